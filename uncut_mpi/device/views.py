"""Arrays over plain addresses."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


class BufferExtent:
    """
    A span of memory as numpy sees it, and whatever has to live as long as arrays of it.

    An array made of it keeps it alive, through any chain of views.
    """

    __slots__ = ("__array_interface__", "__weakref__", "keep")

    def __init__(self, address: int, nbytes: int, keep: Any = None) -> None:
        self.__array_interface__ = {"data": (address, False), "shape": (nbytes,), "typestr": "|u1", "version": 3}
        self.keep = keep


def bytes_at(address: int, nbytes: int) -> Array:
    """Return `nbytes` bytes at an address as a writeable uint8 array."""
    if nbytes == 0:
        return np.empty(0, np.uint8)
    array: Array = np.asarray(BufferExtent(address, nbytes))
    return array


def matrix_at(address: int, rows: int, cols: int, ld: int, dtype: np.dtype[Any]) -> Array:
    """
    Return the column-major rows×cols matrix at an address, a view.

    Parameters
    ----------
    address : int
        Of element (0, 0).
    ld : int
        Leading dimension (elements).
    """
    if rows == 0 or cols == 0:
        return np.empty((rows, cols), dtype, order="F")
    size = dtype.itemsize
    flat = bytes_at(address, (ld * (cols - 1) + rows) * size)
    matrix: Array = np.ndarray((rows, cols), dtype, buffer=flat, strides=(size, ld * size))
    return matrix


def strided(array: Array, shape: tuple[int, ...], strides: tuple[int, ...]) -> Array:
    """Return an array of another shape and strides (bytes) over the memory of one: numpy refuses it to float8_e5m2."""
    plain = array.view(f"V{array.itemsize}")
    made: Array = np.lib.stride_tricks.as_strided(plain, shape, strides).view(array.dtype)
    return made


def words_at(address: int, count: int) -> memoryview:
    """
    Return `count` 32-bit words at an address.

    A memoryview, because each access to it is one aligned 32-bit load or store, and takes a fraction of what numpy's
    would. On x86-64 such an access is atomic and in order with the copies before it.
    """
    return bytes_at(address, 4 * count).data.cast("I")
