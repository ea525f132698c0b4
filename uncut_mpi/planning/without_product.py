"""
Matrices without a product: every part of C is scaled by beta where it lies, or is copied from A (C := A).

On a device a part is scaled in place. What is in host memory passes through a few slots of a device: its owner's or, of
memory that all ranks read, that of whoever is done first. Slots are as large as a rank has room for, up to
`SLOT_BYTES`. Those of a C that is scaled are no larger than gives each rank some `BLOCKS`. What several hold is scaled
once and copied to the others.

A copy takes one step wherever one rank reaches both memories. From the private host memory of one rank to that of
another it passes through slots on the first one's device.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

from uncut_mpi.model.locations import Location
from uncut_mpi.model.parts import ByRows, Part, common
from uncut_mpi.model.placement import MATRICES, Matrix
from uncut_mpi.planning.buffers import BUFFER_ALIGNMENT, COLUMN_ALIGNMENT, Buffers, panel_bytes
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.limits import FEW_TASKS, MAX_TASKS, too_many
from uncut_mpi.planning.schedule import Factor, Kind, Op, Role, Schedule, ending_of
from uncut_mpi.planning.setting import Setting

SLOTS: Final = 3
"""One arrives, one is scaled, one leaves."""

SLOT_BYTES: Final = 16 << 20
LEAST_SLOT_BYTES: Final = 512 << 10
BLOCKS: Final = 16
"""Of a C that is scaled each rank gets about so many blocks, as far as slots are between the least and the most."""


def schedule(setting: Setting) -> Schedule:
    """
    Return the schedule for a problem that scales C, or copies A.

    Pure and deterministic.

    Raises
    ------
    ParamError
        If `devices` names a rank that there is not.
    CapacityError
        If a device has no room for the slots.
    """
    return _Passage(setting).build()


_Held: TypeAlias = tuple[Part, int]
"""A part and its buffer."""

_Block: TypeAlias = tuple[int, int, int, int]
"""What of a region goes through a slot at a time: first row and column, rows and columns."""


def _distance(source: Location, to: Location) -> tuple[bool, bool, bool]:
    """Return how near a memory is: the same one, one of the same rank, a device, any other."""
    return source != to, source.rank != to.rank, source.space == "host"


def _rank(location: Location) -> int:
    """Return whose a memory is that is not all ranks'."""
    assert location.rank is not None
    return location.rank


class _DeviceSlot:
    """A buffer on a device, and the tasks that have used it last."""

    def __init__(self, buffer: int) -> None:
        self.buffer = buffer
        self.users: list[int] = []


class _Passage:
    """One run of the scheduler."""

    def __init__(self, setting: Setting) -> None:
        problem, placement, machine = setting.problem, setting.placement, setting.machine
        devices, readers = setting.options.computing_ranks(setting.num_ranks), setting.readers
        self._setting, self._problem, self._devices = setting, problem, devices
        self._build = ScheduleBuilder(machine.ranks, problem, placement, serial_copies=machine.serial_copies)
        self._buffers = Buffers(machine.ranks, problem, placement)
        buffers = itertools.count()
        self._held: dict[Matrix, dict[tuple[object, ...], list[_Held]]] = {}
        for matrix in MATRICES:
            self._held[matrix] = {}
            for part in placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix)):
                buffer = next(buffers)
                if 0 not in part.shape:  # as a whole matrix may be
                    self._held[matrix].setdefault((part.rows, part.cols, part.count), []).append((part, buffer))
        in_host = [part for part, _ in self._all(Matrix.A, Matrix.C) if part.location.space == "host"]
        shapes = [part.stored_shape for part in in_host]
        self._rows, self._cols = (max((shape[axis] for shape in shapes), default=1) for axis in (0, 1))
        wanted = SLOT_BYTES
        if not problem.copies:
            total = sum(part.elements for part in in_host) * problem.dtypes[Matrix.C].itemsize
            wanted = min(SLOT_BYTES, max(LEAST_SLOT_BYTES, total // (BLOCKS * len(devices))))
            wanted = max(wanted, total // FEW_TASKS)
        self._slot_bytes = [min(wanted, of_rank // SLOTS - BUFFER_ALIGNMENT) for of_rank in setting.room]
        self._slots: dict[int, Iterator[_DeviceSlot]] = {}
        self._turn = itertools.cycle([rank for rank in devices if rank in readers] or readers)
        rates = machine.host_rates(devices, outward=True).min(axis=0).tolist()
        self._second_per_element = dict(zip(devices, (1 / rate for rate in rates), strict=True))
        self._busy_until = dict.fromkeys(devices, 0.0)

    def build(self) -> Schedule:
        if self._problem.copies:
            self._copy_all()
        else:
            self._scale_all()
        self._setting.check_capacity(self._buffers.arena_bytes, least="needs at least")
        return self._build.build(scheduler="parts", grid=(1, len(self._devices)), tile=0, buffers=self._buffers.table())

    def _copy_all(self) -> None:
        sources = self._held[Matrix.A].values()
        for to, buffer in itertools.chain.from_iterable(self._held[Matrix.C].values()):
            for holders in sources:
                held, _ = holders[0]
                shared = common((to.rows, to.cols), (held.rows, held.cols))
                if shared is None:
                    continue
                (top, bottom), (left, right) = shared
                # The nearest of those who have it.
                source, its_buffer = min(holders, key=lambda one: _distance(one[0].location, to.location))
                size = bottom - top, right - left
                self._copy(
                    source.location,
                    RegionRef(its_buffer, top - source.rows[0], left - source.cols[0], *size),
                    to.location,
                    RegionRef(buffer, top - to.rows[0], left - to.cols[0], *size),
                )

    def _copy(self, source: Location, here: RegionRef, to: Location, there: RegionRef) -> None:
        build = self._build
        host_to_host = source.space == to.space == "host"
        if host_to_host and None not in (source.rank, to.rank) and source.rank != to.rank:
            self._copy_by_slots(source, here, to, there)
            return
        private = next((one.rank for one in (source, to) if one.space == "host" and one.rank is not None), None)
        if host_to_host:
            lane = build.host_lane(next(self._turn) if private is None else private)
        else:
            ends = [build.host if one.space == "host" else _rank(one) for one in (source, to)]
            device = next(_rank(one) for one in (source, to) if one.space == "device")
            lane = build.copy_lane(device if private is None else private, *ends)
        self._copied(lane, there, here)

    def _copy_by_slots(self, source: Location, here: RegionRef, to: Location, there: RegionRef) -> None:
        """Copy between private host memories: their owners meet at slots on the source's device."""
        build, rank, its_owner = self._build, _rank(source), _rank(to)
        for block in self._blocks(rank, here.rows, here.cols):
            slot, inside = self._slot(rank, block)
            came = self._copied(build.copy_lane(rank, build.host, rank), inside, here.part(*block), slot.users)
            lane = build.copy_lane(its_owner, rank, build.host)
            slot.users = [self._copied(lane, there.part(*block), inside, [came])]

    def _scale_all(self) -> None:
        batch = bool(self._problem.batch)  # of which parts have only what is computed
        computed = ByRows(() if batch else self._problem.rectangles, lambda one: one[0])
        for holders in self._held[Matrix.C].values():
            # A device scales what it holds in place.
            holders.sort(key=lambda one: one[0].location.space == "host")
            first, _ = holders[0]
            places = [(0, 0, *first.stored_shape)] if batch else []
            for one in computed.within(*first.rows):
                shared = common(one, (first.rows, first.cols))
                if shared is not None:
                    (top, bottom), (left, right) = shared
                    places.append((top - first.rows[0], left - first.cols[0], bottom - top, right - left))
            for place in places:
                way = self._scale if first.location.space == "device" else self._pass_through
                at = first.rows[0] + place[0], first.cols[0] + place[1]
                way([(part, RegionRef(buffer, *place)) for part, buffer in holders], at)

    def _scale(self, held: list[tuple[Part, RegionRef]], at: tuple[int, int]) -> None:
        (first, here), *others = held
        rank = _rank(first.location)
        done = self._combine(rank, here, [], at)
        for other, there in others:
            self._copy_out(rank, other, there, here, done)

    def _pass_through(self, held: list[tuple[Part, RegionRef]], at: tuple[int, int]) -> None:
        first, here = held[0]
        owner = first.location.rank
        fewest = min(self._devices if owner is None else (owner,), key=lambda one: self._slot_bytes[one])
        for block in self._blocks(fewest, here.rows, here.cols):
            rank = self._first_done(block[2] * block[3]) if owner is None else owner
            slot, inside = self._slot(rank, block)
            came = list(slot.users)
            if self._problem.reads_c:
                lane = self._build.copy_lane(rank, self._build.host, rank)
                came = [self._copied(lane, inside, here.part(*block), slot.users)]
            done = self._combine(rank, inside, came, (at[0] + block[0], at[1] + block[1]))
            slot.users = [self._copy_out(rank, other, there.part(*block), inside, done) for other, there in held]

    def _first_done(self, elements: int) -> int:
        """Return the rank that would be the first to have passed on so many elements more."""
        ends = {rank: self._busy_until[rank] + elements * self._second_per_element[rank] for rank in self._devices}
        rank = min(ends, key=ends.__getitem__)
        self._busy_until[rank] = ends[rank]
        return rank

    def _blocks(self, rank: int, rows: int, cols: int) -> Iterator[_Block]:
        """Yield the blocks of a region that go through a rank's slots."""
        height, width = self._slot_shape(rank)
        count = -(-rows // height) * -(-cols // width)
        if count > MAX_TASKS // 3:
            raise too_many(
                self._problem,
                f"passing C through slots of {height}×{width} elements",
                f"{3 * count} tasks",
                MAX_TASKS,
                "give ranks more memory (device_memory)",
            )
        for row, col in itertools.product(range(0, rows, height), range(0, cols, width)):
            yield row, col, min(height, rows - row), min(width, cols - col)

    def _slot_shape(self, rank: int) -> tuple[int, int]:
        """Return rows and columns of a rank's slots: whole columns, or a part of one."""
        dtype = self._problem.dtypes[Matrix.C]
        whole = panel_bytes((self._rows, 1), dtype)
        if whole <= self._slot_bytes[rank]:
            return self._rows, min(self._cols, self._slot_bytes[rank] // whole)
        shortest = COLUMN_ALIGNMENT // dtype.itemsize
        return max(shortest, self._slot_bytes[rank] // COLUMN_ALIGNMENT * shortest), 1

    def _slot(self, rank: int, block: _Block) -> tuple[_DeviceSlot, RegionRef]:
        """Return the slot of a rank that was not used for longest, and where in it a block goes."""
        if rank not in self._slots:
            shape, dtype = self._slot_shape(rank), self._problem.dtypes[Matrix.C]
            slots = [_DeviceSlot(self._buffers.add(rank, shape, dtype, Matrix.C, Role.STAGING)) for _ in range(SLOTS)]
            self._slots[rank] = itertools.cycle(slots)
        slot = next(self._slots[rank])
        return slot, RegionRef(slot.buffer, 0, 0, *block[2:])

    def _all(self, *matrices: Matrix) -> Iterator[_Held]:
        return itertools.chain.from_iterable(one for of in matrices for one in self._held[of].values())

    def _combine(self, rank: int, target: RegionRef, awaits: list[int], at: tuple[int, int]) -> int:
        """Scale a region, whose first element has this row and column of C."""
        terms = [(target, Factor.BETA, Op.N)] if self._problem.reads_c else []
        op, (row, col) = ending_of(self._problem), at
        below = {Op.N: 0, Op.EPILOGUE_ROWS: row, Op.EPILOGUE_COLS: col}.get(op, self._problem.diagonal + row - col)
        lane = self._build.compute_lane(rank)
        return self._build.task(Kind.COMBINE, lane, target, terms, awaits, ending=(op, below))

    def _copied(self, lane: int, to: RegionRef, source: RegionRef, awaits: Sequence[int] = ()) -> int:
        return self._build.task(Kind.COPY, lane, to, [(source, Factor.ONE, Op.N)], awaits)

    def _copy_out(self, rank: int, to: Part, there: RegionRef, source: RegionRef, awaited: int) -> int:
        build, place = self._build, to.location
        if place.space == "host":
            lane = build.copy_lane(rank if place.rank is None else place.rank, rank, build.host)
        else:
            lane = build.result_lane(rank, rank, _rank(place))
        return self._copied(lane, there, source, [awaited])
