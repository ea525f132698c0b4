"""
Ports: what transfers share.

A link has a bandwidth of its own, which one transfer gets. Transfers on several links at once may share something
narrower: the one port of a GPU, a PCIe switch, the host's memory. A `Port` is a linear limit on the rates of such
links. Concurrent transfers get the max-min fair rates under all limits. All rates grow together until a link or a port
is full; those that use it stay, and the others grow on. That is progressive filling (Bertsekas and Gallager, Data
Networks, section 6.5.2). What the limits allow at all, with the best rates instead of the fair ones, is `least_time`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final

import numpy as np

from uncut_mpi.errors import ParamError

_ROUNDING: Final = 1e-12


@dataclasses.dataclass(frozen=True, slots=True)
class Port:
    """
    A limit that links share: the sum of weight times rate over `links` is at most the capacity.

    Attributes
    ----------
    name : str
        Printed in explanations.
    capacity_gb_per_s : float
        In 1e9 bytes per second.
    links : tuple of (int, int)
        (source, destination) locations.
    weights : tuple of float
        One per link, all positive; what a unit of rate on the link takes of the capacity.
    typical_gb_per_s : float
        What to expect of the capacity beside products and other traffic, at most as much; 0: all of it. A bound
        takes the capacity, a prediction what is to be expected.
    """

    name: str
    capacity_gb_per_s: float
    links: tuple[tuple[int, int], ...]
    weights: tuple[float, ...]
    typical_gb_per_s: float = 0.0

    def __post_init__(self) -> None:
        if not (np.isfinite(self.capacity_gb_per_s) and self.capacity_gb_per_s > 0):
            raise ParamError(f"port {self.name} has a capacity of {self.capacity_gb_per_s} GB/s: it has to be positive")
        if len(self.links) != len(self.weights) or not self.links:
            raise ParamError(
                f"port {self.name} has {len(self.links)} links and {len(self.weights)} weights: one weight for each"
            )
        if not all(np.isfinite(weight) and weight > 0 for weight in self.weights):
            raise ParamError(f"port {self.name} has a weight that is not positive")
        if len(set(self.links)) < len(self.links):
            raise ParamError(f"port {self.name} names a link twice")
        if not 0 <= self.typical_gb_per_s <= self.capacity_gb_per_s:
            raise ParamError(
                f"port {self.name} has a typical {self.typical_gb_per_s} GB/s: it has to be 0 to "
                f"{self.capacity_gb_per_s}, the capacity"
            )

    @property
    def expected_gb_per_s(self) -> float:
        """The capacity to plan with."""
        return self.typical_gb_per_s or self.capacity_gb_per_s

    @classmethod
    def of(cls, name: str, capacity_gb_per_s: float, links: Iterable[tuple[int, int]], weight: float = 1.0) -> Port:
        """Return a port whose links all have one weight."""
        listed = tuple(links)
        return cls(name, capacity_gb_per_s, listed, (weight,) * len(listed))


@dataclasses.dataclass(frozen=True, slots=True)
class Net:
    """
    What joins nodes: adapters, each of which some ranks of its node use, and between them no limit.

    Attributes
    ----------
    gb_per_s : float
        What an adapter sends, and at the same time receives (1e9 bytes per second).
    latency_s : float
        Time of a message of few bytes.
    adapters : int
        Of each node. Its ranks are dealt to them evenly, in order; the host uses all.
    typical_gb_per_s : float
        What to expect of `gb_per_s` where all nodes send and receive at once, at most as much; 0: all of it.
    """

    gb_per_s: float
    latency_s: float = 5e-6
    adapters: int = 1
    typical_gb_per_s: float = 0.0

    def __post_init__(self) -> None:
        good = np.isfinite([self.gb_per_s, self.latency_s]).all() and self.gb_per_s > 0 and self.latency_s >= 0
        if not good or self.adapters < 1 or not 0 <= self.typical_gb_per_s <= self.gb_per_s:
            raise ParamError(
                f"{self} was given: rates are positive, what to expect is no more than the best, latencies are not "
                "negative, and a node has an adapter at least"
            )

    def ports(self, numbers: Sequence[Sequence[int]]) -> list[Port]:
        """Return the ports of all adapters, each way; by the numbers of each node's memories, the host's last."""
        found = []
        for at, (*ranks, host) in enumerate(numbers):
            others = [number for other in numbers if other is not numbers[at] for number in other]
            for adapter in range(self.adapters if others else 0):
                own = [rank for place, rank in enumerate(ranks) if place * self.adapters // len(ranks) == adapter]
                shares = {**dict.fromkeys(own, 1.0), host: 1.0 / self.adapters}
                ways = {
                    "sends": {(here, other): share for here, share in shares.items() for other in others},
                    "receives": {(other, here): share for here, share in shares.items() for other in others},
                }
                name = f"node {at}, adapter {adapter}"
                found += [
                    Port(f"{name} {way}", self.gb_per_s, tuple(links), tuple(links.values()), self.typical_gb_per_s)
                    for way, links in ways.items()
                ]
        return found


def device_ports(ranks: Sequence[int], egress_gb_per_s: float, ingress_gb_per_s: float) -> list[Port]:
    """Return each device's port towards the other devices, one for each way."""
    ports = []
    for rank in ranks:
        others = [other for other in ranks if other != rank]
        if others:
            ports.append(Port.of(f"device {rank} egress", egress_gb_per_s, [(rank, other) for other in others]))
            ports.append(Port.of(f"device {rank} ingress", ingress_gb_per_s, [(other, rank) for other in others]))
    return ports


def duplex_ports(
    name: str,
    inward: Sequence[tuple[int, int]],
    outward: Sequence[tuple[int, int]],
    *,
    in_gb_per_s: float,
    out_gb_per_s: float,
    both_gb_per_s: tuple[float, float],
) -> list[Port]:
    """
    Return the ports of links whose two ways slow each other down.

    Parameters
    ----------
    inward, outward : sequence of (int, int)
        Links of either way.
    in_gb_per_s, out_gb_per_s : float
        Total of one way while the other is idle.
    both_gb_per_s : tuple of float
        (in, out) totals while both ways are busy.

    Notes
    -----
    The totals (x, y) that can be had at once lie under the lines from (in, 0) to `both` to (0, out):
    ``x/in + y·(1 − bi/in)/bo ≤ 1`` and ``x·(1 − bo/out)/bi + y/out ≤ 1`` with ``both = (bi, bo)``.
    Each line is one port of capacity 1, scaled to its own way's total. Where `both` is below the straight
    line from (in, 0) to (0, out), which linear limits cannot say, that line is the only port.
    """
    both_in, both_out = both_gb_per_s
    if both_in / in_gb_per_s + both_out / out_gb_per_s <= 1.0:
        weights = (1.0,) * len(inward) + (in_gb_per_s / out_gb_per_s,) * len(outward)
        return [Port(name, in_gb_per_s, (*inward, *outward), weights)]
    across_in = max(0.0, 1.0 - both_in / in_gb_per_s) / both_out
    across_out = max(0.0, 1.0 - both_out / out_gb_per_s) / both_in
    ports = []
    for way, total, own, other, across in (
        ("in", in_gb_per_s, inward, outward, across_in),
        ("out", out_gb_per_s, outward, inward, across_out),
    ):
        crossing = tuple(other) if across > 0 else ()
        own_weights = (1.0,) * len(own) + (across * total,) * len(crossing)
        ports.append(Port(f"{name} {way}", total, tuple(own) + crossing, own_weights))
    return ports


def fair_rates(links: Sequence[tuple[int, int]], limits_gb_per_s: Sequence[float], ports: Sequence[Port]) -> np.ndarray:
    """
    Return the max-min fair rates to expect of concurrent transfers.

    Parameters
    ----------
    links : sequence of (int, int)
        One per transfer; a link may occur more than once.
    limits_gb_per_s : sequence of float
        What each transfer gets at most.
    ports : sequence of Port
        What they share.

    Returns
    -------
    ndarray of float64
        GB/s, one per transfer.
    """
    count = len(links)
    wanted = set(links)
    ports = [port for port in ports if not wanted.isdisjoint(port.links)]
    weights = np.zeros((len(ports), count))
    for row, port in enumerate(ports):
        of = dict(zip(port.links, port.weights, strict=True))
        weights[row] = [of.get(link, 0.0) for link in links]
    limits = np.asarray(limits_gb_per_s, np.float64)
    left = np.array([port.expected_gb_per_s for port in ports], np.float64)
    rates = np.zeros(count)
    growing = np.ones(count, bool)
    while growing.any():
        use = weights[:, growing].sum(axis=1)
        steps = np.divide(left, use, out=np.full(len(ports), np.inf), where=use > 0)
        step = min(float((limits - rates)[growing].min()), float(steps.min(initial=np.inf)))
        rates[growing] += step
        left -= use * step
        full = (use > 0) & (steps <= step * (1 + 1e-12))
        growing &= (limits - rates > 1e-12 * limits) & ~(weights[full] > 0).any(axis=0)
    return rates


def least_time(
    demands: Sequence[tuple[Sequence[tuple[int, int]], float]],
    bandwidth_gb_per_s: np.ndarray,
    ports: Sequence[Port],
) -> float:
    """
    Return the time below which no choice of rates moves all of some bytes.

    Parameters
    ----------
    demands : sequence of (sequence of (int, int), float)
        Links, and the bytes that cross them in any split; all demands at the same time. A link may serve
        several demands: a byte on it then counts for each of them.
    bandwidth_gb_per_s : ndarray of float64
        [source, destination], what one link gets at most.
    ports : sequence of Port
        What the links share.

    Returns
    -------
    float
        Seconds; 0 if there are no bytes.

    Notes
    -----
    With x the mean rate of each link over the time t and λ = 1/t this is the linear program

        max λ  subject to  λ · bytes ≤ Σ x over a demand's links,  x ≤ bandwidth,  Σ weight · x ≤ capacity

    to which any schedule gives a feasible point, since the limits hold at every moment. x = 0 is feasible,
    so the simplex method starts there (Bland's rule: it ends; Bland, New finite pivoting rules for the
    simplex method, 1977).
    """
    demands = [(links, size) for links, size in demands if size > 0]
    if not demands:
        return 0.0
    serves: dict[tuple[int, int], list[tuple[int, float]]] = {}  # of each link the demands, then ports with weights
    for row, (listed, _) in enumerate(demands):
        for link in listed:
            serves.setdefault(link, []).append((row, 0.0))
    shared = [port for port in ports if not serves.keys().isdisjoint(port.links)]
    for row, port in enumerate(shared, len(demands)):
        for link, weight in zip(port.links, port.weights, strict=True):
            if link in serves:
                serves[link].append((row, weight))
    alike: dict[tuple[tuple[int, float], ...], float] = {}  # links that serve and weigh the same are one wide link
    for link, own in serves.items():
        alike[tuple(own)] = alike.get(tuple(own), 0.0) + float(bandwidth_gb_per_s[link])
    bandwidth = np.array([*alike.values()], np.float64)
    if not shared and len(demands) == 1:
        return demands[0][1] / (float(bandwidth.sum()) * 1e9)
    num_links, most_bytes, most_rate = len(alike), max(size for _, size in demands), float(bandwidth.max())
    # Rows: demands, links, ports; columns: x of each link, then λ. In units of the largest rate and demand.
    matrix = np.zeros((len(demands) + num_links + len(shared), num_links + 1))
    limits = np.zeros(len(matrix))
    for column, of in enumerate(alike):
        for row, weight in of:
            matrix[row + (num_links if row >= len(demands) else 0), column] = weight or -1.0
    matrix[: len(demands), -1] = [size / most_bytes for _, size in demands]
    matrix[len(demands) : len(demands) + num_links, :num_links] = np.eye(num_links)
    limits[len(demands) : len(demands) + num_links] = bandwidth / most_rate
    limits[len(demands) + num_links :] = [port.capacity_gb_per_s / most_rate for port in shared]
    return most_bytes / (_largest_last(matrix, limits) * most_rate * 1e9)


def _largest_last(matrix: np.ndarray, limits: np.ndarray) -> float:
    """Return the largest last component of z ≥ 0 with matrix · z ≤ limits, limits ≥ 0 (simplex method)."""
    rows, columns = matrix.shape
    # The last row holds the reduced costs; slack variables are the columns after the z.
    table = np.zeros((rows + 1, columns + rows + 1))
    table[:rows, :columns], table[:rows, -1] = matrix, limits
    table[:rows, columns:-1] = np.eye(rows)
    table[rows, columns - 1] = -1.0
    basis = np.arange(columns, columns + rows)
    while (entering := np.flatnonzero(table[rows, :-1] < -_ROUNDING)).size:
        column = int(entering[0])
        bounding = np.flatnonzero(table[:rows, column] > _ROUNDING)
        ratios = table[bounding, -1] / table[bounding, column]
        tied = bounding[ratios <= ratios.min()]
        row = int(tied[np.argmin(basis[tied])])
        table[row] /= table[row, column]
        factors = table[:, column].copy()
        factors[row] = 0.0
        table -= factors[:, None] * table[row]
        np.maximum(table[:rows, -1], 0.0, out=table[:rows, -1])
        basis[row] = column
    return float(table[rows, -1])
