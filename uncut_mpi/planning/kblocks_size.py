"""How many tasks a schedule of `kblocks` has: the core counts them, without making any."""

from __future__ import annotations

from uncut_mpi import _native
from uncut_mpi.errors import PlanError
from uncut_mpi.planning.blocking import blocking_of, count_blocks
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.kblocks_request import DealtPanels
from uncut_mpi.planning.limits import FEW_TASKS, MAX_STEPS, MAX_TASKS, too_many
from uncut_mpi.planning.options import Blocking, changed


def check_steps(dealt: DealtPanels, how: Blocking) -> None:
    """Raise `PlanError`, before any step is made, if each rank has too many k-blocks and blocks of C."""
    k_blocks = blocking_of(how, far_apart=False).count_k_blocks(_depth(dealt))
    blocks = count_blocks(how.columns) * count_blocks(how.rows)
    if how.in_rings:
        rows, cols = dealt.largest
        rounds = -(-rows // (how.c_rows or rows or 1)) * -(-cols // (how.c_cols or cols or 1))
        if rounds * (k_blocks + blocks) > MAX_STEPS:
            raise too_many(
                dealt.problem,
                f"kblocks with {rounds} blocks of C on each rank, one after the other, and {k_blocks} k-blocks",
                f"{rounds * (k_blocks + blocks)} steps",
                MAX_STEPS,
                "give ranks more memory (device_memory), or ask for larger blocks (blocking.c_rows, blocking.c_cols, "
                "blocking.block)",
            )
        return
    if k_blocks * blocks > MAX_STEPS:
        raise too_many(
            dealt.problem,
            f"kblocks with {k_blocks} k-blocks and {blocks} blocks of C on each rank",
            f"{k_blocks * blocks} pairs of them",
            MAX_STEPS,
            "ask for longer k-blocks (blocking.block), or for fewer blocks (blocking.columns, blocking.rows)",
        )


def with_longer_k_blocks(dealt: DealtPanels, how: Blocking) -> Blocking:
    """Return k-blocks of twice, four times ... the length where there would be more tasks than there may be."""
    if _count(dealt, how, MAX_TASKS) <= MAX_TASKS:
        return how
    while _count(dealt, how, FEW_TASKS) > FEW_TASKS and how.block < _depth(dealt):
        how = changed(how, block=min(2 * how.block, _depth(dealt)))
    return how


def too_many_tasks(dealt: DealtPanels, most_tasks: int) -> PlanError:
    """Return the error that says what makes more tasks than so many."""
    problem = dealt.problem
    grid = ProcessGrid(*dealt.grid, problem.swapped)
    return too_many(
        problem,
        f"kblocks on {grid} ranks, k split {dealt.splits} times,",
        f"more than {most_tasks} tasks",
        most_tasks,
        "ask for larger k-blocks (blocking.block), another grid or fewer ranks",
    )


def _depth(dealt: DealtPanels) -> int:
    """Return the elements of the longest part of k."""
    return -(-dealt.problem.k // dealt.splits)


def _count(dealt: DealtPanels, how: Blocking, most_tasks: int) -> int:
    """Return how many tasks there are, or any lower number where they are surely few enough."""
    request = dealt.request(how, aligns=False)
    if request.tasks_at_most <= most_tasks:
        return 0
    return _native.KBlocksLayout(request).count(most_tasks)
