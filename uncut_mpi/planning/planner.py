"""From a problem to its schedule: picks the scheduler and checks what was asked of it."""

from __future__ import annotations

import dataclasses

from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import uncut
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.schedule import Schedule

_SCHEDULERS = {"uncut": uncut.schedule}


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """
    What the planner decided.

    Attributes
    ----------
    schedule : Schedule
        The tasks of all ranks.
    predicted_s : float
        Time the schedule's model expects.
    options : ScheduleOptions
        Options it was made with.
    """

    schedule: Schedule
    predicted_s: float
    options: ScheduleOptions


def plan(
    problem: GemmProblem,
    placement: Placement,
    num_ranks: int,
    machine: Machine,
    options: ScheduleOptions | None = None,
) -> Planned:
    """
    Return the schedule for a problem.

    Pure and deterministic: the same arguments give the same bytes on any machine.

    Parameters
    ----------
    problem : GemmProblem
        The column-major problem.
    placement : Placement
        Where its A, B and C live.
    num_ranks : int
        Ranks of the session.
    machine : Machine
        What was measured about them; as many ranks.
    options : ScheduleOptions, optional
        What the caller fixes.

    Raises
    ------
    ParamError
        If placement, grid or machine do not fit the ranks.
    PlanError
        If no schedule is possible with these options.
    CapacityError
        If a rank has too little device memory.
    """
    options = options or ScheduleOptions()
    made = _SCHEDULERS[options.scheduler](problem, placement, num_ranks, machine, options)
    return Planned(made.schedule, made.predicted_s, options)


def ablation_options(base: ScheduleOptions | None = None) -> list[tuple[str, ScheduleOptions]]:
    """
    Return the paper's Fig. 8 as (name, options): each step adds to the one before.

    Parameters
    ----------
    base : ScheduleOptions, optional
        All that the steps do not switch is taken from it; relays come with the first routing that
        has a choice.
    """
    step = dataclasses.replace(
        base or ScheduleOptions(),
        scheduler="uncut",
        caching=False,
        overlap=False,
        routing="origin",
        batch=False,
        wr_lazy=False,
        order="fixed",
    )
    steps = [("baseline", step)]
    for name, added in (
        ("+ caching and overlap", {"caching": True, "overlap": True}),
        ("+ bandwidth routing", {"routing": "bw"}),
        ("+ ETA routing and batching", {"routing": "eta", "batch": True}),
        ("+ WR-lazy and ETA order", {"wr_lazy": True, "order": "eta"}),
    ):
        step = dataclasses.replace(step, **added)
        steps.append((name, step))
    return steps
