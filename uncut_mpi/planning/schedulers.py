"""The schedulers by name: what each makes of a problem, and what it has chosen for it."""

from __future__ import annotations

import dataclasses

from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import bands, cyclic, kblocks, uncut
from uncut_mpi.planning.options import ScheduleOptions, changed
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.planning.tiles import MAX_TASKS


@dataclasses.dataclass(frozen=True, slots=True)
class Made:
    """
    A schedule by one scheduler.

    Attributes
    ----------
    schedule : Schedule
        The tasks of all ranks.
    options : ScheduleOptions
        Those asked for, with what the scheduler has chosen.
    predicted_s : float or None
        What the scheduler's own model says; None where it has none.
    """

    schedule: Schedule
    options: ScheduleOptions
    predicted_s: float | None = None

    def seconds(self, machine: Machine) -> float:
        """Return the time that the scheduler's model expects, or else the simulation."""
        return simulate(self.schedule, machine).seconds if self.predicted_s is None else self.predicted_s


def make_schedule(
    problem: GemmProblem,
    placement: Placement,
    num_ranks: int,
    machine: Machine,
    options: ScheduleOptions,
    *,
    most_tasks: int = MAX_TASKS,
) -> Made:
    """
    Return what the scheduler named by `options` makes of a problem; without a product `uncut`, whichever it names.

    Pure and deterministic. What the schedulers raise is in `uncut_mpi.planning.planner.plan`; all but
    `bands`, which makes few tasks, give up (PlanError) what has more than `most_tasks`.
    """
    about = (problem, placement, num_ranks, machine)
    if options.scheduler == "uncut" or not problem.has_product:
        result = uncut.schedule(*about, changed(options, scheduler="uncut"), most_tasks=most_tasks)
        chosen = changed(options, scheduler="uncut", tile=result.schedule.tile, grid=result.schedule.grid)
        return Made(result.schedule, chosen, result.predicted_s)
    if options.scheduler == "cyclic":
        return Made(*cyclic.schedule(*about, options, most_tasks=most_tasks))
    if options.scheduler == "kblocks":
        return Made(*kblocks.schedule(*about, options, most_tasks=most_tasks))
    return Made(*bands.schedule(*about, options))
