"""Products of matrices in parts as they are planned: proved, right on numbers, and moving no more than they must."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator

import numpy as np
import pytest

from tests.helpers import oracle, proven
from tests.helpers.faults import set_rows
from tests.helpers.layouts import even, grid_layout
from tests.helpers.planned import search
from uncut_mpi.errors import ParamError, PlanError, ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.parts import BoundLayout, Part
from uncut_mpi.model.placement import Matrix, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import (
    Blocking,
    ScheduleOptions,
)
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Kind, Role, Schedule
from uncut_mpi.planning.stationary import stationary_grids
from uncut_mpi.planning.verify import verify


def check(schedule: Schedule, seed: int) -> None:
    proven.check(schedule, seed)
    if len(schedule.tasks) < 300:
        assert oracle.is_wrong(schedule) == "", f"seed {seed}"


def test_tiles_of_parts_that_end_at_different_places_are_right_on_numbers() -> None:
    problem = GemmProblem(30, 26, 22, DType.f64, "T", "N")

    def pinwheel(rows: int, cols: int) -> BoundLayout:
        """Return four parts round a fifth one; a rank has two of them."""
        top, bottom, left, right = rows // 3, rows // 2 + 1, cols // 4, cols - 5
        places = (
            ((0, top), (0, right)),
            ((0, bottom), (right, cols)),
            ((bottom, rows), (left, cols)),
            ((top, rows), (0, left)),
            ((top, bottom), (left, right)),
        )
        where = (0, 1, 2, 0, 1)
        parts = (Part(*place, Location.device(rank)) for place, rank in zip(places, where, strict=True))
        return BoundLayout((rows, cols), tuple(parts))

    placement = Placement(*(pinwheel(*shape) for shape in (problem.a_shape, problem.b_shape, (30, 26))))
    for order in ("eta", "fixed"):
        options = ScheduleOptions(scheduler="uncut", tile=7, order=order)
        check(plan(problem, placement, 3, Machine.uniform(3), options).schedule, 1)


def test_a_copy_that_goes_elsewhere_is_refused() -> None:
    problem = GemmProblem(8, 6, 0, DType.f64, reads_c=False, copies=True)
    rows, cols = grid_layout([0, 4, 8], [0, 6], (0, 1)), grid_layout([0, 8], [0, 3, 6], (0, 1))
    schedule = plan(problem, Placement(rows, Location.host(), cols), 2, Machine.uniform(2)).schedule
    read = schedule.operands_of(0)["region"][1]
    with pytest.raises(ScheduleError, match="ends with the values of elements displaced by 0 rows and 3 columns"):
        verify(set_rows(schedule, "regions", read, col=schedule.regions["col"][read] + 3))
    with pytest.raises(ScheduleError, match="never written"):
        verify(dataclasses.replace(schedule, tasks=schedule.tasks[:-1].copy()))


def test_a_large_part_in_host_memory_passes_through_few_slots() -> None:
    problem = GemmProblem(4096, 8192, 0, DType.f64)
    layout = grid_layout([0, 1000, 4096], [0, 8192], (0, 1), Location.host)
    schedule = plan(problem, Placement(Location.host(), Location.host(), layout), 2, Machine.uniform(2)).schedule
    verify(schedule, lower(schedule))
    assert len(schedule.tasks) > 30
    assert schedule.softbuf_bytes().max() <= 3 * (16 << 20)


# -- what they move --------------------------------------------------------------------------------


RANKS, SIZE = 4, 64
SQUARE = GemmProblem(SIZE, SIZE, SIZE, DType.f64, reads_c=False)
KINDS = {"rows": (4, 1), "cols": (1, 4), "blocks": (2, 2)}


def dealt(kind: str) -> BoundLayout:
    down, along = KINDS[kind]
    return grid_layout(even(SIZE, down), even(SIZE, along), range(RANKS))


def placed(kinds: tuple[str, str, str]) -> Placement:
    return Placement(*map(dealt, kinds))


def axes_of(problem: GemmProblem, matrix: Matrix) -> str:
    """Return along which of i, j and k the rows and columns of a matrix go, as it is stored."""
    turned = {Matrix.A: problem.trans_a, Matrix.B: problem.trans_b}.get(matrix) == "T"
    axes = {Matrix.A: "ik", Matrix.B: "kj", Matrix.C: "ij"}[matrix]
    return axes[::-1] if turned else axes


def needed(problem: GemmProblem, placement: Placement, stays: Matrix) -> dict[str, int]:
    """
    Return the bytes that pass each kind of link when one matrix stays, by set arithmetic on elements.

    A rank multiplies the (i, j, k) of the part that it holds; it needs of A and B what it does not hold, and sends of C
    what it has formed and does not hold. What lies in host memory passes the host's link once, whoever needs it.
    """

    def parts(matrix: Matrix) -> tuple[Part, ...]:
        return placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix))

    everything = {"i": (0, problem.m), "j": (0, problem.n), "k": (0, problem.k)}
    axes = axes_of(problem, stays)
    work = [
        (part.location.rank, everything | dict(zip(axes, (part.rows, part.cols), strict=True))) for part in parts(stays)
    ]
    found = dict.fromkeys(("host_to_device", "device_to_host", "device_to_device"), 0)
    for matrix in (Matrix.A, Matrix.B, Matrix.C):
        down, along = axes_of(problem, matrix)
        of_host = "device_to_host" if matrix is Matrix.C else "host_to_device"
        for part in parts(matrix):
            users, stay = np.zeros(part.shape, np.int64), np.zeros(part.shape, np.int64)
            for rank, what in work:
                rows, cols = (
                    slice(max(0, one[0] - edge[0]), max(0, one[1] - edge[0]))
                    for one, edge in ((what[down], part.rows), (what[along], part.cols))
                )
                users[rows, cols] += 1
                if rank == part.location.rank:
                    stay[rows, cols] = 1
            if part.location.space == "host":
                stay = np.minimum(users, 1)
                found[of_host] += problem.dtype.itemsize * int(stay.sum())
            found["device_to_device"] += problem.dtype.itemsize * int((users - stay).sum())
    return found


def staying(problem: GemmProblem, placement: Placement, ranks: int) -> Iterator[tuple[Matrix, Schedule]]:
    """Return which matrices can stay, and schedules in which they do."""
    for form in stationary_grids(problem, placement):
        in_blocks = ScheduleOptions(
            scheduler="kblocks", blocking=Blocking(splits=form.splits, first=16, block=16, columns=2), **form.changes
        )
        in_tiles = ScheduleOptions(scheduler="uncut", tile=24, **{**form.changes, "k_shares": None})
        for options in (in_blocks, in_tiles) if form.splits == 1 else (in_blocks,):
            yield form.matrix, plan(problem, placement, ranks, Machine.uniform(ranks), options).schedule


def moved(schedule: Schedule) -> dict[str, int]:
    """Return the bytes that pass each kind of link."""
    return {kind: nbytes for kind, nbytes in schedule.bytes_by_link().items() if kind != "local"}


@pytest.mark.parametrize("kinds", [*itertools.product(KINDS, repeat=3)])
def test_a_matrix_that_stays_costs_what_the_others_need(kinds: tuple[str, str, str]) -> None:
    placement = placed(kinds)
    for matrix, schedule in staying(SQUARE, placement, RANKS):
        assert moved(schedule) == needed(SQUARE, placement, matrix), (schedule.scheduler, matrix)
        panels = schedule.buffers[schedule.buffers["role"] != Role.USER]
        assert matrix not in panels["matrix"], schedule.scheduler  # it is used where it lies


@pytest.mark.parametrize("batch", [True, False])
def test_ranks_begin_with_tiles_that_they_hold(batch: bool) -> None:
    options = ScheduleOptions(scheduler="uncut", tile=16, grid=(RANKS, 1), batch=batch)
    schedule = plan(SQUARE, placed(("rows", "rows", "rows")), RANKS, Machine.uniform(RANKS), options).schedule
    for rank in range(RANKS):
        products = np.flatnonzero((schedule.tasks["kind"] == Kind.GEMM) & (schedule.tasks["rank"] == rank))
        assert not schedule.tasks["num_awaits"][products[: SIZE // 16]].any()
        assert schedule.tasks["num_awaits"][products[SIZE // 16 :]].any()


@pytest.mark.parametrize("ranks", [3, 4, 6, 8])
def test_so_do_parts_of_any_extents_in_any_memory(ranks: int) -> None:
    stayed: set[tuple[Matrix, str]] = set()
    for seed in range(25):
        rng = random.Random(seed)
        m, n, k = (rng.randint(2 * ranks, 70) for _ in range(3))
        problem = GemmProblem(
            m, n, k, rng.choice((DType.f64, DType.f32)), rng.choice("NT"), rng.choice("NT"), reads_c=False
        )
        kinds: list[str] = []
        layouts = []
        for shape in (problem.a_shape, problem.b_shape, (m, n)):
            down = rng.choice([one for one in range(1, ranks + 1) if ranks % one == 0])
            cuts = [
                [0, *sorted(rng.sample(range(1, extent), count - 1)), extent]
                for extent, count in zip(shape, (down, ranks // down), strict=True)
            ]
            kinds.append(rng.choice(("device", "private", "shared")))
            where = {"device": Location.device, "private": Location.host, "shared": lambda _: Location.host()}[
                kinds[-1]
            ]
            layouts.append(grid_layout(*cuts, rng.sample(range(ranks), ranks), where))
        placement = Placement(*layouts)
        for matrix, schedule in staying(problem, placement, ranks):
            told = f"seed {seed}, {matrix!r} stays, {kinds}, {schedule.scheduler}"
            assert moved(schedule) == needed(problem, placement, matrix), told
            stayed.add((matrix, kinds[matrix]))
    assert len(stayed) == 6  # each of the three, on devices and in private host memory


@pytest.mark.parametrize("kinds", [*itertools.product(KINDS, repeat=3)])
def test_the_search_moves_no_more_than_the_best_of_them_unless_that_is_faster(kinds: tuple[str, str, str]) -> None:
    problem, machine = GemmProblem(4096, 4096, 4096, DType.f64, reads_c=False), Machine.uniform(RANKS)
    edges = [[even(4096, count) for count in KINDS[kind]] for kind in kinds]
    placement = Placement(*(grid_layout(rows, cols, range(RANKS)) for rows, cols in edges))
    found = search(problem, placement, RANKS, machine)
    choice = found.best.schedule
    verify(choice, lower(choice))
    cost = {
        matrix: needed(SQUARE, placed(kinds), matrix)["device_to_device"] for matrix in (Matrix.A, Matrix.B, Matrix.C)
    }
    least = min(cost.values())
    if choice.bytes_by_link()["device_to_device"] > least * (4096 // SIZE) ** 2:
        forms = [one for one in stationary_grids(problem, placement) if cost[one.matrix] == least]
        known = {(one.changes["grid"], one.splits, one.changes["devices"]) for one in forms}
        tried = [one for one in found.candidates if _place(one.options) in known]
        assert {_place(one.options) for one in tried} == known
        assert min(one.predicted_s for one in tried) > found.best.predicted_s


@pytest.mark.parametrize("long", [Matrix.A, Matrix.B])
def test_nothing_moves_by_rule_where_nothing_has_to_though_ranks_differ_in_rate(long: Matrix) -> None:
    m, n = (4096, 8) if long is Matrix.A else (8, 4096)
    problem, rates = GemmProblem(m, n, 8, DType.f64, reads_c=False), {"f64": np.array([1.0, 2.0, 3.0, 2.5])}
    machine = dataclasses.replace(Machine.uniform(RANKS), gemm_tflop_per_s=rates, typical_gemm_tflop_per_s=rates)

    def dealt(shape: tuple[int, int]) -> BoundLayout:
        if max(shape) == 8:
            return BoundLayout(shape, tuple(Part((0, 8), (0, 8), Location.device(rank)) for rank in range(RANKS)))
        return grid_layout(*(even(extent, RANKS if extent > 8 else 1) for extent in shape), range(RANKS))

    placement = Placement(*map(dealt, (problem.a_shape, problem.b_shape, (m, n))))
    for how in ("rule", "full"):
        schedule = plan(problem, placement, RANKS, machine, ScheduleOptions(search=how)).schedule
        assert not any(moved(schedule).values()), how


def _place(options: ScheduleOptions) -> tuple[object, ...]:
    return options.grid, options.blocking.splits, options.devices


def test_shares_that_sum_to_the_extent_are_counts() -> None:
    options = ScheduleOptions(scheduler="kblocks", grid=(2, 1), row_shares=(13, 51), k_shares=(3, 61))
    schedule = plan(SQUARE, Placement.parse("0,0,0"), RANKS, Machine.uniform(RANKS), options).schedule
    assert schedule.splits == 2
    products = schedule.tasks[schedule.tasks["kind"] == Kind.GEMM]
    of = [
        [schedule.regions[schedule.operands["region"][first + at]] for first in products["first_operand"]]
        for at in (0, 1)
    ]
    extents = {(int(c["rows"]), int(a["cols"])) for c, a in zip(*of, strict=True)}
    assert extents == {(13, 3), (13, 61), (51, 3), (51, 61)}
    with pytest.raises(ParamError, match="2 k_shares were given for 3 parts of k"):
        ScheduleOptions(k_shares=(1, 2), blocking=Blocking(splits=3))


def test_ranks_whose_share_of_k_comes_to_nothing_have_no_part() -> None:
    problem = GemmProblem(8, 8, 2, DType.f64, reads_c=False)
    options = ScheduleOptions(scheduler="kblocks", grid=(1, 1), k_shares=(1, 3))
    schedule = plan(problem, Placement.parse("0,0,0"), 2, Machine.uniform(2), options).schedule
    assert schedule.splits == 1
    check(schedule, 1)


@pytest.mark.parametrize("where", ["0", "h", "h1"])
@pytest.mark.parametrize("shape", [(0, 6), (6, 0)])
def test_a_c_without_elements_beside_matrices_in_parts_makes_no_task(where: str, shape: tuple[int, int]) -> None:
    problem = GemmProblem(*shape, 8, DType.f64)
    a, b = (
        grid_layout(even(extents[0], 2), even(extents[1], 1), range(2))
        for extents in (problem.a_shape, problem.b_shape)
    )
    schedule = plan(problem, Placement(a, b, Location.parse(where)), 2, Machine.uniform(2)).schedule
    verify(schedule, lower(schedule))
    assert len(schedule.tasks) == 0


def test_other_schedulers_say_that_they_take_whole_matrices() -> None:
    for scheduler in ("cyclic", "bands"):
        with pytest.raises(PlanError, match="A is in parts"):
            plan(SQUARE, placed(("rows", "rows", "rows")), RANKS, Machine.uniform(RANKS), ScheduleOptions(scheduler))


def test_parts_that_one_rank_holds_or_nobody_make_no_grid() -> None:
    at_home = Location.host()
    shared = grid_layout(even(SIZE, 4), [0, SIZE], range(4), lambda _: at_home)
    twice = grid_layout(even(SIZE, 4), [0, SIZE], (0, 1, 2, 0))
    whole = Location.device(0)
    for layout in (shared, twice, BoundLayout.whole((SIZE, SIZE), whole)):
        assert stationary_grids(SQUARE, Placement(layout, whole, whole)) == []
