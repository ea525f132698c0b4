"""
Few large products: each rank's block of C is updated one k-block at a time.

Where `uncut` multiplies tiles, a rank here multiplies all its rows by all its columns (or a block of
them) over a stretch of k, in the order of `uncut_mpi.planning.blocking`. With `splits` > 1 the ranks of a
process grid rows × cols × splits share k too (2.5D and 3D algorithms), and their partial sums are added up.

* **A and B.** What several ranks need leaves its origin once: each takes a slice (whole stored columns)
  and hands it to the others, so that ports and host links carry every byte once. A rank that holds the matrix
  itself reads it in place.
* **C** is handed on per column block. Combined *at its owner* (`combine` = ``"owner"``, for a C on a device) the
  products travel and C does not; combined *where it is computed* (``"worker"``) C is fetched, into the products'
  place before the first of them where the order has it there in time, else beside them. Partial sums of a k
  split are added by the owner, or each worker adds up a slice of the columns. Half types sum in float32 and are
  rounded once. Where C is at home, alone and not half, products are formed in place.

Who issues a copy: whoever's private host memory it touches; between shared host memory and a device, the
device; between devices, the source (push). One lane per (issuing rank, source, destination); products are on
compute lane 0, COMBINE on lane 1.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Final

from uncut_mpi.errors import ParamError, PlanError
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Location, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.blocking import Move, Step, column_starts, moves, num_column_blocks
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.decomposition import block_bounds
from uncut_mpi.planning.grid import ProcessGrid, block_starts
from uncut_mpi.planning.layout import Layout
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.schedule import HOST, Factor, Kind, Matrix, Op, Role, Schedule

MIN_SLICE_BYTES: Final = 128 * 1024
"""Smallest slice of a fetch shared by several ranks: below it a copy's fixed cost outweighs what it moves."""

MOST_SUMMANDS: Final = 8
"""Regions that one COMBINE reads at most."""

_ALIGNMENT: Final = 16  # bytes: where column blocks start in a transposed B too
_PRODUCTS: Final = 0
_SUMS: Final = 1
"""Compute lanes of a rank."""

_Reads = list[tuple[RegionRef, Factor, Op]]


def schedule(
    problem: GemmProblem, placement: Placement, num_ranks: int, machine: Machine, options: ScheduleOptions
) -> Schedule:
    """
    Return the schedule for a problem that has a product.

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
        If there is no product: C is only scaled.
    CapacityError
        If a rank has too little device memory for its panels.
    """
    placement.check_ranks(num_ranks)
    if machine.num_ranks != num_ranks:
        raise ParamError(f"machine {machine.name} has {machine.num_ranks} ranks, the session has {num_ranks}")
    if not problem.has_product:
        raise PlanError("kblocks schedules products; C is only scaled here")
    return _KBlocks(problem, placement, machine, options).build()


def choose(problem: GemmProblem, placement: Placement, num_workers: int, options: ScheduleOptions) -> Blocking:
    """
    Return `options.blocking` with everything set: what it leaves open follows simple rules.

    k is split over all ranks where it is at least eight times the larger of m and n (and nobody asked for a
    grid or shares); a C in host memory is handed on in the order ``"columns"``, any other in the order ``"k"``.
    """
    asked = options.blocking
    on_host = placement.c.space == "host"
    splits = asked.splits
    if not splits:
        thin = problem.k >= 8 * max(problem.m, problem.n)
        free = options.grid is None and options.row_shares is None and options.col_shares is None
        splits = num_workers if thin and free else 1
    return Blocking(
        splits=splits,
        first=asked.first or 256,
        block=asked.block or 2048,
        columns=asked.columns or 4,
        order=asked.order or ("columns" if on_host else "k"),
        combine=asked.combine or "owner",
    )


def choose_grid(placement: Placement, num_places: int, asked: tuple[int, int] | None) -> ProcessGrid:
    """
    Return the process grid asked for; else one row of ranks if all is in host memory, else the most square one.

    With one grid row every copy from and to the host is of whole columns, which move faster than rows far apart.
    """
    on_host = all(location.space == "host" for location in (placement.a, placement.b, placement.c))
    if asked is None and on_host:
        return ProcessGrid(1, num_places)
    return ProcessGrid.choose(num_places, asked)


@dataclasses.dataclass(slots=True)
class _Worker:
    """A rank that computes, what it holds, and what it has yet to wait for."""

    rank: int
    rows: range
    cols: range
    inner: range  # its part of k
    starts: list[int]  # of its column blocks, from its first column
    a: int  # panels; −1: it reads the caller's matrix
    b: int
    c: int  # −1: products are formed in the caller's C
    begun: set[int] = dataclasses.field(default_factory=set)  # column blocks with a product
    c_there: dict[int, int] = dataclasses.field(default_factory=dict)  # column block → task that put C into the panel
    arriving: list[tuple[Move, int]] = dataclasses.field(default_factory=list)  # copies no product has awaited yet
    product: int = -1  # the last one

    def columns(self, first: int, last: int) -> range:
        """Return the columns of C that some column blocks are."""
        return range(self.cols.start + self.starts[first], self.cols.start + self.starts[last])


@dataclasses.dataclass(slots=True)
class _Adder:
    """A rank that adds up columns of a block of C and hands them on."""

    rank: int
    columns: list[range]  # per column block
    places: list[int]  # where they begin in its buffers, per column block
    partial: dict[int, int]  # rank → buffer for what comes from there
    staging: int = -1  # buffer for C itself
    c_in: dict[int, int] = dataclasses.field(default_factory=dict)  # column block → task that put C there


class _KBlocks:
    """One schedule while it is made."""

    def __init__(self, problem: GemmProblem, placement: Placement, machine: Machine, options: ScheduleOptions) -> None:
        num_ranks = machine.num_ranks
        devices = options.devices or tuple(range(num_ranks))
        if max(devices) >= num_ranks:
            raise ParamError(
                f"rank {max(devices)} shall compute (devices, --compute-ranks), but there are {num_ranks} ranks "
                f"(0 to {num_ranks - 1}): start more ranks or leave it out"
            )
        how = choose(problem, placement, len(devices), options)
        if how.splits > len(devices):
            raise ParamError(f"k shall be split {how.splits} times, but {len(devices)} ranks compute: use more ranks")
        self._problem, self._placement, self._how = problem, placement, how
        self._wide = problem.dtype.accumulator
        self._at_owner = how.combine == "owner" and placement.c.space == "device"
        self._grid = choose_grid(placement, len(devices) // how.splits, options.grid)
        self._builder = ScheduleBuilder(num_ranks, problem, placement)
        self._layout = Layout(num_ranks, problem, placement)
        self._row_starts, self._col_starts = block_bounds(problem, self._grid, options.row_shares, options.col_shares)
        parts = itertools.pairwise(block_starts(problem.k, how.splits))
        self._inner = [range(start, stop) for start, stop in parts if stop > start]
        self._num_blocks = num_column_blocks(how.columns, how.order)
        self._splits = len(self._inner)
        # What needs a sum of its own: C beside the products, a conversion, or partial sums.
        self._combines = problem.reads_c or problem.dtype.is_half or self._splits > 1
        # [(row, col)][split]
        self._workers: dict[tuple[int, int], list[_Worker]] = {}
        self._adders: dict[tuple[int, int], list[_Adder]] = {}
        self._finished: dict[tuple[int, int, int], int] = {}
        for cell in range(self._grid.size):
            row, col = self._grid.position(cell)
            if self._row_starts[row] < self._row_starts[row + 1] and self._col_starts[col] < self._col_starts[col + 1]:
                ranks = [devices[split * self._grid.size + cell] for split in range(self._splits)]
                self._workers[row, col] = [
                    self._make_worker(row, col, rank, inner) for rank, inner in zip(ranks, self._inner, strict=True)
                ]
        for block in self._workers:
            self._adders[block] = self._make_adders(self._workers[block])
        self._layout.check_capacity(machine)

    def build(self) -> Schedule:
        """Return the schedule."""
        how = self._how
        # Stored transposed, the rows of k-blocks are whole columns.
        whole = self._placement.b.space == "host" and self._problem.trans_b == "N"
        steps = [
            moves(len(inner), first=how.first, most=how.block, blocks=how.columns, order=how.order, whole=whole)
            for inner in self._inner
        ]
        for together in itertools.zip_longest(*steps):
            for split, move in enumerate(together):
                if move is not None:
                    self._take(move, split)
        return self._builder.build(
            scheduler="kblocks",
            grid=(self._grid.rows, self._grid.cols),
            splits=self._splits,
            tile=0,
            buffers=self._layout.table(),
        )

    # -- who computes what, and where it lies ------------------------------------------------

    def _at_home(self, matrix: Matrix, rank: int) -> bool:
        return self._location(matrix) == Location.device(rank)

    def _location(self, matrix: Matrix) -> Location:
        return (self._placement.a, self._placement.b, self._placement.c)[matrix]

    def _make_worker(self, row: int, col: int, rank: int, inner: range) -> _Worker:
        problem = self._problem
        rows = range(self._row_starts[row], self._row_starts[row + 1])
        cols = range(self._col_starts[col], self._col_starts[col + 1])
        step = max(1, _ALIGNMENT // problem.dtype.itemsize)
        worker = _Worker(
            rank, rows, cols, inner, column_starts(len(cols), self._how.columns, self._how.order, step), -1, -1, -1
        )
        if not self._at_home(Matrix.A, rank):
            shape = (len(rows), len(inner)) if problem.trans_a == "N" else (len(inner), len(rows))
            worker.a = self._layout.add(rank, shape, problem.dtype, Matrix.A, Role.PANEL)
        if not self._at_home(Matrix.B, rank):
            shape = (len(inner), len(cols)) if problem.trans_b == "N" else (len(cols), len(inner))
            worker.b = self._layout.add(rank, shape, problem.dtype, Matrix.B, Role.PANEL)
        if problem.dtype.is_half or self._splits > 1 or not self._at_home(Matrix.C, rank):
            worker.c = self._layout.add(rank, (len(rows), len(cols)), self._wide, Matrix.C, Role.PANEL)
        return worker

    def _make_adders(self, members: list[_Worker]) -> list[_Adder]:
        owner = self._location(Matrix.C)
        ranks = [owner.rank] if self._at_owner else [member.rank for member in members]
        one = members[0]
        adders = []
        for part, rank in enumerate(ranks):
            assert rank is not None  # a device location always names its rank
            columns = []
            for block in range(self._num_blocks):
                whole = one.columns(block, block + 1)
                cuts = block_starts(len(whole), len(ranks))
                columns.append(whole[cuts[part] : cuts[part + 1]])
            places = [0, *itertools.accumulate(len(cols) for cols in columns)]
            adder = _Adder(rank, columns, places, {})
            adders.append(adder)
            if not self._combines:
                continue
            for member in members:
                if member.rank != rank:
                    shape = (len(one.rows), places[-1])
                    adder.partial[member.rank] = self._layout.add(rank, shape, self._wide, Matrix.C, Role.STAGING)
            late = places[1] if self._is_early(1) else places[-1]
            if not self._at_home(Matrix.C, rank) and (self._problem.reads_c or self._problem.dtype.is_half) and late:
                shape = (len(one.rows), late)
                adder.staging = self._layout.add(rank, shape, self._problem.dtype, Matrix.C, Role.STAGING)
        return adders

    def _is_early(self, block: int) -> bool:
        """Whether C is fetched before the first product of a column block, into its place."""
        alone = self._splits == 1 and not self._problem.dtype.is_half and not self._at_owner
        return alone and self._problem.reads_c and self._how.order == "columns" and block > 0

    # -- regions -----------------------------------------------------------------------------

    def _user(self, matrix: Matrix, rows: range, cols: range) -> RegionRef:
        """Return a rectangle of op(A), op(B) or C in the caller's matrix."""
        return _stored(int(matrix), rows, cols, transposed=self._is_transposed(matrix))

    def _is_transposed(self, matrix: Matrix) -> bool:
        return matrix != Matrix.C and (self._problem.trans_a, self._problem.trans_b)[matrix] == "T"

    def _held(self, worker: _Worker, matrix: Matrix, rows: range, cols: range) -> RegionRef:
        """Return where a worker has a rectangle of op(A), op(B) or C."""
        panel = (worker.a, worker.b, worker.c)[matrix]
        if panel < 0:
            return self._user(matrix, rows, cols)
        top = worker.inner.start if matrix == Matrix.B else worker.rows.start
        left = worker.inner.start if matrix == Matrix.A else worker.cols.start
        rows, cols = _shifted(rows, -top), _shifted(cols, -left)
        return _stored(panel, rows, cols, transposed=self._is_transposed(matrix))

    # -- steps -------------------------------------------------------------------------------

    def _take(self, move: Move, split: int) -> None:
        grid = self._grid
        if move.step == Step.FETCH_A:
            for row in range(grid.rows):
                self._fetch(Matrix.A, self._group([(row, col) for col in range(grid.cols)], split), move)
            return
        if move.step == Step.FETCH_B:
            for col in range(grid.cols):
                self._fetch(Matrix.B, self._group([(row, col) for row in range(grid.rows)], split), move)
            return
        for block, members in self._workers.items():
            worker = members[split]
            if not worker.columns(move.first, move.last):
                continue
            if move.step == Step.MULTIPLY:
                self._multiply(worker, move)
            elif move.step == Step.FETCH_C:
                self._fetch_c(worker, self._adders[block], move.first)
            else:
                self._finished[(*block, move.first)] = self._finished.get((*block, move.first), 0) + 1
                if self._finished[(*block, move.first)] == self._splits:
                    self._finish(members, self._adders[block], move.first)

    def _group(self, blocks: list[tuple[int, int]], split: int) -> list[_Worker]:
        return [self._workers[block][split] for block in blocks if block in self._workers]

    def _fetch(self, matrix: Matrix, group: list[_Worker], move: Move) -> None:
        """Bring one piece of A or B to all that need it: a slice to each, and from each to the others."""
        takers = [worker for worker in group if (worker.a if matrix == Matrix.A else worker.b) >= 0]
        if not takers:
            return

        def place(worker: _Worker) -> tuple[range, range]:
            inner = _shifted(range(move.k_start, move.k_stop), worker.inner.start)
            return (worker.rows, inner) if matrix == Matrix.A else (inner, worker.columns(move.first, move.last))

        source = self._user(matrix, *place(takers[0]))
        if not source.rows or not source.cols:
            return
        size = source.rows * source.cols * self._problem.dtype.itemsize
        parts = max(1, min(len(takers), source.cols, size // MIN_SLICE_BYTES))
        turn = move.k_start // self._how.first
        for part, (start, stop) in enumerate(itertools.pairwise(block_starts(source.cols, parts))):
            first = takers[(part + turn) % len(takers)]
            here = _slice(self._held(first, matrix, *place(first)), start, stop)
            task = self._copy_in(self._location(matrix), first.rank, here, _slice(source, start, stop))
            first.arriving.append((move, task))
            for other in takers:
                if other is not first:
                    there = _slice(self._held(other, matrix, *place(other)), start, stop)
                    other.arriving.append((move, self._push(first.rank, other.rank, there, here, [task])))

    def _fetch_c(self, worker: _Worker, adders: list[_Adder], block: int) -> None:
        if not self._problem.reads_c or self._at_home(Matrix.C, worker.rank):
            return
        for adder in adders:
            columns = adder.columns[block]
            if adder.rank != worker.rank or not columns:
                continue
            source = self._user(Matrix.C, worker.rows, columns)
            if self._is_early(block):
                there = self._held(worker, Matrix.C, worker.rows, columns)
                worker.c_there[block] = self._copy_in(self._location(Matrix.C), worker.rank, there, source)
            else:
                there = RegionRef(adder.staging, 0, adder.places[block], source.rows, source.cols)
                adder.c_in[block] = self._copy_in(self._location(Matrix.C), worker.rank, there, source)

    def _multiply(self, worker: _Worker, move: Move) -> None:
        inner = _shifted(range(move.k_start, move.k_stop), worker.inner.start)
        columns = worker.columns(move.first, move.last)
        target = self._held(worker, Matrix.C, worker.rows, columns)
        ops = [Op[trans] for trans in (self._problem.trans_a, self._problem.trans_b)]
        reads: _Reads = [
            (self._held(worker, Matrix.A, worker.rows, inner), Factor.ALPHA, ops[0]),
            (self._held(worker, Matrix.B, inner, columns), Factor.ONE, ops[1]),
        ]
        awaits = []
        if move.first in worker.begun:
            reads.append((target, Factor.ONE, Op.N))
        elif worker.c < 0 and self._problem.reads_c:
            reads.append((target, Factor.BETA, Op.N))
        elif move.first in worker.c_there:
            reads.append((target, Factor.BETA, Op.N))
            awaits.append(worker.c_there[move.first])
        worker.begun.update(range(move.first, move.last))
        later = []
        for piece, task in worker.arriving:
            if _meet(piece, move):
                awaits.append(task)
            else:
                later.append((piece, task))
        worker.arriving = later  # the lane is in order: what one product awaits the next ones need not
        lane = self._builder.compute_lane(worker.rank, _PRODUCTS)
        worker.product = self._builder.task(Kind.GEMM, lane, target, reads, awaits)

    def _finish(self, members: list[_Worker], adders: list[_Adder], block: int) -> None:
        """Add up what the members have of a column block, and hand it on."""
        if members[0].c < 0:
            return  # formed in the caller's C
        rows = members[0].rows
        for adder in adders:
            columns = adder.columns[block]
            if not columns:
                continue
            at_home = self._at_home(Matrix.C, adder.rank)
            target = self._user(Matrix.C, rows, columns)
            summands: list[tuple[RegionRef, int]] = []
            for member in members:
                own = self._held(member, Matrix.C, rows, columns)
                if member.rank == adder.rank:
                    summands.append((own, member.product))
                    continue
                there = target
                if self._combines:
                    there = RegionRef(adder.partial[member.rank], 0, adder.places[block], own.rows, own.cols)
                summands.append((there, self._push(member.rank, adder.rank, there, own, [member.product])))
            if not self._combines or self._is_early(block):
                out, task = summands[0]
            else:
                out, task = self._combine(adder, block, summands, target)
            if not at_home:
                self._copy_out(adder.rank, self._location(Matrix.C), target, out, [task])

    def _combine(
        self, adder: _Adder, block: int, summands: list[tuple[RegionRef, int]], target: RegionRef
    ) -> tuple[RegionRef, int]:
        lane = self._builder.compute_lane(adder.rank, _SUMS)
        room = MOST_SUMMANDS - self._problem.reads_c
        while len(summands) > room:
            some, summands = summands[:MOST_SUMMANDS], summands[MOST_SUMMANDS:]
            reads: _Reads = [(region, Factor.ONE, Op.N) for region, _ in some]
            task = self._builder.task(Kind.COMBINE, lane, some[0][0], reads, [task for _, task in some])
            summands.insert(0, (some[0][0], task))
        beside = RegionRef(adder.staging, 0, adder.places[block], target.rows, target.cols)
        at_home = self._at_home(Matrix.C, adder.rank)
        out = target if at_home else beside if self._problem.dtype.is_half else summands[0][0]
        reads = [(region, Factor.ONE, Op.N) for region, _ in summands]
        awaits = [task for _, task in summands]
        if self._problem.reads_c:
            reads.append((target if at_home else beside, Factor.BETA, Op.N))
            if block in adder.c_in:
                awaits.append(adder.c_in[block])
        return out, self._builder.task(Kind.COMBINE, lane, out, reads, awaits)

    # -- copies ------------------------------------------------------------------------------

    def _copy_in(self, origin: Location, rank: int, there: RegionRef, source: RegionRef) -> int:
        if origin.space == "device":
            assert origin.rank is not None  # a device location always names its rank
            return self._push(origin.rank, rank, there, source, [])
        lane = self._builder.copy_lane(rank if origin.rank is None else origin.rank, HOST, rank)
        return self._builder.task(Kind.COPY, lane, there, [(source, Factor.ONE, Op.N)])

    def _copy_out(self, rank: int, goal: Location, there: RegionRef, source: RegionRef, awaits: list[int]) -> int:
        if goal.space == "device":
            assert goal.rank is not None  # a device location always names its rank
            return self._push(rank, goal.rank, there, source, awaits)
        lane = self._builder.copy_lane(rank if goal.rank is None else goal.rank, rank, HOST)
        return self._builder.task(Kind.COPY, lane, there, [(source, Factor.ONE, Op.N)], awaits)

    def _push(self, rank: int, to: int, there: RegionRef, source: RegionRef, awaits: list[int]) -> int:
        lane = self._builder.copy_lane(rank, rank, to)
        return self._builder.task(Kind.COPY, lane, there, [(source, Factor.ONE, Op.N)], awaits)


def _stored(buffer: int, rows: range, cols: range, *, transposed: bool) -> RegionRef:
    if transposed:
        rows, cols = cols, rows
    return RegionRef(buffer, rows.start, cols.start, len(rows), len(cols))


def _shifted(extent: range, by: int) -> range:
    return range(extent.start + by, extent.stop + by)


def _slice(region: RegionRef, start: int, stop: int) -> RegionRef:
    return region._replace(col=region.col + start, cols=stop - start)


def _meet(piece: Move, product: Move) -> bool:
    """Whether a product reads a fetched piece."""
    if piece.k_start >= product.k_stop or product.k_start >= piece.k_stop:
        return False
    return piece.step == Step.FETCH_A or (piece.first < product.last and product.first < piece.last)
