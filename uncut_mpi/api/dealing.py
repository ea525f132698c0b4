"""
What ranks give, put together to one matrix: its shape, its type, and which part lies where. Local.

Every rank knows what all ranks give, and comes to the same values or to the same error.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Final

from uncut_mpi.api.batch import Stacks
from uncut_mpi.api.matrix import HeldPart, MatrixInfo
from uncut_mpi.api.stored import Stack, in_order, turned
from uncut_mpi.api.wanted import NewMatrix, dealt_products
from uncut_mpi.errors import ParamError, RankMismatchError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout, LocalArray, even_counts
from uncut_mpi.model.locations import Location, Memory
from uncut_mpi.model.parts import BoundLayout, Order, Part
from uncut_mpi.spmd import agreement

_MOST_SHOWN: Final = 4
"""Of a rank's parts, in an error."""


@dataclasses.dataclass(frozen=True, slots=True)
class GivenArray:
    """What all ranks know of an array that one of them gives."""

    held: HeldPart  # as a part that starts where its rank has said, at (0, 0) where a layout says it
    dtype: DType  # its type
    writeable: bool  # whether it may be written
    stack: Stack | None = None  # of an array of three dimensions: which matrices lie in it, one after another
    library: str = ""  # what it is of (`library_of`)

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.held.part.shape

    @property
    def has_elements(self) -> bool:
        """Whether it counts at all."""
        return _has_elements(self.shape)


def by_layout(
    given: Sequence[GivenArray | None],
    layout: Layout,
    shape: tuple[int, int] | None,
    kind: DType | None,
    order: Order = "C",
) -> MatrixInfo:
    """
    Return the matrix, still without a number, of which each rank gives its part by a layout.

    Parameters
    ----------
    given : sequence of GivenArray or None
        What each rank gives; an array without elements is as good as none.
    shape, kind : optional
        Where the arrays do not say it, or to be checked.
    order : str
        In which order arrays are stored where all of them may be read in either.

    Raises
    ------
    ParamError, RankMismatchError
        If the arrays do not add up to a matrix; with rank: value.
    """
    counting = _counting({rank: [one] for rank, one in enumerate(given) if one is not None})
    shapes = [counting[rank][0].shape if rank in counting else (0, 0) for rank in range(len(given))]
    dtype = _type_of(counting, kind)
    if layout.kind in ("rows", "cols") and not layout.has_counts and (shape is None or any(map(_has_elements, shapes))):
        axis, make = (0, Layout.rows) if layout.kind == "rows" else (1, Layout.cols)
        counts = [shapes[rank][axis] for rank in layout.holders(len(given))]
        if shape is not None and sum(counts) != shape[axis]:
            raise _do_not_fit(layout, shape, [*map(_text, shapes)])
        layout = make(counts, ranks=layout.ranks)
    if shape is None:
        shape = _shape_of(layout, [shapes[rank] for rank in counting])
    layout = layout.filled(shape, len(given))  # as equal as can be where no array has elements
    rectangles = layout.rectangles(shape, len(given))
    found = [*map(_text, shapes)]
    wanted = [_text((bottom - top, right - left)) for (top, bottom), (left, right) in rectangles]
    if found != wanted:
        compared = zip(found, wanted, strict=True)
        raise _do_not_fit(
            layout, shape, [have if have == want else f"{have} instead of {want}" for have, want in compared]
        )
    helds = [counting[rank][0].held if _has_elements(shape) else None for rank, shape in enumerate(shapes)]
    stored = iter(_in_one_order([held.part for held in helds if held is not None], order))
    parts = (None if held is None else next(stored) for held in helds)
    bound = layout.bind(
        shape, [None if part is None else LocalArray(part.location, part.order, part.ld) for part in parts]
    )
    placed = zip((held for held in helds if held is not None), bound.parts, strict=True)
    whose = tuple(dataclasses.replace(held, part=part) for held, part in placed)
    whose = whose or _without_elements(shape, counting, layout.holders(len(given))[0])
    return MatrixInfo(0, bound, dtype, whose, layout, _read_only(counting))


def by_products(
    given: Sequence[GivenArray | None], layout: Layout, shape: tuple[int, ...] | None, kind: DType | None
) -> tuple[MatrixInfo, Stacks]:
    """
    Return the matrix, still without a number, in which each rank gives some of the products of a batch, and where.

    Parameters
    ----------
    given, layout, shape, kind
        As of `by_layout`; the layout is of products.

    Raises
    ------
    ParamError, RankMismatchError
        If the arrays do not add up to a batch; with rank: value.
    """
    counting = _counting({rank: [one] for rank, one in enumerate(given) if one is not None})
    stacks = {rank: one.stack for rank, (one,) in counting.items() if one.stack is not None}
    if not stacks and shape is None:
        raise ParamError("no rank gave an array, so there is no shape: pass shape=")
    if len(stacks) < len(counting) or len(shape or (0, 0, 0)) != 3:
        found = {rank: "3 dimensions" if rank in stacks else "2 dimensions" for rank in counting}
        error = RankMismatchError if len({*found.values()}) > 1 else ParamError
        wanted = "one batch" if shape is None else f"what has shape {shape}"
        raise error(f"arrays do not make {wanted}: {agreement.by_rank(found)}; pass as many dimensions everywhere")
    for what, texts in (
        ("shapes", {rank: "{}×{}".format(*one.shape) for rank, one in stacks.items()}),
        ("orders", {rank: "stored by rows" if one.axis == 0 else "by columns" for rank, one in stacks.items()}),
    ):
        if len({*texts.values()}) > 1:
            raise RankMismatchError(f"parts of a batch are of different {what}: {agreement.by_rank(texts)}")
    usual = next(iter(stacks.values())) if shape is None or stacks else Stack(0, (shape[1], shape[2]), 0, shape[1])
    by_rows, axis, holders = layout.kind == "rows", usual.axis, dealt_products(layout).holders(len(given))
    nothing = Stack(0, usual.shape, axis, usual.shape[axis])
    own = [stacks.get(rank, nothing) for rank in (holders if by_rows else holders[:1])]
    counts = [one.count for one in own]
    if not stacks and shape is not None and 0 in usual.shape:
        counts = [*even_counts(shape[0], len(own))]
    total = sum(counts)
    fits = shape in (None, (total, *usual.shape)) and layout.row_counts in (None, tuple(counts))
    fits &= {*stacks} <= {*holders} and (
        by_rows or all(stacks.get(rank, nothing).count == own[0].count for rank in holders)
    )
    if not fits:
        every = [stacks.get(rank, nothing) for rank in range(len(given))]
        sizes = agreement.by_rank(["{} of {}×{}".format(one.count, *one.shape) for one in every])
        whole = "" if shape is None else f" and shape {shape}"
        raise ParamError(f"local arrays do not make a batch of layout {layout}{whole}: {sizes}")
    extents = [one.whole[axis] for one in own]
    along = (Layout.rows if axis == 0 else Layout.cols)(extents, ranks=layout.ranks) if by_rows else layout
    whole_shape = (sum(extents), usual.shape[1]) if axis == 0 else (usual.shape[0], sum(extents))
    info = by_layout(given, along, whole_shape, kind, "C" if axis == 0 else "F")
    begins = zip(itertools.accumulate(counts, initial=0), itertools.accumulate(extents, initial=0), own, strict=False)
    runs = tuple((first, start, one.step) for first, start, one in begins)
    dealt = Layout.rows(counts, ranks=layout.ranks) if by_rows else layout
    return info, Stacks(total, usual.shape, axis, dealt, runs)


def by_starts(given: Sequence[Sequence[GivenArray]], shape: tuple[int, int], kind: DType | None) -> MatrixInfo:
    """
    Return the matrix, still without a number, of which each rank gives some parts and says where they are.

    Raise ParamError if they overlap, leave the matrix or leave a part of it out, and RankMismatchError for several
    types.
    """
    counting = _counting(dict(enumerate(given)))
    dtype = _type_of(counting, kind)
    helds = [one.held for ones in given for one in ones if one.has_elements]
    parts = _in_one_order([held.part for held in helds])
    try:
        bound = BoundLayout(shape, tuple(parts))
        times = collections.Counter((held.holder, held.part.rows, held.part.cols) for held in helds)
        for held in helds:
            if times[held.holder, held.part.rows, held.part.cols] > 1:
                what = _rectangles_text([held.part])
                raise ParamError(f"parts overlap: rank {held.holder} gave {what} more than once")
    except ParamError as error:
        texts = [_rectangles_text([one.held.part for one in ones if one.has_elements]) for ones in given]
        raise ParamError(f"{error}; of all parts {agreement.by_rank(texts)}") from None
    whose = tuple(dataclasses.replace(held, part=part) for held, part in zip(helds, parts, strict=True))
    whose = whose or _without_elements(shape, counting, 0)
    return MatrixInfo(0, bound, dtype, whose, None, _read_only(counting))


def proposed(wanted: NewMatrix, memories: Sequence[Memory]) -> MatrixInfo:
    """Return what ranks would know of a new matrix, each part of it in that rank's memory."""
    if memories[0] == "shared":  # then on all ranks: one segment
        bound = BoundLayout.whole(wanted.shape, Location.host(), wanted.order)
    else:
        kinds = {"device": Location.device, "host": Location.host}
        arrays = [LocalArray(kinds[memory](rank), wanted.order) for rank, memory in enumerate(memories)]
        bound = wanted.layout.bind(wanted.shape, arrays)
    helds = tuple(HeldPart(part, part.location.rank or 0, ()) for part in bound.parts)
    return MatrixInfo(0, bound, wanted.dtype, helds or _without_elements(wanted.shape, {}, 0))


def _counting(given: Mapping[int, Sequence[GivenArray]]) -> dict[int, list[GivenArray]]:
    """Return the arrays that say what the matrix is: those with elements; if there are none, those without."""
    full = {rank: [one for one in ones if one.has_elements] for rank, ones in given.items()}
    chosen = full if any(full.values()) else given
    return {rank: [*ones] for rank, ones in chosen.items() if ones}


def _type_of(counting: Mapping[int, Sequence[GivenArray]], kind: DType | None) -> DType:
    types = {rank: sorted({one.dtype for one in ones}) for rank, ones in counting.items()}
    found = {dtype for ones in types.values() for dtype in ones}
    if len(found) > 1:
        texts = {rank: " and ".join(one.name for one in ones) for rank, ones in types.items()}
        raise RankMismatchError(f"parts are of different types: {agreement.by_rank(texts)}; convert them to one")
    if kind is None and not found:
        raise ParamError("no rank gave an array, so there is no type: pass dtype=")
    if kind is not None and any(dtype.numpy != kind.numpy for dtype in found):
        raise ParamError(f"arrays of {found.pop().name} were given as {kind.name}, which is {kind.numpy} in memory")
    return found.pop() if kind is None else kind


def _shape_of(layout: Layout, shapes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Return the shape that counts and arrays say."""
    extents = []
    if layout.cyclic is not None:
        raise ParamError(f"a layout {layout} does not say how many rows and columns there are: pass shape=")
    for axis, counts in enumerate((layout.row_counts, layout.col_counts)):
        if counts is None and not shapes:
            raise ParamError(f"no rank gave an array, so layout {layout} does not say the shape: pass shape=")
        extents.append(shapes[0][axis] if counts is None else sum(counts))
    return extents[0], extents[1]


def _without_elements(
    shape: tuple[int, int], counting: Mapping[int, Sequence[GivenArray]], holder: int
) -> tuple[HeldPart, ...]:
    """Return the one part of a matrix that has no elements: as the first array, or host memory of a rank."""
    for ones in counting.values():
        part = dataclasses.replace(ones[0].held.part, rows=(0, shape[0]), cols=(0, shape[1]), ld=0)
        return (dataclasses.replace(ones[0].held, part=part),)
    return (HeldPart(Part((0, shape[0]), (0, shape[1]), Location.host(holder)), holder, ()),)


def _in_one_order(parts: Sequence[Part], usual: Order = "C") -> list[Part]:
    """
    Return parts of which single rows and columns are stored in the order of most others, where they can be.

    Where there are no others, or as many of both, that is `usual`.
    """
    fixed = [part for part in parts if turned(part) is None]
    by_rows = sum((part.shape[0] * part.shape[1]) * (1 if part.order == "C" else -1) for part in fixed)
    order: Order = "C" if by_rows > 0 else "F" if by_rows < 0 else usual
    return [in_order(part, order) for part in parts]


def _read_only(counting: Mapping[int, Sequence[GivenArray]]) -> tuple[int, ...]:
    return tuple(rank for rank, ones in counting.items() if not all(one.writeable for one in ones))


def _do_not_fit(layout: Layout, shape: tuple[int, int], texts: Sequence[str]) -> ParamError:
    return ParamError(
        f"local arrays do not make a matrix of {shape[0]}×{shape[1]} and layout {layout}: {agreement.by_rank(texts)}; "
        "pass each rank's part alone (of a larger array array[:rows, :cols]), or another layout or shape"
    )


def _rectangles_text(parts: Sequence[Part]) -> str:
    shown = [f"[{top}:{bottom}, {left}:{right}]" for (top, bottom), (left, right) in ((p.rows, p.cols) for p in parts)]
    more = [f"{len(shown) - _MOST_SHOWN} more"] if len(shown) > _MOST_SHOWN else []
    return " and ".join([*shown[:_MOST_SHOWN], *more]) or "none"


def _has_elements(shape: tuple[int, int]) -> bool:
    return 0 not in shape


def _text(shape: tuple[int, int]) -> str:
    return f"{shape[0]}×{shape[1]}" if _has_elements(shape) else "nothing"
