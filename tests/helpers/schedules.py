"""
A small scheduler for tests: SUMMA over a process grid, plain enough to be seen to be right.

Every rank of the grid computes one block of C. The k range is cut into steps; for each step a rank
fetches its pieces of A and B into one of a few places of a panel, used in turn, and multiplies. C is
fetched first, combined at the end where it was computed, or combined where it lives. Every await is
written out by the rule "await whoever last wrote or read the place"; nothing else orders anything.
"""

from __future__ import annotations

import dataclasses
import itertools
import random

from uncut_mpi.model.dtypes import MEASURED, DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.schedule import Factor, Kind, Matrix, Op, Role, Schedule

ALIGNMENT = 256


@dataclasses.dataclass(frozen=True)
class SummaOptions:
    """
    What varies.

    Attributes
    ----------
    steps : int
        Steps along k (at most k are made).
    places : int
        Places of the panels that fetched pieces use in turn.
    c_mode : str
        ``"fetch"`` (beta C_in first), ``"lazy"`` (combined at the end by the computing rank) or
        ``"owner"`` (C' goes to C's owner, which combines; needs C on a device, else ``"lazy"``).
    chunks : int
        Copies that one fetch is cut into; where there are several, a JOIN is awaited in their place.
    compute_lanes : int
        Column parts of a rank's block, each on a lane of its own.
    splits : int
        Parts of k given to different ranks (with ``"owner"``).
    forward : bool
        Each piece leaves its origin once and is handed on along the ranks that need it.
    pull : bool
        Copies between devices are issued by the receiver instead of the sender.
    overlap : bool
        Lanes per (source, destination) and for compute; else one lane per rank.
    """

    steps: int = 3
    places: int = 2
    c_mode: str = "lazy"
    chunks: int = 1
    compute_lanes: int = 1
    splits: int = 1
    forward: bool = False
    pull: bool = False
    overlap: bool = True


def cut(extent: int, parts: int) -> list[tuple[int, int]]:
    """Return at most `parts` non-empty intervals that together are [0, extent)."""
    parts = max(1, min(parts, extent))
    edges = [extent * i // parts for i in range(parts + 1)]
    return [(a, b) for a, b in itertools.pairwise(edges) if a < b]


def summa(
    problem: GemmProblem,
    placement: Placement,
    num_ranks: int,
    *,
    grid: tuple[int, int] = (1, 1),
    options: SummaOptions | None = None,
) -> Schedule:
    """Return a schedule over grid[0] × grid[1] ranks (times the splits), which must not exceed `num_ranks`."""
    return _Summa(problem, placement, num_ranks, grid, options or SummaOptions()).build()


def random_case(rng: random.Random, max_ranks: int = 8, max_extent: int = 40) -> Schedule:
    """Return the schedule of a random problem, placement and choice of options."""
    num_ranks = rng.randint(1, max_ranks)

    def location() -> Location:
        kind = rng.randrange(4)
        rank = rng.choice((0, num_ranks - 1, rng.randrange(num_ranks)))
        return Location.host() if kind == 0 else Location.host(rank) if kind == 1 else Location.device(rank)

    def extent() -> int:
        return rng.choice((1, rng.randint(1, max_extent), rng.randint(2, max_extent)))

    problem = GemmProblem(
        m=extent(),
        n=extent(),
        k=rng.choice((0, extent(), extent(), extent(), extent())),
        dtype=rng.choice(MEASURED),
        trans_a=rng.choice("NTC"),
        trans_b=rng.choice("NTC"),
        reads_c=rng.random() < 0.7,
        scales_only=rng.random() < 0.05,
    )
    splits = rng.choice((1, 1, 2)) if num_ranks > 1 else 1
    rows = rng.randint(1, num_ranks // splits)
    cols = rng.randint(1, num_ranks // splits // rows)
    options = SummaOptions(
        steps=rng.randint(1, 5),
        places=rng.randint(1, 3),
        c_mode=rng.choice(("fetch", "lazy", "owner")),
        chunks=rng.randint(1, 3),
        compute_lanes=rng.randint(1, 3),
        splits=splits,
        forward=rng.random() < 0.5,
        pull=rng.random() < 0.5,
        overlap=rng.random() < 0.8,
    )
    return summa(problem, Placement(location(), location(), location()), num_ranks, grid=(rows, cols), options=options)


class _Summa:
    def __init__(
        self, problem: GemmProblem, placement: Placement, num_ranks: int, grid: tuple[int, int], options: SummaOptions
    ) -> None:
        self.problem, self.placement, self.grid, self.options = problem, placement, grid, options
        self.builder = ScheduleBuilder(num_ranks, problem, placement)
        self.used = [0] * num_ranks  # bytes of each SoftBuf
        # Regions written and read so far, with the task: from this the awaits follow.
        self.history: dict[int, list[tuple[RegionRef, int, bool]]] = {}
        self.place_of: dict[int, Location] = {}
        self.user = {
            Matrix.A: self.user_buffer(Matrix.A, placement.a, problem.a_shape, problem.lda),
            Matrix.B: self.user_buffer(Matrix.B, placement.b, problem.b_shape, problem.ldb),
            Matrix.C: self.user_buffer(Matrix.C, placement.c, (problem.m, problem.n), problem.ldc),
        }
        self.panels: dict[tuple[int, Matrix, int], int] = {}
        self.turn = 0

    # -- pieces ------------------------------------------------------------------------------

    def user_buffer(self, matrix: Matrix, where: Location, shape: tuple[int, int], ld: int) -> int:
        at = self.builder.buffer(
            at=where,
            rows=shape[0],
            cols=shape[1],
            ld=ld,
            dtype=self.problem.dtype,
            role=Role.USER,
            matrix=matrix,
        )
        self.place_of[at] = where
        return at

    def softbuf(self, rank: int, rows: int, cols: int, dtype: DType, role: Role, matrix: Matrix) -> int:
        at = self.builder.buffer(
            at=rank, rows=rows, cols=cols, dtype=dtype, role=role, matrix=matrix, offset=self.used[rank]
        )
        self.used[rank] += -(-max(1, rows * cols * dtype.itemsize) // ALIGNMENT) * ALIGNMENT
        self.place_of[at] = Location.device(rank)
        return at

    def whole(self, buffer: int, rows: int, cols: int) -> RegionRef:
        return RegionRef(buffer, 0, 0, rows, cols)

    # -- tasks -------------------------------------------------------------------------------

    def task(self, kind, lane, write=None, reads=(), extra=(), group=-1) -> int:
        """Append a task that awaits whoever last touched what it touches, by overlap."""
        awaits = set(extra)
        touches = [(region, False) for region, _, _ in reads] + ([(write, True)] if write is not None else [])
        for region, writes in touches:
            for other, task, wrote in self.history.get(region.buffer, ()):
                if (writes or wrote) and overlap(region, other):
                    awaits.add(task)
        task = self.builder.task(kind, lane, write, reads, awaits, group)
        for region, writes in touches:
            history = self.history.setdefault(region.buffer, [])
            if writes:  # whoever touched only parts of this is covered by this task from now on
                history[:] = [entry for entry in history if not inside(entry[0], region)]
            history.append((region, task, writes))
        return task

    def copy(self, target: RegionRef, source: RegionRef, group: int = -1) -> None:
        to, at = self.place_of[target.buffer], self.place_of[source.buffer]
        ends = [(self.builder.host if place.space == "host" else place.rank) for place in (at, to)]
        private = [place.rank for place in (at, to) if place.space == "host" and place.rank is not None]
        devices = [place.rank for place in (at, to) if place.space == "device"]
        rank = private[0] if private else devices[-1] if self.options.pull else devices[0]
        lane = self.builder.compute_lane(rank)
        if self.options.overlap:
            lane = self.builder.copy_lane(rank, ends[0], ends[1])
        parts = cut(source.cols, self.options.chunks)
        copies = [
            self.task(
                Kind.COPY,
                lane,
                columns(target, start, stop),
                [(columns(source, start, stop), Factor.ONE, Op.N)],
                group=group,
            )
            for start, stop in parts
        ]
        if len(copies) > 1:
            # Whoever needs the whole awaits the JOIN, which stands on the receiver's lane where there is one.
            home = to.rank if to.space == "device" and not self.options.pull else None
            join_lane = lane if home is None else self.compute_lane(home, 0)
            join = self.task(Kind.JOIN, join_lane, extra=copies, group=group)
            for buffer in {target.buffer, source.buffer}:
                self.history[buffer] = [
                    (region, join if task in copies else task, wrote) for region, task, wrote in self.history[buffer]
                ]

    def compute_lane(self, rank: int, number: int) -> int:
        return self.builder.compute_lane(rank, number if self.options.overlap else 0)

    # -- the algorithm -----------------------------------------------------------------------

    def build(self) -> Schedule:
        problem, options = self.problem, self.options
        on_device = self.placement.c.space == "device"
        mode = options.c_mode if options.c_mode != "owner" or on_device else "lazy"
        blocks = [(rows, cols) for rows in cut(problem.m, self.grid[0]) for cols in cut(problem.n, self.grid[1])]
        if not problem.has_product:
            for rank, block in enumerate(blocks):
                self.scale(rank, block)
        elif mode == "owner":
            self.combine_at_owner(blocks)
        else:
            partial = {rank: self.prepare(rank, block, mode) for rank, block in enumerate(blocks)}
            for number, step in enumerate(cut(problem.k, options.steps)):
                self.multiply(blocks, list(range(len(blocks))), step, number, partial, mode)
            for rank, block in enumerate(blocks):
                self.finish(rank, block, partial[rank], mode)
        return self.builder.build(scheduler="uncut", grid=self.grid, tile=0)

    def scale(self, rank: int, block) -> None:
        """C := beta C, without any product."""
        c = self.c_region(block)
        if self.placement.c == Location.device(rank):
            work = c
        else:
            work = self.c_buffer(rank, block, self.problem.dtype, Role.STAGING)
            if self.problem.reads_c:
                self.copy(work, c)
        reads = [(work, Factor.BETA, Op.N)] if self.problem.reads_c else []
        self.task(Kind.COMBINE, self.compute_lane(rank, 0), work, reads)
        if work != c:
            self.copy(c, work)

    def prepare(self, rank: int, block, mode: str) -> RegionRef:
        """Return where a rank sums its block; with mode fetch it holds C_in (times beta for half types)."""
        problem = self.problem
        at_home = self.placement.c == Location.device(rank)
        fetched = mode == "fetch" and problem.reads_c
        if at_home and not problem.rounds_c and (fetched or not problem.reads_c):
            return self.c_region(block)
        partial = self.c_buffer(rank, block, problem.dtype.accumulator, Role.PANEL)
        if not fetched:
            return partial
        c = self.c_region(block)
        if not problem.rounds_c:
            self.copy(partial, c)
            return partial
        if not at_home:
            staged = self.c_buffer(rank, block, problem.dtype, Role.STAGING)
            self.copy(staged, c)
            c = staged
        self.task(Kind.COMBINE, self.compute_lane(rank, 0), partial, [(c, Factor.BETA, Op.N)])
        return partial

    def multiply(self, blocks, ranks, step, number, partial, mode) -> None:
        """Fetch the pieces of one step of k and multiply on every rank of `ranks`."""
        problem = self.problem
        self.turn += 1
        got: dict[int, dict[Matrix, RegionRef]] = {rank: {} for rank in ranks}
        for matrix in (Matrix.A, Matrix.B):
            source: dict[tuple[int, int], RegionRef] = {}
            for rank in ranks:
                extent = blocks[ranks.index(rank)][0 if matrix is Matrix.A else 1]
                origin = self.input_region(matrix, extent, step)
                if self.place_of[origin.buffer] == Location.device(rank):
                    got[rank][matrix] = origin
                    continue
                place = self.panel(rank, matrix, number, origin)
                self.copy(place, source.get(extent, origin), group=self.turn)
                if self.options.forward:
                    source[extent] = place
                got[rank][matrix] = place
        for rank in ranks:
            a, b, c = got[rank][Matrix.A], got[rank][Matrix.B], partial[rank]
            for lane, (start, stop) in enumerate(cut(c.cols, self.options.compute_lanes)):
                part = columns(c, start, stop)
                b_part = columns(b, start, stop) if problem.trans_b == "N" else rows_of(b, start, stop)
                reads = [(a, Factor.ALPHA, Op[problem.trans_a]), (b_part, Factor.ONE, Op[problem.trans_b])]
                if number > 0:
                    reads.append((part, Factor.ONE, Op.N))
                elif mode == "fetch" and problem.reads_c:
                    reads.append((part, Factor.ONE if problem.rounds_c else Factor.BETA, Op.N))
                self.task(Kind.GEMM, self.compute_lane(rank, lane), part, reads)

    def finish(self, rank: int, block, partial: RegionRef, mode: str) -> None:
        """Bring one block home, combined with C_in where that has not happened yet."""
        problem = self.problem
        c = self.c_region(block)
        if partial == c:
            return
        at_home = self.placement.c == Location.device(rank)
        lane = self.compute_lane(rank, 0)
        reads = [(partial, Factor.ONE, Op.N)]
        if mode == "lazy" and problem.reads_c:
            target = c if at_home else self.c_buffer(rank, block, problem.dtype, Role.STAGING)
            if not at_home:
                self.copy(target, c)
            self.task(Kind.COMBINE, lane, target, [(target, Factor.BETA, Op.N), *reads])
        elif problem.rounds_c:
            target = c if at_home else self.c_buffer(rank, block, problem.dtype, Role.STAGING)
            self.task(Kind.COMBINE, lane, target, reads)
        else:
            target = partial
        if target != c:
            self.copy(c, target)

    def combine_at_owner(self, blocks) -> None:
        """Sum every block, its k range split over ranks, and combine the parts where C lives."""
        problem, options = self.problem, self.options
        owner = self.placement.c.rank
        parts = cut(problem.k, options.splits)
        sums: list[list[RegionRef]] = [[] for _ in blocks]
        for split, (first, last) in enumerate(parts):
            ranks = [split * len(blocks) + i for i in range(len(blocks))]
            partial = {
                rank: self.c_buffer(rank, block, problem.dtype.accumulator, Role.PANEL)
                for rank, block in zip(ranks, blocks, strict=True)
            }
            for number, (start, stop) in enumerate(cut(last - first, options.steps)):
                self.multiply(blocks, ranks, (first + start, first + stop), number, partial, "lazy")
            for i, rank in enumerate(ranks):
                sums[i].append(partial[rank])
        for block, terms in zip(blocks, sums, strict=True):
            reads = [(self.c_region(block), Factor.BETA, Op.N)] if problem.reads_c else []
            for term in terms:
                if self.place_of[term.buffer] != Location.device(owner):
                    arrived = self.c_buffer(owner, block, problem.dtype.accumulator, Role.STAGING)
                    self.copy(arrived, term)
                    term = arrived
                reads.append((term, Factor.ONE, Op.N))
            self.task(Kind.COMBINE, self.compute_lane(owner, 0), self.c_region(block), reads)

    # -- regions -----------------------------------------------------------------------------

    def c_region(self, block) -> RegionRef:
        (top, bottom), (left, right) = block
        return RegionRef(self.user[Matrix.C], top, left, bottom - top, right - left)

    def c_buffer(self, rank: int, block, dtype: DType, role: Role) -> RegionRef:
        (top, bottom), (left, right) = block
        rows, cols = bottom - top, right - left
        return self.whole(self.softbuf(rank, rows, cols, dtype, role, Matrix.C), rows, cols)

    def input_region(self, matrix: Matrix, extent: tuple[int, int], step: tuple[int, int]) -> RegionRef:
        """Return rows `extent` of op(A), or columns of op(B), at k `step`, as stored."""
        trans = self.problem.trans_a if matrix is Matrix.A else self.problem.trans_b
        rows, cols = (extent, step) if (matrix is Matrix.A) == (trans == "N") else (step, extent)
        return RegionRef(self.user[matrix], rows[0], cols[0], rows[1] - rows[0], cols[1] - cols[0])

    def panel(self, rank: int, matrix: Matrix, number: int, piece: RegionRef) -> RegionRef:
        """Return the place for a fetched piece: places are used in turn, and large enough for any step."""
        key = (rank, matrix, number % self.options.places)
        if key not in self.panels:
            steps = -(-self.problem.k // min(self.options.steps, self.problem.k))
            trans = self.problem.trans_a if matrix is Matrix.A else self.problem.trans_b
            k_is_cols = (matrix is Matrix.A) == (trans == "N")
            rows, cols = (piece.rows, steps) if k_is_cols else (steps, piece.cols)
            self.panels[key] = self.softbuf(rank, rows, cols, self.problem.dtype, Role.PANEL, matrix)
        return RegionRef(self.panels[key], 0, 0, piece.rows, piece.cols)


def columns(region: RegionRef, start: int, stop: int) -> RegionRef:
    """Return columns [start, stop) of a region."""
    return region._replace(col=region.col + start, cols=stop - start)


def rows_of(region: RegionRef, start: int, stop: int) -> RegionRef:
    """Return rows [start, stop) of a region."""
    return region._replace(row=region.row + start, rows=stop - start)


def overlap(left: RegionRef, right: RegionRef) -> bool:
    """Return whether two regions of one buffer share an element."""
    return (
        left.row < right.row + right.rows
        and right.row < left.row + left.rows
        and left.col < right.col + right.cols
        and right.col < left.col + left.cols
    )


def inside(inner: RegionRef, outer: RegionRef) -> bool:
    """Return whether `outer` covers `inner`."""
    return (
        outer.row <= inner.row
        and outer.col <= inner.col
        and outer.row + outer.rows >= inner.row + inner.rows
        and outer.col + outer.cols >= inner.col + inner.cols
    )
