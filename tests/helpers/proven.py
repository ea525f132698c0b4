"""What every schedule has to be."""

from __future__ import annotations

import pytest

from tests.helpers.interpret import mismatch, random_data, random_order
from uncut_mpi.planning import tiles
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.planning.verify import verify


def check(schedule: Schedule, seed: int = 0) -> None:
    """The schedule is well-formed, proven, and right on numbers in its own and in another order."""
    schedule.check()
    verify(schedule, lower(schedule))
    data = random_data(schedule.problem, seed)
    for order in (None, random_order(schedule, seed)):
        assert mismatch(schedule, data, order) == "", f"seed {seed}"


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut even the smallest tiles into chunks."""
    monkeypatch.setattr(tiles, "MIN_CHUNK_COLUMNS", 1)
    monkeypatch.setattr(tiles, "MIN_CHUNK_BYTES", 1)
