"""
Process grids of several nodes: which block of C a node forms, and how its ranks share it.

C is cut among nodes as among ranks: a grid of p × q nodes, each of which has a tile of r × c ranks. A node takes what
its block of C needs of A and B, each byte once, and its ranks hand that on to each other. Where A, B and C are dealt to
the same grid it is ``m k (1 − 1/q) / p + k n (1 − 1/p) / q`` elements (Herault, Robert, Bosilca and Dongarra, ScalA
2019, section IV-B, with one block of C). So ranks fill a grid node by node, in the tiles by which least enters a node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import MATRICES, Matrix, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.decomposition import grid_starts
from uncut_mpi.planning.grid import ProcessGrid, grids
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.stationary import stationary_grids


def in_tiles(problem: GemmProblem, machine: Machine, ranks: Sequence[int], grid: ProcessGrid) -> tuple[int, ...]:
    """
    Return ranks in the order in which they fill a grid so that each node has a tile of it.

    Of tiles that fit the grid it is the one by which least of A and B enters a node, the widest of equals. Ranks keep
    their order where none fits: where they are on one node, or nodes have different numbers of them.
    """
    nodes, counts = np.unique(machine.node_of[list(ranks)], return_counts=True)
    each = int(counts[0])
    if len(nodes) == 1 or (counts != each).any() or grid.size != len(ranks):
        return tuple(ranks)
    tiles = [
        (rows, each // rows)
        for rows in range(1, each + 1)
        if each % rows == 0 and grid.rows % rows == 0 and grid.cols % (each // rows) == 0
    ]
    if not tiles:
        return tuple(ranks)
    of_a, of_b = (one.itemsize for one in problem.dtypes[:2])

    def enters(tile: tuple[int, int]) -> float:
        return problem.m * of_a * tile[0] / grid.rows + problem.n * of_b * tile[1] / grid.cols

    rows, cols = min(tiles, key=enters)
    of_nodes = ProcessGrid(grid.rows // rows, grid.cols // cols, grid.transposed)
    of_ranks = ProcessGrid(rows, cols, grid.transposed)
    placed = [[rank for rank in ranks if machine.node_of[rank] == node] for node in nodes]
    return tuple(
        placed[of_nodes.rank(row // rows, col // cols)][of_ranks.rank(row % rows, col % cols)]
        for row, col in map(grid.position, range(grid.size))
    )


def grid_over_nodes(setting: Setting) -> dict[str, Any]:
    """
    Return the grid of all ranks of several nodes by which least crosses between nodes, as changes of options.

    Looked at are the grid on which C stays where it is, if there is one, and all others in tiles. Of equals it is the
    first one, and of tiles the one whose ranks need least of A and B.
    """
    problem, machine = setting.problem, setting.machine
    found = [one.changes for one in stationary_grids(problem, setting.placement) if one.matrix is Matrix.C]
    found = [one for one in found if len(one["devices"]) == machine.num_ranks]
    for rows, cols, _ in sorted(
        grids(machine.num_ranks, split_k=False),
        key=lambda one: problem.m / one[0] + problem.n / one[1],
    ):
        grid = ProcessGrid(rows, cols, problem.swapped)
        found.append({"grid": (rows, cols), "devices": in_tiles(problem, machine, range(machine.num_ranks), grid)})
    crossing = [_crossing_bytes(problem, setting.placement, machine, one) for one in found]
    best = found[int(np.argmin(crossing))]
    in_order = best["devices"] == tuple(range(machine.num_ranks))
    return {**best, "devices": None if in_order else best["devices"]}


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts:
    """Where each part of a matrix begins and ends, int64 of shape (parts, 4), and on which node it is."""

    edges: np.ndarray
    node: np.ndarray

    @classmethod
    def of(cls, problem: GemmProblem, placement: Placement, matrix: Matrix, machine: Machine) -> _Parts:
        """Return those of op(matrix)."""
        parts = placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix))
        turned = {Matrix.A: problem.trans_a, Matrix.B: problem.trans_b}.get(matrix, "N") != "N"
        edges = [(*part.cols, *part.rows) if turned else (*part.rows, *part.cols) for part in parts]
        nodes = [machine.node_of[part.location.rank or 0] for part in parts]
        return cls(np.array(edges, np.int64), np.array(nodes))

    def on(self, node: int, rows: tuple[int, int], cols: tuple[int, int]) -> int:
        """Return how many elements of a rectangle are on a node; replicas count again."""
        own = self.edges[self.node == node]
        high = np.minimum(own[:, 1], rows[1]) - np.maximum(own[:, 0], rows[0])
        wide = np.minimum(own[:, 3], cols[1]) - np.maximum(own[:, 2], cols[0])
        return int((np.maximum(high, 0) * np.maximum(wide, 0)).sum())


def _crossing_bytes(problem: GemmProblem, placement: Placement, machine: Machine, cut: dict[str, Any]) -> int:
    """Return what nodes take of A and B and move of C on a grid, if the blocks of each make one block of C."""
    height, width = cut["grid"]
    grid = ProcessGrid(height, width, problem.swapped)
    rows, cols = grid_starts(problem, grid, cut.get("row_shares"), cut.get("col_shares"))
    places = np.array([grid.position(place) for place in range(grid.size)])
    parts = [_Parts.of(problem, placement, matrix, machine) for matrix in MATRICES]
    node_of, crossing = machine.node_of[list(cut["devices"])], 0
    for node in range(machine.num_nodes):
        (top, left), (bottom, right) = places[node_of == node].min(axis=0), places[node_of == node].max(axis=0) + 1
        down, along, inner = (rows[top], rows[bottom]), (cols[left], cols[right]), (0, problem.k)
        needed = ((down, inner), (inner, along), (down, along))
        for (high, wide), of, dtype in zip(needed, parts, problem.dtypes, strict=True):
            size = (high[1] - high[0]) * (wide[1] - wide[0])
            crossing += max(0, size - of.on(node, high, wide)) * dtype.itemsize
    return crossing
