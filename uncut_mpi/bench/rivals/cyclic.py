"""
PARALiA's schedule: tiles of C dealt out to devices that its model chooses, each tile fetched from the nearest copy.

From P. Anastasiadis, N. Papadopoulou, G. Goumas, N. Koziris, D. Hoppe and L. Zhong, *PARALiA: a performance aware
runtime for auto-tuning linear algebra on heterogeneous systems* (ACM TACO, 2023).

* Devices and shares have the least predicted `metric` (sections 3.1 and 3.3, `paralia.Predictor.select`).
  Shares that are given are kept: equal ones of all ranks are the paper's ``comm_opt``. T has the least predicted time.
* Tiles of C are dealt out in the order in which C is stored, to each device no more than its share (section 3.6).
* A tile of A or B is fetched when a device first needs it, and kept. It comes over the fastest link from where it is or
  will be, or over another device where that is faster (section 3.2).
* With a matrix in host memory, ways over other devices are taken only if `max_hops` is given. The model judges links at
  rest, so all transfers would meet at one device. The authors name congestion as future work.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Final

from uncut_mpi.bench.rivals import paralia
from uncut_mpi.errors import ParamError, PlanError
from uncut_mpi.model.placement import MATRICES
from uncut_mpi.planning.description import grid_text
from uncut_mpi.planning.grid import ProcessGrid, share_starts
from uncut_mpi.planning.limits import MAX_TASKS, coarse_enough, too_many
from uncut_mpi.planning.metrics import METRICS, Cost, metric_of
from uncut_mpi.planning.options import ScheduleOptions, changed
from uncut_mpi.planning.others import Scheduler
from uncut_mpi.planning.ranks import ranks_by_use
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.tiles import LARGER_TILE, USUAL_HOPS, PreparedTiles, TileWorkers, prepare_tiles

DISTRIBUTIONS: Final = ("2d-cyclic", "1d-cyclic", "round-robin", "sequential")
"""How tiles of C are dealt out: the first one unless the scheduler's name says another."""

COMM_OPT: Final = "comm-opt"
"""Without its choice: all devices, in equal shares."""

VARIANTS: Final = (COMM_OPT, *METRICS, *DISTRIBUTIONS)
"""What may follow the name: no choice, the metric by which it chooses ranks and shares, or how tiles are dealt out."""


def distribution_of(options: ScheduleOptions) -> str:
    """Return how tiles are dealt out."""
    variant = options.scheduler.partition(":")[2]
    return variant if variant in DISTRIBUTIONS else DISTRIBUTIONS[0]


def schedule(setting: Setting, *, most_tasks: int = MAX_TASKS) -> tuple[Schedule, ScheduleOptions]:
    """
    Return PARALiA's schedule for a problem that has a product, and the options with devices and tile chosen.

    Pure and deterministic.

    Parameters
    ----------
    setting : Setting
        `scheduler`, which may name one of `VARIANTS`, `devices`, `tile`, `grid` (for ``"2d-cyclic"``), its shares,
        `max_hops` and `compute_lanes` are taken from its options.

    Raises
    ------
    ParamError
        If grid, shares or devices do not fit the ranks, or the metric needs watts that the machine lacks.
    PlanError
        If there is no product, or too many tiles.
    CapacityError
        If a rank has too little device memory for its panels.
    """
    prepared = prepare(setting, most_tasks=most_tasks)
    return dataclasses.replace(prepared.schedule()[0], scheduler="cyclic"), prepared.options


def prepare(setting: Setting, *, most_tasks: int = MAX_TASKS) -> PreparedTiles:
    """Return what `schedule` makes a schedule of, so that it can be made elsewhere; it raises the same errors."""
    problem, placement, machine, options = setting.problem, setting.placement, setting.machine, setting.options
    if not problem.has_product:
        raise PlanError("cyclic schedules products; C is only scaled here")
    usual = 0 if placement.in_host() else USUAL_HOPS
    hops = usual if options.max_hops is None else options.max_hops
    predictor = paralia.Predictor(problem, placement, machine, hops)
    grid, devices, ratios = _places(predictor, options)
    tile = options.tile or predictor.tile_edge(devices, ratios)
    largest = max(1, problem.m, problem.n, problem.k)
    tile = min(tile, largest)

    def products(edge: int) -> int:
        return -(-problem.m // edge) * -(-problem.n // edge) * -(-problem.k // edge)

    if not options.tile:  # a product has two copies of its own, unless others share them
        tile = coarse_enough(tile, largest, lambda edge: 3 * products(edge))
    if products(tile) > most_tasks:  # before that many tiles are dealt
        raise too_many(problem, f"tile {tile}", f"at least {products(tile)} tasks", most_tasks, LARGER_TILE)
    rows, cols = -(-problem.m // tile), -(-problem.n // tile)
    owned = deal(rows, cols, grid, ratios, distribution_of(options))
    workers = TileWorkers(list(devices), [0, problem.m], [0, problem.n], tile, owned)
    engine = changed(options, scheduler="uncut", routing="bw", order="fixed", batch=False, wr_lazy=False, max_hops=hops)
    variant = options.scheduler.partition(":")[2]
    chosen = dataclasses.replace(
        options,
        scheduler="cyclic" if variant in METRICS else options.scheduler,  # devices are chosen now
        grid=(grid.rows, grid.cols),
        tile=tile,
        devices=devices,
    )
    asked = setting.but(options=engine)
    return prepare_tiles(asked, workers, chosen=chosen, grid=grid, most_tasks=most_tasks)


def _places(
    predictor: paralia.Predictor, options: ScheduleOptions
) -> tuple[ProcessGrid, tuple[int, ...], tuple[float, ...]]:
    """Return the grid, who computes and the share of each, 1 in all: what is given, the rest by the model."""
    problem, placement, machine = predictor.problem, predictor.placement, predictor.machine
    variant = options.scheduler.partition(":")[2]
    free = not {"devices", "grid", "row_shares", "col_shares"}.intersection(options.given)
    if variant in METRICS and not free:
        raise ParamError(f"cyclic:{variant} chooses who computes and how much: leave devices, grid and shares out")
    if free and variant != COMM_OPT:
        metric = metric_of(variant if variant in METRICS else "time", machine)

        def cost(work: paralia.Workload) -> float:
            seconds = work.seconds
            return metric.of(Cost(seconds, work.watts * seconds))

        work = predictor.select(cost=cost, order=ranks_by_use(problem, placement, machine))
        return ProcessGrid.most_square(len(work.devices), transposed=problem.swapped), work.devices, work.ratios
    devices = options.computing_ranks(machine.num_ranks)
    grid = ProcessGrid.choose(len(devices), options.grid, transposed=problem.swapped)
    devices = devices[: grid.size]
    if variant == COMM_OPT:
        return grid, devices, (1 / grid.size,) * grid.size
    if options.row_shares is None and options.col_shares is None:
        return grid, devices, predictor.workload(devices).ratios
    grid.check_shares(options.row_shares, options.col_shares)
    for matrix in MATRICES:
        placement.of(matrix)  # raises where it is in parts, which tiles that are dealt out know nothing of
    rows, cols = options.row_shares or (1.0,) * grid.rows, options.col_shares or (1.0,) * grid.cols
    whole = math.fsum(rows) * math.fsum(cols)
    places = map(grid.position, range(grid.size))
    return grid, devices, tuple(rows[row] * cols[col] / whole for row, col in places)


def deal(rows: int, cols: int, grid: ProcessGrid, ratios: Sequence[float], distribution: str) -> list[list[int]]:
    """
    Return each place's tiles of C, numbered down the columns, in the order in which they are dealt.

    A tile goes to the place that the pattern names, or to the next one, in the order of places, that still lacks
    some of its share. Tile rows of a transposed grid's C are the caller's tile columns.

    Parameters
    ----------
    rows, cols : int
        Tiles of m and of n.
    grid : ProcessGrid
        Places.
    ratios : sequence of float
        Share of each place, of any sum.
    distribution : str
        ``"2d-cyclic"``, ``"1d-cyclic"``, ``"round-robin"`` or ``"sequential"``.
    """
    starts = share_starts(rows * cols, ratios, 1)
    if distribution == "sequential":
        return [list(range(start, stop)) for start, stop in itertools.pairwise(starts)]
    left = [stop - start for start, stop in itertools.pairwise(starts)]
    owned: list[list[int]] = [[] for _ in left]
    previous = -1
    for tile in range(rows * cols):
        col, row = divmod(tile, rows)
        if distribution == "2d-cyclic":
            place = grid.rank(row % grid.rows, col % grid.cols)
        elif distribution == "1d-cyclic":
            place = (col if grid.transposed else row) % grid.size
        else:
            place = (previous + 1) % grid.size
        while not left[place]:
            place = (place + 1) % grid.size
        left[place] -= 1
        owned[place].append(tile)
        previous = place
    return owned


def describe(schedule: Schedule, options: ScheduleOptions) -> str:
    """Return how such a schedule divides its problem, in words."""
    return f"tiles of {schedule.tile} dealt out {distribution_of(options)} on {grid_text(schedule)}"


SCHEDULER: Final = Scheduler(
    schedule, ("tile", "grid", "devices", "row_shares", "col_shares", "max_hops", "compute_lanes"), describe, VARIANTS
)
