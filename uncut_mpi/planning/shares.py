"""
Unequal shares: which part of C each rank of a process grid computes when ranks differ in speed.

On a grid a rank's block is (share of its row) × (share of its column), so only speeds of rank 1, s_ij = r_i c_j,
let all ranks finish together. Others lose what the best such fit below them loses: on a 2x2 grid with speeds
1, 1, 1 and 1/2, shares (2/3, 1/3) × (1/2, 1/2) do 3 of 3.5 and no shares do more. A 1×G grid fits any speeds,
but its ranks need all of op(A); whether that pays is for a search to find out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.planning.grid import ProcessGrid

_NORMS: Final = (2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
_ROUNDS_PER_NORM: Final = 40


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

    Minimises the largest r_i c_j / s_ij. Exact where speeds are of rank 1, and so on 1×G and G×1
    grids; see the module's text for those where no shares let all ranks finish together, as `balance`
    says. The rest is a search from several starts, for its problem is a combinatorial one
    (Beaumont et al., Matrix multiplication on heterogeneous platforms, 2001).

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
    log_speeds = np.log(speeds)
    starts = [log_speeds.mean(axis=0), np.log(speeds.sum(axis=0)), np.zeros(speeds.shape[1]), *log_speeds]
    starts += [np.log((speeds / speeds[:, at : at + 1]).min(axis=0)) for at in range(speeds.shape[1])]
    starts.append(_smoothed(log_speeds))
    fits = [_fill_up(speeds, np.exp(start - start.max())) for start in starts]
    rows, cols = max(fits, key=lambda fit: float(fit[0].sum() * fit[1].sum()))
    balance = float(rows.sum() * cols.sum() / speeds.sum())
    return Shares(tuple((rows / rows.sum()).tolist()), tuple((cols / cols.sum()).tolist()), min(1.0, balance))


def arrange(ranks: Sequence[int], speeds: Sequence[float], grid: ProcessGrid) -> tuple[int, ...]:
    """
    Return an order of ranks in which they fill a grid so that shares fit their speeds well.

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
    by_row = np.array(fastest_first).reshape(grid.rows, grid.cols)
    by_col = np.array(fastest_first).reshape(grid.cols, grid.rows).T
    of = np.asarray(speeds, np.float64)
    best = max((by_col, by_row), key=lambda places: fit_shares(of[places]).balance)
    return tuple(ranks[index] for index in best.ravel().tolist())


def _fill_up(speeds: np.ndarray, cols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest rows that `cols` allow under r_i c_j ≤ s_ij, and the largest columns that those allow."""
    rows: np.ndarray = (speeds / cols).min(axis=1)
    filled: np.ndarray = (speeds / rows[:, None]).min(axis=0)
    return rows, filled


def _smoothed(log_speeds: np.ndarray) -> np.ndarray:
    """Return log c_j that minimise the p-norm of r_i c_j / s_ij, in turns with r_i, for growing p."""
    log_cols: np.ndarray = log_speeds.mean(axis=0)
    for norm in _NORMS:
        for _ in range(_ROUNDS_PER_NORM):
            # Where the sum of r is fixed, r_i^(p-1) is inverse to the sum over j of (c_j / s_ij)^p; likewise c.
            log_rows = -np.logaddexp.reduce(norm * (log_cols - log_speeds), axis=1) / (norm - 1)
            log_rows -= np.logaddexp.reduce(log_rows)
            log_cols = -np.logaddexp.reduce(norm * (log_rows[:, None] - log_speeds), axis=0) / (norm - 1)
            log_cols -= np.logaddexp.reduce(log_cols)
    return log_cols
