"""How arrays are stored: order and leading dimension by their strides, extents in bytes, views of memory. Local."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from uncut_mpi.device.exported import Shown
from uncut_mpi.errors import ParamError
from uncut_mpi.instead import dimensions_text
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.parts import Order, Part
from uncut_mpi.model.problem import StoredMatrix


def shown_of(array: Any) -> Shown:
    """Return a two-dimensional array of numpy or cupy for other libraries, bfloat16 too."""
    stored = stored_of(array.shape, array.strides, array.itemsize)
    return Shown(array, (1, stored.ld) if stored.order == "F" else (stored.ld, 1))


def stored_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> StoredMatrix:
    """
    Return how an array with these strides (bytes) is stored.

    Raises
    ------
    ParamError
        If it is not two-dimensional, or neither its rows nor its columns are contiguous.
    """
    if len(shape) != 2:
        raise ParamError(f"an array was given that has {dimensions_text(len(shape))}")
    rows, cols = shape
    row_stride, col_stride = strides
    if rows == 0 or cols == 0:
        return StoredMatrix(rows, cols, "F")
    axes = (rows, row_stride), (cols, col_stride)
    orders: tuple[Order, Order] = ("F", "C")
    for order in orders:
        (length, step), (lines, pitch) = axes if order == "F" else axes[::-1]
        # A stride along an extent of 1 is never used, so it says nothing about the order.
        follows = lines == 1 or (pitch % itemsize == 0 and pitch >= length * itemsize)
        if follows and (length == 1 or step == itemsize):
            return StoredMatrix(rows, cols, order, pitch // itemsize if lines > 1 else length)
    raise ParamError(
        f"an array of {rows}×{cols} with strides {row_stride} and {col_stride} bytes is contiguous along neither "
        "rows nor columns: pass a copy (numpy.ascontiguousarray)"
    )


def turned(part: Part) -> Part | None:
    """Return the same memory read in the other order, if its elements are one row or column without gaps."""
    rows, cols = part.stored_shape
    if cols > 1 and (rows > 1 or part.ld > 1):
        return None
    return dataclasses.replace(part, order="C" if part.order == "F" else "F", ld=cols)


def in_order(part: Part, order: Order) -> Part:
    """Return the same memory read in an order, where it can be: single rows and columns."""
    return part if part.order == order else turned(part) or part


def extent_bytes(stored: StoredMatrix, dtype: DType) -> int:
    """Return the bytes from a matrix's first element to its last; 0 if it has none."""
    rows, cols = stored.column_major_shape
    return ((cols - 1) * stored.ld + rows) * dtype.itemsize if rows and cols else 0


def host_view(flat: np.ndarray, stored: StoredMatrix) -> np.ndarray:
    """Return the strided matrix over a flat array that starts at its element (0, 0)."""
    item = flat.itemsize
    strides = (item, stored.ld * item) if stored.order == "F" else (stored.ld * item, item)
    return np.lib.stride_tricks.as_strided(flat, (stored.rows, stored.cols), strides)
