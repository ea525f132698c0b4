"""The products of tests/mpi with memory that is not page-locked, through the cuda backend."""

from __future__ import annotations

from tests.mpi.test_unpinned_memory import *  # noqa: F403  the same cases, collected here with this folder's fixtures
