"""
From times of transfers at once to the ports they share. Pure.

Ports are added from the few transfers to the many. One is added only where what was measured is below what the ports
found so far allow. So a limit of two GPUs is not repeated as one of four.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

import numpy as np

from uncut_mpi.calibration.samples import Link, TransferSample, link_text
from uncut_mpi.model.ports import Port, duplex_ports, fair_rates

TOLERANCE: Final = 0.05
"""Part by which transfers at once may be slower than the model says before a port is added."""


@dataclasses.dataclass(frozen=True, slots=True)
class HostTotals:
    """
    What some ranks together get from and to the host, in GB/s.

    Attributes
    ----------
    ranks : tuple of int
        Those that transfer at once.
    inward, outward : float
        From the host with nothing going out, to the host with nothing coming in.
    both : tuple of float
        (in, out) with both ways busy.
    """

    ranks: tuple[int, ...]
    inward: float
    outward: float
    both: tuple[float, float]


def star_ports(bandwidth: np.ndarray, stars: Iterable[TransferSample]) -> list[Port]:
    """
    Return the ports of devices that one-to-all and all-to-one transfers show.

    Parameters
    ----------
    bandwidth : ndarray of float64, shape (num_ranks+1, num_ranks+1)
        Of every link by itself (GB/s).
    stars : iterable of TransferSample
        ``"egress"`` and ``"ingress"``: what each device sends to, or receives from, all others at once.
    """
    ports = []
    for star in stars:
        alone = [float(bandwidth[link]) for link in star.links]
        if star.total_gb_per_s < (1 - TOLERANCE) * sum(alone):
            # One transfer alone can be a little faster than all together: never a limit below it.
            ports.append(Port.of(f"device {star.hub} {star.kind}", max(star.total_gb_per_s, *alone), star.links))
    return ports


def host_ports(bandwidth: np.ndarray, totals: Sequence[HostTotals], host: int) -> list[Port]:
    """
    Return the ports of the host's links: of single GPUs, of groups that share a switch, of the whole host.

    Parameters
    ----------
    bandwidth : ndarray of float64, shape (num_ranks+1, num_ranks+1)
        Of every link by itself (GB/s).
    totals : sequence of HostTotals
        Sets of ranks that were measured together; smaller ones count first.
    host : int
        The host's number.
    """
    ports: list[Port] = []
    for one in sorted(totals, key=lambda total: (len(total.ranks), total.ranks)):
        inward, outward = [(host, rank) for rank in one.ranks], [(rank, host) for rank in one.ranks]
        measured = (one.inward, one.outward, sum(one.both))
        ways = (inward, outward, inward + outward)
        allowed = [float(fair_rates(links, [float(bandwidth[link]) for link in links], ports).sum()) for links in ways]
        if all(found >= (1 - TOLERANCE) * most for found, most in zip(measured, allowed, strict=True)):
            continue
        name = (
            f"host link of rank {one.ranks[0]}"
            if len(one.ranks) == 1
            else f"host, ranks {', '.join(map(str, one.ranks))}"
        )
        most_in, most_out = max(one.inward, one.both[0]), max(one.outward, one.both[1])
        ports += duplex_ports(name, inward, outward, in_gb_per_s=most_in, out_gb_per_s=most_out, both_gb_per_s=one.both)
    return ports


def pair_ports(
    bandwidth: np.ndarray, slowdowns: Mapping[tuple[Link, Link], float], ports: Sequence[Port], host: int
) -> list[Port]:
    """
    Return ports for pairs of links that slow each other down more than `ports` explain.

    Parameters
    ----------
    bandwidth : ndarray of float64, shape (num_ranks+1, num_ranks+1)
        Of every link by itself (GB/s).
    slowdowns : mapping of (link, link) to float
        Time of two transfers at once, each of which takes one unit of time alone.
    ports : sequence of Port
        Those found already.
    host : int
        The host's number.
    """
    extra = []
    for (first, second), slowdown in slowdowns.items():
        limits = [float(bandwidth[first]), float(bandwidth[second])]
        if slowdown <= (1 + 2 * TOLERANCE) * predicted_slowdown(limits, (first, second), ports):
            continue
        # Half of the time each is what sharing one port fairly means; what is slower still is noise.
        share = 2.0 / min(slowdown, 2.0)
        name = " and ".join(link_text(link, host, "device ") for link in (first, second))
        extra.append(Port(name, limits[0] * share, (first, second), (1.0, limits[0] / limits[1])))
    return extra


def predicted_slowdown(limits: Sequence[float], links: Sequence[Link], ports: Sequence[Port]) -> float:
    """Return the time that two transfers at once take, each of one unit of time alone, under `ports`."""
    rates = fair_rates(links, limits, ports) / np.asarray(limits)
    first = 1.0 / float(rates.max())
    # The one that is left has the links to itself.
    return first + (1.0 - first * float(rates.min()))
