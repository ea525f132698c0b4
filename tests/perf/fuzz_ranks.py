"""
Multiplies random matrices in parts on ranks that drift apart (tests/helpers/distributed.py) until time is over.

    mpiexec -n 3 python3 -m mpi4py -m tests.perf.fuzz_ranks [MINUTES [SEED]]

Products are those of SEED + 0, 1, 2, … A session, with delays of its own, lasts for 50 of them; the first seed of each
is printed. It ends with the first product that is wrong, and status 1. One session again: MINUTES 0 and its seed.
"""

from __future__ import annotations

import sys
import time

from mpi4py import MPI

from tests.helpers.distributed import random_product, shaken

PRODUCTS = 50


def main(minutes: float = 20.0, first: int = 0) -> int:
    comm, began, number = MPI.COMM_WORLD, time.monotonic(), first
    while number == first or comm.bcast(time.monotonic() - began < 60 * minutes):
        if comm.rank == 0:
            print(f"seed {number}", flush=True)
        with shaken(comm, number) as session:
            for seed in range(number, number + PRODUCTS):
                wrong = [one for one in comm.allgather(random_product(session, seed)) if one]
                if wrong:
                    if comm.rank == 0:
                        print(f"seed {seed}: {wrong[0]}")
                    return 1
        number += PRODUCTS
    if comm.rank == 0:
        print(f"{number - first} products on {comm.size} ranks, from seed {first}: all right")
    return 0


if __name__ == "__main__":
    sys.exit(main(*(kind(word) for kind, word in zip((float, int), sys.argv[1:], strict=False))))
