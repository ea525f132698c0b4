"""
A group: the ranks of one session, on a communicator of their own, with waits that watch.

MPI libraries wait by spinning, which starves the rank that is awaited as soon as ranks outnumber
cores, and their waits never end when a rank is missing. Every wait here is therefore a nonblocking
collective that is polled: it spins briefly, then yields, then sleeps, and can have a deadline.
"""

from __future__ import annotations

import collections
import contextlib
import logging
import math
import os
import pathlib
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import numpy as np

from uncut_mpi.errors import ParamError, PeerFailedError, StallError, agreed, from_wire, to_wire
from uncut_mpi.segments import node_identity
from uncut_mpi.spmd.runtime import MPI, check_launcher, require_mpi, require_thread_multiple
from uncut_mpi.spmd.values import decoded, encoded
from uncut_mpi.units import name_ranks

# Spinning costs nothing while every rank has a core; with fewer cores it keeps the awaited rank
# from running, so it is all but left out. Yielding hands a core on within microseconds, a sleep
# wakes up to a millisecond late and a collective call takes several turns: with 8 ranks on 2 cores
# an exchange took 0.8 to 1.3 ms where yielding came first, and 6 ms where sleeping did. A rank with a
# core of its own yields for longer and sleeps less: one that had no part in a product of 14 ms woke up half
# a millisecond after its end, and a call ends when its last rank does.
_SPIN_S, _SPIN_SHARED_S = 200e-6, 10e-6
_YIELD_S, _YIELD_SHARED_S = 50e-3, 5e-3
_SLEEP_SHARE, _SLEEP_SHARE_SHARED = 1 / 256, 1 / 8
_SLEEP_MIN_S, _SLEEP_MAX_S = 50e-6, 1e-3

OPENING: Final = "opening a session"
SETTLING_S = 60.0
"""How long ranks that have all come to open a session wait for each other, until they share memory by which they see
who has left."""

logger = logging.getLogger("uncut_mpi")

PATIENCE_S = 30.0
"""After so long a wait in which nothing happens is told, and again each time it has lasted twice as long."""

_LOOK_S: Final = 1.0
"""How often a wait past a session's limit looks whether a rank's process is stopped or gone."""

_GRACE_S = 1.0
"""How long a wait for ranks goes on, some of which have left: what is awaited may have been on its way before."""

_LAST_LOOKS: Final = 100
"""How often a wait asks once more before it ends by that."""

_TELL_S: Final = 5e-3
"""For each rank that there is: how long a wait lasts before ranks of other nodes are told of it (`on_wait`)."""

Progress = Callable[[], bytes]
"""Returns something that changes while ranks get on with their work."""

Missing = Callable[[], Sequence[int]]
"""Tells which ranks have not arrived, from what they wrote into shared memory."""

_T = TypeVar("_T")

_FIRST_BYTES: Final = 1 << 14
"""What rank 0 tells at once: a schedule of some dozens of tasks."""

_EACH_BYTES: Final = 512
"""What each rank tells at once: some names and numbers."""

_WORD: Final = 2
"""
Tag of the words that ranks tell each other whatever they do.

Nobody has to hear one before the communicator is freed, and MPI may give its number to another one then. So each begins
with a key of the group.
"""

_KEY_BYTES, _MOST_WORD_BYTES = 8, 64

_awaited: dict[int, object] = {}
"""The buffers of operations that somebody waits for, or whose beginning an interrupt has ended."""

_unended: collections.deque[tuple[Callable[[], bool], object]] = collections.deque()
"""Operations whose wait an error has ended, with their buffers: MPI may still write to them."""


class Backoff:
    """
    Waiting in short steps: spin, then yield, then sleep for a part of the time waited, 50 µs to 1 ms.

    Parameters
    ----------
    spin_s : float
        How long to spin before yielding.
    shared : bool, default True
        Whether others need this core, so that yielding is short and sleeping long.
    """

    __slots__ = ("_share", "_spin_s", "_start_s", "_yield_s")

    def __init__(self, spin_s: float, shared: bool = True) -> None:
        self._spin_s = spin_s
        self._yield_s = spin_s + (_YIELD_SHARED_S if shared else _YIELD_S)
        self._share = _SLEEP_SHARE_SHARED if shared else _SLEEP_SHARE
        self._start_s = time.perf_counter()

    def elapsed_s(self) -> float:
        """Return the time since the wait began."""
        return time.perf_counter() - self._start_s

    def pause(self) -> None:
        """Let a little time pass."""
        waited = time.perf_counter() - self._start_s
        if waited < self._spin_s:
            return
        if waited < self._yield_s:
            os.sched_yield()
            return
        time.sleep(min(max(_SLEEP_MIN_S, self._share * waited), _SLEEP_MAX_S))


def _begun(data: bytes, nbytes: int) -> np.ndarray[Any, Any]:
    """Return a record with the length of some bytes and the first of them, mostly all: who gets it waits once."""
    record, first = bytearray(nbytes), data[: nbytes - 8]
    record[: 8 + len(first)] = len(data).to_bytes(8, sys.byteorder) + first
    return np.frombuffer(record, np.uint8)


class Group:
    """
    The ranks of one session, on a duplicate of the caller's communicator. Collective.

    Methods are collective unless they say otherwise. One thread at a time may use a group; different
    groups may be used from different threads if MPI offers ``MPI_THREAD_MULTIPLE``.

    Parameters
    ----------
    comm : mpi4py.MPI.Comm
        An intracommunicator; it is duplicated, so that no message of the program is touched.
    timeout_s : float, optional
        How long this rank waits for others to make the same call; by default for ever. So long it also waits inside a
        call for a rank whose process is stopped or gone, where it can see that (`halted`).
    ranks_per_node : int, optional
        Take the ranks of a node, in their order, for nodes of so many, which share nothing.
    check_left : callable, optional
        See below; by default there is none yet.

    Attributes
    ----------
    rank, size : int
        This rank, and how many there are.
    node : int
        Index of this rank's node, nodes counted in the order of their lowest ranks.
    num_nodes : int
        Number of nodes.
    node_of : tuple of int
        Node of every rank.
    machines : tuple of str
        What tells the machine of every rank from others (`node_identity`), whatever nodes its ranks are taken for.
    hosts : tuple of str
        Name of the machine that every rank is on, for messages: containers on several may have the same.
    local_rank, local_size : int
        This rank among those of its node, and how many those are.
    oversubscribed : bool
        Whether this node has fewer cores than ranks, so that spinning delays others.
    spin_s : float
        How long a wait on this node spins before it yields (s).
    stalled : bool
        Whether an error has ended a wait: this group can only be abandoned.
    bytes_broadcast : int
        Bytes that have gone through `from_root` so far.
    is_gone : callable
        Returns whether MPI is finalised.
    check_left : callable or None
        Raises if a rank has left for good; waits ask it.
    on_word : callable
        Given each word that comes, after the rank that tells it; an empty one says that the rank gets on.
    on_wait : callable
        Given how many waits this rank has begun (`step`), where one lasts long.

    Raises
    ------
    ParamError
        If `comm` is no intracommunicator.
    TopologyError
        If MPI is not running, was not initialised for the threads that use it, or does not belong to
        the launcher of this job.
    StallError
        Past `timeout_s`, or where all have come and one does not get on (`SETTLING_S`). Nobody can be named: ranks
        share nothing yet by which one could see the others.
    """

    def __init__(
        self,
        comm: Any,
        timeout_s: float | None = None,
        ranks_per_node: int | None = None,
        check_left: Callable[[], None] | None = None,
    ) -> None:
        require_mpi()
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ParamError(
                f"a session needs an intracommunicator of mpi4py, not {type(comm).__name__}"
                f"{' (COMM_NULL: this rank is not part of it)' if isinstance(comm, MPI.Comm) and not comm else ''}"
            )
        check_launcher()
        if not MPI.Is_thread_main():
            require_thread_multiple()
        self._thread = threading.get_ident()
        self.spin_s, self.oversubscribed = _SPIN_SHARED_S, True  # until it is known
        self.stalled = False
        self._why = "an earlier collective call of this session never ended: end the program"
        self._limit_s, self._processes = math.inf if timeout_s is None else timeout_s, [0] * comm.size
        self._freed = (
            True  # until there is a communicator: Open MPI crashes where messages of such a one are looked for
        )
        self.bytes_broadcast = 0
        self.check_left = check_left
        self._steps: memoryview | None = None
        self.is_gone: Callable[[], bool] = MPI.Is_finalized
        self.on_word: Callable[[int, bytes], object] = lambda rank, word: None
        self.on_wait: Callable[[int], object] = lambda steps: None
        self._beats: list[MPI.Request] = []
        self._beat_s, self.num_nodes = time.monotonic(), 1  # until they are known
        # Nonblocking, so that waiting for a rank that opens no session is told and bounded like any other wait; and
        # once more, because the duplicate is there also where a rank has given up waiting for it.
        _forget_ended()
        self.rank, self.size = comm.rank, comm.size
        self._comm, request = comm.Idup()
        self.wait(lambda: request, OPENING, timeout_s, self._comm)
        self._freed = False
        try:
            self.wait(self._comm.Ibarrier, OPENING, SETTLING_S if timeout_s is None else timeout_s, None)
            self._find_nodes(ranks_per_node)
        except BaseException:
            self.free()
            raise

    def _find_nodes(self, ranks_per_node: int | None) -> None:
        about_node = node_identity(), os.sched_getaffinity(0), ranks_per_node, platform.node()
        own = *about_node, os.urandom(_KEY_BYTES), os.getpid()
        facts = self.allgather_objects(own, OPENING, min(SETTLING_S, self._limit_s))
        self.machines, self.hosts = tuple(fact[0] for fact in facts), tuple(fact[3] for fact in facts)
        self._key, here = facts[0][4], self.machines[self.rank]
        self._processes = [fact[5] if fact[0] == here else 0 for fact in facts]
        each, before = [fact[2] or self.size for fact in facts], collections.Counter[str]()
        names = list[tuple[object, int]]()
        for machine, most in zip(self.machines, each, strict=True):
            names.append((machine, before[machine] // most))
            before[machine] += 1
        self._number_nodes(names)
        cores: set[int] = set().union(
            *(fact[1] for fact, node in zip(facts, self.node_of, strict=True) if node == self.node)
        )
        self.oversubscribed = len(cores) < self.machines.count(here)  # whatever nodes they are taken for
        self.spin_s = _SPIN_SHARED_S if self.oversubscribed else _SPIN_S

    def divide(self, parts: Sequence[int]) -> None:
        """Take ranks of a node that are in different parts for ranks of different nodes from now on. Not collective."""
        self._number_nodes([*zip(self.node_of, parts, strict=True)])

    def _number_nodes(self, names: Sequence[tuple[object, int]]) -> None:
        nodes = list(dict.fromkeys(names))
        self.node_of = tuple(nodes.index(name) for name in names)
        self.node, self.num_nodes = self.node_of[self.rank], len(nodes)
        self.local_rank = self.node_of[: self.rank].count(self.node)
        self.local_size = self.node_of.count(self.node)

    @property
    def messages(self) -> MPI.Comm:
        """The communicator, for messages between two ranks; whoever sends one awaits its end. Not collective."""
        return self._comm

    @property
    def here(self) -> list[int]:
        """The ranks on this node, ascending. Not collective."""
        return [rank for rank, node in enumerate(self.node_of) if node == self.node]

    def of_node(self) -> Group:
        """Return a group of the ranks on this node, to be freed. Collective."""
        self.barrier(OPENING)  # since nothing ends a wait in the split
        comm = self._comm.Split(self.node, self.rank)
        try:
            limit_s = None if self._limit_s == math.inf else self._limit_s
            return Group(comm, limit_s, check_left=self.check_left)
        finally:
            comm.Free()

    def duplicate(self) -> MPI.Comm:
        """Return a communicator of the same ranks, to be freed, for collectives that need not be over. Collective."""
        comm, request = self._comm.Idup()
        self.wait(lambda: request, OPENING, SETTLING_S, comm)
        return comm

    # -- waiting -----------------------------------------------------------------------------

    def drive(self) -> None:
        """
        Let MPI get on with messages of the program, if this is the thread that uses the group. Not collective.

        And hear what ranks tell (`beat`, `tell`).
        """
        if threading.get_ident() != self._thread or self._freed or self.is_gone():
            return
        if self.num_nodes == 1:
            self._comm.Iprobe()
            return
        status = MPI.Status()
        # What has come is received as it is: of an earlier communicator the sender may be no rank of this one.
        while (message := self._comm.Improbe(tag=_WORD, status=status)) is not None:
            word = bytearray(_MOST_WORD_BYTES)
            message.Recv((word, MPI.BYTE))
            if word.startswith(self._key):
                self.on_word(status.source, bytes(word[_KEY_BYTES : status.Get_count(MPI.BYTE)]))

    def tell(self, word: bytes) -> None:
        """
        Tell all other ranks a word, of 1 to 56 bytes, which `drive` hears there. Not collective.

        Nothing happens where this thread may not use MPI.
        """
        is_other = threading.get_ident() != self._thread
        if self._freed or self.is_gone() or (is_other and MPI.Query_thread() < MPI.THREAD_MULTIPLE):
            return
        _forget_ended()
        told = self._key + word
        for rank in range(self.size):
            if rank != self.rank:
                keep_until_over(self._comm.Isend((told, MPI.BYTE), rank, _WORD).Test, told)

    def beat(self, interval_s: float) -> None:
        """Tell ranks of other nodes that this one gets on, unless it has within such a time. Not collective."""
        now = time.monotonic()
        if now - self._beat_s >= interval_s and all(request.Test() for request in self._beats):
            others = [rank for rank, node in enumerate(self.node_of) if node != self.node]
            self._beat_s = now
            self._beats = [self._comm.Isend((self._key, MPI.BYTE), rank, _WORD) for rank in others]

    def wait(self, begin: Callable[[], MPI.Request], what: str, timeout_s: float | None, keep: object) -> None:
        """
        Begin a nonblocking operation, and poll it until it is complete. Collective as the operation is.

        Parameters
        ----------
        begin : callable
            Begins the operation.
        what, timeout_s
            As for `watch`.
        keep : object
            The buffers of the operation. MPI may still write to them where an error, an interrupt at any moment too,
            has ended the wait, so they live on until it is done.

        Raises
        ------
        StallError
            Past the deadline.
        """
        self.step()
        kept, request = (keep,), None
        try:
            _awaited[id(kept)] = kept
            request = begin()
            if not request.Test():
                self.watch(request.Test, what, timeout_s, missing=self.behind)
        except BaseException:
            self.stalled = True
            if request is not None:
                keep_until_over(request.Test, _awaited.pop(id(kept)))
            raise
        del _awaited[id(kept)]

    def watch(
        self,
        done: Callable[[], object],
        what: str,
        timeout_s: float | None,
        *,
        missing: Missing | None = None,
        progress: Progress | None = None,
        whom: str = "other ranks",
        to: str = "",
        final: bool = True,
    ) -> None:
        """
        Ask until something is done: spin, then yield, then sleep between. Not collective.

        Parameters
        ----------
        done : callable
            Returns something true when it is.
        what : str
            What is awaited, as the error calls it.
        timeout_s : float or None
            Deadline; None waits for ever.
        missing : callable, optional
            Tells which ranks have not arrived.
        progress : callable, optional
            Returns bytes that change while other ranks get on; the deadline starts anew when they have.
        whom, to : str, optional
            Who is awaited where `missing` names nobody, and to do what, for the message.
        final : bool, default True
            Whether a stall ends the use of this group.

        Raises
        ------
        StallError
            Past the deadline.
        PeerFailedError, StallError
            If a rank has left for good, where `check_left` tells it.

        Notes
        -----
        A wait of `PATIENCE_S` in which nothing happens is logged as a warning that names who is missing.
        """
        backoff = Backoff(self.spin_s, self.oversubscribed)
        seen, since_s, patience_s = b"" if progress is None else progress(), 0.0, PATIENCE_S
        told = self.num_nodes == 1 or self._steps is None  # else others do not see them
        look_s = self._limit_s  # for ranks that cannot get on
        while True:
            backoff.pause()
            if done():
                return
            waited_s = backoff.elapsed_s() - since_s
            if not told and waited_s > _TELL_S * self.size:
                self.tell_steps()
                told = True
            if told and waited_s > _GRACE_S and self.check_left is not None:
                try:
                    self.check_left()
                except (PeerFailedError, StallError):
                    for _ in range(_LAST_LOOKS):  # what is awaited of that rank may be on its way
                        if done():
                            return
                        backoff.pause()
                    self.stalled, look_s = True, 0.0
                    if not self.halted("Tt"):  # else they have left for these
                        raise
            if waited_s > look_s:
                look_s += _LOOK_S
                if halted := self.halted():
                    waited = self._waited(what, waited_s, halted, whom, to)
                    raise self._stall(f"{waited}: the process of {name_ranks(halted)} is stopped or gone", final)
            if waited_s <= min(patience_s, math.inf if timeout_s is None else timeout_s):
                continue
            if progress is not None and progress() != seen:
                seen, since_s, patience_s = progress(), backoff.elapsed_s(), PATIENCE_S
                continue
            self.drive()  # to hear how far others are
            absent = list(missing()) if missing is not None and told else []
            if timeout_s is not None and waited_s > timeout_s:
                waited = self._waited(what, timeout_s, absent, whom, to)
                raise self._stall(f"{waited}: see the other ranks' output, or allow more time", final)
            patience_s *= 2
            # One rank speaks for all that wait; where it is not known who does, each speaks for itself.
            if not absent or self.rank == min({*range(self.size)}.difference(absent), default=self.rank):
                logger.warning("%s; it goes on waiting", self._waited(what, waited_s, absent, whom, to))

    def _stall(self, why: str, final: bool) -> StallError:
        if final:
            self.stalled, self._why = True, f"an earlier collective call of this session never ended: {why}"
        return StallError(why)

    def halted(self, states: str = "TtZX") -> list[int]:
        """Return the ranks on this machine whose process is stopped (Tt), or gone. Not collective."""
        return [rank for rank, process in enumerate(self._processes) if process and _state(process) in states]

    def _waited(self, what: str, waited_s: float, absent: Sequence[int], whom: str, to: str) -> str:
        who = name_ranks(absent) if absent else whom
        return (
            f"{what}: rank {self.rank} of {self.size} waited {waited_s:.3g} s for {who}{to}; "
            "a rank has failed, is still computing, or does not make this collective call"
        )

    def count_steps(self, words: np.ndarray[Any, Any] | None) -> None:
        """
        Count this rank's waits for MPI where the others see them, so that a wait names who is behind. Not collective.

        Parameters
        ----------
        words : ndarray of uint64, shape (size,), or None
            Zeros in memory that the ranks of a node share, from the same call on; None ends it. Those of other nodes'
            ranks somebody writes who hears of them (`on_wait`).
        """
        if self._steps is not None:
            self._steps.release()  # so that the memory can be unmapped
        self._steps = None if words is None else memoryview(words)  # type: ignore[arg-type]  # numpy 1 stubs know no Buffer

    def step(self) -> None:
        """Count a wait for all ranks that this one begins, every collective call of MPI once. Not collective."""
        if self._steps is not None:
            self._steps[self.rank] += 1

    def tell_steps(self) -> None:
        """Let ranks of other nodes hear how many waits this one has begun. Not collective."""
        if self._steps is not None:
            self.on_wait(self._steps[self.rank])

    def behind(self) -> list[int]:
        """Return the ranks that have begun fewer waits than this one, as far as that is known here. Not collective."""
        steps = self._steps
        return [] if steps is None else [rank for rank in range(self.size) if steps[rank] < steps[self.rank]]

    def check_usable(self) -> None:
        """Raise unless collective calls are possible. Not collective."""
        if self._freed:
            raise ParamError("the group of this session is freed: make a new session")
        if self.stalled:
            raise StallError(self._why)
        if threading.get_ident() != self._thread:
            require_thread_multiple()
            self._thread = threading.get_ident()

    # -- collectives -------------------------------------------------------------------------

    def barrier(self, what: str = "barrier", timeout_s: float | None = None) -> None:
        """Wait until every rank is here; StallError if they are not within `timeout_s`."""
        self.check_usable()
        self.wait(self._comm.Ibarrier, what, timeout_s, None)

    def allgather_bytes(
        self, record: np.ndarray[Any, Any], what: str = "allgather", timeout_s: float | None = None
    ) -> np.ndarray[Any, Any]:
        """
        Gather one array of every rank.

        Parameters
        ----------
        record : ndarray
            Same shape and dtype on all ranks.

        Returns
        -------
        ndarray, shape (size, *record.shape)
            That of every rank.

        Raises
        ------
        StallError
            If a rank does not take part within `timeout_s`.
        """
        self.check_usable()
        mine = np.ascontiguousarray(record)
        everyone = np.empty((self.size, *record.shape), record.dtype)
        self.wait(lambda: self._comm.Iallgather(_raw(mine), _raw(everyone)), what, timeout_s, (mine, everyone))
        return everyone

    def allgather_objects(self, value: Any, what: str = "allgather", timeout_s: float | None = None) -> list[Any]:
        """
        Gather one value of every rank (`values`); for small control data, never for matrices.

        PeerFailedError on all ranks, if one rank's object is none.
        """
        try:
            data = encoded((value, None))
        except Exception as error:  # it must reach the other ranks, which already wait
            data = encoded((None, to_wire(error)))
        begun = self.allgather_bytes(_begun(data, _EACH_BYTES), what, timeout_s)
        sizes = begun[:, :8].copy().view(np.int64)[:, 0]
        parts = [one[8 : 8 + size] for one, size in zip(begun, sizes, strict=True)]
        if 8 + sizes.max() > _EACH_BYTES:
            mine, everyone, ends = np.frombuffer(data, np.uint8), np.empty(sizes.sum(), np.uint8), np.cumsum(sizes)
            of_ranks = everyone, sizes.tolist(), (ends - sizes).tolist(), MPI.BYTE
            self.wait(lambda: self._comm.Iallgatherv(mine, of_ranks), what, timeout_s, (mine, of_ranks))
            parts = np.split(everyone, ends[:-1])
        found = []
        for rank, part in enumerate(parts):
            try:
                value, wire = decoded(part.data)
            except ParamError as error:  # on all ranks, since all read the same bytes
                wire = to_wire(error)
            if wire is not None:
                said = ": ".join(wire)
                raise agreed(PeerFailedError(f"rank {rank} could not send its part of {what}: {said}"))
            found.append(value)
        return found

    def from_root(self, function: Callable[[], _T]) -> _T:
        """
        Run a function on rank 0 and give what it returns, or its error, to all.

        Parameters
        ----------
        function : callable
            Returns a value (`values`); called on rank 0 only.

        Raises
        ------
        UncutError
            On all ranks, what `function` raised: the same type and message, or `PeerFailedError`
            on the other ranks for a type that is not one of ours.
        """
        self.check_usable()
        failed: BaseException | None = None
        data = b""
        if self.rank == 0:
            try:
                data = encoded((function(), None))
            except BaseException as error:  # the others wait for the result or the error
                failed, data = error, encoded((None, to_wire(error)))
        first = _begun(data, _FIRST_BYTES)
        self.wait(lambda: self._comm.Ibcast(first, root=0), "broadcast", None, first)
        length = int(first[:8].view(np.int64)[0])
        body = first[8 : 8 + length]
        if len(body) < length:
            body = np.frombuffer(data, np.uint8) if self.rank == 0 else np.empty(length, np.uint8)
            self.wait(lambda: self._comm.Ibcast(body, root=0), "broadcast", None, body)
        self.bytes_broadcast += len(body)
        value, wire = decoded(body.data)
        if wire is not None:
            raise agreed(failed or from_wire(*wire, rank=0))
        found: _T = value
        return found

    def __enter__(self) -> Group:
        return self

    def __exit__(self, *unused: object) -> None:
        self.free()

    def free(self) -> None:
        """Free the communicator; a second call does nothing. A stalled group only lets go of it."""
        if self._freed:
            return
        if not self.stalled:
            # What ranks told while they waited for this one: else a communicator of the program's may get it.
            self.on_word = lambda rank, word: None
            self.drive()
        self._freed = True
        if not self.stalled and not MPI.Is_finalized():
            self._comm.Free()


def _state(process: int) -> str:
    """Return the state of a process as the system calls it; X where it is gone."""
    try:
        return pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "X"


def keep_until_over(is_over: Callable[[], bool], keep: object) -> None:
    """Keep the buffers of an operation that nobody will wait for, until it says that it is over. Not collective."""
    _unended.append((is_over, keep))


def _forget_ended() -> None:
    """Drop what has ended meanwhile of the operations that nobody waited for to their end. Not collective."""
    for _ in range(len(_unended)):
        with contextlib.suppress(IndexError):  # another thread has taken it
            one = _unended.popleft()
            if not one[0]():
                _unended.append(one)


def _raw(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return array.reshape(-1).view(np.uint8)
