"""
What is timed, as schedules for the executor. Pure.

A probe is a schedule whose buffers are windows on the memory areas of `Areas`; every rank runs its
part of it between two barriers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final, TypeAlias

from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import host_index
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.buffers import aligned_ld
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.schedule import Factor, Kind, Op, Role, Schedule

SMALL_BYTES: Final = 4096
"""Bytes of a transfer that counts as one of few bytes."""

_READ: Final = (Factor.ONE, Op.N)
_ROW_DISTANCE: Final = 64 << 10
_BEFORE_WAITS: Final = 16
_PRODUCT_LANES: Final = (0, 3)  # those of kblocks
_SUM_LANE: Final = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Areas:
    """
    How the memory that probes use is divided.

    Each device has an area to send from and one to receive into for every location. The host has, for each rank, two of
    either kind one after the other, so that transfers do not stay in a cache.

    Attributes
    ----------
    num_ranks : int
        Ranks, one device each.
    nbytes : int
        Bytes of an area, a multiple of `SMALL_BYTES`.
    compute_bytes : int
        Bytes that products need on each device for their operands, over the areas from offset 0, and again for their
        results behind these.
    """

    num_ranks: int
    nbytes: int
    compute_bytes: int = 0

    @property
    def device_bytes(self) -> int:
        """Bytes that transfers and products need on each device."""
        return max((self.num_ranks + 2) * self.nbytes, 2 * self.compute_bytes)

    @property
    def host_bytes(self) -> int:
        """Bytes that transfers need on the host."""
        return 4 * self.num_ranks * self.nbytes

    def source(self, link: tuple[int, int], turn: int) -> int:
        """Return the offset of what transfer number `turn` on a link reads, in the memory of its source."""
        source, destination = link
        return 2 * destination * self.nbytes + turn % 2 * self.nbytes if source == host_index(self.num_ranks) else 0

    def destination(self, link: tuple[int, int], turn: int) -> int:
        """Return the offset of what transfer number `turn` on a link writes, in the memory of its destination."""
        source, destination = link
        if destination == host_index(self.num_ranks):
            return (2 * self.num_ranks + 2 * source + turn % 2) * self.nbytes
        return (1 + source) * self.nbytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """
    A schedule to be timed.

    Attributes
    ----------
    schedule : Schedule
        Every rank runs its part.
    windows : tuple of (int, int)
        Location (number of ranks for the host) and offset in bytes of each buffer.
    """

    schedule: Schedule
    windows: tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Transfers:
    """
    Copies one after another on one link.

    Attributes
    ----------
    link : tuple of int
        (source, destination).
    count : int
        Copies.
    nbytes : int
        Of each; a multiple of 8.
    width_bytes : int
        Width of the rows; 0 for a contiguous copy. They lie far apart (`row_distance`) in the host's memory, or at
        the source between devices.
    """

    link: tuple[int, int]
    count: int
    nbytes: int
    width_bytes: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class GemmProbe:
    """
    A product to be timed.

    Attributes
    ----------
    shape : tuple of int
        m, n, k.
    adds : bool
        Whether it is added to C'.
    aligned : bool
        Whether columns are aligned as those of panels, or follow one another as those of a caller's matrices may.
    lanes : int
        On how many lanes products are begun in turn, 1 or 2.
    """

    shape: tuple[int, int, int]
    adds: bool = False
    aligned: bool = True
    lanes: int = 1

    @property
    def is_plain(self) -> bool:
        """Whether it is one product at a time of aligned columns that is not added to anything."""
        return self == GemmProbe(self.shape)

    def __str__(self) -> str:
        how = (
            (", added", self.adds),
            (", columns not aligned", not self.aligned),
            (", two at a time", self.lanes > 1),
        )
        return "×".join(map(str, self.shape)) + "".join(words for words, said in how if said)


Load: TypeAlias = tuple[GemmProbe, DType, int]
"""What keeps a device busy: a product, the type of its operands, and how often it is made."""


@dataclasses.dataclass(frozen=True, slots=True)
class Hold:
    """
    What keeps the lanes of products busy until these are issued: sums, which need memory alone and always last as long.

    Attributes
    ----------
    rows, cols : int
        Of a COMBINE in f64.
    count : int
        COMBINEs on each lane.
    """

    rows: int
    cols: int
    count: int


class ProbeBuild:
    """A schedule builder whose buffers are windows on memory areas, each made once."""

    def __init__(self, areas: Areas) -> None:
        self.areas = areas
        # The product is none of ours: a schedule has one.
        self.build = ScheduleBuilder(areas.num_ranks, GemmProblem(1, 1, 1, DType.f64), Placement.parse("0,0,0"))
        self._windows: dict[tuple[int, int, int, int, int, DType], int] = {}

    def window(self, where: int, offset: int, rows: int, cols: int, dtype: DType = DType.f64, ld: int = 0) -> RegionRef:
        """Return a whole matrix at an offset (bytes) in the memory of a location; `ld` is at least its rows."""
        key = (where, offset, rows, cols, max(ld, rows), dtype)
        if key not in self._windows:
            self._windows[key] = self.build.buffer(
                at=where,
                rows=rows,
                cols=cols,
                dtype=dtype,
                role=Role.USER if where == self.build.host else Role.PANEL,
                ld=max(ld, rows),
                offset=0,
            )
        return RegionRef(self._windows[key], 0, 0, rows, cols)

    def copy(self, lane: int, to: RegionRef, source: RegionRef, awaits: Sequence[int] = ()) -> int:
        """Append a copy and return its task."""
        return self.build.task(Kind.COPY, lane, to, [(source, *_READ)], awaits)

    def send(
        self, lane: int, link: tuple[int, int], awaits: Sequence[int] = (), *, turn: int = 0, nbytes: int = SMALL_BYTES
    ) -> int:
        """Append contiguous copy number `turn` on a link, from area to area, and return its task."""
        source, destination = link
        to = self.window(destination, self.areas.destination(link, turn), nbytes // 8, 1)
        return self.copy(lane, to, self.window(source, self.areas.source(link, turn), nbytes // 8, 1), awaits)

    def multiply(self, rank: int, product: GemmProbe, dtype: DType, turn: int = 0) -> None:
        """Append product number `turn` on a device: C' := A B, or added to C'; A and B lie over one another."""
        m, n, k = product.shape

        def window(offset: int, rows: int, cols: int, of: DType) -> RegionRef:
            return self.window(rank, offset, rows, cols, of, ld=aligned_ld(rows, of) if product.aligned else rows)

        # Types of one byte are multiplied with k contiguous in both, else copied so first.
        turn_a = Op.T if dtype.itemsize == 1 else Op.N
        rows_a, cols_a = (k, m) if turn_a is Op.T else (m, k)
        reads = [(window(0, rows_a, cols_a, dtype), Factor.ONE, turn_a), (window(0, k, n, dtype), *_READ)]
        c = window(self.areas.compute_bytes, m, n, dtype.accumulator)
        if product.adds:
            reads.append((c, *_READ))
        lane = _PRODUCT_LANES[turn % product.lanes]
        self.build.task(Kind.GEMM, self.build.compute_lane(rank, lane), c, reads)

    def combine(self, rank: int, rows: int, cols: int, dtype: DType, lane: int = 0, awaits: Sequence[int] = ()) -> int:
        """Append ``C := C' + C`` on a device, C' where products have operands, C behind, and return its task."""
        new = self.window(rank, 0, rows, cols, dtype.accumulator)
        c = self.window(rank, self.areas.compute_bytes, rows, cols, dtype)
        reads = [(c, *_READ), (new, *_READ)]
        return self.build.task(Kind.COMBINE, self.build.compute_lane(rank, lane), c, reads, awaits)

    def probe(self) -> Probe:
        """Return what was built."""
        schedule = self.build.build(scheduler="calibration", grid=(1, self.areas.num_ranks), tile=0)
        return Probe(schedule, tuple((key[0], key[1]) for key in self._windows))


def issuer(link: tuple[int, int], num_ranks: int) -> int:
    """Return the rank that issues copies on a link: it pushes to devices and to the host, and pulls from the host."""
    source, destination = link
    return destination if source == host_index(num_ranks) else source


def transfers(areas: Areas, at_once: Sequence[Transfers], load: Load | None = None) -> Probe:
    """
    Return transfers on several links at once, each link's one after another on a lane of its own.

    With a load the devices of the first link multiply meanwhile.
    """
    built = ProbeBuild(areas)
    for turn in range(max(one.count for one in at_once)):
        for one in at_once:
            if turn >= one.count:
                continue
            source, destination = one.link
            rank = issuer(one.link, areas.num_ranks)
            lane = built.build.copy_lane(rank, source, destination)
            rows = (one.width_bytes or one.nbytes) // 8
            cols = one.nbytes // (8 * rows)
            far = row_distance(one.width_bytes) // 8 if one.width_bytes else rows
            there, here = (far, rows) if destination == built.build.host else (rows, far)
            to = built.window(destination, areas.destination(one.link, turn), rows, cols, ld=there)
            built.copy(lane, to, built.window(source, areas.source(one.link, turn), rows, cols, ld=here))
    if load is not None:
        product, dtype, count = load
        for rank in sorted({end for end in at_once[0].link if end != built.build.host}):
            for _ in range(count):
                built.multiply(rank, product, dtype)
    return built.probe()


def row_distance(width_bytes: int) -> int:
    """Return how far apart rows of some width lie: as in matrices, whose rows seldom share a page of memory."""
    return max(2 * width_bytes, _ROW_DISTANCE)


def hops(areas: Areas, ranks: Sequence[int], count: int) -> Probe:
    """
    Return small copies of which each awaits the one before.

    Parameters
    ----------
    ranks : sequence of int
        Hop i is issued by rank ``ranks[i % len(ranks)]`` and goes to the next one's device. With one rank the hops
        change between two lanes of it, and stay on its device.
    count : int
        Hops.
    """
    built = ProbeBuild(areas)
    last: list[int] = []
    for hop in range(count):
        here, there = ranks[hop % len(ranks)], ranks[(hop + 1) % len(ranks)]
        # Lanes are told apart by their ends; where the bytes go is the region's business.
        other = built.build.host if len(ranks) == 1 and hop % 2 == 0 else there
        last = [built.send(built.build.copy_lane(here, here, other), (here, there), last, turn=hop)]
    return built.probe()


def turns(areas: Areas, edge: int, count: int, *, copies: bool) -> Probe:
    """
    Return small COMBINEs on rank 0's device of which each awaits the one before, on two lanes in turn.

    Parameters
    ----------
    edge : int
        Rows and columns.
    count : int
        COMBINEs.
    copies : bool
        All on one lane, and between any two a small copy from the host that awaits the one and is awaited by the
        other.
    """
    built = ProbeBuild(areas)
    link = (built.build.host, 0)
    last: list[int] = []
    for turn in range(count):
        if copies:
            last = [built.send(built.build.copy_lane(0, *link), link, last, turn=turn)]
        lane = _PRODUCT_LANES[0 if copies else turn % 2]
        last = [built.combine(0, edge, edge, DType.f64, lane, last)]
    return built.probe()


def beside(areas: Areas, large: int, small: int) -> Probe:
    """
    Return large copies from rank 0 to rank 1, and beside them a small copy's way there and back, on other lanes.

    Parameters
    ----------
    areas : Areas
        The large copies are as long as one.
    large : int
        Copies, one after another.
    small : int
        Ways there and back.
    """
    built = ProbeBuild(areas)
    for turn in range(large):
        built.send(built.build.copy_lane(0, 0, 1), (0, 1), turn=turn, nbytes=areas.nbytes)
    few, last = SMALL_BYTES // 8, list[int]()
    for _ in range(small):
        for here, there in ((0, 1), (1, 0)):
            # Where the large copies do not write.
            to = built.window(there, areas.destination((1, 0) if there == 0 else (1, 1), 0), few, 1)
            last = [built.copy(built.build.result_lane(here, here, there), to, built.window(here, 0, few, 1), last)]
    return built.probe()


def waiting(areas: Areas, count: int, *, waits: bool) -> Probe:
    """
    Return small copies on rank 1's device, behind a large one, each of which awaits a flag that was written before.

    Without `waits` they await nothing: the difference is the time of a lane for a wait.
    """
    built = ProbeBuild(areas)
    sent = [built.send(built.build.copy_lane(0, 0, 1), (0, 1)) for _ in range(count)]
    lane = built.build.copy_lane(1, 1, 1)
    for _ in range(_BEFORE_WAITS):
        built.send(lane, (1, 1), nbytes=areas.nbytes)
    for one in sent:
        built.send(lane, (1, 1), [one] if waits else [])
    return built.probe()


def signalled(areas: Areas, count: int) -> Probe:
    """Return small copies from rank 0 to rank 1, each awaited by one that rank 1 makes on its device."""
    built = ProbeBuild(areas)
    rows = SMALL_BYTES // 8
    for _ in range(count):
        sent = built.send(built.build.copy_lane(0, 0, 1), (0, 1))
        came = built.window(1, areas.destination((0, 1), 0), rows, 1)
        kept = built.window(1, areas.destination((1, 1), 0), rows, 1)
        built.copy(built.build.copy_lane(1, 1, 1), kept, came, [sent])
    return built.probe()


def products(areas: Areas, product: GemmProbe, dtype: DType, count: int, hold: Hold | None = None) -> Probe:
    """
    Return so many of a product on every device at once, one after another on each lane (`ProbeBuild.multiply`).

    With a hold they await it on each of their lanes.
    """
    built = ProbeBuild(areas)
    if hold is not None:
        for rank in range(areas.num_ranks):
            for lane in _PRODUCT_LANES[: product.lanes] * hold.count:
                built.combine(rank, hold.rows, hold.cols, DType.f64, lane)
    for turn in range(count):
        for rank in range(areas.num_ranks):
            built.multiply(rank, product, dtype, turn)
    return built.probe()


def sums(areas: Areas, rows: int, cols: int, count: int, product: GemmProbe | None, dtype: DType) -> Probe:
    """Return sums in f64 on rank 0's device, which go on beside a product if there is one."""
    built = ProbeBuild(areas)
    if product is not None:
        built.multiply(0, product, dtype)
    for _ in range(count):
        built.combine(0, rows, cols, DType.f64, _SUM_LANE)
    return built.probe()


def combines(areas: Areas, rows: int, cols: int, dtype: DType, count: int) -> Probe:
    """Return ``C := C' + C`` on every device at once (`ProbeBuild.combine`)."""
    built = ProbeBuild(areas)
    for _ in range(count):
        for rank in range(areas.num_ranks):
            built.combine(rank, rows, cols, dtype)
    return built.probe()
