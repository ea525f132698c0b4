"""Libraries that multiply in a process for each rank: a job of their own, in which each process has its parts."""

from __future__ import annotations

from typing import Any

import numpy as np

from uncut_mpi.bench.baselines.library import Library, Unsupported
from uncut_mpi.bench.baselines.task import Matrices, Task
from uncut_mpi.model.cyclic import Cyclic
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.places import Dealt
from uncut_mpi.model.positions import picked
from uncut_mpi.spmd.runtime import world


class JobLibrary(Library):
    """A library of which this process is one of several, which an MPI launcher has started."""

    takes_whole = False
    takes_dealt = True

    def __init__(self) -> None:
        self.comm = world()
        self.rank, self.size = self.comm.rank, self.comm.size

    def wait(self) -> None:
        """See `Library.wait`."""
        self.comm.Barrier()

    def slowest(self, seconds: float) -> float:
        """See `Library.slowest`."""
        slowest: float = max(self.comm.allgather(seconds))
        return slowest

    def agree(self, good: bool, why: str) -> None:
        """Raise Unsupported on all processes if something is not good on one."""
        if not all(self.comm.allgather(good)):
            raise Unsupported(why)


class JobOperand:
    """
    A matrix as its part in a process is stored, in the order that a library likes.

    Parameters
    ----------
    dealt : Dealt
        How it is dealt.
    matrix : ndarray
        All of it, in memory that all processes share.
    order : str
        ``"F"`` for a library of column-major matrices, ``"C"`` for one of row-major ones.

    Attributes
    ----------
    turned : bool
        Whether parts are stored in the other order. Shape, layout and part are then those of the transposed matrix.
    matrix : ndarray
        The matrix, or its transpose.
    layout : Layout
        How that is dealt.
    on_host : bool
        Whether parts are in the processes' own host memory.
    """

    def __init__(self, dealt: Dealt, matrix: np.ndarray, order: str) -> None:
        self.turned = (dealt.order or "F") != order
        self.matrix = matrix.T if self.turned else matrix
        self.layout: Layout = dealt.layout.transposed if self.turned else dealt.layout
        self.on_host = dealt.memory == "host"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of what is stored."""
        rows, cols = self.matrix.shape
        return rows, cols

    def where(self, rank: int, size: int) -> tuple[Any, ...]:
        """Return what picks a process's part of the matrix."""
        return picked(*self.layout.indices(self.shape, rank, num_ranks=size))

    def part(self, rank: int, size: int) -> Any:
        """Return a copy of a process's part of the matrix."""
        return self.matrix[self.where(rank, size)].copy(order="K")


def operands(task: Task, matrices: Matrices, order: str) -> tuple[JobOperand, JobOperand, JobOperand]:
    """Return A, B and C as a library of row-major or column-major matrices has them."""
    if any(dealt.memory == "shared" or dealt.layout.kind == "replicated" for dealt in task.dealt):
        raise Unsupported("each process has a part of its own of a matrix")
    a, b, c = (
        JobOperand(dealt, matrix, order)
        for dealt, matrix in zip(task.dealt, (matrices.a, matrices.b, matrices.c), strict=True)
    )
    return a, b, c


def as_cyclic(layout: Layout, shape: tuple[int, int], size: int) -> Cyclic | None:
    """Return the block-cyclic layout that deals a matrix just so to processes 0, 1, ...; None if there is none."""
    if layout.kind == "blocks":
        grid = len(layout.row_counts or ()), len(layout.col_counts or ())
    elif layout.kind in ("rows", "cols"):
        grid = (size, 1) if layout.kind == "rows" else (1, size)
    else:
        return layout.cyclic if layout.ranks is None and layout.cyclic and layout.cyclic.skip == (0, 0) else None
    parts = layout.rectangles(shape, size)
    found = Cyclic((max(b - a for (a, b), _ in parts) or 1, max(b - a for _, (a, b) in parts) or 1), grid)
    return found if Layout("block_cyclic", cyclic=found).rectangles(shape, size) == parts else None
