"""
How cuBLAS adds up parts of k of products written in a half type, with and without leave to do so in that type.

    python tests/perf/half_reductions.py OUT.json

For shapes of each kind, on one GPU: the root mean square of the error against a float64 product over that of rounding
the exact result once, and the least of seven times, for the default math mode and for
CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION.
"""

import json
import sys

import cupy
import numpy as np

ALLOWED, DISALLOWED = 0, 16  # CUBLAS_DEFAULT_MATH, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
R_16F, R_16BF, COMPUTE_32F = 2, 14, 68
SHAPES = (
    *(
        (1500, 300, 1804),
        (1500, 1204, 1804),
        (1500, 301, 1804),
        (750, 602, 1804),
        (375, 1204, 1804),
        (1000, 1000, 3001),
    ),
    *((512, 512, 8192), (1024, 256, 16384), (256, 256, 65536), (128, 128, 4096), (4096, 64, 4096), (300, 200, 3000)),
    *((4096, 4096, 4096), (8192, 8192, 8192), (4096, 4096, 65536), (8192, 512, 8192), (2048, 2048, 16384)),
)


def filled(shape, kind, rng):
    """Return random values of a half type, and the same in float64."""
    values = rng.random(shape, dtype=cupy.float32) - cupy.float32(0.5)
    if kind == R_16F:
        half = values.astype(cupy.float16)
        return half, half.astype(cupy.float64)
    bits = values.view(cupy.uint32) & cupy.uint32(0xFFFF0000)
    return (bits >> 16).astype(cupy.uint16), bits.view(cupy.float32).astype(cupy.float64)


def widened(array, kind):
    """Return a result in float64."""
    if kind == R_16F:
        return array.astype(cupy.float64)
    return (array.astype(cupy.uint32) << 16).view(cupy.float32).astype(cupy.float64)


def main(out):
    """Print and keep the table."""
    handle = cupy.cuda.device.get_cublas_handle()
    rng, stream, rows = cupy.random.default_rng(3), cupy.cuda.Stream(non_blocking=True), []
    alpha, beta = np.array(1.2345, np.float32), np.array(1.1154, np.float32)
    for kind, digits in ((R_16F, 11), (R_16BF, 8)):
        for m, n, k in SHAPES:
            # Column-major: arrays here are the transposes.
            (a, wide_a), (b, wide_b), (c, wide_c) = (filled(s, kind, rng) for s in ((k, m), (n, k), (n, m)))
            exact = float(alpha) * (wide_b @ wide_a) + float(beta) * wide_c
            # To so many digits; what is below the smallest normal number does not count.
            unit = cupy.exp2(cupy.floor(cupy.log2(cupy.maximum(cupy.abs(exact), 2.0**-14))) - digits + 1)
            rounding = cupy.sqrt(cupy.mean((cupy.rint(exact / unit) * unit - exact) ** 2))
            row = {"type": "f16" if kind == R_16F else "bf16", "m": m, "n": n, "k": k}
            for name, mode in (("allowed", ALLOWED), ("disallowed", DISALLOWED)):
                cupy.cuda.cublas.setMathMode(handle, mode)
                times = []
                for _ in range(8):
                    result = c.copy()
                    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                    cupy.cuda.Device().synchronize()
                    with stream:
                        begin.record(stream)
                        cupy.cuda.cublas.gemmEx(
                            handle, 0, 0, m, n, k, alpha.ctypes.data, a.data.ptr, kind, m, b.data.ptr, kind, k,
                            beta.ctypes.data, result.data.ptr, kind, m, COMPUTE_32F, -1,
                        )  # fmt: skip
                        end.record(stream)
                    stream.synchronize()
                    times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e-3)
                error = float(cupy.sqrt(cupy.mean((widened(result, kind) - exact) ** 2)) / rounding)
                row |= {f"{name}_error": error, f"{name}_s": min(times[1:])}
            rows.append(row)
            print(
                f"{row['type']:4} {m:5} {n:5} {k:6}  {row['allowed_error']:6.3f} and "
                f"{row['disallowed_error']:6.3f} of the rounding error, {row['allowed_s'] * 1e6:9.1f} and "
                f"{row['disallowed_s'] * 1e6:9.1f} us"
            )
    cupy.cuda.cublas.setMathMode(handle, ALLOWED)
    with open(out, "w") as file:
        json.dump({"rows": rows, "cublas": cupy.cuda.cublas.getVersion(handle)}, file, indent=1)


if __name__ == "__main__":
    main(sys.argv[1])
