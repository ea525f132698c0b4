"""What a schedule moves, against the least that its products' places ask for."""

from __future__ import annotations

import dataclasses

import numpy as np

from uncut_mpi.model.locations import Location, in_host
from uncut_mpi.model.placement import MATRICES
from uncut_mpi.planning.schedule import Kind, Matrix, Role, Schedule, expand_ranges
from uncut_mpi.view.parts import find_parts


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """
    Bytes over one kind of link.

    Attributes
    ----------
    link : str
        ``host_to_device``, ``device_to_host`` or ``device_to_device``.
    nbytes : int
        What the schedule copies.
    least_bytes : int
        What any schedule copies that computes each product where this one does: what lies in host memory enters
        the devices once and C leaves them once; what a rank multiplies and does not have comes once. A schedule that
        reads the host's bytes several times has less to move between devices.
    """

    link: str
    nbytes: int
    least_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class PortTraffic:
    """
    Bytes into and out of one rank's device, over all of its links, the host's included.

    Attributes
    ----------
    rank : int
        The rank.
    into_bytes, out_of_bytes : int
        What the schedule copies.
    least_into_bytes : int
        What any schedule copies that computes each product where this one does: of A and B what the rank multiplies
        and does not have; of C, where it lives here, what others compute, and where it lives in host memory, what this
        schedule adds to here.
    least_out_of_bytes : int
        Likewise: of A and B, where they live here, what others multiply; of C, where it lives elsewhere, what the
        rank computes or, without a product, scales.
    """

    rank: int
    into_bytes: int
    least_into_bytes: int
    out_of_bytes: int
    least_out_of_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Movement:
    """
    What a schedule moves, against the least.

    Attributes
    ----------
    links : tuple of Traffic
        From host to devices, from devices to host, between devices.
    ports : tuple of PortTraffic
        One per rank.
    """

    links: tuple[Traffic, ...]
    ports: tuple[PortTraffic, ...]


def traffic(schedule: Schedule) -> Movement:
    """Return what a schedule moves over each kind of link and each rank's ports, and the least there is to move."""
    problem = schedule.problem
    used = _used_rectangles(schedule) if problem.has_product else np.zeros((0, 6), np.int64)
    elements = _elements(used, schedule.num_ranks)
    return Movement(_links(schedule, elements), _ports(schedule, used, elements))


def _links(schedule: Schedule, elements: dict[Matrix, np.ndarray]) -> tuple[Traffic, ...]:
    problem, (at_a, at_b, at_c) = schedule.problem, schedule.placement.whole()
    item = problem.dtype.itemsize
    c_bytes = problem.m * problem.n * item
    least = {"host_to_device": 0, "device_to_host": 0, "device_to_device": 0}
    if problem.reads_c and at_c.space == "host":
        least["host_to_device"] += c_bytes
    if at_c.space == "host":
        least["device_to_host"] += c_bytes
    if problem.has_product:
        for matrix, place, size in (
            (Matrix.A, at_a, problem.m * problem.k),
            (Matrix.B, at_b, problem.k * problem.n),
        ):
            foreign = int(elements[matrix][_others(place, schedule.num_ranks)].sum())
            if place.space == "host":
                least["host_to_device"] += size * item
                foreign = max(0, foreign - size)
            least["device_to_device"] += foreign * item
        if at_c.space == "device":
            least["device_to_device"] += int(elements[Matrix.C][_others(at_c, schedule.num_ranks)].sum()) * item
    moved = schedule.bytes_by_link()
    return tuple(Traffic(link, moved[link], least[link]) for link in least)


def _ports(schedule: Schedule, used: np.ndarray, elements: dict[Matrix, np.ndarray]) -> tuple[PortTraffic, ...]:
    num_ranks = schedule.num_ranks
    copies = schedule.copies()
    source, destination, size = copies[:, 1], copies[:, 2], copies[:, 3]
    crossing = source != destination
    into, out_of = (
        np.bincount(end[kept], size[kept], num_ranks).astype(np.int64)
        for end, kept in ((end, crossing & ~in_host(schedule.locations, end)) for end in (destination, source))
    )
    least_into, least_out_of = _host_c_elements(schedule, source=True), np.zeros(num_ranks, np.int64)
    if not schedule.problem.has_product:
        least_out_of = _host_c_elements(schedule, source=False)
    for matrix, place in zip(MATRICES, schedule.placement.whole(), strict=True):
        others = _others(place, num_ranks)
        to_users, from_owner = (least_out_of, least_into) if matrix is Matrix.C else (least_into, least_out_of)
        to_users[others] += elements[matrix][others]
        if place.space == "device":
            elsewhere = used[(used[:, 1] == matrix) & (used[:, 0] != place.rank), 2:]
            from_owner[place.rank] += _covered(elsewhere)
    item = schedule.problem.dtype.itemsize
    columns = (into, least_into * item, out_of, least_out_of * item)
    return tuple(PortTraffic(rank, *map(int, row)) for rank, row in enumerate(zip(*columns, strict=True)))


def _host_c_elements(schedule: Schedule, *, source: bool) -> np.ndarray:
    """Return how many different elements of a C in host memory every rank gets from there, or gives to it."""
    copies = schedule.tasks[schedule.tasks["kind"] == Kind.COPY]
    # A copy's operands are its destination and its source.
    there = schedule.regions[schedule.operands["region"][copies["first_operand"] + int(source)]]
    of = schedule.buffers[there["buffer"]]
    is_c = (of["role"] == Role.USER) & (of["matrix"] == Matrix.C) & in_host(schedule.locations, of["location"])
    columns = [there[name].astype(np.int64) for name in ("row", "col", "rows", "cols")]
    rectangles = np.stack([copies["rank"].astype(np.int64), *columns], axis=1)[is_c]
    found = np.zeros(schedule.num_ranks, np.int64)
    for rank in np.unique(rectangles[:, 0]):
        found[rank] = _covered(rectangles[rectangles[:, 0] == rank, 1:])
    return found


def _others(place: Location, num_ranks: int) -> np.ndarray:
    """Return which ranks do not have a matrix in their device."""
    ranks = np.arange(num_ranks)
    others: np.ndarray = ranks != place.rank if place.space == "device" else ranks >= 0
    return others


def _used_rectangles(schedule: Schedule) -> np.ndarray:
    """Return the parts that products work on as rows of rank, matrix, row, col, rows, cols; none twice."""
    parts = find_parts(schedule)
    tasks = schedule.tasks
    products = tasks[tasks["kind"] == Kind.GEMM]
    # C, A and B; the fourth operand, where there is one, is the first again.
    operand = expand_ranges(products["first_operand"], np.full(len(products), 3))
    rank = np.repeat(products["rank"], 3)
    region = schedule.regions[schedule.operands["region"][operand]]
    columns = (rank, parts.matrix[operand], parts.row[operand], parts.col[operand], region["rows"], region["cols"])
    different: np.ndarray = np.unique(np.stack([column.astype(np.int64) for column in columns], axis=1), axis=0)
    return different


def _elements(rectangles: np.ndarray, num_ranks: int) -> dict[Matrix, np.ndarray]:
    """Return how many different elements of each matrix the products of every rank work on."""
    used = {matrix: np.zeros(num_ranks, np.int64) for matrix in Matrix}
    for matrix, elements in used.items():
        of = rectangles[rectangles[:, 1] == matrix]
        for of_rank in np.unique(of[:, 0]):
            elements[of_rank] = _covered(of[of[:, 0] == of_rank, 2:])
    return used


def _covered(rectangles: np.ndarray) -> int:
    """Return how many elements some rectangles (row, col, rows, cols) cover together; they may overlap."""
    if not len(rectangles):
        return 0
    row, col, rows, cols = rectangles.T
    row_edges, col_edges = np.unique([row, row + rows]), np.unique([col, col + cols])
    # How many rectangles lie over each cell of the grid of all edges, from their corners.
    over = np.zeros((len(row_edges), len(col_edges)), np.int64)
    top, bottom = np.searchsorted(row_edges, row), np.searchsorted(row_edges, row + rows)
    left, right = np.searchsorted(col_edges, col), np.searchsorted(col_edges, col + cols)
    for at_row, at_col, sign in ((top, left, 1), (top, right, -1), (bottom, left, -1), (bottom, right, 1)):
        np.add.at(over, (at_row, at_col), sign)
    covered = over.cumsum(axis=0).cumsum(axis=1) > 0
    return int(np.diff(row_edges) @ covered[:-1, :-1] @ np.diff(col_edges))
