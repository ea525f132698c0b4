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
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from uncut_mpi.model.arguments import counted
from uncut_mpi.model.costs import Disk
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import ASSUMED, Machine
from uncut_mpi.model.placement import MATRICES, Matrix, Placement
from uncut_mpi.model.ports import Port, least_time
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.units import bytes_text

_BY_ASSUMED: Final = "by assumed rates"


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
        lies in the private host memory of one rank passes that rank's link alone.

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


def _host_terms(reads: list[_Use], writes: list[_Use], machine: Machine) -> list[_Term]:
    host, of_ranks = machine.host, list(enumerate(machine.host_of.tolist()))
    inward, outward = [(own, rank) for rank, own in of_ranks], of_ranks
    ways = (
        ("host to devices", _on_host(reads), inward, [(host, rank) for rank, _ in of_ranks]),
        ("devices to host", _on_host(writes), outward, [(rank, host) for rank, _ in of_ranks]),
    )
    terms, demands = [], []
    for name, uses, own_links, of_shared in ways:
        if not uses:
            continue
        links = list(dict.fromkeys((*own_links, *of_shared)))
        terms.append(_transfer_term(name, uses, links, machine))
        demands.append((links, _size_of(uses)))
        for rank in sorted({use.location.rank for use in uses if use.location.rank is not None}):
            private = [use for use in uses if use.location.rank == rank]
            terms.append(_transfer_term(f"{name}, rank {rank}", private, [own_links[rank]], machine))
            demands.append(([own_links[rank]], _size_of(private)))
    if all(uses for _, uses, *_ in ways) and any(_joins_ways(port, host) for port in machine.ports):
        terms.append(
            _Term(
                "host both ways",
                least_time(demands, machine.bandwidth_gb_per_s, machine.ports),
                " and ".join(f"{_bytes_of(uses)} {name}" for name, uses, *_ in ways)
                + " at once, over ports that both ways share",
            )
        )
    return terms


def _on_host(uses: list[_Use]) -> list[_Use]:
    return [use for use in uses if use.location.space == "host" and use.size]


def _joins_ways(port: Port, host: int) -> bool:
    return {source == host for source, destination in port.links if host in (source, destination)} == {True, False}


def _transfer_term(name: str, uses: list[_Use], links: list[tuple[int, int]], machine: Machine) -> _Term:
    total = _size_of(uses)
    seconds = least_time([(links, total)], machine.bandwidth_gb_per_s, machine.ports)
    return _Term(name, seconds, f"{_bytes_of(uses)} / {total / seconds / 1e9:.4g} GB/s {name}")


def _owner_terms(problem: GemmProblem, reads: list[_Use], writes: list[_Use], machine: Machine) -> Iterator[_Term]:
    rates = machine.gemm_rate(problem.arithmetic)
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
            transfer_s = least_time([(links, size)], machine.bandwidth_gb_per_s, machine.ports)
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
