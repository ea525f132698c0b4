"""
A batch of products: whole products are dealt to ranks, and few large ones are cut.

A product stays where its C lies, or else the larger of its operands. Those in host memory are dealt by their
operations, in runs, so that what a rank has lies together. So are those of a few ranks where simulation expects that to
be faster. A cut product's parts are columns or rows of its C.

Each rank goes through its parts in groups: copies in, products, copies out. Copies of a group follow one another on
their lanes, and so do products, so that executors make one call of many. Groups take turns at a few slots, if there is
no room for all.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeAlias

from uncut_mpi.errors import ParamError, PlanError
from uncut_mpi.model.locations import Location, location_index
from uncut_mpi.model.parts import Extent, Part, Rectangle, common, elements_of
from uncut_mpi.model.placement import MATRICES, Matrix
from uncut_mpi.planning.buffers import BUFFER_ALIGNMENT, Buffers, panel_bytes
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.schedule import Factor, Kind, Op, Role, Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import simulate

GROUPS: Final = 8
"""Of a rank, if they are not too small: so copies hide behind products but for an eighth of them."""

LEAST_GROUP_BYTES: Final = 2 << 20
LEAST_PIECE_BYTES: Final = 8 << 20
"""Copies of less are not worth calls of their own, nor pieces of a product that are."""

SLOTS: Final = 3
"""One arrives, one is multiplied, one leaves."""

FEW: Final = 16
"""A rank that has so many products is busy about as long as others, so that none is cut."""

CUT_S: Final = 1e-4
"""Nor is one that takes less."""

STEP: Final = 64
"""Cuts are at multiples of so many rows or columns, for products as fast as others."""


class _Unit(NamedTuple):
    """Some rows and columns of the C of a product."""

    product: int
    rows: Extent
    cols: Extent

    @property
    def longer(self) -> str:
        """Which of the two is longer."""
        return "cols" if _size(self.cols) >= _size(self.rows) else "rows"

    def between(self, axis: str, start: int, stop: int) -> _Unit:
        """Return some of its rows, or columns."""
        return self._replace(rows=(start, stop)) if axis == "rows" else self._replace(cols=(start, stop))


_Shares: TypeAlias = dict[int, list[_Unit]]
"""What each rank does."""


def schedule(setting: Setting) -> Schedule:
    """
    Return the schedule of a batch. Pure and deterministic.

    Raises
    ------
    PlanError, ParamError
        If another scheduler is asked for, a way to cut one product, or another metric than time.
    CapacityError
        If a device has no room for what an element of C needs.
    """
    options = setting.options
    if options.scheduler != "auto":
        raise PlanError(f"{options.scheduler} makes one product and no batch: leave the scheduler to auto")
    refused = [name for name in options.given if name != "devices"] + ["metric"] * (options.metric != "time")
    if refused:
        raise ParamError(f"{', '.join(refused)} was given, which is for one product and no batch: leave it out")
    batch = _Work(setting)
    several = [_Groups(batch, shares).schedule() for shares in batch.ways()]
    if len(several) == 1:
        return several[0]
    return min(several, key=lambda one: simulate(one, setting.machine).seconds)


class _Work:
    """What is to be done, and who holds what."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.problem = setting, setting.problem
        self.blocks = {matrix: self.problem.blocks_of(matrix) for matrix in MATRICES}
        self.held: dict[Matrix, list[list[tuple[Part, int]]]] = {}
        number = itertools.count()
        for matrix in MATRICES:
            held: list[list[tuple[Part, int]]] = [[] for _ in self.problem.batch]
            starts = [rows[0] for rows, _ in self.blocks[matrix]]
            for part in setting.placement.parts(matrix, self.problem.shape_of(matrix), self.problem.ld_of(matrix)):
                buffer = next(number)
                if 0 not in part.shape:  # as a whole matrix may be
                    held[bisect.bisect_right(starts, part.rows[0]) - 1].append((part, buffer))
            self.held[matrix] = held
        self._devices = setting.options.computing_ranks(setting.num_ranks)
        self._rates: list[float] = setting.machine.gemm_rate(self.problem.arithmetic).tolist()
        self._work = [float(m * n * max(k, 1)) for m, n, k in self.problem.batch]
        self._products = [product for product, work in enumerate(self._work) if work]

    def ways(self) -> Iterator[_Shares]:
        """Yield ways to deal the products: those that have a home stay there, or all are dealt."""
        homes = {product: self._home_of(product) for product in self._products}
        shares = self._dealt([product for product, home in homes.items() if home is None])
        for product, home in homes.items():
            if home is not None:
                shares.setdefault(home, []).append(self._whole(product))
        yield shares
        if self._may_pay(homes):
            yield self._dealt(self._products)

    def _home_of(self, product: int) -> int | None:
        """Return the computing rank that alone has C, or else the larger operand; None if there is none."""
        of_inputs = sorted((Matrix.A, Matrix.B), key=lambda one: -elements_of(self.blocks[one][product]))
        for matrix in (Matrix.C, *of_inputs):
            ranks = {part.location.rank for part, _ in self.held[matrix][product]}
            if len(ranks) == 1 and (rank := ranks.pop()) in self._devices:
                return rank
        return None

    def _may_pay(self, homes: Mapping[int, int | None]) -> bool:
        """Whether it may take less to deal all evenly, by rates alone."""
        work = dict.fromkeys(self._devices, 0.0)
        for product, home in homes.items():
            if home is not None:
                work[home] += self._work[product]
        longest, busiest = max((amount / self._rates[rank], rank) for rank, amount in work.items())
        evenly = sum(self._work) / sum(self._rates[rank] for rank in self._devices)
        links: list[float] = self.setting.machine.bandwidth_gb_per_s[busiest].tolist()
        rate = 1e9 * sum(links[rank] for rank in self._devices if rank != busiest)
        moved = sum(map(self.problem.bytes_of, MATRICES))
        return evenly < longest / 2**0.5 and moved / len(self._devices) / rate < 2 * longest

    def _whole(self, product: int) -> _Unit:
        return _Unit(product, *self.blocks[Matrix.C][product])

    def _dealt(self, products: Sequence[int]) -> _Shares:
        """Deal products by their operations, a run of them to each computing rank; what is much of a run is cut."""
        if not products:
            return {}
        rates = [self._rates[rank] for rank in self._devices]
        total = sum(self._work[product] for product in products)
        ends = [total * rate / sum(rates) for rate in itertools.accumulate(rates)]
        much = max(total / len(rates) / FEW, CUT_S * min(rates) / 2)
        shares: _Shares = {}
        at, done = 0, 0.0
        for product in products:
            unit, work = self._whole(product), self._work[product]
            axis = unit.longer
            first, last = start, _ = getattr(unit, axis)
            while at + 1 < len(ends) and ends[at] < done + work:
                part = (ends[at] - done) / work
                middle = first + round((last - first) * part / STEP) * STEP if work > much else round(part) * last
                if start < (middle := min(middle, last)):
                    shares.setdefault(self._devices[at], []).append(unit.between(axis, start, middle))
                    start = middle
                at += 1
            if start < last:
                shares.setdefault(self._devices[at], []).append(unit.between(axis, start, last))
            done += work
        return shares


class _Need(NamedTuple):
    """Rows and columns of a matrix that a unit needs, as stored, and where its device has them, if it does."""

    rectangle: Rectangle
    in_place: RegionRef | None
    again: bool = False  # an earlier piece of the same unit has brought it

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return _size(self.rectangle[0]), _size(self.rectangle[1])


_Kind: TypeAlias = tuple[Matrix, int]
"""Panels of a matrix, by about how high they are: columns of the highest one are at most twice as long."""


_Job: TypeAlias = tuple[_Unit, tuple[_Need, ...]]
"""A unit, and what it needs of A, B and C."""


@dataclasses.dataclass(slots=True)
class _Slot:
    """Panels that groups fill in turn, and the last ones who used them: a product, and copies of C."""

    panels: dict[_Kind, int]
    product: list[int] = dataclasses.field(default_factory=list)
    results: list[int] = dataclasses.field(default_factory=list)


class _Once:
    """Tasks that the first one of some on each lane awaits, and so the others on that lane do."""

    def __init__(self, tasks: Sequence[int]) -> None:
        self._tasks, self._lanes = tasks, set[int]()

    def awaited_on(self, lane: int) -> Sequence[int]:
        """Return what the next one on a lane awaits."""
        if lane in self._lanes:
            return ()
        self._lanes.add(lane)
        return self._tasks


class _Groups:
    """One schedule being made."""

    def __init__(self, batch: _Work, shares: _Shares) -> None:
        setting = batch.setting
        self._batch, self._setting, self._problem, self._shares = batch, setting, setting.problem, shares
        self._machine, about = setting.machine, (setting.num_ranks, setting.problem, setting.placement)
        self._build = ScheduleBuilder(*about, serial_copies=setting.machine.serial_copies)
        self._buffers = Buffers(*about)
        self._items = [dtype.itemsize for dtype in self._problem.dtypes]
        self._there: dict[tuple[int, Matrix, Rectangle], RegionRef] = {}  # what is in panels

    def schedule(self) -> Schedule:
        """Return it."""
        of_ranks = [self._groups(rank, units) for rank, units in self._shares.items()]
        self._setting.check_capacity(self._buffers.arena_bytes)
        for of_all in itertools.zip_longest(*of_ranks):
            for group in filter(None, of_all):
                self._emit(*group)
        grid = 1, max(1, len(self._shares))
        return self._build.build(scheduler="batch", grid=grid, tile=0, buffers=self._buffers.table())

    # -- panels ------------------------------------------------------------------------------

    def _groups(self, rank: int, units: Sequence[_Unit]) -> list[tuple[int, _Slot, list[_Job]]]:
        """Return a rank's groups, each with the slot it takes."""
        room = self._setting.room[rank]
        share = room
        found = self._arranged(rank, [*self._pieces(rank, units)], [(0, len(units) * GROUPS)])
        while found is None:
            share //= 2
            jobs = [*self._fitting(rank, units, share)]
            found = self._arranged(rank, jobs, [(room // SLOTS, SLOTS), (room // (2 * SLOTS), SLOTS), (0, 2)])
        return found

    def _arranged(
        self, rank: int, jobs: Sequence[_Job], ways: Sequence[tuple[int, int]]
    ) -> list[tuple[int, _Slot, list[_Job]]] | None:
        """Return groups of jobs by the first way that a rank has room for: bytes of each, or 0, and slots at most."""
        room, heights = self._setting.room[rank], dict[_Kind, int]()
        for _, needs in jobs:
            for kind, (rows, _) in _panels(needs):
                heights[kind] = max(rows, heights.get(kind, 0))
        columns = {kind: panel_bytes((rows, 1), self._problem.dtypes[kind[0]]) for kind, rows in heights.items()}
        sizes = [sum(columns[kind] * cols for kind, (_, cols) in _panels(needs)) for _, needs in jobs]
        usual = max(sum(sizes) // GROUPS, LEAST_GROUP_BYTES)
        for limit, most in ways:
            groups = _grouped(jobs, sizes, limit if most <= SLOTS else usual)
            count = min(most, len(groups))
            widths = [_widths(groups[number::count]) for number in range(count)]
            needed = sum(columns[kind] * cols + BUFFER_ALIGNMENT for its in widths for kind, cols in its.items())
            if needed <= room or not needed:
                for group in groups:  # so that products of one shape follow one another
                    group.sort(key=lambda job: [need.shape for need in job[1]])
                slots = [self._slot(rank, heights, its) for its in widths]
                return [(rank, slots[number % count], group) for number, group in enumerate(groups)]
        return None

    def _pieces(self, rank: int, units: Sequence[_Unit]) -> Iterator[_Job]:
        """Yield units with what they need; long ones in pieces, whose first one brings what all need."""
        every = [(unit, self._needs(rank, unit)) for unit in units]
        sizes = [sum(math.prod(shape) * self._items[kind[0]] for kind, shape in _panels(needs)) for _, needs in every]
        each, there = max(sum(sizes) // GROUPS, LEAST_PIECE_BYTES), set[tuple[int, Rectangle]]()
        for (unit, needs), size in zip(every, sizes, strict=True):
            axis = unit.longer
            start, stop = getattr(unit, axis)
            step = -(-(stop - start) // max(1, size // each) // STEP) * STEP
            if size < 2 * each or step >= stop - start:
                yield unit, needs
                continue
            there.clear()
            for first in range(start, stop, step):
                piece = unit.between(axis, first, min(first + step, stop))
                needed = self._needs(rank, piece)
                of_each = [*enumerate(one.rectangle for one in needed)]
                yield piece, tuple(one._replace(again=of in there) for one, of in zip(needed, of_each, strict=True))
                there.update(of_each)

    def _slot(self, rank: int, heights: Mapping[_Kind, int], widths: Mapping[_Kind, int]) -> _Slot:
        panels = {}
        for kind, cols in widths.items():
            shape, dtype = (heights[kind], cols), self._problem.dtypes[kind[0]]
            panels[kind] = self._buffers.add(rank, shape, dtype, kind[0], Role.PANEL)
        return _Slot(panels)

    def _fitting(self, rank: int, units: Sequence[_Unit], room: int) -> Iterator[_Job]:
        """Yield units with what they need; in parts those for which a rank has not so much room."""
        todo = [*reversed(units)]
        while todo:
            unit = todo.pop()
            needs = self._needs(rank, unit)
            size = sum(panel_bytes(shape, self._problem.dtypes[kind[0]]) for kind, shape in _panels(needs))
            axis = unit.longer
            start, stop = getattr(unit, axis)
            if size <= room:
                yield unit, needs
            elif stop - start > 1:
                half = (stop - start) // 2
                middle = start + (half // STEP * STEP or half)
                todo += [unit.between(axis, middle, stop), unit.between(axis, start, middle)]
            else:
                self._setting.check_capacity([0] * rank + [2 * size], least="needs at least")

    def _needs(self, rank: int, unit: _Unit) -> tuple[_Need, ...]:
        of_a, of_b = (self._batch.blocks[matrix][unit.product] for matrix in (Matrix.A, Matrix.B))
        rectangles = (
            (unit.rows, of_a[1]) if self._problem.trans_a == "N" else (of_a[0], unit.rows),
            (of_b[0], unit.cols) if self._problem.trans_b == "N" else (unit.cols, of_b[1]),
            (unit.rows, unit.cols),
        )
        return tuple(
            _Need(one, self._in_place(rank, self._batch.held[matrix][unit.product], one))
            for matrix, one in zip(MATRICES, rectangles, strict=True)
        )

    def _in_place(self, rank: int, held: Sequence[tuple[Part, int]], rectangle: Rectangle) -> RegionRef | None:
        for part, buffer in held:
            own = part.rows, part.cols
            here = part.location.space == "device" and part.location.rank == rank
            if here and (own == rectangle or common(own, rectangle) == rectangle):
                return _region(buffer, own, rectangle)
        return None

    # -- tasks -------------------------------------------------------------------------------

    def _emit(self, rank: int, slot: _Slot, group: Sequence[_Job]) -> None:
        """Add the tasks of a group: copies in, matrix after matrix, products, and copies out."""
        places = [self._placed(rank, group, matrix, slot.panels) for matrix in MATRICES]
        came: dict[int, int] = {}
        read, gone = _Once(slot.product), _Once(slot.results)
        for matrix in MATRICES if self._problem.reads_c else (Matrix.A, Matrix.B):
            free = gone if matrix is Matrix.C else read
            for (unit, needs), place in zip(group, places[matrix], strict=True):
                if needs[matrix].in_place is None and not needs[matrix].again:
                    self._bring(
                        rank, self._batch.held[matrix][unit.product], needs[matrix].rectangle, place, free, came
                    )
        awaits = [*came.values(), *slot.results]
        for number, (unit, _) in enumerate(group):
            product = self._multiply(rank, unit, [place[number] for place in places], awaits)
            awaits = []
        slot.product, made, left = [product], _Once([product]), dict[int, int]()
        for (unit, needs), place in zip(group, places[Matrix.C], strict=True):
            self._hand_out(rank, unit, needs[Matrix.C], place, made, left)
        slot.results = [*left.values()]

    def _placed(self, rank: int, group: Sequence[_Job], matrix: Matrix, panels: Mapping[_Kind, int]) -> list[RegionRef]:
        """Return where units have a matrix: in place, or in a panel, side by side."""
        filled = dict.fromkeys(panels.values(), 0)
        for _, needs in group:
            need = needs[matrix]
            rows, cols = need.shape
            if need.in_place is None and not need.again:
                panel = panels.get((matrix, rows.bit_length()), -1)
                self._there[rank, matrix, need.rectangle] = RegionRef(panel, 0, filled.get(panel, 0), rows, cols)
                if panel >= 0:
                    filled[panel] += cols
        return [needs[matrix].in_place or self._there[rank, matrix, needs[matrix].rectangle] for _, needs in group]

    def _bring(
        self,
        rank: int,
        held: Sequence[tuple[Part, int]],
        rectangle: Rectangle,
        place: RegionRef,
        free: _Once,
        came: dict[int, int],
    ) -> None:
        """Copy a rectangle to a place that is free when some tasks are over, and note the last copy of each lane."""
        build, done = self._build, set[Rectangle]()
        for part, buffer in sorted(held, key=lambda one: one[0].location != Location.device(rank)):
            own = part.rows, part.cols
            shared = common(own, rectangle)
            if shared is None or own in done:  # by another holder
                continue
            done.add(own)
            issuer, source = self._reached(rank, part.location)
            lane = build.copy_lane(issuer, source, rank)
            to, read = _region(place.buffer, rectangle, shared, place), _region(buffer, own, shared)
            came[lane] = build.task(Kind.COPY, lane, to, [(read, Factor.ONE, Op.N)], free.awaited_on(lane))

    def _multiply(self, rank: int, unit: _Unit, places: Sequence[RegionRef], awaits: Sequence[int]) -> int:
        a, b, c = places
        lane = self._build.compute_lane(rank)
        before = [(c, Factor.BETA, Op.N)] if self._problem.reads_c else []
        if self._problem.batch[unit.product][2] == 0:
            return self._build.task(Kind.COMBINE, lane, c, before, awaits)
        op_a, op_b = Op[self._problem.trans_a], Op[self._problem.trans_b]
        reads = [(a, Factor.ALPHA, op_a), (b, Factor.ONE, op_b), *before]
        return self._build.task(Kind.GEMM, lane, c, reads, awaits)

    def _hand_out(
        self, rank: int, unit: _Unit, need: _Need, place: RegionRef, made: _Once, left: dict[int, int]
    ) -> None:
        """Copy a part of C to all who hold it elsewhere, and note the last copy of each lane."""
        build = self._build
        for part, buffer in self._batch.held[Matrix.C][unit.product]:
            own = part.rows, part.cols
            shared = common(own, need.rectangle)
            if shared is None or (need.in_place is not None and buffer == need.in_place.buffer):
                continue
            issuer, to_end = self._reached(rank, part.location)
            lane = (build.copy_lane if to_end == build.host else build.result_lane)(issuer, rank, to_end)
            to, read = _region(buffer, own, shared), _region(place.buffer, need.rectangle, shared, place)
            left[lane] = build.task(Kind.COPY, lane, to, [(read, Factor.ONE, Op.N)], made.awaited_on(lane))

    def _reached(self, rank: int, at: Location) -> tuple[int, int]:
        """Return who copies between a rank's device and a memory, and the lane's end there."""
        if at.space == "device":
            return rank, location_index(at, self._setting.num_ranks)
        return rank if at.rank is None else at.rank, self._build.host


def _grouped(jobs: Sequence[_Job], sizes: Sequence[int], limit: int) -> list[list[_Job]]:
    """Return runs of jobs of so many bytes at most, or of one each."""
    groups, filled = [list[_Job]()], 0
    for job, size in zip(jobs, sizes, strict=True):
        if groups[-1] and filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(job)
        filled += size
    return groups


def _panels(needs: Sequence[_Need]) -> Iterator[tuple[_Kind, tuple[int, int]]]:
    """Yield of what kind, and how large, the panels are that are needed."""
    for matrix, need in zip(MATRICES, needs, strict=True):
        rows, cols = need.shape
        if need.in_place is None and not need.again and rows and cols:
            yield (matrix, rows.bit_length()), (rows, cols)


def _widths(groups: Iterable[Iterable[_Job]]) -> dict[_Kind, int]:
    """Return how many columns of panels of each kind groups take at most."""
    most: dict[_Kind, int] = {}
    for group in groups:
        its: dict[_Kind, int] = {}
        for _, needs in group:
            for kind, (_, cols) in _panels(needs):
                its[kind] = its.get(kind, 0) + cols
        most.update((kind, max(cols, most.get(kind, 0))) for kind, cols in its.items())
    return most


def _region(buffer: int, own: Rectangle, wanted: Rectangle, at: RegionRef | None = None) -> RegionRef:
    """Return where a buffer has a rectangle of a matrix, of which it has a larger one from a place on."""
    (top, bottom), (left, right) = wanted
    row, col = (0, 0) if at is None else (at.row, at.col)
    return RegionRef(buffer, row + top - own[0][0], col + left - own[1][0], bottom - top, right - left)


def _size(extent: Extent) -> int:
    return extent[1] - extent[0]
