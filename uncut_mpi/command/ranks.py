"""What every command of several ranks does around its work: help without MPI, one voice for errors, one exit status."""

from __future__ import annotations

import os
import pkgutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

from uncut_mpi.command import streams
from uncut_mpi.command.entry import FAILED, Arguments, HelpRequested, conclude, takes_output, tell
from uncut_mpi.errors import INTERRUPTED, StallError, UncutError, named
from uncut_mpi.spmd import launcher


def _agreed(comm: Any, words: list[str], arguments: Arguments | UncutError) -> Arguments:
    """Return the arguments that all ranks have, or raise the error of any: a file need not be on all. Collective."""
    from uncut_mpi.api.wording import value_digest
    from uncut_mpi.spmd import agreement
    from uncut_mpi.spmd.group import Group

    with Group(comm) as group:
        with agreement.collective(group, "reading the command line"):
            if isinstance(arguments, UncutError):
                raise arguments
        agreement.agree(group, value_digest("command line", words), lambda: {"command line": words})
    assert not isinstance(arguments, UncutError)
    return arguments


def run_on_ranks(
    name: str,
    parse: Callable[[Sequence[str]], Arguments],
    work: str,
    argv: Sequence[str] | None = None,
    comm: Any = None,
) -> int:
    """
    Run a command and return its exit status, the same on every rank. Collective.

    Parameters
    ----------
    name : str
        What its errors begin with.
    parse : callable
        Makes the arguments of the words; uses no MPI.
    work : str
        Where the function is that does the work and answers whether all is well, as ``"module:function"``; what it says
        is printed at the end, on rank 0. It is imported once MPI has begun, so that ``--help`` does without.
    argv : sequence of str, optional
        Arguments; those of the process by default.
    comm : mpi4py.MPI.Comm, optional
        The ranks; all of the job by default.
    """
    # Before CUDA starts, so before anything imports cupy: fewer lanes then share a hardware queue.
    # A matter of speed alone; the order of issue makes every number of queues safe.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    streams.guard()
    words = list(sys.argv[1:] if argv is None else argv)
    arguments: Arguments | UncutError
    try:
        arguments = parse(words)
    except HelpRequested as asked:
        first = (comm.rank if comm is not None else launcher.rank_of_process()) == 0
        return conclude(name, [asked.text] if first else [])
    except UncutError as error:
        arguments = error  # for one rank to say, once they know of each other
    hooked = False
    try:
        from uncut_mpi.spmd import abort, runtime

        comm = runtime.world() if comm is None else comm
        # Loading takes a while, and a rank that is interrupted meanwhile must not leave the others waiting.
        abort.install_abort_hook(comm)
        hooked = True
        run = pkgutil.resolve_name(work)
    except (ImportError, UncutError) as error:
        # Without MPI no process knows of the others: each of them says it.
        streams.to_errors(f"{name}: {named(error)}\n")
        streams.flush_last()
        return FAILED
    except KeyboardInterrupt:
        if hooked:
            raise  # the hook says so, and ends the job
        # MPI may have begun, and its own end would wait for the other ranks: leave the way that a launcher notices.
        streams.to_errors(f"{name}: interrupted\n")
        os._exit(INTERRUPTED)
    said: list[str] = []
    aside = takes_output(arguments)
    problem: UncutError | None = None
    status = FAILED
    try:
        runtime.check_launcher()
        status = 0 if run(comm, _agreed(comm, words, arguments), words, said.append) else 1
    except StallError as error:
        # A rank is missing: nothing that all ranks do together can end any more, so the job is ended.
        tell(said, aside=aside)
        streams.to_errors(f"{name}: rank {comm.rank}: {error}\n")
        abort.end_job(comm, FAILED)
    except UncutError as error:
        problem = error
    except Exception:
        tell(said, aside=aside)
        raise  # the hook says so, and ends the job
    # Every rank has the same error: one says it.
    if comm.rank == 0:
        status = max(status, conclude(name, said, problem, aside=aside))
    streams.flush_last()
    return abort.finish(comm, status)
