"""Counts by which a caller sees what calls cost: plans made, bytes broadcast, allocations, tasks."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class Counters:
    """
    What this rank has done in a session so far.

    Attributes
    ----------
    calls : int
        Products executed.
    planner_calls : int
        Schedules computed (rank 0) or received (the others).
    schedule_bytes_broadcast : int
        Bytes of schedules that went through MPI.
    allocations : int
        Device allocations made: SoftBuf, flags and matrices.
    tasks, copy_bytes : int
        Tasks that this rank executed and bytes that its copies moved.
    """

    calls: int = 0
    planner_calls: int = 0
    schedule_bytes_broadcast: int = 0
    allocations: int = 0
    tasks: int = 0
    copy_bytes: int = 0

    def add(self, tasks: int, copy_bytes: int) -> None:
        """Count one product."""
        self.calls += 1
        self.tasks += tasks
        self.copy_bytes += copy_bytes

    def snapshot(self) -> Counters:
        """Return a copy."""
        return dataclasses.replace(self)
