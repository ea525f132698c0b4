"""
What is measured of the net between nodes, and the `Net` that explains it. Pure.

A sample is messages at once. Each goes from one rank to one of another node, and then a byte comes back, so that the
sender's clock alone tells how long it took.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from uncut_mpi.model.ports import Net

Flow = tuple[int, int]
"""(sender, receiver): ranks of different nodes."""

ALONE: Final = "alone"
RANKS: Final = "ranks"
BOTH_WAYS: Final = "both ways"
NODES: Final = "nodes"

_DIGITS: Final = 9
"""To which a misfit is known: what differs by rounding alone fits as well."""


@dataclasses.dataclass(frozen=True, slots=True)
class NetSample:
    """
    Messages at once.

    Attributes
    ----------
    kind : str
        ``"alone"``, ``"ranks"``, ``"both ways"`` or ``"nodes"``. By ``"ranks"`` several of one node send to another. By
        ``"nodes"`` all ranks of each node send to the next node, and those of the last one to the first.
    flows : tuple of (int, int)
        (sender, receiver) of each.
    nbytes : int
        Of each.
    seconds : tuple of float
        What the slowest took from its beginning until a byte had come back; one for each time that it was measured.
    """

    kind: str
    flows: tuple[Flow, ...]
    nbytes: int
    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        """The time to expect."""
        return statistics.median(self.seconds)

    def rate_gb_per_s(self, latency_s: float) -> float:
        """Return what all messages together get of the net (1e9 bytes per second)."""
        return len(self.flows) * self.nbytes / moving_s(self.median_s, latency_s) / 1e9


def moving_s(seconds: float, latency_s: float) -> float:
    """Return the time without two latencies, of the message and of the byte; no more than half is believed of them."""
    return max(seconds - 2 * latency_s, 0.5 * seconds)


def fit_latency(samples: Iterable[NetSample]) -> float:
    """Return the time of a message of few bytes (s), of the shortest messages that were sent alone, one at least."""
    alone = [one for one in samples if one.kind == ALONE]
    least = min(one.nbytes for one in alone)
    return 0.5 * statistics.median(one.median_s for one in alone if one.nbytes == least)


def busiest(flows: Iterable[Flow], node_of: Sequence[int], adapters: int) -> int:
    """Return how many of some messages the adapter sends, or receives, that has most; ranks are dealt as `Net` does."""
    users: collections.Counter[tuple[int, int, int]] = collections.Counter()
    for flow in flows:
        for way, rank in enumerate(flow):
            node = node_of[rank]
            place, ranks = sum(one == node for one in node_of[:rank]), sum(one == node for one in node_of)
            users[way, node, place * adapters // ranks] += 1
    return max(users.values())


def fit_net(samples: Sequence[NetSample], node_of: Sequence[int]) -> Net:
    """
    Return the net that explains samples.

    The number of adapters is the one with which their rates are the most alike, whether one rank of a node sends or
    several; of equals the least. The best rate is that of any sample, since a bound must not be beaten. What to expect
    is the median where all nodes send and receive at once.

    Parameters
    ----------
    samples : sequence of NetSample
        Short and long messages of one rank alone at least.
    node_of : sequence of int
        Node of each rank.

    Returns
    -------
    Net
    """
    latency_s = fit_latency(samples)
    longest = max(one.nbytes for one in samples)
    long = [one for one in samples if one.nbytes == longest]

    def rate(one: NetSample, seconds: float, adapters: int) -> float:
        """Return what the busiest adapter moves (1e9 bytes per second)."""
        return busiest(one.flows, node_of, adapters) * longest / moving_s(seconds, latency_s) / 1e9

    several = [one for one in long if one.kind == RANKS]
    growing = [one for one in long if one.kind == ALONE and any(one.flows[0] in more.flows for more in several)]
    growing += several

    def misfit(adapters: int) -> float:
        found = float(np.std([math.log(rate(one, one.median_s, adapters)) for one in growing]))
        return round(found, _DIGITS)

    adapters = min(range(1, max((len(one.flows) for one in growing), default=0) + 1), key=misfit, default=1)
    best = max(rate(one, min(one.seconds), adapters) for one in long)
    together = [one for one in long if one.kind == NODES] or long
    typical = statistics.median(rate(one, one.median_s, adapters) for one in together)
    return Net(best, latency_s, adapters, min(best, typical))
