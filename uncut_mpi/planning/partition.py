r"""
How C is cut among ranks: a process grid, or columns of ranks each of which is cut into rows of its own.

On a process grid a rank's block is (share of its row) × (share of its column), so ranks of any speeds cannot all finish
together on it. In a column-based partition each column of ranks has its own rows. Column j is as wide as the areas of
its ranks together, and rank i of it as high as its part of them. Every rank gets exactly the area that it is due
(Beaumont, Boudet, Rastello and Robert, IEEE TPDS 12, 2001). With all matrices on one device that device's own column
needs nothing from elsewhere, and the others need nothing of A twice.

Rows of A are then shared by ranks whose rows overlap: the *strips* between all the cuts of all columns, which the core
finds (`group` in ``csrc/kblocks_request.cpp``).
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.decomposition import grid_starts, share_step
from uncut_mpi.planning.grid import ProcessGrid, share_starts


@dataclasses.dataclass(frozen=True, slots=True)
class Partition:
    """
    Blocks of C, one for each place.

    Attributes
    ----------
    blocks : tuple of (range, range)
        Rows and columns of C, in the order in which ranks fill them; empty ones where there are more ranks than C has.
    shape : tuple of int
        (most ranks in a column, columns).
    """

    blocks: tuple[tuple[range, range], ...]
    shape: tuple[int, int]

    @classmethod
    def of_rectangles(cls, problem: GemmProblem, cut: Callable[[GemmProblem], Partition]) -> list[Partition]:
        """Return how each rectangle of C that a problem computes is cut, as `cut` cuts all of a problem's C."""
        if problem.part is None:
            return [cut(problem)]
        return [
            cut(dataclasses.replace(problem, m=bottom - top, n=right - left, part=None))._shifted(top, left)
            for (top, bottom), (left, right) in problem.rectangles
        ]

    def _shifted(self, down: int, along: int) -> Partition:
        if not (down or along):
            return self
        blocks = [
            (range(rows.start + down, rows.stop + down), range(cols.start + along, cols.stop + along))
            for rows, cols in self.blocks
        ]
        return Partition(tuple(blocks), self.shape)

    @classmethod
    def of_grid(
        cls,
        problem: GemmProblem,
        grid: ProcessGrid,
        row_shares: Sequence[float] | None = None,
        col_shares: Sequence[float] | None = None,
    ) -> Partition:
        """
        Return the blocks of a process grid, in the order in which ranks fill it.

        Parameters
        ----------
        row_shares, col_shares
            As for `uncut_mpi.planning.decomposition.grid_starts`.

        Raises
        ------
        ParamError
            If there are not as many shares as grid rows or columns.
        """
        row_starts, col_starts = grid_starts(problem, grid, row_shares, col_shares)
        rows = [range(*pair) for pair in itertools.pairwise(row_starts)]
        cols = [range(*pair) for pair in itertools.pairwise(col_starts)]
        blocks = tuple((rows[row], cols[col]) for row, col in map(grid.position, range(grid.size)))
        return cls(blocks, (grid.rows, grid.cols))

    @classmethod
    def of_areas(cls, problem: GemmProblem, areas: Sequence[Sequence[float]]) -> Partition:
        """
        Return the blocks of columns of ranks, filled column by column.

        Parameters
        ----------
        areas : sequence of sequence of float
            For each column of ranks what each of its ranks gets of C, from top to bottom, as positive numbers of any
            sum.

        Raises
        ------
        ParamError
            If a column has no rank.
        """
        if not areas or not all(len(column) for column in areas):
            raise ParamError(f"areas = {areas} has a column of ranks without any: name one area for each rank")
        widths = [math.fsum(column) for column in areas]
        col_starts = share_starts(problem.n, widths, share_step(problem, problem.n, widths))
        blocks = []
        for column, cols in zip(areas, itertools.pairwise(col_starts), strict=True):
            row_starts = share_starts(problem.m, column, share_step(problem, problem.m, column))
            blocks += [(range(*rows), range(*cols)) for rows in itertools.pairwise(row_starts)]
        return cls(tuple(blocks), (max(map(len, areas)), len(areas)))


def sizes_of_columns(areas: Sequence[float], columns: int) -> list[int]:
    """
    Return how many ranks each column has in the column-based partition with the shortest edges.

    Edges say what ranks need of A and B: a block of height h and width w needs h k + w k elements. Of all ways to deal
    ranks, in the order given, to so many columns the one is chosen whose blocks have the least sum of half perimeters.
    With c_j ranks and the width w_j of column j that sum is 1 · columns + Σ c_j w_j. Dynamic programming finds it
    (Beaumont et al., 2001, who show that dealing ranks sorted by area loses nothing).

    Parameters
    ----------
    areas : sequence of float
        Of each rank, sorted, any sum.
    columns : int
        From 1 to the number of ranks.
    """
    # By powers of two, since a search asks for several numbers of columns.
    cuts = _best_cuts(tuple(areas), 1 << (columns - 1).bit_length())
    sizes, upto = [], len(areas)
    for cut in cuts[columns - 1 :: -1]:
        since = int(cut[upto])
        sizes.append(upto - since)
        upto = since
    return sizes[::-1]


@functools.lru_cache(maxsize=8)
def _best_cuts(areas: tuple[float, ...], columns: int) -> list[np.ndarray]:
    """Return for 1, 2, ... columns where the last one begins, of the first 0, 1, ... ranks: int, shape (ranks + 1,)."""
    total = math.fsum(areas)
    before, count = np.array([0.0, *itertools.accumulate(area / total for area in areas)]), np.arange(len(areas) + 1)
    # Of a last column, by the end of its ranks and their begin.
    edges = np.where(count[:, None] > count, (count[:, None] - count) * (before[:, None] - before), math.inf)
    least, cuts = np.where(count > 0, math.inf, 0.0), []
    for _ in range(min(columns, len(areas))):
        costs = least + edges
        least = costs.min(axis=1)
        cuts.append((costs < least[:, None] + 1e-12).argmax(axis=1))  # the longest of those as good
    return cuts
