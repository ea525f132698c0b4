"""The opening of a session: what it holds is made step by step, and given back if a rank does not come to the end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

from uncut_mpi.api import lifetime
from uncut_mpi.api.calls import Calls
from uncut_mpi.api.control import Control
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.lifetime import Holdings
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.api.matrix import Home
from uncut_mpi.api.measure import obtain_machine
from uncut_mpi.api.plan_maker import Budget, PlanMaker
from uncut_mpi.api.start import Started
from uncut_mpi.errors import ParamError, is_agreed
from uncut_mpi.model.arguments import byte_count, flag, real_number, whole_number
from uncut_mpi.model.machine import Machine
from uncut_mpi.spmd.abort import tell_once
from uncut_mpi.spmd.group import Group

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
def opening(comm: Any, arrival_timeout_s: object) -> Iterator[Holdings]:
    """Yield what a session holds, to be completed in the block; an error of one rank ends the opening on all."""
    limit_s: float | None = None
    with contextlib.suppress(ParamError):  # raised in the block, on all ranks
        limit_s = patience_of(arrival_timeout_s)
    held = Holdings(Group(comm, limit_s))
    try:
        held.control = Control(held.group)
        lifetime.enter(held)
        tell_once(held.ticket.members[0], lifetime.leave)
        yield held
    except BaseException as error:
        together = is_agreed(error) and not held.group.stalled
        if held.control is not None and not together:
            held.control.exchange.leave(type(error).__name__)
        if held.calls is not None:
            held.calls.let_go()
        elif held.control is not None:
            held.control.close()
        held.whole, held.over, held.calls, held.control = False, True, None, None
        if together and held.backend is not None:
            held.backend.close()
        elif held.ticket.key and not together:
            lifetime.keep(held)
        held.group.free()
        raise


def complete(
    held: Holdings, started: Started, machine: Machine | None, settings: Settings, times: Times, home: Home
) -> Calls:
    """Make the rest of what a session holds, by what its callers have set. Collective."""
    group, backend, counters = held.group, started.backend, Counters()
    machine = obtain_machine(group, backend, started.identities, machine)
    backend.tune_products(tune=settings.tune_products)  # not in the measurement, which other sessions use too
    store = MatrixStore(group, backend, counters, home)
    uuids = [identity.uuid for identity in started.identities]
    sharing = uuids.count(uuids[group.rank])
    budget = Budget(group, backend, machine, settings.device_memory, sharing, settings.host_memory)
    maker = PlanMaker(group, counters, machine, budget, verify=settings.verify)
    assert held.control is not None  # it was made first
    held.calls = calls = Calls(
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
    calls.gate.on_close = held.give_back
    held.whole = True
    return calls


def seconds_of(name: str, value: object) -> float:
    """Return a caller's time (s), or raise ParamError for what is none."""
    seconds = real_number(name, value)
    if not seconds > 0:
        raise ParamError(f"{name} = {seconds}: use more than 0 (seconds)")
    return seconds


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
