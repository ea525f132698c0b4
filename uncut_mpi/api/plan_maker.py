"""The making of plans: rank 0 plans and tells all ranks, each of which makes the same values of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import numpy as np

from uncut_mpi.api.counters import Counters
from uncut_mpi.api.keys import PlanKey
from uncut_mpi.api.neighbours import Neighbours
from uncut_mpi.api.plans import Plan, PlanSummary, Told, Trial
from uncut_mpi.api.searches import Better
from uncut_mpi.device.interface import Backend
from uncut_mpi.errors import CapacityError, PlanError, UncutError, agreed
from uncut_mpi.free_memory import available_bytes, usual_room
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning.chunks import Chunks
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import SEARCHED, ScheduleOptions, changed
from uncut_mpi.planning.planner import Decision, expected_seconds, plans_for_calls, remade
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.verify import verify
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.agreement import by_rank
from uncut_mpi.spmd.group import Group
from uncut_mpi.units import bytes_text

_T = TypeVar("_T")

USUAL_FRACTION: Final = 0.8
"""What of the free memory plans use where nobody says: the program and libraries take some later."""

STEPS: Final = 16
"""The usual budget is a multiple of this part of a device's memory, so that plans are the same from run to run."""


class Budget:
    """
    How many bytes of memory each rank's part of a plan may have, beside the caller's matrices.

    Parameters
    ----------
    group, backend, machine
        Those of the session.
    device_memory, host_memory : int
        What its caller allows (bytes); 0: four fifths of what is free, and a rank's share of half of it. Where devices
        take host memory, the first is of what the second leaves.
    sharing : int
        Ranks that use this rank's device.
    """

    def __init__(
        self, group: Group, backend: Backend, machine: Machine, device_memory: int, sharing: int, host_memory: int = 0
    ) -> None:
        self._group, self._backend, self._sharing = group, backend, sharing
        self.device_memory, self.host_memory = device_memory, host_memory
        self._step = max(1, int(machine.memory_bytes.min()) // STEPS)

    def agree(self, asked: int, held: int) -> int:
        """
        Return the budget of a plan that is about to be made, the same on all ranks. Collective.

        Parameters
        ----------
        asked : int
            What its caller allows (bytes), 0 for the session's.
        held : int
            Bytes that this rank has from earlier plans, which this one may use too.

        Raises
        ------
        CapacityError
            On all ranks, if a rank has less than what was asked for.
        """
        free = self._of_all(self._backend.memory()[0] // self._sharing + held)
        asked = asked or self.device_memory
        least = min(free)
        if asked > least:
            raise agreed(
                CapacityError(
                    f"device_memory = {bytes_text(asked)} was asked for, and rank {free.index(least)} has "
                    f"{bytes_text(least)} ({by_rank([bytes_text(one) for one in free])}): ask for less, free device "
                    "memory, or leave it out"
                )
            )
        usual = int(USUAL_FRACTION * (least - usual_room(least) * self._backend.takes_host_memory))
        return asked or usual // self._step * self._step or usual

    def agree_host(self, asked: int, held: int) -> int:
        """
        Return what each rank may use of host memory for copies, the same on all ranks. Collective.

        Parameters
        ----------
        asked : int
            What the plan's caller allows (bytes), 0 for the session's.
        held : int
            As for `agree`, of host memory.

        Raises
        ------
        CapacityError
            On all ranks, if a rank's share of what is free is less than what was asked for.
        """
        free = min(self._of_all(available_bytes()[0] // self._group.size + held))
        asked = asked or self.host_memory
        if asked > free:
            raise agreed(
                CapacityError(
                    f"host_memory = {bytes_text(asked)} was asked for, and each of {self._group.size} ranks has "
                    f"{bytes_text(free)} of the host memory that is free: ask for less, free some, or leave it out"
                )
            )
        return asked or usual_room(free)

    def _of_all(self, nbytes: int) -> list[int]:
        numbers: list[int] = self._group.allgather_bytes(np.array([nbytes], np.int64), "free memory")[:, 0].tolist()
        return numbers


_MOST_CHOICES: Final = 256
"""Calls of which it is kept which layout of C is the fastest, since that takes several plans."""


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

    Attributes
    ----------
    machine, verify
        The same.
    neighbours : Neighbours
        What searches have chosen, on rank 0.
    """

    def __init__(self, group: Group, counters: Counters, machine: Machine, budget: Budget, *, verify: bool) -> None:
        self._group, self._counters, self.machine, self.verify = group, counters, machine, verify
        self._budget = budget
        self.neighbours = Neighbours()
        self._fastest: dict[tuple[PlanKey, ...], int] = {}

    def make(self, key: PlanKey, held: tuple[int, int], *, whole: bool = False) -> Plan | Trial | Chunks:
        """
        Return a new plan, or those to be tried, or in which chunks to do it. Collective; all ranks raise as rank 0.

        Parameters
        ----------
        key : PlanKey
            What the plan is for.
        held : (int, int)
            Bytes that this rank has from earlier plans: of its device's memory and of host memory.
        whole : bool, optional
            Whether it is done by one schedule, however large.
        """
        options = self._options((key,), held)
        made: list[Schedule] = []  # on rank 0, which need not read what it has written
        told = self._from_root(lambda: self._plan_on_root(key, options, made, whole=whole))
        if isinstance(told, Chunks):
            return told
        plans = self._as_told(key, options, told, made)
        return plans[0] if len(plans) == 1 else Trial(plans, ((),) * len(plans))

    def successor(self, plan: Plan, better: Better | None) -> Plan:
        """Return the better plan that rank 0 has found beside the calls of one; None on the others. Collective."""

        def of_root() -> Told:
            assert better is not None  # it has said so
            self.neighbours.add(plan.key, better.chosen)
            return better.told

        told = [self._from_root(of_root)]
        if better is None:
            return self._as_told(plan.key, plan.options, told, [])[0]
        return self._as_told(plan.key, plan.options, told, [better.plan.schedule], (better.plan,))[0]

    def _from_root(self, function: Callable[[], _T]) -> _T:
        """Return what rank 0 tells of schedules, and count its bytes. Collective."""
        before = self._group.bytes_broadcast
        found: _T = self._group.from_root(function)
        self._counters.schedule_bytes_broadcast += self._group.bytes_broadcast - before
        return found

    def _as_told(
        self,
        key: PlanKey,
        options: ScheduleOptions,
        told: list[Told],
        made: list[Schedule],
        ready: tuple[Plan, ...] = (),
    ) -> tuple[Plan, ...]:
        """
        Return the plans that rank 0 tells. Collective.

        There schedules are `made`, and plans may be `ready`. What the others make is the same.
        """
        group = self._group

        def plans(ways: Callable[[], list[Schedule]]) -> tuple[Plan, ...]:
            with agreement.collective(group, "making the schedule"):
                if ready:
                    return ready
                several = zip(told, made or ways(), strict=True)
                return tuple(Plan.of(key, about, schedule, group.rank, options) for (about, _), schedule in several)

        def as_told() -> list[Schedule]:
            setting = self._setting(key, options)
            return [_decoded(one, key) if isinstance(one, bytes) else remade(setting, one) for _, one in told]

        several = plans(as_told)
        if any(isinstance(one, Decision) for _, one in told):
            same = all(one.schedule.digest() == one.summary.digest for one in several)
            if not group.allgather_bytes(np.array([same])).all():
                # Processors are not alike, and one rounds otherwise in a scheduler that weighs times.
                encoded = self._from_root(lambda: [one.encode() for one in made])
                several = plans(lambda: [_decoded(one, key) for one in encoded])
        self._counters.planner_calls += 1
        return several

    def fastest(self, keys: Sequence[PlanKey], held: tuple[int, int]) -> int:
        """
        Return the number of the key whose plan is predicted to take the least time, the first of equals. Collective.

        Plans are by rule, unless the options say how far to search: the matrix that is made for the first call stays.

        Parameters
        ----------
        keys : sequence of PlanKey
            What the plans would be for, all with the same options.
        held : (int, int)
            As for `make`.

        Raises
        ------
        UncutError
            On all ranks, what rank 0 meets with the first one, if there is a plan for none.
        """
        asked = tuple(keys)
        if asked not in self._fastest:
            options = self._options([key.searched(key.options.search or "rule") for key in asked], held)
            if len(self._fastest) >= _MOST_CHOICES:
                self._fastest.clear()
            self._fastest[asked] = self._group.from_root(lambda: self._fastest_on_root(asked, options))
        return self._fastest[asked]

    def _options(self, keys: Sequence[PlanKey], held: tuple[int, int]) -> ScheduleOptions:
        """Return the options of plans that have the same, with what these may use of memory. Collective."""
        options = keys[0].options
        copied = any(key.private for key in keys)
        of_devices, of_host = self._budget.agree(options.device_memory, held[0]), options.host_memory
        if copied or of_host or self._budget.host_memory:  # reject an unavailable budget even if unused
            most = self._budget.agree_host(of_host, held[1])
            of_host = most if copied else of_host
        return changed(options, device_memory=of_devices, host_memory=of_host)

    def _fastest_on_root(self, keys: Sequence[PlanKey], options: ScheduleOptions) -> int:
        times: dict[PlanKey, float] = {}
        refusals: list[UncutError] = []
        for key in dict.fromkeys(keys):
            try:
                times[key] = expected_seconds(self._setting(key, options))
            except (PlanError, CapacityError) as error:  # another one may have a plan
                refusals.append(error)
        if not times:
            raise refusals[0]
        return keys.index(min(times, key=times.__getitem__))

    def _setting(self, key: PlanKey, options: ScheduleOptions) -> Setting:
        return Setting.of(key.problem, key.placement, self._group.size, self.machine, options, key.private, key.files)

    def _plan_on_root(
        self, key: PlanKey, options: ScheduleOptions, made: list[Schedule], *, whole: bool
    ) -> Chunks | list[Told]:
        started, setting = time.perf_counter(), self._setting(key, options)
        like = self.neighbours.of(key)
        if like is not None:  # each has memory of its own
            like = changed(like, device_memory=options.device_memory, host_memory=options.host_memory)
        chunks, several, calls = plans_for_calls(setting, whole=whole, like=like)
        if chunks is not None:
            return chunks
        plan_s = time.perf_counter() - started
        if self.verify:
            for planned in several:
                verify(planned.schedule, lower(planned.schedule))
        searched = options.scheduler == "auto" and options.search != "rule" and options.metric == "time" and not calls
        if searched and several[0].options.scheduler in SEARCHED:
            self.neighbours.add(key, several[0].options)
        made += [planned.schedule for planned in several]
        about = self.machine, key.options, plan_s, len(several), calls
        return [PlanSummary.of(planned, *about) for planned in several]


def _decoded(encoded: bytes, key: PlanKey) -> Schedule:
    return Schedule.decode(encoded, (key.problem, key.placement))
