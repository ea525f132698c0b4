"""Tasks for baselines, in shared memory of the test's own."""

from __future__ import annotations

import contextlib

import numpy as np

from uncut_mpi.baselines.task import Matrices
from uncut_mpi.command.bench_baselines import SharedTask

ALPHA, BETA = 1.2345, 1.1154


@contextlib.contextmanager
def make_task(m, n, k, dtype, place, compute, seed=3):
    """Yield a task of random matrices, its result poisoned, and the matrices as its process maps them."""
    rng = np.random.default_rng(seed)
    a, b, c = (np.asfortranarray(rng.uniform(-1, 1, shape).astype(dtype.numpy)) for shape in ((m, k), (k, n), (m, n)))
    shared = SharedTask(a, b, c, dtype)
    try:
        shared.poison()
        task = shared.task(ALPHA, BETA, place, compute)
        yield task, Matrices.open(task)
    finally:
        shared.close()


def expected(task, matrices):
    """Return C as it should be, in float64."""
    a, b, c = (matrix.astype(np.float64) for matrix in (matrices.a, matrices.b, matrices.c))
    return task.alpha * a @ b + task.beta * c
