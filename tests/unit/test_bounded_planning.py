"""Every problem that can be addressed has a plan, or an error, in bounded time and memory, whatever the options."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from uncut_mpi.bench.arguments import ablation_options
from uncut_mpi.bench.rivals import bands
from uncut_mpi.errors import CapacityError, ParamError, PlanError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.planner import Planned, plan
from uncut_mpi.planning.search import search

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


@pytest.mark.parametrize("tile", [0, 1])
def test_a_c_that_is_only_scaled_counts_its_tiles(tile: int) -> None:
    problem = GemmProblem(1 << 50, 3, 0, DType.f64)
    options = ScheduleOptions(scheduler="uncut", tile=tile)
    if tile:
        with pytest.raises(PlanError, match=r"tile 1 makes \d+ tasks"):
            plan(problem, Placement.parse("h,h,h"), 4, ROOMY, options)
    else:
        assert len(plan(problem, Placement.parse("h,h,h"), 4, ROOMY, options).schedule.tasks) <= FEW


def test_the_steps_of_the_paper_are_bounded_too() -> None:
    for _, options in ablation_options():
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
