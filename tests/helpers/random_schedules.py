"""Random schedules of every scheduler: problems, placements, machines and all options, from a seed."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np

from tests.helpers.layouts import random_layout
from uncut_mpi.bench.rivals.cyclic import DISTRIBUTIONS
from uncut_mpi.model.costs import GemmShape
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import device_ports
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.options import (
    BLOCK_ORDERS,
    COMBINES,
    DELIVERIES,
    ORDERS,
    ORDERS_BY_K,
    ROUTINGS,
    Blocking,
    ScheduleOptions,
)
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Schedule

SCHEDULERS = ("uncut", "kblocks", "cyclic", "bands")


def random_schedule(
    rng: random.Random, num_ranks: int, scheduler: str, most: int = 60, *, in_parts: bool = False
) -> Schedule:
    """Return a scheduler's schedule of a random problem, placement and machine, with random options of every kind."""

    def location() -> Location:
        rank = rng.choice((0, num_ranks - 1, rng.randrange(num_ranks)))
        device = Location.device(rank)
        return device if scheduler == "bands" else rng.choice((Location.host(), Location.host(rank), device, device))

    def extent() -> int:
        return rng.choice((1, 2, rng.randint(1, 30), rng.randint(1, most)))

    problem = GemmProblem(
        m=extent(),
        n=extent(),
        k=rng.choice((1, 1, 10 if scheduler == "kblocks" else 1)) * extent(),
        dtype=rng.choice(list(DType)),
        trans_a=rng.choice("NTC"),
        trans_b=rng.choice("NTC"),
        **{} if in_parts else {name: rng.choice((0, 10 * most + at)) for at, name in enumerate(("lda", "ldb", "ldc"))},
        reads_c=rng.random() < 0.7,
    )
    if in_parts:
        shapes = problem.a_shape, problem.b_shape, (problem.m, problem.n)
        orders = "F" if scheduler == "uncut" else rng.choice(("F", "FC"))
        placement = Placement(*(random_layout(rng, shape, num_ranks, orders) for shape in shapes))
    else:
        first = location()
        placement = rng.choice((Placement(first, first, first), Placement(first, location(), location())))
    devices = rng.choice((None, None, tuple(rng.sample(range(num_ranks), rng.randint(1, num_ranks)))))
    places = num_ranks if devices is None else len(devices)
    machine = Machine.uniform(num_ranks, latency_s=0.0, memory_bytes=10**10)
    if scheduler == "bands":
        options = ScheduleOptions("bands", tile=rng.choice((0, rng.randint(1, 20))))
    elif scheduler == "cyclic":
        options, machine = _cyclic(rng, places), _with_slow_links(rng, machine)
    elif scheduler == "uncut":
        options = _uncut(rng, places, problem)
        machine = rng.choice((machine, random_machine(rng, num_ranks)))
    else:
        options = _kblocks(rng, places)
        machine = dataclasses.replace(machine, serial_copies=rng.random() < 0.5)
        machine = slow_where_misaligned(machine) if rng.random() < 0.4 else machine
    return plan(problem, placement, num_ranks, machine, dataclasses.replace(options, devices=devices)).schedule


def _cyclic(rng: random.Random, places: int) -> ScheduleOptions:
    rows = rng.randint(1, places)
    return ScheduleOptions(
        f"cyclic:{rng.choice(DISTRIBUTIONS)}",
        tile=rng.choice((0, rng.randint(1, 20))),
        grid=rng.choice((None, (rows, 1), (1, rows))),
        max_hops=rng.randint(0, 2),
        compute_lanes=rng.randint(1, 3),
    )


def _with_slow_links(rng: random.Random, machine: Machine) -> Machine:
    """Return the machine with as many slow links as ranks, which tiles go round."""
    bandwidth = machine.bandwidth_gb_per_s.copy()
    for _ in range(machine.num_ranks):
        bandwidth[rng.randrange(machine.num_ranks), rng.randrange(machine.num_ranks)] = 1.0
    return dataclasses.replace(machine, bandwidth_gb_per_s=bandwidth)


def random_machine(rng: random.Random, num_ranks: int) -> Machine:
    """Return a machine whose links all differ, some by far, so that routes and relays are worth choosing."""
    values = np.random.default_rng(rng.randrange(2**32))
    size = num_ranks + 1
    bandwidth = values.uniform(5, 400, (size, size))
    bandwidth[values.random((size, size)) < rng.choice((0.0, 0.3, 0.8))] *= 0.01
    return dataclasses.replace(
        Machine.uniform(num_ranks, memory_bytes=rng.choice((10**6, 10**10))),  # either way enough for the panels
        bandwidth_gb_per_s=bandwidth,
        ports=tuple(device_ports(range(num_ranks), 300.0, 200.0) if rng.random() < 0.3 else []),
        latency_s=values.uniform(0, 2e-5, (size, size)),
        gemm_tflop_per_s={dtype.name: values.uniform(1, 60, num_ranks) for dtype in DType},
        typical_gemm_tflop_per_s={dtype.name: values.uniform(0.5, 1, num_ranks) for dtype in DType},
    )


def _uncut(rng: random.Random, places: int, problem: GemmProblem) -> ScheduleOptions:
    rows = rng.randint(1, places)
    grid = rng.choice((None, None, (rows, rng.randint(1, places // rows))))
    blocks = ProcessGrid.choose(places, grid)
    least = max(1, round((problem.m * problem.n * problem.k / 10) ** (1 / 3)))  # some sixty tasks
    return ScheduleOptions(
        "uncut",
        tile=rng.choice((0, least, rng.randint(least, least + 40))),
        grid=grid,
        row_shares=rng.choice((None, tuple(rng.uniform(0.1, 3) for _ in range(blocks.rows)))),
        col_shares=rng.choice((None, tuple(rng.uniform(0.1, 3) for _ in range(blocks.cols)))),
        chunks=rng.choice((None, rng.randint(1, 5))),
        min_chunk_bytes=1,
        compute_lanes=rng.choice((1, 2, 8)),
        caching=rng.random() < 0.8,
        overlap=rng.random() < 0.8,
        routing=rng.choice(ROUTINGS),
        batch=rng.random() < 0.6,
        max_hops=rng.choice((None, rng.randint(0, 2))),
        wr_lazy=rng.random() < 0.6,
        order=rng.choice(ORDERS),
    )


def _kblocks(rng: random.Random, places: int) -> ScheduleOptions:
    splits = rng.choice((0, 1, rng.randint(1, places)))
    cells = places // max(1, splits)
    rows = rng.randint(1, cells)
    cols = rng.randint(1, cells // rows)
    block = rng.choice((0, rng.randint(1, 40)))
    order, combine = rng.choice(("", *BLOCK_ORDERS)), rng.choice(("", *COMBINES))
    blocking = Blocking(
        splits=splits,
        first=rng.choice((0, rng.randint(1, min(20, block or 20)))),
        block=block,
        growth=rng.choice((0, 2, 3, 5)),
        columns=rng.choice((0, 1, rng.randint(1, 5))),
        rows=rng.choice((0, 1, rng.randint(1, 5))) if order in ("", "corner") else rng.choice((0, 1)),
        order=order,
        lanes=rng.choice((0, 1, 2)),
        delivery=rng.choice(("", *DELIVERIES)),
        combine=combine,
        away=0 if combine == "worker" else rng.choice((0, rng.randint(1, 7))),
        tail=rng.choice((0, 1, 3, 8, 64)) if order in ORDERS_BY_K else 0,
    )
    if splits and rng.random() < 0.3:
        cuts = sorted(rng.sample(range(1, cells), rng.randint(0, cells - 1)))
        columns = itertools.pairwise([0, *cuts, cells])
        areas = tuple(tuple(rng.uniform(0.1, 3) for _ in range(start, stop)) for start, stop in columns)
        return ScheduleOptions("kblocks", areas=areas, blocking=blocking)
    return ScheduleOptions(
        "kblocks",
        grid=(rows, cols) if splits else rng.choice((None, (rows, cols))),
        row_shares=rng.choice((None, tuple(rng.uniform(0.1, 3) for _ in range(rows)))) if splits else None,
        col_shares=rng.choice((None, tuple(rng.uniform(0.1, 3) for _ in range(cols)))) if splits else None,
        blocking=blocking,
    )


def with_shapes(machine: Machine, **changes: float) -> Machine:
    """Return a machine whose products have other shapes (`GemmShape`), of all types alike."""
    shapes = {name: dataclasses.replace(one, **changes) for name, one in machine.gemm_shape.items()}
    return dataclasses.replace(machine, gemm_shape=shapes)


def slow_where_misaligned(machine: Machine, factor: float = 1e6) -> Machine:
    """Return a machine on which products whose columns are not aligned take so much longer."""
    return dataclasses.replace(machine, gemm_shape={one.name: GemmShape(misaligned=factor) for one in DType})
