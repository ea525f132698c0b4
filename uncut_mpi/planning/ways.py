"""
Ways between devices of a node whose links differ: what a byte takes, and over whom it goes where a link is slow.

On some nodes a few devices are joined by NVLink and the rest by PCIe. There a copy goes over one or two other ranks, in
chunks that follow each other. A piece that several ranks need passes from one to the next over fast links. Between
nodes no rank leads a copy round.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from typing import Final

import numpy as np

from uncut_mpi.model.machine import Machine

RELAY_GAIN: Final = 2.0
"""Over other ranks goes what arrives more than so many times as fast. Links that differ by less are alike."""

_CHUNKS: Final = 8
"""How many chunks of a copy follow each other, so that each relay makes it longer by one of these."""


@dataclasses.dataclass(frozen=True, slots=True)
class Ways:
    """
    Ways between devices of a node; all empty where links are alike on each node.

    Attributes
    ----------
    first, place : list of int
        Of each rank: where its ways begin in those below, and which of those of a node leads to it.
    ways : list of (float, int, int)
        What a byte costs, 1 on the fastest link of the node, and up to two ranks that hand it on in turn, -1 for none.
    links : list of float
        The same of the link itself.
    sends, receives : list of float
        Of each rank: what a byte costs at the port that all links from its device to the node's others share, or to it;
        0 where there is none.
    from_host : list of float
        What a byte costs from shared host memory to each device.
    """

    first: list[int] = dataclasses.field(default_factory=list)
    place: list[int] = dataclasses.field(default_factory=list)
    ways: list[tuple[float, int, int]] = dataclasses.field(default_factory=list)
    links: list[float] = dataclasses.field(default_factory=list)
    sends: list[float] = dataclasses.field(default_factory=list)
    receives: list[float] = dataclasses.field(default_factory=list)
    from_host: list[float] = dataclasses.field(default_factory=list)

    @property
    def even(self) -> bool:
        """Whether links between devices of a node are alike."""
        return not self.ways


@functools.lru_cache(maxsize=8)
def ways_of(machine: Machine) -> Ways:
    """Return the ways of a machine: of those that are as fast the shorter, then the one over the lowest ranks."""
    of_nodes = [np.flatnonzero(machine.node_of == node) for node in range(machine.num_nodes)]
    between = [machine.bandwidth_gb_per_s[np.ix_(ranks, ranks)].astype(np.float64) for ranks in of_nodes]
    if all(map(_alike, between)):
        return Ways()
    count = machine.num_ranks
    first, places, ways, costs = [0] * count, [0] * count, list[tuple[float, int, int]](), list[float]()
    sends, receives, from_host = np.zeros(count), np.zeros(count), np.ones(count)
    inward = machine.links(sharing=tuple(range(count)))[machine.host_of, range(count)]
    for ranks, rates in zip(of_nodes, between, strict=True):
        np.fill_diagonal(rates, 0.0)
        fastest = float(rates.max()) if len(ranks) > 1 else 1.0
        for place, rank in enumerate(ranks.tolist()):
            first[rank], places[rank] = len(ways), place
            for to in range(len(ranks)):
                rate, over = _way(rates, place, to) if place != to else (fastest, ())
                one, two = (*(int(ranks[relay]) for relay in over), -1, -1)[:2]
                ways.append((fastest / rate, one, two))
        costs += np.divide(fastest, rates, out=np.ones_like(rates), where=rates > 0).ravel().tolist()
        of_node = set(ranks.tolist())
        for port in machine.ports:
            links = {link for link in port.links if of_node.issuperset(link) and link[0] != link[1]}
            for end, of in ((0, sends), (1, receives)):
                for rank, others in collections.Counter(link[end] for link in links).items():
                    if others == len(ranks) - 1:
                        of[rank] = fastest / port.expected_gb_per_s
        from_host[ranks] = np.divide(fastest, inward[ranks], out=np.ones(len(ranks)), where=inward[ranks] > 0)
    return Ways(first, places, ways, costs, sends.tolist(), receives.tolist(), from_host.tolist())


def _alike(rates: np.ndarray) -> bool:
    """Return whether no link of a node is so slow that its copies had better go over others."""
    of_links = rates[~np.eye(len(rates), dtype=bool)]
    return len(rates) < 3 or of_links.min() <= 0 or bool(of_links.max() < RELAY_GAIN * of_links.min())


def _way(rates: np.ndarray, source: int, to: int) -> tuple[float, tuple[int, ...]]:
    """Return what the best way sustains, and the ranks that it goes over."""
    best: tuple[float, tuple[int, ...]] = float(rates[source, to]), ()
    enough = RELAY_GAIN * best[0]
    firsts, lasts = np.flatnonzero(rates[source] > enough), np.flatnonzero(rates[:, to] > enough)
    firsts, lasts = firsts[firsts != to], lasts[lasts != source]
    into, out = rates[source], rates[:, to]
    alone = [int(one) for one in firsts if out[one] > enough]
    over_one = np.minimum(into[alone], out[alone]) * _CHUNKS / (_CHUNKS + 1)
    over_two = np.minimum(np.minimum.outer(into[firsts], out[lasts]), rates[firsts[:, None], lasts])
    over_two = over_two.ravel() * _CHUNKS / (_CHUNKS + 2)
    if len(over_one) and over_one.max() > max(best[0], enough):
        best = float(over_one.max()), (alone[int(over_one.argmax())],)
    if len(over_two) and over_two.max() > max(best[0], enough):
        one, two = divmod(int(over_two.argmax()), len(lasts))
        best = float(over_two.max()), (int(firsts[one]), int(lasts[two]))
    return best
