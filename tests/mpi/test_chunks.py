"""Products whose schedule would be too large are done in chunks: blocks of C one after another."""

from __future__ import annotations

import functools
import random
import threading

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.distributed import random_product
from tests.helpers.faulty import FaultyBackend
from tests.helpers.products import Case, check_product, make_operands, mismatch, renew
from tests.helpers.sessions import ranks_per_node
from tests.mpi.test_out_of_core import CASES, KIB
from uncut_mpi.api import plans
from uncut_mpi.planning import chunks


@pytest.fixture
def few_tasks(comm, monkeypatch):
    """Let schedules be too large that have more than some hundred tasks, on many ranks some more."""
    monkeypatch.setattr(chunks, "MOST_TASKS", max(400, 150 * comm.size))
    monkeypatch.setattr(chunks, "STEP", 8)


def mine(session, data):
    """Return this rank's rows."""
    rows, _ = um.Layout.rows().indices(data.shape, session.rank, num_ranks=session.size)
    return data[rows]


def watched(plan, case):
    """Return how far a call was from time to time, and its result."""
    seen, over = [], threading.Event()

    def watch():
        while not over.wait(1e-3):
            seen.append(plan.progress())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        result = plan.execute(case.alpha, case.beta)
    finally:
        over.set()
        thread.join()
    last = next((at for at, value in enumerate(seen) if value > 0), 0)
    while seen and seen[-1] == 0:  # after the end
        seen.pop()
    return seen[last:], result


def multiply(session, operands, case):
    renew(session, operands)
    session.gemm(*operands.abc, **case.how)
    return mismatch(case, operands)


@pytest.mark.parametrize("number", range(len(CASES)))
def test_products_of_every_kind_and_place_are_right_in_chunks(comm, open_session, few_tasks, number):
    case = CASES[number]
    with open_session(comm, device_memory=96 * KIB, verify=True) as session:
        operands = make_operands(session, case)
        session.poison_softbuf()
        for _ in range(2):
            wrong = multiply(session, operands, case)
            collective_assert(comm, not wrong, wrong)
        kept = session._calls.plans._plans.values()
        due = [one.summary.search_after for one in kept if isinstance(one, plans.Chunked)]
        collective_assert(comm, not any(due), f"a product in chunks is planned anew after {due} calls")


def test_who_polls_a_product_in_chunks_comes_to_an_end(comm, open_session, few_tasks, monkeypatch):
    case = Case(480, 260, 280)
    with open_session(comm, device_memory=48 * KIB) as session:
        calls, kinds = session._calls, []

        def polled(*about):
            call = calls.open(*about)
            try:
                call.arm()
                call.start()
                kinds.append(
                    (type(call).__name__, any(call.may_finish(spin_s=0.0, waits=True) for _ in range(100_000)))
                )
                call.finish()
            finally:
                call.let_go()
            return call

        monkeypatch.setattr(calls, "run", polled)
        wrong = multiply(session, make_operands(session, case), case)
        collective_assert(comm, not wrong and kinds == [("ChunkedCall", True)], f"{wrong} {kinds}")


def test_a_plan_says_what_all_chunks_do_and_equal_ones_share_a_schedule(comm, open_session, few_tasks):
    case = Case(480, 260, 280)
    with open_session(comm, device_memory=48 * KIB) as session:
        operands = make_operands(session, case)
        before = session.counters.planner_calls
        with session.plan(*operands.abc) as plan:
            about, planned = plan.summary, session.counters.planner_calls - before
            collective_assert(comm, about.chunks > planned >= 1, f"{about.chunks} chunks, {planned} plans")
            collective_assert(comm, f"{about.chunks} chunks of" in about.how, about.how)
            done = session.gather_values(plan.execute(case.alpha, case.beta))
            check_product(comm, case, operands)
            collective_assert(comm, sum(one.tasks for one in done) == about.tasks, f"{done} {about.tasks}")
            moved = sum(one.copy_bytes for one in done)
            by_link = about.bytes_by_link
            wanted = sum(by_link.values()) + by_link.get("node_to_node", 0)  # who receives counts, too
            collective_assert(comm, moved == wanted, f"{moved} {by_link}")
            collective_assert(comm, plan.progress() == 0 and not plan.tuning, "nothing runs")
            plan.execute(case.alpha, case.beta)  # memory that grew for the last chunk took the bindings of the first
            renew(session, operands)
            seen, again = watched(plan, case)
            collective_assert(comm, seen == sorted(seen) and not again.planned, f"{seen} {again}")
            renew(session, operands)
            trace = plan.trace(case.alpha, case.beta)
            check_product(comm, case, operands)
            good = len(trace.end_s) == len(plan.schedule.tasks) < about.tasks and bool((trace.end_s > 0).any())
            collective_assert(comm, good, "a trace of the first chunk")
        collective_assert(comm, session.counters.planner_calls - before == planned, "planned once")


@pytest.mark.host_backend
@pytest.mark.parametrize("seed", range(6))
def test_chunks_of_matrices_in_any_layouts_and_files_are_right(comm, open_session, few_tasks, monkeypatch, seed):
    rng = random.Random(seed)
    monkeypatch.setattr(chunks, "MOST_TASKS", 10)
    with open_session(comm, device_memory=256 * KIB, verify=True) as session:
        for number in range(3):
            wrong = random_product(session, 100 * seed + number + rng.randrange(10) * 1000)
            collective_assert(comm, not wrong, wrong)


def test_chunks_that_lie_differently_have_plans_of_their_own_for_as_long_as_there_is_room(
    comm, open_session, monkeypatch
):
    monkeypatch.setattr(chunks, "MOST_TASKS", 200)
    monkeypatch.setattr(chunks, "STEP", 8)
    monkeypatch.setattr(chunks, "_axes", lambda problem, placement: (1,))  # rows of a C in order "C"
    rng = np.random.default_rng(1)
    a, b = rng.random((480, 200)), rng.random((200, 220))
    with open_session(comm, device_memory=64 * KIB, verify=True) as session:
        first, second = (session.distribute(mine(session, one), um.Layout.rows()) for one in (a, b))
        result = session.empty((480, 220), "f64", layout=um.Layout.rows(), memory="host")
        with session.plan(first, second, result, reads_c=False) as plan:
            for _ in range(2):
                plan.execute()
                good = np.allclose(result.local, mine(session, a @ b), rtol=1e-12)
                collective_assert(comm, good, str(plan.summary))
            kept = len(getattr(plan._plan, "plans", ()))
            collective_assert(comm, 1 <= kept <= chunks.MOST_KINDS, f"{kept} plans are kept: {plan.summary}")


@pytest.fixture
def failing(comm, few_tasks):
    """Yield a session and what sets it up to fail on a rank that computes in the second chunk of the next call."""
    armed, seen, odd = threading.Event(), set(), ranks_per_node(comm.size) - 1

    def fail(*_):
        if armed.is_set() and comm.rank == odd:
            seen.add(session._gate.epoch)
            if len(seen) > 1:
                armed.clear()
                raise um.DeviceError("nothing works any more")

    machine, faulty = um.Machine.uniform(comm.size), functools.partial(FaultyBackend, fault=fail)
    with um.Session(comm, backend=faulty, machine=machine, device_memory=48 * KIB, timeout_s=20) as session:
        yield session, armed.set


@pytest.mark.host_backend
def test_an_error_in_a_chunk_ends_all_ranks_and_the_session_goes_on(comm, failing):
    case, (session, fails) = Case(480, 260, 280), failing
    operands = make_operands(session, case)
    with session.plan(*operands.abc) as plan:
        fails()
        expect(comm, um.DeviceError, ["nothing works any more"], plan.execute)
        collective_assert(comm, plan.summary.chunks > 1 and plan.progress() == 0, str(plan.summary))
        # By that epoch a rank that is interrupted tells the others.
        told = int(session._calls.control.board.abort[0]), session._gate.epoch + 1
        sees = comm.rank < ranks_per_node(comm.size)  # at once; others hear it
        collective_assert(comm, not sees or told[0] == told[1], f"the second chunk failed: {told}")
    wrong = multiply(session, operands, case)
    collective_assert(comm, not wrong, wrong)


@pytest.mark.host_backend
def test_a_file_of_which_a_chunk_has_failed_gets_no_name(comm, tmp_path, failing):
    folder, (session, fails) = comm.bcast(tmp_path), failing
    operands = make_operands(session, Case(480, 260, 280))
    c = session.create_file(folder / "c.npy", operands.c.shape, "f64")
    with session.plan(operands.a, operands.b, c, reads_c=False) as plan:
        fails()
        expect(comm, um.DeviceError, ["nothing works any more"], plan.execute)
        expect(comm, um.DataFileError, ["has failed"], lambda: session.commit(c))
        plan.execute()
        session.commit(c)
    collective_assert(comm, plan.summary.chunks > 1 and (folder / "c.npy").exists(), str(plan.summary))
