"""What planning finds for a product that is given by its arguments, as `Setting.of` takes them."""

from __future__ import annotations

from typing import Any

from uncut_mpi.model.machine import Machine
from uncut_mpi.planning import planner, schedulers
from uncut_mpi.planning import search as searching
from uncut_mpi.planning.chunks import Chunks
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import Planned
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.planning.schedulers import Made
from uncut_mpi.planning.search import SearchResult
from uncut_mpi.planning.setting import Setting


def plan_several(*about: Any) -> list[Planned]:
    return planner.plan_several(Setting.of(*about))


def expected_seconds(*about: Any) -> float:
    return planner.expected_seconds(Setting.of(*about))


def cut(*about: Any) -> Chunks | None:
    return planner.in_chunks(Setting.of(*about))


def search(*about: Any, budget_tasks: int | None = None) -> SearchResult:
    return searching.search(Setting.of(*about), budget_tasks=budget_tasks)


def setting_of(schedule: Schedule, **options: Any) -> Setting:
    """Return what a schedule could have been made for, on a uniform machine."""
    machine = Machine.uniform(schedule.num_ranks)
    return Setting(schedule.problem, schedule.placement, machine, ScheduleOptions(**options))


def make_schedule(*about: Any, **limit: int) -> Made:
    return schedulers.make_schedule(Setting.of(*about), **limit)
