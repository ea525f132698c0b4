"""
Time per row of two-dimensional copies from GPU 0 to GPU 1, by width and distance of the rows, idle and beside products.

    python tests/perf/device_rows.py

Prints ns per row: GPU 0 idle, multiplying, multiplying with rows that begin off a boundary; and bytes / 390 GB/s.
"""

import time

import cupy
import numpy as np

ROWS, COPIES, SAMPLES = 1024, 6, 7
WIDTHS = (4096, 6144, 8192, 8704, 9216, 10240, 11264, 12288, 12800, 13312, 14336, 16384, 16896, 20480, 24576)


def main():
    """Measure every width at two distances."""
    runtime = cupy.cuda.runtime
    for device in (0, 1):
        runtime.setDevice(device)
        runtime.deviceEnablePeerAccess(1 - device)
    runtime.setDevice(0)
    source = cupy.random.random(1 << 25)
    with cupy.cuda.Device(1):
        target = cupy.zeros(1 << 25)
    copying, multiplying = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    a, b, c = (cupy.random.random((4096, 4096)) for _ in range(3))

    def per_row_ns(width, distance, *, load=False, offset=0):
        times = []
        for _ in range(SAMPLES):
            if load:
                with multiplying:
                    for _ in range(2):
                        cupy.matmul(a, b, out=c)
                time.sleep(0.0008)
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record(copying)
            for copy in range(COPIES):
                at = source.data.ptr + offset + copy * (1 << 24)
                runtime.memcpy2DAsync(target.data.ptr, width, at, distance, width, ROWS, 3, copying.ptr)
            end.record(copying)
            end.synchronize()
            multiplying.synchronize()
            times.append(cupy.cuda.get_elapsed_time(start, end) * 1e6 / COPIES / ROWS)
        return float(np.median(times))

    for distance in (32768, 65536):
        for width in WIDTHS:
            columns = (
                per_row_ns(width, distance),
                per_row_ns(width, distance, load=True),
                per_row_ns(width, distance, load=True, offset=12800),
                width / 390,
            )
            print(width, distance, *(f"{ns:.1f}" for ns in columns), flush=True)


if __name__ == "__main__":
    main()
