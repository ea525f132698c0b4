"""
Sums that are the same whatever the plan (`ScheduleOptions.same_sums`): how C and k are cut, and who forms which tiles.

What a library's product gives depends on its shape, on how its operands lie, and on what was added up before it. Here
all of that follows from m, n, k, types and ops alone. C is cut into tiles, k into k-blocks. Each product is of a tile
and a k-block, between panels of one shape, and tiles are summed in the order of k. Ranks, layouts and places say only
who forms which tile, and when.
"""

from __future__ import annotations

import itertools
from typing import Final

from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.grid import block_starts
from uncut_mpi.planning.options import MOST_SLOTS, USUAL_SLOTS, Blocking
from uncut_mpi.planning.partition import Partition

_PARTS: Final = 8
_LEAST_EDGE: Final = 1024
"""Rows and columns of C are cut into so many parts, or fewer that have so many elements."""

_MOST_PARTS: Final = 32
"""Longer tiles and k-blocks rather than more of them, so that schedules stay small."""

_EDGE: Final = 128
_DEPTH: Final = 256
"""Edges of tiles, and k-blocks, are multiples of so many elements: the latter begin at whole multiples of alignment."""


def grid_of_sums(problem: GemmProblem, asked: Blocking) -> tuple[int, int, int]:
    """Return rows and columns of tiles of C, and the length of k-blocks: as asked for, else by the extents alone."""
    deepest = 8192 if problem.arithmetic.sums_wider else 2048  # and tiles of at most twice as much
    rows, cols = (
        _part(extent, max(min(_PARTS, -(-extent // _LEAST_EDGE)), -(-extent // (2 * deepest))), _EDGE)
        for extent in (problem.m, problem.n)
    )
    depth = _part(asked.block or problem.k, 1 if asked.block else -(-problem.k // deepest), _DEPTH)
    return asked.c_rows or rows, asked.c_cols or cols, depth


def _part(extent: int, parts: int, step: int) -> int:
    return -(-extent // (step * min(parts, _MOST_PARTS))) * step


def dealt_tiles(problem: GemmProblem, places: int) -> tuple[list[Partition], list[tuple[int, int]]]:
    """
    Return which tile each place forms in each turn, and for how many k-blocks of A and B it may have room.

    Places get as many tiles each, row by row of the caller's C, so that they stay with some rows. With the most room
    these rows' k-blocks come once, and so do those of all columns. With less the rows' alone do, or none.
    """
    assert problem.sums is not None
    rows, cols, depth = problem.sums
    down, along = (
        [range(at, min(at + edge, extent)) for at in range(0, extent, edge)]
        for extent, edge in ((problem.m, rows), (problem.n, cols))
    )
    lines = [[(of_rows, of_cols) for of_cols in along] for of_rows in down]
    if problem.swapped:
        lines = [[*line] for line in zip(*lines, strict=True)]
    tiles = [tile for line in lines for tile in line]
    edges = block_starts(len(tiles), places)
    queues = [tiles[first:last] for first, last in itertools.pairwise(edges)]
    turns = itertools.zip_longest(*queues, fillvalue=(range(0), range(0)))
    k_blocks = min(-(-problem.k // depth), MOST_SLOTS)
    across = min(len(lines[0]), len(queues[0]))
    few = min(USUAL_SLOTS, k_blocks * across)
    slots = [
        (k_blocks, min(k_blocks * across, MOST_SLOTS)),
        (k_blocks, few),
        *((one, one) for one in (few, 2, 1) if one <= few),
    ]
    shape = (places, 1)
    if problem.swapped:
        slots, shape = [one[::-1] for one in slots], shape[::-1]
    return [Partition(one, shape) for one in turns], slots
