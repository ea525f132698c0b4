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

from uncut_mpi import _native
from uncut_mpi.segments import node_identity
from uncut_mpi.spmd.group import Group

_State = _native.Turn.State


class DeviceTurns:
    """
    One session's place in the order of calls on its devices. Collective.

    Parameters
    ----------
    group : Group
        The session's ranks. Those of a node take turns together.
    device_key : str
        Identifies this rank's device within its process.
    words : ndarray of uint64, shape (size,)
        Zeros in memory that the ranks of the node share; each of them writes one.

    Attributes
    ----------
    turn : Turn
        How far this rank is, without words for what goes wrong.
    arrive : callable
        Says that this rank has begun its next call, whether it will take its device or not. Not collective.
    release : callable
        Gives this rank's device back, once for each call. Not collective; without `acquire` it does nothing.

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
        self._group, self._key = group, device_key
        processes = group.allgather_objects((node_identity(), os.getpid()))
        self._here = group.here
        # Places among the ranks of the node, in the order of their processes.
        order = sorted(range(group.local_size), key=lambda place: processes[self._here[place]])
        turn = order.index(group.local_rank)
        self._before = order[turn - 1] if turn else None
        self._last = order[-1]
        with _registry_mutex:
            lock = _registry.setdefault(device_key, _native.DeviceLock())
        self.turn = _native.Turn(words[: group.local_size], group.local_rank, lock)
        self.arrive, self.release = self.turn.arrive, self.turn.release  # part of every call

    def missing(self) -> list[int]:
        """Return the ranks that have not begun this call. Not collective."""
        return self._ranks_below(_State.ARRIVED)

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
        turn = self.turn
        try:
            if turn.take(self._group.spin_s):
                return
            self._await_all(_State.ARRIVED, timeout_s, " to begin this call")
            turn.take(0.0)
            self._await_all(_State.HELD, timeout_s, " to try its device")
            if turn.is_blocked:
                settle()
                self._take_turns(timeout_s)
        except BaseException:
            self.release()
            raise

    def close(self) -> None:
        """Leave the order. Not collective; a second call does nothing."""
        self.turn.let_go()

    def _take_turns(self, timeout_s: float | None) -> None:
        turn, before, last = self.turn, self._before, self._last
        turn.release()
        if before is not None:
            self._await_one(before, timeout_s)
        turn.queue()
        self._await(lambda: turn.has_device, timeout_s, "", None)
        turn.say(_State.LOCKED)
        self._await_one(last, timeout_s)

    def _await_all(self, state: _State, timeout_s: float | None, to: str) -> None:
        below = self.turn.below
        self._await(lambda: not below(state), timeout_s, to, lambda: self._ranks_below(state))

    def _await_one(self, place: int, timeout_s: float | None) -> None:
        below, rank = self.turn.below, self._here[place]
        self._await(lambda: place not in below(_State.LOCKED), timeout_s, " to take its device", lambda: [rank])

    def _ranks_below(self, state: _State) -> list[int]:
        return [self._here[place] for place in self.turn.below(state)]

    def _await(
        self, done: Callable[[], bool], timeout_s: float | None, to: str, missing: Callable[[], list[int]] | None
    ) -> None:
        if not done():
            held = f"device {self._key}, which other sessions of this process hold"
            what = f"call {self.turn.call}"
            self._group.watch(done, what, timeout_s, missing=missing, whom=held, to=to, final=False)


# The order is one over all sessions of the process, which know nothing of each other: this is where
# they meet. A lock lives as long as any of them has it.
_registry: weakref.WeakValueDictionary[str, _native.DeviceLock] = weakref.WeakValueDictionary()
_registry_mutex = threading.Lock()
