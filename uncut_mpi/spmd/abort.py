"""
The end of a job: what unhandled errors say, that they end it on all ranks, a command's verdict in every exit status.

Ending it is for command modules; a library call never ends a process.
"""

from __future__ import annotations

import contextlib
import errno
import os
import pathlib
import re
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from uncut_mpi.errors import INTERRUPTED, ParamError, PeerFailedError, named
from uncut_mpi.spmd.group import Backoff
from uncut_mpi.spmd.runtime import MPI, require_mpi
from uncut_mpi.unfinished import discard_unfinished

_OURS = __name__.partition(".")[0]
_OF_CALLERS = ParamError | PeerFailedError | KeyboardInterrupt  # of these our frames say nothing
_NOT_OF_CALLERS = {_OURS, *sys.stdlib_module_names}  # what calls pass on their way
_LAST_WORDS_S = 0.1
_FIRST_WORDS_S = 0.6  # so long the highest rank lets others tell an error
_OTHERS_S = 0.5  # so long a rank stays that has told one, for those that see it later

_job: list[tuple[str, float]] = []
"""How names begin by which ranks of this job see what others tell, and which share of the ranks is below this one."""


def _text(error: BaseException, trace: TracebackType | None) -> str:
    """Return what to say of an unhandled error: all of it, or a line if another rank tells the like in full."""
    while trace is not None and trace.tb_next is not None and _package(trace.tb_frame) in ("runpy", "mpi4py"):
        trace = trace.tb_next
    calls = [*traceback.walk_tb(trace)]
    of_caller = [at for at, (frame, _) in enumerate(calls) if _package(frame) not in _NOT_OF_CALLERS]
    if _is_first(error):
        limit = of_caller[-1] + 1 if of_caller and isinstance(error, _OF_CALLERS) else None
        cause = error.__cause__
        chain = cause is None or str(cause) not in str(error)  # else it would say the same again
        return "".join(traceback.format_exception(type(error), error, trace, limit, chain=chain))
    where = "".join(f" ({calls[at][0].f_code.co_filename}:{calls[at][1]})" for at in of_caller[-1:])
    return f"{' '.join(named(error).split())}{where}\n"


def _is_first(error: BaseException) -> bool:
    """
    Return whether this rank is the first to tell an error in full. Local.

    A rank may catch what others do not, so who tells is not known before. Lower ranks come first, and those with an
    error of their own before those that only saw it. A name without a file is taken until the process ends.
    """
    late = isinstance(error, PeerFailedError)
    kinds = ["own", "peer"][: 1 + late]
    with contextlib.suppress(OSError):  # where there is no such name, each tells all
        for job, share in _job:
            until = time.monotonic() + _FIRST_WORDS_S * (share + 2 * late)
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as look:
                while time.monotonic() < until:
                    if not all(look.connect_ex(job + kind) for kind in kinds):
                        return False
                    time.sleep(_FIRST_WORDS_S / 60)
            return _take(job + kinds[-1])
    return True


def _take(name: str) -> bool:
    taken = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        taken.bind(name)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        return False
    taken.detach()  # others may look for it while MPI ends in this process
    return True


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__package__") or frame.f_globals.get("__name__")).partition(".")[0]


def _say(text: str) -> None:
    for stream, last in ((sys.stdout, ""), (sys.stderr, text)):
        try:
            # One write, so that the lines of several ranks do not mix.
            stream.write(last)
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue  # a closed or missing stream must not keep the job alive


def tell_once(job: bytes, leave: Callable[[str], None]) -> None:
    """
    Let one rank alone print the traceback of an unhandled error that several have, and the others a line. Local.

    A program that has a hook of its own keeps it.

    Parameters
    ----------
    job : bytes
        The same on all these ranks, and in no other job.
    leave : callable
        Tells those who wait for this rank that it has left, by what.
    """
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    _job[:] = _job or [(f"\0{_OURS}.{job.hex()}.", rank / size)]
    if sys.excepthook is not sys.__excepthook__ or size == 1:
        return
    who = f"rank {rank} of {size}"

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        leave(kind.__name__)
        _say(f"[{who}] {_text(error, trace)}")
        time.sleep(_OTHERS_S)
        aborts = getattr(sys.modules["__main__"].__spec__, "name", "").startswith("mpi4py")
        if aborts or issubclass(kind, KeyboardInterrupt):  # by a signal, for which the launcher kills
            unlink_mpi_segments()

    sys.excepthook = tell


def end_job(comm: Any, exit_status: int) -> None:
    """End the job of all ranks at once, with this status. Not collective."""
    discard_unfinished()
    # The launcher passes on what was written a moment ago only if the job lives that much longer.
    time.sleep(_LAST_WORDS_S)
    unlink_mpi_segments()
    comm.Abort(exit_status)
    os._exit(exit_status)  # should the launcher take its time


_ending: list[Any] = []
"""The communicator whose ranks end together, once the hook is installed."""

# Shared memory by which MPICH and Open MPI carry messages within a node, and which an aborted or
# killed job leaves in /dev/shm.
_MPI_SEGMENT = re.compile(r"/dev/shm/(?:mpich_shm_|vader_segment|sm_segment)[^\s/]*$", re.MULTILINE)


def unlink_mpi_segments() -> None:
    """
    Remove the names of the segments through which MPI connects this process. For a job that is about to end.

    They stay mapped, so what is under way goes on; but no further process can join. Not collective.
    """
    with contextlib.suppress(OSError):
        for name in set(_MPI_SEGMENT.findall(pathlib.Path("/proc/self/maps").read_text())):
            with contextlib.suppress(OSError):
                os.unlink(name)


def install_abort_hook(comm: Any) -> None:
    """
    End the job when this rank leaves by an unhandled error, which the other ranks would await for ever.

    The traceback is printed with the rank first. Exit status 1, or 130 for a keyboard interrupt, of which one line
    is printed, also in a thread and under plain ``python -m``; `SystemExit` is no error. Under ``python -m mpi4py`` the
    job ends the same way, only sooner. Not collective; a second call changes the communicator only.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        The ranks that end together (MPI libraries end the whole job).
    """
    require_mpi()
    installed = bool(_ending)
    _ending[:] = [comm]
    if installed:
        return
    before, lock = sys.excepthook, threading.Lock()

    def uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None, where: str = "") -> None:
        if MPI.Is_finalized() or not MPI.Is_initialized():
            before(kind, error, trace)  # no job is left to end
            return
        if not lock.acquire(blocking=False):
            return  # another thread of this process is at it
        (comm,) = _ending
        interrupted = issubclass(kind, KeyboardInterrupt)
        said = "KeyboardInterrupt: the job ends\n"
        if not interrupted:
            said = f"{_text(error, trace)}unhandled error: the job ends\n"
        who = f"rank {comm.rank} of {comm.size}{where}"
        _say("".join(f"[{who}] {line}\n" for line in said.splitlines()))
        end_job(comm, INTERRUPTED if interrupted else 1)

    def uncaught_in_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:  # by which a thread may leave
            error = arguments.exc_value if arguments.exc_value is not None else arguments.exc_type()
            name = arguments.thread.name if arguments.thread is not None else "unknown"
            uncaught(arguments.exc_type, error, arguments.exc_traceback, f", thread {name}")

    sys.excepthook, threading.excepthook = uncaught, uncaught_in_thread


def finish(comm: Any, exit_status: int) -> int:
    """
    Return the exit status of a command, the same on all ranks: the highest that any rank has. Collective.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        All ranks of the command.
    exit_status : int
        This rank's verdict; 0 is success.
    """
    mine = np.array([exit_status], np.int32)
    worst = np.empty(1, np.int32)
    request = comm.Iallreduce(mine, worst, op=MPI.MAX)
    backoff = Backoff(spin_s=0.0)
    while not request.Test():
        backoff.pause()
    return int(worst[0])
