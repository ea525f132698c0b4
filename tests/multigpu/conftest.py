"""
Sessions on real GPUs, one rank each; the cases are those of the host backend.

With --share-gpus every session lets ranks share a GPU, so that a machine with one GPU runs the cases of several ranks:
memory of other processes, their flags and what they agree on are the same, speed is not.
"""

from __future__ import annotations

import functools

import pytest

import uncut_mpi as um
from tests.helpers.sessions import machine_cache, on_nodes, open_session, released  # noqa: F401 (of every test)


def pytest_addoption(parser):
    parser.addoption("--share-gpus", action="store_true", help="ranks share GPUs where they are more than these (slow)")


def pytest_configure(config):
    if config.getoption("--share-gpus", default=False):
        from uncut_mpi.api import session

        def start_shared(group, *, allow_shared_gpu, **options):
            return start(group, allow_shared_gpu=True, **options)

        start = session.start_backend
        session.start_backend = functools.wraps(start)(start_shared)


def pytest_collection_modifyitems(config, items):
    here = [item for item in items if item.path.is_relative_to(config.rootpath / "tests" / "multigpu")]
    alien = [item for item in here if item.get_closest_marker("host_backend")]
    if alien:
        config.hook.pytest_deselected(items=alien)
        items[:] = [item for item in items if item not in alien]


@pytest.fixture(scope="session")
def backend_name():
    """The backend that this folder tests."""
    return "cuda"


@pytest.fixture(scope="module")
def session(comm):
    """A session with the cuda backend; schedules are proved before use."""
    with um.Session(comm, backend="cuda", timeout_s=30, verify=True) as session:
        yield session
