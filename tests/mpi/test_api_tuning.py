"""Plans that try several schedules in their first calls and keep the fastest."""

from __future__ import annotations

import dataclasses
import functools
import threading

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert, expect
from tests.helpers.products import Case, check_product, make_operands, mismatch, release, renew
from tests.helpers.sessions import hide_arrays
from uncut_mpi.api import searches
from uncut_mpi.api.neighbours import Neighbours
from uncut_mpi.api.plans import Trial
from uncut_mpi.planning import planner
from uncut_mpi.planning.schedule import Kind, Schedule

OPTIONS = um.ScheduleOptions(tune=3)
CASE = Case(150, 130, 170, place=("h", "h", "h"))
ENOUGH = 40


@pytest.fixture(scope="module")
def session(comm, open_session):
    """A session on a machine for which the search finds several kinds of schedules, on any number of ranks."""
    machine = um.Machine.uniform(comm.size, host_gb_per_s=0.1)
    with open_session(comm, machine=machine, verify=True) as session:
        yield session


class Failing:
    """An executable that reports an error and runs all the same, as no peer may be left waiting."""

    def __init__(self, executable):
        self._executable = executable

    def run(self, **options):
        return dataclasses.replace(self._executable.run(**options), error=um.DeviceError("on purpose"))

    def __getattr__(self, name):
        return getattr(self._executable, name)


def settle(session, plan, operands):
    """Call until a plan has chosen; return the digests of what ran, and what was wrong with the results here."""
    digests, wrongs = [], []
    while plan.tuning and len(digests) < ENOUGH:
        digests.append(plan._plan.now.summary.digest)
        renew(session, operands)
        plan.execute(CASE.alpha, CASE.beta)
        wrongs.append(mismatch(CASE, operands))
        session.barrier()
    return digests, [wrong for wrong in wrongs if wrong]


@pytest.fixture
def soon(session, monkeypatch):
    """Have four calls pay for a whole search, and a plan taken at once; return what runs one call, and says by what."""
    monkeypatch.setattr(planner, "search_s", lambda call_s, *_: 3.5 * planner.SEARCH_FRACTION * call_s)
    monkeypatch.setattr(searches, "_ADOPT_S", -1.0)
    session._calls.binder.drop_all()
    session._calls.plans.clear()
    session._calls.maker.neighbours = Neighbours()
    operands = make_operands(session, CASE)

    def multiply(beta=CASE.beta, **how):
        renew(session, operands)
        session.gemm(*operands.abc, alpha=CASE.alpha, beta=beta, **how)
        wrong = "" if beta == 0 else mismatch(CASE, operands)
        session.barrier()
        assert not wrong, wrong
        plan = max(session._calls.plans._used.items(), key=lambda one: one[1])[0]
        return plan.summary.search, plan.summary.digest

    yield multiply
    release(session, operands)


def ended(session):
    """Wait until searches have ended, on all ranks."""
    session._calls.searches.wait()
    session.barrier()


def test_calls_never_wait_for_a_search_and_all_ranks_take_its_plan_in_the_same_call(comm, session, soon, monkeypatch):
    may_end, better_plan = threading.Event(), searches.better_plan

    def held(*about, **how):
        assert may_end.wait(60)
        return better_plan(*about, **how)

    monkeypatch.setattr(searches, "better_plan", held)
    before, kinds = session.counters.planner_calls, [soon() for _ in range(8)]
    collective_assert(comm, {kind for kind, _ in kinds} == {"rule"}, f"{kinds}")
    may_end.set()
    ended(session)
    kinds = [soon() for _ in range(4)]
    collective_assert(comm, [kind for kind, _ in kinds] == ["full"] * 4, f"{kinds}")
    collective_assert(comm, len(set(allgather(comm, tuple(kinds)))) == 1, f"{kinds}")
    collective_assert(comm, session.counters.planner_calls - before == 2, "more plans were made than two")


def test_who_asks_how_far_a_search_goes_gets_no_other_plan(comm, session, soon):
    kinds = [[soon(options=um.ScheduleOptions(search=how))[0] for _ in range(6)] for how in ("full", "rule")]
    ended(session)
    kinds.append([soon(options=um.ScheduleOptions(search="rule"))[0]])
    collective_assert(comm, kinds == [["full"] * 6, ["rule"] * 6, ["rule"]], f"{kinds}")


@pytest.mark.parametrize("planted", ["a search", "decoding", "binding"])
def test_where_no_plan_is_found_or_it_cannot_be_taken_the_one_by_rule_stays(comm, session, soon, monkeypatch, planted):
    failed = []

    def fails(*unused, **how):
        failed.append(planted)
        patch.undo()
        raise um.CapacityError("on purpose")

    if planted == "decoding" and comm.size == 1:
        pytest.skip("the rank that searches decodes nothing")
    kinds = [soon(beta=0.0)]
    with monkeypatch.context() as patch:
        if planted == "a search" and comm.rank == 0:
            patch.setattr(searches, "plan_several", fails)
        kinds += [soon(beta=0.0) for _ in range(3)]
        ended(session)
        if planted != "a search" and comm.rank == comm.size - 1:
            target = (Schedule, "decode") if planted == "decoding" else (type(session._backend), "executable")
            patch.setattr(*target, fails)
        kinds += [soon(beta=0.0) for _ in range(6)]
        ended(session)
    kinds.append(soon(beta=0.0))
    collective_assert(comm, len(set(kinds)) == 1 and kinds[0][0] == "rule", f"{kinds}")
    collective_assert(comm, any(allgather(comm, failed)), f"{planted} was never met")


def test_searches_end_with_their_plans_and_with_the_session(comm, open_session, monkeypatch):
    begun, ends = threading.Event(), []

    def endless(plan, machine, searching, *, verify):
        begun.set()
        try:
            while True:
                searching.pause()
        finally:
            ends.append(plan.key.problem.m)

    monkeypatch.setattr(planner, "search_s", lambda call_s, *_: 3.5 * planner.SEARCH_FRACTION * call_s)
    monkeypatch.setattr(searches, "better_plan", endless)
    with open_session(comm, machine=um.Machine.uniform(comm.size, host_gb_per_s=0.1), max_plans=1) as session:
        for size in (40, 50):
            matrices = [session.empty_host((size, size)) for _ in range(3)]
            begun.clear()
            for _ in range(6):
                session.gemm(*matrices)
            assert comm.rank or begun.wait(60)
    assert ends == ([] if comm.rank else [40, 50])
    assert not any(thread.name == "uncut_mpi search" for thread in threading.enumerate())


def test_every_trial_computes_the_product_and_all_ranks_keep_the_same_schedule(session, comm):
    operands = make_operands(session, CASE)
    with session.plan(*operands.abc, reads_c=True, options=OPTIONS) as plan:
        first, tried = plan.summary.digest, plan.summary.tried
        collective_assert(comm, plan.tuning and tried == OPTIONS.tune, "the search found fewer kinds of schedules")
        digests, wrongs = settle(session, plan, operands)
        collective_assert(comm, not wrongs, f"{wrongs}")
        assert not plan.tuning
        assert (len(digests), len(set(digests))) == (4 * tried, tried)
        chosen = plan.summary.digest
        assert chosen == plan.schedule.digest()
        assert chosen in {first, *digests}
        assert len(set(allgather(comm, (first, tried, tuple(digests), chosen)))) == 1
        allocations = session.counters.allocations
        renew(session, operands)
        planned = plan.execute(CASE.alpha, CASE.beta).planned
        check_product(comm, CASE, operands)
        collective_assert(comm, not planned, "it was bound anew")
        assert session.counters.allocations == allocations


def test_the_slowest_rank_s_time_decides(session, comm, monkeypatch):
    after = Trial.after

    def made_up(self, seconds):
        slow = 5.0 if self.index == 0 and comm.rank == comm.size - 1 else 0.0
        return after(self, 1.0 + 0.1 * self.index + slow)

    monkeypatch.setattr(Trial, "after", made_up)
    operands = make_operands(session, CASE)
    with session.plan(*operands.abc, reads_c=True, options=OPTIONS) as plan:
        second = plan._plan.plans[1].summary.digest
        _, wrongs = settle(session, plan, operands)
        collective_assert(comm, not wrongs, f"{wrongs}")
        collective_assert(comm, plan.summary.digest == second == plan.schedule.digest(), plan.summary.how)
        renew(session, operands)
        plan.execute(CASE.alpha, CASE.beta)  # what it took over is its own
        check_product(comm, CASE, operands)


@pytest.mark.mpi(min_size=2)
def test_plans_of_one_product_that_chose_otherwise_are_told_apart(session, comm, monkeypatch):
    operands = make_operands(session, CASE)
    after, fast = Trial.after, [0]
    monkeypatch.setattr(Trial, "after", lambda self, _: after(self, 1.0 + (self.index != fast[0])))
    first, second = (session.plan(*operands.abc, reads_c=True, options=OPTIONS) for _ in range(2))
    for fast[0], plan in enumerate((first, second)):
        settle(session, plan, operands)
    collective_assert(comm, first.summary.digest != second.summary.digest, "both chose the same")
    call = (first if comm.rank == 0 else second).execute
    expect(comm, um.RankMismatchError, ["(a=matrix"], lambda: call(CASE.alpha, CASE.beta))
    for plan in (first, second):
        plan.execute(CASE.alpha, CASE.beta)
        plan.close()


def test_a_trace_is_that_of_the_schedule_shown_and_no_trial(session, comm):
    operands = make_operands(session, CASE)
    with session.plan(*operands.abc, reads_c=True, options=OPTIONS) as plan:
        for _ in range(3):
            plan.execute(CASE.alpha, CASE.beta)
        before = plan._plan
        trace = plan.trace(CASE.alpha, CASE.beta)
        assert len(trace.start_s) == len(plan.schedule.tasks)
        assert plan._plan is before
        tasks = plan.schedule.tasks
        timed = (tasks["num_operands"] > 0) & ~np.isin(tasks["kind"], (Kind.SEND, Kind.RECV))  # messages have no times
        wrong = np.isfinite(trace.start_s).sum() != timed.sum()
        collective_assert(comm, not wrong, "tasks without a time")


@pytest.mark.parametrize("own_result", [True, False])
def test_one_shot_products_are_tuned_too_and_planned_once(session, comm, own_result):
    operands = make_operands(session, CASE)
    planned = session.counters.planner_calls
    beta = CASE.beta if own_result else 0.0
    for _ in range(4 * OPTIONS.tune + 1):
        renew(session, operands)
        out = operands.c if own_result else None
        result = session.gemm(operands.a, operands.b, out, alpha=CASE.alpha, beta=beta, options=OPTIONS)
        check_product(comm, dataclasses.replace(CASE, beta=beta), dataclasses.replace(operands, c=out or result))
        (plan,) = [one for one in session._calls.plans._plans.values() if one.key.options == OPTIONS]
        if not own_result:
            session.release(result)
    collective_assert(comm, not isinstance(plan, Trial), "it still tries")
    assert session.counters.planner_calls == planned + 1
    session._calls.plans.clear()
    session._calls.maker.neighbours = Neighbours()


@pytest.mark.mpi(min_size=2)
def test_arrays_that_no_peer_can_open_are_right_in_every_trial(open_session, comm, monkeypatch):
    case = dataclasses.replace(CASE, place=("0", "h", "0"))
    options = um.ScheduleOptions(tune=8)
    machine = um.Machine.uniform(comm.size, host_gb_per_s=0.1)
    with open_session(comm, machine=machine) as session:
        hide_arrays(session, monkeypatch)
        operands = make_operands(session, case)
        with session.plan(*operands.abc, reads_c=True, options=options) as plan:
            collective_assert(comm, plan.tuning, "there is one kind of schedule")
            _, wrongs = settle(session, plan, operands)
            collective_assert(comm, not wrongs, f"{wrongs}")


@pytest.mark.mpi(min_size=2)
def test_plans_that_stage_an_array_and_plans_that_do_not_share_it(open_session, comm, monkeypatch):
    case = dataclasses.replace(CASE, place=("0", "0", "0"))
    with open_session(comm) as session:
        hide_arrays(session, monkeypatch)
        operands = make_operands(session, case)
        all_plans = [
            session.plan(*operands.abc, reads_c=True, options=um.ScheduleOptions(scheduler=name))
            for name in ("uncut", "kblocks")
        ]
        for plan in (*all_plans, *all_plans):
            renew(session, operands)
            plan.execute(case.alpha, case.beta)
            wrong = mismatch(case, operands)
            collective_assert(comm, not wrong, f"{plan.summary.scheduler}: {wrong}")
        for plan in all_plans:
            plan.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("when", ["bound", "run"])
def test_a_schedule_that_one_rank_cannot_run_is_left_out(session, comm, monkeypatch, when):
    case = dataclasses.replace(CASE, place=("0", "h", "0"))
    operands = make_operands(session, case)
    with session.plan(*operands.abc, reads_c=True, options=um.ScheduleOptions(tune=5)) as plan:
        collective_assert(comm, plan.tuning, "there is one kind of schedule")
        refused, tried = plan._plan.plans[1], plan.summary.tried
        refused_digest = refused.summary.digest
        if comm.rank == comm.size - 1 and when == "bound":
            executable = session._backend.executable

            def refuse(program, *rest):
                if program is refused.program:
                    raise um.CapacityError("no memory on purpose")
                return executable(program, *rest)

            monkeypatch.setattr(session._backend, "executable", refuse)
        if comm.rank == comm.size - 1 and when == "run":
            bind = session._calls.binder.bind

            def broken(bound, *about):
                binding = bind(bound, *about)
                if bound is not refused:
                    return binding
                return dataclasses.replace(binding, executable=Failing(binding.executable))

            monkeypatch.setattr(session._calls.binder, "bind", broken)
        errors, calls = 0, 0
        while plan.tuning and calls < ENOUGH:
            renew(session, operands)
            calls += 1
            try:
                plan.execute(case.alpha, case.beta)
            except um.DeviceError:
                errors += 1
                continue
            check_product(comm, case, operands)
        assert errors == (1 if when == "run" else 0)
        assert not plan.tuning
        assert plan.summary.digest != refused_digest
        assert plan.summary.tried == tried - 1
        plan.execute(case.alpha, case.beta)
    release(session, operands)


def test_a_trial_of_schedules_none_of_which_can_run_is_an_error_and_may_begin_again(session, comm, monkeypatch):
    operands = make_operands(session, CASE)

    def refuse(*_):
        raise um.CapacityError("no memory on purpose")

    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(session._backend, "executable", refuse)
        call = functools.partial(session.gemm, *operands.abc, options=OPTIONS)
        expect(comm, um.CapacityError, ["on purpose"], call)
    renew(session, operands)
    session.gemm(*operands.abc, alpha=CASE.alpha, beta=CASE.beta, options=OPTIONS)
    check_product(comm, CASE, operands)
    session._calls.plans.clear()
    session._calls.maker.neighbours = Neighbours()
    release(session, operands)


def test_schedules_are_tried_on_where_memory_that_grows_has_ended_every_binding(session, comm):
    operands = make_operands(session, CASE)
    with session.plan(*operands.abc, reads_c=True, options=OPTIONS) as plan:
        for _ in range(4 * plan.summary.tried):
            session._calls.binder.drop_all()
            renew(session, operands)
            plan.execute(CASE.alpha, CASE.beta)
            check_product(comm, CASE, operands)
        assert not plan.tuning
        plan.execute(CASE.alpha, CASE.beta)


def test_a_plan_may_be_closed_and_matrices_change_while_schedules_are_tried(session, comm):
    operands, others = (
        make_operands(session, CASE),
        make_operands(session, dataclasses.replace(CASE, seed=CASE.seed + 1)),
    )
    plan = session.plan(*operands.abc, reads_c=True, options=OPTIONS)
    plan.execute(CASE.alpha, CASE.beta)
    for _ in range(30):
        plan.execute(CASE.alpha, CASE.beta, a=others.a, b=others.b, c=others.c)
        renew(session, others)
        plan.execute(CASE.alpha, CASE.beta, a=others.a, b=others.b, c=others.c)
        check_product(comm, CASE, others)
        if not plan.tuning:
            break
    assert not plan.tuning
    plan.close()
    with session.plan(*operands.abc, reads_c=True, options=OPTIONS) as plan:
        plan.execute(CASE.alpha, CASE.beta)
