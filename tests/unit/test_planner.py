"""The planner's entry point and the ablation."""

from __future__ import annotations

import dataclasses
import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from tests.helpers.planned import plan_several, search
from uncut_mpi.api.plans import CALLS, Trial, fastest
from uncut_mpi.bench.arguments import ablation_options
from uncut_mpi.bench.rivals import bands
from uncut_mpi.bench.rivals.paralia import Predictor
from uncut_mpi.errors import CapacityError, ParamError, PlanError
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.places import Places
from uncut_mpi.model.ports import Net
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.candidates import varied
from uncut_mpi.planning.description import describe
from uncut_mpi.planning.longest import longest_task_s
from uncut_mpi.planning.options import MOST_TRIED, Blocking, ScheduleOptions
from uncut_mpi.planning.planner import Planned, plan, plans_for_calls, remade
from uncut_mpi.planning.schedule import Kind
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import simulate

PROBLEM = GemmProblem(16384, 16384, 16384, DType.f64)
HOST = Placement.parse("h,h,h")


def karolina_like(ranks: int = 8) -> Machine:
    """Eight ranks, fast links between them, slow ones to the host."""
    return Machine.uniform(ranks, link_gb_per_s=230, host_gb_per_s=12, gemm_tflop_per_s={"f64": 17.2})


def test_a_plan_says_what_was_chosen() -> None:
    options = ScheduleOptions(scheduler="uncut", chunks=3)
    planned = plan(PROBLEM, HOST, 8, karolina_like(), options)
    chosen = {"tile": planned.schedule.tile, "grid": planned.schedule.grid}
    assert planned.options == dataclasses.replace(options, **chosen)
    assert min(planned.schedule.tile, *planned.schedule.grid) > 0


@pytest.mark.parametrize("extents", [(16384, 16384, 16384), (20000, 3, 20000)], ids=["a product", "a copy"])
def test_the_longest_task_takes_about_what_a_simulation_says(extents: tuple[int, int, int]) -> None:
    machine = karolina_like(2)
    schedule = plan(GemmProblem(*extents, DType.f64), HOST, 2, machine).schedule
    run = simulate(schedule, machine)
    assert longest_task_s(schedule, schedule.copies(), machine) == pytest.approx(
        float((run.end_s - run.start_s).max()), rel=0.5
    )


def test_a_plan_without_options_is_searched() -> None:
    planned = plan(PROBLEM, HOST, 8, karolina_like())
    assert planned.schedule.digest() == search(PROBLEM, HOST, 8, karolina_like()).best.schedule.digest()


@pytest.mark.parametrize("place", ["0,0,0", "h,h,h", "0,1,h"])
@pytest.mark.parametrize(
    "extents", [(64, 64, 64), (1536,) * 3, (8192,) * 3, (1000, 64, 30000), (4096, 1, 7088), (2, 9000, 512)]
)
def test_a_plan_by_rule_tries_little_and_is_not_far_behind(place: str, extents: tuple[int, int, int]) -> None:
    about = GemmProblem(*extents, DType.f64), Placement.parse(place), 4, load_machine("h200-4x")
    rule, full = (search(*about, ScheduleOptions(search=how)) for how in ("rule", "full"))
    assert len(rule.candidates) <= 5
    assert rule.best.predicted_s <= 1.26 * full.best.predicted_s
    if place == "h,h,h":  # the same search by another name
        assert full.best.schedule.digest() == search(*about).best.schedule.digest()
    planned = plan(*about, ScheduleOptions(search="rule"))
    assert planned.schedule.digest() == rule.best.schedule.digest()
    assert planned.options.search == ""
    for metric, few in (("time", full.best.predicted_s < 1.0), ("pdp", False)):
        setting = Setting.of(*about, ScheduleOptions(metric=metric))
        assert (plans_for_calls(setting, whole=True)[2] > 1) == few


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({}, ("uncut", "kblocks")),
        ({"grid": (2, 2), "devices": (3, 1, 2, 0)}, ("uncut", "kblocks")),
        ({"tile": 512}, ("uncut",)),
        ({"scheduler": "cyclic:sequential", "tile": 512}, ("cyclic:sequential",)),
        ({"wr_lazy": False}, ("uncut",)),
        ({"blocking": Blocking(columns=2)}, ("kblocks",)),
        ({"scheduler": "uncut", "chunks": 3}, ("uncut",)),
        ({"scheduler": "kblocks", "blocking": Blocking(order="k")}, ("kblocks",)),
    ],
)
def test_options_of_one_scheduler_leave_the_others_out(options: dict, left: tuple[str, ...]) -> None:
    assert ScheduleOptions(**options).schedulers() == left


@pytest.mark.parametrize(
    "options",
    [
        {"scheduler": "uncut", "blocking": Blocking(splits=2)},
        {"scheduler": "kblocks", "tile": 512},
        {"tile": 512, "blocking": Blocking(splits=2)},
    ],
)
def test_options_of_another_scheduler_are_refused(options: dict) -> None:
    with pytest.raises(ParamError, match=r"(does not take|no scheduler takes all of) .*: leave"):
        plan(PROBLEM, HOST, 8, karolina_like(), ScheduleOptions(**options))


@pytest.mark.parametrize("memory", [0, 1 << 20])
def test_ranks_that_there_are_not_are_named_whatever_memory_is_given(memory: int) -> None:
    options = ScheduleOptions(device_memory=memory)
    with pytest.raises(ParamError, match="has 8 ranks, the session has 3"):
        plan(PROBLEM, HOST, 3, karolina_like(), options)
    with pytest.raises(ParamError, match="matrix A is placed on rank 9"):
        plan(PROBLEM, Placement.parse("9,h,h"), 8, karolina_like(), options)


def test_a_tile_larger_than_every_block_is_cut_to_it() -> None:
    planned = plan(
        GemmProblem(100, 90, 80, DType.f64), HOST, 4, karolina_like(4), ScheduleOptions(scheduler="uncut", tile=10_000)
    )
    assert planned.schedule.tile == 80


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"device_memory": "4"}, "device_memory = '4' is no number of bytes"),
        ({"scheduler": "other"}, "'other' does not exist: use one of uncut, kblocks, .*cyclic.*, auto"),
        ({"scheduler": "cyclic:other"}, "scheduler 'cyclic' has no variant 'other': use one of comm-opt"),
        ({"scheduler": "bands:other"}, "scheduler 'bands' has no variant 'other': use none"),
        ({"scheduler": "parsec", "metric": "edp"}, "a search minimises it"),
        ({"scheduler": "kblocks", "search": "full"}, "it says how far a search goes"),
        ({"search": "long"}, "search 'long' does not exist: use one of rule, full"),
        ({"routing": "fast"}, "routing 'fast' does not exist"),
        ({"order": "random"}, "order 'random' does not exist"),
        ({"tile": -1}, "tile = -1 is below 0"),
        ({"chunks": 0}, "chunks = 0 is below 1"),
        ({"compute_lanes": 65}, "above 64"),
        ({"grid": (0, 2)}, "grid 0x2"),
        ({"max_hops": 3}, "max_hops = 3 is above 2"),
        ({"devices": ()}, "devices names no rank"),
        ({"devices": (1, -1)}, "rank -1 cannot compute"),
        ({"devices": (1, 2, 1)}, "rank 1 is named twice among those that compute"),
        ({"row_shares": ()}, "row_shares"),
        ({"row_shares": (1.0, 0.0)}, "are not all positive numbers"),
        ({"col_shares": (1e308, 1e308)}, "are not all positive numbers"),
        ({"col_shares": (float("inf"),)}, "col_shares"),
    ],
)
def test_options_that_make_no_sense_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        ScheduleOptions(**change)


def test_the_ablation_adds_one_optimisation_after_the_other() -> None:
    steps = ablation_options(ScheduleOptions(scheduler="uncut", tile=1024, chunks=4, grid=(4, 2)))
    assert all((step.tile, step.chunks, step.grid) == (1024, 4, (4, 2)) for step in steps)
    changed = [
        {
            field.name
            for field in dataclasses.fields(ScheduleOptions)
            if getattr(before, field.name) != getattr(after, field.name)
        }
        for before, after in itertools.pairwise(steps)
    ]
    assert changed == [{"caching", "overlap"}, {"routing"}, {"routing", "batch"}, {"wr_lazy", "order"}]
    assert steps[-1] == ScheduleOptions(scheduler="uncut", tile=1024, chunks=4, grid=(4, 2))


@pytest.mark.parametrize(
    ("dtype", "reads_c", "splits", "says"),
    [("f64", True, 1, True), ("f64", False, 1, False), ("f64", False, 2, True), ("f16", False, 1, True)],
)
def test_a_plan_says_where_c_is_combined_if_there_is_anything_to_combine(
    dtype: str, reads_c: bool, splits: int, says: bool
) -> None:
    problem = GemmProblem(512, 512, 512, DType[dtype], reads_c=reads_c)
    blocking = Blocking(splits=splits, delivery="earliest", lanes=1)
    options = ScheduleOptions(scheduler="kblocks", blocking=blocking)
    planned = plan(problem, Placement.parse("0,0,0"), 4, Machine.uniform(4), options)
    text = describe(planned.schedule, planned.options)
    assert (", C combined at its owner" in text) == says
    assert ", one product lane, earliest delivery" in text


def test_lists_and_arrays_stand_for_tuples() -> None:
    assert ScheduleOptions(devices=range(2)).devices == (0, 1)
    given = ScheduleOptions(grid=[1, 2], devices=np.array([1, 0]), row_shares=[1.0], col_shares=np.array([0.25, 0.75]))
    assert given == ScheduleOptions(grid=(1, 2), devices=(1, 0), row_shares=(1.0,), col_shares=(0.25, 0.75))
    assert hash(given)
    assert all(type(one) is int for one in given.devices or ())
    areas = ScheduleOptions(areas=[[0.5], np.array([0.25, 0.25])])
    assert areas == ScheduleOptions(areas=((0.5,), (0.25, 0.25)))
    for wrong in ({"devices": 3}, {"grid": "2x2"}, {"areas": (0.5, 0.5)}):
        with pytest.raises(ParamError, match="is no sequence: pass a tuple, or None"):
            ScheduleOptions(**wrong)


@pytest.mark.parametrize("scheduler", ["auto", "uncut", "kblocks", "cyclic", "bands"])
@pytest.mark.parametrize("extents", [(0, 1000, 8192), (500, 0, 200), (500, 200, 0)])
def test_an_empty_product_is_none_at_all(extents: tuple[int, int, int], scheduler: str) -> None:
    problem = GemmProblem(*extents, DType.f64)
    assert not problem.has_product
    machine = load_machine("h200-4x")
    placement = Placement.parse("0,1,2")
    if not problem.m * problem.n:  # else C is moved and scaled
        assert Predictor(problem, placement, machine).workload((0, 1)).seconds == 0
    found = plan(problem, placement, 4, machine, ScheduleOptions(scheduler=scheduler))
    assert bound(problem, placement, machine).seconds <= found.predicted_s
    assert not (found.schedule.tasks["kind"] == Kind.GEMM).any()


@pytest.mark.parametrize("chunks", [1, 3, 16])
def test_a_number_of_chunks_that_is_given_stays_fixed(chunks: int) -> None:
    options = ScheduleOptions(scheduler="uncut", chunks=chunks)
    problem = GemmProblem(8192, 8192, 8192, DType.f64)
    found = search(problem, Placement.parse("0,0,0"), 8, load_machine("vulcan-8xv100"), options)
    assert {one.options.chunks for one in found.candidates} == {chunks}


@pytest.mark.parametrize(
    ("k", "splits", "told"),
    [
        (512, 1, "one k-block of 512"),
        (700, 2, "one k-block of 350"),
        (1000, 1, "k-blocks of 512 to 1000"),
        (4000, 1, "k-blocks of 512 to 2048"),
    ],
)
def test_a_description_names_no_k_block_longer_than_k(k: int, splits: int, told: str) -> None:
    options = ScheduleOptions(scheduler="kblocks", grid=(1, 1), blocking=Blocking(splits=splits, first=512, block=2048))
    made = plan(GemmProblem(64, 64, k, DType.f64), Placement.parse("h,h,h"), splits, Machine.uniform(splits), options)
    assert f", {told}, " in describe(made.schedule, made.options)


# -- every problem has a plan, or an error, in bounded time and memory -----------------------------


FEW = 500_000
"""Tasks of what the schedulers' own rules make of the largest problems: a second or two."""

ROOMY = dataclasses.replace(load_machine("h200-4x"), memory_bytes=np.full(4, 1 << 62))
SCHEDULERS = ("uncut", "kblocks", "cyclic")


def planned(m: int, n: int, k: int, place: str = "h,h,h", machine: Machine | None = None, **options: object) -> Planned:
    machine = load_machine("h200-4x") if machine is None else machine
    problem = GemmProblem(m, n, k, DType.f64)
    return plan(problem, Placement.parse(place), machine.num_ranks, machine, ScheduleOptions(**options))  # type: ignore[arg-type]


def test_a_long_k_has_a_plan() -> None:
    assert len(planned(4, 4, 2 * 10**9, scheduler="kblocks").schedule.tasks) <= FEW


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(("m", "n", "k"), [(1 << 55, 1, 1), (1, 1, 1 << 55), (3, 1 << 30, 1 << 25)])
def test_what_can_be_addressed_has_a_plan(m: int, n: int, k: int, scheduler: str) -> None:
    made = planned(m, n, k, machine=ROOMY, scheduler=scheduler)
    assert 0 < len(made.schedule.tasks) <= FEW
    assert made.predicted_s > 0


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("shape", [(1 << 58, 1, 1), (1, 1 << 58, 1), (1, 1, 1 << 58)])
def test_the_largest_extents_have_a_plan_or_too_little_memory(shape: tuple[int, int, int], scheduler: str) -> None:
    try:
        made = planned(*shape, machine=ROOMY, scheduler=scheduler)
    except CapacityError:
        return
    assert len(made.schedule.tasks) <= FEW


@pytest.mark.parametrize("shape", [(1, 1, 1 << 58), (3, 1 << 30, 1 << 25)])
def test_what_is_chosen_for_the_largest_extents_is_bounded_too(shape: tuple[int, int, int]) -> None:
    # It tries the rules of all of them: one shape of one long extent and one of two have it all.
    made = planned(*shape, machine=ROOMY, scheduler="auto")
    assert 0 < len(made.schedule.tasks) <= FEW
    assert made.predicted_s > 0


@pytest.mark.parametrize("shape", [(1 << 40, 2, 3), (2, 1 << 40, 3), (2, 3, 1 << 40)])
def test_bands_take_an_edge_that_makes_no_more_tiles_than_they_may(
    shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    most = 1024
    monkeypatch.setattr(bands, "MAX_TILES_OF_BANDS", most)  # each of their tasks is made by itself
    made = planned(*shape, place="0,0,0", machine=ROOMY, scheduler="bands")
    assert 0 < len(made.schedule.tasks) <= 4 * most  # of a tile: at most two copies of bands, a product, its copy


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheduler": "uncut", "tile": 1}, r"tile 1 makes \d+ tasks .* the limit is \d+: ask for a larger tile"),
        ({"scheduler": "cyclic", "tile": 1}, r"makes at least \d+ tasks .* the limit is \d+: ask for a larger tile"),
        ({"blocking": Blocking(block=1)}, r"makes \d+ pairs of them .* the limit is \d+: .*blocking.block"),
        ({"blocking": Blocking(block=7, growth=2)}, r"makes \d+ pairs of them .* the limit is \d+: .*blocking.block"),
    ],
)
@pytest.mark.parametrize("k", [2 * 10**9, 1 << 50])
def test_too_many_tasks_are_counted_before_any_is_made(options: dict[str, object], message: str, k: int) -> None:
    with pytest.raises(PlanError, match=message):
        planned(4, 4, k, machine=ROOMY, **options)


@pytest.mark.parametrize("blocking", [Blocking(first=1), Blocking(first=1, growth=2), Blocking(growth=1 << 40)])
def test_blocks_that_grow_soon_are_long(blocking: Blocking) -> None:
    made = planned(4, 4, 2 * 10**9, scheduler="kblocks", blocking=blocking)
    assert len(made.schedule.tasks) <= FEW


def test_many_blocks_of_c_are_refused() -> None:
    for name in ("rows", "columns"):
        with pytest.raises(ParamError, match=f"{name} = 1000000 is above 4096"):
            Blocking(**{name: 10**6})
    blocking = Blocking(rows=4096, columns=4096, order="corner")
    with pytest.raises(PlanError, match=r"the limit is \d+: .*blocking.rows"):
        planned(1 << 20, 1 << 20, 64, machine=ROOMY, scheduler="kblocks", blocking=blocking)


@pytest.mark.parametrize("order", ["k", "columns", "corner"])
@pytest.mark.parametrize("delivery", ["balanced", "earliest"])
@pytest.mark.parametrize("place", ["h,h,h", "0,0,0"])
def test_tasks_and_what_they_await_are_in_proportion_to_the_k_blocks(order: str, delivery: str, place: str) -> None:
    # 5,000 and 20,000 k-blocks: no task awaits one of each that came before.
    blocking = Blocking(block=1000, columns=2, order=order, delivery=delivery)
    few, many = (
        planned(40, 40, 1000 * blocks, place=place, machine=ROOMY, scheduler="kblocks", blocking=blocking).schedule
        for blocks in (5_000, 20_000)
    )
    assert 20_000 < len(many.tasks) <= 4.1 * len(few.tasks)
    assert 20_000 < len(many.awaits) <= 4.1 * len(few.awaits)


@pytest.mark.parametrize("device_memory", [0, 1 << 20])
def test_a_c_that_is_only_scaled_counts_its_pieces(device_memory: int) -> None:
    problem = GemmProblem(1 << 50, 3, 0, DType.f64)
    options = ScheduleOptions(device_memory=device_memory)
    if device_memory:
        with pytest.raises(PlanError, match=r"slots of \d+×1 elements makes \d+ tasks .*: give ranks more memory"):
            plan(problem, Placement.parse("h,h,h"), 4, ROOMY, options)
    else:
        assert len(plan(problem, Placement.parse("h,h,h"), 4, ROOMY, options).schedule.tasks) <= FEW


def test_the_steps_of_the_paper_are_bounded_too() -> None:
    for options in ablation_options():
        made = plan(GemmProblem(4, 4, 1 << 50, DType.f64), Placement.parse("h,h,h"), 4, ROOMY, options)
        assert len(made.schedule.tasks) <= FEW


@pytest.mark.parametrize("scheduler", ["uncut", "kblocks", "cyclic"])
def test_many_ranks_have_a_plan_of_a_long_k(scheduler: str) -> None:
    machine = dataclasses.replace(Machine.uniform(256), memory_bytes=np.full(256, 1 << 62))
    options = {"grid": (16, 16)} if scheduler == "kblocks" else {}
    made = planned(4096, 4096, 1 << 40, machine=machine, scheduler=scheduler, **options)
    assert len(made.schedule.tasks) <= 4_000_000


def test_a_budget_of_any_size_bounds_each_schedule_as_well() -> None:
    problem, place = GemmProblem(4, 4, 10**10, DType.f64), Placement.parse("h,h,h")
    result = search(problem, place, 4, ROOMY, ScheduleOptions(blocking=Blocking(first=64)), budget_tasks=1 << 60)
    assert max(len(one.schedule.tasks) for one in result.candidates[:3]) <= 4_000_000


def test_columns_of_many_ranks_are_found_once() -> None:
    # Of 128 ranks of different speeds; dealt anew for each number of columns this took the fourth power of the ranks.
    rates = {"f64": np.linspace(20.0, 60.0, 128)}
    machine = dataclasses.replace(Machine.uniform(128), gemm_tflop_per_s=rates, typical_gemm_tflop_per_s=rates)
    result = search(GemmProblem(4096, 4096, 4096, DType.f64), Placement.parse("h,h,h"), 128, machine)
    assert result.tasks_simulated <= 2 * 5_000 * 128


# -- schedules tried by a plan's first calls: whose turn it is, when it is over, which one wins ----


TRIED, PLACE = GemmProblem(4096, 4096, 4096, DType.f64), Placement.parse("0,0,0")


def trial(count):
    return Trial(tuple(SimpleNamespace(digest=bytes([number])) for number in range(count)), ((),) * count)


def test_schedules_take_turns_and_the_first_call_of_each_is_not_timed():
    tried, turns, moments = trial(3), [], []
    while not tried.over:
        assert tried.now is tried.plans[tried.index]
        turns.append(tried.index)
        moments.append(tried.digest)
        tried = tried.after(100.0 if turns.count(tried.index) == 1 else 1.0 + tried.index)
    assert turns == [0, 1, 2, 2, 1, 0] * ((CALLS + 1) // 2)
    assert len(set(moments)) == len(moments)
    assert tried.table().tolist() == [[1.0] * CALLS, [2.0] * CALLS, [3.0] * CALLS]


def test_a_schedule_that_cannot_run_is_tried_no_more_and_does_not_win():
    before = trial(3).after(9.0)
    tried = before.without()
    assert tried.digest != before.digest
    assert (before.num_left, tried.num_left) == (3, 2)
    turns = []
    while not tried.over:
        turns.append(tried.index)
        tried = tried.after(5.0 - tried.index)
    assert turns == [2, 2, 0, 0, 2, 2, 0]
    assert np.isinf(tried.table()[1]).all()
    assert fastest(np.stack([tried.table()] * 2)) == 2


def test_a_moment_of_a_trial_is_told_from_others_with_the_same_turn():
    one = trial(2)
    later = one.after(1.0).after(1.0).after(1.0)
    assert later.index == one.index
    assert later.digest != one.digest
    assert later.digest == one.after(2.0).after(3.0).after(4.0).digest  # times are each rank's own


def test_the_slowest_rank_and_the_median_call_decide():
    ranks = np.array(
        [
            [[1.0, 1.0, 1.0], [2.0, 2.0, 9.0], [3.0, 3.0, 3.0]],
            [[4.0, 4.0, 4.0], [2.5, 2.5, 2.5], [1.0, 1.0, 1.0]],
        ]
    )
    assert fastest(ranks) == 1
    ranks[0, 1, 1] = 9.0  # now it is slow in two calls of three
    assert fastest(ranks) == 2


def test_what_is_tried_are_the_best_predicted_no_two_of_a_kind():
    machine = load_machine("h200-4x")
    found = search(TRIED, PLACE, 4, machine)
    chosen = varied(found.candidates, 6)
    assert len(chosen) == 6
    assert chosen[0] is found.best
    values = [one.value for one in chosen]
    assert values == sorted(values)
    assert values[-1] <= 1.25 * values[0]
    assert len({one.schedule.digest() for one in chosen}) == 6
    alike = [(one.schedule.scheduler, one.schedule.grid, one.schedule.tile, one.options.blocking) for one in chosen]
    shares = [(one.options.row_shares, one.options.col_shares, one.options.areas) for one in chosen]
    assert len(set(zip(alike, shares, strict=True))) == 6
    assert varied(found.candidates, 1) == [found.best]
    # The best of another scheduler comes before more of the same.
    schedulers = {one.schedule.scheduler for one in found.candidates if one.value <= 1.1 * found.best.value}
    assert {one.schedule.scheduler for one in varied(found.candidates, len(schedulers))} == schedulers


def test_columns_of_ranks_are_a_kind_of_their_own():
    machine, blocking = (
        load_machine("h200-4x"),
        Blocking(splits=1, first=256, block=2048, columns=4, order="k", combine="owner"),
    )
    cuts = ((0.3,), (0.25, 0.25, 0.2)), ((0.25, 0.25, 0.2), (0.3,)), ((0.3, 0.3), (0.2, 0.2)), None
    made = [
        search(TRIED, PLACE, 4, machine, ScheduleOptions(areas=areas, blocking=blocking), budget_tasks=1).best
        for areas in cuts
    ]
    made.sort(key=lambda one: one.value)
    assert made[-1].value <= 1.25 * made[0].value
    assert varied(made, 4) == made


def test_sums_away_are_a_kind_of_their_own():
    machine = load_machine("h200-4x")
    made = []
    for away in (0, 1, 2):
        blocking = Blocking(splits=1, first=256, block=2048, columns=4, order="k", combine="owner", away=away)
        options = ScheduleOptions(scheduler="auto", grid=(2, 2), devices=(0, 1, 2, 3), blocking=blocking)
        made.append(search(TRIED, PLACE, 4, machine, options, budget_tasks=1).best)
    made.sort(key=lambda one: one.value)
    chosen = varied(made, 3)
    assert len(chosen) == 2  # one or two away is no great difference
    assert {one.options.blocking.away > 0 for one in chosen} == {True, False}


def test_the_planner_returns_as_many_as_asked_and_plans_the_same_first_one():
    machine = load_machine("h200-4x")
    one = plan(TRIED, PLACE, 4, machine)
    several = plan_several(TRIED, PLACE, 4, machine, ScheduleOptions(tune=4))
    assert len(several) == 4
    assert several[0].schedule.digest() == one.schedule.digest()
    assert [planned.options.tune for planned in several] == [0] * 4
    assert plan(TRIED, PLACE, 4, machine, ScheduleOptions(tune=4)).schedule.digest() == one.schedule.digest()
    # What the caller fixed stays fixed.
    fixed = ScheduleOptions(tune=3, blocking=Blocking(columns=2))
    assert {planned.options.blocking.columns for planned in plan_several(TRIED, PLACE, 4, machine, fixed)} == {2}


BY_ROWS = Places.parse("rows,cols,rows")
SWAPPED = dataclasses.replace(TRIED, swapped=True)


@pytest.mark.parametrize(
    ("problem", "placement", "machine", "options", "private", "files"),
    [
        (TRIED, PLACE, load_machine("h200-4x"), ScheduleOptions(tune=4), (), ()),
        (SWAPPED, BY_ROWS, load_machine("h200-4x"), None, (), ()),
        (TRIED, BY_ROWS, Machine.cluster(load_machine("h200-4x"), 3, Net(25.0, 2e-6)), None, (), ()),
        (TRIED, BY_ROWS, Machine.cluster(karolina_like(2), 2, Net(25.0, 2e-6)), None, (1, 3), ()),
        (TRIED, HOST, karolina_like(3), ScheduleOptions(scheduler="uncut"), (), ()),
        (TRIED, HOST, karolina_like(3), ScheduleOptions(scheduler="cyclic"), (), ()),
        (
            GemmProblem(300, 200, 100, DType.f64),
            Places.parse("cols@host,cols@host,cols@host"),
            karolina_like(2),
            ScheduleOptions(host_memory=6000),
            range(6),
            range(6),
        ),
    ],
    ids=["four tried", "stored by rows", "nodes", "staged on nodes", "uncut", "cyclic", "files, beside copies"],
)
def test_a_decision_is_made_the_same_schedule_of_elsewhere(problem, placement, machine, options, private, files):
    bound_places = placement.bind(problem, machine.num_ranks) if isinstance(placement, Places) else placement
    about = problem, bound_places, machine.num_ranks, machine, options, private, files
    several = plan_several(*about)
    for one in several:
        assert remade(Setting.of(*about), one.decision).digest() == one.schedule.digest()
    assert several[0].beside == bool(files)


def test_nothing_else_can_be_tried():
    with pytest.raises(ParamError, match=r"tune = 4 with scheduler 'uncut'.*scheduler='auto'"):
        ScheduleOptions(scheduler="uncut", tune=4)
    for tune, refused in (
        (MOST_TRIED + 1, "above 16"),
        (-1, "below 0"),
        (2.5, "a float"),
        ("3", "a str"),
        (None, "a N"),
    ):
        with pytest.raises(ParamError, match=f"tune = {tune!r} is {refused}"):
            ScheduleOptions(tune=tune)
    assert ScheduleOptions(scheduler="uncut", tune=1).given == ()


def test_memory_may_be_said_with_a_unit() -> None:
    assert ScheduleOptions(device_memory="4GiB", host_memory="1MB") == ScheduleOptions(
        device_memory=4 << 30, host_memory=10**6
    )
