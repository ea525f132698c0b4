"""
Level 3 of BLAS beside gemm and cuBLASXt, in turns: square matrices dealt by columns, in device memory.

    mpiexec -n N python3 -m mpi4py tests/perf/level3.py OUT.json [DTYPE:EXTENT ...]

Times are host times from a barrier to the end of the call, the slowest rank's. Printed are medians over turns with
quartiles, and the rate as a share of gemm's. By 2n³ operations of gemm and symm, and n³ of the others. cuBLASXt is
called by rank 0, its matrices on the first GPU: on that alone or on those of all ranks, in blocks of 1024 to 8192,
whichever is fastest for each name. What trsm and then trmm leave is compared with what there was (Higham 2002,
sections 8.1 and 8.2).
"""

import argparse
import ctypes
import importlib
import itertools
import json
import statistics
import time

import numpy as np
from common import in_turns
from mpi4py import MPI

import uncut_mpi as um
from uncut_mpi.bench.baselines.cublas_calls import BlasLibrary

ALPHA, BETA, TURNS = 1.2345, 1.1154, 9

parser = argparse.ArgumentParser()
parser.add_argument("out")
parser.add_argument("cases", nargs="*", default=["f64:8192", "f64:16384"])
parser.add_argument("--backend", default="auto")
parser.add_argument("--no-xt", action="store_true", help="leave cuBLASXt out")
options = parser.parse_args()
comm = MPI.COMM_WORLD


XT_BLOCKS = (1024, 2048, 4096, 8192)


class Xt:
    """cuBLASXt on the first GPU or on all, by one process."""

    def __init__(self, devices, cupy, extent):
        with open("/proc/self/maps") as lines:
            (path,) = {line.split()[-1] for line in lines if "libcublas.so" in line}
        self._blas, self._n = BlasLibrary(path), ctypes.c_size_t(extent)
        self._handles = {len(some): self._blas.xt_handle(some) for some in (devices[:1], devices)}
        self.best = {}
        rng = cupy.random.default_rng(5)
        self._a, self._b, self._c = (
            rng.random((extent, extent)) - 0.5 + (cupy.eye(extent) * extent if at == 0 else 0) for at in range(3)
        )

    def choose(self, name):
        """Find what is fastest, by the second of two calls each."""
        took = {}
        for setting in itertools.product(self._handles, XT_BLOCKS):
            self.best[name] = setting
            self.call(name)
            start = time.perf_counter()
            self.call(name)
            took[setting] = time.perf_counter() - start
        self.best[name] = min(took, key=took.get)

    def call(self, name):
        count, edge = self.best[name]
        self._blas.call("cublasXtSetBlockDim", self._handles[count], ctypes.c_int(edge))
        zero = ctypes.c_int(0)
        alpha, beta = (ctypes.byref(ctypes.c_double(value)) for value in (ALPHA, BETA))
        a, b, c = (ctypes.c_void_p(array.data.ptr) for array in (self._a, self._b, self._c))
        n = self._n
        words = {
            "gemm": (zero, zero, n, n, n, alpha, a, n, b, n, beta, c, n),
            "syrk": (zero, zero, n, n, alpha, a, n, beta, c, n),
            "symm": (zero, zero, n, n, alpha, a, n, b, n, beta, c, n),
            "trmm": (zero, zero, zero, zero, n, n, alpha, a, n, b, n, c, n),
            "trsm": (zero, zero, zero, zero, n, n, alpha, a, n, b, n),
        }
        self._blas.call(f"cublasXtD{name}", self._handles[count], *words[name])


def measure(session, dtype, extent, xp):
    """Return the times (ms) of each call of a case, and how far a solution is off, as a share of its bound."""
    a, b, c = (session.empty((extent, extent), dtype, um.Layout.cols()) for _ in range(3))
    rng = xp.random.default_rng(session.rank)
    for matrix in (a, b, c):
        matrix.local[:] = rng.random(matrix.local.shape) - 0.5
    rows, cols = map(xp.asarray, a.local_indices)
    a.local[:] += extent * (rows[:, None] == cols)
    before = b.local.copy()
    session.trsm(a, b)
    session.trmm(a, b)
    # Row by row |A⁻¹| |A| is at most 2 here, so both calls together are off by at most 6 n u |B|, from the right end.
    bound = 6 * extent * float(np.finfo(before.dtype).eps) * float(abs(before).max())
    share = comm.allreduce(float(abs(b.local - before).max()) / bound, MPI.MAX)
    calls = {
        "gemm": lambda: session.gemm(a, b, c, alpha=ALPHA, beta=BETA),
        "syrk": lambda: session.syrk(a, c, alpha=ALPHA, beta=BETA),
        "symm": lambda: session.symm(a, b, c, alpha=ALPHA, beta=BETA),
        "trmm": lambda: session.trmm(a, b, alpha=1 / extent),
        "trsm": lambda: session.trsm(a, b, alpha=extent),
    }
    if session.backend_name == "cuda" and dtype == "f64" and not options.no_xt:
        devices = comm.gather(xp.cuda.Device().id)
        xt = Xt(devices, xp, extent) if session.rank == 0 else None
        for name in calls if xt else ():
            xt.choose(name)
            print(f"Xt {name} of {extent}: {xt.best[name][0]} GPUs, blocks of {xt.best[name][1]}", flush=True)
        comm.barrier()
        calls |= {f"Xt {name}": (lambda name=name: xt and xt.call(name)) for name in [*calls]}
    times = {name: [] for name in calls}
    names = [*calls]
    for number, at in enumerate(in_turns(len(names), TURNS + 2)):
        session.barrier()
        start = time.perf_counter()
        calls[names[at]]()
        took = comm.allreduce(time.perf_counter() - start, MPI.MAX)
        if number >= 2 * len(names):
            times[names[at]].append(1e3 * took)
    for matrix in (a, b, c):
        session.release(matrix)
    return times, share


with um.Session(comm, backend=options.backend, max_plans=100) as session:
    found = {}
    cuda = session.backend_name == "cuda"
    xp = importlib.import_module("cupy") if cuda else np
    for case in options.cases:
        dtype, extent = case.split(":")
        if cuda:
            xp.get_default_memory_pool().free_all_blocks()
        times, share = found[case] = measure(session, dtype, int(extent), xp)
        if session.rank == 0:
            print(f"{case} on {session.size} ranks, {session.backend_name}: trsm, trmm off by {share:.3f} of the bound")
            gemm = statistics.median(times["gemm"])
            for name, values in times.items():
                low, middle, high = statistics.quantiles(values, n=4)
                share = gemm / middle / (1 if name.split()[-1] in ("gemm", "symm") else 2)
                print(f"{name:8} {middle:9.3f} ms ({low:.3f} to {high:.3f}), {share:.2f} of gemm's rate", flush=True)
    if session.rank == 0:
        with open(options.out, "w") as out:
            json.dump({"ranks": session.size, "backend": session.backend_name, "found": found}, out)
