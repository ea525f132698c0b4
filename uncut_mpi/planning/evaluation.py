"""
What a search has tried: schedules made and simulated, their values by a metric, and the budget that they took.

Schedules of `kblocks`, most of those that a search tries, are made and simulated in the core, beside the search; Python
sees their tables only where somebody asks for them. They are begun in batches, and a batch is judged by what was known
before it, so that the pace of the simulations changes nothing. How many tasks one has is known when it is made: what
there was no room for then is not taken, though it has been simulated perhaps. Schedules of tiles are made there too,
all of a batch ahead. Whether they are taken is decided one by one, as if each was made after the one before it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import CapacityError, PlanError, UncutError
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.candidates import Candidate, Progress, progress_of, progress_of_run
from uncut_mpi.planning.limits import MAX_TASKS
from uncut_mpi.planning.metrics import metric_of
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.schedule import Schedule, TileTables
from uncut_mpi.planning.schedulers import Made, make_schedule, make_tiles, prepare_tiles
from uncut_mpi.planning.simulate import Simulation, Simulations
from uncut_mpi.planning.tiles import PreparedTiles

DEFAULT_BUDGET_TASKS: Final = 80_000
"""Simulated tasks of a search on up to 8 ranks, where it takes mostly 20 to 130 ms."""

BUDGET_TASKS_PER_RANK: Final = 5_000
"""The same on more ranks, for each of them."""

_OF_TILES: Final = ("uncut", "cyclic")
"""Schedulers whose schedules the core makes of tiles."""

_MOST_TOO_LARGE: Final = 8
"""After so many schedules in a row for which the budget has no room there are hardly any that it has room for."""


def default_budget(num_ranks: int) -> int:
    """Return how many tasks a search simulates at most where nobody says."""
    return max(DEFAULT_BUDGET_TASKS, BUDGET_TASKS_PER_RANK * num_ranks)


class Evaluation:
    """
    The candidates of one search. A context manager, which ends the core's thread.

    Parameters
    ----------
    problem, placement, num_ranks, machine, issuing_threads
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

    def __init__(
        self,
        problem: GemmProblem,
        placement: Placement,
        num_ranks: int,
        machine: Machine,
        *,
        limit: int,
        issuing_threads: int = 0,
    ) -> None:
        self._problem, self._num_ranks, self._machine = problem, num_ranks, machine
        self._about = (problem, placement, num_ranks, machine)
        self._simulations = Simulations(machine, issuing_threads=issuing_threads)
        self._metric_name, self._metric = "time", metric_of("time", machine)
        self._seen: set[ScheduleOptions] = set()
        self._alike: dict[Hashable, Candidate | None] = {}
        self._copies: set[ScheduleOptions] = set()
        self._known: dict[ScheduleOptions, Candidate] = {}
        self._asked: dict[ScheduleOptions, ScheduleOptions] = {}
        self._by_name: dict[ScheduleOptions, Candidate] = {}
        self._bounds: dict[tuple[int, ...], float] = {}
        self._later: dict[ScheduleOptions, _Ahead | None] = {}
        self._begun: list[Callable[[], Candidate | None]] = []
        self._settled: list[Candidate] = []
        self._expected = self._last_tasks = 0
        self._too_large = 0
        self.tried: list[Candidate] = []
        self.least = np.inf
        self.limit = limit
        self.spent = self.discarded = 0

    def __enter__(self) -> Evaluation:
        self._simulations.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._begun.clear()  # they refer to this
        self._later.clear()
        self._simulations.__exit__()

    def allow(self, limit: int) -> None:
        """Set how many tasks all may have that is tried up to the end of another part of the search."""
        self.limit, self._too_large = limit, 0

    def turn_to(self, metric: str, limit: int) -> None:
        """Begin anew for another metric, with more budget; what was simulated costs nothing again."""
        self._metric_name, self._metric = metric, metric_of(metric, self._machine)
        self.allow(limit)
        before = [dataclasses.replace(one, value=self._metric.value(one.simulation)) for one in self.tried]
        by_name = {one.options: one for one in before}
        self._known = {asked: by_name[named] for asked, named in self._asked.items()} | by_name
        self._alike = {key: by_name[one.options] for key, one in self._alike.items() if one is not None}
        self._seen, self._by_name = set(), {}
        self.least, self.tried = np.inf, []

    @property
    def all_tried(self) -> list[Candidate]:
        """
        What was tried for the last metric, then what else was tried for the one before, each with its value.

        Of options that make the same schedule those that were tried first.
        """
        found = {one.options: one for one in (*self.tried, *self._known.values())}
        return [one for options, one in found.items() if options not in self._copies]

    def found(self, options: ScheduleOptions) -> Candidate | None:
        """Return the candidate of some options, None if there is none."""
        self.settle()
        return self._by_name.get(options)

    def bound_s(self, options: ScheduleOptions) -> float:
        """Return what no schedule on the ranks of some options can beat (s)."""
        ranks = options.devices or tuple(range(self._num_ranks))
        if ranks not in self._bounds:
            # The part of the whole machine's bound that fewer ranks raise: their sum of rates.
            rate = float(self._machine.gemm_rate(self._problem.dtype)[list(ranks)].sum())
            self._bounds[ranks] = max(self._whole_bound_s, self._problem.flops / rate)
        return self._bounds[ranks]

    @functools.cached_property
    def _whole_bound_s(self) -> float:
        problem, placement, _, machine = self._about
        return bound(problem, placement, machine).seconds

    def fits(self, options: ScheduleOptions) -> bool:
        """Return whether all ranks have room for the panels of a schedule of `kblocks`; errors as of its planning."""
        ways = (True, False) if self._of_kblocks.aligns else (True,)
        return any(self._of_kblocks.prepare(options, aligns=aligns).fits for aligns in ways)

    def begin(self, options: ScheduleOptions, *, must: bool = False, always: bool = False) -> None:
        """
        Begin to simulate a schedule, if it may be better and the budget has room for it; `settle` has the results.

        Parameters
        ----------
        options : ScheduleOptions
            What to try; what was tried before is not begun again.
        must : bool, optional
            Whether it is simulated whatever it takes; PlanError or CapacityError if it cannot be planned.
        always : bool, optional
            Whether it may have as many tasks as the whole of a default budget, whatever was spent.
        """
        if options.scheduler in _OF_TILES and not must and not always:
            if options not in self._seen and options not in self._later:
                self._later[options] = self._make_ahead(options)
        else:
            self._begin_later_ones()
            self._begin(options, must=must, always=always)

    def _begin(
        self, options: ScheduleOptions, *, must: bool = False, always: bool = False, ahead: _Ahead | None = None
    ) -> None:
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
        if self.spent + self._expected + self._last_tasks > self.limit:
            self._charge()  # near the end of the budget one by one, so that little is made in vain
        least_room = MAX_TASKS if must else default_budget(self._num_ranks) if always else 0
        room = max(least_room, self.limit - self.spent if self._too_large < _MOST_TOO_LARGE else 0)
        room = min(room, MAX_TASKS)
        if not must and (room <= 0 or (self._metric_name == "time" and self.bound_s(options) >= self.least)):
            self.discarded += 1
            return
        try:
            # What there is no room for is given up on the way.
            if options.scheduler == "kblocks" and not must:
                self._begin_in_core(options, room, least_room)
            else:
                self._begin_here(options, room, ahead)
        except (PlanError, CapacityError) as error:
            if must:
                raise
            self._discard(isinstance(error, PlanError))

    def settle(self) -> list[Candidate]:
        """Return what was begun and there was room for, in that order, when all of it is simulated."""
        self._charge()
        settled, self._settled = self._settled, []
        for candidate in settled:
            self.tried.append(candidate)
            self._by_name[candidate.options] = candidate
            self.least = min(self.least, candidate.value)
        return settled

    def _charge(self) -> None:
        """Wait for what was begun, and spend what it took; who waits for the whole batch judges by it later."""
        self._begin_later_ones()
        begun, self._begun, self._expected = self._begun, [], 0
        self._settled += (candidate for candidate in (one() for one in begun) if candidate is not None)

    # -- making and simulating ---------------------------------------------------------------

    def _make_ahead(self, options: ScheduleOptions) -> _Ahead | None:
        """
        Begin to make a schedule of tiles in the core, beside the others of a batch.

        Whether it is taken is decided when all before it are made, as if it was made then.
        """
        room = self.limit - self.spent
        hopeless = self._metric_name == "time" and self.bound_s(options) >= self.least
        if room <= 0 or self._too_large >= _MOST_TOO_LARGE or hopeless or options in self._known:
            return None
        try:
            prepared = prepare_tiles(*self._about, options, most_tasks=room)
        except UncutError:
            return None  # if it comes to that, it is raised there
        return None if prepared is None else _Ahead(prepared, self._simulations.begin_tiles(prepared.given))

    def _begin_later_ones(self) -> None:
        later, self._later = self._later, {}
        for options, ahead in later.items():
            self._begin(options, ahead=ahead)

    def _begin_here(self, options: ScheduleOptions, room: int, ahead: _Ahead | None) -> None:
        if ahead is None:
            made = make_schedule(*self._about, options, most_tasks=room)
        else:
            made = make_tiles(ahead.prepared, ahead.wait)
            if len(made.schedule.tasks) > room:  # there was more when it was begun
                raise PlanError("there are more tasks than a search has room for")
        if self._is_known(options, made.options) or not self._spend(len(made.schedule.tasks), room):
            return
        run = _Once(self._simulations.begin(made.schedule))
        self._begun.append(lambda: self._candidate_of(options, made, run))

    def _begin_in_core(self, options: ScheduleOptions, room: int, least_room: int) -> None:
        """Begin a schedule of `kblocks`; how many tasks it has is known when it is settled."""
        prepared = self._of_kblocks.prepare(options)
        if self._is_known(options, prepared.options):
            return
        alike = prepared.alike
        if alike in self._alike:  # the same by other rules: it costs nothing
            self._begun.append(lambda: self._named(options, prepared.options, self._alike.get(alike)))
            return
        self._alike[alike] = None
        wait = self._run_in_core(prepared, room)
        self._expected += self._last_tasks

        def settled() -> Candidate | None:
            made, run = prepared, wait()
            room_left = max(self.limit - self.spent, least_room)
            if not run.fits and self._of_kblocks.aligns:  # with fewer panels, if it fits so
                made = self._of_kblocks.prepare(options, aligns=False)
                run = self._run_in_core(made, room_left)()
            if not run.fits:
                self._discard(too_large=False)
                return None
            self._last_tasks = run.num_tasks
            if not self._spend(run.num_tasks, room_left):
                del self._alike[alike]  # there may be more room later
                return None
            simulated = _Once(functools.partial(_simulation_of, made, run, self._machine, self._simulations.machine))
            progress = functools.partial(progress_of_run, run)
            known_bytes = run.moved_bytes + run.held_bytes
            found = self._candidate(options, made.options, made, run.seconds, simulated, progress, known_bytes)
            self._alike[alike] = found
            return found

        self._begun.append(settled)

    def _run_in_core(self, prepared: kblocks.Prepared, room: int) -> Callable[[], _native.KBlocksRun]:
        """Begin to make a schedule and to simulate it, and return what waits for it."""
        run = prepared.run(room, keeps=self._metric_name != "time")
        wait = self._simulations.begin_kblocks(run, self._problem.dtype)

        def ended() -> _native.KBlocksRun:
            wait()
            return run

        return ended

    @functools.cached_property
    def _of_kblocks(self) -> kblocks.Planner:
        return kblocks.Planner(*self._about)

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

    def _named(self, options: ScheduleOptions, named: ScheduleOptions, found: Candidate | None) -> Candidate | None:
        """Return a candidate by the options that make the same schedule."""
        if found is None:  # there was no room for it
            self._discard(too_large=False)
            return None
        if named is not options:
            self._asked[options] = named
        self._copies.add(named)
        return dataclasses.replace(found, options=named)

    def _spend(self, tasks: int, room: int) -> bool:
        """Spend some of the budget, or none if there is no room for so many tasks."""
        if tasks > room:
            self._discard(too_large=True)
            return False
        self._too_large = 0
        self.spent += tasks
        return True

    def _discard(self, too_large: bool) -> None:
        self.discarded += 1
        self._too_large += too_large

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
        known_bytes: int | None = None,
    ) -> Candidate:
        if named is not options:
            self._asked[options] = named
        value = seconds if self._metric_name == "time" else self._metric.value(run())
        made_with = (named, made.grid, made.splits, made.tile, seconds, self.bound_s(options), value, run, progress)
        return Candidate(*made_with, known_bytes)


class _Ahead(NamedTuple):
    """A schedule of tiles that the core makes."""

    prepared: PreparedTiles
    wait: Callable[[], TileTables]


class _Once:
    """A simulation that is made when it is first asked for, and the same whichever thread asks."""

    __slots__ = ("_made", "_make")

    def __init__(self, make: Callable[[], Simulation]) -> None:
        self._make: Callable[[], Simulation] | None = make
        self._made: dict[str, Simulation] = {}

    def __call__(self) -> Simulation:
        make = self._make
        if make is None:
            return self._made["it"]
        found = self._made.get("it") or self._made.setdefault("it", make())  # two threads may make it: one is kept
        self._make = None
        return found


def _simulation_of(
    prepared: kblocks.Prepared, run: _native.KBlocksRun, machine: Machine, native: _native.SimulatedMachine
) -> Simulation:
    if not run.keeps:
        run = prepared.run(run.num_tasks, keeps=True)
        run.make(native)
    return Simulation(prepared.schedule_of(run), machine, *run.times())
