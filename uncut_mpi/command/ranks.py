"""What every command of several ranks does around its work: help without MPI, one voice for errors, one exit status."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from uncut_mpi.command.flags import HelpRequested
from uncut_mpi.errors import INTERRUPTED, StallError, UncutError
from uncut_mpi.spmd import launcher

Arguments = TypeVar("Arguments")


def run_on_ranks(
    name: str,
    parse: Callable[[Sequence[str]], Arguments],
    load: Callable[[], Callable[[Any, Arguments, Sequence[str]], bool]],
    argv: Sequence[str] | None,
    comm: Any,
) -> int:
    """
    Run a command and return its exit status, the same on every rank. Collective.

    Parameters
    ----------
    name : str
        What its errors begin with.
    parse : callable
        Makes the arguments of the words; uses no MPI.
    load : callable
        Returns what does the work and answers whether all is well. What needs MPI is imported there, so that
        ``--help`` does without.
    argv : sequence of str or None
        Arguments; those of the process by default.
    comm : mpi4py.MPI.Comm or None
        The ranks; all of the job by default.
    """
    # Before CUDA starts, so before anything imports cupy: fewer lanes then share a hardware queue.
    # A matter of speed alone; the order of issue makes every number of queues safe.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    words = list(sys.argv[1:] if argv is None else argv)
    arguments: Arguments | UncutError
    try:
        arguments = parse(words)
    except HelpRequested as asked:
        if (comm.rank if comm is not None else launcher.rank_of_process()) == 0:
            sys.stdout.write(asked.text)
            sys.stdout.flush()
        return 0
    except UncutError as error:
        arguments = error  # for one rank to say, once they know of each other
    hooked = False
    try:
        from uncut_mpi.spmd import abort, runtime

        comm = runtime.world() if comm is None else comm
        # Loading takes a while, and a rank that is interrupted meanwhile must not leave the others waiting.
        abort.install_abort_hook(comm)
        hooked = True
        run = load()
    except (ImportError, UncutError) as error:
        # Without MPI no process knows of the others: each of them says it.
        sys.stderr.write(f"{name}: {type(error).__name__}: {error}\n")
        return 2
    except KeyboardInterrupt:
        if hooked:
            raise  # the hook says so, and ends the job
        # MPI may have begun, and its own end would wait for the other ranks: leave the way that a launcher notices.
        sys.stderr.write(f"{name}: interrupted\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED)
    try:
        runtime.check_launcher()
        if isinstance(arguments, UncutError):
            raise arguments
        status = 0 if run(comm, arguments, words) else 1
    except StallError as error:
        # A rank is missing: nothing that all ranks do together can end any more, so the job is ended.
        sys.stderr.write(f"{name}: rank {comm.rank}: {error}\n")
        sys.stderr.flush()
        abort.end_job(comm, 2)
    except UncutError as error:
        # Every rank has the same error: one says it.
        if comm.rank == 0:
            sys.stdout.flush()
            sys.stderr.write(f"{name}: {type(error).__name__}: {error}\n")
        status = 2
    sys.stdout.flush()
    return abort.finish(comm, status)
