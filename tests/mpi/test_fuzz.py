"""Random sequences of calls on ranks that drift apart; tests/perf/fuzz_ranks.py makes as many as one likes."""

from __future__ import annotations

import pytest

from tests.helpers.sequences import run

pytestmark = pytest.mark.host_backend


@pytest.mark.on_nodes
def test_each_call_is_right_or_an_error_on_every_rank_and_nothing_is_left(comm):
    counts = run(comm, 1, {1: 150, 2: 150}.get(comm.size, 100))
    assert counts["gemm"] >= counts["steps"] // 40, counts  # the same on all ranks
