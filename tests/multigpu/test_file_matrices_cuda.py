"""The products of tests/mpi with matrices in files, through the cuda backend."""

from __future__ import annotations

from tests.mpi.test_file_matrices import *  # noqa: F403 -- the same cases, collected here with this folder's fixtures
