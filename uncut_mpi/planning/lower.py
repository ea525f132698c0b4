"""
Lowering: one rank's part of a schedule becomes a list of operations for an executor.

Synchronisation follows mechanically from the awaits. On the same lane it is nothing. With a lane of the host at either
end it is a flag in host memory. Else it is an event on the same rank, and from another rank a flag in the *waiter's*
memory. A flag is one 32-bit word per (producer lane, waiting rank), in host memory one per producer lane. The lane
writes into it how far it has come, as the number of its tasks in the global order. Lanes and flag writes keep their
order. So a wait that an earlier one of the same two lanes implies is left out, and so is a signal that nobody awaits. A
task's waits, body and signals are emitted together, at its place in the global order (premise P3).

Events are used again once every wait for the last record stands earlier in the list. A device's wait is for what has
been recorded when the wait is issued.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.model.epilogue import Epilogue
from uncut_mpi.model.locations import in_host, with_ends
from uncut_mpi.planning.schedule import Schedule


class Code(enum.IntEnum):
    """
    What an operation does; COPY, GEMM, COMBINE, SEND and RECV have the values of the task kinds.

    WAIT_FLAG: the lane waits until flag `slot` in this rank's memory has reached epoch + `value`; with `in_host`, the
    flag of lane `slot` of rank `peer` in host memory.
    RECORD: the lane records event `slot`, behind its task `value`. WAIT_EVENT: the lane waits for task `value` of lane
    `peer` of this rank, of which event `slot` holds the record.
    SIGNAL: the lane writes epoch + `value` to flag `slot` in the memory of rank `peer`; with `in_host`, to its own flag
    in host memory.
    """

    COPY = 0
    GEMM = 1
    COMBINE = 2
    WAIT_FLAG = 4
    WAIT_EVENT = 5
    RECORD = 6
    SIGNAL = 7
    SEND = 8
    RECV = 9


OPERATION_DTYPE: Final = np.dtype(
    [
        ("code", "u1"),
        ("in_host", "u1"),  # SIGNAL, WAIT_FLAG: 1 for a flag in host memory; else 0
        ("num_operands", "<u2"),
        ("lane", "<i4"),  # index into OperationList.lanes
        ("task", "<i4"),  # index in the schedule's global order
        ("slot", "<i4"),  # flag slot or event, in_host the lane on its rank; -1 for bodies
        ("value", "<i4"),  # SIGNAL, RECORD: sequence of the task; waits: of the awaited one; else 0
        # SIGNAL: whose memory, in_host -1; WAIT_FLAG, WAIT_EVENT: the producer's rank, lane; SEND, RECV: the other
        # rank; else -1.
        ("peer", "<i4"),
        ("first_operand", "<i4"),  # index into OperationList.operands; -1 if none
    ]
)
BOUND_OPERAND_DTYPE: Final = np.dtype(
    [
        ("buffer", "<i4"),
        ("dtype", "u1"),
        ("factor", "u1"),
        ("op", "u1"),  # of A and B of a GEMM with a form besides (`Form.code`)
        ("spare_rows", "u1"),  # rows of a panel's padding behind the region, which belong to nobody; at most 255
        ("offset", "<i8"),  # bytes from the start of the buffer
        ("rows", "<i8"),
        ("cols", "<i8"),
        ("ld", "<i8"),  # elements
        # Of a triangle that is written how far below its diagonal the first element is; with an epilogue, which
        # element of the vectors belongs to the first row, or column.
        ("diagonal", "<i8"),
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
        Events the list uses, numbered from 0: as many as are in use at a time.
    flag_lanes : ndarray of LANE_DTYPE, shape (num_flags,)
        The lane that writes each of the flags in this rank's memory, by slot.
    span : int
        How far a run takes the epoch: at least 1, and no signal of any rank has a larger value.
    longest_s : float
        What the longest task of any rank is expected to take (s); 0 where that is not known.
    same_sums : bool
        Whether each product is made by itself, in the library's usual way: neither with others nor as is fastest.
    epilogue : Epilogue or None
        What a COMBINE with such an op does besides.
    vectors : tuple of int
        Where its scale and its bias are in this rank's memory (addresses); 0 for one that there is not. Lowering does
        not know.
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
    longest_s: float = 0.0
    same_sums: bool = False
    epilogue: Epilogue | None = None
    vectors: tuple[int, int] = (0, 0)

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
    The synchronisation of a whole schedule.

    Attributes
    ----------
    lists : dict of int to OperationList
        Of the ranks that were asked for.
    waits : ndarray of int32, shape (w, 2)
        (waiting task, awaited task) of every wait of every rank, in the order of the first.
    num_flags : ndarray of int64, shape (num_ranks,)
        Flags in each rank's memory.
    span : int
        The largest value of any signal, and at least 1, so that each call has an epoch of its own.
    """

    lists: dict[int, OperationList]
    waits: np.ndarray
    num_flags: np.ndarray
    span: int

    def rank_list(self, rank: int) -> OperationList:
        """Return the operation list of `rank`."""
        return self.lists[rank]


def tables_in_core(schedule: Schedule) -> _native.ScheduleTables:
    """Return a schedule's tables as the core takes them, which live as long as what is returned."""
    names = ("tasks", "operands", "regions", "awaits", "buffers", "lanes")
    tables = [np.ascontiguousarray(getattr(schedule, name)) for name in names]
    return _native.ScheduleTables(*[*tables, with_ends(schedule.locations)])


def lower(schedule: Schedule, rank: int | None = None) -> Lowering:
    """
    Derive every event and flag that the awaits of `schedule` need, and the operation lists.

    Local, pure: the same schedule gives the same lists on every rank.

    Parameters
    ----------
    schedule : Schedule
        What to lower; `Schedule.check` has passed it.
    rank : int, optional
        Make the list of this rank alone.
    """
    made, waits, span = _native.lower(tables_in_core(schedule), schedule.num_ranks, -1 if rank is None else rank)
    lists: dict[int, OperationList] = {}
    for number in range(schedule.num_ranks) if rank is None else (rank,):
        operations, operands, num_events, flag_lanes = made[number]
        _mark_forms(schedule, operations.view(OPERATION_DTYPE), operands.view(BOUND_OPERAND_DTYPE))
        own = {
            "operations": operations.view(OPERATION_DTYPE),
            "operands": operands.view(BOUND_OPERAND_DTYPE),
            "lanes": schedule.lanes[schedule.lanes["rank"] == number],
            "flag_lanes": schedule.lanes[flag_lanes],
        }
        for table in own.values():
            table.flags.writeable = False
        lists[number] = OperationList(
            rank=number,
            num_ranks=schedule.num_ranks,
            buffers=schedule.buffers,
            locations=schedule.locations,
            num_events=num_events,
            span=span,
            same_sums=schedule.problem.sums is not None,
            epilogue=schedule.problem.epilogue,
            **own,
        )
    return Lowering(lists, waits.reshape(-1, 2), np.array([len(one[3]) for one in made], np.int64), span)


def _mark_forms(schedule: Schedule, operations: np.ndarray, operands: np.ndarray) -> None:
    """Tell the products of a list what forms A and B have."""
    first = operations["first_operand"][operations["code"] == Code.GEMM]
    for at, form in enumerate(schedule.problem.forms):
        if form is not None:
            operands["op"][first + 1 + at] |= form.code
