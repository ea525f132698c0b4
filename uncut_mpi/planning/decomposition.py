"""
The two-level decomposition of section III-A: blocks of C per rank, and tiles within them.

A grid row's rows of C form one contiguous block, tiled from its own start, so that the tiles of A
are the same for all its ranks and short tiles stand at the ends of blocks only; likewise columns.
All ranks share the tiles of k. Edges keep their true size: nothing is padded.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Final

import numpy as np

from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.grid import ProcessGrid, block_starts

MIN_TILE: Final = 128
"""Smallest tile edge that the heuristic tries, unless an extent is smaller (section III-A)."""

LATENCY_WEIGHT: Final = 0.2
"""Weight of T_min / T in the cost of a tile (section III-A)."""

GEMM_ISSUE_S: Final = 7.9e-6
COPY_ISSUE_S: Final = 1.3e-6
"""Host time to issue one cuBLAS call and one copy, measured in C++ on an H200 node with CUDA 13.0."""


_TILE_ALIGNMENT: Final = 16  # bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Decomposition:
    """
    Blocks and tiles of one problem.

    Attributes
    ----------
    m, n, k : int
        Extents of the problem (elements).
    grid : ProcessGrid
        Who computes which block.
    tile : int
        Tile edge T (elements).
    row_starts, col_starts : tuple of int
        Bounds of the blocks of rows and columns of C; grid.rows + 1 and grid.cols + 1 values.
    """

    m: int
    n: int
    k: int
    grid: ProcessGrid
    tile: int
    row_starts: tuple[int, ...]
    col_starts: tuple[int, ...]

    @classmethod
    def make(cls, problem: GemmProblem, grid: ProcessGrid, tile: int) -> Decomposition:
        """Return the decomposition of `problem` over `grid` into tiles of edge `tile` (elements, at least 1)."""
        return cls(
            m=problem.m,
            n=problem.n,
            k=problem.k,
            grid=grid,
            tile=tile,
            row_starts=tuple(block_starts(problem.m, grid.rows)),
            col_starts=tuple(block_starts(problem.n, grid.cols)),
        )

    def block(self, rank: int) -> tuple[range, range]:
        """Return the rows and the columns of C that `rank` computes; empty beyond the grid."""
        if rank >= self.grid.size:
            return range(0), range(0)
        row, col = self.grid.position(rank)
        return (
            range(self.row_starts[row], self.row_starts[row + 1]),
            range(self.col_starts[col], self.col_starts[col + 1]),
        )

    def tiles(self, block: range) -> list[range]:
        """Return the tiles of a block of rows or columns, the last one of its true size."""
        return [range(start, min(start + self.tile, block.stop)) for start in range(block.start, block.stop, self.tile)]

    def k_tiles(self) -> list[range]:
        """Return the tiles of k."""
        return self.tiles(range(self.k))

    def sub_problems(self, rank: int) -> list[tuple[range, range, range]]:
        """Return (rows, columns, k range) of every sub-problem of `rank`, k innermost, then rows, then columns."""
        rows, cols = self.block(rank)
        return [(i, j, p) for j in self.tiles(cols) for i in self.tiles(rows) for p in self.k_tiles()]

    def num_sub_problems(self) -> int:
        """Return the number of sub-problems of all ranks."""
        steps = -(-self.k // self.tile)
        return _count_tiles(self.row_starts, self.tile) * _count_tiles(self.col_starts, self.tile) * steps


def _count_tiles(starts: tuple[int, ...], tile: int) -> int:
    return sum(-(-(stop - start) // tile) for start, stop in itertools.pairwise(starts))


def tile_cost(tiles: np.ndarray, problem: GemmProblem, num_workers: int, tile_min: int) -> np.ndarray:
    """
    Return the composite cost C_padding + C_overlap + C_latency of section III-A for each tile edge.

    C_padding is the sum of 1/⌊D/T⌋ over those extents D of m, n, k that T does not divide (an extent
    below T is one short tile and adds nothing); C_overlap is the number of workers over (m/T)(n/T)(k/T), the
    part of the work that nothing overlaps; C_latency is 0.2 T_min/T.

    Parameters
    ----------
    tiles : ndarray of int64
        Tile edges (elements).
    num_workers : int
        Ranks that compute.
    tile_min : int
        T_min (elements).
    """
    edges = tiles.astype(np.float64)
    padding = np.zeros(len(tiles))
    pipeline = np.ones(len(tiles))
    for extent in (problem.m, problem.n, problem.k) if problem.has_product else (problem.m, problem.n):
        whole = extent // tiles
        padding += np.where((whole > 0) & (extent % tiles != 0), 1.0 / np.maximum(whole, 1), 0.0)
        pipeline *= np.maximum(extent / edges, 1.0)
    return padding + num_workers / pipeline + LATENCY_WEIGHT * tile_min / edges


def choose_tile(
    problem: GemmProblem, grid: ProcessGrid, *, tile_min: int, bound_s: float, copies_per_tile: int = 1
) -> int:
    """
    Return the tile edge of least cost (see `tile_cost`), the larger of equal ones.

    Candidates are T from 128 to min(m_r, n_c, k) for which tiles start on 16-byte boundaries, as cuBLAS
    needs for its fast kernels, and that minimum itself; the minimum alone where it is below 128.
    Tiles for which a rank would spend more than half of `bound_s` on issuing calls are discarded. If
    that leaves none, T may exceed the smaller extents (tiles end where the matrix ends); if even then
    none is left, T is the largest extent of a block.

    Parameters
    ----------
    tile_min : int
        T_min of the latency term (elements).
    bound_s : float
        Time below which the product cannot be (see `uncut_mpi.model.bounds`).
    copies_per_tile : int
        Copies that a rank issues for each tile of A and B that it holds.
    """
    m_r, n_c = -(-problem.m // grid.rows), -(-problem.n // grid.cols)
    extents = [m_r, n_c, problem.k] if problem.has_product else [m_r, n_c]
    least, most = max(1, min(extents)), max(1, *extents)
    for candidates in (np.arange(min(MIN_TILE, least), least + 1), np.arange(min(MIN_TILE, most), most + 1)):
        aligned = candidates * problem.dtype.itemsize % _TILE_ALIGNMENT == 0
        aligned[-1] = True
        candidates = candidates[-1:] if candidates[-1] < MIN_TILE else candidates[aligned]
        good = candidates[_issue_s(candidates, m_r, n_c, problem, copies_per_tile) <= 0.5 * bound_s]
        if len(good):
            cost = tile_cost(good, problem, grid.size, tile_min)
            return int(good[len(good) - 1 - int(np.argmin(cost[::-1]))])
    return most


def _issue_s(tiles: np.ndarray, m_r: int, n_c: int, problem: GemmProblem, copies_per_tile: int) -> np.ndarray:
    rows, cols = -(-m_r // tiles), -(-n_c // tiles)
    steps = -(-problem.k // tiles) if problem.has_product else np.ones_like(tiles)
    copies = (rows + cols) * steps * copies_per_tile + 2 * rows * cols
    issue_s: np.ndarray = rows * cols * steps * GEMM_ISSUE_S + copies * COPY_ISSUE_S
    return issue_s
