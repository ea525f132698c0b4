"""
One large product whole and in blocks of C, one after another: does a GPU multiply smaller blocks faster?

    python3 tests/perf/product_blocks.py OUT.json [TYPE MxNxK ...]

C := alpha A B + C by cuBLAS, half types with C in float32, full-mantissa values, column-major. Every way of cutting
takes its turn, nine rounds of about 30 ms each, so that all meet the same clocks; medians, TFLOP/s.
"""

import json
import statistics
import sys

import cupy
import numpy as np
from turns import in_turns

TYPES = {"f64": (np.float64, 1, 70), "f32": (np.float32, 0, 68), "f16": (np.float16, 2, 68)}
ROUNDS, ROUND_S = 9, 0.03


def measure(dtype, m, n, k, ways):
    """Return seconds of each way, medians and samples."""
    kind, code, compute = TYPES[dtype]
    wide, wide_code = (np.float64, 1) if dtype == "f64" else (np.float32, 0)
    random = np.random.default_rng(1)
    block = cupy.asarray((random.random(1 << 22) - 0.5).astype(kind))
    a, b = (cupy.resize(block, extent) for extent in (m * k, k * n))
    c = cupy.resize(cupy.asarray((random.random(1 << 22) - 0.5).astype(wide)), m * n)
    alpha, beta = (np.array(x, wide) for x in (1.2345e-4, 1.0))
    handle = cupy.cuda.device.get_cublas_handle()
    item, wide_item = np.dtype(kind).itemsize, np.dtype(wide).itemsize

    def run(rows, cols):
        for col in range(0, n, cols):
            for row in range(0, m, rows):
                cupy.cuda.cublas.gemmEx(
                    handle, 0, 0, min(rows, m - row), min(cols, n - col), k,
                    alpha.ctypes.data, a.data.ptr + row * item, code, m, b.data.ptr + col * k * item, code, k,
                    beta.ctypes.data, c.data.ptr + (col * m + row) * wide_item, wide_code, m, compute, -1,
                )  # fmt: skip

    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    samples = {way: [] for way in ways}
    for at in in_turns(len(ways), ROUNDS + 1):
        way = ways[at]
        repeats = max(1, int(ROUND_S / (samples[way][-1] if samples[way] else ROUND_S)))
        start.record()
        for _ in range(repeats):
            run(*way)
        stop.record()
        stop.synchronize()
        samples[way].append(cupy.cuda.get_elapsed_time(start, stop) * 1e-3 / repeats)
    return {way: times[1:] for way, times in samples.items()}


def main():
    """Measure and print all."""
    out, *given = sys.argv[1:]
    results = []
    for dtype, size in zip(given[::2], given[1::2], strict=True):
        m, n, k = map(int, size.split("x"))
        edges = [(m, n), (m, n // 2), (m // 2, n), (m // 2, n // 2), (m, n // 4), (m // 4, n), (m // 4, n // 4)]
        ways = [way for way in dict.fromkeys(edges) if min(way) >= 512]
        found = measure(dtype, m, n, k, ways)
        whole = statistics.median(found[m, n])
        for way, times in found.items():
            median = statistics.median(times)
            spread = f"{min(times) * 1e6:.1f} to {max(times) * 1e6:.1f}"
            rate = f"{2e-12 * m * n * k / median:6.1f} TF  {median / whole:.3f}"
            print(f"{dtype} {size} in {way[0]}x{way[1]}: {median * 1e6:9.1f} us ({spread}) {rate}", flush=True)
            results.append({"dtype": dtype, "m": m, "n": n, "k": k, "block": way, "samples_s": times})
    with open(out, "w") as file:
        json.dump(results, file)


if __name__ == "__main__":
    main()
