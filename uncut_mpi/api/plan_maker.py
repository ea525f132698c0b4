"""The making of plans: rank 0 plans and tells all ranks, each of which makes the same values of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final, NamedTuple

from uncut_mpi.api.budget import Budget
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.keys import PlanKey
from uncut_mpi.api.plans import Plan, PlanSummary, Trial
from uncut_mpi.errors import CapacityError, PlanError, UncutError
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning.chunks import Chunks
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import changed
from uncut_mpi.planning.planner import cut, expected_seconds, plan_several
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.verify import verify
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import Group

_MOST_CHOICES: Final = 256
"""Calls of which it is kept which layout of C is the fastest, since that takes several plans."""


class Room(NamedTuple):
    """What each rank may use of its device's memory, and of host memory for copies (bytes)."""

    device_memory: int
    host_memory: int


class PlanMaker:
    """
    Makes the plans of a session.

    Parameters
    ----------
    machine : Machine
        What plans are made with.
    budget : Budget
        What they may use of memory.
    verify : bool
        Whether to prove every schedule, and what was lowered from it.
    """

    def __init__(self, group: Group, counters: Counters, machine: Machine, budget: Budget, *, verify: bool) -> None:
        self._group, self._counters, self.machine, self._verify = group, counters, machine, verify
        self._budget = budget
        self._fastest: dict[tuple[PlanKey, ...], int] = {}

    def make(self, key: PlanKey, held: int, *, whole: bool = False) -> Plan | Trial | Chunks:
        """
        Return a new plan, or those to be tried, or in which chunks to do it. Collective; all ranks raise as rank 0.

        Parameters
        ----------
        key : PlanKey
            What the plan is for.
        held : int
            Bytes of device memory that this rank has from earlier plans.
        whole : bool, optional
            Whether it is done by one schedule, however large.
        """
        group, counters = self._group, self._counters
        room = self._room((key,), held)
        before = group.bytes_broadcast
        told = group.from_root(lambda: self._plan_on_root(key, room, whole=whole))
        counters.schedule_bytes_broadcast += group.bytes_broadcast - before
        if isinstance(told, Chunks):
            return told
        with agreement.collective(group, "decoding the schedule"):
            plans = tuple(Plan.of(key, about, Schedule.decode(encoded), group.rank) for about, encoded in told)
        counters.planner_calls += 1
        return plans[0] if len(plans) == 1 else Trial(plans, ((),) * len(plans))

    def fastest(self, keys: Sequence[PlanKey], held: int) -> int:
        """
        Return the number of the key whose plan is predicted to take the least time, the first of equals. Collective.

        Parameters
        ----------
        keys : sequence of PlanKey
            What the plans would be for, all with the same options.
        held : int
            As for `make`.

        Raises
        ------
        UncutError
            On all ranks, what rank 0 meets with the first one, if there is a plan for none.
        """
        asked = tuple(keys)
        if asked not in self._fastest:
            room = self._room(asked, held)
            if len(self._fastest) >= _MOST_CHOICES:
                self._fastest.clear()
            self._fastest[asked] = self._group.from_root(lambda: self._fastest_on_root(asked, room))
        return self._fastest[asked]

    def _room(self, keys: Sequence[PlanKey], held: int) -> Room:
        """Return what plans with the same options may use. Collective."""
        options = keys[0].options
        copied = any(key.private for key in keys)
        of_devices, of_host = self._budget.agree(options.device_memory, held), options.host_memory
        if copied or of_host or self._budget.host_memory:  # reject an unavailable budget even if unused
            most = self._budget.agree_host(of_host)
            of_host = most if copied else of_host
        return Room(of_devices, of_host)

    def _fastest_on_root(self, keys: Sequence[PlanKey], room: Room) -> int:
        times: dict[PlanKey, float] = {}
        refusals: list[UncutError] = []
        for key in dict.fromkeys(keys):
            try:
                times[key] = expected_seconds(self._setting(key, room))
            except (PlanError, CapacityError) as error:  # another one may have a plan
                refusals.append(error)
        if not times:
            raise refusals[0]
        return keys.index(min(times, key=times.__getitem__))

    def _setting(self, key: PlanKey, room: Room) -> Setting:
        options = changed(key.options, device_memory=room.device_memory, host_memory=room.host_memory)
        return Setting.of(key.problem, key.placement, self._group.size, self.machine, options, key.private, key.files)

    def _plan_on_root(self, key: PlanKey, room: Room, *, whole: bool) -> Chunks | list[tuple[PlanSummary, bytes]]:
        started = time.perf_counter()
        setting = self._setting(key, room)
        chunks = None if whole else cut(setting)
        if chunks is not None:
            return chunks
        several = plan_several(setting)
        plan_s = time.perf_counter() - started
        if self._verify:
            for planned in several:
                verify(planned.schedule, lower(planned.schedule))
        return [
            (PlanSummary.of(planned, self.machine, key.options, plan_s, len(several)), planned.schedule.encode())
            for planned in several
        ]
