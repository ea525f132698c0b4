"""
The chooser: tries schedules by simulation and keeps the best.

What the caller fixed stays fixed; the rest (process grid, ranks that compute, tile, batching and chunks, unequal
shares) is searched. Candidates come in a written order, first the heuristics' own choice of each scheduler. Then one
dimension after the other is varied around the best so far, in rounds (coordinate descent). A round that brings nothing,
or the budget, ends that. How finely copies are cut comes last. A scheduler far behind the best of the others is left at
that. A search that ends early goes on from other places. The budget counts tasks of what is tried, never time, so that
equal inputs give equal choices on any machine. It grows with the ranks, as schedules do. What each scheduler's own
rules give (`cyclic` on all ranks) is simulated even when it is spent, unless that alone has more tasks. A candidate
whose bound is no better than the best before is not simulated. One that surely has more tasks than are left is not made
(`uncut_mpi.planning.evaluation`). Of all that are as fast, to half a per cent, the choice is one that copies and holds
little (`TIE`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Final, Protocol

from uncut_mpi.errors import CapacityError, ParamError, PlanError, UncutError
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.candidates import Candidate
from uncut_mpi.planning.dimensions import DIMENSIONS, REFINEMENTS, Dimensions
from uncut_mpi.planning.evaluation import Evaluation, default_budget
from uncut_mpi.planning.metrics import metric_of
from uncut_mpi.planning.options import ORDERS_BY_K, SCHEDULERS, ScheduleOptions, changed

TIE: Final = 0.005
"""
Values that differ by no more than this part are equal: predictions are off by more than that, and what is simulated
differs as much from run to run. Of equals the choice is the best of those that take least, by the bytes that they copy
between memories and those that their buffers take.
"""

_AS_LITTLE: Final = 1 / 3
"""
What takes no more than so much more than the least takes as little: no time is given for less. Of matrices in parts
what takes least is the choice: it leaves them where they are.
"""

_LONG_CALL_S: Final = 0.005
"""
In calls from so long on, in which clocks have come down to what the power allows, two products at once get one to three
per cent less done than one at a time, which a simulation does not see; in calls of 1.5 ms they get five per cent more
done (``docs/performance.md``, 2026-11-25, one product at a time).
"""

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

_FIRST_PART: Final = 0.8
"""What a scheduler may have of the budget, if those after it promise no more; else it may have the rest of this."""

_TIME_PART: Final = 0.75
"""What a search by another metric has of the budget for the least time, with which it begins."""

_FOR_MULTIPLES: Final = 40
"""
The part of the budget, one over this, for blocks of the choice that begin at other multiples. Varied with the rest
they let descents end in more places: 92.8 % of the 305 irregular problems on 8 A100 are then within 2 % of a search
without a budget, 95.4 % so.
"""

_LITTLE: Final = 0.5
"""
Where a search ends with less than this part of a default budget, as on one rank or two, it goes on from the best of
each number of column blocks and each first k-block: descents of few schedules end early, and up to a seventh behind.
"""

_NEARLY: Final = 1.02
"""What is behind by no more than this may be the best with blocks at other multiples."""

_OTHERS: Final = 3
"""On how many other grids of ranks blocks and shares are improved, at most."""

_WORTH_SHARES: Final = 1.5
"""A grid whose best, mostly of equal shares, takes so many times as long is not among these."""

_WORTH_A_WAY: Final = 1.3
"""Another order of blocks, or place of sums, whose best takes so many times as long is not improved by itself."""


class _Dimension(Protocol):
    __name__: str

    def __call__(self, asked: ScheduleOptions, best: Candidate, /) -> Iterator[dict[str, Any]]: ...


def _shape(one: Candidate) -> Hashable:
    return one.shape


def _order(one: Candidate) -> Hashable:
    order = one.options.blocking.order
    return ORDERS_BY_K if order in ORDERS_BY_K else order  # of those by k a descent tries both


def _delivery(one: Candidate) -> Hashable:
    return one.options.blocking.delivery


def _place_of_sums(one: Candidate) -> Hashable:
    return one.options.blocking.combine, one.options.blocking.away > 0


def _columns(one: Candidate) -> Hashable:
    return _order(one), one.options.blocking.columns, _place_of_sums(one)


def _first_block(one: Candidate) -> Hashable:
    return _order(one), one.options.blocking.first


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """
    What a search found.

    Attributes
    ----------
    candidates : list of Candidate
        All that were simulated, best first; of equals those of our schedulers and of what was tried first.
    discarded : int
        Candidates not taken: their bound or their size spoke against them.
    tasks_simulated : int
        Spent budget: the tasks of all candidates.
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
        What the caller fixes: the scheduler (by default none), a tile, a grid, devices, shares, k-blocks, chunks;
        batching is tried where it allows it. Its `metric` is what is minimised. Of the caller's C, as those of the
        candidates (`ScheduleOptions.oriented`); on the way they are of the problem's.
    budget_tasks : int, optional
        Tasks of all that is tried, at most; the first candidate is tried whatever it takes. By default
        `uncut_mpi.planning.evaluation.default_budget`; then what each scheduler's own rules give may have as many
        tasks, whatever is left.
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
    # By its metric `cyclic` chooses its ranks, which is a rule of its own; all else is chosen by simulation.
    rule = asked.metric if asked.scheduler == "cyclic" else "time"
    made_with = dataclasses.replace(asked, tune=0, metric=rule).oriented(problem)
    budget = default_budget(num_ranks) if budget_tasks is None else budget_tasks
    first_part = budget if asked.metric == "time" else math.ceil(_TIME_PART * budget)
    with Evaluation(
        problem, placement, num_ranks, machine, limit=first_part, issuing_threads=issuing_threads
    ) as evaluation:
        dimensions = Dimensions(problem, placement, num_ranks, machine, evaluation)
        explorer = _Explorer(problem, num_ranks, evaluation, dimensions, budget, tries_rules=budget_tasks is None)
        explorer.explore(made_with)
        if asked.metric != "time":
            # Two descents end in different places, and what is fast takes little energy more often than not.
            evaluation.turn_to(asked.metric, budget)
            explorer = _Explorer(problem, num_ranks, evaluation, dimensions, budget, tries_rules=budget_tasks is None)
            explorer.explore(made_with)
    # Stable: equals of one scheduler stay in the order of trying.
    found = sorted(evaluation.all_tried, key=lambda one: (one.value, SCHEDULERS.index(one.options.scheduler)))
    return SearchResult(
        [one.of_callers_c(problem) for one in _with_ties_broken(found, 0 if placement.in_parts else _AS_LITTLE)],
        evaluation.discarded,
        evaluation.spent,
        asked.metric,
    )


def _with_ties_broken(found: list[Candidate], as_little: float) -> list[Candidate]:
    """
    Return candidates with the choice first, which is the best or as good as that and takes less (`TIE`).

    Of long calls that take as little it is one whose ranks have begun one product at a time, if there is any.
    """
    tied = [one for one in found if one.value <= (1 + TIE) * found[0].value]
    if len(tied) == 1:
        return found
    enough = (1 + as_little) * min(one.total_bytes for one in tied)
    little = [one for one in tied if one.total_bytes <= enough]
    choice = little[0]
    if choice.options.blocking.lanes > 1 and choice.predicted_s >= _LONG_CALL_S:
        choice = next((one for one in little if one.options.blocking.lanes == 1), choice)
    return [choice, *(one for one in found if one is not choice)]


class _Explorer:
    """What a search tries for a metric, in which order."""

    def __init__(
        self,
        problem: GemmProblem,
        num_ranks: int,
        evaluation: Evaluation,
        dimensions: Dimensions,
        budget: int,
        *,
        tries_rules: bool,
    ) -> None:
        self._problem, self._num_ranks = problem, num_ranks
        self._evaluation, self._dimensions = evaluation, dimensions
        self._tries_rules = tries_rules
        self._budget = evaluation.limit
        self._little = _LITTLE * min(budget, default_budget(num_ranks))
        self._several = False  # whether schedulers are compared
        self._improved: set[tuple[Candidate, str]] = set()
        self._refused: UncutError | None = None

    def explore(self, asked: ScheduleOptions) -> None:
        """Try the heuristics' choices of each scheduler, then improve the best of each dimension by dimension."""
        schedulers = asked.schedulers if self._problem.has_product else ("uncut",)
        if self._dimensions.in_parts and asked.scheduler == "auto" and self._problem.has_product:
            # `uncut` takes matrices in parts too, but looking for its best grids and tiles makes a plan take too long.
            schedulers = tuple(one for one in schedulers if one == "kblocks")
        alone = len(asked.devices or range(self._num_ranks)) == 1
        if len(schedulers) > 1 and (alone or not self._dimensions.on_devices):
            schedulers = tuple(one for one in schedulers if one != "bands")  # which sends between devices
        self._several = len(schedulers) > 1
        self._explore_some([dataclasses.replace(asked, scheduler=one) for one in schedulers])
        if self._tries_rules and self._evaluation.tried:
            for one in schedulers:  # most have been among what was tried
                rules = dataclasses.replace(asked, scheduler=one)
                if one in ("cyclic", "bands") and self._several and asked.chooses_devices:
                    # PARALiA's choice of devices compares all sets of them: seconds on 8 ranks that differ. Bands of
                    # all ranks have been among what was tried.
                    rules = dataclasses.replace(rules, devices=tuple(range(self._num_ranks)))
                self._evaluation.begin(rules, always=True)
            self._evaluation.settle()
        if not self._evaluation.tried:
            assert self._refused is not None  # the first candidate is simulated or refused
            raise self._refused

    def _explore_some(self, askeds: Sequence[ScheduleOptions]) -> None:
        best: list[tuple[Candidate, ScheduleOptions]] = []
        for asked in askeds:
            try:
                found = self._sketch(asked)
            except (PlanError, CapacityError) as error:  # another may fit
                self._evaluation.settle()
                self._refused = self._refused or error.with_traceback(None)  # whose frames refer to all of this
            else:
                if found is not None:
                    best.append((found, asked))
        if not best or not self._problem.has_product:
            return
        best.sort(key=lambda one: one[0].value)
        # The better first try of another paper's scheduler may be the worse choice, so ours are compared with ours.
        ours = [one.value for one, asked in best if asked.scheduler in _OURS]
        least = {True: min(ours, default=self._evaluation.least), False: self._evaluation.least}
        most = {True: _HOPELESS * least[True], False: _HOPELESS_OF_OTHERS * least[False]}
        promising = [(one, asked) for one, asked in best if one.value <= most[asked.scheduler in _OURS]]
        asked_kblocks = next((one for one in askeds if one.scheduler == "kblocks"), None)
        for_multiples = asked_kblocks is not None and not asked_kblocks.blocking.multiple
        budget = self._budget - (self._budget // _FOR_MULTIPLES if for_multiples else 0)
        # Last comes what has most to vary: it can use what the others leave of their parts.
        promising.sort(key=lambda one: one[1].scheduler == "kblocks")
        for number, (one, asked) in enumerate(promising, 1):
            part = _FIRST_PART if all(one.value <= other.value for other, _ in promising[number:]) else 1 - _FIRST_PART
            spent = self._evaluation.spent
            self._evaluation.allow(budget if number == len(promising) else spent + round(part * (budget - spent)))
            self._explore(one, asked)
        self._evaluation.allow(budget)
        for one, asked in best:
            if asked.scheduler in _OURS and most[True] < one.value <= _BEYOND_HOPE * least[True]:
                self._explore(one, asked)
        if asked_kblocks is not None:
            self._spend_the_rest(asked_kblocks)

    def _spend_the_rest(self, asked: ScheduleOptions) -> None:
        """Go on with `kblocks` where little of the budget was spent, and try other multiples of what is best of all."""
        evaluation = self._evaluation
        if evaluation.spent < self._little:
            for way in (_columns, _first_block):
                self._explore_ways(evaluation.tried[0], asked, way)
        evaluation.allow(self._budget)
        winner = min(evaluation.tried, key=lambda one: one.value)
        if winner.options.scheduler == "kblocks":
            for one in self._best_by(_columns)[: 1 + _OTHERS]:
                if one.value > _NEARLY * winner.value:
                    break
                seen, blocking = len(evaluation.tried), one.options.blocking
                self._improve(one, asked, self._dimensions.block_multiples)
                if len(evaluation.tried) == seen and max(blocking.columns, blocking.rows) > 1:  # there is no room
                    break
            winner = min(evaluation.tried, key=lambda one: one.value)
        if self._dimensions.is_alone(winner):
            self._descend(winner, asked, DIMENSIONS["kblocks"])

    def _sketch(self, asked: ScheduleOptions) -> Candidate | None:
        """Return the best of a scheduler's first few candidates."""
        first = asked
        if asked.scheduler not in ("cyclic", "bands"):
            first = self._first(asked)
        elif self._several:
            first = self._first_dealt(asked)
        if asked.scheduler == "kblocks" and self._problem.has_product and not self._evaluation.fits(first):
            first = next(filter(self._evaluation.fits, self._dimensions.with_room(asked)), first)
        self._evaluation.begin(first, must=not self._evaluation.tried, always=self._tries_rules)
        best = min(self._evaluation.settle(), key=lambda one: one.value, default=None)
        if best is None or not self._problem.has_product:
            return best
        if asked.scheduler == "kblocks":
            varied = self._dimensions
            ways = varied.places_of_sums, varied.corners, varied.block_orders, varied.long_blocks
            for dimension in (varied.stationary, varied.begins, *ways):
                best = self._improve(best, asked, dimension)
            # A descent that began with a rank alone would not find what many ranks do well.
            self._improve(best, asked, varied.alone)
            return best
        if asked.scheduler != "uncut":
            return best
        # Grid, ranks and tile are found with few chunks, which are few tasks; the chunks come last.
        for changes in self._dimensions.rough(asked, best):
            self._evaluation.begin(changed(first, **changes))
        return min(self._evaluation.settle(), key=lambda one: one.value, default=best)

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
            self._explore_crosses(asked)
        if asked.scheduler == "uncut":
            own = [one for one in self._evaluation.tried if one.options.scheduler == "uncut"]
            self._improve(min(own, key=lambda one: one.value), asked, self._dimensions.fine)

    def _descend(self, best: Candidate, asked: ScheduleOptions, dimensions: Sequence[str]) -> Candidate:
        """Improve one dimension after the other, in rounds, until a round brings nothing."""
        for _ in range(_ROUNDS):
            before = best
            for name in dimensions:
                best = self._improve(best, asked, getattr(self._dimensions, name))
            if best is before or self._evaluation.spent >= self._evaluation.limit:
                break
        return best

    def _explore_others(self, best: Candidate, asked: ScheduleOptions) -> Candidate:
        """
        Improve what is best on other numbers of ranks and other grids too, and return the best of all.

        Unequal shares, which come last, are worth most where few ranks take part, and a descent that has left a grid
        early does not come back to it.
        """
        others = [one for one in self._best_by(_shape) if one.shape != best.shape]
        for one in others[:_OTHERS]:
            if one.value > _WORTH_SHARES * self._evaluation.least:
                break
            improved = self._descend(one, asked, REFINEMENTS)
            best = min(best, improved, key=lambda candidate: candidate.value)
        return best

    def _explore_crosses(self, asked: ScheduleOptions) -> None:
        """
        Try the blocks of the best of each order on the best of each other grid, and improve what gains by them.

        A descent on one grid may end with blocks of one order where those that another grid has found are better.
        """
        shapes, orders = self._best_by(_shape), self._best_by(_order)
        for one in shapes[: 1 + _OTHERS]:
            if one.value > _WORTH_A_WAY * self._evaluation.least:
                break
            seen = len(self._evaluation.tried)
            for other in orders:
                if other.shape != one.shape:
                    blocking = dataclasses.replace(other.options.blocking, splits=one.options.blocking.splits)
                    self._evaluation.begin(dataclasses.replace(one.options, blocking=blocking))
            self._evaluation.settle()
            best = min(self._evaluation.tried[seen:], key=lambda found: found.value, default=one)
            if best.value < one.value:
                self._descend(best, asked, REFINEMENTS)

    def _best_by(self, way: Callable[[Candidate], Hashable]) -> list[Candidate]:
        """Return the best schedule of `kblocks` of each way to do something, best first."""
        ways: dict[Hashable, Candidate] = {}
        for one in self._evaluation.tried:
            if one.options.scheduler != "kblocks":
                continue
            key = way(one)
            known = ways.get(key)
            if known is None or one.value < known.value:
                ways[key] = one
        return sorted(ways.values(), key=lambda other: other.value)

    def _explore_ways(self, best: Candidate, asked: ScheduleOptions, way: Callable[[Candidate], Hashable]) -> Candidate:
        """
        Improve the best of each other way to do something, too, if it is not far behind, and return the best of all.

        Which blocks and shares are best depends on the order of blocks and on where C meets the products, and a descent
        that has chosen one seldom changes it.
        """
        for one in self._best_by(way)[1:]:
            if one.value <= _WORTH_A_WAY * self._evaluation.least:
                best = min(best, self._descend(one, asked, REFINEMENTS), key=lambda found: found.value)
        return best

    def _first(self, asked: ScheduleOptions) -> ScheduleOptions:
        if any(one is not None for one in (asked.devices, asked.row_shares, asked.col_shares, asked.areas)):
            return asked
        if asked.blocking.splits > 1:
            return asked
        return dataclasses.replace(asked, **self._dimensions.placed(tuple(range(self._num_ranks)), asked.grid))

    def _first_dealt(self, asked: ScheduleOptions) -> ScheduleOptions:
        """Return what `cyclic` and `bands` begin with among others: all ranks, as PARALiA's model compares slowly."""
        devices = asked.devices or tuple(range(self._num_ranks))
        of_uncut = [one for one in self._evaluation.tried if one.options.scheduler == "uncut"]
        tile = asked.tile
        if not tile and asked.scheduler == "cyclic" and of_uncut:
            tile = min(of_uncut, key=lambda one: one.value).tile
        return dataclasses.replace(asked, devices=devices, tile=tile)

    def _improve(self, best: Candidate, asked: ScheduleOptions, dimension: _Dimension) -> Candidate:
        """Return the best of a candidate and what one dimension makes of it, once: later it would make the same."""
        if (best, dimension.__name__) in self._improved:
            return best
        self._improved.add((best, dimension.__name__))
        seen = len(self._evaluation.tried)
        for changes in dimension(asked, best):
            self._evaluation.begin(changed(best.options, **changes))
        self._evaluation.settle()
        return min((best, *self._evaluation.tried[seen:]), key=lambda one: one.value)
