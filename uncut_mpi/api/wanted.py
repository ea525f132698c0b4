"""What callers ask of the calls that make matrices, converted once and told in the same words on all ranks. Local."""

from __future__ import annotations

import collections.abc
import dataclasses
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from uncut_mpi.api.matrix import Matrix
from uncut_mpi.errors import ParamError
from uncut_mpi.instead import dimensions_text
from uncut_mpi.model.arguments import count, items, shown, type_text, whole_number
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout, even_counts
from uncut_mpi.model.locations import Location, Memory, memory_of
from uncut_mpi.model.problem import MOST_BYTES, Order
from uncut_mpi.planning.grid import ProcessGrid


@dataclasses.dataclass(frozen=True, slots=True)
class NewMatrix:
    """
    A matrix to be made.

    Attributes
    ----------
    shape : tuple of int
        Rows and columns.
    dtype : DType
        Element type.
    order : str
        ``"F"`` or ``"C"``.
    layout : Layout
        How it is to be dealt.
    memory : str
        ``"device"``, ``"host"`` or ``"shared"``.
    """

    shape: tuple[int, int]
    dtype: DType
    order: Order
    layout: Layout
    memory: Memory

    def asked(self) -> dict[str, object]:
        """Return what it is by the names of arguments."""
        asked = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**asked, "dtype": self.dtype.name}


def new_matrix(shape: object, dtype: object, order: object, layout: Layout, memory: object) -> NewMatrix:
    """
    Return what a caller wants to have made.

    Raises
    ------
    ParamError
        For a shape that is not two whole numbers, an unknown type, order or memory, or more bytes than there are
        addresses.
    """
    kind = DType.parse(dtype)
    rows, cols = shape_of(shape, kind.itemsize)
    if not isinstance(order, str) or order not in ("F", "C"):
        raise ParamError(f"order {shown(order)}: use 'F' (column-major) or 'C' (row-major)")
    where = memory_of(memory)
    layout.check_memory(where)
    return NewMatrix((rows, cols), kind, "F" if order == "F" else "C", layout, where)


def new_result(a: Matrix, b: Matrix, trans_a: str, trans_b: str, layout: Layout | None = None) -> NewMatrix:
    """
    Return the matrix for op(A) op(B) where the caller gives none, as this rank is to make it.

    Of two whole matrices it is a host matrix that all ranks see. Else its layout is that of op(A) if that leaves k
    whole, or that of op(B) if that does, or even rows. Its memory is that of the operand that it follows, or of A.

    Parameters
    ----------
    layout : Layout, optional
        Its layout in the place of these.
    """
    rule, followed = next(_followed(a, b, trans_a, trans_b), (Layout.rows(), a))
    memory = own_memory(followed, layout or rule)
    if layout is None and _is_whole(a) and _is_whole(b):
        rule, memory = Layout.whole(0), "shared"
    return NewMatrix(_result_shape(a, b, trans_a, trans_b), a.dtype, "C", layout or rule, memory)


def possible_results(a: Matrix, b: Matrix, trans_a: str, trans_b: str, size: int) -> list[NewMatrix]:
    """Return the matrices for op(A) op(B) to choose from: dealt as op(A), as op(B), by even rows, columns or blocks."""
    rows, cols = shape = _result_shape(a, b, trans_a, trans_b)
    grid = ProcessGrid.most_square(size)
    even = Layout.rows(), Layout.cols(), Layout.blocks(even_counts(rows, grid.rows), even_counts(cols, grid.cols))
    found = [*_followed(a, b, trans_a, trans_b), *((layout, a) for layout in even)]
    return [NewMatrix(shape, a.dtype, "C", layout, own_memory(followed, layout)) for layout, followed in found]


def _result_shape(a: Matrix, b: Matrix, trans_a: str, trans_b: str) -> tuple[int, int]:
    return a.shape[trans_a != "N"], b.shape[trans_b == "N"]


def _is_whole(matrix: Matrix) -> bool:
    return matrix.layout is not None and matrix.layout.kind == "whole"


def _followed(a: Matrix, b: Matrix, trans_a: str, trans_b: str) -> Iterator[tuple[Layout, Matrix]]:
    """Yield how C is dealt if it follows op(A), or op(B), each with the operand; none that cuts k."""
    for operand, trans, apart in ((a, trans_a, "rows"), (b, trans_b, "cols")):
        dealt = operand.layout
        if dealt is not None and dealt.kind in ("whole", "replicated"):
            yield dealt, operand
        elif dealt is not None and dealt.kind == (apart if trans == "N" else {"rows": "cols", "cols": "rows"}[apart]):
            counts = dealt.row_counts if dealt.kind == "rows" else dealt.col_counts
            yield (Layout.rows if apart == "rows" else Layout.cols)(counts, ranks=dealt.ranks), operand
        elif dealt is not None and dealt.cyclic is not None:
            turned = dealt if trans == "N" else dealt.transposed
            if turned.cyclic is not None and turned.cyclic.grid[apart == "rows"] == 1:
                yield turned, operand


def shape_of(shape: object, itemsize: int = 1) -> tuple[int, int]:
    """
    Return a caller's shape.

    Raises
    ------
    ParamError
        If it is not two whole numbers, or elements of this size are more bytes than there are addresses.
    """
    is_list = isinstance(shape, collections.abc.Sequence) and not isinstance(shape, str | bytes | bytearray)
    if not is_list and not (isinstance(shape, np.ndarray) and shape.ndim == 1):
        raise ParamError(f"shape = {shown(shape)} is {type_text(shape)}: pass the numbers of rows and columns")
    extents = list(shape)  # type: ignore[call-overload]
    if len(extents) != 2:
        raise ParamError(f"shape = {shown(shape)} has {dimensions_text(len(extents))}")
    rows, cols = (whole_number(f"shape[{i}]", extent) for i, extent in enumerate(extents))
    if rows < 0 or cols < 0:
        raise ParamError(f"shape = {shown(shape)} has a negative extent: pass the numbers of rows and columns")
    if max(rows * cols, rows, cols) * itemsize >= MOST_BYTES:
        raise ParamError(f"shape = {shown(shape)} is more than can be addressed ({MOST_BYTES} bytes): use less")
    return rows, cols


def own_memory(matrix: Matrix, layout: Layout) -> Memory:
    """
    Return in what memory this rank makes its part of a matrix of some layout that follows another one.

    All ranks make a shared one, or none: that is of what all know of the whole matrix, of which this may be a view.
    """
    if matrix.whole.location == Location.host() and layout.cyclic is None:
        return "shared"
    return "host" if matrix.memory == "shared" else matrix.memory


def layout_of(layout: object, name: str = "layout", mend: str = ", as Layout.rows() or Layout.parse('rows')") -> Layout:
    """Return a caller's layout, or raise ParamError for what is none."""
    if not isinstance(layout, Layout):
        raise ParamError(f"{name} = {shown(layout)} is {type_text(layout)}: pass a Layout{mend}")
    return layout


def out_layout_of(layout: object) -> Layout | Literal["auto"] | None:
    """Return how a caller wants C dealt, or raise ParamError for what is no layout, "auto" or None."""
    if layout is None or (isinstance(layout, str) and layout == "auto"):
        return "auto" if layout else None
    return layout_of(layout, "out_layout", ", 'auto' or None")


def parts_of(parts: object) -> list[tuple[Any, tuple[int, int]]]:
    """
    Return a caller's arrays with the row and column at which each begins.

    Raises
    ------
    ParamError
        If it is anything but pairs of an array and two whole numbers.
    """
    found = []
    for at, part in enumerate(items("parts", parts)):
        if not isinstance(part, tuple | list) or len(part) != 2:
            raise ParamError(f"parts[{at}] is {type_text(part)}: pass (array, (first row, first column))")
        start = [count(f"parts[{at}][1]", number) for number in items(f"parts[{at}][1]", part[1])]
        if len(start) != 2 or min(start) < 0:
            raise ParamError(f"parts[{at}][1] = {shown(part[1])}: pass the first row and column, from 0 on")
        found.append((part[0], (start[0], start[1])))
    return found


def rank_of(name: str, value: object, size: int) -> int:
    """
    Return a caller's rank of a session of so many.

    Raises
    ------
    ParamError
        If it is no whole number, or there is no such rank.
    """
    rank = whole_number(name, value)
    if not 0 <= rank < size:
        raise ParamError(f"{name} = {shown(value)} is not a rank of this session (0 to {size - 1})")
    return rank
