"""
Measuring a machine: ``mpiexec -n RANKS python -m uncut_mpi.calibrate``.

Measures links, products and latencies on whatever the ranks have, prints them on rank 0 and keeps the
machine for later sessions. The exit status is 0 only if every rank succeeded and the litmus passed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

# Before CUDA starts, so before anything imports cupy: fewer lanes then share a hardware queue.
# A matter of speed alone; the order of issue makes every number of queues safe.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from uncut_mpi.command.calibrate_arguments import parse_calibrate
from uncut_mpi.command.calibrate_job import run_calibration
from uncut_mpi.command.flags import HelpRequested
from uncut_mpi.errors import StallError, UncutError
from uncut_mpi.spmd import abort, runtime


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
    words = list(sys.argv[1:] if argv is None else argv)
    comm = runtime.world() if comm is None else comm
    abort.install_abort_hook(comm)
    first = comm.rank == 0
    try:
        runtime.check_launcher()
        passed = run_calibration(comm, parse_calibrate(words), words)
        status = 0 if passed else 1
    except HelpRequested as help_text:
        if first:
            sys.stdout.write(help_text.text)
        status = 0
    except StallError as error:
        # A rank is missing: nothing that all ranks do together can end any more, so the job is ended.
        sys.stderr.write(f"uncut_mpi.calibrate: rank {comm.rank}: {error}\n")
        sys.stderr.flush()
        abort.end_job(comm, 2)
    except UncutError as error:
        # Every rank has the same error: one says it.
        if first:
            sys.stdout.flush()
            sys.stderr.write(f"uncut_mpi.calibrate: {type(error).__name__}: {error}\n")
        status = 2
    sys.stdout.flush()
    return abort.finish(comm, status)


if __name__ == "__main__":
    sys.exit(main())
