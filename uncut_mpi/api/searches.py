"""
Searches beside the calls of a session: on rank 0, in a thread of its own, for products that are planned by rule.

Rank 0 alone counts and searches; the others hear of a better plan in the call in which all take it. What a search may
spend is a share of a whole one, by how many calls there were: never more than `SEARCH_FRACTION` of what they take. The
thread lets others go first after every schedule that it tries, since much of it is Python.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from uncut_mpi.api.plans import AnyPlan, Plan, PlanSummary, Told
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import ScheduleOptions, changed
from uncut_mpi.planning.planner import SEARCH_FRACTION, plan_several
from uncut_mpi.planning.setting import Searching, Setting
from uncut_mpi.planning.verify import verify as prove

SHARES: Final = (1 / 16, 1 / 4, 1.0)
"""Parts of a whole search that are made one after another, each when the calls have paid for it."""

_LEAST_S: Final = 2e-3
"""A part of a search that takes less tries hardly more than a rule does."""

_ADOPT_S: Final = 2e-3
_GROW_S: Final = 1e-2
"""About what a call takes longer in which a plan is taken, and besides where a SoftBuf has to grow for it."""

_GAIN: Final = 1e-3
"""What is no more than this part better than the plan there is, is not worth taking."""

_PAUSE_S: Final = 2e-5

logger = logging.getLogger("uncut_mpi")


class Better(NamedTuple):
    """A plan that a search has found."""

    plan: Plan  # as rank 0 runs it
    told: Told  # what the others make theirs of: the plan in numbers, and its schedule
    chosen: ScheduleOptions  # what the search has chosen


class _EndedError(Exception):
    """Nobody wants the result any more."""


@dataclasses.dataclass(slots=True, eq=False)
class _Job:
    plan: Plan
    share: float
    over: bool = False

    def pause(self) -> None:
        if self.over or not threading.main_thread().is_alive():
            raise _EndedError
        time.sleep(_PAUSE_S)


@dataclasses.dataclass(slots=True, eq=False)
class _Course:
    """How far the searches for one product are."""

    steps: list[tuple[int, float]]  # searches to come: after how many calls, and their shares
    at: int = 0  # the number of the call at which `Searches.left` is 0
    waiting: Better | None = None  # found, but so far there were fewer calls than pay for taking it, too


class Searches:
    """
    The searches of a session. Only one thread makes its calls; all of them are local.

    Parameters
    ----------
    machine : Machine
        What plans are made with.
    fits : callable
        Returns whether no memory has to grow for a plan.
    verify : bool
        Whether to prove every schedule, and what was lowered from it.
    active : bool
        Whether this rank searches.

    Attributes
    ----------
    left : dict of Plan to int
        Calls before something is due, of plans that are counted; less than 0 while a search runs.
    found : dict of Plan to (Better or None)
        What searches found that have ended.
    """

    def __init__(self, machine: Machine, fits: Callable[[Plan], bool], *, verify: bool, active: bool) -> None:
        self._machine, self._fits, self._verify, self._active = machine, fits, verify, active
        self.left: dict[AnyPlan, int] = {}
        self.found: dict[AnyPlan, Better | None] = {}
        self._courses: dict[AnyPlan, _Course] = {}
        self._jobs: collections.deque[_Job] = collections.deque()
        self._running: _Job | None = None
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None  # the last one, which may have ended
        self._is_busy = False

    def watch(self, plan: AnyPlan) -> None:
        """Count the calls of a plan from now on, if there are to be searches."""
        calls = plan.summary.search_after
        if not calls or not self._active or plan in self._courses:
            return
        whole_s = calls * SEARCH_FRACTION * plan.summary.predicted_s
        steps = {math.ceil(share * calls): share for share in SHARES if share == 1 or share * whole_s >= _LEAST_S}
        self._go_on(plan, _Course(sorted(steps.items())), 0)

    def count(self, plan: AnyPlan) -> None:
        """Count a call of a plan in `left`."""
        self.left[plan] = left = self.left[plan] - 1
        if left == 0:
            course = self._courses[plan]
            if course.waiting is not None:
                self.found[plan] = course.waiting
            else:
                self._begin(_Job(plan.now, course.steps.pop(0)[1]))

    def is_due(self, plan: AnyPlan) -> bool:
        """
        Return whether all ranks are to take what was found for a plan in `found` in this call.

        They are when the calls so far pay for that by the share of a search, or as many would save what it takes.
        """
        better, course = self.found[plan], self._courses[plan]
        calls = course.at - self.left[plan]
        if better is not None:
            cost = _ADOPT_S + (0.0 if self._fits(better.plan) else _GROW_S)
            now_s = plan.summary.predicted_s
            pays = math.ceil(cost / max(SEARCH_FRACTION * now_s, now_s - better.plan.summary.predicted_s))
            if calls >= pays:
                return True
            if not course.steps or pays < course.steps[0][0]:
                course.waiting, course.at = better, pays
                self.left[plan] = pays - calls
                del self.found[plan]
                return False
        del self.found[plan]
        self._go_on(plan, course, calls)
        return False

    def succeed(self, plan: AnyPlan, better: AnyPlan) -> None:
        """Go on with the plan that was taken in the place of another."""
        course = self._courses.pop(plan, None)
        if course is not None:
            calls = course.at - self.left.pop(plan)
            self._go_on(better, course, calls)

    def forget(self, plan: AnyPlan) -> None:
        """Drop what is done for a plan, also what runs."""
        if self._courses.pop(plan, None) is None:
            return
        self.left.pop(plan, None)
        with self._lock:
            self.found.pop(plan, None)
            for job in (*self._jobs, self._running):
                if job is not None and job.plan is plan.now:
                    job.over = True

    def close(self) -> None:
        """Drop everything, and wait until nothing runs any more, which is soon."""
        for plan in [*self._courses]:
            self.forget(plan)
        self.wait()

    def wait(self) -> None:
        """Wait until no search runs, nor is to begin."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _go_on(self, plan: AnyPlan, course: _Course, calls: int) -> None:
        """Count up to the next search for a plan, if there is one."""
        course.waiting = None
        if not course.steps:
            self._courses.pop(plan, None)
            self.left.pop(plan, None)
            return
        self._courses[plan] = course
        course.at = max(calls + 1, course.steps[0][0])
        self.left[plan] = course.at - calls

    def _begin(self, job: _Job) -> None:
        with self._lock:
            self._jobs.append(job)
            if not self._is_busy:
                self._is_busy = True
                self._thread = threading.Thread(target=self._work, name="uncut_mpi search")
                self._thread.start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._jobs:
                    self._is_busy, self._running = False, None
                    return
                self._running = job = self._jobs.popleft()
            found = None
            try:
                found = better_plan(job.plan, self._machine, Searching(job.share, job.pause), verify=self._verify)
            except _EndedError:
                pass
            except Exception as error:  # the plan by rule stays
                logger.debug("a search for %s ended: %s", job.plan.key.problem, error)
            with self._lock:
                if not job.over:
                    self.found[job.plan] = found


def better_plan(plan: Plan, machine: Machine, searching: Searching, *, verify: bool) -> Better | None:
    """Return what a search in some way finds, as rank 0 has it, or None if that is no better than a plan."""
    pause = searching.pause or (lambda: None)
    pause()  # whose call begins it goes on
    started, key, options = time.perf_counter(), plan.key, changed(plan.options, search="full")
    about = key.problem, key.placement, machine.num_ranks, machine, options, key.private, key.files
    found = plan_several(Setting.of(*about).but(searching=searching))[0]
    if not found.predicted_s < (1 - _GAIN) * plan.summary.predicted_s:
        return None
    if verify:
        prove(found.schedule, lower(found.schedule))
    pause()
    told = PlanSummary.of(found, machine, key.options, time.perf_counter() - started, 1)
    if searching.share < 1:
        summary = dataclasses.replace(told.summary, search="part", search_after=plan.summary.search_after)
        told = told._replace(summary=summary)
    pause()
    made = Plan.of(key, told.summary, found.schedule, 0, plan.options)
    pause()
    return Better(made, told, found.options)
