"""Flags count the tasks of a session modulo 2³²: products stay right across every turn of the count."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from mpi4py import MPI

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from tests.helpers.faulty import Disorder, FaultyBackend
from tests.helpers.host_copies import joined_by_hosts
from tests.helpers.products import Case, make_operands, mismatch, set_matrix
from tests.helpers.sessions import ranks_per_node
from uncut_mpi.api import memory
from uncut_mpi.planning import planner
from uncut_mpi.planning.planner import plan_several

OPTIONS = um.ScheduleOptions(scheduler="uncut", tile=16)
BOUNDARIES = {"2^30": 1 << 30, "2^31": 1 << 31, "3*2^30": 3 << 30, "2^32": 1 << 32}


def at_epoch(session, epoch: int) -> None:
    """Make the next call begin at `epoch`, as if the session had made all calls before; collective."""
    session.barrier()
    session._calls.binder.flags.epoch = epoch % (1 << 32)
    # The count is never further from the flags than its period, since all are written once in it.
    session._calls.binder.flags.reset()


def flags_of(session) -> np.ndarray:
    """Read all flags of this rank; between calls and barriers."""
    count = int(session._calls.binder.flags.sizes[session.rank]) // 4
    flags = np.zeros((count, 1), np.uint32, order="F")
    session._backend.to_host(int(session._calls.binder.flags.addresses[session.rank]), count, flags)
    return flags[:, 0]


def run_on_other_numbers(session, plan, case, operands, c, call: int) -> None:
    """Run a plan on other numbers in every call: a task that ran before its input came would use the old ones."""
    for matrix, data in ((operands.a, operands.a_MK), (operands.b, operands.b_KN)):
        data[...] = np.random.default_rng((call, data.size)).uniform(-1, 1, data.shape)
        set_matrix(session, matrix, data)
    set_matrix(session, operands.c, c)
    session.barrier()
    plan.execute(case.alpha, case.beta)


@pytest.fixture(params=["in order", "in random order"])
def fresh_session(request, comm):
    disorder = Disorder(seed=5) if request.param == "in random order" else None
    with um.Session(
        comm,
        backend=lambda rank, ranks: FaultyBackend(rank, ranks, disorder=disorder),
        machine=um.Machine.uniform(comm.size),
        timeout_s=20,
    ) as session:
        yield session


@pytest.mark.parametrize("boundary", [1 << 31, 1 << 32])
def test_flags_in_host_memory_keep_step_with_the_others(comm, fresh_session, monkeypatch, boundary):
    def joined(*arguments):
        return [
            dataclasses.replace(one, schedule=joined_by_hosts(one.schedule, random.Random(boundary)))
            for one in plan_several(*arguments)
        ]

    monkeypatch.setattr(planner, "plan_several", joined)
    session = fresh_session
    case = Case(50, 45, 40, place=("0", "h", str(comm.size - 1)))
    operands = make_operands(session, case)
    fresh = operands.c_MN.copy()
    wrong = []
    with session.plan(*operands.abc, options=OPTIONS) as plan:
        at_epoch(session, boundary - 1)
        for call in range(3):
            run_on_other_numbers(session, plan, case, operands, fresh, call)
            wrong.append(mismatch(case, operands))
            session.barrier()
    ahead = session._calls.control.flags[session._group.here] - np.uint32(boundary - 1)
    collective_assert(comm, not any(wrong), f"{wrong}")
    collective_assert(comm, 0 < ahead.max() < 1 << 20, f"flags that no call has written, or none: {ahead}")


@pytest.mark.parametrize("boundary", BOUNDARIES.values(), ids=BOUNDARIES.keys())
def test_products_stay_right_across_a_turn_of_the_count(comm, fresh_session, boundary):
    session = fresh_session
    case = Case(50, 45, 40, place=("0", "h", str(comm.size - 1)), trans_b="T")
    operands = make_operands(session, case)
    fresh = operands.c_MN.copy()
    with session.plan(*operands.abc, trans_b="T", options=OPTIONS) as plan:
        session._calls.binder.flags.epoch = 0
        plan.execute(case.alpha, case.beta)
        span = session._calls.binder.flags.epoch
        at_epoch(session, boundary - 2 * span - 1)  # the third call begins before the boundary and ends behind it
        wrong, epochs = [], []
        for call in range(5):
            run_on_other_numbers(session, plan, case, operands, fresh, call)
            epochs.append(session._calls.binder.flags.epoch)
            wrong.append(mismatch(case, operands))
            session.barrier()
    wanted = [(boundary - 1 + (call - 1) * span) % (1 << 32) for call in range(5)]
    collective_assert(comm, epochs == wanted, f"{epochs}, expected {wanted}")
    collective_assert(comm, not any(wrong), f"{wrong}")
    good = span > 1 if comm.size > 1 else span == 1
    collective_assert(comm, good, f"a call takes the count {span} further")


@pytest.mark.mpi(min_size=2)
def test_flags_say_how_far_lanes_have_come_and_never_more_than_the_count(comm, fresh_session):
    session = fresh_session
    operands = make_operands(session, Case(50, 45, 40))
    session.gemm(*operands.abc, options=OPTIONS)
    first = session._calls.binder.flags.epoch
    session.barrier()
    once = flags_of(session).astype(np.int64)
    session.barrier()
    session.gemm(*operands.abc, options=OPTIONS)
    twice = flags_of(session).astype(np.int64)
    session.barrier()
    good = np.array_equal(np.where(once > 0, once + first, 0), twice)
    good &= session._calls.binder.flags.epoch == 2 * first and 0 <= once.min() <= once.max() <= first
    collective_assert(comm, good, f"{first}: {once[once > 0]}, then {twice[twice > 0]}")
    highest = comm.allreduce(int(once.max()), MPI.MAX)
    alone = ranks_per_node(comm.size) == comm.size  # else ranks wait by flags of the host, or for messages
    collective_assert(
        comm,
        highest == first or not alone,
        f"{highest} is written at most, but a call takes the count {first} on",
    )


@pytest.mark.mpi(min_size=2)
def test_every_flag_is_rewritten_before_the_count_is_a_period_ahead_of_it(comm, fresh_session, monkeypatch):
    session = fresh_session
    operands = make_operands(session, Case(30, 30, 30))
    session.gemm(*operands.abc, options=OPTIONS)
    span = session._calls.binder.flags.epoch
    assert memory._PERIOD == 1 << 30
    monkeypatch.setattr(memory, "_PERIOD", 3 * span)
    at_epoch(session, 0)
    session._calls.control.board.abort[0] = 2 * span + 1  # as if the third call had failed one turn ago
    seen = []
    for _ in range(6):
        session.gemm(*operands.abc, options=OPTIONS)
        seen.append(int(flags_of(session)[-1]))  # a flag that no plan of this session uses
        session.barrier()
    collective_assert(comm, seen == [0, 0, 2 * span, 2 * span, 4 * span, 4 * span], f"{seen}, span {span}")
