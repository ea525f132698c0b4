"""
Ports: what transfers share.

A link has a bandwidth of its own, which one transfer gets. Transfers on several links at once may
share something narrower: the one port of a GPU, a PCIe switch, the host's memory. A `Port` is a
linear limit on the rates of such links, and concurrent transfers get the max-min fair rates under
all limits: all rates grow together until a link or a port is full, those that use it stay, the
others grow on (progressive filling; Bertsekas and Gallager, Data Networks, section 6.5.2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from uncut_mpi.errors import ParamError


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
    """

    name: str
    capacity_gb_per_s: float
    links: tuple[tuple[int, int], ...]
    weights: tuple[float, ...]

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

    @classmethod
    def of(cls, name: str, capacity_gb_per_s: float, links: Iterable[tuple[int, int]], weight: float = 1.0) -> Port:
        """Return a port whose links all have one weight."""
        listed = tuple(links)
        return cls(name, capacity_gb_per_s, listed, (weight,) * len(listed))


def device_ports(
    ranks: Sequence[int], egress_gb_per_s: float, ingress_gb_per_s: float, name: str = "device"
) -> list[Port]:
    """Return each device's port towards the other devices, one for each way."""
    ports = []
    for rank in ranks:
        others = [other for other in ranks if other != rank]
        if others:
            ports.append(Port.of(f"{name} {rank} egress", egress_gb_per_s, [(rank, other) for other in others]))
            ports.append(Port.of(f"{name} {rank} ingress", ingress_gb_per_s, [(other, rank) for other in others]))
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
    Return the max-min fair rates of concurrent transfers.

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
    weights = np.zeros((len(ports), count))
    for row, port in enumerate(ports):
        of = dict(zip(port.links, port.weights, strict=True))
        weights[row] = [of.get(link, 0.0) for link in links]
    limits = np.asarray(limits_gb_per_s, np.float64)
    room = np.array([port.capacity_gb_per_s for port in ports], np.float64)
    rates = np.zeros(count)
    growing = np.ones(count, bool)
    while growing.any():
        use = weights[:, growing].sum(axis=1)
        steps = np.divide(room, use, out=np.full(len(ports), np.inf), where=use > 0)
        step = min(float((limits - rates)[growing].min()), float(steps.min(initial=np.inf)))
        rates[growing] += step
        room -= use * step
        full = (use > 0) & (steps <= step * (1 + 1e-12))
        growing &= (limits - rates > 1e-12 * limits) & ~(weights[full] > 0).any(axis=0)
    return rates
