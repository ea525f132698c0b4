"""Sums that are the same everywhere, of tests/mpi, through the cuda backend."""

from __future__ import annotations

# The same cases, collected here with this folder's fixtures.
from tests.mpi.test_same_sums import *  # noqa: F403
