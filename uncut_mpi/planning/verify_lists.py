"""
The proof of lowered lists: that they imply every await of their schedule, and hold its tasks.

Happens-before is rebuilt from the lists alone. Lanes are first in, first out. A wait for an event is over after
whatever stood on the recording lane before the record. A wait for a value of a flag is over after the tasks of the
signalling lane up to that sequence. For a signal writes the sequence of its task. No wait is for more than has been
signalled earlier in the global order. Each flag is written by one lane, and by none beyond the span. An event holds the
record that is awaited where the wait is issued.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import ScheduleError, reason
from uncut_mpi.model.dtypes import ITEMSIZES
from uncut_mpi.planning.lower import Code, OperationList, tables_in_core
from uncut_mpi.planning.schedule import MAX_LANES, Kind, LaneKind, Role, Schedule, expand_ranges, rows_by_rank

# Waits, then the body, then what tells others: the order within one task (premise P3).
_PHASE: Final = np.full(256, -1, np.int64)
_PHASE[[Code.WAIT_EVENT, Code.WAIT_FLAG]] = 0
_PHASE[[Code.COPY, Code.GEMM, Code.COMBINE, Code.SEND, Code.RECV]] = 1
_PHASE[[Code.RECORD, Code.SIGNAL]] = 2


def verify_lists(schedule: Schedule, lists: Sequence[OperationList]) -> int:
    """
    Prove the lists of all ranks and return how many awaits between lanes they were shown to imply.

    Raises
    ------
    ScheduleError
        Naming the rank, the operation and the rule.
    """
    if len(lists) != schedule.num_ranks:
        raise ScheduleError(f"there are {len(lists)} lists for {schedule.num_ranks} ranks")
    spans = {program.span for program in lists}
    if len(spans) > 1 or min(spans) < 1:
        raise ScheduleError(f"the lists say spans that differ or are not positive: {sorted(spans)}")
    for rank, program in enumerate(lists):
        _verify_frame(schedule, rank, program)
        if len(program.operations):
            _verify_order(schedule, rank, program)
    for rank, expected in enumerate(rows_by_rank(schedule.tasks["rank"], schedule.num_ranks)):
        _verify_bodies(schedule, rank, lists[rank], expected)
    views = [(np.ascontiguousarray(p.operations), np.ascontiguousarray(p.flag_lanes), p.num_events) for p in lists]
    try:
        return _native.prove_lists(tables_in_core(schedule), views, lists[0].span)
    except ValueError as error:
        raise ScheduleError(reason(error)) from None


def _verify_frame(schedule: Schedule, rank: int, program: OperationList) -> None:
    """Check that lanes, buffers and indices are those of the schedule."""
    if (program.rank, program.num_ranks) != (rank, schedule.num_ranks):
        raise ScheduleError(f"the list of rank {rank} says it is of rank {program.rank} of {program.num_ranks}")
    lanes = schedule.lanes[schedule.lanes["rank"] == rank]
    if len(lanes) > MAX_LANES:
        raise ScheduleError(f"rank {rank} has {len(lanes)} lanes, executors take {MAX_LANES}: use fewer ranks")
    tables = ((program.lanes, lanes), (program.buffers, schedule.buffers), (program.locations, schedule.locations))
    if not all(np.array_equal(mine, its) for mine, its in tables):
        raise ScheduleError(f"the list of rank {rank} has other lanes, buffers or locations than the schedule")
    operations = program.operations
    tasks = operations["task"]
    for wrong, what in (
        (_PHASE[operations["code"]] < 0, "has an unknown code"),
        ((operations["lane"] < 0) | (operations["lane"] >= len(lanes)), "is on a lane that does not exist"),
        ((tasks < 0) | (tasks >= len(schedule.tasks)), "belongs to a task that does not exist"),
    ):
        _refuse(rank, program, wrong, what)


def _verify_order(schedule: Schedule, rank: int, program: OperationList) -> None:
    """Check issue order = global order, and waits, body, signals together in the place of their task."""
    operations = program.operations
    task = operations["task"].astype(np.int64)
    lane_ids = np.flatnonzero(schedule.lanes["rank"] == rank)
    _refuse(
        rank, program, lane_ids[operations["lane"]] != schedule.tasks["lane"][task], "is not on the lane of its task"
    )
    backwards = np.concatenate(([False], np.diff(task) < 0))
    _refuse(rank, program, backwards, "stands behind one of a later task: issue order is not the global order")
    phase = _PHASE[operations["code"]]
    backwards = np.concatenate(([False], (np.diff(task) == 0) & (np.diff(phase) < 0)))
    _refuse(rank, program, backwards, "is out of order in its task: waits, then the body, then signals")


def _verify_bodies(schedule: Schedule, rank: int, program: OperationList, own: np.ndarray) -> None:
    """Check that each task of the rank (`own`) but a JOIN has one body, with the operands of the schedule."""
    tasks = schedule.tasks
    operations = program.operations
    bodies = operations[_PHASE[operations["code"]] == 1]
    expected = own[tasks["kind"][own] != Kind.JOIN]
    if not np.array_equal(bodies["task"], expected):
        twice = bodies["task"][1:][bodies["task"][1:] == bodies["task"][:-1]]
        odd = twice if len(twice) else np.setxor1d(bodies["task"], expected)
        raise ScheduleError(
            f"rank {rank} does not have each of its tasks once: task {int(odd[0])} is missing or there twice"
        )
    record = tasks[expected]
    lanes = schedule.lanes[record["lane"]]
    peers = np.where(lanes["kind"] == LaneKind.NET, lanes["source"] + lanes["destination"] - rank, -1)
    for wrong, what in (
        (bodies["code"] != record["kind"], "is of another kind than the schedule says"),
        (bodies["peer"] != peers, "is to another rank than the schedule says, or from another one"),
        (bodies["num_operands"] != record["num_operands"], "has another number of operands than the schedule says"),
        (
            (bodies["first_operand"] < 0) | (bodies["first_operand"] + bodies["num_operands"] > len(program.operands)),
            "has operands outside their table",
        ),
    ):
        if wrong.any():
            raise ScheduleError(f"rank {rank}: the body of task {int(expected[np.argmax(wrong)])} {what}")
    given = program.operands[expand_ranges(bodies["first_operand"], bodies["num_operands"])]
    operand = schedule.operands[expand_ranges(record["first_operand"], record["num_operands"])]
    region = schedule.regions[operand["region"]]
    buffer = schedule.buffers[region["buffer"]]
    forms, first = np.zeros(len(operand), np.uint8), np.cumsum(record["num_operands"]) - record["num_operands"]
    for at, form in enumerate(schedule.problem.forms):
        if form is not None:
            forms[first[record["kind"] == Kind.GEMM] + 1 + at] = form.code
    wanted = {
        "buffer": region["buffer"],
        "dtype": buffer["dtype"],
        "factor": operand["factor"],
        "op": operand["op"] | forms,
        "offset": ITEMSIZES[buffer["dtype"]] * (region["row"] + region["col"] * buffer["ld"]),
        "rows": region["rows"],
        "cols": region["cols"],
        "ld": buffer["ld"],
        "diagonal": operand["diagonal"],
    }
    of_task = np.repeat(expected, record["num_operands"])
    for name, values in wanted.items():
        wrong = given[name] != values
        if wrong.any():
            task = int(of_task[np.argmax(wrong)])
            raise ScheduleError(f"rank {rank}: an operand of task {task} has another {name} than the schedule says")


def _refuse(rank: int, program: OperationList, wrong: np.ndarray, what: str) -> None:
    if wrong.any():
        at = int(np.argmax(wrong))
        operation = program.operations[at]
        code = int(operation["code"])
        name = Code(code).name if code in set(Code) else f"code {code}"
        raise ScheduleError(f"operation {at} of rank {rank} ({name} of task {int(operation['task'])}) {what}")


def verify_spare_rows(lists: Sequence[OperationList]) -> None:
    """
    Prove that no operand's spare rows reach a row that holds anything, nor past its buffer: what products may compute.

    It speaks of addresses, not of the rule by which lowering gives them: a wrong rule is found too.
    Behind each column of a buffer of ours, the last included, stands padding up to its leading dimension; that no
    other buffer is there is `verify`'s to show. A caller's matrix has none: what is there is the caller's.

    Raises
    ------
    ScheduleError
        Naming the rank, the task and the buffer.
    """
    for program in lists:
        operands = program.operands
        buffer = program.buffers[operands["buffer"]]
        # Where the last column ends, and its spare rows, in rows of its buffer.
        start = operands["offset"] // ITEMSIZES[operands["dtype"]] % operands["ld"] + operands["rows"]
        stop = start + operands["spare_rows"]
        padding = (buffer["role"] != Role.USER) & (start >= buffer["rows"]) & (stop <= buffer["ld"])
        wrong = (operands["spare_rows"] > 0) & ~padding
        if wrong.any():
            at = int(np.argmax(wrong))
            first = program.operations["first_operand"]
            tasks = program.operations["task"][(first <= at) & (at < first + program.operations["num_operands"])]
            rows, ld, role = (buffer[name][at] for name in ("rows", "ld", "role"))
            raise ScheduleError(
                f"rank {program.rank}: an operand of task {', '.join(map(str, tasks.tolist()))} has spare rows "
                f"[{start[at]}, {stop[at]}) of buffer {operands['buffer'][at]} ({Role(role).name}), which holds rows "
                f"[0, {rows}) and has leading dimension {ld}: spare rows are padding of a buffer of ours"
            )
