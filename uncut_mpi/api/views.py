"""
Views: some rows and columns of a matrix, or it transposed, as a matrix of its own in the same memory. Local.

A view has a part for each part of the matrix that has some of it. What is the same of all ranks' parts stays so, and
every rank comes to the same values, so that one that makes a view tells the others nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from uncut_mpi.errors import ParamError
from uncut_mpi.mappings import Piece
from uncut_mpi.model.layout import Rectangle
from uncut_mpi.model.parts import BoundLayout, Extent, Part

if TYPE_CHECKING:
    from uncut_mpi.api.matrix import HeldPart, MatrixInfo


class View(NamedTuple):
    """
    What is seen of a matrix.

    Attributes
    ----------
    rows, cols : (int, int)
        Which of the matrix's rows and columns.
    turned : bool
        Whether it is seen transposed.
    """

    rows: Extent
    cols: Extent
    turned: bool = False

    @property
    def transposed(self) -> View:
        """The same, transposed."""
        return self._replace(turned=not self.turned)

    def sliced(self, rows: Extent, cols: Extent) -> View:
        """Return what is seen of some rows and columns of what is seen."""
        if self.turned:
            rows, cols = cols, rows
        (top, _), (left, _) = self.rows, self.cols
        return View((top + rows[0], top + rows[1]), (left + cols[0], left + cols[1]), self.turned)

    def clipped(self, rectangle: Rectangle) -> Rectangle:
        """Return which rows and columns it has of a rectangle of the matrix."""
        rows, cols = (
            (min(max(start, first), last), min(max(stop, first), last))
            for (start, stop), (first, last) in zip(rectangle, (self.rows, self.cols), strict=True)
        )
        return rows, cols

    def placed(self, rectangle: Rectangle) -> Rectangle:
        """Return the rows and columns of the view in which it has a rectangle of the matrix."""
        (top, bottom), (left, right) = self.clipped(rectangle)
        rows, cols = (top - self.rows[0], bottom - self.rows[0]), (left - self.cols[0], right - self.cols[0])
        return (cols, rows) if self.turned else (rows, cols)

    def taken(self, array: Any, rectangle: Rectangle) -> Any:
        """Return what it has of an array that holds a rectangle of the matrix."""
        (top, bottom), (left, right) = self.clipped(rectangle)
        down, along = rectangle[0][0], rectangle[1][0]
        part = array[top - down : bottom - down, left - along : right - along]
        return part.T if self.turned else part

    def __str__(self) -> str:
        (top, bottom), (left, right) = self.rows, self.cols
        return f"[{top}:{bottom}, {left}:{right}]{'.T' if self.turned else ''}"


def slices_of(key: object, shape: tuple[int, int]) -> Rectangle:
    """
    Return the rows and columns that slices name.

    Raises
    ------
    TypeError
        For anything but one slice or two.
    ParamError
        For a slice with a step.
    """
    slices = key if isinstance(key, tuple) else (key,)
    if not 1 <= len(slices) <= 2 or not all(isinstance(one, slice) for one in slices):
        raise TypeError("a Matrix is sliced by rows and columns, matrix[2:5, :]: its elements are in .local or .array")
    found = []
    for one, extent in zip((*slices, slice(None))[:2], shape, strict=True):
        start, stop, step = one.indices(extent)
        if step != 1:
            raise ParamError(
                f"a slice has step {step}, and a view has all of its rows and columns: slice without a step"
            )
        found.append((start, max(start, stop)))
    return found[0], found[1]


def info_of(matrix: MatrixInfo, view: View) -> MatrixInfo:
    """Return what every rank knows of a view of a matrix."""
    found = [one for at, held in enumerate(matrix.parts) if (one := _part_of(held, at, view, matrix.dtype.itemsize))]
    shape = view.rows[1] - view.rows[0], view.cols[1] - view.cols[0]
    dealt = None if matrix.dealt is None else matrix.dealt.sliced(matrix.layout.shape, view.rows, view.cols)
    layout = BoundLayout(shape, tuple(held.part for held, _ in found), "" if dealt is None else str(dealt))
    if not found:  # one that has no elements
        first = matrix.parts[0]
        part = dataclasses.replace(first.part, rows=(0, shape[0]), cols=(0, shape[1]), ld=0)
        found = [(dataclasses.replace(first, part=part, pieces=()), (0, 0))]
    parts = tuple(held for held, _ in found)
    if view.turned:
        dealt = None if dealt is None else dealt.transposed
        layout = dataclasses.replace(layout.transposed, word="" if dealt is None else str(dealt))
        parts = tuple(dataclasses.replace(held, part=held.part.transposed) for held in parts)
    origins = tuple(origin for _, origin in found)
    return dataclasses.replace(matrix, layout=layout, parts=parts, dealt=dealt, view=view, origins=origins)


def _part_of(held: HeldPart, number: int, view: View, itemsize: int) -> tuple[HeldPart, tuple[int, int]] | None:
    """Return what a view has of a part, with the part's number and how many bytes of it are ahead; None for nothing."""
    part = held.part
    rows, cols = view.clipped((part.rows, part.cols))
    if rows[0] == rows[1] or cols[0] == cols[1]:
        return None
    across, along = rows[0] - part.rows[0], cols[0] - part.cols[0]
    if part.order == "C":
        across, along = along, across
    start = (along * part.ld + across) * itemsize
    top, left = view.rows[0], view.cols[0]
    seen = Part((rows[0] - top, rows[1] - top), (cols[0] - left, cols[1] - left), part.location, part.order, part.ld)
    nbytes = ((seen.stored_shape[1] - 1) * seen.ld + seen.stored_shape[0]) * itemsize
    pieces = tuple(one for piece in held.pieces if (one := _within(piece, start, nbytes)))
    there = dataclasses.replace(held, part=seen, pieces=pieces, offset_bytes=held.offset_bytes + start)
    return there, (number, start)


def _within(piece: Piece, start: int, nbytes: int) -> Piece | None:
    """Return what of a piece is in some bytes of the extent that it is a piece of, as a piece of these."""
    first, stop = max(piece.offset, start), min(piece.offset + piece.nbytes, start + nbytes)
    if first >= stop:
        return None
    there = piece.start + first - piece.offset
    return dataclasses.replace(piece, start=there, nbytes=stop - first, offset=first - start)
