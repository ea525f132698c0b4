"""
The memories of a job, numbered: every device by its rank, then one host per node, then each rank's private host memory.

Buffers of a schedule and ends of its lanes are such numbers. A device's number is its rank. What any other memory is
stands in the table alone, so that no other module knows how many hosts there are, nor the core.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import re
from typing import Final, Literal, TypeAlias, cast, get_args

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import count, shown, there_are, value_of_callers

ANY_DEVICE: Final = -3
"""Destination of a lane that carries a rank's copies to all other devices."""

NOBODY: Final = -1
"""Rank of a memory that belongs to a node."""

Ranks: TypeAlias = int | tuple[int, ...]
"""How many ranks a job has, all on one node; or of each the node that it is on, from 0 without gaps."""

Memory: TypeAlias = Literal["device", "host", "shared"]
"""Device memory, host memory of one rank, or host memory that all ranks of the node read and write."""


class Space(enum.IntEnum):
    """Kind of memory a buffer lies in."""

    DEVICE = 0
    HOST = 1


@value_of_callers
@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Location:
    """
    A memory that can hold a matrix.

    Attributes
    ----------
    space : str
        ``"device"`` or ``"host"``.
    rank : int or None
        The rank that owns the memory. None only with ``"host"``: host memory that every rank of
        the node can read. A host location with a rank is private to that rank, and only that
        rank's link to its device reaches it.
    """

    space: str
    rank: int | None

    def __post_init__(self) -> None:
        space = self.space
        if not isinstance(space, str) or space not in ("device", "host"):
            raise ParamError(f"space = {shown(space)} of a location: use 'device' or 'host'")
        object.__setattr__(self, "space", str.__str__(space))
        if self.rank is not None or space == "device":
            object.__setattr__(self, "rank", count("rank", self.rank))

    @classmethod
    def device(cls, rank: int) -> Location:
        """Return the device memory of `rank`."""
        return cls("device", rank)

    @classmethod
    def host(cls, rank: int | None = None) -> Location:
        """Return the host memory that all ranks read, or the private one of `rank`."""
        return cls("host", rank)

    @classmethod
    def parse(cls, text: str) -> Location:
        """
        Parse ``h`` (shared host), ``3`` (device of rank 3) or ``h3`` (private host memory of rank 3).

        Raises
        ------
        ParamError
            If the text is none of these.
        """
        # Python reads no number of some thousand digits.
        match = re.fullmatch(r"(h?)(\d{0,18})", text.strip()) if isinstance(text, str) else None
        if match is None or not match.group(0):
            raise ParamError(
                f"placement {shown(text)} is not a location: write h for host memory, a rank number for its device, "
                "or both, as h2, for host memory of that rank alone"
            )
        host, rank = match.groups()
        return cls("host" if host else "device", int(rank) if rank else None)

    def __str__(self) -> str:
        if self.space == "host":
            return "h" if self.rank is None else f"h{self.rank}"
        return str(self.rank)


_HOST: Final = Location.host()


LOCATION_DTYPE: Final = np.dtype(
    [
        ("space", "<i4"),
        ("rank", "<i4"),  # whose memory; NOBODY for host memory that all ranks of the node read
        ("node", "<i4"),
    ]
)


ENDED_DTYPE: Final = np.dtype([*LOCATION_DTYPE.descr, ("end", "<i4")])


def nodes_of(ranks: Ranks) -> tuple[int, ...]:
    """Return the node of each rank."""
    return (0,) * ranks if isinstance(ranks, int) else ranks


@functools.lru_cache(maxsize=64)
def location_table(ranks: Ranks) -> np.ndarray:
    """Return the memories of a job as records of LOCATION_DTYPE, read-only."""
    table = np.array(_memories(ranks), LOCATION_DTYPE)
    table.flags.writeable = False
    return table


def _memories(ranks: Ranks) -> list[tuple[int, int, int]]:
    nodes = nodes_of(ranks)
    devices, private = ([(space, *one) for one in enumerate(nodes)] for space in (Space.DEVICE, Space.HOST))
    return [*devices, *((Space.HOST, NOBODY, node) for node in range(max(nodes) + 1)), *private]


def location_index(location: Location, ranks: Ranks) -> int:
    """
    Return the number of a memory, as it stands in `location_table`; of host memory of all ranks that of node 0.

    Raises
    ------
    ParamError
        If its rank does not exist.
    """
    found = _numbers(ranks).get(location)
    if found is None:
        raise ParamError(f"there is no memory {location}: {there_are(len(nodes_of(ranks)), 'rank')}")
    return found


@functools.lru_cache(maxsize=64)
def _numbers(ranks: Ranks) -> dict[Location, int]:
    table = location_table(ranks)
    return {location_at(table, at): at for at in reversed(range(len(table)))}


def host_index(ranks: Ranks) -> int:
    """Return the number of node 0's host memory, which all its ranks read; lanes to private memory there end in it."""
    return _numbers(ranks)[_HOST]


def with_ends(locations: np.ndarray) -> np.ndarray:
    """
    Return the table as the core has it: with where links and lanes to each memory end.

    Of all host memory of a node that is what all its ranks read.
    """
    return _with_ends(locations.tobytes())


@functools.lru_cache(maxsize=64)
def _with_ends(table: bytes) -> np.ndarray:
    rows = np.frombuffer(table, LOCATION_DTYPE).tolist()
    hosts = {node: at for at, (space, rank, node) in enumerate(rows) if space == Space.HOST and rank == NOBODY}
    ended = [(*row, hosts[row[2]] if row[0] == Space.HOST else at) for at, row in enumerate(rows)]
    return np.array(ended, ENDED_DTYPE)


def num_ends(ranks: Ranks) -> int:
    """Return from how many memories links lead to as many: those numbered first."""
    return int(with_ends(location_table(ranks))["end"].max()) + 1


def in_host(locations: np.ndarray, at: np.ndarray | int) -> np.ndarray:
    """Return whether memories (numbers, of any shape) are host memory."""
    host: np.ndarray = locations["space"][at] == Space.HOST
    return host


def location_at(locations: np.ndarray, at: int) -> Location:
    """Return the memory of a number."""
    space, rank, _ = locations[at].tolist()
    return Location("host" if space == Space.HOST else "device", None if rank == NOBODY else rank)


def end_name(locations: np.ndarray, end: int) -> str:
    """
    Return an end of a copy lane in words: ``host``, ``devices``, or the rank of a device.

    Of several nodes the host has its node's number, as ``host.1``.
    """
    if end == ANY_DEVICE:
        return "devices"
    if locations["space"][end] == Space.DEVICE:
        return str(end)
    return f"host.{locations['node'][end]}" if locations["node"].any() else "host"


def between_nodes(locations: np.ndarray, source: np.ndarray, destination: np.ndarray) -> np.ndarray:
    """Return whether copies lead from node to node, of their ends (numbers of memories, of one shape)."""
    crossing: np.ndarray = locations["node"][source] != locations["node"][destination]
    return crossing


def memory_of(memory: object) -> Memory:
    """Return a caller's kind of memory, or raise ParamError for what is none."""
    if isinstance(memory, str) and memory in get_args(Memory):
        return cast(Memory, str.__str__(memory))
    raise ParamError(f"memory = {shown(memory)}: use 'device', 'host' (each rank's own) or 'shared' (the node's)")
