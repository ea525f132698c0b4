"""
What sessions hold until they are closed, dropped by all their ranks, or MPI is gone.

Giving back is collective, and the garbage collector of one rank knows nothing of the others. So a session that is
dropped, or left by an error, is only marked on that rank. The next session that opens on communicators of all its ranks
finds it marked on all of them. There they give it back, several in one order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import operator
import os
import threading
import weakref
from collections.abc import Callable
from typing import NamedTuple

from uncut_mpi.api.calls import Calls
from uncut_mpi.api.control import Control
from uncut_mpi.device.interface import Backend
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.runtime import is_fork

_process = os.urandom(8)
_numbers = itertools.count()


class Ticket(NamedTuple):
    """What a session is known by on all its ranks, and the processes of these."""

    key: bytes
    members: tuple[bytes, ...]


_NO_TICKET = Ticket(b"", ())


@dataclasses.dataclass(eq=False)
class Holdings:
    """
    Everything that a session has to give back, without the session itself; `api.opening` makes it.

    Attributes
    ----------
    group, control, backend, calls
        What there is so far; in a session all of it.
    ticket : Ticket
        Empty until `enter` makes it.
    whole : bool
        Whether the session has opened on this rank. If the error of one rank has kept it from that, a device is held at
        most, whose memory peers may map.
    released : bool
        Whether it has been given back.
    over : bool
        Whether this rank makes no call in the session any more.
    offered : bool
        Whether a thread of this process is asking the others whether they have dropped it too.
    """

    group: Group
    control: Control | None = None
    backend: Backend | None = None
    calls: Calls | None = None
    ticket: Ticket = _NO_TICKET
    whole: bool = False
    released: bool = False
    over: bool = False
    offered: bool = False

    @property
    def in_use(self) -> bool:
        """Whether work of this rank or its peers may still be in flight, so that nothing of it can be freed. Local."""
        return self.whole and self._calls.gate.broken

    @property
    def _calls(self) -> Calls:
        assert self.calls is not None  # of a session that has opened
        return self.calls

    def leave(self, reason: str) -> None:
        """Tell those who wait for this rank that it has left, by what. Local."""
        if self.whole:
            self._calls.gate.leave(reason)

    def give_back(self, *, in_use: bool = False, check_left: Callable[[], None] | None = None) -> None:
        """
        Release everything. Collective.

        Parameters
        ----------
        in_use : bool, default False
            The communicator alone, since the rest is in use on some rank.
        check_left : callable, optional
            In the place of the group's own, by which all have left where nobody has closed the session.
        """
        if check_left is not None:
            self.group.check_left = check_left
        if not in_use:
            self._end()
            self._calls.close()
            self._calls.store.close()
            self._calls.backend.close()
        self.group.free()

    def give_back_alone(self) -> None:
        """Release what this rank holds, where the others do the same or MPI is gone. Local."""
        if self.whole:
            self._end()
            self._calls.abandon()
            self._calls.store.give_back_alone()
        if self.backend is not None:
            self.backend.close()
        self.group.free()

    def _end(self) -> None:
        self._calls.gate.closed = self.released = True
        self._calls.binder.drop_all()
        self._calls.plans.clear()


_kept: dict[bytes, Holdings] = {}
_mutex = threading.RLock()  # a collection of garbage may drop a session where it is held
_in_use: list[Holdings] = []
"""What devices may still work on, so that nothing of it may be freed, nor by the garbage collector."""


def enter(holdings: Holdings) -> None:
    """Give back the sessions that all their ranks have dropped, if these are ranks of a new one too. Collective."""
    group = holdings.group
    offers: dict[bytes, Holdings] = {}
    try:
        with _mutex:  # another thread may open a session meanwhile, and one of them alone gives a session back
            offers = {key: kept for key, kept in _kept.items() if kept.over and not kept.offered}
            for kept in offers.values():
                kept.offered = True
        mine = {key: (kept.in_use, kept.whole) for key, kept in offers.items()}
        facts: list[tuple[bytes, int, dict[bytes, tuple[bool, bool]]]]
        facts = group.allgather_objects((_process, next(_numbers), mine))
        over = {process: keys for process, _, keys in facts}
        for key, kept in sorted(offers.items(), key=operator.itemgetter(0)):
            states = [over.get(member, {}).get(key) for member in kept.ticket.members]
            found = [state for state in states if state is not None]
            if len(found) < len(states):
                continue
            del _kept[key]
            if any(in_use for in_use, _ in found):
                _in_use.append(kept)
                kept.give_back(in_use=True)
            elif all(whole for _, whole in found):
                kept.give_back(check_left=group.check_left)
            else:
                kept.give_back_alone()
    finally:
        for kept in offers.values():
            kept.offered = False
    key = hashlib.blake2b(repr([fact[:2] for fact in facts]).encode(), digest_size=16).digest()
    # In one step, so that an interrupt leaves both or none.
    holdings.ticket = Ticket(key, tuple(process for process, _, _ in facts))


def keep(holdings: Holdings, session: object = None) -> None:
    """
    Keep what a session holds until it is closed, or dropped by all its ranks. Local.

    Parameters
    ----------
    session : object, optional
        One that has opened. It is not kept itself, and nothing of what is held may refer to it: when nothing refers to
        it any more, or the program ends, this rank has left it.
    """
    with _mutex:
        _kept[holdings.ticket.key] = holdings
    if session is not None:
        weakref.finalize(session, _dropped, holdings.ticket.key)


def forget(holdings: Holdings) -> None:
    """Note that a session is closed: there is nothing left to give back. Local."""
    with _mutex:
        _kept.pop(holdings.ticket.key, None)


def leave(reason: str) -> None:
    """Tell those who wait for this rank in a session that it has left, by the name of an error's type. Local."""
    for kept in [*_kept.values()]:
        if not is_fork[0]:  # a fork leaves nothing
            kept.leave(reason)


def _dropped(key: bytes) -> None:
    kept = _kept.get(key)
    if kept is not None and not is_fork[0]:  # a fork leaves nothing
        kept.leave("leaving without close()")
        kept.over = True
