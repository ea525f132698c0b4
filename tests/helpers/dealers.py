"""PyTorch and JAX as they deal arrays to the ranks of a job, for tests that run on several."""

from __future__ import annotations

import contextlib
import os
import socket

import numpy as np
import pytest


def free_address(comm):
    """Return a port of this machine that rank 0 has found free. Collective."""
    with contextlib.closing(socket.socket()) as door:
        door.bind(("localhost", 0))
        return comm.bcast(f"localhost:{door.getsockname()[1]}")


def torch_group(comm, device):
    """
    Make the ranks of a communicator torch's processes, in their order, while a block runs. Collective.

    `device` is the ordinal of this rank's GPU, for NCCL, or None on the host. Skips where torch is not installed.
    """
    torch = pytest.importorskip("torch")
    dist = pytest.importorskip("torch.distributed.tensor") and torch.distributed
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    address = free_address(comm)

    @contextlib.contextmanager
    def group():
        if device is not None:
            torch.cuda.set_device(device)
        names = "gloo" if device is None else "cpu:gloo,cuda:nccl"
        dist.init_process_group(names, init_method=f"tcp://{address}", rank=comm.rank, world_size=comm.size)
        try:
            yield torch
        finally:
            comm.Barrier()
            dist.destroy_process_group()

    return group()


def jax_processes(comm, device):
    """
    Make the ranks of a communicator JAX's processes, in their order, while a block runs. Collective.

    `device` is the ordinal of this rank's GPU, or None on the host. Skips where JAX is not installed.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # others want memory of the GPU, too
    jax = pytest.importorskip("jax")
    backend = pytest.importorskip("jax.extend.backend")
    address = free_address(comm)

    @contextlib.contextmanager
    def processes():
        backend.clear_backends()  # other tests may have used JAX alone
        jax.config.update("jax_platforms", "cpu" if device is None else "cuda")
        jax.config.update("jax_enable_x64", True)
        ids = None if device is None else [device]
        jax.distributed.initialize(address, comm.size, comm.rank, local_device_ids=ids)
        try:
            yield jax
        finally:
            comm.Barrier()
            jax.distributed.shutdown()

    return processes()


def ordinal_of(session):
    """Return the number of the session's GPU, None where its devices are the host's memory."""
    return session._backend._ordinal if session.backend_name == "cuda" else None


def as_numpy(array):
    """Return a tensor, or an array of numpy, cupy or JAX, as numbers of float64 on the host."""
    if hasattr(array, "detach"):
        return array.detach().double().cpu().numpy()
    return np.asarray(array.get() if hasattr(array, "get") else array).astype(np.float64)
