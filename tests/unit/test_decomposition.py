"""Blocks, tiles and the tile heuristic."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uncut_mpi.model.dtypes import MEASURED, DType
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.decomposition import (
    candidate_tiles,
    choose_tile,
    count_tiles,
    fitting_tile,
    grid_starts,
    slivers,
    tile_cost,
)
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.options import ScheduleOptions

LONG = 1e9  # a bound (s) that discards nothing


def square(extent: int) -> GemmProblem:
    return GemmProblem(extent, extent, extent, DType.f64)


def test_cost_is_the_sum_of_the_three_terms_of_the_paper() -> None:
    problem = GemmProblem(1000, 2048, 4096, DType.f64)
    tiles = np.array([512, 2048])
    # 512: 1000 has a remainder, one whole tile; 2048: 1000 is one short tile.
    first = 1 / 1 + 4 / ((1000 / 512) * 4 * 8) + 0.2 * 2048 / 512
    second = 0 + 4 / (1 * 1 * 2) + 0.2
    assert tile_cost(tiles, problem, 4, 2048) == pytest.approx([first, second], rel=1e-14)
    assert tile_cost(tiles, problem, 4, 1024) == pytest.approx([first - 0.4, second - 0.1], rel=1e-14)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(256, 3000),
    st.integers(256, 3000),
    st.integers(128, 3000),
    st.integers(1, 16),
    st.sampled_from([256, 2048]),
)
def test_the_tile_is_the_cheapest_of_all_candidates(m: int, n: int, k: int, ranks: int, tile_min: int) -> None:
    problem = GemmProblem(m, n, k, DType.f64)
    grid = ProcessGrid.most_square(ranks)
    least = min(math.ceil(m / grid.rows), math.ceil(n / grid.cols), k)
    tile = choose_tile(problem, grid, tile_min=tile_min, bound_s=LONG)
    if least < 128:
        assert tile == least
        return
    costs = {}
    for candidate in {*range(128, least + 1, 2), least}:  # 16-byte boundaries of f64, and all of the extent
        cost = ranks / math.prod(max(extent / candidate, 1.0) for extent in (m, n, k)) + 0.2 * tile_min / candidate
        for extent in (m, n, k):
            if extent % candidate and extent >= candidate:
                cost += 1 / (extent // candidate)
        costs[candidate] = cost
    assert costs[tile] == pytest.approx(min(costs.values()), rel=1e-12)


def test_the_heuristic_takes_2048_for_the_large_squares_of_the_paper() -> None:
    for extent in (8192, 16384):
        assert choose_tile(square(extent), ProcessGrid(2, 4), tile_min=2048, bound_s=LONG) == 2048


@pytest.mark.parametrize(("dtype", "step"), [("f64", 2), ("f32", 4), ("f16", 8), ("bf16", 8)])
def test_tiles_start_on_16_byte_boundaries(dtype: str, step: int) -> None:
    for extent in (1001, 1777, 3001):
        problem = GemmProblem(extent, extent, extent, DType[dtype])
        tile = choose_tile(problem, ProcessGrid(1, 3), tile_min=512, bound_s=LONG)
        assert tile % step == 0 or tile >= extent // 3


def test_a_smaller_t_min_gives_smaller_tiles() -> None:
    assert choose_tile(square(16384), ProcessGrid(2, 4), tile_min=128, bound_s=LONG) == 1024


def test_tiles_that_take_half_the_bound_to_issue_are_discarded() -> None:
    grid = ProcessGrid(2, 2)
    problem = GemmProblem(4096, 4096, 100, DType.f64)
    assert choose_tile(problem, grid, tile_min=2048, bound_s=LONG) == 100
    # 21×21 products of 100³ take 3.5 ms and more to issue, against a bound of 0.5 ms.
    chosen = choose_tile(problem, grid, tile_min=2048, bound_s=0.5e-3)
    assert 2048 // chosen <= 5
    # Nothing can be issued within the bound: one product per rank.
    assert choose_tile(problem, grid, tile_min=2048, bound_s=1e-6) == 2048


def test_copies_that_a_tile_takes_count_as_issue_time() -> None:
    grid = ProcessGrid(2, 2)
    one = choose_tile(square(4096), grid, tile_min=128, bound_s=6e-3, copies_per_tile=1)
    many = choose_tile(square(4096), grid, tile_min=128, bound_s=6e-3, copies_per_tile=64)
    assert one < many


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 300, 301), (10_000, 10_000, 1), (65536, 65536, 65536)])
def test_extreme_shapes_get_a_tile_that_makes_few_tasks(shape: tuple[int, int, int]) -> None:
    problem = GemmProblem(*shape, DType.f64)
    grid = ProcessGrid(2, 4)
    tile = choose_tile(problem, grid, tile_min=2048, bound_s=problem.flops / 4e14)
    rows, cols = (count_tiles(starts, tile) for starts in grid_starts(problem, grid, None, None))
    assert rows * cols * math.ceil(problem.k / tile) <= 32**3


# -- further tiles ---------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.integers(1, 16),
    st.integers(1, 12),
    st.sampled_from(MEASURED),
)
def test_candidates_are_distinct_aligned_and_start_with_the_heuristics_own(
    m: int, n: int, k: int, ranks: int, count: int, dtype: DType
) -> None:
    problem, grid, options = (
        GemmProblem(m, n, k, dtype),
        ProcessGrid.most_square(ranks),
        ScheduleOptions(scheduler="uncut"),
    )
    tiles = candidate_tiles(problem, grid, options, count)
    assert tiles[0] == choose_tile(problem, grid, tile_min=2048, bound_s=LONG)
    assert 1 <= len(tiles) <= count
    assert candidate_tiles(problem, grid, options, count + 1)[: len(tiles)] == tiles
    extents = [math.ceil(m / grid.rows), math.ceil(n / grid.cols), *([k] if k else [])]
    for tile in tiles[1:]:
        assert 128 <= tile <= max(extents) or tile == max(extents)
        assert tile * dtype.itemsize % 16 == 0 or tile in extents
    for at, tile in enumerate(tiles):
        assert all(abs(tile - other) > 0.05 * max(tile, other) for other in tiles[:at])
    costs = tile_cost(np.array(tiles[1:], np.int64), problem, grid.size, 2048)
    assert (np.diff(costs) >= 0).all()


def test_candidates_cut_the_extents_evenly_or_are_powers_of_two() -> None:
    tiles = candidate_tiles(square(12_000), ProcessGrid(2, 4), ScheduleOptions(scheduler="uncut"), 100)
    for parts in (1, 2, 3, 4, 6, 8):
        assert any(abs(tile - 6000 / parts) <= 0.1 * tile for tile in tiles), parts
    for power in (256, 512):  # larger ones leave short tiles of 12,000
        assert any(abs(tile - power) <= 0.1 * tile for tile in tiles), power
    assert {6000, 3000, 2000, 1000} <= set(tiles)  # these leave no short tiles
    assert len(tiles) < 20


def test_candidates_follow_the_largest_block() -> None:
    options = ScheduleOptions(scheduler="uncut", row_shares=(1, 3))
    tiles = candidate_tiles(GemmProblem(8000, 8000, 8000, DType.f64), ProcessGrid(2, 1), options, 100)
    assert max(tiles) == 8000
    wide = GemmProblem(403, 8000, 8000, DType.f64)  # blocks of 100 and 303 rows, in equal ones 202
    assert candidate_tiles(wide, ProcessGrid(2, 1), options, 1) == [303]
    assert any(abs(tile - 6000) <= 300 for tile in tiles)


def test_candidates_leave_out_what_takes_half_the_bound_to_issue() -> None:
    problem, grid = square(8192), ProcessGrid(2, 2)
    free, bounded = (
        candidate_tiles(problem, grid, ScheduleOptions(scheduler="uncut"), 100, bound_s=b) for b in (LONG, 5e-3)
    )
    assert min(free) < min(bounded)
    assert set(bounded[1:]) <= set(free)


def test_a_tile_asked_for_is_the_only_candidate() -> None:
    grid = ProcessGrid(2, 2)
    assert candidate_tiles(square(1000), grid, ScheduleOptions(scheduler="uncut", tile=300), 5) == [300]
    assert candidate_tiles(square(1000), grid, ScheduleOptions(scheduler="uncut", tile=3000), 5) == [1000]


@pytest.mark.parametrize(
    ("extent", "shares", "expected"),
    [
        (8192, (0.28, 0.25, 0.24, 0.23), (0, 2304, 4352, 6336, 8192)),  # blocks of 2,000 and less: steps of 64
        (16384, (0.28, 0.25, 0.24, 0.23), (0, 4608, 8704, 12672, 16384)),  # steps of 128
        (4096, (0.313, 0.249, 0.222, 0.216), (0, 1280, 2304, 3200, 4096)),
        (1024, (0.3, 0.7), (0, 306, 1024)),  # so small that steps of 64 would change the shares
    ],
)
def test_blocks_of_unequal_shares_end_at_even_places(extent, shares, expected) -> None:
    problem = GemmProblem(extent, extent, extent, DType.f64)
    assert grid_starts(problem, ProcessGrid(len(shares), 1), shares, None)[0] == expected


def test_candidates_leave_no_short_tiles() -> None:
    problem = square(8192)
    options = ScheduleOptions(scheduler="uncut", col_shares=(0.28, 0.25, 0.24, 0.23))
    tiles = candidate_tiles(problem, ProcessGrid(1, 4), options, 100)
    short = slivers(np.array(tiles), {8192, 2304})  # the smaller blocks are done earlier
    large = np.array(tiles) >= 512
    assert not short[large][1:].any()  # the first is the heuristic's own
    assert large.sum() > 3
    assert slivers(np.array([2000, 2048, 2240, 2304, 4000]), {2304}).tolist() == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("tile", "fitting"), [(2240, 2304), (2048, 2304), (2304, 2304), (500, 500), (1800, 1800), (700, 700)]
)
def test_a_tile_is_enlarged_until_it_leaves_no_short_ones(tile: int, fitting: int) -> None:
    problem = GemmProblem(2304, 2304, 2304, DType.f64)
    assert fitting_tile(problem, ProcessGrid(1, 1), ScheduleOptions(scheduler="uncut"), tile) == fitting
