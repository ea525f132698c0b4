"""
What was measured about a machine: links, GEMM rates, memory.

A `Machine` is the only thing through which measured facts reach a planner.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from uncut_mpi.errors import ParamError, TopologyError, named
from uncut_mpi.model.arguments import count, counted, flag, items, real_number, shown, type_text, value_of_callers, word
from uncut_mpi.model.costs import Disk, GemmShape, IssueCosts, RowRates
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Ranks, host_index, num_ends
from uncut_mpi.model.ports import Net, Port, fair_rates
from uncut_mpi.model.remade import Remade

FORMAT_VERSION: Final = 9
_FORMAT_WITHOUT_NODES: Final = 8  # as 9, but for what one node has by default

MOST_RANKS: Final = 4096
"""Tables of links have the square of their number."""

ASSUMED: Final = "assumed, not measured"
QUICK: Final = "quick form"
"""The provenance of a machine that nobody measured, and how that of one begins that a session measured."""

_PER_RANK: Final = {
    "multiprocessors": 1,
    "combine_gb_per_s": 0.0,
    "half_combine_gb_per_s": 0.0,
    "idle_watts": 0.0,
    "active_watts": 0.0,
    "busy_watts": 0.0,
    "node_of": 0,
}
# Fields of one kind, which are checked, kept in files and read alike.
_WORDS: Final = ("name", "key", "provenance")
_FLAGS: Final = ("serial_copies", "steady")
_TABLES: Final = ("bandwidth_gb_per_s", "latency_s")
_SIZED: Final = {**_PER_RANK, "host_bytes": 0}
"""Arrays that may be left out, with what they have then, which is the least: of each rank, or of the node."""
_WHOLE: Final = ("multiprocessors", "node_of", "memory_bytes", "host_bytes")
_ARRAYS: Final = {
    name: np.int64 if name in _WHOLE else np.float64 for name in dict.fromkeys((*_TABLES, *_PER_RANK, *_WHOLE))
}
_RATES: Final = ("gemm_tflop_per_s", "typical_gemm_tflop_per_s")
_RECORDS: Final = {"row_rates": RowRates, "costs": IssueCosts, "disk": Disk}
_NOT_IN_EARLIER_FILES: Final[dict[str, Any]] = {"node_of": (), "host_bytes": (), "disk": {}}


def _unknown() -> np.ndarray:
    return np.zeros(0)


@value_of_callers
@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Machine(Remade):
    """
    Ranks on one node or several, each with one device, and the host memory that those of a node share.

    Locations are numbered 0 … num_ranks−1 for the devices, and then for the host of each node. Shapes below have ends,
    num_ranks + num_nodes.

    Attributes
    ----------
    name : str
        Printed in plans and reports.
    key : str
        Identifies the hardware; a machine is used only where the key is the same.
    bandwidth_gb_per_s : ndarray of float64, shape (ends, ends)
        [source, destination], 1e9 bytes per second, the best seen, one transfer at a time. Between memories of two
        nodes it is that of the net.
    latency_s : ndarray of float64, shape (ends, ends)
        [source, destination], time of a transfer of few bytes.
    gemm_tflop_per_s : mapping of str to ndarray of float64, shape (num_ranks,)
        Best rate of one large product per dtype name: 2mnk operations over its time, complex ones of complex types. A
        complex type that is missing has a quarter of the rate of its parts.
    memory_bytes : ndarray of int64, shape (num_ranks,)
        Device memory of each rank.
    typical_gemm_tflop_per_s : mapping of str to ndarray of float64, shape (num_ranks,)
        Rate to expect of it, with all ranks computing at once; the best rate if not given.
    ports : tuple of Port
        What transfers share; empty if they do not slow each other down.
    gemm_shape : mapping of str to GemmShape
        How the rate depends on the shape, per dtype name; a missing type runs at its rate always.
    multiprocessors : ndarray of int64, shape (num_ranks,)
        Blocks of a product that a device runs at once.
    row_rates : RowRates
        What narrow rows cost a copy.
    combine_gb_per_s : ndarray of float64, shape (num_ranks,)
        Rate at which COMBINE reads and writes device memory; 0: half the bandwidth from the device to itself.
    half_combine_gb_per_s : ndarray of float64, shape (num_ranks,)
        The same where the result is of a half type; 0: as for the others.
    costs : IssueCosts
        Host time of issuing, and latencies of events and flags.
    idle_watts, busy_watts : ndarray of float64, shape (num_ranks,)
        Power of each device at rest and in a product; 0 where unknown.
    active_watts : ndarray of float64, shape (num_ranks,)
        Power of each device between the products of a call, its clocks up; 0 where unknown.
    serial_copies : bool
        A device serves the copies that it issues one way (to other devices, from the host, to the host) one after
        another, each with its latency. Else those on different links run together. Measured between devices; each way
        with the host has one lane per rank.
    provenance : str
        Who measured it, how and when.
    steady : bool
        False if the machine was busy with something else, so that a later measurement is worth more.
    whole : bool
        Whether a whole calibration of an idle machine measured all of it. Its file has a seal of that, so that one
        whose figures were changed by hand does not say so.
    node_of : ndarray of int64, shape (num_ranks,)
        Node of each rank, from 0 without gaps.
    host_bytes : ndarray of int64, shape (num_nodes,)
        Host memory of each node; 0 where unknown. Matrices that are staged there have to fit beside the others.
    disk : Disk
        What files take; a common disk where it was not measured.
    on_disk : bool
        Whether what lies in host memory stands for what lies in files: of a machine that a search is to see. No file
        has one.

    Notes
    -----
    A bound takes the best rates, which nothing beats; a planner those to expect.
    """

    name: str
    key: str
    bandwidth_gb_per_s: np.ndarray
    latency_s: np.ndarray
    gemm_tflop_per_s: Mapping[str, np.ndarray]
    memory_bytes: np.ndarray
    typical_gemm_tflop_per_s: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    ports: tuple[Port, ...] = ()
    gemm_shape: Mapping[str, GemmShape] = dataclasses.field(default_factory=dict)
    multiprocessors: np.ndarray = dataclasses.field(default_factory=_unknown)
    row_rates: RowRates = dataclasses.field(default_factory=RowRates)
    combine_gb_per_s: np.ndarray = dataclasses.field(default_factory=_unknown)
    half_combine_gb_per_s: np.ndarray = dataclasses.field(default_factory=_unknown)
    costs: IssueCosts = dataclasses.field(default_factory=IssueCosts)
    idle_watts: np.ndarray = dataclasses.field(default_factory=_unknown)
    busy_watts: np.ndarray = dataclasses.field(default_factory=_unknown)
    active_watts: np.ndarray = dataclasses.field(default_factory=_unknown)
    serial_copies: bool = False
    provenance: str = ""
    steady: bool = True
    whole: bool = False
    node_of: np.ndarray = dataclasses.field(default_factory=_unknown)
    host_bytes: np.ndarray = dataclasses.field(default_factory=_unknown)
    disk: Disk = dataclasses.field(default_factory=Disk)
    on_disk: bool = False

    def __post_init__(self) -> None:
        self._convert()
        size = self._check_nodes()
        for name in _TABLES:
            table = getattr(self, name)
            if table.shape != (size, size):
                raise ParamError(f"{name} of machine {self.name} has shape {table.shape}, expected {(size, size)}")
            if not (np.isfinite(table).all() and (table >= 0).all()):
                raise ParamError(f"{name} of machine {self.name} has a negative or non-finite entry")
            table.flags.writeable = False
        off_diagonal = ~np.eye(size, dtype=bool)
        if (self.bandwidth_gb_per_s[off_diagonal] <= 0).any():
            raise ParamError(f"machine {self.name} has a link without bandwidth")
        if not self.typical_gemm_tflop_per_s:
            object.__setattr__(self, "typical_gemm_tflop_per_s", self.gemm_tflop_per_s)
        for name in _RATES:
            for dtype, rate in getattr(self, name).items():
                if rate.shape != (self.num_ranks,) or not (rate > 0).all():
                    raise ParamError(f"{name}[{dtype}] of machine {self.name} is not {self.num_ranks} positive rates")

        for dtype, rate in self.typical_gemm_tflop_per_s.items():
            best = self.gemm_tflop_per_s.get(dtype, rate)
            if not (rate <= best * (1 + 1e-9)).all():
                raise ParamError(
                    f"typical_gemm_tflop_per_s[{dtype}] of machine {self.name} is above gemm_tflop_per_s, the best "
                    "rate: give both, or leave the typical rates out ({})"
                )
        for name, default in _SIZED.items():
            values, length = getattr(self, name), self.num_ranks if name in _PER_RANK else self.num_nodes
            if not values.size:
                values = np.full(length, default)
                object.__setattr__(self, name, values)
            if values.shape != (length,) or not (np.isfinite(values).all() and (values >= default).all()):
                wanted = f"{counted(length, 'number')} of {default} or more"
                raise ParamError(f"{name} of machine {self.name} is {shown(values)}: name {wanted}")
            values.flags.writeable = False
        for port in self.ports:
            for source, destination in port.links:
                if not (0 <= source < size and 0 <= destination < size):
                    raise ParamError(
                        f"port {port.name} of machine {self.name} names link {source} to {destination}, "
                        f"locations are 0 to {size - 1}"
                    )

    def _check_nodes(self) -> int:
        """Check on which nodes the ranks are, and return from how many memories links lead."""
        if not self.node_of.size:
            object.__setattr__(self, "node_of", np.zeros(self.num_ranks, np.int64))
        if self.node_of.shape != (self.num_ranks,) or set(self.node_of.tolist()) != {*range(self.num_nodes)}:
            raise ParamError(
                f"node_of of machine {self.name} is {shown(self.node_of)}: name the node of each of its "
                f"{counted(self.num_ranks, 'rank')}, from 0 without gaps"
            )
        return num_ends(self.ranks)

    def _convert(self) -> None:
        """Turn what was given into arrays of one type each, and Python's own values."""
        kinds: dict[str, Callable[[str, object], Any]] = {
            **dict.fromkeys(_WORDS, word),
            **dict.fromkeys((*_FLAGS, "whole"), flag),
            **{name: _whole_numbers if kind is np.int64 else _numbers for name, kind in _ARRAYS.items()},
            "ports": items,
        }
        for name, to in kinds.items():
            object.__setattr__(self, name, to(f"{name} of a machine", getattr(self, name)))
        if self.memory_bytes.ndim != 1 or not 1 <= len(self.memory_bytes) <= MOST_RANKS or self.memory_bytes.min() < 0:
            raise ParamError(
                f"memory_bytes of machine {self.name} has shape {self.memory_bytes.shape}: name a number of 0 or more "
                f"for each rank, of which there are 1 to {MOST_RANKS}"
            )
        for name in (*_RATES, "gemm_shape"):
            table = getattr(self, name)
            if not isinstance(table, Mapping) or not all(isinstance(key, str) for key in table):
                raise ParamError(f"{name} of machine {self.name} is {type_text(table)}: pass a dict by names of types")
            if name != "gemm_shape":
                made = {key: _numbers(f"{name}[{key}] of a machine", rate) for key, rate in table.items()}
                object.__setattr__(self, name, made)
        for name, kind, values in (
            ("ports", Port, self.ports),
            ("gemm_shape", GemmShape, self.gemm_shape.values()),
            *((name, kind, [getattr(self, name)]) for name, kind in _RECORDS.items()),
        ):
            for one in values:
                if not isinstance(one, kind):
                    raise ParamError(f"{name} of machine {self.name} has {type_text(one)}: pass a {kind.__name__}")

    @property
    def num_ranks(self) -> int:
        """Ranks (devices) of the machine."""
        return len(self.memory_bytes)

    @property
    def ranks(self) -> Ranks:
        """Their number, or of several nodes that of each: as tables of locations take it."""
        return tuple(self.node_of.tolist()) if self.node_of.any() else self.num_ranks

    @property
    def num_nodes(self) -> int:
        """Nodes that ranks are on."""
        return int(self.node_of.max()) + 1

    @property
    def host(self) -> int:
        """Number of node 0's host memory, which all its ranks read."""
        return host_index(self.ranks)

    @property
    def host_of(self) -> np.ndarray:
        """Number of the host memory of each rank's node, shape (num_ranks,)."""
        numbers: np.ndarray = self.num_ranks + self.node_of
        return numbers

    def gemm_rate(self, dtype: DType) -> np.ndarray:
        """
        Return the best flop/s of each rank for one type, shape (num_ranks,).

        Raises
        ------
        TopologyError
            If the machine was measured without that type.
        """
        return self._rate(self.gemm_tflop_per_s, dtype)

    def typical_gemm_rate(self, dtype: DType) -> np.ndarray:
        """
        Return the flop/s to expect of each rank for one type, shape (num_ranks,).

        Raises
        ------
        TopologyError
            If the machine was measured without that type.
        """
        return self._rate(self.typical_gemm_tflop_per_s, dtype)

    def has_gemm_rate(self, dtype: DType) -> bool:
        """Return whether products of a type have a rate here."""
        return self._known_rate(self.typical_gemm_tflop_per_s, dtype) is not None

    def product_shape(self, dtype: DType) -> GemmShape:
        """Return how the rate of products of a type depends on their shape."""
        known = (self.gemm_shape.get(one.name) for one in dtype.measured_as)
        return next((one for one in known if one is not None), GemmShape())

    def check_ranks(self, num_ranks: int) -> None:
        """
        Check that the machine is one of so many ranks.

        Raises
        ------
        ParamError
            If it is not.
        """
        if self.num_ranks != count("num_ranks", num_ranks):
            raise ParamError(f"machine {self.name} has {counted(self.num_ranks, 'rank')}, the session has {num_ranks}")

    @staticmethod
    def _known_rate(rates: Mapping[str, np.ndarray], dtype: DType) -> np.ndarray | None:
        if not isinstance(dtype, DType):
            raise ParamError(f"dtype = {shown(dtype)} is {type_text(dtype)}: pass a DType (DType.parse)")
        for one in dtype.measured_as:
            if one.name in rates:
                return rates[one.name]
        real = rates.get(dtype.real.name)
        return None if real is None else real / 4  # of complex types: each of their operations is four real ones

    def _rate(self, rates: Mapping[str, np.ndarray], dtype: DType) -> np.ndarray:
        rate = self._known_rate(rates, dtype)
        if rate is None:
            raise TopologyError(
                f"machine {self.name} has no GEMM rate for {dtype.name}: take another type, or measure it"
            )
        flops: np.ndarray = rate * 1e12
        return flops

    def links(self, *, sharing: Sequence[int] = ()) -> np.ndarray:
        """
        Return the bandwidths to plan with, as `bandwidth_gb_per_s`.

        Parameters
        ----------
        sharing : sequence of int
            Ranks that use their host links at once, in one direction.
        """
        table: np.ndarray = self.bandwidth_gb_per_s.copy()
        ranks = self._ranks("sharing", sharing)
        if ranks:
            hosts = self.host_of[list(ranks)]
            table[hosts, ranks] = self.host_rates(ranks)[0]
            table[ranks, hosts] = self.host_rates(ranks, inward=False, outward=True)[1]
        return table

    def host_rates(self, ranks: Sequence[int], *, inward: bool = True, outward: bool = False) -> np.ndarray:
        """
        Return what each of some ranks gets from or to its host while all of them transfer at once.

        Parameters
        ----------
        ranks : sequence of int
            Those that transfer.
        inward, outward : bool
            Which ways are busy; at least one.

        Returns
        -------
        ndarray of float64, shape (2, len(ranks))
            GB/s from the host and to the host; 0 for a way that is idle. Max-min fair under `ports`.
        """
        return _host_rates(self, self._ranks("ranks", ranks), flag("inward", inward), flag("outward", outward))

    def _ranks(self, name: str, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return ranks of this machine that a caller names."""
        chosen = tuple(count(f"{name}[{at}]", rank) for at, rank in enumerate(items(name, ranks)))
        if not all(0 <= rank < self.num_ranks for rank in chosen):
            raise ParamError(f"{name} = {shown(chosen)} of machine {self.name}: name some of 0 to {self.num_ranks - 1}")
        return chosen

    def subset(self, ranks: Sequence[int]) -> Machine:
        """
        Return the machine that some of the ranks make: they become 0, 1, …, in the order given.

        Raises
        ------
        ParamError
            If a rank does not exist or occurs twice.
        """
        chosen = [count(f"ranks[{at}]", rank) for at, rank in enumerate(items("ranks", ranks))]
        if len(set(chosen)) < len(chosen) or not chosen or not all(0 <= rank < self.num_ranks for rank in chosen):
            raise ParamError(
                f"ranks {chosen} of machine {self.name} were asked for: "
                f"name some of 0 to {self.num_ranks - 1}, each once"
            )
        nodes, node_of = np.unique(self.node_of[chosen], return_inverse=True)  # those without ranks are no more
        ends = [*chosen, *(self.num_ranks + nodes).tolist()]
        place = {end: number for number, end in enumerate(ends)}
        ports = []
        for port in self.ports:
            kept = [
                ((place[source], place[destination]), weight)
                for (source, destination), weight in zip(port.links, port.weights, strict=True)
                if source in place and destination in place
            ]
            if kept:
                links, weights = zip(*kept, strict=True)
                ports.append(dataclasses.replace(port, links=links, weights=weights))
        both = np.ix_(ends, ends)
        fields: dict[str, Any] = {
            **{name: f"{getattr(self, name)}[{','.join(map(str, chosen))}]" for name in ("name", "key")},
            **{name: getattr(self, name)[both] for name in _TABLES},
            **{name: {dtype: rate[chosen] for dtype, rate in getattr(self, name).items()} for name in _RATES},
            **{name: getattr(self, name)[chosen] for name in ("memory_bytes", *_PER_RANK)},
            "node_of": node_of,
            "host_bytes": self.host_bytes[nodes],
        }
        return dataclasses.replace(self, ports=tuple(ports), **fields)

    @classmethod
    def uniform(
        cls,
        num_ranks: int,
        *,
        name: str = "uniform",
        link_gb_per_s: float = 390.0,
        host_gb_per_s: float = 50.0,
        latency_s: float = 5e-6,
        gemm_tflop_per_s: Mapping[str, float] | None = None,
        memory_bytes: int = 140 * 10**9,
    ) -> Machine:
        """Return a machine of equal devices and equal links, for tests and for planning without a measurement."""
        num_ranks = count("num_ranks", num_ranks)
        if not 1 <= num_ranks <= MOST_RANKS:
            raise ParamError(f"{num_ranks} ranks were asked for, a machine has 1 to {MOST_RANKS}")
        link_gb_per_s = real_number("link_gb_per_s", link_gb_per_s, finite=True)
        host_gb_per_s = real_number("host_gb_per_s", host_gb_per_s, finite=True)
        latency_s = real_number("latency_s", latency_s, finite=True)
        memory_bytes = count("memory_bytes", memory_bytes)
        size = num_ends(num_ranks)
        bandwidth = np.full((size, size), link_gb_per_s)
        bandwidth[num_ranks:, :] = bandwidth[:, num_ranks:] = host_gb_per_s
        np.fill_diagonal(bandwidth, 4.0 * link_gb_per_s)
        rates = gemm_tflop_per_s or {"f64": 60.0, "f32": 50.0, "f16": 750.0, "bf16": 750.0, "tf32": 400.0}
        return cls(
            name=name,
            key=f"{name}-{num_ranks}",
            bandwidth_gb_per_s=bandwidth,
            latency_s=np.full((size, size), latency_s),
            gemm_tflop_per_s={dtype: np.full(num_ranks, rate) for dtype, rate in rates.items()},
            memory_bytes=np.full(num_ranks, memory_bytes, np.int64),
            provenance=ASSUMED,
        )

    @classmethod
    def cluster(cls, node: Machine, num_nodes: int, net: Net) -> Machine:
        """
        Return a machine of several nodes that are alike, joined by a net.

        Ranks are numbered node by node. What goes to a memory of another node goes through the hosts of both. Its rate
        is the least of the links on its way, its latency their sum.

        Parameters
        ----------
        node : Machine
            What was measured of one node.
        num_nodes : int
            How many there are.
        net : Net
            What was measured between them.

        Raises
        ------
        ParamError
            If `node` has several nodes already, or there were more than 4,096 ranks.
        """
        num_nodes, each = count("num_nodes", num_nodes), node.num_ranks
        if not 1 <= num_nodes * each <= MOST_RANKS:
            raise ParamError(
                f"{counted(num_nodes, 'node')} with {counted(each, 'rank')} were asked for: a cluster has 1 to "
                f"{MOST_RANKS} ranks"
            )
        if num_nodes == 1:
            return node
        return cls.joined([node] * num_nodes, np.repeat(np.arange(num_nodes), each).tolist(), net)

    @classmethod
    def joined(cls, nodes: Sequence[Machine], node_of: Sequence[int], net: Net) -> Machine:
        """
        Return a machine of several nodes, which may differ, joined by a net; as `cluster`.

        Parameters
        ----------
        nodes : sequence of Machine
            What was measured of each. What holds for all ranks (shapes of products, costs of issuing) is the first's.
        node_of : sequence of int
            Node of each rank; those of a node are its machine's, in their order.
        net : Net
            What was measured between them.

        Raises
        ------
        ParamError
            If one of `nodes` has several, or not as many ranks as `node_of` says.
        """
        placed = [[rank for rank, node in enumerate(node_of) if node == at] for at in range(len(nodes))]
        fit = all(one.num_nodes == 1 and one.num_ranks == len(its) for one, its in zip(nodes, placed, strict=True))
        if not nodes or not fit or sum(map(len, placed)) != len(node_of):
            found = ", ".join(f"{one.num_ranks} on {counted(one.num_nodes, 'node')}" for one in nodes)
            raise ParamError(f"machines with ranks {found} were to be joined as nodes {list(node_of)}: they do not fit")
        total = len(node_of)
        numbers = [[*its, total + at] for at, its in enumerate(placed)]  # of each node's memories, the host's last
        tables = {}
        for name, of_net, join, nowhere in (
            ("bandwidth_gb_per_s", net.gb_per_s, np.minimum, math.inf),
            ("latency_s", net.latency_s, np.add, 0.0),
        ):
            out, come = np.full((2, total + len(nodes)), nowhere)
            for node, here in zip(nodes, numbers, strict=True):
                # To the host of its node, and from that of the other one; what lies there is there.
                table, ranks = getattr(node, name), here[:-1]
                out[ranks], come[ranks] = table[:-1, -1], table[-1, :-1]
            over: np.ndarray = join(join.outer(out, come), of_net)
            for node, here in zip(nodes, numbers, strict=True):
                over[np.ix_(here, here)] = getattr(node, name)
            tables[name] = over
        ports = [
            dataclasses.replace(
                port, name=f"node {at}, {port.name}", links=tuple((here[source], here[to]) for source, to in port.links)
            )
            for at, (node, here) in enumerate(zip(nodes, numbers, strict=True))
            for port in node.ports
        ]
        order = np.argsort(np.concatenate(placed), kind="stable")

        def of_ranks(values: Iterable[np.ndarray]) -> np.ndarray:
            together: np.ndarray = np.concatenate([*values])[order]
            return together

        changes: dict[str, Any] = tables | {"host_bytes": np.concatenate([node.host_bytes for node in nodes])}
        for name in ("memory_bytes", *(name for name in _PER_RANK if name != "node_of")):
            changes[name] = of_ranks(getattr(node, name) for node in nodes)
        for name in _RATES:
            several = [getattr(node, name) for node in nodes]
            shared = [key for key in several[0] if all(key in one for one in several)]
            changes[name] = {key: of_ranks(one[key] for one in several) for key in shared}
        return dataclasses.replace(
            nodes[0],
            name=_together(node.name for node in nodes),
            key=_together(node.key for node in nodes),
            ports=(*ports, *net.ports(numbers)),
            node_of=np.array(node_of, np.int64),
            whole=False,
            steady=all(node.steady for node in nodes),
            **changes,
        )

    def to_json(self) -> str:
        """Return the machine as JSON text of format `FORMAT_VERSION`."""
        data = self._figures()
        sealed = {"whole": _seal(data)} if self.whole else {}
        return json.dumps(data | sealed, indent=1, sort_keys=True)

    def _figures(self) -> dict[str, Any]:
        """Return all that its file says of it."""
        return {
            "format": FORMAT_VERSION,
            **{name: getattr(self, name) for name in (*_WORDS, *_FLAGS)},
            **{name: getattr(self, name).tolist() for name in _ARRAYS},
            **{name: {dtype: rate.tolist() for dtype, rate in getattr(self, name).items()} for name in _RATES},
            **{name: dataclasses.asdict(getattr(self, name)) for name in _RECORDS},
            "gemm_shape": {name: dataclasses.asdict(shape) for name, shape in self.gemm_shape.items()},
            "ports": [
                {
                    "name": port.name,
                    "capacity_gb_per_s": float(port.capacity_gb_per_s),
                    "typical_gb_per_s": float(port.typical_gb_per_s),
                    "links": [[*link, weight] for link, weight in zip(port.links, port.weights, strict=True)],
                }
                for port in self.ports
            ],
        }

    @classmethod
    def from_json(cls, text: str) -> Machine:
        """
        Rebuild a machine from `to_json`'s text.

        Raises
        ------
        ParamError
            If the text is not a machine file of this format.
        """
        try:
            data: dict[str, Any] = _NOT_IN_EARLIER_FILES | json.loads(text)
            found = data["format"]
            if found not in (FORMAT_VERSION, _FORMAT_WITHOUT_NODES):
                raise ParamError(
                    f"machine file format {found} was found, this version reads {FORMAT_VERSION}: measure that machine "
                    "again (python -m uncut_mpi.calibrate)"
                )
            fields: dict[str, Any] = {
                **{name: _text(data, name) for name in _WORDS},
                **{name: bool(data[name]) for name in _FLAGS},
                **{name: np.array(data[name], kind) for name, kind in _ARRAYS.items()},
                **{name: {one: np.array(rate, np.float64) for one, rate in data[name].items()} for name in _RATES},
                **{name: kind(**data[name]) for name, kind in _RECORDS.items()},
                "gemm_shape": {name: GemmShape(**shape) for name, shape in data["gemm_shape"].items()},
                "ports": tuple(
                    Port(
                        port["name"],
                        float(port["capacity_gb_per_s"]),
                        tuple((int(link[0]), int(link[1])) for link in port["links"]),
                        tuple(float(link[2]) for link in port["links"]),
                        float(port["typical_gb_per_s"]),
                    )
                    for port in data["ports"]
                ),
            }
            made = cls(**fields)
            return dataclasses.replace(made, whole=data.get("whole") == _seal(made._figures()))
        except ParamError:
            raise
        except (LookupError, TypeError, AttributeError, ValueError, OverflowError, RecursionError) as error:
            raise ParamError(
                f"not a machine file: {named(error)}; name one that python -m uncut_mpi.calibrate has "
                "written, or a machine that ships with the package"
            ) from None


@functools.lru_cache(maxsize=1024)
def _host_rates(machine: Machine, ranks: tuple[int, ...], inward: bool, outward: bool) -> np.ndarray:
    """As `Machine.host_rates`; a search asks for the same ranks again and again."""
    hosts = machine.host_of[list(ranks)].tolist()
    ways = [list(zip(hosts, ranks, strict=True))] * inward + [list(zip(ranks, hosts, strict=True))] * outward
    links = [link for way in ways for link in way]
    rates = fair_rates(links, [float(machine.bandwidth_gb_per_s[link]) for link in links], machine.ports)
    result = np.zeros((2, len(ranks)))
    result[[way for way, busy in enumerate((inward, outward)) if busy]] = rates.reshape(len(ways), len(ranks))
    result.flags.writeable = False
    return result


def _together(names: Iterable[str]) -> str:
    """Return what nodes have in their order, once for those that follow one another: ``2 × a + b``."""
    runs = ((name, len([*alike])) for name, alike in itertools.groupby(names))
    return " + ".join(f"{times} × {name}" if times > 1 else name for name, times in runs)


def _seal(data: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(data, sort_keys=True).encode(), digest_size=8).hexdigest()


def _text(data: Mapping[str, Any], name: str) -> str:
    if not isinstance(data[name], str):
        raise TypeError(f"{name} is {type(data[name]).__name__}, not text")
    return str(data[name])


def _numbers(name: str, value: object) -> np.ndarray:
    """Return a caller's real numbers as an array of float64, itself if it is one."""
    try:
        found = np.asarray(value)
        if found.dtype.kind in "iuf":
            return found.astype(np.float64, copy=False)
    except Exception:  # whatever the caller's type raises
        pass
    raise ParamError(f"{name} = {shown(value)} is {type_text(value)}: pass an array of real numbers")


def _whole_numbers(name: str, value: object) -> np.ndarray:
    """Return a caller's whole numbers, in whatever type, as an array of int64."""
    found = _numbers(name, value)
    whole = np.asarray(value)
    if whole.dtype.kind == "i":
        return whole.astype(np.int64, copy=False)
    if not (np.abs(found) < 2.0**63).all() or (found != np.rint(found)).any():
        raise ParamError(f"{name} = {shown(value)}: pass whole numbers that fit 64 bits")
    return whole.astype(np.int64)
