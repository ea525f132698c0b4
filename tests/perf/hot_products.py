"""
How fast products of many shapes run at a GPU's power limit, and below it.

    python tests/perf/hot_products.py OUT.json SECONDS [f64 f16 ...]

Every shape tiles one problem: its products write all blocks of one C in turn, as a schedule does. Once the GPU is hot,
shapes take turns in random order: SECONDS of calls back to back each, of which the second half counts, and as many
calls with pauses four times their length. Printed are both rates, and power and clock while hot.
"""

import json
import random
import statistics
import sys
import time

import cupy
import numpy as np
import pynvml

KINDS = {"f64": (1, 1, 70, np.float64), "f32": (0, 0, 68, np.float32), "f16": (2, 2, 68, np.float16)}
KINDS["f16 into f32"] = (2, 0, 68, np.float16)
EDGE = 8192
BLOCKS = (
    *((8192, 8192), (4096, 8192), (4096, 4096), (4096, 2048), (2048, 4096), (2048, 2048), (8192, 1024), (1024, 8192)),
    *((4096, 1024), (1024, 4096), (2048, 1024), (1024, 2048), (1024, 1024), (4096, 512), (512, 4096), (2048, 512)),
)
DEPTHS = (8192, 4096, 2048, 1024, 512)


def main(out, seconds, names):
    """Measure and print."""
    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByIndex(0)
    handle = cupy.cuda.device.get_cublas_handle()
    stream = cupy.cuda.Stream(non_blocking=True)
    facts = {"device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(), "rows": []}
    for name in names:
        kind, kind_c, compute, dtype = KINDS[name]
        scalar = np.float64 if name == "f64" else np.float32
        alpha, beta = np.array(1.2345, scalar), np.array(0.1154, scalar)
        rng = cupy.random.default_rng(5)
        a, b = ((rng.random((EDGE, EDGE), dtype=cupy.float32) - cupy.float32(0.5)).astype(dtype) for _ in range(2))
        if name == "f64":
            a, b = a + 1e-9 * cupy.random.random(a.shape), b + 1e-9 * cupy.random.random(b.shape)
        c = cupy.zeros((EDGE, EDGE), np.float32 if kind_c == 0 else dtype)

        def tile(m, n, k, a=a, b=b, c=c, kind=kind, kind_c=kind_c, compute=compute, alpha=alpha, beta=beta):
            """Call one product after the other: blocks of C, each with all parts of k."""
            while True:
                for row in range(0, EDGE, m):
                    for col in range(0, EDGE, n):
                        for depth in range(0, EDGE, k):
                            cupy.cuda.cublas.gemmEx(
                                handle, 0, 0, m, n, k, alpha.ctypes.data,
                                a.data.ptr + a.itemsize * (row + EDGE * depth), kind, EDGE,
                                b.data.ptr + b.itemsize * (depth + EDGE * col), kind, EDGE, beta.ctypes.data,
                                c.data.ptr + c.itemsize * (row + EDGE * col), kind_c, EDGE, compute, -1,
                            )  # fmt: skip
                            yield

        def run(calls, at_once, limit_s, pause):
            """Return seconds and operations of the second half of so long, and power and clocks meanwhile."""
            began, groups, watts, clocks = time.perf_counter(), [], [], []
            while time.perf_counter() - began < limit_s:
                first, last = cupy.cuda.Event(), cupy.cuda.Event()
                with stream:
                    first.record(stream)
                    for _ in range(at_once):
                        next(calls)
                    last.record(stream)
                if groups and not pause:
                    groups[-1][1].synchronize()
                else:
                    last.synchronize()
                groups.append((first, last))
                if time.perf_counter() - began > limit_s / 2:
                    watts.append(pynvml.nvmlDeviceGetPowerUsage(device) / 1e3)
                    clocks.append(pynvml.nvmlDeviceGetClockInfo(device, pynvml.NVML_CLOCK_SM))
                if pause:
                    time.sleep(4e-3 * cupy.cuda.get_elapsed_time(first, last))
            stream.synchronize()
            times = [cupy.cuda.get_elapsed_time(*group) * 1e-3 for group in groups[len(groups) // 2 :]]
            return statistics.median(times) / at_once, statistics.mean(watts), statistics.mean(clocks)

        shapes = [(m, n, EDGE) for m, n in BLOCKS] + [
            (m, n, k) for m, n in ((8192, 8192), (4096, 8192), (2048, 2048)) for k in DEPTHS[1:]
        ]
        found = {shape: [] for shape in shapes}
        run(tile(EDGE, EDGE, EDGE), 1, 4 * seconds, False)
        for turn in range(3):
            random.Random(turn).shuffle(shapes)
            for m, n, k in shapes:
                at_once = max(1, round(4096**2 * 8192 / (m * n * k)))
                found[m, n, k].append(run(tile(m, n, k), at_once, seconds, False))
        cold = {
            shape: run(tile(*shape), max(1, round(4096**2 * 2048 / np.prod(shape))), seconds, True)[0]
            for shape in shapes
        }
        for (m, n, k), rows in sorted(found.items(), key=lambda one: -one[0][0] * one[0][1] * one[0][2]):
            hot = [2e-12 * m * n * k / row[0] for row in rows]
            row = {
                "type": name,
                "m": m,
                "n": n,
                "k": k,
                "hot_tflop_per_s": hot,
                "watts": rows[-1][1],
                "mhz": rows[-1][2],
            }
            row["cold_tflop_per_s"] = 2e-12 * m * n * k / cold[m, n, k]
            facts["rows"].append(row)
            print(
                f"{name:5} {m:5} {n:5} {k:5} hot {statistics.median(hot):6.1f} ({min(hot):.1f} to {max(hot):.1f}) cold "
                f"{row['cold_tflop_per_s']:6.1f} TFLOP/s, {row['watts']:.0f} W, {row['mhz']:.0f} MHz",
                flush=True,
            )
    with open(out, "w") as file:
        json.dump(facts, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3:] or ["f64", "f16"])
