"""How arrays are stored: order and leading dimension by their strides, extents in bytes, views of memory. Local."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import numpy as np

from uncut_mpi.device.exported import Shown, library_of
from uncut_mpi.device.views import strided
from uncut_mpi.errors import ParamError
from uncut_mpi.instead import dimensions_text
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.parts import Order, Part
from uncut_mpi.model.problem import StoredMatrix


def shown_of(array: Any) -> Shown:
    """Return an array of numpy or cupy for other libraries, bfloat16 too."""
    if array.ndim != 2:
        return Shown(array, tuple(stride // array.itemsize for stride in array.strides))
    stored = stored_of(array.shape, array.strides, array.itemsize)
    return Shown(array, (1, stored.ld) if stored.order == "F" else (stored.ld, 1))


def in_library(array: Any, library: str) -> Any:
    """
    Return an array as one of a library (`library_of`) over the same memory, if that is loaded and can; else as it is.

    JAX copies what has gaps, and on the host what begins at no multiple of 64 bytes: its arrays never change.
    """
    namespace = sys.modules.get(library)
    if namespace is None or library_of(type(array)) == library:
        return array
    if library != "torch" and not (array.flags.c_contiguous or array.flags.f_contiguous):
        array = array.copy()
        if not isinstance(array, np.ndarray):
            array.device.synchronize()
    try:
        return namespace.from_dlpack(shown_of(array))
    except Exception:  # it has no such device: JAX that uses GPUs alone, or a PyTorch without CUDA
        return array


def stored_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> StoredMatrix:
    """
    Return how an array with these strides (bytes) is stored.

    Raise ParamError if it is not two-dimensional, or neither its rows nor its columns are contiguous.
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


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """Matrices of one shape in one array, all one after another: as rows of a larger matrix, or as its columns."""

    count: int  # how many there are
    shape: tuple[int, int]  # rows and columns of each
    # 0 where their rows follow one another, each stored by rows; 1 where their columns do, each stored by columns.
    axis: int
    step: int  # rows (columns) of the larger matrix from one to the next; more than they have where there are gaps

    @property
    def whole(self) -> tuple[int, int]:
        """Rows and columns of the larger matrix."""
        extent = (self.count - 1) * self.step + self.shape[self.axis] if self.count else 0
        return (extent, self.shape[1]) if self.axis == 0 else (self.shape[0], extent)


def stack_of(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> tuple[Stack, tuple[int, int]]:
    """
    Return what an array of three dimensions with these strides (bytes) is, and the strides of the larger matrix.

    Raise ParamError if its matrices are stored by neither rows nor columns, or not whole lines apart.
    """
    count, rows, cols = shape
    apart, *inside = strides
    if 0 in shape:
        return Stack(count, (rows, cols), 0, rows), (itemsize * cols, itemsize)
    for axis in (0, 1):
        lines, length = (rows, cols) if axis == 0 else (cols, rows)
        pitch, step = inside if axis == 0 else inside[::-1]
        if lines == 1:  # then a stride between them is never used
            pitch = apart if count > 1 else length * itemsize
        if count == 1:
            apart = lines * pitch
        lies = length == 1 or step == itemsize
        if (
            lies
            and pitch % itemsize == 0
            and pitch >= length * itemsize
            and apart % pitch == 0
            and apart >= lines * pitch
        ):
            both = (pitch, itemsize) if axis == 0 else (itemsize, pitch)
            return Stack(count, (rows, cols), axis, apart // pitch), both
    raise ParamError(
        f"an array of {count}×{rows}×{cols} with strides {strides[0]}, {strides[1]} and {strides[2]} bytes is no batch "
        "of matrices that are stored by rows (or by columns), whole rows apart: pass a copy (x.copy())"
    )


def turned(part: Part) -> Part | None:
    """Return the same memory read in the other order, if its elements are one row or column without gaps."""
    rows, lines = part.stored_shape[0], part.stored_shape[1] // part.count  # of one block
    one_line = lines <= 1 and (part.count == 1 or part.ld == rows)
    if not one_line and (rows > 1 or part.ld > 1):
        return None
    return dataclasses.replace(part, order="C" if part.order == "F" else "F", ld=lines)


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
    return strided(flat, (stored.rows, stored.cols), strides)
