"""Schedules of every scheduler, of random problems on 1 to 64 ranks: proven with their lists, and right on numbers."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.helpers import interpret, oracle
from tests.helpers.faults import FAULTS, Fault, spoiled
from tests.helpers.random_schedules import SCHEDULERS, random_schedule
from uncut_mpi.errors import ScheduleError
from uncut_mpi.planning import kblocks_request, tiles
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.schedule import Kind, Role
from uncut_mpi.planning.verify import verify

CASES = {"uncut": 120, "kblocks": 120, "cyclic": 60, "bands": 40}
"""How many random cases of a scheduler with so many ranks."""


@pytest.fixture(autouse=True)
def any_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pieces of the small matrices used here be cut into chunks and slices too."""
    monkeypatch.setattr(tiles, "MIN_CHUNK_COLUMNS", 1)
    monkeypatch.setattr(tiles, "MIN_CHUNK_BYTES", 1)
    monkeypatch.setattr(kblocks_request, "MIN_SLICE_BYTES", 1)


@pytest.mark.parametrize("ranks", [1, 4, 8, 64])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_random_schedules_are_proven_and_right_on_numbers(scheduler: str, ranks: int) -> None:
    kinds, relayed, cases = np.zeros(4, np.int64), 0, CASES[scheduler] // (6 if ranks == 64 else 1)
    for seed in range(cases):
        rng = random.Random(seed * 1000 + ranks)
        schedule = random_schedule(rng, rng.randint(1, ranks), scheduler)
        about = f"seed {seed}: {schedule.problem}, placed {schedule.placement}, {schedule.num_ranks} ranks"
        try:
            verify(schedule, lower(schedule))
        except ScheduleError as error:
            raise AssertionError(about) from error
        kinds += np.bincount(schedule.tasks["kind"], minlength=4)
        relayed += (schedule.buffers["role"] == Role.CACHE).any()
        if seed % 4 == 0 and len(schedule.tasks) < 300:
            assert oracle.is_wrong(schedule) == "", about
    used = [Kind.GEMM] if scheduler == "bands" and ranks == 1 else [Kind.COPY, Kind.GEMM, Kind.COMBINE]
    assert (kinds[used] >= cases // 6).all(), kinds
    assert relayed > 0 or ranks == 1 or scheduler in ("kblocks", "bands")


@pytest.mark.parametrize("scheduler", ["uncut", "kblocks"])
def test_so_are_those_of_matrices_in_parts_in_any_order_of_tasks(scheduler: str) -> None:
    for seed in range(100):
        rng = random.Random(seed)
        schedule = random_schedule(rng, rng.choice((1, 2, 3, 4, 6, 8)), scheduler, in_parts=True)
        verify(schedule, lower(schedule))
        data, order = interpret.random_data(schedule.problem, seed), interpret.random_order(schedule, seed)
        assert interpret.mismatch(schedule, data, order) == "", f"seed {seed}"
        if seed % 2 and len(schedule.tasks) < 300:
            assert oracle.is_wrong(schedule) == "", f"seed {seed}"


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_planted_in_them_are_found_and_nothing_else_is_refused(fault: Fault, scheduler: str) -> None:
    assert spoiled(fault, lambda rng: random_schedule(rng, rng.randint(1, 8), scheduler, most=30), 15) >= 1
