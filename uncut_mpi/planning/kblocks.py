"""
Few large products: each rank's block of C is updated one k-block at a time.

Where `uncut` multiplies tiles, a rank here multiplies all its rows by all its columns (or a block of
them) over a stretch of k, in the order of `uncut_mpi.planning.blocking`. With `splits` > 1 the ranks of a
process grid rows × cols × splits share k too (2.5D and 3D algorithms), and their partial sums are added up.

* **A and B.** What several ranks need leaves its origin once: each takes a slice (whole stored columns)
  and hands it to the others, so that ports and host links carry every byte once; or, between devices, one takes the
  whole piece (`delivery`; where devices serve their copies one after another always). A rank that holds the matrix
  itself reads it in place, unless it copies it so that its products are aligned (`uncut_mpi.planning.alignment`;
  then a k that is no multiple of 16 bytes has a product for the rest, too).
* **C** is handed on per block. Combined *at its owner* (`combine` = ``"owner"``, for a C on a device) the
  products travel and C does not; combined *where it is computed* (``"worker"``) C is fetched, into the products'
  place before the first of them where the order has it there in time, else beside them. Or the last few column blocks
  (`away`) are combined where they are computed and the others at the owner, whose device would be the last to end with
  all of its own products and everybody's sums. Partial sums of a k
  split are added by the owner, or each worker adds up a slice of the columns. Half types sum in float32 and are
  rounded once. *Directly*, without a sum apart, a block is formed whose C is at home or there before its products; with
  half types also all of its k has to be in one product, which sums in float32 and rounds once.
* **A rank that has A and B**, and uses both as they lie, multiplies all of k at once, whatever blocks the others take,
  and begins when the first fetch, for which all others wait, is issued: one product where C is at home too (in place),
  else one per column block; but where its blocks are formed directly it takes them as the others do.

Who issues a copy: whoever's private host memory it touches; between shared host memory and a device, the
device; between devices, the source (push). One lane per (issuing rank, source, destination), between devices
another for results, which await products; products are on compute lanes 0 and 3 in turn, where
two may have begun (`lanes`), and COMBINE on lanes 1 and 2. Where a device
serves its copies one after another (`Machine.serial_copies`) it has one lane for fetches and one for results to all
other devices; a piece that several ranks need goes from its device to one of them whole, before those that one rank
needs, and to one that has most of these, so that what is handed on meets none of them at a port; of equals to the one
that has least to send in all. By list scheduling (`delivery` = ``"earliest"``) that decides only between copies that
could begin at one time.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import operator
from collections import Counter
from collections.abc import Sequence
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import CapacityError, ParamError, PlanError
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Location, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.alignment import Alignment, choose_alignment, elements_aligned
from uncut_mpi.planning.blocking import (
    DirectBlocks,
    Move,
    Step,
    Steps,
    block_edges,
    count_blocks,
    forms_sums,
    moves,
)
from uncut_mpi.planning.grid import ProcessGrid, block_starts
from uncut_mpi.planning.layout import Layout
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.partition import Partition
from uncut_mpi.planning.schedule import Matrix, Role, Schedule, native_tables
from uncut_mpi.planning.tiles import MAX_TASKS

MIN_SLICE_BYTES: Final = 128 * 1024
"""Smallest slice of a fetch shared by several ranks: below it a copy's fixed cost outweighs what it moves."""

MOST_IN_A_ROW: Final = 32
"""Ranks of a grid row, where nobody asks for a grid and all is in host memory."""

_ALIGNED: Final = Alignment()

MOST_SUMMANDS: Final = 8
"""Regions that one COMBINE reads at most."""


def schedule(
    problem: GemmProblem,
    placement: Placement,
    num_ranks: int,
    machine: Machine,
    options: ScheduleOptions,
    *,
    most_tasks: int = MAX_TASKS,
) -> tuple[Schedule, ScheduleOptions]:
    """
    Return the schedule for a problem that has a product, and the options with everything set.

    Pure and deterministic.

    Parameters
    ----------
    problem, placement, num_ranks, machine
        As for `uncut_mpi.planning.planner.plan`.
    options : ScheduleOptions
        Grid, devices, shares and `blocking` are taken from it; what it leaves open `choose` decides.

    Raises
    ------
    ParamError
        If grid, devices, shares or machine do not fit the ranks.
    PlanError
        If there is no product: C is only scaled; or if there would surely be more than `most_tasks` tasks.
    CapacityError
        If a rank has too little device memory for its panels.
    """
    placement.check_ranks(num_ranks)
    machine.check_ranks(num_ranks)
    if not problem.has_product:
        raise PlanError("kblocks schedules products; C is only scaled here")
    try:
        plan = _Plan(problem, placement, machine, options, most_tasks)
    except CapacityError:
        plan = _Plan(problem, placement, machine, options, most_tasks, aligns=False)  # with fewer panels, if it fits so
    made = Schedule(
        num_ranks=num_ranks,
        problem=problem,
        placement=placement,
        scheduler="kblocks",
        grid=plan.partition.shape,
        splits=len(plan.inner),
        tile=0,
        buffers=plan.layout.table(),
        **native_tables(*plan.tables()),
    )
    grid = made.grid if options.areas is None else None
    return made, dataclasses.replace(options, grid=grid, blocking=plan.how)


def choose(problem: GemmProblem, placement: Placement, num_workers: int, options: ScheduleOptions) -> Blocking:
    """
    Return `options.blocking` with everything set: what it leaves open follows simple rules.

    k is split over all ranks where it is at least eight times the larger of m and n (and nobody asked for a
    grid or shares). k-blocks grow twofold from 256 to 2048, with half types, whose products read and write C in
    float32, to 8192. A C in host memory is handed on in the order ``"columns"``, any other in the order ``"k"``. In the
    order ``"corner"`` there are as many row blocks as column blocks. Two products may have begun.
    """
    asked = options.blocking
    on_host = placement.c.space == "host"
    splits = asked.splits
    if not splits:
        thin = problem.k >= 8 * max(problem.m, problem.n)
        free = (options.grid, options.row_shares, options.col_shares, options.areas) == (None,) * 4
        splits = num_workers if thin and free else 1
    largest = 8192 if problem.dtype.is_half else 2048
    block = asked.block or max(asked.first, largest)
    order = asked.order or ("corner" if asked.rows > 1 else "columns" if on_host else "k")
    columns = asked.columns or 4
    return Blocking(
        splits=splits,
        first=asked.first or min(256, block),
        block=block,
        growth=asked.growth or 2,
        columns=columns,
        rows=asked.rows or (columns if order == "corner" else 1),
        order=order,
        lanes=asked.lanes or 2,
        delivery=asked.delivery or "balanced",
        combine=asked.combine or "owner",
        away=asked.away,
    )


def choose_grid(placement: Placement, num_places: int, options: ScheduleOptions) -> ProcessGrid:
    """
    Return the process grid asked for; else one row of ranks if all is in host memory, else the most square one.

    With one grid row every copy from and to the host is of whole columns, which move faster than rows far apart. But
    the ranks of a row hand slices of A to each other, copies by the square of their number, and all of A has to enter
    every rank: of more than `MOST_IN_A_ROW` ranks there are as few rows as leave no more in a row, if that is possible
    with no more rows than columns.
    Where shares are given without a grid it is the most square one, which they have to fit.
    """
    on_host = all(location.space == "host" for location in (placement.a, placement.b, placement.c))
    if options.grid is None and options.row_shares is None and options.col_shares is None and on_host:
        square = ProcessGrid.most_square(num_places)
        rows = [rows for rows in range(1, square.rows + 1) if num_places % rows == 0]
        return next(
            (ProcessGrid(count, num_places // count) for count in rows if num_places // count <= MOST_IN_A_ROW), square
        )
    return ProcessGrid.choose(num_places, options.grid)


def _partition(problem: GemmProblem, placement: Placement, num_places: int, options: ScheduleOptions) -> Partition:
    if options.areas is None:
        grid = choose_grid(placement, num_places, options)
        shares = (None if one is None else tuple(one) for one in (options.row_shares, options.col_shares))
        return _on_grid(problem, grid, *shares)
    named = sum(map(len, options.areas))
    if named != num_places:
        parts = f" each of the {options.blocking.splits} parts of k" if options.blocking.splits > 1 else ""
        raise ParamError(f"areas names {named} ranks, {num_places} compute{parts}: name an area for each")
    return _in_areas(problem, tuple(map(tuple, options.areas)))


# A search asks for the same ones with many blockings.
_on_grid = functools.lru_cache(maxsize=128)(Partition.of_grid)
_in_areas = functools.lru_cache(maxsize=128)(Partition.of_areas)


@dataclasses.dataclass(frozen=True, slots=True)
class _Worker:
    """A rank that computes: its part of the product, and its panels of A, B and C (−1: the caller's matrix)."""

    rank: int
    rows: range
    cols: range
    inner: range  # of k
    heights: tuple[int, ...]  # where its row blocks start, from its first row, and their end
    starts: tuple[int, ...]  # of its column blocks, from its first column
    panels: tuple[int, int, int]
    direct: tuple[int, int]  # the panel of C where blocks are formed directly, and which of the columns is its first
    is_direct: bool  # whether blocks that can be are
    k_step: int  # as `Alignment.k_step`


@dataclasses.dataclass(frozen=True, slots=True)
class _Adder:
    """A rank that adds up columns of a block of C and hands them on."""

    rank: int
    firsts: list[int]  # per column block
    lasts: list[int]
    places: list[int]  # where they begin in its buffers, per column block
    partial: list[int]  # buffer for what each member brings, −1 for itself
    staging: int  # buffer for C itself, −1 if it needs none


class _Plan:
    """Who computes what, where it lies, and what to do in which order; the tasks are made natively."""

    def __init__(
        self,
        problem: GemmProblem,
        placement: Placement,
        machine: Machine,
        options: ScheduleOptions,
        most_tasks: int,
        *,
        aligns: bool = True,
    ) -> None:
        devices = options.computing_ranks(machine.num_ranks)
        how = choose(problem, placement, len(devices), options)
        if how.splits > len(devices):
            raise ParamError(f"k shall be split {how.splits} times, but {len(devices)} ranks compute: use more ranks")
        self._problem, self._placement, self._machine, self.how = problem, placement, machine, how
        self._step = elements_aligned(problem)  # where column blocks start in a transposed B too
        self._aligns = aligns
        locations = (placement.a, placement.b, placement.c)
        self._homes = [location.rank if location.space == "device" else None for location in locations]
        self._num_blocks = count_blocks(how.columns)
        self._first_away = max(0, self._num_blocks - how.away)  # first column block combined where it is computed
        self._at_owner = how.combine == "owner" and placement.c.space == "device" and self._first_away > 0
        self.partition = _partition(problem, placement, len(devices) // how.splits, options)
        self._on_grid = options.areas is None
        self.layout = Layout(machine.num_ranks, problem, placement)
        parts = itertools.pairwise(block_starts(problem.k, how.splits))
        self.inner = [range(start, stop) for start, stop in parts if stop > start]
        self._moves = self._make_moves()
        self._check_size(most_tasks)
        self._combines = forms_sums(problem, len(self.inner))
        # What is formed without sums apart, by whether C is there. (Where it is, types that are no halves need no say.)
        whole, half = len(self.inner) == 1, problem.dtype.is_half
        first = (self._first_away if self._at_owner else 0) if whole else self._num_blocks
        self._direct: list[dict[bool, DirectBlocks]] = []  # of each part of k
        for steps in self._moves:
            away = steps.direct(half=half, reads_c=problem.reads_c or not whole, first=first)
            none = steps.direct(half=half, reads_c=True, first=self._num_blocks)
            self._direct.append({False: away, True: steps.direct_at_home if half and whole else none})
        self._even = self._is_even()
        # By place; a block without rows or columns is left out.
        self._members: dict[int, list[_Worker]] = {}
        places = len(self.partition.blocks)
        for place, (rows, cols) in enumerate(self.partition.blocks):
            if rows and cols:
                ranks = [devices[split * places + place] for split in range(len(self.inner))]
                self._members[place] = [
                    self._worker(rank, rows, cols, inner) for rank, inner in zip(ranks, self.inner, strict=True)
                ]
        self._adders = {place: self._make_adders(members) for place, members in self._members.items()}
        self.layout.check_capacity(machine)

    def tables(self) -> tuple[np.ndarray, ...]:
        """Return tasks, operands, regions, awaits and lanes as bytes."""
        problem, how, given = self._problem, self.how, _native.KBlocksInput()
        given.row_starts = list(self.partition.bands)
        given.rows, given.cols = len(self.partition.places), self.partition.shape[1]
        number = {place: at for at, place in enumerate(self._members)} | {-1: -1}
        given.block_of = [number[place] for band in self.partition.places for place in band]
        given.trans_a, given.trans_b = problem.trans_a == "T", problem.trans_b == "T"
        given.reads_c, given.half, given.combines = problem.reads_c, problem.dtype.is_half, self._combines
        given.serial_copies = self._machine.serial_copies
        given.earliest = how.delivery == "earliest"
        given.itemsize, given.min_slice_bytes = problem.dtype.itemsize, MIN_SLICE_BYTES
        given.first_block, given.most_summands, given.product_lanes = how.first, MOST_SUMMANDS, how.lanes
        for matrix in (Matrix.A, Matrix.B, Matrix.C):
            location = self._location(matrix)
            given.set_origin(matrix, location.space == "host", -1 if location.rank is None else location.rank)
        for place, members in self._members.items():
            given.add_block()
            for one in members:
                rows, cols, inner = ((part.start, part.stop) for part in (one.rows, one.cols, one.inner))
                panels, left = (*one.panels, one.direct[0]), one.direct[1]
                given.add_worker(
                    one.rank, rows, cols, inner, one.heights, one.starts, panels, left, one.is_direct, one.k_step
                )
            for adder in self._adders[place]:
                given.add_adder(adder.rank, adder.firsts, adder.lasts, adder.places, adder.partial, adder.staging)
        for steps, direct in zip(self._moves, self._direct, strict=True):
            given.add_moves(steps.table, direct[False].marks, direct[True].marks)
        return _native.schedule_kblocks(given)

    def _is_even(self) -> bool:
        """Return whether all that products begin and end at is a multiple of what they are aligned to."""
        problem, step = self._problem, self._step
        extents = [problem.m, problem.n, problem.k, problem.lda, problem.ldb, problem.ldc, *self.partition.bands]
        extents += [cols.start for _, cols in self.partition.blocks] + [inner.start for inner in self.inner]
        return not any(extent % step for extent in extents)

    def _make_moves(self) -> list[Steps]:
        """Return the steps of each part of k."""
        how = self.how
        # Stored transposed, the rows of k-blocks are whole columns.
        whole = self._placement.b.space == "host" and self._problem.trans_b == "N"
        made = {
            extent: moves(
                extent,
                first=how.first,
                most=how.block,
                blocks=how.columns,
                order=how.order,
                whole=whole,
                growth=how.growth,
                rows=how.rows,
            )
            for extent in {len(inner) for inner in self.inner}
        }
        return [made[len(inner)] for inner in self.inner]

    def _check_size(self, most_tasks: int) -> None:
        """Refuse what surely has too many tasks before any of it is made."""
        rows, cols, splits = len(self.partition.places), self.partition.shape[1], len(self.inner)
        if sum(map(len, self._moves)) * rows * cols * (rows + cols + splits) <= most_tasks:
            return  # far from it: counting takes as long as making few
        tasks = self._least_tasks()
        if tasks > most_tasks:
            problem, (height, width) = self._problem, self.partition.shape
            raise PlanError(
                f"kblocks on {height}x{width} ranks, k split {splits} times, makes at least {tasks} tasks of "
                f"{problem.m}×{problem.n}×{problem.k}, the limit is {most_tasks}: ask for larger k-blocks, another "
                "grid or fewer ranks"
            )

    def _least_tasks(self) -> int:
        """Return how many tasks there are at least: the copies of A and B, products, and partial sums to add up."""
        problem, step = self._problem, self._step
        partition = self.partition
        # How many bands of a height are computed by so many ranks, columns of a width by so many.
        bands = Counter(
            (stop - start, sum(place >= 0 for place in band))
            for (start, stop), band in zip(itertools.pairwise(partition.bands), partition.places, strict=True)
        )
        in_column = Counter((cols.start, len(cols)) for rows, cols in partition.blocks if rows and cols)
        columns = Counter((width, ranks) for (_, width), ranks in in_column.items())
        # The owner of a matrix fetches none of it, and may multiply all of k at once.
        home = {name: getattr(self._placement, name).space == "device" for name in "abc"}
        starts_of = {width: block_edges(width, self.how.columns, step) for width, _ in columns}
        # Where ranks beside each other are cut at other rows a band may have rows of some row blocks alone.
        heights = {height: block_edges(height, self.how.rows, step) for height, _ in bands} if self._on_grid else {}
        shortest = min((len(rows) for rows, cols in partition.blocks if rows and cols), default=0)
        edges = block_edges(shortest, self.how.rows, step)
        tasks = 0
        for move, splits in Counter(move for steps in self._moves for move in steps).items():
            inner = move.k_stop - move.k_start
            if move.step == Step.FETCH_A:
                for (height, ranks), groups in bands.items() if self._on_grid or self.how.rows == 1 else ():
                    part = heights[height][move.bottom] - heights[height][move.top] if heights else height
                    stored = inner if problem.trans_a == "N" else part
                    copies = self._copies_of_piece(Matrix.A, ranks - home["a"], stored, part * inner)
                    tasks += splits * groups * copies
            elif move.step == Step.FETCH_B:
                for (width, ranks), groups in columns.items():
                    across = starts_of[width][move.last] - starts_of[width][move.first]
                    stored = across if problem.trans_b == "N" else inner
                    copies = self._copies_of_piece(Matrix.B, ranks - home["b"], stored, across * inner)
                    tasks += splits * groups * copies
            elif move.step == Step.MULTIPLY and edges[move.bottom] > edges[move.top]:
                blocks = sum(
                    ranks * groups
                    for (width, ranks), groups in columns.items()
                    if self._has_columns(starts_of[width], move)
                )
                tasks += splits * max(0, blocks - (home["a"] and home["b"]))
        adders = 1 if self._at_owner else len(self.inner)
        for (width, ranks), groups in columns.items():
            sums = sum(min(adders, stop - start) for start, stop in itertools.pairwise(starts_of[width]))
            tasks += ranks * groups * sums * (len(self.inner) - 1)
        return tasks

    @staticmethod
    def _has_columns(starts: Sequence[int], move: Move) -> bool:
        return starts[move.last] > starts[move.first]

    def _copies_of_piece(self, matrix: Matrix, takers: int, columns: int, elements: int) -> int:
        """Return how many copies bring a piece of A or B to all that take it, as the tasks are made."""
        if takers <= 0 or elements == 0:
            return 0
        whole = self._machine.serial_copies or self.how.delivery == "earliest"
        if whole and self._location(matrix).space == "device":
            return takers
        slices = elements * self._problem.dtype.itemsize // MIN_SLICE_BYTES
        return takers * max(1, min(takers, columns, slices))

    def _at_home(self, matrix: Matrix, rank: int) -> bool:
        return self._homes[matrix] == rank

    def _location(self, matrix: Matrix) -> Location:
        return (self._placement.a, self._placement.b, self._placement.c)[matrix]

    def _worker(self, rank: int, rows: range, cols: range, inner: range) -> _Worker:
        problem = self._problem
        half = problem.dtype.is_half
        alignment = self._alignment(rank, rows, cols, inner)
        copied = alignment.copied
        c_is_here = self._at_home(Matrix.C, rank)
        heights = block_edges(len(rows), self.how.rows, self._step)
        starts = block_edges(len(cols), self.how.columns, self._step)

        def panel(matrix: Matrix, shape: tuple[int, int], *, turned: bool, needed: bool) -> int:
            if not needed and self._at_home(matrix, rank):
                return -1
            return self.layout.add(rank, shape[::-1] if turned else shape, problem.dtype, matrix, Role.PANEL)

        # One product of all k, which is rounded once.
        resident = self._at_home(Matrix.A, rank) and self._at_home(Matrix.B, rank) and not copied
        once = len(inner) % alignment.k_step == 0
        in_place = c_is_here and len(self.inner) == 1 and not alignment.apart and (not half or (resident and once))
        blocks = self._direct[0][c_is_here]
        is_direct = bool(blocks.blocks) and not alignment.apart and (once or not half)
        panels = (
            panel(Matrix.A, (len(rows), len(inner)), turned=problem.trans_a == "T", needed=Matrix.A in copied),
            panel(Matrix.B, (len(inner), len(cols)), turned=problem.trans_b == "T", needed=Matrix.B in copied),
        )
        apart, direct, left = -1, -1, 0
        if not in_place:
            height, width = len(rows), len(cols)
            if half and is_direct:
                down, along = blocks.apart
                height, width = heights[down], starts[along]
                left = starts[blocks.first]
                if not c_is_here and left < len(cols):
                    direct = self.layout.add(rank, (len(rows), len(cols) - left), problem.dtype, Matrix.C, Role.PANEL)
            if height and width:
                apart = self.layout.add(rank, (height, width), problem.dtype.accumulator, Matrix.C, Role.PANEL)
            if not half:
                direct = apart
        panel_of_c = (direct, left)
        return _Worker(
            rank, rows, cols, inner, heights, starts, (*panels, apart), panel_of_c, is_direct, alignment.k_step
        )

    def _alignment(self, rank: int, rows: range, cols: range, inner: range) -> Alignment:
        """Return what this rank does about columns that are not aligned."""
        if self._even or not self._aligns:
            return _ALIGNED
        homes = [matrix for matrix in (Matrix.A, Matrix.B, Matrix.C) if self._at_home(matrix, rank)]
        steps = self._moves[self.inner.index(inner)]
        part = (rows, cols, inner)
        return choose_alignment(self._problem, self._machine, rank, part, homes, steps, may_sum_apart=self._combines)

    def _make_adders(self, members: list[_Worker]) -> list[_Adder]:
        """Return who adds up which columns: the owner of C, or each member a slice of every column block; or both."""
        workers, every = [member.rank for member in members], range(self._num_blocks)
        if not self._at_owner:
            return self._adders_of(members, workers, every)
        owner = self._placement.c.rank
        assert owner is not None  # a device location always names its rank
        adders = self._adders_of(members, [owner], every[: self._first_away])
        return adders + (self._adders_of(members, workers, every[self._first_away :]) if self.how.away else [])

    def _adders_of(self, members: list[_Worker], ranks: list[int], blocks: range) -> list[_Adder]:
        """Return an adder for each rank: of some column blocks each has a part of the columns, of the others none."""
        problem, one = self._problem, members[0]
        first = one.cols.start
        adders = []
        for part, rank in enumerate(ranks):
            firsts = [first + start for start in one.starts]
            lasts = firsts[1:]
            del firsts[-1]
            if len(ranks) == 1 and len(blocks) == self._num_blocks:
                places = [*one.starts]
            else:
                for at, (start, stop) in enumerate(zip(firsts, lasts, strict=True)):
                    if at not in blocks:
                        lasts[at] = start
                    elif len(ranks) > 1:
                        cuts = block_starts(stop - start, len(ranks))
                        firsts[at], lasts[at] = start + cuts[part], start + cuts[part + 1]
                widths = map(operator.sub, lasts, firsts)
                places = list(itertools.accumulate(widths, initial=0))
            partial, staging = [-1] * len(members), -1
            # Of what is formed directly there are no sums.
            down, along = len(one.heights) - 1, self._num_blocks
            if one.is_direct:
                down, along = self._direct[0][self._at_home(Matrix.C, one.rank)].apart
            height, width = one.heights[down], places[along]
            if self._combines and height and width:
                wide = problem.dtype.accumulator
                for number, member in enumerate(members):
                    if member.rank != rank:
                        partial[number] = self.layout.add(rank, (height, width), wide, Matrix.C, Role.STAGING)
                beside = problem.reads_c or problem.dtype.is_half
                if beside and not self._at_home(Matrix.C, rank):
                    staging = self.layout.add(rank, (height, width), problem.dtype, Matrix.C, Role.STAGING)
            adders.append(_Adder(rank, firsts, lasts, places, partial, staging))
        return adders
