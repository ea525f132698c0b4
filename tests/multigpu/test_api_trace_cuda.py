"""Traces of real calls through the cuda backend."""

from __future__ import annotations

from tests.mpi.test_api_trace import *  # noqa: F403  the same cases, collected here with this folder's session
