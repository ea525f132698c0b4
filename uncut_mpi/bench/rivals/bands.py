"""
Choi's schedule: bands of A and B between devices, a tile of C from each pair of them.

From Y. R. Choi, V. Nikolskiy and V. Stegailov, *Tuning of a matrix-matrix multiplication algorithm for several GPUs
connected by fast communication links* (PCT 2022), section 4, and Y. R. Choi and V. Stegailov, *Multi-GPU GEMM algorithm
performance analysis for Nvidia and AMD GPUs connected by NVLink and PCIe* (2022), section 6.

* A band is T rows of op(A), or T columns of op(B), over all of k. T is the papers' threshold (`choi`).
  Bands go between GPUs only. Where A is stored transposed, a band of it is "one long data line".
* A device has room for two bands of A and two of B, so that one comes while the other is in use. The papers leave open
  which ones: here a device keeps its band of B while bands of A pass by, as equation 7 has it.
* Results go to C's owner, which adds them to βC, those of each device on a lane of their own. On one lane, where each
  comes behind a product, they would keep the other devices waiting.
* What whole bands leave over, A's and B's owners compute: rows of A that of B, columns of B that of A.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from uncut_mpi.bench.rivals.choi import BandModel
from uncut_mpi.errors import PlanError
from uncut_mpi.model.arguments import counted
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import MATRICES, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.buffers import Buffers
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.grid import block_starts
from uncut_mpi.planning.limits import MAX_TASKS, coarse_enough
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.others import Scheduler
from uncut_mpi.planning.schedule import Factor, Kind, Matrix, Op, Role, Schedule
from uncut_mpi.planning.setting import Setting

MAX_TILES_OF_BANDS: Final = 65_536
"""Most tiles of C, whose tasks are made one by one here and not in the core."""

MIN_TILE: Final = 128
"""Smallest edge that is chosen: the model knows of no cost of issuing."""

SLOTS: Final = 2
"""Bands of one matrix that a device has room for, and results under way."""

_USER: Final = {Matrix.A: 0, Matrix.B: 1, Matrix.C: 2}


def schedule(setting: Setting, *, most_tasks: int = MAX_TASKS) -> tuple[Schedule, ScheduleOptions]:
    """
    Return Choi's schedule for a problem that has a product, and the options with the edge chosen.

    Pure and deterministic.

    Parameters
    ----------
    setting : Setting
        A, B and C in device memory; `devices` and `tile` are taken from its options.
    most_tasks : int, optional
        As for other schedulers; there are never more than `MAX_TILES_OF_BANDS` tiles, which are far fewer.

    Raises
    ------
    ParamError
        If devices do not fit the ranks.
    PlanError
        If a matrix is in host memory, there is no product, or there are more than `MAX_TILES_OF_BANDS` tiles.
    CapacityError
        If a rank has too little device memory for its bands.
    """
    problem, placement, machine, options = setting.problem, setting.placement, setting.machine, setting.options
    if not problem.has_product:
        raise PlanError("bands schedules products; C is only scaled here")
    placement.whole()  # else refused
    if placement.in_host():
        raise PlanError(
            f"bands are sent between devices only, but A, B and C are at {placement}: place all three on devices, or "
            "take another scheduler"
        )
    devices = options.computing_ranks(setting.num_ranks)
    largest = max(1, problem.m, problem.n)
    tile = min(options.tile or choose_tile(problem, placement, machine, devices), largest)

    def tiles(edge: int) -> int:
        return -(-problem.m // edge) * -(-problem.n // edge)

    most = MAX_TILES_OF_BANDS
    if not options.tile:
        tile = coarse_enough(tile, largest, tiles, most=most, few=most)
    if tiles(tile) > most:
        shape = "×".join(map(str, problem.callers_shape[:2]))
        raise PlanError(f"bands of {tile} make more than {most} tiles of {shape}: ask for a larger tile")
    made = _Bands(setting, devices, tile).build()
    return made, dataclasses.replace(options, tile=tile)


def choose_tile(problem: GemmProblem, placement: Placement, machine: Machine, devices: tuple[int, ...]) -> int:
    """
    Return the edge that the papers' conditions ask for (`BandModel.tile_edge`), at least `MIN_TILE`.

    N of the square matrices is k, the length of a band. The rates are the slowest of the devices and of their links
    from the owners of A and B. No edge leaves a device without a tile: the largest is max(m, n) over the devices.
    """
    links = [
        float(machine.bandwidth_gb_per_s[owner, device])
        for owner in (placement.device_of(Matrix.A), placement.device_of(Matrix.B))
        for device in devices
        if device != owner
    ]
    own = [float(machine.bandwidth_gb_per_s[device, device]) for device in devices]
    model = BandModel(
        n=problem.k,
        num_devices=max(2, len(devices)),  # one alone has to get its bands in time as well
        math_gflop_per_s=float(machine.typical_gemm_rate(problem.arithmetic)[list(devices)].min()) / 1e9,
        memory_gb_per_s=2 * min(own),  # a copy within a device reads and writes every byte
        transfer_gb_per_s=min(links, default=min(own)),
        dtype=problem.arithmetic,
    )
    most = -(-max(problem.m, problem.n) // len(devices))
    return max(min(MIN_TILE, problem.m, problem.n), min(model.tile_edge(), most))


@dataclasses.dataclass(slots=True)
class _BandSlot:
    """Room for one band, result or tile of C on a device, and the last tasks that wrote and used it."""

    buffer: int
    holds: int = -1  # number of the band
    writer: list[int] = dataclasses.field(default_factory=list)
    user: list[int] = dataclasses.field(default_factory=list)


class _Slots:
    """A few slots, the least recently taken of which is next."""

    def __init__(self, buffers: list[int]) -> None:
        self._slots = [_BandSlot(buffer) for buffer in buffers]

    def find(self, number: int) -> _BandSlot | None:
        """Return the slot that holds a band."""
        for at, slot in enumerate(self._slots):
            if slot.holds == number:
                self._slots.append(self._slots.pop(at))
                return slot
        return None

    def take(self) -> _BandSlot:
        """Return the slot that was not taken for longest."""
        slot = self._slots.pop(0)
        self._slots.append(slot)
        return slot


class _Bands:
    """One run of the scheduler."""

    def __init__(self, setting: Setting, devices: tuple[int, ...], tile: int) -> None:
        problem, placement, machine = setting.problem, setting.placement, setting.machine
        self._setting, self._problem, self._devices = setting, problem, devices
        self._tile = tile
        self._build = ScheduleBuilder(machine.ranks, problem, placement, serial_copies=machine.serial_copies)
        self._buffers = Buffers(machine.ranks, problem, placement)
        self._rows = [range(start, min(start + tile, problem.m)) for start in range(0, problem.m, tile)]
        self._cols = [range(start, min(start + tile, problem.n)) for start in range(0, problem.n, tile)]
        owners = {matrix: placement.device_of(matrix) for matrix in MATRICES}
        assert None not in owners.values()  # all are on devices
        self._owner = {matrix: int(owner or 0) for matrix, owner in owners.items()}
        self._bands: dict[tuple[int, Matrix], _Slots] = {}
        self._results: dict[int, _Slots] = {}
        self._staged: dict[int, _Slots] = {}

    def build(self) -> Schedule:
        runs = self._deal()
        for device, run in runs.items():
            if run:
                self._make_room(device)
        self._setting.check_capacity(self._buffers.arena_bytes)
        for step in range(max(len(run) for run in runs.values())):
            for device, run in runs.items():
                if step < len(run):
                    self._compute(device, *run[step])
        return self._build.build(
            scheduler="bands", grid=(1, len(self._devices)), tile=self._tile, buffers=self._buffers.table()
        )

    def _deal(self) -> dict[int, list[tuple[int, int]]]:
        """Return the tiles (row, column) of each device, in the order of its work."""
        whole_rows, whole_cols = self._problem.m // self._tile, self._problem.n // self._tile
        tiles: list[tuple[int, int]] = []
        for col in range(whole_cols):
            rows = range(whole_rows)
            tiles += [(row, col) for row in (rows if col % 2 == 0 else reversed(rows))]
        left: dict[int, list[tuple[int, int]]] = {self._owner[Matrix.A]: [], self._owner[Matrix.B]: []}
        all_rows, all_cols = range(len(self._rows)), range(len(self._cols))
        left[self._owner[Matrix.B]] += [(row, col) for row in all_rows[whole_rows:] for col in all_cols]
        left[self._owner[Matrix.A]] += [(row, col) for col in all_cols[whole_cols:] for row in all_rows[:whole_rows]]
        for owner, of_owner in left.items():
            if owner not in self._devices:  # it computes nothing
                tiles += of_owner
        starts = block_starts(len(tiles), len(self._devices))
        runs = {device: tiles[starts[at] : starts[at + 1]] for at, device in enumerate(self._devices)}
        for owner, of_owner in left.items():
            if owner in runs:
                runs[owner] = runs[owner] + of_owner
        return runs

    def _make_room(self, device: int) -> None:
        problem, tile = self._problem, self._tile
        wide = problem.accumulator
        height, width = min(tile, problem.m), min(tile, problem.n)
        for matrix, shape, turned in (
            (Matrix.A, (height, problem.k), problem.trans_a != "N"),
            (Matrix.B, (problem.k, width), problem.trans_b != "N"),
        ):
            if self._owner[matrix] != device:
                stored = shape[::-1] if turned else shape
                self._bands[device, matrix] = self._slots(device, stored, problem.dtypes[matrix], matrix)
        at_home = device == self._owner[Matrix.C]
        if not at_home or problem.rounds_c:
            self._results[device] = self._slots(device, (height, width), wide, Matrix.C)
        if not at_home and self._adds:
            self._staged[device] = self._slots(self._owner[Matrix.C], (height, width), wide, Matrix.C)

    def _slots(self, rank: int, shape: tuple[int, int], dtype: DType, matrix: Matrix) -> _Slots:
        return _Slots([self._buffers.add(rank, shape, dtype, matrix, Role.STAGING) for _ in range(SLOTS)])

    @property
    def _adds(self) -> bool:
        """Whether a result has to be added to C, or converted, by its owner."""
        return self._problem.reads_c or self._problem.rounds_c

    def _compute(self, device: int, row: int, col: int) -> None:
        """Emit the tasks of one tile of C."""
        problem, build, home = self._problem, self._build, self._owner[Matrix.C]
        rows, cols = self._rows[row], self._cols[col]
        a, a_slot = self._band(device, Matrix.A, row, rows)
        b, b_slot = self._band(device, Matrix.B, col, cols)
        factors = [
            (a, Factor.ALPHA, Op[problem.trans_a]),
            (b, Factor.ONE, Op[problem.trans_b]),
        ]
        lane = build.compute_lane(device)
        target = RegionRef(_USER[Matrix.C], rows.start, cols.start, len(rows), len(cols))
        fetched = [task for slot in (a_slot, b_slot) if slot is not None for task in slot.writer]
        if device == home and not problem.rounds_c:
            old = [(target, Factor.BETA, Op.N)] if problem.reads_c else []
            product = build.task(Kind.GEMM, lane, target, [*factors, *old], fetched)
            self._used(product, a_slot, b_slot)
            return
        slot = self._results[device].take()
        result = RegionRef(slot.buffer, 0, 0, len(rows), len(cols))
        product = build.task(Kind.GEMM, lane, result, factors, [*fetched, *slot.user])
        self._used(product, a_slot, b_slot)
        if device == home:
            slot.user = [self._add(device, target, result, product)]
            return
        copies = build.result_lane(device, device, home)
        if not self._adds:
            slot.user = [build.task(Kind.COPY, copies, target, [(result, Factor.ONE, Op.N)], [product])]
            return
        staged = self._staged[device].take()
        there = RegionRef(staged.buffer, 0, 0, len(rows), len(cols))
        copied = build.task(Kind.COPY, copies, there, [(result, Factor.ONE, Op.N)], [product, *staged.user])
        slot.user, staged.user = [copied], [self._add(device, target, there, copied)]

    def _band(self, device: int, matrix: Matrix, number: int, extent: range) -> tuple[RegionRef, _BandSlot | None]:
        """Return where a device reads a band, fetched if it is not there, and the slot it is in."""
        problem, owner = self._problem, self._owner[matrix]
        rows, cols = (len(extent), problem.k) if matrix == Matrix.A else (problem.k, len(extent))
        row, col = (extent.start, 0) if matrix == Matrix.A else (0, extent.start)
        if (problem.trans_a if matrix == Matrix.A else problem.trans_b) != "N":
            rows, cols, row, col = cols, rows, col, row
        origin = RegionRef(_USER[matrix], row, col, rows, cols)
        if owner == device:
            return origin, None
        slots = self._bands[device, matrix]
        slot = slots.find(number)
        if slot is None:
            slot = slots.take()
            slot.holds = number
            lane, here = self._build.copy_lane(owner, owner, device), RegionRef(slot.buffer, 0, 0, rows, cols)
            slot.writer = [self._build.task(Kind.COPY, lane, here, [(origin, Factor.ONE, Op.N)], slot.user)]
        return RegionRef(slot.buffer, 0, 0, rows, cols), slot

    def _add(self, device: int, target: RegionRef, result: RegionRef, awaited: int) -> int:
        """Emit the sum of a device's result and C on C's owner."""
        old = [(target, Factor.BETA, Op.N)] if self._problem.reads_c else []
        lane = self._build.compute_lane(self._owner[Matrix.C], 1 + self._devices.index(device))
        return self._build.task(Kind.COMBINE, lane, target, [(result, Factor.ONE, Op.N), *old], [awaited])

    @staticmethod
    def _used(product: int, *slots: _BandSlot | None) -> None:
        for slot in slots:
            if slot is not None:
                slot.user = [product]


def describe(schedule: Schedule, options: ScheduleOptions) -> str:
    """Return how such a schedule divides its problem, in words."""
    return f"bands of {schedule.tile} on {counted(max(schedule.grid), 'device')}"


SCHEDULER: Final = Scheduler(schedule, ("tile", "devices"), describe)
