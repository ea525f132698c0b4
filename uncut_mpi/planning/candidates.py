"""What a search looked at: a schedule, its simulated run, and what a metric makes of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from uncut_mpi.planning.metrics import energy_j, watts_known
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.schedule import Kind, Schedule
from uncut_mpi.planning.simulate import Simulation


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Candidate:
    """
    A schedule that the search looked at.

    Attributes
    ----------
    options : ScheduleOptions
        What it was made with; every searched field is set.
    grid, splits, tile
        As those of the schedule.
    predicted_s : float
        Simulated time.
    bound_s : float
        What no schedule on these ranks can beat.
    value : float
        What the metric makes of it; smaller is better.
    run : callable
        Returns its run as the model sees it, always the same one. A search looks at few of them.
    """

    options: ScheduleOptions
    grid: tuple[int, int]
    splits: int
    tile: int
    predicted_s: float
    bound_s: float
    value: float
    run: Callable[[], Simulation]

    @property
    def simulation(self) -> Simulation:
        """Its run as the model sees it."""
        return self.run()

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.simulation.schedule

    @property
    def energy_j(self) -> float:
        """Predicted energy of all devices (J); 0 where the machine's watts are unknown."""
        return energy_j(self.simulation) if watts_known(self.simulation.machine) else 0.0


def shape_of(candidate: Candidate) -> tuple[int, ...]:
    """Return how a schedule cuts its problem: grid, splits of k and, of columns of ranks, how many each has."""
    columns = () if candidate.options.areas is None else tuple(map(len, candidate.options.areas))
    return (*candidate.grid, candidate.splits, *columns)


def speeds_of(candidate: Candidate) -> np.ndarray | None:
    """
    Return each place's share of C per second of its last task's end, or None where a rank has none.

    Of `kblocks` the last product counts: what comes after it is done for all at C's owner.
    """
    if candidate.splits > 1:
        return None
    simulation, schedule = candidate.simulation, candidate.schedule
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
