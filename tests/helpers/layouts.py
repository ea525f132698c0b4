"""Matrices in parts: layouts to test with, and where a schedule has the caller's."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

from uncut_mpi.model.locations import Location
from uncut_mpi.model.parts import BoundLayout, Part
from uncut_mpi.planning.schedule import Matrix, Schedule

Rect = tuple[slice, slice]


def user_places(schedule: Schedule, matrix: Matrix) -> list[tuple[int, Rect, Rect]]:
    """Return where parts of a matrix are: the buffer, the rectangle there and the one of the matrix."""
    found = []
    for at, turned, row, col, rows, cols, top, left in schedule.pieces.tolist():
        if schedule.buffers["matrix"][at] == matrix:
            assert not turned
            there = slice(row, row + rows), slice(col, col + cols)
            found.append((at, there, (slice(top, top + rows), slice(left, left + cols))))
    return found


def grid_layout(
    row_cuts: Sequence[int],
    col_cuts: Sequence[int],
    ranks: Sequence[int],
    where: Callable[[int], Location] = Location.device,
    more: Callable[[], int] = lambda: 0,
) -> BoundLayout:
    """Return blocks between cuts, of ranks row by row; leading dimensions are `more` than the least."""
    places = itertools.product(itertools.pairwise(row_cuts), itertools.pairwise(col_cuts))
    parts = [
        Part(rows, cols, where(rank), "F", rows[1] - rows[0] + more())
        for (rows, cols), rank in zip(places, ranks, strict=False)
        if rows[0] < rows[1] and cols[0] < cols[1]
    ]
    return BoundLayout((row_cuts[-1], col_cuts[-1]), tuple(parts))


def even(extent: int, count: int) -> list[int]:
    """Return where so many equal parts begin, and the extent."""
    return [extent * part // count for part in range(count + 1)]


def random_layout(rng: random.Random, shape: tuple[int, int], num_ranks: int) -> BoundLayout:
    """Return a layout of any kind: in memories of all kinds, with uneven parts, empty ones and leading dimensions."""

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
        parts = [Part((0, rows), (0, cols), where(rank), "F", rows + rng.randint(0, 3)) for rank in holders]
        return BoundLayout(shape, tuple(parts))
    down = {"rows": num_ranks, "cols": 1}.get(kind) or rng.choice(
        [one for one in range(1, num_ranks + 1) if num_ranks % one == 0]
    )
    row_cuts, col_cuts = cuts(rows, down), cuts(cols, num_ranks // down)
    return grid_layout(row_cuts, col_cuts, ranks, where, lambda: rng.randint(0, 3))
