"""
Sessions that nobody closed: what they hold is kept until all their ranks can give it back together.

Giving back is collective, and the garbage collector of one rank knows nothing of the others. So a session that is
dropped, or left by an error, is only marked on that rank. The next session that opens on communicators of all its ranks
finds it marked on all of them. There they give it back, several in one order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from uncut_mpi.api.holdings import HalfOpened, Holdings
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.runtime import is_fork

_process = os.urandom(8)
_numbers = itertools.count()


@dataclasses.dataclass(slots=True)
class _Kept:
    """
    A session of this process that is not closed.

    Attributes
    ----------
    members : tuple of bytes
        The processes of its ranks.
    leave : callable
        Tells those who wait for this rank that it has left, by what.
    holdings : Holdings or HalfOpened
        What is to be given back.
    over : bool
        Whether this rank makes no call in it any more.
    offered : bool
        Whether a thread of this process is asking the others whether they have dropped it too.
    """

    members: tuple[bytes, ...]
    leave: Callable[[str], None]
    holdings: Holdings | HalfOpened
    over: bool = False
    offered: bool = False


_kept: dict[bytes, _Kept] = {}
_mutex = threading.RLock()  # a collection of garbage may drop a session where it is held
_in_use: list[Holdings | HalfOpened] = []
"""What devices may still work on, so that nothing of it may be freed, nor by the garbage collector."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """What a session is known by on all its ranks; made by `enter`."""

    key: bytes
    members: tuple[bytes, ...]


def enter(group: Group) -> Ticket:
    """Give back the sessions that all their ranks have dropped, if these are ranks of `group`. Collective."""
    offers: dict[bytes, _Kept] = {}
    try:
        with _mutex:  # another thread may open a session meanwhile, and one of them alone gives a session back
            offers = {key: kept for key, kept in _kept.items() if kept.over and not kept.offered}
            for kept in offers.values():
                kept.offered = True
        mine = {key: (kept.holdings.in_use, kept.holdings.whole) for key, kept in offers.items()}
        facts: list[tuple[bytes, int, dict[bytes, tuple[bool, bool]]]]
        facts = group.allgather_objects((_process, next(_numbers), mine))
        over = {process: keys for process, _, keys in facts}
        for key in sorted(offers):
            states = [over.get(member, {}).get(key) for member in offers[key].members]
            found = [state for state in states if state is not None]
            if len(found) < len(states):
                continue
            holdings = _kept.pop(key).holdings
            if any(in_use for in_use, _ in found):
                _in_use.append(holdings)
                holdings.give_back(in_use=True)
            elif all(whole for _, whole in found):
                holdings.give_back(check_left=group.check_left)
            else:
                holdings.give_back_alone()
    finally:
        for kept in offers.values():
            kept.offered = False
    key = hashlib.blake2b(repr([fact[:2] for fact in facts]).encode(), digest_size=16).digest()
    return Ticket(key, tuple(process for process, _, _ in facts))


def keep(session: Any, ticket: Ticket, leave: Callable[[str], None], holdings: Holdings) -> None:
    """
    Keep what a session holds until it is closed, or dropped by all its ranks. Local.

    Parameters
    ----------
    session : object
        Not kept itself: when nothing refers to it any more, or the program ends, this rank has left it.
    leave, holdings
        See `_Kept`; they must not refer to `session`.
    """
    with _mutex:
        _kept[ticket.key] = _Kept(ticket.members, leave, holdings)
    weakref.finalize(session, _dropped, ticket.key)


def keep_half_opened(ticket: Ticket, holdings: HalfOpened) -> None:
    """Keep what a session holds that an error of one rank has kept from opening, until all its ranks have. Local."""
    with _mutex:
        _kept[ticket.key] = _Kept(ticket.members, lambda reason: None, holdings, over=True)


def forget(ticket: Ticket) -> None:
    """Note that a session is closed: there is nothing left to give back. Local."""
    with _mutex:
        _kept.pop(ticket.key, None)


def end(ticket: Ticket) -> None:
    """Note that this rank makes no call in a session any more. Local."""
    if ticket.key in _kept:
        _kept[ticket.key].over = True


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
