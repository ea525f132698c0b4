"""
Many products: one after another, waited for or not, and in batches; beside cupy's and cuBLAS's.

    mpiexec -n N python3 -m mpi4py tests/perf/in_loops.py OUT.json

All is on rank 0's GPU. The ways take turns, each after a warm-up; times are per product, or per call of a batch. The
plain thing is `cublas`: one call of it and a synchronisation for each product.
"""

import json
import pathlib
import statistics
import sys
import time

import ml_dtypes
import numpy as np
from mpi4py import MPI

import uncut_mpi as um

TYPES = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
CUBLAS_TYPES = {"f64": (1, 70), "f32": (0, 68), "f16": (2, 68), "bf16": (14, 68)}  # of data, and in which it sums
PRODUCTS: tuple[tuple[str, int], ...] = (("f64", 2048), ("f32", 2048), ("bf16", 2048), ("f16", 1536), ("f64", 512))
PRODUCTS += (("f64", 64), ("f64", 4096), ("f64", 1536), ("f64", 3376), ("f16", 3376))
BATCHES: tuple[tuple[str, int, int], ...] = (
    ("f64", 1000, 128),
    ("f32", 1000, 128),
    ("bf16", 1000, 128),
    ("f16", 1000, 128),
)
BATCHES += (("f64", 40, 64), ("f64", 10_000, 16), ("f64", 100, 512))
LOOP, ROUNDS = 100, 9


def operands(session, dtype, *shape):
    """Return three matrices or batches on rank 0's device, two of them with random values."""
    made = [session.empty_device((*shape, shape[-1]), TYPES[dtype], rank=0) for _ in range(3)]
    if session.rank == 0:
        import cupy

        for one in made[:2]:
            values = cupy.random.random(one.shape, np.float64 if dtype == "f64" else np.float32)
            one.array[...] = values.astype(one.array.dtype)
        cupy.cuda.Device().synchronize()
    return made


def compare(session, ways, times):
    """Return the samples (s) of each way, which take turns; a sample is the mean of so many times."""
    found = {name: [] for name in ways}
    for number in range(1 + ROUNDS):
        for name, way in ways.items():
            session.barrier()
            start = time.perf_counter()
            way()
            if number:
                found[name].append((time.perf_counter() - start) / times)
    return found


def theirs(session, made, times):
    """Return what cupy does, in types that it multiplies, where one rank has all."""
    a, b, c = made
    if session.size > 1 or a.dtype.name == "bf16":
        return {}
    import cupy

    def run():
        for _ in range(times):
            cupy.matmul(a.array, b.array, out=c.array)
        cupy.cuda.Device().synchronize()

    return {"cupy": run}


def plain(session, made, dtype):
    """Return a loop of calls of cuBLAS, each awaited, where one rank has all."""
    if session.size > 1:
        return {}
    import cupy
    from cupy.cuda import cublas, runtime

    kind, sums_in = CUBLAS_TYPES[dtype]
    size, scalar = made[0].shape[0], np.float64 if dtype == "f64" else np.float32
    one, zero = np.ones(1, scalar), np.zeros(1, scalar)
    factors = one.ctypes.data, zero.ctypes.data
    a, b, c = (matrix.array.data.ptr for matrix in made)
    handle, stream = cupy.cuda.device.get_cublas_handle(), cupy.cuda.get_current_stream().ptr

    def run():
        keep = one, zero
        for _ in range(LOOP):
            about = b, kind, size, a, kind, size, factors[1], c, kind, size, sums_in, -1  # of transposes, in rows
            cublas.gemmEx(handle, 0, 0, size, size, size, factors[0], *about)
            runtime.streamSynchronize(stream)
        del keep

    return {"cublas": run}


def products(session, dtype, size):
    """Compare a loop of products that are waited for with one of products that are not."""
    made = a, b, c = operands(session, dtype, size)
    plan = session.plan(a, b, c)

    def planned():
        for _ in range(LOOP):
            plan.execute()

    def waited():
        for _ in range(LOOP):
            session.gemm(a, b, c)

    def unwaited():
        for handle in [session.gemm(a, b, c, wait=False) for _ in range(LOOP)]:
            handle.wait()

    ours = {"waited": waited, "planned": planned, "unwaited": unwaited}
    return compare(session, ours | theirs(session, made, LOOP) | plain(session, made, dtype), LOOP)


def batch(session, dtype, count, size):
    """Time a first call of a batch, and compare later ones."""
    made = a, b, c = operands(session, dtype, count, size)
    session.barrier()
    start = time.perf_counter()
    session.gemm(a, b, c)
    first = time.perf_counter() - start
    return {"first": [first]} | compare(session, {"ours": lambda: session.gemm(a, b, c)} | theirs(session, made, 1), 1)


def main(out):
    """Run all, print medians with the least and the largest, and write the samples."""
    samples = {}
    with um.Session(MPI.COMM_WORLD) as session:
        for what, cases in ((products, PRODUCTS), (batch, BATCHES)):
            for case in cases:
                name = f"{what.__name__} {' '.join(map(str, case))}"
                samples[name] = what(session, *case)
                texts = [
                    f"{way} {1e6 * statistics.median(one):.1f} [{1e6 * min(one):.1f}, {1e6 * max(one):.1f}]"
                    for way, one in samples[name].items()
                ]
                if session.rank == 0:
                    print(f"{name}: {', '.join(texts)} us", flush=True)
        if session.rank == 0:
            about = {"ranks": session.size, "device": session.device_names[0], "samples_s": samples}
            pathlib.Path(out).write_text(json.dumps(about), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
