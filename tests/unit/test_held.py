"""Schedules of `kblocks` whose ranks begin with what they hold of matrices in parts."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.helpers.interpret import mismatch, random_data, random_order
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout, LocalArray
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Kind, Role, Schedule
from uncut_mpi.planning.search import search
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.planning.verify import verify
from uncut_mpi.view.timeline import Timeline

ROWS, COLS = Layout.rows(), Layout.cols()


def placed(problem: GemmProblem, *layouts: Layout, ranks: int = 4) -> Placement:
    """Return where A, B and C are, on devices; their shapes are those of what is stored."""
    arrays = [LocalArray(Location.device(rank)) for rank in range(ranks)]
    shapes = problem.a_shape, problem.b_shape, (problem.m, problem.n)
    return Placement(*(layout.bind(shape, arrays) for layout, shape in zip(layouts, shapes, strict=True)))


def planned(problem: GemmProblem, placement: Placement, ranks: int = 4, **blocking) -> Schedule:
    grid = (1, ranks) if placement.a.word.startswith("cols") else (ranks, 1)
    options = ScheduleOptions(scheduler="kblocks", grid=grid, blocking=Blocking(**blocking))
    return kblocks.schedule(problem, placement, ranks, Machine.uniform(ranks), options)[0]


def check(schedule: Schedule) -> None:
    """The schedule is proven, and right on numbers in its own and in another order."""
    verify(schedule, lower(schedule))
    data = random_data(schedule.problem, 3, alpha=0.7, beta=-1.3)
    assert mismatch(schedule, data) == ""
    assert mismatch(schedule, data, random_order(schedule, 5)) == ""


def first_products(schedule: Schedule) -> list[int]:
    """Return the first product of each rank."""
    products = np.flatnonzero(schedule.tasks["kind"] == Kind.GEMM)
    return [int(products[schedule.tasks["rank"][products] == rank][0]) for rank in range(schedule.num_ranks)]


def copied(schedule: Schedule) -> set[tuple[int, int]]:
    lanes = schedule.lanes[schedule.tasks["lane"][schedule.tasks["kind"] == Kind.COPY]]
    return {(int(one["source"]), int(one["destination"])) for one in lanes}


@pytest.mark.parametrize("layout", [ROWS, COLS], ids=["rows", "cols"])
@pytest.mark.parametrize("dtype", [DType.f64, DType.bf16])
def test_a_rank_begins_at_once_with_what_it_holds_and_copies_none_of_it(layout: Layout, dtype: DType) -> None:
    problem = GemmProblem(64, 64, 64, dtype, reads_c=True)
    schedule = planned(problem, placed(problem, layout, layout, layout))
    users = np.flatnonzero(schedule.buffers["role"] == Role.USER)
    for task in first_products(schedule):
        of_a, of_b = schedule.operands_of(task)["region"][1:3]
        assert np.isin(schedule.regions["buffer"][[of_a, of_b]], users).all()
        # Of C it may await what brings it, of A and B nothing.
        assert not schedule.tasks["num_awaits"][task] or dtype.is_half
    assert all(source != to for source, to in copied(schedule))
    check(schedule)


def test_each_holder_serves_one_rank_at_a_time() -> None:
    """Each rank's first piece comes from the one behind it."""
    problem = GemmProblem(64, 64, 64, DType.f64)
    served = {}
    for begin in ("held", "first"):
        schedule = planned(problem, placed(problem, ROWS, ROWS, ROWS), begin=begin, columns=1, order="k", first=16)
        first: dict[int, int] = {}
        for _, source, to, _ in schedule.copies().tolist():
            if source != to:
                first.setdefault(to, source)
        served[begin] = first
    assert served["held"] == {0: 1, 1: 2, 2: 3, 3: 0}
    assert set(served["first"].values()) != {0, 1, 2, 3}


@pytest.mark.parametrize("counts", [(16, 16, 16, 16), (0, 31, 2, 31), (64, 0, 0, 0), (1, 3, 41, 19)])
@pytest.mark.parametrize("order", ["k", "columns", "corner", "k-columns"])
def test_parts_of_any_extents_in_any_order_of_blocks(counts: tuple[int, ...], order: str) -> None:
    problem = GemmProblem(61, 47, 64, DType.f64, trans_b="T", reads_c=True)
    placement = placed(problem, Layout.cols(counts), Layout.cols(counts[::-1]), ROWS)
    options = ScheduleOptions(scheduler="kblocks", grid=(2, 2), blocking=Blocking(begin="held", first=4, order=order))
    check(kblocks.schedule(problem, placement, 4, Machine.uniform(4), options)[0])


@pytest.mark.parametrize("splits", [2, 4])
def test_ranks_that_share_k_begin_with_what_they_hold_of_their_part(splits: int) -> None:
    problem = GemmProblem(40, 24, 64, DType.f32, trans_a="T", reads_c=True)
    placement = placed(problem, ROWS, ROWS, ROWS)
    options = ScheduleOptions(
        scheduler="kblocks", grid=(4 // splits, 1), blocking=Blocking(begin="held", splits=splits, first=4)
    )
    check(kblocks.schedule(problem, placement, 4, Machine.uniform(4), options)[0])


def test_bytes_are_those_of_the_stationary_form() -> None:
    problem = GemmProblem(64, 96, 128, DType.f64)
    schedule = planned(problem, placed(problem, ROWS, ROWS, ROWS))
    moved = sum(size for _, source, to, size in schedule.copies().tolist() if source != to)
    assert moved == 3 * 96 * 128 * 8  # each rank is sent what it lacks of B


ACROSS = {
    "rows": ((ROWS, COLS, COLS), (1, 4), {"order": "corner", "rows": 4, "columns": 1}),
    "cols": ((ROWS, COLS, ROWS), (4, 1), {"order": "columns", "columns": 4}),
    "cols of a corner": ((ROWS, COLS, ROWS), (4, 1), {"order": "corner", "rows": 1, "columns": 4}),
}


@pytest.mark.parametrize("which", ACROSS)
@pytest.mark.parametrize("dtype", [DType.f64, DType.bf16])
@pytest.mark.parametrize("trans", ["NN", "TT"])
def test_a_rank_begins_with_rows_or_columns_of_c_for_which_it_holds_all(which: str, dtype: DType, trans: str) -> None:
    """A is gathered by rows, or B by columns, while products run."""
    layouts, grid, how = ACROSS[which]
    if trans == "TT":
        layouts = (COLS, ROWS, layouts[2])
    problem = GemmProblem(4096, 4096, 64, dtype, *trans, reads_c=True)
    options = ScheduleOptions(scheduler="kblocks", grid=grid, blocking=Blocking(first=64, block=64, **how))
    placement = placed(problem, *layouts)
    schedule = kblocks.schedule(problem, placement, 4, Machine.uniform(4), options)[0]
    users = np.flatnonzero(schedule.buffers["role"] == Role.USER)
    for task in first_products(schedule):
        assert np.isin(schedule.regions["buffer"][schedule.operands_of(task)["region"][1:3]], users).all()
        assert not schedule.tasks["num_awaits"][task]
    assert all(source != to for source, to in copied(schedule))
    assert sum(size for *_, size in schedule.copies().tolist()) == 3 * 4096 * 64 * dtype.itemsize
    verify(schedule, lower(schedule))
    served = {}
    for _, source, to, _ in schedule.copies().tolist():
        served.setdefault(to, source)
    assert served == {0: 1, 1: 2, 2: 3, 3: 0}


@pytest.mark.parametrize("counts", [(16, 16, 16, 16), (0, 31, 2, 31), (64, 0, 0, 0), (1, 3, 41, 19), (20, 20, 24, 0)])
@pytest.mark.parametrize("which", ACROSS)
@pytest.mark.parametrize(("dtype", "first"), [(DType.f64, 8), (DType.bf16, 64)])
@pytest.mark.parametrize("c", ["in parts", "in host memory", "on one rank"])
def test_rows_and_columns_of_any_extents(counts: tuple[int, ...], which: str, dtype: DType, first: int, c: str) -> None:
    layouts, grid, how = ACROSS[which]
    problem = GemmProblem(64, 64, 40, dtype, reads_c=True)
    placement = placed(problem, Layout.rows(counts), Layout.cols(counts), layouts[2])
    if c != "in parts":
        where = Location.host() if c == "in host memory" else Location.device(1)
        placement = dataclasses.replace(placement, c=where)
    options = ScheduleOptions(scheduler="kblocks", grid=grid, blocking=Blocking(first=first, block=64, **how))
    check(kblocks.schedule(problem, placement, 4, Machine.uniform(4), options)[0])


@pytest.mark.parametrize("counts", [(20, 20, 24, 0), (11, 49, 4, 0), (0, 0, 40, 24)])
@pytest.mark.parametrize("order", ["columns", "corner"])
def test_ranks_that_begin_at_one_column_may_have_other_blocks(counts: tuple[int, ...], order: str) -> None:
    """A rank that holds none of B has equal blocks, one that holds the first columns has a block of these."""
    problem = GemmProblem(64, 64, 64, DType.f64, reads_c=True)
    how = Blocking(begin="held", order=order, rows=1, columns=2, first=16, block=16)
    options = ScheduleOptions(scheduler="kblocks", grid=(4, 1), blocking=how)
    placement = placed(problem, ROWS, Layout.cols(counts), ROWS)
    check(kblocks.schedule(problem, placement, 4, Machine.uniform(4), options)[0])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("shape", "layouts"), [((8192, 28672, 8192), (ROWS, COLS, COLS)), ((8192, 8192, 28672), (COLS, ROWS, ROWS))]
)
def test_tensor_parallel_products_move_most_bytes_while_they_multiply(ranks, shape, layouts) -> None:
    """Tokens in rows are gathered and multiplied by columns of weights; the next product is reduced to rows again."""
    problem = GemmProblem(*shape, DType.bf16, reads_c=False)
    machine = load_machine("h200-4x").subset(range(ranks))
    schedule = plan(problem, placed(problem, *layouts, ranks=ranks), ranks, machine).schedule
    times = simulate(schedule, machine)
    total, hidden = Timeline.of(schedule, times.start_s, times.end_s, "predicted").moved
    assert hidden >= 0.9 * total > 0


def test_it_is_faster_and_a_search_finds_it() -> None:
    machine = dataclasses.replace(Machine.uniform(4), latency_s=np.full((5, 5), 1e-5))
    problem = GemmProblem(4096, 4096, 4096, DType.f64)
    placement = placed(problem, ROWS, ROWS, ROWS)
    seconds = {
        begin: simulate(planned(problem, placement, begin=begin), machine).seconds for begin in ("first", "held")
    }
    assert seconds["held"] < 0.95 * seconds["first"]
    found = search(problem, placement, 4, machine, ScheduleOptions(scheduler="kblocks"))
    assert found.best.options.blocking.begin == "held"
    asked = ScheduleOptions(scheduler="kblocks", blocking=Blocking(begin="first"))
    others = search(problem, placement, 4, machine, asked)
    assert {one.options.blocking.begin for one in others.candidates} == {"first"}
    assert found.best.predicted_s < 0.96 * others.best.predicted_s


def test_whole_matrices_are_taken_from_the_first_k_on() -> None:
    problem = GemmProblem(64, 64, 64, DType.f64)
    found = search(problem, Placement.parse("0,1,0"), 4, Machine.uniform(4), ScheduleOptions(scheduler="kblocks"))
    assert {one.options.blocking.begin for one in found.candidates} == {"first"}
