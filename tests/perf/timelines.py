"""
Simulated and measured timelines side by side: one traced call of each problem, and where its time went.

    mpiexec -n 4 python tests/perf/timelines.py OUT.json "f64 8192 0,0,0" "f32 7168 0,0,0 scheduler=kblocks" ...

A problem is TYPE, SIZE (N or MxNxK) and PLACE, and then options as in sweep.py. Every problem is timed first as usual;
the last line of each shows what recording two events per task adds. OUT.json has every task's times.
"""

import json
import statistics
import sys
import time

import numpy as np
from mpi4py import MPI
from sweep import options_of

import uncut_mpi as um
from uncut_mpi.command.arguments import parse
from uncut_mpi.command.product import generated_sources, make_product, measure, release_product, reset_result
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.schedule import Kind
from uncut_mpi.planning.simulate import simulate, union_seconds


def describe(schedule, times):
    """Return, by rank and kind, first start, last end, time covered and number of tasks, in ms."""
    tasks = schedule.tasks
    rows = {}
    for rank in range(schedule.num_ranks):
        for kind in (Kind.COPY, Kind.GEMM, Kind.COMBINE):
            chosen = (tasks["rank"] == rank) & (tasks["kind"] == kind)
            if chosen.any():
                start, end = times[0][chosen], times[1][chosen]
                facts = (start.min(), end.max(), union_seconds(start, end))
                rows[f"{rank} {kind.name.lower()}"] = [round(1e3 * float(x), 4) for x in facts] + [int(chosen.sum())]
    return rows


def main():
    """Trace every problem and print what its ranks did, simulated and measured."""
    out, *texts = sys.argv[1:]
    cases = []
    with um.Session(MPI.COMM_WORLD, timeout_s=20) as session:
        for text in texts:
            dtype, size, place, *words = text.split()
            extents = [int(part) for part in size.split("x")]
            m, n, k = extents * 3 if len(extents) == 1 else extents
            arguments = parse(
                ["-m", str(m), "-n", str(n), "-k", str(k), "--place", place, "--warmup", "5", "--repeat", "15"]
            )
            sources = generated_sources(arguments, m, n, k)
            product = make_product(session, arguments, (m, n, k), DType[dtype], sources, "F")
            options = options_of(" ".join(words))
            with session.plan(product.a, product.b, product.c, reads_c=True, options=options) as plan:
                timing = measure(session, plan, arguments, 0.0, lambda p=product: reset_result(session, p))
                issue = session.gather_values([plan.execute(1.2345, 1.1154).issue_s])
                plan.trace(alpha=1.2345, beta=1.1154)
                trace = plan.trace(alpha=1.2345, beta=1.1154)
                if session.rank == 0:
                    cases.append(facts_of(session, plan, text, timing, trace))
                    cases[-1]["issue_s"] = [one[-1] for one in issue]
                    show(cases[-1])
            release_product(session, product)
    if cases:
        facts = {"devices": session.device_names, "date": time.strftime("%Y-%m-%d"), "version": um.__version__}
        with open(out, "w", encoding="utf-8") as file:
            json.dump({**facts, "cases": cases}, file)


def facts_of(session, plan, text, timing, trace):
    """Return everything that is kept of one problem."""
    schedule = plan.schedule
    simulation = simulate(schedule, session.machine)
    simulated, measured = (simulation.start_s, simulation.end_s), (trace.start_s, trace.end_s)
    tasks = schedule.tasks
    return {
        "problem": text,
        "how": plan.summary.how,
        "scheduler": plan.summary.scheduler,
        "tasks": plan.summary.tasks,
        "median_s": statistics.median(timing.samples_s),
        "samples_s": timing.samples_s,
        "predicted_s": plan.summary.predicted_s,
        "simulated": describe(schedule, simulated),
        "measured": describe(schedule, measured),
        "rank": tasks["rank"].tolist(),
        "lane": tasks["lane"].tolist(),
        "kind": [Kind(kind).name for kind in tasks["kind"].tolist()],
        "simulated_us": [np.round(1e6 * part, 2).tolist() for part in simulated],
        "measured_us": [np.round(1e6 * np.nan_to_num(part, nan=-1e-6), 2).tolist() for part in measured],
    }


def show(case):
    """Print one problem's rows, simulated beside measured."""
    ends = [max(row[1] for row in case[name].values()) for name in ("simulated", "measured")]
    print(
        f"{case['problem']}: median {1e3 * case['median_s']:.3f} ms, predicted {1e3 * case['predicted_s']:.3f}, "
        f"tasks end at {ends[0]:.3f} simulated, {ends[1]:.3f} measured, issued in "
        + ", ".join(f"{1e6 * one:.0f}" for one in case["issue_s"])
        + f" us; {case['scheduler']}: {case['how']}"
    )
    for name, row in case["simulated"].items():
        other = case["measured"][name]
        print(
            f"   {name:10s} {row[3]:4d} tasks  first {row[0]:8.3f} | {other[0]:8.3f}"
            f"   last {row[1]:8.3f} | {other[1]:8.3f}   busy {row[2]:8.3f} | {other[2]:8.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
