"""
Measures many products with many options in one session, for comparison with the model's predictions.

    mpiexec -n 4 python tests/perf/model_data.py CASES.json OUT.json [SECONDS]

CASES.json is a list of {"m", "n", "k", "dtype", "place", "options": ["...", ...], "energy": false, "trace": false};
the options are written as for sweep.py. Writes each sample of the slowest rank, what was planned
(digest, tile, tasks, prediction), with "energy" the joules per call of all devices (NVML's
counter over at least two seconds of calls), and with "trace" when each task of one call ran (us).
Data are random with every bit of the mantissa in use, a block of them repeated. Stops after SECONDS
and says what is missing.
"""

import contextlib
import json
import statistics
import sys
import time

import numpy as np
from mpi4py import MPI
from sweep import options_of

import uncut_mpi as um
from uncut_mpi.command.arguments import parse
from uncut_mpi.command.product import Source, make_product
from uncut_mpi.model.dtypes import DType

WARMUP, REPEAT, REPEAT_S = 2, 7, 0.7
ENERGY_S = 2.0


def pool(dtype):
    """Return one mebi-element of random values with the mantissa in use, the same on every rank."""
    return (np.random.default_rng(7).random(1 << 20) - 0.5).astype(dtype.numpy)


def source(rows, cols, values):
    """Return a matrix in Fortran order whose columns run through `values`, each from another start."""

    def fill(out, lines):
        for at, column in enumerate(range(lines.start, lines.stop)):
            start = column * 7919 % (len(values) - rows) if rows < len(values) else 0
            out[:, at] = values[start : start + rows]

    return Source(rows, cols, "F", fill)


def energy_counter(session):
    """Return a function that reads this rank's device's energy (joules), or None."""
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(session.rank)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
        return lambda: pynvml.nvmlDeviceGetTotalEnergyConsumption(handle) * 1e-3
    return None


def timed(session, plan):
    """Return the seconds of one call on this rank, from a barrier on."""
    session.barrier()
    start = time.perf_counter()
    plan.execute(1.2345, 1.1154)
    return time.perf_counter() - start


def measure(session, plan, joules):
    """Return samples of the slowest rank and joules per call of all devices (0 if not asked for)."""
    for _ in range(WARMUP):
        timed(session, plan)
    once = max(session.gather(timed(session, plan)))
    repeats = REPEAT if once * REPEAT < REPEAT_S * 2 else max(3, int(REPEAT_S / once))
    samples = [timed(session, plan) for _ in range(repeats)]
    slowest = [max(of_ranks) for of_ranks in zip(*session.gather(samples), strict=True)]
    if joules is None:
        return slowest, 0.0
    calls = max(3, int(ENERGY_S / statistics.median(slowest)))
    before = joules()
    for _ in range(calls):
        plan.execute(1.2345, 1.1154)
    session.barrier()
    return slowest, sum(session.gather((joules() - before) / calls))


def microseconds(times):
    """Return times rounded for the file; -1 where there is none."""
    return np.round(1e6 * np.nan_to_num(times, nan=-1e-6), 1).tolist()


def main():
    """Run the cases and print one line for each."""
    with open(sys.argv[1], encoding="utf-8") as file:
        cases = json.load(file)
    limit = time.monotonic() + (float(sys.argv[3]) if len(sys.argv) > 3 else 1e9)
    rows, missing = [], []
    with um.Session(MPI.COMM_WORLD, timeout_s=30) as session:
        counter = energy_counter(session)
        pools = {dtype.name: pool(dtype) for dtype in DType}
        for case in cases:
            name = f"{case['m']}x{case['n']}x{case['k']} {case['dtype']} {case['place']}"
            if max(session.gather(time.monotonic())) > limit:
                missing.append(name)
                continue
            m, n, k = case["m"], case["n"], case["k"]
            arguments = parse(["-m", str(m), "-n", str(n), "-k", str(k), "--place", case["place"]])
            values = pools[case["dtype"]]
            sources = source(m, k, values), source(k, n, values), source(m, n, values)
            product = make_product(session, arguments, (m, n, k), DType[case["dtype"]], sources, "F")
            for options in case["options"]:
                with session.plan(product.a, product.b, product.c, reads_c=True, options=options_of(options)) as plan:
                    samples, energy_j = measure(session, plan, counter if case.get("energy") else None)
                    traced = plan.trace(1.2345, 1.1154) if case.get("trace") else None
                    about = plan.summary
                rows.append(
                    {
                        **{key: case[key] for key in ("m", "n", "k", "dtype", "place")},
                        "options": options,
                        "tile": about.tile,
                        "grid": about.grid,
                        "tasks": about.tasks,
                        "digest": about.digest,
                        "predicted_s": about.predicted_s,
                        "samples_s": samples,
                        "median_s": statistics.median(samples),
                        "energy_j": energy_j,
                        "how": about.how,
                        **(
                            {}
                            if traced is None
                            else {"trace_us": [microseconds(x) for x in (traced.start_s, traced.end_s)]}
                        ),
                    }
                )
                if session.rank == 0:
                    print(
                        f"{name} {options} T={about.tile} grid {about.grid} "
                        f"{statistics.median(samples) * 1e3:9.3f} ms {energy_j:8.2f} J",
                        flush=True,
                    )
            used = (product.a, product.b, product.c, product.host_a, product.host_b, product.first_c)
            for matrix in {id(one): one for one in used}.values():
                session.release(matrix)
        if session.rank == 0:
            facts = {
                "devices": session.device_names,
                "date": time.strftime("%Y-%m-%d"),
                "machine": json.loads(session.machine.to_json()),
                "missing": missing,
                "rows": rows,
            }
            with open(sys.argv[2], "w", encoding="utf-8") as file:
                json.dump(facts, file)
            print(f"{len(rows)} rows; missing: {missing or 'none'}")


if __name__ == "__main__":
    main()
