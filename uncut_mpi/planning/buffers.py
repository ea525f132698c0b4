"""The buffers of a schedule: the caller's matrices, and panels packed into each rank's SoftBuf."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from uncut_mpi.model.dtypes import ITEMSIZES, DType
from uncut_mpi.model.locations import Ranks, location_index, location_table
from uncut_mpi.model.parts import Part, edges_of
from uncut_mpi.model.placement import MATRICES, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.schedule import (
    BUFFER_DTYPE,
    PIECE_DTYPE,
    Matrix,
    Role,
    Schedule,
    buffer_bytes,
    expand_ranges,
)

BUFFER_ALIGNMENT: Final = 256  # bytes; what cudaMalloc gives, and enough for any vector load
COLUMN_ALIGNMENT: Final = 64  # bytes
ALIGNMENT: Final = 16  # bytes; of columns, for tensor cores to be fed fast


class Buffers:
    """
    Collects the buffers of a schedule: those of the caller's A, B and C come first, each rank's own follow.

    Attributes
    ----------
    ranks : Ranks
        Of the schedule.
    arena_bytes : list of int
        What they take so far of each memory (`location_table`): of devices first, by rank.
    """

    def __init__(self, ranks: Ranks, problem: GemmProblem, placement: Placement) -> None:
        self.ranks = ranks
        self.arena_bytes = [0] * len(location_table(ranks))
        self._first = user_table(ranks, problem, placement)
        self._records = list[tuple[int, ...]]()

    @classmethod
    def of(cls, schedule: Schedule) -> Buffers:
        """Return the buffers of a schedule, to which others can be added."""
        buffers = cls(schedule.ranks, schedule.problem, schedule.placement)
        buffers._first = schedule.buffers
        buffers.arena_bytes = [_aligned(size) for size in schedule.arena_bytes().tolist()]
        return buffers

    def add(self, at: int, shape: tuple[int, int], dtype: DType, matrix: Matrix, role: Role) -> int:
        """Add a buffer behind those of a memory, its columns on 64-byte boundaries, and return its index."""
        rows, cols = shape
        offset = self.arena_bytes[at]
        self._records.append((at, role, matrix, dtype, 0, rows, cols, aligned_ld(rows, dtype), offset))
        self.arena_bytes[at] = offset + _aligned(panel_bytes(shape, dtype))
        return self.num_buffers() - 1

    def num_buffers(self) -> int:
        """Return how many buffers there are so far."""
        return len(self._first) + len(self._records)

    def table(self) -> np.ndarray:
        """Return the buffers as records."""
        return np.concatenate((self._first, np.array(self._records, BUFFER_DTYPE)))


# A search asks for the same ones all the time.
@functools.lru_cache(maxsize=64)
def user_table(ranks: Ranks, problem: GemmProblem, placement: Placement) -> np.ndarray:
    """Return the buffers of the caller's A, B and C, one for each part, as a table that cannot be written to."""
    records, role = list[tuple[int, ...]](), int(Role.USER)
    for matrix in MATRICES:
        dtype, of = int(problem.dtypes[matrix]), int(matrix)
        for part in placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix)):
            at = location_index(part.location, ranks)
            records.append((at, role, of, dtype, 0, *part.stored_shape, part.ld, -1))
    table = np.array(records, BUFFER_DTYPE)
    table.flags.writeable = False
    return table


@functools.lru_cache(maxsize=64)
def user_pieces(problem: GemmProblem, placement: Placement) -> np.ndarray:
    """Return what these buffers hold of A, B and C, each a piece, as a table that cannot be written to."""
    parts = [
        part for matrix in MATRICES for part in placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix))
    ]
    table = pieces_of(parts)
    table.flags.writeable = False
    return table


def pieces_of(parts: Sequence[Part]) -> np.ndarray:
    """Return what buffers hold that are parts, one after another."""
    counts, edges = np.array([part.count for part in parts], np.int64), edges_of(parts)
    table = np.zeros(len(edges), PIECE_DTYPE)
    table["buffer"] = np.repeat(np.arange(len(parts)), counts)
    table["turned"] = np.repeat([part.order == "C" for part in parts], counts)
    sizes = edges[:, 1::2] - edges[:, ::2]
    turned = table["turned"] == 1
    sizes[turned] = sizes[turned, ::-1]
    table["rows"], table["cols"] = sizes.T
    # In the buffer each block begins behind those before it.
    table["col"] = expand_ranges(np.zeros(len(parts), np.int64), counts) * table["cols"]
    table["top"], table["left"] = edges[:, ::2].T
    return table


def parts_on_devices(problem: GemmProblem, placement: Placement) -> dict[int, list[tuple[Matrix, Part]]]:
    """Return the parts on each rank's device."""
    found: dict[int, list[tuple[Matrix, Part]]] = {}
    for matrix in MATRICES:
        for part in placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix)):
            if part.location.space == "device" and part.location.rank is not None:
                found.setdefault(part.location.rank, []).append((matrix, part))
    return found


def homes(
    problem: GemmProblem, parts: Iterable[tuple[Matrix, Part]], rows: range, cols: range, inner: range
) -> dict[Matrix, Part]:
    """Return which of some parts has all that a block of C needs of A, B or C, with these steps of k."""
    found: dict[Matrix, Part] = {}
    for matrix, part in parts:
        down, along = inner if matrix is Matrix.B else rows, inner if matrix is Matrix.A else cols
        if {Matrix.A: problem.trans_a, Matrix.B: problem.trans_b}.get(matrix, "N") != "N":
            down, along = along, down
        (top, bottom), (left, right) = part.rows, part.cols
        if top <= down.start and down.stop <= bottom and left <= along.start and along.stop <= right:
            found[matrix] = part
    return found


@functools.lru_cache(maxsize=64)
def resident_bytes(ranks: Ranks, problem: GemmProblem, placement: Placement) -> tuple[int, ...]:
    """Return what the caller's matrices take of each memory (`location_table`)."""
    users = user_table(ranks, problem, placement)
    resident = np.zeros(len(location_table(ranks)), np.int64)
    np.add.at(resident, users["location"], user_bytes(users))
    return tuple(resident.tolist())


def user_bytes(users: np.ndarray) -> np.ndarray:
    """
    Return what each of the caller's buffers takes.

    Of a matrix's several ones in a memory that is their elements alone: they may lie in the same columns.

    Parameters
    ----------
    users : ndarray of BUFFER_DTYPE
        Such buffers.
    """
    there = len(MATRICES) * users["location"].astype(np.int64) + users["matrix"]
    elements, spanned = users["rows"].astype(np.int64) * users["cols"] * ITEMSIZES[users["dtype"]], buffer_bytes(users)
    return np.where(np.bincount(there)[there] > 1, np.minimum(elements, spanned), spanned)


def elements_aligned(problem: GemmProblem) -> int:
    """Return how many elements `ALIGNMENT` bytes are, of every matrix."""
    return max(1, ALIGNMENT // min(dtype.itemsize for dtype in problem.dtypes))


def _aligned(size: int) -> int:
    return -(-size // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT


def aligned_ld(rows: int, dtype: DType) -> int:
    """Return the leading dimension of a panel of so many rows, in elements."""
    step = COLUMN_ALIGNMENT // dtype.itemsize
    return -(-rows // step) * step


def panel_bytes(shape: Sequence[int], dtype: DType) -> int:
    """Return what a panel of so many rows and columns takes."""
    rows, cols = shape
    return aligned_ld(rows, dtype) * cols * dtype.itemsize
