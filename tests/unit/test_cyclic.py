"""Cyclic blocks: ScaLAPACK's index functions, orders, layouts, and how products and copies are cut by them."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from uncut_mpi.errors import ParamError
from uncut_mpi.model.cyclic import CyclicOrder, indxg2l, indxg2p, indxl2g, numroc
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout, LocalArray
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.parts import BoundLayout
from uncut_mpi.model.places import Places
from uncut_mpi.model.positions import (
    LINES_OF_A_PIECE,
    cost_of_cuts,
    orders_for_copy,
    orders_for_product,
    picked,
    pieces_in,
    reordered,
)
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import Planned, plan
from uncut_mpi.planning.verify import verify


def dealt(extent: int, block: int, parts: int, source: int) -> list[list[int]]:
    """Deal indices block by block, as the definition says it; return those of each process."""
    found: list[list[int]] = [[] for _ in range(parts)]
    for number, start in enumerate(range(0, extent, block)):
        found[(source + number) % parts] += range(start, min(extent, start + block))
    return found


@pytest.mark.parametrize(("block", "parts"), [*itertools.product((1, 2, 3, 7, 64), (1, 2, 3, 5))])
def test_index_functions_are_those_of_the_definition(block: int, parts: int) -> None:
    for extent, source in itertools.product((0, 1, 2, 5, 6, 7, 13, 64, 65, 200), range(parts)):
        table = dealt(extent, block, parts, source)
        assert [numroc(extent, block, one, source, parts) for one in range(parts)] == [*map(len, table)]
        for process, indices in enumerate(table):
            for place, index in enumerate(indices):
                assert indxg2p(index, block, source, parts) == process
                assert indxg2l(index, block, parts) == place
                assert indxl2g(place, block, process, source, parts) == index


@pytest.mark.parametrize("grid_order", ["R", "C"])
def test_where_an_element_is_is_what_the_index_functions_say(grid_order: str) -> None:
    (mb, nb), (p, q), (rsrc, csrc), shape = (3, 4), (2, 3), (1, 2), (20, 31)
    layout = Layout.block_cyclic(mb, nb, (p, q), source=(rsrc, csrc), grid_order=grid_order)
    for row, col in itertools.product(range(shape[0]), range(shape[1])):
        down, along = indxg2p(row, mb, rsrc, p), indxg2p(col, nb, csrc, q)
        rank = down * q + along if grid_order == "R" else along * p + down
        assert layout.locate(shape, row, col) == (rank, indxg2l(row, mb, p), indxg2l(col, nb, q))
    for row, col in ((20, 0), (0, 31), (-1, 0)):
        with pytest.raises(ParamError, match=f"20x31 has no row {row} with column {col}"):
            layout.locate(shape, row, col)


def random_order(rng: random.Random) -> CyclicOrder:
    parts = rng.randint(1, 5)
    return CyclicOrder(rng.randint(0, 40), rng.randint(1, 7), parts, rng.randrange(parts))


@pytest.mark.parametrize("rows", [[], [0], [4], [2, 3, 4], [0, 1, 2, 3, 4], [1, 3], [3, 2], [4, 0]])
@pytest.mark.parametrize("cols", [[], [3], [0, 1, 2, 3], [2, 1, 0], [0, 2]])
def test_what_is_picked_is_what_index_arrays_pick_and_no_copy_where_they_are_runs(
    rows: list[int], cols: list[int]
) -> None:
    data = np.arange(20).reshape(5, 4)
    where = np.array(rows, np.int64), np.array(cols, np.int64)
    assert np.array_equal(data[picked(*where)], data[np.ix_(*where)])
    are_runs = all(one == [*range(one[0], one[0] + len(one))] for one in (rows, cols) if one)
    assert (data[picked(*where)].base is data.base) == are_runs


def test_an_order_has_one_process_behind_the_other_and_so_has_that_of_a_window() -> None:
    rng = random.Random(1)
    windows = 0
    for _ in range(2000):
        order = random_order(rng)
        table = dealt(order.extent, order.block, order.num_parts, order.source)
        assert order.indices(np.arange(order.extent)).tolist() == [*itertools.chain.from_iterable(table)]
        assert order.position(order.indices(np.arange(order.extent))).tolist() == [*range(order.extent)]
        assert not order.is_plain or order.indices(np.arange(order.extent)).tolist() == [*range(order.extent)]
        start = rng.randint(0, order.extent)
        stop = rng.randint(start, order.extent)
        window = order.window(start, stop)
        within = [[index - start for index in one if start <= index < stop] for one in table]
        assert window.indices(np.arange(window.extent)).tolist() == [*itertools.chain.from_iterable(within)]
        assert window.counts == (*map(len, within),)
        edges = [*itertools.accumulate(order.counts, initial=0)]
        for extent, mine in zip(itertools.pairwise(edges), within, strict=True):
            first, last = order.within(extent, start, stop)
            assert (order.indices(np.arange(order.extent))[first:last] - start).tolist() == mine
            first, last = order.in_window(extent, start, stop)
            assert window.indices(np.arange(window.extent))[first:last].tolist() == mine
            windows += bool(mine) and window.skip > 0
    assert windows > 500


def random_cyclic(rng: random.Random, ranks: int, *, named: bool = True) -> Layout:
    down = rng.choice([one for one in range(1, ranks + 1) if ranks % one == 0])
    grid = down, ranks // down
    source = rng.randrange(grid[0]), rng.randrange(grid[1])
    order, block = rng.choice("RC"), (rng.randint(1, 6), rng.randint(1, 6))
    names = rng.choice((None, tuple(rng.sample(range(ranks), ranks)))) if named else None
    return Layout.block_cyclic(*block, grid, source=source, grid_order="C" if order == "C" else "R", ranks=names)


def test_a_layout_deals_rows_and_columns_and_says_so_in_one_word() -> None:
    rng = random.Random(2)
    for _ in range(500):
        layout, shape = random_cyclic(rng, rng.choice((1, 2, 4, 6))), (rng.randint(0, 20), rng.randint(0, 20))
        cyclic = layout.cyclic
        assert cyclic is not None
        assert Layout.parse(str(layout)) == layout
        assert str(layout).isascii()
        assert " " not in str(layout)
        height, width = cyclic.grid
        rows = dealt(shape[0], cyclic.block[0], height, cyclic.source[0])
        cols = dealt(shape[1], cyclic.block[1], width, cyclic.source[1])
        for number in range(height * width):
            row, col = divmod(number, width) if cyclic.grid_order == "R" else divmod(number, height)[::-1]
            rank = number if layout.ranks is None else layout.ranks[number]
            found = layout.indices(shape, rank)
            assert [one.tolist() for one in found] == [rows[row], cols[col]]
            assert layout.local_shape(shape, rank) == (len(rows[row]), len(cols[col]))
            turned = layout.transposed.indices(shape[::-1], rank)
            assert [one.tolist() for one in turned] == [cols[col], rows[row]]
        assert layout.transposed.transposed == layout
        top, left = rng.randint(0, shape[0]), rng.randint(0, shape[1])
        part = layout.sliced(shape, (top, shape[0]), (left, shape[1]))
        assert Layout.parse(str(part)) == part
        for rank in layout.holders():
            own = part.indices((shape[0] - top, shape[1] - left), rank)
            all_of = layout.indices(shape, rank)
            assert (own[0] + top).tolist() == [row for row in all_of[0] if row >= top]
            assert (own[1] + left).tolist() == [col for col in all_of[1] if col >= left]


def test_words_of_layouts() -> None:
    layout = Layout.block_cyclic(64, 32, (2, 3), source=(1, 2), grid_order="C", ranks=[5, 4, 3, 2, 1, 0])
    assert str(layout) == "block_cyclic(64,32;2,3;source=1,2;order=C;ranks=5,4,3,2,1,0)"
    assert str(Layout.block_cyclic(8, 8, (2, 2))) == "block_cyclic(8,8;2,2)"
    wrong = (
        "8,8",
        "8;2,2",
        "8,8;2,2;order=R",
        "8,8;2,2;source=1",
        "8,8;2,2;source=1,1;source=1,1",
        "0,8;2,2",
        "a,8;2,2",
    )
    for text in wrong:
        with pytest.raises(ParamError):
            Layout.parse(f"block_cyclic({text})")


def test_a_descriptor_says_shape_and_layout() -> None:
    layout, shape = Layout.from_descriptor((1, 7, 100, 50, 8, 4, 1, 0, 60), (2, 2), grid_order="C")
    assert shape == (100, 50)
    assert layout == Layout.block_cyclic(8, 4, (2, 2), source=(1, 0), grid_order="C")
    for desc in ((1, 0, 100, 50, 8, 4, 1, 0), (2, 0, 100, 50, 8, 4, 1, 0, 60), (1, 0, 100, 50, 0, 4, 1, 0, 60)):
        with pytest.raises(ParamError):
            Layout.from_descriptor(desc, (2, 2))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"grid": (2, 0)}, "extents from 1 on"),
        ({"mb": 0}, "extents from 1 on"),
        ({"grid": (2,)}, "two whole numbers"),
        ({"source": (2, 0)}, "source = .* is not in a grid of 2×2"),
        ({"grid_order": "F"}, "grid_order = 'F'"),
        ({"ranks": (0, 1, 2)}, "has a grid for 4 parts and names 3 ranks"),
        ({"ranks": (0, 1, 2, 2)}, "a rank more than once"),
        ({"mb": 1.5}, "whole number"),
    ],
)
def test_what_is_no_layout_is_refused(given: dict[str, Any], words: str) -> None:
    asked: dict[str, Any] = {"mb": 4, "nb": 4, "grid": (2, 2), **given}
    with pytest.raises(ParamError, match=words):
        Layout.block_cyclic(**asked)


def test_a_grid_that_does_not_fit_the_ranks_is_refused() -> None:
    with pytest.raises(ParamError, match="has 4 parts for 3 ranks: pass a grid of as many processes, or ranks="):
        Layout.block_cyclic(4, 4, (2, 2)).rectangles((10, 10), 3)
    assert Layout.block_cyclic(4, 4, (2, 2), ranks=(4, 0, 1, 3)).rectangles((10, 10), 5)[2] == ((0, 0), (0, 0))


def bound(layout: Layout, shape: tuple[int, int], ranks: int) -> BoundLayout:
    return layout.bind(shape, [LocalArray(Location.device(rank)) for rank in range(ranks)])


def element_at(layout: BoundLayout, row: int, col: int) -> tuple[int, int, int]:
    """Return who holds an element, and where in its array."""
    places = [
        at if order is None else int(order.position(at)) for at, order in zip((row, col), layout.orders, strict=True)
    ]
    ((rank, found),) = [
        (part.location.rank or 0, (places[0] - part.rows[0], places[1] - part.cols[0]))
        for part in layout.parts
        if part.rows[0] <= places[0] < part.rows[1] and part.cols[0] <= places[1] < part.cols[1]
    ]
    return rank, *found


def test_pieces_in_other_orders_have_every_element_where_its_holder_has_it() -> None:
    rng = random.Random(3)
    cut = 0
    for _ in range(60):
        ranks, shape = rng.choice((1, 2, 4, 6)), (rng.randint(1, 20), rng.randint(1, 20))
        one, other = (
            bound(rng.choice((random_cyclic(rng, ranks), Layout.rows(), Layout.cols())), shape, ranks) for _ in range(2)
        )
        found = np.full((*shape, 3), -1)
        rows, cols = (
            np.arange(extent) if order is None else order.indices(np.arange(order.extent))
            for extent, order in zip(shape, other.orders, strict=True)
        )
        pieces = [*pieces_in(one, other.orders)]
        for piece in pieces:
            part, rank = piece.part, piece.part.location.rank
            for row, col in itertools.product(range(*part.rows), range(*part.cols)):
                local = piece.row + row - part.rows[0], piece.col + col - part.cols[0]
                found[rows[row], cols[col]] = rank, *local
        wanted = [[element_at(one, row, col) for col in range(shape[1])] for row in range(shape[0])]
        assert np.array_equal(found, np.array(wanted))
        assert len(pieces) == len(reordered(one, other.orders).parts)
        cut += len(pieces) > len(one.parts)
    assert cut > 20


def test_matrices_that_are_dealt_alike_are_not_cut() -> None:
    layout = Layout.block_cyclic(64, 64, (2, 4), source=(1, 3))
    a, b, c = (bound(layout, shape, 8) for shape in ((1000, 900), (900, 700), (1000, 700)))
    orders = orders_for_product(a, b, c, "N", "N")
    # k is dealt to 4 columns of ranks in A and to 2 rows of them in B, so one of the two is cut along it.
    assert orders[2] == c.orders
    assert len(reordered(c, orders[2]).parts) == 8
    square = Layout.block_cyclic(64, 64, (2, 2))
    a, b, c = (bound(square, shape, 4) for shape in ((1000, 900), (900, 700), (1000, 700)))
    orders = orders_for_product(a, b, c, "N", "N")
    assert orders == (a.orders, b.orders, c.orders)
    turned = orders_for_product(bound(square, (900, 1000), 4), b, c, "T", "N")
    assert turned[0] == bound(square, (900, 1000), 4).orders
    assert orders_for_copy(a, bound(square, (1000, 900), 4)) == a.orders


def test_cuts_cost_by_pieces_and_by_the_lines_that_they_make() -> None:
    cyclic = bound(Layout.block_cyclic(64, 64, (2, 1)), (6400, 300), 2)
    rows, cols = cyclic.orders
    assert cost_of_cuts(cyclic, (rows, cols)) == 2 * (LINES_OF_A_PIECE + 300)
    # Of 50 runs of rows on each rank all columns are lines of their own; of runs of columns none is shorter.
    assert cost_of_cuts(cyclic, (None, cols)) == 2 * (50 * LINES_OF_A_PIECE + 50 * 300)
    turned = bound(Layout.block_cyclic(64, 64, (1, 2)), (300, 6400), 2)
    assert cost_of_cuts(turned, (turned.orders[0], None)) == 2 * (50 * LINES_OF_A_PIECE + 3200)


def test_orders_are_those_whose_cuts_cost_least() -> None:
    shape = 6400, 6400
    cyclic, whole = (bound(layout, shape, 4) for layout in (Layout.block_cyclic(64, 64, (2, 2)), Layout.whole(0)))
    # Rather A and B are cut than C, which would be formed elsewhere.
    assert orders_for_product(cyclic, cyclic, whole, "N", "N")[2] == (None, None)
    # Of k the columns of A are cut, not the rows of B.
    flat = bound(Layout.block_cyclic(64, 64, (1, 4)), shape, 4)
    assert orders_for_product(flat, flat, flat, "N", "N")[0][1] is None
    rows = bound(Layout.rows(), shape, 4)
    both = orders_for_copy(cyclic, rows)
    ways = itertools.product((None, cyclic.orders[0]), (None, cyclic.orders[1]))
    assert cost_of_cuts(cyclic, both) + cost_of_cuts(rows, both) == min(
        cost_of_cuts(cyclic, way) + cost_of_cuts(rows, way) for way in ways
    )


# -- plans of block-cyclic matrices beside those of blocks -----------------------------------------


def planned(word: str, ranks: int, dtype: DType) -> Planned:
    problem = GemmProblem(8192, 8192, 8192, dtype)
    placement = Places.parse(f"{word},{word},{word}").bind(problem, ranks)
    return plan(problem, placement, ranks, load_machine("h200-4x").subset(range(ranks)), ScheduleOptions())


@pytest.mark.parametrize(
    ("ranks", "along", "dtype"), [(2, "cols", DType.bf16), (4, "cols", DType.f64), (4, "rows", DType.bf16)]
)
def test_cyclic_blocks_are_expected_to_take_little_longer_than_one_block_each(
    ranks: int, along: str, dtype: DType
) -> None:
    """Runs of a matrix are handed on together, so that the copies of a lane are one (`csrc/packing.hpp`)."""
    usual = planned(along, ranks, dtype)
    grid = f"1,{ranks}" if along == "cols" else f"{ranks},1"
    for block in (64, 256):
        made = planned(f"block_cyclic({block},{block};{grid})", ranks, dtype)
        assert made.predicted_s < 1.1 * usual.predicted_s, (block, made.predicted_s, usual.predicted_s)
    verify(made.schedule)
