"""
Products of many extents, one GPU: how does their rate depend on what m and n are multiples of?

    python3 tests/perf/product_map.py OUT.json [TYPE ...]

C += A B by cuBLAS, column-major, columns 8192 apart, full-mantissa values, k = 2048, every pair of `EXTENTS`. A sample
is four products in a row behind a kernel that holds the stream until all are issued; all pairs take turns, with pauses,
and the median of three is kept.
"""

import json
import statistics
import sys
import time

import cupy
import numpy as np
from cupy.cuda import cublas
from products_at_once import SPIN, TYPES

EXTENTS = sorted(
    {256, 272, 304, 320, 336, 384, 400, 448, 512, 528, 576, 640, 672, 704, 768, 816, 896, 960, 1024, 1040, 1088, 1152}
    | {1216, 1280, 1312, 1408, 1536, 1600, 1664, 1792, 1824, 2048, 2064, 2176, 2304, 2432, 2560, 2736, 3072, 3280, 4096}
)
K, LD = 2048, 8192
PRODUCTS, ROUNDS, HELD_CLOCKS = 4, 3, 400_000


def measure(name):
    """Return the seconds of every pair of extents."""
    kind, code, wide, wide_code, compute = TYPES[name]
    random = np.random.default_rng(1)
    block = cupy.asarray((random.random(1 << 22) - 0.5).astype(kind))
    a, b = cupy.resize(block, LD * K), cupy.resize(block, LD * EXTENTS[-1])
    c = cupy.zeros(LD * EXTENTS[-1], wide)
    one = np.ones(1, "float64" if wide == "float64" else "float32")
    handle, spin = cublas.create(), cupy.RawKernel(SPIN, "spin")
    stream, start, stop = cupy.cuda.Stream(non_blocking=True), cupy.cuda.Event(), cupy.cuda.Event()
    found = {}
    order = [(m, n) for m in EXTENTS for n in EXTENTS]
    for turn in range(ROUNDS + 1):
        random.shuffle(order)
        for m, n in order:
            with stream:
                spin((1,), (1,), (np.int64(HELD_CLOCKS),))
                start.record()
                for _ in range(PRODUCTS):
                    cublas.gemmEx(
                        handle, 0, 0, m, n, K, one.ctypes.data, a.data.ptr, code, LD, b.data.ptr, code, LD,
                        one.ctypes.data, c.data.ptr, wide_code, LD, compute, -1,
                    )  # fmt: skip
                stop.record()
            stop.synchronize()
            if turn:
                found.setdefault((m, n), []).append(cupy.cuda.get_elapsed_time(start, stop) * 1e-3 / PRODUCTS)
            time.sleep(0.0005)
    return {pair: statistics.median(times) for pair, times in found.items()}


def main():
    """Measure and keep all."""
    results = {"k": K, "ld": LD, "extents": EXTENTS, "us": {}}
    for name in sys.argv[2:] or TYPES:
        began = time.perf_counter()
        seconds = measure(name)
        results["us"][name] = [[round(1e6 * seconds[m, n], 2) for n in EXTENTS] for m in EXTENTS]
        by_pair = {(m, n): 2e-12 * m * n * K / found for (m, n), found in seconds.items()}
        few = [n for n in EXTENTS if n in (256, 304, 320, 512, 576, 1024, 1040, 1536, 2048, 2064, 4096)]
        print(f"{name}: TFLOP/s, m down, n along; {time.perf_counter() - began:.0f} s")
        print("      " + " ".join(f"{n:6d}" for n in few))
        for m in few:
            print(f"{m:5d} " + " ".join(f"{by_pair[m, n]:6.1f}" for n in few), flush=True)
        with open(sys.argv[1], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
