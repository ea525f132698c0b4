"""Sequences in which the same value often stands many times in a row, as shapes in a batch do."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np

_T = TypeVar("_T")


class Alike(Sequence[_T], Generic[_T]):
    """
    Values as runs of equal ones: what is made, compared and hashed takes as long as there are runs.

    Parameters
    ----------
    runs : iterable of (value, int)
        Each value, and how many times it stands there; neighbours may be equal.
    """

    def __init__(self, runs: Iterable[tuple[_T, int]] = ()) -> None:
        joined = itertools.groupby((run for run in runs if run[1]), lambda one: one[0])
        self.runs: tuple[tuple[_T, int], ...] = tuple(
            (value, sum(count for _, count in some)) for value, some in joined
        )
        self._stops = [*itertools.accumulate(count for _, count in self.runs)]

    @classmethod
    def of(cls, values: Iterable[_T]) -> Alike[_T]:
        """Return some values, or what they are already."""
        return values if isinstance(values, Alike) else cls((value, 1) for value in values)

    def __len__(self) -> int:
        return self._stops[-1] if self._stops else 0

    def __iter__(self) -> Iterator[_T]:
        return itertools.chain.from_iterable(itertools.repeat(*run) for run in self.runs)

    @overload
    def __getitem__(self, at: int) -> _T: ...
    @overload
    def __getitem__(self, at: slice) -> Sequence[_T]: ...
    def __getitem__(self, at: int | slice) -> _T | Sequence[_T]:
        if isinstance(at, slice):
            return [*self][at]
        return self.runs[bisect.bisect_right(self._stops, range(len(self))[at])][0]

    def __eq__(self, other: object) -> bool:
        return self.runs == other.runs if isinstance(other, Alike) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.runs)

    def __repr__(self) -> str:
        return f"Alike({self.runs!r})"

    def table(self, width: int) -> np.ndarray:
        """Return values that are tuples of so many whole numbers as the rows of an array, int64."""
        values = np.array([value for value, _ in self.runs], np.int64).reshape(-1, width)
        return np.repeat(values, [count for _, count in self.runs], axis=0)

    def encoded(self) -> list[Any]:
        """Return values that are tuples as lists, for JSON, each with how many times it stands there."""
        return [[*value, count] for value, count in self.runs]  # type: ignore[misc]

    @classmethod
    def decoded(cls, values: Iterable[Sequence[Any]]) -> Alike[Any]:
        """Return what `encoded` was made of; ValueError or TypeError for anything else."""
        made: Alike[Any] = Alike((tuple(value), count) for *value, count in values)
        return made
