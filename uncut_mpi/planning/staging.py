"""
Matrices that cannot be used where they are: a copy of them is, in memory of ours beside them.

CUDA IPC exports no stream-ordered pool and no managed memory, so that peers cannot open them. Host memory that CUDA
cannot page-lock is for lanes of the host alone, and for no device. Where a schedule lets others use such a matrix, this
pass puts a buffer of ours in its place, in the owner's SoftBuf in the same kind of memory. The owner copies what they
read into it, and what they wrote of C out of it. It does so by tasks like any others: what these await is proved, and
they run beside the rest. Copies within host memory are on a lane of the host.

There is a copy for each region that others use. So a task that reads awaits its own region only, and what was written
goes on to its place at once. The owner's device uses what lies there as before. Where host memory has no room for all
of them, they go through rings (`uncut_mpi.planning.staging_rings`).

A part of a matrix may be stored the other way round than the matrix (order "C"). Schedulers have it as it would be
else (`Placement.straight`), and that is how it is in a buffer of ours, which everybody uses, the owner too. The copies
transpose it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np

from uncut_mpi.errors import CapacityError
from uncut_mpi.model.dtypes import ITEMSIZES, DType
from uncut_mpi.model.locations import NOBODY, in_host
from uncut_mpi.model.placement import Placement
from uncut_mpi.planning.buffers import BUFFER_ALIGNMENT, Buffers, panel_bytes, user_pieces, user_table
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
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.staging_rings import Ring, shared_room

MOST_RINGS: Final = 8
"""So many rings of a rank have lanes of their own: each is a queue of its worker, and a rank has not many."""

SHAPE: Final = ["rows", "cols"]
CORNERS: Final = ["row", "col", *SHAPE]

USUAL_HOST_PART: Final = 0.5
"""What ranks take of free host memory where nobody says: the program's matrices and the system need some, too."""

PIECE_BYTES: Final = 32 << 20
PIECES: Final = 4
MANY_PIECES: Final = 64
"""
What goes through a ring is copied in pieces of so many bytes at most, so that the ring has room for `PIECES` of them.

They are longer where it has room for `MANY_PIECES` all the same: so a schedule has fewer tasks.
"""


MOST_PIECES: Final = 500_000
"""With so many copies a schedule takes half a minute to make; more are a mistake in the amount of memory."""


def usual_room(free_bytes: int) -> int:
    """Return what a rank may take of so many bytes of host memory: a power of two, so that plans stay the same."""
    return 1 << max(0, int(USUAL_HOST_PART * free_bytes).bit_length() - 1)


def piece_bytes(room: int) -> int:
    """Return how much is copied at a time through a ring of so many bytes."""
    return min(max(PIECE_BYTES, room // MANY_PIECES), room // PIECES)


def used_by_others(schedule: Schedule, users: Collection[int]) -> tuple[int, ...]:
    """Return those of some user buffers that others use than their owner's device, or its worker in host memory."""
    if not users:
        return ()
    uses = _Uses.of(schedule)
    return tuple(sorted({*users}.intersection(uses.buffer[~uses.in_place].tolist())))


def stage(schedule: Schedule, users: Collection[int], setting: Setting) -> Schedule:
    """
    Return a schedule that does the same, in which none but those who can touch some of the caller's buffers.

    Parameters
    ----------
    schedule : Schedule
        What is to be done.
    users : collection of int
        As of `used_by_others`.
    setting : Setting
        Where matrices live and how they are stored, which the schedule has as `Placement.straight` says. It says too
        which of them lie in files, and what copies may take on devices and (`host_memory`) of host memory.

    Raises
    ------
    CapacityError
        If it has not.
    """
    placement, host_memory, files = setting.placement, setting.options.host_memory, setting.files
    made, uses = _as_stored(schedule, placement), _Uses.of(schedule)
    turned = np.isin(np.arange(len(schedule.buffers)), made.pieces["buffer"][made.pieces["turned"] != 0])
    uses.in_place[turned[uses.buffer]] = False
    moved = [
        user
        for user in sorted({*users, *np.flatnonzero(turned).tolist()})
        if not uses.in_place[uses.buffer == user].all()
    ]
    pieces = bytes_of_pieces(schedule.buffers, schedule.locations, moved, host_memory)
    if pieces:
        schedule = _in_pieces(schedule, pieces)
        made, uses = _as_stored(schedule, placement), _Uses.of(schedule)
        uses.in_place[turned[uses.buffer]] = False
    work = _StagedSchedule(schedule, made, uses, turned)
    columns = _columns_of_rings(schedule, uses, pieces, host_memory)
    for user in moved:
        if user in columns:
            work.through_ring(user, columns[user])
        else:
            work.through_all(user, in_file=user in files)
    setting.check_capacity(work.buffers.arena_bytes)
    return work.schedule(files)


class _StagedSchedule:
    """A schedule while its buffers are replaced, one after the other."""

    def __init__(self, schedule: Schedule, made: Schedule, uses: _Uses, turned: np.ndarray) -> None:
        self._before, self._made, self._uses, self._turned = schedule, made, uses, turned
        self.buffers = Buffers.of(made)
        self._lanes: list[tuple[int, ...]] = schedule.lanes.tolist()
        self._regions = [schedule.regions.copy()]
        self._copies: list[_Added] = []
        self._awaits: list[tuple[int, int]] = []

    def through_all(self, user: int, *, in_file: bool) -> None:
        """Give a buffer a copy of all of it; one in a file is read and written on lanes of its own."""
        uses, schedule = self._uses, self._before
        at, matrix, (rows, cols) = self._about(user)
        ours = self.buffers.add(at, (rows, cols), schedule.problem.dtypes[matrix], matrix, Role.STAGING)
        first = self._number(user) if in_file else 0
        moved, chunks, chunk_of = _chunks(schedule, uses, user)
        used, use = np.unique(uses.region[moved], return_inverse=True)
        instead = schedule.regions[used]
        instead["buffer"] = ours
        uses.operands["region"][moved] = self._add(instead) + use
        staged = chunks.copy()
        staged["buffer"] = ours
        own, theirs = self._add(self._of_owner(user, ours, chunks)), self._add(staged)
        ways_in, ways_out = [], []
        for chunk, its in enumerate(rows_by_rank(chunk_of, len(chunks))):
            here = moved[its]
            written = here[uses.written[here]]
            pair = own + chunk, theirs + chunk
            if len(written) < len(here) and (matrix is not Matrix.C or schedule.problem.reads_c):
                tasks = uses.task[here].tolist()
                ways_in.append(
                    (tasks[0], _Added(self._lane(user, first), *pair[::-1], self._op(user), 0, [], [], tasks))
                )
            if len(written) and matrix is Matrix.C:
                # The last on each lane: those before it are over then.
                tasks = uses.task[written].tolist()
                last = dict(zip(schedule.tasks["lane"][tasks].tolist(), tasks, strict=True))
                copy = _Added(
                    self._lane(user, first + in_file),
                    *pair,
                    self._op(user),
                    len(schedule.tasks),
                    [*last.values()],
                    [],
                    [],
                )
                ways_out.append((tasks[-1], copy))
        # What is used first comes first, and what is complete first goes first.
        for ways in (ways_in, ways_out):
            self._copies += [copy for _, copy in sorted(ways, key=operator.itemgetter(0))]

    def through_ring(self, user: int, columns: int) -> None:
        """Let what others use of a buffer go through so many columns."""
        uses, schedule = self._uses, self._before
        at, matrix, _ = self._about(user)
        moved = np.flatnonzero(uses.buffer == user)
        regions = schedule.regions[uses.region[moved]]
        shape = int(regions["rows"].max()), columns
        ours = self.buffers.add(at, shape, schedule.problem.dtypes[matrix], matrix, Role.STAGING)
        ring, first = Ring(columns), np.empty(len(moved), np.int64)
        lanes, corners = schedule.tasks["lane"][uses.task[moved]].tolist(), regions[CORNERS].tolist()
        written = uses.written[moved].tolist()
        for at_use, task in enumerate(uses.task[moved].tolist()):
            first[at_use] = ring.use(task, lanes[at_use], corners[at_use], writes=written[at_use])
        ring.end()
        self._awaits += ring.awaits
        instead = regions.copy()
        instead["buffer"], instead["row"], instead["col"] = ours, 0, first
        uses.operands["region"][moved] = self._add(instead) + np.arange(len(moved))
        theirs = np.array([copy.region for copy in ring.copies], regions[CORNERS].dtype)
        given, there = np.zeros(len(theirs), REGION_DTYPE), np.zeros(len(theirs), REGION_DTYPE)
        for name in CORNERS:
            given[name] = there[name] = theirs[name]
        given["buffer"] = user
        there["buffer"], there["row"], there["col"] = ours, 0, [copy.column for copy in ring.copies]
        own, in_ring = self._add(self._of_owner(user, ours, given)), self._add(there)
        unused: np.ndarray = self._regions[0][self._regions[0]["buffer"] == ours]  # of one that is turned
        unused["row"], unused["col"], unused["rows"], unused["cols"] = 0, 0, 1, 1
        self._regions[0][self._regions[0]["buffer"] == ours] = unused
        numbers = {id(copy): len(self._copies) + place for place, copy in enumerate(ring.copies)}
        ways = {copy.inward for copy in ring.copies}
        number = self._number(user)
        lanes_of = {inward: self._lane(user, number + (not inward)) for inward in sorted(ways, reverse=True)}
        for place, copy in enumerate(ring.copies):
            ends = (in_ring + place, own + place) if copy.inward else (own + place, in_ring + place)
            before = [numbers[id(one)] for one in copy.copies]
            made = _Added(lanes_of[copy.inward], *ends, self._op(user), copy.position, copy.tasks, before, copy.waiters)
            self._copies.append(made)

    def schedule(self, files: Collection[int]) -> Schedule:
        """Return the schedule with all copies, in which some buffers are marked as files."""
        buffers = self.buffers.table()
        buffers["medium"][[*files]] = 1
        tasks, operands, awaits = _with_copies(
            self._before, self._uses.operands, self._copies, self._lanes, self._awaits
        )
        return dataclasses.replace(
            self._made,
            tasks=tasks,
            operands=operands,
            regions=np.concatenate(self._regions),
            awaits=awaits,
            buffers=buffers,
            lanes=np.array(self._lanes, LANE_DTYPE),
        )

    def _about(self, user: int) -> tuple[int, Matrix, tuple[int, int]]:
        """Return a buffer's memory, its matrix and its shape."""
        at, _, code, _, _, rows, cols, _, _ = self._before.buffers[user].tolist()
        return at, Matrix(code), (rows, cols)

    def _number(self, user: int) -> int:
        """Return the number of a buffer's own lane inward; that of the one outward follows."""
        return 1 + 2 * (user % MOST_RINGS)

    def _lane(self, user: int, number: int) -> int:
        """Return the owner's lane of that number for a buffer in host memory, or its own one on a device."""
        at, owner = int(self._before.buffers["location"][user]), int(self._before.owners()[user])
        lane = (owner, int(LaneKind.COPY), at, at)
        if self._before.in_host()[user]:
            lane = (owner, int(LaneKind.HOST), NO_SOURCE, number)
        if lane not in self._lanes:
            self._lanes.append(lane)
        return self._lanes.index(lane)

    def _op(self, user: int) -> Op:
        return Op.T if self._turned[user] else Op.N

    def _of_owner(self, user: int, ours: int, regions: np.ndarray) -> np.ndarray:
        """Return regions of a buffer as the owner has them."""
        found: np.ndarray = regions.copy()
        if self._turned[user]:
            for down, along in (("row", "col"), ("rows", "cols")):
                found[down], found[along] = regions[along], regions[down]
            # Nobody uses the regions that he had, but they are to lie in a buffer.
            self._regions[0]["buffer"][self._before.regions["buffer"] == user] = ours
        return found

    def _add(self, regions: np.ndarray) -> int:
        """Add regions, and return the number of the first."""
        first = sum(map(len, self._regions))
        self._regions.append(regions)
        return first


def bytes_of_pieces(
    buffers: np.ndarray, locations: np.ndarray, moved: Sequence[int], host_memory: int
) -> dict[int, int]:
    """Return those of some buffers (numbers) that go through rings, and how much is copied at a time."""
    taken: dict[int, dict[int, int]] = {}  # of each rank
    for user in moved:
        at, code, *shape = buffers[["location", "dtype", *SHAPE]][user].tolist()
        if in_host(locations, at):
            of_rank = taken.setdefault(int(locations["rank"][at]), {})
            of_rank[user] = panel_bytes(shape, DType(code)) + BUFFER_ALIGNMENT
    return {
        user: piece_bytes(host_memory // len(its))
        for its in taken.values()
        for user in its
        if 0 < host_memory < sum(its.values())
    }


def _in_pieces(schedule: Schedule, pieces: Mapping[int, int]) -> Schedule:
    """Return a schedule whose copies from and to some buffers are divided by columns, one behind the other."""
    tasks, regions, items = schedule.tasks, schedule.regions, ITEMSIZES[schedule.buffers["dtype"]]
    most = np.full(len(schedule.buffers), np.iinfo(np.int64).max)
    most[[*pieces]] = [*pieces.values()]
    copies = np.flatnonzero((tasks["kind"] == Kind.COPY) & (tasks["num_operands"] == 2))
    ends = schedule.operands["region"][tasks["first_operand"][copies][:, None] + np.arange(2)]
    plain = schedule.operands["op"][tasks["first_operand"][copies] + 1] == Op.N
    columns = regions["cols"][ends[:, 0]]
    longest = np.ones(len(most), np.int64)  # a ring's columns are as long as the longest piece of one
    np.maximum.at(longest, regions["buffer"][ends], regions["rows"][ends])
    width = (most // (longest * items))[regions["buffer"][ends]].min(axis=1)
    counts = np.ones(len(tasks), np.int64)
    counts[copies] = np.where(plain, -(-columns // np.maximum(1, width)), 1)
    counts = np.maximum(1, counts)
    if counts.sum() > MOST_PIECES:
        whole = len(tasks) > MOST_PIECES  # however long they are
        more = f"let them use {-(-int(counts.sum()) // MOST_PIECES)} times as much (host_memory)"
        mend = "ask for kblocks or auto, which cut such products" if whole else more
        raise CapacityError(
            f"{counts.sum()} copies of matrices in files, or in memory that no device reaches, would go through the "
            f"host memory that ranks may use for them, and {MOST_PIECES} are the most: {mend}"
        )
    if counts.max(initial=1) == 1:
        return schedule
    last = np.cumsum(counts) - 1
    divided = np.repeat(tasks, counts)
    number = np.arange(len(divided)) - np.repeat(last - counts + 1, counts)
    divided["num_awaits"][number > 0] = 0
    split = np.flatnonzero(np.repeat(counts > 1, counts))
    which = np.searchsorted(copies, np.repeat(np.arange(len(tasks)), counts)[split])
    made = regions[ends[which]]  # (pieces, 2)
    start = columns[which] * number[split] // counts[copies][which]
    stop = columns[which] * (number[split] + 1) // counts[copies][which]
    made["col"] += start[:, None]
    made["cols"] = (stop - start)[:, None]
    operands = schedule.operands[tasks["first_operand"][copies[which]][:, None] + np.arange(2)]
    operands["region"] = len(regions) + np.arange(2 * len(split)).reshape(-1, 2)
    divided["first_operand"][split] = len(schedule.operands) + 2 * np.arange(len(split))
    return dataclasses.replace(
        schedule,
        tasks=divided,
        regions=np.concatenate((regions, made.reshape(-1))),
        operands=np.concatenate((schedule.operands, operands.reshape(-1))),
        awaits=last[schedule.awaits].astype(schedule.awaits.dtype),
    )


def _columns_of_rings(schedule: Schedule, uses: _Uses, users: Collection[int], host_memory: int) -> dict[int, int]:
    """Return how many columns the rings of some buffers have."""
    owners = schedule.owners()
    column_bytes: dict[int, int] = {}
    whole: dict[int, dict[int, int]] = {}
    least: dict[int, dict[int, int]] = {}
    for user in users:
        regions = schedule.regions[uses.region[uses.buffer == user]]
        code, *shape = schedule.buffers[["dtype", *SHAPE]][user].tolist()
        owner, dtype = int(owners[user]), DType(code)
        column_bytes[user] = panel_bytes((int(regions["rows"].max()), 1), dtype)
        whole.setdefault(owner, {})[user] = panel_bytes(shape, dtype) + BUFFER_ALIGNMENT
        least.setdefault(owner, {})[user] = column_bytes[user] * int(regions["cols"].max()) + BUFFER_ALIGNMENT
    columns = {}
    for owner, of_all in whole.items():
        given = shared_room(of_all, least[owner], host_memory, owner)
        columns.update({user: (given[user] - BUFFER_ALIGNMENT) // column_bytes[user] for user in of_all})
    return columns


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


class _Added(NamedTuple):
    """A copy that is added before a task: what it awaits, tasks and other copies, and the tasks that await it."""

    lane: int
    written: int
    read: int
    op: Op
    position: int
    tasks: Sequence[int]
    copies: Sequence[int]
    waiters: Sequence[int]


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
    schedule: Schedule,
    operands: np.ndarray,
    copies: Sequence[_Added],
    lanes: Sequence[tuple[int, ...]],
    more_awaits: Sequence[tuple[int, int]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the tables of tasks, operands and awaits with copies added, and what tasks await of each other besides."""
    tasks = schedule.tasks
    total = len(tasks) + len(copies)
    positions = np.array([copy.position for copy in copies], np.int64)
    order = np.argsort(positions, kind="stable")
    of_copy = np.empty(len(copies), np.int64)  # where each of them stands
    of_copy[order] = positions[order] + np.arange(len(copies))
    of_task = np.arange(len(tasks)) + np.searchsorted(positions[order], np.arange(len(tasks)), side="right")
    waiter = [np.repeat(of_task, tasks["num_awaits"])]
    awaited = [of_task[schedule.awaits[expand_ranges(tasks["first_await"], tasks["num_awaits"])]]]
    for at, copy in zip(of_copy.tolist(), copies, strict=True):
        for its, where in ((copy.tasks, of_task), (copy.copies, of_copy)):
            waiter.append(np.full(len(its), at))
            awaited.append(where[np.array(its, np.int64)])
        waiter.append(of_task[np.array(copy.waiters, np.int64)])
        awaited.append(np.full(len(copy.waiters), at))
    pairs_of_tasks = np.array(more_awaits, np.int64).reshape(-1, 2)
    waiter.append(of_task[pairs_of_tasks[:, 0]])
    awaited.append(of_task[pairs_of_tasks[:, 1]])
    pairs = np.unique(np.concatenate(waiter) * total + np.concatenate(awaited))
    joined = np.zeros(total, TASK_DTYPE)
    joined[of_task] = tasks
    for at, copy in zip(of_copy.tolist(), copies, strict=True):
        joined[at] = (Kind.COPY, 0, 2, lanes[copy.lane][0], copy.lane, -1, 0, 0, 0)
    joined["num_awaits"] = np.bincount(pairs // total, minlength=total)
    joined["first_await"] = np.cumsum(joined["num_awaits"], dtype=np.int64) - joined["num_awaits"]
    of_copies = (
        [(copy.written, Factor.ONE, Op.N, 0) for copy in copies],
        [(copy.read, Factor.ONE, copy.op, 0) for copy in copies],
    )
    first = np.cumsum(joined["num_operands"], dtype=np.int64) - joined["num_operands"]
    all_operands = np.zeros(int(joined["num_operands"].sum()), OPERAND_DTYPE)
    for number, of_all in enumerate(of_copies):
        all_operands[first[of_copy] + number] = np.array(of_all, OPERAND_DTYPE)
    all_operands[expand_ranges(first[of_task], tasks["num_operands"])] = operands
    joined["first_operand"] = first
    return joined, all_operands, (pairs % total).astype(AWAIT_DTYPE)
