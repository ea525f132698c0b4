"""What searches of a session have chosen, for products that differ from theirs in their extents alone."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Final

from uncut_mpi.api.keys import PlanKey
from uncut_mpi.model.locations import Location
from uncut_mpi.model.placement import Where
from uncut_mpi.planning.options import ScheduleOptions, changed

FACTOR: Final = 2.0
"""Extents of neighbours differ by no more than this."""

MOST: Final = 64
"""How many are kept."""

_Extents = tuple[int, int, int]


class Neighbours:
    """Choices of searches by the product that they were made for, `MOST` at most; the least recently used go first."""

    def __init__(self) -> None:
        self._known: dict[tuple[Hashable, _Extents], ScheduleOptions] = {}

    def add(self, key: PlanKey, chosen: ScheduleOptions) -> None:
        """Keep what a search has chosen for a product, of the caller's C, unless memory has limited it."""
        if chosen.blocking.in_rings or 0 in _extents(key):
            return
        about = _alike(key), _extents(key)
        self._known.pop(about, None)
        self._known[about] = chosen
        if len(self._known) > MOST:
            del self._known[next(iter(self._known))]

    def of(self, key: PlanKey) -> ScheduleOptions | None:
        """Return what was chosen for the product that is the nearest one to another, if one is near."""
        alike, extents = _alike(key), _extents(key)
        if 0 in extents:  # nothing is multiplied
            return None
        near = {its: _distance(extents, its) for kind, its in self._known if kind == alike}
        nearest = min(near, key=near.__getitem__, default=None)
        if nearest is None or near[nearest] > math.log(FACTOR):
            return None
        chosen = self._known[alike, nearest] = self._known.pop((alike, nearest))
        return chosen


def _extents(key: PlanKey) -> _Extents:
    return key.problem.m, key.problem.n, key.problem.k


def _distance(one: _Extents, other: _Extents) -> float:
    return max(abs(math.log(a / b)) for a, b in zip(one, other, strict=True))


def _alike(key: PlanKey) -> Hashable:
    """Return what is equal for products that differ in nothing but their extents."""
    problem, placement = key.problem, key.placement
    how = (
        problem.dtypes,
        problem.trans_a,
        problem.trans_b,
        problem.reads_c,
        problem.swapped,
        problem.triangle,
        problem.forms,
        problem.epilogue,
    )
    where = tuple(map(_where, (placement.a, placement.b, placement.c)))
    return how, where, changed(key.options, search=""), bool(key.private), bool(key.files)


def _where(where: Where) -> Hashable:
    if isinstance(where, Location):
        return where
    return where.word, tuple((part.location, part.order) for part in where.parts)
