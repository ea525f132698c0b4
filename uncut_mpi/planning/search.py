"""
The chooser: tries schedules by simulation and keeps the best.

What the caller fixed stays fixed; the rest (process grid, ranks that compute, tile, batching and
chunks, unequal shares) is searched. Candidates come in a written order: first the heuristics' own
choice of each scheduler, then one dimension after the other around the best so far (coordinate descent), in
rounds, until a round brings nothing or the budget is spent; how finely copies are cut comes last. A
scheduler far behind the best of the others is left at that. The budget counts simulated tasks, never time, so
that equal inputs give equal choices on any machine. It grows with the ranks, as schedules do. Whatever is left of it,
what each scheduler's own rules give (`cyclic` on all ranks) is simulated, so that no choice is worse, unless it alone
has more tasks than that. A candidate whose bound is no better than the best of the batches before is not simulated,
and one that surely has more tasks than are left is not made.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import CapacityError, ParamError, PlanError, UncutError
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.candidates import Candidate, Progress, progress_of, progress_of_run, shape_of
from uncut_mpi.planning.dimensions import DIMENSIONS, REFINEMENTS, Dimensions
from uncut_mpi.planning.metrics import metric_of
from uncut_mpi.planning.options import SCHEDULERS, ScheduleOptions, changed
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.planning.schedulers import Made, make_schedule
from uncut_mpi.planning.simulate import Simulation, Simulations
from uncut_mpi.planning.tiles import MAX_TASKS

DEFAULT_BUDGET_TASKS: Final = 80_000
"""Simulated tasks of a search on up to 8 ranks, where it takes 30 to 150 ms."""

BUDGET_TASKS_PER_RANK: Final = 5_000
"""The same on more ranks, for each of them."""

_ROUNDS: Final = 3
_OURS: Final = ("uncut", "kblocks")
_HOPELESS: Final = 1.25
"""A scheduler whose first tries take so many times as long as another's gets what the others leave of the budget."""

_BEYOND_HOPE: Final = 1.6
"""Where it takes more than so many times as long, it gets nothing of that either."""

_HOPELESS_OF_OTHERS: Final = 1.02
"""
Nor does a scheduler of another paper where it takes so many times as long: with less to vary, they seldom make up for
what they are behind.
"""

_MOST_TOO_LARGE: Final = 8
"""After so many schedules in a row for which the budget has no room there are hardly any that it has room for."""

_FIRST_PART: Final = 0.7
"""What the more promising scheduler gets of the budget, at least."""

_OTHERS: Final = 3
"""On how many other grids of ranks blocks and shares are improved, at most."""

_WORTH_SHARES: Final = 1.5
"""A grid whose best, mostly of equal shares, takes so many times as long is not among these."""

_WORTH_A_WAY: Final = 1.3
"""Another order of blocks, or place of sums, whose best takes so many times as long is not improved by itself."""


class _Dimension(Protocol):
    __name__: str

    def __call__(self, asked: ScheduleOptions, best: Candidate, /) -> Iterator[dict[str, Any]]: ...


def _order(one: Candidate) -> Hashable:
    return one.options.blocking.order


def _delivery(one: Candidate) -> Hashable:
    return one.options.blocking.delivery


def _place_of_sums(one: Candidate) -> Hashable:
    return one.options.blocking.combine, one.options.blocking.away > 0


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
    with (
        Simulations(machine, issuing_threads=issuing_threads) as simulations,
        _Explorer(
            problem, placement, num_ranks, machine, first_part, simulations, tries_rules=budget_tasks is None
        ) as explorer,
    ):
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


class _Once:
    """A simulation that is made when it is first asked for."""

    __slots__ = ("_make", "_made")

    def __init__(self, make: Callable[[], Simulation]) -> None:
        self._make = make
        self._made: Simulation | None = None

    def __call__(self) -> Simulation:
        if self._made is None:
            self._made = self._make()
        return self._made


def _simulation(prepared: kblocks.Prepared, run: _native.KBlocksRun, machine: Machine) -> Simulation:
    return Simulation(prepared.schedule_of(run), machine, *run.times())


class _Explorer:
    """
    One search: what it knows and what it has spent.

    A context manager: at the end it lets go of what refers to it, so that nothing of a search outlives its result.
    """

    def __init__(
        self,
        problem: GemmProblem,
        placement: Placement,
        num_ranks: int,
        machine: Machine,
        budget: int,
        simulations: Simulations,
        *,
        tries_rules: bool,
    ) -> None:
        self._problem, self._placement, self._num_ranks, self._machine = problem, placement, num_ranks, machine
        self._about = (problem, placement, num_ranks, machine)
        self._metric_name = "time"
        self._metric = metric_of("time", machine)
        self._tries_rules = tries_rules
        self._budget, self._simulations = budget, simulations
        self._limit = budget
        self._seen: set[ScheduleOptions] = set()
        self._known: dict[ScheduleOptions, Candidate] = {}
        self._asked: dict[ScheduleOptions, ScheduleOptions] = {}
        self._dimensions = Dimensions(problem, placement, num_ranks, machine, self)
        self._candidates: dict[ScheduleOptions, Candidate] = {}
        self._improved: set[tuple[Candidate, str]] = set()
        self._least = np.inf
        self._bounds: dict[tuple[int, ...], float] = {}
        self._refused: UncutError | None = None
        self._begun: list[Callable[[], Candidate | None]] = []
        self._too_large = 0
        self.tried: list[Candidate] = []
        self.discarded = 0
        self.spent = 0

    def __enter__(self) -> _Explorer:
        return self

    def __exit__(self, *_: object) -> None:
        del self._dimensions
        self._begun.clear()

    def turn_to(self, metric: str, budget: int) -> None:
        """Begin anew for another metric, with more budget; what was simulated costs nothing again."""
        self._metric_name, self._metric = metric, metric_of(metric, self._machine)
        self._budget = self._limit = budget
        self._too_large = 0
        before = [dataclasses.replace(one, value=self._metric.value(one.simulation)) for one in self.tried]
        by_name = {one.options: one for one in before}
        self._known = {asked: by_name[named] for asked, named in self._asked.items()} | by_name
        self._seen, self._candidates, self._improved, self._least, self.tried = set(), {}, set(), np.inf, []

    @property
    def all_tried(self) -> list[Candidate]:
        """What was tried for the last metric, then what else was tried for the one before, each with its value."""
        found = {one.options: one for one in (*self.tried, *self._known.values())}
        return list(found.values())

    def explore(self, asked: ScheduleOptions) -> None:
        """Try the heuristics' choices of each scheduler, then improve the best of each dimension by dimension."""
        schedulers = asked.schedulers if self._problem.has_product else ("uncut",)
        if len(schedulers) > 1 and not self._dimensions.on_devices:
            schedulers = tuple(one for one in schedulers if one != "bands")
        self._explore_some([dataclasses.replace(asked, scheduler=one) for one in schedulers])
        if self._tries_rules and self.tried:
            for one in schedulers:  # most have been among what was tried
                rules = dataclasses.replace(asked, scheduler=one)
                if one == "cyclic" and asked.devices is None and asked.grid is None:
                    # PARALiA's choice of devices compares all sets of them: seconds on 8 ranks that differ.
                    rules = dataclasses.replace(rules, devices=tuple(range(self._num_ranks)))
                self._try(rules, always=True)
            self._settle()
        if not self.tried:
            assert self._refused is not None  # the first candidate is simulated or refused
            raise self._refused

    def _explore_some(self, askeds: Sequence[ScheduleOptions]) -> None:
        best: list[tuple[Candidate, ScheduleOptions]] = []
        for asked in askeds:
            try:
                found = self._sketch(asked)
            except (PlanError, CapacityError) as error:  # another may fit
                self._settle()
                self._refused = self._refused or error
            else:
                if found is not None:
                    best.append((found, asked))
        if not best or not self._problem.has_product:
            return
        best.sort(key=lambda one: one[0].value)
        # The better first try of another paper's scheduler may be the worse choice, so ours are compared with ours.
        ours = [one.value for one, asked in best if asked.scheduler in _OURS]
        least = {True: min(ours, default=self._least), False: self._least}
        most = {True: _HOPELESS * least[True], False: _HOPELESS_OF_OTHERS * least[False]}
        promising = [(one, asked) for one, asked in best if one.value <= most[asked.scheduler in _OURS]]
        for number, (one, asked) in enumerate(promising):
            if number < len(promising) - 1:  # some of the budget is for the next one
                self._limit = self.spent + round(_FIRST_PART * (self._budget - self.spent))
            self._too_large = 0
            self._explore(one, asked)
            self._limit = self._budget
        self._too_large = 0
        for one, asked in best:
            if asked.scheduler in _OURS and most[True] < one.value <= _BEYOND_HOPE * least[True]:
                self._explore(one, asked)
        winner = min(self.tried, key=lambda one: one.value)
        if self._dimensions.is_alone(winner):
            self._descend(winner, next(one for one in askeds if one.scheduler == "kblocks"), DIMENSIONS["kblocks"])

    def _sketch(self, asked: ScheduleOptions) -> Candidate | None:
        """Return the best of a scheduler's first few candidates."""
        first = self._first_dealt(asked) if asked.scheduler in ("cyclic", "bands") else self._first(asked)
        self._try(first, must=not self.tried, always=self._tries_rules)
        best = min(self._settle(), key=lambda one: one.value, default=None)
        if best is None or not self._problem.has_product:
            return best
        if asked.scheduler == "kblocks":
            varied = self._dimensions
            for dimension in (varied.places_of_sums, varied.corners, varied.block_orders):
                best = self._improve(best, asked, dimension)
            # A descent that began with a rank alone would not find what many ranks do well.
            self._improve(best, asked, varied.alone)
            return best
        if asked.scheduler != "uncut":
            return best
        # Grid, ranks and tile are found with few chunks, which are few tasks; the chunks come last.
        for changes in self._dimensions.rough(asked, best):
            self._try(changed(first, **changes))
        return min(self._settle(), key=lambda one: one.value, default=best)

    def _explore(self, best: Candidate, asked: ScheduleOptions) -> None:
        """Try what a few rounds of coordinate descent make of a candidate."""
        best = self._descend(best, asked, DIMENSIONS[asked.scheduler])
        if asked.scheduler == "kblocks":
            best = self._explore_ways(best, asked, _order)
            other = self._explore_others(best, asked)
            if other.value < best.value:
                self._descend(other, asked, DIMENSIONS["kblocks"])
            self._explore_ways(best, asked, _place_of_sums)
            self._explore_ways(best, asked, _delivery)
        if asked.scheduler == "uncut":
            own = [one for one in self.tried if one.options.scheduler == "uncut"]
            self._improve(min(own, key=lambda one: one.value), asked, self._dimensions.fine)

    def _descend(self, best: Candidate, asked: ScheduleOptions, dimensions: Sequence[str]) -> Candidate:
        """Improve one dimension after the other, in rounds, until a round brings nothing."""
        for _ in range(_ROUNDS):
            before = best
            for name in dimensions:
                best = self._improve(best, asked, getattr(self._dimensions, name))
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
                shape = shape_of(one)
                if shape not in others or one.value < others[shape].value:
                    others[shape] = one
        others.pop(shape_of(best), None)
        for one in sorted(others.values(), key=lambda other: other.value)[:_OTHERS]:
            if one.value > _WORTH_SHARES * self._least:
                break
            improved = self._descend(one, asked, REFINEMENTS)
            best = min(best, improved, key=lambda candidate: candidate.value)
        return best

    def _explore_ways(self, best: Candidate, asked: ScheduleOptions, way: Callable[[Candidate], Hashable]) -> Candidate:
        """
        Improve the best of each other way to do something, too, if it is not far behind, and return the best of all.

        Which blocks and shares are best depends on the order of blocks and on where C meets the products, and a descent
        that has chosen one seldom changes it.
        """
        ways: dict[Hashable, Candidate] = {}
        for one in self.tried:
            if one.options.scheduler == "kblocks" and (way(one) not in ways or one.value < ways[way(one)].value):
                ways[way(one)] = one
        for one in sorted(ways.values(), key=lambda other: other.value)[1:]:
            if one.value <= _WORTH_A_WAY * self._least:
                best = min(best, self._descend(one, asked, REFINEMENTS), key=lambda found: found.value)
        return best

    def _first(self, asked: ScheduleOptions) -> ScheduleOptions:
        if any(one is not None for one in (asked.devices, asked.row_shares, asked.col_shares, asked.areas)):
            return asked
        if asked.blocking.splits > 1:
            return asked
        return dataclasses.replace(asked, **self._dimensions.placed(tuple(range(self._num_ranks)), asked.grid))

    def _first_dealt(self, asked: ScheduleOptions) -> ScheduleOptions:
        """Return what `cyclic` and `bands` begin with: all ranks, since PARALiA's model takes long to compare sets."""
        devices = asked.devices or tuple(range(self._num_ranks))
        of_uncut = [one for one in self.tried if one.options.scheduler == "uncut"]
        tile = asked.tile
        if not tile and asked.scheduler == "cyclic" and of_uncut:
            tile = min(of_uncut, key=lambda one: one.value).tile
        return dataclasses.replace(asked, devices=devices, tile=tile)

    def _improve(self, best: Candidate, asked: ScheduleOptions, dimension: _Dimension) -> Candidate:
        """Return the best of a candidate and what one dimension makes of it, once: later it would make the same."""
        if (best, dimension.__name__) in self._improved:
            return best
        self._improved.add((best, dimension.__name__))
        seen = len(self.tried)
        for changes in dimension(asked, best):
            self._try(changed(best.options, **changes))
        self._settle()
        return min((best, *self.tried[seen:]), key=lambda one: one.value)

    def found(self, options: ScheduleOptions) -> Candidate | None:
        """Return the candidate of some options, None if there is none."""
        self._settle()
        return self._candidates.get(options)

    # -- trying ------------------------------------------------------------------------------

    def _try(self, options: ScheduleOptions, *, must: bool = False, always: bool = False) -> None:
        """
        Begin to simulate a schedule, if it may be better and the budget has room for it; `_settle` has the results.

        What is tried `always` may have as many tasks as the whole of a default budget, whatever was spent.
        """
        before = len(self._seen)
        self._seen.add(options)
        if len(self._seen) == before:
            return
        known = self._known.get(options) if self._known else None
        if known is not None:
            if known.options == options or known.options not in self._seen:
                self._seen.add(known.options)
                self._begun.append(lambda: known)
            return
        room = self._limit - self.spent if self._too_large < _MOST_TOO_LARGE else 0
        if must:
            room = MAX_TASKS
        if always:
            room = max(room, default_budget(self._num_ranks))
        if not must:
            lower = self.bound_s(options)
            hopeless = self._metric_name == "time" and lower >= self._least
            if hopeless or room <= 0:
                self.discarded += 1
                return
        try:
            # What there is no room for is given up on the way.
            if options.scheduler == "kblocks" and not must:
                self._begin_kblocks(options, room, default_budget(self._num_ranks) if always else 0)
            else:
                self._begin(options, room)
        except (PlanError, CapacityError) as error:
            if must:
                raise
            self.discarded += 1
            self._too_large += isinstance(error, PlanError)

    def _begin(self, options: ScheduleOptions, room: int) -> None:
        """Make a schedule, and begin to simulate it if it has no more tasks than there is room for."""
        made = make_schedule(*self._about, options, most_tasks=room)
        if self._is_known(options, made.options) or not self._spend(len(made.schedule.tasks), room):
            return
        run = _Once(self._simulations.begin(made.schedule))
        self._begun.append(lambda: self._candidate_of(options, made, run))

    def _begin_kblocks(self, options: ScheduleOptions, room: int, least_room: int) -> None:
        """Begin to make a schedule of `kblocks` and to simulate it; how many tasks it has is known later."""
        prepared = self._of_kblocks.prepare(options, most_tasks=room)
        if self._is_known(options, prepared.options):
            return
        run = prepared.run(room)
        wait = self._simulations.begin_kblocks(run, self._problem.dtype)

        def settled() -> Candidate | None:
            wait()
            if not run.fits:
                return self._with_fewer_panels(options, least_room)
            if not self._spend(run.num_tasks, max(self._limit - self.spent, least_room)):
                return None
            simulated = _Once(functools.partial(_simulation, prepared, run, self._machine))
            progress = functools.partial(progress_of_run, run)
            return self._candidate(options, prepared.options, prepared, run.seconds, simulated, progress)

        self._begun.append(settled)

    def _with_fewer_panels(self, options: ScheduleOptions, least_room: int) -> Candidate | None:
        """Return what there is room for in devices' memory, if anything."""
        room = max(self._limit - self.spent, least_room)
        try:
            made = make_schedule(*self._about, options, most_tasks=room)
        except (PlanError, CapacityError):
            self.discarded += 1
            return None
        if not self._spend(len(made.schedule.tasks), room):
            return None
        return self._candidate_of(options, made, _Once(self._simulations.begin(made.schedule)))

    def _is_known(self, options: ScheduleOptions, named: ScheduleOptions) -> bool:
        """Whether the heuristics have chosen what was tried by name."""
        before = len(self._seen)
        self._seen.add(named)
        if named is options or named == options:
            return False
        if len(self._seen) == before:
            return True
        if named in self._known:
            self._begun.append(lambda: self._known[named])
            return True
        return False

    def _spend(self, tasks: int, room: int) -> bool:
        """Spend some of the budget, or none if there is no room for so many tasks."""
        if tasks > room:
            self.discarded += 1
            self._too_large += 1
            return False
        self._too_large = 0
        self.spent += tasks
        return True

    def _candidate_of(self, options: ScheduleOptions, made: Made, run: _Once) -> Candidate:
        progress = functools.partial(progress_of, run())
        return self._candidate(options, made.options, made.schedule, run().seconds, run, progress)

    def _candidate(
        self,
        options: ScheduleOptions,
        named: ScheduleOptions,
        made: Schedule | kblocks.Prepared,
        seconds: float,
        run: Callable[[], Simulation],
        progress: Callable[[], Progress],
    ) -> Candidate:
        if named is not options:
            self._asked[options] = named
        value = seconds if self._metric_name == "time" else self._metric.value(run())
        return Candidate(named, made.grid, made.splits, made.tile, seconds, self.bound_s(options), value, run, progress)

    def _settle(self) -> list[Candidate]:
        """
        Return what was begun and there was room for, in that order, when all of it is simulated.

        Between two calls schedules are prepared while those begun are simulated, and judged by what the call before
        returned, so that the pace of the simulations changes nothing.
        """
        begun, self._begun = self._begun, []
        settled = []
        for one in begun:
            candidate = one()
            if candidate is not None:
                settled.append(candidate)
        for candidate in settled:
            self.tried.append(candidate)
            self._candidates[candidate.options] = candidate
            self._least = min(self._least, candidate.value)
        return settled

    @functools.cached_property
    def _of_kblocks(self) -> kblocks.Planner:
        return kblocks.Planner(*self._about)

    @functools.cached_property
    def _whole_bound(self) -> float:
        return bound(self._problem, self._placement, self._machine).seconds

    def bound_s(self, options: ScheduleOptions) -> float:
        """Return what no schedule on the ranks of some options can beat (s)."""
        ranks = options.devices or tuple(range(self._num_ranks))
        if ranks not in self._bounds:
            # The part of the whole machine's bound that fewer ranks raise: their sum of rates.
            rate = float(self._machine.gemm_rate(self._problem.dtype)[list(ranks)].sum())
            self._bounds[ranks] = max(self._whole_bound, self._problem.flops / rate)
        return self._bounds[ranks]
