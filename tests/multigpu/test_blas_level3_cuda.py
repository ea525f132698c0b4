"""The other names of level 3 of BLAS and PBLAS on the ranks' own GPUs: the cases of the host."""

from __future__ import annotations

import pytest

from tests.mpi.test_blas_level3 import *  # noqa: F403  the same cases, collected here with this folder's backend

pytestmark = [pytest.mark.mpi(min_size=1), pytest.mark.multigpu(num=1)]
