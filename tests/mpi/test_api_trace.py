"""Traces of real calls: every task has its time, in the order that the schedule asks for."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert, expect
from tests.helpers.faulty import FaultyBackend
from tests.helpers.products import Case, check_product, make_operands, set_matrix
from tests.helpers.timelines import check_trace
from uncut_mpi.planning.schedule import Kind
from uncut_mpi.view import Timeline, to_perfetto

# Between GPUs clocks are compared by one event each; within a rank only the resolution of the events counts.
CLOCKS_S = {"host": (0.0, 0.0), "cuda": (1e-6, 1e-4)}


def traced(session, case):
    operands = make_operands(session, case)
    options = um.ScheduleOptions(scheduler="uncut", tile=32)
    with session.plan(*operands.abc, reads_c=case.beta != 0, options=options) as plan:
        session.poison_softbuf()
        trace = plan.trace(case.alpha, case.beta)
        return plan.schedule, trace, operands


@pytest.mark.parametrize("place", [("h", "h", "h"), ("0", "h", "0")])
def test_a_traced_call_computes_and_times_every_task_in_its_order(session, comm, place):
    case = Case(96, 80, 70, place=place)
    schedule, trace, operands = traced(session, case)
    check_product(comm, case, operands)
    bodies = ~np.isin(schedule.tasks["kind"], (Kind.JOIN, Kind.SEND, Kind.RECV))  # messages have no times
    timed = np.isfinite(trace.start_s)
    rank = schedule.tasks["rank"]
    same_s, other_s = CLOCKS_S[session.backend_name]
    late = [
        (int(awaited), task)
        for task in np.flatnonzero(bodies).tolist()
        for awaited in schedule.awaited(task)
        if bodies[awaited]
        and trace.end_s[awaited] > trace.start_s[task] + (same_s if rank[awaited] == rank[task] else other_s)
    ]
    good = (timed == bodies).all() and (trace.end_s[bodies] >= trace.start_s[bodies]).all() and not late
    collective_assert(comm, good, f"{late}")
    collective_assert(comm, np.nanmin(trace.start_s) == 0.0, "the first task starts at 0")
    every = allgather(comm, (trace.start_s.tobytes(), trace.end_s.tobytes()))
    collective_assert(comm, len(set(every)) == 1, "ranks have different traces")
    check_trace(json.loads(to_perfetto([Timeline.of(schedule, trace.start_s, trace.end_s, "measured")])))


def test_a_rank_that_traces_alone_is_an_error_on_all(session, comm):
    case = Case(40, 40, 40)
    operands = make_operands(session, case)
    caught = None
    with session.plan(*operands.abc) as plan:
        try:
            (plan.trace if comm.rank == 0 else plan.execute)(1.0, 1.0)
        except um.RankMismatchError as error:
            caught = error
    collective_assert(comm, (caught is None) == (comm.size == 1) and (caught is None or "trace" in str(caught)), caught)


def test_a_closed_plan_is_not_traced(session, comm):
    operands = make_operands(session, Case(8, 8, 8))
    plan = session.plan(*operands.abc)
    plan.close()
    expect(comm, um.ParamError, ["closed"], plan.trace)


@pytest.mark.host_backend
def test_how_far_a_call_is_can_be_asked_meanwhile(comm, open_session):
    seen = []

    def look(*_):
        seen.append(plan.progress())

    with open_session(comm, backend=lambda rank, ranks: FaultyBackend(rank, ranks, fault=look)) as session:
        matrices = [session.empty_host((300, 300)) for _ in range(3)]
        for matrix in matrices[:2]:
            set_matrix(session, matrix, 1.0)
        session.barrier()
        with session.plan(*matrices, options=um.ScheduleOptions(scheduler="uncut", tile=50)) as plan:
            before = plan.progress()
            plan.execute()
            after = plan.progress()
        drops = [(one, other) for one, other in itertools.pairwise(seen) if other < one]
        good = before == after == 0 and not drops and 0 <= seen[0] < 0.2 and 0.8 < seen[-1] <= 1
        collective_assert(comm, good, f"{before} {drops} {seen[0]} to {seen[-1]} {after}")
