"""
The exception tree of uncut_mpi, below `UncutError`. It imports nothing of ours.

::

    ParamError(ValueError)            the caller's arguments; raised before any device work
      RankMismatchError               ranks passed different values; lists rank: value
      DataFileError                   a matrix file is missing, truncated, of another dtype, ...
    TopologyError(RuntimeError)       no peer access, two ranks on one GPU, machine file for other hardware
    PlanError(RuntimeError)           no feasible schedule; says the limit and by how much it is missed
      ScheduleError                   a schedule that breaks the rules of its own representation or its proof
    CapacityError(MemoryError)        device or shared memory: needed, available, what to change
    DeviceError(RuntimeError)         a CUDA or cuBLAS call failed: call, code name, device, task
      PinError                        host memory that cannot be page-locked as a whole
    PeerFailedError(RuntimeError)     this rank is healthy; names the rank that was not
    StallError(TimeoutError)          no task finished anywhere for the time allowed; says who awaits whom
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Final, TypeAlias, TypeVar

INTERRUPTED: Final = 130
"""Exit status of a command that Ctrl-C ended: 128 and the number of SIGINT, as shells have it."""

_PACKAGE: Final = __name__.partition(".")[0]

_Error = TypeVar("_Error", bound=BaseException)

Wire: TypeAlias = tuple[str, str]
"""Type name and message of an error, as other ranks get it."""


class UncutError(Exception):
    """
    Base of every error that uncut_mpi raises on purpose.

    A message says what was asked, what was found and what to do: value first, advice last. Every class takes one
    message, so that an error caught on one rank can be carried to the others as text and raised there as the same type.
    See `is_agreed` for whether the other ranks of a collective call have raised as well.
    """


class ParamError(UncutError, ValueError):
    """The caller's arguments cannot be used; raised before any device work."""


class RankMismatchError(ParamError):
    """Ranks passed different values to a collective call; the message lists rank: value."""


class DataFileError(ParamError):
    """A matrix file is missing, truncated, not two-dimensional or of another dtype."""


class TopologyError(UncutError, RuntimeError):
    """The ranks and devices of this job cannot work together as asked."""


class PlanError(UncutError, RuntimeError):
    """No feasible schedule exists for the problem, machine and options given."""


class ScheduleError(PlanError):
    """A schedule breaks the rules of its own representation or fails its proof."""


class CapacityError(UncutError, MemoryError):
    """Too little device or shared memory; the message says needed, available and the mend."""


class DeviceError(UncutError, RuntimeError):
    """A call into CUDA, cuBLAS or the operating system's memory failed on this rank."""


class PinError(DeviceError):
    """Host memory cannot be page-locked as a whole: of a caller's matrix a reason to stage it, of ours an error."""


class PeerFailedError(UncutError, RuntimeError):
    """Another rank of the session failed, and the message names it; this one is healthy."""


class StallError(UncutError, TimeoutError):
    """No task finished anywhere for the time allowed; the message says who awaits whom."""


_BY_NAME = {name: cls for name, cls in globals().items() if isinstance(cls, type) and issubclass(cls, UncutError)}


def agreed(error: _Error) -> _Error:
    """Mark an error as raised by every rank of a collective call; return it."""
    error.agreed = True  # type: ignore[attr-defined]
    return error


@contextlib.contextmanager
def raised_by_all() -> Iterator[None]:
    """Mark the errors of a block that does on every rank the same with the same values, so that all raise them."""
    try:
        yield
    except UncutError as error:
        raise agreed(error) from None


def is_agreed(error: BaseException) -> bool:
    """Return whether every rank of a collective call has raised this error, or its equivalent, with this one."""
    return getattr(error, "agreed", False)


def release_frames(error: BaseException) -> None:
    """
    Empty the frames that an error and its causes have left, from this package's first one down.

    They refer to what a call works on, and often to the error, which would all live until garbage is collected, or
    as long as somebody keeps the error. Lines and names of the traceback stay.
    """
    errors = [error]
    for one in errors:
        inside, trace = False, one.__traceback__
        while trace is not None:
            inside = inside or trace.tb_frame.f_globals.get("__name__", "").startswith(_PACKAGE)
            if inside:
                with contextlib.suppress(RuntimeError):  # it is still executing
                    trace.tb_frame.clear()
            trace = trace.tb_next
        found = [other for other in (one.__cause__, one.__context__) if other is not None]
        errors += [other for other in found if all(other is not known for known in errors)]


def reason(error: BaseException) -> str:
    """Return what was wrong, of a file without its name; of an error that says nothing its type."""
    said = error.strerror if isinstance(error, OSError) else None
    return (said or str(error)).strip() or type(error).__name__


def named(error: BaseException) -> str:
    """Return an error's type and what it says, if it says something."""
    return f"{type(error).__name__}: {error}".strip().removesuffix(":")


def to_wire(error: BaseException) -> Wire:
    """Return (type name, message) of an error, to be carried to other ranks."""
    return type(error).__name__, str(error).strip() or repr(error)


def from_wire(name: str, message: str, *, rank: int) -> UncutError:
    """
    Rebuild an error that was caught on another rank.

    Parameters
    ----------
    name, message : str
        What `to_wire` returned there.
    rank : int
        The rank that it was caught on; named when the type is not one of ours.

    Returns
    -------
    UncutError
        The same type with the same message, or `PeerFailedError` for a foreign type.
    """
    cls = _BY_NAME.get(name)
    if cls is None:
        return PeerFailedError(f"rank {rank} raised {name}: {message}")
    return cls(message)
