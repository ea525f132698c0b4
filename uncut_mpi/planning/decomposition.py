"""
The two-level decomposition of section III-A: blocks of C per rank, and tiles within them.

A grid row's rows of C form one contiguous block, tiled from its own start. So the tiles of A are the same for all its
ranks, and short tiles stand at the ends of blocks only. Columns are likewise. All ranks share the tiles of k. Edges
keep their true size: nothing is padded.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from typing import Final

import numpy as np

from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.buffers import elements_aligned
from uncut_mpi.planning.grid import ProcessGrid, block_starts, counted_starts, share_starts
from uncut_mpi.planning.options import ScheduleOptions

MIN_TILE: Final = 128
"""Smallest tile edge that the heuristic tries, unless an extent is smaller (section III-A)."""

LATENCY_WEIGHT: Final = 0.2
TILE_MIN: Final = 2048
"""Weight of T_min / T in the cost of a tile, and T_min (elements; section III-A)."""

GEMM_ISSUE_S: Final = 7.9e-6
COPY_ISSUE_S: Final = 1.3e-6
"""Host time to issue one cuBLAS call and one copy, measured in C++ on an H200 node with CUDA 13.0."""

EQUAL_PARTS: Final = (1, 2, 3, 4, 6, 8)
"""Into how many equal parts of an extent `candidate_tiles` looks for tiles that cut it."""

_EVEN_ELEMENTS: Final = 64
_LARGE_TILE: Final = 512
# Steps of block edges, and from what size of the smallest block on: libraries cut C into blocks of 64 to 256, and
# half a step changes a share by 4 % at most.
_EVEN_STEPS: Final = ((128, 2048), (64, 768))
# A last tile of less than this part of the others costs as many operations and multiplies slower.
_SLIVER: Final = 0.25
_NEAR: Final = 0.05
_MOST_EDGE: Final = 1 << 20


def grid_starts(
    problem: GemmProblem, grid: ProcessGrid, row_shares: Sequence[float] | None, col_shares: Sequence[float] | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """
    Return where the blocks of rows and of columns of C begin over a grid, and end (elements).

    Parameters
    ----------
    row_shares, col_shares : sequence of float or None
        What each grid row and column gets, proportionally; None: equal blocks. The edges of unequal blocks stand on
        16-byte boundaries of a contiguous matrix.

    Raises
    ------
    ParamError
        If there are not as many shares as grid rows or columns.
    """
    grid.check_shares(row_shares, col_shares)
    rows = starts_of(problem, problem.m, grid.rows, row_shares)
    return rows, starts_of(problem, problem.n, grid.cols, col_shares)


def starts_of(problem: GemmProblem, extent: int, blocks: int, shares: Sequence[float] | None) -> tuple[int, ...]:
    """Return where blocks of an extent start, and the extent: of these sizes, in these proportions, or equal ones."""
    if shares is None:
        return tuple(block_starts(extent, blocks))
    counted = counted_starts(extent, shares)
    return tuple(counted or share_starts(extent, shares, share_step(problem, extent, shares)))


def share_step(problem: GemmProblem, extent: int, shares: Sequence[float]) -> int:
    """Return the step of the edges of unequal blocks of an extent: the smaller the smallest block, the finer."""
    smallest = extent * min(shares) / math.fsum(shares)
    return next((step for step, least in _EVEN_STEPS if smallest >= least), elements_aligned(problem))


def slivers(tiles: np.ndarray, extents: Collection[int]) -> np.ndarray:
    """
    Return which tile edges leave a last tile that is short: less than a quarter of the others.

    Parameters
    ----------
    tiles : ndarray of int
        Tile edges.
    extents : collection of int
        What they cut: rows and columns of blocks, and k.
    """
    found = np.zeros(len(tiles), bool)
    for extent in extents:
        rest = extent % tiles
        found |= (extent > tiles) & (rest > 0) & (rest < _SLIVER * tiles)
    return found


def fitting_tile(problem: GemmProblem, grid: ProcessGrid, options: ScheduleOptions, tile: int) -> int:
    """Return the next even edge, up to a fourth larger, that leaves the largest blocks no short tile; else `tile`."""
    extents = _extents_cut(problem, grid_starts(problem, grid, options.row_shares, options.col_shares))
    if tile < _LARGE_TILE or not slivers(np.array([tile]), extents)[0]:
        return tile
    tiles = np.arange(-(-tile // _EVEN_ELEMENTS) * _EVEN_ELEMENTS, tile + tile // 4 + 1, _EVEN_ELEMENTS)
    good = tiles[~slivers(tiles, extents)]
    return min(int(good[0]), max(extents)) if len(good) else tile


def _extents_cut(problem: GemmProblem, starts: Sequence[Sequence[int]]) -> set[int]:
    """Return the extents that tiles cut for the ranks that take longest: the largest blocks and k."""
    return {problem.k, *map(_largest, starts)}


def _largest(starts: Sequence[int]) -> int:
    return max(stop - start for start, stop in itertools.pairwise(starts))


def count_tiles(starts: Sequence[int], tile: int) -> int:
    """Return the number of tiles of blocks that start there, the last number being their end."""
    return sum(-(-(stop - start) // tile) for start, stop in itertools.pairwise(starts))


def tile_cost(tiles: np.ndarray, problem: GemmProblem, num_workers: int, tile_min: int) -> np.ndarray:
    """
    Return the composite cost C_padding + C_overlap + C_latency of section III-A for each tile edge.

    C_padding is the sum of 1/⌊D/T⌋ over those extents D of m, n, k that T does not divide. An extent below T is one
    short tile and adds nothing. C_overlap is the number of workers over (m/T)(n/T)(k/T), the part of the work that
    nothing overlaps. C_latency is 0.2 T_min/T.

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
    for extent in (problem.m, problem.n, problem.k):
        whole = extent // tiles
        padding += np.where((whole > 0) & (extent % tiles != 0), 1.0 / np.maximum(whole, 1), 0.0)
        pipeline *= np.maximum(extent / edges, 1.0)
    return padding + num_workers / pipeline + LATENCY_WEIGHT * tile_min / edges


def choose_tile(
    problem: GemmProblem,
    grid: ProcessGrid,
    *,
    tile_min: int,
    bound_s: float,
    copies_per_tile: int = 1,
    block: tuple[int, int] | None = None,
) -> int:
    """
    Return the tile edge of least cost (see `tile_cost`), the larger of equal ones.

    Candidates are T from 128 to min(m_r, n_c, k) for which tiles start on 16-byte boundaries, as cuBLAS needs for its
    fast kernels. That minimum itself is one too, and the only one where it is below 128. Tiles for which a rank would
    spend more than half of `bound_s` on issuing calls are discarded. If that leaves none, T may exceed the smaller
    extents (tiles end where the matrix ends); if even then none is left, T is the largest extent of a block.

    Parameters
    ----------
    tile_min : int
        T_min of the latency term (elements).
    bound_s : float
        Time below which the product cannot be (see `uncut_mpi.model.bounds`).
    copies_per_tile : int
        Copies that a rank issues for each tile of A and B that it holds.
    block : tuple of int, optional
        (m_r, n_c), rows and columns of the largest block; None: of equal ones.
    """
    m_r, n_c = block or (-(-problem.m // grid.rows), -(-problem.n // grid.cols))
    most = max(m_r, n_c, problem.k)
    for largest in (min(m_r, n_c, problem.k), most):
        candidates = _aligned_tiles(largest, problem)
        good = candidates[_issue_s(candidates, m_r, n_c, problem, copies_per_tile) <= 0.5 * bound_s]
        if len(good):
            cost = tile_cost(good, problem, grid.size, tile_min)
            return int(good[len(good) - 1 - int(np.argmin(cost[::-1]))])
    return most


def candidate_tiles(
    problem: GemmProblem, grid: ProcessGrid, options: ScheduleOptions, count: int, *, bound_s: float = math.inf
) -> list[int]:
    """
    Return tile edges worth trying, at most `count`: the heuristic's own first, the others by rising cost.

    The others are the edges of least cost (see `tile_cost`) near the powers of two and near what cuts an extent
    equally. The extents are m_r, n_c and k, cut into 1, 2, 3, 4, 6 or 8 parts. They too start tiles on 16-byte
    boundaries, and may exceed the smaller extents. Large ones are multiples of 64, or divide an extent and leave no
    short tile at the end of the largest blocks or of k. Of edges that differ by less than a twentieth only the best is
    kept, of equal costs the larger edge comes first. A tile that `options` fixes is the only one.

    Parameters
    ----------
    grid : ProcessGrid
        Who computes; `options` gives its shares.
    options : ScheduleOptions
        Tile, shares, chunks, batching and caching are taken from it.
    count : int
        At least 1.
    bound_s : float
        As for `choose_tile`; by default no tile is discarded.

    Raises
    ------
    ParamError
        If there are not as many shares as grid rows or columns.
    """
    starts = grid_starts(problem, grid, options.row_shares, options.col_shares)
    m_r, n_c = _largest(starts[0]), _largest(starts[1])
    extents = (m_r, n_c, problem.k)
    most = max(extents)
    if options.tile:
        return [min(options.tile, most)]
    copies = options.most_chunks if options.batch and options.caching and grid.size > 1 else 1
    own = choose_tile(problem, grid, tile_min=TILE_MIN, bound_s=bound_s, copies_per_tile=copies, block=(m_r, n_c))
    if count == 1:
        return [own]
    edges = _aligned_tiles(most, problem)
    # Libraries multiply odd extents slower by a fifth (docs/performance.md, 2026-11-22), and short ones at the end too.
    even = (edges < _LARGE_TILE) | (edges % _EVEN_ELEMENTS == 0)
    for extent in extents:
        even |= extent % edges == 0
    even &= (edges < _LARGE_TILE) | ~slivers(edges, _extents_cut(problem, starts))
    edges = edges[even]
    edges = edges[_issue_s(edges, m_r, n_c, problem, copies) <= 0.5 * bound_s]
    cost = tile_cost(edges, problem, grid.size, TILE_MIN)
    wanted = {2**power for power in range(most.bit_length())}
    wanted |= {-(-extent // parts) for extent in extents for parts in EQUAL_PARTS}
    found: set[int] = set()
    for edge in wanted:
        near = np.flatnonzero(np.abs(edges - edge) <= _NEAR * edge)
        if len(near):
            found.add(int(near[len(near) - 1 - int(np.argmin(cost[near][::-1]))]))
    kept = [own]
    for at in sorted(found, key=lambda at: (cost[at], -edges[at])):
        edge = int(edges[at])
        if len(kept) < count and all(abs(edge - other) > _NEAR * max(edge, other) for other in kept):
            kept.append(edge)
    return kept


def _aligned_tiles(largest: int, problem: GemmProblem) -> np.ndarray:
    """
    Return edges from `MIN_TILE` to `largest` that keep tiles on 16-byte boundaries, and `largest` itself.

    Above `_MOST_EDGE` there is `largest` alone: no device holds a square of that size, and a list of edges has to fit.
    """
    if largest < MIN_TILE:
        return np.array([largest])
    edges = np.arange(MIN_TILE, min(largest, _MOST_EDGE + 1))
    good: np.ndarray = np.append(edges[edges % elements_aligned(problem) == 0], largest)
    return good


def _issue_s(tiles: np.ndarray, m_r: int, n_c: int, problem: GemmProblem, copies_per_tile: int) -> np.ndarray:
    rows, cols = -(-m_r // tiles), -(-n_c // tiles)
    steps = -(-problem.k // tiles)
    copies = (rows + cols).astype(np.float64) * steps * copies_per_tile + 2.0 * rows * cols
    products = rows.astype(np.float64) * cols * steps  # which may be more than fit 64 bits
    issue_s: np.ndarray = products * GEMM_ISSUE_S + copies * COPY_ISSUE_S
    return issue_s
