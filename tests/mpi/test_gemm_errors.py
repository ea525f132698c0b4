"""Bad input gets one clear error on every rank, and the session goes on working after it."""

from __future__ import annotations

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert, expect, outcome
from tests.helpers.hostile import interrupt
from tests.helpers.products import Case, array_of, check_product, make_operands, shared_of
from uncut_mpi.units import name_ranks


def blocked(slots):
    return um.ScheduleOptions(scheduler="kblocks", blocking=um.Blocking(slots=slots))


@pytest.fixture
def operands(session):
    return make_operands(session, Case(24, 20, 16))


def test_shapes_that_do_not_fit(session, comm, operands):
    expect(comm, um.ParamError, ["24×16", "24×20"], lambda: session.gemm(operands.a, operands.c, operands.c))


def test_errors_name_the_call_that_was_written(session, comm, operands):
    a, b, c = operands.a, operands.b, operands.c
    late = comm.rank == comm.size - 1
    for call, name in (
        (lambda one: session.gemm(a, one, c), "gemm"),
        (lambda one: session.gemm(a, one, c, wait=False), "gemm with wait=False"),
        (lambda one: session.gemm_batch([a], [one], [c]), "gemm_batch"),
        (lambda one: session.gemm_batch([a], [one], [c], wait=False), "gemm_batch with wait=False"),
        (lambda one: session.matmul(a, one), "matmul"),
        (lambda one: a @ one, "matmul"),
        (lambda one: session.plan(a, one, c), "plan"),
    ):
        expect(comm, um.ParamError, [f"{name}: shapes"], lambda call=call: call(a))
        who = "" if comm.size == 1 else f"rank {comm.size - 1}: "
        expect(comm, um.ParamError, [f"{who}{name}: B"], lambda call=call: call(None if late else b))
        if comm.size > 1:
            said = f"rank 0 called barrier, rank{'s 1-' * (comm.size > 2)}{' ' * (comm.size < 3)}{comm.size - 1}"
            expect(
                comm,
                um.RankMismatchError,
                [f"{said} called {name}: "],
                lambda call=call: session.barrier() if comm.rank == 0 else call(b),
            )


def test_types_that_differ(session, comm, operands):
    other = session.empty_host((16, 20), np.float32)
    expect(comm, um.ParamError, ["f64", "f32"], lambda: session.gemm(operands.a, other, operands.c))


def test_c_overlapping_an_input(session, comm, operands):
    square = session.empty_host((24, 24), np.float64)
    part = session.register(square.array[:, :16] if session.rank == 0 else None, root=0)
    expect(comm, um.ParamError, ["overlaps"], lambda: session.gemm(part, operands.b, session_c(session, square)))


def session_c(session, square):
    return session.register(square.array[:, 4:24] if session.rank == 0 else None, root=0)


def test_disjoint_parts_of_one_array_do_not_overlap(session, comm):
    whole = shared_of(session, np.random.default_rng(0).uniform(-1, 1, (30, 60)))
    root = session.rank == 0
    a, b, c = (
        session.register(whole.array[:, at : at + 20][:rows] if root else None, root=0)
        for at, rows in ((0, 30), (20, 20), (40, 30))
    )
    session.gemm(a, b, c)
    seen = array_of(whole)
    good = seen is None or np.allclose(seen[:, 40:], seen[:, :20] @ seen[:20, 20:40], rtol=0, atol=1e-13)
    collective_assert(comm, good, "C is not A B")


def test_beta_without_c(session, comm, operands):
    expect(comm, um.ParamError, ["beta", "2.0"], lambda: session.gemm(operands.a, operands.b, beta=2.0))


def test_beta_in_a_plan_that_promised_none(session, comm, operands):
    with session.plan(*operands.abc, reads_c=False) as plan:
        expect(comm, um.ParamError, ["beta = 0.5", "reads_c"], lambda: plan.execute(1.0, 0.5))
        plan.execute(1.0, 0.0)


def test_alpha_in_a_plan_that_promised_none(session, comm, operands):
    with session.plan(*operands.abc, scales_only=True) as plan:
        expect(comm, um.ParamError, ["alpha = 2.0", "scales_only"], lambda: plan.execute(2.0, 0.5))
        plan.execute(0.0, 0.5)


def test_matrices_that_do_not_fit_the_plan(session, comm, operands):
    with session.plan(*operands.abc) as plan:
        expect(comm, um.ParamError, ["planned", "given"], lambda: plan.execute(a=operands.b))


@pytest.mark.mpi(min_size=2)
def test_a_mismatch_names_what_differs_alone(session, comm, operands):
    a, b, c = operands.abc
    last = session.rank == session.size - 1
    other = session.empty_host(c.shape)
    with session.plan(a, b, c) as plan:
        for name, call in (
            ("alpha", lambda: session.gemm(a, b, c, alpha=2.0 if last else 1.0)),
            ("alpha", lambda: session.gemm(a, b, alpha=2.0 if last else 1.0)),
            ("trans_a", lambda: session.gemm(a, b, trans_a="T" if last else "N")),
            ("beta", lambda: plan.execute(beta=2.0 if last else 1.0)),
            ("out", lambda: session.gemm(a, b, other if last else c)),
            ("options.tile", lambda: session.gemm(a, b, options=um.ScheduleOptions(tile=8 if last else 16))),
            ("options.blocking.slots", lambda: session.gemm(a, b, options=blocked(4 if last else 3))),
            ("c", lambda: session.plan(a, b, other if last else c)),
            ("reads_c", lambda: session.plan(a, b, c, reads_c=last)),
            ("memory", lambda: session.redistribute(c, um.Layout.rows(), memory="host" if last else "device")),
            ("order", lambda: session.empty_host((3, 4), order="F" if last else "C")),
            ("matrix", lambda: session.release(other if last else c)),
            ("a number", lambda: session.agree(3 if last else 2, "a number")),
            ("max_plans", lambda: um.Session(comm, max_plans=5 if last else 6)),
        ):
            said = outcome(call)
            good = said.startswith(f"RankMismatchError: ranks passed different values: {name}: ")
            collective_assert(comm, good and said.count(": ") == 3 and f" on rank {comm.size - 1}" in said, said)
    session.release(other)
    session.gemm(*operands.abc, alpha=1.2345, beta=1.1154)
    check_product(comm, Case(24, 20, 16), operands)


@pytest.mark.mpi(min_size=2)
def test_one_rank_with_a_bad_argument(session, comm, operands):
    trans = "X" if session.rank == 1 else "N"
    expect(comm, um.ParamError, ["'X'"], lambda: session.gemm(*operands.abc, trans_a=trans))


def test_a_rank_that_does_not_exist(session, comm):
    missing = session.size
    expect(comm, um.ParamError, [str(missing)], lambda: session.register(None, root=missing))
    expect(comm, um.ParamError, [str(missing)], lambda: session.empty_device((4, 4), rank=missing))


def test_too_little_shared_memory(session, comm):
    expect(comm, um.CapacityError, ["needs", "available"], lambda: session.empty_host((1 << 22, 1 << 22)))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "settings",
    [{"max_plans": 3}, {"verify": True}, {"timeout_s": -1.0}, {"arrival_timeout_s": 0.0}, {"machine": "h200-4x"}],
)
def test_sessions_whose_settings_differ_or_are_wrong(comm, open_session, settings):
    mine = settings if comm.rank == 0 else {}
    expect(comm, um.ParamError, ["rank"], lambda: open_session(comm, **mine))


@pytest.mark.mpi(min_size=2)
@pytest.mark.host_backend
@pytest.mark.parametrize("late", ["gemm", "barrier", "together"])
@pytest.mark.on_nodes
def test_a_rank_that_comes_after_the_others_gave_up_is_told(comm, late):
    session = um.Session(comm, backend="host", machine=um.Machine.uniform(comm.size), arrival_timeout_s=0.5)
    made = make_operands(session, Case(24, 20, 16))
    session.gemm(made.a, made.b)

    def call():
        if late == "gemm":
            session.gemm(made.a, made.b)
        elif late == "barrier":
            session.barrier()
        else:
            with session.together("what never ends"):
                pass

    if comm.rank == 1:
        allgather(comm, None)  # the others are no more in the call
        found = outcome(call)
    else:
        found = outcome(lambda: session.gemm(made.a, made.b))
        allgather(comm, None)
    others = name_ranks([rank for rank in range(comm.size) if rank != 1])
    told = f"{others} waited for this rank and gave up" if comm.rank == 1 else "for rank 1"
    collective_assert(comm, found.startswith("StallError: ") and told in found and session.broken, found)
    session.close()


@pytest.mark.mpi(min_size=3)
@pytest.mark.host_backend
@pytest.mark.on_nodes
def test_a_rank_whose_wait_was_interrupted_is_told_that_others_gave_up(comm, monkeypatch):
    session = um.Session(comm, backend="host", machine=um.Machine.uniform(comm.size), arrival_timeout_s=0.5)
    made = make_operands(session, Case(24, 20, 16))
    found = ""
    if comm.rank == 2:
        allgather(comm, None)  # nobody waits any more
    try:
        with monkeypatch.context() as patch:
            if comm.rank == 1:
                patch.setattr(session._group, "watch", interrupt)
            session.gemm(made.a, made.b, made.c)
    except (um.StallError, KeyboardInterrupt) as error:
        found = type(error).__name__
    if comm.rank != 2:
        allgather(comm, None)
    collective_assert(comm, found == ("KeyboardInterrupt" if comm.rank == 1 else "StallError"), found)
    if comm.rank == 1:
        with pytest.raises(um.StallError, match="waited for this rank and gave up"):
            session.barrier()
    allgather(comm, None)
    session._gate.broken = True  # no rank may close collectively
    session.close()
