"""Plans that try schedules, through the cuda backend."""

from __future__ import annotations

from tests.mpi.test_api_tuning import *  # noqa: F403  the same cases, collected here with this folder's session
