"""
Compares schedule options in one session: same matrices, one after the other, median of the slowest rank.

    mpiexec -n 4 python tests/perf/sweep.py OUT.json SIZE PLACE DTYPE "tile=2048" "tile=1024 chunks=4" \
        "scheduler=kblocks grid=2x2 k.first=256 k.columns=4" ...

SIZE is N or MxNxK; words with ``k.`` are of `Blocking`. With several sizes, places or types (commas between sizes and
types, semicolons between places) every combination is measured.
"""

import itertools
import json
import statistics
import sys
import time

from mpi4py import MPI

import uncut_mpi as um
from uncut_mpi.command.arguments import parse
from uncut_mpi.command.product import generated_sources, make_product, measure, release_product, reset_result
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.options import Blocking


def options_of(text):
    """Return the schedule options written as ``name=value`` words."""
    values, blocking = {}, {}
    for word in text.split():
        name, value = word.split("=")
        value = int(value) if value.isdigit() else {"True": True, "False": False}.get(value, value)
        if name == "grid":
            value = tuple(int(part) for part in value.split("x"))
        if name == "areas":
            value = tuple(tuple(float(part) for part in column.split(",")) for column in value.split("/"))
        if name in ("devices", "row_shares", "col_shares"):
            value = tuple((int if name == "devices" else float)(part) for part in str(value).split(","))
        (blocking if name.startswith("k.") else values)[name.removeprefix("k.")] = value
    return um.ScheduleOptions(**values, blocking=Blocking(**blocking))


def main():
    """Run the sweep and print one line per set of options."""
    out, sizes, places, dtypes, *texts = sys.argv[1:]
    cases = []
    with um.Session(MPI.COMM_WORLD, timeout_s=20) as session:
        for size, place, dtype in itertools.product(sizes.split(","), places.split(";"), dtypes.split(",")):
            extents = [int(part) for part in size.split("x")]
            cases.append(run_case(session, tuple(extents * 3 if len(extents) == 1 else extents), place, dtype, texts))
            if session.rank == 0:
                facts = {
                    "devices": session.device_names,
                    "date": time.strftime("%Y-%m-%d"),
                    "version": um.__version__,
                    "cases": cases,
                }
                with open(out, "w", encoding="utf-8") as file:
                    json.dump(facts, file, indent=1)


def run_case(session, extents, place, dtype, texts):
    """Measure every set of options on one problem and return the facts."""
    m, n, k = extents
    size = "x".join(str(extent) for extent in extents)
    arguments = parse(["-m", str(m), "-n", str(n), "-k", str(k), "--place", place, "--warmup", "3", "--repeat", "9"])
    rows = []
    product = make_product(session, arguments, extents, DType[dtype], generated_sources(arguments, m, n, k), "F")
    for text in texts:
        with session.plan(product.a, product.b, product.c, reads_c=True, options=options_of(text)) as plan:
            timing = measure(session, plan, arguments, 0.0, lambda: reset_result(session, product))
            results = session.gather_values([plan.execute(1.0, 1.0) for _ in range(3)])
            issue = max(one[-1].issue_s for one in results)
            row = {
                "options": text,
                "how": plan.summary.how,
                "tasks": plan.summary.tasks,
                "median_s": statistics.median(timing.samples_s),
                "samples_s": timing.samples_s,
                "predicted_s": plan.summary.predicted_s,
                "plan_s": plan.summary.plan_s,
                "issue_s": issue,
            }
            rows.append(row)
            if session.rank == 0:
                print(
                    f"{size} {place} {dtype} {text:60s} median {row['median_s'] * 1e3:8.3f} ms "
                    f"min {min(timing.samples_s) * 1e3:8.3f} "
                    f"spread {statistics.pstdev(timing.samples_s) * 1e3:6.3f} "
                    f"predicted {row['predicted_s'] * 1e3:8.3f} issue {issue * 1e3:6.3f} "
                    f"planned {row['plan_s'] * 1e3:4.0f} {row['how'] if 'auto' in text else ''}",
                    flush=True,
                )
    release_product(session, product)
    return {"m": m, "n": n, "k": k, "place": place, "dtype": dtype, "rows": rows}


if __name__ == "__main__":
    main()
