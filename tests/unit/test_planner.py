"""The planner's entry point and the ablation."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from uncut_mpi.bench.arguments import ablation_options
from uncut_mpi.bench.rivals.paralia import predict
from uncut_mpi.errors import ParamError
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import uncut
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.planner import describe, plan
from uncut_mpi.planning.schedule import Kind
from uncut_mpi.planning.search import search

PROBLEM = GemmProblem(16384, 16384, 16384, DType.f64)
HOST = Placement.parse("h,h,h")


def karolina_like(ranks: int = 8) -> Machine:
    """Eight ranks, fast links between them, slow ones to the host."""
    return Machine.uniform(ranks, link_gb_per_s=230, host_gb_per_s=12, gemm_tflop_per_s={"f64": 17.2})


def test_a_plan_is_the_schedulers_result() -> None:
    options = ScheduleOptions(scheduler="uncut", tile=2048)
    planned = plan(PROBLEM, HOST, 8, karolina_like(), options)
    made = uncut.schedule(PROBLEM, HOST, 8, karolina_like(), options)
    assert planned.schedule.digest() == made.schedule.digest()
    assert planned.predicted_s == made.predicted_s > 0
    assert planned.schedule.scheduler == planned.options.scheduler == "uncut"


def test_a_plan_says_what_was_chosen() -> None:
    options = ScheduleOptions(scheduler="uncut", chunks=3)
    planned = plan(PROBLEM, HOST, 8, karolina_like(), options)
    chosen = {"tile": planned.schedule.tile, "grid": planned.schedule.grid}
    assert planned.options == dataclasses.replace(options, **chosen)
    assert min(planned.schedule.tile, *planned.schedule.grid) > 0


def test_a_plan_without_options_is_searched() -> None:
    planned = plan(PROBLEM, HOST, 8, karolina_like())
    assert planned.schedule.digest() == search(PROBLEM, HOST, 8, karolina_like()).best.schedule.digest()


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
    assert ScheduleOptions(**options).schedulers == left


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"splits": -1}, "splits = -1 is below 0"),
        ({"columns": -2}, "columns = -2 is below 0"),
        ({"away": -1}, "away = -1 is below 0"),
        ({"order": "rows"}, "order 'rows' of kblocks does not exist: use one of k, columns"),
        ({"combine": "host"}, "combine 'host' of kblocks does not exist"),
    ],
)
def test_k_blocks_that_make_no_sense_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        Blocking(**change)


def test_a_grid_larger_than_the_ranks_is_refused() -> None:
    with pytest.raises(ParamError, match="grid 3x3 has 9 places, but there are 8 ranks"):
        plan(PROBLEM, HOST, 8, karolina_like(), ScheduleOptions(scheduler="uncut", grid=(3, 3)))


def test_a_tile_larger_than_every_block_is_cut_to_it() -> None:
    planned = plan(
        GemmProblem(100, 90, 80, DType.f64), HOST, 4, karolina_like(4), ScheduleOptions(scheduler="uncut", tile=10_000)
    )
    assert planned.schedule.tile == 80


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scheduler": "other"}, "'other' does not exist: use one of uncut, kblocks, .*cyclic.*, auto"),
        ({"scheduler": "cyclic:other"}, "scheduler 'cyclic' has no variant 'other': use one of comm-opt"),
        ({"scheduler": "bands:other"}, "scheduler 'bands' has no variant 'other': use none"),
        ({"scheduler": "parsec", "metric": "edp"}, "a search minimises it"),
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
    assert [name for name, _ in steps] == [
        "baseline",
        "+ caching and overlap",
        "+ bandwidth routing",
        "+ ETA routing and batching",
        "+ WR-lazy and ETA order",
    ]
    assert all((step.tile, step.chunks, step.grid) == (1024, 4, (4, 2)) for _, step in steps)
    changed = [
        {
            field.name
            for field in dataclasses.fields(ScheduleOptions)
            if getattr(before, field.name) != getattr(after, field.name)
        }
        for (_, before), (_, after) in itertools.pairwise(steps)
    ]
    assert changed == [{"caching", "overlap"}, {"routing"}, {"routing", "batch"}, {"wr_lazy", "order"}]
    assert steps[-1][1] == ScheduleOptions(scheduler="uncut", tile=1024, chunks=4, grid=(4, 2))


def test_by_the_model_the_ablation_gains_where_the_paper_does() -> None:
    """
    Overlap, batching, and lazy fetching of C pay where the links are slow.

    Bandwidth routing alone does not: links are independent in the model, and what one rank fetches
    for all waits for its link.
    """
    for place, gains in (("h,h,h", (2.0, 1.0, 1.5, 1.02)), ("0,0,0", (1.2, 1.0, 0.98, 0.98))):
        times = [
            plan(PROBLEM, Placement.parse(place), 8, karolina_like(), options).predicted_s
            for _, options in ablation_options()
        ]
        for before, after, gain in zip(times, times[1:], gains, strict=False):
            assert before / after >= gain, (place, times)


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
        assert predict(problem, placement, machine, (0, 1)).seconds == 0
    found = search(problem, placement, 4, machine, ScheduleOptions(scheduler=scheduler))
    limit = bound(problem, placement, machine).seconds
    assert limit <= found.best.predicted_s
    assert not (found.best.schedule.tasks["kind"] == Kind.GEMM).any()


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
