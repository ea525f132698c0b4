"""The grids of processes that a program's BLACS has made: their communicators, and who has which place."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any, NoReturn

from uncut_mpi.errors import TopologyError
from uncut_mpi.spmd.runtime import MPI

_SYSTEM_HANDLE = 10  # what Cblacs_get is asked for: a number for the communicator of a context's processes


@dataclasses.dataclass(frozen=True, slots=True)
class BlacsGrid:
    """A BLACS context as this process sees it."""

    shape: tuple[int, int]  # rows and columns of its grid
    place: tuple[int, int]  # this process's row and column; negative if it is not in the grid


class Blacs:
    """
    The BLACS that this process has loaded.

    Parameters
    ----------
    integer : type
        Of its integers, of ctypes.

    Raises
    ------
    TopologyError
        If it has loaded none whose C names can be found.
    """

    def __init__(self, integer: Any) -> None:
        self._integer, self._library = integer, ctypes.CDLL(None)
        for name in ("Cblacs_gridinfo", "Cblacs_get", "Cblacs2sys_handle", "Cblacs_abort", "Cigamx2d"):
            if not hasattr(self._library, name):
                raise TopologyError(f"{name} is not found in this process: link BLACS (ScaLAPACK) as a shared library")
        self._library.Cblacs2sys_handle.restype = ctypes.c_void_p

    def grid(self, context: int) -> BlacsGrid:
        """Return the grid of a context. Local."""
        four = [self._integer() for _ in range(4)]
        self._library.Cblacs_gridinfo(self._integer(context), *map(ctypes.byref, four))
        rows, cols, row, col = (one.value for one in four)
        return BlacsGrid((rows, cols), (row, col))

    def communicator(self, context: int) -> MPI.Intracomm:
        """Return a duplicate of a context's communicator. Collective in the grid."""
        number = self._integer()
        self._library.Cblacs_get(self._integer(context), _SYSTEM_HANDLE, ctypes.byref(number))
        handle = self._library.Cblacs2sys_handle(number) or 0
        if MPI._sizeof(MPI.Comm) == ctypes.sizeof(ctypes.c_int):  # then the rest of the register says nothing
            handle &= 0xFFFFFFFF
        found = MPI.Comm.fromhandle(handle)
        return MPI.Intracomm(found).Dup()

    def tell(self, context: int, routine: str, number: int) -> None:
        """Tell the program of a wrong argument, as PBLAS does."""
        if hasattr(self._library, "pxerbla_"):
            of, at = ctypes.byref(self._integer(context)), ctypes.byref(self._integer(number))
            self._library.pxerbla_(of, routine.encode(), at, ctypes.c_size_t(len(routine)))

    def abort(self, context: int, code: int) -> NoReturn:
        """End all processes, as PBLAS does."""
        self._library.Cblacs_abort(self._integer(context), self._integer(code))
        raise SystemExit(code)


@functools.cache
def blacs(integer_bytes: int) -> Blacs:
    """Return the BLACS of this process, by the size of its integers. Raises as `Blacs`."""
    return Blacs(ctypes.c_int64 if integer_bytes == 8 else ctypes.c_int32)


def can_begin() -> str:
    """Return why MPI cannot be used now; empty if it can, or nobody has loaded it."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "MPI_Initialized"):
        return ""
    flag = ctypes.c_int()
    library.MPI_Initialized(ctypes.byref(flag))
    if not flag.value:
        return "the program has loaded MPI and not begun it"
    library.MPI_Finalized(ctypes.byref(flag))
    if flag.value:
        return "MPI is finalised"
    library.MPI_Is_thread_main(ctypes.byref(flag))
    level = ctypes.c_int()
    library.MPI_Query_thread(ctypes.byref(level))
    if not flag.value and level.value < MPI.THREAD_MULTIPLE:
        return "another thread than the main one calls, and the program has begun MPI without MPI_THREAD_MULTIPLE"
    return ""
