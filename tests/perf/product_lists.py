"""
The products that one rank has in schedules of several kinds for one problem: which kind does the model favour?

    python3 tests/perf/product_lists.py choose MACHINE OUT.json    (no GPU: searches, and writes the products)
    python3 tests/perf/product_lists.py time OUT.json LISTS.json   (pauses of 20 ms, and back to back)
    python3 tests/perf/product_lists.py compare OUT.json MACHINE...    (no GPU: errors of machines' shapes)

Of every problem the best schedule of `kblocks` of each order, with k in parts and whole, of those within a third of the
best; of each the rank with the longest products, among those with more than one. What matters to a choice is what
spreads within a problem.
"""

import functools
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from rank_products import begin, products_of, simulate_products

PROBLEMS = {
    "f16": ((8192,) * 3, (12288,) * 3, (16384,) * 3, (16384, 16384, 4096), (8192, 8192, 32768), (24576,) * 3),
    "tf32": ((8192,) * 3, (12288,) * 3, (16384,) * 3),
    "f64": ((4096,) * 3, (8192,) * 3, (12288,) * 3),
    "f32": ((4096,) * 3, (8192,) * 3, (12288,) * 3),
}
WITHIN, COLD_CALLS, PAUSE_S, LONG_S = 1.35, 7, 0.02, 0.8
TELLING_S = 1e-3


def choose(machine_name, out):
    """Write the products of the best of each kind."""
    from uncut_mpi.model.dtypes import DType
    from uncut_mpi.model.machine_files import load_machine
    from uncut_mpi.model.placement import Placement
    from uncut_mpi.model.problem import GemmProblem
    from uncut_mpi.planning.search import search

    machine, found = load_machine(machine_name), []
    for name, problems in PROBLEMS.items():
        for extents in problems:
            for place in ("0,0,0", "0,1,2"):
                result = search(GemmProblem(*extents, DType[name]), Placement.parse(place), machine.num_ranks, machine)
                kinds = set()
                for one in result.candidates:
                    blocking = one.options.blocking
                    kind = f"{blocking.order} {'whole' if blocking.first >= extents[2] else 'parts'}"
                    if one.options.scheduler != "kblocks" or kind in kinds or one.value > WITHIN * result.best.value:
                        continue
                    kinds.add(kind)
                    rank, listed = products_of(one, machine, several=True)
                    found.append(
                        {
                            "problem": f"{name} {'x'.join(map(str, extents))} {place}",
                            "kind": kind,
                            "predicted_s": one.predicted_s,
                            "model_s": simulate_products(machine, name, rank, listed),
                            "products": listed,
                        }
                    )
    Path(out).write_text(json.dumps(found))


def time_all(out, lists):
    """Time every list."""
    import cupy
    from products_at_once import TYPES, Streams

    block = np.random.default_rng(1).random(1 << 22) - 0.5
    target, streams, memory = cupy.zeros(3 << 29, "float64"), Streams(), {}
    rows = json.loads(Path(lists).read_text())
    for row in rows:
        name = row["problem"].split()[0]
        kind = TYPES[name][0]
        if kind not in memory:
            memory = {kind: cupy.resize(cupy.asarray(block.astype(kind)), (6 << 30) // np.dtype(kind).itemsize)}
        data = memory[kind]
        addresses = (data.data.ptr, data.data.ptr + data.nbytes // 2)
        once = functools.partial(begin, streams, name, addresses, target, row["products"])
        once()[1].synchronize()
        time.sleep(0.3)
        row["cold_s"] = []
        for _ in range(COLD_CALLS):
            start, stop = once()
            stop.synchronize()
            row["cold_s"].append(cupy.cuda.get_elapsed_time(start, stop) * 1e-3)
            time.sleep(PAUSE_S)
        count = min(600, max(30, int(LONG_S / statistics.median(row["cold_s"]))))
        events = [once() for _ in range(count)]
        events[-1][1].synchronize()
        row["hot_s"] = [cupy.cuda.get_elapsed_time(*pair) * 1e-3 for pair in events[count // 2 :]]
        cold, hot = (statistics.median(row[key]) for key in ("cold_s", "hot_s"))
        print(
            f"{row['problem']} {row['kind']}: {len(row['products'])} products, model {1e3 * row['model_s']:.3f}, "
            f"with pauses {1e3 * cold:.3f}, back to back {1e3 * hot:.3f} ms",
            flush=True,
        )
    Path(out).write_text(json.dumps(rows))


def compare(timed, machines):
    """Print the errors of the machines' shapes and rates, for lists of a millisecond and more."""
    from uncut_mpi.model.machine_files import load_machine

    rows = [row for row in json.loads(Path(timed).read_text()) if statistics.median(row["hot_s"]) >= TELLING_S]
    for name in PROBLEMS:
        for way in ("hot_s", "cold_s"):
            for machine_name in machines:
                machine, errors = load_machine(machine_name), {}
                for row in rows:
                    if row["problem"].split()[0] == name:
                        model = simulate_products(machine, name, 0, row["products"])
                        errors.setdefault(row["problem"], []).append(np.log(model / statistics.median(row[way])))
                if not errors:
                    continue
                every = np.concatenate(list(errors.values()))
                spread = np.sqrt(np.mean([np.var(of_one) for of_one in errors.values() if len(of_one) > 1]))
                print(
                    f"{name} {way} {machine_name}: {len(every)} lists, mean {every.mean():+.3f}, root mean square "
                    f"{np.sqrt(np.mean(every**2)):.3f}, within a problem {spread:.4f}"
                )


if __name__ == "__main__":
    {"choose": choose, "time": time_all, "compare": lambda timed, *names: compare(timed, names)}[sys.argv[1]](
        *sys.argv[2:]
    )
