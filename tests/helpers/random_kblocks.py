"""Random schedules of kblocks: problems, placements, machines and every option."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Sequence

from uncut_mpi.model.costs import GemmShape
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import BLOCK_ORDERS, COMBINES, DELIVERIES, ORDERS_BY_K, Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Schedule


def random_schedule(
    rng: random.Random,
    num_ranks: int,
    most: int = 60,
    *,
    least: int = 0,
    tails: Sequence[int] = (0,),
) -> tuple[Schedule, ScheduleOptions]:
    """
    Return the schedule of a random problem, placement and choice of every option.

    Other tails change nothing else.
    """

    def location() -> Location:
        rank = rng.choice((0, num_ranks - 1, rng.randrange(num_ranks)))
        return rng.choice((Location.host(), Location.host(rank), Location.device(rank), Location.device(rank)))

    def extent() -> int:
        if least:
            return rng.randint(least, most)
        return rng.choice((1, 2, rng.randint(1, 30), rng.randint(1, most)))

    devices = rng.choice((None, None, tuple(rng.sample(range(num_ranks), rng.randint(1, num_ranks)))))
    places = num_ranks if devices is None else len(devices)
    splits = rng.choice((0, 1, rng.randint(1, places)))
    rows = rng.randint(1, places // max(1, splits))
    cols = rng.randint(1, places // max(1, splits) // rows)
    problem = GemmProblem(
        m=extent(),
        n=extent(),
        k=rng.choice((extent(), (1 if least else 10) * extent())),
        dtype=rng.choice(list(DType)),
        trans_a=rng.choice("NTC"),
        trans_b=rng.choice("NTC"),
        lda=rng.choice((0, 700)),
        ldb=rng.choice((0, 701)),
        ldc=rng.choice((0, 202)),
        reads_c=rng.random() < 0.7,
    )
    block = rng.choice((0, rng.randint(1, 40)))
    combine = rng.choice(("", *COMBINES))
    order = rng.choice(("", *BLOCK_ORDERS))
    options = ScheduleOptions(
        scheduler="kblocks",
        grid=(rows, cols) if splits else rng.choice((None, (rows, cols))),
        devices=devices,
        row_shares=rng.choice((None, tuple(rng.uniform(0.1, 3) for _ in range(rows)))) if splits else None,
        col_shares=rng.choice((None, tuple(rng.uniform(0.1, 3) for _ in range(cols)))) if splits else None,
        blocking=Blocking(
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
        ),
    )
    first = location()
    placement = rng.choice((Placement(first, first, first), Placement(first, location(), location())))
    machine = Machine.uniform(num_ranks, memory_bytes=10**10)
    machine = dataclasses.replace(machine, serial_copies=rng.random() < 0.5)
    if splits and rng.random() < 0.3:
        areas = random_areas(rng, places // splits)
        options = dataclasses.replace(options, grid=None, row_shares=None, col_shares=None, areas=areas)
    if rng.random() < 0.4:
        machine = slow_where_misaligned(machine)
    blocking = options.blocking
    if blocking.order in ORDERS_BY_K:
        blocking = dataclasses.replace(blocking, tail=rng.choice(tails))
    options = dataclasses.replace(options, blocking=blocking)
    return plan(problem, placement, num_ranks, machine, options).schedule, options


def with_shapes(machine: Machine, **changes: float) -> Machine:
    """Return a machine whose products have other shapes (`GemmShape`), of all types alike."""
    shapes = {name: dataclasses.replace(one, **changes) for name, one in machine.gemm_shape.items()}
    return dataclasses.replace(machine, gemm_shape=shapes)


def slow_where_misaligned(machine: Machine, factor: float = 1e6) -> Machine:
    """Return a machine on which products whose columns are not aligned take so much longer."""
    return dataclasses.replace(machine, gemm_shape={one.name: GemmShape(misaligned=factor) for one in DType})


def random_areas(rng: random.Random, places: int) -> tuple[tuple[float, ...], ...]:
    """Return so many areas, in columns of one place or more."""
    cuts = sorted(rng.sample(range(1, places), rng.randint(0, places - 1)))
    return tuple(
        tuple(rng.uniform(0.1, 3) for _ in range(start, stop)) for start, stop in itertools.pairwise([0, *cuts, places])
    )
