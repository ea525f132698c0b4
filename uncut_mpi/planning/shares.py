"""
Unequal shares: which part of C each rank of a process grid computes when ranks differ in speed.

On a grid a rank's block is (share of its row) × (share of its column), so only speeds of rank 1, s_ij = r_i c_j, let
all ranks finish together. Others lose what the best such fit below them loses. On a 2x2 grid with speeds 1, 1, 1 and
1/2, shares (2/3, 1/3) × (1/2, 1/2) do 3 of 3.5, and no shares do more. A 1×G grid fits any speeds, but its ranks need
all of op(A); whether that pays is for a search to find out.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import ParamError
from uncut_mpi.planning.grid import ProcessGrid


@dataclasses.dataclass(frozen=True, slots=True)
class Shares:
    """
    Shares of a process grid.

    Attributes
    ----------
    rows, cols : tuple of float
        Share of each grid row and column; each sums to 1.
    balance : float
        What the grid achieves of the sum of its ranks' speeds, at most 1: 1 if all finish together.
    """

    rows: tuple[float, ...]
    cols: tuple[float, ...]
    balance: float


def fit_shares(speeds: np.ndarray) -> Shares:
    """
    Return the shares with which the slowest rank of a grid finishes earliest.

    Minimises the largest r_i c_j / s_ij. It is exact where speeds are of rank 1, and so on 1×G and G×1 grids. Elsewhere
    some ranks wait (`balance`), and the module's text has an example. There it is a search from
    several starts, for its problem is a combinatorial one (Beaumont et al., Matrix multiplication on heterogeneous
    platforms, 2001).

    Parameters
    ----------
    speeds : ndarray of float64, shape (grid rows, grid columns)
        Of the rank at each place; any unit, all positive.

    Raises
    ------
    ParamError
        If a speed is not positive.
    """
    speeds = np.asarray(speeds, np.float64)
    if speeds.ndim != 2 or not speeds.size or not (np.isfinite(speeds).all() and (speeds > 0).all()):
        raise ParamError("speeds are not a grid of positive numbers: one for each place, rows × columns")
    rows, cols, reached = _native.fit_shares(speeds.ravel().tolist(), speeds.shape[0])
    total_rows, total_cols = math.fsum(rows), math.fsum(cols)
    return Shares(
        tuple(row / total_rows for row in rows),
        tuple(col / total_cols for col in cols),
        min(1.0, reached / float(speeds.sum())),
    )


def arrange(ranks: Sequence[int], speeds: Sequence[float], grid: ProcessGrid) -> tuple[tuple[int, ...], Shares]:
    """
    Return an order of ranks in which they fill a grid so that shares fit their speeds well, and those shares.

    Sorted by speed, fastest first and lower ranks first of equal ones, they fill it either column by
    column or row by row, whichever balances better (`fit_shares`). With 4 ranks of 3.5, 2 of 5 and 2 of
    7 TFLOP/s the columns of a 2x4 grid are equal pairs, and nothing is lost.

    Parameters
    ----------
    ranks : sequence of int
        As many as the grid has places.
    speeds : sequence of float
        One per rank of `ranks`, any unit.
    """
    fastest_first = sorted(range(len(ranks)), key=lambda index: (-speeds[index], ranks[index]))
    orders = [np.array(fastest_first).reshape(grid.cols, grid.rows).T]
    if min(grid.rows, grid.cols) > 1:
        orders.append(np.array(fastest_first).reshape(grid.rows, grid.cols))
    of = np.asarray(speeds, np.float64)
    fits = [fit_shares(of[places]) for places in orders]
    best = max(range(len(fits)), key=lambda which: fits[which].balance)
    order = orders[best].ravel("F" if grid.transposed else "C").tolist()
    return tuple(ranks[index] for index in order), fits[best]
