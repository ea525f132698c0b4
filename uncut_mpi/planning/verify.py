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
import math
import re
from collections.abc import Mapping
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import ScheduleError, reason
from uncut_mpi.model.dtypes import ITEMSIZES, DType
from uncut_mpi.model.locations import NOBODY, location_at, location_index
from uncut_mpi.model.parts import ByRows, Part
from uncut_mpi.model.placement import MATRICES
from uncut_mpi.planning.buffers import BUFFER_ALIGNMENT, pieces_of
from uncut_mpi.planning.lower import Lowering, tables_in_core
from uncut_mpi.planning.schedule import (
    TRIANGLES,
    Kind,
    Matrix,
    Op,
    Role,
    Schedule,
    buffer_bytes,
    ending_of,
    expand_ranges,
)
from uncut_mpi.planning.verify_lists import verify_lists, verify_spare_rows

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
    _verify_user_buffers(schedule)
    _verify_softbuf(schedule)
    _verify_forms(schedule)
    _verify_sums(schedule)
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
    how = Op[problem.trans_a], Op[problem.trans_b], problem.dtypes, problem.diagonal
    follower = _native.Follower(tables_in_core(schedule), *how)
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
                ending = TRIANGLES[part.triangle] if problem.epilogue is None else ending_of(problem)
                wanted = part.summed, part.alpha, part.c_in, part.copied, ending
                follower.expect(at, rows, cols, by, bool(turned), *wanted)
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


def _verify_forms(schedule: Schedule) -> None:
    """
    Prove that each product is with all of a matrix that has a form, and beside a triangular one B may be C.

    That is so if each element of B is read once, by what its own column of C depends on, as the contents show.
    """
    products = np.flatnonzero(schedule.tasks["kind"] == Kind.GEMM)
    for at, form in enumerate(schedule.problem.forms):
        if form is None:
            continue
        wanted = schedule.problem.shape_of(Matrix(at))
        region = schedule.regions[schedule.operands["region"][schedule.tasks["first_operand"][products] + 1 + at]]
        parts = (region["rows"] != wanted[0]) | (region["cols"] != wanted[1])
        if parts.any():
            task = _describe_task(schedule, int(products[np.argmax(parts)]))
            raise ScheduleError(f"{Matrix(at).name} is {form.kind}, and {task} has a part of it")
        other, read = Matrix(1 - at), schedule.regions[schedule.operands["region"][_read_operands(schedule)]]
        owned = schedule.buffers[read["buffer"]]
        of_other = read[(owned["role"] == Role.USER) & (owned["matrix"] == other)]
        times = int((of_other["rows"] * of_other["cols"]).sum())
        if form.is_triangular and len(products) and times != math.prod(schedule.problem.shape_of(other)):
            raise ScheduleError(
                f"{Matrix(at).name} is {form.kind}, so that {other.name} may be C, and some of it is read twice"
            )


def _read_operands(schedule: Schedule) -> np.ndarray:
    """Return the numbers of the operands that tasks read: all but what they write, and what a SEND sends."""
    tasks = schedule.tasks
    skipped = (tasks["kind"] != Kind.SEND).astype(np.int64)
    return expand_ranges(tasks["first_operand"] + skipped, np.maximum(tasks["num_operands"] - skipped, 0))


def _verify_sums(schedule: Schedule) -> None:
    """Prove of sums that shall be the same in every plan that all they depend on follows from the problem alone."""
    problem, buffers = schedule.problem, schedule.buffers
    if problem.sums is None:
        return
    products = np.flatnonzero(schedule.tasks["kind"] == Kind.GEMM)

    def require(good: np.ndarray, what: str) -> None:
        if not good.all():
            task = _describe_task(schedule, int(products[np.argmin(good)]))
            raise ScheduleError(f"sums shall be the same in every plan, and {task} {what}")

    held = held_by_operands(schedule)
    of_c, of_a = (held[np.isin(held["task"], products) & (held["operand"] == operand)] for operand in (0, 1))
    if not all(np.array_equal(one["task"], products) for one in (of_c, of_a)):
        raise ScheduleError("sums shall be the same in every plan, and a product has several parts of A or C")
    by_k = "col" if problem.trans_a == "N" else "row"
    extents = zip(
        (of_c, of_c, of_a), ("row", "col", by_k), problem.sums, (problem.m, problem.n, problem.k), strict=True
    )
    for one, first, edge, extent in extents:
        whole = (one[first] % edge == 0) & (one[f"{first}s"] == np.minimum(edge, extent - one[first]))
        require(whole, "is not of a tile and a k-block")
    first_operand = schedule.tasks["first_operand"][products]
    regions = [schedule.regions[schedule.operands["region"][first_operand + number]] for number in range(3)]
    rows, _, depth = problem.sums
    wanted = (rows, rows if problem.trans_a == "N" else depth, depth if problem.trans_b == "N" else problem.sums[1])
    for region, down in zip(regions, wanted, strict=True):
        buffer = buffers[region["buffer"]]
        items = region["row"] + region["col"] * buffer["ld"]
        begins = buffer["offset"] + items * ITEMSIZES[buffer["dtype"]]
        same = (buffer["role"] == Role.PANEL) & (begins % BUFFER_ALIGNMENT == 0)
        require(same & (buffer["rows"] == down) & (buffer["ld"] == buffer["ld"][:1]), "has no panel of the usual shape")
    number = of_c["row"] // problem.sums[0] * -(-problem.n // problem.sums[1]) + of_c["col"] // problem.sums[1]
    order = np.argsort(number, kind="stable")
    steps = -(-problem.k // problem.sums[2])
    in_turn = np.empty(len(order), bool)
    in_turn[order] = of_a[by_k][order] // problem.sums[2] == np.arange(len(order)) % steps
    in_turn[order] &= regions[0][order] == np.repeat(regions[0][order][::steps], steps)[: len(order)]
    require(in_turn, "is not the next of its tile in the order of k")


def _verify_user_buffers(schedule: Schedule) -> None:
    """Prove that the caller's buffers are the placement's parts of A, B and C."""
    problem, buffers = schedule.problem, schedule.buffers
    users = np.flatnonzero(buffers["role"] == Role.USER)
    nobodys = users[buffers["matrix"][users] == Matrix.NONE]
    if len(nobodys):
        raise ScheduleError(f"buffer {nobodys[0]} is the caller's but belongs to no matrix")
    order = np.argsort(schedule.pieces["buffer"], kind="stable")
    first = np.searchsorted(schedule.pieces["buffer"][order], np.arange(len(buffers) + 1))
    for matrix in MATRICES:
        own = users[buffers["matrix"][users] == matrix].tolist()
        parts = schedule.placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix))
        if len(own) > len(parts) == 1:
            raise ScheduleError(f"buffers {own[0]} and {own[1]} are both the caller's {matrix.name}")
        missing = dict[tuple[int, int], list[Part]]()  # by where they begin
        for part in parts:
            missing.setdefault((part.rows[0], part.cols[0]), []).append(part)
        for at in own:
            its = order[first[at] : first[at + 1]]
            _verify_user_buffer(schedule, at, matrix, schedule.pieces[its], missing)
        left = next((part for some in missing.values() for part in some), None)
        if left is not None and matrix is Matrix.C and problem.m and problem.n:
            what = "" if len(parts) == 1 else f", rows {left.rows} and columns {left.cols}"
            raise ScheduleError(f"no buffer is the caller's C{what}")
    strange = schedule.pieces["buffer"][~np.isin(schedule.pieces["buffer"], users)]
    if len(strange):
        raise ScheduleError(f"a piece of the caller's matrices is in buffer {strange[0]}, which is not the caller's")


def _verify_user_buffer(
    schedule: Schedule, at: int, matrix: Matrix, pieces: np.ndarray, missing: Mapping[tuple[int, int], list[Part]]
) -> None:
    """Check one buffer by the pieces that it has, and that it is one of some parts, which is taken out of them."""
    where, _, _, dtype, _, rows, cols, ld, offset = schedule.buffers[at].tolist()
    what = f"buffer {at} is the caller's {matrix.name}"
    top, left = pieces[["top", "left"]][0].tolist() if len(pieces) else (0, 0)
    same = missing.get((top, left), [])
    if not same and len(pieces):
        raise ScheduleError(f"{what} but holds a piece at row {top} and column {left}, where no part of it is left")
    here = [part for part in same if location_index(part.location, schedule.ranks) == where]
    part = next((part for part in here if part.ld == ld), next(iter(here or same), None))
    if part is None or len(pieces) != part.count:
        raise ScheduleError(f"{what} but there are {len(pieces)} pieces that say what it holds")
    if not here:
        raise ScheduleError(f"{what} but does not lie at {part.location}")
    shape = part.stored_shape
    wanted = schedule.problem.dtypes[matrix]
    if ((rows, cols), ld, dtype) != (shape, part.ld, wanted):
        raise ScheduleError(
            f"{what} but has shape {rows}×{cols}, leading dimension {ld} and type {DType(dtype).name}, not "
            f"{shape[0]}×{shape[1]}, {part.ld} and {wanted.name}"
        )
    wanted_pieces = pieces_of([part])
    wanted_pieces["buffer"] = at
    if not np.array_equal(pieces, wanted_pieces):
        raise ScheduleError(f"{what} but its piece is not all of it, or not turned as it is")
    if offset != -1:
        raise ScheduleError(f"{what} but has an offset in a SoftBuf")
    same.remove(part)


def _verify_softbuf(schedule: Schedule) -> None:
    """Prove that no two buffers of ours share memory, as address ranges."""
    buffers = schedule.buffers
    own = np.flatnonzero(buffers["role"] != Role.USER)
    table = buffers[own]
    for wrong, what in (
        (table["offset"] < 0, "has no place in a SoftBuf"),
        (
            schedule.in_host()[own] & ((table["role"] != Role.STAGING) | (schedule.owners()[own] == NOBODY)),
            "is not the caller's, yet not in a device's SoftBuf, nor is it staging in a rank's private host memory",
        ),
        (table["offset"] % ITEMSIZES[table["dtype"]] != 0, "does not start at a multiple of its element size"),
    ):
        if wrong.any():
            raise ScheduleError(f"buffer {int(own[np.argmax(wrong)])} {what}")
    extent = buffer_bytes(table)
    own, table, extent = own[extent > 0], table[extent > 0], extent[extent > 0]
    order = np.lexsort((table["offset"], table["location"]))
    memory, start = table["location"][order], table["offset"][order]
    stop = start + extent[order]
    clash = (memory[1:] == memory[:-1]) & (start[1:] < stop[:-1])
    if clash.any():
        at = int(np.argmax(clash))
        first, second = int(own[order[at]]), int(own[order[at + 1]])
        raise ScheduleError(
            f"buffers {first} and {second} overlap in the SoftBuf of rank {schedule.owners()[first]}: "
            f"bytes [{start[at]}, {stop[at]}) and [{start[at + 1]}, {stop[at + 1]})"
        )
