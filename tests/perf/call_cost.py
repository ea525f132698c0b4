"""
What a repeated call of a tiny product costs, this version beside another one: 64x64x64 in f64, all on rank 0's device.

    python3 tests/perf/call_cost.py LIBRARY OUT.jsonl mpiexec -n N

LIBRARY is the folder of the other version (`pip install --target`). Each version is a job of its own, started by the
command that ends the line; rank r of both is pinned to one core. They take turns, of 200 calls of `Session.gemm` and
200 of `GemmPlan.execute` each, so that cores and clocks are the same for both; whoever waits for its turn sleeps.
OUT.jsonl gets a line for each version with the medians of each turn: of calls, and of the parts of an execution on rank
0 that are spent issuing and draining. Printed are medians over turns, and that of the ratio with its quartiles. With 4
ranks the machine is the shipped h200-4x and they may share a device: its plan is rank 0's alone, as on a node with 4.
"""

import contextlib
import json
import operator
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

SIZE, TURNS, CALLS = 64, 100, 200
FIRST = 20  # calls of a turn that are not counted: caches, and the device, come from the other job
ALPHA, BETA = 1.2345, 1.1154


def times_of(call):
    """Return what each of many calls took (s), and what they returned."""
    found, results = [], []
    for _ in range(CALLS):
        start = time.perf_counter()
        results.append(call())
        found.append(time.perf_counter() - start)
    return found, results


def take_turns(folder, job, rank, work):
    """Do some work in turns with the same rank of the other job; the first turn begins when both are ready."""
    pipes = [f"{folder}/{which}.{rank}" for which in (job, 1 - job)]
    for pipe in pipes:
        with contextlib.suppress(FileExistsError):
            os.mkfifo(pipe)
    own, other = (os.open(pipe, os.O_RDWR) for pipe in pipes)
    if job == 1:
        os.write(other, b"x")
    for _ in range(TURNS):
        os.read(own, 1)
        work()
        os.write(other, b"x")
    if job == 0:
        os.read(own, 1)  # or its end would be in the other's last turn


def measure(library, folder, job, cores):
    """Be a rank of one version, whose rank 0 leaves the medians of its turns in the folder."""
    if library:
        # An editable installation comes first otherwise.
        sys.meta_path[:] = [one for one in sys.meta_path if "ditable" not in type(one).__module__]
        sys.path.insert(0, library)
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    os.sched_setaffinity(0, {cores[comm.rank % len(cores)]})  # before any thread is made

    import numpy as np

    import uncut_mpi as um
    from uncut_mpi.model.machine_files import load_machine

    known = {"machine": load_machine("h200-4x"), "allow_shared_gpu": True} if comm.size == 4 else {}
    turns = {"gemm": [], "execute": [], "issue": [], "drain": []}
    with um.Session(comm, **known) as session:
        a, b, c = (session.empty_device((SIZE, SIZE), np.float64, rank=0, order="F") for _ in range(3))
        for matrix in (a, b, c):
            if session.rank == 0:
                matrix.array.fill(0.5)
        with session.plan(a, b, c) as plan:

            def work():
                calls, _ = times_of(lambda: session.gemm(a, b, c, alpha=ALPHA, beta=BETA))
                executions, results = times_of(lambda: plan.execute(ALPHA, BETA))
                parts = ([getattr(one, f"{of}_s") for one in results] for of in ("issue", "drain"))
                for name, samples in zip(turns, (calls, executions, *parts), strict=True):
                    turns[name].append(statistics.median(samples[FIRST:]))

            work()
            take_turns(folder, job, comm.rank, work)
        facts = {"library": str(pathlib.Path(um.__file__).parents[1]), "device": session.device_names[0]}
    if comm.rank == 0:
        facts |= {"ranks": comm.size, "turns_s": {name: samples[1:] for name, samples in turns.items()}}
        pathlib.Path(folder, f"{job}.json").write_text(json.dumps(facts))


def main(library, out, *command):
    """Run both versions, print how they compare, and append that."""
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        starts = ([library, folder, 0, cores], ["", folder, 1, cores])
        jobs = [
            subprocess.Popen([*command, sys.executable, "-m", "mpi4py", __file__, json.dumps(start)])
            for start in starts
        ]
        while any(job.poll() is None for job in jobs):
            if any(job.poll() for job in jobs):
                for job in jobs:
                    job.terminate()
            time.sleep(0.1)
        if any(job.returncode for job in jobs):
            sys.exit("a job has failed")
        facts = [json.loads(pathlib.Path(folder, f"{job}.json").read_text()) for job in (0, 1)]
    with open(out, "a") as file:
        file.writelines(json.dumps(one) + "\n" for one in facts)
    before, after = (one["turns_s"] for one in facts)
    print(f"{facts[0]['ranks']} ranks, {facts[0]['device']}: {facts[0]['library']}, then {facts[1]['library']}")
    for name in [name for name in before if all(before[name])]:  # the host backend has nothing to drain
        low, ratio, high = statistics.quantiles(map(operator.truediv, after[name], before[name]), n=4)
        old, new = (1e6 * statistics.median(one[name]) for one in (before, after))
        print(f"{name:8} {old:8.2f} -> {new:8.2f} us, ratio {ratio:.4f} ({low:.4f} to {high:.4f})")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        measure(*json.loads(sys.argv[1]))
    else:
        main(*sys.argv[1:])
