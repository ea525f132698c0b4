"""What a search looked at: a schedule, its run, what a metric makes of it; and which of them are worth trying."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Final, NamedTuple

import numpy as np

from uncut_mpi import _native
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.crossing import cross
from uncut_mpi.planning.metrics import energy_j, watts_known
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.schedule import Kind, Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import Simulation

Progress = tuple[np.ndarray, np.ndarray]

_WORTH_TRYING: Final = 1.25
"""A candidate predicted to take so many times as long as the best one is not tried."""

_CLOSE: Final = 1.1
"""Up to this the best of another scheduler comes before more of the same."""


class Taken(NamedTuple):
    """
    What a schedule takes.

    Attributes
    ----------
    moved_bytes : int
        What it copies from one memory to another.
    held_bytes : int
        Its buffers on all devices.
    products : int
        How many of its tasks are products.
    """

    moved_bytes: int
    held_bytes: int
    products: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Simulated:
    """
    A run of a schedule that is there.

    Attributes
    ----------
    simulation : Simulation
        The run, of copies between nodes in halves.
    planned : Schedule
        What it is a run of, as its scheduler made it.
    """

    simulation: Simulation
    planned: Schedule

    @property
    def taken(self) -> Taken:
        """What the schedule takes besides time."""
        schedule = self.simulation.schedule
        copies = schedule.copies()
        held, products = int(schedule.softbuf_bytes().sum()), int((schedule.tasks["kind"] == Kind.GEMM).sum())
        return Taken(int(copies[copies[:, 1] != copies[:, 2], 3].sum()), held, products)

    @property
    def progress(self) -> Progress:
        """The end of each rank's last task, and the operations of its products."""
        schedule = self.simulation.schedule
        last = np.zeros(schedule.num_ranks)
        np.maximum.at(last, schedule.tasks["rank"], self.simulation.end_s)
        last[last > 0] += self.simulation.throttled_s[last > 0]
        return last, products_flops(schedule)


@dataclasses.dataclass(frozen=True, eq=False)
class SimulatedInCore:
    """
    A run of a schedule of `kblocks` that the core has simulated; a search looks at few of them.

    Attributes
    ----------
    prepared : Prepared
        What the schedule is made of.
    run : KBlocksRun
        The run in the core.
    machine, native : Machine, SimulatedMachine
        On what; the same for the core.
    """

    prepared: kblocks.Prepared
    run: _native.KBlocksRun
    machine: Machine
    native: _native.SimulatedMachine

    @property
    def simulation(self) -> Simulation:
        """The run with its schedule; made again, if the core has not kept the times."""
        return self._kept[0]

    @property
    def planned(self) -> Schedule:
        """What it is a run of, as its scheduler made it."""
        return self._kept[1]

    @functools.cached_property
    def _kept(self) -> tuple[Simulation, Schedule]:
        run = self.run
        if not run.keeps:
            run = self.prepared.run(run.num_tasks, keeps=True)
            run.make(self.native)
        planned = self.prepared.schedule_of(run)
        return Simulation(cross(planned), self.machine, *run.times()), planned

    @property
    def taken(self) -> Taken:
        """What the schedule takes besides time."""
        return Taken(self.run.moved_bytes, self.run.held_bytes, self.run.num_products)

    @property
    def progress(self) -> Progress:
        """
        The same as of `Simulated`, but of each rank's last product, or the last copy that it sends.

        Sums at C's owner are formed for all.
        """
        ends, elements = self.run.progress()
        return np.array(ends), 2.0 * np.array(elements)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """
    A schedule that the search looked at.

    Attributes
    ----------
    options : ScheduleOptions
        What it was made with; every searched field is set.
    grid, splits, tile
        As those of the schedule; what a search returns has `Schedule.callers_grid`.
    predicted_s : float
        Simulated time.
    bound : callable
        Returns what no schedule on these ranks can beat (s).
    value : float
        What the metric makes of it; smaller is better.
    run : Simulated or SimulatedInCore
        Its run as the model sees it.
    shape : tuple of int
        How it cuts its problem: grid, splits of k and, of columns of ranks, how many each has.
    traits : frozenset
        What a descent seldom changes: shape, order of blocks, place of sums and how pieces are handed on.
    """

    options: ScheduleOptions
    grid: tuple[int, int]
    splits: int
    tile: int
    predicted_s: float
    bound: Callable[[], float]
    value: float
    run: Simulated | SimulatedInCore
    shape: tuple[int, ...] = dataclasses.field(init=False)
    traits: frozenset[Hashable] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        columns, how = () if self.options.areas is None else tuple(map(len, self.options.areas)), self.options.blocking
        object.__setattr__(self, "shape", (*self.grid, self.splits, *columns))
        kind = self.shape, how.order, how.slots > 0, (how.combine, how.away > 0), how.delivery, how.begin
        object.__setattr__(self, "traits", frozenset(kind))

    def of_callers_c(self, setting: Setting) -> Candidate:
        """Return it with options and grid of the caller's C instead of the problem's."""
        if not setting.problem.swapped:
            return self
        return dataclasses.replace(self, options=setting.callers(self.options), grid=self.grid[::-1])

    @property
    def simulation(self) -> Simulation:
        """Its run as the model sees it."""
        return self.run.simulation

    @property
    def schedule(self) -> Schedule:
        """The schedule, with copies between nodes in halves."""
        return self.simulation.schedule

    @property
    def planned(self) -> Schedule:
        """The schedule as its scheduler made it, with copies between nodes whole: so matrices can still be staged."""
        return self.run.planned

    @property
    def energy_j(self) -> float:
        """Predicted energy of all devices (J); 0 where the machine's watts are unknown."""
        return energy_j(self.simulation) if watts_known(self.simulation.machine) else 0.0


def speeds_of(candidate: Candidate) -> np.ndarray | None:
    """Return each place's share of C per second until it has done its part, or None where a rank has none."""
    if candidate.splits > 1:
        return None
    areas = candidate.options.areas
    places = math.prod(candidate.grid) if areas is None else sum(map(len, areas))
    ranks = candidate.options.devices or tuple(range(places))
    ends, flops = (of_all[list(ranks[:places])] for of_all in candidate.run.progress)
    if not (ends > 0).all() or not (flops > 0).all():
        return None
    speeds: np.ndarray = flops / ends
    return speeds


def products_flops(schedule: Schedule) -> np.ndarray:
    """Return the operations of each rank's products, float64 of shape (num_ranks,)."""
    tasks, flops = flops_of_tasks(schedule)
    return np.bincount(schedule.tasks["rank"][tasks], flops, schedule.num_ranks)


def flops_of_tasks(schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
    """Return which tasks are products, and the operations of each, int64."""
    tasks = np.flatnonzero(schedule.tasks["kind"] == Kind.GEMM)
    first = schedule.tasks["first_operand"][tasks]
    c, a = (schedule.regions[schedule.operands["region"][first + which]] for which in (0, 1))
    depth = np.where(schedule.operands["op"][first + 1] != 0, a["rows"], a["cols"])
    return tasks, 2 * c["rows"].astype(np.int64) * c["cols"] * depth


def varied(candidates: Sequence[Candidate], count: int) -> list[Candidate]:
    """
    Return up to so many candidates, the best first, no two of a kind, with each scheduler's best if it is close.

    A simulation cannot know how a library's products run on particular shapes (on an H200 5 to 15 % of a product's time
    either way). Nor does it know what meets on the machine. Schedules with the same blocks meet the same.

    Parameters
    ----------
    candidates : sequence of Candidate
        Best first, at least one.
    count : int
        At least 1.
    """
    if count == 1:
        return [candidates[0]]
    least = candidates[0].value
    worth = [one for one in candidates if one.value <= _WORTH_TRYING * least]
    of_schedulers: dict[str, Candidate] = {}
    for one in worth:
        if one.value <= _CLOSE * least:
            of_schedulers.setdefault(one.options.scheduler, one)
    kinds: set[Hashable] = set()
    num_ranks = candidates[0].schedule.num_ranks
    chosen: dict[str, Candidate] = {}  # by digest: different options may come to the same
    for one in (*of_schedulers.values(), *worth):
        kind = _kind(one, num_ranks)
        if len(chosen) < count and kind not in kinds:
            kinds.add(kind)
            chosen.setdefault(one.schedule.digest(), one)
    return sorted(chosen.values(), key=lambda one: one.value)


def _kind(candidate: Candidate, num_ranks: int) -> Hashable:
    options = candidate.options
    shares = tuple(
        round(share / sum(part), 1) for part in (options.row_shares, options.col_shares) if part for share in part
    )
    ranks = len(options.devices or ()) or num_ranks
    blocking = options.blocking
    own: Hashable = candidate.tile
    if options.scheduler == "kblocks":
        own = blocking.columns, blocking.rows, blocking.order, blocking.lanes, blocking.delivery, blocking.combine
        own = (*own, blocking.away > 0, blocking.begin)
    whole = math.fsum(area for column in options.areas or () for area in column)
    areas = tuple(tuple(round(area / whole, 1) for area in column) for column in options.areas or ())
    return options.scheduler, candidate.grid, candidate.splits, ranks, shares, areas, own
