"""Which of several schedules is the fastest, found out by a plan's first calls."""

from __future__ import annotations

from typing import Final

import numpy as np

CALLS: Final = 3
"""Calls of each schedule that are timed; the one that binds it comes before them and is not."""

_PATIENCE: Final = 2
"""Times as many calls as needed are made at most, where memory grows or matrices change on the way."""


class Trials:
    """
    The times of some schedules, and whose turn it is.

    Every rank records the same calls, so the turns are the same on all ranks; the times are this rank's own.

    Parameters
    ----------
    count : int
        Schedules.
    """

    def __init__(self, count: int) -> None:
        self._seconds: list[list[float]] = [[] for _ in range(count)]
        self._most = _PATIENCE * count * (CALLS + 1)
        self.calls = 0

    @property
    def turn(self) -> int:
        """The schedule of the next call: one with the fewest times, so that all meet the same conditions."""
        return min(range(len(self._seconds)), key=lambda index: len(self._seconds[index]))

    @property
    def over(self) -> bool:
        """Whether enough is known, or too much was tried."""
        return self.calls >= self._most or all(len(times) >= CALLS for times in self._seconds)

    def record(self, seconds: float | None) -> None:
        """Take the time of a call of the schedule whose turn it was; None where it had to bind first."""
        self.calls += 1
        if seconds is not None:
            self._seconds[self.turn].append(seconds)

    def table(self) -> np.ndarray:
        """Return this rank's times (s), shape (schedules, CALLS); infinite where there are fewer."""
        table = np.full((len(self._seconds), CALLS), np.inf)
        for row, times in zip(table, self._seconds, strict=True):
            row[: min(len(times), CALLS)] = times[:CALLS]
        return table


def fastest(tables: np.ndarray) -> int:
    """
    Return the schedule whose calls take least, in the median of the slowest rank; the first one if none was timed.

    Parameters
    ----------
    tables : ndarray of float64, shape (ranks, schedules, CALLS)
        The tables of all ranks.
    """
    return int(np.argmin(np.median(tables.max(axis=0), axis=1)))
