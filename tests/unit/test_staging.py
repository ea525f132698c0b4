"""Matrices that their owner alone can use: what others use of them goes through memory of ours, by tasks."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.helpers import interpret
from tests.helpers.faults import (
    drop_await,
    drop_await_of,
    set_rows,
    shift_region,
    skip_a_task,
    spoiled,
    swap_in_lane,
    take_an_operand_the_other_way_round,
)
from tests.helpers.layouts import even, random_layout
from tests.helpers.planned import plan_several, setting_of
from tests.helpers.schedules import SummaOptions, random_case, summa
from uncut_mpi.api.keys import private_of
from uncut_mpi.api.plans import PlanSummary
from uncut_mpi.errors import CapacityError, ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location, Space
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.parts import BoundLayout, Order, Part
from uncut_mpi.model.placement import MATRICES, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import planner
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Factor, Kind, LaneKind, Matrix, Op, Role, Schedule, buffer_bytes
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.planning.staging import stage, used_by_others
from uncut_mpi.planning.verify import verify

SUBSETS = [part for size in (1, 2, 3) for part in itertools.combinations(MATRICES, size)]


def staged(schedule: Schedule, matrices: tuple[Matrix, ...] = MATRICES) -> Schedule:
    """Return a schedule in which none but the owners, and no device, touch those of some matrices that one rank has."""
    touched = used_by_others(schedule, of_one_rank(schedule, matrices))
    return stage(schedule, touched, setting_of(schedule)) if touched else schedule


def of_one_rank(schedule: Schedule, matrices: tuple[Matrix, ...]) -> list[Matrix]:
    """Return those of some matrices that are not in host memory of all ranks."""
    return [matrix for matrix in matrices if schedule.placement.of(matrix) != Location.host()]


def touched_from_elsewhere(schedule: Schedule, matrices: list[Matrix]) -> set[int]:
    """Return the tasks that touch one of some matrices and are not its owner's, or not its worker's if on the host."""
    found, buffers, owners, in_host = set(), schedule.buffers, schedule.owners(), schedule.in_host()
    for at, task in enumerate(schedule.tasks):
        for buffer in schedule.regions["buffer"][schedule.operands_of(at)["region"]].tolist():
            if buffers["matrix"][buffer] not in matrices or buffers["role"][buffer] != Role.USER or owners[buffer] < 0:
                continue
            by_worker = schedule.lanes["kind"][task["lane"]] == LaneKind.HOST
            if task["rank"] != owners[buffer] or by_worker != in_host[buffer]:
                found.add(at)
    return found


def test_whichever_matrices_are_staged_none_but_the_owner_touches_them_and_the_product_is_right() -> None:
    changed = 0
    for seed in range(30):
        schedule = random_case(random.Random(seed))
        data = interpret.random_data(schedule.problem, seed)
        for matrices in SUBSETS:
            found = staged(schedule, matrices)
            if found is schedule:
                continue
            changed += 1
            verify(found, lower(found))
            assert not touched_from_elsewhere(found, of_one_rank(schedule, matrices)), (seed, matrices)
            assert not used_by_others(found, of_one_rank(schedule, matrices)), (seed, matrices)
            wrong = interpret.mismatch(found, data, interpret.random_order(found, seed))
            assert not wrong, (seed, matrices, wrong)
    assert changed >= 20


@pytest.mark.parametrize(
    "fault", [drop_await, swap_in_lane, shift_region, skip_a_task], ids=lambda fault: fault.__name__
)
def test_faults_planted_in_staged_schedules_are_found_and_nothing_else_is_refused(fault) -> None:
    assert spoiled(fault, lambda rng: staged(random_case(rng, 6, 20)), 60) >= 15


def test_a_copy_back_that_does_not_await_a_writer_is_refused() -> None:
    def of_c(rng: random.Random) -> Schedule:
        while (found := staged(schedule := random_case(rng, 6, 20), (Matrix.C,))) is schedule:
            pass
        return found

    def wait_less(schedule: Schedule, rng: random.Random) -> Schedule | None:
        return drop_await_of(schedule, rng, copies_back(schedule))

    assert spoiled(wait_less, of_c, 30) >= 25


def with_turned_parts(rng: random.Random) -> Schedule:
    """Return a random schedule for matrices of which some parts are stored the other way round."""
    while True:
        ranks = rng.randint(1, 4)
        problem = GemmProblem(*(rng.randint(2, 14) for _ in range(3)), DType.f64, rng.choice("NT"), rng.choice("NT"))
        shapes = problem.a_shape, problem.b_shape, (problem.m, problem.n)
        placement = Placement(*(random_layout(rng, shape, ranks, "FC") for shape in shapes))
        options = ScheduleOptions(scheduler="kblocks", blocking=Blocking(first=4, block=8, columns=rng.randint(1, 2)))
        found = plan(problem, placement, ranks, Machine.uniform(ranks), options).schedule
        if (found.operands["op"][copy_reads(found)] == Op.T).any():
            return found


def copy_reads(schedule: Schedule) -> np.ndarray:
    """Return which operands copies read."""
    reads: np.ndarray = schedule.tasks["first_operand"][schedule.tasks["kind"] == Kind.COPY] + 1
    return reads


@pytest.mark.parametrize(
    "fault",
    [drop_await, swap_in_lane, shift_region, skip_a_task, take_an_operand_the_other_way_round],
    ids=lambda fault: fault.__name__,
)
def test_faults_planted_where_parts_are_transposed_are_found_and_nothing_else_is_refused(fault) -> None:
    assert spoiled(fault, with_turned_parts, 40) >= 10


def test_parts_stored_the_other_way_round_are_used_as_others_and_transposed_by_their_owners() -> None:
    problem, places = GemmProblem(60, 50, 40, DType.f32, reads_c=False), ("h0", "0", "h", "1")

    def rows(shape: tuple[int, int], orders: Sequence[Order]) -> BoundLayout:
        extents = itertools.pairwise(even(shape[0], 4))
        parts = [
            Part(extent, (0, shape[1]), Location.parse(place), order)
            for extent, place, order in zip(extents, places, orders, strict=True)
        ]
        return BoundLayout(shape, tuple(parts))

    about = (2, Machine.uniform(2), ScheduleOptions(scheduler="kblocks", grid=(1, 2)))
    b = rows(problem.b_shape, "FFFF")
    turned = Placement(rows(problem.a_shape, "CCCF"), b, rows((60, 50), "FFFC"))
    stood_in = ["h0", "0", "h0", "1"]  # what all ranks have is copied by one of them
    a = BoundLayout(problem.a_shape, tuple(
        Part(part.rows, part.cols, Location.parse(place)) for part, place in zip(turned.a.parts, stood_in, strict=True)
    ))  # fmt: skip
    straight = Placement(a, b, rows((60, 50), "FFFF"))
    assert turned.straight(range(2)) == straight
    assert straight.straight(range(2)) == straight
    (direct,), (planned,) = plan_several(problem, straight, *about), plan_several(problem, turned, *about)
    assert (direct.staged, planned.staged) == ((), (Matrix.A, Matrix.C))
    found, before = planned.schedule, direct.schedule
    verify(found, lower(found))
    ours = found.buffers[len(before.buffers) :]
    assert ours[["matrix", "location", "rows", "cols"]].tolist() == [
        (0, 3, 15, 40), (0, 0, 15, 40), (0, 3, 15, 40), (2, 1, 15, 50)
    ]  # fmt: skip
    first = found.tasks["first_operand"][found.tasks["kind"] == Kind.COPY]
    pairs = found.buffers[found.regions["buffer"][found.operands["region"]]]
    ways = {
        (*pairs[at][["location", "role"]].tolist(), *pairs[at + 1][["location", "role"]].tolist())
        for at in first.tolist()
        if found.operands["op"][at + 1] == Op.T
    }
    user, staging = int(Role.USER), int(Role.STAGING)
    assert ways == {
        (3, staging, 3, user), (0, staging, 0, user), (3, staging, 2, user), (1, user, 1, staging)
    }  # fmt: skip
    # Nothing else is moved, and everybody uses what is in the buffers of ours.
    added = 4 * (3 * 15 * 40 + 15 * 50)
    assert found.bytes_by_link() == {**before.bytes_by_link(), "local": before.bytes_by_link()["local"] + added}
    assert planned.predicted_s == simulate(found, Machine.uniform(2)).seconds


def test_a_search_takes_parts_stored_the_other_way_round() -> None:
    problem, machine = GemmProblem(90, 80, 70, DType.f64), Machine.uniform(2)
    a = BoundLayout((90, 70), (Part((0, 90), (0, 70), Location.device(1), "C"),))
    planned = plan(problem, Placement(a, Location.host(), Location.device(0)), 2, machine)
    verify(planned.schedule, lower(planned.schedule))
    assert planned.staged == (Matrix.A,)


def test_what_is_stored_the_other_way_round_and_not_used_is_not_staged() -> None:
    at = [Location.device(rank) for rank in range(2)]
    copies = BoundLayout((6, 6), (Part((0, 6), (0, 6), at[0]), Part((0, 6), (0, 6), at[1], "C")))
    problem = GemmProblem(6, 6, 0, DType.f64)
    (planned,) = plan_several(
        problem, Placement(copies, copies, Location.host()), 2, Machine.uniform(2), ScheduleOptions()
    )
    assert planned.staged == ()
    assert planned.schedule.pieces["turned"].tolist() == [0, 1, 0, 1, 0]
    verify(planned.schedule, lower(planned.schedule))


def private_host(rng: random.Random) -> Schedule:
    """Return a random schedule in which a worker of rank 0 copies A, B and C, which is read and written."""
    ranks, options = rng.randint(1, 4), SummaOptions(steps=rng.randint(1, 4), chunks=rng.randint(1, 3))
    problem = GemmProblem(*(rng.randint(4, 20) for _ in range(3)), DType.f64, trans_a=rng.choice("NT"))
    return staged(summa(problem, Placement.parse("h0,h0,h0"), ranks, grid=(1, ranks), options=options))


@pytest.mark.parametrize("into", [False, True], ids=["who reads", "who writes back"])
def test_what_does_not_await_a_worker_s_copy_or_is_not_awaited_by_it_is_refused(into: bool) -> None:
    def wait_less(schedule: Schedule, rng: random.Random) -> Schedule | None:
        by_worker = schedule.lanes["kind"][schedule.tasks["lane"]] == LaneKind.HOST
        if into:
            return drop_await_of(schedule, rng, np.flatnonzero(by_worker & (schedule.tasks["num_awaits"] > 0)))
        pairs = np.repeat(np.arange(len(schedule.tasks)), schedule.tasks["num_awaits"])
        waiting = np.unique(pairs[by_worker[schedule.awaits]])
        return drop_await_of(schedule, rng, waiting[~by_worker[waiting]])

    assert spoiled(wait_less, private_host, 40) >= 20


def test_parts_of_a_matrix_are_staged_where_each_lies() -> None:
    problem, places = GemmProblem(60, 50, 40, DType.f64), ("h0", "0", "h", "h1")

    def rows(columns: int) -> BoundLayout:
        cut = [Part((15 * at, 15 * at + 15), (0, columns), Location.parse(place)) for at, place in enumerate(places)]
        return BoundLayout((60, columns), tuple(cut))

    placement = Placement(rows(40), Location.device(1), rows(50))
    about = (problem, placement, 2, Machine.uniform(2), ScheduleOptions(scheduler="kblocks", grid=(1, 2)))
    (direct,), (planned,) = plan_several(*about), plan_several(*about, range(9))
    found = planned.schedule
    verify(found, lower(found))
    assert planned.staged == (Matrix.A, Matrix.C)
    assert not touched_from_elsewhere(found, [*MATRICES])
    ours = found.buffers[len(direct.schedule.buffers) :]
    # None in the host memory that all ranks read; what the device of rank 0 has of A it sends itself, as B's does.
    assert ours[["matrix", "location"]].tolist() == [(0, 3), (0, 4), (2, 3), (2, 0), (2, 4)]
    (some,) = plan_several(*about, (0, 1, 6))  # what others do not use is no reason
    verify(some.schedule, lower(some.schedule))
    assert some.staged == (Matrix.A, Matrix.C)
    ours = some.schedule.buffers[len(direct.schedule.buffers) :]
    assert ours[["matrix", "location"]].tolist() == [(0, 3), (2, 0)]


def test_staging_in_host_memory_is_counted_beside_that_of_devices_and_kept_apart() -> None:
    found = private_host(random.Random(3))
    (of_host,) = np.nonzero(found.in_host() & (found.buffers["role"] == Role.STAGING))
    sizes = buffer_bytes(found.buffers[of_host])
    needed = found.softbuf_bytes(Space.HOST).tolist()
    assert needed[0] >= sizes.sum()
    assert not any(needed[1:])
    assert found.softbuf_bytes().tolist() == found.arena_bytes()[: found.num_ranks].tolist()
    for other, words in ((of_host[0], "overlap in the SoftBuf of rank 0"), (of_host[1], "")):
        there = set_rows(found, "buffers", of_host[1], offset=found.buffers["offset"][other])
        with pytest.raises(ScheduleError, match=words) if words else contextlib.nullcontext():
            verify(there)


def test_a_host_that_has_no_room_for_a_matrix_once_more_is_an_error() -> None:
    problem, place, size = GemmProblem(256, 256, 256, DType.f64), Placement.parse("h1,h,0"), 256 * 256 * 8
    options = ScheduleOptions(scheduler="kblocks", grid=(2, 2))
    for host_bytes in (0, 3 * size, 3 * size - 1):
        machine = dataclasses.replace(Machine.uniform(4), host_bytes=np.array([host_bytes]))
        assert plan_several(problem, place, 4, machine, options)[0].staged == ()
        if host_bytes == 3 * size - 1:
            with pytest.raises(CapacityError, match=r"1.573 MB of host memory .* 1 B too few"):
                plan_several(problem, place, 4, machine, options, (Matrix.A,))
        else:
            (planned,) = plan_several(problem, place, 4, machine, options, (Matrix.A,))
            assert planned.schedule.softbuf_bytes(Space.HOST).tolist() == [0, size, 0, 0]


def copies_back(schedule: Schedule) -> np.ndarray:
    """Return the tasks that copy within a device into the caller's C."""
    copies = np.flatnonzero(schedule.tasks["kind"] == Kind.COPY)
    buffers = schedule.buffers[schedule.regions["buffer"][schedule.operands["region"]]]
    into, out_of = (buffers[schedule.tasks["first_operand"][copies] + at] for at in (0, 1))
    local = into["location"] == out_of["location"]
    return copies[local & (into["role"] == Role.USER) & (into["matrix"] == Matrix.C)]


def test_peers_results_alone_are_copied_and_each_goes_on_when_it_has_come() -> None:
    problem = GemmProblem(256, 256, 256, DType.f64, reads_c=False)
    options = ScheduleOptions(scheduler="kblocks", grid=(2, 2))
    about = (problem, Placement.parse("0,0,0"), 4, Machine.uniform(4), options)
    (direct,), (planned,) = plan_several(*about), plan_several(*about, MATRICES)
    assert (direct.staged, planned.staged) == ((), (Matrix.C,))
    before, after = direct.schedule.bytes_by_link(), planned.schedule.bytes_by_link()
    assert after == {**before, "local": before["local"] + 3 * 128 * 128 * 8}  # three of four ranks are peers
    back = copies_back(planned.schedule)
    assert len(back) > 3
    awaited = [planned.schedule.awaited(task) for task in back]
    assert all(len(tasks) == 1 for tasks in awaited)
    assert len({int(tasks[0]) for tasks in awaited}) == len(back)
    assert planned.predicted_s == simulate(planned.schedule, Machine.uniform(4)).seconds > direct.predicted_s


def test_who_reads_awaits_its_own_region() -> None:
    problem = GemmProblem(40, 40, 60, DType.f64, reads_c=False)
    pulled = summa(problem, Placement.parse("1,0,0"), 2, grid=(1, 1), options=SummaOptions(steps=3, pull=True))
    found = staged(pulled)
    assert len(found.tasks) == len(pulled.tasks) + 3  # a copy into the buffer for each step along k
    readers = [[task for task in range(len(found.tasks)) if step in found.awaited(task)] for step in range(3)]
    assert all(len(tasks) == 1 for tasks in readers)
    assert readers == sorted(readers)  # what is read first comes first


Rows = tuple[int, int]


def scaled_by_peers(pulled: list[Rows], pushed: list[Rows], again: Rows | None = None) -> Schedule:
    """
    Return a schedule of C := beta C, or of C := 0, in which peers take rows from the owner and bring rows back.

    The owner then takes some more, and puts them back itself.
    """
    problem, ranks = GemmProblem(8, 4, 0, DType.f64, reads_c=bool(pulled)), len(pushed) + 1
    build = ScheduleBuilder(ranks, problem, Placement.parse("0,0,0"))

    def buffer(rank: int, matrix: Matrix, role: Role, offset: int = -1) -> int:
        rows, cols = problem.shape_of(matrix)
        place = Location.device(rank)
        return build.buffer(at=place, rows=rows, cols=cols, dtype=DType.f64, role=role, matrix=matrix, offset=offset)

    def part(buffer: int, rows: Rows) -> RegionRef:
        return RegionRef(buffer, rows[0], 0, rows[1] - rows[0], 4)

    def copy(lane: int, out_of: int, into: int, rows: Rows, awaits: list[int]) -> int:
        return build.task(Kind.COPY, lane, part(into, rows), [(part(out_of, rows), Factor.ONE, Op.N)], awaits)

    *_, c = (buffer(0, matrix, Role.USER) for matrix in MATRICES)
    panels = [buffer(rank, Matrix.C, Role.PANEL, 0) for rank in range(ranks)]
    pulls = [copy(build.copy_lane(peer, 0, peer), c, panels[peer], rows, []) for peer, rows in enumerate(pulled, 1)]
    sums = []
    for peer, rows in enumerate(pulled or pushed, 1):
        there = part(panels[peer], rows)
        reads = [(there, Factor.BETA, Op.N)] if pulled else []
        sums.append(build.task(Kind.COMBINE, build.compute_lane(peer), there, reads, pulls[peer - 1 : peer]))
    pushes = [
        copy(build.copy_lane(peer, peer, 0), panels[peer], c, rows, [*pulls, sums[peer - 1]])
        for peer, rows in enumerate(pushed, 1)
    ]
    if again is not None:
        lane = build.copy_lane(0, 0, 0)
        copy(lane, panels[0], c, again, [copy(lane, c, panels[0], again, pushes)])
    return build.build(scheduler="test", grid=(1, 1), tile=0)


@pytest.mark.parametrize(
    ("pulled", "pushed", "again", "copies"),
    [
        ([(0, 4), (4, 8)], [(0, 4), (4, 8)], None, 4),
        ([(0, 6), (4, 8)], [(0, 5), (5, 8)], None, 2),
        ([(0, 4), (4, 8)], [(0, 4), (4, 8)], (2, 6), 2),
        ([], [(0, 4), (4, 8)], (2, 6), 1),
    ],
    ids=["apart", "peers overlap", "the owner writes too", "nothing is read at first"],
)
def test_regions_that_overlap_are_copied_as_one(pulled, pushed, again, copies) -> None:
    schedule = scaled_by_peers(pulled, pushed, again)
    verify(schedule, lower(schedule))
    found = staged(schedule)
    verify(found, lower(found))
    assert len(found.tasks) - len(schedule.tasks) == copies
    data = interpret.random_data(schedule.problem)
    for seed in range(5):
        assert not interpret.mismatch(found, data, interpret.random_order(found, seed))


def test_what_no_peer_touches_is_left_as_it_is() -> None:
    problem = GemmProblem(256, 256, 256, DType.f64)
    options = ScheduleOptions(scheduler="kblocks", grid=(2, 2))  # which brings sums to the owner of C
    about = (problem, Placement.parse("0,1,2"), 4, Machine.uniform(4), options)
    (direct,), (planned,) = plan_several(*about), plan_several(*about, MATRICES)
    assert planned.staged == ()
    assert planned.schedule.digest() == direct.schedule.digest()


def test_memory_that_has_no_room_for_a_matrix_once_more_is_an_error() -> None:
    problem = GemmProblem(256, 256, 256, DType.f64, reads_c=False)
    options = ScheduleOptions(scheduler="kblocks", grid=(2, 2))
    place, room = Placement.parse("0,0,0"), 256 * 256 * 8
    (direct,) = plan_several(problem, place, 4, Machine.uniform(4), options)
    most = 3 * room + int(direct.schedule.softbuf_bytes()[0])  # the matrices lie there too
    for memory_bytes, fits in ((most + room, True), (most + room - 1, False)):
        machine = Machine.uniform(4, memory_bytes=memory_bytes)
        assert plan_several(problem, place, 4, machine, options)[0].schedule.digest() == direct.schedule.digest()
        if fits:
            plan_several(problem, place, 4, machine, options, (Matrix.C,))
        else:
            with pytest.raises(CapacityError, match=r"rank 0 needs [\d.]+ MB .* 1 B too few"):
                plan_several(problem, place, 4, machine, options, (Matrix.C,))


def test_callers_names_of_what_is_staged_are_those_of_the_caller() -> None:
    # A C in row-major order is the transposed product of B and A.
    a, b, c = (
        types.SimpleNamespace(parts=[types.SimpleNamespace(obstacle=why, in_file=False)])
        for why in ("a pool", "", "a pool")
    )
    for swapped, private in ((False, (Matrix.A, Matrix.C)), (True, (Matrix.B, Matrix.C))):
        problem = GemmProblem(16, 16, 16, DType.f64, swapped=swapped)
        assert private_of(problem, (a, b, c)) == (private, ())
        options = ScheduleOptions(scheduler="kblocks")
        (planned,) = plan_several(problem, Placement.parse("0,0,0"), 2, Machine.uniform(2), options)
        summary, _ = PlanSummary.of(dataclasses.replace(planned, staged=private), Machine.uniform(2), options, 0.0, 1)
        assert summary.staged == "AC"


def test_a_schedule_that_does_not_fit_once_staged_is_left_out_of_a_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, place, machine = (
        GemmProblem(3000, 2000, 1000, DType.f64),
        Placement.parse("0,0,0"),
        load_machine("h200-4x"),
    )
    options = ScheduleOptions(tune=3)
    whole = plan_several(problem, place, 4, machine, options, (Matrix.C,))
    assert len(whole) == 3
    staged, refused = planner._staged, [0]

    def too_large(*arguments: Any) -> planner.Planned:
        refused[0] += 1
        if refused[0] <= most:
            raise CapacityError("too large")
        return staged(*arguments)

    monkeypatch.setattr(planner, "_staged", too_large)
    most = 1
    found = plan_several(problem, place, 4, machine, options, (Matrix.C,))
    assert [one.schedule.digest() for one in found] == [one.schedule.digest() for one in whole[1:]]
    # Where none of them fits, others leave room for the copy of C, 48 MB on rank 0.
    most, refused[0], tight = 0, 0, dataclasses.replace(options, device_memory=52 << 20)
    smaller = plan_several(problem, place, 4, machine, tight, (Matrix.C,))[0]
    assert refused[0] > 1
    assert smaller.schedule.softbuf_bytes().max() <= tight.device_memory == smaller.options.device_memory
    most = 10**9
    with pytest.raises(CapacityError, match="too large"):
        plan_several(problem, place, 4, machine, options, (Matrix.C,))
