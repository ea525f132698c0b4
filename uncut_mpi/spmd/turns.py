"""
One total order per device over all calls, plans and sessions of a process.

Ranks of a call wait for each other's flags on the device. So two calls that two processes issue in different orders
would wait for each other for ever. A call therefore holds one lock in each of its ranks' processes, that of the device.
It holds it from before its first operation until its last has finished. `DeviceTurns` says how the locks are taken, and
why nothing waits in a circle.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from uncut_mpi.segments import node_identity
from uncut_mpi.spmd.group import Group

# A rank's word is 4·call + one of these, so that it only ever grows.
_ARRIVED, _HELD, _BLOCKED, _LOCKED = range(4)
_STATES = 4


class DeviceTurns:
    """
    One session's place in the order of calls on its devices. Collective.

    Parameters
    ----------
    group : Group
        The session's ranks, all on one node.
    device_key : str
        Identifies this rank's device within its process.
    words : ndarray of uint64, shape (size,)
        Zeros in memory that all ranks share; entry r is written by rank r only.

    Notes
    -----
    The locks are local to the processes; the ranks of a session tell each other how far they are through one word
    each of shared memory:

    1. *Arrive.* Every rank writes ARRIVED and waits until all have, which takes no time if they have met in
       between. No lock is held so far, so a program may make the calls of two sessions one after the other in
       one process, in two threads in another.
    2. *Try.* Every rank tries its lock without waiting, writes HELD or BLOCKED, and waits until all have.
       All ranks are inside the call and trying never waits, so this ends. If all are HELD, the call has
       what it needs: with one session, always. A word that was BLOCKED never reads HELD, and one that was
       HELD changes only where a BLOCKED was seen; so all ranks decide alike.
    3. *Take turns.* Otherwise every rank gives its lock back, and they queue for their locks one after the
       other in ascending (node, process) order, each writing LOCKED when it has it.

    Nothing waits in a circle. A call that waits for a lock is in step 3, so it holds only locks of lower
    processes than the one it waits for. Whoever holds a lock in step 2 gives it back or has all of its
    locks. So among the waiting calls, the one that waits for the highest process waits for a call that
    itself waits for no lock. Locks are granted in order of arrival and a try fails while anyone queues, so
    no session starves. How many sessions share a device is asked nowhere: one may come or go at any time.
    """

    def __init__(self, group: Group, device_key: str, words: np.ndarray[Any, Any]) -> None:
        self._group, self._key, self._rank = group, device_key, group.rank
        # Polled many times a call, and six times as fast as the array.
        self._words = memoryview(words)  # type: ignore[arg-type]  # numpy 1 stubs know no Buffer
        processes = group.allgather_objects((node_identity(), os.getpid()))
        ranks = sorted(range(group.size), key=processes.__getitem__)
        place = ranks.index(group.rank)
        self._before = ranks[place - 1] if place else None
        self._last = ranks[-1]
        self._call = 0
        with _registry_mutex:
            self._lock = _registry.setdefault(device_key, _DeviceLock())
        self._closed = False

    def arrive(self) -> None:
        """Say that this rank has begun its next call, whether it will take its device or not. Not collective."""
        self._call += 1
        self._words[self._rank] = _STATES * self._call + _ARRIVED

    def missing(self) -> list[int]:
        """Return the ranks that have not begun this call. Not collective."""
        return self._below(self._word(_ARRIVED))

    def acquire(self, timeout_s: float | None = None, settle: Callable[[], None] = lambda: None) -> None:
        """
        Take the devices of all ranks for the call begun last. Collective, and so must something be before `release`.

        Parameters
        ----------
        settle : callable, optional
            Ends earlier calls of the session that still have the device, for which nothing but time is needed.

        Raises
        ------
        StallError
            If they are not to be had within `timeout_s`; says what is awaited. The session cannot
            make calls any more then.
        """
        words, first = self._words, _STATES * self._call
        arrived, tried = first + _ARRIVED, first + _HELD
        try:
            if min(words) < arrived:  # mostly not, and this is part of every call
                self._await(lambda: min(words) >= arrived, timeout_s, " to begin this call", self.missing)
            words[self._rank] = tried if self._lock.try_take(self) else first + _BLOCKED
            if min(words) < tried:
                self._await(lambda: min(words) >= tried, timeout_s, " to try its device", lambda: self._below(tried))
            # A rank that has failed in this call may be in its next one: not all above HELD is BLOCKED or LOCKED.
            if max(words) > tried and (first + _BLOCKED in words or first + _LOCKED in words):
                settle()
                self._take_turns(timeout_s)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Give this rank's device back, once for each call. Not collective; without `acquire` it does nothing."""
        self._lock.give_back(self)

    def close(self) -> None:
        """Leave the order. Not collective; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self.release()
            self._words.release()  # so that the memory can be unmapped

    def _take_turns(self, timeout_s: float | None) -> None:
        self._lock.give_back(self)
        locked, before, last = self._word(_LOCKED), self._before, self._last
        if before is not None:
            self._await(lambda: self._words[before] >= locked, timeout_s, " to take its device", lambda: [before])
        self._lock.queue(self)
        self._await(lambda: self._lock.is_held_by(self), timeout_s, "", None)
        self._words[self._rank] = locked
        self._await(lambda: self._words[last] >= locked, timeout_s, " to take its device", lambda: [last])

    def _below(self, word: int) -> list[int]:
        return [rank for rank, theirs in enumerate(self._words) if theirs < word]

    def _word(self, state: int) -> int:
        return _STATES * self._call + state

    def _await(
        self, done: Callable[[], bool], timeout_s: float | None, to: str, missing: Callable[[], list[int]] | None
    ) -> None:
        if not done():
            held = f"device {self._key}, which other sessions of this process hold"
            what = f"call {self._call}"
            self._group.watch(done, what, timeout_s, missing=missing, whom=held, to=to, final=False)


class _DeviceLock:
    """A lock granted in order of arrival: who is first in the line holds it. Waiters poll."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._line: list[object] = []

    def try_take(self, who: object) -> bool:
        """Take it if nobody else holds it or waits for it; each time it is taken it is to be given back."""
        with self._mutex:
            if self._line and not (self._line[0] is self._line[-1] is who):
                return False
            self._line.append(who)
            return True

    def queue(self, who: object) -> None:
        """Wait for it from now on."""
        with self._mutex:
            self._line.append(who)

    def is_held_by(self, who: object) -> bool:
        """Return whether all who came before have given it back."""
        return self._line[0] is who

    def give_back(self, who: object) -> None:
        """Hold it once less, or wait for it no more."""
        with self._mutex:
            if who in self._line:
                self._line.remove(who)


# The order is one over all sessions of the process, which know nothing of each other: this is where
# they meet. A lock lives as long as any of them has it.
_registry: weakref.WeakValueDictionary[str, _DeviceLock] = weakref.WeakValueDictionary()
_registry_mutex = threading.Lock()
