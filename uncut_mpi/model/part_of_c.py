"""Which part of C a product computes: rectangles, each its rows of op(A) times its columns of op(B)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence

from uncut_mpi.errors import ParamError
from uncut_mpi.model.parts import Extent, Rectangle, common


@dataclasses.dataclass(frozen=True, slots=True)
class PartOfC:
    """
    Rectangles of C that a product computes; what is beside them stays as it was.

    Attributes
    ----------
    rectangles : tuple of ((int, int), (int, int))
        First row and the one after the last, first column and the one after the last, of each; no two overlap.

    Raises
    ------
    ParamError
        If a rectangle is empty, or two of them overlap.
    """

    rectangles: tuple[Rectangle, ...]

    def __post_init__(self) -> None:
        for (top, bottom), (left, right) in self.rectangles:
            if not (0 <= top < bottom and 0 <= left < right):
                raise ParamError(f"C [{top}:{bottom}, {left}:{right}] has no elements: name rectangles that have some")
        for one, other in itertools.combinations(self.rectangles, 2):
            if common(one, other) is not None:
                raise ParamError(f"the rectangles {one} and {other} of C overlap: compute each element once")

    @classmethod
    def lower(cls, extent: int, step: int) -> PartOfC:
        """Return the lower triangle of a square C by blocks: in each `step` rows all up to the diagonal's block."""
        edges = [*range(0, extent, step), extent]
        return cls(tuple((rows, (0, rows[1])) for rows in itertools.pairwise(edges)))

    @classmethod
    def decoded(cls, told: Sequence[Sequence[Sequence[int]]]) -> PartOfC:
        """Return what `encoded` was made of; ValueError or TypeError if it is nothing such."""
        return cls(tuple(((int(top), int(bottom)), (int(left), int(right))) for (top, bottom), (left, right) in told))

    def encoded(self) -> list[list[list[int]]]:
        """Return it as JSON holds it."""
        return [[[*rows], [*cols]] for rows, cols in self.rectangles]

    @property
    def transposed(self) -> PartOfC:
        """The same of the transposed C: of a lower triangle the upper one."""
        return PartOfC(tuple((cols, rows) for rows, cols in self.rectangles))

    def within(self, rows: Extent, cols: Extent) -> PartOfC:
        """Return what of it lies in some rows and columns of C, counted from the first of these."""
        found = (common(one, (rows, cols)) for one in self.rectangles)
        top, left = rows[0], cols[0]
        return PartOfC(tuple(((a - top, b - top), (c - left, d - left)) for (a, b), (c, d) in filter(None, found)))

    def beside(self, rows: int, cols: int) -> Iterator[Rectangle]:
        """Yield rectangles that together are the rest of a C of so many rows and columns."""
        edges = sorted({0, rows, *(edge for its_rows, _ in self.rectangles for edge in its_rows)})
        for top, bottom in itertools.pairwise(edges):
            there = sorted(its_cols for its_rows, its_cols in self.rectangles if its_rows[0] <= top < its_rows[1])
            ends = [0, *itertools.chain.from_iterable(there), cols]
            for left, right in zip(ends[::2], ends[1::2], strict=True):
                if left < right:
                    yield (top, bottom), (left, right)
