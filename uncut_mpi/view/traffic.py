"""What a schedule moves, against the least that its products' places ask for."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from uncut_mpi.model.locations import Location, between_nodes, in_host
from uncut_mpi.model.parts import Extent
from uncut_mpi.model.placement import MATRICES
from uncut_mpi.planning.schedule import Kind, Matrix, Role, Schedule
from uncut_mpi.planning.verify import held_by_operands


@dataclasses.dataclass(frozen=True, slots=True)
class Traffic:
    """
    Bytes over one kind of link.

    Attributes
    ----------
    link : str
        As of `Schedule.bytes_by_link`.
    nbytes : int
        What the schedule copies.
    least_bytes : int
        What any schedule copies that computes each product where this one does. What lies in host memory enters the
        devices once and C leaves them once. What a rank multiplies and does not have comes once, and to each node once.
        A schedule that takes bytes from the host or from another node several times has less to move between devices.
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
        What any schedule copies that computes each product where this one does. Of A and B it is what the rank
        multiplies and does not have. Of C, where it lives here, it is what others compute, and where it lives in host
        memory, what this schedule adds to here.
    least_out_of_bytes : int
        Likewise: of A and B, what lives here alone and others multiply; of C, where it lives elsewhere too, what
        the rank computes or, without a product, scales.
    """

    rank: int
    into_bytes: int
    least_into_bytes: int
    out_of_bytes: int
    least_out_of_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class NodeTraffic:
    """
    Bytes into and out of one node.

    Attributes
    ----------
    node : int
        The node.
    into_bytes, out_of_bytes : int
        What the schedule copies.
    least_into_bytes : int
        What any schedule copies that computes each product where this one does, each byte once. Of A and B it is what
        the node multiplies and does not have; of C, where it lives here, what other nodes compute.
    """

    node: int
    into_bytes: int
    least_into_bytes: int
    out_of_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Movement:
    """
    What a schedule moves, against the least.

    Attributes
    ----------
    links : tuple of Traffic
        From host to devices, from devices to host, between devices; of several nodes between them too.
    ports : tuple of PortTraffic
        One per rank.
    nodes : tuple of NodeTraffic
        One per node.
    """

    links: tuple[Traffic, ...]
    ports: tuple[PortTraffic, ...]
    nodes: tuple[NodeTraffic, ...]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """
    A rectangle of a matrix, and who has it.

    Attributes
    ----------
    devices : set of int
        Ranks that have it on their device.
    hosts : list of int
        Nodes of the host memories that have it.
    used : ndarray of int64, shape (number, 5)
        What products work on of it: rank, row, col, rows, cols.
    touched : ndarray of int64, shape (num_ranks,)
        Bytes of the different elements that those of each rank work on.
    item : int
        Bytes of an element.
    """

    rows: Extent
    cols: Extent
    devices: set[int]
    hosts: list[int]
    used: np.ndarray
    touched: np.ndarray
    item: int

    @property
    def size(self) -> int:
        """Bytes in all."""
        return (self.rows[1] - self.rows[0]) * (self.cols[1] - self.cols[0]) * self.item

    def worked_on(self, by: np.ndarray) -> int:
        """Return the bytes of the different elements that products of some ranks (bools) work on."""
        return _covered(self.used[by[self.used[:, 0]], 1:]) * self.item

    def elsewhere(self, device: int) -> int:
        """Return the bytes of the different elements that the products of other ranks than one work on."""
        return self.worked_on(np.arange(len(self.touched)) != device)

    def devices_on(self, here: np.ndarray) -> list[int]:
        """Return which of some ranks (bools) have it on their device."""
        return [one for one in self.devices if here[one]]


def traffic(schedule: Schedule, held: np.ndarray | None = None) -> Movement:
    """
    Return what a schedule moves over each kind of link and each rank's ports, and the least there is to move.

    Parameters
    ----------
    schedule : Schedule
        What is looked at.
    held : ndarray of HELD_DTYPE, optional
        As of `held_by_operands`, which takes a while.
    """
    held = held_by_operands(schedule) if held is None else held
    used = _used_rectangles(schedule, held) if schedule.problem.has_product else np.zeros((0, 6), np.int64)
    blocks = {matrix: _blocks(schedule, matrix, used[used[:, 1] == matrix]) for matrix in MATRICES}
    nodes = _nodes(schedule, blocks)
    return Movement(_links(schedule, blocks, nodes), _ports(schedule, blocks), nodes)


def _links(schedule: Schedule, blocks: dict[Matrix, list[_Block]], nodes: Sequence[NodeTraffic]) -> tuple[Traffic, ...]:
    problem, node_of = schedule.problem, schedule.locations["node"][: schedule.num_ranks]
    moved = schedule.bytes_by_link()
    least = dict.fromkeys((link for link in moved if link != "local"), 0)
    for node in range(len(nodes)):
        here = node_of == node
        for block in blocks[Matrix.C]:
            own, others = block.devices_on(here), block.touched[here & _others(block, schedule.num_ranks)].sum()
            # What the node's products work on; on one node all of the block, which may only be scaled.
            size = block.worked_on(here) if len(nodes) > 1 and problem.has_product else block.size
            if node in block.hosts:
                least["device_to_host"] += size
                least["host_to_device"] += size if problem.reads_c and not own else 0
            elif len(own) == 1:  # which every part of a sum comes to
                least["device_to_device"] += int(others)
            elif not own:  # parts of a sum come together before they leave
                least["device_to_device"] += int(others) - size if problem.has_product else 0
            elif problem.has_product:  # or the sum, from another one
                least["device_to_device"] += sum(block.worked_on(here & (np.arange(len(here)) != one)) for one in own)
            else:
                least["device_to_device"] += block.size * (len(own) - 1)
        for block in (*blocks[Matrix.A], *blocks[Matrix.B]) if problem.has_product else ():
            foreign = int(block.touched[here & _others(block, schedule.num_ranks)].sum())
            if not block.devices_on(here):
                once = block.worked_on(here)  # comes once, from the node's host or from another node
                foreign -= once
                least["host_to_device"] += once if node in block.hosts else 0
            least["device_to_device"] += foreign
    if len(nodes) > 1:
        least["node_to_node"] = sum(one.least_into_bytes for one in nodes)
    return tuple(Traffic(link, moved[link], least[link]) for link in least)


def _nodes(schedule: Schedule, blocks: dict[Matrix, list[_Block]]) -> tuple[NodeTraffic, ...]:
    node_of, (_, source, destination, size) = schedule.locations["node"], schedule.copies().T
    crossing, num_nodes = between_nodes(schedule.locations, source, destination), int(node_of.max()) + 1
    into, out_of = (
        np.bincount(node_of[end[crossing]], size[crossing], num_nodes).astype(np.int64) for end in (destination, source)
    )
    least = np.zeros(num_nodes, np.int64)
    for node in range(num_nodes if schedule.problem.has_product else 0):
        here = node_of[: schedule.num_ranks] == node
        for matrix, of in blocks.items():
            for block in of:
                if (node in block.hosts or bool(block.devices_on(here))) == (matrix is Matrix.C):
                    least[node] += block.worked_on(~here if matrix is Matrix.C else here)
    return tuple(NodeTraffic(node, *map(int, row)) for node, row in enumerate(zip(into, least, out_of, strict=True)))


def _ports(schedule: Schedule, blocks: dict[Matrix, list[_Block]]) -> tuple[PortTraffic, ...]:
    num_ranks = schedule.num_ranks
    copies = schedule.copies()
    source, destination, size = copies[:, 1], copies[:, 2], copies[:, 3]
    crossing = source != destination
    into, out_of = (
        np.bincount(end[kept], size[kept], num_ranks).astype(np.int64)
        for end, kept in ((end, crossing & ~in_host(schedule.locations, end)) for end in (destination, source))
    )
    least_into, least_out_of = _host_c_bytes(schedule, source=True), np.zeros(num_ranks, np.int64)
    if not schedule.problem.has_product:
        least_out_of = _host_c_bytes(schedule, source=False)
    for block in (*blocks[Matrix.A], *blocks[Matrix.B]):
        others = _others(block, num_ranks)
        least_into[others] += block.touched[others]
        if len(block.devices) + len(block.hosts) == 1:
            for owner in block.devices:
                least_out_of[owner] += block.elsewhere(owner)
    for block in blocks[Matrix.C]:
        for rank in range(num_ranks):
            least_out_of[rank] += block.touched[rank] if block.hosts or block.devices - {rank} else 0
        for owner in block.devices:
            least_into[owner] += block.elsewhere(owner)
    columns = (into, least_into, out_of, least_out_of)
    return tuple(PortTraffic(rank, *map(int, row)) for rank, row in enumerate(zip(*columns, strict=True)))


def _host_c_bytes(schedule: Schedule, *, source: bool) -> np.ndarray:
    """Return the bytes of the different elements of a C in host memory that every device gets, or gives."""
    task, first, last, _ = schedule.copies().T
    device = last if source else first
    operand = schedule.operands_of_copies(task)[0 if source else 1]
    there = schedule.regions[schedule.operands["region"][operand]]
    of = schedule.buffers[there["buffer"]]
    is_c = (of["role"] == Role.USER) & (of["matrix"] == Matrix.C) & in_host(schedule.locations, of["location"])
    is_c &= ~in_host(schedule.locations, device)
    columns = [device, *(there[name] for name in ("buffer", "row", "col", "rows", "cols"))]
    rectangles = np.stack([column.astype(np.int64) for column in columns], axis=1)[is_c]
    found = np.zeros(schedule.num_ranks, np.int64)
    for rank, buffer in np.unique(rectangles[:, :2], axis=0).tolist():
        found[rank] += _covered(rectangles[(rectangles[:, :2] == (rank, buffer)).all(axis=1), 2:])
    return found * schedule.problem.dtypes[Matrix.C].itemsize


def _blocks(schedule: Schedule, matrix: Matrix, used: np.ndarray) -> list[_Block]:
    """Return the blocks of a matrix that are held together; `used` as of `_used_rectangles`."""
    problem, num_ranks, node_of = schedule.problem, schedule.num_ranks, schedule.locations["node"].tolist()
    held: dict[tuple[Extent, Extent], list[Location]] = {}
    for part in schedule.placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix)):
        held.setdefault((part.rows, part.cols), []).append(part.location)
    found, item = [], problem.dtypes[matrix].itemsize
    for (rows, cols), locations in held.items():
        top, left = np.maximum(used[:, 2], rows[0]), np.maximum(used[:, 3], cols[0])
        height = np.minimum(used[:, 2] + used[:, 4], rows[1]) - top
        width = np.minimum(used[:, 3] + used[:, 5], cols[1]) - left
        inside = np.stack([used[:, 0], top, left, height, width], axis=1)[(height > 0) & (width > 0)]
        touched = np.zeros(num_ranks, np.int64)
        for rank in np.unique(inside[:, 0]).tolist():
            touched[rank] = item * _covered(inside[inside[:, 0] == rank, 1:])
        devices = {one.rank for one in locations if one.space == "device" and one.rank is not None}
        hosts = [node_of[one.rank or 0] for one in locations if one.space == "host"]
        found.append(_Block(rows, cols, devices, hosts, inside, touched, item))
    return found


def _others(block: _Block, num_ranks: int) -> np.ndarray:
    """Return which ranks do not have a block in their device."""
    return ~np.isin(np.arange(num_ranks), [*block.devices])


def _used_rectangles(schedule: Schedule, held: np.ndarray) -> np.ndarray:
    """Return the parts that products work on as rows of rank, matrix, row, col, rows, cols; none twice."""
    # C, A and B; the fourth operand, where there is one, is the first again.
    held = held[(schedule.tasks["kind"][held["task"]] == Kind.GEMM) & (held["operand"] < 3)]
    columns = (schedule.tasks["rank"][held["task"]], *(held[name] for name in ("matrix", "row", "col", "rows", "cols")))
    different: np.ndarray = np.unique(np.stack([column.astype(np.int64) for column in columns], axis=1), axis=0)
    return different


def _covered(rectangles: np.ndarray) -> int:
    """Return how many elements some rectangles (row, col, rows, cols) cover together; they may overlap."""
    if not len(rectangles):
        return 0
    row, col, rows, cols = rectangles.T
    row_edges, col_edges = np.unique([row, row + rows]), np.unique([col, col + cols])
    covered = cells_over(rectangles, row_edges, col_edges) > 0
    return int(np.diff(row_edges) @ covered @ np.diff(col_edges))


def cells_over(rectangles: np.ndarray, row_edges: np.ndarray, col_edges: np.ndarray) -> np.ndarray:
    """Return how many rectangles (row, col, rows, cols) lie over each cell between some edges, theirs among them."""
    row, col, rows, cols = rectangles.T
    # A rectangle counts from where it begins on, and no more from where it ends.
    over = np.zeros((len(row_edges), len(col_edges)), np.int64)
    top, bottom = np.searchsorted(row_edges, row), np.searchsorted(row_edges, row + rows)
    left, right = np.searchsorted(col_edges, col), np.searchsorted(col_edges, col + cols)
    for at_row, at_col, sign in ((top, left, 1), (top, right, -1), (bottom, left, -1), (bottom, right, 1)):
        np.add.at(over, (at_row, at_col), sign)
    counts: np.ndarray = over.cumsum(axis=0).cumsum(axis=1)[:-1, :-1]
    return counts
