"""Which of several schedules is the fastest, found out by a plan's first calls."""

from __future__ import annotations

from typing import Final

import numpy as np

CALLS: Final = 3
"""Calls of each schedule that are timed; its first one comes before them and is not."""


class Trials:
    """
    The times of some schedules, and whose turn it is.

    Every rank records the same calls, so the turns are the same on all ranks; the times are this rank's own.

    Parameters
    ----------
    count : int
        Schedules; the first one is never left out.
    """

    def __init__(self, count: int) -> None:
        self._seconds: list[list[float]] = [[] for _ in range(count)]
        self._left_out: set[int] = set()

    @property
    def turn(self) -> int:
        """The schedule of the next call: the one that ran least, so that all meet the same conditions."""
        left = (index for index in range(len(self._seconds)) if index not in self._left_out)
        return min(left, key=lambda index: len(self._seconds[index]))

    @property
    def num_left(self) -> int:
        """How many schedules are not left out."""
        return len(self._seconds) - len(self._left_out)

    @property
    def state(self) -> int:
        """A number that differs between any two moments of the trials."""
        return sum(map(len, self._seconds)) * len(self._seconds) + len(self._left_out)

    @property
    def over(self) -> bool:
        """Whether every schedule that is not left out has its times."""
        return all(len(times) > CALLS or index in self._left_out for index, times in enumerate(self._seconds))

    def record(self, seconds: float) -> None:
        """Take the time of a call of the schedule whose turn it was."""
        self._seconds[self.turn].append(seconds)

    def leave_out(self, index: int) -> None:
        """Try a schedule no more: it cannot run here."""
        self._left_out.add(index)

    def table(self) -> np.ndarray:
        """Return this rank's times (s), shape (schedules, CALLS); infinite for schedules that are left out."""
        table = np.full((len(self._seconds), CALLS), np.inf)
        for index, times in enumerate(self._seconds):
            if index not in self._left_out:
                table[index] = times[1 : 1 + CALLS]
        return table


def fastest(tables: np.ndarray) -> int:
    """
    Return the schedule whose calls take least, in the median of the slowest rank.

    Parameters
    ----------
    tables : ndarray of float64, shape (ranks, schedules, CALLS)
        The tables of all ranks.
    """
    return int(np.argmin(np.median(tables.max(axis=0), axis=1)))
