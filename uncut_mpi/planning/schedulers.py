"""The schedulers by name: what each makes of a problem, and what it has chosen for it."""

from __future__ import annotations

import dataclasses

from uncut_mpi.errors import PlanError
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning import batch, kblocks, uncut, without_product
from uncut_mpi.planning.limits import MAX_TASKS
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.others import other
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import simulate


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


def make_schedule(setting: Setting, *, most_tasks: int = MAX_TASKS) -> Made:
    """
    Return what the scheduler named by the options of a setting makes of it.

    Without a product it is `without_product`, whichever is named, and of a batch `batch`.
    Pure and deterministic. What the schedulers raise is in `uncut_mpi.planning.planner.plan`; what has more than
    `most_tasks` they give up (PlanError).
    """
    problem, options = setting.problem, setting.options
    if not problem.has_product:
        return Made(without_product.schedule(setting), options)
    if problem.batch:
        return Made(batch.schedule(setting), options)
    if (problem.part is not None or problem.epilogue is not None) and options.scheduler != "kblocks":
        raise PlanError(
            f"{options.scheduler} computes all of C, and nothing else: ask for kblocks or auto for a part of it, or an "
            "epilogue"
        )
    if options.scheduler == "uncut":
        prepared = uncut.prepare(setting, most_tasks=most_tasks)
        schedule, seconds = prepared.schedule()
        return Made(schedule, prepared.options, seconds)
    if options.scheduler == "kblocks":
        return Made(*kblocks.schedule(setting, most_tasks=most_tasks))
    return Made(*other(options.scheduler).make(setting, most_tasks=most_tasks))
