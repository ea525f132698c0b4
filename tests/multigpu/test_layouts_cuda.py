"""The matrices in parts of tests/mpi, and views of them, through the cuda backend."""

from __future__ import annotations

# The same cases, collected here with this folder's fixtures.
from tests.mpi.test_api_layouts import *  # noqa: F403
from tests.mpi.test_gemm_layouts import *  # noqa: F403
from tests.mpi.test_redistribute import *  # noqa: F403
from tests.mpi.test_views import *  # noqa: F403
