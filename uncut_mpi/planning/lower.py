"""
Lowering: one rank's part of a schedule becomes a list of operations for an executor.

Synchronisation follows mechanically from the awaits: same lane, nothing; same rank, an event;
other rank, a flag in the *waiter's* memory. A flag is one 32-bit word per (producer lane, waiting
rank): the lane writes into it how far it has come, in sequence numbers, which count the tasks of a
lane from 1 in the global order. A wait that an earlier wait of the same lane on the same producer
lane already implies is left out, and so is a signal that nobody waits for (lanes and flag writes keep
their order). A task's waits, body and signals are emitted together, at its place in the global order
(premise P3).
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import in_host
from uncut_mpi.planning.schedule import Kind, Schedule, expand_ranges


class Code(enum.IntEnum):
    """
    What an operation does; COPY, GEMM and COMBINE have the values of the task kinds.

    WAIT_FLAG: the lane waits until flag `slot` in this rank's memory has reached epoch + `value`.
    WAIT_EVENT: the lane waits for event `slot` of this rank. RECORD: the lane records event `slot`.
    SIGNAL: the lane writes epoch + `value` to flag `slot` in the memory of rank `peer`.
    """

    COPY = 0
    GEMM = 1
    COMBINE = 2
    WAIT_FLAG = 4
    WAIT_EVENT = 5
    RECORD = 6
    SIGNAL = 7


OPERATION_DTYPE: Final = np.dtype(
    [
        ("code", "u1"),
        ("pad", "u1"),
        ("num_operands", "<u2"),
        ("lane", "<i4"),  # index into OperationList.lanes
        ("task", "<i4"),  # index in the schedule's global order
        ("slot", "<i4"),  # flag slot or event; -1 for bodies
        ("value", "<i4"),  # SIGNAL: the sequence of the task; WAIT_FLAG: of the awaited one; else 0
        ("peer", "<i4"),  # SIGNAL: whose memory; WAIT_FLAG: the producer's rank; else -1
        ("first_operand", "<i4"),  # index into OperationList.operands; -1 if none
    ]
)
BOUND_OPERAND_DTYPE: Final = np.dtype(
    [
        ("buffer", "<i4"),
        ("dtype", "u1"),
        ("factor", "u1"),
        ("op", "u1"),
        ("room", "u1"),  # rows of a panel's padding behind the region, which belong to nobody; at most 255
        ("offset", "<i8"),  # bytes from the start of the buffer
        ("rows", "<i8"),
        ("cols", "<i8"),
        ("ld", "<i8"),  # elements
    ]
)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class OperationList:
    """
    What one rank issues, in order.

    Attributes
    ----------
    rank, num_ranks : int
        Whose list it is, and how many ranks the session has.
    operations : ndarray of OPERATION_DTYPE
        In issue order.
    operands : ndarray of BOUND_OPERAND_DTYPE
        Written operand first, then the reads, per body operation. Addresses are (buffer, offset).
    lanes : ndarray of LANE_DTYPE
        This rank's lanes.
    buffers : ndarray of BUFFER_DTYPE
        The schedule's buffers, all of them.
    locations : ndarray of LOCATION_DTYPE
        The memories of the job, into which buffers and lanes point.
    num_events : int
        Events the list uses, numbered from 0.
    flag_lanes : ndarray of LANE_DTYPE, shape (num_flags,)
        The lane that writes each of the flags in this rank's memory, by slot.
    span : int
        How far a run takes the epoch: at least 1, and no signal of any rank has a larger value.
    """

    rank: int
    num_ranks: int
    operations: np.ndarray
    operands: np.ndarray
    lanes: np.ndarray
    buffers: np.ndarray
    locations: np.ndarray
    num_events: int
    flag_lanes: np.ndarray
    span: int

    @property
    def num_flags(self) -> int:
        """Flags in this rank's memory, numbered from 0."""
        return len(self.flag_lanes)

    def buffers_used(self) -> np.ndarray:
        """Return the indices of the buffers that this rank's operations touch, ascending."""
        return np.unique(self.operands["buffer"])

    def in_host(self) -> np.ndarray:
        """Return whether each buffer lies in host memory."""
        return in_host(self.locations, self.buffers["location"])


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Lowering:
    """
    The synchronisation of a whole schedule, from which any rank's list can be cut.

    Attributes
    ----------
    schedule : Schedule
        What was lowered.
    event_waits : ndarray of int32, shape (e, 2)
        (waiting task, awaited task) on one rank, different lanes; redundant ones left out.
    flag_waits : ndarray of int32, shape (f, 2)
        (waiting task, awaited task) on different ranks; redundant ones left out.
    sequence : ndarray of int32, shape (tasks,)
        The place of each task on its lane, from 1.
    signals : ndarray of int32, shape (s, 2)
        (awaited task, waiting rank), in order.
    flags : ndarray of int32, shape (f, 3)
        (waiting rank, producer lane, slot in that rank's memory), one row per flag, in the order of the first two.
    span : int
        The largest value of any signal, and at least 1, so that each call has an epoch of its own.
    """

    schedule: Schedule
    event_waits: np.ndarray
    flag_waits: np.ndarray
    sequence: np.ndarray
    signals: np.ndarray
    flags: np.ndarray
    span: int

    def num_flags(self) -> np.ndarray:
        """Return the number of flag slots in each rank's memory, int64 of shape (num_ranks,)."""
        return np.bincount(self.flags[:, 0], minlength=self.schedule.num_ranks)

    def rank_list(self, rank: int) -> OperationList:
        """Return the operation list of `rank`."""
        return _rank_list(self, rank)


def lower(schedule: Schedule) -> Lowering:
    """
    Derive every event and flag that the awaits of `schedule` need.

    Local, pure: the same schedule gives the same lists on every rank.
    """
    tasks = schedule.tasks
    waiter = np.repeat(np.arange(len(tasks), dtype=np.int64), tasks["num_awaits"])
    awaited = schedule.awaits[expand_ranges(tasks["first_await"], tasks["num_awaits"])].astype(np.int64)
    lane = tasks["lane"].astype(np.int64)
    crossing = lane[waiter] != lane[awaited]
    waiter, awaited = waiter[crossing], awaited[crossing]

    # Of all waits of one lane on one other lane, keep those that look further than any before them:
    # within a waiter the furthest first, then running maxima per (waiting lane, awaited lane).
    pair = lane[waiter] * len(schedule.lanes) + lane[awaited]
    order = np.lexsort((-awaited, waiter, pair))
    waiter, awaited, pair = waiter[order], awaited[order], pair[order]
    if len(pair):
        segment = np.concatenate(([0], np.cumsum(pair[1:] != pair[:-1])))
        reach = awaited + segment * (len(tasks) + 1)
        before = np.concatenate(([-1], np.maximum.accumulate(reach)[:-1]))
        first_of_segment = np.concatenate(([True], pair[1:] != pair[:-1]))
        keep = first_of_segment | (reach > before)
        waiter, awaited = waiter[keep], awaited[keep]
    order = np.lexsort((awaited, waiter))
    waits = np.stack((waiter[order], awaited[order]), axis=1).astype(np.int32)

    rank = tasks["rank"]
    local = rank[waits[:, 0]] == rank[waits[:, 1]]
    event_waits, flag_waits = waits[local], waits[~local]
    signals = np.unique(np.stack((flag_waits[:, 1], rank[flag_waits[:, 0]]), axis=1), axis=0)
    keys = np.unique(signals[:, 1].astype(np.int64) * len(schedule.lanes) + lane[signals[:, 0]])
    flag_rank, flag_lane = np.divmod(keys, max(1, len(schedule.lanes)))
    slot = np.arange(len(keys)) - np.searchsorted(flag_rank, flag_rank)
    sequence = sequences(lane)
    return Lowering(
        schedule=schedule,
        event_waits=event_waits,
        flag_waits=flag_waits,
        sequence=sequence,
        signals=signals,
        flags=np.stack((flag_rank, flag_lane, slot), axis=1).astype(np.int32),
        span=int(sequence[signals[:, 0]].max(initial=1)),
    )


def sequences(lane: np.ndarray) -> np.ndarray:
    """Return the place of each task on its lane, from 1, given the lanes of all tasks."""
    order = np.argsort(lane, kind="stable")
    sequence = np.empty(len(lane), np.int32)
    sequence[order] = 1 + np.arange(len(lane)) - np.searchsorted(lane[order], lane[order])
    return sequence


# Order of the parts of one task within its place (premise P3).
_PHASE: Final = {Code.WAIT_EVENT: 0, Code.WAIT_FLAG: 1, Code.COPY: 2, Code.RECORD: 3, Code.SIGNAL: 4}


def _rank_list(lowering: Lowering, rank: int) -> OperationList:
    schedule = lowering.schedule
    tasks = schedule.tasks
    own = np.flatnonzero(tasks["rank"] == rank)
    lane_ids = np.flatnonzero(schedule.lanes["rank"] == rank)
    lane_number = np.full(len(schedule.lanes), -1, np.int64)
    lane_number[lane_ids] = np.arange(len(lane_ids))

    events = lowering.event_waits[tasks["rank"][lowering.event_waits[:, 0]] == rank]
    recorded = np.unique(events[:, 1])
    waits = lowering.flag_waits[tasks["rank"][lowering.flag_waits[:, 0]] == rank]
    signals = lowering.signals[tasks["rank"][lowering.signals[:, 0]] == rank]
    flags = lowering.flags
    flag_keys = flags[:, 0].astype(np.int64) * len(schedule.lanes) + flags[:, 1]

    def slots(ranks: np.ndarray | int, producers: np.ndarray) -> np.ndarray:
        found = np.searchsorted(flag_keys, ranks * np.int64(len(schedule.lanes)) + tasks["lane"][producers])
        found_slots: np.ndarray = flags[found, 2]
        return found_slots

    bodies = own[tasks["kind"][own] != Kind.JOIN]
    sequence = lowering.sequence
    parts = [
        (Code.WAIT_EVENT, events[:, 0], np.searchsorted(recorded, events[:, 1]), 0, -1),
        (Code.WAIT_FLAG, waits[:, 0], slots(rank, waits[:, 1]), sequence[waits[:, 1]], tasks["rank"][waits[:, 1]]),
        (Code.COPY, bodies, -1, 0, -1),
        (Code.RECORD, recorded, np.arange(len(recorded)), 0, -1),
        (Code.SIGNAL, signals[:, 0], slots(signals[:, 1], signals[:, 0]), sequence[signals[:, 0]], signals[:, 1]),
    ]
    total = sum(len(part[1]) for part in parts)
    operations = np.zeros(total, OPERATION_DTYPE)
    phase = np.empty(total, np.int64)
    start = 0
    for code, task, slot, value, peer in parts:
        stop = start + len(task)
        operations["code"][start:stop] = tasks["kind"][task] if code is Code.COPY else code
        operations["task"][start:stop] = task
        operations["slot"][start:stop] = slot
        operations["value"][start:stop] = value
        operations["peer"][start:stop] = peer
        phase[start:stop] = _PHASE[code]
        start = stop
    operations = operations[np.lexsort((operations["peer"], operations["slot"], phase, operations["task"]))]
    of_task = tasks[operations["task"]]
    operations["lane"] = lane_number[of_task["lane"]]
    body = operations["code"] <= Code.COMBINE
    operations["num_operands"] = np.where(body, of_task["num_operands"], 0)
    source = expand_ranges(of_task["first_operand"][body], of_task["num_operands"][body])
    counts = operations["num_operands"].astype(np.int64)
    operations["first_operand"] = np.where(counts > 0, np.cumsum(counts) - counts, -1)

    operand = schedule.operands[source]
    region = schedule.regions[operand["region"]]
    buffer = schedule.buffers[region["buffer"]]
    operands = np.zeros(len(operand), BOUND_OPERAND_DTYPE)
    operands["buffer"] = region["buffer"]
    for name in ("factor", "op"):
        operands[name] = operand[name]
    operands["dtype"] = buffer["dtype"]
    operands["rows"], operands["cols"], operands["ld"] = region["rows"], region["cols"], buffer["ld"]
    itemsize = np.array([dtype.itemsize for dtype in DType], np.int64)[buffer["dtype"]]
    operands["offset"] = (region["col"] * buffer["ld"] + region["row"]) * itemsize
    operands["room"] = _native.room_behind(region, schedule.buffers)
    lanes = schedule.lanes[lane_ids]
    for table in (operations, operands, lanes):
        table.flags.writeable = False
    return OperationList(
        rank=rank,
        num_ranks=schedule.num_ranks,
        operations=operations,
        operands=operands,
        lanes=lanes,
        buffers=schedule.buffers,
        locations=schedule.locations,
        num_events=len(recorded),
        flag_lanes=schedule.lanes[flags[flags[:, 0] == rank, 1]],
        span=lowering.span,
    )
