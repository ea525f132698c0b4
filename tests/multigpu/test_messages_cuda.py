"""The messages of tests/mpi from the memory of GPUs, and to it."""

from __future__ import annotations

from tests.mpi.test_messages import *  # noqa: F403  the same cases, collected here with this folder's fixtures
