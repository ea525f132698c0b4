"""Products through a session on the host backend: placements, layouts, types, edges, scalars."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.distributed import made_of, on_host
from tests.helpers.products import (
    Case,
    Operands,
    check_product,
    expected,
    make_operands,
    mismatch,
    moved_bytes,
    product,
    random_matrix,
    release,
    renew,
    shared_of,
    shows,
)
from uncut_mpi.api import plan_maker, plans
from uncut_mpi.device.interface import Backend
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning import kblocks_request
from uncut_mpi.planning.options import BLOCK_ORDERS, DELIVERIES
from uncut_mpi.planning.planner import remade
from uncut_mpi.planning.schedule import Kind

TYPES = ("f64", "f32", "f16", "bf16", "tf32", "f16,f16,f32", "bf16,bf16,f32", "i8", "e4m3", "e5m2")
TYPES += ("e4m3,e4m3,bf16", "e4m3,e5m2,f16", "e5m2,e4m3,bf16")
UNCUT = um.ScheduleOptions(scheduler="uncut", tile=16)


@pytest.fixture
def run(comm, session):
    """Multiplies the matrices of a case, by default by uncut; fails on all ranks if the product is wrong."""

    def multiply(case: Case, options: um.ScheduleOptions | None = UNCUT) -> None:
        wrong = product(session, case, options)
        collective_assert(comm, not wrong, wrong)

    return multiply


def places(size: int) -> list[tuple[str, str, str]]:
    ends = ["h", "0", str(size - 1)]
    return sorted(set(itertools.product(dict.fromkeys(ends), repeat=3)))


def test_every_placement_on_host_first_and_last_rank(session, run):
    for number, place in enumerate(places(session.size)):
        run(Case(65, 43, 57, place=place, seed=number))


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_accumulates_and_rounds_as_it_should(session, run, dtype):
    last = str(session.size - 1)
    first = Case(1, 1, 1, dtype=dtype).dtypes[0]
    wheres = [("h", "h", "h"), ("0", "0", "0"), ("0", last, "h"), (last, "h0", "0")]
    ways = itertools.product("NT", "NT", map("".join, itertools.product("FC", repeat=3)))
    for number, (trans_a, trans_b, orders) in enumerate(ways):
        if ((number // 4).bit_count() + TYPES.index(dtype)) % 2:  # of two types next to each other one has it
            continue
        alpha, beta = (3, -2) if first.is_integer else (1.2345, 1.1154)
        case = Case(
            *((48, 40, 96) if number % 4 < 2 else (33, 21, 47)),
            wheres[(number + number // 4) % 4],
            dtype,
            trans_a,
            trans_b,
            orders,
            pad=(0, 0, 0) if number % 4 < 2 else (1, 0, 3),
            alpha=alpha,
            beta=beta * (number % 3 > 0),
            seed=number,
            scales=(0.37, 2.9) if first.needs_scales else (),
        )
        run(case, (UNCUT, None)[number % 2])


@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),
        (1, 40, 7),
        (40, 1, 7),
        (7, 40, 1),
        (3, 2, 300),
        (129, 2, 1),
        (0, 5, 3),
        (5, 0, 3),
        (5, 4, 0),
        (0,) * 3,
    ],
)
def test_edges_of_size(session, run, shape):
    last = str(session.size - 1)
    for place, beta in itertools.product((("h", "h", "h"), ("0", last, "0"), ("h", "0", last)), (0.0, 0.5)):
        run(Case(*shape, place=place, beta=beta), None)


@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.0), (0.0, 2.5), (1.0, 1.0), (-2.0, 0.0), (1.0, -1.0)])
def test_scalars_and_what_they_leave_unread(session, run, alpha, beta):
    last = str(session.size - 1)
    for place, dtype in itertools.product((("h", "h", "h"), ("0", "0", "0"), (last, "h", "0")), ("f64", "bf16")):
        run(Case(33, 35, 20, place=place, dtype=dtype, alpha=alpha, beta=beta))


def test_private_host_memory_of_a_rank(session, run):
    last = f"h{session.size - 1}"
    for place in ((last, "h", "h"), ("h0", "0", last), (last, last, last), ("0", "h0", "0")):
        run(Case(40, 44, 36, place=place))


def test_ranks_that_do_not_compute_hold_matrices(session, run):
    last, size = str(session.size - 1), session.size
    for devices in ((0,), tuple(range(size))[::-1], tuple(range(size))[: -(-size // 2)], (size - 1,)):
        for place in (("h", "h", "h"), ("0", "0", "0"), (last, "0", last), ("h0", last, "h0")):
            run(Case(70, 66, 50, place=place), dataclasses.replace(UNCUT, devices=devices))


def k_options(session: um.Session, number: int) -> um.ScheduleOptions:
    """Return options of kblocks, its orders, splits and ways with C drawn by `number`."""
    draw = random.Random(number)
    combine, block = draw.choice(("owner", "worker")), draw.choice((24, 200))
    blocking = um.Blocking(
        splits=draw.choice((1, 1 + draw.randrange(min(3, session.size)))),
        first=draw.choice((5, block)),
        block=block,
        columns=draw.randint(1, 4),
        order=draw.choice(BLOCK_ORDERS),
        lanes=draw.randint(1, 2),
        delivery=draw.choice(DELIVERIES),
        combine=combine,
        away=0 if combine == "worker" else draw.randrange(3),
    )
    return um.ScheduleOptions(scheduler="kblocks", blocking=blocking)


@pytest.fixture
def any_slice(monkeypatch):
    """Let fetches of the small matrices used here be shared by ranks too."""
    monkeypatch.setattr(kblocks_request, "MIN_SLICE_BYTES", 1)


@pytest.mark.usefixtures("any_slice")
def test_large_products_with_every_placement(session, run):
    for number, place in enumerate(places(session.size)):
        run(Case(65, 43, 57, place=place, seed=number), k_options(session, number))


@pytest.mark.usefixtures("any_slice")
def test_large_products_with_every_transpose_type_and_order(session, run):
    last = str(session.size - 1)
    for number, (trans_a, trans_b, orders, dtype) in enumerate(
        itertools.product("NT", "NT", ("FFF", "CFC", "FCF"), ("f64", "f32", "f16", "bf16"))
    ):
        case = Case(
            37,
            51,
            129,
            place=[("h", "h", "h"), ("0", last, "h"), ("h", "0", last), ("0", "0", "0")][number % 4],
            dtype=dtype,
            trans_a=trans_a,
            trans_b=trans_b,
            orders=orders,
            pad=(3, 5, 1),
            beta=(0.0, 1.1154)[number % 3 > 0],
            seed=number,
        )
        run(case, k_options(session, number))


def test_a_plan_runs_with_other_scalars_and_arrays(session, comm):
    one, other = (Case(50, 40, 60, place=("h", "0", "h"), seed=seed) for seed in (0, 9))
    operands, others = (make_operands(session, case) for case in (one, other))
    with session.plan(*operands.abc, reads_c=True, options=UNCUT) as plan:
        for alpha, beta, case, given in (
            (1.0, 0.5, one, operands),
            (-0.25, 2.0, one, operands),
            (3.0, 0.0, other, others),
            (0.0, 1.5, other, others),
        ):
            renew(session, given)
            session.poison_softbuf()
            plan.execute(alpha, beta, a=given.a, b=given.b, c=given.c)
            check_product(comm, dataclasses.replace(case, alpha=alpha, beta=beta), given)


@pytest.mark.parametrize("planned", [False, True])
def test_a_repeated_call_asks_the_device_for_nothing_but_to_run(session, comm, monkeypatch, planned):
    case = Case(64, 60, 56, place=("0", "h", str(session.size - 1)))
    operands = make_operands(session, case)
    with session.plan(*operands.abc, options=UNCUT) as plan:

        def call():
            if planned:
                plan.execute(case.alpha, case.beta)
            else:
                session.gemm(*operands.abc, **case.how, options=UNCUT)

        call()
        renew(session, operands)
        session.poison_softbuf()
        asked, before = [], session.counters.snapshot()
        with monkeypatch.context() as patch:
            for name in Backend.__abstractmethods__ - {"mark_caller", "await_caller"}:
                patch.setattr(session._backend, name, lambda *_, name=name: asked.append(name))
            call()
    after = session.counters
    wrong = mismatch(case, operands)
    collective_assert(comm, not asked and not wrong, f"asked for {asked}; {wrong}")
    costs = ("planner_calls", "schedule_bytes_broadcast", "allocations")
    new = {name: getattr(after, name) - getattr(before, name) for name in costs}
    collective_assert(comm, not any(new.values()) and after.calls == before.calls + 1, f"{new}")
    release(session, operands)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("differs", [False, True], ids=["all make the same", "one rounds otherwise"])
def test_many_ranks_make_a_large_schedule_themselves(comm, open_session, monkeypatch, differs):
    monkeypatch.setattr(plans, "MOST_TOLD_ALL", 1)
    monkeypatch.setattr(plans, "LARGE_BYTES", 0)
    if differs and comm.rank == 1:
        monkeypatch.setattr(plan_maker, "remade", lambda setting, one: remade(setting, one._replace(options=UNCUT)))
    with open_session(comm, verify=True) as session:
        case = Case(160, 150, 140, place=("h", "0", "0"))
        operands = make_operands(session, case)
        with session.plan(*operands.abc) as plan:
            session.poison_softbuf()
            plan.execute(case.alpha, case.beta)
            check_product(comm, case, operands)
            told, whole = session.counters.schedule_bytes_broadcast, len(plan.schedule.encode())
            digests = comm.allgather(plan.schedule.digest())
        collective_assert(comm, (told > whole) == differs, f"{told} bytes were told, the schedule has {whole}")
        collective_assert(comm, set(digests) == {plan.summary.digest}, f"{digests}, {plan.summary.digest} planned")


def test_counted_tasks_and_bytes_equal_the_schedule(session, comm):
    case = Case(90, 80, 70, place=("h", "0", "0"))
    operands = make_operands(session, case)
    with session.plan(*operands.abc, options=UNCUT) as plan:
        done, schedule = session.gather_values(plan.execute(1.0, 1.0)), plan.schedule
        counted = sum(one.tasks for one in done), sum(one.copy_bytes for one in done)
        scheduled = int((schedule.tasks["kind"] != Kind.JOIN).sum()), moved_bytes(schedule)
        collective_assert(comm, counted == scheduled, f"{counted} tasks and bytes, scheduled {scheduled}")


def test_more_than_5000_operations_on_one_lane(session, comm):
    edge = 28 if session.size > 2 else 24
    case = Case(8 * edge, 8 * edge, 8 * edge, place=("0", "h", "0"))
    options = um.ScheduleOptions(scheduler="uncut", tile=8, compute_lanes=1, grid=(1, min(session.size, 4)), chunks=1)
    operands = make_operands(session, case)
    with session.plan(*operands.abc, options=options) as plan:
        session.poison_softbuf()
        plan.execute(case.alpha, case.beta)
        lanes = np.bincount(plan.schedule.tasks["lane"])
    wrong = mismatch(case, operands)
    collective_assert(comm, lanes.max() > 5000 and not wrong, f"{lanes.max()} tasks on a lane; {wrong}")


@pytest.mark.parametrize("dtype", TYPES)
def test_every_type_is_multiplied_in_every_layout(comm, session, dtype):
    types = Case(1, 1, 1, dtype=dtype).dtypes
    alpha, beta = (-5, 2) if types[0].is_integer else (1.2345, 1.1154)
    scales = (0.37, 2.9) if types[0].needs_scales else ()
    dealt = {
        "rows": um.Layout.rows(),
        "cols": um.Layout.cols(),
        "cyclic": um.Layout.block_cyclic(3, 4, (session.size, 1)),
    }
    for number, of_inputs in enumerate(itertools.product(dealt, repeat=2)):
        layouts = *of_inputs, [*dealt][(number + number // 3) % 3]  # each with each, for C too
        case = Case(21, 26, 35, dtype=dtype, alpha=alpha, beta=beta, seed=number, scales=scales)
        shapes = (case.m, case.k), (case.k, case.n), (case.m, case.n)
        data = [
            random_matrix(*shape, kind, (number, at))
            for at, (shape, kind) in enumerate(zip(shapes, types, strict=True))
        ]
        made = [made_of(session, one, dealt[layout]) for one, layout in zip(data, layouts, strict=True)]
        session.gemm(*made, **case.how)
        result, bound = expected(case, Operands(*made, *data, [], session.backend_name == "cuda"))
        place = np.ix_(*made[2].local_indices)
        error = np.abs(on_host(made[2].local).astype(result.dtype) - result[place])
        collective_assert(comm, (error <= bound[place]).all(), f"{case} {layouts}: off by {error.max(initial=0)}")
        for one in made:
            session.release(one)


def test_a_new_c_has_the_usual_type_and_plans_and_batches_take_scales(comm, session):
    ones = {kind: shared_of(session, np.ones((3, 4, 4)), kind) for kind in ("i8", "e4m3", "e5m2", "bf16")}
    for kind, how, dtype, value in (
        ("i8", {"alpha": 3}, "i32", 12),
        ("e4m3", {"scale_a": 0.5, "scale_b": 4}, "f32", 8),
        ("e5m2", {"scale_a": 1.0, "scale_b": 1.0, "alpha": 2.0}, "f32", 8),
        ("bf16", {}, "bf16", 4),
    ):
        one, (first, *_) = ones[kind], ones[kind]
        for made in (session.gemm(one, one, **how), session.gemm(first, first, **how, out_layout="auto")):
            collective_assert(comm, made.dtype.name == dtype, f"C of {kind} is {made.dtype}")
            collective_assert(comm, (on_host(made.local) == value).all(), f"C of {kind} is {made.local}")
        out = session.empty_host((3, 4, 4), dtype)
        session.gemm_batch([*one], first, [*out], **how)
        collective_assert(comm, (out.array == value).all(), f"C of {kind} is {out.array}")
        with session.plan(first, first, out[0]) as plan:
            plan.execute(**{"alpha": 1, **how}, beta=1)
        collective_assert(comm, (out.array[0] == 2 * value).all(), f"C of {kind} is {out.array[0]}")


def test_float8_without_scales_and_scalars_that_are_none_are_one_error_on_every_rank(comm, session):
    kinds = ("e4m3", "f32", "i8", "i32")
    float8, single, small, wide = (shared_of(session, np.ones((4, 4)), kind) for kind in kinds)
    missing = ["A is e4m3", "scale_a = None and scale_b = None", "1.0"]
    calls = {
        lambda: session.gemm(float8, float8): missing,
        lambda: session.gemm(float8, float8, single): missing,
        lambda: float8 @ float8: missing,
        lambda: session.gemm(float8, float8, single, scale_a=1.0): ["scale_a = 1.0 and scale_b = None"],
        lambda: session.gemm(float8, float8, single, scale_a="1", scale_b=1.0): ["scale_a"],
        lambda: session.gemm(single, single, scale_a=1.0, scale_b=1.0): ["for e4m3 and e5m2", "A is f32"],
        lambda: session.gemm(float8, small, single, scale_a=1.0, scale_b=1.0): ["A is e4m3, B is i8"],
        lambda: session.gemm(small, small, single): ["let C be i32"],
        lambda: session.gemm(wide, wide): ["A is i32", "convert A and B"],
        lambda: session.gemm(small, small, wide, alpha=0.5): ["alpha = 0.5 is no int32"],
        lambda: session.gemm(small, small, wide, beta=2.0**31): ["beta = 2147483648.0 is no int32"],
    }
    for call, told in calls.items():
        expect(comm, um.ParamError, told, call)
    with session.plan(float8, float8, single) as plan:
        expect(comm, um.ParamError, missing, plan.execute)


def test_uint8_arrays_are_float8_where_that_is_said(comm, session):
    data = np.arange(16, dtype=np.float32).reshape(4, 4)
    for kind in ("e4m3", "e5m2"):
        held = data.astype(DType[kind].numpy)
        root = session.rank == 0
        a = session.register(held.view(np.uint8) if root else None, root=0, dtype=kind)
        b = session.distribute(held.view(np.uint8) if root else None, um.Layout.whole(0), shape=(4, 4), dtype=kind)
        collective_assert(comm, not root or b.local.dtype == np.uint8, f"{kind}: {b.local}")
        c = session.gemm(a, b, scale_a=1.0, scale_b=1.0)
        wide = held.astype(np.float32)
        collective_assert(comm, shows(c, wide @ wide), f"{kind}: {c.array if root else ''}")
    expect(comm, um.ParamError, ["uint8"], lambda: session.register(held.view(np.uint8), root=0))
