"""A product that is bound is made in one go; where something is not as usual, the steps go on from there."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests.helpers.collective import collective_assert, outcome
from tests.helpers.hostile import interrupt
from tests.helpers.products import as_numpy, shows
from uncut_mpi.api.gate import Stage
from uncut_mpi.device.host.executor import HostRun
from uncut_mpi.errors import DeviceError

pytestmark = pytest.mark.mpi

SIZE = 40


class Repeated:
    """A session whose C := A B is bound and was made in one go."""

    def __init__(self, comm, session):
        self.comm, self.session, self.odd = comm, session, comm.rank == comm.size - 1
        numbers = np.random.default_rng(5).uniform(-1, 1, (2, SIZE, SIZE))
        self.a, self.b, self.c = (session.empty_host((SIZE, SIZE), np.float64) for _ in range(3))
        if comm.rank == 0:
            self.a.array[...], self.b.array[...] = numbers
        session.barrier()
        self.plan = session.plan(self.a, self.b, self.c)
        self.plan.execute()
        self.first = comm.bcast(as_numpy(self.c).copy() if comm.rank == 0 else None)
        # |error| ≤ γ_k |A| |B| entry by entry (Higham, Accuracy and Stability, section 3.5).
        bound = 1.01 * SIZE * np.finfo(np.float64).eps * (np.abs(numbers[0]) @ np.abs(numbers[1]))
        near = np.abs(self.first - numbers[0] @ numbers[1]) <= bound
        self.check(near.all(), "the first product is wrong")
        self.make()
        self.check_made()

    def make(self, **how):
        """Make it over a poisoned C."""
        self.session.barrier()
        if self.comm.rank == 0:
            self.c.array[...] = np.nan
        return self.plan.execute(**how)

    def check(self, fine, detail=""):
        collective_assert(self.comm, fine, detail)

    def check_made(self, wanted=None):
        """Check that C is right, after a go that went so far; by default as far as that depends on no other rank."""
        stage, right = self.session._gate.stage, shows(self.c, self.first)
        wanted = wanted or (Stage.OVER if self.comm.size == 1 else stage)
        self.check(right and stage is wanted, f"{stage}, {right}")


@pytest.fixture
def repeated(comm, open_session):
    with open_session(comm) as session:
        yield Repeated(comm, session)


def test_what_it_did_is_told_and_counted(repeated):
    before = repeated.session.counters.snapshot()
    result = repeated.make()
    after = repeated.session.counters
    repeated.check_made()
    counted = after.calls - before.calls, after.tasks - before.tasks, after.copy_bytes - before.copy_bytes
    repeated.check(counted == (1, result.tasks, result.copy_bytes) and not result.planned, f"{counted}, {result}")


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_comes_late_is_awaited(repeated):
    if repeated.odd:
        time.sleep(0.1)
    repeated.plan.execute()
    repeated.check_made(None if repeated.odd else Stage.OPENING)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_pass_other_scalars_are_told(repeated):
    said = outcome(lambda: repeated.plan.execute(2.0 if repeated.odd else 1.0))
    repeated.check("RankMismatchError" in said and "alpha" in said, said)
    repeated.make()
    repeated.make()
    repeated.check_made()


@pytest.mark.mpi(min_size=2)
def test_ranks_in_other_calls_are_told(repeated):
    said = outcome(repeated.session.barrier if repeated.odd else repeated.plan.execute)
    repeated.check("RankMismatchError" in said and "called barrier" in said, said)
    repeated.make()
    repeated.check_made()


def test_an_error_before_it_begins_reaches_all(repeated, monkeypatch):
    def broken():
        raise DeviceError("made up")

    with monkeypatch.context() as patch:
        if repeated.odd:
            patch.setattr(repeated.session._backend, "await_caller", broken)
        said = outcome(repeated.plan.execute)
    repeated.check("DeviceError" in said and "made up" in said, said)
    repeated.make()
    repeated.check_made()


def test_an_interrupt_before_it_begins_ends_nothing(repeated, monkeypatch):
    if repeated.odd:
        with monkeypatch.context() as patch:
            patch.setattr(repeated.session._backend, "await_caller", interrupt)
            said = outcome(repeated.plan.execute)
    repeated.plan.execute()
    repeated.check(not repeated.odd or "KeyboardInterrupt" in said)
    repeated.make()
    repeated.check_made()


@pytest.mark.host_backend
def test_an_error_of_its_tasks_reaches_all_and_the_next_one_is_right(comm, repeated, monkeypatch):
    step, failures = HostRun._step, ["made up"]

    def broken(*about):
        if failures:
            raise DeviceError(failures.pop())
        step(*about)

    works = repeated.make().tasks > 0
    with monkeypatch.context() as patch:
        if works:  # it would be right if it were run again
            patch.setattr(HostRun, "_step", broken)
        said = outcome(repeated.make)
        stage = repeated.session._gate.stage
    repeated.check("DeviceError" in said and "made up" in said, said)
    repeated.check(comm.size > 1 or stage is Stage.ENDED, stage)
    repeated.make()
    repeated.check_made()


@pytest.mark.host_backend
def test_an_exception_from_a_run_ends_the_session_for_all(comm, open_session, monkeypatch):
    session = open_session(comm, timeout_s=5.0)
    repeated = Repeated(comm, session)
    with monkeypatch.context() as patch:
        if repeated.odd:
            patch.setattr(repeated.session._calls._going.executable, "runner", interrupt)
        said = outcome(repeated.make)
    wanted = "KeyboardInterrupt" if repeated.odd else "left the session by KeyboardInterrupt"
    collective_assert(comm, wanted in said, said)
    collective_assert(comm, session.broken and outcome(session.close) == "worked")


def test_a_device_that_another_session_has_is_awaited(comm, open_session, repeated):
    with open_session(comm) as other:
        turns = other._calls.turns
        turns.arrive()
        turns.acquire(10.0)
        other._group.barrier()
        free = threading.Timer(0.05, turns.release)
        free.start()
        repeated.plan.execute()
        repeated.check_made(Stage.TAKING if comm.size == 1 else None)
        free.join()
        repeated.make()
        repeated.check_made()
