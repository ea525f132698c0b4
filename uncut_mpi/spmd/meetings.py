"""
Where ranks meet: each gives a record to all others, through memory that they share or by messages between nodes.

A call opens by such an exchange, and a product closes by one.
"""

from __future__ import annotations

import struct
import time
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import PeerFailedError, StallError, Wire, agreed, to_wire
from uncut_mpi.spmd.group import Group, Missing, Progress, keep_until_over
from uncut_mpi.spmd.runtime import MPI
from uncut_mpi.units import name_ranks

RECORD = np.dtype(
    [
        ("digest", np.uint64, 2),
        ("call", "S36"),
        ("epoch", np.uint32),
        ("flags", np.uint32),
        ("status", np.int32),
    ]
)
"""
What ranks tell each other when a call opens and closes, 64 bytes: digest of the arguments, name of the
call (ASCII), epoch, flags, error status (0 = none). Digest, name and epoch are the same on all ranks.
"""

READY, NEWS = 1, 2
"""Flags of a record: the rank has all it needs for the call; the ranks are to take what it has found meanwhile."""

_WAITING, _ALIKE, _MET, _ABANDONED = range(4)  # what a meeting comes to
_LAST_WORDS_S = 0.3
_PAUSE_S = 5e-6  # between two looks of a rank with a core of its own

_COMMON_BYTES = 56  # digest, call and epoch
_RECORD_STRUCT = struct.Struct("=16s36sIIi")  # the same, for one write

WORD: Final = struct.Struct("=BQ40s")
"""
A word by which ranks of several nodes tell each other what went wrong (`Group.tell`): about what, a number, a text.

About the exchange that opens or closes calls it is the number of the meeting to which a rank does not come, and why.
"""

OPENING, CLOSING, ABORT, STEPS = range(4)


def memory_bytes(group: Group) -> int:
    """Return the bytes of shared memory that a `CallExchange` needs."""
    return _native.Meeting.memory_bytes(group.size)


class NetMeeting:
    """
    As `Meeting`, by messages of MPI: where ranks are on several nodes. One thread uses it, that of the group.

    A rank that leaves tells all others so, which hear it wherever they wait. Some may wait in a meeting by then, to
    which it does not come. So meetings have a communicator of their own: nothing comes after one that is not over.

    Parameters
    ----------
    about : int
        `OPENING` or `CLOSING`, by which others know what a word of this one is about.
    """

    def __init__(self, group: Group, mine: np.ndarray, everyone: np.ndarray, about: int) -> None:
        self._group, self._mine, self._everyone, self._about = group, mine, everyone, about
        self._comm, self._rows = group.duplicate(), everyone.reshape(group.size, -1)
        self._request: MPI.Request | None = None
        self._gone: dict[int, tuple[int, str]] = {}  # by rank: the meeting it does not attend, and why
        self.number = 0

    @property
    def left(self) -> list[tuple[int, int, str]]:
        """The ranks that are known to have left: with which meeting, and why."""
        return [(rank, number, why) for rank, (number, why) in sorted(self._gone.items())]

    @property
    def pending(self) -> bool:
        """Whether a meeting was begun that is neither collected nor abandoned."""
        return self._request is not None

    def meet(self, spin_s: float) -> int:
        """Begin the next meeting with this rank's record, then as `collect`."""
        self._group.drive()
        self._group.step()
        self.number += 1
        self._request = self._comm.Iallgather((self._mine, MPI.BYTE), (self._everyone, MPI.BYTE))
        return self.collect(spin_s)

    def collect(self, spin_s: float) -> int:
        """Return what the meeting has come to within so long, as `Meeting.collect`."""
        assert self._request is not None
        until_s = time.perf_counter() + spin_s
        while not (over := self._request.Test()) and not self._is_abandoned():
            if time.perf_counter() >= until_s:
                return _WAITING
        if not over:
            keep_until_over(self._request.Test, (self._mine, self._everyone))
        self._request = None
        self._group.drive()  # who left may have told so before the last one came
        if any(number <= self.number for number, _ in self._gone.values()):
            self._group.tell_steps()  # others may still wait for who has not come
            return _ABANDONED
        return _ALIKE if (self._rows == self._mine).all() else _MET

    def _is_abandoned(self) -> bool:
        """
        Return whether nobody waits in this meeting any more, since a rank has left.

        Who gives it up has come to it. It need not use MPI any more, by which the others could end what they have begun
        with it. They wait as long as they like for those that have not come.
        """
        left = [(number, why) for number, why in self._gone.values() if number <= self.number]
        return any(number < self.number or why for number, why in left) or (
            bool(left) and self._gone.keys() >= {*self._group.behind()}
        )

    def leave(self, reason: str) -> None:
        """Take part in no meeting any more: not in the one that was begun, else not in the next; tell all others."""
        if self._request is None:
            self.number += 1
        else:
            keep_until_over(self._request.Test, (self._mine, self._everyone))
        if self._group.rank not in self._gone:
            self._gone[self._group.rank] = self.number, reason
            self._group.tell(WORD.pack(self._about, self.number, reason.encode()))

    def hear(self, rank: int, number: int, reason: str) -> None:
        """Take note that another rank does not come to the meeting of this number, nor to any after it, and why."""
        self._gone[rank] = number, reason

    def close(self) -> None:
        """Free the communicator, unless some may still wait there."""
        if not self._gone and self._request is None and not self._group.stalled and not MPI.Is_finalized():
            self._comm.Free()


class CallExchange:
    """
    The exchange of one `RECORD` per rank that opens and closes a call, on buffers kept for all calls.

    The ranks meet in memory that they share, which is quicker than a message of MPI's (docs/performance.md,
    2026-11-22), or by messages where they are on several nodes. A rank that has to wait for the others lets MPI get on
    meanwhile, as it would inside an MPI call.

    Parameters
    ----------
    memory : ndarray of uint8, shape (`memory_bytes(group)`,)
        Zeros in memory that all ranks share.

    Attributes
    ----------
    meeting : Meeting or NetMeeting
        Where the ranks meet, without words for what goes wrong.
    mine : ndarray of RECORD, shape (1,)
        Filled in by the caller before `exchange`.
    everyone : ndarray of RECORD, shape (size,)
        Records of all ranks; overwritten by the next exchange.
    unanimous : bool
        Whether the last exchange has brought nothing but copies of `mine`.
    """

    about = OPENING

    def __init__(self, group: Group, memory: np.ndarray) -> None:
        self._group = group
        self._pause_s = 0.0 if group.oversubscribed else _PAUSE_S
        self._outcome, self._spin_s, self.unanimous = _WAITING, group.spin_s, False
        self.mine = np.zeros(1, RECORD)
        self.everyone = np.zeros(group.size, RECORD)
        mine, everyone = self.mine.view(np.uint8), self.everyone.view(np.uint8)
        self.meeting: _native.Meeting | NetMeeting = (
            NetMeeting(group, mine, everyone, self.about)
            if group.num_nodes > 1
            else _native.Meeting(memory, group.rank, mine, everyone)
        )
        self._common = everyone.reshape(group.size, -1)[:, :_COMMON_BYTES]
        self._mine_bytes = mine.data

    def fill(self, call: str, digest: bytes, epoch: int, *, flags: int, status: int) -> None:
        """Write `mine`: the call's name (ASCII), the 16-byte digest of its arguments, and the rest. Local."""
        _RECORD_STRUCT.pack_into(self._mine_bytes, 0, digest, call.encode(), epoch, flags, status)

    def has(self, call: str, digest: bytes, epoch: int, flags: int, status: int) -> bool:
        """Return whether `mine` is this record. Local."""
        return self._mine_bytes == _RECORD_STRUCT.pack(digest, call.encode(), epoch, flags, status)

    def exchange(
        self, what: str, timeout_s: float | None = None, missing: Missing | None = None, begun: int | None = None
    ) -> np.ndarray:
        """
        Give `mine` to all ranks and return the records of all. Collective; allocates nothing.

        Parameters
        ----------
        begun : int, optional
            What the meeting has come to so far, if it was begun (`Passage`).

        Raises
        ------
        StallError
            If a rank does not take part within `timeout_s`; names those that `missing` tells. If others have given up
            this exchange, when all have come, or an earlier one; names them.
        PeerFailedError
            If a rank has left the session, whether the others are here or not; names it.
        """
        self._group.check_usable()
        meeting = self.meeting
        if begun is not None:
            self._outcome = begun
        else:
            if meeting.pending:  # an interrupt ended that wait, but what others need next comes after it
                self._watch(what, timeout_s, missing)
            self._outcome = meeting.meet(self._spin_s)
        if self._outcome == _WAITING:
            self._watch(what, timeout_s, missing)
        elif self._outcome == _ABANDONED:
            self.check_left(what)
        self.unanimous = self._outcome == _ALIKE
        return self.everyone

    def check_left(self, what: str) -> None:
        """
        Check that no rank has left, as far as is known here now. Local.

        Those that have only given up an exchange count when it is over here: who still waits in it does so as long as
        it likes.

        Parameters
        ----------
        what : str
            What this rank waits in, for the error.

        Raises
        ------
        PeerFailedError, StallError
            As `exchange`.
        """
        self._group.drive()
        left, gone = self.meeting.left, dict[str, list[int]]()
        if not left:
            return
        next_one = self.meeting.number + (not self.meeting.pending)
        for rank, number, why in left:
            if why or number < next_one:
                gone.setdefault(why, []).append(rank)
        gave_up = gone.pop("", None)
        if gone:
            # The launcher may end the job as soon as this rank ends; what the other has to say comes first.
            time.sleep(_LAST_WORDS_S)
            who = ", ".join(f"{name_ranks(ranks)} left the session by {why}" for why, ranks in gone.items())
            raise agreed(PeerFailedError(f"{what}: {who}, so it has ended on all ranks: see that rank's output"))
        if gave_up:
            whom = "this rank" if self._outcome == _ABANDONED else "others"
            raise agreed(
                StallError(
                    f"{what}, rank {self._group.rank}: {name_ranks(gave_up)} waited for {whom} and gave up, "
                    "so the session has ended here too: begin and end every call on all ranks in time, or raise "
                    "arrival_timeout_s (inside a call timeout_s)"
                )
            )

    @property
    def pending(self) -> bool:
        """Whether an exchange was begun that an interrupt has ended; the next one goes on with it. Local."""
        return self.meeting.pending

    def leave(self, reason: str = "") -> None:
        """
        Take part in no exchange any more, and tell those who wait for this rank, now or later. Local.

        Parameters
        ----------
        reason : str, default ""
            By what, as the name of an error's type; by default this rank has given up waiting.
        """
        self.meeting.leave(reason.encode("ascii", "replace").decode())

    def hear(self, rank: int, number: int, reason: str) -> None:
        """Take note of a rank that has left, where ranks meet by messages: from which meeting on, and why. Local."""
        if isinstance(self.meeting, NetMeeting):
            self.meeting.hear(rank, number, reason)

    def close(self) -> None:
        """Give back what it has taken where ranks meet by messages. Not collective."""
        if isinstance(self.meeting, NetMeeting):
            self.meeting.close()

    def _watch(
        self, what: str, timeout_s: float | None, missing: Missing | None = None, progress: Progress | None = None
    ) -> None:
        group, collect = self._group, self.meeting.collect
        if isinstance(self.meeting, NetMeeting):
            missing = group.behind

        def met() -> int:
            group.drive()
            self._outcome = collect(self._pause_s)
            return self._outcome

        group.watch(met, what, timeout_s, missing=missing, progress=progress)
        if self._outcome == _ABANDONED:
            self.check_left(what)

    def all_same(self) -> bool:
        """Return whether all ranks gave the same digest, call and epoch in the last exchange. Local."""
        return bool((self._common == self._common[0]).all())


_TEXT_BYTES = 2048  # of an error, at most
_FAILED, _LOST = 1, 2  # in the status of a record, beside _LEFT


class Verdicts(CallExchange):
    """
    The exchange that ends a product: who has failed, and by what. On one node any thread may make it, without MPI.

    Parameters
    ----------
    memory : ndarray of uint8, shape (`verdict_bytes(group)`,)
        Zeros in memory that all ranks share.
    """

    about = CLOSING

    def __init__(self, group: Group, memory: np.ndarray) -> None:
        ends = memory_bytes(group)
        super().__init__(group, memory[:ends])
        self._rank = group.rank
        self._texts = memory[ends:].reshape(2, group.size, _TEXT_BYTES)  # used in turn, as the places of a meeting
        self._told = False

    def tell(self, error: BaseException | None, spin_s: float = 0.0) -> bool:
        """
        Tell all ranks what this one has met, if it has not; return whether all have. Not collective, but `judge` is.

        Of an error the first 2,048 bytes of its text reach the others.
        """
        if self._told:
            if self._outcome == _WAITING:
                self._outcome = self.meeting.collect(spin_s)
            return self._outcome != _WAITING
        self._told = True
        if error is not None:
            text = "\0".join(to_wire(error)).encode("utf-8", "replace")[: _TEXT_BYTES - 1] + b"\0"
            self._texts[(self.meeting.number + 1) % 2, self._rank, : len(text)] = np.frombuffer(text, np.uint8)
            lost = isinstance(error, StallError) or getattr(error, "fatal", False)
            self.mine["status"] = _LOST if lost else _FAILED
        self._outcome = self.meeting.meet(spin_s)
        return self._outcome != _WAITING

    def begun(self, outcome: int) -> None:
        """Note that all was well here and was told (`Passage`), and what the meeting has come to so far. Local."""
        self._told, self._outcome = True, outcome

    def judge(
        self, error: BaseException | None, timeout_s: float, progress: Progress
    ) -> tuple[list[Wire | None], bool] | None:
        """
        Return what each rank has met, or None if it is nothing, after `tell`. Collective.

        Parameters
        ----------
        error : BaseException or None
            What this one tells, or has told.
        progress : callable
            As of `Group.watch`.

        Returns
        -------
        (list of (str, str) or None, bool) or None
            Each rank's error as `to_wire` has it, and whether tasks of any may still be in flight. After a stall they
            may, or with a context that is dead (`fatal`); nothing may be freed or reused then.

        Raises
        ------
        StallError, PeerFailedError
            As `CallExchange.exchange`.
        """
        if not self.tell(error, self._spin_s):
            self._watch("closing barrier", timeout_s, progress=progress)
        elif self._outcome == _ABANDONED:
            self.check_left("closing barrier")
        self._told = False
        if error is None and self._outcome == _ALIKE:
            return None
        self.mine["status"], statuses = 0, self.everyone["status"]
        lost = bool((statuses == _LOST).any())
        if self._group.num_nodes > 1:
            return self._group.allgather_objects(error and to_wire(error), "closing barrier", timeout_s), lost
        wires: list[Wire | None] = [self._wire(rank) if status else None for rank, status in enumerate(statuses)]
        if error is not None:
            wires[self._rank] = to_wire(error)
        return wires, lost

    def _wire(self, rank: int) -> Wire:
        name, message, *_ = self._texts[self.meeting.number % 2, rank].tobytes().decode("utf-8", "ignore").split("\0")
        return name, message


def verdict_bytes(group: Group) -> int:
    """Return the bytes of shared memory that `Verdicts` need."""
    return memory_bytes(group) + 2 * group.size * _TEXT_BYTES
