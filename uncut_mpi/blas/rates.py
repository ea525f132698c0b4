"""How fast the library computes that a program has otherwise: measured once for each of its routines."""

from __future__ import annotations

import ctypes
import functools
import time
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from uncut_mpi.model.cyclic import numroc
from uncut_mpi.model.dtypes import DType

if TYPE_CHECKING:
    from uncut_mpi.blas.doors import Door

_EDGE: Final = 768
"""Of a matrix of one process: more than caches hold, and some ms on a few cores."""

_BLOCK: Final = 64


@functools.cache
def plain_rate(dtype: DType, integer_bytes: int, routine: int) -> float:
    """
    Return how many operations a second a routine ?gemm_ does; 0 if there is none. Local.

    Parameters
    ----------
    dtype : DType
        Of its matrices.
    integer_bytes : int
        Of its integers.
    routine : int
        Its address.
    """
    if not routine:
        return 0.0
    integer = ctypes.c_int64 if integer_bytes == 8 else ctypes.c_int32
    a, b, c = (np.full((_EDGE, _EDGE), 1.5, dtype.numpy, order="F") for _ in range(3))
    one, edge = np.ones(1, dtype.numpy), integer(_EDGE)
    numbers = ctypes.byref(edge), ctypes.byref(edge), ctypes.byref(edge)
    by = ctypes.byref(edge)
    call = ctypes.CFUNCTYPE(None)(routine)

    def multiply() -> None:
        call(*(b"N", b"N"), *numbers, _at(one), _at(a), by, _at(b), by, _at(one), _at(c), by, *[ctypes.c_size_t(1)] * 2)

    return _flop(dtype, _EDGE) / _seconds(multiply)


@functools.cache
def numpy_rate(dtype: DType) -> float:
    """Return how many operations a second numpy's product does. Local."""
    a, b = (np.full((_EDGE, _EDGE), 1.5, dtype.numpy, order="F") for _ in range(2))
    return _flop(dtype, _EDGE) / _seconds(lambda: a @ b)


def grid_rate(door: Door, dtype: DType, integer_bytes: int, context: int, routine: int) -> float:
    """
    Return how many operations a second a routine p?gemm_ does; 0 if there is none. Collective in the door's grid.

    Parameters
    ----------
    door : Door
        Of the grid.
    dtype, integer_bytes, routine
        As of `plain_rate`.
    context : int
        Of the grid.
    """
    if not routine or door.grid is None:
        return 0.0
    integer = ctypes.c_int64 if integer_bytes == 8 else ctypes.c_int32
    (height, width), (row, col) = door.grid.shape, door.grid.place
    edge = _EDGE * max(1, round((height * width) ** 0.5))
    rows, cols = numroc(edge, _BLOCK, row, 0, height), numroc(edge, _BLOCK, col, 0, width)
    a, b, c = (np.full((max(1, rows), cols), 1.5, dtype.numpy, order="F") for _ in range(3))
    described = (integer * 9)(1, context, edge, edge, _BLOCK, _BLOCK, 0, 0, max(1, rows))
    one, first, extent = np.ones(1, dtype.numpy), integer(1), integer(edge)
    call = ctypes.CFUNCTYPE(None)(routine)

    def matrix(array: np.ndarray) -> tuple[Any, ...]:
        return _at(array), ctypes.byref(first), ctypes.byref(first), described

    def multiply() -> None:
        extents = [ctypes.byref(extent)] * 3
        call(*(b"N", b"N"), *extents, _at(one), *matrix(a), *matrix(b), _at(one), *matrix(c))

    return _flop(dtype, edge) / float(max(door.session.gather_values(_seconds(multiply))))


def _at(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _flop(dtype: DType, edge: int) -> float:
    return (8.0 if dtype.is_complex else 2.0) * edge**3


def _seconds(multiply: Any) -> float:
    multiply()  # threads start, and memory is touched
    start = time.perf_counter()
    multiply()
    return time.perf_counter() - start
