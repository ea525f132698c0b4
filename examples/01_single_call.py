"""
One product of two matrices in host memory that all ranks share.

    mpiexec -n 2 python -m mpi4py examples/01_single_call.py        (2 ranks; any number works)
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

import uncut_mpi as um

M, N, K = 300, 200, 400

with um.Session(MPI.COMM_WORLD) as session:
    a = session.empty_host((M, K), np.float64)
    b = session.empty_host((K, N), np.float64)
    if session.rank == 0:  # every rank sees the same memory, so one of them fills it
        rng = np.random.default_rng(1)
        a.array[:] = rng.random((M, K))
        b.array[:] = rng.random((K, N))

    c = session.gemm(a, b)  # collective: waits for rank 0 to have filled A and B

    if session.rank == 0:
        error = np.abs(c.array - a.array @ b.array).max()
        print(f"{session.size} ranks, {session.backend_name} backend, {M}x{N}x{K}: largest error {error:.1e}")
        if not error < 1e-10:
            raise SystemExit("the product is wrong")
