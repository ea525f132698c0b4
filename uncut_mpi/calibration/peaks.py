"""
What is possible at all: capacities and rates that nothing measured has beaten. Pure.

What to expect of a machine is the median of what was measured, what it can do is the best. A bound takes the best, and
a whole product counts as a measurement: what it moved and computed in its time was possible. Host memory that other
programs use too gives a tenth more from one second to the next, and to a product more than to a probe.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

import numpy as np

from uncut_mpi.calibration.samples import TransferSample
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import Port
from uncut_mpi.model.problem import GemmProblem

_ROUNDING: Final = 1e-12
_MOST_STEPS: Final = 1000


class Done(NamedTuple):
    """A product that ran: the problem, where its matrices were, and the shortest of its calls (s)."""

    problem: GemmProblem
    placement: Placement
    best_s: float


def peak_bandwidth(bandwidth_gb_per_s: np.ndarray, transfers: Iterable[TransferSample]) -> np.ndarray:
    """
    Return the best that each link has carried.

    Parameters
    ----------
    bandwidth_gb_per_s : ndarray of float64, shape (num_ranks+1, num_ranks+1)
        What is known of them.
    transfers : iterable of TransferSample
        All that was measured, alone and at once.
    """
    best: np.ndarray = bandwidth_gb_per_s.copy()
    for one in transfers:
        for link, rate in zip(one.links, one.best_gb_per_s, strict=True):
            best[link] = max(best[link], rate)
    return best


def peak_ports(ports: Iterable[Port], transfers: Sequence[TransferSample]) -> tuple[Port, ...]:
    """
    Return ports with capacities that the best of no measurement exceeds; what to expect of them stays.

    Parameters
    ----------
    ports : iterable of Port
        As medians show them.
    transfers : sequence of TransferSample
        All that was measured, alone and at once.
    """
    rates = [dict(zip(one.links, one.best_gb_per_s, strict=True)) for one in transfers]
    return tuple(_at_least(port, max((_use(port, rate) for rate in rates), default=0.0)) for port in ports)


def unbeaten(machine: Machine, products: Iterable[Done]) -> Machine:
    """
    Return the machine on which no product took less than its bound.

    Parameters
    ----------
    machine : Machine
        What is known so far.
    products : iterable of Done
        Any that ran on this hardware.

    Notes
    -----
    A bound that was beaten is limited by a resource: the rate of the type, or the ports of links. Where no port limits
    the links between devices, it is these. This resource gets what the product shows, step by step until the bound
    holds, since another resource may limit it then. Where a matrix's owner would compute most of the operations itself
    it is its rate. What to expect of the machine stays.
    """
    for problem, placement, best_s in products:
        for _ in range(_MOST_STEPS):
            limit = bound(problem, placement, machine)
            if limit.seconds <= best_s:
                break
            factor = limit.seconds / best_s * (1.0 + _ROUNDING)
            machine = _raised(machine, limit.limited_by, problem, placement, factor)
    return machine


def _raised(machine: Machine, limited_by: str, problem: GemmProblem, placement: Placement, factor: float) -> Machine:
    """Return the machine with more of what limits a bound."""
    if limited_by == "compute":
        return _computing_faster(machine, problem, np.full(machine.num_ranks, factor))
    if limited_by.startswith(("out of", "into")):
        # What the owner of a matrix computes itself or sends to others: what most of it hangs on.
        owner = int(limited_by.rsplit(maxsplit=1)[1])
        alone_s = problem.flops / float(machine.gemm_rate(problem.arithmetic)[owner])
        if bound(problem, placement, machine).terms[limited_by] > alone_s / 2:
            factors = np.ones(machine.num_ranks)
            factors[owner] = factor
            return _computing_faster(machine, problem, factors)
    host = machine.host
    of_host = "host" in limited_by

    def concerns(link: tuple[int, int]) -> bool:
        return (host in link) == of_host

    ports = tuple(
        _at_least(port, port.capacity_gb_per_s * factor) if any(map(concerns, port.links)) else port
        for port in machine.ports
    )
    wider = dataclasses.replace(machine, ports=ports)
    before, after = (bound(problem, placement, one).terms[limited_by] for one in (machine, wider))
    if after < before:
        return wider
    faster = machine.bandwidth_gb_per_s.copy()
    for link in np.ndindex(*faster.shape):
        if link[0] != link[1] and concerns(link):
            faster[link] *= factor
    return dataclasses.replace(machine, bandwidth_gb_per_s=faster)


def _computing_faster(machine: Machine, problem: GemmProblem, factors: np.ndarray) -> Machine:
    name = problem.arithmetic.name if problem.arithmetic.name in machine.gemm_tflop_per_s else "f32"
    rates = {**machine.gemm_tflop_per_s, name: machine.gemm_tflop_per_s[name] * factors}
    return dataclasses.replace(machine, gemm_tflop_per_s=rates)


def _use(port: Port, rates: dict[tuple[int, int], float]) -> float:
    """Return what transfers take of a port (GB/s)."""
    return sum(weight * rates.get(link, 0.0) for link, weight in zip(port.links, port.weights, strict=True))


def _at_least(port: Port, capacity_gb_per_s: float) -> Port:
    if capacity_gb_per_s <= port.capacity_gb_per_s:
        return port
    return dataclasses.replace(
        port, capacity_gb_per_s=capacity_gb_per_s, typical_gb_per_s=float(port.expected_gb_per_s)
    )
