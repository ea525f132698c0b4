"""Fixtures of tests that run on several ranks with the host backend."""

from __future__ import annotations

import functools
import pathlib

import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from tests.helpers.sessions import opener

MOST_RANKS = {
    **dict.fromkeys(("test_api_arguments.py", "test_api_arrays.py", "test_gemm_files.py", "test_odd_arguments.py"), 3),
    **dict.fromkeys(("test_random_arrays.py", "test_same_memory.py", "test_api_random_arguments.py"), 3),
    "test_api_references.py": 2,
    "test_api_opening.py": 3,
    "test_peers.py": 3,
    "test_fuzz.py": 4,
    "test_parts_memory.py": 3,
    **dict.fromkeys(("test_api_measure.py", "test_bench.py", "test_calibrate.py"), 3),
    **dict.fromkeys(
        (
            "test_api_layouts.py",
            "test_gemm_layouts.py",
            "test_redistribute.py",
            "test_views.py",
            "test_api_matrices.py",
            "test_api_trace.py",
            "test_api_tuning.py",
        ),
        4,
    ),
    **dict.fromkeys(("test_command.py", "test_gemm_errors.py"), 4),
}
"""On how many ranks files run at most: more take longer and do nothing else."""


def pytest_ignore_collect(collection_path: pathlib.Path) -> bool | None:
    """Leave out what is the same on many ranks; None has pytest decide."""
    from mpi4py import MPI

    return True if MPI.COMM_WORLD.size > MOST_RANKS.get(collection_path.name, MPI.COMM_WORLD.size) else None


@pytest.fixture(scope="session")
def comm():
    """All ranks of the job."""
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.fixture(scope="session")
def backend_name():
    """The backend that this folder tests; the folder of GPU tests has another."""
    return "host"


@pytest.fixture(scope="session")
def open_session(backend_name):
    """Opens a session of this folder's backend."""
    return opener(backend_name)


@pytest.fixture(scope="session")
def agree_all(comm):
    """The only assertion between collective calls: `agree_all(ok, detail)` fails on all ranks, naming the guilty."""
    return functools.partial(collective_assert, comm)


@pytest.fixture(scope="module")
def session(comm):
    """A session with the host backend on a machine of equal links; schedules are proved before use."""
    machine = um.Machine.uniform(comm.size)
    with um.Session(comm, backend="host", machine=machine, timeout_s=30, verify=True) as session:
        yield session


@pytest.fixture
def few_ranks(comm):
    """For what takes long on many ranks, as whole calibrations, whose probes grow with the square of the ranks."""
    if comm.size > 3:
        pytest.skip("takes long with more than 3 ranks, and is the same")


@pytest.fixture
def two_ranks(comm):
    """For what takes long on more than two."""
    if comm.size > 2:
        pytest.skip("takes long with more than 2 ranks, and is the same")


@pytest.fixture
def group(comm):
    """A group of all ranks."""
    from uncut_mpi.spmd.group import Group

    group = Group(comm)
    yield group
    group.free()
