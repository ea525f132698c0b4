"""
Measuring a machine: ``mpiexec -n RANKS python -m uncut_mpi.calibrate``.

Measures links, products and latencies on whatever the ranks have, prints them on rank 0 and keeps the
machine for later sessions. The exit status is 0 only if every rank succeeded and the litmus passed.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from uncut_mpi.command.calibrate_arguments import CalibrateArguments, parse_calibrate
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
    return run_on_ranks("uncut_mpi.calibrate", parse_calibrate, _load, argv, comm)


def _load() -> Callable[[Any, CalibrateArguments, Sequence[str]], bool]:
    from uncut_mpi.command.calibrate_job import run_calibration

    return run_calibration


if __name__ == "__main__":
    sys.exit(main())
