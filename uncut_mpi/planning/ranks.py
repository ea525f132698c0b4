"""Which ranks are of most use for a product, from the rates of their devices and of their ways to the matrices."""

from __future__ import annotations

import bisect
import itertools
import math
from typing import Any, Final

import numpy as np

from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import MATRICES, Matrix, Placement
from uncut_mpi.model.problem import GemmProblem

MOST_TOLD_APART: Final = 32
"""Of more ranks, those whose rates differ little count as alike."""

_LITTLE: Final = 0.05
_ROUNDING: Final = 1e-12


def ranks_by_use(problem: GemmProblem, placement: Placement, machine: Machine) -> list[int]:
    """
    Return all ranks in the order in which it pays to compute with them.

    They are taken one by one. Next is the rank that lowers most the time of the product and of each matrix's way to and
    from the ranks so far, each of these after the other. Rates are those that these ranks get at once; of equals it is
    the lowest. Of ranks that are alike, given those so far, one is looked at.
    """
    rest, times = _Rest(problem, placement, machine), _Times(problem, placement, machine)
    chosen: list[int] = []
    while len(chosen) < machine.num_ranks:
        some = rest.firsts()
        if len(some) > 1:
            some.sort()
            seconds = times.with_each(chosen, some)
            some = some[int(np.argmax(seconds <= (1 + _ROUNDING) * seconds.min())) :]
        chosen.append(some[0])
        rest.take(some[0])
    return chosen


class _Rest:
    """
    The ranks that are left, those together that are alike.

    Ranks are alike if they and their links to the matrices have equal rates, and each port that their host links cross
    is crossed with equal weight. The port is either the same, or one of equal capacity that no rank chosen so far
    crosses.
    """

    def __init__(self, problem: GemmProblem, placement: Placement, machine: Machine) -> None:
        self._exact = machine.num_ranks <= MOST_TOLD_APART
        self._capacity = [self._rounded(port.expected_gb_per_s) for port in machine.ports]
        self._crossed: list[list[tuple[int, bool, float]]] = [[] for _ in range(machine.num_ranks)]
        self._crossing: list[set[int]] = [set() for _ in machine.ports]
        for number, port in enumerate(machine.ports):
            for (source, destination), weight in zip(port.links, port.weights, strict=True):
                inward = source >= machine.num_ranks  # from a host
                if inward != (destination >= machine.num_ranks):
                    rank = destination if inward else source
                    self._crossed[rank].append((number, inward, weight))
                    self._crossing[number].add(rank)
        self._used = [False] * len(machine.ports)
        locations = itertools.chain.from_iterable(map(placement.locations, MATRICES))
        owners = {location.rank for location in locations if location.rank is not None}
        columns, ranks = [machine.typical_gemm_rate(problem.arithmetic)], range(machine.num_ranks)
        for end in sorted({*machine.host_of.tolist(), *owners}):
            columns += [machine.bandwidth_gb_per_s[end, ranks], machine.bandwidth_gb_per_s[ranks, end]]
        self._rates = [tuple(self._rounded(float(rate)) for rate in row) for row in np.column_stack(columns)]
        self._key: list[tuple[Any, ...]] = [()] * machine.num_ranks
        self._alike: dict[tuple[Any, ...], list[int]] = {}
        for rank in range(machine.num_ranks):
            self._file(rank)

    def firsts(self) -> list[int]:
        """Return the lowest rank of each kind."""
        return [ranks[0] for ranks in self._alike.values()]

    def take(self, rank: int) -> None:
        """Leave a rank out."""
        self._drop(rank)
        for number, _, _ in self._crossed[rank]:
            self._crossing[number].discard(rank)
        for number, _, _ in self._crossed[rank]:
            if not self._used[number]:
                self._used[number] = True
                for other in self._crossing[number]:
                    self._drop(other)
                    self._file(other)

    def _rounded(self, rate: float) -> float:
        return rate if self._exact or rate <= 0 else round(math.log(rate) / _LITTLE)

    def _file(self, rank: int) -> None:
        ports = [
            (number if self._used[number] else -1, self._capacity[number], inward, weight)
            for number, inward, weight in self._crossed[rank]
        ]
        self._key[rank] = (self._rates[rank], tuple(sorted(ports)))
        bisect.insort(self._alike.setdefault(self._key[rank], []), rank)

    def _drop(self, rank: int) -> None:
        ranks = self._alike[self._key[rank]]
        del ranks[bisect.bisect_left(ranks, rank)]
        if not ranks:
            del self._alike[self._key[rank]]


class _Times:
    """
    What the product and each matrix's way to and from some ranks take, each of these after the other.

    The way from a rank's own host memory is left out: it is the same whoever computes.
    """

    def __init__(self, problem: GemmProblem, placement: Placement, machine: Machine) -> None:
        self._machine, self._flops = machine, problem.flops
        self._rates = machine.typical_gemm_rate(problem.arithmetic)
        self._of_host = {True: 0.0, False: 0.0}  # bytes, by whether they go to the ranks
        self._of_devices: dict[bool, dict[int, float]] = {True: {}, False: {}}
        ways = [(Matrix.A, True), (Matrix.B, True), (Matrix.C, False), *([(Matrix.C, True)] * problem.reads_c)]
        for matrix, inward in ways:
            for part in placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix)):
                nbytes, rank = float(math.prod(part.shape) * problem.dtypes[matrix].itemsize), part.location.rank
                if rank is None:
                    self._of_host[inward] += nbytes
                elif part.location.space == "device":
                    self._of_devices[inward][rank] = self._of_devices[inward].get(rank, 0.0) + nbytes

    def with_each(self, chosen: list[int], some: list[int]) -> np.ndarray:
        """Return what it takes those that are chosen and one of some others (s), for each of these."""
        seconds: np.ndarray = self._flops / (self._rates[chosen].sum() + self._rates[some])
        for inward, nbytes in self._of_host.items():
            if nbytes:
                rates = [self._machine.host_rates([*chosen, one], inward=inward, outward=not inward) for one in some]
                seconds += nbytes / (1e9 * np.array([float(one.sum()) for one in rates]))
        for inward, of_ranks in self._of_devices.items():
            owners = list(of_ranks)
            links = self._machine.bandwidth_gb_per_s
            links = links[owners] if inward else links[:, owners].T
            rates = links[:, chosen].sum(axis=1)[:, np.newaxis] + links[:, some]
            seconds += (np.array([*of_ranks.values()])[:, np.newaxis] / (1e9 * rates)).sum(axis=0)
        return seconds
