"""What callers ask of the calls that make matrices, converted once and told in the same words on all ranks. Local."""

from __future__ import annotations

import collections.abc
import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Final, Literal

import numpy as np

from uncut_mpi.api.batch import Batch, Stacks
from uncut_mpi.api.matrix import Matrix, over_nodes
from uncut_mpi.api.typed import overload
from uncut_mpi.errors import ParamError
from uncut_mpi.instead import dimensions_text
from uncut_mpi.model.arguments import count, items, shown, type_text, whole_number
from uncut_mpi.model.dtypes import DType, three_of
from uncut_mpi.model.layout import Layout, even_counts
from uncut_mpi.model.locations import Location, Memory, memory_of
from uncut_mpi.model.problem import MOST_BYTES, Order
from uncut_mpi.planning.grid import ProcessGrid


@dataclasses.dataclass(frozen=True, slots=True)
class NewMatrix:
    """A matrix to be made."""

    shape: tuple[int, int]  # rows and columns
    dtype: DType  # element type
    order: Order  # "F" or "C"
    layout: Layout  # how it is to be dealt
    memory: Memory  # "device", "host" or "shared"
    stacks: Stacks | None = None  # of a batch: which matrices are in it

    def asked(self) -> dict[str, object]:
        """Return what it is by the names of arguments."""
        asked = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**asked, "dtype": self.dtype.name}


_ORDERS: Final[dict[str, Order]] = {"C": "C", "F": "F"}


def new_matrix(
    shape: object, dtype: object, order: object, layout: Layout, memory: object, size: int | None = None
) -> NewMatrix:
    """
    Return what a caller wants to have made.

    Parameters
    ----------
    size : int, optional
        How many ranks there are; with it a shape of three numbers is that of a batch, whose products the layout deals.

    Raises
    ------
    ParamError
        For a shape that is not two whole numbers, an unknown type, order or memory, or more bytes than there are
        addresses.
    """
    kind = DType.parse(dtype)
    extents = shape_of(shape, kind.itemsize, batches=size is not None)
    if not isinstance(order, str) or order not in _ORDERS:
        raise ParamError(f"order {shown(order)}: use 'F' (column-major) or 'C' (row-major)")
    where, stored = memory_of(memory), _ORDERS[order]
    layout.check_memory(where)
    if len(extents) == 2 or size is None:
        return NewMatrix(extents[-2:], kind, stored, layout, where)
    return new_batch(extents, kind, stored, layout, where, size)


def new_batch(
    shape: tuple[int, int, int], dtype: DType, order: Order, layout: Layout, memory: Memory, size: int
) -> NewMatrix:
    """Return the matrix of all products of a batch, which a layout deals to so many ranks."""
    count, rows, cols = shape
    dealt = dealt_products(layout).filled((count, 1), size)
    dealt.rectangles((count, 1), size)
    stacks = Stacks.dense(count, (rows, cols), order, dealt)
    if dealt.row_counts is not None:
        extents = [products * stacks.shape[stacks.axis] for products in dealt.row_counts]
        layout = (Layout.rows if order == "C" else Layout.cols)(extents, ranks=dealt.ranks)
    return NewMatrix(
        (count * rows, cols) if order == "C" else (rows, count * cols), dtype, order, layout, memory, stacks
    )


def dealt_products(layout: Layout) -> Layout:
    """Return how a caller wants products of a batch dealt, or raise ParamError for what cuts products."""
    if layout.kind not in ("rows", "whole", "replicated"):
        raise ParamError(
            f"layout {layout} of a batch: pass Layout.rows(), by which each rank has whole products (with counts of "
            "them), Layout.whole(rank) or Layout.replicated()"
        )
    return layout


def new_results(
    a: Any, b: Any, trans_a: str, trans_b: str, layout: Layout | Literal["auto"] | None, size: int
) -> list[NewMatrix]:
    """
    Return the matrix, or batch, for op(A) op(B) where the caller gives none, as this rank is to make it.

    Of two whole ones all ranks see it on the host. Else it is dealt as op(A) or op(B), the first that leaves k whole,
    or by even rows; a batch as the first of as many. It is in memory as that one's, or A's. With a layout it is dealt
    by that, and by ``"auto"`` these are those to choose from: as either, and by even rows, columns or blocks.

    Raises
    ------
    ParamError
        If a batch has a number of matrices, or shapes, that do not fit, or the layout is none of products.
    """
    batches = [one for one in (a, b) if isinstance(one, Batch)]
    (m, k), (k_b, n) = (
        one.shape[-2:] if trans == "N" else one.shape[:-3:-1] for one, trans in ((a, trans_a), (b, trans_b))
    )
    if batches:
        count = max(map(len, batches)) if all(map(len, batches)) else 0
        if any(len(one) not in (1, count) for one in batches):
            raise ParamError(f"A and B have {' and '.join(str(len(one)) for one in batches)} products: pass as many")
        if k != k_b:
            raise ParamError(f"shapes do not fit: op(A) is {m}×{k} and op(B) is {k_b}×{n}")
        several = [one for one in batches if len(one) == count]
        dealt, even = [(one.layout, several[0].base) for one in several], [Layout.rows()]
    else:
        grid = ProcessGrid.most_square(size)
        dealt = [*_followed(a, b, trans_a, trans_b)]
        even = [Layout.rows(), Layout.cols(), Layout.blocks(even_counts(m, grid.rows), even_counts(n, grid.cols))]
    rule, first = next(iter(dealt), (Layout.rows(), a))
    chosen = [(layout if isinstance(layout, Layout) else rule, first)]
    if layout == "auto":
        chosen = [*dealt, *((one, several[0].base if batches else a) for one in even)]
    made, dtype = [(one, own_memory(followed, one)) for one, followed in chosen], three_of(a.dtype)[2]
    if layout is None and all(one.layout is not None and one.layout.kind == "whole" for one in (a, b)):
        made = [(Layout.whole(0), "shared")]
    if batches:
        return [new_batch((count, m, n), dtype, "C", *one, size) for one in made]
    return [NewMatrix((m, n), dtype, "C", *one) for one in made]


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


@overload
def shape_of(shape: object, itemsize: int = 1) -> tuple[int, int]: ...
@overload
def shape_of(shape: object, itemsize: int = 1, *, batches: bool) -> tuple[int, int] | tuple[int, int, int]: ...
def shape_of(shape: object, itemsize: int = 1, *, batches: bool = False) -> tuple[int, ...]:
    """
    Return a caller's shape; of `batches` also one of three numbers, of which the first says how many matrices.

    Raise ParamError for no whole numbers, or more bytes of such elements than there are addresses.
    """
    is_list = isinstance(shape, collections.abc.Sequence) and not isinstance(shape, str | bytes | bytearray)
    if not is_list and not (isinstance(shape, np.ndarray) and shape.ndim == 1):
        raise ParamError(f"shape = {shown(shape)} is {type_text(shape)}: pass the numbers of rows and columns")
    extents = list(shape)  # type: ignore[call-overload]
    if len(extents) != 2 and not (batches and len(extents) == 3):
        raise ParamError(f"shape = {shown(shape)} has {dimensions_text(len(extents))}")
    found = tuple(whole_number(f"shape[{i}]", extent) for i, extent in enumerate(extents))
    if min(found) < 0:
        raise ParamError(f"shape = {shown(shape)} has a negative extent: pass the numbers of rows and columns")
    if max(math.prod(found), math.prod(found[:-1]), found[-1]) * itemsize >= MOST_BYTES:
        raise ParamError(f"shape = {shown(shape)} is more than can be addressed ({MOST_BYTES} bytes): use less")
    return found


def own_memory(matrix: Matrix, layout: Layout) -> Memory:
    """
    Return in what memory this rank makes its part of a matrix of some layout that follows another one.

    All ranks make a shared one, or none: that is of what all know of the whole matrix, of which this may be a view. On
    several nodes none is dealt in it.
    """
    shared = matrix.whole.location == Location.host() and layout.cyclic is None
    if shared and (layout == Layout.whole() or not over_nodes(matrix)):
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
    """Return a caller's arrays with the row and column at which each begins, or raise ParamError for what is none."""
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
    """Return a caller's rank of a session of so many, or raise ParamError for what is none."""
    rank = whole_number(name, value)
    if not 0 <= rank < size:
        raise ParamError(f"{name} = {shown(value)} is not a rank of this session (0 to {size - 1})")
    return rank
