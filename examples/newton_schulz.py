"""
The orthogonalisation of the Muon optimiser, in bf16: five Newton-Schulz steps on a matrix dealt by rows.

    mpiexec -n 2 python -m mpi4py examples/newton_schulz.py        (2 ranks; any number works)

A step is X := aX + b(XXᵀ)X + c(XXᵀ)²X, here three products: G := XXᵀ, Y := bX + cGX, X := aX + GY. All matrices stay
dealt to the ranks. With GPUs try --rows 8192 --cols 16384 --repeat 10 --no-check.
"""

from __future__ import annotations

import argparse
import statistics
import time

import ml_dtypes
import numpy as np
from mpi4py import MPI

import uncut_mpi as um

A, B, C = 3.4445, -4.7750, 2.0315
LEAST, MOST = 0.6, 1.3  # where these coefficients bring singular values
CLOSE = 0.02  # to the reference: some roundings to 8 bits, added up over the steps

parser = argparse.ArgumentParser()
parser.add_argument("--rows", type=int, default=128)
parser.add_argument("--cols", type=int, default=320)
parser.add_argument("--steps", type=int, default=5)
parser.add_argument("--repeat", type=int, default=1, help="orthogonalise so many times, for the time of a step")
parser.add_argument("--no-check", action="store_true", help="leave out the reference, which numpy computes on rank 0")
options = parser.parse_args()
shape, least = (options.rows, options.cols), min(options.rows, options.cols)


def reference(given: np.ndarray) -> np.ndarray:
    """Return the singular values that the same steps give in float64."""
    wide = given.astype(np.float64)
    wide = wide if wide.shape[0] <= wide.shape[1] else wide.T
    wide = wide / np.linalg.norm(wide)
    for _ in range(options.steps):
        gram = wide @ wide.T
        wide = A * wide + (B * gram + C * gram @ gram) @ wide
    return np.linalg.svd(wide, compute_uv=False)


with um.Session(MPI.COMM_WORLD) as session:
    # Each rank has some rows of a gradient in host memory.
    layout = um.Layout.rows()
    gradient = session.empty(shape, "bf16", layout, memory="host")
    mine = np.random.default_rng(session.rank).standard_normal(gradient.local.shape, np.float32)
    gradient.local[:] = mine.astype(ml_dtypes.bfloat16)
    squares = session.gather_values(float(np.square(gradient.local.astype(np.float32)).sum(dtype=np.float64)))
    norm = sum(squares) ** 0.5

    # X and Y are dealt as the gradient is; a tall X is used as its transpose, so that G is as small as can be.
    x, y = (session.empty(shape, "bf16", layout) for _ in range(2))
    gram = session.empty((least, least), "bf16", layout)
    wide, between = (x, y) if shape[0] <= shape[1] else (x.T, y.T)

    seconds = []
    with (
        session.plan(wide, wide.T, gram, reads_c=False) as square,
        session.plan(gram, wide, between) as inner,
        session.plan(gram, between, wide) as outer,
    ):
        for _ in range(options.repeat + 1):  # the first time binds the plans, and is not counted
            session.redistribute(gradient, None, out=x)
            session.barrier()
            began = time.perf_counter()
            for step in range(options.steps):
                # X is the gradient at first, and from then on it has been divided by its norm.
                by = 1 / norm if step == 0 else 1.0
                square.execute(alpha=by * by)
                session.redistribute(x, None, out=y)  # each rank copies its own rows
                inner.execute(alpha=by * C, beta=by * B)
                outer.execute(alpha=1.0, beta=by * A)
            seconds.append((time.perf_counter() - began) / options.steps)

    result, given = (None, None) if options.no_check else (session.gather(x), session.gather(gradient))
    if session.rank == 0:
        flops = 6 * least * shape[0] * shape[1]
        taken = statistics.median(seconds[1:])
        print(f"{session.size} ranks, {session.backend_name} backend, {shape[0]}x{shape[1]} bf16: ", end="")
        print(f"{taken * 1e3:.3f} ms a step, {flops / taken / 1e12:.3f} TFLOP/s")
    if result is not None:
        found = np.linalg.svd(result.astype(np.float64), compute_uv=False)
        error = np.abs(found - reference(given)).max()
        print(f"singular values {found[-1]:.3f} to {found[0]:.3f}, at most {error:.1e} from the reference")
        if not (found[-1] > LEAST and found[0] < MOST and error < CLOSE):
            raise SystemExit("the result is not orthogonal, or not what the reference gives")
