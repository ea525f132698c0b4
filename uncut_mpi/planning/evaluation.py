"""
What a search has tried: schedules made and simulated, their values by a metric, and the budget that they took.

Schedules of `kblocks` are made and simulated in the core, beside the search. Python sees their tables only where
somebody asks for them. Schedules are begun in batches, and a batch is judged by what was known before it. So the pace
of the simulations changes nothing. How many tasks a schedule has is known when it is made: what there is no room for
is not taken then.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import CapacityError, PlanError
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.candidates import Candidate, Simulated, SimulatedInCore
from uncut_mpi.planning.crossing import cross
from uncut_mpi.planning.limits import MAX_TASKS
from uncut_mpi.planning.metrics import metric_of
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.planning.schedulers import make_schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import Simulations

DEFAULT_BUDGET_TASKS: Final = 120_000
"""Simulated tasks of a search on up to 8 ranks, where it takes mostly 20 to 130 ms."""

BUDGET_TASKS_PER_RANK: Final = 5_000
"""The same on more ranks, for each of them."""

_SMALL_CALL_S: Final = 8e-5
"""A call that takes no longer is small: a search is limited by what it can save."""

_MOST_FOR_SMALL_CALLS: Final = 36
"""Schedules that are tried for a small call, which takes about 5 ms."""

_TRIED_PER_S: Final = 4_000_000
"""So many more for each second by which the best call is longer than a small one."""

_TRIAL_S: Final = 1e-4
_SEARCH_S: Final = 0.025
_TASK_S: Final = 5e-6
"""
About what a schedule that is tried takes, a whole search at most for each rank, and schedules as large as the first for
each of its tasks (2 cores of an AMD EPYC).
"""

_MOST_TOO_LARGE: Final = 8
"""After so many schedules in a row for which the budget has no room there are hardly any that it has room for."""


def search_s(call_s: float, num_ranks: int, tasks: int) -> float:
    """Return about how long all is looked for (s), by counts alone; of a plan by rule its call (s) and its tasks."""
    return max(min(_SEARCH_S * num_ranks, _TRIAL_S * _most_tried(call_s)), _TASK_S * tasks)


def _most_tried(call_s: float) -> float:
    return _MOST_FOR_SMALL_CALLS + _TRIED_PER_S * max(0.0, call_s - _SMALL_CALL_S)


def default_budget(num_ranks: int) -> int:
    """Return how many tasks a search simulates at most where nobody says."""
    return max(DEFAULT_BUDGET_TASKS, BUDGET_TASKS_PER_RANK * num_ranks)


class Evaluation:
    """
    The candidates of one search. A context manager, which ends the core's thread.

    Parameters
    ----------
    setting : Setting
        As for `uncut_mpi.planning.search.search`.
    limit : int
        Tasks of all that is tried, at most.

    Attributes
    ----------
    tried : list of Candidate
        What was simulated, in the order in which it was begun.
    least : float
        The best value.
    limit, spent : int
        Tasks of all that is tried at most, and what they are now.
    discarded : int
        Candidates not taken: their bound or their size spoke against them.
    """

    def __init__(self, setting: Setting, *, limit: int) -> None:
        self._setting, self._problem, self._machine = setting, setting.problem, setting.machine
        self._by_rule, self._searching = setting.options.search == "rule", setting.searching
        self._simulations = Simulations(setting.machine, at_once=self._by_rule or self._searching.pause is not None)
        self._metric_name, self._metric = "time", metric_of("time", setting.machine)
        self._results: dict[ScheduleOptions, Candidate | None] = {}  # None: begun, or not taken
        self._alike: dict[Hashable, ScheduleOptions] = {}
        self._begun: list[tuple[ScheduleOptions, Callable[[], Candidate | None]]] = []
        self._bounds: dict[tuple[int, ...], float] = {}
        self._too_large = self._last_tasks = 0
        self.tried: list[Candidate] = []
        self.least = self._fastest_s = np.inf
        self.limit = limit
        self.spent = self.discarded = 0

    def __enter__(self) -> Evaluation:
        self._simulations.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._begun.clear()  # they refer to this
        self._simulations.__exit__()

    def allow(self, limit: int) -> None:
        """Set how many tasks all may have that is tried up to the end of another part of the search."""
        self.limit, self._too_large = limit, 0

    def turn_to(self, metric: str) -> None:
        """Judge by another metric what was tried, and what will be."""
        self._metric_name, self._metric = metric, metric_of(metric, self._machine)
        self.tried = [dataclasses.replace(one, value=self._metric.value(one.simulation)) for one in self.tried]
        by_name = {one.options: one for one in self.tried}
        self._results = {asked: one and by_name[one.options] for asked, one in self._results.items()}
        self.least = min((one.value for one in self.tried), default=np.inf)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be tried."""
        most = self._searching.share * _most_tried(self._fastest_s)
        return self.spent >= self.limit or self._too_large >= _MOST_TOO_LARGE or len(self.tried) >= most

    def found(self, options: ScheduleOptions) -> Candidate | None:
        """Return the candidate of some options, None if there is none."""
        self.settle()
        return self._results.get(options)

    def bound_s(self, options: ScheduleOptions) -> float:
        """Return what no schedule on the ranks of some options can beat (s)."""
        ranks = options.devices or tuple(range(self._setting.num_ranks))
        if ranks not in self._bounds:
            self._bounds[ranks] = self._setting.bound_s(ranks)
        return self._bounds[ranks]

    def fits(self, options: ScheduleOptions) -> bool:
        """Return whether all ranks have room for the panels of a schedule of `kblocks`."""
        ways = (True, False) if self._kblocks.aligns else (True,)
        return self._setting.surely_fits or any(
            self._kblocks.prepare(options, aligns=aligns, in_core=True).fits for aligns in ways
        )

    def begin(self, options: ScheduleOptions, *, must: bool = False) -> None:
        """
        Begin to simulate a schedule, if it may be better and the budget has room for it; `settle` has the results.

        Parameters
        ----------
        options : ScheduleOptions
            What to try; what was tried before is not begun again.
        must : bool, optional
            Whether it is simulated whatever it takes; PlanError or CapacityError if it cannot be planned.
        """
        known = len(self._results)
        self._results.setdefault(options, None)  # hashed once: that takes a while
        if len(self._results) == known:
            return
        if self._searching.pause is not None:
            self._searching.pause()
        if self.spent + (len(self._begun) + 1) * self._last_tasks > self.limit:
            self.settle()  # near the end of the budget one by one, so that little is made in vain
        by_bound = self._metric_name == "time" and not self._by_rule  # to know it takes as long as to try some by rule
        if not must and (self.is_over or (by_bound and self.bound_s(options) >= self.least)):
            self.discarded += 1
            return
        try:
            begin = self._begin_in_core if options.scheduler == "kblocks" else self._begin_here
            begin(options, must=must)
        except (PlanError, CapacityError) as error:
            if must:
                raise
            self.discarded += 1
            self._too_large += isinstance(error, PlanError)  # it has more tasks than there is room for

    def settle(self) -> list[Candidate]:
        """Return what was begun and there was room for, in that order, when all of it is simulated."""
        settled = []
        begun, self._begun = self._begun, []
        for options, wait in begun:
            candidate = wait()
            if candidate is None:
                self.discarded += 1
                continue
            if self._results.get(candidate.options) is None:
                self._results[candidate.options] = candidate
                settled.append(candidate)
            if options is not candidate.options:
                self._results[options] = candidate
        for candidate in settled:
            self.least = min(self.least, candidate.value)
            self._fastest_s = min(self._fastest_s, candidate.predicted_s)
        self.tried += settled
        return settled

    # -- making and simulating ---------------------------------------------------------------

    def _begin_here(self, options: ScheduleOptions, *, must: bool) -> None:
        asked = self._setting.but(options=options)
        made = make_schedule(asked, most_tasks=self._most_tasks(must=must))
        wait = self._simulations.begin(cross(made.schedule))

        def ended() -> Candidate | None:
            if (known := self._results.get(made.options)) is not None:  # tried by name
                return known
            if not self._spend(len(made.schedule.tasks), must=must):
                return None
            run = wait()
            return self._candidate(made.options, made.schedule, run.seconds, Simulated(run, made.schedule))

        self._begun.append((options, ended))

    def _begin_in_core(self, options: ScheduleOptions, *, must: bool) -> None:
        prepared = self._prepare(options, must=must)
        alike = prepared.alike
        first = self._alike.setdefault(alike, options)
        if first is not options:  # the same by other rules: it costs nothing
            self._begun.append((options, lambda: self._results[first]))
            return
        wait = self._run_in_core(prepared, must=must)

        def ended() -> Candidate | None:
            made, run = prepared, wait()
            if not run.fits and self._kblocks.aligns:  # with fewer panels, if it fits so
                made = self._prepare(options, aligns=False, must=must)
                run = self._run_in_core(made, must=must)()
            if must and (not run.fits or run.num_tasks > MAX_TASKS):
                made.schedule()  # says why there is none
            if not run.fits or not self._spend(run.num_tasks, must=must):
                del self._alike[alike]  # there may be more room later
                return None
            simulated = SimulatedInCore(made, run, self._machine, self._simulations.machine)
            return self._candidate(made.options, made, run.seconds, simulated)

        self._begun.append((options, ended))

    def _run_in_core(self, prepared: kblocks.Prepared, *, must: bool) -> Callable[[], _native.KBlocksRun]:
        """Begin to make a schedule and to simulate it, and return what waits for it."""
        keeps = self._by_rule or self._metric_name != "time"  # few are tried by rule, of which one is taken
        run = prepared.run(self._most_tasks(must=must), keeps=keeps)
        wait = self._simulations.begin_kblocks(run, self._problem.arithmetic)

        def ended() -> _native.KBlocksRun:
            wait()
            return run

        return ended

    @functools.cached_property
    def _kblocks(self) -> kblocks.Planner:
        return kblocks.Planner(self._setting)

    def _prepare(self, options: ScheduleOptions, *, aligns: bool = True, must: bool = False) -> kblocks.Prepared:
        return self._kblocks.prepare(options, aligns=aligns, in_core=not (must or options.blocking.slots))

    def _most_tasks(self, *, must: bool) -> int:
        return MAX_TASKS if must else self.limit - self.spent

    def _spend(self, tasks: int, *, must: bool = False) -> bool:
        """Spend some of the budget, or none if there is no room for so many tasks."""
        fits = must or tasks <= self.limit - self.spent
        self._too_large, self._last_tasks = 0 if fits else self._too_large + 1, tasks
        self.spent += tasks if fits else 0
        return fits

    def _candidate(
        self,
        options: ScheduleOptions,
        made: kblocks.Prepared | Schedule,
        seconds: float,
        run: Simulated | SimulatedInCore,
    ) -> Candidate:
        value = seconds if self._metric_name == "time" else self._metric.value(run.simulation)
        bound = functools.partial(self._setting.bound_s, options.devices or tuple(range(self._setting.num_ranks)))
        return Candidate(options, made.grid, made.splits, made.tile, seconds, bound, value, run)
