"""Products through a session on the host backend: placements, layouts, types, edges, scalars."""

from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from tests.helpers.products import Case, check_product, make_operands, mismatch, release, renew
from uncut_mpi.device.interface import Backend
from uncut_mpi.model.costs import GemmShape
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning import kblocks_request, tiles
from uncut_mpi.planning.options import BLOCK_ORDERS, DELIVERIES
from uncut_mpi.planning.schedule import Role

pytestmark = pytest.mark.mpi(min_size=1)


def run(session: um.Session, comm, case: Case, options: um.ScheduleOptions | None = None) -> None:
    operands = make_operands(session, case)
    session.poison_softbuf()
    session.gemm(
        operands.a,
        operands.b,
        operands.c,
        alpha=case.alpha,
        beta=case.beta,
        trans_a=case.trans_a,
        trans_b=case.trans_b,
        options=options,
    )
    check_product(comm, case, operands)
    release(session, operands)


def places(size: int) -> list[tuple[str, str, str]]:
    ends = ["h", "0", str(size - 1)]
    return sorted(set(itertools.product(dict.fromkeys(ends), repeat=3)))


def test_every_placement_on_host_first_and_last_rank(session, comm):
    for number, place in enumerate(places(session.size)):
        run(session, comm, Case(65, 43, 57, place=place, seed=number), um.ScheduleOptions(scheduler="uncut", tile=16))


def test_every_type_accumulates_and_rounds_as_it_should(session, comm):
    last = str(session.size - 1)
    for dtype, place in itertools.product(
        ("f64", "f32", "f16", "bf16", "tf32"), (("h", "h", "h"), ("0", "0", "0"), ("0", last, "h"))
    ):
        for beta in (0.0, 1.1154):
            run(
                session,
                comm,
                Case(48, 40, 96, place=place, dtype=dtype, beta=beta),
                um.ScheduleOptions(scheduler="uncut", tile=16),
            )


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
        (0, 0, 0),
    ],
)
def test_edges_of_size(session, comm, shape):
    last = str(session.size - 1)
    for place, beta in itertools.product((("h", "h", "h"), ("0", last, "0"), ("h", "0", last)), (0.0, 0.5)):
        run(session, comm, Case(*shape, place=place, beta=beta))


@pytest.mark.parametrize(("alpha", "beta"), [(0.0, 0.0), (0.0, 2.5), (1.0, 1.0), (-2.0, 0.0), (1.0, -1.0)])
def test_scalars_and_what_they_leave_unread(session, comm, alpha, beta):
    last = str(session.size - 1)
    for place, dtype in itertools.product((("h", "h", "h"), ("0", "0", "0"), (last, "h", "0")), ("f64", "bf16")):
        run(
            session,
            comm,
            Case(33, 35, 20, place=place, dtype=dtype, alpha=alpha, beta=beta),
            um.ScheduleOptions(scheduler="uncut", tile=16),
        )


def test_private_host_memory_of_a_rank(session, comm):
    last = f"h{session.size - 1}"
    for place in ((last, "h", "h"), ("h0", "0", last), (last, last, last), ("0", "h0", "0")):
        run(session, comm, Case(40, 44, 36, place=place), um.ScheduleOptions(scheduler="uncut", tile=16))


@pytest.mark.parametrize(
    "options",
    [
        {"caching": False},
        {"overlap": False},
        {"caching": False, "overlap": False, "routing": "origin", "batch": False, "wr_lazy": False, "order": "fixed"},
        {"routing": "origin"},
        {"routing": "bw"},
        {"batch": False},
        {"wr_lazy": False},
        {"order": "fixed"},
        {"compute_lanes": 1, "chunks": 3},
        {"tile": 100},
    ],
    ids=lambda options: " ".join(f"{name}={value}" for name, value in options.items()),
)
def test_every_option_gives_the_right_product(session, comm, options):
    last = str(session.size - 1)
    for place in (("h", "h", "h"), ("0", "0", "0"), ("h", last, "0")):
        run(
            session,
            comm,
            Case(70, 66, 50, place=place),
            um.ScheduleOptions(scheduler="uncut", **{"tile": 16, **options}),
        )


def test_ranks_that_do_not_compute_hold_matrices(session, comm):
    last, size = str(session.size - 1), session.size
    for devices in ((0,), tuple(range(size))[::-1], tuple(range(size))[: -(-size // 2)], (size - 1,)):
        for place in (("h", "h", "h"), ("0", "0", "0"), (last, "0", last), ("h0", last, "h0")):
            run(
                session,
                comm,
                Case(70, 66, 50, place=place),
                um.ScheduleOptions(scheduler="uncut", tile=16, devices=devices),
            )


def test_blocks_of_unequal_shares(session, comm):
    size = session.size
    for rows, cols in ((1, size), (size, 1)):
        shares = tuple(1.0 + rank % 3 for rank in range(size))
        options = um.ScheduleOptions(
            scheduler="uncut",
            tile=16,
            grid=(rows, cols),
            row_shares=shares[:rows],
            col_shares=shares[::-1][:cols],
            order="eta",
        )
        for dtype in ("f64", "bf16"):
            run(session, comm, Case(70, 166, 50, place=("h", "0", "h"), dtype=dtype), options)


def k_options(session: um.Session, number: int, **changes) -> um.ScheduleOptions:
    """Return options of kblocks, its orders, splits and ways with C drawn by `number`."""
    draw = random.Random(number)
    combine = draw.choice(("owner", "worker"))
    block = draw.choice((24, 200))
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
    return um.ScheduleOptions(scheduler="kblocks", blocking=dataclasses.replace(blocking, **changes))


@pytest.fixture
def any_slice(monkeypatch):
    """Let fetches of the small matrices used here be shared by ranks too."""
    monkeypatch.setattr(kblocks_request, "MIN_SLICE_BYTES", 1)


@pytest.mark.usefixtures("any_slice")
def test_large_products_with_every_placement(session, comm):
    for number, place in enumerate(places(session.size)):
        run(session, comm, Case(65, 43, 57, place=place, seed=number), k_options(session, number))


@pytest.mark.usefixtures("any_slice")
def test_large_products_with_every_transpose_type_and_order(session, comm):
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
        run(session, comm, case, k_options(session, number))


@pytest.mark.usefixtures("any_slice")
def test_large_products_of_columns_of_ranks(session, comm):
    others, last = session.size - 1, str(session.size - 1)
    one = (0.7,) if others else (1.0,)
    rest = tuple(0.2 + 0.1 * (number % 3) for number in range(others))
    cuts = [(one, rest), (rest, one), (one, rest[:1], rest[1:])]
    for number, (dtype, trans_a) in enumerate(itertools.product(("f64", "f16", "f32"), "NT")):
        areas = tuple(column for column in cuts[number % 3] if column)
        place = [("0", "0", "0"), ("0", last, "h"), ("h", "h", last)][number % 3]
        options = dataclasses.replace(k_options(session, number, splits=1), areas=areas)
        run(session, comm, Case(65, 83, 57, place=place, dtype=dtype, trans_a=trans_a, seed=number), options)


@pytest.mark.usefixtures("any_slice")
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
def test_large_products_from_the_corner(session, comm, dtype):
    last = str(session.size - 1)
    for number, (block, lanes, combine) in enumerate(itertools.product((200, 24), (2, 1), ("worker", "owner"))):
        options = k_options(
            session,
            number,
            splits=1,
            first=min(block, 16),
            block=block,
            rows=1 + number % 3,
            order="corner",
            lanes=lanes,
            delivery=DELIVERIES[number // 4],
            combine=combine,
            away=2 * (combine == "owner"),
        )
        place = [("0", last, "0"), ("h", "0", last), (last, "h", "h"), ("0", "0", last)][number // 2 % 4]
        case = Case(
            65, 83, 57, place=place, dtype=dtype, trans_a="NT"[number % 2], beta=(1.1154, 0.0)[number // 4], seed=number
        )
        run(session, comm, case, options)
        whole = dataclasses.replace(options, blocking=dataclasses.replace(options.blocking, first=200, block=200))
        run(session, comm, case, whole)


@pytest.mark.parametrize("distribution", ["2d-cyclic", "1d-cyclic", "round-robin", "sequential"])
def test_tiles_that_are_dealt_out(session, comm, distribution):
    options, last = um.ScheduleOptions(scheduler=f"cyclic:{distribution}", tile=13), str(session.size - 1)
    for number, place in enumerate((("h", "0", last), (f"h{last}", "h", "0"), ("0", "0", "0"))):
        case = Case(65, 43, 57, place=place, dtype=("f64", "f16")[number % 2], trans_a="NT"[number // 2 % 2])
        run(session, comm, case, options)


def test_bands_between_devices(session, comm):
    last, inner = str(session.size - 1), str(session.size // 2)
    orders = itertools.product("NT", "NT", ("f64", "bf16"), (0.0, 1.1154))
    for number, (trans_a, trans_b, dtype, beta) in enumerate(orders):
        place = [("0", "0", "0"), ("0", last, inner), (last, "0", last)][number % 3]
        case = Case(65, 43, 57, place=place, dtype=dtype, trans_a=trans_a, trans_b=trans_b, beta=beta, seed=number)
        run(session, comm, case, um.ScheduleOptions(scheduler="bands", tile=(0, 11, 20)[number % 3]))


@pytest.fixture
def slow_links(comm, monkeypatch):
    """A session that believes that direct copies are slow but for those over the rank before the last."""
    monkeypatch.setattr(tiles, "MIN_CHUNK_COLUMNS", 4)
    monkeypatch.setattr(tiles, "MIN_CHUNK_BYTES", 256)
    bandwidth = np.full((comm.size + 1, comm.size + 1), 1.0)
    relay = max(0, comm.size - 2)
    bandwidth[relay, :] = bandwidth[:, relay] = 100.0
    machine = um.Machine.uniform(comm.size)
    machine = dataclasses.replace(machine, bandwidth_gb_per_s=bandwidth, latency_s=machine.latency_s * 0)
    with um.Session(comm, backend="host", machine=machine, timeout_s=30, verify=True) as session:
        yield session


@pytest.mark.parametrize("max_hops", [1, 2])
@pytest.mark.parametrize("batch", [True, False])
def test_tiles_and_results_go_round_slow_links(slow_links, comm, max_hops, batch):
    last = slow_links.size - 1
    computing = tuple(rank for rank in range(slow_links.size) if rank != max(0, last - 1)) or (0,)
    for number, devices in enumerate((None, computing)):
        routes = itertools.product(("bw", "eta"), ((str(last), "0", "0"), ("h", str(last), "h")))
        for dtype, (routing, place) in zip(("f64", "f16", "f16", "f64"), routes, strict=True):
            options = um.ScheduleOptions(
                scheduler="uncut", tile=16, devices=devices, max_hops=max_hops, batch=batch, routing=routing
            )
            case = Case(70, 66, 50, place=place, dtype=dtype, seed=number)
            operands = make_operands(slow_links, case)
            with slow_links.plan(operands.a, operands.b, operands.c, reads_c=True, options=options) as plan:
                relays = (plan.schedule.buffers["role"] == Role.CACHE).any()
                slow_links.poison_softbuf()
                plan.execute(case.alpha, case.beta)
            wrong = mismatch(case, operands)
            if not relays and slow_links.size > 2:
                wrong += " nothing was relayed"
            collective_assert(comm, not wrong, wrong)
            release(slow_links, operands)


@pytest.fixture
def slow_unaligned(comm):
    """A session that believes that products whose columns are not aligned take very long."""
    machine = um.Machine.uniform(comm.size)
    machine = dataclasses.replace(machine, gemm_shape={one.name: GemmShape(misaligned=1e6) for one in DType})
    with um.Session(comm, backend="host", machine=machine, timeout_s=30, verify=True) as session:
        yield session


@pytest.mark.usefixtures("any_slice")
def test_columns_that_are_not_aligned_are_copied_by_who_holds_them(slow_unaligned, comm):
    last = str(slow_unaligned.size - 1)
    types = ("f64", "f16", "bf16", "tf32")
    for number, (trans_a, trans_b, dtype) in enumerate(itertools.product("NT", "NT", types)):
        place = [("0", "0", "0"), ("0", last, "0"), (last, "0", "h")][number % 3]
        m = 67 if trans_a == "N" else 64  # nobody adds rows to a transposed A
        # Nor to a transposed B: products with its last rows stay as they are, which in the order "k" most are.
        cut = {"order": "k"} if trans_b == "N" else {"order": "columns", "columns": 3}
        case = Case(m, 53, 71, place=place, dtype=dtype, trans_a=trans_a, trans_b=trans_b, pad=(0, 1, 3), seed=number)
        operands = make_operands(slow_unaligned, case)
        with slow_unaligned.plan(
            operands.a,
            operands.b,
            operands.c,
            trans_a=trans_a,
            trans_b=trans_b,
            reads_c=True,
            options=k_options(slow_unaligned, number, splits=1, **cut),
        ) as plan:
            copies = plan.schedule.copies()
            own = copies[(copies[:, 1] == copies[:, 2]) & (copies[:, 1] == int(place[0]))]
            slow_unaligned.poison_softbuf()
            plan.execute(case.alpha, case.beta)
        wrong = mismatch(case, operands) or ("" if len(own) else "A was not copied where it lies")
        collective_assert(comm, not wrong, wrong)
        release(slow_unaligned, operands)


def test_more_ranks_than_tiles_leave_ranks_without_work(session, comm):
    run(session, comm, Case(8, 8, 8), um.ScheduleOptions(scheduler="uncut", tile=128))
    run(session, comm, Case(8, 8, 8, place=("0", "0", "0")), um.ScheduleOptions(scheduler="uncut", grid=(1, 1)))


def test_a_plan_runs_with_other_scalars_and_arrays(session, comm):
    case = Case(50, 40, 60, place=("h", "0", "h"))
    operands = make_operands(session, case)
    others = make_operands(session, Case(50, 40, 60, place=("h", "0", "h"), seed=9))
    with session.plan(
        operands.a, operands.b, operands.c, reads_c=True, options=um.ScheduleOptions(scheduler="uncut", tile=16)
    ) as plan:
        for alpha, beta, given in (
            (1.0, 0.5, operands),
            (-0.25, 2.0, operands),
            (3.0, 0.0, others),
            (0.0, 1.5, others),
        ):
            renew(session, given)
            session.poison_softbuf()
            plan.execute(alpha, beta, a=given.a, b=given.b, c=given.c)
            seed = 9 if given is others else 0
            check_product(comm, Case(50, 40, 60, place=case.place, alpha=alpha, beta=beta, seed=seed), given)


@pytest.mark.parametrize("planned", [False, True])
def test_a_repeated_call_asks_the_device_for_nothing_but_to_run(session, comm, monkeypatch, planned):
    case = Case(64, 60, 56, place=("0", "h", str(session.size - 1)))
    operands = make_operands(session, case)
    options = um.ScheduleOptions(scheduler="uncut", tile=16)
    matrices = (operands.a, operands.b, operands.c)
    with session.plan(*matrices, options=options) as plan:

        def call():
            if planned:
                plan.execute(case.alpha, case.beta)
            else:
                session.gemm(*matrices, alpha=case.alpha, beta=case.beta, options=options)

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


def test_counted_tasks_and_bytes_equal_the_schedule(session, comm):
    case = Case(90, 80, 70, place=("h", "0", "0"))
    operands = make_operands(session, case)
    with session.plan(
        operands.a, operands.b, operands.c, options=um.ScheduleOptions(scheduler="uncut", tile=16)
    ) as plan:
        result = plan.execute(1.0, 1.0)
        totals = comm.allgather((result.tasks, result.copy_bytes))
        schedule = plan.schedule
        bodies = int((schedule.tasks["kind"] != 3).sum())
        collective_assert(
            comm,
            sum(t for t, _ in totals) == bodies and sum(b for _, b in totals) == int(schedule.copies()[:, 3].sum()),
            f"counted {totals}, scheduled {bodies} tasks and {int(schedule.copies()[:, 3].sum())} bytes",
        )


def test_more_than_5000_operations_on_one_lane(session, comm):
    edge = 28 if session.size > 2 else 24
    case = Case(8 * edge, 8 * edge, 8 * edge, place=("0", "h", "0"))
    options = um.ScheduleOptions(scheduler="uncut", tile=8, compute_lanes=1, grid=(1, min(session.size, 4)), chunks=1)
    operands = make_operands(session, case)
    with session.plan(operands.a, operands.b, operands.c, options=options) as plan:
        session.poison_softbuf()
        plan.execute(case.alpha, case.beta)
        lanes = np.bincount(plan.schedule.tasks["lane"])
    wrong = mismatch(case, operands)
    collective_assert(comm, lanes.max() > 5000 and not wrong, f"{lanes.max()} tasks on a lane; {wrong}")
