"""
The end of a job: what unhandled errors say, that they end it on all ranks, a command's verdict in every exit status.

Ending it is for command modules; a library call never ends a process.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import sys
import threading
import time
import traceback
from types import FrameType, TracebackType
from typing import Any

import numpy as np

from uncut_mpi.errors import INTERRUPTED, ParamError, is_told, named
from uncut_mpi.spmd.group import Backoff
from uncut_mpi.spmd.runtime import MPI, require_mpi

_OURS = __name__.partition(".")[0]
_LAST_WORDS_S = 0.1
_YIELD_AT_ONCE_S = 0.0


class _Hook:
    """What replaces the hooks of `sys` and `threading`; one per process."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self._before = sys.excepthook
        self._ending = threading.Lock()

    def uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Stand in for `sys.excepthook`, which Python does not call for SystemExit."""
        if MPI.Is_finalized() or not MPI.Is_initialized():
            self._before(kind, error, trace)  # no job is left to end
            return
        self._end(kind, error, trace, "")

    def uncaught_in_thread(self, arguments: threading.ExceptHookArgs) -> None:
        """Stand in for `threading.excepthook`; a thread may leave by SystemExit."""
        if arguments.exc_type is SystemExit:
            return
        error = arguments.exc_value if arguments.exc_value is not None else arguments.exc_type()
        name = arguments.thread.name if arguments.thread is not None else "unknown"
        if MPI.Is_finalized() or not MPI.Is_initialized():
            self._before(arguments.exc_type, error, arguments.exc_traceback)
            return
        self._end(arguments.exc_type, error, arguments.exc_traceback, f", thread {name}")

    def _end(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, where: str) -> None:
        if not self._ending.acquire(blocking=False):
            return  # another thread of this process is at it
        who = f"rank {self.comm.rank} of {self.comm.size}{where}"
        if issubclass(kind, KeyboardInterrupt):
            said = "KeyboardInterrupt: the job ends\n"
        else:
            said = f"{_text(error, trace)}unhandled error: the job ends\n"
        _say("".join(f"[{who}] {line}\n" for line in said.splitlines()))
        end_job(self.comm, INTERRUPTED if issubclass(kind, KeyboardInterrupt) else 1)


def _text(error: BaseException, trace: TracebackType | None) -> str:
    """Return what to say of an unhandled error: if a lower rank tells it in full a line, and a moment after that."""
    while trace is not None and trace.tb_next is not None and _package(trace.tb_frame) in ("runpy", "mpi4py"):
        trace = trace.tb_next
    calls = [*traceback.walk_tb(trace)]
    of_caller = [at for at, (frame, _) in enumerate(calls) if _package(frame) != _OURS]
    if not is_told(error):
        limit = of_caller[-1] + 1 if of_caller and isinstance(error, ParamError) else None  # their mistake, not ours
        cause = error.__cause__
        chain = cause is None or str(cause) not in str(error)  # else it would say the same again
        return "".join(traceback.format_exception(type(error), error, trace, limit, chain=chain))
    time.sleep(_LAST_WORDS_S)
    where = "".join(f" ({calls[at][0].f_code.co_filename}:{calls[at][1]})" for at in of_caller[-1:])
    return f"{' '.join(named(error).split())}{where}\n"


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


def tell_once() -> None:
    """
    Let one rank alone print the traceback of an unhandled error that several have, and the others a line. Local.

    A program that has a hook of its own keeps it.
    """
    if sys.excepthook is not sys.__excepthook__ or MPI.COMM_WORLD.size == 1:
        return
    who = f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size}"

    def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _say(f"[{who}] {_text(error, trace)}")
        if getattr(sys.modules["__main__"].__spec__, "name", "").startswith("mpi4py"):  # it aborts the job now
            time.sleep(2 * _LAST_WORDS_S)
            unlink_mpi_segments()

    sys.excepthook = tell


def end_job(comm: Any, exit_status: int) -> None:
    """End the job of all ranks at once, with this status. Not collective."""
    # The launcher passes on what was written a moment ago only if the job lives that much longer.
    time.sleep(_LAST_WORDS_S)
    unlink_mpi_segments()
    comm.Abort(exit_status)
    os._exit(exit_status)  # should the launcher take its time


_installed: list[_Hook] = []

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
    if _installed:
        _installed[0].comm = comm
        return
    hook = _Hook(comm)
    _installed.append(hook)
    sys.excepthook = hook.uncaught
    threading.excepthook = hook.uncaught_in_thread


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
    backoff = Backoff(_YIELD_AT_ONCE_S)
    while not request.Test():
        backoff.pause()
    return int(worst[0])
