"""
Views: some rows and columns of a matrix, or it transposed, as a matrix of its own in the same memory. Local.

A view has a part for each part of the matrix that has some of it. What is the same of all ranks' parts stays so, and
every rank comes to the same values, so that one that makes a view tells the others nothing.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from uncut_mpi.errors import ParamError
from uncut_mpi.mappings import Stretch
from uncut_mpi.model.alike import Alike
from uncut_mpi.model.parts import BoundLayout, Extent, Part, Rectangle
from uncut_mpi.model.positions import Orders

if TYPE_CHECKING:
    from uncut_mpi.api.matrix import HeldPart, MatrixInfo


class View(NamedTuple):
    """What is seen of a matrix."""

    rows: Extent  # rows, cols: which of the matrix's rows and columns
    cols: Extent
    turned: bool = False  # turned, conjugated: whether it is seen transposed, and conjugated
    conjugated: bool = False

    @property
    def transposed(self) -> View:
        """The same, transposed."""
        return self._replace(turned=not self.turned)

    def sliced(self, rows: Extent, cols: Extent) -> View:
        """Return what is seen of some rows and columns of what is seen."""
        if self.turned:
            rows, cols = cols, rows
        (top, _), (left, _) = self.rows, self.cols
        return self._replace(rows=(top + rows[0], top + rows[1]), cols=(left + cols[0], left + cols[1]))

    def clipped(self, rectangle: Rectangle, orders: Orders) -> Rectangle:
        """Return which positions it has of a rectangle of the matrix, in the matrix's orders of rows and columns."""
        rows, cols = (
            (min(max(extent[0], first), last), min(max(extent[1], first), last))
            if order is None
            else order.within(extent, first, last)
            for extent, (first, last), order in zip(rectangle, (self.rows, self.cols), orders, strict=True)
        )
        return rows, cols

    def not_of(self, rectangle: Rectangle) -> list[Rectangle]:
        """Return what of a rectangle of the matrix is not seen: what is above, below, left and right of the view."""
        (top, bottom), (left, right) = rectangle
        rows, (begin, end) = self.clipped(rectangle, (None, None))
        if rows[0] == rows[1] or begin == end:
            return [rectangle] if top < bottom and left < right else []
        above, below = ((top, rows[0]), rectangle[1]), ((rows[1], bottom), rectangle[1])
        around = above, below, (rows, (left, begin)), (rows, (end, right))
        return [(down, along) for down, along in around if down[0] < down[1] and along[0] < along[1]]

    def placed(self, rectangle: Rectangle, orders: Orders) -> Rectangle:
        """Return the positions of the view in which it has a rectangle of the matrix, transposed if it is."""
        rows, cols = self.seen(rectangle, orders)
        return (cols, rows) if self.turned else (rows, cols)

    def seen(self, rectangle: Rectangle, orders: Orders) -> Rectangle:
        """Return the positions of the view in which it has a rectangle of the matrix."""
        clipped = self.clipped(rectangle, orders)
        rows, cols = (
            (start - first, stop - first) if order is None else order.in_window(extent, first, last)
            for extent, (start, stop), (first, last), order in zip(
                rectangle, clipped, (self.rows, self.cols), orders, strict=True
            )
        )
        return rows, cols

    def orders(self, orders: Orders) -> Orders:
        """Return the orders of its rows and columns, before it is transposed, of those of the matrix."""
        rows, cols = (
            None if order is None or (window := order.window(first, last)).is_plain else window
            for order, (first, last) in zip(orders, (self.rows, self.cols), strict=True)
        )
        return rows, cols

    def taken(self, array: Any, rectangle: Rectangle, orders: Orders) -> Any:
        """Return what it has of an array that holds a rectangle of the matrix."""
        (top, bottom), (left, right) = self.clipped(rectangle, orders)
        down, along = rectangle[0][0], rectangle[1][0]
        part = array[top - down : bottom - down, left - along : right - along]
        return part.T if self.turned else part

    def __str__(self) -> str:
        (top, bottom), (left, right) = self.rows, self.cols
        seen = (".H" if self.turned else ".H.T") if self.conjugated else ".T" if self.turned else ""
        return f"[{top}:{bottom}, {left}:{right}]{seen}"


@dataclasses.dataclass(frozen=True, slots=True)
class Several:
    """Matrices that are one operand of a batch: what is seen of those that they lie in."""

    token: str  # that only the same matrices have, put together in the same way; the same on all ranks
    numbers: frozenset[int] = dataclasses.field(compare=False, repr=False)  # of the matrices that they lie in
    text: str = dataclasses.field(compare=False, repr=False)  # what they are, for messages
    shapes: Alike[tuple[int, int]] = dataclasses.field(compare=False, repr=False)  # rows and columns of each
    members: tuple[str, ...] = dataclasses.field(default=(), compare=False, repr=False)  # what each is, of a list
    conjugated: bool = False  # as of `View`

    def __str__(self) -> str:
        return self.text


def slices_of(key: object, shape: tuple[int, int]) -> Rectangle:
    """
    Return the rows and columns that slices name.

    Raise TypeError for anything but one slice or two, and ParamError for one with a step.
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
    orders, item = matrix.layout.orders, matrix.dtype.itemsize
    number = matrix.number
    found = [one for at, held in enumerate(matrix.parts) if (one := _part_of(held, (number, at), view, orders, item))]
    shape = view.rows[1] - view.rows[0], view.cols[1] - view.cols[0]
    dealt = None if matrix.dealt is None else matrix.dealt.sliced(matrix.layout.shape, view.rows, view.cols)
    word = "" if dealt is None else str(dealt)
    layout = BoundLayout(shape, tuple(held.part for held, _ in found), word, view.orders(orders))
    if not found:  # one that has no elements
        first = matrix.parts[0]
        part = dataclasses.replace(first.part, rows=(0, shape[0]), cols=(0, shape[1]), ld=0)
        found = [(dataclasses.replace(first, part=part, stretches=()), (number, 0, 0))]
    parts = tuple(held for held, _ in found)
    if view.turned:
        dealt = None if dealt is None else dealt.transposed
        layout = dataclasses.replace(layout.transposed, word="" if dealt is None else str(dealt))
        parts = tuple(dataclasses.replace(held, part=held.part.transposed) for held in parts)
    origins = tuple(origin for _, origin in found)
    return dataclasses.replace(matrix, layout=layout, parts=parts, dealt=dealt, view=view, origins=origins)


def _part_of(
    held: HeldPart, of: tuple[int, int], view: View, orders: Orders, itemsize: int
) -> tuple[HeldPart, tuple[int, int, int]] | None:
    """Return what a view has of a part, with that's numbers and how many bytes of it are ahead; None for nothing."""
    part = held.part
    rows, cols = view.clipped((part.rows, part.cols), orders)
    if rows[0] == rows[1] or cols[0] == cols[1]:
        return None
    seen = Part(*view.seen((part.rows, part.cols), orders), part.location, part.order, part.ld)
    there, start = piece_of(held, seen, rows[0] - part.rows[0], cols[0] - part.cols[0], itemsize)
    return there, (*of, start)


def piece_of(held: HeldPart, seen: Part, row: int, col: int, itemsize: int) -> tuple[HeldPart, int]:
    """
    Return what lies in a part from one of its elements on, and how many bytes of the part are ahead of it.

    Parameters
    ----------
    seen : Part
        What it is called, in the memory of the part.
    row, col : int
        The element, counted from the first one of the part.
    """
    across, along = (row, col) if held.part.order == "F" else (col, row)
    start = (along * seen.ld + across) * itemsize
    nbytes = ((seen.stored_shape[1] - 1) * seen.ld + seen.stored_shape[0]) * itemsize
    stretches = tuple(one for run in held.stretches if (one := _within(run, start, nbytes)))
    return dataclasses.replace(held, part=seen, stretches=stretches, offset_bytes=held.offset_bytes + start), start


def _within(run: Stretch, start: int, nbytes: int) -> Stretch | None:
    """Return what of a stretch is in some bytes of its extent, as a stretch of these."""
    first, stop = max(run.offset, start), min(run.offset + run.nbytes, start + nbytes)
    if first >= stop:
        return None
    there = run.start + first - run.offset
    return dataclasses.replace(run, start=there, nbytes=stop - first, offset=first - start)
