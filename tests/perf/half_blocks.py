"""
What one rank's product of a half type takes, cut in several ways: parts of k with sums in float32, or blocks of C.

    python tests/perf/half_blocks.py OUT.json 8192x8192x16384 4096x4096x8192 ...

No copies and no other ranks: cuBLAS and a COMBINE on one GPU, as `kblocks` would call them for a rank that has all of
A and B. All ways take turns, three products at a time; medians over the turns.
"""

import itertools
import json
import statistics
import sys
import time

import cupy
import numpy as np
from cupy.cuda import device
from cupy_backends.cuda.libs import cublas
from turns import in_turns

TURNS, TOGETHER, WARMUP = 8, 3, 2
ALPHA, BETA, ZERO, ONE = (np.array([value], np.float32) for value in (1.2345, 1.1154, 0.0, 1.0))
FLOAT, HALF, COMPUTE_FLOAT, USUAL_KERNEL = 0, 2, 68, 99


class RankProduct:
    """One product in f16, and the ways to cut it; stored transposed, as numpy's order is not cuBLAS's."""

    def __init__(self, m, n, k):
        def random(*shape):
            return cupy.random.standard_normal(shape, dtype=np.float32).astype(np.float16)

        self.m, self.n, self.k = m, n, k
        self.a, self.b, self.c = random(k, m), random(n, k), random(n, m)
        self.sums = cupy.empty((n, m), np.float32)
        self.add = cupy.ElementwiseKernel(
            "float32 sum, float16 c", "float16 out", "out = (float16)(sum + 1.1154f * (float)c)", "combine"
        )
        self.handle = device.get_cublas_handle()

    def gemm(self, rows, cols, inner, *, direct, beta):
        out, kind = (self.c, HALF) if direct else (self.sums, FLOAT)
        (top, bottom), (left, right), (first, last) = rows, cols, inner
        cublas.gemmEx(
            self.handle, 0, 0, bottom - top, right - left, last - first, ALPHA.ctypes.data,
            self.a.data.ptr + 2 * (top + first * self.m), HALF, self.m,
            self.b.data.ptr + 2 * (first + left * self.k), HALF, self.k,
            beta.ctypes.data, out.data.ptr + out.itemsize * (top + left * self.m), kind, self.m,
            COMPUTE_FLOAT, USUAL_KERNEL,
        )  # fmt: skip

    def combine(self, left, right):
        self.add(self.sums[left:right], self.c[left:right], self.c[left:right])

    def at_once(self, *, direct=True):
        """One product, with C added to it or by a COMBINE."""
        self.gemm((0, self.m), (0, self.n), (0, self.k), direct=direct, beta=BETA if direct else ZERO)
        if not direct:
            self.combine(0, self.n)

    def by_k(self, stops, blocks):
        """Parts of k that end at these eighths, the last one by column blocks, each with its COMBINE."""
        cuts = [0, *(stop * self.k // 8 for stop in stops), self.k]
        for number, (first, last) in enumerate(itertools.pairwise(cuts[:-1])):
            beta = ONE if number else ZERO
            self.gemm((0, self.m), (0, self.n), (first, last), direct=False, beta=beta)
        for number in range(blocks):
            cols = (self.n * number // blocks, self.n * (number + 1) // blocks)
            self.gemm((0, self.m), cols, (cuts[-2], self.k), direct=False, beta=ONE)
            self.combine(*cols)

    def from_corner(self, blocks, *, direct=True):
        """Row and column blocks in turn, each with all that it makes with those before it."""
        rows, cols = ([extent * at // blocks for at in range(blocks + 1)] for extent in (self.m, self.n))
        beta = BETA if direct else ZERO
        every = (0, self.k)
        self.gemm((0, rows[1]), (0, cols[1]), every, direct=direct, beta=beta)
        for at in range(1, blocks):
            self.gemm((0, rows[at]), (cols[at], cols[at + 1]), every, direct=direct, beta=beta)
            self.gemm((rows[at], rows[at + 1]), (0, cols[at + 1]), every, direct=direct, beta=beta)
        if not direct:
            self.combine(0, self.n)

    def ways(self):
        """Return how to cut it, by name."""
        return {
            "at once": self.at_once,
            "at once, sums apart": lambda: self.at_once(direct=False),
            "k 1/8 2/8 5/8, 8 column blocks": lambda: self.by_k((1, 3), 8),
            "k 1/8 7/8, 4 column blocks": lambda: self.by_k((1,), 4),
            "2x2 blocks": lambda: self.from_corner(2),
            "4x4 blocks": lambda: self.from_corner(4),
            "8x8 blocks": lambda: self.from_corner(8),
            "4x4 blocks, sums apart": lambda: self.from_corner(4, direct=False),
        }


def measure(product):
    """Return the times of one product each way (ms), all ways in turns."""
    ways = product.ways()
    times = {name: [] for name in ways}
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        for at in in_turns(len(ways), WARMUP + TURNS):
            name, way = list(ways.items())[at]
            way()
            begin.record(stream)
            for _ in range(TOGETHER):
                way()
            end.record(stream)
            stream.synchronize()
            times[name].append(cupy.cuda.get_elapsed_time(begin, end) / TOGETHER)
    return {name: samples[WARMUP:] for name, samples in times.items()}


def main():
    """Measure every size and print the medians."""
    out, *sizes = sys.argv[1:]
    found = []
    for size in sizes:
        m, n, k = (int(part) for part in size.split("x"))
        times = measure(RankProduct(m, n, k))
        usual = statistics.median(times["at once"])
        for name, samples in times.items():
            middle = statistics.median(samples)
            print(f"{size} {name:32} {middle:8.3f} ms {2 * m * n * k / middle / 1e9:6.0f} TFLOP/s {middle / usual:.3f}")
        found.append({"m": m, "n": n, "k": k, "dtype": "f16", "ms": times})
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    with open(out, "w", encoding="utf-8") as file:
        json.dump({"device": name, "date": time.strftime("%Y-%m-%d"), "products": found}, file, indent=1)


if __name__ == "__main__":
    main()
