"""Random products of matrices in parts, on ranks that drift apart; tests/perf/fuzz_ranks.py goes on and on."""

from __future__ import annotations

import pytest

from tests.helpers.collective import collective_assert
from tests.helpers.distributed import random_product, shaken

pytestmark = pytest.mark.mpi


@pytest.fixture(scope="module")
def session(comm):
    """A session whose ranks run what is ready in random order, after random pauses, and deliver flags late."""
    with shaken(comm, seed=1) as session:
        yield session


@pytest.mark.parametrize("seed", range(12))
def test_any_product_is_right_on_ranks_that_drift_apart(comm, session, seed):
    wrong = random_product(session, seed)
    collective_assert(comm, not wrong, wrong)
