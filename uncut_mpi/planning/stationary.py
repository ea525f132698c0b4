"""
Process grids on which one matrix stays where it is: what a product of matrices in parts moves least by.

A rank computes what the part that it holds takes part in. C stays: its holders form their own rows and columns. A
stays: each holder multiplies its rows and its part of k by all columns of B, and k is split over the holders of a row.
B stays likewise. They are grids as any others, with the parts' extents as shares, of the column-major problem.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, NamedTuple

from uncut_mpi.model.placement import Matrix, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.grid import ProcessGrid


class Stationary(NamedTuple):
    """
    A grid on which a matrix stays.

    Attributes
    ----------
    matrix : Matrix
        Which one.
    splits : int
        Parts of k.
    changes : dict
        What is to be changed of `ScheduleOptions` besides: the grid, shares and devices. These are in the order in
        which they fill the grids of all parts of k. Shares are the extents of what each has, None where there is one.
    """

    matrix: Matrix
    splits: int
    changes: dict[str, Any]


def stationary_grids(problem: GemmProblem, placement: Placement) -> list[Stationary]:
    """Return the grids of matrices in parts, C first, each of whose parts another rank holds."""
    found = []
    for matrix in (Matrix.C, Matrix.A, Matrix.B):
        extents = _extents(problem, placement, matrix)
        if extents is not None:
            found.append(_grid(problem, matrix, *extents))
    return found


def _extents(
    problem: GemmProblem, placement: Placement, matrix: Matrix
) -> tuple[list[int], list[int], dict[tuple[int, int], int]] | None:
    """Return cuts of op(matrix) along rows and columns, and the rank of each part that they make; None if some lack."""
    parts = placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix))
    turned = {Matrix.A: problem.trans_a, Matrix.B: problem.trans_b}.get(matrix, "N") != "N"
    places = [(part.cols, part.rows) if turned else (part.rows, part.cols) for part in parts]
    ranks = [part.location.rank for part in parts if part.location.rank is not None]
    if len(parts) < 2 or len({*ranks}) < len(parts):
        return None
    rows, cols = (sorted({edge for place in places for edge in place[axis]}) for axis in (0, 1))
    if (len(rows) - 1) * (len(cols) - 1) != len(parts) or len({*places}) < len(parts):
        return None  # parts beside each other end at different places, or are replicas
    begins = [(rows.index(top), cols.index(left)) for (top, _), (left, _) in places]
    return rows, cols, dict(zip(begins, ranks, strict=True))


def _grid(
    problem: GemmProblem, matrix: Matrix, rows: list[int], cols: list[int], ranks: dict[tuple[int, int], int]
) -> Stationary:
    heights, widths = (tuple(stop - start for start, stop in itertools.pairwise(edges)) for edges in (rows, cols))
    down, along = len(heights), len(widths)
    if matrix is Matrix.A:
        devices = (ranks[row, part] for part in range(along) for row in range(down))
        return Stationary(matrix, along, _changes((down, 1), devices, heights, None, widths))
    if matrix is Matrix.B:
        devices = (ranks[part, col] for part in range(down) for col in range(along))
        return Stationary(matrix, down, _changes((1, along), devices, None, widths, heights))
    grid = ProcessGrid(down, along, problem.swapped)
    devices = (ranks[grid.position(place)] for place in range(grid.size))
    return Stationary(matrix, 1, _changes((down, along), devices, heights, widths, None))


def _changes(grid: tuple[int, int], devices: Iterable[int], *shares: tuple[int, ...] | None) -> dict[str, Any]:
    named = zip(("row_shares", "col_shares", "k_shares"), shares, strict=True)
    return {"grid": grid, "devices": tuple(devices), "areas": None, **dict(named)}
