"""
The schedule: fixed-size task records in one global order, and the tables they point into.

A schedule is the one contract between the packages. Schedulers emit it, `verify` proves it, `lower` turns it into each
rank's operation list, executors run that.

Every awaited task stands earlier in the global order, and each rank issues its tasks in that order. With the premises
P1 to P5 of ``docs/architecture.md`` no executor can then deadlock. `Kind` says what each task does. `Schedule.check`
checks the rules, and `verify` what they mean.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import struct
from typing import Any, Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi._native import Factor as Factor
from uncut_mpi._native import Kind as Kind
from uncut_mpi._native import LaneKind as LaneKind
from uncut_mpi._native import Op as Op
from uncut_mpi._native import Role as Role
from uncut_mpi.errors import ScheduleError, named
from uncut_mpi.model.alike import Alike
from uncut_mpi.model.dtypes import ITEMSIZES, DType
from uncut_mpi.model.epilogue import Epilogue
from uncut_mpi.model.form import PLAIN, Form
from uncut_mpi.model.locations import (
    LOCATION_DTYPE,
    NOBODY,
    Ranks,
    Space,
    between_nodes,
    in_host,
    location_table,
    with_ends,
)
from uncut_mpi.model.part_of_c import OTHER, PartOfC
from uncut_mpi.model.placement import Matrix as Matrix
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.model.remade import Remade

_CORE: Final = _native.contract()
"""Records and limits, which `csrc/records.hpp` declares and describes; so does it `Kind` and the other enumerations."""

NO_SOURCE: Final[int] = _CORE["limits"]["no_source"]
"""Source of a lane that leads from no memory to another."""

MAX_SUMMANDS: Final[int] = _CORE["limits"]["max_summands"]
"""Regions that one COMBINE reads at most."""

MAX_LANES: Final[int] = _CORE["limits"]["max_lanes"]
"""
Lanes of a rank that executors take; the width of its rows of progress words and of flags in host memory.

Schedules may have more, to be studied: one for 1,024 ranks may have a lane to each of them. Their lists are refused.
"""

TASK_DTYPE, OPERAND_DTYPE, REGION_DTYPE, BUFFER_DTYPE, LANE_DTYPE, PIECE_DTYPE = (
    np.dtype(_CORE["records"][name]) for name in ("tasks", "operands", "regions", "buffers", "lanes", "pieces")
)
TRIANGLES: Final = {name: Op[name.upper() or "N"] for name in OTHER}
"""What the written operand of a COMBINE says of which triangle of C is."""
EPILOGUES: Final = {"rows": Op.EPILOGUE_ROWS, "cols": Op.EPILOGUE_COLS}
"""What it says where C is written with an epilogue, by what the vectors are along."""
AWAIT_DTYPE: Final = np.dtype("<i4")

_TABLES: Final = (
    ("tasks", TASK_DTYPE),
    ("operands", OPERAND_DTYPE),
    ("regions", REGION_DTYPE),
    ("awaits", AWAIT_DTYPE),
    ("buffers", BUFFER_DTYPE),
    ("lanes", LANE_DTYPE),
    ("locations", LOCATION_DTYPE),
    ("pieces", PIECE_DTYPE),
)
_MAGIC: Final = b"UNCUTSCH"
FORMAT_VERSION: Final = 7
_HEADER: Final = struct.Struct(f"<8sIIQ{len(_TABLES)}Q")


def ending_of(problem: GemmProblem) -> Op:
    """Return what is said of C where it is written at last: that it is all of it, a triangle, or with an epilogue."""
    return TRIANGLES[problem.triangle] if problem.epilogue is None else EPILOGUES[problem.epilogue.along]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Schedule(Remade):
    """
    All tasks of a call in one global order.

    Attributes
    ----------
    num_ranks : int
        Ranks of the session.
    problem : GemmProblem
        What the schedule computes.
    placement : Placement
        Where the column-major problem's A, B and C live (after any exchange of A and B).
    scheduler : str
        Name of the scheduler that made it.
    grid : tuple of int
        Process grid (rows, cols) of the ranks that compute; of columns of ranks (most ranks in one, columns). Of the
        column-major problem; `callers_grid` has the caller's.
    splits : int
        Over how many such grids k is split.
    tile : int
        Tile edge in elements; 0 where the scheduler has none.
    tasks, operands, regions, awaits, buffers, lanes, locations, pieces : ndarray
        Tables of the dtypes in this module; read-only.
    """

    num_ranks: int
    problem: GemmProblem
    placement: Placement
    scheduler: str
    grid: tuple[int, int]
    splits: int
    tile: int
    tasks: np.ndarray
    operands: np.ndarray
    regions: np.ndarray
    awaits: np.ndarray
    buffers: np.ndarray
    lanes: np.ndarray
    locations: np.ndarray
    pieces: np.ndarray

    def __post_init__(self) -> None:
        for name, dtype in _TABLES:
            table = getattr(self, name)
            if table.dtype != dtype or table.ndim != 1:
                raise ScheduleError(f"table {name} has dtype {table.dtype}, expected {dtype}")
            table.flags.writeable = False

    @property
    def ranks(self) -> Ranks:
        """Their number, or of several nodes that of each: as tables of locations take it."""
        nodes = tuple(self.locations["node"][: self.num_ranks].tolist())
        return nodes if any(nodes) else self.num_ranks

    # -- parts of a task ---------------------------------------------------------------------

    def awaited(self, task: int) -> np.ndarray:
        """Return the indices of the tasks that task `task` awaits."""
        record = self.tasks[task]
        first = int(record["first_await"])
        return self.awaits[first : first + int(record["num_awaits"])]

    def operands_of(self, task: int) -> np.ndarray:
        """Return the operand records of task `task`, the written one first."""
        record = self.tasks[task]
        first = int(record["first_operand"])
        return self.operands[first : first + int(record["num_operands"])]

    # -- encoding ----------------------------------------------------------------------------

    def encode(self) -> bytes:
        """
        Return the schedule as bytes: a versioned header, a JSON description, the tables.

        Same schedule, same bytes.
        """
        about = json.dumps(
            {
                "num_ranks": self.num_ranks,
                "placement": self.placement.encoded(),
                "scheduler": self.scheduler,
                "grid": list(self.grid),
                "splits": self.splits,
                "tile": self.tile,
                **_described(self.problem),
            },
            sort_keys=True,
            separators=(",", ":"),
        ).encode()
        about += b" " * (-len(about) % 8)
        tables = [getattr(self, name) for name, _ in _TABLES]
        header = _HEADER.pack(_MAGIC, FORMAT_VERSION, len(_TABLES), len(about), *(len(table) for table in tables))
        parts = [header, about]
        for table in tables:
            raw = table.tobytes()
            parts += [raw, b"\0" * (-len(raw) % 8)]
        return b"".join(parts)

    @classmethod
    def decode(cls, data: bytes | memoryview, expected: tuple[GemmProblem, Placement] | None = None) -> Schedule:
        """
        Rebuild a schedule from `encode`'s bytes.

        Parameters
        ----------
        data : bytes
            A schedule.
        expected : (GemmProblem, Placement), optional
            What it is likely to be of: if it is, that is not made and checked again.

        Raises
        ------
        ScheduleError
            If the bytes are not a schedule of this format version, are cut short, or point outside
            their tables.
        """
        view = memoryview(data)
        if len(view) < _HEADER.size:
            raise ScheduleError(f"{len(view)} bytes are too few for a schedule header of {_HEADER.size}")
        magic, version, num_tables, about_bytes, *counts = _HEADER.unpack_from(view)
        if magic != _MAGIC or num_tables != len(_TABLES):
            raise ScheduleError("these bytes are not an uncut_mpi schedule")
        if version != FORMAT_VERSION:
            raise ScheduleError(f"schedule format {version} was found, this version reads {FORMAT_VERSION}")
        position = _HEADER.size
        need = (
            position
            + about_bytes
            + sum(-(-count * dtype.itemsize // 8) * 8 for count, (_, dtype) in zip(counts, _TABLES, strict=True))
        )
        if need != len(view):
            raise ScheduleError(f"the schedule says {need} bytes, {len(view)} were given")
        about_json = bytes(view[position : position + about_bytes])
        position += about_bytes
        tables: dict[str, np.ndarray] = {}
        for count, (name, dtype) in zip(counts, _TABLES, strict=True):
            tables[name] = np.frombuffer(view, dtype, count, position).copy()
            position += -(-count * dtype.itemsize // 8) * 8
        try:
            about = json.loads(about_json)
            problem, placement = expected or (None, None)
            if problem is None or not _is_described(problem, about):
                problem = _problem_of(about)
            if placement is None or placement.encoded() != about["placement"]:
                placement = Placement.decoded(about["placement"])
            schedule = cls(
                num_ranks=about["num_ranks"],
                problem=problem,
                placement=placement,
                scheduler=about["scheduler"],
                grid=(about["grid"][0], about["grid"][1]),
                splits=about["splits"],
                tile=about["tile"],
                **tables,
            )
        except (ValueError, LookupError, TypeError) as error:
            raise ScheduleError(f"the schedule's description cannot be read: {named(error)}") from None
        schedule.check()
        return schedule

    def digest(self) -> str:
        """Return 32 hexadecimal digits of BLAKE2b over `encode`'s bytes."""
        return digest_of_bytes(self.encode())

    # -- structure ---------------------------------------------------------------------------

    def check(self) -> None:
        """
        Check the structure: every index in range, every await earlier, lanes on their ranks.

        Raises
        ------
        ScheduleError
            Naming the first offender. Meaning is `verify`'s business.
        """
        tasks, operands, regions, buffers, lanes = self.tasks, self.operands, self.regions, self.buffers, self.lanes
        pieces = self.pieces

        def require(good: np.ndarray, what: str) -> None:
            if not good.all():
                raise ScheduleError(f"{what} (first at index {int(np.argmin(good))})")

        def require_inside(rectangles: np.ndarray, what: str) -> None:
            at = rectangles["buffer"]
            require((at >= 0) & (at < len(buffers)), f"a {what}'s buffer does not exist")
            for first, extent in (("row", "rows"), ("col", "cols")):
                start, length = rectangles[first], rectangles[extent]
                inside = (start >= 0) & (length >= 0) & (length <= buffers[extent][at] - start)
                require(inside, f"a {what} leaves its buffer")

        # Looked at before tables of so many ranks and nodes are made, which could be any number.
        counted = isinstance(self.num_ranks, int) and 0 < self.num_ranks <= len(self.locations)
        nodes = self.locations["node"][: self.num_ranks if counted else 0]
        counted = counted and bool(((nodes >= 0) & (nodes < self.num_ranks)).all())
        if not (counted and np.array_equal(self.locations, location_table(self.ranks))):
            raise ScheduleError(f"the table of locations is not that of {self.num_ranks} ranks on some nodes")
        first = tasks["first_await"].astype(np.int64)
        stop = first + tasks["num_awaits"]
        require((first >= 0) & (tasks["num_awaits"] >= 0) & (stop <= len(self.awaits)), "awaits outside their table")
        waiter = np.repeat(np.arange(len(tasks)), tasks["num_awaits"])
        awaited = self.awaits[expand_ranges(first, tasks["num_awaits"])]
        require((awaited >= 0) & (awaited < waiter), "a task awaits one that is not earlier in the global order")
        first = tasks["first_operand"].astype(np.int64)
        require((first >= 0) & (first + tasks["num_operands"] <= len(operands)), "operands outside their table")
        require((tasks["lane"] >= 0) & (tasks["lane"] < len(lanes)), "a task's lane does not exist")
        require(np.isin(tasks["kind"], list(Kind)), "a task's kind does not exist")
        sends, receives = (np.flatnonzero(tasks["kind"] == kind) for kind in (Kind.SEND, Kind.RECV))
        if not np.array_equal(sends + 1, receives):
            raise ScheduleError("the tasks SEND and RECV of a copy between nodes do not stand one behind the other")
        of_pair = awaited[np.isin(waiter, receives)], waiter[np.isin(waiter, receives)]
        require(np.isin(receives, of_pair[1][of_pair[0] + 1 == of_pair[1]]), "a RECV does not await its SEND")
        ends = lanes[["source", "destination"]]
        require(ends[tasks["lane"][sends]] == ends[tasks["lane"][receives]], "SEND and RECV have lanes of other ranks")
        for halves, end in ((sends, "source"), (receives, "destination")):
            require(lanes[end][tasks["lane"][halves]] == tasks["rank"][halves], f"a lane has another rank as {end}")
        require(
            (tasks["kind"] != Kind.COMBINE) | (tasks["num_operands"] <= 1 + MAX_SUMMANDS),
            f"a COMBINE reads more than {MAX_SUMMANDS} regions",
        )
        require(lanes["rank"][tasks["lane"]] == tasks["rank"], "a task's lane is on another rank")
        require((lanes["rank"] >= 0) & (lanes["rank"] < self.num_ranks), "a lane's rank does not exist")
        is_ending = np.zeros(len(operands), bool)
        for kind, endings in (
            (Kind.COMBINE, [*TRIANGLES.values(), *EPILOGUES.values()]),
            (Kind.GEMM, [*EPILOGUES.values()] if self.problem.fuses_epilogue else []),
        ):
            written = tasks[(tasks["kind"] == kind) & (tasks["num_operands"] > 0)]["first_operand"]
            is_ending[written] = np.isin(operands["op"][written], endings)
        require((operands["region"] >= 0) & (operands["region"] < len(regions)), "an operand's region does not exist")
        require(
            (operands["factor"] <= max(Factor))
            & ((operands["op"] <= (Op.C if self.problem.arithmetic.is_complex else Op.T)) | is_ending),
            "an operand's factor or op is unknown, or conjugates what is real",
        )
        require_inside(regions, "region")
        require(
            (buffers["dtype"] <= max(DType))
            & (buffers["role"] <= max(Role))
            & ((buffers["matrix"] <= Matrix.C) | (buffers["matrix"] == Matrix.NONE)),
            "a buffer's dtype, role or matrix is unknown",
        )
        require((buffers["rows"] >= 0) & (buffers["cols"] >= 0), "a buffer's extent is negative")
        require(
            (buffers["location"] >= 0) & (buffers["location"] < len(self.locations)),
            "a buffer's location does not exist",
        )
        require_inside(pieces, "piece")
        require((pieces["turned"] >= 0) & (pieces["turned"] <= 1), "a piece is neither turned nor not")
        require(buffers["ld"] >= np.maximum(buffers["rows"], 1), "a buffer's leading dimension is below its rows")

    # -- summaries ---------------------------------------------------------------------------

    def arena_bytes(self) -> np.ndarray:
        """Return the bytes that buffers of ours need of each memory, int64 of shape (number of locations,)."""
        needed = np.zeros(len(self.locations), np.int64)
        own = self.buffers[self.buffers["offset"] >= 0]
        np.maximum.at(needed, own["location"], own["offset"] + buffer_bytes(own))
        return needed

    def softbuf_bytes(self, space: Space = Space.DEVICE) -> np.ndarray:
        """Return the SoftBuf bytes that each rank needs in a kind of memory, int64 of shape (num_ranks,)."""
        of_ranks = (self.locations["space"] == space) & (self.locations["rank"] != NOBODY)
        needed: np.ndarray = self.arena_bytes()[of_ranks]
        return needed

    def owners(self) -> np.ndarray:
        """Return the rank that each buffer belongs to, NOBODY for host memory that all ranks read."""
        ranks: np.ndarray = self.locations["rank"][self.buffers["location"]]
        return ranks

    def in_host(self) -> np.ndarray:
        """Return whether each buffer lies in host memory."""
        return in_host(self.locations, self.buffers["location"])

    def copies(self) -> np.ndarray:
        """
        Return every COPY and SEND as (task, source, destination, bytes).

        Returns
        -------
        ndarray of int64, shape (number of both, 4)
            Source and destination are locations; for private host memory too that of its node's host.
        """
        at = np.flatnonzero(np.isin(self.tasks["kind"], (Kind.COPY, Kind.SEND)))
        reads, writes = self.operands_of_copies(at)
        out = np.empty((len(at), 4), np.int64)
        ends = with_ends(self.locations)["end"]
        out[:, 0] = at
        for column, operand in ((1, reads), (2, writes)):
            region = self.regions[self.operands["region"][operand]]
            of = self.buffers[region["buffer"]]
            out[:, column] = ends[of["location"]]
            if column == 2:
                out[:, 3] = region["rows"] * region["cols"] * ITEMSIZES[of["dtype"]]
        return out

    def operands_of_copies(self, tasks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the operands that some COPY and SEND tasks read, and those that they, or RECVs behind them, write."""
        sends = (self.tasks["kind"][tasks] == Kind.SEND).astype(np.int64)
        return self.tasks["first_operand"][tasks] + 1 - sends, self.tasks["first_operand"][tasks + sends]

    @property
    def callers_grid(self) -> tuple[int, int]:
        """`grid` of the caller's C: of a C stored by rows, which is transposed here, rows and columns change places."""
        return self.grid[::-1] if self.problem.swapped else self.grid

    def bytes_by_link(self, copies: np.ndarray | None = None) -> dict[str, int]:
        """
        Return bytes of all copies, or some, by kind of link.

        These are ``host_to_device``, ``device_to_host`` and ``device_to_device`` within nodes, of several nodes
        ``node_to_node`` whatever memories it leads from and to, and ``local``, within a memory.
        """
        copies = self.copies() if copies is None else copies
        source, destination, size = copies[:, 1], copies[:, 2], copies[:, 3]
        host_in, host_out = in_host(self.locations, source), in_host(self.locations, destination)
        local, over_net = source == destination, between_nodes(self.locations, source, destination)
        moved = {
            "host_to_device": int(size[host_in & ~host_out & ~over_net].sum()),
            "device_to_host": int(size[host_out & ~host_in & ~over_net].sum()),
            "device_to_device": int(size[~host_in & ~host_out & ~local & ~over_net].sum()),
            "node_to_node": int(size[over_net].sum()),
            "local": int(size[local].sum()),
        }
        if not self.locations["node"].any():
            del moved["node_to_node"]
        return moved


_IN_PARTS: Final = "part", "batch", "forms", "sums", "epilogue"
"""Fields of a problem that the header has by themselves, where there are any."""


def digest_of_bytes(encoded: bytes) -> str:
    """Return `Schedule.digest` of a schedule that is encoded."""
    return hashlib.blake2b(encoded, digest_size=16).hexdigest()


def _is_described(problem: GemmProblem, about: dict[str, Any]) -> bool:
    """Return whether a header is of a problem."""
    described = _described(problem)
    return all(about.get(name) == described.get(name) for name in (*described, *_IN_PARTS))


def _described(problem: GemmProblem) -> dict[str, object]:
    """Return what the header holds of a problem: types of operands, where each begins in its matrix, scalars' kind."""
    fields = (field.name for field in dataclasses.fields(problem))
    return {
        "problem": {name: getattr(problem, name) for name in fields if name not in _IN_PARTS}
        | {"dtype": problem.arithmetic.name},
        **({} if problem.part is None else {"part": problem.part.encoded()}),
        **({"batch": Alike.of(problem.batch).encoded()} if problem.batch else {}),
        **({"forms": [form and form.code for form in problem.forms]} if problem.forms != PLAIN else {}),
        **({"sums": [*problem.sums]} if problem.sums is not None else {}),
        **({} if problem.epilogue is None else {"epilogue": dataclasses.asdict(problem.epilogue)}),
        "dtypes": [dtype.name for dtype in problem.dtypes],
        "offsets": [[0, 0]] * 3,
        "scalars": "complex" if problem.arithmetic.is_complex else "real",
    }


def _problem_of(about: dict[str, Any]) -> GemmProblem:
    """Return the problem that a header describes, or raise ScheduleError if it describes it otherwise."""
    dtypes = tuple(DType[name] for name in about["dtypes"])
    part = PartOfC.decoded(about["part"]) if "part" in about else None
    batch = Alike.decoded(about.get("batch", ()))
    a, b = (code and Form.of_code(code) for code in about.get("forms", (None, None)))
    given = {
        "dtype": dtypes,
        "part": part,
        "batch": batch,
        "forms": (a, b),
        "sums": about.get("sums") and (*about["sums"],),
        "epilogue": Epilogue.decoded(about["epilogue"]) if "epilogue" in about else None,
    }
    problem = GemmProblem(**{**about["problem"], **given})
    for name, value in _described(problem).items():
        if about[name] != value:
            raise ScheduleError(f"{name} of the schedule is {about[name]}: so far it is {value}")
    return problem


def native_tables(*tables: np.ndarray) -> dict[str, np.ndarray]:
    """Return the tables that a native scheduler made, uint8 arrays in its order, as the fields of a `Schedule`."""
    names, dtypes = ("tasks", "operands", "regions", "awaits", "lanes"), dict(_TABLES)
    return {name: np.frombuffer(table, dtypes[name]) for name, table in zip(names, tables, strict=True)}


def rows_by_rank(ranks: np.ndarray, num_ranks: int) -> list[np.ndarray]:
    """Return for each rank where it stands in `ranks` (int, shape (n,)), as ascending rows."""
    order = np.argsort(ranks, kind="stable")
    return np.split(order, np.searchsorted(ranks[order], np.arange(1, num_ranks)))


def buffer_bytes(buffers: np.ndarray) -> np.ndarray:
    """
    Return the bytes each buffer record spans, 0 if it is empty.

    A caller's matrix has (ld·(cols−1) + rows) elements; a buffer of ours ld·cols, the padding of its last column
    included, which products may read and write.
    """
    last = np.where(buffers["role"] == Role.USER, buffers["rows"], buffers["ld"])
    elements = buffers["ld"] * np.maximum(buffers["cols"] - 1, 0) + last
    some = (buffers["rows"] > 0) & (buffers["cols"] > 0)
    size: np.ndarray = np.where(some, elements, 0) * ITEMSIZES[buffers["dtype"]]
    return size


def expand_ranges(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Return first[0] … first[0]+count[0]−1, first[1] … as one int64 array."""
    count = count.astype(np.int64)
    total = int(count.sum())
    starts = np.repeat(first.astype(np.int64) - (np.cumsum(count) - count), count)
    return starts + np.arange(total)
