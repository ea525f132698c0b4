"""The products of tests/mpi that are done in chunks, through the cuda backend."""

from __future__ import annotations

from tests.mpi.test_chunks import *  # noqa: F403 -- the same cases, collected here with this folder's fixtures
