"""
The products of one rank of a schedule, by themselves on one GPU: how long they take, and how long the model says.

    python3 tests/perf/rank_products.py choose MACHINE OUT.json [LIBRARY]   (no GPU: searches, and writes the products)
    python3 tests/perf/rank_products.py time OUT.json CHOICES.json...       (in turns, medians of nine)

Of every problem the rank whose products are the longest by simulation; its lanes are streams. What products wait for,
and what runs beside them, is left out, in both times.
"""

import json
import statistics
import sys
import time
from pathlib import Path

PLACES = ("0,0,0", "0,1,2", "0,1,0")
EXTENTS = [
    *((n, n, n) for n in (3000, 4096, 6000, 8192, 10240, 12288)),
    *((12000, 12000, 2048), (1000, 3000, 2000), (5120, 5120, 20480), (20480, 20480, 2560), (7168, 3584, 7168)),
]
ITEM_BYTES = {"f64": 8, "f32": 4, "f16": 2}


def choose(machine_name, out, library):
    """Write the products of the choices of a version of the library."""
    if library:
        # An editable installation comes first otherwise.
        sys.meta_path[:] = [one for one in sys.meta_path if "ditable" not in type(one).__module__]
        sys.path.insert(0, library)

    from uncut_mpi.model.dtypes import DType
    from uncut_mpi.model.machine import Machine
    from uncut_mpi.model.placement import Placement
    from uncut_mpi.model.problem import GemmProblem
    from uncut_mpi.planning.search import search

    with open(machine_name) as file:
        content = json.load(file)
    known = set(vars(__import__("uncut_mpi.model.costs", fromlist=["GemmShape"]).GemmShape)["__dataclass_fields__"])
    for name, shape in content["gemm_shape"].items():  # an earlier version knows less
        content["gemm_shape"][name] = {key: value for key, value in shape.items() if key in known}
    machine = Machine.from_json(json.dumps(content))
    found = []
    for extents in EXTENTS:
        for place in PLACES:
            for name in ITEM_BYTES:
                problem = GemmProblem(*extents, DType[name])
                best = search(problem, Placement.parse(place), machine.num_ranks, machine).best
                rank, listed = products_of(best, machine)
                alone = simulate_products(machine, name, rank, listed)
                found.append(
                    {
                        "problem": f"{name} {'x'.join(map(str, extents))} {place}",
                        "predicted_s": best.predicted_s,
                        "model_s": alone,
                        "products": listed,
                        "options": str(best.options),
                    }
                )
    with open(out, "w") as file:
        json.dump(found, file)


def products_of(candidate, machine, *, several=False):
    """Return the rank whose products take longest, of those with several, and these: (m, n, k, adds, of C, lane)."""
    import numpy as np

    from uncut_mpi.model.dtypes import DType
    from uncut_mpi.planning.schedule import Kind

    times, schedule = candidate.simulation, candidate.schedule
    tasks = schedule.tasks
    products = np.flatnonzero(tasks["kind"] == Kind.GEMM)
    spent = [
        sum(times.end_s[task] - times.start_s[task] for task in products if tasks["rank"][task] == rank)
        for rank in range(machine.num_ranks)
    ]
    counts = [np.count_nonzero(tasks["rank"][products] == rank) for rank in range(machine.num_ranks)]
    rank = max(range(machine.num_ranks), key=lambda one: (several and counts[one] > 1, spent[one]))
    lanes, listed = {}, []
    for task in products[tasks["rank"][products] == rank]:
        first = tasks["first_operand"][task]
        operands = schedule.operands[first : first + tasks["num_operands"][task]]
        c, a = (schedule.regions[operands[at]["region"]] for at in (0, 1))
        k = a["rows"] if operands[1]["op"] else a["cols"]
        of_c = DType(int(schedule.buffers[c["buffer"]]["dtype"])).name
        lane = lanes.setdefault(int(tasks["lane"][task]), len(lanes))
        listed.append([int(c["rows"]), int(c["cols"]), int(k), len(operands) > 3, of_c, lane])
    return rank, listed


def simulate_products(machine, name, rank, listed):
    """Return the time of products one after another by the model: with one lane all there is."""
    from uncut_mpi.model.dtypes import DType

    shape, rate = machine.gemm_shape[name], float(machine.typical_gemm_rate(DType[name])[rank])
    seconds = 0.0
    for m, n, k, adds, of_c, _ in listed:
        extra = m * n * ((2 if adds else 1) * DType[of_c].itemsize - DType[name].accumulator.itemsize)
        seconds += shape.seconds(m, n, k, int(machine.multiprocessors[rank]), rate, extra)
    return seconds


def begin(streams, name, addresses, target, products, held_clocks=0):
    """
    Issue a rank's products on their lanes; return the events before the first and after the last.

    Parameters
    ----------
    streams : products_at_once.Streams
        Two lanes.
    name : str
        Type of A and B, which begin at `addresses`.
    target : ndarray of cupy
        Half of it is the C of each lane.
    products : list
        As of `products_of`.
    held_clocks : int, optional
        How long a kernel holds the streams before the first.
    """
    import cupy
    import numpy as np
    from cupy.cuda import cublas
    from products_at_once import TYPES

    kind, code, _, _, compute = TYPES[name]
    factors = np.array([0.0, 1.0], "float64" if name == "f64" else "float32")
    zero, one = factors.ctypes.data, factors[1:].ctypes.data
    step = 16 // np.dtype(kind).itemsize
    (first, second), handles = streams.streams, streams.handles
    start, stop, joined = (cupy.cuda.Event() for _ in range(3))
    with first:
        if held_clocks:
            streams.spin((1,), (1,), (np.int64(held_clocks),))
        start.record(first)
    second.wait_event(start)
    for m, n, k, adds, of_c, lane in products:
        # As panels have them: whole multiples of 16 bytes, columns at multiples of 64.
        m, ld_k = -(-m // step) * step, -(-k // (4 * step)) * 4 * step
        ld_m = -(-m // (4 * step)) * 4 * step
        with streams.streams[lane % 2]:  # cupy's products go to the current stream
            cublas.gemmEx(
                handles[lane % 2], 0, 0, m, n, k, one, addresses[0], code, ld_m, addresses[1], code, ld_k,
                one if adds else zero, target.data.ptr + lane % 2 * (target.nbytes // 2), TYPES[of_c][1], ld_m,
                compute, -1,
            )  # fmt: skip
    joined.record(second)
    first.wait_event(joined)
    stop.record(first)
    return start, stop


def time_all(out, choices):
    """Time the products of several files in turns."""
    import cupy
    import numpy as np
    from products_at_once import TYPES, Streams

    random = np.random.default_rng(1)
    block = cupy.asarray(random.random(1 << 22) - 0.5)
    memory = {name: cupy.resize(block.astype(TYPES[name][0]), (3 << 30) // size) for name, size in ITEM_BYTES.items()}
    target, streams = cupy.zeros(1 << 30, "float64"), Streams()
    files = [json.loads(Path(name).read_text()) for name in choices]
    results = []
    for rows in zip(*files, strict=True):
        assert len({row["problem"] for row in rows}) == 1
        name = rows[0]["problem"].split()[0]
        addresses = (memory[name].data.ptr, memory[name].data.ptr)
        samples = [[] for _ in rows]
        for turn in range(11):
            for samples_of, row in zip(samples, rows, strict=True):
                held = 600_000 + 30_000 * len(row["products"])
                start, stop = begin(streams, name, addresses, target, row["products"], held)
                stop.synchronize()
                if turn > 1:
                    samples_of.append(cupy.cuda.get_elapsed_time(start, stop) * 1e-3)
                time.sleep(0.003)
        medians = [statistics.median(one) for one in samples]
        results.append({"problem": rows[0]["problem"], "samples_s": samples, "model_s": [r["model_s"] for r in rows]})
        rates = [
            2e-12 * sum(m * n * k for m, n, k, *_ in row["products"]) / median
            for median, row in zip(medians, rows, strict=True)
        ]
        results[-1]["tflop_per_s"] = rates
        text = ", ".join(
            f"{1e3 * median:.3f} ms (model {1e3 * row['model_s']:.3f}, {len(row['products'])}, {rate:.1f} TF)"
            for median, row, rate in zip(medians, rows, rates, strict=True)
        )
        print(f"{rows[0]['problem']}: {text}", flush=True)
    with open(out, "w") as file:
        json.dump(results, file)
    for name in ITEM_BYTES:
        mine = [one for one in results if one["problem"].startswith(name + " ")]
        ratios = [one["tflop_per_s"][-1] / one["tflop_per_s"][0] for one in mine]
        print(
            f"{name}: rate of the last over that of the first, geometric mean {statistics.geometric_mean(ratios):.4f}"
        )
        for at in range(len(files)):
            errors = [one["model_s"][at] / statistics.median(one["samples_s"][at]) - 1 for one in mine]
            spread = statistics.pstdev(errors)
            print(
                f"  {choices[at]}: model {statistics.fmean(errors):+.3f} in the mean, standard deviation {spread:.3f}"
            )


if __name__ == "__main__":
    if sys.argv[1] == "choose":
        choose(sys.argv[2], sys.argv[3], sys.argv[4] if len(sys.argv) > 4 else "")
    else:
        time_all(sys.argv[2], sys.argv[3:])
