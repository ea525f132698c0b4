"""
How a matrix is dealt to ranks: what users write, before there is a shape or a memory.

A `Layout` is a value that all ranks share. `Layout.bind` makes of it, with a shape and with how each rank's array is
stored, the `BoundLayout` that schedules use.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import count, counted, items, shown, value_of_callers
from uncut_mpi.model.cyclic import NUMBERS, Cyclic, joined, split
from uncut_mpi.model.locations import Location, Memory
from uncut_mpi.model.parts import BoundLayout, Extent, Order, Part, Rectangle
from uncut_mpi.model.positions import Orders, indices_of

Kind: TypeAlias = Literal["whole", "rows", "cols", "blocks", "replicated", "block_cyclic"]
"""What a rank has: all, some rows, some columns, a block, all as every other one has, or every so many-th block."""

_FIELDS: Final[dict[str, tuple[set[str], set[str]]]] = {
    "whole": (set(), set()),
    "rows": (set(), {"row_counts"}),
    "cols": (set(), {"col_counts"}),
    "blocks": ({"row_counts", "col_counts"}, set()),
    "replicated": (set(), set()),
    "block_cyclic": ({"cyclic"}, set()),
}
"""Which fields a layout of each kind has, and which it may have."""

_WORD = re.compile(r"(whole|rows|cols|blocks|replicated|block_cyclic)(?:\(([^()]*)\))?")


class LocalArray(NamedTuple):
    """
    How a rank's array is stored.

    Attributes
    ----------
    location : Location
        Where it lies.
    order : str
        ``"F"`` or ``"C"``.
    ld : int
        Leading dimension (elements); 0 for the least one.
    """

    location: Location
    order: Order = "F"
    ld: int = 0


@value_of_callers
@dataclasses.dataclass(frozen=True, slots=True)
class Layout:
    """
    How a matrix is dealt to ranks: the same value on all of them.

    `whole`, `rows`, `cols`, `blocks`, `replicated` and `block_cyclic` make one. It prints as a word that `parse` reads:
    ``rows``, ``rows(0,200,71,100)``, ``blocks(3,4;5,6;ranks=3,1,0,2)``, ``block_cyclic(64,64;2,2)``, ``whole(0)``.

    Attributes
    ----------
    kind : str
        ``"whole"``, ``"rows"``, ``"cols"``, ``"blocks"``, ``"replicated"`` or ``"block_cyclic"``.
    row_counts, col_counts : tuple of int or None
        How many rows and columns there are in each part, from the first on; None where nothing says so.
    ranks : tuple of int or None
        Whose parts these are, blocks row by row, those of a process grid in its order; None for all ranks in theirs.
    cyclic : Cyclic or None
        How blocks are dealt, if they are dealt in turn.

    Raises
    ------
    ParamError
        If counts or ranks are no numbers, negative, or do not fit each other.
    """

    kind: Kind
    row_counts: tuple[int, ...] | None = None
    col_counts: tuple[int, ...] | None = None
    ranks: tuple[int, ...] | None = None
    cyclic: Cyclic | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.kind, str) or self.kind not in _FIELDS:
            raise ParamError(f"kind = {shown(self.kind)} is no layout: use {', '.join(_FIELDS)}")
        for name in ("row_counts", "col_counts", "ranks"):
            object.__setattr__(self, name, _optional(name, getattr(self, name)))
        needed, allowed = _FIELDS[self.kind]
        given = {name for name in ("row_counts", "col_counts", "cyclic") if getattr(self, name) is not None}
        if not needed <= given <= needed | allowed:
            raise ParamError(f"a layout {self.kind} does not have these fields: make it with Layout.{self.kind}(…)")
        if self.kind == "whole" and (self.ranks is None or len(self.ranks) != 1):
            raise ParamError(f"a layout whole names {shown(self.ranks)}: make it with Layout.whole(root)")
        if self.ranks is None:
            return
        if len(set(self.ranks)) < len(self.ranks):
            raise ParamError(
                f"ranks = {shown(self.ranks)} of a layout {self.kind} has a rank more than once: a rank has one part; "
                "distribute_parts takes several"
            )
        if (self.has_counts or self.cyclic) and len(self.ranks) != self._num_counted:
            what = "counts" if self.cyclic is None else "a grid"
            raise ParamError(
                f"a layout {self.kind} has {what} for {counted(self._num_counted, 'part')} and names "
                f"{counted(len(self.ranks), 'rank')}: pass as many of both"
            )

    # -- kinds -------------------------------------------------------------------------------

    @classmethod
    def whole(cls, root: int = 0) -> Layout:
        """Return the layout of a matrix that one rank has."""
        return cls("whole", ranks=_numbers("root", (root,)))

    @classmethod
    def rows(cls, counts: Sequence[int] | None = None, *, ranks: Sequence[int] | None = None) -> Layout:
        """
        Return the layout by which each rank has some rows, all columns of them.

        Parameters
        ----------
        counts : sequence of int, optional
            How many rows each has, 0 too. By default `Session.distribute` takes them from the arrays; elsewhere they
            are as equal as `numpy.array_split` makes them.
        ranks : sequence of int, optional
            Who has rows, from the first row on; by default all ranks in their order.
        """
        return cls("rows", row_counts=_optional("counts", counts), ranks=_optional("ranks", ranks))

    @classmethod
    def cols(cls, counts: Sequence[int] | None = None, *, ranks: Sequence[int] | None = None) -> Layout:
        """Return the layout by which each rank has some columns, as `rows` has it of rows."""
        return cls("cols", col_counts=_optional("counts", counts), ranks=_optional("ranks", ranks))

    @classmethod
    def blocks(
        cls, row_counts: Sequence[int], col_counts: Sequence[int], *, ranks: Sequence[int] | None = None
    ) -> Layout:
        """
        Return the layout by which each rank has a block.

        Parameters
        ----------
        row_counts, col_counts : sequence of int
            Rows of each row of blocks, columns of each column of blocks; 0 too.
        ranks : sequence of int, optional
            Whose the blocks are, row by row; by default all ranks in their order.
        """
        counts = _numbers("row_counts", row_counts), _numbers("col_counts", col_counts)
        return cls("blocks", *counts, ranks=_optional("ranks", ranks))

    @classmethod
    def replicated(cls, *, ranks: Sequence[int] | None = None) -> Layout:
        """
        Return the layout by which each rank has all of the matrix.

        What they have must be equal: one of them is read. A result is written to all.

        Parameters
        ----------
        ranks : sequence of int, optional
            Who has it; by default all ranks.
        """
        return cls("replicated", ranks=_optional("ranks", ranks))

    @classmethod
    def block_cyclic(
        cls,
        mb: int,
        nb: int,
        grid: tuple[int, int],
        *,
        source: tuple[int, int] = (0, 0),
        grid_order: Literal["R", "C"] = "R",
        ranks: Sequence[int] | None = None,
    ) -> Layout:
        """
        Return ScaLAPACK's two-dimensional block-cyclic layout.

        Block (i, j) goes to process ((source[0] + i) mod grid[0], (source[1] + j) mod grid[1]). A process has its
        blocks one behind the other in one local array.

        Parameters
        ----------
        mb, nb : int
            Rows and columns of a block.
        grid : (int, int)
            Rows and columns of the process grid.
        source : (int, int)
            The process that has the first block: its row and column in the grid.
        grid_order : {"R", "C"}
            Whether processes fill the grid row by row or column by column.
        ranks : sequence of int, optional
            The ranks of processes 0, 1, ...; by default all ranks in their order.

        Raises
        ------
        ParamError
            If a number is none, a block or the grid is empty, or `source` is not in the grid.
        """
        block, shape = _pair("mb, nb", (mb, nb)), _pair("grid", grid)
        if not isinstance(grid_order, str) or grid_order not in ("R", "C"):
            raise ParamError(f"grid_order = {shown(grid_order)}: use 'R' (row by row) or 'C' (column by column)")
        if 0 in block or 0 in shape:
            raise ParamError(
                f"blocks of {block[0]}×{block[1]} on a grid of {shape[0]}×{shape[1]}: pass extents from 1 on"
            )
        first = _pair("source", source)
        if first[0] >= shape[0] or first[1] >= shape[1]:
            raise ParamError(
                f"source = {shown(source)} is not in a grid of {shape[0]}×{shape[1]}: pass its row and column"
            )
        dealt = Cyclic(block, shape, first, "R" if grid_order == "R" else "C")
        return cls("block_cyclic", ranks=_optional("ranks", ranks), cyclic=dealt)

    @classmethod
    def from_descriptor(
        cls,
        desc: Sequence[int],
        grid: tuple[int, int],
        *,
        grid_order: Literal["R", "C"] = "R",
        ranks: Sequence[int] | None = None,
    ) -> tuple[Layout, tuple[int, int]]:
        """
        Return the layout and the shape that an array descriptor of ScaLAPACK says.

        Parameters
        ----------
        desc : sequence of nine int
            DTYPE_ (1), CTXT_, M_, N_, MB_, NB_, RSRC_, CSRC_ and LLD_. CTXT_ and LLD_ are not looked at: the grid is
            `grid`, and the leading dimension is that of the array.
        grid, grid_order, ranks
            As of `block_cyclic`.

        Raises
        ------
        ParamError
            If it is no such descriptor; as `block_cyclic`.
        """
        given = items("desc", desc)
        if len(given) != 9 or count("desc[0] (DTYPE_)", given[0]) != 1:
            raise ParamError(f"desc = {shown(desc)}: pass the nine numbers of a dense matrix, of which the first is 1")
        m, n, mb, nb, row, col = (count(f"desc[{at}]", given[at]) for at in range(2, 8))
        shape = _pair("desc (M_, N_)", (m, n))
        return cls.block_cyclic(mb, nb, grid, source=(row, col), grid_order=grid_order, ranks=ranks), shape

    # -- words -------------------------------------------------------------------------------

    def __str__(self) -> str:
        if self.kind == "whole":
            return f"whole({joined(self.ranks)})"
        lists = [joined(counts) for counts in (self.row_counts, self.col_counts) if counts is not None]
        lists += [] if self.cyclic is None else self.cyclic.words
        if self.ranks is not None:
            lists.append(f"ranks={joined(self.ranks)}")
        return f"{self.kind}({';'.join(lists)})" if lists else self.kind

    @classmethod
    def parse(cls, text: str) -> Layout:
        """
        Return the layout that prints as `text`; also ``whole`` for ``whole(0)``.

        Raises
        ------
        ParamError
            If it is none.
        """
        match = _WORD.fullmatch(text) if isinstance(text, str) else None
        if match is not None:
            kind, inside = match.groups()
            fields = [] if inside is None else inside.split(";")
            named = [fields.pop().removeprefix("ranks=")] if fields and fields[-1].startswith("ranks=") else []
            cyclic = Cyclic.parse(fields) if kind == "block_cyclic" else None
            if all(NUMBERS.fullmatch(field) for field in (*named, *(fields if cyclic is None else ()))):
                counts, ranks = [split(field) for field in fields if cyclic is None], split(named[0]) if named else None
                if cyclic is not None:
                    grid, source, grid_order = cyclic.grid, cyclic.source, cyclic.grid_order
                    made = cls.block_cyclic(*cyclic.block, grid, source=source, grid_order=grid_order, ranks=ranks)
                    return dataclasses.replace(made, cyclic=cyclic)
                if kind == "whole" and ranks is None and sum(map(len, counts)) <= 1:
                    return cls.whole(*(one[0] for one in counts))
                if kind == "blocks" and len(counts) == 2:
                    return cls.blocks(*counts, ranks=ranks)
                if kind in ("rows", "cols") and len(counts) <= 1:
                    return (cls.rows if kind == "rows" else cls.cols)(*counts, ranks=ranks)
                if kind == "replicated" and not counts:
                    return cls.replicated(ranks=ranks)
        raise ParamError(
            f"layout {shown(text)} is not known: write whole(0), rows, rows(3,4), cols, cols(3,4), blocks(3,4;5,6), "
            "block_cyclic(64,64;2,2) or replicated, with ranks as in rows(3,4;ranks=2,0) and cols(ranks=2,0)"
        )

    # -- who has what ------------------------------------------------------------------------

    @property
    def has_counts(self) -> bool:
        """Whether it says how much each part has of the extent that it cuts."""
        return self.row_counts is not None or self.col_counts is not None

    def check_memory(self, memory: Memory) -> None:
        """Raise ParamError if a matrix that is dealt so cannot be made in a memory."""
        if memory == "shared" and self.cyclic is not None:
            raise ParamError(
                f"memory = 'shared' with layout {self}: a shared segment has the matrix as a whole, and no rank's "
                "blocks one behind the other; use host or device memory"
            )

    def holders(self, num_ranks: int | None = None) -> Sequence[int]:
        """
        Return whose the parts are, one after another.

        Raises
        ------
        ParamError
            If the layout is not for so many ranks, or `num_ranks` is needed and None.
        """
        if num_ranks is not None and (num_ranks := count("num_ranks", num_ranks)) < 1:
            raise ParamError(f"num_ranks = {num_ranks}: pass a number of ranks from 1 on")
        if self.ranks is not None:
            if num_ranks is not None and max(self.ranks) >= num_ranks:
                raise ParamError(
                    f"layout {self} names rank {max(self.ranks)}, but there are ranks 0 to {num_ranks - 1} only: "
                    "name those that there are"
                )
            return self.ranks if self.cyclic is None else self.cyclic.row_by_row(self.ranks)
        if self.has_counts or self.cyclic:
            if num_ranks not in (None, self._num_counted):
                mend = "pass counts for all of them" if self.cyclic is None else "pass a grid of as many processes"
                raise ParamError(
                    f"layout {self} has {counted(self._num_counted, 'part')} for {counted(num_ranks or 0, 'rank')}: "
                    f"{mend}, or ranks= to say whose the parts are"
                )
            every = range(self._num_counted)
            return every if self.cyclic is None else self.cyclic.row_by_row(every)
        if num_ranks is None:
            raise ParamError(f"layout {self} does not say how many ranks there are: pass num_ranks=")
        return range(num_ranks)

    def local_shape(self, shape: tuple[int, int], rank: int, *, num_ranks: int | None = None) -> tuple[int, int]:
        """
        Return the rows and columns that a rank has. Local.

        Parameters
        ----------
        shape : (int, int)
            Of the matrix.
        rank : int
            Whose part.
        num_ranks : int, optional
            How many ranks there are; needed where neither counts nor `ranks` say it.
        """
        (top, bottom), (left, right) = self._rectangle(shape, rank, num_ranks)
        return bottom - top, right - left

    def indices(
        self, shape: tuple[int, int], rank: int, *, num_ranks: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """
        Return which rows and which columns of the matrix a rank has. Local.

        ``matrix[numpy.ix_(*layout.indices(matrix.shape, rank))]`` is its part.

        Parameters
        ----------
        shape, rank, num_ranks
            As of `local_shape`.

        Raises
        ------
        CapacityError
            If there is no memory for so many indices.
        """
        return indices_of(self._rectangle(shape, rank, num_ranks), self.orders(shape))

    def locate(
        self, shape: tuple[int, int], row: int, col: int, *, num_ranks: int | None = None
    ) -> tuple[int, int, int]:
        """
        Return the rank that has an element, and its row and column in that rank's part. Local.

        ScaLAPACK's INDXG2P and INDXG2L for both indices at once, counted from 0. Of a replicated matrix it is the first
        rank.

        Parameters
        ----------
        shape, num_ranks
            As of `local_shape`.
        row, col : int
            Of the matrix.

        Raises
        ------
        ParamError
            If the matrix has no such element, or as of `holders`.
        """
        shape, row, col = _pair("shape", shape), count("row", row), count("col", col)
        if not (0 <= row < shape[0] and 0 <= col < shape[1]):
            raise ParamError(f"a matrix of {shape[0]}x{shape[1]} has no row {row} with column {col}: both count from 0")
        down, along = (
            index if order is None else int(order.position(index))
            for index, order in zip((row, col), self.orders(shape), strict=True)
        )
        holders = self.holders(num_ranks)
        edges = self._edges(shape, len(holders))
        for number, rank in enumerate(holders):
            (top, bottom), (left, right) = self._cell(number, *edges)
            if top <= down < bottom and left <= along < right:
                return rank, down - top, along - left
        raise AssertionError("the parts cover the matrix")

    def orders(self, shape: tuple[int, int]) -> Orders:
        """Return in which order of rows and of columns a rank has a rectangle; None where it is theirs."""
        return (None, None) if self.cyclic is None else self.cyclic.orders(shape)

    def rectangles(self, shape: tuple[int, int], num_ranks: int) -> list[Rectangle]:
        """
        Return what each rank has, rank by rank; a rectangle without elements where it has nothing.

        It is one of positions in the orders of the matrix (`orders`), which mostly are indices.

        Raises
        ------
        ParamError
            If counts do not add up to the shape, or the layout is not for so many ranks.
        """
        holders = self.holders(num_ranks)
        rows, cols = self._edges(shape, len(holders))
        found = [self._cell(None, rows, cols)] * num_ranks
        for at, rank in enumerate(holders):
            found[rank] = self._cell(at, rows, cols)
        return found

    def filled(self, shape: tuple[int, int], num_ranks: int) -> Layout:
        """Return the layout with its counts, for a matrix of this shape."""
        if self.kind not in ("rows", "cols") or self.has_counts:
            return self
        rows, cols = self._edges(shape, len(self.holders(num_ranks)))
        counts = tuple(stop - start for start, stop in (rows if self.kind == "rows" else cols))
        return (Layout.rows if self.kind == "rows" else Layout.cols)(counts, ranks=self.ranks)

    def sliced(self, shape: tuple[int, int], rows: Extent, cols: Extent) -> Layout:
        """Return how some rows and columns of a matrix of this shape are dealt, if it is dealt so with counts."""
        if self.cyclic is not None:
            return dataclasses.replace(self, cyclic=self.cyclic.begun_at(rows[0], cols[0]))
        row_counts, col_counts = (
            given and tuple(max(0, min(stop, last) - max(start, first)) for start, stop in edges)
            for given, (first, last), edges in zip(
                (self.row_counts, self.col_counts), (rows, cols), self._edges(shape, 1), strict=True
            )
        )
        return dataclasses.replace(self, row_counts=row_counts, col_counts=col_counts)

    @property
    def transposed(self) -> Layout:
        """How the transposed matrix is dealt."""
        if self.cyclic is not None:
            return dataclasses.replace(self, cyclic=self.cyclic.transposed)
        kind: Kind = "cols" if self.kind == "rows" else "rows" if self.kind == "cols" else self.kind
        ranks, height, width = self.ranks, len(self.row_counts or (0,)), len(self.col_counts or (0,))
        if kind == "blocks":
            given = ranks or range(height * width)
            ranks = tuple(given[row * width + col] for col in range(width) for row in range(height))
        return Layout(kind, self.col_counts, self.row_counts, ranks)

    def bind(self, shape: tuple[int, int], arrays: Sequence[LocalArray | None]) -> BoundLayout:
        """
        Return which part of a matrix lies where.

        Parameters
        ----------
        shape : (int, int)
            Of the matrix.
        arrays : sequence of LocalArray or None
            How each rank's array is stored; None only for those that have nothing.

        Raises
        ------
        ParamError
            If counts do not add up to the shape, or the layout is not for so many ranks.
        """
        parts = tuple(
            Part(rows, cols, array.location, array.order, array.ld)
            for (rows, cols), array in zip(self.rectangles(shape, len(arrays)), arrays, strict=True)
            if rows[0] < rows[1] and cols[0] < cols[1] and array is not None
        )
        return BoundLayout(shape, parts, str(self), self.orders(shape))

    @property
    def _num_counted(self) -> int:
        """How many parts there are, where counts or a grid say it."""
        if self.cyclic is not None:
            return self.cyclic.grid[0] * self.cyclic.grid[1]
        return len(self.row_counts or (0,)) * len(self.col_counts or (0,))

    def _edges(self, shape: tuple[int, int], num_holders: int) -> tuple[list[Extent], list[Extent]]:
        """Return where the parts begin and end, along rows and along columns."""
        extents = _numbers("shape", shape)
        if len(extents) != 2:
            raise ParamError(f"shape = {shown(shape)}: pass the numbers of rows and columns")
        if self.cyclic is not None:
            rows, cols = (_edges_of(order.counts) for order in self.cyclic.every_order((extents[0], extents[1])))
            return rows, cols
        return (
            self._cut("rows", extents[0], self.row_counts, num_holders if self.kind == "rows" else 1),
            self._cut("columns", extents[1], self.col_counts, num_holders if self.kind == "cols" else 1),
        )

    def _cut(self, what: str, extent: int, counts: tuple[int, ...] | None, num_cells: int) -> list[Extent]:
        if counts is None:
            counts = even_counts(extent, num_cells)
        elif sum(counts) != extent:
            raise ParamError(
                f"layout {self} has {sum(counts)} {what}, the matrix {extent}: pass counts that add up to it"
            )
        return _edges_of(counts)

    def _cell(self, at: int | None, rows: list[Extent], cols: list[Extent]) -> Rectangle:
        """Return what the holder of a number has, or None of them."""
        if at is None:
            return rows[0] if self.kind == "cols" else (0, 0), cols[0] if self.kind == "rows" else (0, 0)
        if self.kind == "replicated":
            return rows[0], cols[0]
        row, col = divmod(at, len(cols))
        return rows[row], cols[col]

    def _rectangle(self, shape: tuple[int, int], rank: int, num_ranks: int | None) -> Rectangle:
        rank = count("rank", rank)
        holders = self.holders(num_ranks)
        rows, cols = self._edges(shape, len(holders))
        known = num_ranks if num_ranks is not None else len(holders) if self.ranks is None else max(rank, 0) + 1
        if not 0 <= rank < known:
            grid = f", whose grid is for {counted(known, 'rank')}" if self.cyclic and num_ranks is None else ""
            raise ParamError(f"rank = {rank} is none of the ranks 0 to {known - 1} of layout {self}{grid}")
        return self._cell(holders.index(rank) if rank in holders else None, rows, cols)


def even_counts(extent: int, num_parts: int) -> tuple[int, ...]:
    """Return parts of an extent that are as equal as can be, as `numpy.array_split` cuts it."""
    each, more = divmod(extent, num_parts)
    return (each + 1,) * more + (each,) * (num_parts - more)


def _edges_of(counts: Sequence[int]) -> list[Extent]:
    return list(itertools.pairwise(itertools.accumulate(counts, initial=0)))


def _optional(name: str, values: object) -> tuple[int, ...] | None:
    return None if values is None else _numbers(name, values)


def _numbers(name: str, values: object) -> tuple[int, ...]:
    numbers = tuple(count(f"a number of {name}", value) for value in items(name, values))
    if not numbers or min(numbers) < 0:
        raise ParamError(f"{name} = {shown(values)}: pass one whole number from 0 on, or several")
    return numbers


def _pair(name: str, values: object) -> tuple[int, int]:
    numbers = _numbers(name, values)
    if len(numbers) != 2:
        raise ParamError(f"{name} = {shown(values)}: pass two whole numbers, of rows and of columns")
    return numbers[0], numbers[1]
