"""What rank 0 tells the others of a plan: its schedules, and of each what it says of itself."""

from __future__ import annotations

from collections.abc import Sequence

from uncut_mpi.api.plans import PlanSummary
from uncut_mpi.model.locations import Space
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import Planned, describe


def told_of(several: Sequence[Planned], asked: ScheduleOptions, plan_s: float) -> list[tuple[PlanSummary, bytes]]:
    """
    Return of each plan its summary and its schedule, encoded.

    Parameters
    ----------
    several : sequence of Planned
        The schedules to try, or one.
    asked : ScheduleOptions
        What the caller asked for.
    plan_s : float
        Time it took to plan all of them (s).
    """
    return [(_summary(planned, asked, plan_s, len(several)), planned.schedule.encode()) for planned in several]


def _summary(planned: Planned, asked: ScheduleOptions, plan_s: float, tried: int) -> PlanSummary:
    schedule = planned.schedule
    names = "BAC" if schedule.problem.swapped else "ABC"
    in_host = schedule.softbuf_bytes(Space.HOST).tolist()
    return PlanSummary(
        scheduler=f"auto ({schedule.scheduler})" if asked.scheduler == "auto" else schedule.scheduler,
        grid=schedule.callers_grid,
        splits=schedule.splits,
        tile=schedule.tile,
        how=describe(schedule, planned.options),
        tasks=len(schedule.tasks),
        bytes_by_link=schedule.bytes_by_link(),
        predicted_s=planned.predicted_s,
        plan_s=plan_s,
        digest=schedule.digest(),
        softbuf_bytes=schedule.softbuf_bytes().tolist(),
        staged="".join(sorted(names[matrix] for matrix in planned.staged)),
        tried=tried,
        device_memory=planned.options.device_memory,
        host_bytes=in_host,
        host_memory=planned.options.host_memory if any(in_host) else 0,
    )
