"""Sessions with little memory: products that do not fit are computed one block of C after the other."""

from __future__ import annotations

import functools
import time

import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.faulty import FaultyBackend
from tests.helpers.products import Case, check_product, make_operands, renew
from uncut_mpi.api.plan_maker import Budget

KIB = 1 << 10

CASES = [
    Case(300, 260, 280),
    Case(300, 260, 280, ("h", "h", "h"), "bf16", "T", "N", "FCF"),
    Case(300, 260, 280, ("h", "h", "h"), "c128", "C", "T", "CCC", beta=0),
    Case(280, 320, 300, ("0", "0", "0"), "f32", "N", "T", "FFC"),
    Case(280, 320, 300, ("h", "0", "h"), "f16", "N", "N", "CFC", beta=0.5),
    Case(120, 110, 900, ("h", "h", "0"), "f64", "N", "N", "FFF"),
]


@pytest.mark.parametrize("memory", [96 * KIB, 256 * KIB])
def test_products_of_every_kind_and_place_are_right_in_little_memory(comm, open_session, memory):
    with open_session(comm, device_memory=memory, verify=True) as session:
        for case in CASES:
            operands = make_operands(session, case)
            session.poison_softbuf()
            for _ in range(2):  # a plan that is used again overwrites what it left
                renew(session, operands)
                scalars = {"alpha": case.alpha, "beta": case.beta}
                trans = {"trans_a": case.trans_a, "trans_b": case.trans_b}
                session.gemm(*operands.abc, **scalars, **trans)
                check_product(comm, case, operands)


def test_what_a_call_allows_goes_before_what_the_session_does(comm, open_session):
    case = Case(300, 260, 280)
    with open_session(comm, device_memory=96 * KIB) as session:
        operands = make_operands(session, case)
        abc = operands.abc
        little = session.plan(*abc)
        much = session.plan(*abc, options=um.ScheduleOptions(device_memory=64 * KIB * KIB))
        collective_assert(comm, "room for" in str(little), str(little))
        collective_assert(comm, "room for" not in str(much), str(much))
        for plan in (little, much):
            renew(session, operands)
            plan.execute(alpha=case.alpha, beta=case.beta)
            check_product(comm, case, operands)


def test_a_budget_that_nothing_fits_is_one_error_and_the_session_goes_on(comm, open_session):
    case = Case(300, 260, 280)
    with open_session(comm) as session:
        operands = make_operands(session, case)
        for memory, words in ((1, ["would do with", "device_memory"]), (1 << 60, ["was asked for, and rank "])):
            options = um.ScheduleOptions(device_memory=memory)
            call = functools.partial(session.gemm, *operands.abc, options=options)
            expect(comm, um.CapacityError, words, call)
        session.gemm(*operands.abc, alpha=case.alpha, beta=case.beta)
        check_product(comm, case, operands)


@pytest.mark.parametrize(("value", "words"), [(0, "below 1"), (-5, "below 1"), (1.5, "memory"), ("x", "memory")])
def test_budgets_that_are_none_are_refused(comm, open_session, value, words):
    expect(comm, um.ParamError, [words], lambda: open_session(comm, device_memory=value))


@pytest.mark.mpi(min_size=2)
def test_ranks_that_allow_different_bytes_are_told(comm, open_session):
    expect(comm, um.RankMismatchError, ["device_memory"], lambda: open_session(comm, device_memory=1000 + comm.rank))


def test_four_fifths_of_what_is_free_or_of_what_copies_leave_of_host_memory_are_the_usual_budget(comm, open_session):
    with open_session(comm) as session:
        memory = 16 * 10**9
        machine = um.Machine.uniform(comm.size, memory_bytes=memory)
        free = [10 * 10**9 + 10**9 * (rank == 1) for rank in range(comm.size)]
        session._backend.memory = lambda: (free[comm.rank], memory)
        usual = Budget(session._group, session._backend, machine, 0, 1).agree(0, 0)
        held = Budget(session._group, session._backend, machine, 0, 1).agree(0, 5 * 10**9)
        shared = Budget(session._group, session._backend, machine, 0, 2).agree(0, 0)
        unknown = Budget(session._group, session._backend, um.Machine.uniform(comm.size, memory_bytes=0), 0, 1)
        collective_assert(comm, unknown.agree(0, 0) > 0, "no budget where the model has no memory")
        del session._backend.memory
        # Copies have 2³², 2³² and 2³¹ bytes beside it.
        wanted = (4, 8, 2) if session._backend.takes_host_memory else (8, 12, 4)
        found = [one / 10**9 for one in (usual, held, shared)]
        collective_assert(comm, found == [*wanted], str(found))


@pytest.mark.host_backend
def test_an_error_in_the_middle_ends_all_ranks_and_the_session_goes_on(comm):
    case, failing = Case(300, 260, 280), [True]

    def fail(task, *_):
        if failing and comm.rank == comm.size - 1 and task > 200:
            failing.clear()
            raise um.DeviceError("nothing works any more")

    machine, faulty = um.Machine.uniform(comm.size), functools.partial(FaultyBackend, fault=fail)
    with um.Session(comm, backend=faulty, machine=machine, device_memory=96 * KIB, timeout_s=20) as session:
        operands = make_operands(session, case)
        product = operands.abc
        began = time.monotonic()
        expect(comm, um.DeviceError, ["nothing works any more"], lambda: session.gemm(*product))
        collective_assert(comm, time.monotonic() - began < 10.0, "nobody waits for those that have failed")
        failing.clear()
        renew(session, operands)
        session.gemm(*product, alpha=case.alpha, beta=case.beta)
        check_product(comm, case, operands)
