"""Routing by LAM and ETA: the native loop against the Python one, whose examples are those of test_claims.py."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.routing import best_chain, pipeline
from uncut_mpi import _native

NATIVE_NEVER = (2**63 - 1) // 4
INF = math.inf


times = st.integers(0, 1000)


@given(st.lists(st.tuples(times, st.integers(1, 100)), min_size=1, max_size=6), times, st.integers(1, 9))
def test_the_pipeline_formula_is_what_chunks_do_one_by_one(
    hops: list[tuple[int, int]], start: int, chunks: int
) -> None:
    there = [start] * chunks
    expected = []
    for free, cost in hops:
        busy_until = free
        for q in range(chunks):
            busy_until = max(busy_until, there[q]) + cost
            there[q] = busy_until
        expected.append(there[-1])
    assert pipeline(start, [free for free, _ in hops], [cost for _, cost in hops], chunks) == expected


@st.composite
def states(draw: st.DrawFn, most: int = 8) -> tuple[list[float], list[list[int]], list[list[int]], list[int], int]:
    """ETA of some holders, LAM, chunk costs, destinations that do not hold the tile, chunks."""
    locations = draw(st.integers(2, most + 2))
    holders = draw(st.sets(st.integers(0, locations - 1), min_size=1, max_size=locations - 1))
    others = [location for location in range(locations) if location not in holders]
    destinations = draw(st.permutations(others))[: draw(st.integers(1, min(most, len(others))))]
    eta = [float(draw(times)) if location in holders else INF for location in range(locations)]
    # Few distinct values, so that ties are frequent.
    matrix = st.lists(
        st.lists(st.integers(0, 6), min_size=locations, max_size=locations), min_size=locations, max_size=locations
    )
    lam, cost = draw(matrix), draw(matrix)
    return eta, lam, cost, list(destinations), draw(st.integers(1, 8))


@settings(deadline=None, max_examples=150)
@given(states())
def test_the_native_chain_search_agrees_with_the_python_one(state) -> None:
    eta, lam, cost, destinations, chunks = state
    chain = best_chain(eta, lam, cost, destinations, chunks)
    native = [NATIVE_NEVER if t == INF else int(t) for t in eta]
    source, order, arrivals = _native.uncut_best_chain(native, lam, cost, destinations, chunks)
    assert (source, tuple(order), tuple(arrivals)) == (chain.source, chain.order, chain.arrivals)


def test_a_native_chain_needs_a_destination() -> None:
    with pytest.raises(ValueError, match="needs a destination"):
        _native.uncut_best_chain([0], [[0]], [[0]], [], 1)
