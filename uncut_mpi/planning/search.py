"""
The chooser: tries schedules by simulation and keeps the best.

What the caller fixed stays fixed; the rest is searched. `kblocks` begins with its own rules, all in one block and one
rank alone. Of these one dimension after the other is varied, again and again, until a pass brings nothing (coordinate
descent). `uncut` follows. Then comes the best of each other kind: on another grid, in another order, with C formed
elsewhere. The budget counts tasks of what is tried, never time, so that equal inputs give equal choices on any machine.
A call that takes little is tried in few ways only. A candidate whose bound is no better than the best is not simulated.
Of all that are as fast, to a per cent, the choice is one that copies little, then one that holds little, or one of few
products (`_with_ties_broken`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from typing import Any, Final

from uncut_mpi.errors import CapacityError, ParamError, PlanError
from uncut_mpi.model.placement import Placement
from uncut_mpi.planning.candidates import Candidate
from uncut_mpi.planning.dimensions import DIMENSIONS, OF_RANKS, OF_TILES, OUT_OF_CORE, Dimensions
from uncut_mpi.planning.evaluation import Evaluation, default_budget
from uncut_mpi.planning.metrics import metric_of
from uncut_mpi.planning.options import MOST_C_SLOTS, SEARCHED, USUAL_SLOTS, ScheduleOptions, changed
from uncut_mpi.planning.rank_sets import RankSets, is_cut
from uncut_mpi.planning.setting import Setting

TIE: Final = 0.01
"""
Values that differ by no more than this part are equal: predictions are off by more than that, and what is simulated
differs as much from run to run.
"""

_AS_LITTLE: Final = 1 / 3
"""What copies or holds no more than so much more than the least, or has no more products, is as good."""

_ALMOST: Final = 1e-3
"""
The same for bytes of matrices in parts, and where ranks have not room for all: what moves least leaves them where they
are. Smaller differences, such as padding, do not decide.
"""

_MOST_PASSES: Final = 3
_OUT_OF_CORE_PER_S: Final = 200_000
_MOST_OUT_OF_CORE: Final = 1_000_000
"""
Tasks that are tried besides for each second of a call for which ranks have not room, and at most: such calls are long,
and their schedules have many tasks. A core tries half a million each second (2 cores of an AMD EPYC).
"""

_WORTH_IT: Final = 1.6
"""The best of another kind that takes so many times as long as `kblocks`' best is not improved by itself."""

_TILED_PART: Final = 0.5
"""What `kblocks` leaves of the budget until `uncut` has been tried."""

_HOPELESS: Final = 1.25
"""The best grid of `uncut` that takes so many times as long is not improved."""

_LONG: Final = 4
"""A C so many times as long as wide is tried in strips where nothing else is looked for."""

_FREED_AT_ONCE: Final = 16
"""Schedules that are let go together, where others are to come first."""

_TIME_PART: Final = 0.75
"""What a search by another metric has of the budget for the least time, with which it begins."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class SearchResult:
    """
    What a search found.

    Attributes
    ----------
    candidates : list of Candidate
        All that were simulated, best first; of equals those of what was tried first.
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


def search(setting: Setting, *, budget_tasks: int | None = None) -> SearchResult:
    """
    Return the schedules tried for a problem, the best first.

    Pure and deterministic.

    Parameters
    ----------
    setting : Setting
        Its options are what the caller fixes: the scheduler (by default none), a tile, a grid, devices, shares,
        k-blocks, chunks; batching is tried where it allows it. Their `metric` is what is minimised. The candidates'
        are of the caller's C.
    budget_tasks : int, optional
        Tasks of all that is tried, at most; the first candidate is tried whatever it takes. By default
        `uncut_mpi.planning.evaluation.default_budget`.

    Raises
    ------
    ParamError
        If the metric needs watts that the machine file lacks, the budget is below 1, or no scheduler that is searched
        here takes the options.
    PlanError, CapacityError
        If there is no product, or not even the first candidate can be planned.
    """
    found, tried = _found(setting, budget_tasks)
    candidates = [one.of_callers_c(setting) for one in found]
    return SearchResult(candidates, tried.discarded, tried.spent, setting.options.metric)


def choice(setting: Setting) -> Candidate:
    """Return the best that a search finds, alone: for calls that wait for it, or run beside it."""
    found, tried = _found(setting)
    best, pause = found[0].of_callers_c(setting), setting.searching.pause
    del tried
    while pause is not None and found:  # to free a thousand schedules takes milliseconds
        del found[-_FREED_AT_ONCE:]
        pause()
    return best


def _found(setting: Setting, budget_tasks: int | None = None) -> tuple[list[Candidate], Evaluation]:
    """Return candidates of the problem's C, the best first, and all that was tried."""
    if budget_tasks is not None and budget_tasks < 1:
        raise ParamError(f"budget_tasks = {budget_tasks} is below 1")
    if not setting.problem.has_product:
        raise PlanError("a search tries schedules of products; C is only scaled here, by `without_product`")
    metric = setting.options.metric
    metric_of(metric, setting.machine)  # before any work
    made_with = changed(setting.options, tune=0, search="", metric="time")
    budget = default_budget(setting.num_ranks) if budget_tasks is None else budget_tasks
    budget = math.ceil(setting.searching.share * budget)
    with Evaluation(setting, limit=budget) as tried:
        first = budget if metric == "time" else math.ceil(_TIME_PART * budget)
        _Explorer(setting, tried).explore(made_with, first, setting.options.search)
        if metric != "time":
            # Two descents end in different places, and what is fast takes little energy more often than not.
            tried.turn_to(metric)
            _Explorer(setting, tried).explore(made_with, budget, setting.options.search)
    found = sorted(tried.tried, key=lambda one: one.value)  # stable: equals stay in the order of trying
    return _with_ties_broken(found, setting.placement), tried


def _with_ties_broken(found: list[Candidate], placement: Placement) -> list[Candidate]:
    """
    Return candidates, first of those as good as the first one (`TIE`) one that copies little, and then holds little.

    Of matrices in parts of devices, and where the first one has not room for all, it is one that copies least in few
    products. Those are large, so what the model does not know of small ones does not count. What is held without room
    for all is limited anyway.
    """
    best = found[0]
    in_turn = best.options.blocking.slots > 0
    tied = [one for one in found if one.value <= (1 + TIE) * best.value]
    slack = _ALMOST if placement.in_parts or in_turn else _AS_LITTLE
    rules = [("moved_bytes", slack)]
    rules += [] if in_turn else [("held_bytes", slack)]
    rules += [("products", _AS_LITTLE)] if in_turn or (placement.in_parts and not placement.in_host()) else []
    taken = {one: one.run.taken for one in tied} if len(tied) > 1 else {}
    for which, as_little in rules if taken else ():
        least = min(getattr(taken[one], which) for one in tied)
        tied = [one for one in tied if getattr(taken[one], which) <= least + as_little * abs(least)]
    return [tied[0], *(one for one in found if one is not tied[0])]


class _Explorer:
    """What a search tries for a metric, in which order."""

    def __init__(self, setting: Setting, evaluation: Evaluation) -> None:
        self._problem, self._placement, self._num_ranks = setting.problem, setting.placement, setting.num_ranks
        self._evaluation, self._sets = evaluation, RankSets(setting)
        self._share, self._besides = setting.searching.share, setting.searching.besides
        self._dimensions = Dimensions(setting, evaluation, self._sets)
        self._improved: set[tuple[Candidate, str]] = set()

    def explore(self, asked: ScheduleOptions, budget: int, search: str) -> None:
        """Improve what each scheduler chooses by itself, and the best of each other kind, if all is looked for."""
        if asked.scheduler not in (*SEARCHED, "auto"):  # others have rules of their own
            self._begin_with(asked)
            return
        schedulers = self._schedulers(asked)
        if search == "rule":
            self._by_rule(changed(asked, scheduler="kblocks" if "kblocks" in schedulers else schedulers[0]))
            return
        kblocks, uncut = (changed(asked, scheduler=one) for one in ("kblocks", "uncut"))
        spent = self._evaluation.spent
        self._evaluation.allow(spent + round((1 - _TILED_PART) * (budget - spent)) if len(schedulers) > 1 else budget)
        done, refused = set[Hashable](), None
        if "kblocks" in schedulers:
            try:
                starts = self._usual_starts(kblocks)
                if starts and starts[0].options.blocking.slots:
                    self._begin_with(*self._with_all_of_c(kblocks))
                    more = min(_MOST_OUT_OF_CORE, _OUT_OF_CORE_PER_S * starts[0].predicted_s)
                    budget += round(self._share * more)
                    budget += self._evaluation.spent - spent  # what there is to begin with
                    self._evaluation.allow(budget)
                for one in starts:
                    dimensions = OUT_OF_CORE if one.options.blocking.slots else DIMENSIONS
                    done |= self._descend(one, kblocks, dimensions).traits
            except (PlanError, CapacityError) as error:
                if len(schedulers) == 1:
                    raise
                refused = error.with_traceback(None)  # else its frames refer to it
        self._evaluation.allow(budget)
        if "uncut" in schedulers:
            try:
                self._explore_tiles(uncut)
            except CapacityError as error:
                raise refused or error from None  # `kblocks` says with how little memory it could do
        for one in self._starts(done):
            dimensions = OUT_OF_CORE if one.options.blocking.slots else DIMENSIONS
            self._descend(one, kblocks, [name for name in dimensions if name not in OF_RANKS])

    def _by_rule(self, asked: ScheduleOptions) -> None:
        """Try what a scheduler chooses by itself; of `kblocks` also all in one block, and where a matrix stays."""
        first = self._on_all_ranks(asked)
        if asked.scheduler == "kblocks" and not self._evaluation.fits(first):
            first = next(filter(self._evaluation.fits, self._sets.with_room(asked)), first)
        for usual in self._begin_with(first):
            if asked.scheduler == "kblocks" and not usual.options.blocking.slots:
                whole = self._dimensions.whole(asked, usual, by_rule=True)
                others = [*whole, *self._in_strips(asked, usual), *self._dimensions.stays(asked, usual)]
                self._begin_with(*(changed(usual.options, **one) for one in others))
                with contextlib.suppress(ParamError):  # what was chosen for another product need not fit this one
                    self._begin_with(*self._besides)

    def _in_strips(self, asked: ScheduleOptions, usual: Candidate) -> list[dict[str, Any]]:
        """Return how a C that is much longer than wide is cut along its length alone, where that is left open."""
        m, n = self._problem.m, self._problem.n
        count = len(usual.options.computing_ranks(self._num_ranks)) // max(1, usual.options.blocking.splits)
        if is_cut(asked) or count < 2 or max(m, n) < _LONG * min(m, n):
            return []
        return [{"grid": (count, 1) if m > n else (1, count), "row_shares": None, "col_shares": None}]

    def _schedulers(self, asked: ScheduleOptions) -> tuple[str, ...]:
        """Return the schedulers to search among. Looking for `uncut`'s best for matrices in parts takes too long."""
        is_plain = self._problem.part is None and self._problem.epilogue is None
        tiled = (is_plain and not self._placement.in_parts) or asked.scheduler == "uncut"
        searched = tuple(one for one in asked.schedulers() if one == "kblocks" or (one == "uncut" and tiled))
        if not searched:
            names = " or ".join(asked.schedulers())
            raise ParamError(f"{', '.join(asked.given)} is for {names}, which no search tries here: name the scheduler")
        return searched

    def _begin_with(self, *several: ScheduleOptions) -> list[Candidate]:
        """Return candidates of some options; the first of a search is simulated whatever it takes, or refused."""
        for options in several:
            self._evaluation.begin(options, must=not self._evaluation.tried and options is several[0])
        return [one for one in map(self._evaluation.found, several) if one is not None]

    def _usual_starts(self, asked: ScheduleOptions) -> list[Candidate]:
        """Return what `kblocks` begins with, best first: its own rules, all in one block, and one rank alone."""
        first, several = self._on_all_ranks(asked), list[ScheduleOptions]()
        if not self._evaluation.fits(first):
            several += self._in_rings(first)
            first = next(filter(self._evaluation.fits, self._sets.with_room(asked)), first)
        usual = next(iter(self._begin_with(first)), None)
        if usual is None:  # it was refused when it was begun
            return []
        in_rings = self._begin_with(*several)
        if usual.options.blocking.slots:
            return sorted(dict.fromkeys((usual, *in_rings)), key=lambda one: one.value)
        usual = self._improve(usual, asked, "parts")
        in_one_block = self._begin_with(
            *(changed(usual.options, **one) for one in self._dimensions.whole(asked, usual))
        )
        at_once = self._begin_with(*(changed(usual.options, **one) for one in self._dimensions.at_once(asked, usual)))
        self._begin_with(*(changed(usual.options, **one) for one in self._dimensions.stays(asked, usual)))
        starts = [self._improve(one, asked, "grids") for one in (usual, *in_one_block[:1])]
        for others in (in_one_block[1:], at_once):
            starts += sorted(others, key=lambda one: one.value)[:1]
        return sorted([*starts, *in_rings], key=lambda one: one.value)

    def _in_rings(self, asked: ScheduleOptions) -> list[ScheduleOptions]:
        """Return how all ranks would compute one block of C after the other, if that may be."""
        if asked.areas is not None or not asked.blocking.may_be_in_rings:
            return []
        slots, of_c = asked.blocking.slots or USUAL_SLOTS, asked.blocking.c_slots
        ways = [{"slots": slots, "c_slots": one} for one in ((of_c,) if of_c else range(1, MOST_C_SLOTS + 1))]
        return [changed(asked, blocking=changed(asked.blocking, splits=1, **way)) for way in ways]

    def _with_all_of_c(self, asked: ScheduleOptions) -> list[ScheduleOptions]:
        """Return one block of C for each rank with the deepest k-blocks beside it, all alike: A and B enter once."""
        if asked.blocking.rings_given or asked.blocking.first or not self._in_rings(asked):
            return []
        problem = self._problem
        way = {"splits": 1, "slots": 2, "c_rows": problem.m, "c_cols": problem.n, "first": problem.k}
        return [changed(asked, blocking=changed(asked.blocking, **way))]

    def _explore_tiles(self, asked: ScheduleOptions) -> None:
        """Improve what `uncut` chooses by itself, on all ranks or one, if it is not far behind."""
        usual = self._on_all_ranks(asked)
        for one in self._begin_with(usual, *self._dimensions.alone(usual)):
            best = one
            for name in ("tiles", "grids"):
                best = self._improve(best, asked, name)
            if best.value <= _HOPELESS * self._evaluation.least:
                self._descend(best, asked, OF_TILES)

    def _on_all_ranks(self, asked: ScheduleOptions) -> ScheduleOptions:
        given = (asked.devices, asked.row_shares, asked.col_shares, asked.areas)
        if any(one is not None for one in given) or asked.blocking.splits > 1:
            return asked
        return changed(asked, **self._sets.devices_and_shares(tuple(range(self._num_ranks)), asked.grid))

    def _starts(self, done: set[Hashable]) -> Iterator[Candidate]:
        """Return the best of each other kind, one after the other: what comes of one may be better than the next."""
        left, seen, least = list[Candidate](), 0, math.inf
        while not self._evaluation.is_over:
            new = [one for one in self._evaluation.tried[seen:] if one.options.scheduler == "kblocks"]
            seen, least = len(self._evaluation.tried), min([least, *(one.value for one in new)])
            left = [one for one in (*left, *new) if not one.traits <= done]
            best = min(left, key=lambda one: one.value, default=None)
            if best is None or best.value > _WORTH_IT * least:
                return
            done |= best.traits
            yield best

    def _descend(self, best: Candidate, asked: ScheduleOptions, dimensions: Sequence[str]) -> Candidate:
        """Improve one dimension after the other, again and again, until a pass brings nothing."""
        for _ in range(_MOST_PASSES):
            before = best
            for name in dimensions:
                best = self._improve(best, asked, name)
            if best is before or self._evaluation.is_over:
                break
        return best

    def _improve(self, best: Candidate, asked: ScheduleOptions, name: str) -> Candidate:
        """Return the best of a candidate and what one dimension makes of it, once: later it would make the same."""
        if (best, name) in self._improved:
            return best
        self._improved.add((best, name))
        seen = len(self._evaluation.tried)
        for changes in self._dimensions.vary(name, asked, best):
            if self._evaluation.is_over:
                break
            self._evaluation.begin(changed(best.options, **changes))
        self._evaluation.settle()
        return min((best, *self._evaluation.tried[seen:]), key=lambda one: one.value)
