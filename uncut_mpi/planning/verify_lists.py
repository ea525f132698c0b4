"""
The proof of lowered lists: that they imply every await of their schedule, and hold its tasks.

Happens-before is rebuilt from the lists alone: lanes are first in, first out; a wait for an event is
over after whatever stood on the recording lane before the record, a wait for a value of a flag after
whatever stood on the signalling lane before the first signal that writes so much.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import Code, OperationList, sequences
from uncut_mpi.planning.schedule import Kind, Schedule, expand_ranges

# Waits, then the body, then what tells others: the order within one task (premise P3).
_PHASE: Final = np.full(256, -1, np.int64)
for _codes, _phase in (
    ((Code.WAIT_EVENT, Code.WAIT_FLAG), 0),
    ((Code.COPY, Code.GEMM, Code.COMBINE), 1),
    ((Code.RECORD, Code.SIGNAL), 2),
):
    for _code in _codes:
        _PHASE[_code] = _phase


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
    sequence = sequences(schedule.tasks["lane"])
    for rank, program in enumerate(lists):
        _verify_frame(schedule, rank, program)
        if len(program.operations):
            _verify_order(schedule, rank, program)
        _verify_bodies(schedule, rank, program)
        _verify_events(sequence, rank, program)
    flags = _verify_flags(schedule, lists, sequence)
    return _verify_awaits(schedule, lists, flags)


def _verify_frame(schedule: Schedule, rank: int, program: OperationList) -> None:
    """Check that lanes, buffers and indices are those of the schedule."""
    if (program.rank, program.num_ranks) != (rank, schedule.num_ranks):
        raise ScheduleError(f"the list of rank {rank} says it is of rank {program.rank} of {program.num_ranks}")
    lanes = schedule.lanes[schedule.lanes["rank"] == rank]
    if not np.array_equal(program.lanes, lanes) or not np.array_equal(program.buffers, schedule.buffers):
        raise ScheduleError(f"the list of rank {rank} has other lanes or buffers than the schedule")
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


def _verify_bodies(schedule: Schedule, rank: int, program: OperationList) -> None:
    """Check that each task of the rank but a JOIN has one body, with the operands of the schedule."""
    tasks = schedule.tasks
    operations = program.operations
    bodies = operations[_PHASE[operations["code"]] == 1]
    expected = np.flatnonzero((tasks["rank"] == rank) & (tasks["kind"] != Kind.JOIN))
    if not np.array_equal(bodies["task"], expected):
        twice = bodies["task"][1:][bodies["task"][1:] == bodies["task"][:-1]]
        odd = twice if len(twice) else np.setxor1d(bodies["task"], expected)
        raise ScheduleError(
            f"rank {rank} does not have each of its tasks once: task {int(odd[0])} is missing or there twice"
        )
    record = tasks[expected]
    for wrong, what in (
        (bodies["code"] != record["kind"], "is of another kind than the schedule says"),
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
    itemsize = np.array([dtype.itemsize for dtype in DType], np.int64)[buffer["dtype"]]
    wanted = {
        "buffer": region["buffer"],
        "dtype": buffer["dtype"],
        "factor": operand["factor"],
        "op": operand["op"],
        "offset": itemsize * (region["row"] + region["col"] * buffer["ld"]),
        "rows": region["rows"],
        "cols": region["cols"],
        "ld": buffer["ld"],
    }
    of_task = np.repeat(expected, record["num_operands"])
    for name, values in wanted.items():
        wrong = given[name] != values
        if wrong.any():
            task = int(of_task[np.argmax(wrong)])
            raise ScheduleError(f"rank {rank}: an operand of task {task} has another {name} than the schedule says")


def _verify_events(sequence: np.ndarray, rank: int, program: OperationList) -> None:
    """Check that a wait for an event is issued while the event holds the record that is awaited."""
    operations = program.operations
    code, slot = operations["code"], operations["slot"]
    uses_event = (code == Code.RECORD) | (code == Code.WAIT_EVENT)
    missing = uses_event & ((slot < 0) | (slot >= program.num_events))
    _refuse(rank, program, missing, "names an event that does not exist")
    records = code == Code.RECORD
    wrong = records & (operations["value"] != sequence[operations["task"]])
    _refuse(rank, program, wrong, "records another value than the sequence of its task")
    twice = np.concatenate(([False], (np.diff(operations["task"]) == 0) & records[1:] & records[:-1]))
    _refuse(rank, program, twice, "records a task twice")
    holds: dict[int, tuple[int, int]] = {}
    at = np.flatnonzero(uses_event)
    for index, what, event, value, lane, peer in zip(
        at.tolist(),
        *(operations[name][at].tolist() for name in ("code", "slot", "value", "lane", "peer")),
        strict=True,
    ):
        if what == Code.RECORD:
            holds[event] = (lane, value)
        elif holds.get(event) != (peer, value):
            wrong = np.arange(len(operations)) == index
            _refuse(
                rank,
                program,
                wrong,
                f"waits for task {value} of lane {peer}, of which event {event} holds no record there",
            )


@dataclasses.dataclass(slots=True)
class _Flag:
    """What is written to one flag, in order: values, the tasks that write them, and their clocks."""

    values: list[int] = dataclasses.field(default_factory=list)
    tasks: list[int] = dataclasses.field(default_factory=list)
    clocks: list[np.ndarray] = dataclasses.field(default_factory=list)


def _verify_flags(
    schedule: Schedule, lists: Sequence[OperationList], sequence: np.ndarray
) -> dict[tuple[int, int], _Flag]:
    """Check one flag, one lane, values that grow and waits for values that come; return the flags."""
    flags: dict[tuple[int, int], _Flag] = {}
    spans = {program.span for program in lists}
    if len(spans) > 1 or min(spans) < 1:
        raise ScheduleError(f"the lists say spans that differ or are not positive: {sorted(spans)}")
    lane = schedule.tasks["lane"]
    for rank, program in enumerate(lists):
        operations = program.operations
        signals = operations[operations["code"] == Code.SIGNAL]
        for task, slot, value, peer in zip(
            *(signals[name].tolist() for name in ("task", "slot", "value", "peer")), strict=True
        ):
            if not 0 <= peer < len(lists) or peer == rank or not 0 <= slot < lists[peer].num_flags:
                raise ScheduleError(
                    f"rank {rank}: task {task} signals flag {slot} of rank {peer}, which does not exist"
                )
            what = f"rank {rank}: task {task} signals {value} to flag {slot} of rank {peer}"
            if lists[peer].flag_lanes[slot] != schedule.lanes[lane[task]]:
                raise ScheduleError(f"{what}, whose list says that another lane does")
            flag = flags.setdefault((peer, slot), _Flag())
            if flag.tasks and lane[flag.tasks[-1]] != lane[task]:
                raise ScheduleError(f"{what}, which task {flag.tasks[-1]} of another lane signals too")
            if value != sequence[task]:
                raise ScheduleError(f"{what}, but is task {sequence[task]} of its lane")
            if flag.tasks and flag.tasks[-1] == task:
                raise ScheduleError(f"{what} twice")
            if value > program.span:
                raise ScheduleError(f"{what}, beyond the span of {program.span}")
            flag.values.append(value)
            flag.tasks.append(task)
    for rank, program in enumerate(lists):
        operations = program.operations
        waits = operations[operations["code"] == Code.WAIT_FLAG]
        for task, slot, value, peer in zip(
            *(waits[name].tolist() for name in ("task", "slot", "value", "peer")), strict=True
        ):
            what = f"rank {rank}: task {task} waits for {value} in flag {slot}"
            found = flags.get((rank, slot))
            if found is None or not 0 < value <= found.values[-1]:
                raise ScheduleError(f"{what}, which nobody signals")
            producer = found.tasks[bisect.bisect_left(found.values, value)]
            if schedule.tasks["rank"][producer] != peer:
                raise ScheduleError(
                    f"{what} as if rank {peer} signalled it; rank {schedule.tasks['rank'][producer]} does"
                )
            if producer >= task:
                raise ScheduleError(
                    f"{what}, which task {producer} is the first to signal, not earlier in the global order"
                )
    return flags


def _verify_awaits(schedule: Schedule, lists: Sequence[OperationList], flags: dict[tuple[int, int], _Flag]) -> int:
    """Check that the lists alone imply every await."""
    tasks = schedule.tasks
    lane_of: list[int] = tasks["lane"].tolist()
    waiter = np.repeat(np.arange(len(tasks)), tasks["num_awaits"])
    awaited = schedule.awaits[expand_ranges(tasks["first_await"], tasks["num_awaits"])]
    crossing = tasks["lane"][waiter] != tasks["lane"][awaited]
    to_prove: dict[int, list[int]] = {}
    for later, earlier in zip(waiter[crossing].tolist(), awaited[crossing].tolist(), strict=True):
        to_prove.setdefault(later, []).append(earlier)

    sync: dict[int, list[tuple[int, int, int, int]]] = {}
    for program in lists:
        operations = program.operations
        at = np.flatnonzero(_PHASE[operations["code"]] != 1)
        for task, code, slot, value, peer in zip(
            *(operations[name][at].tolist() for name in ("task", "code", "slot", "value", "peer")), strict=True
        ):
            sync.setdefault(task, []).append((code, slot, value, peer))

    now_on: dict[int, np.ndarray] = {}  # the clock of each lane; a lane not there has seen nothing
    at_event: dict[tuple[int, int], np.ndarray] = {}
    rank_of: list[int] = tasks["rank"].tolist()
    for task in sorted(sync.keys() | to_prove.keys()):
        lane, rank = lane_of[task], rank_of[task]
        now = now_on.setdefault(lane, np.full(len(schedule.lanes), -1, np.int32))
        operations_here = sync.get(task, [])
        for code, slot, value, _ in operations_here:
            if code == Code.WAIT_EVENT:
                np.maximum(now, at_event[rank, slot], out=now)
            elif code == Code.WAIT_FLAG:
                flag = flags[rank, slot]
                np.maximum(now, flag.clocks[bisect.bisect_left(flag.values, value)], out=now)
        for earlier in to_prove.get(task, ()):
            if now[lane_of[earlier]] < earlier:
                raise ScheduleError(
                    f"rank {rank}: the lists let task {task} (lane {lane}) start before task {earlier} "
                    f"(rank {rank_of[earlier]}, lane {lane_of[earlier]}), which it awaits, is over"
                )
        now[lane] = task
        snapshot: np.ndarray | None = None
        for code, slot, _, peer in operations_here:
            if code in (Code.RECORD, Code.SIGNAL):
                snapshot = now.copy() if snapshot is None else snapshot
                if code == Code.RECORD:
                    at_event[rank, slot] = snapshot
                else:
                    flags[peer, slot].clocks.append(snapshot)
    return int(crossing.sum())


def _refuse(rank: int, program: OperationList, wrong: np.ndarray, what: str) -> None:
    if wrong.any():
        at = int(np.argmax(wrong))
        operation = program.operations[at]
        code = int(operation["code"])
        name = Code(code).name if code in set(Code) else f"code {code}"
        raise ScheduleError(f"operation {at} of rank {rank} ({name} of task {int(operation['task'])}) {what}")
