"""
Blocks of C multiplied on one stream, and on two in turn: how much of what a product leaves idle can another one use?

    python3 tests/perf/products_at_once.py OUT.json

C += A B by cuBLAS on one GPU, column-major, full-mantissa values, C cut into 1, 2, 4 and 8 rows and columns of blocks.
Both ways of every cut take turns, with pauses, behind a kernel that holds the streams until all is issued; medians of
five. At the end, by type, the `GemmShape.idle_use` that explains two streams best, given the tail of the shipped H200.
"""

import json
import math
import statistics
import sys
import time

import cupy
import numpy as np
from cupy.cuda import cublas

from uncut_mpi.calibration.fitting import fit_idle_use
from uncut_mpi.model.machine_files import load_machine

# type: (of A and B, their code, of C, its code, compute type); "f16 in f32" sums into float32.
TYPES = {
    "f64": ("float64", 1, "float64", 1, 70),
    "f32": ("float32", 0, "float32", 0, 68),
    "tf32": ("float32", 0, "float32", 0, 77),
    "f16": ("float16", 2, "float16", 2, 68),
    "f16 in f32": ("float16", 2, "float32", 0, 68),
}
LONG = [(4096, 2048, 4096), (2048, 2048, 4096), (4096, 4096, 8192)]
WIDE = [(4096, 2048, 4096), (4096, 4096, 8192), (8192, 8192, 4096)]
PARTS = (1, 2, 4, 8)
ROUNDS, PAUSE_S, HELD_CLOCKS = 5, 0.003, 12_000_000
SPIN = 'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }'


class Streams:
    """Two streams with a handle each."""

    def __init__(self):
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
        self.handles = [cublas.create() for _ in range(2)]
        self.spin = cupy.RawKernel(SPIN, "spin")

    def seconds(self, calls, lanes):
        """Return the time of all calls, in turn on so many streams."""
        first, second = self.streams
        start, joined, stop = (cupy.cuda.Event() for _ in range(3))
        with first:
            self.spin((1,), (1,), (np.int64(HELD_CLOCKS),))
            start.record(first)
        second.wait_event(start)
        for number, call in enumerate(calls):
            with self.streams[number % lanes]:  # cupy's products go to the current stream
                call(self.handles[number % lanes])
        joined.record(second)
        first.wait_event(joined)
        stop.record(first)
        stop.synchronize()
        return cupy.cuda.get_elapsed_time(start, stop) * 1e-3


def measure(streams, name, m, n, k):
    """Return a row for every way to cut C."""
    kind, code, wide, wide_code, compute = TYPES[name]
    random = np.random.default_rng(1)
    block = cupy.asarray((random.random(1 << 22) - 0.5).astype(kind))
    a, b, c = cupy.resize(block, m * k), cupy.resize(block, k * n), cupy.zeros(m * n, wide)
    one = np.ones(1, "float64" if wide == "float64" else "float32")

    def product(row, col, rows, cols):
        addresses = (a.data.ptr + row * a.itemsize, b.data.ptr + col * k * b.itemsize)
        to = c.data.ptr + (col * m + row) * c.itemsize
        return lambda handle: cublas.gemmEx(
            handle, 0, 0, rows, cols, k, one.ctypes.data, addresses[0], code, m, addresses[1], code, k,
            one.ctypes.data, to, wide_code, m, compute, -1,
        )  # fmt: skip

    found = {}
    for turn in range(ROUNDS + 2):
        for down in PARTS:
            for along in PARTS:
                rows, cols = m // down, n // along
                calls = [product(i * rows, j * cols, rows, cols) for j in range(along) for i in range(down)]
                for lanes in (1, 2):
                    seconds = streams.seconds(calls, lanes)
                    time.sleep(PAUSE_S)
                    if turn > 1:
                        found.setdefault((rows, cols), {}).setdefault(lanes, []).append(seconds / len(calls))
    about = {"dtype": name, "m": m, "n": n, "k": k}
    return [
        {**about, "rows": rows, "cols": cols, "one_s": times[1], "two_s": times[2]}
        for (rows, cols), times in found.items()
    ]


def idle_use(rows, shape, multiprocessors):
    """Return what explains the rows best, and the root mean square error of the ratios of both times."""
    idle = [1 - shape.work(one["rows"], one["cols"], one["k"], multiprocessors)[1] for one in rows]
    gained = [1 - statistics.median(one["two_s"]) / statistics.median(one["one_s"]) for one in rows]
    use = fit_idle_use(idle, gained)
    return use, math.sqrt(np.mean((np.array(gained) - np.minimum(use * np.array(idle), 0.5)) ** 2))


def main():
    """Measure and print all."""
    streams, rows = Streams(), []
    shapes = load_machine("h200-4x").gemm_shape
    for name in TYPES:
        own = [row for size in (LONG if name in ("f64", "f32") else WIDE) for row in measure(streams, name, *size)]
        rows += own
        for row in own:
            one, two = (statistics.median(row[key]) for key in ("one_s", "two_s"))
            what = f"{name} {row['rows']}x{row['cols']}x{row['k']}"
            print(f"{what}: {one * 1e6:.1f} us, two at a time {two * 1e6:.1f} each, {two / one:.3f}")
        use, error = idle_use(own, shapes[name.split()[0]], 132)
        print(f"{name}: idle_use {use:.2f}, error of the ratio {error:.3f}", flush=True)
    with open(sys.argv[1], "w") as file:
        json.dump({"device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(), "rows": rows}, file)


if __name__ == "__main__":
    main()
