"""
Which part of C a product computes: rectangles, each its rows of op(A) times its columns of op(B), or a triangle of C.

A triangle is in rectangles too: those along the diagonal are computed whole, and what is beyond it is not written.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, TypeAlias

from uncut_mpi.errors import ParamError
from uncut_mpi.model.parts import Extent, Rectangle, common

Triangle: TypeAlias = Literal["", "lower", "upper", "lower_real", "upper_real"]
OTHER: Final[Mapping[str, Triangle]] = {
    "": "",
    "lower": "upper",
    "upper": "lower",
    "lower_real": "upper_real",
    "upper_real": "lower_real",
}
"""The same triangle of the transposed matrix."""
MOST_BLOCKS: Final = 16
"""Most rectangles of a triangle, if nobody says how many: with r of them 1/r more is computed than the triangle has."""
LEAST_ROWS: Final = 1024
"""
Rows of each are about so many or more: all ranks share each, and of fewer rows it mostly takes longer than it saves.
"""


@dataclasses.dataclass(frozen=True, slots=True)
class PartOfC:
    """
    Rectangles of C that a product computes; what is beside them stays as it was.

    Attributes
    ----------
    rectangles : tuple of ((int, int), (int, int))
        First row and the one after the last, first column and the one after the last, of each; no two overlap.
    triangle : {"", "lower", "upper", "lower_real", "upper_real"}
        Of C, with its diagonal: beyond it nothing is written in the rectangles either. Of a Hermitian C (real) the
        diagonal is written without imaginary parts.
    diagonal : int
        How many rows below the diagonal the first element of C is: 0, unless this C is a part of another.

    Raises
    ------
    ParamError
        If a rectangle is empty, or two of them overlap.
    """

    rectangles: tuple[Rectangle, ...]
    triangle: Triangle = ""
    diagonal: int = 0

    def __post_init__(self) -> None:
        if self.triangle not in OTHER:
            raise ParamError(f"triangle {self.triangle!r}: use 'lower', 'upper', 'lower_real', 'upper_real' or ''")
        for (top, bottom), (left, right) in self.rectangles:
            if not (0 <= top < bottom and 0 <= left < right):
                raise ParamError(f"C [{top}:{bottom}, {left}:{right}] has no elements: name rectangles that have some")
        for one, other in itertools.combinations(self.rectangles, 2):
            if common(one, other) is not None:
                raise ParamError(f"the rectangles {one} and {other} of C overlap: compute each element once")

    @classmethod
    def lower(cls, extent: int, step: int = 0, triangle: Triangle = "") -> PartOfC:
        """Return the lower triangle of a square C by blocks: in each `step` rows all up to the diagonal's block."""
        step = step or max(1, -(-extent // max(1, min(MOST_BLOCKS, extent // LEAST_ROWS))))
        edges = [*range(0, extent, step), extent]
        return cls(tuple((rows, (0, rows[1])) for rows in itertools.pairwise(edges)), triangle)

    @classmethod
    def decoded(cls, told: Mapping[str, Any]) -> PartOfC:
        """Return what `encoded` was made of; ValueError, LookupError or TypeError if it is nothing such."""
        rectangles = told["rectangles"]
        return cls(
            tuple(((int(top), int(bottom)), (int(left), int(right))) for (top, bottom), (left, right) in rectangles),
            told["triangle"],
            int(told["diagonal"]),
        )

    def encoded(self) -> dict[str, Any]:
        """Return it as JSON holds it."""
        rectangles = [[[*rows], [*cols]] for rows, cols in self.rectangles]
        return {"rectangles": rectangles, "triangle": self.triangle, "diagonal": self.diagonal}

    @property
    def transposed(self) -> PartOfC:
        """The same of the transposed C: of a lower triangle the upper one."""
        return PartOfC(tuple((cols, rows) for rows, cols in self.rectangles), OTHER[self.triangle], -self.diagonal)

    def within(self, rows: Extent, cols: Extent) -> PartOfC:
        """Return what of it lies in some rows and columns of C, counted from the first of these."""
        found = (common(one, (rows, cols)) for one in self.rectangles)
        top, left = rows[0], cols[0]
        moved = tuple(((a - top, b - top), (c - left, d - left)) for (a, b), (c, d) in filter(None, found))
        return PartOfC(moved, self.triangle, self.diagonal + top - left)

    def beside(self, rows: int, cols: int) -> Iterator[Rectangle]:
        """Yield rectangles that together are the rest of a C of so many rows and columns."""
        edges = sorted({0, rows, *(edge for its_rows, _ in self.rectangles for edge in its_rows)})
        for top, bottom in itertools.pairwise(edges):
            there = sorted(its_cols for its_rows, its_cols in self.rectangles if its_rows[0] <= top < its_rows[1])
            ends = [0, *itertools.chain.from_iterable(there), cols]
            for left, right in zip(ends[::2], ends[1::2], strict=True):
                if left < right:
                    yield (top, bottom), (left, right)
