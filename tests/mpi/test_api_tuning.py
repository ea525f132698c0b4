"""Plans that try several schedules in their first calls and keep the fastest."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert
from tests.helpers.products import Case, make_operands, mismatch, release, set_matrix

pytestmark = pytest.mark.mpi(min_size=1)
OPTIONS = um.ScheduleOptions(tune=3)
CASE = Case(150, 130, 170, place=("h", "h", "h"))
ENOUGH = 40


class Slow:
    """An executable that takes its time."""

    def __init__(self, executable, seconds):
        self._executable, self._seconds = executable, seconds

    def run(self, **options):
        time.sleep(self._seconds)
        return self._executable.run(**options)

    def __getattr__(self, name):
        return getattr(self._executable, name)


def settle(session, plan, operands, *, slowed=None):
    """Call until a plan has chosen; return the digests of what ran, and what was wrong with the results here."""
    digests, wrongs = [], []
    while plan.tuning and len(digests) < ENOUGH:
        turn = plan._entry.turn()
        digests.append(turn.summary.digest)
        if slowed is not None and turn.summary.digest == slowed:
            for key, binding in turn.bindings.items():
                if not isinstance(binding.executable, Slow):
                    turn.bindings[key] = dataclasses.replace(binding, executable=Slow(binding.executable, 0.02))
        set_matrix(session, operands.c, operands.c_MN)
        session.barrier()
        plan.execute(CASE.alpha, CASE.beta)
        wrongs.append(mismatch(CASE, operands))
        session.barrier()
    return digests, [wrong for wrong in wrongs if wrong]


def test_every_trial_computes_the_product_and_all_ranks_keep_the_same_schedule(session, comm):
    operands = make_operands(session, CASE)
    with session.plan(operands.a, operands.b, operands.c, reads_c=True, options=OPTIONS) as plan:
        first, tried = plan.summary.digest, plan.summary.tried
        assert plan.tuning == (tried > 1)
        digests, wrongs = settle(session, plan, operands)
        collective_assert(comm, not wrongs, f"{wrongs}")
        assert not plan.tuning
        assert len(set(digests)) == tried
        assert len(digests) == 4 * tried - 1 if tried > 1 else not digests  # the first is bound when it is planned
        chosen = plan.summary.digest
        assert chosen == plan.schedule.digest()
        assert chosen in {first, *digests}
        assert len(set(allgather(comm, (first, tried, tuple(digests), chosen)))) == 1
        allocations = session.counters.allocations
        set_matrix(session, operands.c, operands.c_MN)
        session.barrier()
        plan.execute(CASE.alpha, CASE.beta)
        wrong = mismatch(CASE, operands)
        collective_assert(comm, not wrong, wrong)
        assert session.counters.allocations == allocations
    release(session, operands)


def test_a_schedule_that_is_slow_on_one_rank_is_not_kept(session, comm):
    operands = make_operands(session, CASE)
    with session.plan(operands.a, operands.b, operands.c, reads_c=True, options=OPTIONS) as plan:
        first = plan.summary.digest
        if not plan.tuning:
            pytest.skip("the search found one kind of schedule")
        _, wrongs = settle(session, plan, operands, slowed=first if comm.rank == comm.size - 1 else None)
        collective_assert(comm, not wrongs, f"{wrongs}")
        collective_assert(comm, plan.summary.digest != first, "the slowed one was kept")
        # What it took over is its own: the matrices may go first.
        plan.execute(CASE.alpha, CASE.beta)
    release(session, operands)


def test_a_trace_is_that_of_the_schedule_shown_and_no_trial(session, comm):
    operands = make_operands(session, CASE)
    with session.plan(operands.a, operands.b, operands.c, reads_c=True, options=OPTIONS) as plan:
        for _ in range(3):
            plan.execute(CASE.alpha, CASE.beta)
        calls = plan._entry.trials.calls if plan.tuning else 0
        trace = plan.trace(CASE.alpha, CASE.beta)
        assert len(trace.start_s) == len(plan.schedule.tasks)
        assert (plan._entry.trials.calls if plan.tuning else 0) == calls
        wrong = np.isfinite(trace.start_s).sum() != (plan.schedule.tasks["num_operands"] > 0).sum()
        collective_assert(comm, not wrong, "tasks without a time")
    release(session, operands)


def test_one_shot_products_are_tuned_too_and_planned_once(session, comm):
    operands = make_operands(session, CASE)
    planned = session.counters.planner_calls
    for _ in range(16):
        set_matrix(session, operands.c, operands.c_MN)
        session.barrier()
        session.gemm(operands.a, operands.b, operands.c, alpha=CASE.alpha, beta=CASE.beta, options=OPTIONS)
        wrong = mismatch(CASE, operands)
        collective_assert(comm, not wrong, wrong)
    assert session.counters.planner_calls == planned + 1
    release(session, operands)


def test_a_plan_may_be_closed_and_matrices_change_while_schedules_are_tried(session, comm):
    operands, others = (
        make_operands(session, CASE),
        make_operands(session, dataclasses.replace(CASE, seed=CASE.seed + 1)),
    )
    plan = session.plan(operands.a, operands.b, operands.c, reads_c=True, options=OPTIONS)
    plan.execute(CASE.alpha, CASE.beta)
    for _ in range(30):
        plan.execute(CASE.alpha, CASE.beta, a=others.a, b=others.b, c=others.c)
        set_matrix(session, others.c, others.c_MN)
        session.barrier()
        plan.execute(CASE.alpha, CASE.beta, a=others.a, b=others.b, c=others.c)
        wrong = mismatch(CASE, others)
        collective_assert(comm, not wrong, wrong)
        if not plan.tuning:
            break
    assert not plan.tuning
    plan.close()
    with session.plan(operands.a, operands.b, operands.c, reads_c=True, options=OPTIONS) as plan:
        plan.execute(CASE.alpha, CASE.beta)
    release(session, operands)
    release(session, others)
