"""Print where the shared library lies that has the names of BLAS and PBLAS, for ``LD_PRELOAD`` and linkers."""

import argparse

from uncut_mpi.blas import library

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m uncut_mpi.blas", description=__doc__)
    parser.add_argument("--ilp64", action="store_true", help="the one whose integers have 64 bits")
    print(library(ilp64=parser.parse_args().ilp64))  # noqa: T201
