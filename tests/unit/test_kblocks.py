"""The scheduler of few large products: its schedules, and their proof on 1 to 64 ranks."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from tests.helpers.blocking import k_blocks
from tests.helpers.shapes import slow_where_misaligned, with_shapes
from uncut_mpi import _native
from uncut_mpi.errors import CapacityError, ParamError
from uncut_mpi.model.costs import GemmShape, IssueCosts, RowRates
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout, LocalArray
from uncut_mpi.model.locations import ANY_DEVICE, Location, host_index
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.blocking import count_blocks
from uncut_mpi.planning.description import describe
from uncut_mpi.planning.kblocks import Planner
from uncut_mpi.planning.kblocks_defaults import choose
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import BLOCK_ORDERS, DELIVERIES, Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import MAX_SUMMANDS, Kind, LaneKind, Matrix, Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.planning.verify import verify

CHANGES = {
    "splits": 2,
    "first": 512,
    "block": 1024,
    "growth": 3,
    "columns": 3,
    "rows": 3,
    "order": "columns",
    "lanes": 1,
    "delivery": "earliest",
    "begin": "first",
    "combine": "worker",
    "away": 2,
    "tail": 2,
    "slots": 2,
    "c_rows": 1024,
    "c_cols": 1024,
    "c_slots": 2,
    "b_slots": 2,
    "sweep": "again",
    "barrier": "node",
}


def unaligned_products(schedule: Schedule) -> int:
    """
    Return how many products have columns that begin at no multiple of 16 bytes, or a k along columns that is none.

    Except those of less than 16 bytes of k, which others leave.
    """
    found = 0
    for task in schedule.tasks[schedule.tasks["kind"] == Kind.GEMM]:
        wrong, along_k = False, 0
        for which, operand in enumerate(schedule.operands[task["first_operand"] :][:3]):
            region = schedule.regions[operand["region"]]
            buffer = schedule.buffers[region["buffer"]]
            item, ld = DType(int(buffer["dtype"])).itemsize, int(buffer["ld"])
            wrong |= bool((int(region["row"]) + int(region["col"]) * ld) * item % 16 or ld * item % 16)
            if which == (1 if operand["op"] else 2):
                along_k = int(region["rows"]) * item
        found += wrong or (along_k > 16 and along_k % 16 > 0)
    return found


class TestAlignment:
    PROBLEM = GemmProblem(513, 405, 611, DType.f16)

    def made(self, problem: GemmProblem, where: str, machine: Machine, grid: tuple[int, int]) -> Schedule:
        chosen = ScheduleOptions(scheduler="kblocks", blocking=Blocking(first=64, block=128), grid=grid)
        schedule = plan(problem, Placement.parse(where), machine.num_ranks, machine, chosen).schedule
        verify(schedule, lower(schedule))
        return schedule

    @pytest.mark.parametrize("serial", [True, False])
    @pytest.mark.parametrize("where", ["0,0,0", "0,1,2", "3,0,h", "h,2,2"])
    @pytest.mark.parametrize(("trans_a", "trans_b"), ["NN", "TN", "NT", "TT"])
    def test_who_holds_a_or_b_copies_it_and_sends_as_before(self, where, serial, trans_a, trans_b):
        # Nobody adds rows where A is transposed.
        m = 513 if trans_a == "N" else 512
        problem = dataclasses.replace(self.PROBLEM, m=m, trans_a=trans_a, trans_b=trans_b, lda=0, ldb=0, ldc=0)
        machine = dataclasses.replace(Machine.uniform(4), serial_copies=serial)
        before = self.made(problem, where, machine, grid=(2, 2))
        after = self.made(problem, where, slow_where_misaligned(machine), grid=(2, 2))
        assert unaligned_products(before) > 0
        assert unaligned_products(after) == 0
        sent = []
        for schedule in (before, after):
            copies = schedule.copies()
            of_inputs = np.isin(copies[:, 0], np.flatnonzero(self.reads_a_or_b(schedule)))
            apart = copies[:, 1] != copies[:, 2]
            sent.append(sorted(map(tuple, copies[of_inputs & apart][:, 1:].tolist())))
        assert sent[0] == sent[1]

    @staticmethod
    def reads_a_or_b(schedule: Schedule) -> np.ndarray:
        """Whether each task writes a panel of A or B."""
        regions = schedule.operands["region"][schedule.tasks["first_operand"]]
        matrices = schedule.buffers["matrix"][schedule.regions["buffer"][regions]]
        return np.isin(matrices, [Matrix.A, Matrix.B])

    def test_nothing_is_copied_that_is_aligned_or_hardly_slower(self):
        machine = Machine.uniform(2)
        even = GemmProblem(512, 405, 608, DType.f16)
        places = "0,0,0"
        assert (
            self.made(even, places, slow_where_misaligned(machine), grid=(1, 2)).digest()
            == self.made(even, places, machine, grid=(1, 2)).digest()
        )
        hardly = slow_where_misaligned(machine, 1e-6)
        assert unaligned_products(self.made(self.PROBLEM, places, hardly, grid=(1, 2))) > 0

    def test_a_half_type_is_not_written_where_columns_of_c_are_not_aligned(self):
        problem = GemmProblem(512, 405, 608, DType.f16)
        counts = []
        for ldc in (512, 513):
            schedule = self.made(
                dataclasses.replace(problem, ldc=ldc), "0,0,0", slow_where_misaligned(Machine.uniform(1)), grid=(1, 1)
            )
            written = schedule.operands["region"][schedule.tasks["first_operand"][schedule.tasks["kind"] == Kind.GEMM]]
            counts.append(int((schedule.regions["buffer"][written] == 2).sum()))
        assert counts == [1, 0]


def test_row_blocks_begin_at_multiples_too() -> None:
    schedule = cube(8192, "0,0,0", first=4096, block=4096, columns=1, rows=3, order="corner")
    written = schedule.operands[schedule.tasks["first_operand"][schedule.tasks["kind"] == Kind.GEMM]]["region"]
    assert all(row % 256 == 0 for row in schedule.regions[written]["row"])


# -- schedules -------------------------------------------------------------------------------------


def cube(n: int, place: str, ranks: int = 4, **options: object) -> Schedule:
    """Return the schedule of a cube; in the place "rows" each rank has as many rows of A, B and C."""
    blocking = Blocking(**{"first": 256, "block": 2048, "columns": 4, "order": "k", "combine": "owner", **options})
    asked = ScheduleOptions(scheduler="kblocks", blocking=blocking)
    problem = GemmProblem(n, n, n, DType.f64)
    rows = Layout.rows().bind((n, n), [LocalArray(Location.device(rank)) for rank in range(ranks)])
    placement = Placement(rows, rows, rows) if place == "rows" else Placement.parse(place)
    return plan(problem, placement, ranks, Machine.uniform(ranks), asked).schedule


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_the_schedule(name: str) -> None:
    assert {*CHANGES} == {field.name for field in dataclasses.fields(Blocking)}
    others = {"rows": {"order": "corner"}}.get(name, {})
    if name in ("slots", "b_slots", "c_rows", "c_cols", "c_slots", "sweep", "barrier"):  # of blocks in turn
        others = {"combine": "worker", "slots": 3, "c_rows": 2048, "c_cols": 2048, "c_slots": 1}
    place = "rows" if name == "begin" else "h,h,h" if "slots" in others else "0,0,0"
    changes = {**others, name: CHANGES[name]}
    assert cube(8192, place, **changes).digest() != cube(8192, place, **others).digest()


def test_row_blocks_of_another_order_are_refused() -> None:
    with pytest.raises(ParamError, match=r"3 row blocks .* are for the order 'corner', not for 'k'"):
        Blocking(rows=3, order="k")


@pytest.mark.parametrize("order", BLOCK_ORDERS)
def test_what_is_handed_on_comes_from_those_who_send_least(order: str) -> None:
    machine = dataclasses.replace(Machine.uniform(4), serial_copies=True)
    blocking = Blocking(first=256, block=1024, columns=2, order=order, combine="worker")
    options = ScheduleOptions(scheduler="kblocks", blocking=blocking)
    copies = plan(
        GemmProblem(4096, 4096, 4096, DType.f64), Placement.parse("0,1,2"), 4, machine, options
    ).schedule.copies()
    sent = [int(copies[(copies[:, 1] == rank) & (copies[:, 2] != rank), 3].sum()) for rank in range(4)]
    matrix = 4096**2 * 8
    # The owners of A and B send theirs once and a quarter of C; the owner of C three quarters of it, and half of B;
    # the fourth rank a quarter of C, and half of A.
    assert sent == [matrix * 5 // 4, matrix * 5 // 4, matrix * 5 // 4, matrix * 3 // 4]


def delivered(delivery: str, *, serial: bool = True) -> tuple[Schedule, Machine]:
    """Return a schedule by which three ranks get all of their columns of B, each some rows of A; and the machine."""
    machine = dataclasses.replace(load_machine("h200-4x"), serial_copies=serial)
    blocking = Blocking(first=1024, block=1024, columns=1, order="k", combine="owner", delivery=delivery)
    options = ScheduleOptions(
        scheduler="kblocks", devices=(0, 3, 2, 1), areas=((0.35,), (0.24, 0.22, 0.19)), blocking=blocking
    )
    return plan(
        GemmProblem(4096, 4096, 4096, DType.f64), Placement.parse("0,0,0"), 4, machine, options
    ).schedule, machine


def shared_at_receivers_s(schedule: Schedule, machine: Machine) -> float:
    """Return for how long copies of A and B are on their way to a device while another of them is."""
    times = simulate(schedule, machine)
    copies = schedule.copies()
    inputs = copies[np.isin(copies[:, 0], np.flatnonzero(TestAlignment.reads_a_or_b(schedule)))]
    shared = 0.0
    for rank in range(schedule.num_ranks):
        of_rank = sorted((times.start_s[task], times.end_s[task]) for task in inputs[inputs[:, 2] == rank, 0])
        shared += sum(max(0.0, one[1] - other[0]) for one, other in itertools.pairwise(of_rank))
    return shared


def test_by_list_scheduling_no_receiver_has_two_copies_at_a_time() -> None:
    shared = {delivery: shared_at_receivers_s(*delivered(delivery)) for delivery in DELIVERIES}
    assert shared["earliest"] == 0 < shared["balanced"]


def test_list_scheduling_is_faster_where_few_large_pieces_meet() -> None:
    machine = dataclasses.replace(Machine.uniform(4), serial_copies=True)
    problem, seconds = GemmProblem(4096, 4096, 4096, DType.f64), {}
    for delivery in DELIVERIES:
        blocking = Blocking(first=2048, block=2048, columns=2, order="k", combine="owner", delivery=delivery)
        options = ScheduleOptions(scheduler="kblocks", grid=(2, 2), blocking=blocking)
        made = plan(problem, Placement.parse("0,1,0"), 4, machine, options).schedule
        seconds[delivery] = simulate(made, machine).seconds
    assert seconds["earliest"] < 0.9 * seconds["balanced"]


@pytest.mark.parametrize("serial", [True, False])
def test_by_list_scheduling_whole_pieces_leave_their_origin_once_and_who_has_one_hands_it_on(serial: bool) -> None:
    copies = delivered("earliest", serial=serial)[0].copies()
    sent = [copies[(copies[:, 1] == rank) & (copies[:, 2] != rank) & (copies[:, 2] != 0), 3] for rank in range(4)]
    handed_on = np.concatenate(sent[1:])
    piece = int(handed_on[0])  # of B
    assert (handed_on == piece).all()
    assert handed_on.size == 2 * 4
    assert sent[0].sum() == 4096**2 * 8 + 4 * piece  # A, and each piece of B
    assert sum(one.size > 0 for one in sent[1:]) == 2


def test_delivery_is_of_no_effect_where_a_and_b_are_in_host_memory() -> None:
    areas = ((0.25,), (0.25, 0.25), (0.25,))
    digests = set()
    for delivery in DELIVERIES:
        options = ScheduleOptions(scheduler="kblocks", areas=areas, blocking=Blocking(delivery=delivery))
        planned = plan(
            GemmProblem(1024, 1024, 1024, DType.f64), Placement.parse("h,h,0"), 4, Machine.uniform(4), options
        )
        digests.add(planned.schedule.digest())
        assert "delivery" not in describe(planned.schedule, planned.options)
    assert len(digests) == 1


@pytest.mark.parametrize("place", ["0,1,2", "0,0,0", "h,h,1", "1,2,h"])
def test_from_the_corner_half_types_are_formed_directly(place: str) -> None:
    machine = Machine.uniform(4)
    blocking = Blocking(first=512, block=1024, columns=4, order="corner", combine="worker")
    problem, options = GemmProblem(4096, 4096, 4096, DType.f16), ScheduleOptions(scheduler="kblocks", blocking=blocking)
    schedule = plan(problem, Placement.parse(place), 4, machine, options).schedule
    verify(schedule, lower(schedule))
    for rank in range(4):
        parts = [one for one in products_of(schedule, rank) if one[3] == "f32"]
        # Sums apart of the first block alone, whose width and height are a quarter of the rank's.
        assert {one[:2] for one in parts} <= {(512, 512), (1024, 256), (256, 1024)}
        assert all(one[2] == 4096 for one in products_of(schedule, rank) if one[3] == "f16")
    sums = schedule.tasks[schedule.tasks["kind"] == Kind.COMBINE]
    assert len(sums) <= 4
    at_once = dataclasses.replace(blocking, first=4096, block=4096)
    schedule = plan(
        problem, Placement.parse(place), 4, machine, dataclasses.replace(options, blocking=at_once)
    ).schedule
    verify(schedule, lower(schedule))
    assert not (schedule.tasks["kind"] == Kind.COMBINE).any()


def test_two_products_may_have_begun_and_each_awaits_what_it_needs() -> None:
    machine = Machine.uniform(4)
    problem = GemmProblem(4096, 4096, 4096, DType.f64)

    def made(lanes: int, order: str) -> Schedule:
        blocking = Blocking(first=1024, block=4096, columns=4, order=order, combine="worker", lanes=lanes)
        options = ScheduleOptions(scheduler="kblocks", blocking=blocking)
        schedule = plan(problem, Placement.parse("0,1,2"), 4, machine, options).schedule
        verify(schedule, lower(schedule))
        return schedule

    for order in BLOCK_ORDERS:
        one, two = made(1, order), made(2, order)
        assert [products_of(one, rank) for rank in range(4)] == [products_of(two, rank) for rank in range(4)]
        for rank in range(4):
            products = two.tasks[(two.tasks["kind"] == Kind.GEMM) & (two.tasks["rank"] == rank)]
            numbers = two.lanes["destination"][products["lane"]].tolist()
            assert set(numbers) == {0, 3}
            # Parts of k of the same block are added one after the other; then blocks take turns.
            parts = [shape[:3] for shape in products_of(two, rank)]
            for (before, after), lanes in zip(itertools.pairwise(parts), itertools.pairwise(numbers), strict=True):
                assert lanes[0] != lanes[1] or before[:2] == after[:2]
            last = numbers[-4:]
            assert last in ([0, 3, 0, 3], [3, 0, 3, 0])


def test_a_half_type_without_c_is_sent_to_its_owner_as_it_is() -> None:
    problem = GemmProblem(1024, 1024, 512, DType.f16, reads_c=False)
    options = ScheduleOptions(scheduler="kblocks", blocking=Blocking(first=512, block=512, columns=2))
    schedule = plan(problem, Placement.parse("0,0,0"), 2, Machine.uniform(2), options).schedule
    verify(schedule, lower(schedule))
    assert not (schedule.tasks["kind"] == Kind.COMBINE).any()
    copies = schedule.copies()
    assert copies[copies[:, 2] == 0, 3].sum() == 1024 * 512 * 2


def test_every_byte_leaves_the_owner_once() -> None:
    copies = cube(8192, "0,0,0").copies()
    matrix = 8192**2 * 8
    out = copies[copies[:, 1] == 0]
    # On a 2x2 grid rank 0 keeps its own halves for itself, and passes them on to one other.
    assert out[:, 3].sum() == 2 * matrix
    # Results only travel, C does not.
    assert copies[copies[:, 2] == 0, 3].sum() == 3 * matrix // 4


@pytest.mark.parametrize("place", ["0,0,0", "0,1,2", "h,h,3"])
@pytest.mark.parametrize("away", [1, 3])
def test_of_the_last_column_blocks_the_owner_forms_none(place: str, away: int) -> None:
    schedule = cube(4096, place, away=away)
    owner = schedule.placement.c.rank
    starts = _native.block_edges(2048, 4, 2)
    first_at_worker = starts[len(starts) - 1 - away]
    sums = schedule.tasks[schedule.tasks["kind"] == Kind.COMBINE]
    written = [schedule.regions[schedule.operands[task["first_operand"]]["region"]] for task in sums]
    at_owner = [int(one["col"]) % 2048 for task, one in zip(sums, written, strict=True) if task["rank"] == owner]
    # Of three blocks of C the owner forms the first column blocks, each rank the last ones of its own.
    assert sorted(at_owner) == sorted(3 * [start for start in starts[:-1] if start < first_at_worker])
    others = sums["rank"][sums["rank"] != owner].tolist()
    assert sorted(others) == sorted(away * [rank for rank in range(4) if rank != owner])
    # C leaves the owner for them alone.
    copies = schedule.copies()
    of_c = [
        (int(destination), int(size))
        for task, source, destination, size in copies
        if source == owner
        and schedule.regions[schedule.operands[schedule.tasks["first_operand"][task] + 1]["region"]]["buffer"]
        == Matrix.C
    ]
    assert sum(size for _, size in of_c) == 3 * 2048 * (2048 - first_at_worker) * 8
    assert {destination for destination, _ in of_c} == set(others)


def test_when_all_column_blocks_are_away_c_is_combined_where_it_is_computed() -> None:
    every = count_blocks(4)
    assert cube(4096, "0,1,2", away=every).digest() == cube(4096, "0,1,2", combine="worker").digest()
    assert cube(4096, "h,h,h", away=2).digest() == cube(4096, "h,h,h").digest()
    with pytest.raises(ParamError, match=r"combine = 'worker' .* all are: leave one of the two out"):
        Blocking(combine="worker", away=1)


def test_a_device_that_copies_in_turn_has_one_lane_for_fetches_and_one_for_results_to_devices() -> None:
    machine = dataclasses.replace(Machine.uniform(4), serial_copies=True)
    problem = GemmProblem(4096, 4096, 4096, DType.f64)
    options = ScheduleOptions(scheduler="kblocks", grid=(2, 2), blocking=Blocking(first=512))
    schedule = plan(problem, Placement.parse("0,0,0"), 4, machine, options).schedule
    lanes = schedule.lanes[schedule.lanes["kind"] != LaneKind.COMPUTE]
    assert set(lanes["destination"].tolist()) == {ANY_DEVICE}
    kinds = sorted((int(lane["rank"]), int(lane["kind"])) for lane in lanes)
    assert kinds == [(0, 1), (1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]  # nothing is fetched over rank 3
    # Its copies are few and whole: each piece goes to one rank, which hands it on.
    from_owner = schedule.copies()[schedule.copies()[:, 1] == 0]
    assert from_owner[:, 3].sum() == 2 * 8 * 4096**2
    pieces = sum(1 for start, _ in k_blocks(4096, 512, 2048)) * 4
    assert len(from_owner) == pieces
    # First what is handed on to rank 3, so that all ranks have theirs of a stretch of k at one time. Ranks 1 and 2,
    # which alone need the rest, get it from rank 0, so that nothing handed on meets a copy of rank 0 at a port.
    onward = [set(schedule.awaited(task).tolist()) for task, source, _, _ in schedule.copies() if source in (1, 2)]
    handed_on = {task for awaited in onward for task in awaited}
    order = [(int(task) in handed_on, int(destination)) for task, _, destination, _ in from_owner]
    assert all(sorted(order[at : at + 4]) == sorted(order[:4]) for at in range(0, len(order), 4))
    assert [shared for shared, _ in order] == [True, True, False, False] * (len(order) // 4)
    assert {destination for _, destination in order[:2]} == {destination for _, destination in order[2:4]} == {1, 2}
    # From the host each of the ranks fetches a part.
    schedule = plan(problem, Placement.parse("h,h,h"), 4, machine, options).schedule
    ends = {(int(lane["source"]), int(lane["destination"])) for lane in schedule.lanes if lane["kind"] != 0}
    host = host_index(4)
    assert ends == {pair for rank in range(4) for pair in ((host, rank), (rank, host), (rank, ANY_DEVICE))}


@pytest.mark.parametrize(("grid", "splits"), [((4, 1), 1), ((2, 2), 1), ((2, 1), 2)])
def test_where_copies_are_served_in_turn_the_first_one_begins_before_the_product_at_home(grid, splits) -> None:
    machine = dataclasses.replace(Machine.uniform(4), serial_copies=True)
    options = ScheduleOptions(scheduler="kblocks", grid=grid, blocking=Blocking(first=512, splits=splits))
    schedule = plan(GemmProblem(4096, 4096, 4096, DType.f64), Placement.parse("0,0,0"), 4, machine, options).schedule
    mine = schedule.tasks["kind"][schedule.tasks["rank"] == 0].tolist()
    assert mine[0] == Kind.COPY
    assert mine.index(Kind.GEMM) <= 2  # a piece that is handed on is a copy of another rank
    # Of a stretch of k all that is handed on comes first, whichever split it is for.
    from_owner = schedule.copies()[schedule.copies()[:, 1] == 0][:, 0].tolist()
    awaited = {task for other in range(len(schedule.tasks)) for task in schedule.awaited(other).tolist()
               if schedule.tasks["kind"][other] == Kind.COPY and schedule.tasks["rank"][other] != 0}  # fmt: skip
    per_stretch = len(from_owner) // sum(1 for _ in k_blocks(4096 // splits, 512, 2048))
    shared = [task in awaited for task in from_owner[:per_stretch]]
    assert shared == sorted(shared, reverse=True)


def test_sums_take_turns_on_two_lanes() -> None:
    schedule = cube(4096, "0,0,0")
    sums = schedule.tasks[schedule.tasks["kind"] == Kind.COMBINE]
    numbers = schedule.lanes["destination"][sums["lane"]]
    assert set(sums["rank"].tolist()) == {0}
    assert numbers.tolist() == [1 + at % 2 for at in range(len(sums))]


def test_every_byte_crosses_the_host_links_once() -> None:
    schedule = cube(8192, "h,h,h", order="columns")
    copies = schedule.copies()
    matrix = 8192**2 * 8
    assert copies[copies[:, 1] == host_index(4), 3].sum() == 3 * matrix
    assert copies[copies[:, 2] == host_index(4), 3].sum() == matrix
    # One grid row: whole columns only.
    assert schedule.grid == (1, 4)
    for task, source, destination, _ in copies.tolist():
        for operand, end in zip(schedule.operands_of(task), (destination, source), strict=True):
            if end == host_index(4):
                region = schedule.regions[operand["region"]]
                assert region["rows"] == schedule.buffers[region["buffer"]]["rows"]


def test_few_products_where_tiles_would_be_many() -> None:
    kinds = cube(16384, "0,0,0").tasks["kind"]
    assert (kinds == Kind.GEMM).sum() == 3 * (9 + 4 + 2) + 1  # rank 0 has all it needs


def products_of(schedule: Schedule, rank: int) -> list[tuple[int, int, int, str]]:
    """Rows, columns, k and the type written of each product of a rank, in the order of issue."""
    found = []
    for task in np.flatnonzero((schedule.tasks["kind"] == Kind.GEMM) & (schedule.tasks["rank"] == rank)):
        c, a = (schedule.regions[operand["region"]] for operand in schedule.operands_of(int(task))[:2])
        written = DType(int(schedule.buffers["dtype"][c["buffer"]])).name
        found.append((int(c["rows"]), int(c["cols"]), int(a["cols"]), written))
    return found


@pytest.mark.parametrize("dtype", ["f64", "f16"])
def test_a_rank_that_has_all_it_needs_multiplies_all_of_k_at_once(dtype: str) -> None:
    def made(place: str, **changes: object) -> Schedule:
        options = ScheduleOptions(scheduler="kblocks", blocking=Blocking(columns=4, **changes))
        problem = GemmProblem(1024, 2048, 4096, DType[dtype])
        return plan(problem, Placement.parse(place), 2, Machine.uniform(2), options).schedule

    schedule = made("0,0,0")
    # A half type is rounded once, since no partial sum is ever written.
    assert products_of(schedule, 0) == [(1024, 1024, 4096, dtype)]
    assert schedule.tasks["rank"][schedule.tasks["kind"] == Kind.GEMM][0] == 0
    first = np.flatnonzero(schedule.tasks["kind"] == Kind.GEMM)[0]
    assert first == 1  # after the fetch that all others wait for
    assert len(products_of(schedule, 1)) > 4
    # Where C is elsewhere results leave column block by column block.
    wide = DType[dtype].accumulator.name
    widths = [256, 256, 256, 128, 64, 64]
    assert products_of(made("0,0,1"), 0) == [(1024, width, 4096, wide) for width in widths]
    # What is added to C itself awaits it, block by block, and a half type is then written; the first block is not.
    added_to = made("0,0,h", order="columns", combine="worker")
    assert products_of(added_to, 0) == [
        (1024, width, 4096, kind) for width, kind in zip(widths, [wide] + 5 * [dtype], strict=True)
    ]


@pytest.mark.parametrize(
    ("k", "changes", "written"),
    [
        (512, {}, "f16"),
        (512, {"columns": 4}, "f16"),
        (512, {"columns": 4, "order": "columns", "combine": "worker"}, "f16"),
        (512, {"first": 256, "block": 256}, "f32"),  # sums of parts would be rounded twice
        (509, {}, "f32"),  # a product of the rest of k is added
        (512, {"splits": 2}, "f32"),
    ],
)
def test_a_half_type_is_written_where_it_is_if_each_product_has_all_of_k(
    k: int, changes: dict[str, object], written: str
) -> None:
    blocking = Blocking(**{"first": 512, "block": 512, **changes})
    options = ScheduleOptions(scheduler="kblocks", blocking=blocking, devices=(0, 1) if blocking.splits > 1 else (1,))
    problem = GemmProblem(8192, 4096, k, DType.f16)
    schedule = plan(problem, Placement.parse("0,0,1"), 2, slow_where_misaligned(Machine.uniform(2)), options).schedule
    verify(schedule, lower(schedule))
    assert {found for *_, found in products_of(schedule, 1)} == {written}
    assert (Kind.COMBINE in schedule.tasks["kind"]) == (written == "f32")


def test_ranks_that_share_k_add_up_slices() -> None:
    problem = GemmProblem(512, 512, 1 << 16, DType.f64)
    schedule = plan(
        problem, Placement.parse("h,h,h"), 4, Machine.uniform(4), ScheduleOptions(scheduler="kblocks")
    ).schedule
    assert (schedule.grid, schedule.splits) == ((1, 1), 4)
    sums = schedule.tasks[schedule.tasks["kind"] == Kind.COMBINE]
    assert set(sums["rank"].tolist()) == {0, 1, 2, 3}
    assert set(sums["num_operands"].tolist()) == {6}  # the result, four partial sums and C


@pytest.mark.parametrize("splits", [MAX_SUMMANDS, 20])
def test_many_partial_sums_are_added_in_turns(splits: int) -> None:
    problem = GemmProblem(64, 64, 4096, DType.f16)
    options = ScheduleOptions(scheduler="kblocks", blocking=Blocking(splits=splits))
    schedule = plan(problem, Placement.parse("3,3,3"), splits, Machine.uniform(splits), options).schedule
    verify(schedule, lower(schedule))
    assert schedule.tasks["num_operands"].max() == 1 + MAX_SUMMANDS


def test_what_does_not_fit_is_refused() -> None:
    machine = Machine.uniform(4, memory_bytes=10**8)
    place, problem = Placement.parse("h,h,h"), GemmProblem(8192, 8192, 8192, DType.f64)
    with pytest.raises(CapacityError, match=r"rank 0 needs [\d.]+ MB of device memory \([\d.]+ MB for its panels"):
        plan(problem, place, 4, machine, ScheduleOptions(scheduler="kblocks", blocking=Blocking(order="columns")))
    with pytest.raises(
        CapacityError, match=r"rank 0 would do with [\d.]+ kB .* let ranks use \d+ bytes \(device_memory\)"
    ):
        plan(problem, place, 4, machine, ScheduleOptions(scheduler="kblocks", device_memory=10**5))
    said = (
        r"rank 2 needs 1.074 GB of device memory \(1.074 GB for the matrices placed there\), and 1.000 GB are "
        "available, 73.74 MB too few"
    )
    alone = ScheduleOptions(scheduler="kblocks", devices=(0,), blocking=Blocking(combine="worker"))
    memory = np.array([10**10, 10**10, 10**9, 10**10])
    unequal = dataclasses.replace(Machine.uniform(4), memory_bytes=memory)
    with pytest.raises(CapacityError, match=said):
        plan(problem, Placement.parse("h,2,2"), 4, unequal, alone)
    for options, words in (
        ({"blocking": Blocking(splits=5)}, "k shall be split 5 times, but 4 ranks compute"),
        ({"devices": (4,)}, "rank 4 shall compute"),
        ({"grid": (2, 3)}, "grid 2x3 has 6 places"),
    ):
        with pytest.raises(ParamError, match=words):
            plan(problem, place, 4, Machine.uniform(4), ScheduleOptions(scheduler="kblocks", **options))


def test_k_blocks_that_are_fixed_keep_the_others_within_them() -> None:
    problem, place = GemmProblem(8192, 8192, 8192, DType.f64), Placement.parse("h,h,h")

    def chosen(**fixed: int) -> tuple[int, int]:
        options = ScheduleOptions(scheduler="kblocks", blocking=Blocking(**fixed))
        how = choose(problem, place, 4, options)
        return how.first, how.block

    assert chosen() == (256, 2048)
    assert chosen(first=3000) == (3000, 3000)
    assert chosen(block=100) == (100, 100)
    with pytest.raises(ParamError, match=r"first k-block shall have 512 .* largest 256 .* no longer"):
        Blocking(first=512, block=256)


@pytest.mark.parametrize(("m", "n"), [(0, 64), (64, 0), (0, 0)])
def test_a_product_without_elements_has_no_tasks(m: int, n: int) -> None:
    options = ScheduleOptions(scheduler="kblocks")
    made = plan(GemmProblem(m, n, 64, DType.f64), Placement.parse("0,1,h"), 2, Machine.uniform(2), options)
    assert len(made.schedule.tasks) == 0


# == what ranks of kblocks do about columns that are not aligned, and when they leave them =========


A = Matrix.A

MISALIGNED = {"f64": 0.21, "f32": 0.02, "tf32": 2.03, "f16": 5.96, "bf16": 6.43}
"""Of calibration_2xh200_2026-11-22_18h.json; what ships may change."""


@pytest.fixture(scope="module")
def machine() -> Machine:
    shipped = load_machine("h200-4x")
    shapes = {
        name: dataclasses.replace(shape, misaligned=MISALIGNED[name]) for name, shape in shipped.gemm_shape.items()
    }
    return dataclasses.replace(shipped, gemm_shape=shapes)


AS_IT_IS = (False, False, False, 1)
"""Nothing is copied or summed apart, and products have any k."""


def chosen(machine: Machine, problem: GemmProblem, place: str, **how: object) -> tuple[bool, bool, bool, int]:
    """Return what rank 0 does for its products if it computes all of C: copies A and B, sums apart, and its k step."""
    blocking = Blocking(**{"first": 256, "block": 2048, "growth": 2, "columns": 4, "rows": 1, "order": "k", **how})
    options = ScheduleOptions(scheduler="kblocks", devices=(0,), blocking=blocking)
    return Planner(Setting.of(problem, Placement.parse(place), 4, machine)).prepare(options).request.aligned[0]


@pytest.mark.parametrize(
    ("problem", "place", "wanted"),
    [
        (GemmProblem(8191, 8191, 8191, DType.f16), "0,0,0", (True, True, True, 8)),
        (GemmProblem(8191, 8191, 8191, DType.f16), "0,1,1", (True, False, False, 8)),
        (GemmProblem(8191, 8191, 8191, DType.f16), "1,1,1", (False, False, False, 8)),
        (GemmProblem(8192, 8191, 8191, DType.tf32, lda=8193), "0,1,0", (True, False, False, 4)),
        (GemmProblem(8191, 8192, 8192, DType.f64), "1,1,0", (False, False, True, 2)),
        (GemmProblem(8191, 8192, 8192, DType.f16, lda=8192), "0,1,1", (True, False, False, 8)),
        # k runs along no column; n along those of B, at the end of one column block alone.
        (GemmProblem(8192, 8191, 8191, DType.f16, trans_b="T"), "0,0,1", (False, True, False, 1)),
        # Aligned, or so small that what has to be done takes longer.
        (GemmProblem(8192, 8191, 8192, DType.f16), "0,0,0", AS_IT_IS),
        (GemmProblem(1001, 1001, 1001, DType.f16), "0,0,0", AS_IT_IS),
        (GemmProblem(2001, 2001, 2001, DType.f64), "0,0,0", AS_IT_IS),
        # Nobody adds rows to a transposed A, so that all the rest would be in vain.
        (GemmProblem(8191, 8192, 8192, DType.f16, trans_a="T"), "0,0,0", AS_IT_IS),
        (GemmProblem(100, 100, 8191, DType.f16, trans_a="T"), "0,0,0", AS_IT_IS),
        # A C that cannot be summed apart leaves the rest as it is.
        (GemmProblem(8191, 8191, 8191, DType.f64, reads_c=False), "0,0,0", AS_IT_IS),
        (GemmProblem(8191, 8191, 8191, DType.f64, reads_c=False), "0,0,1", (True, True, False, 2)),
    ],
)
def test_all_that_is_in_the_way_is_seen_to_or_nothing(machine, problem, place, wanted):
    assert chosen(machine, problem, place) == wanted


def test_a_machine_that_does_not_say_so_is_not_slower(machine):
    for other in (with_shapes(machine, misaligned=0.0), Machine.uniform(4)):
        assert chosen(other, GemmProblem(8191, 8191, 8191, DType.f16), "0,0,0") == AS_IT_IS


def test_tails_of_further_products_count(machine):
    problem = GemmProblem(3001, 3001, 3001, DType.f16)
    assert chosen(machine, problem, "0,0,0") != AS_IT_IS
    assert chosen(with_shapes(machine, tail_elements=1e8), problem, "0,0,0") == AS_IT_IS


@pytest.mark.parametrize("dtype", [DType.f16, DType.tf32, DType.f64])
@pytest.mark.parametrize("extent", [151, 1001, 2001, 4095, 8191])
@pytest.mark.parametrize(("share", "gain"), [(0.0, 0.7), (0.84, 0.75)], ids=["copies are free", "copies take products"])
def test_what_is_chosen_is_no_slower_than_leaving_it(machine, dtype, extent, share, gain):
    problem = GemmProblem(extent, extent, extent, dtype)
    machine = with_shapes(machine, copy_share=share)
    careless = with_shapes(machine, misaligned=0.0)
    options = ScheduleOptions(scheduler="kblocks", devices=(0,))
    seconds = []
    for planned in (machine, careless):
        schedule = plan(problem, Placement.parse("0,0,0"), 4, planned, options).schedule
        verify(schedule, lower(schedule))
        seconds.append(simulate(schedule, machine).seconds)
    assert seconds[0] <= 1.02 * seconds[1]
    assert extent < 4095 or dtype is DType.f64 or seconds[0] < gain * seconds[1]


@pytest.mark.parametrize(("share", "pays"), [(0.89, True), (0.9, False)])
def test_what_stays_slow_of_a_transposed_b_is_the_part_with_the_last_columns(share: float, pays: bool) -> None:
    # Of 1001 columns the last of two blocks is halved twice, at multiples of 64: 105 stay slow, 0.895 of them do not.
    problem = GemmProblem(4096, 1001, 4096, DType.f16, trans_b="T", lda=4097)
    slow = Machine.uniform(4, gemm_tflop_per_s={"f16": 0.1})  # what is copied takes next to nothing
    costs = IssueCosts(copy_s=share * problem.flops / 0.1e12 / 0.61)  # as much as is seen of it
    machine = dataclasses.replace(slow, gemm_shape={"f16": GemmShape(misaligned=1.0)}, costs=costs)
    made = chosen(machine, problem, "0,1,1", first=4096, block=4096, columns=2, order="columns")
    assert made == ((True, False, False, 1) if pays else AS_IT_IS)


def test_what_does_not_fit_with_panels_is_planned_without(machine):
    problem = GemmProblem(70001, 70001, 70001, DType.f64)
    schedule = plan(problem, Placement.parse("0,0,0"), 4, machine, ScheduleOptions(scheduler="kblocks")).schedule
    homes = schedule.buffers[(schedule.buffers["location"] == 0) & (schedule.buffers["offset"] >= 0)]
    assert not (homes["matrix"] == A).any()


def test_what_copies_within_a_device_cost_counts(machine: Machine) -> None:
    problem = GemmProblem(4095, 4096, 512, DType.f64, lda=4095, ldc=4096)
    shapes = {"f64": dataclasses.replace(machine.gemm_shape["f64"], misaligned=0.5)}
    fast, slow = (
        dataclasses.replace(machine, gemm_shape=shapes, row_rates=RowRates(local=((512, share),)))
        for share in (1.0, 0.01)
    )
    assert chosen(fast, problem, "0,1,1") == (True, False, False, 2)
    assert chosen(slow, problem, "0,1,1") == AS_IT_IS
