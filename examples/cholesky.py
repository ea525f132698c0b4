"""
Cholesky factorisation A = L Lᵀ of a matrix that is dealt to ranks, by columns of blocks.

    mpiexec -n 2 python -m mpi4py examples/cholesky.py        (2 ranks; any number works)

The lower triangle of A becomes L in place. A block on the diagonal is factored by the rank that has it, a triangular
solve makes those below it, and what they add up to is taken from the rest: first from the next block on the diagonal,
which is factored while the ranks go on. On two GPUs: --extent 32768 --block 8192 --repeats 40.
"""

from __future__ import annotations

import argparse
import importlib
import time
from typing import Any

import numpy as np
from mpi4py import MPI

import uncut_mpi as um

parser = argparse.ArgumentParser()
parser.add_argument("--extent", type=int, default=700, help="rows of A")
parser.add_argument("--block", type=int, default=128, help="rows that one rank factors")
parser.add_argument("--repeats", type=int, default=1)
parser.add_argument("--shift", type=float, default=1.0, help="times the extent is added to the diagonal of G Gᵀ")
options = parser.parse_args()


def factor_block(own: Any) -> None:
    """Overwrite the lower triangle of a block of this rank with its Cholesky factor."""
    if session.backend_name != "cuda":
        own[:] = np.linalg.cholesky(own)
        return
    from cupy_backends.cuda.libs import cublas, cusolver

    handle, lower = xp.cuda.device.get_cusolver_handle(), cublas.CUBLAS_FILL_MODE_LOWER
    where = lower, len(own), own.data.ptr, own.strides[1] // own.itemsize  # cupy.linalg's makes copies
    work, info = xp.empty(cusolver.dpotrf_bufferSize(handle, *where), own.dtype), xp.empty(1, "i4")
    cusolver.dpotrf(handle, *where, work.data.ptr, work.size, info.data.ptr)
    if info.item():
        raise ArithmeticError("the matrix is not positive definite")


def factor(a: um.Matrix) -> None:
    """Overwrite the lower triangle of a matrix with its Cholesky factor."""
    n, block = a.shape[0], options.block
    later: list[um.Handle[um.Matrix]] = []
    for start in range(0, n, block):
        stop, end = min(start + block, n), min(start + 2 * block, n)
        diagonal, head, rest = a[start:stop, start:stop], a[stop:end, start:stop], a[end:, start:stop]
        with session.together("factoring a block"):
            if diagonal.local.size:  # of all its rows, and on one rank
                factor_block(diagonal.local)
        for product in later:
            product.wait()
        session.trsm(diagonal, a[stop:, start:stop], left=False, trans="T")
        by: Any = {"alpha": -1.0, "beta": 1.0, "trans_b": "T"}
        session.gemm(head, head, a[stop:end, stop:end], triangle="lower", **by)
        later = [
            session.gemm(rest, head, a[end:, stop:end], wait=False, **by),
            session.gemm(rest, rest, a[end:, end:], triangle="lower", wait=False, **by),
        ]


with um.Session(MPI.COMM_WORLD, max_plans=1000) as session:  # each view has a plan of its own
    xp = importlib.import_module("cupy") if session.backend_name == "cuda" else np
    n = options.extent
    layout = um.Layout.block_cyclic(options.block, options.block, (session.size, 1))
    g = session.empty((n, n), "f64", layout, order="F")  # as cuSOLVER takes it
    rng = xp.random.default_rng(session.rank)
    g.local[:] = rng.random(g.local.shape) - 0.5
    given, made = (session.empty((n, n), "f64", layout, order="F") for _ in range(2))
    given.local[:] = 0
    session.syrk(g, given)
    rows, cols = map(xp.asarray, given.local_indices)
    given.local[:] += options.shift * n * (rows[:, None] == cols)
    largest = MPI.COMM_WORLD.allreduce(float(abs(given.local).max()), MPI.MAX)
    times = []
    for _ in range(options.repeats):
        session.redistribute(given, None, out=made)
        session.barrier()
        began = time.perf_counter()
        factor(made)
        session.barrier()
        times.append(time.perf_counter() - began)

    # |A - L Lᵀ| is at most (n + 1) u |L||Lᵀ| (Higham 2002, theorem 10.3), which is at most the largest of A; and the
    # same again for the check.
    session.syrk(made, given, alpha=-1.0, beta=1.0)
    error = MPI.COMM_WORLD.allreduce(float(abs(given.local).max()), MPI.MAX)
    bound = 2 * (n + 1) * 2.0**-53 * largest
    if session.rank == 0:
        middle, who = float(np.median(times)), f"{session.size} ranks, {session.backend_name} backend"
        print(f"{who}: {n}x{n} in {middle * 1e3:.1f} ms, {n**3 / 3 / middle / 1e12:.3f} TFLOP/s")
        print(f"largest error of L L^T {error:.1e}, bound {bound:.1e}")
    if not error <= bound:
        raise SystemExit("the error is larger than its bound")
