"""
Routing of read-only tiles over the links of a node: sections III-D and III-E in small, slow form.

The scheduler's native inner loop does the same on integers (picoseconds); tests hold the two together. It
alone also relays tiles over ranks that need not have them (`ScheduleOptions.max_hops`).

Words: ``eta[location]`` is when a valid copy of the tile is at a location (infinite: never);
``lam[source, destination]`` is when that link is free (the link availability matrix);
``chunk_cost[source, destination]`` is what one chunk takes on it.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import numpy as np

EXHAUSTIVE_DESTINATIONS: Final = 5
"""Up to so many destinations every order of a chain is tried (120 orders of 5)."""

Times: TypeAlias = Sequence[float] | np.ndarray
Links: TypeAlias = Sequence[Sequence[float]] | np.ndarray


@dataclasses.dataclass(frozen=True, slots=True)
class Chain:
    """
    A batched fetch: the tile passes from `source` along `order`, chunk by chunk.

    Attributes
    ----------
    source : int
        Location that the first destination copies from.
    order : tuple of int
        Destinations, each copying from the one before.
    arrivals : tuple of float
        When the last chunk reaches each of them.
    """

    source: int
    order: tuple[int, ...]
    arrivals: tuple[float, ...]


def best_source(eta: Times, lam_to: Times, cost_to: Times) -> tuple[int, float]:
    """
    Return the source from which a tile arrives first, and when (section III-D2).

    ETA_min = min over sources i of max(ETA[i], LAM[destination][i]) + cost_i; of equal ones the
    lowest i.

    Parameters
    ----------
    eta : sequence of float, shape (locations,)
        When each location has the tile.
    lam_to, cost_to : sequence of float, shape (locations,)
        When the link from each location to the destination is free, and what the fetch takes on it.
    """
    arrivals = [max(ready, free) + cost for ready, free, cost in zip(eta, lam_to, cost_to, strict=True)]
    source = min(range(len(arrivals)), key=arrivals.__getitem__)
    return source, arrivals[source]


def pipeline(start: float, free: Sequence[float], chunk_cost: Sequence[float], chunks: int) -> list[float]:
    """
    Return when the last of `chunks` chunks leaves each hop of a chain (section III-E).

    Chunk q starts on hop h when it is there and the link is free. As chunks take equal times on a
    hop, hop h ends at max(S_h + p c_h, F_{h−1} + c_h), where S_h is when its first chunk starts. With
    equal hops and idle links the last of n hops ends at t (1 + (n−1)/p), t = p c.

    Parameters
    ----------
    start : float
        When the source has the tile.
    free, chunk_cost : sequence of float
        Per hop: when its link is free, and what one chunk takes on it.
    """
    arrivals: list[float] = []
    first, last = start, start
    for hop, (link_free, cost) in enumerate(zip(free, chunk_cost, strict=True)):
        begin = max(first, link_free)
        last = max(begin + chunks * cost, last + cost if hop else 0)
        first = begin + cost
        arrivals.append(last)
    return arrivals


def best_chain(eta: Times, lam: Links, chunk_cost: Links, destinations: Sequence[int], chunks: int) -> Chain:
    """
    Return the chain over `destinations` whose last arrival is earliest (section III-E1).

    Up to `EXHAUSTIVE_DESTINATIONS` destinations every order is tried; of equal ones the least sum of
    arrivals wins, then the first in the order of `destinations`. Beyond, destinations are inserted
    one by one where they cost least, which is n³/3 hops of work and no longer the optimum.
    The source of a first hop is the one from which that destination would be served first.

    Parameters
    ----------
    eta : sequence of float, shape (locations,)
        When each location has the tile; ``math.inf`` for never.
    lam, chunk_cost : shape (locations, locations)
        [source][destination].
    destinations : sequence of int
        Locations that need the tile; at least one.
    chunks : int
        Chunks p of the fetch.
    """

    def first_hop(destination: int) -> int:
        ready = [math.inf if s == destination else t for s, t in enumerate(eta)]
        source, _ = best_source(
            ready,
            [lam[s][destination] for s in range(len(eta))],
            [chunks * chunk_cost[s][destination] for s in range(len(eta))],
        )
        return source

    def evaluate(order: Sequence[int]) -> Chain:
        source = first_hop(order[0])
        path = [source, *order]
        hops = list(itertools.pairwise(path))
        arrivals = pipeline(eta[source], [lam[s][d] for s, d in hops], [chunk_cost[s][d] for s, d in hops], chunks)
        return Chain(source, tuple(order), tuple(arrivals))

    def key(chain: Chain) -> tuple[float, float]:
        return chain.arrivals[-1], sum(chain.arrivals)

    if len(destinations) <= EXHAUSTIVE_DESTINATIONS:
        return min((evaluate(order) for order in itertools.permutations(destinations)), key=key)
    chain = evaluate(destinations[:1])
    for destination in destinations[1:]:
        chain = min((evaluate(order) for order in _insertions(chain.order, destination)), key=key)
    return chain


def _insertions(order: tuple[int, ...], destination: int) -> Iterator[tuple[int, ...]]:
    for at in range(len(order) + 1):
        yield (*order[:at], destination, *order[at:])
