"""What a search looked at: a schedule, its simulated run, and what a metric makes of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from uncut_mpi import _native
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.metrics import energy_j, watts_known
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.schedule import Kind, Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import Simulation

Progress = tuple[np.ndarray, np.ndarray]


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
    bound_s : float
        What no schedule on these ranks can beat.
    value : float
        What the metric makes of it; smaller is better.
    run : callable
        Returns its run as the model sees it, always the same one. A search looks at few of them.
    progress : callable
        Returns when each rank has done its part, and how much that is: arrays of (s, operations).
    known : Taken or None
        What `taken` returns, where that is known.
    shape : tuple of int
        How it cuts its problem: grid, splits of k and, of columns of ranks, how many each has.
    """

    options: ScheduleOptions
    grid: tuple[int, int]
    splits: int
    tile: int
    predicted_s: float
    bound_s: float
    value: float
    run: Callable[[], Simulation]
    progress: Callable[[], Progress]
    known: Taken | None = None
    shape: tuple[int, ...] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        columns = () if self.options.areas is None else tuple(map(len, self.options.areas))
        object.__setattr__(self, "shape", (*self.grid, self.splits, *columns))

    def of_callers_c(self, setting: Setting) -> Candidate:
        """Return it with options and grid of the caller's C instead of the problem's."""
        if not setting.problem.swapped:
            return self
        return dataclasses.replace(self, options=setting.callers(self.options), grid=self.grid[::-1])

    @property
    def simulation(self) -> Simulation:
        """Its run as the model sees it."""
        return self.run()

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.simulation.schedule

    @property
    def taken(self) -> Taken:
        """What it takes besides time."""
        if self.known is not None:
            return self.known
        moved = self.schedule.bytes_by_link()
        held = int(self.schedule.softbuf_bytes().sum())
        products = int((self.schedule.tasks["kind"] == Kind.GEMM).sum())
        return Taken(sum(moved.values()) - moved["local"], held, products)

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
    ends, flops = (of_all[list(ranks[:places])] for of_all in candidate.progress())
    if not (ends > 0).all() or not (flops > 0).all():
        return None
    speeds: np.ndarray = flops / ends
    return speeds


def progress_of(simulation: Simulation) -> Progress:
    """
    Return the end of each rank's last task, and the operations of its products.

    Of `kblocks` the last product counts, or the last copy that it sends: sums at C's owner are formed for all.
    """
    schedule = simulation.schedule
    ranks, ends = schedule.tasks["rank"], simulation.end_s
    if schedule.scheduler == "kblocks":
        lanes = schedule.lanes[schedule.tasks["lane"]]
        sent = (lanes["source"] == ranks) & (lanes["destination"] != ranks) & (schedule.tasks["kind"] == Kind.COPY)
        own = (schedule.tasks["kind"] == Kind.GEMM) | sent
        ranks, ends = ranks[own], ends[own]
    last = np.zeros(schedule.num_ranks)
    np.maximum.at(last, ranks, ends)
    last[last > 0] += simulation.throttled_s[last > 0]
    return last, products_flops(schedule)


def progress_of_run(run: _native.KBlocksRun) -> Progress:
    """Return the same of a run in the core."""
    ends, elements = run.progress()
    return np.array(ends), 2.0 * np.array(elements)


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


class Once:
    """A simulation that is made when it is first asked for, and the same whichever thread asks."""

    __slots__ = ("_kept", "_make")

    def __init__(self, make: Callable[[], Simulation]) -> None:
        self._make, self._kept = make, dict[str, Simulation]()

    def __call__(self) -> Simulation:
        """Return it."""
        return self._kept.get("it") or self._kept.setdefault("it", self._make())


def itself(run: Simulation) -> Simulation:
    """Return a run that is there already; unlike a lambda it can be pickled."""
    return run


def simulation_of(
    prepared: kblocks.Prepared, run: _native.KBlocksRun, machine: Machine, native: _native.SimulatedMachine
) -> Simulation:
    """Return the run of a schedule of `kblocks` that the core has simulated; again, if it has not kept the times."""
    if not run.keeps:
        run = prepared.run(run.num_tasks, keeps=True)
        run.make(native)
    return Simulation(prepared.schedule_of(run), machine, *run.times())
