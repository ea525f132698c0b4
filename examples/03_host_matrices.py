"""
Matrices in three kinds of memory: private to one rank, shared by all, and on one rank's device.

    mpiexec -n 2 python -m mpi4py examples/03_host_matrices.py        (2 ranks; any number works)
"""

from __future__ import annotations

import numpy as np
from mpi4py import MPI

import uncut_mpi as um

M, N, K = 250, 130, 310

with um.Session(MPI.COMM_WORLD) as session:
    # A: an ordinary numpy array that only rank 0 has, here in Fortran order and part of a larger one.
    private = None
    if session.rank == 0:
        private = np.asfortranarray(np.random.default_rng(3).random((M + 10, K)))[:M]
    a = session.register(private, root=0)

    # B: shared host memory, which every rank fills in part.
    b = session.empty_host((K, N), np.float64)
    rows = np.array_split(np.arange(K), session.size)[session.rank]
    b.array[rows] = np.random.default_rng(session.rank).random((len(rows), N))

    # C: memory of the last rank's device (with the host backend, a segment that stands for it).
    c = session.empty_device((M, N), np.float64, rank=session.size - 1)
    session.gemm(a, b, c)
    result = session.download(c)

    if session.rank == 0:
        error = np.abs(result.array - private @ b.array).max()
        print(f"A {a.location}, B {b.location}, C {c.location}: largest error {error:.1e}")
        if not error < 1e-10:
            raise SystemExit("the product is wrong")
