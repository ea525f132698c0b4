"""
PARALiA's LinkMap: what each link sustains while others are in use, and detours around slow ones.

From P. Anastasiadis, N. Papadopoulou, G. Goumas, N. Koziris, D. Hoppe and L. Zhong, *PARALiA: a
performance aware runtime for auto-tuning linear algebra on heterogeneous systems* (ACM TACO, 2023),
sections 3.2 and 3.4. Locations are those of a `Machine`: devices, then the host.

It differs from `Machine.ports` in that links slow each other down in pairs, so that three transfers
over one port seem to cost as much as two. It is kept for what it is: the model of that paper.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.ports import fair_rates
from uncut_mpi.model.remade import Remade

Link: TypeAlias = tuple[int, int]
"""(source, destination) locations."""

MOST_SLOWDOWN: Final = 2.0
"""What simultaneous use of another link may do at most (section 3.4)."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class LinkMap(Remade):
    """
    Links between locations, as PARALiA sees them (table 1).

    Attributes
    ----------
    latency_s, bandwidth_gb_per_s : ndarray of float64, shape (locations, locations)
        [source, destination], of a link in use alone.
    slowdowns : mapping of (link, link) to float
        How much slower the first link is while the second is in use; pairs not named do not meet.
    shared_gb_per_s : ndarray of float64, shape (locations, locations)
        What a link sustains; its own bandwidth until `shared_by` says who uses it.
    routes : mapping of link to tuple of int
        Devices that a transfer passes on its way; links not named are direct.
    """

    latency_s: np.ndarray
    bandwidth_gb_per_s: np.ndarray
    slowdowns: Mapping[tuple[Link, Link], float]
    shared_gb_per_s: np.ndarray
    routes: Mapping[Link, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for values in (self.latency_s, self.bandwidth_gb_per_s, self.shared_gb_per_s):
            values.flags.writeable = False

    @classmethod
    @functools.lru_cache(maxsize=4)  # it takes some 40 ms for 8 devices with ports, and is asked for again
    def of(cls, machine: Machine) -> LinkMap:
        """Return the map of a machine; slowdowns are what the machine's ports do to two transfers at once."""
        meeting: dict[tuple[Link, Link], None] = {}
        for port in machine.ports:
            meeting.update(dict.fromkeys(itertools.permutations(port.links, 2)))
        crossed: dict[Link, dict[int, float]] = {}
        for number, port in enumerate(machine.ports):
            for link, weight in zip(port.links, port.weights, strict=True):
                crossed.setdefault(link, {})[number] = weight
        # Most pairs are like others: two rates, and what either takes of the ports that they cross.
        known: dict[tuple[Any, ...], float] = {}
        slowdowns = {}
        for link, other in meeting:
            alone = [float(machine.bandwidth_gb_per_s[each]) for each in (link, other)]
            own, others = crossed[link], crossed[other]
            shared = [
                (machine.ports[number].expected_gb_per_s, own.get(number, 0.0), others.get(number, 0.0))
                for number in sorted({*own, *others})
            ]
            kind = (*alone, *shared)
            if kind not in known:
                together = fair_rates([link, other], alone, machine.ports)
                # Equation 6; of equal transfers, the time is the inverse of the rate.
                slower = (1.0 / float(together[0])) / (1.0 / alone[0])
                known[kind] = min(max(slower, 1.0), MOST_SLOWDOWN)
            if known[kind] > 1.0:
                slowdowns[link, other] = known[kind]
        return cls(machine.latency_s, machine.bandwidth_gb_per_s, slowdowns, machine.bandwidth_gb_per_s)

    def shared_by(self, devices: Sequence[int], data_locations: Sequence[int]) -> LinkMap:
        """
        Return the map for devices that all receive from all data locations throughout.

        Parameters
        ----------
        devices : sequence of int
            Devices that compute.
        data_locations : sequence of int
            Where matrices live.

        Notes
        -----
        The paper prints the shared bandwidth as the bandwidth times a double sum of slowdowns, which would grow with
        every link in use. Its text asks for the contrary, and for a factor of 2 at most "to avoid empirical errors
        spilling into the models". Here the bandwidth is divided by the largest slowdown that any of the links in use
        causes.
        """
        caused = _caused_by(self)
        worst: dict[Link, float] = {}
        for used in {(source, to) for source in data_locations for to in devices}:
            for link, factor in caused.get(used, ()):
                worst[link] = max(worst.get(link, 1.0), factor)
        shared = self.bandwidth_gb_per_s.copy()
        for link, factor in worst.items():
            shared[link] /= factor
        return dataclasses.replace(self, shared_gb_per_s=shared, routes={})

    def rerouted(self, devices: Sequence[int], *, max_hops: int = 1) -> LinkMap:
        """
        Return the map with transfers led around slow links (section 3.2).

        A transfer goes through up to `max_hops` of the devices where the narrowest link on that way sustains more than
        the direct one. Of equal ways it takes the shortest, then the one through the lowest devices. The bandwidth is
        then that of the narrowest link, since chunks follow each other, and latencies add up.

        Parameters
        ----------
        devices : sequence of int
            Devices that compute and hold buffers, which a transfer may pass.
        max_hops : int
            0 (no detours), 1 or 2.

        Raises
        ------
        ParamError
            If `max_hops` is none of these.
        """
        if max_hops not in (0, 1, 2):
            raise ParamError(f"max_hops = {max_hops}: a transfer may pass 0, 1 or 2 devices")
        shared, latency, routes = self.shared_gb_per_s.copy(), self.latency_s.copy(), dict(self.routes)
        among = sorted(set(devices))
        for hops in range(1, max_hops + 1):
            for link in self._slower_than_ends(among, shared):
                narrowest, way = self._widest_way(link, among, hops)
                if narrowest > shared[link]:
                    shared[link] = narrowest
                    latency[link] = sum(
                        float(self.latency_s[leg]) for leg in itertools.pairwise((link[0], *way, link[1]))
                    )
                    routes[link] = way
        return dataclasses.replace(self, latency_s=latency, shared_gb_per_s=shared, routes=routes)

    def _slower_than_ends(self, devices: list[int], known_gb_per_s: np.ndarray) -> list[Link]:
        """Return the links that sustain less than the best first and the best last leg of a way over devices."""
        wide = self.shared_gb_per_s.astype(np.float64)
        np.fill_diagonal(wide, -np.inf)
        most = np.minimum(
            wide[:, devices].max(axis=1, initial=-np.inf)[:, None], wide[devices].max(axis=0, initial=-np.inf)
        )
        np.fill_diagonal(most, -np.inf)
        return [(int(source), int(to)) for source, to in np.argwhere(most > known_gb_per_s)]

    def _widest_way(self, link: Link, devices: list[int], hops: int) -> tuple[float, tuple[int, ...]]:
        """Return what the widest way over so many devices sustains, and these, the lowest of equal ways."""
        between = np.array([device for device in devices if device not in link])
        if len(between) < hops:
            return -np.inf, ()
        first, last = self.shared_gb_per_s[link[0], between], self.shared_gb_per_s[between, link[1]]
        if hops == 1:
            wide = np.minimum(first, last)
            at = int(np.argmax(wide))
            return float(wide[at]), (int(between[at]),)
        across = self.shared_gb_per_s[np.ix_(between, between)].astype(np.float64)
        np.fill_diagonal(across, -np.inf)
        wide = np.minimum(np.minimum(first[:, None], last), across)
        at, then = (int(index) for index in np.unravel_index(np.argmax(wide), wide.shape))
        return float(wide[at, then]), (int(between[at]), int(between[then]))

    def transfer_s(self, source: int, destination: int, size_bytes: float) -> float:
        """Return t_link = latency + bytes / shared bandwidth (equation 2); 0 within a location or of no bytes."""
        if source == destination or size_bytes == 0:
            return 0.0
        link = source, destination
        return float(self.latency_s[link]) + size_bytes / (float(self.shared_gb_per_s[link]) * 1e9)


@functools.lru_cache(maxsize=4)
def _caused_by(links: LinkMap) -> dict[Link, list[tuple[Link, float]]]:
    """Return which links a link slows down while it is in use, and how much; sets of devices are compared by it."""
    caused: dict[Link, list[tuple[Link, float]]] = {}
    for (link, other), factor in links.slowdowns.items():
        caused.setdefault(other, []).append((link, factor))
    return caused
