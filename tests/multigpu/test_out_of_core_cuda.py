"""The products of tests/mpi that do not fit, through the cuda backend."""

from __future__ import annotations

from tests.mpi.test_out_of_core import *  # noqa: F403 -- the same cases, collected here with this folder's fixtures
