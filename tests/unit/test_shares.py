"""Unequal shares: blocks in proportion, and the shares that fit the speeds of a grid's ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.decomposition import Decomposition
from uncut_mpi.planning.grid import ProcessGrid, block_starts, share_starts
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.shares import arrange, fit_shares

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
        made = Decomposition.make(problem, ProcessGrid(3, 2), 64, (1, 2, 3.3), (1, 1.7))
        assert all(edge % step == 0 for edge in (*made.row_starts[:-1], *made.col_starts[:-1]))
        assert (made.row_starts[-1], made.col_starts[-1]) == (1001, 999)


def test_without_shares_blocks_are_equal() -> None:
    made = Decomposition.make(GemmProblem(101, 55, 10, DType.f64), ProcessGrid(2, 4), 64, None, (1, 1, 1, 2))
    assert made.row_starts == tuple(block_starts(101, 2))
    assert made.col_starts == (0, 12, 22, 32, 55)


def test_each_block_needs_one_share() -> None:
    with pytest.raises(ParamError, match="3 row_shares were given, grid 2x4 has 2 rows"):
        Decomposition.make(GemmProblem(9, 9, 9, DType.f64), ProcessGrid(2, 4), 4, (1, 1, 1))
    with pytest.raises(ParamError, match="1 col_shares were given, grid 2x4 has 4 cols"):
        Decomposition.make(GemmProblem(9, 9, 9, DType.f64), ProcessGrid(2, 4), 4, None, (1,))


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
