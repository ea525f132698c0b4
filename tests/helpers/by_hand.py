"""Schedules of single tasks, written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.schedule import Factor, Kind, Op, Role, Schedule


class ByHand(ScheduleBuilder):
    """Tasks among buffers of any kind, of a problem that nobody looks at."""

    def __init__(self, ranks: int = 1, dtype: DType = DType.f64, **how: Any) -> None:
        super().__init__(ranks, GemmProblem(1, 1, 1, dtype), Placement.parse("0,0,0"), **how)

    def add(self, at: Location | int, rows: int = 1, cols: int = 1, dtype: DType = DType.f64, **how: Any) -> RegionRef:
        """Add a buffer, and return all of it."""
        made = self.buffer(at=at, rows=rows, cols=cols, dtype=dtype, **{"role": Role.STAGING, **how})
        return RegionRef(made, 0, 0, rows, cols)

    def copy(self, lane: int, to: RegionRef, of: RegionRef, awaits: Sequence[int] = (), op: Op = Op.N) -> int:
        """Add a copy, and return its task."""
        return self.task(Kind.COPY, lane, to, [(of, Factor.ONE, op)], awaits)

    def done(self) -> Schedule:
        """Return the schedule."""
        return self.build(scheduler="test", grid=(1, 1), tile=0)
