"""
Compares schedule options in one session: same matrices, one after the other, median of the slowest rank.

    mpiexec -n 4 python tests/perf/sweep.py OUT.json SIZE PLACE "tile=2048" "tile=1024 chunks=4" ...
"""

import json
import statistics
import sys
import time

from mpi4py import MPI

import uncut_mpi as um
from uncut_mpi.command.arguments import parse
from uncut_mpi.command.product import generated_sources, make_product, measure, reset_result
from uncut_mpi.model.dtypes import DType


def options_of(text):
    """Return the schedule options written as ``name=value`` words."""
    values = {}
    for word in text.split():
        name, value = word.split("=")
        values[name] = int(value) if value.isdigit() else {"True": True, "False": False}.get(value, value)
    return um.ScheduleOptions(**values)


def main():
    """Run the sweep and print one line per set of options."""
    out, size, place, *texts = sys.argv[1:]
    arguments = parse(["-m", size, "--place", place, "--warmup", "3", "--repeat", "9"])
    n = int(size)
    rows = []
    with um.Session(MPI.COMM_WORLD, timeout_s=20) as session:
        product = make_product(session, arguments, (n, n, n), DType.f64, generated_sources(arguments, n, n, n), "F")
        for text in texts:
            with session.plan(product.a, product.b, product.c, reads_c=True, options=options_of(text)) as plan:
                timing = measure(session, plan, arguments, 0.0, lambda: reset_result(session, product))
                results = session.gather([plan.execute(1.0, 1.0) for _ in range(3)])
                issue = max(one[-1].issue_s for one in results)
                row = {
                    "options": text,
                    "tile": plan.summary.tile,
                    "tasks": plan.summary.tasks,
                    "median_s": timing.median_s,
                    "samples_s": timing.samples_s,
                    "predicted_s": plan.summary.predicted_s,
                    "issue_s": issue,
                }
                rows.append(row)
                if session.rank == 0:
                    print(
                        f"{n} {place} {text:40s} tile {row['tile']:5d} median {row['median_s'] * 1e3:8.3f} ms "
                        f"min {min(timing.samples_s) * 1e3:8.3f} "
                        f"spread {statistics.pstdev(timing.samples_s) * 1e3:6.3f} "
                        f"predicted {row['predicted_s'] * 1e3:8.3f} issue {issue * 1e3:6.3f}",
                        flush=True,
                    )
        if session.rank == 0:
            facts = {
                "size": n,
                "place": place,
                "dtype": "f64",
                "devices": session.device_names,
                "date": time.strftime("%Y-%m-%d"),
                "version": um.__version__,
                "rows": rows,
            }
            with open(out, "w", encoding="utf-8") as file:
                json.dump(facts, file, indent=1)


if __name__ == "__main__":
    main()
