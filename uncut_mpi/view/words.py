"""What titles and legends say."""

from __future__ import annotations

from typing import Final

from uncut_mpi.planning.schedule import Schedule

_UNITS: Final = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def title_of(schedule: Schedule, machine: str = "") -> str:
    """Return the problem, as the caller wrote it, the scheduler and, if it is known, the machine."""
    problem, place = schedule.problem, schedule.placement
    m, n, a, b = problem.m, problem.n, place.a, place.b
    if problem.swapped:
        m, n, a, b = n, m, b, a
    where = f"A, B, C at {a},{b},{place.c}"
    title = f"m×n×k = {m}×{n}×{problem.k}, {problem.dtype.name}, {where}; scheduler {schedule.scheduler}"
    return f"{title}; machine {machine}" if machine else title


def bytes_text(size: int) -> str:
    """Return a number of bytes with three significant digits in B, kB, MB, GB or TB (powers of 1000)."""
    for factor, unit in _UNITS:
        # What would be rounded to 1000 of a unit is 1 of the next.
        if size >= 0.9995 * factor:
            value = size / factor
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"
    return f"{size} B"
