"""
Prints how long planning, lowering and simulating take: ``python tests/perf/planning_speed.py``.

The best of five runs each, on one core; "plan" makes the schedule, "lower" every rank's operation
list, "digest" encodes and hashes it; "simulate" runs it on a machine with ports, with millions of tasks per second.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import device_ports, duplex_ports
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.lower import Lowering, lower
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.planning.simulate import simulate

CASES = (
    # extent, tile, ranks, placement, limit of plan + lower (s), or 0
    (16384, 2048, 8, "h,h,h", 0.1),
    (16384, 2048, 8, "0,0,0", 0.1),
    (32768, 2048, 16, "h,h,h", 1.0),
    (32768, 2048, 16, "0,0,0", 1.0),
    (16384, 512, 8, "h,h,h", 0.0),
    (65536, 0, 8, "h,h,h", 0.0),
    (16384, 1024, 61, "h,h,h", 0.0),
    (32768, 2048, 64, "0,0,0", 0.0),
)


def best(function: Callable[[], Any], repeats: int = 5) -> tuple[float, Any]:
    """Return the shortest time in seconds, and the last result."""
    shortest, result = float("inf"), None
    for _ in range(repeats):
        started = time.perf_counter()
        result = function()
        shortest = min(shortest, time.perf_counter() - started)
    return shortest, result


def lower_all(schedule: Schedule, ranks: int) -> Lowering:
    """Return the lowering, with every rank's list cut from it once."""
    lowering = lower(schedule)
    for rank in range(ranks):
        lowering.rank_list(rank)
    return lowering


def main() -> None:
    """Print the table."""
    print(
        f"{'problem':28} {'options':10} {'tasks':>8} {'plan_s':>8} {'lower_s':>8} {'digest_s':>8} {'simulate_s':>10} "
        f"{'Mtasks/s':>8}  limit_s"
    )
    for extent, tile, ranks, place, limit in CASES:
        problem = GemmProblem(extent, extent, extent, DType.f64)
        machine = Machine.uniform(ranks, memory_bytes=10**12)
        host = [(ranks, rank) for rank in range(ranks)], [(rank, ranks) for rank in range(ranks)]
        ports = device_ports(range(ranks), 400, 400)
        ports += duplex_ports("host", *host, in_gb_per_s=185, out_gb_per_s=147, both_gb_per_s=(95, 95))
        shared = dataclasses.replace(machine, ports=tuple(ports))
        for name, batch in (("default", True), ("no batch", False)):
            options = ScheduleOptions(scheduler="uncut", tile=tile, batch=batch)
            arguments = (problem, Placement.parse(place), ranks, machine, options)
            plan_s, planned = best(lambda: plan(*arguments))  # noqa: B023
            schedule = planned.schedule
            lower_s, _ = best(lambda: lower_all(schedule, ranks))  # noqa: B023
            digest_s, _ = best(schedule.digest)
            simulate_s, _ = best(lambda: simulate(schedule, shared))  # noqa: B023
            verdict = "" if not limit else f"{limit:g} {'met' if plan_s + lower_s < limit else 'MISSED'}"
            title = f"{extent}^3 T={schedule.tile} {place} on {ranks}"
            print(
                f"{title:28} {name:10} {len(schedule.tasks):8} {plan_s:8.4f} {lower_s:8.4f} {digest_s:8.4f} "
                f"{simulate_s:10.4f} {len(schedule.tasks) / simulate_s / 1e6:8.2f}  {verdict}"
            )


if __name__ == "__main__":
    main()
