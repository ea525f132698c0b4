"""
Ways between devices whose links differ: what a byte takes, and over whom it goes where a link is slow.

On some nodes a few devices are joined by NVLink and the rest by PCIe. There a copy goes over one or two other ranks, in
chunks that follow each other. A piece that several ranks need passes from one to the next over fast links.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
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
    Ways between devices; all empty where links are alike.

    Attributes
    ----------
    ways : list of (float, int, int)
        [from * ranks + to]: what a byte costs, 1 on the fastest link, and up to two ranks that hand it on in turn, -1
        for none.
    links : list of float
        The same of the link itself.
    sends, receives : list of float
        What a byte costs at the port that all links from a device share, or to it; 0 where there is none.
    from_host : list of float
        What a byte costs from shared host memory to each device.
    """

    ways: list[tuple[float, int, int]] = dataclasses.field(default_factory=list)
    links: list[float] = dataclasses.field(default_factory=list)
    sends: list[float] = dataclasses.field(default_factory=list)
    receives: list[float] = dataclasses.field(default_factory=list)
    from_host: list[float] = dataclasses.field(default_factory=list)

    @property
    def even(self) -> bool:
        """Whether links between devices are alike."""
        return not self.ways


@functools.lru_cache(maxsize=8)
def ways_of(machine: Machine) -> Ways:
    """Return the ways of a machine: of those that are as fast the shorter, then the one over the lowest ranks."""
    count = machine.num_ranks
    rates = machine.bandwidth_gb_per_s[:count, :count].astype(np.float64)
    np.fill_diagonal(rates, 0.0)
    of_links = rates[~np.eye(count, dtype=bool)]
    if count < 3 or of_links.min() <= 0 or of_links.max() < RELAY_GAIN * of_links.min():
        return Ways()
    fastest = float(of_links.max())
    ways = [(1.0, -1, -1)] * count**2
    of_nodes = [np.flatnonzero(machine.node_of == node) for node in range(machine.num_nodes)]
    found: dict[bytes, list[tuple[float, tuple[int, ...]]]] = {}
    for here, there in itertools.product(of_nodes, repeat=2):
        # A relay is on one of the two nodes. Nodes whose links are alike have ways alike.
        near = here if here is there else np.concatenate((here, there))
        between_near = rates[np.ix_(near, near)]
        first = len(near) - len(there)
        pairs = itertools.product(range(len(here)), range(first, len(near)))
        key = b"%d %d " % (len(here), first) + between_near.tobytes()
        if key not in found:
            found[key] = [_way(between_near, one, other) if one != other else (fastest, ()) for one, other in pairs]
        ends = itertools.product(here.tolist(), there.tolist())
        for (source, to), (rate, over) in zip(ends, found[key], strict=True):
            one, two = (*(int(near[relay]) for relay in over), -1, -1)[:2]
            ways[source * count + to] = fastest / rate, one, two
    links = np.divide(fastest, rates, out=np.ones_like(rates), where=rates > 0)
    sends, receives = np.zeros(count), np.zeros(count)
    for port in machine.ports:
        between = {link for link in port.links if max(link) < count and link[0] != link[1]}
        for end, of in ((0, sends), (1, receives)):
            for rank, others in collections.Counter(link[end] for link in between).items():
                if others == count - 1:
                    of[rank] = fastest / port.expected_gb_per_s
    inward = machine.links(sharing=tuple(range(count)))[machine.host_of, range(count)]
    from_host = np.divide(fastest, inward, out=np.ones(count), where=inward > 0)
    return Ways(ways, links.ravel().tolist(), sends.tolist(), receives.tolist(), from_host.tolist())


def _way(rates: np.ndarray, source: int, to: int) -> tuple[float, tuple[int, ...]]:
    """Return what the best way sustains, and the ranks that it goes over."""
    best: tuple[float, tuple[int, ...]] = float(rates[source, to]), ()
    enough = RELAY_GAIN * best[0]
    firsts = [int(one) for one in np.flatnonzero(rates[source] > enough) if one != to]
    lasts = [int(one) for one in np.flatnonzero(rates[:, to] > enough) if one != source]
    chains: list[tuple[int, ...]] = [(one,) for one in firsts if one in lasts]
    chains += [(firsts[one], lasts[two]) for one, two in np.argwhere(rates[np.ix_(firsts, lasts)] > enough)]
    for chain in chains:
        narrowest = min(float(rates[leg]) for leg in itertools.pairwise((source, *chain, to)))
        rate = narrowest * _CHUNKS / (_CHUNKS + len(chain))
        if rate > max(best[0], enough):
            best = rate, chain
    return best
