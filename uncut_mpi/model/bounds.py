"""
What no schedule can beat on a machine, if its rates are the best there are.

Every term is a time below which some resource cannot have done what any schedule must ask of it. The bound is the
largest of them. None assumes a process grid, a tile or an order. Waiting, latency and the filling of pipelines are left
out, so that a term can only be too low. What links can carry together is what their ports allow
(`uncut_mpi.model.ports.least_time`). `bound` derives each term.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from uncut_mpi.model.arguments import counted
from uncut_mpi.model.costs import Disk
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import ASSUMED, Machine
from uncut_mpi.model.placement import MATRICES, Matrix, Placement
from uncut_mpi.model.ports import Port, least_time
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.units import bytes_text

_BY_ASSUMED: Final = "by assumed rates"
_HALVINGS: Final = 60  # of an interval, which has the precision of a number then


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """
    The time that no schedule can beat at a machine's rates.

    Attributes
    ----------
    seconds : float
        The bound; 0 if there is nothing to do.
    limited_by : str
        Name of the largest term, as ``"compute"``, ``"host to devices"`` or ``"into rank 0"``.
    formula : str
        That term, in words and numbers.
    terms : mapping of str to float
        Every term that applies (seconds).
    basis : str
        ``"what nothing could beat"`` if its rates were measured in a whole calibration of an idle machine, else
        ``"by measured rates"``, or ``"by assumed rates"``.
    """

    seconds: float
    limited_by: str
    formula: str
    terms: Mapping[str, float]
    basis: str

    @property
    def words(self) -> str:
        """The formula, and what it is worth."""
        return f"{self.formula}, {self.basis}" if self.terms else self.formula


@dataclasses.dataclass(frozen=True, slots=True)
class _Term:
    name: str
    seconds: float
    formula: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Use:
    """A part of a matrix that a product reads or writes: the matrix's name, the part's bytes, those of all, where."""

    name: str
    size: int
    whole: int
    location: Location


def bound_of_files(
    problem: GemmProblem, placement: Placement, machine: Machine, in_files: tuple[bool, bool, bool]
) -> Bound:
    """
    Return the same where some of A, B and C lie in files: these are read once, and C written, at the disk's rates.

    Parameters
    ----------
    problem, placement, machine
        As for `bound`; matrices in files lie in host memory there.
    in_files : (bool, bool, bool)
        Which of A, B and C do.
    """
    terms = _terms(problem, placement, machine)
    names = {matrix.name for matrix, is_one in zip(MATRICES, in_files, strict=True) if is_one}
    rates = machine.disk.read_gb_per_s, machine.disk.write_gb_per_s
    of_disk = ("reading files", "writing files")
    for name, uses, rate in zip(of_disk, _uses(problem, placement), rates, strict=True):
        if mine := [use for use in uses if use.name in names]:
            formula = f"{_bytes_of(mine)} / {rate:.4g} GB/s of the disk"
            terms.append(_Term(name, _size_of(mine) / rate / 1e9, formula))
    largest = _largest(terms, _basis(problem, machine))
    by_disk = largest.limited_by in of_disk and machine.disk == Disk()
    return dataclasses.replace(largest, basis=_BY_ASSUMED) if by_disk else largest


@functools.lru_cache(maxsize=256)  # the values are frozen, and a search asks for the same ones again and again
def bound(problem: GemmProblem, placement: Placement, machine: Machine) -> Bound:
    r"""
    Return the time that no schedule for a problem can beat on a machine.

    Parameters
    ----------
    problem : GemmProblem
        The product.
    placement : Placement
        Where the problem's A, B and C live (of a swapped problem, A is the caller's B).
    machine : Machine
        Links and rates.

    Raises
    ------
    ParamError
        If the placement names a rank that the machine does not have.
    TopologyError
        If the machine has no rate for the problem's type.

    Notes
    -----
    Compute
        The 2mnk operations at the sum of all ranks' rates.

    Host links
        Products are made on devices. So every byte of A, B and C (if read) that lies in host memory enters some device
        at least once, over all links from host to devices together. C in host memory leaves a device at least once.
        Where the two ways share a port there is a term for both at once; else they run at full speed together. What
        lies in the private host memory of one rank passes that rank's link alone. Of several nodes there are such terms
        for each host that has something, and the links to all other nodes count too, since it may be sent.

    Out of and into a rank
        Let rank o hold matrices in its device and do the share x of the operations itself. That takes :math:`xF/r_o`,
        with F = 2mnk and :math:`r_o` its rate. An element of A (m×k) that never leaves o has all its 2n operations done
        there. So at most the share x of A's elements stays, and at least :math:`(1-x)` of its bytes leave o. The same
        holds for B. An element of C with an operation done elsewhere needs a partial result from there, of at least one
        element, so at least :math:`(1-x)` of C's bytes enter o. (C is combined at its owner at best, so reading it
        costs nothing here.) With q the time for all those bytes over all of o's links together, the time is at least
        :math:`\min_x \max(xF/r_o, (1-x)q) = q\,(F/r_o)/(F/r_o + q)`. Where o holds parts, let their bytes take q and
        those of the whole matrices Q. At most the share x of all elements stays, so :math:`q - xQ` has to move, and Q
        stands for q in the denominator. It is for all of one C: of a part, or in a batch, some elements of A and B have
        few operations.

    Between nodes
        Let a node do w of the products of two elements, with a elements of A, b of B, and sums of c elements of C.
        Then :math:`w \le \sqrt{abc}` (Loomis and Whitney). No element of A is in more than n products, of B in more
        than m, of C in more than k. What the node does not have of A and B at first enters it. Of each element of C
        that lives on other nodes alone a sum leaves it. In a time t at most t times what its adapters take enters, and
        t times what they give leaves. So w has a largest value for each t, and is no more than t times the node's rate.
        The bound is the least t for which these add up to mnk.

        This is the argument of Irony, Toledo and Tiskin (J. Parallel Distrib. Comput. 64, 2004), with limits of single
        matrices as Al Daas and others have them (SPAA 2022). What nodes have at first is counted too. Where each of P
        nodes has a P-th of all, one takes and gives :math:`3(mnk/P)^{2/3} - (mk + kn + mn)/P` elements or more.
        Kwasniewski and others (SC 2019) have that for much memory; with S elements of it in a node
        :math:`2mnk/(P\sqrt S)` may be more. Nodes have host memory for what they get, so memory has no limit here.
        It holds for no algorithm that saves products (Strassen's), which no scheduler makes. It knows adapters by
        ports all of whose links begin or end at their node.
    """
    return _largest(_terms(problem, placement, machine), _basis(problem, machine))


def _terms(problem: GemmProblem, placement: Placement, machine: Machine) -> list[_Term]:
    placement.check_ranks(machine.num_ranks)
    reads, writes = _uses(problem, placement)
    terms = []
    if problem.has_product:
        terms.append(_compute_term(problem, machine))
        if machine.num_ranks > 1 and problem.part is None and not problem.batch:
            terms.extend(_owner_terms(problem, reads, writes, machine))
        if machine.num_nodes > 1:
            terms.append(_net_term(problem, placement, machine))
    return [*terms, *_host_terms(reads, writes, machine)]


def _largest(terms: Sequence[_Term], basis: str) -> Bound:
    nothing = _Term("nothing", 0.0, "nothing is multiplied, and nothing has to leave its memory")
    largest = max(terms, key=lambda term: term.seconds, default=nothing)
    return Bound(largest.seconds, largest.name, largest.formula, {term.name: term.seconds for term in terms}, basis)


def _basis(problem: GemmProblem, machine: Machine) -> str:
    if not machine.provenance or machine.provenance == ASSUMED:
        return _BY_ASSUMED
    known = not problem.has_product or problem.arithmetic.name in machine.gemm_tflop_per_s
    return "what nothing could beat" if known and machine.whole else "by measured rates"


def _uses(problem: GemmProblem, placement: Placement) -> tuple[list[_Use], list[_Use]]:
    """Return what is read and written; of what several memories hold, each of which may be read, nothing is read."""
    read: list[_Use] = []
    written: list[_Use] = []
    for matrix in MATRICES:
        parts = placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix))
        item, whole = problem.dtypes[matrix].itemsize, problem.bytes_of(matrix)
        held = collections.Counter((part.rows, part.cols) for part in parts)
        for part in parts:
            used = part.elements if problem.part is None else problem.elements_used(matrix, part.rows, part.cols)
            use = _Use(matrix.name, item * used, whole, part.location)
            if matrix is Matrix.C:
                written.append(use)
            if held[part.rows, part.cols] == 1 and _is_read(problem, matrix):
                read.append(use)
    return read, written


def _is_read(problem: GemmProblem, matrix: Matrix) -> bool:
    if matrix is Matrix.C:
        return problem.reads_c
    return problem.has_product or (problem.copies and matrix is Matrix.A)


def _compute_term(problem: GemmProblem, machine: Machine) -> _Term:
    rate = float(machine.gemm_rate(problem.arithmetic).sum())
    m, n, k = problem.callers_shape
    elements = f"{m}·{n}" if problem.part is None else f"{problem.flops // (2 * k)}"
    count = f"{problem.flops}" if problem.batch else f"2·{elements}·{k}"
    return _Term(
        "compute",
        problem.flops / rate,
        f"{count} operations / {rate / 1e12:.4g} TFLOP/s of {counted(machine.num_ranks, 'rank')}",
    )


def _host_terms(reads: list[_Use], writes: list[_Use], machine: Machine) -> Iterator[_Term]:
    for node in range(machine.num_nodes):
        read, written = ([use for use in uses if _node_of(use.location, machine) == node] for uses in (reads, writes))
        yield from _terms_of_host(read, written, node, machine)


def _terms_of_host(reads: list[_Use], writes: list[_Use], node: int, machine: Machine) -> Iterator[_Term]:
    host, several = machine.num_ranks + node, machine.num_nodes > 1
    ends = _nodes_of_ends(machine)
    devices, elsewhere = np.flatnonzero(ends[: machine.num_ranks] == node), np.flatnonzero(ends != node)
    demands, ports = [], _ports_of_nodes(machine)[node]
    ways = (("host to devices", _on_host(reads), False), ("devices to host", _on_host(writes), True))
    for name, uses, back in ways:
        if not uses:
            continue
        of = f"{name}, node {node}" if several else name

        def link(other: int, back: bool = back) -> tuple[int, int]:
            return (other, host) if back else (host, other)

        links = [link(other) for other in (*devices.tolist(), *elsewhere.tolist())]
        yield _transfer_term(of, uses, links, machine, ports)
        demands.append((links, _size_of(uses)))
        for rank in sorted({use.location.rank for use in uses if use.location.rank is not None}):
            private = [use for use in uses if use.location.rank == rank]
            links = [link(other) for other in (rank, *elsewhere.tolist())]
            yield _transfer_term(f"{name}, rank {rank}", private, links, machine, ports)
            demands.append((links, _size_of(private)))
    if all(uses for _, uses, _ in ways) and any(_joins_ways(port, host) for port in ports):
        yield _Term(
            f"host both ways, node {node}" if several else "host both ways",
            least_time(demands, machine.bandwidth_gb_per_s, ports),
            " and ".join(f"{_bytes_of(uses)} {name}" for name, uses, _ in ways)
            + " at once, over ports that both ways share",
        )


def _nodes_of_ends(machine: Machine) -> np.ndarray:
    """Return the node of every end of links."""
    return np.concatenate((machine.node_of, np.arange(machine.num_nodes)))


def _node_of(location: Location, machine: Machine) -> int:
    """Return the node of a memory; host memory of all ranks is that of the first one."""
    return int(machine.node_of[location.rank or 0])


@functools.lru_cache(maxsize=64)
def _ports_of_nodes(machine: Machine) -> list[list[Port]]:
    """Return of each node the ports all of whose links begin or end there; others tell little of what it can do."""
    ends, found = _nodes_of_ends(machine), [list[Port]() for _ in range(machine.num_nodes)]
    for port in machine.ports:
        nodes = ends[np.array(port.links)]
        for node in {*nodes[0].tolist()}:
            if (nodes == node).any(axis=1).all():
                found[node].append(port)
    return found


@functools.lru_cache(maxsize=64)
def _places(machine: Machine) -> list[tuple[int, int]]:
    """Return of each rank the first node that is like its own, links and ports and all, and its place on a node."""
    ends, links, found = _nodes_of_ends(machine), machine.bandwidth_gb_per_s, dict[bytes, int]()
    first, place = np.zeros(machine.num_nodes, np.int64), np.zeros(machine.num_ranks, np.int64)
    for node, ports in enumerate(_ports_of_nodes(machine) if machine.num_nodes > 1 else ()):
        own = ends == node
        here, elsewhere = np.flatnonzero(own), np.flatnonzero(~own)
        number = np.where(own, np.cumsum(own), -np.cumsum(~own))
        known = hashlib.blake2b(links[np.ix_(here, here)].tobytes())
        for table in (links[np.ix_(here, elsewhere)], links[np.ix_(elsewhere, here)]):
            known.update(table.tobytes())
        for port in ports:
            known.update(np.array([port.capacity_gb_per_s, *port.weights]).tobytes())
            known.update(number[np.array(port.links)].tobytes())
        first[node] = found.setdefault(known.digest(), node)
        place[here[:-1]] = np.arange(len(here) - 1)
    if machine.num_nodes == 1:
        place = np.arange(machine.num_ranks)
    return list(zip(first[machine.node_of].tolist(), place.tolist(), strict=True))


def _on_host(uses: list[_Use]) -> list[_Use]:
    return [use for use in uses if use.location.space == "host" and use.size]


def _joins_ways(port: Port, host: int) -> bool:
    return {source == host for source, destination in port.links if host in (source, destination)} == {True, False}


def _transfer_term(
    name: str, uses: list[_Use], links: list[tuple[int, int]], machine: Machine, ports: Sequence[Port]
) -> _Term:
    total = _size_of(uses)
    seconds = least_time([(links, total)], machine.bandwidth_gb_per_s, ports)
    return _Term(name, seconds, f"{_bytes_of(uses)} / {total / seconds / 1e9:.4g} GB/s {name}")


def _owner_terms(problem: GemmProblem, reads: list[_Use], writes: list[_Use], machine: Machine) -> Iterator[_Term]:
    rates = machine.gemm_rate(problem.arithmetic)
    ports, places = _ports_of_nodes(machine), _places(machine)
    known: dict[tuple[tuple[int, int], str, float], float] = {}  # ranks that are alike move as much in as long
    for owner in range(machine.num_ranks):
        here = Location.device(owner)
        alone_s = problem.flops / float(rates[owner])
        others = [location for location in range(len(machine.bandwidth_gb_per_s)) if location != owner]
        for way, uses, links in (
            ("out of", [p for p in reads if p.location == here and p.name != "C"], [(owner, to) for to in others]),
            ("into", [p for p in writes if p.location == here], [(source, owner) for source in others]),
        ):
            size = _size_of(uses)
            if size == 0:
                continue
            alike = places[owner], way, size
            if alike not in known:
                of_node = ports[machine.node_of[owner]]
                known[alike] = least_time([(links, size)], machine.bandwidth_gb_per_s, of_node)
            transfer_s = known[alike]
            # What moves is what is there less the share of all of it that may stay: all of it, of whole matrices.
            all_s = transfer_s * _whole_of(uses) / size
            share = transfer_s / (alone_s + all_s)
            yield _Term(
                f"{way} rank {owner}",
                share * alone_s,
                f"{share:.0%} of the operations at rank {owner} at {rates[owner] / 1e12:.4g} TFLOP/s, "
                f"else {1 - share * all_s / transfer_s:.0%} of {_bytes_of(uses)} {way} it / "
                f"{size / transfer_s / 1e9:.4g} GB/s",
            )


def least_bytes_of_a_node(problem: GemmProblem, placement: Placement, machine: Machine) -> int:
    """
    Return what some node takes of A and B and gives of C in any schedule, at least; 0 on one node.

    Local: no MPI or CUDA call. See `bound`, between nodes, for the formula and what it assumes.
    """
    if machine.num_nodes == 1 or not problem.has_product:
        return 0
    nodes = _Nodes.of(problem, placement, machine)
    # Whichever does its share of the operations or more, of nodes that could.
    share = nodes.operations / machine.num_nodes
    return int(_least(lambda size: float(nodes.most(size, size, joint=True).max()), share, float(nodes.whole.sum())))


def _net_term(problem: GemmProblem, placement: Placement, machine: Machine) -> _Term:
    nodes = _Nodes.of(problem, placement, machine)
    rates = np.zeros(machine.num_nodes)
    np.add.at(rates, machine.node_of, machine.gemm_rate(problem.arithmetic) / 2)
    first_rank = np.unique(machine.node_of, return_index=True)[1].tolist()
    kinds, of_node = np.unique([_places(machine)[rank][0] for rank in first_rank], return_inverse=True)
    into, out_of = (
        np.array([_rate_over_net(machine, node, out=out) for node in kinds.tolist()])[of_node] for out in (False, True)
    )

    def done(seconds: float) -> float:
        return float(np.minimum(rates * seconds, nodes.most(into * seconds, out_of * seconds)).sum())

    longest = float(nodes.operations / rates.sum() + (nodes.whole.sum() / np.minimum(into, out_of)).max())
    node = int(np.argmin(into))
    return _Term(
        "between nodes",
        _least(done, nodes.operations, longest),
        f"what all operations need is not there sooner: {into[node] / 1e9:.4g} GB/s into node {node}, "
        f"{out_of[node] / 1e9:.4g} GB/s out of it",
    )


def _rate_over_net(machine: Machine, node: int, *, out: bool) -> float:
    """Return what a node takes or gives over all links with other nodes together (bytes per second)."""
    ends = _nodes_of_ends(machine)
    here, elsewhere = (np.flatnonzero(where).tolist() for where in (ends == node, ends != node))
    links = [(one, other) if out else (other, one) for one in here for other in elsewhere]
    return 1e9 / least_time([(links, 1e9)], machine.bandwidth_gb_per_s, _ports_of_nodes(machine)[node])


def _least(done: Callable[[float], float], wanted: float, most: float) -> float:
    """Return the least argument up to `most` for which a growing function reaches what is wanted, rounded down."""
    low, high = 0.0, most
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if done(middle) >= wanted else (middle, high)
    return low


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Nodes:
    """
    What nodes have of a product's matrices.

    Attributes
    ----------
    held : ndarray of float64, shape (num_nodes, 3)
        Bytes of A, B and C on each.
    whole : ndarray of float64, shape (3,)
        Bytes of all of each matrix.
    per_byte : ndarray of float64, shape (3,)
        Operations, a product and a sum each, that have a byte of each matrix; at most.
    items : float
        Bytes of an element of A, of B and of C, multiplied.
    operations : float
        Of the product.
    """

    held: np.ndarray
    whole: np.ndarray
    per_byte: np.ndarray
    items: float
    operations: float

    @classmethod
    def of(cls, problem: GemmProblem, placement: Placement, machine: Machine) -> _Nodes:
        held, whole = np.zeros((machine.num_nodes, 3)), np.zeros(3)
        items = np.array([problem.dtypes[matrix].itemsize for matrix in MATRICES], np.float64)
        for matrix in MATRICES:
            parts = placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix))
            there = {(part.rows, part.cols, _node_of(part.location, machine)): part.elements for part in parts}
            for (_, _, node), elements in there.items():
                held[node, matrix] += elements * items[matrix]
            whole[matrix] = max(problem.bytes_of(matrix), held[:, matrix].max())
        per_byte = np.array([problem.n, problem.m, problem.k]) / items
        return cls(held, whole, per_byte, float(items.prod()), problem.flops / 2)

    def most(self, taken: np.ndarray | float, given: np.ndarray | float, *, joint: bool = False) -> np.ndarray:
        """
        Return the operations that each node can have done at most, shape (num_nodes,).

        Parameters
        ----------
        taken, given : ndarray or float
            Bytes of A and B that it has got, and of C that it has given.
        joint : bool
            Whether these are the same bytes: of all three together.
        """
        alone = np.minimum(self.held + np.stack(np.broadcast_arrays(taken, taken, given), axis=-1), self.whole)
        if joint:
            bytes_of_all = _filled(self.held, self.whole, taken).prod(axis=1)
        else:
            bytes_of_all = _filled(self.held[:, :2], self.whole[:2], taken).prod(axis=1) * alone[:, 2]
        found: np.ndarray = np.minimum(np.sqrt(bytes_of_all / self.items), (alone * self.per_byte).min(axis=1))
        return found


def _filled(held: np.ndarray, whole: np.ndarray, more: np.ndarray | float) -> np.ndarray:
    """Return bytes of each matrix, `more` beside those held, whose product is largest: levels alike, as of water."""
    total = held.sum(axis=1) + more
    low, high = np.zeros(len(held)), np.full(len(held), whole.max())
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        fits = np.clip(middle[:, None], held, whole).sum(axis=1) <= total
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    filled: np.ndarray = np.clip(high[:, None], held, whole)
    return filled


def _whole_of(uses: list[_Use]) -> float:
    """Return the bytes of the matrices that have these parts, each once."""
    return float(sum({use.name: use.whole for use in uses}.values()))


def _size_of(uses: list[_Use]) -> float:
    return float(sum(use.size for use in uses))


def _bytes_of(uses: list[_Use]) -> str:
    sizes: dict[str, int] = {}
    for use in uses:
        sizes[use.name] = sizes.get(use.name, 0) + use.size
    return "(" + " + ".join(f"{name} {bytes_text(size)}" for name, size in sizes.items()) + ")"
