"""Which of several plans is the fastest, found out by their first calls."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import ClassVar, Final

import numpy as np

from uncut_mpi.api.plans import Plan, PlanKey, PlanSummary

CALLS: Final = 3
"""Calls of each plan that are timed; its first one comes before them and is not."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """
    Several plans of one key, of which the next calls show the fastest.

    Every rank counts the same calls, so the turns are the same on all ranks; the times are this rank's own.

    Attributes
    ----------
    plans : tuple of Plan
        The one that is predicted best comes first, and is never left out.
    seconds : tuple of (tuple of float or None)
        What the calls of each took so far; None for one that cannot run here and is left out.
    """

    plans: tuple[Plan, ...]
    seconds: tuple[tuple[float, ...] | None, ...]
    tuning: ClassVar[bool] = True

    @property
    def key(self) -> PlanKey:
        """What the plans were made for."""
        return self.plans[0].key

    @property
    def digest(self) -> bytes:
        """16 bytes that only trials of the same plans at the same moment share: all ranks run the same schedule."""
        counts = [-1 if times is None else len(times) for times in self.seconds]
        return hashlib.blake2b(self.turn.digest + repr(counts).encode(), digest_size=16).digest()

    @property
    def index(self) -> int:
        """
        Whose turn it is: that of a plan that ran least, so that all meet the same conditions.

        Every other round goes backwards, so that no plan always comes after a slow one, which lets devices cool.
        """
        counts = {index: len(times) for index, times in enumerate(self.seconds) if times is not None}
        least = min(counts.values())
        those = [index for index, count in counts.items() if count == least]
        return those[-1 if least % 2 else 0]

    @property
    def turn(self) -> Plan:
        """The plan that the next call runs."""
        return self.plans[self.index]

    now = turn

    @property
    def may_go(self) -> bool:
        """Whether the plan whose turn it is may be left out."""
        return self.index > 0

    @property
    def shown(self) -> Plan:
        """The plan that is predicted best, which callers are told of."""
        return self.plans[0]

    @property
    def summary(self) -> PlanSummary:
        """That of the plan predicted best."""
        return self.plans[0].summary

    @property
    def every(self) -> Sequence[Plan]:
        """All that may be bound."""
        return self.plans

    @property
    def num_left(self) -> int:
        """How many plans are not left out."""
        return sum(times is not None for times in self.seconds)

    @property
    def over(self) -> bool:
        """Whether every plan that is not left out has its times."""
        return all(times is None or len(times) > CALLS for times in self.seconds)

    def after(self, seconds: float) -> Trial:
        """Return the trial after a call of the plan whose turn it is."""
        return self._with((*(self.seconds[self.index] or ()), seconds))

    def without(self) -> Trial:
        """Return the trial without the plan whose turn it is: it cannot run here."""
        return self._with(None)

    def _with(self, times: tuple[float, ...] | None) -> Trial:
        at = self.index
        return dataclasses.replace(self, seconds=(*self.seconds[:at], times, *self.seconds[at + 1 :]))

    def table(self) -> np.ndarray:
        """Return this rank's times (s), shape (plans, CALLS); infinite for plans that are left out."""
        return np.array([[np.inf] * CALLS if times is None else times[1 : 1 + CALLS] for times in self.seconds])


def fastest(tables: np.ndarray) -> int:
    """
    Return the plan whose calls take least, in the median of the slowest rank.

    Parameters
    ----------
    tables : ndarray of float64, shape (ranks, plans, CALLS)
        The tables of all ranks.
    """
    return int(np.argmin(np.median(tables.max(axis=0), axis=1)))
