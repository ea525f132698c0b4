"""Routing by LAM and ETA: the paper's worked examples, and the native loop against the Python one."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.routing import EXHAUSTIVE_DESTINATIONS, best_chain, best_source, pipeline
from uncut_mpi import _native

NATIVE_NEVER = (2**63 - 1) // 4
INF = math.inf


@pytest.mark.parametrize("difference", [5.5, 10, 29.5])
def test_the_state_of_fig_4_routes_a00_from_the_host_and_b00_from_gpu_2(difference: float) -> None:
    # Locations G0, G1, G2, G3, H; destination G0: LAM from G1 is 40, from G2 15, from H 10.
    host = 4
    lam_to_g0 = [INF, 40, 15, 0, 10]
    t_p2p = 7
    cost = [0, t_p2p, t_p2p, t_p2p, t_p2p + difference]
    assert best_source([INF, 30, INF, INF, 0], lam_to_g0, cost) == (host, 10 + t_p2p + difference)
    assert best_source([INF, INF, 15, INF, 0], lam_to_g0, cost) == (2, 15 + t_p2p)


@pytest.mark.parametrize(("difference", "a00", "b00"), [(4.5, 4, 4), (30.5, 1, 2)])
def test_outside_that_range_fig_4_routes_otherwise(difference: float, a00: int, b00: int) -> None:
    lam_to_g0 = [INF, 40, 15, 0, 10]
    cost = [0, 7, 7, 7, 7 + difference]
    assert best_source([INF, 30, INF, INF, 0], lam_to_g0, cost)[0] == a00
    assert best_source([INF, INF, 15, INF, 0], lam_to_g0, cost)[0] == b00


@pytest.mark.parametrize(("hops", "chunks"), [(1, 8), (4, 8), (3, 1), (5, 2)])
def test_a_chain_of_equal_hops_takes_t_times_1_plus_n_minus_1_over_p(hops: int, chunks: int) -> None:
    t = 800.0
    arrivals = pipeline(0.0, [0.0] * hops, [t / chunks] * hops, chunks)
    assert arrivals[-1] == pytest.approx(t * (1 + (hops - 1) / chunks), rel=1e-14)


def test_four_destinations_in_eight_chunks_take_1_375_fetches_instead_of_4() -> None:
    assert pipeline(0.0, [0.0] * 4, [1 / 8] * 4, 8)[-1] == 1.375
    assert pipeline(0.0, [0.0] * 4, [1.0] * 4, 1)[-1] == 4.0


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


@settings(deadline=None, max_examples=100)
@given(states(most=EXHAUSTIVE_DESTINATIONS))
def test_no_order_ends_earlier_than_the_chain_found(state) -> None:
    eta, lam, cost, destinations, chunks = state
    chain = best_chain(eta, lam, cost, destinations, chunks)
    for order in itertools.permutations(destinations):
        first = [(max(t, lam[s][order[0]]) + chunks * cost[s][order[0]], s) for s, t in enumerate(eta) if t < INF]
        path = [min(first)[1], *order]
        hops = list(itertools.pairwise(path))
        last = pipeline(eta[path[0]], [lam[s][d] for s, d in hops], [cost[s][d] for s, d in hops], chunks)[-1]
        assert chain.arrivals[-1] <= last


def test_a_chain_leaves_a_busy_link_to_the_ranks_that_have_the_tile() -> None:
    # 0 holds the tile; its link to 1 is busy for long, that to 2 is free.
    lam = [[0, 900, 0], [0, 0, 0], [0, 0, 0]]
    cost = [[10] * 3 for _ in range(3)]
    assert best_chain([0.0, INF, INF], lam, cost, [1, 2], 4).order == (2, 1)


def test_a_native_chain_needs_a_destination() -> None:
    with pytest.raises(ValueError, match="needs a destination"):
        _native.uncut_best_chain([0], [[0]], [[0]], [], 1)
