"""
What memory holds while a schedule runs, derived only by following its tasks.

A `Fragment` is a rectangle of a buffer with one content, one last writer and the readers since.
Contents are affine: a `Piece` or `Partial` with displacement (row, col) says that element (r, c) of
the buffer belongs to element (r + row, c + col) of the matrix, so a rectangle may be cut or copied
without touching its content otherwise. Every function here raises `ScheduleError` naming the rule;
`verify` adds which task broke it.
"""

from __future__ import annotations

import enum
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

from uncut_mpi.errors import ScheduleError
from uncut_mpi.planning.schedule import Factor, Matrix

Rect: TypeAlias = tuple[int, int, int, int]
"""First row, first column, row after the last, column after the last."""

Intervals: TypeAlias = tuple[tuple[int, int], ...]
"""Disjoint half-open intervals, ascending, none touching the next."""


class CIn(enum.IntEnum):
    """How the caller's C takes part in a partial result: not at all, as it was, or times beta."""

    ABSENT = 0
    RAW = 1
    SCALED = 2


class Piece(NamedTuple):
    """A piece of A or B as stored; (row, col) is the displacement into the stored matrix."""

    matrix: Matrix
    row: int
    col: int

    def moved(self, rows: int, cols: int) -> Piece:
        """Return the content of a copy whose region starts `rows`, `cols` before its source's."""
        return Piece(self.matrix, self.row + rows, self.col + cols)


class Partial(NamedTuple):
    """
    A partial result for a piece of C.

    Attributes
    ----------
    row, col : int
        Displacement into C; meaningless for zeros.
    summed : Intervals
        Parts of [0, k) that have been summed.
    alpha : bool
        Whether the sum carries the factor alpha.
    c_in : CIn
        How C as the caller gave it takes part.
    rounded : bool
        Whether the value was computed and then rounded to a half type: nothing may be added any more.
    """

    row: int
    col: int
    summed: Intervals
    alpha: bool
    c_in: CIn
    rounded: bool

    def moved(self, rows: int, cols: int) -> Partial:
        """Return the content of a copy whose region starts `rows`, `cols` before its source's."""
        return self if self.is_zero else self._replace(row=self.row + rows, col=self.col + cols)

    @property
    def is_zero(self) -> bool:
        """Whether this is the empty sum."""
        return not self.summed and self.c_in is CIn.ABSENT


Content: TypeAlias = Piece | Partial | None
"""None: nothing was ever written there, or it must not be read."""

Part: TypeAlias = tuple[Rect, Content]

ZEROS = Partial(0, 0, (), False, CIn.ABSENT, False)


class Fragment:
    """A rectangle of a buffer; `writer` is its last writer (−1: none), `readers` the last reader per lane since."""

    __slots__ = ("content", "live", "readers", "rect", "writer")

    def __init__(self, rect: Rect, content: Content, writer: int, readers: dict[int, int]) -> None:
        self.rect = rect
        self.content = content
        self.writer = writer
        self.readers = readers
        self.live = True


class Memory:
    """The fragments of one buffer: disjoint, together all of it."""

    def __init__(self, rows: int, cols: int, content: Content, touched: Iterable[Rect]) -> None:
        """Start with one content; `touched` are the rectangles that tasks will touch, to cut along them at once."""
        rects = set(touched)
        row_cuts = sorted({0, rows, *(r[0] for r in rects), *(r[2] for r in rects)})
        col_cuts = sorted({0, cols, *(r[1] for r in rects), *(r[3] for r in rects)})
        if len(row_cuts) * len(col_cuts) > 4 * len(rects) + 16:
            row_cuts, col_cuts = [0, rows], [0, cols]
        self._at: dict[Rect, Fragment] = {}
        self._tiling: dict[Rect, list[Fragment]] = {}
        if not rows or not cols:
            return
        for top, bottom in itertools.pairwise(row_cuts):
            for left, right in itertools.pairwise(col_cuts):
                rect = (top, left, bottom, right)
                self._at[rect] = Fragment(rect, content, -1, {})

    def fragments(self) -> Iterable[Fragment]:
        """Return all fragments."""
        return self._at.values()

    def tiles(self, rect: Rect) -> list[Fragment]:
        """Return the fragments that together are exactly `rect`, cutting those that reach over its edges."""
        exact = self._at.get(rect)
        if exact is not None:
            return [exact]
        known = self._tiling.get(rect)
        if known is not None and all(fragment.live for fragment in known):
            return known
        top, left, bottom, right = rect
        if top >= bottom or left >= right:
            return []
        overlapping = [
            f
            for f in self._at.values()
            if f.rect[0] < bottom and f.rect[2] > top and f.rect[1] < right and f.rect[3] > left
        ]
        found = [self._cut(fragment, rect) for fragment in overlapping]
        self._tiling[rect] = found
        return found

    def overwrite(self, rect: Rect, tiles: Sequence[Fragment], parts: Sequence[Part], task: int) -> None:
        """Replace `tiles` (what `tiles(rect)` returned) by what `task` wrote; equal contents become one fragment."""
        if all(content == parts[0][1] for _, content in parts):
            parts = [(rect, parts[0][1])]
        if len(tiles) == 1 and len(parts) == 1:
            tiles[0].content, tiles[0].writer, tiles[0].readers = parts[0][1], task, {}
            return
        for fragment in tiles:
            self._remove(fragment)
        for part, content in parts:
            self._at[part] = Fragment(part, content, task, {})

    def _remove(self, fragment: Fragment) -> None:
        fragment.live = False
        del self._at[fragment.rect]

    def _cut(self, fragment: Fragment, rect: Rect) -> Fragment:
        """Cut what lies outside `rect` off `fragment`; return what is inside."""
        top, left, bottom, right = fragment.rect
        t, lf, b, r = max(top, rect[0]), max(left, rect[1]), min(bottom, rect[2]), min(right, rect[3])
        if (t, lf, b, r) == fragment.rect:
            return fragment
        self._remove(fragment)
        inside = Fragment((t, lf, b, r), fragment.content, fragment.writer, dict(fragment.readers))
        self._at[inside.rect] = inside
        for part in ((top, left, bottom, lf), (top, r, bottom, right), (top, lf, t, r), (b, lf, bottom, r)):
            if part[0] < part[2] and part[1] < part[3]:
                self._at[part] = Fragment(part, fragment.content, fragment.writer, dict(fragment.readers))
        return inside


def add_interval(summed: Intervals, start: int, stop: int) -> Intervals:
    """
    Return `summed` with [start, stop) added.

    Raises
    ------
    ScheduleError
        If part of it is there already.
    """
    at = bisect_right(summed, (start, stop))
    if (at and summed[at - 1][1] > start) or (at < len(summed) and summed[at][0] < stop):
        raise ScheduleError(f"k [{start}, {stop}) is summed twice: {describe_intervals(summed)} is there already")
    before, after = summed[:at], summed[at:]
    if before and before[-1][1] == start:
        start, before = before[-1][0], before[:-1]
    if after and after[0][0] == stop:
        stop, after = after[0][1], after[1:]
    return (*before, (start, stop), *after)


def describe_intervals(summed: Intervals) -> str:
    """Return intervals as text."""
    return " and ".join(f"[{start}, {stop})" for start, stop in summed) or "nothing"


def scaled(content: Content, factor: Factor) -> Partial:
    """
    Return `content` times `factor`, as an addend of a sum.

    Raises
    ------
    ScheduleError
        If it is no partial result, was rounded already, or the factor does not belong to it.
    """
    if not isinstance(content, Partial):
        raise ScheduleError(f"{describe_content(content)} cannot be a term of C")
    if factor is Factor.ZERO:
        return ZEROS
    if content.rounded:
        raise ScheduleError("a value that was rounded to the half type already is summed again: half types round once")
    if factor is Factor.BETA:
        if content.c_in is CIn.SCALED:
            raise ScheduleError("beta is applied twice")
        if content.c_in is CIn.ABSENT or content.summed:
            raise ScheduleError(f"beta is applied to {describe_content(content)}; it belongs to C_in alone")
        return content._replace(c_in=CIn.SCALED)
    if factor is Factor.ALPHA:
        if content.alpha:
            raise ScheduleError("alpha is applied twice")
        if content.c_in is not CIn.ABSENT or not content.summed:
            raise ScheduleError(f"alpha is applied to {describe_content(content)}; it belongs to products alone")
        return content._replace(alpha=True)
    return content


def add(left: Partial, right: Partial) -> Partial:
    """
    Return the sum of two partial results.

    Raises
    ------
    ScheduleError
        If they belong to different elements of C, a k is in both, C_in is in both or lacks beta, or
        only one of them carries alpha.
    """
    if left.is_zero:
        return right
    if right.is_zero:
        return left
    if (left.row, left.col) != (right.row, right.col):
        raise ScheduleError("terms of different elements of C are summed")
    if left.c_in and right.c_in:
        twice = ": beta is applied twice" if CIn.SCALED in (left.c_in, right.c_in) else ""
        raise ScheduleError(f"C_in is summed twice{twice}")
    c_in = left.c_in or right.c_in
    if c_in is CIn.RAW:
        raise ScheduleError("C_in is summed without beta")
    if left.summed and right.summed and left.alpha != right.alpha:
        raise ScheduleError("a sum carries alpha in only some of its terms")
    summed = left.summed
    for start, stop in right.summed:
        summed = add_interval(summed, start, stop)
    return Partial(left.row, left.col, summed, left.alpha or right.alpha, c_in, False)


def describe_content(content: Content) -> str:
    """Return what memory holds as text, without its place."""
    if content is None:
        return "memory that holds nothing which may be read"
    if isinstance(content, Piece):
        return f"a piece of {content.matrix.name}"
    if content.is_zero:
        return "zeros"
    parts = []
    if content.summed:
        parts.append(f"{'alpha times ' if content.alpha else ''}the sum over k {describe_intervals(content.summed)}")
    if content.c_in:
        parts.append("beta C_in" if content.c_in is CIn.SCALED else "C_in")
    return " plus ".join(parts)


def overlay(rect: Rect, terms: list[list[tuple[Rect, Partial]]]) -> list[tuple[Rect, list[Partial]]]:
    """Cut `rect` so that every term has one value per cell; return the cells with the values of all terms."""
    if all(len(term) == 1 for term in terms):
        return [(rect, [term[0][1] for term in terms])]
    row_cuts = sorted({rect[0], rect[2], *(edge for term in terms for part, _ in term for edge in (part[0], part[2]))})
    col_cuts = sorted({rect[1], rect[3], *(edge for term in terms for part, _ in term for edge in (part[1], part[3]))})
    cells = []
    for top, bottom in itertools.pairwise(row_cuts):
        for left, right in itertools.pairwise(col_cuts):
            values = [
                next(value for p, value in term if p[0] <= top and p[2] >= bottom and p[1] <= left and p[3] >= right)
                for term in terms
            ]
            cells.append(((top, left, bottom, right), values))
    return cells
