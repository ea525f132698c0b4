"""
Plan once, multiply many times with other scalars: repeated calls plan nothing and broadcast nothing.

    mpiexec -n 3 python -m mpi4py examples/02_reuse_a_plan.py        (3 ranks; any number works)
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

import uncut_mpi as um

M, N, K = 256, 320, 192

with um.Session(MPI.COMM_WORLD) as session:
    a, b, c = (session.empty_host(shape, np.float64) for shape in ((M, K), (K, N), (M, N)))
    if session.rank == 0:
        rng = np.random.default_rng(2)
        for matrix in (a, b, c):
            matrix.array[:] = rng.random(matrix.shape)
        expected = c.array.copy()

    with session.plan(a, b, c, reads_c=True) as plan:
        plan.execute(alpha=1.0, beta=0.5)  # the first execution binds the plan to the matrices
        before = session.counters.snapshot()
        for step in range(1, 10):
            plan.execute(alpha=1.0 / (step + 1), beta=0.5)
        after = session.counters

    planned = after.planner_calls - before.planner_calls
    broadcast = after.schedule_bytes_broadcast - before.schedule_bytes_broadcast
    if session.rank == 0:
        for step in range(10):
            expected = a.array @ b.array / (step + 1) + 0.5 * expected
        error = np.abs(c.array - expected).max()
        print(f"9 repeated calls: {planned} planner calls, {broadcast} bytes broadcast, largest error {error:.1e}")
        if planned or broadcast or not error < 1e-10:
            raise SystemExit("a repeated call planned again, or the result is wrong")
