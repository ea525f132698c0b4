"""
Tensors of torch and jax, multiplied where they are: no copy goes in, and none comes out.

    mpiexec -n 2 python -m mpi4py examples/tensors.py        (2 ranks; needs torch, jax is optional)
"""

from __future__ import annotations

import importlib.util

import torch
from mpi4py import MPI

import uncut_mpi as um

M, N, K = 96, 64, 160

torch.manual_seed(1)
with um.Session(MPI.COMM_WORLD) as session:
    # A tensor lies in host memory, or on its own rank's GPU, which the session has made the current one.
    device = torch.device("cuda" if session.backend_name == "cuda" else "cpu")
    first, last = session.rank == 0, session.rank == session.size - 1
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        # Rank 0 has A and B, the last rank has C; the others pass None. B is a transposed view.
        left = torch.randn(M, K, device=device).to(dtype) if first else None
        right = torch.randn(N, K, device=device).to(dtype).T if first else None
        result = torch.zeros(M, N, dtype=dtype, device=device) if last else None
        a, b = session.register(left, root=0), session.register(right, root=0)
        c = session.register(result, root=session.size - 1)
        session.gemm(a, b, c)  # `result` holds the product now
        exact = MPI.COMM_WORLD.bcast((left.double() @ right.double()).cpu() if first else None)
        if last:
            error = float((result.double().cpu() - exact).abs().max() / exact.abs().max())
            print(f"{dtype} on {device.type}, C at {c.location}: largest error {error:.1e} of the largest value")
            if not error < K**0.5 * torch.finfo(dtype).eps:
                raise SystemExit("the product is wrong")

    # A result that the session made of tensors is a tensor, where this rank sees it; any other library takes it, too.
    eye = session.register(torch.eye(4, dtype=torch.float32, device=device) if first else None, root=0)
    made = session.gemm(eye, eye)
    if made.address:
        assert made.array.trace() == torch.from_dlpack(made).trace() == 4

    if importlib.util.find_spec("jax"):
        from jax import numpy as jnp

        # Arrays of jax never change, so they are A or B, and C is memory of the session.
        ones = session.register(jnp.ones((8, 8), dtype=jnp.bfloat16) if first else None, root=0)
        if session.gemm(ones, ones, session.empty_host((8, 8), "bf16")).array[0, 0] != 8:
            raise SystemExit("the product of jax arrays is wrong")
