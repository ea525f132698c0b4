"""
Products with everything on one device and odd extents, aligned in panels or as they are: does the estimate choose well?

    python3 -m mpi4py tests/perf/aligned_products.py MACHINE.json OUT.json

MACHINE.json is a calibration of one GPU like this. Both plans of `kblocks` are called in turns: 15 times each with a
pause of 4 ms before each call, and 15 times each without. Printed are medians of both, what the machine says, and which
plan is chosen.
"""

import contextlib
import dataclasses
import json
import statistics
import sys
import time
from pathlib import Path

import cupy
import numpy as np
from mpi4py import MPI

import uncut_mpi as um
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning import alignment
from uncut_mpi.planning.simulate import simulate

EXTENTS = (1001, 1501, 2001, 2501, 3001, 3501, 4001, 5001)
TYPES = {"f16": np.float16, "tf32": np.float32, "f64": np.float64}
CALLS, PAUSE_S = 15, 0.004
SCALARS = {"alpha": 1.2345, "beta": 1.1154}


def plan_with(session, arrays, dtype, seen):
    """Return a plan for which so much of the cost of alignment is seen."""
    matrices = [session.register(array, root=0, dtype=dtype) for array in arrays]
    usual, alignment._SEEN = alignment._SEEN, seen
    try:
        return session.plan(*matrices, options=um.ScheduleOptions(scheduler="kblocks", devices=(0,)))
    finally:
        alignment._SEEN = usual


def timed(plan, pause_s):
    """Return the seconds of one call after a pause."""
    time.sleep(pause_s)
    start = time.perf_counter()
    plan.execute(**SCALARS)
    return time.perf_counter() - start


def compare(sessions, machine, dtype, extent):
    """Return the times of both plans, measured in turns and simulated, or None if there is but one."""
    arrays = [(cupy.random.random((extent, extent)) - 0.5).astype(TYPES[dtype], order="F") for _ in range(3)]
    # A session keeps its plans, so each way has one of its own.
    every, never, usual = (0.0, float("inf"), alignment._SEEN)
    aligned, as_is, chosen = (
        plan_with(session, arrays, dtype, seen) for session, seen in zip(sessions, (every, never, usual), strict=True)
    )
    chosen = chosen.schedule.digest()
    row = None
    if aligned.schedule.digest() != as_is.schedule.digest():
        for plan in (aligned, as_is) * 4:
            timed(plan, 0.0)
        paused, at_once = (
            list(zip(*((timed(aligned, pause_s), timed(as_is, pause_s)) for _ in range(CALLS)), strict=True))
            for pause_s in (PAUSE_S, 0.0)
        )
        row = {
            "dtype": dtype,
            "extent": extent,
            "chosen": "aligned" if chosen == aligned.schedule.digest() else "as it is",
            "aligned_s": paused[0],
            "as_it_is_s": paused[1],
            "aligned_at_once_s": at_once[0],
            "as_it_is_at_once_s": at_once[1],
            "simulated_s": [simulate(plan.schedule, machine).seconds for plan in (aligned, as_is)],
        }
    return row


def main():
    """Measure and print all."""
    machine = dataclasses.replace(Machine.from_json(Path(sys.argv[1]).read_text()), key="assumed: one like it")
    rows = []
    with contextlib.ExitStack() as stack:
        sessions = [stack.enter_context(um.Session(MPI.COMM_WORLD, machine=machine)) for _ in range(3)]
        for dtype in TYPES:
            for extent in EXTENTS:
                row = compare(sessions, machine, dtype, extent)
                if row is None:
                    continue
                rows.append(row)
                found = (1e6 * statistics.median(value) for name, value in row.items() if name.endswith("_s"))
                paused, as_is_paused, at_once, as_is_at_once = list(found)[:4]
                said = " / ".join(f"{1e6 * one:.0f}" for one in row["simulated_s"])
                print(
                    f"{dtype} {extent}: {paused:.0f} / {as_is_paused:.0f} us, at once {at_once:.0f} / "
                    f"{as_is_at_once:.0f}, simulated {said}: {row['chosen']}",
                    flush=True,
                )
        facts = {"device": sessions[0].device_names[0], "machine": machine.provenance, "rows": rows}
    Path(sys.argv[2]).write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
