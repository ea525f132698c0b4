"""What a person asks of a plan: what stays, what moves, over how many ranks k is reduced, and what limits the time."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import numpy as np

from uncut_mpi.model.locations import end_name
from uncut_mpi.planning.schedule import Kind, LaneKind, Matrix, Schedule, rows_by_rank
from uncut_mpi.planning.simulate import Simulation, union_seconds
from uncut_mpi.planning.verify import held_by_operands
from uncut_mpi.units import bytes_text
from uncut_mpi.view.parts import letters_of
from uncut_mpi.view.traffic import cells_over

_LIMITING: Final = 0.7
"""What shall be busy for this part of the time limits it; where nothing is, the order of the work does."""

_LINKS: Final = {
    "host_to_device": "from the host",
    "device_to_host": "to the host",
    "device_to_device": "between devices",
    "node_to_node": "between nodes",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Explanation:
    """
    What a schedule does and what its simulation shows.

    Attributes
    ----------
    moved : mapping of str to mapping of str to int
        Of each matrix that takes part, as the caller calls it, the bytes over each kind of link. Empty if it stays.
    reduced_over : int
        How many ranks at most make products that are added to one element of C.
    busiest : str
        Which devices, link or port are busy longest in the simulation.
    busy_share : float
        For which part of its time.
    seconds : float
        The time that was simulated.
    """

    moved: Mapping[str, Mapping[str, int]]
    reduced_over: int
    busiest: str
    busy_share: float
    seconds: float

    @property
    def lines(self) -> tuple[str, ...]:
        """What moves, and what limits the time, in a line each."""
        if self.seconds <= 0:
            return ()
        busy = f"{self.busy_share:.0%}".replace("%", " %")
        if self.busy_share >= _LIMITING:
            limit = f"limited by {self.busiest}, expected to be busy for {busy} of the time"
        else:
            limit = (
                f"limited by the order of the work: nothing is expected to be busy longer than {self.busiest}, "
                f"for {busy} of the time"
            )
        return self._movement(), limit

    def _movement(self) -> str:
        stay = [name for name, of in self.moved.items() if not of]
        parts = [f"{listed(stay)} {'stay' if len(stay) > 1 else 'stays'} in place"] if stay else []
        for name, of in self.moved.items():
            if of:
                parts.append(f"{name} moves " + " and ".join(f"{bytes_text(of[link])} {_LINKS[link]}" for link in of))
        if self.reduced_over:
            split = f"reduced over {self.reduced_over} ranks" if self.reduced_over > 1 else "not split"
            parts.append(f"k is {split}")
        return "; ".join(parts)


def explain(simulation: Simulation, held: np.ndarray | None = None) -> Explanation:
    """
    Return what the schedule of a simulation does, from its proof, and what limits it, from the simulation.

    Parameters
    ----------
    simulation : Simulation
        The run.
    held : ndarray of HELD_DTYPE, optional
        As of `held_by_operands`, which takes a while.
    """
    schedule = simulation.schedule
    held = held_by_operands(schedule) if held is None else held
    matrix_of = np.full(len(schedule.tasks), Matrix.C)  # zeros, which have no place, are sums
    received = schedule.tasks["kind"][held["task"]] == Kind.RECV  # what the SEND before it carries
    read = (held["operand"] == 1) | received
    matrix_of[held["task"][read] - received[read]] = held["matrix"][read]
    copies = schedule.copies()
    busiest, share = max(_busy(simulation), key=lambda one: one[1], default=("", 0.0))
    letters = letters_of(schedule)
    moved = {
        letters[matrix]: _moved(schedule, copies[matrix_of[copies[:, 0]] == matrix]) for matrix in _taking(schedule)
    }
    return Explanation(
        moved={name: moved[name] for name in sorted(moved)},
        reduced_over=_reduced_over(schedule, held),
        busiest=busiest,
        busy_share=share,
        seconds=simulation.seconds,
    )


def _taking(schedule: Schedule) -> list[Matrix]:
    """Return the matrices that take part."""
    problem = schedule.problem
    return [Matrix.A] * (problem.has_product or problem.copies) + [Matrix.B] * problem.has_product + [Matrix.C]


def listed(names: Sequence[str]) -> str:
    """Return names as ``A``, ``A and C`` or ``A, B and C``."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _moved(schedule: Schedule, copies: np.ndarray) -> dict[str, int]:
    """Return the bytes of some copies between memories by kind of link."""
    return {link: size for link, size in schedule.bytes_by_link(copies).items() if size and link in _LINKS}


def _reduced_over(schedule: Schedule, held: np.ndarray) -> int:
    of = held[(schedule.tasks["kind"][held["task"]] == Kind.GEMM) & (held["operand"] == 0)]
    if not len(of):
        return 0
    row, col, rows, cols = (of[name] for name in ("row", "col", "rows", "cols"))
    edges = np.unique([row, row + rows]), np.unique([col, col + cols])
    rectangles = np.stack([row, col, rows, cols], axis=1)
    ranks = rows_by_rank(schedule.tasks["rank"][of["task"]], schedule.num_ranks)
    return int(np.sum([cells_over(rectangles[own], *edges) > 0 for own in ranks], axis=0).max())


def _busy(simulation: Simulation) -> Iterator[tuple[str, float]]:
    """Yield devices, ports, links, the disk and workers of the host with the part of the time that each is busy."""
    machine, seconds = simulation.machine, simulation.seconds
    if seconds <= 0:
        return
    computing = 1.0 - simulation.idle_share
    busy = computing[computing > 0]
    device = int(np.argmax(computing))
    if len(busy):
        yield "computing" if busy.min() > 0.9 * busy.max() else f"computing on device {device}", float(busy.max())
    moved = simulation.transferred_bytes() * 1e-9
    for port in machine.ports:
        weighted = sum(weight * moved[link] for link, weight in zip(port.links, port.weights, strict=True))
        yield f"port {port.name}", float(weighted / port.expected_gb_per_s / seconds)
    locations = simulation.schedule.locations
    for source, destination in np.argwhere(moved > 0).tolist():
        if source != destination:
            takes = moved[source, destination] / max(machine.bandwidth_gb_per_s[source, destination], 1e-6)
            ends = (end_name(locations, end) for end in (source, destination))
            yield "link {}->{}".format(*ends), float(takes / seconds)
    yield from ((what, takes / seconds) for what, takes in _by_host(simulation))


def _by_host(simulation: Simulation) -> Iterator[tuple[str, float]]:
    """Yield what each way of the disk takes, for which ranks take turns, and each rank's copies within host memory."""
    schedule = simulation.schedule
    tasks, start, end = schedule.tasks, simulation.start_s, simulation.end_s
    copies = np.flatnonzero((schedule.lanes["kind"][tasks["lane"]] == LaneKind.HOST) & (tasks["kind"] == Kind.COPY))
    operands = tasks["first_operand"][copies]
    written, read = (
        schedule.buffers["medium"][schedule.regions["buffer"][schedule.operands["region"][operands + at]]] != 0
        for at in (0, 1)
    )
    for what, which in (("reading files", read), ("writing files", written)):
        if which.any():
            yield what, union_seconds(start[copies[which]], end[copies[which]])
    within = copies[~(read | written)]
    for rank in np.unique(tasks["rank"][within]).tolist():
        own = within[tasks["rank"][within] == rank]
        yield f"copies within host memory by rank {rank}", union_seconds(start[own], end[own])
