"""The gemm command of tests/mpi through the cuda backend."""

from __future__ import annotations

from tests.mpi.test_command import *  # noqa: F403  the same cases, collected here with this folder's fixtures
