"""When every task of one call ran, on all ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from uncut_mpi.device.interface import TaskTimes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """
    When the tasks of one call ran.

    Attributes
    ----------
    start_s, end_s : ndarray of float64, shape (number of tasks,)
        One per task of the plan's schedule, from the moment that the first task of any rank began. NaN for a JOIN,
        which no device executes.

    Notes
    -----
    On a GPU, times are those of events on the task's stream, so that a task that waits for the multiprocessors or
    a copy engine runs already. Clocks of different ranks are compared by one event each, to some 10 µs.
    """

    start_s: np.ndarray
    end_s: np.ndarray


def merge_times(num_tasks: int, of_ranks: Sequence[TaskTimes]) -> Trace:
    """Return the times of all ranks as one trace."""
    start, end = np.full((2, num_tasks), np.nan)
    for times in of_ranks:
        start[times.tasks], end[times.tasks] = times.start_s, times.end_s
    first = np.nanmin(start) if np.isfinite(start).any() else 0.0
    return Trace(start - first, end - first)
