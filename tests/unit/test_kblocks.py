"""The scheduler of few large products: its order of blocks, and the proof of its schedules on 1 to 64 ranks."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.helpers import oracle
from tests.helpers.faults import FAULTS, Fault
from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Location, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import BLOCK_ORDERS, COMBINES, Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Kind, Schedule
from uncut_mpi.planning.verify import verify

CASES = {1: 150, 2: 200, 3: 200, 4: 300, 6: 200, 8: 200, 12: 100, 16: 60, 31: 40, 64: 20}
"""How many random cases with at most so many ranks."""


@pytest.fixture
def any_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pieces of the small matrices used here be cut into slices too."""
    monkeypatch.setattr(kblocks, "MIN_SLICE_BYTES", 1)


def random_schedule(rng: random.Random, num_ranks: int, most: int = 60) -> tuple[Schedule, ScheduleOptions]:
    """Return the schedule of a random problem, placement and choice of every option."""

    def location() -> Location:
        rank = rng.choice((0, num_ranks - 1, rng.randrange(num_ranks)))
        return rng.choice((Location.host(), Location.host(rank), Location.device(rank), Location.device(rank)))

    def extent() -> int:
        return rng.choice((1, 2, rng.randint(1, 30), rng.randint(1, most)))

    devices = rng.choice((None, None, tuple(rng.sample(range(num_ranks), rng.randint(1, num_ranks)))))
    places = num_ranks if devices is None else len(devices)
    splits = rng.choice((0, 1, rng.randint(1, places)))
    rows = rng.randint(1, places // max(1, splits))
    cols = rng.randint(1, places // max(1, splits) // rows)
    problem = GemmProblem(
        m=extent(),
        n=extent(),
        k=rng.choice((extent(), 10 * extent())),
        dtype=rng.choice(list(DType)),
        trans_a=rng.choice("NT"),
        trans_b=rng.choice("NT"),
        lda=rng.choice((0, 700)),
        ldb=rng.choice((0, 701)),
        ldc=rng.choice((0, 202)),
        reads_c=rng.random() < 0.7,
    )
    options = ScheduleOptions(
        scheduler="kblocks",
        grid=(rows, cols) if splits else rng.choice((None, (rows, cols))),
        devices=devices,
        row_shares=rng.choice((None, tuple(rng.uniform(0.1, 3) for _ in range(rows)))) if splits else None,
        col_shares=rng.choice((None, tuple(rng.uniform(0.1, 3) for _ in range(cols)))) if splits else None,
        blocking=Blocking(
            splits=splits,
            first=rng.choice((0, rng.randint(1, 20))),
            block=rng.choice((0, rng.randint(1, 40))),
            columns=rng.choice((0, 1, rng.randint(1, 5))),
            order=rng.choice(("", *BLOCK_ORDERS)),
            combine=rng.choice(("", *COMBINES)),
        ),
    )
    first = location()
    placement = rng.choice((Placement(first, first, first), Placement(first, location(), location())))
    machine = Machine.uniform(num_ranks, memory_bytes=10**10)
    return plan(problem, placement, num_ranks, machine, options).schedule, options


@pytest.mark.usefixtures("any_slice")
@pytest.mark.parametrize("most_ranks", CASES)
def test_random_schedules_are_proven(most_ranks: int) -> None:
    kinds, split = np.zeros(4, np.int64), 0
    for seed in range(CASES[most_ranks]):
        rng = random.Random(seed * 1000 + most_ranks)
        schedule, options = random_schedule(rng, rng.choice((most_ranks, rng.randint(1, most_ranks))))
        try:
            verify(schedule, lower(schedule), capacity_bytes=schedule.softbuf_bytes().tolist())
        except Exception as error:
            about = f"{schedule.problem}, placed {schedule.placement}, {schedule.num_ranks} ranks, {options}"
            raise AssertionError(f"seed {seed}: {about}") from error
        kinds += np.bincount(schedule.tasks["kind"], minlength=4)
        split += schedule.splits > 1
    assert split > (CASES[most_ranks] // 10 if most_ranks > 1 else -1)
    assert (kinds[[Kind.COPY, Kind.GEMM, Kind.COMBINE]] > CASES[most_ranks] // 2).all(), kinds


@pytest.mark.usefixtures("any_slice")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_planted_in_its_schedules_are_found_and_nothing_else_is_refused(fault: Fault) -> None:
    spoiled = 0
    for seed in range(25):
        rng = random.Random(seed)
        schedule, _ = random_schedule(rng, rng.randint(1, 8), most=30)
        mutant = fault(schedule, rng)
        if mutant is None:
            continue
        wrong, said = oracle.is_wrong(mutant), ""
        try:
            verify(mutant)
        except ScheduleError as error:
            said = str(error)
        assert bool(wrong) == bool(said), f"seed {seed}: the oracle says {wrong!r}, verify says {said!r}"
        spoiled += bool(wrong)
    assert spoiled >= 5


@pytest.mark.usefixtures("any_slice")
def test_its_schedules_compute_the_product() -> None:
    for seed in range(60):
        rng = random.Random(seed)
        schedule, _ = random_schedule(rng, rng.randint(1, 8), most=30)
        assert oracle.is_wrong(schedule) == "", seed
