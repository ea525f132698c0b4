"""Matrices in parts: layouts to test with, and where a schedule has the caller's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.part_of_c import OTHER, PartOfC
from uncut_mpi.model.parts import BoundLayout, Order, Part, Rectangle
from uncut_mpi.model.placement import MATRICES, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.schedule import Matrix, Schedule

Rect = tuple[slice, slice]


def user_parts(schedule: Schedule, matrix: Matrix, memory: Sequence[np.ndarray]) -> list[tuple[int, np.ndarray, Rect]]:
    """Return the parts of a matrix: the buffer of each, what it holds as it is in the matrix, and where that is."""
    found = []
    for at, turned, row, col, rows, cols, top, left in schedule.pieces.tolist():
        if schedule.buffers["matrix"][at] == matrix:
            held = memory[at][row : row + rows, col : col + cols]
            held = held.T if turned else held
            found.append((at, held, (slice(top, top + held.shape[0]), slice(left, left + held.shape[1]))))
    return found


def blocks_of(problem: GemmProblem, matrix: Matrix) -> tuple[Rectangle, ...]:
    """Return rows and columns of the blocks of a matrix that exist, as it is stored: of a plain one just one."""
    if not problem.batch:
        rows, cols = problem.shape_of(matrix)
        return (((0, rows), (0, cols)),)
    every = zip(*problem.batch, strict=True)
    m, n, k = ([*itertools.pairwise(itertools.accumulate(extents, initial=0))] for extents in every)
    down, along, trans = ((m, k, problem.trans_a), (k, n, problem.trans_b), (m, n, "N"))[matrix]
    return tuple(zip(down, along, strict=True) if trans == "N" else zip(along, down, strict=True))


def diagonal(layouts: Sequence[BoundLayout]) -> BoundLayout:
    """Return the layout of a matrix that has those of others as the blocks on its diagonal, and nothing else."""
    parts, top, left = list[Part](), 0, 0
    for one in layouts:
        parts += [part.moved(top, left) for part in one.parts]
        top, left = top + one.shape[0], left + one.shape[1]
    return BoundLayout((top, left), tuple(parts), blocks=tuple(one.shape for one in layouts))


def grid_layout(
    row_cuts: Sequence[int],
    col_cuts: Sequence[int],
    ranks: Sequence[int],
    where: Callable[[int], Location] = Location.device,
    stored: Callable[[Part], Part] = lambda part: part,
) -> BoundLayout:
    """Return blocks between cuts, of ranks row by row; `stored` may give them another order and leading dimension."""
    places = itertools.product(itertools.pairwise(row_cuts), itertools.pairwise(col_cuts))
    parts = [
        stored(Part(rows, cols, where(rank)))
        for (rows, cols), rank in zip(places, ranks, strict=False)
        if rows[0] < rows[1] and cols[0] < cols[1]
    ]
    return BoundLayout((row_cuts[-1], col_cuts[-1]), tuple(parts))


def even(extent: int, count: int) -> list[int]:
    """Return where so many equal parts begin, and the extent."""
    return [extent * part // count for part in range(count + 1)]


def random_layout(
    rng: random.Random, shape: tuple[int, int], num_ranks: int, orders: Sequence[Order] = ("F",)
) -> BoundLayout:
    """Return a layout of any kind: in memories of all kinds, with uneven parts, empty ones and leading dimensions."""

    def stored(part: Part) -> Part:
        order = rng.choice(orders) if len(orders) > 1 else orders[0]
        return Part(part.rows, part.cols, part.location, order, part.shape["FC".index(order)] + rng.randint(0, 3))

    def where(rank: int) -> Location:
        return rng.choice((*[Location.device(rank)] * 3, Location.host(rank), Location.host()))

    def cuts(extent: int, count: int) -> list[int]:
        return [0, *sorted(rng.randint(0, extent) for _ in range(count - 1)), extent]

    rows, cols = shape
    ranks = rng.sample(range(num_ranks), num_ranks)
    kind = rng.choice(("whole", "rows", "cols", "blocks", "replicated"))
    if rows * cols == 0:
        return BoundLayout(shape, ())
    if kind == "whole":
        return BoundLayout.whole(shape, where(ranks[0]))
    if kind == "replicated":
        holders = ranks[: rng.randint(1, num_ranks)]
        return BoundLayout(shape, tuple(stored(Part((0, rows), (0, cols), where(rank))) for rank in holders))
    down = {"rows": num_ranks, "cols": 1}.get(kind) or rng.choice(
        [one for one in range(1, num_ranks + 1) if num_ranks % one == 0]
    )
    row_cuts, col_cuts = cuts(rows, down), cuts(cols, num_ranks // down)
    return grid_layout(row_cuts, col_cuts, ranks, where, stored)


def random_part(rng: random.Random, rows: int, cols: int) -> PartOfC:
    """Return some cells of a random grid over a C that has elements, or what of them is in some triangle."""
    edges = [sorted({0, extent, *(rng.randrange(extent + 1) for _ in range(2))}) for extent in (rows, cols)]
    cells = [*itertools.product(*map(itertools.pairwise, edges))]
    some = tuple(rng.sample(cells, rng.randint(1, len(cells))))
    return PartOfC(some, rng.choice([*OTHER]), rng.choice((0, rng.randint(-rows, cols))))


def random_batch(rng: random.Random, ranks: int, dtype: DType, most: int = 130) -> tuple[GemmProblem, Placement]:
    """Return a batch of any products, alike or not, stacked or each laid out for itself."""
    count = rng.choice((1, 2, 3, 12))
    shapes = [tuple(rng.choice((0, 1, 5, most // 3, most)) for _ in range(3)) for _ in range(count)]
    shapes = shapes if rng.random() < 0.6 else [shapes[0]] * count
    trans = {f"trans_{one}": rng.choice("NT") for one in "ab"}
    about = {"reads_c": rng.random() < 0.5, "scales_only": rng.random() < 0.1, **trans}
    problem = batch_of(shapes, dtype, **about)
    orders: tuple[Order, ...] = rng.choice((("F",), ("F",), ("F", "C")))
    alike = rng.choice((None, Location.host(), Location.device(0)))

    def layout_of(shape: tuple[int, int]) -> BoundLayout:
        return random_layout(rng, shape, ranks, orders) if alike is None else BoundLayout.whole(shape, alike)

    if len({*shapes}) == 1 and rng.random() < 0.7:
        return problem, Placement(*(_stacked(rng, its, ranks) for its in _shapes_of_blocks(problem)))
    return problem, batch_placement(problem, layout_of)


def batch_of(shapes: Sequence[tuple[int, ...]], dtype: DType = DType.f64, **about: Any) -> GemmProblem:
    """Return the problem of some products (m, n, k)."""
    m, n, k = map(sum, zip(*shapes, strict=True))
    return GemmProblem(m, n, k, dtype, batch=tuple(shapes), **about)


def batch_placement(problem: GemmProblem, layout_of: Callable[[Any], BoundLayout]) -> Placement:
    """Return where a batch lies, by the shape of each block of each matrix."""
    return Placement(*(diagonal([layout_of(one) for one in its]) for its in _shapes_of_blocks(problem)))


def _shapes_of_blocks(problem: GemmProblem) -> list[list[tuple[int, ...]]]:
    return [[tuple(stop - start for start, stop in one) for one in blocks_of(problem, matrix)] for matrix in MATRICES]


def _stacked(rng: random.Random, blocks: list[tuple[int, ...]], ranks: int) -> BoundLayout:
    """Return a layout of blocks of one shape of which several, or single ones, lie one after another in each memory."""
    (rows, cols), count = blocks[0], len(blocks)
    edges = [0, *sorted(rng.choices(range(count + 1), k=rng.randint(0, 3))), count]
    where = [*map(Location.device, range(ranks)), Location.host(), Location.host(rng.randrange(ranks))]
    parts = [
        Part((first * rows, stop * rows), (first * cols, stop * cols), one, "F", rows + rng.randint(0, 3), stop - first)
        for first, stop in itertools.pairwise(edges)
        for one in rng.sample(where, rng.choice((1, 1, 2)))
        if first < stop and rows and cols
    ]
    return BoundLayout((rows * count, cols * count), tuple(parts), blocks=blocks)
