"""Which ranks compute, which place of a grid each fills, and what fits where memory is short: for a search."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from uncut_mpi.planning.grid import ProcessGrid, grids
from uncut_mpi.planning.node_grid import in_tiles
from uncut_mpi.planning.options import COMBINES, ScheduleOptions, changed
from uncut_mpi.planning.partition import sizes_of_columns
from uncut_mpi.planning.ranks import ranks_by_use
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.shares import arrange
from uncut_mpi.planning.ways import ways_of

ALL_COUNTS: Final = 12
"""On up to so many ranks every number of them is tried; of more, eighths of them and halves of an eighth."""

MANY: Final = 64
"""Of more ranks a search for room looks at three quarters at least, and at columns of them that are about square."""

MOST_SIDE: Final = 64
"""The longest row or column of ranks that is tried, if the most square grid has no longer one."""

SHARE_TOLERANCE: Final = 0.05
"""Ranks whose speeds differ by no more than this part are equal."""


class RankSets:
    """
    Sets of ranks, and the places that they fill.

    Parameters
    ----------
    setting : Setting
        As for `uncut_mpi.planning.search.search`.
    """

    def __init__(self, setting: Setting) -> None:
        self._setting, self._problem = setting, setting.problem
        self._machine, self._num_ranks = setting.machine, setting.num_ranks
        self._known: dict[tuple[tuple[int, ...], tuple[int, int] | None], dict[str, Any]] = {}

    @functools.cached_property
    def by_use(self) -> list[int]:
        """All ranks, those of most use first."""
        return ranks_by_use(self._problem, self._setting.placement, self._machine)

    @functools.cached_property
    def even(self) -> bool:
        """Whether all links between devices are as fast."""
        return ways_of(self._machine).even

    @functools.cached_property
    def counts(self) -> list[int]:
        """How many ranks may compute."""
        most = self._num_ranks
        if most <= ALL_COUNTS:
            return list(range(most, 0, -1))
        counts = [most * eighths // 8 for eighths in range(8, 0, -1)]
        while counts[-1] > 1:
            counts.append(counts[-1] // 2)
        return [most, *dict.fromkeys(_count_without_long_grid(count) for count in counts[1:])]

    def in_order(self, ranks: Iterable[int]) -> dict[str, Any]:
        """Return `devices` for ranks in the order in which they fill places; None if they are all ranks in order."""
        devices = tuple(ranks)
        return {"devices": None if devices == tuple(range(self._num_ranks)) else devices}

    def devices_and_shares(self, ranks: tuple[int, ...], grid: tuple[int, int] | None) -> dict[str, Any]:
        """Return devices and shares for ranks on a grid: equal blocks unless their rates differ."""
        if (ranks, grid) not in self._known:
            self._known[ranks, grid] = self._place(ranks, grid)
        return self._known[ranks, grid]

    def _place(self, ranks: tuple[int, ...], grid: tuple[int, int] | None) -> dict[str, Any]:
        rates = self._machine.typical_gemm_rate(self._problem.arithmetic)[list(ranks)]
        transposed = self._problem.swapped
        places = ProcessGrid.choose(math.prod(grid) if grid else len(ranks), grid, transposed=transposed)
        if grid and self._machine.num_nodes > 1:  # else the scheduler chooses both
            ranks = in_tiles(self._problem, self._machine, sorted(ranks), places)
        devices = self.in_order(ranks)
        if rates.max() <= (1 + SHARE_TOLERANCE) * rates.min() or places.size != len(ranks):
            return {**devices, "row_shares": None, "col_shares": None, "areas": None}
        arranged, shares = arrange(ranks, rates.tolist(), places)
        return {**self.in_order(arranged), "row_shares": shares.rows, "col_shares": shares.cols, "areas": None}

    def with_room(self, asked: ScheduleOptions) -> Iterator[ScheduleOptions]:
        """
        Return ways to begin where memory is short: other ranks, those with most room first, grids and places of sums.

        Columns of ranks come last: of a number of ranks that has few divisors they take less than any grid.
        """
        order = sorted(range(self._num_ranks), key=lambda rank: (-self._setting.room[rank], rank))
        counts = self.counts if not is_cut(asked) else [max(self.counts)]  # who fixes the cut names places for all
        if self._num_ranks > MANY:  # each way takes milliseconds by then, and fewer ranks have less room together
            counts = [count for count in counts if 4 * count >= 3 * self._num_ranks]
        sets = [tuple(sorted(order[:count])) for count in counts] if asked.devices is None else [asked.devices]
        given = asked.blocking
        small: dict[str, Any] = {"columns": given.columns or 16}
        if not given.order and given.rows <= 1 and not given.tail:
            small["order"] = "columns"  # C enters a block at a time
        free = not given.combine and not given.away
        for ranks, combine in itertools.product(sets, COMBINES if free else (given.combine,)):
            cuts: list[dict[str, Any]] = [{}]
            if not is_cut(asked):
                root, several = math.isqrt(len(ranks)), range(2, len(ranks))
                if len(ranks) > MANY:
                    several = range(root // 2, 2 * root + 1)
                sizes = (sizes_of_columns([1.0] * len(ranks), columns) for columns in several)
                rings = given.in_rings  # of a process grid, each rank of which has all of k
                cuts = [
                    {"grid": grid[:2], "splits": grid[2]} for grid in grids(len(ranks)) if grid[2] == 1 or not rings
                ]
                if not rings:
                    cuts += [{"areas": in_columns(np.ones(len(ranks)), each), "splits": 1} for each in sizes]
            for cut in cuts:
                splits = cut.pop("splits", given.splits)
                if given.splits in (0, splits):
                    filled = ranks
                    if asked.devices is None and "grid" in cut:
                        down, along = cut["grid"]
                        places = ProcessGrid(down, along, self._problem.swapped)
                        filled = in_tiles(self._problem, self._machine, ranks, places)
                    where = {"devices": ranks} if asked.devices is not None else self.in_order(filled)
                    yield changed(
                        asked, **where, **cut, blocking=changed(given, splits=splits, combine=combine, **small)
                    )


def _count_without_long_grid(count: int) -> int:
    """Return the next lower number of ranks whose most square grid is no more than `MOST_SIDE` wide, or 2 to 1."""
    while (grid := ProcessGrid.most_square(count)).cols > max(MOST_SIDE, 2 * grid.rows):
        count -= 1
    return count


def is_cut(asked: ScheduleOptions) -> bool:
    """Whether the caller has said how C is cut: by a grid, by shares or by areas."""
    shares = asked.row_shares, asked.col_shares, asked.k_shares
    return any(one is not None for one in (asked.grid, *shares, asked.areas))


def in_columns(speeds: np.ndarray, sizes: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Return areas in proportion to speeds, summing to 1, in columns of so many ranks."""
    each = iter((speeds / speeds.sum()).tolist())
    return tuple(tuple(itertools.islice(each, size)) for size in sizes)
