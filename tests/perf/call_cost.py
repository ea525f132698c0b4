"""
What a repeated call of a tiny product costs: 64x64x64 in f64, all on the device of rank 0.

    mpiexec -n N python3 -m mpi4py tests/perf/call_cost.py OUT.jsonl [LIBRARY]

Appends a line to OUT.jsonl: medians and quartiles over 2,000 calls of `Session.gemm` and of `GemmPlan.execute`, and the
parts of a call of rank 0 that are spent issuing and draining. With 4 ranks the machine is the shipped h200-4x and they
may share a device: its plan is rank 0's alone, as on a node with 4. LIBRARY is the folder of another version.
"""

import json
import statistics
import sys
import time

from mpi4py import MPI

if len(sys.argv) > 2:
    # An editable installation comes first otherwise.
    sys.meta_path[:] = [one for one in sys.meta_path if "ditable" not in type(one).__module__]
    sys.path.insert(0, sys.argv[2])

import numpy as np

import uncut_mpi as um
from uncut_mpi.model.machine_files import load_machine

SIZE, WARM_UP, CALLS = 64, 300, 2000
SCALARS = {"alpha": 1.2345, "beta": 1.1154}


def times_of(call):
    """Return what each of many calls took (s)."""
    for _ in range(WARM_UP):
        call()
    found = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        found.append(time.perf_counter() - start)
    return found


def main():
    """Measure and append."""
    comm = MPI.COMM_WORLD
    known = {"machine": load_machine("h200-4x"), "allow_shared_gpu": True} if comm.size == 4 else {}
    with um.Session(comm, **known) as session:
        a, b, c = (session.empty_device((SIZE, SIZE), np.float64, rank=0, order="F") for _ in range(3))
        for matrix in (a, b, c):
            if matrix.array is not None:
                matrix.array.fill(0.5)
        facts = {"library": sys.argv[2] if len(sys.argv) > 2 else "", "ranks": comm.size}
        facts["device"] = session.device_names[0]
        samples = {"gemm": times_of(lambda: session.gemm(a, b, c, **SCALARS))}
        with session.plan(a, b, c) as plan:
            results = []
            samples["execute"] = times_of(lambda: results.append(plan.execute(**SCALARS)))
        samples["issue"], samples["drain"] = ([getattr(one, f"{of}_s") for one in results] for of in ("issue", "drain"))
        for name, values in samples.items():
            facts[f"{name}_s"] = statistics.quantiles(values[-CALLS:], n=4)
    if comm.rank == 0:
        with open(sys.argv[1], "a") as file:
            file.write(json.dumps(facts) + "\n")
        text = ", ".join(f"{name} {1e6 * facts[f'{name}_s'][1]:.1f}" for name in samples)
        print(f"{facts['library'] or 'this version'}, {comm.size} ranks: {text} us", flush=True)


if __name__ == "__main__":
    main()
