"""Building a schedule task by task, for schedulers written in Python and for tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import ANY_DEVICE, Location, Ranks, host_index, location_index, location_table, nodes_of
from uncut_mpi.model.placement import MATRICES, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.buffers import user_pieces
from uncut_mpi.planning.schedule import (
    AWAIT_DTYPE,
    BUFFER_DTYPE,
    LANE_DTYPE,
    NO_SOURCE,
    OPERAND_DTYPE,
    REGION_DTYPE,
    TASK_DTYPE,
    Factor,
    Kind,
    LaneKind,
    Matrix,
    Op,
    Role,
    Schedule,
)


class RegionRef(NamedTuple):
    """A rectangle of a buffer while a schedule is being built: buffer index, first row and column, extent."""

    buffer: int
    row: int
    col: int
    rows: int
    cols: int

    def part(self, row: int, col: int, rows: int, cols: int) -> RegionRef:
        """Return a rectangle of this one."""
        return RegionRef(self.buffer, self.row + row, self.col + col, rows, cols)


class ScheduleBuilder:
    """
    Collects buffers, lanes and tasks in the global order and makes a `Schedule` of them.

    For schedulers written in Python and for tests; the inner loops of large schedulers fill the
    tables natively. With `serial_copies` (`Machine.serial_copies`) copies to other devices share a lane of their kind.
    """

    def __init__(
        self, ranks: Ranks, problem: GemmProblem, placement: Placement, *, serial_copies: bool = False
    ) -> None:
        self._about = (ranks, problem, placement)
        self._serial_copies = serial_copies
        self._buffers: list[tuple[Any, ...]] = []
        self._lanes: dict[tuple[int, int, int, int], int] = {}
        self._rank_of_lane: list[int] = []
        self._regions: dict[RegionRef, int] = {}
        self._tasks: list[tuple[Any, ...]] = []
        self._operands: list[tuple[int, int, int, int, int]] = []
        self._awaits: list[int] = []

    def buffer(
        self,
        *,
        at: Location | int,
        rows: int,
        cols: int,
        dtype: DType,
        role: Role,
        matrix: Matrix = Matrix.NONE,
        ld: int | None = None,
        offset: int = -1,
    ) -> int:
        """Add a buffer, on the device of a rank or where else, and return its index; `ld` defaults to the rows."""
        where = at if isinstance(at, int) else location_index(at, self._about[0])
        self._buffers.append(
            (where, role, matrix, dtype, 0, rows, cols, ld if ld is not None else max(1, rows), offset)
        )
        return len(self._buffers) - 1

    @property
    def host(self) -> int:
        """The host end of copy lanes."""
        return host_index(self._about[0])

    def compute_lane(self, rank: int, number: int = 0) -> int:
        """Return the index of compute lane `number` of `rank`, added at first use."""
        return self._lane((rank, LaneKind.COMPUTE, NO_SOURCE, number))

    def host_lane(self, rank: int, number: int = 0) -> int:
        """Return the index of lane `number` of the worker of `rank`, added at first use."""
        return self._lane((rank, LaneKind.HOST, NO_SOURCE, number))

    def copy_lane(self, rank: int, source: int, destination: int) -> int:
        """Return the index of the lane on which `rank` issues copies source → destination (locations)."""
        return self._lane((rank, LaneKind.COPY, source, self._end(rank, source, destination)))

    def result_lane(self, rank: int, source: int, destination: int) -> int:
        """Return the index of the lane on which `rank` issues copies of results source → destination."""
        return self._lane((rank, LaneKind.RESULT, source, self._end(rank, source, destination)))

    def _end(self, rank: int, source: int, destination: int) -> int:
        together = self._serial_copies and source == rank and destination not in (rank, self.host)
        return ANY_DEVICE if together else destination

    def task(
        self,
        kind: Kind,
        lane: int,
        write: RegionRef | None = None,
        reads: Sequence[tuple[RegionRef, Factor, Op]] = (),
        awaits: Iterable[int] = (),
        group: int = -1,
        ending: tuple[Op, int] = (Op.N, 0),
    ) -> int:
        """Append a task at the end of the global order and return its index; `ending`: op and diagonal of `write`."""
        awaited = sorted(set(awaits))
        first_operand, first_await = len(self._operands), len(self._awaits)
        if write is not None:
            self._operands.append((self._region(write), Factor.ONE, ending[0], 0, ending[1]))
        for region, factor, op in reads:
            self._operands.append((self._region(region), factor, op, 0, 0))
        self._awaits += awaited
        rank = self._rank_of_lane[lane]
        self._tasks.append(
            (kind, 0, len(self._operands) - first_operand, rank, lane, group, first_operand, first_await, len(awaited))
        )
        return len(self._tasks) - 1

    def build(
        self,
        *,
        scheduler: str,
        grid: tuple[int, int],
        tile: int,
        buffers: np.ndarray | None = None,
    ) -> Schedule:
        """Return the checked schedule; `buffers`, records of BUFFER_DTYPE, replaces those that were added."""
        ranks, problem, placement = self._about
        regions = [(ref.buffer, 0, ref.row, ref.col, ref.rows, ref.cols) for ref in self._regions]
        table = np.array(self._buffers, BUFFER_DTYPE) if buffers is None else buffers
        schedule = Schedule(
            num_ranks=len(nodes_of(ranks)),
            problem=problem,
            placement=placement,
            scheduler=scheduler,
            grid=grid,
            splits=1,
            tile=tile,
            tasks=np.array(self._tasks, TASK_DTYPE),
            operands=np.array(self._operands, OPERAND_DTYPE),
            regions=np.array(regions, REGION_DTYPE),
            awaits=np.array(self._awaits, AWAIT_DTYPE),
            buffers=table,
            lanes=np.array(list(self._lanes), LANE_DTYPE),
            locations=location_table(ranks),
            pieces=_pieces(problem, placement, table),
        )
        schedule.check()
        return schedule

    def _lane(self, key: tuple[int, int, int, int]) -> int:
        if key not in self._lanes:
            self._lanes[key] = len(self._rank_of_lane)
            self._rank_of_lane.append(key[0])
        return self._lanes[key]

    def _region(self, ref: RegionRef) -> int:
        return self._regions.setdefault(ref, len(self._regions))


def _pieces(problem: GemmProblem, placement: Placement, buffers: np.ndarray) -> np.ndarray:
    """Return what the caller's buffers hold: of each matrix the first one has its first part, and so on."""
    users = buffers[buffers["role"] == Role.USER]
    left = {matrix: iter(np.flatnonzero(users["matrix"] == matrix).tolist()) for matrix in MATRICES}
    pieces = user_pieces(problem, placement).copy()
    of_parts = [
        next(left[matrix], -1)
        for matrix in MATRICES
        for _ in placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix))
    ]
    pieces["buffer"] = np.array(of_parts)[pieces["buffer"]]
    pieces = pieces[pieces["buffer"] >= 0]
    pieces["buffer"] = np.flatnonzero(buffers["role"] == Role.USER)[pieces["buffer"]]
    return np.asarray(pieces)
