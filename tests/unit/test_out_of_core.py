"""Products that do not fit the memory of ranks: one block of C after the other, k-blocks in slots."""

from __future__ import annotations

import dataclasses
import itertools
import random
import re

import numpy as np
import pytest

from tests.helpers import faults, oracle
from tests.helpers.proven import check
from uncut_mpi.errors import CapacityError, ParamError, PlanError, ScheduleError
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.dtypes import MEASURED, DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.places import Places
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import BARRIERS, SWEEPS, Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Kind, Matrix, Role, Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.verify import verify

GIB = 1 << 30


def random_problem(rng: random.Random, most: int = 90) -> GemmProblem:
    m, n, k = (rng.randint(1, most) for _ in range(3))
    trans_a, trans_b = rng.choices("NTC", k=2)
    dtype = rng.choice(MEASURED)
    return GemmProblem(m, n, k, dtype, trans_a=trans_a, trans_b=trans_b, reads_c=rng.random() < 0.6)


def random_placement(rng: random.Random, ranks: int) -> Placement:
    kinds = (Location.host(), Location.host(rng.randrange(ranks)), Location.device(rng.randrange(ranks)))
    return Placement(*(rng.choice(kinds) for _ in range(3)))


def in_rings(rng: random.Random) -> Blocking:
    edges = {name: rng.choice((0, rng.randint(5, 30))) for name in ("c_rows", "c_cols")}
    columns, lanes, c_slots = rng.randint(1, 4), rng.choice((1, 2)), rng.choice((1, 2))
    slots = {"slots": rng.randint(1, 4), "b_slots": rng.choice((0, rng.randint(1, 5))), "c_slots": c_slots}
    words = {"sweep": rng.choice(("", *SWEEPS)), "barrier": rng.choice(("", *BARRIERS))}
    return Blocking(block=rng.randint(3, 30), columns=columns, lanes=lanes, **words, **slots, **edges)


def blocks_of_c(schedule: Schedule) -> int:
    """Return how many blocks of C the first rank with a ring forms: what is new in its panels of C."""
    of_sums = schedule.buffers["matrix"] == Matrix.C
    gemms = schedule.tasks[schedule.tasks["kind"] == Kind.GEMM]
    first = gemms[gemms["num_operands"] == 3]  # which begin a part of C
    written = schedule.operands["region"][first["first_operand"]]
    return int(of_sums[schedule.regions["buffer"][written]].sum())


def turns_of_rings(schedule: Schedule) -> float:
    """Return how many times as much comes into panels of A and B as they have room for."""
    buffers = schedule.buffers
    ours = (buffers["role"] == Role.PANEL) & (buffers["matrix"] <= Matrix.B)
    copies = schedule.tasks[schedule.tasks["kind"] == Kind.COPY]
    to = schedule.regions[schedule.operands["region"][copies["first_operand"]]]
    came = to[ours[to["buffer"]]]
    return float((came["rows"] * came["cols"]).sum() / (buffers["rows"] * buffers["cols"])[ours].sum())


def test_any_blocks_slots_and_problems_are_right() -> None:
    turns = []
    for seed in range(30):
        rng = random.Random(seed)
        ranks = rng.choice((1, 2, 3, 4, 6))
        machine = dataclasses.replace(Machine.uniform(ranks), serial_copies=rng.random() < 0.5)
        options = ScheduleOptions(scheduler="kblocks", blocking=in_rings(rng))
        schedule = plan(random_problem(rng), random_placement(rng, ranks), ranks, machine, options).schedule
        verify(schedule, lower(schedule))
        assert oracle.is_wrong(schedule) == "", seed
        if ((schedule.buffers["role"] == Role.PANEL) & (schedule.buffers["matrix"] <= Matrix.B)).any():
            turns.append(turns_of_rings(schedule))
    assert sum(one >= 3 for one in turns) > 3


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("c_slots", [1, 2])
def test_all_slots_are_used_again_and_again(slots: int, c_slots: int) -> None:
    problem = GemmProblem(60, 60, 60, DType.f64, reads_c=False)
    blocking = Blocking(block=8, slots=slots, c_slots=c_slots, c_rows=20, c_cols=30, columns=2)
    options = ScheduleOptions(scheduler="kblocks", blocking=blocking)
    schedule = plan(problem, Placement.parse("h,h,h"), 2, Machine.uniform(2), options).schedule
    assert turns_of_rings(schedule) > 3
    assert blocks_of_c(schedule) >= 3
    verify(schedule, lower(schedule))
    assert oracle.is_wrong(schedule) == ""


def test_a_slot_that_is_used_too_early_is_seen() -> None:
    problem = GemmProblem(60, 60, 60, DType.f64)
    blocking = Blocking(block=8, slots=2, c_slots=1, c_rows=20, c_cols=30, columns=2)
    options = ScheduleOptions(scheduler="kblocks", blocking=blocking)
    schedule = plan(problem, Placement.parse("h,h,h"), 2, Machine.uniform(2), options).schedule
    seen = 0
    copies = np.flatnonzero((schedule.tasks["kind"] == Kind.COPY) & (schedule.tasks["num_awaits"] > 0))
    for seed in range(40):
        wrong = faults.drop_await_of(schedule, random.Random(seed), copies)
        if wrong is None or oracle.is_wrong(wrong) == "":
            continue  # others imply it
        seen += 1
        with pytest.raises(ScheduleError):
            verify(wrong)
    assert seen > 5


def test_what_is_there_of_the_next_block_does_not_come_again() -> None:
    problem = GemmProblem(64, 64, 64, DType.f64, reads_c=False)
    moved = {}
    for slots in (1, 4):
        blocking = Blocking(block=16, slots=slots, c_rows=16, c_cols=16, columns=1)
        options = ScheduleOptions(scheduler="kblocks", blocking=blocking)
        schedule = plan(problem, Placement.parse("h,h,h"), 1, Machine.uniform(1), options).schedule
        moved[slots] = schedule.bytes_by_link()["host_to_device"] // (16 * 16 * 8)
    # Of 16 blocks of C each needs 4 k-blocks of A and 4 of B. Whatever the slots, the last one of what two blocks
    # share is there. With room for all of k each block but the first brings one of both.
    assert moved == {1: 2 * 16 * 4 - 15, 4: 17 * 4}


# -- budgets ---------------------------------------------------------------------------------------


def test_any_budget_from_the_least_on_is_kept() -> None:
    blocks, refused = [], []
    for seed in range(10):
        rng = random.Random(seed)
        ranks = rng.choice((1, 2, 3))
        problem, placement = random_problem(rng, 40), random_placement(rng, ranks)
        machine = Machine.uniform(ranks)
        usual = plan(problem, placement, ranks, machine, ScheduleOptions(scheduler="kblocks")).schedule
        needed = int(usual.softbuf_bytes().max())
        scheduler = rng.choice(("auto", "kblocks"))
        for budget in {needed, needed * 2 // 3, needed // 2, needed // 4, needed // 16} - {0}:
            options = ScheduleOptions(scheduler=scheduler, device_memory=budget)
            try:
                made = plan(problem, placement, ranks, machine, options)
            except CapacityError as error:
                refused.append(str(error))
                continue
            assert made.schedule.softbuf_bytes().max() <= budget
            verify(made.schedule, lower(made.schedule))
            assert oracle.is_wrong(made.schedule) == "", (seed, budget)
            blocks.append(blocks_of_c(made.schedule))
    assert sum(one >= 3 for one in blocks) > 6
    assert all("would do with" in text for text in refused), refused


@pytest.mark.parametrize("place", ["h,h,h", "0,h,0"])
@pytest.mark.parametrize("blocking", [Blocking(order="columns"), Blocking(slots=2, c_rows=20)])
def test_what_options_need_more_than_a_budget_is_said_and_is_enough(place: str, blocking: Blocking) -> None:
    problem, placement, machine = GemmProblem(60, 50, 40, DType.f64), Placement.parse(place), Machine.uniform(2)
    options = ScheduleOptions(scheduler="kblocks", blocking=blocking, device_memory=1000)
    with pytest.raises(CapacityError, match=r"let ranks use \d+ bytes") as error:
        plan(problem, placement, 2, machine, options)
    assert "leave out options" in str(error.value)
    assert "would do with" not in str(error.value)
    (enough,) = re.findall(r"let ranks use (\d+) bytes", str(error.value))
    made = plan(problem, placement, 2, machine, dataclasses.replace(options, device_memory=int(enough))).schedule
    # Of each rank the end is rounded up to 256 bytes.
    assert int(enough) - 256 < made.softbuf_bytes().max() <= int(enough)


def test_copies_over_other_ranks_keep_the_budget_too() -> None:
    machine, over_others = load_machine("vulcan-8xv100"), 0
    for seed in range(2):
        rng = random.Random(seed)
        sizes = [rng.randint(100, 300) for _ in range(3)]
        problem = GemmProblem(*sizes, rng.choice((DType.f64, DType.f32)), trans_a=rng.choice("NT"))
        placement = Placement.parse(rng.choice(("h,h,h", "0,1,h", "3,h,7")))
        needed = 8 * max(m * n for m, n in itertools.combinations(sizes, 2)) // 2
        made = plan(problem, placement, 8, machine, ScheduleOptions(scheduler="kblocks", device_memory=needed))
        assert made.schedule.softbuf_bytes().max() <= needed
        verify(made.schedule, lower(made.schedule))
        assert oracle.is_wrong(made.schedule) == "", seed
        buffers = made.schedule.buffers
        over_others += int((buffers["matrix"] > Matrix.C).any())
    assert over_others > 0


def test_copies_that_transpose_on_devices_have_their_room_beside_small_blocks() -> None:
    problem, copied = GemmProblem(45, 50, 55, DType.c128, trans_a="T", trans_b="C"), 55 * 50 * 16
    placement, machine = Places.parse("h,block_cyclic(7,9;2,1)@C,h").bind(problem, 2), Machine.uniform(2)
    budget = copied // 2 + 20_000  # the copies of each rank's half, and not much
    made = plan(problem, placement, 2, machine, ScheduleOptions(device_memory=budget)).schedule
    assert made.softbuf_bytes().max() <= budget
    check(made)
    with pytest.raises(CapacityError, match=r"rank \d needs .* too few"):
        plan(problem, placement, 2, machine, ScheduleOptions(device_memory=copied // 2 - 1000))


@pytest.mark.parametrize("dtype", [DType.f64, DType.bf16, DType.c128])
@pytest.mark.parametrize("place", ["h,h,h", "0,0,0", "h,h,h1", "h,h,rows@host", "h,h,block_cyclic(7,5;2,1)@host"])
@pytest.mark.parametrize("budget", [768, 5000])
def test_what_has_no_product_needs_three_slots_alone(place: str, dtype: DType, budget: int) -> None:
    problem = GemmProblem(61, 37, 0, dtype)
    placement = Places.parse(place).bind(problem, 2)
    for scheduler in ("auto", "uncut"):
        options = ScheduleOptions(scheduler=scheduler, device_memory=budget)
        made = plan(problem, placement, 2, Machine.uniform(2), options).schedule
        assert made.softbuf_bytes().max() <= budget
        check(made)
    if place == "0,0,0":  # which is scaled in place
        return
    with pytest.raises(CapacityError, match=r"at least 768 B .*let ranks use 768 bytes \(device_memory\)"):
        plan(problem, placement, 2, Machine.uniform(2), ScheduleOptions(device_memory=767))


def test_what_fits_is_computed_as_ever() -> None:
    machine, placement = load_machine("h200-4x").subset((0, 1)), Placement.parse("h,h,h")
    problem = GemmProblem(4096, 4096, 4096, DType.f64)
    for scheduler in ("auto", "kblocks", "uncut"):
        usual = plan(problem, placement, 2, machine, ScheduleOptions(scheduler=scheduler))
        room = int(usual.schedule.softbuf_bytes().max())
        same = plan(problem, placement, 2, machine, ScheduleOptions(scheduler=scheduler, device_memory=2 * room))
        assert same.schedule.digest() == usual.schedule.digest()


def test_the_least_that_works_is_said_and_works() -> None:
    problem, placement = GemmProblem(500, 400, 300, DType.f64), Placement.parse("h,h,h")
    with pytest.raises(CapacityError, match=r"would do with ([\d.]+) kB") as found:
        plan(problem, placement, 2, Machine.uniform(2), ScheduleOptions(device_memory=1000))
    said = re.search(r"let ranks use (\d+) bytes \(device_memory\)", str(found.value))
    assert said is not None
    options = ScheduleOptions(scheduler="kblocks", device_memory=1000)
    planner = kblocks.Planner(Setting.of(problem, placement, 2, Machine.uniform(2, memory_bytes=1000)))
    least = int(said[1])
    assert least == max(planner.prepare(options, aligns=False).rank_bytes)
    made = plan(problem, placement, 2, Machine.uniform(2), ScheduleOptions(device_memory=least))
    assert made.schedule.softbuf_bytes().max() <= least
    verify(made.schedule, lower(made.schedule))


@pytest.mark.parametrize(
    ("extents", "dtype", "place", "ranks", "budget", "part"),
    [
        ((32768, 32768, 32768), DType.f64, "h,h,h", 2, 4 * GIB, 0.97),
        ((16384, 16384, 16384), DType.f32, "h,h,h", 1, 2 * GIB, 0.92),
        ((32768, 32768, 32768), DType.f64, "0,1,h", 2, 1 * GIB, 0.92),
        # k-blocks of B lie behind one link, then behind the other: they come in turn.
        ((32768, 32768, 32768), DType.f64, "rows@host,rows@host,rows@host", 2, 2 * GIB, 0.92),
    ],
)
def test_little_memory_takes_hardly_longer(
    extents: tuple[int, int, int], dtype: DType, place: str, ranks: int, budget: int, part: float
) -> None:
    machine, problem = load_machine("h200-4x").subset(range(ranks)), GemmProblem(*extents, dtype, reads_c=False)
    placement = Places.parse(place).bind(problem, ranks)
    whole = plan(problem, placement, ranks, machine)
    small = plan(problem, placement, ranks, machine, ScheduleOptions(device_memory=budget))
    assert small.schedule.softbuf_bytes().max() <= budget
    assert small.predicted_s < whole.predicted_s / part


@pytest.mark.parametrize(
    ("machine_name", "ranks", "dtype", "place", "budget"),
    [
        ("h200-4x", 4, DType.f64, "h,h,h", GIB // 8),  # short rows of host memory are slow
        ("h200-4x", 4, DType.f64, "0,0,0", GIB // 8),  # A and B come from a device, in many copies
        ("h200-4x", 2, DType.f64, "h,0,h", GIB // 4),
        ("vega-4xa100", 4, DType.f64, "h,h,h", GIB // 8),  # one way is faster than both at once
    ],
)
def test_a_cut_takes_hardly_longer_than_the_best_of_others(
    machine_name: str, ranks: int, dtype: DType, place: str, budget: int
) -> None:
    machine, placement = load_machine(machine_name).subset(range(ranks)), Placement.parse(place)
    problem, open_ = GemmProblem(16384, 16384, 16384, dtype), Blocking()

    def seconds(blocking: Blocking) -> float:
        options = ScheduleOptions(scheduler="kblocks", device_memory=budget, blocking=blocking)
        return plan(problem, placement, ranks, machine, options).predicted_s

    asked = itertools.product((256, 512, 1024), (2, 3), (1, 2))
    others = [Blocking(block=block, slots=slots, c_slots=c_slots) for block, slots, c_slots in asked]
    assert seconds(open_) <= 1.1 * min(map(seconds, others))


def test_a_result_that_no_memory_holds_leaves_at_the_speed_of_the_links() -> None:
    machine, placement = load_machine("h200-4x").subset((0, 1)), Placement.parse("h,h,h")
    problem = GemmProblem(131072, 131072, 4096, DType.f64, reads_c=False)
    made = plan(problem, placement, 2, machine, ScheduleOptions(device_memory=16 * GIB))
    assert made.predicted_s < 1.25 * bound(problem, placement, machine).seconds
    assert made.schedule.softbuf_bytes().max() <= 16 * GIB


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ({"splits": 2}, "splits = 1"),
        ({"order": "columns"}, "order = 'k'"),
        ({"order": "corner", "rows": 2}, "rows = 1"),
        ({"begin": "held"}, "begin = 'first'"),
        ({"combine": "owner"}, "combine = 'worker'"),
        ({"away": 1}, "away = 0"),
    ],
)
@pytest.mark.parametrize("name", ["slots", "c_rows", "c_cols", "c_slots"])
def test_what_does_not_go_with_slots_is_refused(name: str, other: dict[str, object], what: str) -> None:
    with pytest.raises(ParamError, match=rf"{name} = 2, .* goes with {what}"):
        Blocking(**{name: 2}, **other)


@pytest.mark.parametrize("other", [{"areas": ((1.0,), (1.0,))}, {"k_shares": (1.0,)}])
def test_shares_that_do_not_go_with_slots_are_refused(other: dict[str, object]) -> None:
    with pytest.raises(ParamError, match="leave one of the two out"):
        ScheduleOptions(scheduler="kblocks", blocking=Blocking(slots=2), **other)


def test_more_blocks_of_c_than_anybody_can_follow_are_refused() -> None:
    options = ScheduleOptions(scheduler="kblocks", blocking=Blocking(c_rows=1, c_cols=1))
    with pytest.raises(PlanError, match=r"blocks of C on each rank, one after the other.*device_memory"):
        plan(GemmProblem(9000, 9000, 9000, DType.f64), Placement.parse("h,h,h"), 1, Machine.uniform(1), options)


def test_thin_k_blocks_that_memory_cuts_into_many_steps_are_refused() -> None:
    options = ScheduleOptions(scheduler="kblocks", blocking=Blocking(block=1, columns=1), device_memory=1 << 24)
    with pytest.raises(PlanError, match=r"blocks of C on each rank, one after the other, and 100000 k-blocks"):
        plan(GemmProblem(9000, 9000, 100_000, DType.f64), Placement.parse("h,h,h"), 1, Machine.uniform(1), options)


@pytest.mark.parametrize("grid", [(1, 2), (2, 1)])
def test_a_grid_that_is_asked_for_is_kept_where_memory_is_short(grid: tuple[int, int]) -> None:
    problem, options = GemmProblem(4096, 4096, 4096, DType.f64), ScheduleOptions(grid=grid, device_memory=1 << 27)
    made = plan(problem, Placement.parse("h,h,h"), 2, Machine.uniform(2), options)
    assert made.schedule.grid == grid
    assert made.options.blocking.in_rings
    assert made.schedule.softbuf_bytes().max() <= 1 << 27


@pytest.mark.parametrize("rows", [200, 1000])
def test_blocks_of_c_that_are_asked_for_lie_on_a_grid_where_memory_is_short(rows: int) -> None:
    options = ScheduleOptions(device_memory=6_880_000, blocking=Blocking(c_rows=rows))
    problem, place = GemmProblem(4000, 100, 2000, DType.f64), Placement.parse("h,h,h")
    try:
        made = plan(problem, place, 4, load_machine("h200-4x"), options)
    except CapacityError:
        return
    assert made.options.areas is None
    assert made.options.blocking.c_rows == rows
