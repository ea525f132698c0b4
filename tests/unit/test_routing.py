"""Routing by LAM and ETA: the native loop against the Python one, whose examples are those of test_claims.py."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.routing import best_chain, pipeline
from uncut_mpi import _native

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
    alone = [best_chain(eta, lam, cost, [to], chunks).source for to in destinations]
    starts = [max(int(eta[source]), lam[source][to]) for source, to in zip(alone, destinations, strict=True)]
    first = [
        (start + cost[source][to], start + chunks * cost[source][to])
        for start, source, to in zip(starts, alone, destinations, strict=True)
    ]
    free, chunk_cost = ([of[a][b] for a in destinations for b in destinations] for of in (lam, cost))
    order = _native.uncut_chain_order(first, free, chunk_cost, chunks)
    assert tuple(destinations[at] for at in order) == chain.order
