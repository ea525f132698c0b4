"""
The chooser: tries schedules by simulation and keeps the best.

What the caller fixed stays fixed; the rest (process grid, ranks that compute, tile, batching and
chunks, unequal shares) is searched. Candidates come in a written order: first the heuristics' own
choice of each scheduler, then one dimension after the other around the best so far (coordinate descent), in
rounds, until a round brings nothing or the budget is spent; how finely copies are cut comes last. A
scheduler far behind the best of the others is left at that. The budget counts simulated tasks, never time, so
that equal inputs give equal choices on any machine. It grows with the ranks, as schedules do. Whatever is left of it,
what each scheduler's own rules give (`cyclic` on all ranks) is simulated, so that no choice is worse, unless it alone
has more tasks than that. A candidate whose bound is no better than the best found is not simulated, and one that surely
has more tasks than are left is not made.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from uncut_mpi.errors import CapacityError, ParamError, PlanError, UncutError
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.grid_bounds import grids
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Location, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.decomposition import candidate_tiles, fitting_tile
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.metrics import energy_j, metric_of, watts_known
from uncut_mpi.planning.options import BLOCK_ORDERS, COMBINES, DISTRIBUTIONS, SCHEDULERS, ScheduleOptions
from uncut_mpi.planning.partition import columns_of_ranks
from uncut_mpi.planning.ranks import ranks_by_use
from uncut_mpi.planning.schedule import Kind, Schedule
from uncut_mpi.planning.schedulers import make_schedule
from uncut_mpi.planning.shares import arrange, fit_shares
from uncut_mpi.planning.simulate import Simulation, simulate
from uncut_mpi.planning.tiles import MAX_TASKS

DEFAULT_BUDGET_TASKS: Final = 40_000
"""Simulated tasks of a search on up to 8 ranks, where it takes 50 to 150 ms."""

BUDGET_TASKS_PER_RANK: Final = 5_000
"""The same on more ranks, for each of them."""

_TILES: Final = 6
_ROUNDS: Final = 3
_ALL_COUNTS: Final = 12
"""On up to so many ranks every number of them is tried; of more, eighths of them and halves of an eighth."""

_MOST_SIDE: Final = 64
"""
Ranks in a row or column of the grids of tiles that are tried: a fetch looks at its ranks in pairs. Above, the most
square grid alone is.
"""

_COLUMN_BLOCKS: Final = (1, 2, 3, 4, 8)
_K_BLOCKS: Final = (1024, 2048, 4096)
_GROWTHS: Final = (2, 3, 4)
_FIRST_BLOCKS: Final = (128, 256, 512, 1024)
_FIRST_BLOCK_OF_HALVES: Final = 2048
_MOST_ARRANGEMENTS: Final = 24
"""Ways to place the owners of matrices of which all are tried; of more, those that move one of them."""

_OURS: Final = ("uncut", "kblocks")
_HOPELESS: Final = 1.25
"""A scheduler whose first tries take so many times as long as another's is not looked at further."""

_FAR_BEHIND: Final = 1.1
"""A grid whose best takes so many times as long is not tried with other blocks."""

_FIRST_PART: Final = 0.7
"""What the more promising scheduler gets of the budget, at least."""

_DIMENSIONS: Final = {
    "uncut": ("_when_c", "_orders", "_grids", "_tiles", "_ranks", "_rough", "_shares"),
    "kblocks": (
        "_combines",
        "_splits",
        "_block_orders",
        "_columns",
        "_arrangements",
        "_shares",
        "_columns_of_ranks",
        "_largest_blocks",
        "_first_blocks",
        "_growths",
        "_fewer_ranks",
        "_shares",
    ),
    "cyclic": ("_edges", "_distributions"),
    "bands": ("_edges",),
}
"""What is varied, in this order: first what costs few tasks for what it brings."""

_WITHIN_A_GRID: Final = (
    "_arrangements",
    "_shares",
    "_combines",
    "_columns",
    "_largest_blocks",
    "_first_blocks",
    "_growths",
    "_shares",
)
_OTHERS: Final = 3
"""On how many other grids of ranks blocks and shares are improved, at most."""

_WORTH_SHARES: Final = 1.5
"""A grid whose best, mostly of equal shares, takes so many times as long is not among these."""

_SHARE_STEPS: Final = 3
_SHARE_TOLERANCE: Final = 0.05


_Dimension = Callable[[ScheduleOptions, "Candidate"], Iterator[dict[str, Any]]]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """
    A schedule that the search looked at.

    Attributes
    ----------
    options : ScheduleOptions
        What it was made with; every searched field is set.
    simulation : Simulation
        Its run as the model sees it.
    bound_s : float
        What no schedule on these ranks can beat.
    value : float
        What the metric makes of it; smaller is better.
    """

    options: ScheduleOptions
    simulation: Simulation
    bound_s: float
    value: float

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.simulation.schedule

    @property
    def predicted_s(self) -> float:
        """Simulated time."""
        return self.simulation.seconds

    @property
    def energy_j(self) -> float:
        """Predicted energy of all devices (J); 0 where the machine's watts are unknown."""
        return energy_j(self.simulation) if watts_known(self.simulation.machine) else 0.0


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """
    What a search found.

    Attributes
    ----------
    candidates : list of Candidate
        All that were simulated, best first; of equals those of our schedulers and of what was tried first.
    discarded : int
        Candidates not simulated: their bound or their size spoke against them.
    tasks_simulated : int
        Spent budget.
    metric : str
        What was minimised.
    """

    candidates: list[Candidate]
    discarded: int
    tasks_simulated: int
    metric: str

    @property
    def best(self) -> Candidate:
        """The choice."""
        return self.candidates[0]


def search(
    problem: GemmProblem,
    placement: Placement,
    num_ranks: int,
    machine: Machine,
    options: ScheduleOptions | None = None,
    *,
    budget_tasks: int | None = None,
    issuing_threads: int = 0,
) -> SearchResult:
    """
    Return the schedules tried for a problem, the best first.

    Pure and deterministic.

    Parameters
    ----------
    problem, placement, num_ranks, machine
        As for `uncut_mpi.planning.planner.plan`.
    options : ScheduleOptions, optional
        What the caller fixes: the scheduler (by default none), a tile, a grid, devices, shares, k-blocks; chunks and
        batching are tried up to what it allows. Its `metric` is what is minimised.
    budget_tasks : int, optional
        Tasks to simulate at most; the first candidate is simulated whatever it takes. By default `default_budget`;
        then what each scheduler's own rules give may have as many tasks, whatever is left.
    issuing_threads : int
        As for `simulate`.

    Raises
    ------
    ParamError
        If the metric needs watts that the machine file lacks, or the budget is below 1.
    PlanError, CapacityError
        If not even the first candidate can be planned.
    """
    if budget_tasks is not None and budget_tasks < 1:
        raise ParamError(f"budget_tasks = {budget_tasks} is below 1")
    asked = options or ScheduleOptions()
    metric_of(asked.metric, machine)  # before any work
    made_with = dataclasses.replace(asked, tune=0, metric="time")
    budget = default_budget(num_ranks) if budget_tasks is None else budget_tasks
    first_part = budget if asked.metric == "time" else -(-budget // 2)
    explorer = _Explorer(
        problem, placement, num_ranks, machine, first_part, issuing_threads, tries_rules=budget_tasks is None
    )
    explorer.explore(made_with)
    if asked.metric != "time":
        # Two descents end in different places, and what is fast takes little energy more often than not.
        explorer.turn_to(asked.metric, budget)
        explorer.explore(made_with)
    return SearchResult(
        # Stable: equals of one scheduler stay in the order of trying.
        sorted(explorer.all_tried, key=lambda one: (one.value, SCHEDULERS.index(one.options.scheduler))),
        explorer.discarded,
        explorer.spent,
        asked.metric,
    )


def default_budget(num_ranks: int) -> int:
    """Return how many tasks a search simulates at most where nobody says."""
    return max(DEFAULT_BUDGET_TASKS, BUDGET_TASKS_PER_RANK * num_ranks)


class _Explorer:
    """One search: what it knows and what it has spent."""

    def __init__(
        self,
        problem: GemmProblem,
        placement: Placement,
        num_ranks: int,
        machine: Machine,
        budget: int,
        threads: int,
        *,
        tries_rules: bool,
    ) -> None:
        self._problem, self._placement, self._num_ranks, self._machine = problem, placement, num_ranks, machine
        self._metric_name = "time"
        self._metric = metric_of("time", machine)
        self._tries_rules = tries_rules
        self._budget, self._threads = budget, threads
        self._limit = budget
        self._seen: set[ScheduleOptions] = set()
        self._known: dict[ScheduleOptions, Candidate] = {}
        self._asked: dict[ScheduleOptions, ScheduleOptions] = {}
        self._candidates: dict[ScheduleOptions, Candidate] = {}
        self._least = np.inf
        self._bounds: dict[tuple[int, ...], float] = {}
        self._refused: UncutError | None = None
        self.tried: list[Candidate] = []
        self.discarded = 0
        self.spent = 0

    def turn_to(self, metric: str, budget: int) -> None:
        """Begin anew for another metric, with more budget; what was simulated costs nothing again."""
        self._metric_name, self._metric = metric, metric_of(metric, self._machine)
        self._budget = self._limit = budget
        before = [dataclasses.replace(one, value=self._metric.value(one.simulation)) for one in self.tried]
        by_name = {one.options: one for one in before}
        self._known = {asked: by_name[named] for asked, named in self._asked.items()} | by_name
        self._seen, self._candidates, self._least, self.tried = set(), {}, np.inf, []

    @property
    def all_tried(self) -> list[Candidate]:
        """What was tried for the last metric, then what else was tried for the one before, each with its value."""
        found = {one.options: one for one in (*self.tried, *self._known.values())}
        return list(found.values())

    def explore(self, asked: ScheduleOptions) -> None:
        """Try the heuristics' choices of each scheduler, then improve the best of each dimension by dimension."""
        schedulers = asked.schedulers if self._problem.has_product else ("uncut",)
        if len(schedulers) > 1 and not self._on_devices:
            schedulers = tuple(one for one in schedulers if one != "bands")
        self._explore_some([dataclasses.replace(asked, scheduler=one) for one in schedulers])
        if self._tries_rules and self.tried:
            for one in schedulers:  # most have been among what was tried
                rules = dataclasses.replace(asked, scheduler=one)
                if one == "cyclic" and asked.devices is None and asked.grid is None:
                    # PARALiA's choice of devices compares all sets of them: seconds on 8 ranks that differ.
                    rules = dataclasses.replace(rules, devices=tuple(range(self._num_ranks)))
                self._try(rules, always=True)
        if not self.tried:
            assert self._refused is not None  # the first candidate is simulated or refused
            raise self._refused

    def _explore_some(self, askeds: Sequence[ScheduleOptions]) -> None:
        best: list[tuple[Candidate, ScheduleOptions]] = []
        for asked in askeds:
            try:
                found = self._sketch(asked)
            except (PlanError, CapacityError) as error:  # another may fit
                self._refused = self._refused or error
            else:
                if found is not None:
                    best.append((found, asked))
        if not best or not self._problem.has_product:
            return
        best.sort(key=lambda one: one[0].value)
        # The schedulers of other papers have less to vary: theirs may be the better first try and the worse choice.
        ours = [one.value for one, asked in best if asked.scheduler in _OURS]
        least = {True: min(ours, default=self._least), False: self._least}
        promising = [(one, asked) for one, asked in best if one.value <= _HOPELESS * least[asked.scheduler in _OURS]]
        for number, (one, asked) in enumerate(promising):
            if number < len(promising) - 1:  # some of the budget is for the next one
                self._limit = self.spent + round(_FIRST_PART * (self._budget - self.spent))
            self._explore(one, asked)
            self._limit = self._budget

    def _sketch(self, asked: ScheduleOptions) -> Candidate | None:
        """Return the best of a scheduler's first few candidates."""
        first = self._first_dealt(asked) if asked.scheduler in ("cyclic", "bands") else self._first(asked)
        best = self._try(first, must=not self.tried, always=self._tries_rules)
        if best is None or not self._problem.has_product:
            return best
        if asked.scheduler == "kblocks":
            for dimension in (self._combines, self._corners, self._block_orders):
                best = self._improve(best, asked, dimension)
            return best
        if asked.scheduler != "uncut":
            return best
        # Grid, ranks and tile are found with few chunks, which are few tasks; the chunks come last.
        rough = [self._try(dataclasses.replace(first, **changes)) for changes in self._rough_transfers(asked)]
        return min((one for one in rough if one is not None), key=lambda one: one.value, default=best)

    def _explore(self, best: Candidate, asked: ScheduleOptions) -> None:
        """Try what a few rounds of coordinate descent make of a candidate."""
        best = self._descend(best, asked, _DIMENSIONS[asked.scheduler])
        if asked.scheduler == "kblocks":
            other = self._explore_others(best, asked)
            if other.value < best.value:
                self._descend(other, asked, _DIMENSIONS["kblocks"])
        if asked.scheduler == "uncut":
            own = [one for one in self.tried if one.options.scheduler == "uncut"]
            self._improve(min(own, key=lambda one: one.value), asked, self._fine)

    def _descend(self, best: Candidate, asked: ScheduleOptions, dimensions: Sequence[str]) -> Candidate:
        """Improve one dimension after the other, in rounds, until a round brings nothing."""
        for _ in range(_ROUNDS):
            before = best
            for name in dimensions:
                best = self._improve(best, asked, getattr(self, name))
            if best is before or self.spent >= self._limit:
                break
        return best

    def _explore_others(self, best: Candidate, asked: ScheduleOptions) -> Candidate:
        """
        Improve what is best on other numbers of ranks and other grids too, and return the best of all.

        Unequal shares, which come last, are worth most where few ranks take part, and a descent that has left a grid
        early does not come back to it.
        """
        others: dict[tuple[int, ...], Candidate] = {}
        for one in self.tried:
            if one.options.scheduler == "kblocks":
                shape = _shape(one)
                if shape not in others or one.value < others[shape].value:
                    others[shape] = one
        others.pop(_shape(best), None)
        for one in sorted(others.values(), key=lambda other: other.value)[:_OTHERS]:
            if one.value > _WORTH_SHARES * self._least:
                break
            improved = self._descend(one, asked, _WITHIN_A_GRID)
            best = min(best, improved, key=lambda candidate: candidate.value)
        return best

    def _first(self, asked: ScheduleOptions) -> ScheduleOptions:
        if any(one is not None for one in (asked.devices, asked.row_shares, asked.col_shares, asked.areas)):
            return asked
        if asked.blocking.splits > 1:
            return asked
        return dataclasses.replace(asked, **self._placed(tuple(range(self._num_ranks)), asked.grid))

    def _first_dealt(self, asked: ScheduleOptions) -> ScheduleOptions:
        """Return what `cyclic` and `bands` begin with: all ranks, since PARALiA's model takes long to compare sets."""
        devices = asked.devices or tuple(range(self._num_ranks))
        of_uncut = [one for one in self.tried if one.options.scheduler == "uncut"]
        tile = asked.tile
        if not tile and asked.scheduler == "cyclic" and of_uncut:
            tile = min(of_uncut, key=lambda one: one.value).schedule.tile
        return dataclasses.replace(asked, devices=devices, tile=tile)

    def _improve(self, best: Candidate, asked: ScheduleOptions, dimension: _Dimension) -> Candidate:
        """Return the best of a candidate and what one dimension makes of it."""
        for changes in dimension(asked, best):
            found = self._try(dataclasses.replace(best.options, **changes))
            if found is not None and found.value < best.value:
                best = found
        return best

    # -- dimensions: what to change about the best so far ------------------------------------

    def _ranks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        if asked.devices is not None or _is_cut(asked):
            return
        for count in self._counts:
            yield {"tile": asked.tile, "grid": None, **self._placed(tuple(sorted(self._order_of_ranks[:count])), None)}

    def _grids(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        if _is_cut(asked):
            return
        ranks = best.options.devices or tuple(range(self._num_ranks))
        square = ProcessGrid.most_square(len(ranks))
        for rows in range(1, len(ranks) + 1):
            grid = (rows, len(ranks) // rows)
            if len(ranks) % rows == 0 and max(grid) <= max(_MOST_SIDE, square.cols):
                changes = {"devices": ranks} if asked.devices is not None else self._placed(tuple(sorted(ranks)), grid)
                yield {"tile": asked.tile, "row_shares": None, "col_shares": None, **changes, "grid": grid}

    def _rough_transfers(self, asked: ScheduleOptions) -> list[dict[str, Any]]:
        if not asked.batch or not asked.caching:
            return []
        return [{"batch": False}, {"batch": True, "chunks": min(2, asked.most_chunks)}]

    def _rough(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        yield from self._rough_transfers(asked)

    def _fine(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        if best.options.batch and best.options.caching:
            yield from ({"chunks": chunks} for chunks in (asked.most_chunks, 4) if chunks <= asked.most_chunks)

    def _orders(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        if asked.order == "eta":
            yield from ({"order": order} for order in ("finish", "eta"))

    def _when_c(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        placement = self._placement
        if asked.wr_lazy and self._problem.reads_c and placement.c in (placement.a, placement.b):
            yield from ({"wr_lazy": lazy} for lazy in (False, True))

    def _tiles(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        if asked.tile:
            return
        grid = ProcessGrid(*best.schedule.grid)
        options = dataclasses.replace(best.options, tile=0)
        for tile in candidate_tiles(self._problem, grid, options, _TILES, bound_s=self._bound(options)):
            yield {"tile": tile}

    def _shares(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        if asked.row_shares is not None or asked.col_shares is not None or asked.areas is not None:
            return
        current = best
        for _ in range(_SHARE_STEPS if best.schedule.grid != (1, 1) else 0):
            speeds = self._speeds(current)
            if speeds is None or speeds.max() <= (1 + _SHARE_TOLERANCE) * speeds.min():
                return
            changes: dict[str, Any]
            if best.options.areas is not None:
                changes = {"areas": _in_columns(speeds, [len(column) for column in best.options.areas])}
            else:
                shares = fit_shares(speeds.reshape(best.schedule.grid))
                changes = {"row_shares": shares.rows, "col_shares": shares.cols}
            if best.options.scheduler == "uncut" and not asked.tile:
                shared = dataclasses.replace(best.options, **changes)
                tile = fitting_tile(self._problem, ProcessGrid(*best.schedule.grid), shared, best.schedule.tile)
                changes["tile"] = tile
            yield changes
            found = self._candidates.get(dataclasses.replace(best.options, **changes))
            if found is None:
                return
            current = found

    # -- dimensions of kblocks -------------------------------------------------------------

    def _corners(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """One row of ranks, one column of them, and all ranks sharing k."""
        ranks = best.options.devices or tuple(range(self._num_ranks))
        yield from self._on_grids(asked, best, [(1, len(ranks), 1), (len(ranks), 1, 1), (1, 1, len(ranks))])

    def _splits(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        ranks = best.options.devices or tuple(range(self._num_ranks))
        yield from self._on_grids(asked, best, grids(len(ranks)))

    def _on_grids(
        self, asked: ScheduleOptions, best: Candidate, chosen: Sequence[tuple[int, int, int]]
    ) -> Iterator[dict[str, Any]]:
        if _is_cut(asked):
            return
        ranks = best.options.devices or tuple(range(self._num_ranks))
        for rows, cols, splits in chosen:
            if asked.blocking.splits in (0, splits) and not self._behind(best, (rows, cols), splits):
                changes = {"devices": ranks} if asked.devices is not None else self._placed(ranks, (rows, cols))
                shares = {"row_shares": None, "col_shares": None, "areas": None, **changes}
                yield {**shares, "grid": (rows, cols), **_blocked(best, splits=splits)}

    def _behind(self, best: Candidate, grid: tuple[int, int], splits: int) -> bool:
        """Whether all that was tried on a grid takes far longer than the best: other block sizes will not help."""
        values = [
            one.value for one in self.tried if one.options.scheduler == "kblocks" and _shape(one) == (*grid, splits)
        ]
        return bool(values) and min(values) > _FAR_BEHIND * best.value

    def _block_orders(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        if not asked.blocking.order:
            yield from (_blocked(best, order=order) for order in BLOCK_ORDERS)

    def _columns(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        if not asked.blocking.columns:
            yield from (_blocked(best, columns=count) for count in _COLUMN_BLOCKS)

    def _largest_blocks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        inner = -(-self._problem.k // best.options.blocking.splits)
        if not asked.blocking.block:
            first = best.options.blocking.first
            for block in (*_K_BLOCKS, inner):
                if block <= inner and (first <= block or not asked.blocking.first):
                    yield _blocked(best, block=block, first=min(first, block))

    def _first_blocks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        if not asked.blocking.first:
            most = best.options.blocking.block
            sizes = (*_FIRST_BLOCKS, _FIRST_BLOCK_OF_HALVES) if self._problem.dtype.is_half else _FIRST_BLOCKS
            yield from (_blocked(best, first=first) for first in sizes if first <= most)
            if self._problem.trans_a == "T" and self._placement.a.space == "host" and not asked.blocking.block:
                # All of k at once: stored so, shorter blocks are rows far apart.
                inner = -(-self._problem.k // best.options.blocking.splits)
                yield _blocked(best, first=inner, block=inner)

    def _growths(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        if not asked.blocking.growth:
            yield from (_blocked(best, growth=growth) for growth in _GROWTHS)

    def _combines(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        if self._placement.c.space == "device" and not asked.blocking.combine:
            yield from (_blocked(best, combine=combine) for combine in COMBINES)

    def _fewer_ranks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        if asked.devices is not None or _is_cut(asked) or asked.blocking.splits > 1:
            return
        for count in self._counts:
            ranks = tuple(sorted(self._order_of_ranks[:count]))
            yield {"grid": None, "areas": None, **self._placed(ranks, None), **_blocked(best, splits=1)}

    def _arrangements(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """Other places for the ranks that own A, B or C: which pieces come first, and who hands them on."""
        ranks = best.options.devices or tuple(range(self._num_ranks))
        owners = [rank for rank in self._owners if rank in ranks]
        if asked.devices is not None or not owners or len(ranks) == 1:
            return
        if math.perm(len(ranks), len(owners)) <= _MOST_ARRANGEMENTS:
            others = [rank for rank in ranks if rank not in owners]
            for places in itertools.permutations(range(len(ranks)), len(owners)):
                of_owners = dict(zip(places, owners, strict=True))
                left = iter(others)
                yield self._in_places(of_owners[at] if at in of_owners else next(left) for at in range(len(ranks)))
            return
        for owner in owners:
            for rank in ranks:
                if rank != owner:
                    swapped = {owner: rank, rank: owner}
                    yield self._in_places(swapped.get(one, one) for one in ranks)

    def _columns_of_ranks(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        """
        Columns of ranks that are each cut into rows of their own, faster ranks first.

        A rank that has A and B needs nothing of either: it gets a column for itself, whatever that does to edges.
        """
        if asked.devices is not None or _is_cut(asked) or asked.blocking.splits > 1 or best.schedule.splits > 1:
            return
        ranks = best.options.devices or tuple(range(self._num_ranks))
        speeds = self._speeds(best)
        if len(ranks) < 3 or speeds is None or len(speeds) < len(ranks):
            return
        of = dict(zip(ranks, speeds.tolist(), strict=True))
        alone = [rank for rank in ranks if self._has_operands(rank)]
        order = sorted((rank for rank in ranks if rank not in alone), key=lambda rank: (-of[rank], rank))
        devices = (*alone, *order)
        areas = [of[rank] for rank in order]
        for columns in range(1, len(order) + 1):
            sizes = [1] * len(alone) + columns_of_ranks(areas, columns)
            equal = len(set(sizes)) == 1 and max(of.values()) <= (1 + _SHARE_TOLERANCE) * min(of.values())
            if not equal:  # else it is a grid
                arranged = _in_columns(np.array([of[rank] for rank in devices]), sizes)
                whole = {"grid": None, "row_shares": None, "col_shares": None, "areas": arranged}
                yield {**self._in_places(devices), **whole}

    def _has_operands(self, rank: int) -> bool:
        return self._placement.a == self._placement.b == Location.device(rank)

    # -- dimensions of cyclic and bands ------------------------------------------------------

    def _edges(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        if not asked.tile:
            yield from ({"tile": edge} for edge in (best.schedule.tile // 2, 2 * best.schedule.tile) if edge)

    def _distributions(self, asked: ScheduleOptions, best: Candidate) -> Iterator[dict[str, Any]]:
        if "distribution" not in asked.given:
            yield from ({"distribution": distribution} for distribution in DISTRIBUTIONS)

    # -- what the dimensions need ------------------------------------------------------------

    @functools.cached_property
    def _on_devices(self) -> bool:
        placement = self._placement
        return all(location.space == "device" for location in (placement.a, placement.b, placement.c))

    @functools.cached_property
    def _owners(self) -> list[int]:
        """The ranks on whose devices A, B or C is."""
        placement = self._placement
        devices = {one.rank for one in (placement.a, placement.b, placement.c) if one.space == "device"}
        return sorted(rank for rank in devices if rank is not None)

    @functools.cached_property
    def _order_of_ranks(self) -> list[int]:
        return ranks_by_use(self._problem, self._placement, self._machine)

    @functools.cached_property
    def _counts(self) -> list[int]:
        """How many ranks may compute."""
        most = self._num_ranks
        if most <= _ALL_COUNTS:
            return list(range(most, 0, -1))
        counts = [most * eighths // 8 for eighths in range(8, 0, -1)]
        while counts[-1] > 1:
            counts.append(counts[-1] // 2)
        return [most, *dict.fromkeys(_no_long_grid(count) for count in counts[1:])]

    def _in_places(self, ranks: Iterable[int]) -> dict[str, Any]:
        """Return devices for ranks in the order in which they fill places, all in their own order under one name."""
        devices = tuple(ranks)
        return {"devices": None if devices == tuple(range(self._num_ranks)) else devices}

    def _placed(self, ranks: tuple[int, ...], asked: tuple[int, int] | None) -> dict[str, Any]:
        """Return devices and shares for ranks on a grid: equal blocks unless their rates differ."""
        if not self._problem.has_product:
            return {}
        rates = self._machine.typical_gemm_rate(self._problem.dtype)[list(ranks)]
        devices = self._in_places(ranks)
        grid = ProcessGrid(*asked) if asked is not None else ProcessGrid.most_square(len(ranks))
        if rates.max() <= (1 + _SHARE_TOLERANCE) * rates.min() or grid.size != len(ranks):
            return {**devices, "row_shares": None, "col_shares": None, "areas": None}
        arranged, shares = arrange(ranks, rates.tolist(), grid)
        return {**self._in_places(arranged), "row_shares": shares.rows, "col_shares": shares.cols, "areas": None}

    def _speeds(self, candidate: Candidate) -> np.ndarray | None:
        """
        Return each place's share of C per second of its last task's end, or None where a rank has none.

        Of `kblocks` the last product counts: what comes after it is done for all at C's owner.
        """
        simulation, schedule = candidate.simulation, candidate.schedule
        if schedule.splits > 1:
            return None
        areas = candidate.options.areas
        places = math.prod(schedule.grid) if areas is None else sum(map(len, areas))
        ranks = candidate.options.devices or tuple(range(places))
        counted = schedule.tasks["rank"], simulation.end_s
        if schedule.scheduler == "kblocks":
            products = schedule.tasks["kind"] == Kind.GEMM
            counted = counted[0][products], counted[1][products]
        ends = np.zeros(schedule.num_ranks)
        np.maximum.at(ends, *counted)
        chosen = list(ranks[:places])
        end, flops = ends[chosen], products_flops(schedule)[chosen]
        if not (end > 0).all() or not (flops > 0).all():
            return None
        speeds: np.ndarray = flops / end
        return speeds

    # -- trying ------------------------------------------------------------------------------

    def _try(self, options: ScheduleOptions, *, must: bool = False, always: bool = False) -> Candidate | None:
        """
        Simulate a schedule, if it may be better and the budget has room for it.

        What is tried `always` may have as many tasks as the whole of a default budget, whatever was spent.
        """
        if options in self._seen:
            return None
        self._seen.add(options)
        known = self._known.get(options)
        if known is not None:
            if known.options != options and known.options in self._seen:
                return None
            return self._keep(known)
        room = MAX_TASKS if must else self._limit - self.spent
        if always:
            room = max(room, default_budget(self._num_ranks))
        if not must:
            lower = self._bound(options)
            hopeless = self._metric_name == "time" and lower >= self._least
            if hopeless or room <= 0:
                self.discarded += 1
                return None
        try:
            # What there is no room for is given up on the way.
            schedule, named = self._plan(options, room)
        except (PlanError, CapacityError):
            if must:
                raise
            self.discarded += 1
            return None
        if named != options:
            if named in self._seen:
                return None  # the heuristics have chosen what was tried by name
            if named in self._known:
                return self._keep(self._known[named])
            self._seen.add(named)
        if len(schedule.tasks) > room:
            self.discarded += 1
            return None
        lower = self._bound(options)
        simulation = simulate(schedule, self._machine, issuing_threads=self._threads)
        self.spent += len(schedule.tasks)
        self._asked[options] = named
        return self._keep(Candidate(named, simulation, lower, self._metric.value(simulation)))

    def _keep(self, candidate: Candidate) -> Candidate:
        self._seen.add(candidate.options)
        self.tried.append(candidate)
        self._candidates[candidate.options] = candidate
        self._least = min(self._least, candidate.value)
        return candidate

    def _plan(self, options: ScheduleOptions, most_tasks: int) -> tuple[Schedule, ScheduleOptions]:
        """Return a schedule, and the options with what its scheduler has chosen."""
        about = (self._problem, self._placement, self._num_ranks, self._machine)
        made = make_schedule(*about, options, most_tasks=most_tasks)
        return made.schedule, made.options

    @functools.cached_property
    def _whole_bound(self) -> float:
        return bound(self._problem, self._placement, self._machine).seconds

    def _bound(self, options: ScheduleOptions) -> float:
        ranks = options.devices or tuple(range(self._num_ranks))
        if ranks not in self._bounds:
            # The part of the whole machine's bound that fewer ranks raise: their sum of rates.
            rate = float(self._machine.gemm_rate(self._problem.dtype)[list(ranks)].sum())
            self._bounds[ranks] = max(self._whole_bound, self._problem.flops / rate)
        return self._bounds[ranks]


def _no_long_grid(count: int) -> int:
    """Return the next lower number of ranks whose most square grid is no more than `_MOST_SIDE` wide, or 2 to 1."""
    while (grid := ProcessGrid.most_square(count)).cols > max(_MOST_SIDE, 2 * grid.rows):
        count -= 1
    return count


def _is_cut(asked: ScheduleOptions) -> bool:
    """Whether the caller has said how C is cut: by a grid, by shares or by areas."""
    return any(one is not None for one in (asked.grid, asked.row_shares, asked.col_shares, asked.areas))


def _shape(candidate: Candidate) -> tuple[int, ...]:
    columns = () if candidate.options.areas is None else tuple(map(len, candidate.options.areas))
    return (*candidate.schedule.grid, candidate.schedule.splits, *columns)


def _in_columns(speeds: np.ndarray, sizes: Sequence[int]) -> tuple[tuple[float, ...], ...]:
    """Return areas in proportion to speeds, summing to 1, in columns of so many ranks."""
    each = iter((speeds / speeds.sum()).tolist())
    return tuple(tuple(itertools.islice(each, size)) for size in sizes)


def _blocked(best: Candidate, **changes: Any) -> dict[str, Any]:
    return {"blocking": dataclasses.replace(best.options.blocking, **changes)}


def product_flops(schedule: Schedule, rank: int) -> float:
    """Return the operations of a rank's products: the elements of C times the steps of k, twice."""
    return float(products_flops(schedule)[rank])


def products_flops(schedule: Schedule) -> np.ndarray:
    """Return the operations of each rank's products, float64 of shape (num_ranks,)."""
    gemms = schedule.tasks[schedule.tasks["kind"] == Kind.GEMM]
    first = gemms["first_operand"]
    c, a = (schedule.regions[schedule.operands["region"][first + which]] for which in (0, 1))
    depth = np.where(schedule.operands["op"][first + 1] != 0, a["rows"], a["cols"])
    elements = np.zeros(schedule.num_ranks, np.int64)
    np.add.at(elements, gemms["rank"], c["rows"] * c["cols"] * depth)
    flops: np.ndarray = 2.0 * elements
    return flops
