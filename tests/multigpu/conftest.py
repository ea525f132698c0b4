"""Sessions on real GPUs, one rank each; the cases are those of the host backend."""

from __future__ import annotations

import pytest

import uncut_mpi as um


@pytest.fixture(scope="session")
def comm():
    """All ranks of the job."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def session(comm):
    """A session with the cuda backend; schedules are proved before use."""
    with um.Session(comm, backend="cuda", timeout_s=30, verify=True) as session:
        yield session
