"""Options and reports speak of the caller's C, however it is stored."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.helpers.planned import plan_several, search
from uncut_mpi.api.plans import PlanSummary
from uncut_mpi.bench.rivals.cyclic import DISTRIBUTIONS
from uncut_mpi.errors import ParamError, PlanError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem, StoredMatrix
from uncut_mpi.planning.decomposition import grid_starts, share_step
from uncut_mpi.planning.description import describe
from uncut_mpi.planning.grid import ProcessGrid, block_starts, share_starts
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.planner import Planned, plan
from uncut_mpi.planning.schedule import Kind, Matrix
from uncut_mpi.planning.shares import arrange, fit_shares
from uncut_mpi.planning.verify import held_by_operands

Rect = tuple[int, int, int, int]
PLACES = ("h,h,h", "0,0,0", "1,0,h", "0,1,1", "h,h,0")


def problem_of(m: int, n: int, k: int, order: str, *, inputs: str = "", **about: object) -> GemmProblem:
    """Return the problem of matrices in an order: all in one, or A and B in others."""
    orders = (inputs or 2 * order) + order
    shapes = ((m, k), (k, n), (m, n))
    a, b, c = (StoredMatrix(*shape, order=one) for shape, one in zip(shapes, orders, strict=True))
    return GemmProblem.from_operands(a, b, c, dtype=DType.f64, **about)  # type: ignore[arg-type]


def places_of(place: str, problem: GemmProblem) -> Placement:
    """Return the placement that a session makes of the places of A, B and C."""
    at = Placement.parse(place)
    return Placement(at.b, at.a, at.c) if problem.swapped else at


def planned(problem: GemmProblem, place: str, ranks: int, options: ScheduleOptions, **machine: object) -> Planned:
    return plan(problem, places_of(place, problem), ranks, Machine.uniform(ranks, **machine), options)  # type: ignore[arg-type]


def computed(made: Planned) -> dict[int, set[Rect]]:
    """Return of each rank the blocks of the caller's C that its products form: (row, col, rows, cols)."""
    schedule = made.schedule
    held = held_by_operands(schedule)
    is_written = (held["operand"] == 0) & (schedule.tasks["kind"][held["task"]] == Kind.GEMM)
    found: dict[int, set[Rect]] = {}
    for task, _, matrix, row, col, rows, cols in held[is_written].tolist():
        assert matrix == Matrix.C
        found.setdefault(int(schedule.tasks["rank"][task]), set()).add(
            (col, row, cols, rows) if schedule.problem.swapped else (row, col, rows, cols)
        )
    return found


def written(made: Planned, tile: int) -> dict[tuple[int, int], int]:
    """Return which rank writes each tile (row, column) of the caller's C in host memory."""
    schedule = made.schedule
    regions = schedule.regions[schedule.operands["region"][schedule.tasks["first_operand"]]]
    found = {}
    for rank, region in zip(schedule.tasks["rank"].tolist(), regions, strict=True):
        if region["buffer"] == Matrix.C:
            at = int(region["row"]) // tile, int(region["col"]) // tile
            found[at[::-1] if schedule.problem.swapped else at] = rank
    return found


def spans(made: Planned) -> dict[int, tuple[range, range]]:
    """Return of each rank the rows and columns of the caller's C between the first and the last that it computes."""
    found = {}
    for rank, blocks in computed(made).items():
        rows = range(min(row for row, *_ in blocks), max(row + height for row, _, height, _ in blocks))
        cols = range(min(col for _, col, *_ in blocks), max(col + width for _, col, _, width in blocks))
        found[rank] = rows, cols
    return found


def due(problem: GemmProblem, m: int, n: int, options: ScheduleOptions, ranks: int) -> dict[int, tuple[range, range]]:
    """Return what the options give each rank, by their documentation."""
    grid = ProcessGrid.choose(len(options.devices or range(ranks)), options.grid)
    edges = []
    for extent, blocks, shares in ((m, grid.rows, options.row_shares), (n, grid.cols, options.col_shares)):
        cut = block_starts(extent, blocks)
        if shares is not None and sum(shares) == extent and all(share % 1 == 0 for share in shares):
            cut = [0, *map(int, itertools.accumulate(shares))]  # they are counts
        elif shares is not None:
            cut = share_starts(extent, shares, share_step(problem, extent, shares))
        edges.append(cut)
    devices = options.devices or tuple(range(ranks))
    return {
        devices[place]: (range(*edges[0][row : row + 2]), range(*edges[1][col : col + 2]))
        for place, (row, col) in enumerate(itertools.product(range(grid.rows), range(grid.cols)))
        if edges[0][row] < edges[0][row + 1] and edges[1][col] < edges[1][col + 1]
    }


@st.composite
def cut_options(draw: st.DrawFn) -> tuple[int, ScheduleOptions]:
    """Return a number of ranks, and options that say how C is cut and who fills the grid."""
    rows, cols = draw(st.sampled_from([(1, 2), (2, 1), (2, 2), (2, 3), (3, 1), (3, 2), (1, 4), (4, 2)]))
    ranks = rows * cols + draw(st.integers(0, 2))
    devices = draw(st.none() | st.permutations(range(ranks)))
    shares = [
        draw(st.none() | st.lists(st.sampled_from([1, 2, 3, 5]), min_size=count, max_size=count))
        for count in (rows, cols)
    ]
    scheduler = draw(st.sampled_from(["uncut", "kblocks"]))
    return ranks, ScheduleOptions(
        scheduler=scheduler,
        grid=(rows, cols),
        devices=devices and tuple(devices),
        row_shares=shares[0] and tuple(shares[0]),
        col_shares=shares[1] and tuple(shares[1]),
    )


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    case=cut_options(),
    m=st.integers(8, 700),
    n=st.integers(8, 700),
    k=st.integers(1, 300),
    place=st.sampled_from(PLACES),
    order=st.sampled_from("FC"),
    inputs=st.sampled_from(["FF", "FC", "CF", "CC"]),
)
def test_each_rank_computes_what_grid_shares_and_devices_say_of_the_callers_c(
    case: tuple[int, ScheduleOptions], m: int, n: int, k: int, place: str, order: str, inputs: str
) -> None:
    ranks, options = case
    problem = problem_of(m, n, k, order, inputs=inputs)
    made = planned(problem, place, ranks, options)
    assert spans(made) == due(problem, m, n, options, ranks)
    kept = ("grid", "devices", "row_shares", "col_shares", "areas")
    assert all(getattr(made.options, name) == getattr(options, name) for name in kept)


@pytest.mark.parametrize("order", "FC")
@pytest.mark.parametrize("scheduler", ["uncut", "kblocks"])
def test_ranks_fill_the_grid_that_is_chosen_row_by_row_too(scheduler: str, order: str) -> None:
    devices = (3, 1, 5, 0, 2, 4)
    problem = problem_of(600, 660, 128, order)
    made = planned(problem, "0,0,0", 6, ScheduleOptions(scheduler=scheduler, devices=devices))
    assert made.options.devices == devices
    assert made.options.grid is not None
    assert spans(made) == due(problem, 600, 660, made.options, 6)


@pytest.mark.parametrize("order", "FC")
def test_what_a_search_chooses_is_what_its_choice_says_of_the_callers_c(order: str) -> None:
    # Rates that differ make it choose ranks, their order and shares.
    rates = {"f64": np.array([30.0, 60.0, 45.0, 60.0])}
    machine = dataclasses.replace(Machine.uniform(4), gemm_tflop_per_s=rates, typical_gemm_tflop_per_s=rates)
    problem = problem_of(3000, 2000, 1500, order)
    placement = places_of("h,h,h", problem)
    for scheduler in ("uncut", "kblocks"):
        options = ScheduleOptions(blocking=Blocking(splits=1)) if scheduler == "kblocks" else ScheduleOptions(chunks=4)
        result = search(problem, placement, 4, machine, options)
        checked = 0
        for one in result.candidates[:60]:
            assert one.options.grid is None or one.grid == one.options.grid
            if one.options.areas is None and one.options.grid is not None:
                made = Planned(one.schedule, one.predicted_s, one.options)
                assert spans(made) == due(problem, 3000, 2000, one.options, 4)
                checked += 1
        assert checked > 3


@pytest.mark.parametrize("order", "FC")
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_tiles_are_dealt_out_on_the_grid_of_the_callers_c(distribution: str, order: str) -> None:
    options = ScheduleOptions(scheduler=f"cyclic:{distribution}", grid=(2, 3), devices=(4, 0, 2, 5, 1, 3), tile=100)
    made = planned(problem_of(600, 600, 300, order), "h,h,h", 6, options)
    owner = written(made, 100)
    assert len(owner) == 36
    places = {rank: place for place, rank in enumerate(options.devices or ())}
    for (row, col), rank in owner.items():
        along, across = (row, col) if order == "C" else (col, row)
        expected = {
            "2d-cyclic": 3 * (row % 2) + col % 3,
            "1d-cyclic": row % 6,
            "round-robin": (6 * along + across) % 6,
            "sequential": (6 * along + across) // 6,
        }
        assert places[rank] == expected[distribution]


@pytest.mark.parametrize("order", "FC")
def test_areas_are_strips_of_c_as_it_is_stored(order: str) -> None:
    areas = ((2.0,), (1.0, 3.0))  # a third of C as a whole strip, two thirds as one that two ranks share
    options = ScheduleOptions(scheduler="kblocks", areas=areas, devices=(2, 0, 1))
    made = planned(problem_of(1200, 1200, 400, order), "h,h,h", 3, options)
    whole, strip, rest = range(1200), range(400), range(400, 1200)
    expected = {2: (whole, strip), 0: (range(300), rest), 1: (range(300, 1200), rest)}
    if order == "C":
        expected = {rank: (cols, rows) for rank, (rows, cols) in expected.items()}
    assert spans(made) == expected
    said = describe(made.schedule, made.options)
    assert said.startswith(f"{'rows' if order == 'C' else 'columns'} of ranks 0.333 | 0.167:0.500")
    summary, _ = PlanSummary.of(made, Machine.uniform(3), options, 0.0, 1)
    assert summary.grid == (2, 2)


@pytest.mark.parametrize("order", "FC")
def test_row_and_column_blocks_of_the_order_corner_are_those_of_the_callers_c(order: str) -> None:
    blocking = Blocking(order="corner", rows=2, columns=4)
    options = ScheduleOptions(scheduler="kblocks", grid=(1, 1), blocking=blocking, devices=(0,))
    made = planned(problem_of(1600, 1600, 256, order), "h,h,h", 1, options)
    blocks = set().union(*computed(made).values())
    # They begin at multiples of 128 and 64, and the last of several is halved twice.
    assert {row for row, *_ in blocks} == {0, 768, 1152, 1408}
    assert {col for _, col, *_ in blocks} == {0, 448, 832, 1216, 1408, 1536}
    assert (made.options.blocking.rows, made.options.blocking.columns) == (2, 4)
    assert "2x4 blocks" in describe(made.schedule, made.options)


@pytest.mark.parametrize("order", "FC")
def test_strips_of_the_other_orders_are_those_of_c_as_it_is_stored(order: str) -> None:
    blocking = Blocking(order="columns", columns=4)
    options = ScheduleOptions(scheduler="kblocks", grid=(1, 1), blocking=blocking)
    made = planned(problem_of(1600, 1600, 256, order), "h,h,h", 1, options)
    assert {block[0 if order == "C" else 1] for block in computed(made)[0]} == {0, 448, 832, 1216, 1408, 1536}
    assert made.options.blocking.columns == 4
    said = describe(made.schedule, made.options)
    assert f"4 {'row' if order == 'C' else 'column'} blocks" in said
    assert f"order columns{' along rows of C' if order == 'C' else ''}" in said


@pytest.mark.parametrize("scheduler", ["uncut", "kblocks", "cyclic", "auto"])
def test_reports_name_the_grid_of_the_callers_c(scheduler: str) -> None:
    options = ScheduleOptions(scheduler=scheduler, grid=(4, 1))
    problem = problem_of(4000, 100, 1000, "C")
    several = plan_several(problem, places_of("h,h,h", problem), 4, Machine.uniform(4), options)
    made = several[0]
    summary, _ = PlanSummary.of(made, Machine.uniform(4), options, 0.0, len(several))
    assert summary.grid == (4, 1)
    assert "4x1" in summary.how
    assert made.options.grid == (4, 1)
    assert json.dumps(dataclasses.asdict(made.options))


@pytest.mark.parametrize("scheduler", ["uncut", "kblocks", "cyclic"])
@pytest.mark.parametrize("grid", [(4, 1), (1, 4), (2, 2)])
def test_a_grid_moves_the_same_bytes_between_devices_for_either_order(grid: tuple[int, int], scheduler: str) -> None:
    options = ScheduleOptions(scheduler=scheduler, grid=grid)
    moved = [
        planned(problem_of(4000, 100, 1000, order), "h,h,h", 4, options).schedule.bytes_by_link() for order in "FC"
    ]
    assert moved[0]["device_to_device"] == moved[1]["device_to_device"]
    assert moved[0]["host_to_device"] == moved[1]["host_to_device"]


def test_errors_name_the_callers_grid_and_shares() -> None:
    problem = problem_of(100, 200, 50, "C")
    with pytest.raises(ParamError, match=r"grid 3x2 has 6 places, but there are 4 ranks"):
        planned(problem, "h,h,h", 4, ScheduleOptions(scheduler="uncut", grid=(3, 2)))
    for scheduler in ("uncut", "kblocks"):
        options = ScheduleOptions(scheduler=scheduler, grid=(2, 1), row_shares=(1, 2, 3))
        with pytest.raises(ParamError, match=r"3 row_shares were given, grid 2x1 has 2 rows"):
            planned(problem, "h,h,h", 2, options)
        with pytest.raises(ParamError, match=r"1 col_shares were given, grid 1x2 has 2 cols"):
            planned(problem, "h,h,h", 2, ScheduleOptions(scheduler=scheduler, grid=(1, 2), col_shares=(1,)))
    with pytest.raises(PlanError, match=r"of 40000×20000×"):
        planned(problem_of(40000, 20000, 50, "C"), "h,h,h", 4, ScheduleOptions(scheduler="uncut", tile=1))


def test_conversion_to_the_problems_orientation_is_its_own_inverse() -> None:
    swapped, straight = problem_of(3, 4, 5, "C"), problem_of(3, 4, 5, "F")
    for options in (
        ScheduleOptions(grid=(2, 3), row_shares=(1, 2), col_shares=(1, 2, 3), devices=(5, 4, 3, 2, 1, 0)),
        ScheduleOptions(blocking=Blocking(order="corner", rows=2, columns=8)),
        ScheduleOptions(areas=((1,), (2, 3))),
        ScheduleOptions(),
    ):
        assert options.oriented(straight) is options
        turned = options.oriented(swapped)
        assert turned.oriented(swapped) == options
        assert math.prod(turned.grid or (6, 1)) == 6


# -- unequal shares: blocks in proportion, and the shares that fit the speeds of a grid's ranks ----


positive = st.floats(0.01, 100)


# -- blocks ----------------------------------------------------------------------------------------


@example(1302, [2.0, 25.375, 0.5, 0.5], 4)
@given(st.integers(0, 50_000), st.lists(positive, min_size=1, max_size=64), st.sampled_from([1, 2, 4, 8]))
def test_blocks_get_their_due_to_a_step_and_cover_everything(extent: int, shares: list[float], step: int) -> None:
    starts = share_starts(extent, shares, step)
    assert (starts[0], starts[-1], len(starts)) == (0, extent, len(shares) + 1)
    dues = [extent * share / sum(shares) for share in shares]
    used = step if min(dues) >= step * (1 + 1e-9) else 1
    if min(dues) < step * (1 - 1e-9) or used == step:
        for due, (start, stop) in zip(dues, itertools.pairwise(starts), strict=True):
            assert due - used * (1 + 1e-9) < stop - start < due + 2 * used
        assert all(start % used == 0 for start in starts[:-1])


def test_edges_of_blocks_stand_on_16_byte_boundaries() -> None:
    for dtype, step in (("f64", 2), ("f32", 4), ("f16", 8)):
        problem = GemmProblem(1001, 999, 10, DType[dtype])
        rows, cols = grid_starts(problem, ProcessGrid(3, 2), (1, 2, 3.3), (1, 1.7))
        assert all(edge % step == 0 for edge in (*rows[:-1], *cols[:-1]))
        assert (rows[-1], cols[-1]) == (1001, 999)


def test_without_shares_blocks_are_equal() -> None:
    rows, cols = grid_starts(GemmProblem(101, 55, 10, DType.f64), ProcessGrid(2, 4), None, (1, 1, 1, 2))
    assert rows == tuple(block_starts(101, 2))
    assert cols == (0, 12, 22, 32, 55)


# -- the fit ---------------------------------------------------------------------------------------


def finish(speeds: np.ndarray, rows: tuple[float, ...], cols: tuple[float, ...]) -> np.ndarray:
    """When each rank finishes, where all of them together would need a time of 1."""
    return np.outer(rows, cols) / speeds * speeds.sum()


@given(st.lists(positive, min_size=1, max_size=8), st.lists(positive, min_size=1, max_size=8))
def test_speeds_of_rank_1_let_all_ranks_finish_together(rows: list[float], cols: list[float]) -> None:
    speeds = np.outer(rows, cols)
    fit = fit_shares(speeds)
    assert finish(speeds, fit.rows, fit.cols) == pytest.approx(np.ones(speeds.shape), rel=1e-9)
    assert fit.balance == pytest.approx(1.0, rel=1e-9)


@given(st.lists(positive, min_size=1, max_size=64))
def test_a_single_row_or_column_fits_any_speeds(speeds: list[float]) -> None:
    for shape in ((1, -1), (-1, 1)):
        assert fit_shares(np.array(speeds).reshape(shape)).balance == pytest.approx(1.0, rel=1e-9)


def best_possible(speeds: np.ndarray) -> float:
    """
    The largest (sum r)(sum c) / sum s under r_i c_j <= s_ij, by trying every corner.

    In logarithms the constraints are linear and what is maximised is convex, so the best is a corner: a
    spanning tree of constraints that hold with equality.
    """
    rows, cols = speeds.shape
    places = list(itertools.product(range(rows), range(cols)))
    best = 0.0
    for tree in itertools.combinations(places, rows + cols - 1):
        r, c = {0: 1.0}, {}
        for _ in tree:
            for i, j in tree:
                if i in r and j not in c:
                    c[j] = speeds[i, j] / r[i]
                elif j in c and i not in r:
                    r[i] = speeds[i, j] / c[j]
        if len(r) == rows and len(c) == cols:
            products = np.outer([r[i] for i in range(rows)], [c[j] for j in range(cols)])
            if (products <= speeds * (1 + 1e-12)).all():
                best = max(best, sum(r.values()) * sum(c.values()) / speeds.sum())
    return best


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from([(2, 2), (2, 3), (3, 2), (2, 4), (3, 3)]),
    st.lists(st.floats(0.2, 5), min_size=9, max_size=9),
)
def test_no_shares_are_more_than_five_percent_better(shape: tuple[int, int], values: list[float]) -> None:
    speeds = np.array(values[: shape[0] * shape[1]]).reshape(shape)
    fit = fit_shares(speeds)
    times = finish(speeds, fit.rows, fit.cols)
    assert fit.balance == pytest.approx(1 / times.max(), rel=1e-9)
    assert sum(fit.rows) == pytest.approx(1)
    assert sum(fit.cols) == pytest.approx(1)
    assert fit.balance >= best_possible(speeds) / 1.05


def test_one_slow_rank_of_four_holds_up_a_2x2_grid_but_not_a_1x4_one() -> None:
    slow = np.array([[1, 1], [1, 0.5]])
    assert fit_shares(slow).balance == pytest.approx(3 / 3.5)
    assert fit_shares(slow.reshape(1, 4)).balance == pytest.approx(1)


def test_speeds_have_to_be_positive() -> None:
    for wrong in (np.array([[1, 0]]), np.array([[1, np.nan]]), np.ones(3), np.ones((0, 2))):
        with pytest.raises(ParamError, match="not a grid of positive numbers"):
            fit_shares(wrong)


# -- heterogeneous ranks -----------------------------------------------------------------------------


HETEROGENEOUS = np.array([3.5, 5.0, 3.5, 7.0, 3.5, 5.0, 7.0, 3.5])
"""PARALiA's emulation of a heterogeneous node, TFLOP/s: 38 in all, 28 where the slowest sets the pace."""


@pytest.mark.parametrize("shape", [(2, 4), (4, 2), (1, 8), (8, 1)])
def test_the_order_of_ranks_makes_pairs_of_equals_the_columns_of_a_grid(shape: tuple[int, int]) -> None:
    grid = ProcessGrid(*shape)
    order, shares = arrange(range(8), HETEROGENEOUS.tolist(), grid)
    assert sorted(order) == list(range(8))
    assert shares == fit_shares(HETEROGENEOUS[list(order)].reshape(shape))
    assert shares.balance == pytest.approx(1)


def test_ranks_keep_their_numbers_and_equal_ones_their_order() -> None:
    assert arrange((7, 5, 3, 1), [1.0, 2.0, 1.0, 2.0], ProcessGrid(1, 4))[0] == (1, 5, 3, 7)


def test_by_the_model_shares_bring_38_of_38_tflop_per_s_and_equal_blocks_28() -> None:
    rates = {"f64": HETEROGENEOUS}
    base = Machine.uniform(8, link_gb_per_s=1e5, host_gb_per_s=1e5, latency_s=0)
    machine = Machine("mixed", "mixed", base.bandwidth_gb_per_s.copy(), base.latency_s.copy(), rates, base.memory_bytes)
    problem = GemmProblem(9120, 9120, 4096, DType.f64, reads_c=False)
    order, fit = arrange(range(8), HETEROGENEOUS.tolist(), ProcessGrid(2, 4))
    fitted = ScheduleOptions(
        scheduler="uncut", tile=512, grid=(2, 4), devices=order, row_shares=fit.rows, col_shares=fit.cols
    )
    reached = [
        problem.flops / plan(problem, Placement.parse("h,h,h"), 8, machine, options).predicted_s / 1e12
        for options in (ScheduleOptions(scheduler="uncut", tile=512, grid=(2, 4)), fitted)
    ]
    assert reached[0] == pytest.approx(28, rel=0.02)
    assert reached[1] == pytest.approx(38, rel=0.02)
