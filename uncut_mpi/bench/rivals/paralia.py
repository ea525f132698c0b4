"""
PARALiA's predictor: the time of a product on a set of devices in closed form, and the choice of the set.

From P. Anastasiadis, N. Papadopoulou, G. Goumas, N. Koziris, D. Hoppe and L. Zhong, *PARALiA: a
performance aware runtime for auto-tuning linear algebra on heterogeneous systems* (ACM TACO, 2023),
sections 3.1 and 3.3; the links are those of `uncut_mpi.bench.rivals.link_map`. All transfers and products
overlap fully, so the times are optimistic. The private host memory of a rank counts as the host.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Final, TypeAlias

import numpy as np

from uncut_mpi.bench.rivals.link_map import LinkMap
from uncut_mpi.errors import ParamError
from uncut_mpi.model.costs import GemmShape
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import MATRICES, Matrix, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.grid import grids

TILE_STEP: Final = 256
"""Tile edges looked at are multiples of it, as those of the paper's database (section 3.4)."""

MOST_TILE: Final = 8192
"""The largest of them."""

TILE_TOLERANCE: Final = 0.01
"""The smallest tile whose prediction is within this part of the least is taken: the model overlaps all fully."""

MOST_SETS: Final = 560
"""Sets of devices predicted at most, as many of each size. All sets of 8 devices are among them."""

RATIO_TOLERANCE: Final = 0.05
"""Devices are balanced when their predicted times differ by no more than this part (section 3.1)."""

_Floats: TypeAlias = np.ndarray[tuple[int], np.dtype[np.float64]]
_Table: TypeAlias = np.ndarray[tuple[int, int], np.dtype[np.float64]]
_Ranks: TypeAlias = np.ndarray[tuple[int], np.dtype[np.int64]]
_Way: TypeAlias = tuple[int | _Ranks, int | _Ranks, float]  # source, destination, bytes

_NO_SHAPE: Final = GemmShape()
_MOST_ADJUSTMENTS: Final = 50


@dataclasses.dataclass(frozen=True, slots=True)
class DevicePrediction:
    """
    Predicted times of one device's share (seconds).

    Attributes
    ----------
    exec_s : float
        Products, t_exec.
    receive_s : float
        Its share of all matrices that are read, each over the link from where it lives.
    extra_s : float
        What other devices need too, equation 4.
    send_s : float
        Its share of the results.
    """

    exec_s: float
    receive_s: float
    extra_s: float
    send_s: float

    @property
    def seconds(self) -> float:
        """The predicted time (equation 5; without extra bytes equation 3, of one device and host data equation 1)."""
        return max(self.exec_s, self.extra_s + self.receive_s, self.send_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Workload:
    """
    A distribution of a product over devices, and what it is predicted to take.

    Attributes
    ----------
    devices : tuple of int
        Ranks that compute.
    ratios : tuple of float
        Share of each, 1 in all.
    predictions : tuple of DevicePrediction
        One for each of them.
    watts : float
        Power of all devices of the machine, those that compute at work and the others at rest.
    """

    devices: tuple[int, ...]
    ratios: tuple[float, ...]
    predictions: tuple[DevicePrediction, ...]
    watts: float

    @property
    def seconds(self) -> float:
        """The time of the slowest device (total_pred_t)."""
        return max(prediction.seconds for prediction in self.predictions)


def extra_transfer_bytes(grid: tuple[int, int], read_only_bytes: Sequence[float]) -> float:
    """
    Return the bytes that devices receive beyond one copy of each matrix that is only read (section 3.3).

    ((rows − 1) + (cols − 1)) / RONLY_num · RONLY_sum_bytes, of all devices together.

    Parameters
    ----------
    grid : tuple of int
        (rows, cols) of the block-cyclic distribution.
    read_only_bytes : sequence of float
        Sizes of the matrices that are only read.
    """
    if not read_only_bytes:
        return 0.0
    return ((grid[0] - 1) + (grid[1] - 1)) / len(read_only_bytes) * sum(read_only_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class _Costs:
    """What shares of a product cost devices; of each array an element is a device's."""

    product_s: _Floats  # of the whole product, or of one of a tile
    tiles: int  # of C, 0: none
    products: int  # of each tile
    extra_s: _Floats  # what it receives beyond one copy of each matrix, if its share were all
    # Of the ways of what is read, and at last of the result, a row each: t_link of a share (equation 2).
    size_bytes: _Table
    latency_s: _Table
    bytes_per_s: _Table
    tile_bytes: float  # each tile starts anew; 0: no tiles

    def at(self, shares: _Floats) -> tuple[_Floats, _Floats, _Floats, _Floats]:
        """Return the fields of the devices' `DevicePrediction`, in their order."""
        tiles = np.ceil(shares * self.tiles - 1e-9) if self.tiles else shares
        moved = shares * self.size_bytes
        starts = np.ceil(moved / self.tile_bytes) if self.tile_bytes else 1.0
        moved_s = np.where(moved == 0, 0.0, starts * self.latency_s + moved / self.bytes_per_s)
        return (
            tiles * self.products * self.product_s,
            moved_s[:-1].sum(axis=0),
            shares * self.extra_s,
            moved_s[-1],
        )

    def seconds(self, shares: _Floats) -> list[float]:
        """Return the devices' `DevicePrediction.seconds`."""
        exec_s, receive_s, extra_s, send_s = self.at(shares)
        times: list[float] = np.maximum(np.maximum(exec_s, extra_s + receive_s), send_s).tolist()
        return times


@dataclasses.dataclass(frozen=True, slots=True)
class Predictor:
    """
    What a product is predicted to take.

    Attributes
    ----------
    problem : GemmProblem
        The product.
    placement : Placement
        Where its matrices live, on devices that compute or not.
    machine : Machine
        Links, rates and watts.
    max_hops : int
        Devices that a rerouted transfer passes at most, 0 to 2; the paper's evaluation has 1.
    tile : int
        Edge of tiles (elements); 0: everything at once.

    Raises
    ------
    ParamError
        By its methods, if a rank does not exist or shares do not fit.
    TopologyError
        By its methods, if the machine has no rate for the problem's type.

    Notes
    -----
    The grid is the most square one. In equation 4 each device receives its share of the extra bytes, at the mean of
    what its links from the other devices sustain. The paper says: "we assume these bytes are equally distributed
    between devices".
    """

    problem: GemmProblem
    placement: Placement
    machine: Machine
    max_hops: int = 1
    tile: int = 0

    def workload(self, devices: Sequence[int], ratios: Sequence[float] | None = None) -> Workload:
        """
        Return what the product is predicted to take on some ranks.

        Parameters
        ----------
        devices : sequence of int
            Ranks that compute.
        ratios : sequence of float, optional
            Share of each, 1 in all. By default equal ones, then adjusted until the predicted times differ by 5 % at
            most (section 3.1).
        """
        chosen = tuple(devices)
        self._check(chosen, ratios)
        costs = self._costs(chosen, self._links_for(chosen))
        if ratios is not None:
            return self._predicted(chosen, tuple(ratios), costs)
        shares = (1.0 / len(chosen),) * len(chosen)
        for _ in range(_MOST_ADJUSTMENTS):
            times = costs.seconds(np.array(shares))
            if min(times) == 0 or max(times) <= min(times) * (1 + RATIO_TOLERANCE):
                break
            # Times are linear in the shares, with latencies that are not negative. Then this step, the last one
            # where there are no latencies, leads no device beyond the slowest of before.
            speeds = [share / seconds for share, seconds in zip(shares, times, strict=True)]
            whole = sum(speeds)
            shares = tuple(speed / whole for speed in speeds)
        return self._predicted(chosen, shares, costs)

    def select(
        self,
        *,
        cost: Callable[[Workload], float] = lambda workload: workload.seconds,
        order: Sequence[int] | None = None,
        most_sets: int = MOST_SETS,
    ) -> Workload:
        """
        Return the workload of least cost over sets of devices (section 3.1).

        Sets grow by one device at a time: the cheapest sets of a size first, each with each device that it lacks. Of
        each size as many are predicted as `most_sets` allows. Of up to 8 devices that is every set, as in the paper; of
        more devices it is some of them. The set of all devices is always predicted.

        Parameters
        ----------
        cost : callable
            What is minimised; by default the time. Of equals the smallest set is taken, of these the one of the lowest
            ranks.
        order : sequence of int, optional
            All ranks in the order in which they are added, where not all can be; by default that of their numbers.
        most_sets : int
            Sets that are predicted at most, but one of each size always is.
        """
        ranks = tuple(range(self.machine.num_ranks)) if order is None else tuple(order)
        most = max(1, most_sets // len(ranks))
        best: Workload | None = None
        smaller: list[tuple[int, ...]] = [()]
        for _ in ranks:
            larger = dict.fromkeys(
                tuple(sorted((*devices, rank))) for devices in smaller for rank in ranks if rank not in devices
            )
            found = [self.workload(devices) for devices in sorted(itertools.islice(larger, most))]
            for one in found:
                if best is None or cost(one) < cost(best) * (1 - 1e-9):
                    best = one
            smaller = [one.devices for one in sorted(found, key=cost)]
        assert best is not None  # a machine has a rank
        return best

    def tile_edge(self, devices: Sequence[int], ratios: Sequence[float] | None = None) -> int:
        """
        Return the tile edge T (elements) of least predicted time for some ranks and shares, by default equal ones.

        Equations 1 to 5 in tiles. A device's products are as many as its share of ⌈m/T⌉·⌈n/T⌉, rounded up, times
        ⌈k/T⌉. Each has the time looked up for T×T×T ("Kernel lookup", section 3.4). Each tile that the device receives
        or sends has the link's latency. The equations know of no start or end without overlap, so that of edges within
        `TILE_TOLERANCE` the smallest is taken.
        """
        largest = max(1, self.problem.m, self.problem.n, self.problem.k)
        edges = [*range(TILE_STEP, min(largest, MOST_TILE) + 1, TILE_STEP)] or [largest]
        chosen = tuple(devices)
        shares = tuple(ratios) if ratios is not None else (1.0 / len(chosen),) * len(chosen)
        self._check(chosen, shares)
        links = self._links_for(chosen)
        with_tiles = (dataclasses.replace(self, tile=edge) for edge in edges)
        times = [one._predicted(chosen, shares, one._costs(chosen, links)).seconds for one in with_tiles]
        near = min(times) * (1 + TILE_TOLERANCE)
        edge: int = min(edge for edge, seconds in zip(edges, times, strict=True) if seconds <= near)
        return edge

    def _check(self, chosen: tuple[int, ...], ratios: Sequence[float] | None) -> None:
        self.placement.check_ranks(self.machine.num_ranks)
        if not chosen or len(set(chosen)) < len(chosen) or not set(chosen) <= set(range(self.machine.num_ranks)):
            raise ParamError(
                f"devices {chosen} of a prediction: name ranks 0 to {self.machine.num_ranks - 1}, each once at most"
            )
        if ratios is not None and (
            len(ratios) != len(chosen) or min(ratios) < 0 or not abs(sum(ratios) - 1) <= 1e-9 * len(chosen)
        ):
            raise ParamError(f"ratios {tuple(ratios)} of devices {chosen}: give each a share, 1 in all")

    def _links_for(self, chosen: tuple[int, ...]) -> LinkMap:
        links = LinkMap.of(self.machine).shared_by(chosen, [*map(self._index, self.placement.whole())])
        return links.rerouted(chosen, max_hops=self.max_hops)

    def _predicted(self, devices: tuple[int, ...], shares: tuple[float, ...], costs: _Costs) -> Workload:
        machine = self.machine
        idle = sorted(set(range(machine.num_ranks)).difference(devices))
        watts = float(machine.busy_watts[list(devices)].sum()) + float(machine.idle_watts[idle].sum())
        each = zip(*(part.tolist() for part in costs.at(np.array(shares))), strict=True)
        predictions = tuple(DevicePrediction(*one) for one in each)
        return Workload(devices, shares, predictions, watts)

    def _costs(self, devices: tuple[int, ...], links: LinkMap) -> _Costs:
        """Return what shares of the product cost the devices."""
        problem = self.problem
        at_a, at_b, at_c = self.placement.whole()
        of_a, of_b, c_bytes = (float(problem.bytes_of(matrix)) for matrix in MATRICES)
        read_only: list[tuple[float, Location]] = []
        if problem.has_product:
            read_only = [(of_a, at_a), (of_b, at_b)]
        reads = [*read_only, (c_bytes, at_c)] if problem.reads_c else read_only
        chosen = np.array(devices)
        extra_s = np.zeros(len(devices))
        if len(devices) > 1:
            between = links.shared_gb_per_s[np.ix_(chosen, chosen)].astype(np.float64)
            np.fill_diagonal(between, 0.0)
            from_others = between.sum(axis=0) / (len(devices) - 1)
            extra_s = extra_transfer_bytes(
                grids(len(devices), split_k=False)[0][:2], [size for size, _ in read_only]
            ) / (from_others * 1e9)
        ways: list[_Way] = [(self._index(at), chosen, size) for size, at in reads]
        ways.append((chosen, self._index(at_c), c_bytes))
        product_s, tiles, products = self._products(chosen)
        return _Costs(product_s, tiles, products, extra_s, *self._transfers(links, ways))

    def _transfers(self, links: LinkMap, ways: Sequence[_Way]) -> tuple[_Table, _Table, _Table, float]:
        """Return what ways cost; what is there already costs nothing."""
        moves = np.array([source != destination for source, destination, _ in ways])
        latency_s = np.array([links.latency_s[source, destination] for source, destination, _ in ways])
        gb_per_s = np.array([links.shared_gb_per_s[source, destination] for source, destination, _ in ways])
        return (
            np.where(moves, np.array([size for *_, size in ways])[:, None], 0.0),
            np.where(moves, latency_s, 0.0),
            np.where(moves, gb_per_s * 1e9, 1.0),
            float(self.tile**2 * self.problem.arithmetic.itemsize),
        )

    def _products(self, devices: _Ranks) -> tuple[_Floats, int, int]:
        """Return the time of one product on each device (s), how many share C, and how many of them are along k."""
        problem = self.problem
        if not problem.has_product:
            return np.zeros(len(devices)), 0, 0
        extents = (problem.m, problem.n, problem.k)
        if not self.tile:
            return self._product_s(devices, *extents), 0, 1
        m, n, k = (min(self.tile, extent) for extent in extents)
        return self._product_s(devices, m, n, k), -(-problem.m // m) * -(-problem.n // n), -(-problem.k // k)

    def _product_s(self, devices: _Ranks, m: int, n: int, k: int) -> _Floats:
        machine, dtype, sums = self.machine, self.problem.arithmetic, self.problem.accumulator.itemsize
        shape = machine.gemm_shape.get(dtype.name, _NO_SHAPE)
        item = self.problem.dtypes[Matrix.C].itemsize if k == self.problem.k else sums
        adds = self.problem.reads_c or k < self.problem.k
        extra_bytes = m * n * ((2 if adds else 1) * item - sums)
        alike = [
            *zip(machine.multiprocessors[devices].tolist(), machine.gemm_rate(dtype)[devices].tolist(), strict=True)
        ]
        known = {one: shape.seconds(m, n, k, int(one[0]), float(one[1]), extra_bytes) for one in set(alike)}
        return np.array([known[one] for one in alike])

    def _index(self, location: Location) -> int:
        return self.machine.host if location.space == "host" or location.rank is None else location.rank
