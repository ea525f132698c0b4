"""
The static proof of a schedule and of its lowered lists.

`verify` starts from the caller's A, B and C and derives what every rectangle of memory holds only by following tasks.
It proves that every read is of what it should be. No write races a read or a write, where happens-before is lane order
plus awaits, never the global order. Each element of C ends with what the problem says (`GemmProblem.result`), with each
k, alpha and beta exactly once. Buffers do not overlap, and every task can be issued where it is.
The lowered lists imply every await. It sees no pointers, fences or transposes as executed: tests with real executors
cover those.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import ScheduleError, reason
from uncut_mpi.model.locations import location_at
from uncut_mpi.model.parts import ByRows
from uncut_mpi.planning.lower import Lowering, tables_in_core
from uncut_mpi.planning.schedule import Kind, Matrix, Op, Role, Schedule
from uncut_mpi.planning.verify_lists import verify_lists, verify_spare_rows
from uncut_mpi.planning.verify_memory import verify_memory

HELD_DTYPE: Final = np.dtype(
    [
        ("task", "<i4"),
        ("operand", "<i4"),  # its number in the task; 0 is written
        ("matrix", "<i8"),
        ("row", "<i8"),  # of the matrix as stored
        ("col", "<i8"),
        ("rows", "<i8"),
        ("cols", "<i8"),
    ]
)
"""A rectangle of A, B or C that an operand holds."""


@dataclasses.dataclass(frozen=True, slots=True)
class Proof:
    """
    What was proven, as counts.

    Attributes
    ----------
    tasks : int
        Tasks followed.
    reads, writes : int
        Operands whose contents and ordering were checked.
    waits : int
        Awaits between different lanes that the lowered lists were shown to imply; 0 without them.
    """

    tasks: int
    reads: int
    writes: int
    waits: int


def verify(schedule: Schedule, lowering: Lowering | None = None) -> Proof:
    """
    Prove a schedule and, if given, its lowering.

    Local, pure; needs no device.

    Parameters
    ----------
    schedule : Schedule
        What to prove.
    lowering : Lowering, optional
        The lowering of the same schedule; every rank's list is proven too.

    Returns
    -------
    Proof
        Counts of what was checked.

    Raises
    ------
    ScheduleError
        Naming the rule that is broken, the task (kind, rank, lane, regions) and the other party.
    """
    schedule.check()
    verify_memory(schedule)
    follower = _followed(schedule)
    waits = 0
    if lowering is not None:
        lists = [lowering.rank_list(rank) for rank in range(schedule.num_ranks)]
        waits = verify_lists(schedule, lists)
        verify_spare_rows(lists)
    return Proof(len(schedule.tasks), follower.reads, follower.writes, waits)


def follower_of(schedule: Schedule) -> _native.Follower:
    """Return a follower for the tasks of `schedule`, which has followed none of them yet."""
    problem, buffers = schedule.problem, schedule.buffers
    follower = _native.Follower(tables_in_core(schedule), Op[problem.trans_a], Op[problem.trans_b], problem.dtypes)
    for part in problem.result:
        if not (0 <= part.rows[0] <= part.rows[1] <= problem.m and 0 <= part.cols[0] <= part.cols[1] <= problem.n):
            (top, bottom), (left, right) = part.rows, part.cols
            raise ScheduleError(f"C [{top}:{bottom}, {left}:{right}] is to hold something, but is not all there")
    result = ByRows(problem.result, lambda part: part.rows)
    for at, turned, row, col, height, width, top, left in schedule.pieces.tolist():
        matrix, by = int(buffers["matrix"][at]), (top - col, left - row) if turned else (top - row, left - col)
        if matrix != Matrix.C:
            given = matrix if problem.has_product or problem.copies else -1
            follower.give(at, (row, row + height), (col, col + width), by, bool(turned), given)
            continue
        for part in result.within(top, top + (width if turned else height)):
            spans = (part.rows, by[0]), (part.cols, by[1])
            down, along = ((start - ahead, stop - ahead) for (start, stop), ahead in (spans[::-1] if turned else spans))
            rows = max(row, down[0]), min(row + height, down[1])
            cols = max(col, along[0]), min(col + width, along[1])
            if rows[0] < rows[1] and cols[0] < cols[1]:
                follower.expect(at, rows, cols, by, bool(turned), part.summed, part.alpha, part.c_in, part.copied)
    return follower


def held_by_operands(schedule: Schedule) -> np.ndarray:
    """
    Return which rectangles of A, B and C the operands of a schedule's tasks hold, as the proof derives them.

    What a task writes is told as it is after the task. Memory that holds no elements of a matrix has no rectangle:
    never written, or zeros anywhere but in the caller's C. A sum of products is of C, wherever it is.

    Returns
    -------
    ndarray of HELD_DTYPE
        By task; of the column-major problem's matrices, as they are stored.

    Raises
    ------
    ScheduleError
        If a task breaks a rule of `verify`, but for those of what awaits what: to prove these takes memory by the
        square of the lanes.
    """
    return np.frombuffer(_followed(schedule, keeps_held=True).take_held(), HELD_DTYPE)


def _followed(schedule: Schedule, *, keeps_held: bool = False) -> _native.Follower:
    """Return a follower that has followed all tasks and checked the result."""
    try:
        follower = follower_of(schedule)
        if keeps_held:
            follower.keep_held()
        follower.follow(tables_in_core(schedule))
        follower.finish()
    except _native.RuleBroken as error:
        describe = {"task": _describe_task, "buffer": describe_buffer}
        text = re.sub(r"<(task|buffer) (\d+)>", lambda at: describe[at[1]](schedule, int(at[2])), reason(error))
        raise ScheduleError(text) from None
    return follower


def _describe_task(schedule: Schedule, task: int) -> str:
    """Return a task as text: index, kind, rank, lane, regions."""
    record = schedule.tasks[task]
    places = []
    for buffer, _, row, col, rows, cols in schedule.regions[schedule.operands_of(task)["region"]].tolist():
        places.append(f"{describe_buffer(schedule, buffer)} [{row}:{row + rows}, {col}:{col + cols}]")
    text = f"task {task} ({Kind(record['kind']).name}, rank {record['rank']}, lane {record['lane']}"
    if places:
        text += f", writes {places[0]}"
    if len(places) > 1:
        text += ", reads " + ", ".join(places[1:])
    return text + ")"


def describe_buffer(schedule: Schedule, buffer: int) -> str:
    """Return a buffer as text: index, role, matrix, place."""
    record = schedule.buffers[buffer]
    matrix = "" if record["matrix"] == Matrix.NONE else f" of {Matrix(record['matrix']).name}"
    where = location_at(schedule.locations, int(record["location"]))
    place = where.space + ("" if where.rank is None else f" of rank {where.rank}")
    return f"buffer {buffer} ({Role(record['role']).name}{matrix}, {place})"
