"""Flags count the calls of a session modulo 2³²: products stay right across every turn of the count."""

from __future__ import annotations

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from tests.helpers.products import Case, make_operands, mismatch, release, set_matrix
from uncut_mpi.device.host import Disorder, HostBackend

pytestmark = pytest.mark.mpi(min_size=1)
OPTIONS = um.ScheduleOptions(scheduler="uncut", tile=16)
BOUNDARIES = {"2^30": 1 << 30, "2^31": 1 << 31, "3*2^30": 3 << 30, "2^32": 1 << 32}


def at_epoch(session, epoch: int) -> None:
    """Make the next call but one that of `epoch`, as if the session had made all calls before; collective."""
    session.barrier()
    session._calls._epoch = (epoch - 1) % (1 << 32)
    # The count is never further from the flags than its period, since all are written once in it.
    session._calls._reset_flags()


@pytest.fixture(params=["in order", "in random order"])
def fresh_session(request, comm):
    disorder = Disorder(seed=5) if request.param == "in random order" else None
    with um.Session(
        comm,
        backend=lambda rank, ranks: HostBackend(rank, ranks, disorder=disorder),
        machine=um.Machine.uniform(comm.size),
        timeout_s=20,
    ) as session:
        yield session


@pytest.mark.parametrize("boundary", BOUNDARIES.values(), ids=BOUNDARIES.keys())
def test_products_stay_right_across_a_turn_of_the_count(comm, fresh_session, boundary):
    session = fresh_session
    case = Case(50, 45, 40, place=("0", "h", str(comm.size - 1)), trans_b="T")
    operands = make_operands(session, case)
    fresh = operands.c_MN.copy()
    with session.plan(operands.a, operands.b, operands.c, trans_b="T", options=OPTIONS) as plan:
        plan.execute(case.alpha, case.beta)
        at_epoch(session, boundary - 2)
        wrong, epochs = [], []
        for call in range(5):
            # Other numbers in every call: a task that ran before its input came would use the old ones.
            for matrix, data in ((operands.a, operands.a_MK), (operands.b, operands.b_KN)):
                data[...] = np.random.default_rng((call, data.size)).uniform(-1, 1, data.shape)
                set_matrix(session, matrix, data)
            set_matrix(session, operands.c, fresh)
            session.barrier()
            plan.execute(case.alpha, case.beta)
            epochs.append(session._calls._epoch)
            wrong.append(mismatch(case, operands))
            session.barrier()
    wanted = [(boundary - 2 + call) % (1 << 32) for call in range(5)]
    collective_assert(comm, epochs == wanted, f"{epochs}, expected {wanted}")
    collective_assert(comm, not any(wrong), f"{wrong}")
    release(session, operands)


def test_every_flag_is_rewritten_once_in_a_period(comm, fresh_session):
    session = fresh_session
    calls = session._calls
    operands = make_operands(session, Case(30, 30, 30))
    at_epoch(session, (1 << 30) - 1)
    count = int(calls._flags.sizes[session.rank]) // 4
    calls._board.abort[0] = (1 << 30) + 1  # as if the call of this epoch had failed one turn ago
    seen = []
    for _ in range(2):
        session.gemm(operands.a, operands.b, operands.c, options=OPTIONS)
        flags = np.zeros((count, 1), np.uint32, order="F")
        session._backend.to_host(int(calls._flags.addresses[session.rank]), count, flags)
        seen.append(int(flags[-1, 0]))  # a slot that no plan of this session uses
        session.barrier()
    collective_assert(comm, seen == [(1 << 30) - 3, (1 << 30) - 1], f"{seen}")
    release(session, operands)
