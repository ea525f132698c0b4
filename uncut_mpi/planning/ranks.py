"""Which ranks are of most use for a product, from the rates of their devices and of their ways to the matrices."""

from __future__ import annotations

from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Location, Placement
from uncut_mpi.model.problem import GemmProblem


def ranks_by_use(problem: GemmProblem, placement: Placement, machine: Machine) -> list[int]:
    """
    Return all ranks in the order in which it pays to compute with them.

    One after the other, the one that lowers most what the product and each matrix's way to and from the ranks
    so far would take, one after the other at the rates that those ranks get at once; the lowest of equals.
    """
    chosen: list[int] = []
    while len(chosen) < machine.num_ranks:
        rest = [rank for rank in range(machine.num_ranks) if rank not in chosen]
        chosen.append(min(rest, key=lambda rank: (_total_s(problem, placement, machine, [*chosen, rank]), rank)))
    return chosen


def _total_s(problem: GemmProblem, placement: Placement, machine: Machine, ranks: list[int]) -> float:
    seconds = problem.flops / float(machine.typical_gemm_rate(problem.dtype)[ranks].sum())
    pieces = [(problem.m * problem.k, placement.a, True), (problem.k * problem.n, placement.b, True)]
    pieces.append((problem.m * problem.n, placement.c, False))
    if problem.reads_c:
        pieces.append((problem.m * problem.n, placement.c, True))
    for elements, location, inward in pieces:
        rate = _total_gb_per_s(location, machine, ranks, inward=inward)
        seconds += elements * problem.dtype.itemsize / (rate * 1e9)
    return seconds


def _total_gb_per_s(location: Location, machine: Machine, ranks: list[int], *, inward: bool) -> float:
    """Return what some ranks get from a location together, or to it."""
    rank = location.rank
    if rank is None:
        return float(machine.host_rates(ranks, inward=inward, outward=not inward).sum())
    if location.space == "host":
        return float(machine.bandwidth_gb_per_s[(machine.host, rank) if inward else (rank, machine.host)])
    links = machine.bandwidth_gb_per_s[rank, ranks] if inward else machine.bandwidth_gb_per_s[ranks, rank]
    return float(links.sum())
