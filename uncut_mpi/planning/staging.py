"""
Matrices that cannot be used where they are: a copy of them is, in memory of ours beside them.

CUDA IPC exports no stream-ordered pool and no managed memory, so that peers cannot open them. Host memory that CUDA
cannot page-lock is for lanes of the host alone, and for no device. Where a schedule lets others use such a matrix, this
pass puts a buffer of ours in its place, in the owner's SoftBuf in the same kind of memory. The owner copies what they
read into it, and what they wrote of C out of it. It does so by tasks like any others: what these await is proved, and
they run beside the rest. Copies within host memory are on a lane of the host.

There is a copy for each region that others use. So a task that reads awaits its own region only, and what was written
goes on to its place at once. The owner's device uses what lies there as before.

A part of a matrix may be stored the other way round than the matrix (order "C"). Schedulers have it as it would be
else (`Placement.straight`), and that is how it is in a buffer of ours, which everybody uses, the owner too. The copies
transpose it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from uncut_mpi.model.locations import NOBODY
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.planning.buffers import Buffers, user_pieces, user_table
from uncut_mpi.planning.schedule import (
    AWAIT_DTYPE,
    LANE_DTYPE,
    NO_SOURCE,
    OPERAND_DTYPE,
    REGION_DTYPE,
    TASK_DTYPE,
    Factor,
    Kind,
    LaneKind,
    Matrix,
    Op,
    Role,
    Schedule,
    expand_ranges,
    rows_by_rank,
)


def used_by_others(schedule: Schedule, users: Collection[int]) -> tuple[int, ...]:
    """Return those of some user buffers that others use than their owner's device, or its worker in host memory."""
    if not users:
        return ()
    uses = _Uses.of(schedule)
    return tuple(sorted({*users}.intersection(uses.buffer[~uses.in_place].tolist())))


def stage(schedule: Schedule, users: Collection[int], machine: Machine, placement: Placement) -> Schedule:
    """
    Return a schedule that does the same, in which none but those who can touch some of the caller's buffers.

    Parameters
    ----------
    schedule : Schedule
        What is to be done.
    users : collection of int
        As of `used_by_others`.
    machine : Machine
        Whose memory is to have room for them once more.
    placement : Placement
        Where matrices live and how they are stored; the schedule has it as `Placement.straight` says.

    Raises
    ------
    CapacityError
        If it has not.
    """
    problem, made = schedule.problem, _as_stored(schedule, placement)
    buffers, uses = Buffers.of(made), _Uses.of(schedule)
    turned = np.isin(np.arange(len(schedule.buffers)), made.pieces["buffer"][made.pieces["turned"] != 0])
    uses.in_place[turned[uses.buffer]] = False
    lanes: list[tuple[int, ...]] = schedule.lanes.tolist()
    regions = [schedule.regions.copy()]
    ways_in: list[_Copy] = []
    ways_out: list[_Copy] = []
    for user in sorted({*users, *np.flatnonzero(turned).tolist()}):
        if uses.in_place[uses.buffer == user].all():
            continue
        at, _, code, _, _, rows, cols, _, _ = schedule.buffers[user].tolist()
        owner, matrix = int(schedule.owners()[user]), Matrix(code)
        ours = buffers.add(at, (rows, cols), problem.dtype, matrix, Role.STAGING)
        on_host = schedule.in_host()[user]
        lane = (owner, int(LaneKind.HOST), NO_SOURCE, 0) if on_host else (owner, int(LaneKind.COPY), at, at)
        if lane not in lanes:
            lanes.append(lane)
        moved, chunks, chunk_of = _chunks(schedule, uses, user)
        used, use = np.unique(uses.region[moved], return_inverse=True)
        first = sum(map(len, regions))
        regions += [instead := schedule.regions[used], chunks, staged := chunks.copy()]
        instead["buffer"] = staged["buffer"] = ours
        uses.operands["region"][moved] = first + use
        first += len(used)
        op = Op.N
        if turned[user]:
            op = Op.T
            for down, along in (("row", "col"), ("rows", "cols")):
                chunks[down], chunks[along] = staged[along], staged[down]
            # Nobody uses the regions that he had, but they are to lie in a buffer.
            regions[0]["buffer"][schedule.regions["buffer"] == user] = ours
        for chunk, its in enumerate(rows_by_rank(chunk_of, len(chunks))):
            here = moved[its]
            written = here[uses.written[here]]
            theirs, own = first + chunk, first + len(chunks) + chunk
            if len(written) < len(here) and (matrix is not Matrix.C or problem.reads_c):
                ways_in.append(_Copy(owner, lanes.index(lane), own, theirs, op, uses.task[here]))
            if len(written) and matrix is Matrix.C:
                ways_out.append(_Copy(owner, lanes.index(lane), theirs, own, op, uses.task[written]))
    buffers.check_capacity(machine)
    # What is used first comes first, and what is complete first goes first.
    ways_in.sort(key=lambda copy: int(copy.tasks[0]))
    ways_out.sort(key=lambda copy: int(copy.tasks[-1]))
    tasks, operands, awaits = _with_copies(schedule, uses.operands, ways_in, ways_out)
    return dataclasses.replace(
        made,
        tasks=tasks,
        operands=operands,
        regions=np.concatenate(regions),
        awaits=awaits,
        buffers=buffers.table(),
        lanes=np.array(lanes, LANE_DTYPE),
    )


def _as_stored(schedule: Schedule, placement: Placement) -> Schedule:
    """Return a schedule whose buffers of the caller, and what they hold, are as a placement says."""
    if placement == schedule.placement:
        return schedule
    users = user_table(schedule.num_ranks, schedule.problem, placement)
    return dataclasses.replace(
        schedule,
        placement=placement,
        buffers=np.concatenate((users, schedule.buffers[len(users) :])),
        pieces=user_pieces(schedule.problem, placement),
    )


class _Uses(NamedTuple):
    """All operands in the order of tasks, as records that no two tasks share; and what is to be known of each."""

    operands: np.ndarray
    region: np.ndarray
    buffer: np.ndarray
    task: np.ndarray
    written: np.ndarray
    in_place: np.ndarray  # by the owner: on its device, in host memory by its worker; by anybody where it is all ranks'

    @classmethod
    def of(cls, schedule: Schedule) -> _Uses:
        tasks = schedule.tasks
        operands = schedule.operands[expand_ranges(tasks["first_operand"], tasks["num_operands"])]
        region = operands["region"].copy()
        buffer = schedule.regions["buffer"][region]
        task = np.repeat(np.arange(len(tasks)), tasks["num_operands"])
        by_worker = schedule.lanes["kind"][tasks["lane"]] == LaneKind.HOST
        owner = schedule.owners()[buffer]
        in_place = (tasks["rank"][task] == owner) & (by_worker[task] == schedule.in_host()[buffer])
        in_place |= owner == NOBODY
        return cls(operands, region, buffer, task, np.diff(task, prepend=-1) > 0, in_place)


class _Copy(NamedTuple):
    """A copy of one chunk; the tasks that await it, or those that it awaits, in their order."""

    rank: int
    lane: int
    written: int
    read: int
    op: Op
    tasks: np.ndarray


def _chunks(schedule: Schedule, uses: _Uses, user: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """
    Return which operands are to be in the buffer of ours, in what chunks it is copied, and the chunk of each of them.

    The chunks are the regions that peers use. Where these overlap, or the owner writes in them or reads what peers
    wrote, all of the matrix is one chunk, which the owner uses there too.
    """
    at = np.flatnonzero(uses.buffer == user)
    own, moved = at[uses.in_place[at]], at[~uses.in_place[at]]
    chunks, chunk_of = np.unique(schedule.regions[uses.region[moved]], return_inverse=True)
    never = len(schedule.tasks)
    begins = np.full(len(chunks), never)  # the first task that writes in each of them
    written = uses.written[moved]
    np.minimum.at(begins, chunk_of[written], uses.task[moved[written]])
    used, use = np.unique(schedule.regions[uses.region[own]], return_inverse=True)
    ends = np.full(len(used), -1)  # the last task that reads there; after all others if one writes
    np.maximum.at(ends, use, np.where(uses.written[own], never + 1, uses.task[own]))
    if _apart(chunks, begins, used, ends, free=never + 2):
        return moved, chunks, chunk_of
    rows, cols = schedule.buffers["rows"][user], schedule.buffers["cols"][user]
    return at, np.array([(user, 0, 0, 0, rows, cols)], REGION_DTYPE), np.zeros(len(at), np.int64)


def _apart(chunks: np.ndarray, begins: np.ndarray, used: np.ndarray, ends: np.ndarray, *, free: int) -> bool:
    """Return whether no two chunks overlap, and each region that is used ends before all that it overlaps begin."""
    both = np.concatenate((chunks, used))
    edges = [
        np.unique(np.concatenate((both[first], both[first] + both[extent])), return_inverse=True)[1].reshape(2, -1)
        for first, extent in (("row", "rows"), ("col", "cols"))
    ]
    (tops, bottoms), (lefts, rights) = (edge.tolist() for edge in edges)
    grid = np.full((max(bottoms), max(rights)), free)  # of what is between edges: when the chunk there begins
    parts = [
        grid[top:bottom, left:right] for top, bottom, left, right in zip(tops, bottoms, lefts, rights, strict=True)
    ]
    for part, begin in zip(parts[: len(chunks)], begins.tolist(), strict=True):
        if part.min(initial=free) < free:
            return False
        part[...] = begin
    return all(end < part.min(initial=free) for part, end in zip(parts[len(chunks) :], ends.tolist(), strict=True))


def _with_copies(
    schedule: Schedule, operands: np.ndarray, ways_in: Sequence[_Copy], ways_out: Sequence[_Copy]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tables of tasks, operands and awaits with copies ahead of all tasks, and behind them."""
    tasks = schedule.tasks
    ahead, behind = len(ways_in), len(ways_in) + len(tasks)
    total = behind + len(ways_out)
    waiter = [np.repeat(np.arange(ahead, behind), tasks["num_awaits"])]
    awaited = [ahead + schedule.awaits[expand_ranges(tasks["first_await"], tasks["num_awaits"])]]
    for at, copy in enumerate(ways_in):
        waiter.append(ahead + copy.tasks)
        awaited.append(np.full(len(copy.tasks), at))
    for at, copy in enumerate(ways_out, behind):
        # The last on each lane: those before it are over then.
        last = dict(zip(tasks["lane"][copy.tasks].tolist(), copy.tasks.tolist(), strict=True))
        waiter.append(np.full(len(last), at))
        awaited.append(ahead + np.array([*last.values()]))
    pairs = np.unique(np.concatenate(waiter) * total + np.concatenate(awaited))
    copies = [*ways_in, *ways_out]
    joined = np.zeros(total, TASK_DTYPE)
    joined[ahead:behind] = tasks
    joined[[*range(ahead), *range(behind, total)]] = [
        (Kind.COPY, 0, 2, copy.rank, copy.lane, -1, 0, 0, 0) for copy in copies
    ]
    joined["num_awaits"] = np.bincount(pairs // total, minlength=total)
    for first, count in (("first_operand", "num_operands"), ("first_await", "num_awaits")):
        joined[first] = np.cumsum(joined[count], dtype=np.int64) - joined[count]
    of_copies = [
        operand
        for copy in copies
        for operand in ((copy.written, Factor.ONE, Op.N, 0), (copy.read, Factor.ONE, copy.op, 0))
    ]
    added = np.array(of_copies, OPERAND_DTYPE)
    operands = np.concatenate((added[: 2 * ahead], operands, added[2 * ahead :]))
    return joined, operands, (pairs % total).astype(AWAIT_DTYPE)
