"""Tasks for baselines, in shared memory of the test's own."""

from __future__ import annotations

import contextlib

import numpy as np

from uncut_mpi.bench.baselines.task import Matrices
from uncut_mpi.bench.datasets import OTHERWISE, Case
from uncut_mpi.bench.processes import SharedTask
from uncut_mpi.model.places import Places

ALPHA, BETA = 1.2345, 1.1154


@contextlib.contextmanager
def make_task(m, n, k, dtype, place, compute, seed=3):
    """Yield a task of random matrices, its result poisoned, and the matrices as its process maps them."""
    rng = np.random.default_rng(seed)

    def random(*shape):
        values = rng.uniform(-1, 1, shape)
        return values + 1j * rng.uniform(-1, 1, shape) if dtype.is_complex else values

    a, b, c = (np.asfortranarray(random(*shape).astype(dtype.numpy)) for shape in ((m, k), (k, n), (m, n)))
    shared = SharedTask(a, b, c, dtype)
    try:
        shared.poison()
        task = shared.task(ALPHA, BETA, place, compute)
        yield task, Matrices.open(task)
    finally:
        shared.close()


def wide(matrix):
    """Return a matrix in float64, or in complex128 if it is complex."""
    return matrix.astype(np.complex128 if matrix.dtype.kind == "c" else np.float64)


def expected(task, matrices):
    """Return C as it should be, in float64 or complex128."""
    a, b, c = map(wide, (matrices.a, matrices.b, matrices.c))
    return task.alpha * a @ b + task.beta * c


DEALT = {
    (96, 64, 80): (
        "rows,rows,rows",
        "cols,cols,cols",
        "blocks,blocks,blocks",
        "cyclic:8,cyclic:8,cyclic:8",
        *OTHERWISE,
    ),
    (48, 64, 32): ("cyclic:4:8,cyclic:8:4,cyclic:4", "blocks,cols@C,rows@host", "rows,cols@host,cols@C"),
}
"""Placements to try, by extents: those of the dataset, with blocks as small as the matrices, and others."""


def dealt_tasks(dtype, ranks):
    """Yield placements, of many ranks some, and tasks of matrices that are dealt so with what `make_task` yields."""
    for (m, n, k), placements in DEALT.items():
        for placement in placements[:: 1 if ranks <= 2 else 2]:
            words = Case(m, n, k, placement.replace("256", "16").replace("64", "8")).places(ranks)
            places = Places.parse(words)
            place = tuple(map(str, (places.a, places.b, places.c)))
            with make_task(m, n, k, dtype, place, tuple(range(ranks))) as made:
                yield placement, *made


def check_every_setting(ask, task, matrices, what):
    """Multiply by each setting of a process that answers `ask`, check the results and return the settings."""
    begun = ask({"do": "begin", "task": task.to_json()})
    # A library may have no product of just these layouts.
    assert set(begun["failed"]) <= {"as dealt"}, f"{what}: {begun['failed']}"
    wanted = expected(task, matrices)
    # γ_k of the accumulator on sums below k·1.24 + 1.2, and one rounding of the type (Higham 2002, section 3.1).
    most = (1.24 * task.k + 1.2) * (2 if task.dtype.is_complex else 1)  # of which each part is the sum of two
    half = task.dtype.unit_roundoff if task.dtype.sums_wider else 0
    bound = most * ((task.k + 4) * task.dtype.accumulator.unit_roundoff + half)
    for setting in begun["settings"]:
        ask({"do": "begin", "task": task.to_json(), "settings": [setting]})
        # C goes on from call to call, and is set back at the end.
        assert len(ask({"do": "time", "count": 2})["samples_s"]) == 2
        matrices.out.fill(np.nan)
        ask({"do": "end"})
        found = wide(matrices.out)
        np.testing.assert_allclose(found, wanted, rtol=0, atol=bound, err_msg=f"{what}, {setting}")
    return list(begun["settings"])
