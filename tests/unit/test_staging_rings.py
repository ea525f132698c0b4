"""Copies through rings of host memory: of any room, in files, planned for the disk."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Callable

import numpy as np
import pytest

from tests.helpers import interpret
from tests.helpers.faults import drop_await, shift_region, skip_a_task, spoiled, swap_in_lane
from tests.helpers.layouts import random_layout
from tests.helpers.planned import plan_several, setting_of
from tests.helpers.schedules import random_case
from uncut_mpi.errors import CapacityError
from uncut_mpi.model.costs import Disk
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.lines import lines_of
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.parts import BoundLayout, Part
from uncut_mpi.model.placement import MATRICES, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Factor, Kind, LaneKind, Matrix, Op, Role, Schedule
from uncut_mpi.planning.staging import stage, used_by_others
from uncut_mpi.planning.verify import verify

REFUSALS: list[str] = []


def through_rings(schedule: Schedule, part: float) -> Schedule | None:
    """Return a schedule whose private host memory is staged in a part of what it takes; None if that is too little."""
    users = np.flatnonzero(
        schedule.in_host()[: len(schedule.pieces)] & (schedule.owners()[: len(schedule.pieces)] >= 0)
    )
    touched = used_by_others(schedule, users.tolist())
    if not touched:
        return None
    whole = stage(schedule, touched, setting_of(schedule)).arena_bytes()[schedule.num_ranks :]
    room = max(1, int(whole.max() * part))
    try:
        found = stage(schedule, touched, setting_of(schedule, host_memory=room))
    except CapacityError as error:
        REFUSALS.append(str(error))
        return None
    assert found.arena_bytes()[schedule.num_ranks :].max() <= room
    return found


def private(rng: random.Random) -> Schedule:
    """Return a schedule of blocks of C one after the other, for matrices in private host memory."""
    ranks = rng.randint(1, 3)
    dtype, blocking = (
        DType.f64,
        Blocking(block=rng.randint(3, 9), columns=rng.randint(1, 3), slots=2, c_rows=9, c_cols=11),
    )
    problem = GemmProblem(
        *(rng.randint(8, 40) for _ in range(3)), dtype, *rng.choices("NT", k=2), reads_c=rng.random() < 0.6
    )
    shapes = problem.a_shape, problem.b_shape, (problem.m, problem.n)
    layouts = [random_layout(rng, shape, ranks, "F") for shape in shapes]
    hosts = [
        BoundLayout(
            one.shape,
            tuple(dataclasses.replace(part, location=Location.host(at % ranks)) for at, part in enumerate(one.parts)),
        )
        for one in layouts
    ]
    options = ScheduleOptions(scheduler="kblocks", blocking=blocking)
    return plan(problem, Placement(*hosts), ranks, Machine.uniform(ranks), options).schedule


@pytest.mark.parametrize(("make", "count", "least"), [(random_case, 30, 5), (private, 20, 20)])
def test_rings_of_any_room_are_proved_and_right(
    make: Callable[[random.Random], Schedule], count: int, least: int
) -> None:
    rings = 0
    for seed, part in itertools.product(range(count), (0.6, 0.25, 0.08)):
        schedule = make(random.Random(seed))
        found = through_rings(schedule, part)
        if found is None:
            continue
        in_rings = found.lanes["destination"][found.lanes["kind"] == LaneKind.HOST] > 0
        rings += bool(in_rings.any())
        verify(found, lower(found))
        wrong = interpret.mismatch(
            found, interpret.random_data(schedule.problem, seed), interpret.random_order(found, seed)
        )
        assert not wrong, (seed, part, wrong)
    assert all("the smallest of them take" in text and "host_memory" in text for text in REFUSALS)
    assert rings >= least


@pytest.mark.parametrize(
    "fault", [drop_await, swap_in_lane, shift_region, skip_a_task], ids=lambda fault: fault.__name__
)
def test_faults_planted_in_rings_are_found_and_nothing_else_is_refused(fault) -> None:
    def ring(rng: random.Random) -> Schedule:
        while (found := through_rings(random_case(rng, 6, 20), 0.4)) is None:
            pass
        return found

    assert spoiled(fault, ring, 30) >= 7


def rewritten(cuts: list[range], ring: int) -> Schedule:
    """Return a schedule that scales columns of C on a device and writes some of them again, through a short ring."""
    problem = GemmProblem(8, 8, 0, DType.f64)
    build = ScheduleBuilder(1, problem, Placement.parse("0,0,h0"))
    about = {"dtype": DType.f64, "rows": 8, "cols": 8}
    _, _, c = (
        build.buffer(at=place, role=Role.USER, matrix=matrix, **{**about, "rows": rows, "cols": cols})
        for matrix, place in zip(MATRICES, (Location.device(0), Location.device(0), Location.host(0)), strict=True)
        for rows, cols in [problem.shape_of(matrix)]
    )
    panel = build.buffer(at=Location.device(0), role=Role.PANEL, matrix=Matrix.C, offset=0, **about)
    come, go = build.copy_lane(0, build.host, 0), build.copy_lane(0, 0, build.host)
    last: list[int] = []
    for turn, some in enumerate(cuts):
        ours, theirs = (RegionRef(at, 0, some.start, 8, len(some)) for at in (panel, c))
        there = build.task(Kind.COPY, come, ours, [(theirs, Factor.ONE, Op.N)], last)
        if turn < 8:
            there = build.task(Kind.COMBINE, build.compute_lane(0), ours, [(ours, Factor.BETA, Op.N)], [there])
        last = [build.task(Kind.COPY, go, theirs, [(ours, Factor.ONE, Op.N)], [there])]
    schedule = build.build(scheduler="test", grid=(1, 1), tile=0)
    verify(schedule, lower(schedule))
    return stage(schedule, (2,), setting_of(schedule, host_memory=256 + 64 * ring))


@pytest.mark.parametrize("again", [[range(at, at + 1) for at in range(8)], [range(2), range(1, 2), range(1, 4)]])
def test_what_was_written_through_a_ring_is_read_again_and_written_again(again: list[range]) -> None:
    found = rewritten([*(range(at, at + 1) for at in range(8)), *again], 4)
    verify(found, lower(found))
    for seed in range(5):
        assert not interpret.mismatch(
            found, interpret.random_data(found.problem, seed), interpret.random_order(found, seed)
        )


def in_files(problem: GemmProblem, ranks: int) -> Placement:
    """Return where matrices are whose lines ranks have, an equal share each."""
    shapes = problem.a_shape, problem.b_shape, (problem.m, problem.n)
    return Placement(
        *(
            BoundLayout(
                shape,
                tuple(
                    Part((0, shape[0]), (lines.start, lines.stop), Location.host(rank))
                    for rank in range(ranks)
                    for lines in [lines_of(shape[1], rank, ranks)]
                ),
            )
            for shape in shapes
        )
    )


@pytest.mark.parametrize("trans", ["NN", "TN", "NT", "TT"])
@pytest.mark.parametrize("device_memory", [60 << 30, 2 << 30])
def test_files_are_read_nearly_once_and_in_long_rows(trans: str, device_memory: int) -> None:
    problem = GemmProblem(16384, 16384, 16384, DType.f64, *trans, reads_c=False)
    machine = load_machine("h200-4x").subset((0, 1))
    options = ScheduleOptions(host_memory=2 << 30, device_memory=device_memory)
    placement, nbytes = in_files(problem, 2), 3 * 8 * 16384**2
    (planned,) = plan_several(problem, placement, 2, machine, options, range(6), range(6))
    schedule = planned.schedule
    assert schedule.buffers["medium"].tolist() == [1] * 6 + [0] * (len(schedule.buffers) - 6)
    assert schedule.arena_bytes()[schedule.num_ranks :].max() <= 2 << 30
    of_files = schedule.lanes["kind"][schedule.tasks["lane"]] == LaneKind.HOST
    first = schedule.tasks["first_operand"][of_files]
    moved = schedule.regions[schedule.operands["region"][first]]
    least = 8 * int((moved["rows"] * moved["cols"]).sum()) / nbytes
    assert least <= (1.001 if device_memory > 10 << 30 else 2.5)
    # C leaves while A and B come, but for the first of it.
    once = nbytes / (machine.disk.read_gb_per_s * 1e9)
    assert once * 2 / 3 <= planned.predicted_s <= (1.1 if device_memory > 10 << 30 else 4.5) * once
    if device_memory > 10 << 30 and trans[1] == "N":
        assert planned.predicted_s <= 0.9 * once


def test_where_each_run_of_bytes_costs_much_fewer_are_read() -> None:
    problem, runs = GemmProblem(16384, 16384, 16384, DType.f64, reads_c=False), []
    for call_s in (1e-7, 2e-3):
        machine = dataclasses.replace(load_machine("h200-4x").subset((0, 1)), disk=Disk(3.0, 1.5, call_s))
        options = ScheduleOptions(host_memory=1 << 30, device_memory=1 << 30)
        schedule = plan_several(problem, in_files(problem, 2), 2, machine, options, range(6), range(6))[0].schedule
        copies = schedule.tasks[schedule.lanes["kind"][schedule.tasks["lane"]] == LaneKind.HOST]
        ends = schedule.regions[schedule.operands["region"][copies["first_operand"][:, None] + np.arange(2)]]
        of_file = schedule.buffers["medium"][ends["buffer"]] != 0
        whole = ends["rows"] == schedule.buffers["ld"][ends["buffer"]]
        runs.append(int(np.where(whole, 1, ends["cols"])[of_file].sum()))
    assert runs[1] < runs[0] / 2


def test_many_parts_through_rings_share_lanes() -> None:
    problem = GemmProblem(48, 48, 48, DType.f64)
    cuts = [(4 * at, 4 * at + 4) for at in range(12)]
    parts = BoundLayout((48, 48), tuple(Part((0, 48), cut, Location.host(0)) for cut in cuts))
    options = ScheduleOptions(scheduler="kblocks", host_memory=30_000)
    (planned,) = plan_several(problem, Placement(parts, parts, parts), 1, Machine.uniform(1), options, range(36))
    schedule = planned.schedule
    of_host = schedule.lanes[schedule.lanes["kind"] == LaneKind.HOST]
    assert len(of_host) == 16
    verify(schedule, lower(schedule))
    wrong = interpret.mismatch(schedule, interpret.random_data(problem, 1), interpret.random_order(schedule, 1))
    assert not wrong
