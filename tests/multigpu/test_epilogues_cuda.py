"""Epilogues of tests/mpi, through the cuda backend."""

from __future__ import annotations

# The same cases, collected here with this folder's fixtures.
from tests.mpi.test_epilogues import *  # noqa: F403
