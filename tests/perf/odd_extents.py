"""
Which extents and leading dimensions let the library use its fast kernels: one product, changed in one way at a time.

    python3 tests/perf/odd_extents.py [OUT.json]

C := alpha op(A) op(B) + C of 8192×4096×2048 by cuBLAS, half types with C in float32 unless said otherwise, random
values; best of nine, µs, and how many times as long as the even one.
"""

import json
import sys

import cupy
import numpy as np

TYPES = {
    "f16": (np.float16, 2, 68),
    "tf32": (np.float32, 0, 77),
    "f32": (np.float32, 0, 68),
    "f64": (np.float64, 1, 70),
}
EVEN = {"m": 8192, "n": 4096, "k": 2048}
# Changes of the extents; of the leading dimensions, which are those of the even product otherwise.
CASES = [
    ("even", {}, {}),
    ("m 8191", {"m": 8191}, {}),
    ("m 8184", {"m": 8184}, {}),
    ("m 8188", {"m": 8188}, {}),
    ("n 4095", {"n": 4095}, {}),
    ("k 2047", {"k": 2047}, {}),
    ("k 2044", {"k": 2044}, {}),
    ("all odd", {"m": 8191, "n": 4095, "k": 2047}, {}),
    ("ld of A 8193", {}, {"a": 8193}),
    ("ld of B 2049", {}, {"b": 2049}),
    ("ld of C 8193", {}, {"c": 8193}),
    ("k 7", {"k": 7}, {}),
    ("m 7", {"m": 7}, {}),
    ("n 7", {"n": 7}, {}),
]


def main():
    """Measure and print all."""
    handle = cupy.cuda.device.get_cublas_handle()
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()
    random = np.random.default_rng(1)
    results = []
    for name, (kind, code, compute) in TYPES.items():
        block = cupy.asarray((random.random(1 << 22) - 0.5).astype(kind))
        a, b = (cupy.resize(block, 8200 * 8200 // 2) for _ in range(2))
        wide = np.float64 if name == "f64" else np.float32
        c = cupy.zeros(8200 * 4200, wide)
        alpha, beta = (np.array(x, wide) for x in (1.2345, 1.0))
        for ops in ("NN", "TN", "NT", "TT"):
            base = None
            outs = [(wide, {2: 0}.get(code, code))] + ([(kind, code)] if name == "f16" else [])
            for what, extents, lds in CASES:
                m, n, k = ({**EVEN, **extents}[one] for one in "mnk")
                room = {one: EVEN[one] for one in "mnk"}
                lda, ldb, ldc = (room["m"], room["k"])[ops[0] == "T"], (room["k"], room["n"])[ops[1] == "T"], room["m"]
                lda, ldb, ldc = lds.get("a", lda), lds.get("b", ldb), lds.get("c", ldc)
                if "a" in lds and ops[0] == "T":
                    lda = 2049
                if "b" in lds and ops[1] == "T":
                    ldb = 4097
                for _, code_c in outs:
                    if ops != "NN" and code_c == 2:
                        continue
                    best = float("inf")
                    for _turn in range(9):
                        start.record()
                        for _again in range(4):
                            cupy.cuda.cublas.gemmEx(
                                handle, ops[0] == "T", ops[1] == "T", m, n, k, alpha.ctypes.data, a.data.ptr, code, lda,
                                b.data.ptr, code, ldb, beta.ctypes.data, c.data.ptr, code_c, ldc, compute, -1,
                            )  # fmt: skip
                        stop.record()
                        stop.synchronize()
                        best = min(best, cupy.cuda.get_elapsed_time(start, stop) * 1e-3 / 4)
                    base = base or best
                    out = " to f16" if code_c == 2 else ""
                    results.append({"dtype": name, "ops": ops, "case": what + out, "best_s": best})
                    print(f"{name} {ops} {what + out:>20}: {best * 1e6:8.1f} us  {best / base:.2f}", flush=True)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
