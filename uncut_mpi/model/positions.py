"""
Orders of rows and columns that the matrices of a product share.

A product is right under any permutation of m, n and k that its operands share. So schedules count positions in an order
of each. A matrix that is dealt so is a block for each holder. One that is dealt otherwise is cut where its own order
and that of the product go apart, into runs that both have in one piece.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from uncut_mpi.errors import CapacityError
from uncut_mpi.model.cyclic import CyclicOrder
from uncut_mpi.model.epilogue import Epilogue
from uncut_mpi.model.form import PLAIN, Forms
from uncut_mpi.model.parts import BoundLayout, Extent, Part

LINES_OF_A_PIECE: Final = 2000
"""How many short lines are copied while a copy is issued: 4 us (two H100, ``docs/performance.md``, 2026-11-26)."""

COST_OF_C: Final = 4
"""How many times as much cuts of C cost: a C that is cut is formed elsewhere, and goes both ways."""

_MOST_RUNS: Final = 1 << 24

Orders: TypeAlias = tuple[CyclicOrder | None, CyclicOrder | None]
"""Of rows and of columns; None where positions are indices."""


class IndexRun(NamedTuple):
    """
    Elements that are neighbours in two orders.

    Attributes
    ----------
    offset : int
        How many elements of the part are ahead of it.
    start, stop : int
        Its positions in the other order.
    """

    offset: int
    start: int
    stop: int

    @property
    def extent(self) -> Extent:
        """Its positions in the other order."""
        return self.start, self.stop


class PartBlock(NamedTuple):
    """
    What of a part is a rectangle in other orders.

    Attributes
    ----------
    part : Part
        The rectangle, in the memory of the part.
    number : int
        Of the part that it is of.
    row, col : int
        How many of that part's rows and columns are ahead of it.
    """

    part: Part
    number: int
    row: int
    col: int


def indices_of(rectangle: tuple[Extent, Extent], orders: Orders) -> tuple[np.ndarray, np.ndarray]:
    """Return which rows and columns are at some positions."""
    try:
        rows, cols = (
            np.arange(*extent) if order is None else order.indices(np.arange(*extent))
            for extent, order in zip(rectangle, orders, strict=True)
        )
    except (MemoryError, ValueError):  # the latter beyond what numpy can count
        (top, bottom), (left, right) = rectangle
        raise CapacityError(
            f"there is no host memory for the indices of {bottom - top} rows and {right - left} columns: ask where "
            "single elements are (Layout.locate), or for the extents (Layout.local_shape)"
        ) from None
    return rows, cols


def picked(rows: np.ndarray, cols: np.ndarray) -> tuple[Any, ...]:
    """Return what picks some rows and columns of an array: slices if each follow one another, which is much faster."""
    if all((np.diff(one) == 1).all() for one in (rows, cols)):
        return tuple(slice(int(one[0]), int(one[-1]) + 1) if len(one) else slice(0, 0) for one in (rows, cols))
    return np.ix_(rows, cols)


def pieces_in(bound: BoundLayout, orders: Orders) -> Iterator[PartBlock]:
    """Yield the parts of a matrix as rectangles of positions in other orders, part by part."""
    for number, part in enumerate(bound.parts):
        rows, cols = (
            runs(own, extent, other)
            for own, extent, other in zip(bound.orders, (part.rows, part.cols), orders, strict=True)
        )
        for row, col in itertools.product(rows, cols):
            yield PartBlock(
                Part(row.extent, col.extent, part.location, part.order, part.ld), number, row.offset, col.offset
            )


def reordered(bound: BoundLayout, orders: Orders) -> BoundLayout:
    """Return a matrix with its rows and columns in other orders."""
    if bound.orders == orders:
        return bound
    return BoundLayout(bound.shape, tuple(one.part for one in pieces_in(bound, orders)), bound.word, orders)


def orders_for_product(
    a: BoundLayout,
    b: BoundLayout,
    c: BoundLayout,
    trans_a: str,
    trans_b: str,
    triangle: str = "",
    forms: Forms = PLAIN,
    epilogue: Epilogue | None = None,
) -> tuple[Orders, Orders, Orders]:
    """
    Return the orders for A, B and C by which copies of what op(A) op(B) needs cost least (`cost_of_cuts`).

    Rows of op(A) and C have one order, columns of op(B) and C, and columns of op(A) and rows of op(B). Those of C are
    as they are if a triangle of it is formed, and along an epilogue's vectors. Those of an operand that has a form are,
    too. The epilogue is of the caller's C.
    """
    along = "" if epilogue is None else epilogue.along
    (m_of_a, k_of_a), (k_of_b, n_of_b) = (
        one.orders if trans == "N" else one.orders[::-1] for one, trans in ((a, trans_a), (b, trans_b))
    )

    def asked(m: CyclicOrder | None, n: CyclicOrder | None, k: CyclicOrder | None) -> tuple[Orders, Orders, Orders]:
        return (m, k) if trans_a == "N" else (k, m), (k, n) if trans_b == "N" else (n, k), (m, n)

    ways = itertools.product(
        [None] if triangle or forms[0] or along == "rows" else dict.fromkeys((c.orders[0], m_of_a)),
        [None] if triangle or forms[1] or along == "cols" else dict.fromkeys((c.orders[1], n_of_b)),
        [None] if any(forms) else dict.fromkeys((k_of_a, k_of_b)),
    )

    def cost(way: tuple[Orders, Orders, Orders]) -> int:
        return sum(map(cost_of_cuts, (a, b, c), way)) + (COST_OF_C - 1) * cost_of_cuts(c, way[2])

    return min((asked(*way) for way in ways), key=cost)


def orders_for_copy(source: BoundLayout, target: BoundLayout) -> Orders:
    """Return the orders by which copies from one matrix to another one of its shape cost least."""
    (rows, cols), (others, more) = target.orders, source.orders
    ways = itertools.product(dict.fromkeys((rows, others)), dict.fromkeys((cols, more)))
    return min(ways, key=lambda way: cost_of_cuts(source, way) + cost_of_cuts(target, way))


def cost_of_cuts(bound: BoundLayout, orders: Orders) -> int:
    """
    Return what it costs to copy a matrix in the pieces that other orders make of it, in copied lines.

    A line is what is contiguous: of a column, or of a row where rows are stored. So cuts across the lines are cheap.
    Cuts of lines make many short ones, of which a device moves some 0.5 per ns, however short they are. A piece more
    takes as long as `LINES_OF_A_PIECE` of them.
    """
    cost = 0
    for part in bound.parts:
        counts = [
            len(runs(own, extent, other))
            for own, extent, other in zip(bound.orders, (part.rows, part.cols), orders, strict=True)
        ]
        along = 0 if part.order == "F" else 1
        cost += counts[0] * counts[1] * LINES_OF_A_PIECE + counts[along] * part.shape[1 - along]
    return cost


@functools.lru_cache(maxsize=256)
def runs(own: CyclicOrder | None, extent: Extent, other: CyclicOrder | None) -> Sequence[IndexRun]:
    """Return the runs of some positions of an order in another one, first things first."""
    if extent[0] == extent[1]:
        return ()
    if own == other:
        return (IndexRun(0, *extent),)
    starts = np.array(extent[:1])
    if own is not None:
        edges = np.array(own.starts)
        starts, stops = np.maximum(edges[:-1], extent[0]), np.minimum(edges[1:], extent[1])
        local = starts - edges[:-1] + own.skip * (np.arange(own.num_parts) == own.source)
        some = starts < stops
        starts = _cut(starts[some], stops[some], local[some], own.block)
    places = starts if own is None else own.indices(starts)
    if other is not None:
        inside = _cut(starts, np.append(starts[1:], extent[1]), places + other.skip, other.block)
        places = other.position(inside if own is None else own.indices(inside))
        starts = inside
    begin = np.append(True, np.diff(places) != np.diff(starts))
    starts, firsts = starts[begin].tolist(), places[begin].tolist()
    return tuple(
        IndexRun(start - extent[0], first, first + stop - start)
        for start, stop, first in zip(starts, [*starts[1:], extent[1]], firsts, strict=True)
    )


def _cut(starts: np.ndarray, stops: np.ndarray, values: np.ndarray, block: int) -> np.ndarray:
    """Return where ranges begin and where, counting on from a value at each one's start, multiples of a block are."""
    low = values // block + 1
    counts = np.maximum(-(-(values + stops - starts) // block) - low, 0)
    if (total := int(counts.sum())) > _MOST_RUNS:
        raise CapacityError(
            f"{int((stops - starts).sum())} rows or columns dealt in blocks of {block} make {total} pieces, at most "
            f"{_MOST_RUNS} can be told apart: deal larger blocks"
        )
    which = np.repeat(np.arange(len(starts)), counts)
    nth = np.arange(total) - (np.cumsum(counts) - counts)[which]
    return np.sort(np.concatenate([starts, starts[which] + (low[which] + nth) * block - values[which]]))
