"""Schedules of the paper's scheduler are proven, with their lowered lists: random problems on 1 to 64 ranks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.helpers import oracle
from tests.helpers.faults import FAULTS, Fault, spoiled
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import device_ports
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import tiles
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import ORDERS, ROUTINGS, ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Kind, Role, Schedule
from uncut_mpi.planning.verify import verify

CASES = {1: 60, 2: 60, 3: 90, 4: 120, 8: 90, 16: 40, 64: 20}
"""How many random cases with at most so many ranks."""


@pytest.fixture
def any_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fetches of the small matrices used here be cut into chunks too."""
    monkeypatch.setattr(tiles, "MIN_CHUNK_COLUMNS", 1)
    monkeypatch.setattr(tiles, "MIN_CHUNK_BYTES", 1)


def random_machine(rng: random.Random, num_ranks: int) -> Machine:
    """Return a machine whose links all differ, some by far, so that routes and relays are worth choosing."""
    values = np.random.default_rng(rng.randrange(2**32))
    size = num_ranks + 1
    bandwidth = values.uniform(5, 400, (size, size))
    bandwidth[values.random((size, size)) < rng.choice((0.0, 0.3, 0.8))] *= 0.01
    ports = device_ports(range(num_ranks), 300.0, 200.0) if rng.random() < 0.3 else []
    return Machine(
        name="random",
        key="random",
        bandwidth_gb_per_s=bandwidth,
        ports=tuple(ports),
        latency_s=values.uniform(0, 2e-5, (size, size)),
        gemm_tflop_per_s={dtype.name: values.uniform(1, 60, num_ranks) for dtype in DType},
        typical_gemm_tflop_per_s={dtype.name: values.uniform(0.5, 1, num_ranks) for dtype in DType},
        memory_bytes=np.full(num_ranks, rng.choice((10**6, 10**10))),  # either way enough for the panels
    )


def random_schedule(rng: random.Random, num_ranks: int, most_tasks: int = 400) -> tuple[Schedule, ScheduleOptions]:
    """Return the schedule of a random problem, placement, machine and choice of every option."""

    def location() -> Location:
        rank = rng.choice((0, num_ranks - 1, rng.randrange(num_ranks)))
        return rng.choice((Location.host(), Location.host(rank), Location.device(rank), Location.device(rank)))

    def extent() -> int:
        return rng.choice((1, 2, rng.randint(1, 30), rng.randint(1, 100)))

    m, n, k = extent(), extent(), rng.choice((0, *(extent() for _ in range(9))))
    devices = rng.choice((None, None, tuple(rng.sample(range(num_ranks), rng.randint(1, num_ranks)))))
    places = num_ranks if devices is None else len(devices)
    rows = rng.randint(1, places)
    grid = rng.choice((None, None, (rows, rng.randint(1, places // rows))))
    blocks = ProcessGrid.choose(places, grid)
    least_tile = max(1, round((m * n * max(k, 1) * 6 / most_tasks) ** (1 / 3)))
    problem = GemmProblem(
        m=m,
        n=n,
        k=k,
        dtype=rng.choice(list(DType)),
        trans_a=rng.choice("NT"),
        trans_b=rng.choice("NT"),
        lda=rng.choice((0, 200)),
        ldb=rng.choice((0, 201)),
        ldc=rng.choice((0, 202)),
        reads_c=rng.random() < 0.7,
        scales_only=rng.random() < 0.05,
    )
    options = ScheduleOptions(
        scheduler="uncut",
        tile=rng.choice((0, least_tile, rng.randint(least_tile, least_tile + 40))),
        grid=grid,
        devices=devices,
        row_shares=rng.choice((None, tuple(rng.uniform(0.1, 3) for _ in range(blocks.rows)))),
        col_shares=rng.choice((None, tuple(rng.uniform(0.1, 3) for _ in range(blocks.cols)))),
        chunks=rng.randint(1, 5),
        compute_lanes=rng.choice((1, 2, 8)),
        caching=rng.random() < 0.8,
        overlap=rng.random() < 0.8,
        routing=rng.choice(ROUTINGS),
        batch=rng.random() < 0.6,
        max_hops=rng.randint(0, 2),
        wr_lazy=rng.random() < 0.6,
        order=rng.choice(ORDERS),
    )
    first = location()
    placement = rng.choice((Placement(first, first, first), Placement(first, location(), location())))
    return plan(problem, placement, num_ranks, random_machine(rng, num_ranks), options).schedule, options


@pytest.mark.usefixtures("any_chunk")
@pytest.mark.parametrize("most_ranks", CASES)
def test_random_schedules_are_proven(most_ranks: int) -> None:
    kinds, relayed = np.zeros(4, np.int64), 0
    for seed in range(CASES[most_ranks]):
        rng = random.Random(seed * 1000 + most_ranks)
        schedule, options = random_schedule(rng, rng.choice((most_ranks, rng.randint(1, most_ranks))))
        try:
            verify(schedule, lower(schedule))
        except Exception as error:
            about = f"{schedule.problem}, placed {schedule.placement}, {schedule.num_ranks} ranks, {options}"
            raise AssertionError(f"seed {seed}: {about}") from error
        kinds += np.bincount(schedule.tasks["kind"], minlength=4)
        relayed += (schedule.buffers["role"] == Role.CACHE).any()
    assert relayed > (CASES[most_ranks] // 30 if most_ranks > 2 else -1)
    assert (kinds[[Kind.COPY, Kind.GEMM, Kind.COMBINE]] > CASES[most_ranks] // 2).all(), kinds


@pytest.mark.usefixtures("any_chunk")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_planted_in_its_schedules_are_found_and_nothing_else_is_refused(fault: Fault) -> None:
    assert spoiled(fault, lambda rng: random_schedule(rng, rng.randint(1, 8), most_tasks=60)[0], 25) >= 5


@pytest.mark.usefixtures("any_chunk")
def test_its_schedules_compute_the_product() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        schedule, _ = random_schedule(rng, rng.randint(1, 8), most_tasks=60)
        assert oracle.is_wrong(schedule) == "", seed
