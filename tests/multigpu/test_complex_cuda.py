"""The complex products of tests/mpi through the cuda backend."""

from __future__ import annotations

import pytest

# The same cases, collected here with this folder's fixtures.
from tests.mpi.test_complex import *  # noqa: F403

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.multigpu(num=1)]
