"""Private host matrices that cannot be page-locked: a worker of their owner copies them, and devices use its copies."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert, expect
from tests.helpers.faulty import Disorder, FaultyBackend
from tests.helpers.products import (
    Case,
    Operands,
    make_operands,
    mismatch,
    moved_bytes,
    random_matrix,
    release,
    renew,
    set_matrix,
)
from tests.helpers.sessions import hide_arrays, refuse_pins
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import Code
from uncut_mpi.planning.staging import used_by_others

UNCUT = um.ScheduleOptions(scheduler="uncut", tile=16)
OPTIONS = (UNCUT, um.ScheduleOptions(scheduler="cyclic", tile=16), um.ScheduleOptions(scheduler="kblocks"))


def run(session: um.Session, case: Case, operands: Operands, options: um.ScheduleOptions = UNCUT) -> str:
    """Return what is wrong with a product, or with what it says of itself; collective."""
    set_matrix(session, operands.c, operands.c_MN)
    session.poison_softbuf()
    about = {"trans_a": case.trans_a, "trans_b": case.trans_b, "reads_c": case.beta != 0}
    about["scales_only"] = case.alpha == 0
    with session.plan(*operands.abc, options=options, **about) as plan:
        done = plan.execute(case.alpha, case.beta)
        key, staged = plan._plan.key, plan.summary.staged
        if used_by_others(plan.schedule, key.private):
            return f"{key.private} are used by devices or peers"
    copied = sum(session.gather_values(done.copy_bytes))
    if (done.staged, copied) != (bool(staged), moved_bytes(plan.schedule)):
        return f"staged {staged!r}, but {done.staged}; copied {copied} bytes"
    missing = {name for name, one in zip("ABC", operands.abc, strict=True) if one.info.obstacle}
    needed = missing if case.alpha else missing & {"C"}
    return mismatch(case, operands) or ("" if set(staged) == needed else f"staged {staged!r}, not {needed}")


def cases(size: int) -> list[Case]:
    last, ends = f"h{size - 1}", (("NN", "FFF"), ("TN", "CFC"), ("NT", "FCC"), ("TT", "CCF"))
    places = [("h0", "h0", "h0"), ("h0", "h", last), (last, "h0", "0"), ("0", last, last), ("h", "0", "h0")]
    return [
        Case(
            *(60, 50, 40),
            place=place,
            trans_a=ends[at % 4][0][0],
            trans_b=ends[at % 4][0][1],
            orders=ends[at % 4][1],
            pad=(at % 3, 0, at % 2),
            alpha=0.0 if at == 5 else 1.2345,
            beta=(1.1154, 0.0)[at % 2] if at < 5 else 0.5,
            seed=at,
        )
        for at, place in enumerate([*places, places[0]])
    ]


def test_whichever_matrices_cannot_be_page_locked_products_are_right(comm, open_session, monkeypatch):
    wrong = []
    with open_session(comm, verify=True) as session:
        refuse_pins(session, monkeypatch)
        for case in cases(comm.size):
            operands = make_operands(session, case)
            wrong += [run(session, case, operands, one) for one in OPTIONS]
            release(session, operands)
    collective_assert(comm, not any(wrong), str(wrong))


def test_a_session_of_one_rank_needs_them_copied_too(comm, open_session, monkeypatch):
    wrong = []
    with open_session(comm.Split(comm.rank), verify=True) as session:
        refuse_pins(session, monkeypatch)
        for case in cases(1)[:3]:
            operands = make_operands(session, case)
            wrong.append(run(session, case, operands))
            release(session, operands)
    collective_assert(comm, not any(wrong), str(wrong))


def test_what_lies_in_one_memory_twice_is_copied_twice_and_matrices_of_both_kinds_together(
    comm, open_session, monkeypatch
):
    case = Case(40, 40, 40, place=("h0", "h0", "0"))
    data = random_matrix(40, 40, DType.f64, (1,))
    wrong = []
    with open_session(comm, verify=True) as session:
        refuse_pins(session, monkeypatch)
        hide_arrays(session, monkeypatch)
        first, second = (session.register(data if session.rank == 0 else None, root=0) for _ in range(2))
        c = session.empty_device((40, 40), rank=0)
        c_MN = random_matrix(40, 40, DType.f64, (2,))
        for a, b in ((first, first), (first, second)):
            operands = Operands(a, b, c, data, data, c_MN, [])
            set_matrix(session, c, c_MN)
            session.poison_softbuf()
            with session.plan(a, b, c, options=UNCUT) as plan:
                plan.execute(case.alpha, case.beta)
            wrong.append(mismatch(case, operands))
            if plan.summary.staged != ("ABC" if comm.size > 1 else "AB"):
                wrong.append(plan.summary.staged)
    collective_assert(comm, not any(wrong), str(wrong))


def test_a_plan_runs_again_and_with_arrays_that_are_page_locked(comm, open_session, monkeypatch):
    refused = [True]
    case = Case(40, 30, 20, place=("h0", "h", f"h{comm.size - 1}"))
    with open_session(comm) as session:
        refuse_pins(session, monkeypatch, lambda _: refused[0])
        unpinned = make_operands(session, case)
        refused[0] = False
        direct = make_operands(session, case)
        mixed = Operands(unpinned.a, direct.b, direct.c, unpinned.a_MK, direct.b_KN, direct.c_MN, [])
        wrong, staged = [], []
        with session.plan(unpinned.a, unpinned.b, unpinned.c, options=UNCUT) as plan:
            for call, given in enumerate((unpinned, unpinned, direct, mixed, unpinned, mixed)):
                for matrix, data in ((given.a, given.a_MK), (given.b, given.b_KN)):
                    data[...] = np.random.default_rng((call, data.size)).uniform(-1, 1, data.shape)
                    set_matrix(session, matrix, data)
                renew(session, given)
                session.poison_softbuf()
                plan.execute(case.alpha, case.beta, a=given.a, b=given.b, c=given.c)
                staged.append(plan.summary.staged)
                wrong.append(mismatch(case, given))
        planned = session.counters.planner_calls
    collective_assert(comm, not any(wrong), str(wrong))
    collective_assert(comm, staged == ["AC", "AC", "", "A", "AC", "A"] and planned == 3, f"{staged}, {planned} plans")


def test_memory_of_ours_that_cannot_be_page_locked_is_everybody_s_error_and_the_session_goes_on(
    comm, open_session, monkeypatch
):
    case = Case(40, 30, 20, place=("h0", "h", "h"))
    with open_session(comm) as session:
        refuse_pins(session, monkeypatch)
        operands = make_operands(session, case)

        def refuse(address, nbytes):
            raise um.PinError("refused on purpose")

        with monkeypatch.context() as patch:
            patch.setattr(session._backend, "pin", refuse)
            expect(
                comm, um.PinError, ["page-locked host memory to stage", "on purpose"],
                lambda: session.gemm(*operands.abc, options=UNCUT),
            )  # fmt: skip
        wrong = run(session, case, operands)
        release(session, operands)
    collective_assert(comm, not wrong, wrong)


@pytest.mark.host_backend
@pytest.mark.parametrize("seed", range(2))
def test_any_order_of_what_may_run_gives_the_product(comm, open_session, monkeypatch, seed):
    wrong = []
    with open_session(comm, backend=functools.partial(FaultyBackend, disorder=Disorder(seed=seed))) as session:
        refuse_pins(session, monkeypatch)
        for case in cases(comm.size)[:2]:
            operands = make_operands(session, case)
            wrong += [run(session, case, operands, one) for one in (OPTIONS[0], OPTIONS[2])]
            release(session, operands)
    collective_assert(comm, not any(wrong), str(wrong))


@pytest.mark.host_backend
@pytest.mark.parametrize("place", ["h0", "0"])
def test_a_call_that_fails_among_copies_within_the_host_ends_on_all_ranks_and_the_next_one_is_right(
    comm, open_session, monkeypatch, place
):
    failing = [True]

    def fail(task, code, region):
        # With C there, the fourth copy of its owner is one of its worker; else a product comes first on some rank.
        if failing[0] and comm.rank == 0 and code is Code.COPY:
            failing.append(True)
            if len(failing) > 4:
                raise um.DeviceError(f"task {task} failed on purpose")

    with open_session(comm, backend=lambda rank, ranks: FaultyBackend(rank, ranks, fault=fail)) as session:
        refuse_pins(session, monkeypatch)
        case = Case(64, 48, 80, place=("h0", "h0", place))
        operands = make_operands(session, case)
        expect(
            comm, um.DeviceError, ["rank 0", "on purpose"] if comm.size > 1 else ["on purpose"],
            lambda: session.gemm(*operands.abc, options=UNCUT),
        )  # fmt: skip
        failing[0] = False
        wrong = [run(session, case, operands) for _ in range(2)]
    counts = allgather(comm, len(failing))
    collective_assert(comm, counts[0] == 5 and not any(wrong), f"{counts} {wrong}")
