"""
The schedule of the Uncut-GEMMs paper (sections III-A to III-G): geometry and memory here, tasks natively.

What happens to one sub-problem (i, j, p) of a rank, C_ij += op(A)_ip op(B)_pj:

* A and B tiles that the rank lacks are fetched into its panels. With batching one fetch serves all
  ranks of the grid row (A) or column (B): the tile is cut into chunks along its stored columns,
  which pass from rank to rank. A rank that holds a matrix itself reads it in place.
* C is fetched with the first sub-problem of its tile, or with the last (WR-lazy); where C is at home the
  product is formed in place. Half types sum in float32 and are rounded once, by a COMBINE at the end.
* All sub-problems of a C tile are on one compute lane; the first one that is scheduled carries
  beta. The last one is followed by COMBINE (WR-lazy, half types) and the write-back.

* Where a link is much slower than a chain of links over one or two other ranks (`RELAY_GAIN`), a tile may go
  over the chain, in chunks: with routing "bw" always, with "eta" if it then arrives earlier. C tiles likewise, both
  ways. Ranks on the way keep the copies, in a cache, and are sources for later fetches; one that needs the
  tile itself takes it into its panel. A rank without room for a copy passes nothing on.

Who issues a copy: whoever's private host memory it touches; between shared host memory and a device,
the device; between devices, the source (push). One lane per (issuing rank, source, destination), and between
devices another for C tiles on their way back, which await their products.
Without overlap each rank has one lane and pulls what it needs.

The order "eta" (III-G1) serves ranks in turn. A sub-problem's start is the later of its tiles' ETA (of the
best routes, if some have yet to be fetched) and the end of what the rank computes already. Among
sub-problems whose tiles have all arrived by then: the most advanced C tile, then the lowest (j, i), then the
earliest ETA and the lowest p. If there is none, the smallest of

1. start;
2. the number of tiles to fetch for it;
3. the number of sub-problems that its one missing tile would make ready, the larger the better;
4. (j, i, p).

Without batching, of the steps p of which a rank has no tile yet only the first 8 are looked at.

The order "finish" puts before 2 whether the sub-problem opens a new C tile, so that C tiles finish, and are
written back, one after the other.

Times are the model's, as integers in picoseconds, so that equal inputs give equal bytes anywhere.
Without caching no copy is ever nearer than another, so the order is the fixed one.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import ParamError, PlanError
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Location, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.decomposition import Decomposition, candidate_tiles
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.layout import Layout, aligned_ld
from uncut_mpi.planning.options import ROUTINGS, ScheduleOptions
from uncut_mpi.planning.schedule import (
    AWAIT_DTYPE,
    LANE_DTYPE,
    OPERAND_DTYPE,
    REGION_DTYPE,
    TASK_DTYPE,
    Matrix,
    Role,
    Schedule,
)

MIN_CHUNK_COLUMNS: Final = 100
"""Fewest stored columns in a chunk of a batched fetch."""

MIN_CHUNK_BYTES: Final = 256 * 1024
"""Smallest chunk: below it a copy's fixed cost (some 2.5 µs) outweighs what it moves at 400 GB/s."""

CHUNKS_PER_HOP: Final = 2
"""Chunks for each hop of a chain but the first, where the options leave their number open."""

MAX_TASKS: Final = 20_000_000
"""Most tasks of a schedule; beyond, its tables alone would take gigabytes on every rank."""

RELAY_GAIN: Final = 1.5
"""
How many times as fast as a link a chain over relays has to be: it occupies two or three links instead of one.

Links that differ by less, as by the distance to a host's memory or by how they were measured, stay in use.
"""

_PRIVATE_NONE: Final = -1
_PS_PER_S: Final = 1e12


@dataclasses.dataclass(frozen=True, slots=True)
class UncutResult:
    """
    A schedule and what its model says.

    Attributes
    ----------
    schedule : Schedule
        The tasks of all ranks.
    predicted_s : float
        When the last task is over: ETA plus compute, every rank starting at 0.
    decomposition : Decomposition
        Blocks and tiles.
    """

    schedule: Schedule
    predicted_s: float
    decomposition: Decomposition


def schedule(
    problem: GemmProblem, placement: Placement, num_ranks: int, machine: Machine, options: ScheduleOptions
) -> UncutResult:
    """
    Return the paper's schedule for a problem.

    Pure: the same arguments give the same bytes.

    Raises
    ------
    ParamError
        If the placement, the grid or the devices name ranks that do not exist, the machine has fewer
        ranks, or there is not one share for each grid row and column.
    CapacityError
        If a rank's panels do not fit its device memory beside the matrices that live there.
    PlanError
        If the tile asked for makes more than `MAX_TASKS` tasks.
    """
    placement.check_ranks(num_ranks)
    if machine.num_ranks != num_ranks:
        raise ParamError(f"machine {machine.name} has {machine.num_ranks} ranks, the session has {num_ranks}")
    devices = _devices(num_ranks, options)
    grid = ProcessGrid.choose(len(devices), options.grid)
    tile = _tile(problem, placement, grid, devices, machine, options)
    decomposition = Decomposition.make(problem, grid, tile, options.row_shares, options.col_shares)
    _check_size(decomposition, options)

    workers = _workers(problem, placement, decomposition, devices)
    layout = Layout(num_ranks, problem, placement)
    panels = _Panels(layout, problem, placement, workers, lazy=_is_lazy(problem, placement, options))
    layout.check_capacity(machine)
    native = _native_input(problem, placement, machine, options, decomposition, workers, panels)
    _set_relays(native, problem, machine, options, layout)
    tasks, operands, regions, awaits, lanes, caches, end_ps = _native.schedule_uncut(native)
    for rank, matrix, slots in caches:
        rows, cols = native.slot_shape[matrix]
        layout.add(rank, (rows, slots * cols), problem.dtype, Matrix(matrix), Role.CACHE)
    result = Schedule(
        num_ranks=num_ranks,
        problem=problem,
        placement=placement,
        scheduler="uncut",
        grid=(grid.rows, grid.cols),
        splits=1,
        tile=decomposition.tile,
        tasks=tasks.view(TASK_DTYPE),
        operands=operands.view(OPERAND_DTYPE),
        regions=regions.view(REGION_DTYPE),
        awaits=awaits.view(AWAIT_DTYPE),
        buffers=layout.table(),
        lanes=lanes.view(LANE_DTYPE),
    )
    return UncutResult(result, end_ps / _PS_PER_S, decomposition)


def _is_lazy(problem: GemmProblem, placement: Placement, options: ScheduleOptions) -> bool:
    """WR-lazy is worth its memory only where C would queue behind A or B on the same links (section III-F)."""
    return options.wr_lazy and problem.reads_c and placement.c in (placement.a, placement.b)


def _devices(num_ranks: int, options: ScheduleOptions) -> tuple[int, ...]:
    """Return the ranks that compute, in grid order."""
    if options.devices is None:
        return tuple(range(num_ranks))
    if max(options.devices) >= num_ranks:
        raise ParamError(
            f"rank {max(options.devices)} shall compute (devices, --compute-ranks), but there are {num_ranks} ranks "
            f"(0 to {num_ranks - 1}): start more ranks or leave it out"
        )
    return options.devices


def _tile(
    problem: GemmProblem,
    placement: Placement,
    grid: ProcessGrid,
    devices: tuple[int, ...],
    machine: Machine,
    options: ScheduleOptions,
) -> int:
    bound_s = 0.0
    if not options.tile:
        bound_s = bound(problem, placement, machine).seconds
    if not options.tile and problem.has_product:  # the bound is for all ranks
        bound_s = max(bound_s, problem.flops / float(machine.gemm_rate(problem.dtype)[list(devices)].sum()))
    return candidate_tiles(problem, grid, options, 1, bound_s=bound_s)[0]


def _check_size(decomposition: Decomposition, options: ScheduleOptions) -> None:
    tiles = decomposition.num_sub_problems() * (1 if options.caching else 3)
    if tiles > MAX_TASKS:
        raise PlanError(
            f"tile {decomposition.tile} makes {tiles} tasks of {decomposition.m}×{decomposition.n}×{decomposition.k}, "
            f"the limit is {MAX_TASKS}: ask for a larger tile, or for none"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Worker:
    """A rank that computes: its rows and columns of C."""

    rank: int
    rows: int
    cols: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Workers:
    """Who computes which block, as a grid of its own: the process grid, or C's owner alone when C is only scaled."""

    grid: ProcessGrid
    ranks: list[int]
    row_starts: list[int]
    col_starts: list[int]

    def working(self) -> list[_Worker]:
        found = []
        for cell, rank in enumerate(self.ranks):
            row, col = self.grid.position(cell)
            rows = self.row_starts[row + 1] - self.row_starts[row]
            cols = self.col_starts[col + 1] - self.col_starts[col]
            if rows and cols:
                found.append(_Worker(rank, rows, cols))
        return found


def _workers(
    problem: GemmProblem, placement: Placement, decomposition: Decomposition, devices: tuple[int, ...]
) -> _Workers:
    if not problem.has_product and placement.c.rank is not None:
        return _Workers(ProcessGrid(1, 1), [placement.c.rank], [0, problem.m], [0, problem.n])
    grid = decomposition.grid
    return _Workers(grid, list(devices[: grid.size]), list(decomposition.row_starts), list(decomposition.col_starts))


class _Panels:
    """Each working rank's buffers, by rank; −1 for those that it does without."""

    def __init__(
        self, layout: Layout, problem: GemmProblem, placement: Placement, workers: _Workers, *, lazy: bool
    ) -> None:
        num_ranks = len(layout.softbuf_bytes)
        self.a_panel, self.b_panel, self.c_panel, self.c_staging = ([-1] * num_ranks for _ in range(4))
        self._layout = layout
        for worker in workers.working():
            self._add_worker(worker, problem, placement, lazy)

    def _add_worker(self, worker: _Worker, problem: GemmProblem, placement: Placement, lazy: bool) -> None:
        rank, dtype, k, add = worker.rank, problem.dtype, problem.k, self._layout.add
        home = {name: getattr(placement, name) == Location.device(rank) for name in "abc"}
        block = (worker.rows, worker.cols)
        if not problem.has_product:
            if not home["c"]:
                self.c_staging[rank] = add(rank, block, dtype, Matrix.C, Role.STAGING)
            return
        if not home["a"]:
            shape = (worker.rows, k) if problem.trans_a == "N" else (k, worker.rows)
            self.a_panel[rank] = add(rank, shape, dtype, Matrix.A, Role.PANEL)
        if not home["b"]:
            shape = (k, worker.cols) if problem.trans_b == "N" else (worker.cols, k)
            self.b_panel[rank] = add(rank, shape, dtype, Matrix.B, Role.PANEL)
        if dtype.is_half or not home["c"]:
            self.c_panel[rank] = add(rank, block, dtype.accumulator, Matrix.C, Role.PANEL)
        if not home["c"] and (dtype.is_half or lazy):
            self.c_staging[rank] = add(rank, block, dtype, Matrix.C, Role.STAGING)


def _native_input(
    problem: GemmProblem,
    placement: Placement,
    machine: Machine,
    options: ScheduleOptions,
    decomposition: Decomposition,
    workers: _Workers,
    panels: _Panels,
) -> _native.UncutInput:
    given = _native.UncutInput()
    given.m, given.n, given.k, given.tile = problem.m, problem.n, problem.k, decomposition.tile
    given.num_ranks = machine.num_ranks
    given.rows, given.cols = workers.grid.rows, workers.grid.cols
    given.trans_a, given.trans_b = problem.trans_a == "T", problem.trans_b == "T"
    given.reads_c, given.product, given.half = problem.reads_c, problem.has_product, problem.dtype.is_half
    given.itemsize, given.accumulator_itemsize = problem.dtype.itemsize, problem.dtype.accumulator.itemsize
    given.set_origins(*(_origin(location, machine.host) for location in (placement.a, placement.b, placement.c)))

    given.caching, given.overlap = options.caching, options.overlap
    given.batch = options.batch and options.caching
    given.lazy = _is_lazy(problem, placement, options)
    given.eta_order = options.order != "fixed"
    given.finish_first = options.order == "finish"
    given.set_routing(ROUTINGS.index(options.routing if options.caching else "origin"))
    given.chunks = options.most_chunks
    given.chunks_per_hop = CHUNKS_PER_HOP if options.chunks is None else 0
    given.compute_lanes = options.compute_lanes if options.overlap else 1
    given.min_chunk_columns = MIN_CHUNK_COLUMNS
    given.min_chunk_bytes = options.min_chunk_bytes or MIN_CHUNK_BYTES

    given.row_starts, given.col_starts = workers.row_starts, workers.col_starts
    given.cell_rank = workers.ranks
    given.a_panel, given.b_panel = panels.a_panel, panels.b_panel
    given.c_panel, given.c_staging = panels.c_panel, panels.c_staging

    host_shared = Location.host() in (placement.a, placement.b, placement.c)
    bandwidth = machine.links(sharing=[worker.rank for worker in workers.working()] if host_shared else [])
    ps_per_byte = np.divide(1000.0, bandwidth, out=np.zeros(bandwidth.shape), where=bandwidth > 0)
    given.ps_per_byte = ps_per_byte.ravel().tolist()
    given.latency_ps = np.rint(machine.latency_s * _PS_PER_S).astype(np.int64).ravel().tolist()
    rate = machine.typical_gemm_rate(problem.dtype) if problem.has_product else np.ones(machine.num_ranks)
    given.ps_per_flop = (_PS_PER_S / rate).tolist()
    return given


def _set_relays(
    given: _native.UncutInput, problem: GemmProblem, machine: Machine, options: ScheduleOptions, layout: Layout
) -> None:
    """Say how tiles may be relayed; needs the blocks and the tile."""
    if options.caching and options.routing != "origin":
        given.max_hops = options.max_hops
    given.relay_gain = 1.0 / RELAY_GAIN
    rows, cols = (
        min(given.tile, max(stop - start for start, stop in itertools.pairwise(starts)))
        for starts in (given.row_starts, given.col_starts)
    )
    inner = min(given.tile, problem.k)
    shapes = (
        (rows, inner) if problem.trans_a == "N" else (inner, rows),
        (inner, cols) if problem.trans_b == "N" else (cols, inner),
        (rows, cols),
    )
    given.slot_shape = shapes
    given.slot_bytes = tuple(aligned_ld(rows, problem.dtype) * cols * problem.dtype.itemsize for rows, cols in shapes)
    given.first_cache = layout.num_buffers()
    given.cache_room = layout.free_bytes(machine)
    given.port_ps_per_byte = [1000.0 / port.expected_gb_per_s for port in machine.ports]
    given.port_uses = [
        (number, *link, weight)
        for number, port in enumerate(machine.ports)
        for link, weight in zip(port.links, port.weights, strict=True)
    ]


def _origin(location: Location, host: int) -> tuple[int, int]:
    """Return (location number, rank whose link alone reaches it or −1)."""
    if location.space == "device":
        assert location.rank is not None  # a device location always names its rank
        return location.rank, _PRIVATE_NONE
    return host, _PRIVATE_NONE if location.rank is None else location.rank
