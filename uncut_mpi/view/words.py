"""What titles and legends say."""

from __future__ import annotations

from uncut_mpi.planning.schedule import Schedule


def title_of(schedule: Schedule, machine: str = "") -> str:
    """Return the problem, as the caller wrote it, the scheduler and, if it is known, the machine."""
    problem, place = schedule.problem, schedule.placement
    a, b = (place.b, place.a) if problem.swapped else (place.a, place.b)
    where = f"A, B, C at {a},{b},{place.c}"
    title = f"m×n×k = {problem.shape_text}, {problem.arithmetic.name}, {where}; scheduler {schedule.scheduler}"
    return f"{title}; machine {machine}" if machine else title
