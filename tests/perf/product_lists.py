"""
The products that one rank has in schedules of several kinds for one problem: which kind does the model favour?

    python3 tests/perf/product_lists.py choose MACHINE OUT.json    (no GPU: searches, and writes the products)
    python3 tests/perf/product_lists.py time OUT.json LISTS.json   (pauses of 20 ms, and back to back)
    python3 tests/perf/product_lists.py compare OUT.json MACHINE...    (no GPU: errors of machines' shapes)

Of every problem the best schedule of `kblocks` of each order, with k in parts and whole, of those within a third of the
best; of each the rank with the longest products, among those with more than one. What matters to a choice is what
spreads within a problem.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from rank_products import products_of, simulate_products

PROBLEMS = {
    "f16": ((8192,) * 3, (12288,) * 3, (16384,) * 3, (16384, 16384, 4096), (8192, 8192, 32768), (24576,) * 3),
    "tf32": ((8192,) * 3, (12288,) * 3, (16384,) * 3),
    "f64": ((4096,) * 3, (8192,) * 3, (12288,) * 3),
    "f32": ((4096,) * 3, (8192,) * 3, (12288,) * 3),
}
CODES = {"f64": ("float64", 1, 70), "f32": ("float32", 0, 68), "f16": ("float16", 2, 68), "tf32": ("float32", 0, 77)}
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
    from cupy.cuda import cublas

    block = np.random.default_rng(1).random(1 << 22) - 0.5
    target, memory = cupy.zeros(3 << 29, "float64"), {}
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    handles = [cublas.create() for _ in range(2)]
    rows = json.loads(Path(lists).read_text())
    for row in rows:
        name = row["problem"].split()[0]
        kind, code, compute = CODES[name]
        if kind not in memory:
            memory = {kind: cupy.resize(cupy.asarray(block.astype(kind)), (6 << 30) // np.dtype(kind).itemsize)}
        data, one = memory[kind], np.ones(1, "float64" if name == "f64" else "float32")
        step = 16 // data.itemsize

        def once(row=row, data=data, one=one, step=step, code=code, compute=compute):
            start, stop, joined = (cupy.cuda.Event() for _ in range(3))
            start.record(streams[0])
            streams[1].wait_event(start)
            for m, n, k, adds, of_c, lane in row["products"]:
                # As panels have them: whole multiples of 16 bytes, columns at multiples of 64.
                m, ld_k = -(-m // step) * step, -(-k // (4 * step)) * 4 * step
                ld_m = -(-m // (4 * step)) * 4 * step
                with streams[lane % 2]:  # cupy's products go to the current stream
                    cublas.gemmEx(
                        handles[lane % 2], 0, 0, m, n, k, one.ctypes.data, data.data.ptr, code, ld_m,
                        data.data.ptr + data.nbytes // 2, code, ld_k, (one if adds else 0 * one).ctypes.data,
                        target.data.ptr + lane % 2 * (target.nbytes // 2), CODES[of_c][1], ld_m, compute, -1,
                    )  # fmt: skip
            joined.record(streams[1])
            streams[0].wait_event(joined)
            stop.record(streams[0])
            return start, stop

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
