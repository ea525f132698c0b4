"""Sessions: several in one job, on split and overlapping communicators, from threads; failure inside a call."""

from __future__ import annotations

import functools
import gc
import threading
import time

import pytest

import uncut_mpi as um
from tests.helpers import products
from tests.helpers.collective import allgather, collective_assert, expect, outcome
from tests.helpers.faulty import FaultyBackend
from tests.helpers.products import Case, make_operands, mismatch, moved_bytes, release, renew, set_matrix
from tests.helpers.sessions import hide_arrays, ranks_per_node
from uncut_mpi.planning.lower import Code

OPTIONS = um.ScheduleOptions(scheduler="uncut", tile=16)


product = functools.partial(products.product, options=OPTIONS)


def test_a_session_on_one_rank_needs_no_peer(comm, open_session):
    with open_session(comm.Split(comm.rank)) as session:
        wrong = product(session, Case(50, 40, 30, place=("0", "h", "0")))
    collective_assert(comm, session.size == 1 and not wrong, wrong)


@pytest.mark.mpi(min_size=2)
def test_sessions_on_split_communicators_work_side_by_side(comm, open_session):
    part = comm.Split(comm.rank % 2)
    with open_session(part) as session:
        wrong = product(session, Case(40 + comm.rank % 2, 33, 21, place=("0", "h", str(part.size - 1))))
    part.Free()
    collective_assert(comm, not wrong, wrong)


@pytest.mark.mpi(min_size=2)
def test_overlapping_sessions_work_in_turn(comm, open_session):
    inner = comm.Split(0 if comm.rank < comm.size - 1 else 1)
    with open_session(comm) as all_ranks, open_session(inner) as some:
        wrong = []
        for seed in range(3):
            wrong.append(product(some, Case(30, 31, 32, place=("0", "h", "h"), seed=seed)))
            wrong.append(product(all_ranks, Case(33, 34, 35, place=("h", "0", "0"), seed=seed)))
    inner.Free()
    collective_assert(comm, not any(wrong), str(wrong))


@pytest.mark.one_node("one thread makes the calls of all sessions there")
def test_two_threads_with_a_session_each(comm, open_session):
    parts = [comm.Dup(), comm.Dup()]
    wrong: list[object] = [None, None]

    def work(number: int) -> None:
        try:
            with open_session(parts[number]) as session:
                wrong[number] = [
                    product(session, Case(30 + number, 25, 20, place=("0", "h", "h"), seed=s)) for s in range(4)
                ]
        except BaseException as error:  # shown by the assertion below, on every rank
            wrong[number] = error

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for part in parts:
        part.Free()
    collective_assert(comm, wrong == [[""] * 4] * 2, str(wrong))


def test_a_second_call_inside_one_is_refused_on_another_thread_or_this_one(comm, open_session):
    with open_session(comm) as session:
        with session._gate.exclusive():
            found = [outcome(lambda: session.empty_host((2, 2)))]
            thread = threading.Thread(target=lambda: found.append(outcome(lambda: session.empty_host((2, 2)))))
            thread.start()
            thread.join()
        session.barrier()
    collective_assert(comm, len(found) == 2 and all("another thread" in one for one in found), found)


def test_dropped_matrices_are_freed_by_the_next_collective_call(comm, open_session):
    with open_session(comm) as session:
        numbers = []
        for _ in range(3):
            matrix = session.empty_host((8, 8))
            numbers.append(matrix.info.number)
            del matrix
            gc.collect()
        held = set(session._store._held)
    collective_assert(comm, held == {numbers[-1]}, f"held {held} of {numbers}")


def test_a_matrix_that_one_rank_alone_has_dropped_stays_with_all(comm, open_session):
    with open_session(comm) as session:
        kept = [session.empty_host((8, 8))]
        number = kept[0].info.number
        if comm.rank == 0:
            kept.clear()
            gc.collect()
        session.empty_host((2, 2))
        collective_assert(comm, number in session._store._held, f"{number} is gone")


def test_plans_beyond_the_bound_are_dropped_and_made_again(comm, open_session):
    with open_session(comm, max_plans=2) as session:
        wrong = [product(session, Case(size, 20, 20, seed=size)) for size in (18, 19, 20, 21, 18, 21)]
        kept = len(session._calls.plans._plans)
    collective_assert(comm, kept == 2 and not any(wrong), f"{kept} plans, {wrong}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("fault", ["argument", "matrices", "call", "stream"])
def test_ranks_keep_the_same_plans_after_a_call_that_fails_on_one_of_them(comm, open_session, monkeypatch, fault):
    odd = comm.rank == comm.size - 1

    def broken(stream=None):
        raise um.DeviceError("no such stream")

    with open_session(comm, max_plans=2) as session:
        first, second, third = (make_operands(session, Case(size, 20, 20)) for size in (18, 19, 20))

        def multiply(operands, **how):
            session.gemm(*operands.abc, options=OPTIONS, **how)

        multiply(first)
        multiply(second)
        error: Exception | None = None
        with monkeypatch.context() as patch:
            if odd and fault == "stream":
                patch.setattr(session._backend, "mark_caller", broken)
            try:
                if odd and fault == "call":
                    session.barrier()
                elif odd and fault == "argument":
                    multiply(first, alpha="one")
                else:
                    multiply(second if odd and fault == "matrices" else first)
            except um.UncutError as caught:
                error = caught
        collective_assert(comm, error is not None, "a call succeeded that could not")
        multiply(third)
        kept = sorted(plan.key.problem.m for plan in session._calls.plans._plans.values())
        multiply(first)
    sets = comm.allgather(kept)
    assert all(one == sets[0] for one in sets), sets


@pytest.mark.mpi(min_size=2)
@pytest.mark.host_backend
@pytest.mark.on_nodes
def test_ranks_run_no_task_any_more_when_another_has_failed(comm, open_session):
    last, ran, failing = comm.size - 1, [], [True]

    def fail(task, code, region):
        ran.append(task)
        if failing[0] and comm.rank == last:
            raise um.DeviceError(f"task {task} failed on purpose")

    with open_session(comm, backend=lambda rank, ranks: FaultyBackend(rank, ranks, fault=fail)) as session:
        case = Case(200, 200, 200, place=3 * (str(last),))  # the others begin with what they get from there
        operands = make_operands(session, case)

        def multiply():
            session.gemm(*operands.abc, options=OPTIONS)

        expect(comm, um.DeviceError, [f"rank {last}", "on purpose"], multiply)
        counts = allgather(comm, len(ran))
        failing[0] = False
        ran.clear()
        wrong = product(session, case)
        whole = allgather(comm, len(ran))
    begun = [0] * last  # on other nodes with what has been sent before
    if ranks_per_node(comm.size) < comm.size:
        begun = [count for count, all_of_it in zip(counts[:last], whole, strict=False) if 2 * count < all_of_it]
    collective_assert(comm, counts == [*begun, 1] and not wrong, f"tasks {counts} of {whole}; afterwards {wrong}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.host_backend
def test_a_rank_that_hangs_is_named_on_every_rank(comm, open_session):
    release_it = threading.Event()

    def hang(task, code, region):
        if comm.rank == 1 and code is Code.GEMM:
            release_it.wait(4.0)

    session = open_session(comm, backend=lambda rank, ranks: FaultyBackend(rank, ranks, fault=hang), timeout_s=1.0)
    operands = make_operands(session, Case(64, 64, 64, place=("1", "1", "0")))
    options = um.ScheduleOptions(scheduler="uncut", tile=64, grid=(1, 1))
    found = outcome(lambda: session.gemm(*operands.abc, options=options))
    release_it.set()
    collective_assert(comm, "rank 1" in found or found == "worked", found)
    session.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.host_backend
def test_a_product_that_is_expected_to_take_longer_than_is_allowed_is_awaited(comm, open_session):
    def late(task, code, region):
        if code is Code.GEMM:
            time.sleep(0.5)

    slow = um.Machine.uniform(comm.size, gemm_tflop_per_s={"f64": 1e-7})  # 5 s
    backend = functools.partial(FaultyBackend, fault=late)
    with open_session(comm, backend=backend, machine=slow, timeout_s=0.1) as session:
        case = Case(64, 64, 64, place=("1", "1", "0"))
        wrong = product(session, case, options=um.ScheduleOptions(scheduler="uncut", tile=64, grid=(1, 1)))
    collective_assert(comm, not wrong, wrong)


@pytest.mark.mpi(min_size=2)
def test_whichever_matrices_cannot_be_exported_products_are_right(comm, open_session, monkeypatch):
    options = [
        um.ScheduleOptions(scheduler=name, tile=tile, devices=tuple(range(comm.size)))
        for name, tile in (("uncut", 16), ("cyclic", 16), ("bands", 16), ("kblocks", 0))
    ]
    wrong, staged = [], []
    with open_session(comm) as session:
        hidden = set()
        hide_arrays(session, monkeypatch, lambda array: array.shape in hidden)
        for number in range(8):
            case = Case(
                *(60, 50, 40),
                place=("0", str(number % comm.size), str(comm.size - 1)),
                orders=("FFF", "CFC", "FCC")[number % 3],
                beta=1.25 * (number % 2),
                seed=number,
            )
            shapes = ((case.m, case.k), (case.k, case.n), (case.m, case.n))
            hidden |= {shape for at, shape in enumerate(shapes) if number >> at & 1}
            operands = make_operands(session, case)
            for one in options:
                set_matrix(session, operands.c, operands.c_MN)
                session.poison_softbuf()
                with session.plan(*operands.abc, reads_c=case.beta != 0, options=one) as plan:
                    done = plan.execute(case.alpha, case.beta)
                copied, listed = sum(allgather(comm, done.copy_bytes)), moved_bytes(plan.schedule)
                if done.staged != bool(plan.summary.staged) or copied != listed:
                    wrong.append(f"{plan.summary.staged!r}, but {done.staged}; copied {copied} of {listed} bytes")
                wrong.append(mismatch(case, operands))
                staged.append(plan.summary.staged)
            release(session, operands)
            hidden.clear()
    # Each scheduler has let peers write to a C that they cannot open, and to one that they can.
    shown = [{"", "C"} <= set(staged[at :: len(options)]) for at in range(len(options))]
    collective_assert(comm, not any(wrong) and all(shown), f"{staged} {wrong}")


@pytest.mark.mpi(min_size=2)
def test_a_plan_stages_the_matrices_that_need_it_and_no_others(comm, open_session, monkeypatch):
    hidden = [True]
    case = Case(40, 30, 20, place=("0", "h", "0"))
    with open_session(comm) as session:
        hide_arrays(session, monkeypatch, lambda _: hidden[0])
        shadowed = make_operands(session, case)
        hidden[0] = False
        direct = make_operands(session, case)
        wrong, staged, traced = [], [], []
        with session.plan(shadowed.a, shadowed.b, shadowed.c, options=OPTIONS) as plan:
            for given in (shadowed, direct, shadowed, direct):
                set_matrix(session, given.a, given.a_MK)
                renew(session, given)
                session.poison_softbuf()
                staged.append(plan.execute(case.alpha, case.beta, a=given.a, b=given.b, c=given.c).staged)
                wrong.append(mismatch(case, given))
            planned = session.counters.planner_calls
            for given in (shadowed, direct):
                trace = plan.trace(case.alpha, case.beta, a=given.a, b=given.b, c=given.c)
                traced.append((plan.summary.staged, len(trace.start_s) - len(plan.schedule.tasks)))
    collective_assert(comm, staged == [True, False, True, False] and not any(wrong), f"{staged} {wrong}")
    collective_assert(comm, traced == [("C", 0), ("", 0)] and planned == 2, f"{traced}, planned {planned} times")


def test_a_plan_is_the_same_on_every_rank_and_when_made_again(comm, open_session):
    with open_session(comm) as session:
        operands = make_operands(session, Case(60, 50, 40))
        digests = []
        for _ in range(2):
            with session.plan(*operands.abc, options=OPTIONS) as plan:
                digests += allgather(comm, (plan.summary.digest, plan.schedule.digest()))
    collective_assert(comm, len({digest for pair in digests for digest in pair}) == 1, str(digests))
