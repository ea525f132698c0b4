"""How ranks wait for each other: how late they may wake up. No clock runs: time is what the test says."""

from __future__ import annotations

import pytest

from uncut_mpi.spmd import group
from uncut_mpi.spmd.group import Backoff


class Clock:
    """Time that passes while somebody sleeps or yields."""

    def __init__(self) -> None:
        self.now = 100.0
        self.slept: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def pass_a_little(self) -> None:
        self.now += 1e-6


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()

    def read() -> float:
        clock.pass_a_little()
        return clock.now

    monkeypatch.setattr(group.time, "perf_counter", read)
    monkeypatch.setattr(group.time, "sleep", clock.sleep)
    monkeypatch.setattr(group.os, "sched_yield", clock.pass_a_little)
    return clock


@pytest.mark.parametrize("waited_s", [1e-3, 14e-3, 60e-3, 0.3, 2.0])
def test_a_rank_with_a_core_of_its_own_wakes_up_late_by_less_than_a_hundredth(clock, waited_s):
    backoff = Backoff(200e-6, shared=False)
    start = clock.now
    while clock.now < start + waited_s:
        backoff.pause()
    assert clock.now - start - waited_s <= max(2e-6, waited_s / 200)


def test_a_rank_that_shares_a_core_sleeps_soon_and_for_up_to_a_millisecond(clock):
    backoff = Backoff(10e-6, shared=True)
    start = clock.now
    while not clock.slept:
        backoff.pause()
    assert clock.now - start < 8e-3
    while clock.now < start + 0.1:
        backoff.pause()
    assert clock.slept == sorted(clock.slept)
    assert clock.slept[-1] == 1e-3
    assert backoff.elapsed_s() == pytest.approx(clock.now - start, abs=1e-5)
