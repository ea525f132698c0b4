"""
Prints how long planning, lowering and simulating take: ``python tests/perf/planning_speed.py``.

The best of five runs each, on one core; "plan" makes the schedule, "lower" every rank's operation
list, "lists" proves these, "digest" encodes and hashes the schedule, "verify" proves it; "simulate"
runs it on a machine with ports. Rates are in millions of tasks per second.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import device_ports, duplex_ports
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.planning.verify import verify
from uncut_mpi.planning.verify_lists import verify_lists

UNCUT = ScheduleOptions(scheduler="uncut")
NO_BATCH = ScheduleOptions(scheduler="uncut", batch=False)
CYCLIC = ScheduleOptions(scheduler="cyclic")
KBLOCKS = ScheduleOptions(scheduler="kblocks", blocking=Blocking(first=64, block=64, columns=1, rows=1))

CASES = (
    # m and n, k, tile, ranks, placement, options, limit of plan + lower (s), or 0
    (16384, 16384, 2048, 8, "h,h,h", (UNCUT, NO_BATCH), 0.1),
    (16384, 16384, 2048, 8, "0,0,0", (UNCUT, NO_BATCH), 0.1),
    (32768, 32768, 2048, 16, "h,h,h", (UNCUT, NO_BATCH), 1.0),
    (32768, 32768, 2048, 16, "0,0,0", (UNCUT, NO_BATCH), 1.0),
    (16384, 16384, 512, 8, "h,h,h", (UNCUT, NO_BATCH), 0.0),
    (65536, 65536, 0, 8, "h,h,h", (UNCUT, NO_BATCH), 0.0),
    (16384, 16384, 1024, 61, "h,h,h", (UNCUT, NO_BATCH), 0.0),
    (32768, 32768, 2048, 64, "0,0,0", (UNCUT, NO_BATCH), 0.0),
    (16384, 16384, 170, 8, "h,h,h", (UNCUT, CYCLIC), 0.0),
    (16384, 16384, 256, 16, "0,0,0", (CYCLIC,), 0.0),
    (4096, 2**22, 0, 8, "0,0,0", (KBLOCKS,), 0.0),
    (4096, 2**22, 0, 8, "h,h,h", (KBLOCKS,), 0.0),
)


def best(function: Callable[[], Any], repeats: int = 5) -> tuple[float, Any]:
    """Return the shortest time in seconds, and the last result."""
    shortest, result = float("inf"), None
    for _ in range(repeats):
        started = time.perf_counter()
        result = function()
        shortest = min(shortest, time.perf_counter() - started)
    return shortest, result


def main() -> None:
    """Print the table."""
    print(
        f"{'problem':32} {'options':14} {'tasks':>8} {'plan_s':>8} {'lower_s':>8} {'Mtasks/s':>8} "
        f"{'lists_s':>8} {'Mtasks/s':>8} {'digest_s':>8} {'verify_s':>8} {'Mtasks/s':>8} "
        f"{'simulate_s':>10} {'Mtasks/s':>8}  limit_s"
    )
    for extent, k, tile, ranks, place, choices, limit in CASES:
        problem = GemmProblem(extent, extent, k, DType.f64)
        machine = Machine.uniform(ranks, memory_bytes=10**14)
        host = [(ranks, rank) for rank in range(ranks)], [(rank, ranks) for rank in range(ranks)]
        ports = device_ports(range(ranks), 400, 400)
        ports += duplex_ports("host", *host, in_gb_per_s=185, out_gb_per_s=147, both_gb_per_s=(95, 95))
        shared = dataclasses.replace(machine, ports=tuple(ports))
        for choice in choices:
            options = dataclasses.replace(choice, tile=tile)
            arguments = (problem, Placement.parse(place), ranks, machine, options)
            plan_s, planned = best(functools.partial(plan, *arguments))
            schedule = planned.schedule
            tasks = len(schedule.tasks)
            lower_s, lowering = best(functools.partial(lower, schedule))
            lists = [lowering.rank_list(rank) for rank in range(ranks)]
            lists_s, _ = best(functools.partial(verify_lists, schedule, lists))
            digest_s, _ = best(schedule.digest)
            verify_s, _ = best(functools.partial(verify, schedule))
            simulate_s, _ = best(functools.partial(simulate, schedule, shared))
            verdict = "" if not limit else f"{limit:g} {'met' if plan_s + lower_s < limit else 'MISSED'}"
            title = f"{extent}^2 {k} T={schedule.tile} {place} on {ranks}"
            name = str(options.scheduler) + ("" if options.batch else " no batch")
            print(
                f"{title:32} {name:14} {tasks:8} {plan_s:8.4f} {lower_s:8.4f} "
                f"{tasks / lower_s / 1e6:8.2f} {lists_s:8.4f} {tasks / lists_s / 1e6:8.2f} {digest_s:8.4f} "
                f"{verify_s:8.4f} {tasks / verify_s / 1e6:8.2f} "
                f"{simulate_s:10.4f} {tasks / simulate_s / 1e6:8.2f}  {verdict}"
            )


if __name__ == "__main__":
    main()
