"""
Benchmarks: ``mpiexec -n RANKS python -m uncut_mpi.bench``.

Measures the papers' problems with several methods in one run, keeps every result as a line of JSON and
sums them up as the papers do. The exit status is 0 only if every rank succeeded and every result was right.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from uncut_mpi.command.bench_arguments import BenchArguments, parse_bench
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
    return run_on_ranks("uncut_mpi.bench", parse_bench, _load, argv, comm)


def _load() -> Callable[[Any, BenchArguments, Sequence[str]], bool]:
    from uncut_mpi.command.bench_job import run_bench

    return run_bench


if __name__ == "__main__":
    sys.exit(main())
