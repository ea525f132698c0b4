"""The turns of the flags' count of tests/mpi through the cuda backend."""

from __future__ import annotations

import pytest

from tests.mpi.test_api_epochs import *  # noqa: F403  the same cases, collected here with this folder's session


@pytest.fixture
def fresh_session(comm, open_session):
    """A session whose calls nobody has counted yet."""
    with open_session(comm) as session:
        yield session
