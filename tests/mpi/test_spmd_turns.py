"""Calls of several sessions have one order per device, whatever threads and communicators they come from."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

from tests.helpers.collective import allgather
from uncut_mpi.errors import StallError
from uncut_mpi.spmd import exchange, turns
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.turns import DeviceTurns

LIMIT_S = 40


class Sessions:
    """Stand-ins for sessions: a group, its order, and shared memory in which its calls meet."""

    def __init__(self, comm):
        self.group = Group(comm)
        size = self.group.size
        self.segment = exchange.shared_segment(self.group, 16 * size, "a test")
        words = self.segment.array(np.uint64, 2 * size)
        self.meetings = words[size:]
        self.order = DeviceTurns(self.group, "device", words[:size])

    def call(self, log, name, before_meeting=lambda: None):
        """One call: like a real one it can end only when all of its ranks are in it at once."""
        self.order.arrive()
        self.order.acquire(LIMIT_S)
        log.append(name)
        before_meeting()
        self.meetings[self.group.rank] += 1
        deadline = time.monotonic() + LIMIT_S
        while self.meetings.min() < self.meetings[self.group.rank]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name}: its ranks never met")
            time.sleep(1e-4)
        log.append(name)
        self.order.release()

    def close(self):
        self.order.close()
        self.group.barrier()
        self.segment.close()
        self.group.free()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_is_in_its_next_call_already_blocks_nobody(comm):
    group = Group(comm)
    words = np.zeros(group.size, np.uint64)  # not shared: what the others have written is made up
    own = DeviceTurns(group, "device", words)
    own.arrive()
    others = np.arange(group.size) != group.rank
    words[others] = 4 * 2  # they have ended the first call, which failed, and began the next
    own.acquire(LIMIT_S)
    found = int(words[group.rank])
    own.release()
    own.close()
    group.free()
    assert found == 4 + 1  # HELD: it took no turn


@pytest.fixture
def make(comm):
    made = []

    def one(sub):
        made.append(Sessions(sub))
        return made[-1]

    yield one
    comm.Barrier()
    for session in made:
        session.close()


def run_threads(*bodies):
    """Run each body in a thread of its own; return the errors."""
    errors = []

    def guarded(body):
        try:
            body()
        except BaseException as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=guarded, args=(body,), daemon=True) for body in bodies]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S + 10)
    return errors + ["a thread is still running"] * sum(thread.is_alive() for thread in threads)


def alternates(log):
    """Whether every call in the log of one process ended before the next began."""
    return len(log) % 2 == 0 and log[::2] == log[1::2]


def test_one_session_takes_its_devices_again_and_again(comm, agree_all, make):
    session, log = make(comm), []
    for number in range(50):
        session.call(log, number)
    agree_all(alternates(log) and len(log) == 100, log)


def test_two_threads_with_a_session_each_never_mix_their_calls(comm, agree_all, make):
    first, second, log = make(comm), make(comm), []
    rng = np.random.default_rng(comm.rank)
    pauses = rng.uniform(0, 2e-3, (2, 40))

    def body(session, name, pause):
        for number in range(40):
            time.sleep(pause[number])
            session.call(log, (name, number))

    errors = run_threads(lambda: body(first, "a", pauses[0]), lambda: body(second, "b", pauses[1]))
    agree_all(not errors, errors)
    logs = allgather(comm, log)
    agree_all(alternates(log) and len(log) == 160, log)
    agree_all(logs.count(log) == comm.size, f"orders differ: {logs}")


@pytest.mark.mpi(min_size=2)
def test_opposite_rank_orders_do_not_deadlock(comm, agree_all, make):
    backwards = comm.Split(0, key=-comm.rank)
    first, second, log = make(comm), make(backwards), []
    backwards.Free()

    def body(session, name):
        for number in range(40):
            session.call(log, (name, number))

    errors = run_threads(lambda: body(first, "a"), lambda: body(second, "b"))
    agree_all(not errors, errors)
    agree_all(alternates(log), log)


@pytest.mark.mpi(min_size=3)
def test_a_ring_of_overlapping_pairs_does_not_deadlock(comm, agree_all, make):
    sessions, log = [], []
    for first in range(comm.size):
        inside = comm.rank in (first, (first + 1) % comm.size)
        sub = comm.Split(0 if inside else 1, key=comm.rank)
        if inside:
            sessions.append((first, make(sub)))
        sub.Free()

    def body(number, session):
        for turn in range(15):
            session.call(log, (number, turn), before_meeting=lambda: time.sleep(2e-4))

    errors = run_threads(*(lambda which=which: body(*which) for which in sessions))
    agree_all(not errors, errors)
    agree_all(alternates(log), log)


@pytest.mark.mpi(min_size=2)
def test_one_process_makes_its_calls_in_turn_and_another_in_threads(comm, agree_all, make):
    first, second, log = make(comm), make(comm), []
    if comm.rank == comm.size - 1:
        errors = run_threads(lambda: [s.call(log, n) for n in range(10) for s in (first, second)])
    else:
        errors = run_threads(
            lambda: [first.call(log, ("a", n)) for n in range(10)],
            lambda: [second.call(log, ("b", n)) for n in range(10)],
        )
    agree_all(not errors, errors)
    agree_all(alternates(log), log)


@pytest.mark.mpi(min_size=2)
def test_a_session_made_while_another_is_in_a_call_waits_for_it(comm, agree_all, make):
    first, log, entered = make(comm), [], threading.Event()
    made = []
    other = comm.Dup()

    def hold():
        entered.set()
        time.sleep(0.05 if comm.rank == 0 else 0.0)

    def old():
        first.call(log, "old", before_meeting=hold)

    def new():
        if comm.rank == 0:
            entered.wait(LIMIT_S)
        made.append(make(other))
        made[0].call(log, "new")

    errors = run_threads(old, new)
    other.Free()
    agree_all(not errors, errors)
    agree_all(alternates(log) and sorted(log) == ["new", "new", "old", "old"], log)


def test_calls_on_different_devices_do_not_wait_for_each_other(comm, agree_all):
    group = Group(comm)
    segment = exchange.shared_segment(group, 16 * group.size, "a test")
    words = segment.array(np.uint64, 2 * group.size)
    first = DeviceTurns(group, "one", words[: group.size])
    second = DeviceTurns(group, "two", words[group.size :])
    first.arrive()
    first.acquire(LIMIT_S)
    second.arrive()
    second.acquire(LIMIT_S)
    group.barrier()
    for one in (first, second):
        one.release()
        one.close()
    segment.close()
    group.free()
    del first, second, one
    agree_all(not {"one", "two"} & set(turns._registry), turns._registry)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_never_comes_is_named(comm, agree_all, make):
    session = make(comm)
    late = comm.size - 1
    found = ""
    if comm.rank != late:
        try:
            session.order.arrive()
            session.order.acquire(0.2)
        except StallError as error:
            found = str(error)
    agree_all(comm.rank == late or f"for rank {late} to begin this call" in found, found)
    agree_all(comm.rank == late or session.order.missing() == [late], session.order.missing())


def test_a_device_that_another_session_keeps_is_named_and_free_afterwards(comm, agree_all, make):
    first, second = make(comm), make(comm)
    first.order.arrive()
    first.order.acquire(LIMIT_S)
    first.group.barrier()
    found = ""
    try:
        second.order.arrive()
        second.order.acquire(0.2)
    except StallError as error:
        found = str(error)
    agree_all("device device" in found or "for rank" in found, found)
    first.group.barrier()
    first.order.release()
    log = []
    first.call(log, "again")
    agree_all(log == ["again", "again"], log)
