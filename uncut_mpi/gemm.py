"""
The main job: ``mpiexec -n RANKS python -m uncut_mpi.gemm``.

Multiplies generated matrices or files on whatever the ranks have, measures, verifies, and says on
rank 0 what was done. The exit status is 0 only if every rank succeeded and the check passed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

# Before CUDA starts, so before anything imports cupy: fewer lanes then share a hardware queue.
# A matter of speed alone; the order of issue makes every number of queues safe.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

from uncut_mpi.command.arguments import HelpRequested, parse
from uncut_mpi.errors import StallError, UncutError
from uncut_mpi.spmd import launcher

_NAME = "uncut_mpi.gemm"


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
    answer = _answer(words)
    if answer is not None:
        if (comm.rank if comm is not None else launcher.rank_of_process()) == 0:
            sys.stdout.write(answer)
            sys.stdout.flush()
        return 0
    try:
        from uncut_mpi.command.job import run
        from uncut_mpi.spmd import abort, runtime
    except (ImportError, UncutError) as error:
        # Without MPI no process knows of the others: each of them says it.
        sys.stderr.write(f"{_NAME}: {type(error).__name__}: {error}\n")
        return 2
    comm = runtime.world() if comm is None else comm
    abort.install_abort_hook(comm)
    try:
        runtime.check_launcher()
        status = 0 if run(comm, parse(words), words) else 1
    except StallError as error:
        # A rank is missing: nothing that all ranks do together can end any more, so the job is ended.
        sys.stderr.write(f"{_NAME}: rank {comm.rank}: {error}\n")
        sys.stderr.flush()
        abort.end_job(comm, 2)
    except UncutError as error:
        # Every rank has the same error: one says it.
        if comm.rank == 0:
            sys.stdout.flush()
            sys.stderr.write(f"{_NAME}: {type(error).__name__}: {error}\n")
        status = 2
    sys.stdout.flush()
    return abort.finish(comm, status)


def _answer(words: Sequence[str]) -> str | None:
    """Return what answers --help or --version, without MPI, which may be what is missing; None for a job."""
    try:
        parse(words)
    except HelpRequested as asked:
        return asked.text
    except UncutError:
        pass  # for all ranks to agree on and one to say
    return None


if __name__ == "__main__":
    sys.exit(main())
