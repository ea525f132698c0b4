"""
What adding to C costs a product, by the size of C and by k: with beta 0 and with beta 1, in bursts and back to back.

    python3 tests/perf/added_products.py OUT.json

C := A B and C += A B by cuBLAS on one GPU, column-major, full-mantissa values. Bursts of 3 ms with pauses of 4 ms,
behind a kernel that holds the stream until all is issued (medians of five, the two in turns); and 80 ms back to back,
after as much that is not counted, where the power limit is reached.
"""

import json
import statistics
import sys
import time

import cupy
import numpy as np
from cupy.cuda import cublas
from products_at_once import SPIN, TYPES

SHAPES = ((2048, 2048), (4096, 2048), (4096, 4096), (8192, 4096), (8192, 8192), (16384, 4096), (16384, 8192))
DEPTHS = {"f64": (256, 1024, 2048), "f32": (256, 1024, 2048)}
USUAL_DEPTHS = (512, 1024, 2048, 4096, 8192)
BURST_S, PAUSE_S, LONG_S, ROUNDS = 3e-3, 4e-3, 0.08, 5


class Product:
    """C := A B or C += A B of one shape."""

    def __init__(self, stream, handle, name, matrices, m, n, k):
        _, self.code, wide, self.wide_code, self.compute = TYPES[name]
        self.stream, self.handle, self.extents = stream, handle, (m, n, k)
        self.a, self.b, self.c = matrices
        self.factors = np.array([0.0, 1.0], "float64" if wide == "float64" else "float32")
        self.spin = cupy.RawKernel(SPIN, "spin")

    def seconds(self, count, adds, held):
        """Return the mean time of so many, one after another."""
        m, n, k = self.extents
        start, stop = cupy.cuda.Event(), cupy.cuda.Event()
        zero_or_one = self.factors[int(adds) :]
        with self.stream:  # cupy's products go to the current stream
            if held:
                self.spin((1,), (1,), (np.int64(40_000 * count + 200_000),))
            start.record(self.stream)
            for _ in range(count):
                cublas.gemmEx(
                    self.handle, 0, 0, m, n, k, self.factors[1:].ctypes.data, self.a.data.ptr, self.code, m,
                    self.b.data.ptr, self.code, k, zero_or_one.ctypes.data, self.c.data.ptr, self.wide_code, m,
                    self.compute, -1,
                )  # fmt: skip
            stop.record(self.stream)
        stop.synchronize()
        return cupy.cuda.get_elapsed_time(start, stop) * 1e-3 / count


def main():
    """Measure and print all."""
    stream, handle, rows = cupy.cuda.Stream(non_blocking=True), cublas.create(), []
    random = np.random.default_rng(1).random(1 << 22) - 0.5
    for name in ("f16 in f32", "tf32", "f16", "f64", "f32"):
        kind, wide = TYPES[name][0], TYPES[name][2]
        block = cupy.asarray(random.astype(kind))
        matrices = (cupy.resize(block, 1 << 27), cupy.resize(block, 1 << 26), cupy.zeros(1 << 27, wide))
        for m, n in SHAPES[:5] if name in DEPTHS else SHAPES:
            for k in DEPTHS.get(name, USUAL_DEPTHS):
                product = Product(stream, handle, name, matrices, m, n, k)
                product.seconds(2, True, True)
                about = product.seconds(4, False, True)
                burst, many = max(2, min(24, int(BURST_S / about))), max(20, int(LONG_S / about))
                cold = ([], [])
                for turn in range(ROUNDS + 1):
                    for adds in (False, True):
                        seconds = product.seconds(burst, adds, True)
                        time.sleep(PAUSE_S)
                        if turn:
                            cold[adds].append(seconds)
                hot = []
                for adds in (False, True):
                    product.seconds(many, adds, False)
                    hot.append(product.seconds(many, adds, False))
                row = {"dtype": name, "m": m, "n": n, "k": k, "hot_s": hot}
                row["cold_s"] = [statistics.median(one) for one in cold]
                rows.append(row)
                text = ", ".join(
                    f"{way} {1e6 * row[key][0]:.1f} and {1e6 * (row[key][1] - row[key][0]):+.1f} us"
                    for way, key in (("bursts", "cold_s"), ("back to back", "hot_s"))
                )
                print(f"{name} {m}x{n}x{k}: {text}", flush=True)
        del matrices
        cupy.get_default_memory_pool().free_all_blocks()
    with open(sys.argv[1], "w") as file:
        json.dump(rows, file)


if __name__ == "__main__":
    main()
