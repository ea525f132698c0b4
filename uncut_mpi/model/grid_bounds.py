"""
What no schedule of one process grid can beat.

The ranks of a set D compute, as a grid of r × c blocks of C with k split in s parts. There are r·c·s = G ranks, with
equal shares. A is m×k, B k×n, C m×n; their bytes are called A, B, C too. Every matrix starts in one place, and C ends
in one. Each byte of the host crosses its links once. What several ranks need passes from device to device.

The private host memory of a rank is behind that rank's link and device, so it counts as host and as
owned by the device. Waiting, latency and the filling of pipelines are left out.

The bound that holds for any schedule, without a grid, is `uncut_mpi.model.bounds.bound`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from uncut_mpi.errors import ParamError
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Matrix, Placement
from uncut_mpi.model.ports import least_time
from uncut_mpi.model.problem import GemmProblem

MOST_SEARCHED: Final = 16
"""Ranks of which every set is looked at: 65,535 sets."""


@dataclasses.dataclass(frozen=True, slots=True)
class GridBound:
    """
    The time that no schedule of a process grid can beat.

    Attributes
    ----------
    seconds : float
        The largest term.
    limited_by : str
        Its name.
    terms : mapping of str to float
        ``compute``, ``host``, ``egress``, ``ingress`` and ``replication`` (seconds).
    grid : tuple of int
        (r, c, s): blocks of rows, of columns and of k.
    devices : tuple of int
        Ranks that compute, ascending.
    """

    seconds: float
    limited_by: str
    terms: Mapping[str, float]
    grid: tuple[int, int, int]
    devices: tuple[int, ...]


def grid_bound(
    problem: GemmProblem,
    placement: Placement,
    machine: Machine,
    *,
    grid: tuple[int, int, int],
    devices: Sequence[int] | None = None,
    c_at_owner: bool = True,
) -> GridBound:
    """
    Return the time that no schedule of a process grid can beat.

    Parameters
    ----------
    problem : GemmProblem
        The product.
    placement : Placement
        Where the problem's A, B and C live, on ranks that compute or not.
    machine : Machine
        Links, ports and rates.
    grid : tuple of int
        (r, c, s) with r·c·s ranks.
    devices : sequence of int, optional
        The ranks that compute; all by default.
    c_at_owner : bool
        Whether a C that is read stays at its owner and is combined there. False: it is fetched to the
        ranks that compute.

    Raises
    ------
    ParamError
        If the grid does not fit the ranks, or a rank does not exist.
    TopologyError
        If the machine has no rate for the problem's type.

    Notes
    -----
    The module's text derives each term.

    Notes
    -----
    compute
        2mnk / (G · rate of the slowest rank of D).
    host
        What lies in host memory enters, and C there leaves, over the host links of D, both ways at once
        under their ports. C enters only if it is read.
    egress
        What has to leave the device that owns matrices, over its links to D. Of A that is everything, but the own block
        A/(rs) stays where no other column needs it (c = 1). Of B likewise with B/(cs), r = 1. C is read as (1 −
        1/(rc))·C, unless it is combined at its owner.
    ingress
        What has to enter the device that owns C, from D: all results but its own block C/(rc), which only a
        split of k (s > 1) makes incomplete.
    replication
        What has to enter the ranks of D from other devices, over the sum of their ingress. A enters in c copies and B
        in r, less the owner's own block. Of what comes from the host it is one copy less, as the first enters over a
        host link. Besides there are (s − 1)·C partial results, C's results and, if it moves, C itself.
    """
    return _Node(problem, placement, machine, devices, c_at_owner).bound(grid)


def grids(num_ranks: int, *, split_k: bool = True) -> list[tuple[int, int, int]]:
    """Return all (r, c, s) with r·c·s = `num_ranks`: least s first, then the most square, then the least r."""
    divisors = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
    found = [
        (rows, cols, num_ranks // rows // cols)
        for rows, cols in itertools.product(divisors, divisors)
        if num_ranks % (rows * cols) == 0
    ]
    return sorted(
        (grid for grid in found if split_k or grid[2] == 1),
        key=lambda grid: (grid[2], abs(grid[0] - grid[1]), grid[0]),
    )


def best_grid_bound(
    problem: GemmProblem,
    placement: Placement,
    machine: Machine,
    *,
    subsets: Iterable[Sequence[int]] | None = None,
    split_k: bool = True,
    c_at_owner: bool = True,
) -> GridBound:
    """
    Return the lowest `grid_bound` over sets of ranks and all grids of each.

    Of equal ones (to a part in 10⁹) the first set and the first of `grids` is kept.

    Parameters
    ----------
    problem, placement, machine, c_at_owner
        As for `grid_bound`.
    subsets : iterable of sequences of int, optional
        Sets of ranks, in the order of preference. By default every set of the machine's ranks, small ones
        first; there are 2ⁿ − 1 of n ranks, so that of more than `MOST_SEARCHED` they have to be named.
    split_k : bool
        Whether k may be split.

    Raises
    ------
    ParamError
        If there is no set of ranks or there are too many, or a rank does not exist.
    TopologyError
        If the machine has no rate for the problem's type.
    """
    ranks = range(machine.num_ranks)
    if subsets is None:
        if len(ranks) > MOST_SEARCHED:
            raise ParamError(
                f"machine {machine.name} has {len(ranks)} ranks, and all sets of more than {MOST_SEARCHED} "
                "are too many to look at: name some (subsets)"
            )
        subsets = (chosen for count in range(1, len(ranks) + 1) for chosen in itertools.combinations(ranks, count))
    best: GridBound | None = None
    for devices in subsets:
        node = _Node(problem, placement, machine, devices, c_at_owner)
        for grid in grids(len(node.devices), split_k=split_k):
            found = node.bound(grid)
            if best is None or found.seconds < best.seconds * (1 - 1e-9):
                best = found
    if best is None:
        raise ParamError("no set of ranks was given to choose from: give at least one")
    return best


class _Node:
    """What a set of ranks and a placement fix, whatever the grid."""

    def __init__(
        self,
        problem: GemmProblem,
        placement: Placement,
        machine: Machine,
        devices: Sequence[int] | None,
        c_at_owner: bool,
    ) -> None:
        placement.check_ranks(machine.num_ranks)
        self.devices = tuple(sorted(set(range(machine.num_ranks) if devices is None else devices)))
        if not self.devices or not 0 <= self.devices[0] <= self.devices[-1] < machine.num_ranks:
            raise ParamError(
                f"devices {self.devices} of a bound: name at least one of the ranks 0 to {machine.num_ranks - 1}"
            )
        self._machine = machine
        item = problem.dtype.itemsize
        inputs = problem.m * problem.k * item, problem.k * problem.n * item
        self._a, self._b = (float(size) if problem.has_product else 0.0 for size in inputs)
        self._c = float(problem.m * problem.n * item)
        self._reads_c = problem.reads_c
        self._has_product = problem.has_product
        self._c_moves = problem.reads_c and problem.has_product and not c_at_owner
        self._located = located = placement.whole()
        slowest = float(machine.gemm_rate(problem.dtype)[list(self.devices)].min())
        self._compute_s = problem.flops / (len(self.devices) * slowest) if problem.has_product else 0.0
        self._host_s = self._host_time()
        owners = {location.rank for location in located if location.rank is not None}
        taking_part = sorted(owners.union(self.devices))
        # Seconds per byte.
        self._egress = {owner: self._time_per_byte([(owner, to) for to in self.devices]) for owner in owners}
        c_owner = located[Matrix.C].rank
        self._c_ingress = (
            0.0 if c_owner is None else self._time_per_byte([(source, c_owner) for source in self.devices])
        )
        ingress = [self._time_per_byte([(source, to) for source in taking_part]) for to in self.devices]
        rates = [1.0 / time for time in ingress if time > 0]
        self._replication = 1.0 / sum(rates) if rates else 0.0

    def _time_per_byte(self, links: list[tuple[int, int]]) -> float:
        """Return seconds per byte over links, those that end where they start left out; 0 without links."""
        real = [(source, to) for source, to in links if source != to]
        if not real:
            return 0.0
        return least_time([(real, 1e9)], self._machine.bandwidth_gb_per_s, self._machine.ports) / 1e9

    def _host_time(self) -> float:
        host = self._machine.host
        sizes = self._a, self._b, self._c * self._reads_c
        inward = [*zip(sizes, self._located, strict=True)]
        demands = []
        for into, pieces in ((True, inward), (False, [(self._c, self._located[Matrix.C])])):
            held = [(size, location) for size, location in pieces if location.space == "host"]
            private = [(size, location.rank) for size, location in held if location.rank is not None]
            via = sorted({rank for _, rank in private}.union(self.devices))
            link = {rank: (host, rank) if into else (rank, host) for rank in via}
            demands.append(([link[rank] for rank in via], sum(size for size, _ in held)))
            for rank in sorted({rank for _, rank in private}):
                demands.append(([link[rank]], sum(size for size, owner in private if owner == rank)))
        return least_time(demands, self._machine.bandwidth_gb_per_s, self._machine.ports)

    def bound(self, grid: tuple[int, int, int]) -> GridBound:
        rows, cols, splits = grid
        if min(grid) < 1 or rows * cols * splits != len(self.devices):
            raise ParamError(
                f"grid {rows}x{cols}x{splits} does not have as many places as there are devices, {len(self.devices)}"
            )
        terms = {"compute": self._compute_s, "host": self._host_s, "egress": 0.0, "ingress": 0.0, "replication": 0.0}
        if self._has_product:
            terms.update(self._device_terms(rows, cols, splits))
        limited_by = max(terms, key=terms.__getitem__)
        return GridBound(terms[limited_by], limited_by, terms, (rows, cols, splits), self.devices)

    def _device_terms(self, rows: int, cols: int, splits: int) -> dict[str, float]:
        leaving: dict[int, float] = {}
        replicated = (splits - 1) * self._c
        for size, location, needed_by, holders in (
            (self._a, self._located[Matrix.A], cols, rows * splits),
            (self._b, self._located[Matrix.B], rows, cols * splits),
        ):
            if location.rank is None:
                replicated += (needed_by - 1) * size
                continue
            own = self._own(location, size / holders)
            leaving[location.rank] = leaving.get(location.rank, 0.0) + size - (own if needed_by == 1 else 0.0)
            replicated += needed_by * size - own
        entering = 0.0
        owner = self._located[Matrix.C].rank
        if owner is not None:
            own = self._own(self._located[Matrix.C], self._c / (rows * cols))
            entering = self._c - (own if splits == 1 else 0.0)
            fetched = (self._c - own) * self._c_moves
            leaving[owner] = leaving.get(owner, 0.0) + fetched
            replicated += fetched + (self._c - own) * (owner in self.devices)
        return {
            "egress": max((size * self._egress[rank] for rank, size in leaving.items()), default=0.0),
            "ingress": entering * self._c_ingress,
            "replication": replicated * self._replication,
        }

    def _own(self, location: Location, block: float) -> float:
        return block if location.rank in self.devices else 0.0
