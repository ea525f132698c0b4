"""The schedulers of other papers, PARALiA's `cyclic` and Choi's `bands`: what they deal out, and their proof."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from tests.helpers.planned import search
from uncut_mpi.bench.rivals import bands, paralia
from uncut_mpi.bench.rivals.choi import BandModel
from uncut_mpi.bench.rivals.cyclic import DISTRIBUTIONS, deal
from uncut_mpi.errors import CapacityError, ParamError, PlanError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location, in_host
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.parts import BoundLayout, Part
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.metrics import METRICS
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Kind

SCHEDULERS = ("cyclic", "bands")


@pytest.mark.parametrize(("place", "usual"), [("0,h,0", 0), ("0,0,0", 1)])
def test_cyclic_takes_ways_round_slow_links_as_asked(place: str, usual: int) -> None:
    problem, machine = GemmProblem(4096, 4096, 4096, DType.f64), load_machine("vulcan-8xv100")
    made = {
        hops: plan(
            problem,
            Placement.parse(place),
            8,
            machine,
            ScheduleOptions(scheduler="cyclic", devices=tuple(range(8)), tile=1024, max_hops=hops),
        ).schedule.digest()
        for hops in (None, 0, 1)
    }
    assert made[None] == made[usual]
    assert made[0] != made[1]


# -- cyclic: tiles dealt out ----------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "cols", "ranks"), [(4, 4, 4), (5, 3, 4), (7, 7, 6), (1, 9, 8), (2, 1, 8), (8, 8, 1)])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_tile_is_dealt_once_in_equal_shares(rows: int, cols: int, ranks: int, distribution: str) -> None:
    owned = deal(rows, cols, ProcessGrid.most_square(ranks), [1.0] * ranks, distribution)
    assert sorted(itertools.chain(*owned)) == list(range(rows * cols))
    sizes = [len(one) for one in owned]
    assert max(sizes) - min(sizes) <= 1
    assert all(one == sorted(one) for one in owned)


def test_patterns_are_those_of_their_names() -> None:
    grid, equal = ProcessGrid(2, 2), [0.25] * 4
    # 4 x 4 tiles, numbered down the columns.
    assert deal(4, 4, grid, equal, "2d-cyclic")[1] == [4, 6, 12, 14]  # even rows, odd columns
    assert deal(4, 4, grid, equal, "1d-cyclic")[1] == [1, 5, 9, 13]
    assert deal(3, 4, grid, equal, "round-robin")[1] == [1, 5, 9]
    assert deal(4, 4, grid, equal, "sequential")[1] == [4, 5, 6, 7]


def test_shares_are_kept_and_what_is_over_goes_to_the_next_place() -> None:
    for distribution in DISTRIBUTIONS:
        owned = deal(6, 5, ProcessGrid(1, 3), [0.5, 0.3, 0.2], distribution)
        assert [len(one) for one in owned] == [15, 9, 6]


def test_each_rank_fetches_a_tile_once_and_every_distribution_differs() -> None:
    problem, place = GemmProblem(1024, 1024, 1024, DType.f64, reads_c=True), Placement.parse("h,h,h")
    digests = set()
    for distribution in DISTRIBUTIONS:
        options = ScheduleOptions(scheduler=f"cyclic:{distribution}", tile=128)
        schedule = plan(problem, place, 3, Machine.uniform(3), options).schedule
        copies = schedule.tasks[schedule.tasks["kind"] == Kind.COPY]
        written = schedule.operands["region"][copies["first_operand"]]
        assert len(np.unique(written)) == len(written)
        digests.add(schedule.digest())
    assert len(digests) == len(DISTRIBUTIONS)


def test_it_takes_the_devices_shares_and_tile_of_least_predicted_time() -> None:
    machine = load_machine("vulcan-8xv100-uneven")
    problem, place = GemmProblem(8192, 8192, 8192, DType.f64, reads_c=True), Placement.parse("0,1,2")
    made = plan(problem, place, 8, machine, ScheduleOptions(scheduler="cyclic"))
    work = paralia.Predictor(problem, place, machine).select()
    assert made.options.devices == work.devices
    edge = paralia.Predictor(problem, place, machine).tile_edge(work.devices, ratios=work.ratios)
    assert (made.options.tile, made.schedule.tile) == (edge, edge)
    gemms = made.schedule.tasks[made.schedule.tasks["kind"] == Kind.GEMM]
    steps, tiles = -(-8192 // edge), (-(-8192 // edge)) ** 2
    for device, ratio in zip(work.devices, work.ratios, strict=True):
        assert abs((gemms["rank"] == device).sum() / steps - ratio * tiles) < 1


def test_it_chooses_devices_by_the_metric() -> None:
    machine = load_machine("vulcan-8xv100").subset(range(5))
    problem, place = GemmProblem(1024, 1024, 1024, DType.f64, reads_c=True), Placement.parse("0,0,0")
    devices = {}
    for metric in METRICS:
        options = ScheduleOptions(scheduler=f"cyclic:{metric}")
        made = plan(problem, place, 5, machine, options).options
        assert made.scheduler == "cyclic"  # what it chose is named instead
        assert made.devices is not None
        devices[metric] = made.devices
        assert plan(problem, place, 5, machine, made).options == made
        # What the plan command shows is the same.
        assert search(problem, place, 5, machine, options, budget_tasks=1).best.options == made
    # As in the paper, power alone takes one device, and its product with the time fewer than time alone.
    assert devices == {"time": (0, 2, 3, 4), "edp": (0, 3), "pdp": (0,)}


def test_of_more_than_eight_ranks_it_chooses_too() -> None:
    problem, latency = GemmProblem(256, 256, 256, DType.f64), 1e-3
    made = plan(
        problem,
        Placement.parse("11,11,11"),
        12,
        Machine.uniform(12, latency_s=latency),
        ScheduleOptions(scheduler="cyclic"),
    )
    assert made.options.devices == (11,)


def test_shares_that_are_given_are_kept() -> None:
    problem, place = GemmProblem(1024, 2048, 512, DType.f64), Placement.parse("0,0,0")
    for order, rows, cols in (("F", (3, 1), None), ("F", None, (1, 1, 2)), ("C", (3, 1), (1, 1, 2))):
        about = dataclasses.replace(problem, swapped=order == "C")
        options = ScheduleOptions(scheduler="cyclic", grid=(2, 3), row_shares=rows, col_shares=cols, tile=64)
        schedule = plan(about, place, 8, Machine.uniform(8), options).schedule
        gemms = schedule.tasks[schedule.tasks["kind"] == Kind.GEMM]
        found = np.bincount(gemms["rank"], minlength=8) / len(gemms)
        wanted = np.outer(rows or (1, 1), cols or (1, 1, 1)).astype(float).ravel()
        assert found[:6] == pytest.approx(wanted / wanted.sum(), abs=1 / 128)
        assert not found[6:].any()
    with pytest.raises(ParamError, match="3 row_shares were given, grid 2x4 has 2 rows"):
        plan(problem, place, 8, Machine.uniform(8), ScheduleOptions(scheduler="cyclic", row_shares=(1, 1, 1)))


# -- the tile of PARALiA's equations ---------------------------------------------------------------


def test_the_tile_is_the_smallest_of_nearly_least_time() -> None:
    # 4 devices, no waves and no latency: what T leaves unequal is all that it changes, and 2048 = 4 x 4 tiles of 512.
    machine = Machine.uniform(4, latency_s=0.0)
    problem = GemmProblem(2048, 2048, 2048, DType.f64)
    assert paralia.Predictor(problem, Placement.parse("0,0,0"), machine).tile_edge(range(4)) == 256
    # 768 would be 3 x 3 tiles, of which one device had 3 of 9, and 1280 2 x 2 longer ones.
    assert (
        paralia.Predictor(GemmProblem(100, 90, 80, DType.f64), Placement.parse("0,0,0"), machine).tile_edge(range(4))
        == 100
    )


def test_latency_and_waves_speak_for_larger_tiles() -> None:
    problem, place = GemmProblem(8192, 8192, 8192, DType.f64), Placement.parse("h,h,h")
    slow = Machine.uniform(4, latency_s=1e-3)
    fast = Machine.uniform(4, latency_s=0.0)
    assert paralia.Predictor(problem, place, slow).tile_edge(range(4)) > paralia.Predictor(
        problem, place, fast
    ).tile_edge(range(4))
    h200 = load_machine("h200-4x")  # 132 multiprocessors: small tiles leave most of a wave empty
    assert paralia.Predictor(problem, Placement.parse("0,0,0"), h200).tile_edge(range(4)) >= 1024


# -- bands -----------------------------------------------------------------------------------------


def test_a_product_is_of_whole_bands_and_two_of_each_matrix_have_room() -> None:
    problem = GemmProblem(2048, 2048, 1000, DType.f32, "T", "N", reads_c=True)
    options = ScheduleOptions(scheduler="bands", tile=256)
    schedule = plan(problem, Placement.parse("2,1,0"), 4, Machine.uniform(4), options).schedule
    gemms = schedule.tasks[schedule.tasks["kind"] == Kind.GEMM]
    assert np.bincount(gemms["rank"]).tolist() == [16] * 4
    a = schedule.regions[schedule.operands["region"][gemms["first_operand"] + 1]]
    assert set(zip(a["rows"].tolist(), a["cols"].tolist(), strict=True)) == {(1000, 256)}
    # Device 3 has no matrix: two bands of A and of B, two results; all bytes of A and B that it sees are whole columns.
    own = schedule.buffers[(schedule.buffers["location"] == 3)]
    assert sorted(own["rows"].tolist()) == [256, 256, 1000, 1000, 1000, 1000]
    # "The copy kernel of the results received" adds beta C, on C's owner; its own products need none.
    sums = schedule.tasks[schedule.tasks["kind"] == Kind.COMBINE]
    assert (len(sums), set(sums["rank"].tolist())) == (48, {0})
    assert not in_host(schedule.locations, schedule.copies()[:, 1:3]).any()


@pytest.mark.parametrize("place", ["0,0,0", "2,1,0"])
def test_results_are_added_beside_the_owners_products(place: str) -> None:
    machine, seconds = Machine.uniform(4), {}
    for reads_c in (False, True):
        problem = GemmProblem(16384, 16384, 32768, DType.f32, "T", "N", reads_c=reads_c)
        options = ScheduleOptions(scheduler="bands", tile=1024)
        seconds[reads_c] = plan(problem, Placement.parse(place), 4, machine, options).predicted_s
    assert seconds[True] < 1.1 * seconds[False]


def test_a_band_of_b_stays_while_those_of_a_pass() -> None:
    problem = GemmProblem(1024, 1024, 512, DType.f64)
    options = ScheduleOptions(scheduler="bands", tile=128)
    schedule = plan(problem, Placement.parse("0,1,0"), 4, Machine.uniform(4), options).schedule
    into_3 = [copy for copy in schedule.copies().tolist() if copy[2] == 3]
    from_a = sum(copy[1] == 0 for copy in into_3)
    # Two columns of eight tiles, up and down: the bands of the turn are there.
    assert (from_a, len(into_3) - from_a) == (8 + 8 - 2, 2)


def test_what_bands_leave_over_is_the_owners_work() -> None:
    problem = GemmProblem(1000, 900, 64, DType.f64)
    options = ScheduleOptions(scheduler="bands", tile=256)  # 3 x 3 whole tiles, 232 rows and 132 columns left
    schedule = plan(problem, Placement.parse("2,3,0"), 4, Machine.uniform(4), options).schedule
    gemms = schedule.tasks[schedule.tasks["kind"] == Kind.GEMM]
    c = schedule.regions[schedule.operands["region"][gemms["first_operand"]]]
    assert set(gemms["rank"][c["rows"] == 232].tolist()) == {3}  # rows over: B's owner
    assert set(gemms["rank"][(c["cols"] == 132) & (c["rows"] == 256)].tolist()) == {2}  # columns over: A's owner
    assert len(gemms) == 16


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_edge_is_that_of_the_papers_conditions(ranks: int) -> None:
    machine = Machine.uniform(ranks)
    problem, place = GemmProblem(32768, 32768, 32768, DType.f32), Placement.parse("0,0,0")
    model = BandModel(
        n=32768,
        num_devices=ranks,
        math_gflop_per_s=float(machine.typical_gemm_rate(DType.f32)[0]) / 1e9,
        memory_gb_per_s=2 * float(machine.bandwidth_gb_per_s[0, 0]),
        transfer_gb_per_s=float(machine.bandwidth_gb_per_s[0, 1]),
    )
    chosen = plan(problem, place, ranks, machine, ScheduleOptions(scheduler="bands")).schedule.tile
    assert chosen == max(bands.MIN_TILE, model.tile_edge()) > model.transfer_threshold()


def test_bands_are_between_devices_only_and_not_too_many() -> None:
    problem, options = GemmProblem(4096, 4096, 64, DType.f64), ScheduleOptions(scheduler="bands", tile=8)
    with pytest.raises(
        PlanError, match=r"between devices only, but A, B and C are at 0,0,h: place all three on devices"
    ):
        plan(problem, Placement.parse("0,0,h"), 2, Machine.uniform(2), options)
    with pytest.raises(PlanError, match="bands of 8 make more than 65536 tiles of 4096×4096: ask for a larger tile"):
        plan(problem, Placement.parse("0,0,0"), 2, Machine.uniform(2), options)


# -- both ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_what_does_not_fit_is_refused(scheduler: str) -> None:
    problem, place = GemmProblem(8192, 8192, 8192, DType.f64), Placement.parse("0,0,0")
    with pytest.raises(
        CapacityError, match=r"rank \d needs [\d.]+ [MG]B of device memory .*, and 10.00 MB are available"
    ):
        plan(problem, place, 4, Machine.uniform(4, memory_bytes=10**7), ScheduleOptions(scheduler=scheduler))
    with pytest.raises(ParamError, match=r"rank 4 shall compute \(devices, --compute-ranks\), but there are 4 ranks"):
        plan(problem, place, 4, Machine.uniform(4), ScheduleOptions(scheduler=scheduler, devices=(4,)))
    with pytest.raises(ParamError, match="the session has 3"):
        plan(problem, place, 3, Machine.uniform(4), ScheduleOptions(scheduler=scheduler))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_without_a_product_c_is_scaled_as_ever(scheduler: str) -> None:
    problem = GemmProblem(300, 200, 100, DType.f64, reads_c=True, scales_only=True)
    place = Placement.parse("0,0,0")
    made = plan(problem, place, 2, Machine.uniform(2), ScheduleOptions(scheduler=scheduler)).schedule
    assert (
        made.digest()
        == plan(problem, place, 2, Machine.uniform(2), ScheduleOptions(scheduler="uncut")).schedule.digest()
    )


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_a_search_leaves_them_out_and_their_rules_alone(scheduler: str) -> None:
    problem, place = GemmProblem(2048, 2048, 2048, DType.f64, reads_c=True), Placement.parse("0,1,0")
    found = search(problem, place, 4, Machine.uniform(4))
    assert {one.options.scheduler for one in found.candidates} == {"kblocks", "uncut"}
    (alone,) = search(problem, place, 4, Machine.uniform(4), ScheduleOptions(scheduler=scheduler)).candidates
    made = plan(problem, place, 4, Machine.uniform(4), ScheduleOptions(scheduler=scheduler))
    assert alone.schedule.digest() == made.schedule.digest()


def test_tiles_dealt_out_by_shares_do_not_take_parts_either() -> None:
    problem = GemmProblem(100, 60, 80, DType.f64)
    halves = tuple(Part((50 * at, 50 * at + 50), (0, 60), Location.host(at)) for at in range(2))
    placement = Placement(Location.host(), Location.host(), BoundLayout((100, 60), halves))
    for options in (
        ScheduleOptions(scheduler="cyclic", grid=(2, 1), row_shares=(1.0, 3.0)),
        ScheduleOptions(scheduler="cyclic", grid=(1, 2), col_shares=(1.0, 3.0)),
        ScheduleOptions(scheduler="cyclic", grid=(2, 1)),
    ):
        with pytest.raises(PlanError, match="C is in parts"):
            plan(problem, placement, 2, Machine.uniform(2), options)
