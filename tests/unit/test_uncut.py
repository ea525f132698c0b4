"""The paper's scheduler: what its schedules compute, move and promise."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.canonical import canonical_digest
from tests.helpers.planned import make_schedule
from tests.helpers.proven import check, small_chunks  # noqa: F401 (a fixture)
from uncut_mpi.errors import CapacityError, ParamError, PlanError
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import ANY_DEVICE, host_index, location_at
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import Port, device_ports
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import tiles
from uncut_mpi.planning.options import ORDERS, ROUTINGS, ScheduleOptions
from uncut_mpi.planning.schedule import Kind, LaneKind, Matrix, Role, Schedule
from uncut_mpi.planning.schedulers import Made
from uncut_mpi.planning.simulate import simulate

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "golden_uncut_digests.json"
T = 8  # tile edge of the small problems


def problem_of(m: int, n: int, k: int, dtype: str = "f64", **more) -> GemmProblem:
    return GemmProblem(m, n, k, DType[dtype], **more)


def cube(extent: int, **more) -> GemmProblem:
    return problem_of(extent, extent, extent, **more)


def make(problem: GemmProblem, place: str, ranks: int, machine: Machine | None = None, **options) -> Schedule:
    return result_of(problem, place, ranks, machine, **options).schedule


def result_of(problem: GemmProblem, place: str, ranks: int, machine: Machine | None = None, **options) -> Made:
    machine = machine or Machine.uniform(ranks)
    return make_schedule(
        problem, Placement.parse(place), ranks, machine, ScheduleOptions(scheduler="uncut", **{"tile": T, **options})
    )


def of_kind(schedule: Schedule, kind: Kind) -> np.ndarray:
    return np.flatnonzero(schedule.tasks["kind"] == kind)


def written_role(schedule: Schedule, task: int) -> tuple[int, int]:
    buffer = schedule.regions["buffer"][schedule.operands_of(task)["region"][0]]
    return int(schedule.buffers["matrix"][buffer]), int(schedule.buffers["role"][buffer])


def bytes_into(schedule: Schedule, matrix: Matrix) -> int:
    """Bytes that copies bring into panels and staging of a matrix."""
    into = [
        copy
        for copy in schedule.copies()
        if written_role(schedule, copy[0]) in {(matrix, Role.PANEL), (matrix, Role.STAGING)}
    ]
    return int(sum(copy[3] for copy in into))


# -- products --------------------------------------------------------------------------------------


_ON_OFF = {"caching": (True, False), "overlap": (True, False), "batch": (True, False), "wr_lazy": (True, False)}


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize(("place", "dtype"), [("h,h,h", "f64"), ("3,0,h1", "f32")])
def test_every_combination_of_options_gives_the_product(place: str, dtype: str) -> None:
    names = [*_ON_OFF, "routing", "order"]
    for seed, values in enumerate(itertools.product(*_ON_OFF.values(), ROUTINGS, ORDERS)):
        options = dict(zip(names, values, strict=True))
        problem = problem_of(17, 20, 10, dtype, reads_c=seed % 5 != 0)
        check(make(problem, place, 4, chunks=2, compute_lanes=2, **options), seed)


# -- what is moved ---------------------------------------------------------------------------------


def test_a_matrix_at_home_is_read_and_written_in_place() -> None:
    schedule = make(cube(32), "0,0,0", 4)
    on_0 = schedule.buffers[schedule.owners() == 0]
    assert set(on_0["role"].tolist()) == {Role.USER}
    assert schedule.softbuf_bytes()[0] == 0
    copies = schedule.copies()
    assert not (copies[:, 1] == copies[:, 2]).any()


def test_caching_fetches_each_tile_once_per_rank_and_without_it_each_sub_problem_fetches() -> None:
    kept = make(cube(64), "h,h,h", 4, batch=False)
    anew = make(cube(64), "h,h,h", 4, caching=False)
    tile_bytes = T * T * 8
    # 2×2 grid of blocks of 4×4 tiles, 8 steps of k: 32 tiles of A and 32 of B per rank.
    assert bytes_into(kept, Matrix.A) == 4 * 32 * tile_bytes
    assert bytes_into(anew, Matrix.A) == 4 * 4 * 4 * 8 * tile_bytes
    copies = anew.copies()
    into_panels = copies[copies[:, 2] != host_index(4)]
    assert (into_panels[:, 1] == host_index(4)).all()  # always from the origin


def test_without_overlap_every_rank_has_one_lane_and_pulls() -> None:
    schedule = make(cube(32), "0,h,0", 4, overlap=False)
    assert sorted(schedule.lanes["rank"].tolist()) == [0, 1, 2, 3]
    for task, _, destination, _ in schedule.copies():
        if written_role(schedule, task)[1] == Role.PANEL:
            assert schedule.tasks["rank"][task] == destination
    check(schedule)


def test_with_overlap_copies_are_issued_where_the_data_is() -> None:
    schedule = make(cube(32), "1,h,h2", 4)
    for task, source, destination, _ in schedule.copies():
        issuer = int(schedule.tasks["rank"][task])
        buffers = schedule.regions["buffer"][schedule.operands_of(task)["region"]]
        places = [location_at(schedule.locations, at) for at in schedule.buffers["location"][buffers]]
        private = [at.rank for at in places if at.space == "host" and at.rank is not None]
        if private:
            assert issuer == private[0] == 2
        elif source == host_index(4):
            assert issuer == destination
        else:
            assert issuer == source
        lane = schedule.lanes[schedule.tasks["lane"][task]]
        assert (int(lane["kind"]), int(lane["source"]), int(lane["destination"])) == (
            LaneKind.COPY,
            source,
            destination,
        )


@pytest.mark.parametrize("place", ["0,1,0", "1,1,1", "0,2,h"])
def test_results_between_devices_have_lanes_of_their_own(place: str) -> None:
    schedule = make(cube(64), place, 4)
    kinds = schedule.lanes["kind"][schedule.tasks["lane"]]
    for task, _, destination, _ in schedule.copies():
        matrix, role = written_role(schedule, task)
        result = matrix == Matrix.C and role == Role.USER and destination != host_index(4)
        assert kinds[task] == (LaneKind.RESULT if result else LaneKind.COPY)
    assert (kinds == LaneKind.RESULT).any() == (place != "0,2,h")


@pytest.mark.parametrize("place", ["0,0,0", "0,1,2", "0,2,h", "h1,h1,1"])
def test_a_device_that_copies_in_turn_has_one_lane_of_a_kind_to_devices(place: str) -> None:
    machine = dataclasses.replace(Machine.uniform(4), serial_copies=True)
    schedule = make(problem_of(64, 64, 64), place, 4, machine, tile=16)
    ends = schedule.lanes[schedule.lanes["kind"] != LaneKind.COMPUTE]
    to_devices = [lane for lane in ends if lane["source"] == lane["rank"] and lane["destination"] != host_index(4)]
    assert to_devices
    assert all(lane["destination"] == ANY_DEVICE for lane in to_devices)
    assert len({(int(lane["rank"]), int(lane["kind"])) for lane in to_devices}) == len(to_devices)
    check(schedule)


def test_what_a_device_sends_in_turn_is_expected_in_turn() -> None:
    together = Machine.uniform(4, link_gb_per_s=100.0, latency_s=0.0, gemm_tflop_per_s={"f64": 1e6})
    in_turn = dataclasses.replace(together, serial_copies=True)
    problem = problem_of(512, 2048, 512, reads_c=False)
    expected = [
        result_of(problem, "0,0,0", 4, machine, grid=(1, 4), tile=512, batch=False).predicted_s
        for machine in (together, in_turn)
    ]
    # Rank 0 sends a tile of B to each of three ranks, and one of A at least once.
    least_s = 4 * 8 * 512**2 / 100e9
    assert expected[0] < least_s <= expected[1]


def test_a_result_that_awaits_its_product_holds_up_no_fetch_over_the_same_link() -> None:
    # B comes to rank 0 over the link that rank 1's part of C takes.
    machine = dataclasses.replace(Machine.uniform(2), ports=tuple(device_ports(range(2), 400, 400)))
    schedule = make(GemmProblem(8192, 8192, 8192, DType.f64), "0,1,0", 2, machine, tile=2048)
    assert simulate(schedule, machine).idle_share.max() < 0.15  # two fifths if one lane carries both


def test_batching_forwards_each_tile_along_the_grid_row_or_column_in_groups() -> None:
    together = make(cube(64), "h,h,h", 4)
    apart = make(cube(64), "h,h,h", 4, batch=False, routing="origin")
    assert (apart.tasks["group"] == -1).all()
    groups = together.tasks["group"][together.tasks["group"] >= 0]
    assert len(np.unique(groups)) == 64 + 64  # all tiles of A and B
    assert together.bytes_by_link()["host_to_device"] == apart.bytes_by_link()["host_to_device"] - 2 * 64 * 64 * 8
    # Every hop but the first of a group awaits the one before it, of the same chunk.
    for group in np.unique(groups):
        members = np.flatnonzero(together.tasks["group"] == group)
        hops = [member for member in members if together.copies()[:, 0].searchsorted(member) >= 0]
        assert len(hops) == 2  # one chunk: the tiles are small
        assert together.awaited(hops[1]).tolist() == [hops[0]]


def test_chunks_cut_shared_tiles_along_stored_columns_and_stay_in_order() -> None:
    problem = problem_of(4096, 4096, 2048, trans_b="T")
    counts = {}
    for chunks in (1, 4, 8):
        schedule = make(problem, "h,h,h", 4, tile=1024, chunks=chunks)
        counts[chunks] = len(schedule.copies())
        shared = np.flatnonzero(schedule.tasks["group"] >= 0)
        region = schedule.regions[schedule.operands["region"][schedule.tasks["first_operand"][shared]]]
        assert set(region["rows"].tolist()) == {1024}
        assert set(region["cols"].tolist()) == {1024 // chunks}
    tiles = 2 * (4 * 2 + 4 * 2)  # of A and B, to two ranks each
    assert counts[4] - counts[1] == 3 * tiles
    assert counts[8] - counts[1] == 7 * tiles


def test_chunks_never_get_too_small() -> None:
    schedule = make(cube(1024), "h,h,h", 4, tile=512, chunks=64)
    shared = np.flatnonzero(schedule.tasks["group"] >= 0)
    region = schedule.regions[schedule.operands["region"][schedule.tasks["first_operand"][shared]]]
    assert region["cols"].min() >= tiles.MIN_CHUNK_COLUMNS
    assert (region["rows"] * region["cols"]).min() * 8 >= tiles.MIN_CHUNK_BYTES
    assert region["cols"].min() < 512


def host_ports(ranks: int, total_gb_per_s: float) -> tuple[Port, Port]:
    """What all ranks together get from the host, and to it."""
    return (
        Port.of("in", total_gb_per_s, [(ranks, rank) for rank in range(ranks)]),
        Port.of("out", total_gb_per_s, [(rank, ranks) for rank in range(ranks)]),
    )


def one_good_host_link() -> Machine:
    """Four ranks with fast links between them; only rank 0 reaches the host quickly."""
    bandwidth = np.full((5, 5), 100.0)
    bandwidth[4, :] = [10, 1, 1, 1, 10]
    return dataclasses.replace(Machine.uniform(4), bandwidth_gb_per_s=bandwidth)


def test_routing_takes_load_off_the_origin() -> None:
    made = [
        result_of(cube(2048), "h,h,h", 4, one_good_host_link(), tile=256, batch=False, routing=routing)
        for routing in ROUTINGS
    ]
    origin, by_bandwidth, by_eta = (result.schedule.bytes_by_link()["host_to_device"] for result in made)
    once = 3 * 2048 * 2048 * 8
    assert origin == once + 2 * 2048 * 2048 * 8
    assert by_bandwidth == once
    assert once < by_eta < origin
    assert max(made[1].predicted_s, made[2].predicted_s) < made[0].predicted_s


def test_eta_routing_uses_the_origin_where_the_faster_link_is_busy() -> None:
    # The links between ranks are a little faster than the host's: by bandwidth alone they get all copies.
    machine = Machine.uniform(4, link_gb_per_s=12, host_gb_per_s=10, latency_s=0)
    by_bandwidth, by_eta = (
        result_of(cube(2048), "h,h,0", 4, machine, tile=256, batch=False, routing=routing, order="fixed")
        for routing in ("bw", "eta")
    )
    assert by_eta.schedule.bytes_by_link()["host_to_device"] > by_bandwidth.schedule.bytes_by_link()["host_to_device"]
    assert by_eta.predicted_s < by_bandwidth.predicted_s


@pytest.mark.parametrize(("place", "shared"), [("h,h,h", True), ("0,h,0", True), ("h1,h1,h1", False), ("0,1,2", False)])
def test_ranks_that_share_the_host_s_memory_are_planned_with_what_each_gets_then(place: str, shared: bool) -> None:
    alone = Machine.uniform(4)
    together = dataclasses.replace(alone, ports=host_ports(4, 100.0))
    slower = Machine.uniform(4, host_gb_per_s=25.0)
    problem = cube(2048)
    found, as_alone, as_slower = (
        make_schedule(
            problem, Placement.parse(place), 4, machine, ScheduleOptions(scheduler="uncut", tile=512)
        ).predicted_s
        for machine in (together, alone, slower)
    )
    assert found == (as_slower if shared else as_alone)
    assert not shared or as_slower > as_alone


def test_one_of_several_ranks_at_work_has_the_host_to_itself() -> None:
    together = dataclasses.replace(Machine.uniform(4), ports=host_ports(4, 100.0))
    options = {"grid": (1, 1), "tile": 512}
    found, alone = (result_of(cube(1024), "h,h,h", 4, one, **options) for one in (together, Machine.uniform(4)))
    assert found.predicted_s == alone.predicted_s


def test_products_are_planned_at_the_rate_to_expect() -> None:
    best = Machine.uniform(1, host_gb_per_s=1e6, latency_s=0, gemm_tflop_per_s={"f64": 2})
    machine = dataclasses.replace(best, typical_gemm_tflop_per_s={"f64": np.array([1.0])})
    predicted_s = result_of(cube(1024), "0,0,0", 1, machine).predicted_s
    assert predicted_s == pytest.approx(2 * 1024**3 / 1e12, rel=1e-3)


def test_private_host_memory_is_reached_over_its_own_ranks_link_alone() -> None:
    machine = Machine.uniform(4)
    shared = result_of(cube(4096), "h,h,h", 4, machine, tile=1024)
    private = result_of(cube(4096), "h1,h1,h1", 4, machine, tile=1024)
    bytes_in = private.schedule.bytes_by_link()["host_to_device"]
    assert private.predicted_s > bytes_in / 50e9
    assert shared.predicted_s < bytes_in / 50e9


def test_columns_of_panels_begin_at_multiples_of_64_bytes() -> None:
    buffers = make(problem_of(999, 777, 555, "f16"), "h,h,h", 4, tile=101).buffers
    own = buffers[buffers["role"] != Role.USER]
    assert len(own) > 4
    assert not (own["ld"] * [DType(one).itemsize for one in own["dtype"].tolist()] % 64).any()


# -- C ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("place", "lazy"), [("h,h,h", True), ("0,h,0", True), ("h,0,0", True), ("h,h,0", False), ("0,1,h", False)]
)
def test_wr_lazy_combines_once_per_tile_where_a_or_b_shares_the_location_of_c(place: str, lazy: bool) -> None:
    on, off = make(cube(64), place, 4), make(cube(64), place, 4, wr_lazy=False)
    at_home = 16 if "0" in place.split(",")[2] else 0  # tiles of the rank that holds C
    assert len(of_kind(on, Kind.COMBINE)) == (64 - at_home if lazy else 0)
    assert len(of_kind(off, Kind.COMBINE)) == 0
    assert (on.digest() != off.digest()) == lazy
    assert bytes_into(on, Matrix.C) == bytes_into(off, Matrix.C) == (64 - at_home) * T * T * 8


def test_wr_lazy_needs_room_for_c_twice() -> None:
    on, off = make(cube(64), "h,h,h", 4), make(cube(64), "h,h,h", 4, wr_lazy=False)
    assert (on.softbuf_bytes() - off.softbuf_bytes()).tolist() == [64 * 64 * 8 // 4] * 4


def test_wr_lazy_fetches_c_after_the_last_tiles_of_a_and_b_that_it_needs() -> None:
    schedule = make(cube(64), "h,h,h", 4, order="fixed")
    for rank in range(4):
        copies = [c for c in schedule.copies() if c[2] == rank and c[1] == host_index(4)]
        first_of_c = min(c[0] for c in copies if written_role(schedule, c[0])[0] == Matrix.C)
        gemms = of_kind(schedule, Kind.GEMM)
        before = gemms[(schedule.tasks["rank"][gemms] == rank) & (gemms < first_of_c)]
        assert len(before) == 8  # all steps of k of its first C tile


# -- order and lanes -------------------------------------------------------------------------------


def test_the_fixed_order_runs_through_k_then_rows_then_columns() -> None:
    schedule = make(problem_of(32, 32, 24), "h,h,h", 1, order="fixed")
    places = []
    for task in of_kind(schedule, Kind.GEMM):
        a, c = (schedule.regions[schedule.operands_of(task)["region"][which]] for which in (1, 0))
        places.append((int(c["col"]), int(c["row"]), int(a["col"])))
    assert places == sorted(places)
    assert len(places) == 4 * 4 * 3


def test_the_order_by_eta_starts_with_what_arrives_first() -> None:
    # B is at rank 0; A comes over a slow link. The fixed order would wait for all of k before it reuses a tile of A.
    machine = Machine.uniform(1, host_gb_per_s=0.1, latency_s=0, gemm_tflop_per_s={"f64": 0.01})
    fixed, by_eta = (
        result_of(cube(64), "h,0,0", 1, machine, wr_lazy=False, order=order, compute_lanes=1)
        for order in ("fixed", "eta")
    )
    assert by_eta.predicted_s < fixed.predicted_s
    reads = [int(by_eta.schedule.operands_of(task)["region"][1]) for task in of_kind(by_eta.schedule, Kind.GEMM)]
    assert len(set(reads[:8])) == 1  # one tile of A serves all eight columns before the next is awaited


def test_how_long_c_would_take_to_come_is_of_no_account_where_it_is_not_read() -> None:
    machine = Machine.uniform(2, host_gb_per_s=0.1, latency_s=0, gemm_tflop_per_s={"f64": 0.01})
    bandwidth = machine.bandwidth_gb_per_s.copy()
    bandwidth[1, 0] = 1e-3
    made = [
        result_of(cube(64, reads_c=False), "h,0,1", 2, one, devices=(0,), order="eta", compute_lanes=1, max_hops=0)
        for one in (machine, dataclasses.replace(machine, bandwidth_gb_per_s=bandwidth))
    ]
    assert made[0].schedule.digest() == made[1].schedule.digest()
    assert made[0].predicted_s == made[1].predicted_s


def test_the_order_finish_finishes_c_tiles_before_it_opens_more() -> None:
    # C crosses slow links: if all its tiles were finished at the end, so would be all write-backs.
    fixed, by_eta = (
        result_of(cube(16384), "4,2,h", 8, Machine.uniform(8), tile=2048, order=order).predicted_s
        for order in ("fixed", "finish")
    )
    assert by_eta <= 1.01 * fixed


def test_ranks_take_turns() -> None:
    schedule = make(cube(64), "h,h,h", 4)
    ranks = schedule.tasks["rank"][of_kind(schedule, Kind.GEMM)]
    assert (ranks.reshape(-1, 4) == [0, 1, 2, 3]).all()


@pytest.mark.parametrize("lanes", [1, 3, 8])
def test_a_c_tile_stays_on_one_compute_lane(lanes: int) -> None:
    schedule = make(cube(64), "h,h,h", 4, compute_lanes=lanes)
    computes = schedule.lanes["kind"] == LaneKind.COMPUTE
    assert computes.sum() == 4 * lanes
    lane_of: dict[int, int] = {}
    for task in of_kind(schedule, Kind.GEMM):
        target = int(schedule.operands_of(task)["region"][0])
        lane = int(schedule.tasks["lane"][task])
        assert lane_of.setdefault(target, lane) == lane


def test_ranks_without_work_issue_nothing_but_what_they_own() -> None:
    schedule = make(problem_of(3, 2, 20), "5,h,h", 6)
    working = {rank for rank in range(6) if schedule.softbuf_bytes()[rank]}
    issuing = set(schedule.tasks["rank"].tolist())
    assert issuing == working | {5}
    check(schedule)


# -- memory ----------------------------------------------------------------------------------------


def test_too_little_memory_says_which_rank_needs_what_and_what_to_do() -> None:
    machine = dataclasses.replace(Machine.uniform(2), memory_bytes=np.array([10**9, 20_000]))
    with pytest.raises(CapacityError, match=r"rank 1 needs [\d.]+ kB .*, and 20.00 kB are available, .*use more ranks"):
        make(cube(64), "h,h,h", 2, machine)
    # What lives on the device counts as well.
    fits = dataclasses.replace(Machine.uniform(2), memory_bytes=np.array([10**9, 3 * 64 * 64 * 8]))
    make(cube(64), "0,0,0", 2, fits)
    with pytest.raises(CapacityError, match="rank 0 needs"):
        make(cube(64), "0,h,h", 2, dataclasses.replace(fits, memory_bytes=np.array([64 * 64 * 8 + 20_000, 10**9])))


def test_a_tile_far_too_small_is_refused_with_the_count() -> None:
    with pytest.raises(PlanError, match=r"tile 1 makes \d+ tasks .* the limit is 4000000"):
        make(cube(4096), "h,h,h", 4, tile=1)


def test_ranks_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ParamError, match="placed on rank 4"):
        make(cube(16), "4,h,h", 4)
    with pytest.raises(ParamError, match="grid 3x2 has 6 places"):
        make(cube(16), "h,h,h", 4, grid=(3, 2))
    with pytest.raises(ParamError, match="has 3 ranks, the session has 4"):
        make(cube(16), "h,h,h", 4, Machine.uniform(3))


# -- the model's time ------------------------------------------------------------------------------


def test_predicted_time_of_one_tile_is_the_sum_of_its_tasks() -> None:
    machine = Machine.uniform(1, host_gb_per_s=10, latency_s=1e-6, gemm_tflop_per_s={"f64": 1})
    size = 512
    nbytes = size * size * 8
    copy = 1e-6 + nbytes / 10e9
    compute = 2 * size**3 / 1e12
    eager = result_of(cube(size), "h,h,h", 1, machine, tile=size, wr_lazy=False)
    assert eager.predicted_s == pytest.approx(4 * copy + compute, rel=1e-9)
    lazy = result_of(cube(size), "h,h,h", 1, machine, tile=size)
    combine = 1e-6 + 0.5 * 3 * nbytes / (4 * 390e9)
    assert lazy.predicted_s == pytest.approx(2 * copy + max(copy, compute) + combine + copy, rel=1e-9)
    home = result_of(cube(size), "0,0,0", 1, machine, tile=size)
    assert home.predicted_s == pytest.approx(compute, rel=1e-9)
    serial = result_of(cube(size), "h,h,h", 1, machine, tile=size, overlap=False)
    assert serial.predicted_s == pytest.approx(4 * copy + compute + combine, rel=1e-9)


def test_write_backs_follow_one_another_on_their_link() -> None:
    machine = Machine.uniform(1, host_gb_per_s=10, latency_s=0, gemm_tflop_per_s={"f64": 1e9})
    made = result_of(cube(512, reads_c=False), "0,0,h", 1, machine, tile=256)
    assert made.predicted_s == pytest.approx(512 * 512 * 8 / 10e9, rel=1e-4)


def test_predicted_time_of_a_batched_fetch_is_the_pipelines() -> None:
    # One tile of A passes along a row of four ranks; B and C take no time.
    machine = Machine.uniform(5, link_gb_per_s=10, host_gb_per_s=1e6, latency_s=0, gemm_tflop_per_s={"f64": 1e9})
    made = result_of(problem_of(1024, 4, 1024, reads_c=False), "4,h,h", 5, machine, tile=1024, grid=(1, 4), chunks=8)
    t = 1024 * 1024 * 8 / 10e9
    assert made.predicted_s == pytest.approx(t * (1 + 3 / 8), rel=1e-4)


def test_prediction_is_never_below_the_bound() -> None:
    for ranks, place in itertools.product((1, 2, 4, 8), ("h,h,h", "0,0,0", "h,0,h")):
        machine = Machine.uniform(ranks)
        problem = cube(4096)
        made = result_of(problem, place, ranks, machine, tile=0)
        assert made.predicted_s >= bound(problem, Placement.parse(place), machine).seconds * (1 - 1e-9)  # picoseconds


# -- determinism -----------------------------------------------------------------------------------


def golden_cases() -> dict[str, Schedule]:
    return {
        "16384 h,h,h on 8": make(cube(16384), "h,h,h", 8, tile=0),
        "8192 0,0,0 on 4": make(cube(8192), "0,0,0", 4, tile=0),
        "thin f16 T,N": make(problem_of(1000, 777, 13010, "f16", trans_a="T"), "3,h,5", 8, tile=512),
        "fixed, no lazy": make(problem_of(5000, 3000, 2000, "f32"), "h,h,h", 6, tile=700, order="fixed", wr_lazy=False),
        "no caching": make(problem_of(300, 200, 100), "h,h,h2", 3, tile=64, caching=False),
        "no overlap, bw": make(
            problem_of(4096, 4096, 1024, trans_b="T"), "1,0,h", 4, tile=512, overlap=False, routing="bw"
        ),
        "primes": make(problem_of(4001, 3001, 2003), "h,h,h", 13, tile=301, batch=False),
    }


def test_digests_are_those_of_the_golden_file() -> None:
    assert {name: canonical_digest(schedule) for name, schedule in golden_cases().items()} == json.loads(
        GOLDEN.read_text()
    )


def test_the_same_problem_twice_and_in_another_process_gives_the_same_bytes() -> None:
    again = make(cube(4096), "h,h,h", 8, tile=512)
    assert again.encode() == make(cube(4096), "h,h,h", 8, tile=512).encode()
    code = "from tests.unit.test_uncut import cube, make; print(make(cube(4096), 'h,h,h', 8, tile=512).digest())"
    root = pathlib.Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "PYTHONPATH": str(root)}
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, cwd=root, env=environment
    )
    assert other.stdout.strip() == again.digest()


CHANGES = {
    "tile": 512,
    "grid": (1, 8),
    "devices": (7, 6, 5, 4, 3, 2, 1, 0),
    "row_shares": (1.0, 2.0),
    "col_shares": (1.0, 1.0, 2.0, 1.0),
    "max_hops": 0,
    "chunks": 4,
    "min_chunk_bytes": 8 << 20,
    "compute_lanes": 1,
    "caching": False,
    "overlap": False,
    "routing": "origin",
    "batch": False,
    "wr_lazy": False,
    "order": "fixed",
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_changes_the_digest(name: str) -> None:
    bandwidth = Machine.uniform(8).bandwidth_gb_per_s.copy()
    bandwidth[0, 1] = bandwidth[8, 1] = 1.0  # relays are for slow links
    machine = dataclasses.replace(Machine.uniform(8), bandwidth_gb_per_s=bandwidth)
    default = make(cube(8192), "h,h,h", 8, machine, tile=0)
    changed = make(cube(8192), "h,h,h", 8, machine, **{"tile": 0, name: CHANGES[name]})
    assert changed.digest() != default.digest()


def test_every_option_has_its_change_tested() -> None:
    names = {field.name for field in dataclasses.fields(ScheduleOptions)}
    # Those of searches and of other schedulers.
    others = {
        "scheduler",
        "tune",
        "metric",
        "same_sums",
        "search",
        "areas",
        "k_shares",
        "blocking",
        "device_memory",
        "host_memory",
    }
    assert names == {*CHANGES} | others
