"""
The main job: ``mpiexec -n RANKS python -m uncut_mpi.gemm``.

Multiplies generated matrices or files on whatever the ranks have, measures, verifies, and says on
rank 0 what was done. The exit status is 0 only if every rank succeeded and the check passed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from uncut_mpi.command.arguments import GemmArguments, parse
from uncut_mpi.command.ranks import run_on_ranks


def main(argv: Sequence[str] | None = None, comm: Any = None) -> int:
    """
    Run the command and return its exit status, the same on every rank. Collective.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments; those of the process by default.
    comm : mpi4py.MPI.Comm, optional
        The ranks; all of the job by default.
    """
    return run_on_ranks("uncut_mpi.gemm", parse, _load, argv, comm)


def _load() -> Callable[[Any, GemmArguments, Sequence[str]], bool]:
    from uncut_mpi.command.job import run

    return run


if __name__ == "__main__":
    sys.exit(main())
