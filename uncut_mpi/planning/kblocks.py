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
import itertools
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import CapacityError, ParamError, PlanError
from uncut_mpi.model.locations import location_table
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Location, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.alignment import Alignment, choose_alignment, elements_aligned
from uncut_mpi.planning.blocking import (
    COLUMN_TAIL_PARTS,
    HALVINGS,
    Move,
    Step,
    Steps,
    block_edges,
    blocking_of,
    count_blocks,
    count_k_blocks,
    forms_sums,
    moves,
)
from uncut_mpi.planning.grid import ProcessGrid, block_starts
from uncut_mpi.planning.layout import BUFFER_ALIGNMENT, COLUMN_ALIGNMENT, check_capacity, room_for_panels, user_table
from uncut_mpi.planning.limits import FEW_TASKS, MAX_STEPS, MAX_TASKS, too_many
from uncut_mpi.planning.options import ORDERS_BY_K, Blocking, ScheduleOptions, changed
from uncut_mpi.planning.partition import Partition
from uncut_mpi.planning.schedule import BUFFER_DTYPE, Matrix, Schedule, native_tables

MIN_SLICE_BYTES: Final = 128 * 1024
"""Smallest slice of a fetch shared by several ranks: below it a copy's fixed cost outweighs what it moves."""

MOST_IN_A_ROW: Final = 32
"""Ranks of a grid row, where nobody asks for a grid and all is in host memory."""

MOST_K_BLOCKS: Final = 1024
"""Into how many k-blocks a rank's part of k is cut where nobody asks: of a longer k they are longer."""

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
    planner = Planner(problem, placement, num_ranks, machine)
    made = planner.prepare(options, most_tasks=most_tasks)
    try:
        return made.schedule(), made.options
    except CapacityError:  # with fewer panels, if it fits so
        made = planner.prepare(options, most_tasks=most_tasks, aligns=False)
        return made.schedule(), made.options


def choose(problem: GemmProblem, placement: Placement, num_workers: int, options: ScheduleOptions) -> Blocking:
    """
    Return `options.blocking` with everything set: what it leaves open follows simple rules.

    k is split over all ranks where it is at least eight times the larger of m and n (and nobody asked for a
    grid or shares). k-blocks grow twofold from 256 to 2048, with half types, whose products read and write C in
    float32, to 8192, or to longer ones of which there are `MOST_K_BLOCKS`. A C in host memory is handed on in the order
    ``"columns"``, any other, or where `Blocking.tail` is given, in the order ``"k"``. In the order ``"corner"`` there
    are as many row blocks as column blocks. Blocks begin at multiples of 16 bytes. Two products may have begun.
    """
    asked = options.blocking
    if asked.is_complete:
        return asked
    on_host = placement.c.space == "host"
    splits = asked.splits
    if not splits:
        thin = problem.k >= 8 * max(problem.m, problem.n)
        free = (options.grid, options.row_shares, options.col_shares, options.areas) == (None,) * 4
        splits = num_workers if thin and free else 1
    largest = 8192 if problem.dtype.is_half else 2048
    block = asked.block or max(asked.first, largest, -(-problem.k // (splits * MOST_K_BLOCKS)))
    order = asked.order or ("corner" if asked.rows > 1 else "columns" if on_host and not asked.tail else "k")
    columns = asked.columns or 4
    return Blocking(
        splits=splits,
        first=asked.first or min(256, block),
        block=block,
        growth=asked.growth or 2,
        columns=columns,
        rows=asked.rows or (columns if order == "corner" else 1),
        multiple=asked.multiple or 1,
        order=order,
        lanes=asked.lanes or 2,
        delivery=asked.delivery or "balanced",
        combine=asked.combine or "owner",
        away=asked.away,
        tail=asked.tail,
    )


def choose_grid(
    placement: Placement, num_places: int, options: ScheduleOptions, *, transposed: bool = False
) -> ProcessGrid:
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
        square = ProcessGrid.most_square(num_places, transposed=transposed)
        rows = [rows for rows in range(1, square.rows + 1) if num_places % rows == 0]
        return next(
            (
                ProcessGrid(count, num_places // count, transposed)
                for count in rows
                if num_places // count <= MOST_IN_A_ROW
            ),
            square,
        )
    return ProcessGrid.choose(num_places, options.grid, transposed=transposed)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Cut:
    """
    How C is cut among ranks.

    Attributes
    ----------
    partition : Partition
        Its blocks and bands.
    places : KBlocksPlaces
        The same for the core.
    is_even : bool
        Whether all extents of the problem, and where blocks start, are multiples of what products are aligned to.
    """

    partition: Partition
    places: _native.KBlocksPlaces
    is_even: bool

    @classmethod
    def of(cls, problem: GemmProblem, partition: Partition) -> _Cut:
        places = _native.KBlocksPlaces(partition.bands, partition.places)
        for rows, cols in partition.blocks:
            places.add((rows.start, rows.stop), (cols.start, cols.stop))
        extents = [problem.m, problem.n, problem.k, problem.lda, problem.ldb, problem.ldc, *partition.bands]
        extents += [cols.start for _, cols in partition.blocks]
        step = elements_aligned(problem)
        return cls(partition, places, not any(extent % step for extent in extents))


class Planner:
    """
    Prepares schedules of one problem, which have much in common; a search asks for hundreds.

    Parameters
    ----------
    problem, placement, num_ranks, machine
        As for `schedule`.

    Attributes
    ----------
    aligns : bool
        Whether ranks may take panels for what they hold: on machines whose products are slower without.

    Raises
    ------
    ParamError, PlanError
        What `schedule` raises whatever the options.
    """

    def __init__(self, problem: GemmProblem, placement: Placement, num_ranks: int, machine: Machine) -> None:
        placement.check_ranks(num_ranks)
        machine.check_ranks(num_ranks)
        if not problem.has_product:
            raise PlanError("kblocks schedules products; C is only scaled here")
        self.problem, self.placement, self.machine = problem, placement, machine
        self.room = room_for_panels(num_ranks, problem, placement, machine)
        self.given = self._common_input()
        shape = machine.gemm_shape.get(problem.dtype.name)
        self.aligns = shape is not None and shape.misaligned > 0
        # Whether k-blocks of B are rows far apart in host memory; stored transposed they are whole columns.
        self.whole = placement.b.space == "host" and problem.trans_b == "N"
        self._cuts: dict[tuple[object, ...], _Cut] = {}

    def prepare(self, options: ScheduleOptions, *, most_tasks: int = MAX_TASKS, aligns: bool = True) -> Prepared:
        """
        Return what `schedule` makes a schedule of, so that it can be made elsewhere, or not at all.

        Pure and deterministic. Errors are those of `schedule`, but for CapacityError.

        Parameters
        ----------
        options, most_tasks
            As for `schedule`.
        aligns : bool, optional
            Whether ranks may take panels for what they hold, so that their products are aligned.
        """
        return Prepared(self, options, most_tasks, aligns=aligns and self.aligns)

    def cut(self, num_places: int, options: ScheduleOptions) -> _Cut:
        """Return how C is cut among so many ranks."""
        key = (num_places, options.grid, options.row_shares, options.col_shares, options.areas)
        found = self._cuts.get(key)
        if found is None:
            found = self._cuts[key] = _Cut.of(self.problem, self._partition(num_places, options))
        return found

    def _partition(self, num_places: int, options: ScheduleOptions) -> Partition:
        if options.areas is None:
            grid = choose_grid(self.placement, num_places, options, transposed=self.problem.swapped)
            return Partition.of_grid(self.problem, grid, options.row_shares, options.col_shares)
        named = sum(map(len, options.areas))
        if named != num_places:
            parts = f" each of the {options.blocking.splits} parts of k" if options.blocking.splits > 1 else ""
            raise ParamError(f"areas names {named} ranks, {num_places} compute{parts}: name an area for each")
        return Partition.of_areas(self.problem, options.areas)

    def _common_input(self) -> _native.KBlocksInput:
        """Return what the tasks of all schedules are made of."""
        problem, placement, machine = self.problem, self.placement, self.machine
        given, dtype = _native.KBlocksInput(), problem.dtype
        given.num_ranks, given.serial_copies = machine.num_ranks, machine.serial_copies
        given.trans_a, given.trans_b = problem.trans_a == "T", problem.trans_b == "T"
        given.reads_c, given.half = problem.reads_c, dtype.is_half
        given.dtype, given.accumulator = dtype, dtype.accumulator
        given.itemsize, given.accumulator_itemsize = dtype.itemsize, dtype.accumulator.itemsize
        given.most_summands, given.min_slice_bytes = MOST_SUMMANDS, MIN_SLICE_BYTES
        given.halvings, given.step = HALVINGS, elements_aligned(problem)  # a transposed B is aligned along n
        given.buffer_alignment, given.column_alignment = BUFFER_ALIGNMENT, COLUMN_ALIGNMENT
        given.most_tasks = MAX_TASKS
        given.set_buffers(user_table(given.num_ranks, problem, placement))
        for matrix, at in zip((Matrix.A, Matrix.B, Matrix.C), (placement.a, placement.b, placement.c), strict=True):
            given.set_origin(matrix, at.space == "host", -1 if at.rank is None else at.rank)
        return given


class Prepared:
    """
    What there is to compute, by whom and in which steps; where it lies and the tasks are the core's to say.

    Attributes
    ----------
    options : ScheduleOptions
        Those asked for, with everything set.
    grid : tuple of int
        Rows and columns of ranks.
    splits : int
        Parts of k that have any.
    tile : int
        0: `kblocks` has none.
    """

    tile = 0

    def __init__(self, planner: Planner, options: ScheduleOptions, most_tasks: int, *, aligns: bool) -> None:
        problem, placement = planner.problem, planner.placement
        devices = options.computing_ranks(planner.machine.num_ranks)
        how = choose(problem, placement, len(devices), options)
        if how.splits > len(devices):
            raise ParamError(f"k shall be split {how.splits} times, but {len(devices)} ranks compute: use more ranks")
        self._planner = planner
        cut = planner.cut(len(devices) // how.splits, options)
        self._partition, self._on_grid = cut.partition, options.areas is None
        # Parts of k that have any come first.
        self._k_starts = block_starts(problem.k, min(how.splits, problem.k))
        self.splits = len(self._k_starts) - 1
        self._combines = forms_sums(problem, self.splits)
        first_away = max(0, count_blocks(how.columns) - how.away)  # column block combined where it is computed
        self._at_owner = how.combine == "owner" and placement.c.space == "device" and first_away > 0
        self._how = how
        self._check_size(options, most_tasks)
        how = self._how

        self._given = given = _native.KBlocksInput(planner.given)
        given.combines, given.at_owner, given.first_away = self._combines, self._at_owner, first_away
        given.earliest = how.delivery == "earliest"
        given.row_blocks, given.column_blocks, given.multiple = how.rows, how.columns, how.multiple
        given.first_block, given.product_lanes = how.first, how.lanes
        given.k_starts = self._k_starts
        for start, stop in self._parts:
            given.add_steps(blocking_of(stop - start, how, whole=planner.whole))
        given.set_places(cut.places, devices)
        if aligns:
            self._align(cut)
        self.grid = cut.partition.shape
        grid = self.grid if self._on_grid else None
        known = how is options.blocking and grid == options.grid
        self.options = options if known else changed(options, grid=grid, blocking=how)

    @property
    def alike(self) -> Hashable:
        """What schedules have in common that are the same: k-blocks may have the same ends by other rules."""
        options, how = self.options, self._how
        cut = options.grid, options.devices, options.row_shares, options.col_shares, options.areas
        blocks = how.splits, how.first, how.columns, how.rows, how.multiple
        return *cut, *blocks, how.lanes, how.delivery, how.combine, how.away, self._given.steps_digest

    def schedule(self) -> Schedule:
        """Return the schedule, once; raise CapacityError if a rank has too little device memory for its panels."""
        planner = self._planner
        whose = (planner.machine.num_ranks, planner.problem, planner.placement, planner.machine)
        check_capacity(self._given.lay_out(), *whose)
        try:
            return self._schedule(_native.schedule_kblocks(self._given))
        except _native.TooManyTasksError as error:
            raise self._too_many(f"more than {MAX_TASKS} tasks", MAX_TASKS) from error

    def run(self, most_tasks: int, *, keeps: bool = False) -> _native.KBlocksRun:
        """
        Return what the core makes the schedule and its simulation of, if it has no more than so many tasks.

        Parameters
        ----------
        most_tasks : int
            The limit.
        keeps : bool, optional
            Whether tasks and times are kept; who looks at few runs has them made again.
        """
        return _native.KBlocksRun(self._given, self._planner.room, most_tasks, keeps)

    def schedule_of(self, run: _native.KBlocksRun) -> Schedule:
        """Return the schedule of such a run, when it is made and kept."""
        return self._schedule(run.tables())

    def _schedule(self, tables: tuple[np.ndarray, ...]) -> Schedule:
        *native, buffers = tables
        return Schedule(
            num_ranks=self._planner.machine.num_ranks,
            problem=self._planner.problem,
            placement=self._planner.placement,
            scheduler="kblocks",
            grid=self.grid,
            splits=self.splits,
            tile=self.tile,
            buffers=np.frombuffer(buffers, BUFFER_DTYPE),
            locations=location_table(self._planner.machine.num_ranks),
            **native_tables(*native),
        )

    @property
    def _parts(self) -> Iterator[tuple[int, int]]:
        """Where each part of k starts and ends."""
        return itertools.pairwise(self._k_starts)

    def _align(self, cut: _Cut) -> None:
        """Say what ranks do about columns that are not aligned."""
        step = elements_aligned(self._planner.problem)
        if cut.is_even and not any(start % step for start in self._k_starts):
            return
        for at, (rows, cols, ranks) in enumerate(self._given.places):
            for split, (rank, (start, stop)) in enumerate(zip(ranks, self._parts, strict=True)):
                how = self._alignment(rank, range(*rows), range(*cols), range(start, stop))
                self._given.align(at, split, Matrix.A in how.copied, Matrix.B in how.copied, how.apart, how.k_step)

    def _moves(self, extent: int) -> Steps:
        """Return the steps of a part of k."""
        how = self._how
        many = count_k_blocks(extent, how.first, how.block, how.growth) > MOST_K_BLOCKS  # too large to be kept
        return (moves.__wrapped__ if many else moves)(extent, how, whole=self._planner.whole)

    def _check_size(self, options: ScheduleOptions, most_tasks: int) -> None:
        """
        Refuse what surely has too many tasks before any is made; k-blocks of which nobody asks for others are longer.

        Raises
        ------
        PlanError
            If there are too many all the same.
        """
        how, depth = self._how, -(-self._planner.problem.k // self.splits)
        most_k_blocks = depth // how.block + (how.block // how.first).bit_length() + 3
        blocks = self._count_blocks()
        if most_k_blocks * blocks <= MAX_STEPS and self._are_few(self.splits * most_k_blocks, most_tasks):
            return  # far from it: counting takes as long as making few
        tasks = self._size(most_tasks)
        if tasks > MAX_TASKS and not options.blocking.block:
            while tasks > FEW_TASKS and self._how.block < depth:
                self._how = changed(self._how, block=min(2 * self._how.block, depth))
                tasks = self._size(FEW_TASKS)
        if tasks > most_tasks:
            raise self._too_many(f"at least {tasks} tasks", most_tasks)
        k_blocks = max(self._count_k_blocks())
        if k_blocks * blocks > MAX_STEPS:
            raise too_many(
                self._planner.problem,
                f"kblocks with {k_blocks} k-blocks and {blocks} blocks of C on each rank",
                f"{k_blocks * blocks} pairs of them",
                MAX_STEPS,
                "ask for longer k-blocks (block, --k-block), or for fewer blocks (--column-blocks, --row-blocks)",
            )

    def _count_k_blocks(self) -> list[int]:
        """Return how many there are of each part of k, give or take one."""
        how = self._how
        return [count_k_blocks(stop - start, how.first, how.block, how.growth) for start, stop in self._parts]

    def _count_blocks(self) -> int:
        """Return how many blocks of C each rank has."""
        return count_blocks(self._how.columns) * count_blocks(self._how.rows)

    def _too_many(self, tasks: str, most_tasks: int) -> PlanError:
        problem = self._planner.problem
        grid = ProcessGrid(*self._partition.shape, problem.swapped)
        return too_many(
            problem,
            f"kblocks on {grid} ranks, k split {self.splits} times,",
            tasks,
            most_tasks,
            "ask for larger k-blocks (block, --k-block), another grid or fewer ranks",
        )

    def _size(self, most_tasks: int) -> int:
        """Return how many tasks there are at least, or any lower number where they are surely few enough."""
        counts, blocks = self._count_k_blocks(), self._count_blocks()
        least = sum(map(self._least_of_k_blocks, counts))
        if least > most_tasks or max(counts) * blocks > MAX_STEPS:
            return least
        return 0 if self._are_few(sum(counts), most_tasks) else self._least_tasks()

    def _are_few(self, k_blocks: int, most_tasks: int) -> bool:
        """Return whether so many k-blocks in all have surely no more tasks than so many."""
        rows, cols, splits = len(self._partition.places), self._partition.shape[1], self.splits
        steps = (7 if self._how.order == "columns" else 3) * k_blocks + 4 * splits * self._count_blocks()
        return steps * rows * cols * (rows + cols + splits) <= most_tasks

    def _least_of_k_blocks(self, count: int) -> int:
        """Return how many tasks so many k-blocks make at least, whatever their length: what can be said at once."""
        how, placement = self._how, self._planner.placement
        home_a, home_b = placement.a.space == "device", placement.b.space == "device"
        workers = sum(1 for rows, cols in self._partition.blocks if rows and cols)
        takers = max(0, workers - home_a) * (self._on_grid or how.rows == 1)
        if how.order not in ORDERS_BY_K:  # the first block of C alone is made of k-blocks, and it may be empty
            return count * takers
        takers += max(0, workers - home_b)
        tail = how.tail or COLUMN_TAIL_PARTS
        head = max(0, count - count // tail - 2)  # the others go by column blocks
        products = max(0, workers - (home_a and home_b))
        return (count if how.order == "k" else head) * takers + head * products

    def _least_tasks(self) -> int:
        """Return how many tasks there are at least: the copies of A and B, products, and partial sums to add up."""
        problem = self._planner.problem
        partition = self._partition
        # How many bands of a height are computed by so many ranks, columns of a width by so many.
        bands = Counter(
            (stop - start, sum(place >= 0 for place in band))
            for (start, stop), band in zip(itertools.pairwise(partition.bands), partition.places, strict=True)
        )
        in_column = Counter((cols.start, len(cols)) for rows, cols in partition.blocks if rows and cols)
        columns = Counter((width, ranks) for (_, width), ranks in in_column.items())
        # The owner of a matrix fetches none of it, and may multiply all of k at once.
        home = {name: getattr(self._planner.placement, name).space == "device" for name in "abc"}
        starts_of = {width: self._edges(width, self._how.columns) for width, _ in columns}
        # Where ranks beside each other are cut at other rows a band may have rows of some row blocks alone.
        heights = {height: self._edges(height, self._how.rows) for height, _ in bands} if self._on_grid else {}
        shortest = min((len(rows) for rows, cols in partition.blocks if rows and cols), default=0)
        edges = self._edges(shortest, self._how.rows)
        tasks = 0
        for move, splits in Counter(move for start, stop in self._parts for move in self._moves(stop - start)).items():
            inner = move.k_stop - move.k_start
            if move.step == Step.FETCH_A:
                for (height, ranks), groups in bands.items() if self._on_grid or self._how.rows == 1 else ():
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
        adders = 1 if self._at_owner else self.splits
        for (width, ranks), groups in columns.items():
            sums = sum(min(adders, stop - start) for start, stop in itertools.pairwise(starts_of[width]))
            tasks += ranks * groups * sums * (self.splits - 1)
        return tasks

    def _edges(self, extent: int, blocks: int) -> tuple[int, ...]:
        return block_edges(extent, blocks, elements_aligned(self._planner.problem), self._how.multiple)

    @staticmethod
    def _has_columns(starts: Sequence[int], move: Move) -> bool:
        return starts[move.last] > starts[move.first]

    def _copies_of_piece(self, matrix: Matrix, takers: int, columns: int, elements: int) -> int:
        """Return how many copies bring a piece of A or B to all that take it, as the tasks are made."""
        if takers <= 0 or elements == 0:
            return 0
        whole = self._planner.machine.serial_copies or self._how.delivery == "earliest"
        if whole and self._location(matrix).space == "device":
            return takers
        slices = elements * self._planner.problem.dtype.itemsize // MIN_SLICE_BYTES
        return takers * max(1, min(takers, columns, slices))

    def _location(self, matrix: Matrix) -> Location:
        return (self._planner.placement.a, self._planner.placement.b, self._planner.placement.c)[matrix]

    def _alignment(self, rank: int, rows: range, cols: range, inner: range) -> Alignment:
        """Return what this rank does about columns that are not aligned."""
        homes = [matrix for matrix in (Matrix.A, Matrix.B, Matrix.C) if self._location(matrix) == Location.device(rank)]
        steps = self._moves(len(inner))
        part = (rows, cols, inner)
        return choose_alignment(
            self._planner.problem,
            self._planner.machine,
            rank,
            part,
            homes,
            steps,
            may_sum_apart=self._combines,
            multiple=self._how.multiple,
        )
