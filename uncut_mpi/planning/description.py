"""How schedules divide their problems, in words: of the caller's C, whatever is stored the other way round."""

from __future__ import annotations

import math
from collections.abc import Sequence

from uncut_mpi.model.arguments import counted
from uncut_mpi.model.placement import Matrix
from uncut_mpi.planning.blocking import count_blocks, forms_sums
from uncut_mpi.planning.options import ORDERS_BY_K, Blocking, ScheduleOptions
from uncut_mpi.planning.others import other
from uncut_mpi.planning.schedule import Schedule


def describe(schedule: Schedule, options: ScheduleOptions) -> str:
    """Return how a schedule divides its problem; `options` as `uncut_mpi.planning.planner.Planned` has them."""
    if schedule.problem.sums is not None:
        rows, cols, depth = schedule.problem.sums
        edges = (cols, rows) if schedule.problem.swapped else (rows, cols)
        return f"tiles of C of {edges[0]}x{edges[1]} and k-blocks of {depth}, the same in every plan"
    match schedule.scheduler:
        case "parts":
            return "each part " + ("copied to who shall have it" if schedule.problem.copies else "scaled where it lies")
        case "batch":
            ranks = schedule.grid[1]
            return f"{counted(len(schedule.problem.batch), 'product')} dealt to {counted(ranks, 'rank')}"
        case "uncut":
            return f"{_ranks_text(schedule, options)}, tile {schedule.tile}"
        case "kblocks":
            return blocks_text(schedule, options, _ranks_text(schedule, options))
    return other(schedule.scheduler).describe(schedule, options)


def grid_text(schedule: Schedule) -> str:
    """Return a schedule's process grid as ``RxC`` of the caller's C, or ``RxCxS`` where k is split."""
    rows, cols = schedule.callers_grid
    return f"{rows}x{cols}" + (f"x{schedule.splits}" if schedule.splits > 1 else "")


def areas_text(areas: Sequence[Sequence[float]]) -> str:
    """Return the areas of columns (or rows) of ranks as parts of C: ranks parted by colons, columns by bars."""
    total = math.fsum(map(math.fsum, areas))
    return " | ".join(":".join(f"{area / total:.3f}" for area in column) for column in areas)


def blocks_text(schedule: Schedule, options: ScheduleOptions, ranks: str) -> str:
    """Return how a schedule of blocks of k divides its problem, with `ranks` for how the ranks share C."""
    blocking = options.blocking
    by_k = schedule.problem.swapped and "columns" in blocking.order
    earliest = blocking.delivery == "earliest" and schedule.placement.on_device(Matrix.A, Matrix.B)
    clauses = (
        ranks,
        _k_blocks_text(blocking, -(-schedule.problem.k // schedule.splits)),
        _blocks_of_c_text(blocking, _along(schedule)),
        f"order {blocking.order}" + (" along rows of C" if by_k else ""),
        "one product lane" if blocking.lanes == 1 else "",
        "earliest delivery" if earliest else "",
        "beginning with what is held" if blocking.begin == "held" else "",
        _ring_text(blocking),
        _combined_text(schedule, blocking),
    )
    return ", ".join(filter(None, clauses))


def _along(schedule: Schedule) -> str:
    """Return what of the caller's C is stored together: rows or columns."""
    return "row" if schedule.problem.swapped else "column"


def _ranks_text(schedule: Schedule, options: ScheduleOptions) -> str:
    if options.areas is not None:
        splits = f", {schedule.splits} of k" if schedule.splits > 1 else ""
        return f"{_along(schedule)}s of ranks {areas_text(options.areas)}{splits}"
    text = f"grid {grid_text(schedule)}"
    for what, shares in (("rows", options.row_shares), ("columns", options.col_shares)):
        if shares is not None and len(set(shares)) > 1:
            text += f", {what} {':'.join(f'{share / sum(shares):.3f}' for share in shares)}"
    return text


def _k_blocks_text(blocking: Blocking, depth: int) -> str:
    first, block = min(blocking.first, depth), min(blocking.block, depth)
    if first == depth:
        return f"one k-block of {depth}"
    growth = f" growing {blocking.growth}-fold" if blocking.growth > 2 else ""
    return f"k-blocks of {first} to {block}{growth}" if first < block else f"k-blocks of {first}"


def _blocks_of_c_text(blocking: Blocking, along: str) -> str:
    text = f"{blocking.columns} {along} block{'s' if blocking.columns > 1 else ''}"
    if blocking.order == "corner" and max(blocking.rows, blocking.columns) > 1:
        text = f"{blocking.rows}x{blocking.columns} blocks"
    if blocking.tail and blocking.order in ORDERS_BY_K and blocking.columns > 1:
        text += f" in the last 1/{blocking.tail} of k" if blocking.tail > 1 else " in all of k"
    return text


def _ring_text(blocking: Blocking) -> str:
    if not blocking.slots:
        return ""
    rows, cols = blocking.c_rows or "all", blocking.c_cols or "all"
    two = ", the next one begun meanwhile" if blocking.c_slots > 1 else ""
    return f"room for {blocking.slots} of them and C by {rows} rows and {cols} columns{two}"


def _combined_text(schedule: Schedule, blocking: Blocking) -> str:
    # Where C is not read and the type is not rounded, the products are all there is.
    if not (schedule.placement.on_device(Matrix.C) and forms_sums(schedule.problem, schedule.splits)):
        return ""
    count = count_blocks(blocking.columns)
    combine = "worker" if blocking.away >= count else blocking.combine
    rest = f" but for the last {blocking.away} of {count}" if 0 < blocking.away < count else ""
    return f"C combined at its {combine}{rest}"
