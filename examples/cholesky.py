"""
Cholesky factorisation A = L Lᵀ of a matrix that is dealt to ranks, by halves.

    mpiexec -n 2 python -m mpi4py examples/cholesky.py        (2 ranks; any number works)

The lower triangle of A becomes L in place. The first half is factored; a triangular solve makes the rows below it, and
what they add up to is taken from the second half's triangle, which is factored in the same way. Blocks at the end of
this are factored by the rank that has them. On two GPUs: --extent 32768 --block 4096 --repeats 9.
"""

from __future__ import annotations

import argparse
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
    handle, lower = cupy.cuda.device.get_cusolver_handle(), cublas.CUBLAS_FILL_MODE_LOWER
    where = lower, len(own), own.data.ptr, own.strides[1] // own.itemsize  # cupy.linalg's makes copies
    work, info = cupy.empty(cusolver.dpotrf_bufferSize(handle, *where), own.dtype), cupy.empty(1, "i4")
    cusolver.dpotrf(handle, *where, work.data.ptr, work.size, info.data.ptr)
    if info.item():
        raise ArithmeticError("the matrix is not positive definite")


def factor(a: um.Matrix) -> None:
    """Overwrite the lower triangle of a matrix with its Cholesky factor."""
    extent = a.shape[0]
    if extent <= options.block:
        with session.together("factoring a block"):
            if a.local.size:  # of all its rows, and on one rank
                factor_block(a.local)
        return
    half = -(-extent // options.block) // 2 * options.block
    first, below, last = a[:half, :half], a[half:, :half], a[half:, half:]
    factor(first)
    session.trsm(first, below, left=False, trans="T")
    session.syrk(below, last, alpha=-1.0, beta=1.0)
    factor(last)


with um.Session(MPI.COMM_WORLD, max_plans=1000) as session:  # each view has a plan of its own
    if session.backend_name == "cuda":
        import cupy
        from cupy_backends.cuda.libs import cublas, cusolver

        xp = cupy
    else:
        xp = np
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
    session.release(g)
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
        best, rate = min(times), n**3 / 3 / min(times) / 1e12
        who = f"{session.size} ranks, {session.backend_name} backend"
        print(f"{who}: {n}x{n} in {best * 1e3:.1f} ms, {rate:.3f} TFLOP/s")
        print(f"largest error of L L^T {error:.1e}, bound {bound:.1e}")
    if not error <= bound:
        raise SystemExit("the error is larger than its bound")
