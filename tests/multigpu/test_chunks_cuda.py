"""The products of tests/mpi that are done in chunks, through the cuda backend."""

from __future__ import annotations

import pytest

from tests.mpi.test_chunks import *  # noqa: F403 -- the same cases, collected here with this folder's fixtures

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.multigpu(num=1)]
