"""
A schedule of very many tasks, made, proved, lowered, bound and run: time and memory of each.

    mpiexec -n RANKS python -m mpi4py tests/perf/many_tasks.py [EXTENT [TILE [SCHEDULER [LANES]]]]

The product of two EXTENT×EXTENT matrices of random numbers in tiles of TILE on any backend, with LANES compute lanes on
each rank: 1600 and 16 are a million products. The result is compared with numpy's. Memory is the largest resident set
of rank 0's process so far.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

import uncut_mpi as um
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.verify import verify


def main() -> None:
    """Run and print."""
    comm = MPI.COMM_WORLD
    extent, tile = (int(sys.argv[at]) if len(sys.argv) > at else default for at, default in ((1, 1600), (2, 16)))
    scheduler, lanes = (sys.argv[at] if len(sys.argv) > at else default for at, default in ((3, "uncut"), (4, "8")))
    options = um.ScheduleOptions(scheduler=scheduler, tile=tile, compute_lanes=int(lanes))
    machine = Machine.uniform(comm.size)

    def step(what: str, work: Callable[[], Any]) -> Any:
        started = time.perf_counter()
        result = work()
        if comm.rank == 0:
            seconds = time.perf_counter() - started
            used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
            print(f"{what:20} {seconds:8.2f} s  {used:6.2f} GiB", flush=True)
        return result

    if comm.rank == 0:
        problem = GemmProblem(extent, extent, extent, DType.f64)
        place = Placement.parse("h,h,h")
        schedule = step("make", lambda: plan(problem, place, comm.size, machine, options).schedule)
        print(f"{len(schedule.tasks)} tasks, {len(schedule.encode()) / 2**20:.0f} MiB encoded")
        lowering = step("lower", lambda: lower(schedule))
        step("prove", lambda: verify(schedule))
        step("prove with lists", lambda: verify(schedule, lowering))
        del schedule, lowering
    comm.Barrier()
    with um.Session(comm, machine=machine, timeout_s=600) as session:
        a, b, c = (session.empty_host((extent, extent), order="F") for _ in range(3))
        if comm.rank == 0:
            random = np.random.default_rng(0)
            a.array[...], b.array[...] = random.random((2, extent, extent))
            c.array.fill(np.nan)
        session.barrier()
        with step("plan of the session", lambda: session.plan(a, b, c, options=options)) as planned:
            first = step("first call", planned.execute)
            step("second call", planned.execute)
            if comm.rank == 0:
                error = np.abs(c.array - a.array @ b.array).max()
                print(f"{first.tasks} tasks on rank 0, largest error {error:.2e}")
                assert error < 1e-12 * extent**1.5


if __name__ == "__main__":
    main()
