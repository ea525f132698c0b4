"""
What sessions hold from their opening until they are closed, dropped by all their ranks, or MPI is gone.

It is made step by step, and given back if a rank does not come to the end.

Giving back is collective, and the garbage collector of one rank knows nothing of the others. So a session that is
dropped, or left by an error, is only marked on that rank. The next session that opens on communicators of all its ranks
finds it marked on all of them. There they give it back, several in one order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import operator
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

from uncut_mpi.api.calls import Calls
from uncut_mpi.api.control import Control
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.api.matrix import Home
from uncut_mpi.api.measure import obtain_machine
from uncut_mpi.api.plan_maker import Budget, PlanMaker
from uncut_mpi.api.start import Started
from uncut_mpi.device.interface import Backend
from uncut_mpi.errors import ParamError, is_agreed
from uncut_mpi.model.arguments import byte_count, flag, real_number, whole_number
from uncut_mpi.model.machine import Machine
from uncut_mpi.spmd.abort import tell_once
from uncut_mpi.spmd.group import OPENING, SETTLING_S, Group
from uncut_mpi.spmd.transport import MpiTransport

_process = os.urandom(8)
_numbers = itertools.count()


class Ticket(NamedTuple):
    """What a session is known by on all its ranks, and the processes of these."""

    key: bytes
    members: tuple[bytes, ...]


_NO_TICKET = Ticket(b"", ())


@dataclasses.dataclass(eq=False)
class Holdings:
    """Everything that a session has to give back, without the session itself; `opening` makes it."""

    group: Group  # group, control, backend, calls: what there is so far; in a session all of it, else no calls
    control: Control | None = None
    backend: Backend | None = None
    calls: Calls = dataclasses.field(init=False)
    ticket: Ticket = _NO_TICKET  # empty until `enter` makes it
    released: bool = False  # whether it has been given back
    over: bool = False  # whether this rank makes no call in the session any more
    offered: bool = False  # whether a thread of this process is asking the others whether they have dropped it too

    @property
    def whole(self) -> bool:
        """
        Whether the session has opened on this rank.

        If the error of one rank has kept it from that, a device is held at most, whose memory peers may map.
        """
        return hasattr(self, "calls")

    def divide(self, parts: Sequence[int]) -> None:
        """Take ranks of a node that are in different parts for ranks of different nodes. Collective, while it opens."""
        control, self.control = self.control, None
        assert control is not None
        self.group.barrier(OPENING, SETTLING_S)  # all have come so far, and none waits for what is given up now
        control.close()
        self.group.divide(parts)
        self.control = Control(self.group)

    @property
    def in_use(self) -> bool:
        """Whether work of this rank or its peers may still be in flight, so that nothing of it can be freed. Local."""
        return self.whole and self.calls.gate.broken

    def leave(self, reason: str) -> None:
        """Tell those who wait for this rank that it has left, by what. Local."""
        if self.whole:
            self.calls.gate.leave(reason)

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
        with contextlib.ExitStack() as last:  # also after an error, of a file that is unfinished
            last.callback(self.group.free)
            if in_use:
                # Messages of what is in flight may still come. So that no other communicator gets them:
                self.group.stalled = True
            else:
                last.callback(self.calls.backend.close)
                last.callback(self.calls.let_go)
                last.push(self._tell)
                last.push(self._close_store)
                self.calls.flight.drain()  # a rank that has left may have calls in flight
                self._end()
                self.calls.close()

    def _close_store(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Release the matrices, unless an error has put ranks apart. Collective."""
        if not self.group.stalled and (error is None or is_agreed(error)):
            self.calls.store.close()

    def _tell(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Tell those who wait for this rank of an error that it has alone. Local."""
        if error is not None and not is_agreed(error) and self.control is not None:
            self.group.stalled = True
            self.control.exchange.leave(type(error).__name__)

    def give_back_alone(self) -> None:
        """Release what this rank holds, where the others do the same or MPI is gone. Local."""
        if self.whole:
            self._end()
            self.calls.abandon()
            self.calls.store.give_back_alone()
        if self.backend is not None:
            self.backend.close()
        self.group.free()

    def _end(self) -> None:
        self.calls.gate.closed = self.released = True
        self.calls.binder.drop_all()
        self.calls.plans.clear()


RANKS_PER_NODE: Final = "UNCUT_MPI_RANKS_PER_NODE"
"""In the environment: as `ranks_per_node` of a session that names none."""

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
        One that has opened. It is not kept itself, and nothing of what is held may refer to it. When nothing refers to
        it any more, or the program ends, this rank has left it.
    """
    with _mutex:
        _kept[holdings.ticket.key] = holdings
    if session is not None:
        weakref.finalize(session, _dropped, holdings.ticket.key)


def sessions() -> list[Holdings]:
    """Return what the sessions hold that are open in this process. Local."""
    return [kept for kept in [*_kept.values()] if kept.whole and not kept.over]


def forget(holdings: Holdings) -> None:
    """Note that a session is closed: there is nothing left to give back. Local."""
    with _mutex:
        _kept.pop(holdings.ticket.key, None)


def leave(reason: str) -> None:
    """Tell those who wait for this rank in a session that it has left, by the name of an error's type. Local."""
    for kept in [*_kept.values()]:
        kept.leave(reason)


def _dropped(key: bytes) -> None:
    kept = _kept.get(key)
    if kept is not None:
        kept.leave("leaving without close()")
        kept.over = True


Times = tuple[float, float | None]
"""After which time (s) a call fails in which nothing gets on, and one to which ranks do not come."""


class Settings(NamedTuple):
    """What callers set of a session, the same on all ranks; 0 bytes stand for what is free."""

    max_plans: int
    verify: bool
    tune_products: bool
    device_memory: int
    host_memory: int

    @classmethod
    def of(
        cls, max_plans: object, verify: object, tune_products: object, device_memory: object, host_memory: object
    ) -> Settings:
        """Return a caller's settings, or raise ParamError for what is none."""
        most = whole_number("max_plans", max_plans)
        if most < 1:
            raise ParamError(f"max_plans = {most} is below 1")
        flags = flag("verify", verify), flag("tune_products", tune_products)
        return cls(most, *flags, _bytes("device_memory", device_memory), _bytes("host_memory", host_memory))


@contextlib.contextmanager
def opening(comm: Any, arrival_timeout_s: object, ranks_per_node: object = None) -> Iterator[Holdings]:
    """Yield what a session holds, to be completed in the block; an error of one rank ends the opening on all."""
    limit_s: float | None = None
    with contextlib.suppress(ParamError):  # raised in the block, on all ranks
        limit_s = patience_of(arrival_timeout_s)
    each: int | None = None
    with contextlib.suppress(ParamError):
        each = ranks_per_node_of(ranks_per_node)
    held = Holdings(Group(comm, limit_s, each))
    try:
        held.control = Control(held.group)
        enter(held)
        tell_once(held.ticket.members[0], leave)
        yield held
    except BaseException as error:
        together = is_agreed(error) and not held.group.stalled
        if held.control is not None and not together:
            held.control.exchange.leave(type(error).__name__)
        held.over, held.group.stalled = True, not together
        if held.whole:
            calls = held.calls
            del held.calls
            calls.let_go()
        elif held.control is not None:
            held.control.close()
        held.control = None
        if together and held.backend is not None:
            held.backend.close()
        elif held.ticket.key and not together:
            keep(held)
        held.group.free()
        raise


def complete(
    held: Holdings, started: Started, machine: Machine | None, settings: Settings, times: Times, home: Home
) -> Calls:
    """Make the rest of what a session holds, by what its callers have set. Collective."""
    group, backend, counters = held.group, started.backend, Counters()
    machine = obtain_machine(group, backend, started.identities, machine)
    if group.num_nodes > 1:
        backend.transport = MpiTransport(group)
    backend.tune_products(tune=settings.tune_products)  # not in the measurement, which other sessions use too
    store = MatrixStore(group, backend, counters, home)
    uuids = [identity.uuid for identity in started.identities]
    sharing = uuids.count(uuids[group.rank])
    budget = Budget(group, backend, machine, settings.device_memory, sharing, settings.host_memory)
    maker = PlanMaker(group, counters, machine, budget, verify=settings.verify)
    assert held.control is not None  # it was made first
    held.calls = Calls(
        group,
        backend,
        store,
        counters,
        maker,
        control=held.control,
        device_key=uuids[group.rank],
        max_plans=settings.max_plans,
        timeout_s=times[0],
        arrival_timeout_s=times[1],
    )
    held.calls.gate.on_close = held.give_back
    return held.calls


def seconds_of(name: str, value: object) -> float:
    """Return a caller's time (s), or raise ParamError for what is none."""
    seconds = real_number(name, value)
    if not seconds > 0:
        raise ParamError(f"{name} = {seconds}: use more than 0 (seconds)")
    return seconds


def ranks_per_node_of(value: object) -> int | None:
    """Return a caller's `ranks_per_node`, or the environment's; None for none. Raise ParamError for what is none."""
    if value is None:
        value = os.environ.get(RANKS_PER_NODE) or None
        if isinstance(value, str):
            if not value.isdecimal():
                raise ParamError(f"{RANKS_PER_NODE} = {value!r} in the environment: use a whole number, or unset it")
            value = int(value)
    if value is None:
        return None
    each = whole_number("ranks_per_node", value)
    if each < 1:
        raise ParamError(f"ranks_per_node = {each} is below 1: leave it out, or name how many ranks are to be a node")
    return each


def patience_of(value: object) -> float | None:
    """Return how long a caller has ranks wait for each other (s), or raise ParamError; None for ever."""
    return None if value is None else seconds_of("arrival_timeout_s", value)


def _bytes(name: str, value: object) -> int:
    """Return a caller's number of bytes, 0 for None."""
    if value is None:
        return 0
    number = byte_count(name, value)
    if number < 1:
        raise ParamError(f"{name} = {number} is below 1: name bytes, or leave it out")
    return number
