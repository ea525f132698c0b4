"""
Calls of one rank with few and with many products of the same cube: what does the next one cost, and what is expected?

    python3 -m mpi4py tests/perf/many_products.py MACHINE.json OUT.json

MACHINE.json is a calibration of one GPU, of whichever node. The scheduler is `uncut` with everything on the device, so
that nothing is copied and no product waits for anything but C: one lane, and two. Each call follows a pause of 4 ms
(medians of nine), follows another at once (of twelve), or is traced, which adds two events to each task (of four).
"""

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
from uncut_mpi.planning.schedule import Kind
from uncut_mpi.planning.simulate import simulate

SIZES = {"float64": (2048, 3072, 4096, 6144), "float32": (2048, 3072, 4096, 6144), "float16": (4096, 6144, 8192, 12288)}
PARTS, LANES, PAUSE_S = (1, 2, 3, 4, 6), (1, 2), 0.004
COLD_CALLS, HOT_CALLS, TRACED_CALLS = 9, 12, 4
SCALARS = {"alpha": 1.2345, "beta": 1.1154}


def measure(session, matrices, machine, tile, lanes):
    """Return what calls with products of one size take, and what the machine says of them."""
    options = um.ScheduleOptions(scheduler="uncut", devices=(0,), tile=tile, compute_lanes=lanes)
    with session.plan(*matrices, reads_c=True, options=options) as plan:
        products = plan.schedule.tasks["kind"] == Kind.GEMM

        def seconds(pause_s):
            time.sleep(pause_s)
            start = time.perf_counter()
            plan.execute(**SCALARS)
            return time.perf_counter() - start

        def traced():
            time.sleep(PAUSE_S)
            trace = plan.trace(**SCALARS)
            return float((np.array(trace.end_s) - np.array(trace.start_s))[products].sum())

        for _ in range(4):
            seconds(0.0)
        return {
            "products": int(products.sum()),
            "with_pauses_s": statistics.median(seconds(PAUSE_S) for _ in range(COLD_CALLS)),
            "traced_products_s": statistics.median(traced() for _ in range(TRACED_CALLS)),
            "back_to_back_s": statistics.median(seconds(0.0) for _ in range(HOT_CALLS)),
            "simulated_s": simulate(plan.schedule, machine).seconds,
        }


def main():
    """Measure and print all."""
    machine = dataclasses.replace(Machine.from_json(Path(sys.argv[1]).read_text()), key="assumed: one like it")
    rows = []
    with um.Session(MPI.COMM_WORLD, machine=machine) as session:
        for dtype, sizes in SIZES.items():
            for size in sizes:
                matrices = [session.empty_device((size, size), np.dtype(dtype), rank=0, order="F") for _ in range(3)]
                for matrix in matrices:
                    matrix.array[...] = cupy.random.random((size, size)).astype(dtype) - cupy.asarray(0.5, dtype)
                for tile in (size // parts for parts in PARTS):
                    for lanes in LANES:
                        found = measure(session, matrices, machine, tile, lanes)
                        rows.append({"dtype": dtype, "size": size, "tile": tile, "lanes": lanes, **found})
                        times = ", ".join(
                            f"{name[:-2].replace('_', ' ')} {1e6 * value:.0f}"
                            for name, value in found.items()
                            if name != "products"
                        )
                        print(f"{dtype} {size}, {found['products']} on {lanes}: {times} us", flush=True)
                for matrix in matrices:
                    session.release(matrix)
        facts = {"device": session.device_names[0], "machine": machine.provenance, "rows": rows}
    Path(sys.argv[2]).write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
