"""The making of plans: rank 0 plans and tells all ranks, each of which makes the same values of it."""

from __future__ import annotations

import time

from uncut_mpi.api import plan_message
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.plans import Plan, PlanKey
from uncut_mpi.api.trials import Trial
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.planner import plan_several
from uncut_mpi.planning.verify import verify
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import Group


class PlanMaker:
    """
    Makes the plans of a session.

    Parameters
    ----------
    machine : Machine
        What plans are made with.
    verify : bool
        Whether to prove every schedule, and what was lowered from it.
    """

    def __init__(self, group: Group, counters: Counters, machine: Machine, *, verify: bool) -> None:
        self._group, self._counters, self._machine, self._verify = group, counters, machine, verify

    def make(self, key: PlanKey) -> Plan | Trial:
        """Return a new plan, or those to be tried. Collective; raises on all ranks what rank 0 meets."""
        group, counters = self._group, self._counters
        before = group.bytes_broadcast
        data = agreement.from_root(group, lambda: self._plan_on_root(key))
        with agreement.collective(group, "decoding the schedule"):
            plans = tuple(Plan.of(key, *decoded, group.rank) for decoded in plan_message.decode(data))
        counters.planner_calls += 1
        counters.schedule_bytes_broadcast += group.bytes_broadcast - before
        return plans[0] if len(plans) == 1 else Trial(plans, ((),) * len(plans))

    def _plan_on_root(self, key: PlanKey) -> bytes:
        started = time.perf_counter()
        several = plan_several(key.problem, key.placement, self._group.size, self._machine, key.options, key.private)
        plan_s = time.perf_counter() - started
        if self._verify:
            for planned in several:
                verify(planned.schedule, lower(planned.schedule))
        return plan_message.encode(several, key.options, plan_s)
