"""
Copies of the caller's matrices in less memory than these take: a ring of columns, used again and again.

What others use of a matrix comes into the next columns of its ring when it is used, in the order of the schedule. It
is still there for whoever uses the same region again, until others need the columns. A copy into columns awaits all
that used what was there, and the copy out of what was written there. Copies in are as early as that lets them be, so
that a lane of the host reads ahead as far as its ring has room.
"""

from __future__ import annotations

import bisect
import dataclasses
import operator
from collections.abc import Mapping
from typing import TypeAlias

from uncut_mpi.errors import CapacityError
from uncut_mpi.units import bytes_text

Region: TypeAlias = tuple[int, int, int, int]
"""First row and column, rows and columns, of a matrix as it is stored."""


@dataclasses.dataclass(slots=True, eq=False)
class RingCopy:
    """
    A copy between a matrix and its ring.

    Attributes
    ----------
    inward : bool
        Whether it goes into the ring.
    region : tuple of int
        Of the matrix.
    column : int
        Where it begins in the ring.
    position : int
        It stands before the task of this number, and behind those before.
    tasks : list of int
        That it awaits.
    copies : list of RingCopy
        That it awaits: ways out, of the same columns or of what it reads.
    waiters : list of int
        Tasks that await it.
    """

    inward: bool
    region: Region
    column: int
    position: int
    tasks: list[int]
    copies: list[RingCopy]
    waiters: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class _Columns:
    """Columns that hold a region, or are left of such."""

    region: Region
    column: int
    width: int
    users: dict[int, int] = dataclasses.field(default_factory=dict)  # by lane the last task that uses it
    writers: dict[int, int] = dataclasses.field(default_factory=dict)  # the same of what is not copied out yet
    way_in: RingCopy | None = None
    way_out: RingCopy | None = None

    def without(self, start: int, stop: int) -> list[_Columns]:
        """Return the columns that are left beside some: whoever writes them has to await the same."""
        ends = (self.column, start), (stop, self.column + self.width)
        return [
            _Columns(self.region, first, last - first, self.users, {}, None, self.way_out)
            for first, last in ends
            if first < last
        ]


class Ring:
    """
    Where the regions of one matrix are in its ring, as one task after the other uses them.

    Parameters
    ----------
    columns : int
        Of the ring.

    Attributes
    ----------
    copies : list of RingCopy
        Those made so far.
    awaits : list of (int, int)
        Tasks that write columns, and those that they await for it.
    """

    def __init__(self, columns: int) -> None:
        self._columns, self._head = columns, 0
        self._slots: list[_Columns] = []  # by column
        self._there: dict[Region, _Columns] = {}
        # By where their columns begin, in steps of the ring's columns: no region has more.
        self._ways_out: dict[int, list[RingCopy]] = {}
        self._is_written = False
        self.copies: list[RingCopy] = []
        self.awaits: list[tuple[int, int]] = []

    def use(self, task: int, lane: int, region: Region, *, writes: bool) -> int:
        """Take note of what a task uses, later in the schedule than those before, and return its first column."""
        slot = self._there.get(region)
        if slot is None:
            slot = self._begin(task, region, writes=writes)
        elif writes and slot.way_out is not None:
            slot.way_out.waiters.append(task)
        if slot.way_in is not None:
            slot.way_in.waiters.append(task)
        slot.users[lane] = task
        if writes:
            self._is_written = True
            for other in self._others(region):  # are to be read again
                self._leave(other)
                del self._there[other.region]
            slot.writers[lane] = task
        return slot.column

    def end(self) -> None:
        """Copy out what is still to be."""
        for slot in self._slots:
            self._leave(slot)

    def _begin(self, task: int, region: Region, *, writes: bool) -> _Columns:
        """Return columns for a region that is not there."""
        slot, tasks, copies = self._take(region)
        if writes:
            self.awaits += [(task, before) for before in tasks]
            for copy in copies:
                copy.waiters.append(task)
            return slot
        for other in self._others(region):
            self._leave(other)
        copies += self._ways_out_of(region)
        position = max([0, *(before + 1 for before in tasks), *(copy.position for copy in copies)])
        slot.way_in = RingCopy(True, region, slot.column, position, tasks, copies)
        self.copies.append(slot.way_in)
        return slot

    def _take(self, region: Region) -> tuple[_Columns, list[int], list[RingCopy]]:
        """Return the next columns, and what is to be awaited before they are written."""
        width = region[3]
        start = self._head if self._head + width <= self._columns else 0
        users: dict[int, int] = {}
        copies: list[RingCopy] = []
        left: list[_Columns] = []
        first = bisect.bisect_right(self._slots, start, key=operator.attrgetter("column"))
        first -= first > 0 and self._slots[first - 1].column + self._slots[first - 1].width > start
        last = bisect.bisect_left(self._slots, start + width, key=operator.attrgetter("column"))
        for old in self._slots[first:last]:
            self._leave(old)
            if self._there.get(old.region) is old:
                del self._there[old.region]
            if old.way_out is not None:
                copies.append(old.way_out)
            for lane, task in old.users.items():
                users[lane] = max(task, users.get(lane, -1))
            left += old.without(start, start + width)
        self._head = start + width
        slot = self._there[region] = _Columns(region, start, width)
        self._slots[first:last] = sorted([*left, slot], key=operator.attrgetter("column"))
        return slot, sorted(users.values()), copies

    def _leave(self, slot: _Columns) -> None:
        """Copy out what was written in a slot and is not copied out yet."""
        if slot.writers:
            last = sorted(slot.writers.values())
            slot.way_out = RingCopy(False, slot.region, slot.column, last[-1] + 1, last, [])
            slot.writers = {}
            self.copies.append(slot.way_out)
            self._ways_out.setdefault(slot.region[1] // self._columns, []).append(slot.way_out)

    def _ways_out_of(self, region: Region) -> list[RingCopy]:
        """Return the copies out of what overlaps a region."""
        first, last = region[1] // self._columns - 1, (region[1] + region[3] - 1) // self._columns
        near = (one for at in range(first, last + 1) for one in self._ways_out.get(at, ()))
        return [one for one in near if _overlap(one.region, region)]

    def _others(self, region: Region) -> list[_Columns]:
        """Return where other regions are that overlap one, of a matrix that is written."""
        if not self._is_written:
            return []
        return [slot for one, slot in self._there.items() if one != region and _overlap(one, region)]


def _overlap(one: Region, other: Region) -> bool:
    return all(one[at] < other[at] + other[at + 2] and other[at] < one[at] + one[at + 2] for at in (0, 1))


def shared_room(whole: Mapping[int, int], least: Mapping[int, int], room: int, owner: int) -> dict[int, int]:
    """
    Return how many bytes the copies of each matrix of a rank may take in host memory.

    Parameters
    ----------
    whole, least : mapping of int to int
        By buffer the bytes of all of it, and of the largest region that a task uses.
    room : int
        For all together (bytes).
    owner : int
        The rank.

    Raises
    ------
    CapacityError
        If there is less room than the largest regions take.
    """
    needed = sum(least.values())
    if needed > room:
        raise CapacityError(
            f"rank {owner} may use {bytes_text(room)} of host memory for copies of matrices in files, or in memory "
            f"that no device reaches, and the smallest of them take {bytes_text(needed)}: let it use some times as "
            "much (host_memory), or ask for smaller blocks (blocking.block, blocking.c_rows, blocking.c_cols)"
        )
    more = {at: max(0, whole[at] - least[at]) for at in whole}
    left = min(room - needed, sum(more.values()))
    return {at: least[at] + more[at] * left // max(1, sum(more.values())) for at in whole}
