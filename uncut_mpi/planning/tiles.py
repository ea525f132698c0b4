"""
What schedulers of tiles have in common: the panels of the ranks that compute, and the call that makes the tasks.

A scheduler of tiles says who computes which tiles of C (`TileWorkers`) and with which of the engine's means
(`ScheduleOptions` as `uncut` has them). `uncut_mpi.planning.uncut` says what the engine does with them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from uncut_mpi import _native
from uncut_mpi.model.locations import location_table, nodes_of, with_ends
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.buffers import (
    BUFFER_ALIGNMENT,
    Buffers,
    homes,
    panel_bytes,
    parts_on_devices,
    user_pieces,
    user_table,
)
from uncut_mpi.planning.decomposition import count_tiles
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.limits import MAX_TASKS, too_many
from uncut_mpi.planning.options import ROUTINGS, ScheduleOptions
from uncut_mpi.planning.schedule import Matrix, Op, Role, Schedule
from uncut_mpi.planning.setting import Setting

MIN_CHUNK_COLUMNS: Final = 100
"""Fewest stored columns in a chunk of a batched fetch."""

MIN_CHUNK_BYTES: Final = 256 * 1024
"""Smallest chunk: below it a copy's fixed cost (some 2.5 µs) outweighs what it moves at 400 GB/s."""

CHUNKS_PER_HOP: Final = 2
"""Chunks for each hop of a chain but the first, where the options leave their number open."""

USUAL_HOPS: Final = 1
"""Most ranks that a tile is relayed over where nothing is asked for, as in PARALiA."""

RELAY_GAIN: Final = 1.5
"""
How many times as fast as a link a chain over relays has to be: it occupies two or three links instead of one.

Links that differ by less, as by the distance to a host's memory or by how they were measured, stay in use.
"""

LARGER_TILE: Final = "ask for a larger tile, or for none"

_MOST_PS: Final = 2.0**60
# Of the estimate of how long all tasks take one after the other: chunks and relays, and links that share a port.
_TASKS_PER_COPY: Final = 32
_PORT_WEIGHT: Final = 4.0

_PS_PER_S: Final = 1e12


class _Worker(NamedTuple):
    """A rank that computes: how many rows and columns of C it has in panels, and between which all of them lie."""

    rank: int
    rows: int
    cols: int
    block: tuple[range, range]


@dataclasses.dataclass(frozen=True, slots=True)
class TileWorkers:
    """
    Who computes which tiles of C.

    Attributes
    ----------
    ranks : list of int
        Who computes: each block's rank, row by row, or those that tiles of a single block are dealt out to.
    row_starts, col_starts : sequence of int
        Where the blocks of C begin, and where the last ends (elements).
    tile : int
        Tile edge (elements); each block is tiled from its own start.
    owned : list of list of int
        Of each rank the tiles of C that are dealt out to it, in the order of its work, numbered down the columns.
        Empty: every rank computes its block.
    """

    ranks: list[int]
    row_starts: Sequence[int]
    col_starts: Sequence[int]
    tile: int
    owned: list[list[int]] = dataclasses.field(default_factory=list)

    def working(self) -> list[_Worker]:
        """Return the ranks with work, and the rows and columns that their panels hold."""
        if self.owned:
            return self._dealt()
        down, along = ([*itertools.starmap(range, itertools.pairwise(at))] for at in (self.row_starts, self.col_starts))
        blocks = zip(self.ranks, itertools.product(down, along), strict=True)
        return [_Worker(rank, len(rows), len(cols), (rows, cols)) for rank, (rows, cols) in blocks if rows and cols]

    def _dealt(self) -> list[_Worker]:
        m, n = self.row_starts[-1], self.col_starts[-1]
        heights, widths = (_tile_sizes(extent, self.tile) for extent in (m, n))
        return [
            _Worker(
                rank,
                sum(heights[i] for i in {tile % len(heights) for tile in owned}),
                sum(widths[j] for j in {tile // len(heights) for tile in owned}),
                (range(m), range(n)),
            )
            for rank, owned in zip(self.ranks, self.owned, strict=True)
            if owned
        ]

    def num_tiles(self) -> int:
        """Return the number of tiles of C."""
        return count_tiles(self.row_starts, self.tile) * count_tiles(self.col_starts, self.tile)


def _tile_sizes(extent: int, tile: int) -> list[int]:
    return [min(tile, extent - start) for start in range(0, extent, tile)]


def _tiles_by_size(extents: Sequence[int], tile: int) -> dict[int, int]:
    """Return how many tiles of some extents have which size, of however many there are."""
    found: dict[int, int] = {}
    for extent in extents:
        whole, rest = divmod(extent, tile)
        for size, count in ((tile, whole), (rest, 1)):
            if size and count:
                found[size] = found.get(size, 0) + count
    return found


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PreparedTiles:
    """
    What the core makes a schedule of tiles of; it may do so elsewhere.

    Attributes
    ----------
    given : UncutInput
        For `_native.schedule_uncut`.
    options : ScheduleOptions
        Those asked for, with what was chosen; the schedule has its scheduler's name.
    grid : ProcessGrid
        The schedule's.
    setting : Setting
        What is asked for.
    buffers : Buffers
        Panels of the ranks, to which the caches of relays are added: one schedule alone can be made.
    unit_ps : int
        Of times in `given` (ps).
    """

    given: _native.UncutInput
    options: ScheduleOptions
    grid: ProcessGrid
    setting: Setting
    buffers: Buffers
    unit_ps: int = 1

    def schedule(self) -> tuple[Schedule, float]:
        """
        Return the schedule, once, and when its last task is over by ETA plus compute (s).

        Raises
        ------
        PlanError
            If there are more than `most_tasks` tasks.
        """
        given, tile = self.given, self.given.tile
        try:
            *tables, caches, end_ps = _native.schedule_uncut(given)
        except _native.TooManyTasksError as error:
            tasks = f"more than {given.most_tasks} tasks"
            raise too_many(self.setting.problem, f"tile {tile}", tasks, given.most_tasks, LARGER_TILE) from error
        for rank, matrix, tiles in caches:
            rows, cols = given.tile_shape[matrix]
            dtype = self.setting.problem.dtypes[matrix]
            self.buffers.add(rank, (rows, tiles * cols), dtype, Matrix(matrix), Role.CACHE)
        result = self.setting.schedule(
            self.buffers.table(),
            tables,
            scheduler=self.options.scheduler,
            grid=(self.grid.rows, self.grid.cols),
            splits=1,
            tile=tile,
        )
        return result, end_ps * self.unit_ps / _PS_PER_S


def prepare_tiles(
    setting: Setting, workers: TileWorkers, *, chosen: ScheduleOptions, grid: ProcessGrid, most_tasks: int = MAX_TASKS
) -> PreparedTiles:
    """
    Return what a schedule of tiles is made of.

    Parameters
    ----------
    setting : Setting
        With the engine's options.
    workers : TileWorkers
        Who computes what.
    chosen : ScheduleOptions
        The scheduler's, with everything set.
    grid : ProcessGrid
        What the schedule is said to be on.
    most_tasks : int, optional
        The limit.

    Raises
    ------
    CapacityError
        If a rank's panels do not fit its device memory beside the matrices that live there.
    PlanError
        If there would surely be more than `most_tasks` tasks.
    """
    problem, placement, machine, options = setting.problem, setting.placement, setting.machine, setting.options
    tasks = least_tasks(problem, placement, workers, options)
    if tasks > most_tasks:  # surely too many: refused before any are made
        raise too_many(problem, f"tile {workers.tile}", f"{tasks} tasks or more", most_tasks, LARGER_TILE)
    buffers = Buffers(machine.ranks, problem, placement)
    native = _native.UncutInput(_common_input(problem, placement, machine))
    native.most_tasks = most_tasks
    _set_options(native, options)
    # WR-lazy is worth its memory only where C would queue behind A or B on the same links (section III-F).
    native.lazy = options.wr_lazy and problem.reads_c and placement.c_beside_inputs
    working = workers.working()
    _set_workers(native, workers, working, problem, placement, buffers)
    setting.check_capacity(buffers.arena_bytes)
    native.ps_per_byte = _ps_per_byte(machine, tuple(one.rank for one in working) if placement.in_shared_host else ())
    _set_relays(native, setting, buffers)
    return PreparedTiles(native, chosen, grid, setting, buffers, _set_unit(native, problem, machine, tasks))


def _set_unit(given: _native.UncutInput, problem: GemmProblem, machine: Machine, tasks: int) -> int:
    """Count times in longer units than picoseconds where days of them might not fit 64 bits, and return the unit."""
    rows, cols = given.tile_shape[2]
    longest = 2.0 * rows * cols * min(given.tile, problem.k) * max(given.ps_per_flop)
    longest += max(given.tile_bytes) * _slowest_ps_per_byte(machine)
    unit = max(1, math.ceil(longest * _TASKS_PER_COPY * tasks / _MOST_PS))
    if unit > 1:
        given.latency_ps = [latency // unit for latency in given.latency_ps]
        for name in ("ps_per_flop", "ps_per_byte", "port_ps_per_byte"):
            setattr(given, name, [each / unit for each in getattr(given, name)])
    return unit


def least_tasks(problem: GemmProblem, placement: Placement, workers: TileWorkers, options: ScheduleOptions) -> int:
    """
    Return how many tasks there are at least: products, and copies of tiles of A, B and C.

    Of matrices in parts, whose cuts make more tiles, only products are counted.
    """
    steps = -(-problem.k // workers.tile)
    products = workers.num_tiles() * steps
    if placement.in_parts:
        return products
    if workers.owned:
        height = -(-workers.row_starts[-1] // workers.tile)
        for rank, owned in zip(workers.ranks, workers.owned, strict=True):
            heights, widths = {tile % height for tile in owned}, {tile // height for tile in owned}
            products += len(heights) * steps * (placement.device_of(Matrix.A) != rank)
            products += len(widths) * steps * (placement.device_of(Matrix.B) != rank)
        return products
    if not options.caching:
        return products * (1 + placement.in_host(Matrix.A) + placement.in_host(Matrix.B))
    rows, cols = (
        [stop - start for start, stop in itertools.pairwise(starts) if stop > start]
        for starts in (workers.row_starts, workers.col_starts)
    )
    tasks = products
    for blocks, others, matrix, inner_is_columns in (
        (rows, cols, Matrix.A, problem.trans_a == "N"),
        (cols, rows, Matrix.B, problem.trans_b != "N"),
    ):
        takers = len(others) - placement.on_device(matrix)  # the owner of a matrix fetches none of it
        sizes, depths = _tiles_by_size(blocks, workers.tile), _tiles_by_size([problem.k], workers.tile)
        for (size, tiles), (depth, deep) in itertools.product(sizes.items(), depths.items()):
            columns = depth if inner_is_columns else size
            chunks = _chunks_of_tile(size * depth * problem.dtypes[matrix].itemsize, columns, takers, options)
            tasks += takers * tiles * deep * chunks
    return tasks


def _chunks_of_tile(size_bytes: int, columns: int, takers: int, options: ScheduleOptions) -> int:
    """Return into how many chunks a tile of A or B is cut for so many ranks, as the scheduler does without relays."""
    if not options.batch or takers < 2:
        return 1
    most = CHUNKS_PER_HOP * (takers - 1) if options.chunks is None else options.chunks
    least_bytes = options.min_chunk_bytes or MIN_CHUNK_BYTES
    return max(1, min(most, options.most_chunks, columns // MIN_CHUNK_COLUMNS, size_bytes // least_bytes))


def _set_workers(
    given: _native.UncutInput,
    workers: TileWorkers,
    working: list[_Worker],
    problem: GemmProblem,
    placement: Placement,
    buffers: Buffers,
) -> None:
    """Say who computes what, and add their buffers; −1 for those that a rank does without."""
    given.tile = workers.tile
    given.row_starts, given.col_starts = workers.row_starts, workers.col_starts
    given.cell_rank, given.owned = workers.ranks, workers.owned
    a_panel, b_panel, c_panel, c_staging = ([-1] * len(nodes_of(buffers.ranks)) for _ in range(4))
    (of_a, of_b, of_c), k, add = problem.dtypes, problem.k, buffers.add
    held = parts_on_devices(problem, placement)
    for rank, rows, cols, block in working:
        home = homes(problem, held.get(rank, ()), *block, range(k))
        if Matrix.A not in home:
            shape = (rows, k) if problem.trans_a == "N" else (k, rows)
            a_panel[rank] = add(rank, shape, of_a, Matrix.A, Role.PANEL)
        if Matrix.B not in home:
            shape = (k, cols) if problem.trans_b == "N" else (cols, k)
            b_panel[rank] = add(rank, shape, of_b, Matrix.B, Role.PANEL)
        if problem.rounds_c or Matrix.C not in home:
            c_panel[rank] = add(rank, (rows, cols), problem.accumulator, Matrix.C, Role.PANEL)
        if Matrix.C not in home and (problem.rounds_c or given.lazy):
            c_staging[rank] = add(rank, (rows, cols), of_c, Matrix.C, Role.STAGING)
    given.a_panel, given.b_panel = a_panel, b_panel
    given.c_panel, given.c_staging = c_panel, c_staging


def _set_options(given: _native.UncutInput, options: ScheduleOptions) -> None:
    given.caching, given.overlap = options.caching, options.overlap
    given.batch = options.batch and options.caching
    given.eta_order = options.order != "fixed"
    given.finish_first = options.order == "finish"
    given.routing = ROUTINGS.index(options.routing if options.caching else "origin")
    given.chunks = options.most_chunks
    given.chunks_per_hop = CHUNKS_PER_HOP if options.chunks is None else 0
    given.compute_lanes = options.compute_lanes if options.overlap else 1
    given.min_chunk_bytes = options.min_chunk_bytes or MIN_CHUNK_BYTES


@functools.lru_cache(maxsize=8)  # the same for every schedule that a search tries
def _common_input(problem: GemmProblem, placement: Placement, machine: Machine) -> _native.UncutInput:
    """Return what a problem and a machine say alone."""
    given = _native.UncutInput()
    given.m, given.n, given.k, given.num_ranks = problem.m, problem.n, problem.k, machine.num_ranks
    given.op_a, given.op_b = Op[problem.trans_a], Op[problem.trans_b]
    given.reads_c, given.dtypes = problem.reads_c, problem.dtypes
    users = user_table(machine.ranks, problem, placement)
    given.set_pieces(with_ends(location_table(machine.ranks)), users, user_pieces(problem, placement))
    given.serial_copies = machine.serial_copies
    given.min_chunk_columns = MIN_CHUNK_COLUMNS
    given.latency_ps = np.rint(machine.latency_s * _PS_PER_S).astype(np.int64).ravel().tolist()
    given.ps_per_flop = (_PS_PER_S / machine.typical_gemm_rate(problem.arithmetic)).tolist()
    given.relay_gain = 1.0 / RELAY_GAIN
    given.port_ps_per_byte = [1000.0 / port.expected_gb_per_s for port in machine.ports]
    given.port_uses = [
        (number, *link, weight)
        for number, port in enumerate(machine.ports)
        for link, weight in zip(port.links, port.weights, strict=True)
    ]
    return given


@functools.lru_cache(maxsize=32)
def _slowest_ps_per_byte(machine: Machine) -> float:
    """Return what a byte takes over the slowest link or port, many of which share one."""
    links = machine.bandwidth_gb_per_s.astype(np.float64)
    rates = [float(links[links > 0].min(initial=np.inf)), *(port.expected_gb_per_s for port in machine.ports)]
    return 1000.0 * _PORT_WEIGHT * machine.num_ranks / min(rates)


@functools.lru_cache(maxsize=32)
def _ps_per_byte(machine: Machine, sharing: tuple[int, ...]) -> list[float]:
    bandwidth = machine.links(sharing=sharing)
    table: list[float] = (
        np.divide(1000.0, bandwidth, out=np.zeros(bandwidth.shape), where=bandwidth > 0).ravel().tolist()
    )
    return table


def _set_relays(given: _native.UncutInput, setting: Setting, buffers: Buffers) -> None:
    """Say how tiles may be relayed; needs the blocks and the tile."""
    problem, options = setting.problem, setting.options
    if options.caching and options.routing != "origin":
        given.max_hops = USUAL_HOPS if options.max_hops is None else options.max_hops
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
    given.tile_shape = shapes
    given.tile_bytes = tuple(map(panel_bytes, shapes, problem.dtypes))
    given.first_cache = buffers.num_buffers()
    # Beside one more buffer's alignment per matrix.
    taken = zip(setting.room, buffers.arena_bytes, strict=False)
    given.cache_bytes = [room - needed - 3 * BUFFER_ALIGNMENT for room, needed in taken]
