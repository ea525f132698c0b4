"""
Measures many products with many options in one session, for comparison with the model's predictions.

    mpiexec -n 4 python tests/perf/model_data.py CASES.json OUT.json [SECONDS]

CASES.json (`model_cases.py` writes some) is a list of {"m", "n", "k", "dtype", "place", "options": ["...", ...]}; the
options are written as for sweep.py, or are ``metric=`` and what the search shall minimise. Writes each sample of the
slowest rank and what was planned (digest, tile, tasks, prediction and simulated time). More keys of a case: "energy":
true adds the joules per call of every device (NVML's counter over two seconds of calls, which are hotter and slower
than those that are timed: "energy_call_s"), those predicted, and who takes part; "trace": true when each task of one
call ran (us); "again": N times the fastest N and the last schedule once more, in turns. Data are random with every bit
of the mantissa in use, a block of them repeated. Stops after SECONDS and says what is missing.
"""

import contextlib
import json
import statistics
import sys
import time

import numpy as np
from mpi4py import MPI
from sweep import options_of
from turns import in_turns

import uncut_mpi as um
from uncut_mpi.command.arguments import parse
from uncut_mpi.command.product import Source, make_product
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.metrics import energy_j as energy_of
from uncut_mpi.planning.metrics import watts_known, working_ranks
from uncut_mpi.planning.search import search
from uncut_mpi.planning.simulate import simulate

WARMUP, REPEAT, REPEAT_S = 2, 7, 0.7
AGAIN = 25
ENERGY_S = 2.0


def pool(dtype):
    """Return one mebi-element of random values with the mantissa in use, the same on every rank."""
    return (np.random.default_rng(7).random(1 << 20) - 0.5).astype(dtype.numpy)


def source(rows, cols, values):
    """Return a matrix in Fortran order whose columns run through `values`, each from another start."""

    def fill(out, down, along):
        for at, column in enumerate(range(along.start, along.stop)):
            start = column * 7919 % (len(values) - rows) if rows < len(values) else 0
            out[:, at] = values[start + down.start : start + down.stop]

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


def measure(session, plan, joules=None):
    """Return samples of the slowest rank, joules per call of every device (empty if not asked for), and its seconds."""
    for _ in range(WARMUP):
        timed(session, plan)
    once = max(session.gather_values(timed(session, plan)))
    repeats = REPEAT if once * REPEAT < REPEAT_S * 2 else max(3, int(REPEAT_S / once))
    samples = [timed(session, plan) for _ in range(repeats)]
    slowest = [max(of_ranks) for of_ranks in zip(*session.gather_values(samples), strict=True)]
    if joules is None:
        return slowest, [], 0.0
    calls = max(3, int(ENERGY_S / statistics.median(slowest)))
    before, start = joules(), time.perf_counter()
    for _ in range(calls):
        plan.execute(1.2345, 1.1154)
    session.barrier()
    spent_s = (time.perf_counter() - start) / calls
    return slowest, session.gather_values((joules() - before) / calls), spent_s


def chosen_options(session, plan, text):
    """Return the options written as `text`, or those that a search by a metric finds for the problem of `plan`."""
    if not text.startswith("metric="):
        return options_of(text)
    if plan is None:
        raise um.ParamError("a metric needs the problem of a schedule before it: name another one first")
    schedule = plan.schedule
    asked = um.ScheduleOptions(metric=text.removeprefix("metric="))
    return search(schedule.problem, schedule.placement, session.size, session.machine, asked).best.options


def microseconds(times):
    """Return times rounded for the file; -1 where there is none."""
    return np.round(1e6 * np.nan_to_num(times, nan=-1e-6), 1).tolist()


def repeat(session, measured, count):
    """
    Time the fastest `count` and the last of the schedules again, call by call in turns.

    Clocks sink and host memory changes within a second: one after the other, who comes last would be the slowest.
    """
    chosen = [*sorted(measured[:-1], key=lambda one: one[1]["median_s"])[:count], measured[-1]]
    samples = [[] for _ in chosen]
    for at in in_turns(len(chosen), WARMUP + AGAIN):
        samples[at].append(timed(session, chosen[at][0]))
    for (_, row), mine in zip(chosen, samples, strict=True):
        row["again_s"] = [max(of_ranks) for of_ranks in zip(*session.gather_values(mine[WARMUP:]), strict=True)]
        if session.rank == 0:
            print(f"  again {statistics.median(row['again_s']) * 1e3:9.3f} ms {row['options']}", flush=True)


def described(case, options, plan, machine, measured, traced):
    """Return the facts of one schedule."""
    about, (samples, energy_j, energy_call_s) = plan.summary, measured
    run = simulate(plan.schedule, machine)
    return {
        **{key: case[key] for key in ("m", "n", "k", "dtype", "place")},
        "options": options,
        "scheduler": plan.schedule.scheduler,
        "tile": about.tile,
        "grid": about.grid,
        "tasks": about.tasks,
        "digest": about.digest,
        "how": about.how,
        "predicted_s": about.predicted_s,
        "simulated_s": run.seconds,
        "samples_s": samples,
        "median_s": statistics.median(samples),
        "energy_j": energy_j,
        "energy_call_s": energy_call_s,
        "simulated_j": energy_of(run) if watts_known(machine) else 0.0,
        "working": working_ranks(plan.schedule).tolist(),
        **({} if traced is None else {"trace_us": [microseconds(x) for x in (traced.start_s, traced.end_s)]}),
    }


def line(name, row):
    """Return what is printed of one schedule."""
    error = row["simulated_s"] / row["median_s"] - 1
    joules = row["energy_j"]
    working = sum(joules[rank] for rank in row["working"]) if joules else 0.0
    energy = (
        f" {sum(joules):8.3f} J ({row['simulated_j']:.3f}), {working:8.3f} of ranks {row['working']}, a call in "
        f"{row['energy_call_s'] * 1e3:.3f} ms"
        if joules
        else ""
    )
    times = f"{row['median_s'] * 1e3:9.3f} ms, simulated {row['simulated_s'] * 1e3:9.3f} {error:+5.1%}"
    return f"{name} {row['options']}: {times}{energy} | {row['how']}"


def main():
    """Run the cases and print one line for each."""
    with open(sys.argv[1], encoding="utf-8") as file:
        cases = json.load(file)
    limit = time.monotonic() + (float(sys.argv[3]) if len(sys.argv) > 3 else 1e9)
    rows, missing, failed = [], [], []
    with um.Session(MPI.COMM_WORLD, timeout_s=30) as session:
        counter = energy_counter(session)
        pools = {dtype.name: pool(dtype) for dtype in DType}
        for case in cases:
            name = f"{case['m']}x{case['n']}x{case['k']} {case['dtype']} {case['place']}"
            if max(session.gather_values(time.monotonic())) > limit:
                missing.append(name)
                continue
            m, n, k = case["m"], case["n"], case["k"]
            arguments = parse(["-m", str(m), "-n", str(n), "-k", str(k), "--place", case["place"]])
            values = pools[case["dtype"]]
            sources = source(m, k, values), source(k, n, values), source(m, n, values)
            product = make_product(session, arguments, (m, n, k), DType[case["dtype"]], sources, "F")
            measured = []
            with contextlib.ExitStack() as plans:
                of = (product.a, product.b, product.c)
                for options in case["options"]:
                    try:
                        made = chosen_options(session, measured[0][0] if measured else None, options)
                        plan = plans.enter_context(session.plan(*of, reads_c=True, options=made))
                    except um.UncutError as error:  # the same on every rank
                        failed.append(f"{name} {options}: {error}")
                        continue
                    found = measure(session, plan, counter if case.get("energy") else None)
                    traced = plan.trace(1.2345, 1.1154) if case.get("trace") else None
                    row = described(case, options, plan, session.machine, found, traced)
                    measured.append((plan, row))
                    if session.rank == 0:
                        print(line(name, row), flush=True)
                if case.get("again") and measured:
                    repeat(session, measured, case["again"])
            rows += [row for _, row in measured]
            used = (product.a, product.b, product.c, product.host_a, product.host_b, product.first_c)
            for matrix in {id(one): one for one in used}.values():
                session.release(matrix)
        if session.rank == 0:
            facts = {
                "devices": session.device_names,
                "date": time.strftime("%Y-%m-%d"),
                "machine": json.loads(session.machine.to_json()),
                "missing": missing,
                "failed": failed,
                "rows": rows,
            }
            with open(sys.argv[2], "w", encoding="utf-8") as file:
                json.dump(facts, file)
            print(f"{len(rows)} rows; missing: {missing or 'none'}; failed: {failed or 'none'}")


if __name__ == "__main__":
    main()
