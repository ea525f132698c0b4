"""Process grids and blocks."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from uncut_mpi.errors import ParamError
from uncut_mpi.planning.grid import ProcessGrid, block_starts


@pytest.mark.parametrize(
    ("ranks", "shape"),
    [
        (1, (1, 1)),
        (2, (1, 2)),
        (4, (2, 2)),
        (6, (2, 3)),
        (7, (1, 7)),
        (8, (2, 4)),
        (12, (3, 4)),
        (16, (4, 4)),
        (61, (1, 61)),
    ],
)
def test_default_grid_is_the_most_square_factor_pair(ranks: int, shape: tuple[int, int]) -> None:
    grid = ProcessGrid.most_square(ranks)
    assert (grid.rows, grid.cols) == shape


@given(st.integers(1, 64))
def test_default_grid_uses_all_ranks_and_no_pair_is_nearer_to_a_square(ranks: int) -> None:
    grid = ProcessGrid.most_square(ranks)
    assert grid.size == ranks
    assert grid.rows <= grid.cols
    for rows in range(1, ranks + 1):
        if ranks % rows == 0 and rows <= ranks // rows:
            assert rows <= grid.rows


@given(st.integers(1, 8), st.integers(1, 8))
def test_ranks_are_numbered_row_by_row(rows: int, cols: int) -> None:
    grid = ProcessGrid(rows, cols)
    places = list(itertools.product(range(rows), range(cols)))
    assert [grid.position(rank) for rank in range(grid.size)] == places
    assert [grid.rank(*place) for place in places] == list(range(grid.size))


def test_an_explicit_grid_may_leave_ranks_over_but_not_need_more() -> None:
    assert ProcessGrid.choose(8, (1, 5)) == ProcessGrid(1, 5)
    assert ProcessGrid.choose(8, None) == ProcessGrid(2, 4)
    with pytest.raises(ParamError, match="grid 3x3 has 9 places, but there are 8 ranks"):
        ProcessGrid.choose(8, (3, 3))
    with pytest.raises(ParamError, match="below 1"):
        ProcessGrid(0, 4)
    with pytest.raises(ParamError, match="0 ranks"):
        ProcessGrid.most_square(0)


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_blocks_are_contiguous_cover_everything_and_put_the_larger_ones_first(extent: int, blocks: int) -> None:
    starts = block_starts(extent, blocks)
    sizes = [stop - start for start, stop in itertools.pairwise(starts)]
    assert starts[0] == 0
    assert starts[-1] == extent
    assert len(sizes) == blocks
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
