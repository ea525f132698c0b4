"""
Which task is certain to be over before another starts: vector clocks over lanes.

Lanes are first in, first out, so "everything on lane l up to task u is over" is one number per lane.
A clock holds that number for every lane. The global order is never used as an ordering: it only
says in which sequence clocks can be computed, since no task awaits a later one.
"""

from __future__ import annotations

import numpy as np

from uncut_mpi.planning.schedule import Schedule


class Clocks:
    """
    Vector clocks of one schedule, computed task by task in the global order.

    ``clock[l]`` is the last task of lane l that is over before the task starts; −1 for none. The
    task's own lane names the task itself. A clock is kept only while a later task still awaits it.
    """

    def __init__(self, schedule: Schedule) -> None:
        tasks = schedule.tasks
        self._lane: list[int] = tasks["lane"].tolist()
        self._first: list[int] = tasks["first_await"].tolist()
        self._count: list[int] = tasks["num_awaits"].tolist()
        self._awaits: list[int] = schedule.awaits.tolist()
        awaited = [
            a for first, n in zip(self._first, self._count, strict=True) for a in self._awaits[first : first + n]
        ]
        self._uses: list[int] = np.bincount(np.array(awaited, np.int64), minlength=len(tasks)).tolist()
        self._of_task: dict[int, np.ndarray] = {}
        self._of_lane: list[np.ndarray] = [np.full(len(schedule.lanes), -1, np.int32)] * len(schedule.lanes)

    def advance(self, task: int) -> np.ndarray:
        """Return the clock of `task`; call once per task, in the global order."""
        lane = self._lane[task]
        clock: np.ndarray = self._of_lane[lane].copy()
        first = self._first[task]
        for awaited in self._awaits[first : first + self._count[task]]:
            if clock[self._lane[awaited]] < awaited:
                np.maximum(clock, self._of_task[awaited], out=clock)
            self._uses[awaited] -= 1
            if not self._uses[awaited]:
                del self._of_task[awaited]
        clock[lane] = task
        self._of_lane[lane] = clock
        if self._uses[task]:
            self._of_task[task] = clock
        return clock
