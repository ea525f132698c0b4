"""
Which part of a matrix lies where: a layout that is bound to a shape and to memories.

A part is what one holder has in one local array: a rectangle of the matrix. Parts cover the matrix exactly; a rectangle
that several holders have is a replica in each. What is dealt in cyclic blocks is a rectangle of positions in an order
of its rows and one of its columns (`uncut_mpi.model.cyclic`).
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.model.alike import Alike
from uncut_mpi.model.cyclic import CyclicOrder
from uncut_mpi.model.locations import Location

_T = TypeVar("_T")

Order: TypeAlias = Literal["F", "C"]
"""How a matrix is stored: by columns or by rows."""

Extent: TypeAlias = tuple[int, int]
"""First row or column, and the one after the last."""

Rectangle: TypeAlias = tuple[Extent, Extent]
"""Rows and columns of a matrix."""


def elements_of(one: Rectangle) -> int:
    """Return how many elements a rectangle has."""
    (top, bottom), (left, right) = one
    return (bottom - top) * (right - left)


def common(one: Rectangle, other: Rectangle) -> Rectangle | None:
    """Return what two rectangles have in common, None if that is nothing."""
    (top, bottom), (left, right) = ((max(a[0], b[0]), min(a[1], b[1])) for a, b in zip(one, other, strict=True))
    return ((top, bottom), (left, right)) if top < bottom and left < right else None


class ByRows(Generic[_T]):
    """What has some rows each, found by rows."""

    def __init__(self, items: Iterable[_T], rows_of: Callable[[_T], Extent]) -> None:
        self._items = sorted(items, key=rows_of)
        rows = [rows_of(one) for one in self._items]
        self._starts, self._stops = (
            [start for start, _ in rows],
            [*itertools.accumulate((stop for _, stop in rows), max)],
        )

    def within(self, top: int, bottom: int) -> Sequence[_T]:
        """Return those that have some of these rows, and maybe others, by their first rows."""
        return self._items[bisect.bisect_right(self._stops, top) : bisect.bisect_left(self._starts, bottom)]


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """
    A rectangle of a matrix in one local array.

    Attributes
    ----------
    rows, cols : (int, int)
        The rectangle: its first row or column, and the one after its last.
    location : Location
        Where the array lies.
    order : str
        ``"F"`` (column-major) or ``"C"`` (row-major), as the array stores it.
    ld : int
        Leading dimension (elements): distance between columns (F) or rows (C); by default the least one.
    count : int
        How many blocks of a batch it is, of one shape. They are one after another on the diagonal of the matrix, with
        nothing beside them. In the array their columns (F), or rows (C), follow one another.
    """

    rows: Extent
    cols: Extent
    location: Location
    order: Order = "F"
    ld: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.ld == 0:
            object.__setattr__(self, "ld", max(1, self.stored_shape[0]))

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.rows[1] - self.rows[0], self.cols[1] - self.cols[0]

    @property
    def stored_shape(self) -> tuple[int, int]:
        """Rows and columns of the same memory read as a column-major matrix."""
        rows, cols = self.shape
        return (rows // self.count, cols) if self.order == "F" else (cols // self.count, rows)

    @property
    def elements(self) -> int:
        """How many elements it has."""
        return math.prod(self.stored_shape)

    @property
    def transposed(self) -> Part:
        """The same memory as a part of the transposed matrix."""
        return Part(self.cols, self.rows, self.location, "C" if self.order == "F" else "F", self.ld, self.count)

    def moved(self, top: int, left: int) -> Part:
        """Return the same memory so many rows and columns further on in the matrix."""
        (above, below), (before, behind) = self.rows, self.cols
        rows, cols = (above + top, below + top), (before + left, behind + left)
        return Part(rows, cols, self.location, self.order, self.ld, self.count)


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class BoundLayout:
    """
    The parts of a matrix.

    Attributes
    ----------
    shape : (int, int)
        Rows and columns of the matrix.
    parts : tuple of Part
        Those that have elements, holder by holder; where a rectangle has several holders, the first one is read.
    word : str
        The layout in one word (`Layout`), for messages. Layouts that differ in nothing else are equal.
    orders : tuple of CyclicOrder or None
        Of rows and of columns: in which order parts have their positions. None where these are indices. A schedule
        counts positions, so that layouts that differ in nothing else are equal, too.
    blocks : Alike of (int, int)
        Rows and columns of the blocks on the diagonal, of which alone the parts are (`GemmProblem.batch`); none: all.

    Raises
    ------
    ParamError
        If parts overlap, leave the matrix or leave a part of it out.
    """

    shape: tuple[int, int]
    parts: tuple[Part, ...]
    word: str = dataclasses.field(default="", compare=False)
    orders: tuple[CyclicOrder | None, CyclicOrder | None] = dataclasses.field(default=(None, None), compare=False)
    blocks: Sequence[tuple[int, int]] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "blocks", Alike.of(self.blocks))
        if self.blocks:
            if not self._has_blocks_in_turn():
                self._check_blocks()
        else:
            _check_cover(self.shape, self.parts, edges_of(self.parts))

    def __hash__(self) -> int:
        # Keys of caches are hashed all the time, and a batch has many parts.
        return hash((self.shape, len(self.parts), len(self.blocks)))

    def __repr__(self) -> str:
        # Digests of keys are made of it, as values of builtin types, whose text is made much faster than ours.
        shape, parts, _, *blocks = self.encoded()
        return f"BoundLayout({shape}, {parts}{''.join(f', blocks={some}' for some in blocks)})"

    def _has_blocks_in_turn(self) -> bool:
        """Return whether its parts are the blocks one after another, as mostly: that is seen sooner than all is."""
        parts, top, left = iter(self.parts), 0, 0
        for (rows, cols), count in Alike.of(self.blocks).runs:
            missing = count if rows and cols else 0
            while missing:
                part = next(parts, None)
                if part is None or part.count > missing or (part.rows[0], part.cols[0]) != (top, left):
                    return False
                if part.shape != (rows * part.count, cols * part.count):
                    return False
                top, left, missing = part.rows[1], part.cols[1], missing - part.count
            if not (rows and cols):
                top, left = top + rows * count, left + cols * count
        return next(parts, None) is None and (top, left) == self.shape

    def _check_blocks(self) -> None:
        """Check that the parts in each block are all of it, and that there are no others."""
        sizes = Alike.of(self.blocks).table(2)
        stops = np.cumsum(sizes, axis=0)
        starts, (rows, cols) = stops - sizes, stops[-1].tolist()
        if (rows, cols) != self.shape:
            raise ParamError(f"blocks on the diagonal of {rows}×{cols} in all are no matrix of {self.shape}")
        edges, whose = edges_of(self.parts), np.repeat(np.arange(len(self.parts)), [one.count for one in self.parts])
        # Of blocks that begin in a row, the last one has it.
        block = np.clip(np.searchsorted(starts[:, 0], edges[:, 0], side="right") - 1, 0, None)
        inside = edges - np.repeat(starts[block], 2, axis=1)
        zero = np.zeros(len(block), np.int64)
        whole = (inside == np.stack([zero, sizes[block, 0], zero, sizes[block, 1]], axis=1)).all(axis=1)
        whole &= sizes[block].min(axis=1) > 0
        alone = np.bincount(block[whole], minlength=len(sizes)) == np.bincount(block, minlength=len(sizes))
        alone &= np.isin(np.arange(len(sizes)), block) | (sizes.min(axis=1) == 0)
        order = np.argsort(block, kind="stable")
        for at in np.flatnonzero(~alone).tolist():
            first, last = np.searchsorted(block[order], (at, at + 1))
            own = order[first:last]
            _check_cover(self.blocks[at], [self.parts[one] for one in whose[own].tolist()], inside[own])

    @classmethod
    def whole(cls, shape: tuple[int, int], location: Location, order: Order = "F", ld: int = 0) -> BoundLayout:
        """Return the layout of a matrix in one piece."""
        parts = (Part((0, shape[0]), (0, shape[1]), location, order, ld),) if shape[0] and shape[1] else ()
        return cls(shape, parts, "whole")

    def sliced(self, rows: Extent, cols: Extent) -> BoundLayout:
        """Return some of its rows and columns, by position, as a matrix of its own."""
        parts = []
        for part in self.parts:
            if shared := common((part.rows, part.cols), (rows, cols)):
                (top, bottom), (left, right) = shared
                shifted = (top - rows[0], bottom - rows[0]), (left - cols[0], right - cols[0])
                parts.append(Part(*shifted, part.location, part.order, part.ld))
        return BoundLayout((rows[1] - rows[0], cols[1] - cols[0]), tuple(parts), self.word)

    @property
    def transposed(self) -> BoundLayout:
        """The same memory as the transposed matrix."""
        made = object.__new__(BoundLayout)  # what was checked needs no check
        parts = tuple(part.transposed for part in self.parts)
        blocks = Alike(((cols, rows), count) for (rows, cols), count in Alike.of(self.blocks).runs)
        about = self.shape[::-1], parts, self.word, self.orders[::-1], blocks
        for field, value in zip(dataclasses.fields(self), about, strict=True):
            object.__setattr__(made, field.name, value)
        return made

    @property
    def order(self) -> Order:
        """How most of its elements are stored; of equals by rows, as numpy has it."""
        by_columns = sum(one.elements * (1 if one.order == "F" else -1) for one in self.parts)
        return "F" if by_columns > 0 else "C"

    def straight(self, readers: Sequence[int]) -> BoundLayout:
        """
        Return where parts of order "F" lie, and buffers of ours that stand in for those of order "C".

        Such a buffer is in order "F", in the same memory as its part. Where that is host memory of all ranks, it is in
        private host memory of one of those who reach that (`readers`), of each in turn, whose worker copies it.
        """
        if all(part.order == "F" for part in self.parts):
            return self

        def place(location: Location, number: int) -> Location:
            return Location.host(readers[number % len(readers)]) if location == Location.host() else location

        parts = (
            part if part.order == "F" else Part(part.rows, part.cols, place(part.location, number), count=part.count)
            for number, part in enumerate(self.parts)
        )
        return dataclasses.replace(self, parts=tuple(parts))

    def encoded(self) -> list[Any]:
        """Return it as plain values, for JSON."""
        parts = [
            [*one.rows, *one.cols, str(one.location), one.order, one.ld, *[one.count] * (one.count > 1)]
            for one in self.parts
        ]
        return [list(self.shape), parts, self.word, *[Alike.of(self.blocks).encoded()] * bool(self.blocks)]

    @classmethod
    def decoded(cls, values: Sequence[Any]) -> BoundLayout:
        """Return what `encoded` was made of; ValueError, TypeError or ParamError for anything else."""
        (rows, cols), parts, word, *blocks = values
        made = (
            Part((top, bottom), (left, right), Location.parse(location), order, ld, *count)
            for top, bottom, left, right, location, order, ld, *count in parts
        )
        (of_batch,) = blocks or ((),)
        return cls((rows, cols), tuple(made), word, blocks=Alike.decoded(of_batch))

    def __str__(self) -> str:
        places = dict.fromkeys(str(part.location) for part in self.parts)
        return f"{self.word or 'parts'}@{'+'.join(places)}"


def edges_of(parts: Sequence[Part]) -> np.ndarray:
    """Return first and last rows, first and last columns of parts, of each block of those that are several; int64."""
    edges = np.array([(*part.rows, *part.cols) for part in parts], np.int64).reshape(-1, 4)
    counts = np.array([part.count for part in parts], np.int64)
    if counts.size == 0 or counts.max() == 1:
        return edges
    nth = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    sizes = np.repeat((edges[:, 1::2] - edges[:, ::2]) // counts[:, np.newaxis], counts, axis=0)
    starts = np.repeat(edges[:, ::2], counts, axis=0) + nth[:, np.newaxis] * sizes
    return np.stack([starts[:, 0], starts[:, 0] + sizes[:, 0], starts[:, 1], starts[:, 1] + sizes[:, 1]], axis=1)


def _check_cover(shape: tuple[int, int], parts: Sequence[Part], edges: np.ndarray) -> None:
    """Check that the rectangles of parts (rows, then columns) together are all of a shape, each element once."""
    rows, cols = shape
    outside = (edges[:, 0] < 0) | (edges[:, 2] < 0) | (edges[:, 1] > rows) | (edges[:, 3] > cols)
    outside |= (edges[:, 0] >= edges[:, 1]) | (edges[:, 2] >= edges[:, 3])
    if outside.any():
        raise ParamError(f"{_text(parts[int(np.argmax(outside))])} is no part of a matrix of {rows}×{cols}")
    if len(edges) and (edges == (0, rows, 0, cols)).all():
        return  # each is all of it, as mostly
    found = np.unique(edges, axis=0)  # replicas once
    tops, top = np.unique(found[:, :2], return_inverse=True)
    lefts, left = np.unique(found[:, 2:], return_inverse=True)
    holders = np.zeros((max(1, len(tops)), max(1, len(lefts))), np.int64)
    for (first, last), (begin, end) in zip(top.reshape(-1, 2).tolist(), left.reshape(-1, 2).tolist(), strict=True):
        holders[first:last, begin:end] += 1
    if holders.max() > 1:
        raise ParamError(f"parts overlap: {_two_that_overlap(parts)}")
    area = int(((found[:, 1] - found[:, 0]) * (found[:, 3] - found[:, 2])).sum())
    if area != rows * cols:
        raise ParamError(f"parts have {area} elements of a matrix of {rows}×{cols}, which has {rows * cols}")


def _text(part: Part) -> str:
    (top, bottom), (left, right) = part.rows, part.cols
    return f"[{top}:{bottom}, {left}:{right}] at {part.location}"


def _two_that_overlap(parts: Sequence[Part]) -> str:
    edges = edges_of(parts)
    for at, (top, bottom, left, right) in enumerate(edges.tolist()):
        others = edges[:at]
        meets = (others[:, 0] < bottom) & (top < others[:, 1]) & (others[:, 2] < right) & (left < others[:, 3])
        meets &= (others != edges[at]).any(axis=1)
        if meets.any():
            return f"{_text(parts[int(np.argmax(meets))])} and {_text(parts[at])}"
    raise AssertionError("no two parts overlap")
