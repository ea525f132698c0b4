"""How large a schedule may be, so that planning takes seconds and gigabytes at most, whatever is asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from uncut_mpi.errors import PlanError
from uncut_mpi.model.problem import GemmProblem

MAX_TASKS: Final = 4_000_000
"""
Most tasks of a schedule.

To plan, encode and lower a task takes about 0.4 kB and 1.5 µs on rank 0, with the proof 0.7 kB and 4 µs: 3 GB and some
16 s for so many (a million tasks of `uncut` on 2 ranks, measured). To bind it to the host backend takes 1.3 kB more.
A product of 65,536³ on 1,024 ranks has 1.4 million.
"""

MANY_BUFFERS: Final = 1 << 20
"""What alignment adds to the buffers of a rank at most (bytes), where there are a few."""

FEW_TASKS: Final = MAX_TASKS // 64
"""If the usual tiles or k-blocks would make more than `MAX_TASKS`, they grow until there are at most so many."""

MAX_STEPS: Final = 1 << 17
"""Most pairs of a k-block and a block of C that each rank of `kblocks` follows."""


def coarse_enough(
    size: int, largest: int, count: Callable[[int], int], *, most: int = MAX_TASKS, few: int = FEW_TASKS
) -> int:
    """
    Return a tile or block, or twice, four times ... as large a one where it makes more tasks than there may be.

    Parameters
    ----------
    size : int
        What a scheduler's rules choose (elements).
    largest : int
        Beyond which nothing changes (elements).
    count : callable
        How many tasks a size makes.
    most, few : int, optional
        When it is enlarged, and until when.
    """
    if count(size) <= most:
        return size
    while size < largest and count(size) > few:
        size = min(2 * size, largest)
    return size


def too_many(problem: GemmProblem, what: str, tasks: str, most_tasks: int, mend: str) -> PlanError:
    """Return the error that says what makes how many tasks, in words, that they are too many, and what to do."""
    return PlanError(f"{what} makes {tasks} of {problem.shape_text}, the limit is {most_tasks}: {mend}")
