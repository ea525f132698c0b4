"""
Kernel ridge regression whose kernel matrix is in a file: larger than what the GPUs, and copies of it, may take.

    mpiexec -n 2 python -m mpi4py examples/kernel_ridge.py        (2 ranks; any number works)

Conjugate gradients solve (K + ridge I) W = Y for all outputs at once. K(x, z) = (1 + x·z / features)^degree is made
some rows at a time, and then each iteration reads it from its file. For a larger one, of 288 MB, try --points 6000
--features 20 --outputs 16 --device-memory 64MiB --host-memory 64MiB --block 1000 --folder /a/fast/disk.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
import time

import numpy as np
from mpi4py import MPI

import uncut_mpi as um

NOISE, RIDGE = 0.05, 1e-3

parser = argparse.ArgumentParser()
parser.add_argument("--points", type=int, default=600)
parser.add_argument("--held-out", type=int, default=100, help="points for the error")
parser.add_argument("--features", type=int, default=6)
parser.add_argument("--outputs", type=int, default=3, help="right-hand sides")
parser.add_argument("--degree", type=int, default=2, help="of the kernel")
parser.add_argument("--iterations", type=int, default=200, help="at most")
parser.add_argument("--block", type=int, default=200, help="rows of the kernel matrix made at a time")
parser.add_argument("--device-memory", default="1MiB")
parser.add_argument("--host-memory", default="1MiB")
parser.add_argument("--folder", help="for the kernel matrix; a temporary one by default")
options = parser.parse_args()
comm = MPI.COMM_WORLD


def kernel(left: um.Matrix, right: um.Matrix, out: um.Matrix) -> None:
    """Fill a matrix with the kernel of all pairs of points; every rank has some rows of it in host memory."""
    session.gemm(left, right.T, out, alpha=1 / options.features)
    out.local[:] = (out.local + 1) ** options.degree


def dots(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Return the dot product of each column with its like, over the rows of all ranks."""
    return comm.allreduce(np.einsum("ij,ij->j", left, right))


with (
    tempfile.TemporaryDirectory(dir=options.folder) if comm.rank == 0 else contextlib.nullcontext() as folder,
    um.Session(comm, device_memory=options.device_memory, host_memory=options.host_memory) as session,
):
    path = os.path.join(comm.bcast(folder), "kernel.npy")
    n, first = options.points, session.rank == 0

    # Points, and outputs that are random polynomials of them, of degree 2 at most; those to learn from have noise.
    rng = np.random.default_rng(4)
    x, held_out = (session.empty_host((count, options.features)) for count in (n, options.held_out))
    y, w, p, q = (session.empty((n, options.outputs), "f64", um.Layout.rows(), memory="host") for _ in range(4))
    bends = rng.standard_normal((options.outputs, options.features, options.features)) / options.features
    bends *= options.degree > 1  # or the kernel could not learn them
    slopes = rng.standard_normal((options.features, options.outputs))
    points = [rng.standard_normal(one.shape) for one in (x, held_out)]
    noise = NOISE * rng.standard_normal(y.shape)
    if first:
        x.array[:], held_out.array[:] = points
    values = [np.einsum("ni,oij,nj->no", one, bends, one, optimize=True) + one @ slopes for one in points]
    y.local[:] = (values[0] + noise)[y.local_indices[0]]

    # K, some rows after the others.
    began = time.perf_counter()
    matrix = session.create_file(path, (n, n), "f64", order="C")
    block = session.empty((min(options.block, n), n), "f64", um.Layout.rows(), memory="host")
    for start in range(0, n, options.block):
        some = block[: min(options.block, n - start)]
        kernel(x[start : start + options.block], x, some)
        session.redistribute(some, None, out=matrix[start : start + options.block])
    session.release(block)
    made = time.perf_counter() - began

    # Conjugate gradients, a step length for each column. Only Q = K P is a product; the rest is local.
    began = time.perf_counter()
    w.local[:] = 0
    residual = y.local.copy()
    p.local[:] = residual
    square = wanted = dots(residual, residual)
    done = 0
    with session.plan(matrix, p, q, reads_c=False) as plan:
        while done < options.iterations and (square > 1e-20 * wanted).any():
            plan.execute()
            q.local[:] += RIDGE * p.local
            length = square / np.maximum(dots(p.local, q.local), np.finfo(float).tiny)
            w.local[:] += length * p.local
            residual -= length * q.local
            before, square = square, dots(residual, residual)
            p.local[:] = residual + square / np.maximum(before, np.finfo(float).tiny) * p.local
            done += 1
    solved = time.perf_counter() - began

    cross = session.empty((options.held_out, n), "f64", um.Layout.rows(), memory="host")
    kernel(held_out, x, cross)
    predicted = session.gather(session.gemm(cross, w))
    if first:
        error = np.sqrt(np.mean((predicted - values[1]) ** 2))
        left = np.sqrt((square / wanted).max())
        print(
            f"{session.size} ranks, {session.backend_name} backend, {options.device_memory} for each device: ", end=""
        )
        print(f"a kernel matrix of {n * n * 8 / 1e6:.1f} MB made in {made:.2f} s")
        print(f"{done} iterations, {solved / max(done, 1) * 1e3:.1f} ms each, residual {left:.1e} of Y")
        print(f"error on held-out points {error:.4f}, noise {NOISE}, deviation {values[1].std():.2f}")
        if not error < NOISE:
            raise SystemExit("the error on held-out points is larger than the noise")
