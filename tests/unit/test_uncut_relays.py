"""The paper's scheduler where not every rank computes and where slow links are gone round."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.helpers.planned import make_schedule
from tests.helpers.proven import check, small_chunks  # noqa: F401 (a fixture)
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import Port
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import tiles
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import ROUTINGS, ScheduleOptions
from uncut_mpi.planning.schedule import Kind, Matrix, Role, Schedule
from uncut_mpi.planning.schedulers import Made
from uncut_mpi.planning.verify import verify

T = 16


def machine_of(links: dict[tuple[int, int], float], num_ranks: int, other: float, **more) -> Machine:
    """Return a machine with the bandwidths named, GB/s, and one other bandwidth for all links that are not."""
    bandwidth = np.full((num_ranks + 1, num_ranks + 1), other)
    for link, value in links.items():
        bandwidth[link] = value
    base = Machine.uniform(num_ranks, latency_s=0)
    return dataclasses.replace(base, bandwidth_gb_per_s=bandwidth, **more)


def made(place: str, machine: Machine, problem: GemmProblem | None = None, **options) -> Made:
    problem = problem or GemmProblem(64, 64, 64, DType.f64)
    options = ScheduleOptions(scheduler="uncut", **{"tile": T, **options})
    return make_schedule(problem, Placement.parse(place), machine.num_ranks, machine, options)


def bytes_on(schedule: Schedule, *links: tuple[int, int]) -> int:
    return sum(size for _, source, to, size in schedule.copies().tolist() if (source, to) in links)


def caches(schedule: Schedule) -> list[tuple[int, int]]:
    """Return (rank, matrix) of every buffer in which a relay keeps copies."""
    own = schedule.buffers[schedule.buffers["role"] == Role.CACHE]
    return sorted(zip(own["location"].tolist(), own["matrix"].tolist(), strict=True))


# -- ranks that compute ------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("devices", [(0,), (2, 0), (3, 1, 2), (3, 2, 1, 0)])
@pytest.mark.parametrize("place", ["h,h,h", "1,1,1", "3,0,h1", "h,2,3"])
def test_only_the_devices_named_compute(devices: tuple[int, ...], place: str) -> None:
    schedule = made(place, Machine.uniform(4), devices=devices).schedule
    computing = schedule.tasks["rank"][schedule.tasks["kind"] != Kind.COPY]
    assert set(computing.tolist()) == set(devices)
    panels = schedule.owners()[schedule.buffers["role"] != Role.USER]
    assert set(panels.tolist()) <= set(devices)
    check(schedule)


def test_devices_fill_the_grid_row_by_row_in_their_order() -> None:
    schedule = made("h,h,h", Machine.uniform(5), devices=(4, 0, 3, 1), grid=(2, 2), wr_lazy=False).schedule
    found = {}
    for task in np.flatnonzero(schedule.tasks["kind"] == Kind.COPY):
        write, read = schedule.regions[schedule.operands_of(task)["region"]]
        if schedule.buffers["role"][write["buffer"]] == Role.USER:  # a write-back
            found.setdefault(int(schedule.owners()[read["buffer"]]), (int(write["row"]), int(write["col"])))
    assert {rank: (row // 32, col // 32) for rank, (row, col) in found.items()} == {
        4: (0, 0), 0: (0, 1), 3: (1, 0), 1: (1, 1),
    }  # fmt: skip


def test_the_grid_is_chosen_for_the_ranks_that_compute() -> None:
    assert made("h,h,h", Machine.uniform(8), devices=(1, 2, 4, 7)).schedule.grid == (2, 2)
    with pytest.raises(ParamError, match="grid 2x3 has 6 places, but there are 4 ranks to compute"):
        made("h,h,h", Machine.uniform(8), devices=(1, 2, 4, 7), grid=(2, 3))
    with pytest.raises(ParamError, match=r"rank 8 shall compute \(devices, --compute-ranks\), but there are 8 ranks"):
        made("h,h,h", Machine.uniform(8), devices=(1, 8))


# -- relays --------------------------------------------------------------------------------------------


PARALIA = {(0, 1): 1.0, (0, 2): 3.0, (2, 1): 4.0}
"""The example of PARALiA: rank 1 gets a tile from 0 three times as fast over 2."""


@pytest.mark.usefixtures("small_chunks")
def test_a_slow_link_is_gone_round_over_a_rank_that_need_not_compute() -> None:
    machine = machine_of(PARALIA, 3, 0.5)
    results = [made("0,1,1", machine, devices=(1,), routing="bw", max_hops=hops, chunks=T) for hops in (0, 1)]
    direct, relayed = (result.schedule for result in results)
    a_bytes = 64 * 64 * 8
    assert (bytes_on(direct, (0, 1)), bytes_on(direct, (0, 2), (2, 1)), caches(direct)) == (a_bytes, 0, [])
    assert [bytes_on(relayed, link) for link in PARALIA] == [0, a_bytes, a_bytes]
    assert caches(relayed) == [(2, Matrix.A)]
    assert results[1].predicted_s < 0.4 * results[0].predicted_s
    check(relayed)


@pytest.mark.usefixtures("small_chunks")
def test_by_eta_the_slow_link_still_carries_what_arrives_earlier_over_it() -> None:
    # 0 -> 2 -> 1 brings three tiles while 0 -> 1 brings one.
    schedule = made("0,1,1", machine_of(PARALIA, 3, 0.5), devices=(1,), chunks=T, routing="eta").schedule
    a_bytes = 64 * 64 * 8
    assert 0.1 * a_bytes < bytes_on(schedule, (0, 1)) < 0.4 * a_bytes
    assert bytes_on(schedule, (0, 1)) + bytes_on(schedule, (2, 1)) == a_bytes
    check(schedule)


def test_a_chain_that_is_hardly_faster_than_the_link_is_left_alone() -> None:
    for direct, relays in ((3 / tiles.RELAY_GAIN * 1.3, False), (3 / tiles.RELAY_GAIN * 0.8, True)):
        machine = machine_of({**PARALIA, (0, 1): direct}, 3, 0.5)
        problem = GemmProblem(2048, 2048, 2048, DType.f64)
        schedule = made("0,1,1", machine, problem, devices=(1,), routing="bw", tile=1024).schedule
        assert bool(caches(schedule)) == relays


@pytest.mark.parametrize("batch", [True, False])
def test_where_links_are_equal_nothing_is_relayed(batch: bool) -> None:
    digests = {made("0,3,h1", Machine.uniform(8), max_hops=hops, batch=batch).schedule.digest() for hops in (0, 1, 2)}
    assert len(digests) == 1


@pytest.mark.usefixtures("small_chunks")
def test_routing_by_origin_never_relays() -> None:
    for options in ({"routing": "origin"}, {"caching": False}):
        schedule = made("0,1,1", machine_of(PARALIA, 3, 0.5), devices=(1,), **options).schedule
        assert caches(schedule) == []
        assert bytes_on(schedule, (0, 2)) == 0


@pytest.mark.usefixtures("small_chunks")
def test_two_relays_are_used_only_where_they_are_allowed_and_needed() -> None:
    slow = machine_of({(0, 2): 40, (2, 3): 40, (3, 1): 40}, 4, 1.0)
    for hops, relays in ((0, []), (1, []), (2, [(2, Matrix.A), (3, Matrix.A)])):
        schedule = made("0,1,1", slow, devices=(1,), routing="bw", max_hops=hops).schedule
        assert caches(schedule) == relays
        check(schedule)
    one_is_enough = machine_of({(0, 2): 40, (2, 3): 40, (3, 1): 40, (2, 1): 40}, 4, 1.0)
    assert caches(made("0,1,1", one_is_enough, devices=(1,), routing="bw", max_hops=2).schedule) == [(2, Matrix.A)]


@pytest.mark.usefixtures("small_chunks")
def test_what_a_relay_keeps_is_a_source_for_other_ranks() -> None:
    # 1 and 3 need the same rows of A, which reach both quickly over 2 alone.
    links = {(0, 2): 10, (2, 1): 10, (2, 3): 10, (1, 3): 0.1, (3, 1): 0.1, (0, 1): 1, (0, 3): 1}
    machine = machine_of(links, 4, 5.0)
    for routing in ("bw", "eta"):
        schedule = made(
            "0,h,h", machine, devices=(1, 3), grid=(1, 2), batch=False, routing=routing, order="fixed"
        ).schedule
        a_bytes = 64 * 64 * 8
        once = bytes_on(schedule, (0, 2))
        assert 0.7 * a_bytes <= once <= a_bytes  # not twice
        assert bytes_on(schedule, (2, 1), (2, 3)) > 1.3 * once
        check(schedule)


@pytest.mark.usefixtures("small_chunks")
def test_what_a_relay_keeps_is_fetched_from_there_without_a_chain_being_worth_it() -> None:
    links = {(0, 2): 10, (2, 1): 10, (0, 1): 1, (0, 3): 6, (2, 3): 8, (1, 3): 0.1, (3, 1): 0.1}
    schedule = made(
        "0,h,h", machine_of(links, 4, 5.0), devices=(1, 3), grid=(1, 2), batch=False, routing="bw", order="fixed"
    ).schedule
    a_bytes = 64 * 64 * 8
    assert [bytes_on(schedule, link) for link in ((0, 2), (2, 1), (2, 3), (0, 3))] == [a_bytes, a_bytes, a_bytes, 0]
    check(schedule)


@pytest.mark.usefixtures("small_chunks")
def test_a_batched_fetch_is_ordered_with_its_relays_in_mind() -> None:
    # By direct links alone 0 -> 3 -> 1 would be best; over 2, rank 1 passes tiles to 3 much faster.
    links = {(0, 1): 40, (0, 3): 40, (1, 3): 1, (1, 2): 40, (2, 3): 40}
    schedule = made("0,h,h", machine_of(links, 4, 5.0), devices=(1, 3), grid=(1, 2), routing="bw", chunks=T).schedule
    a_bytes = 64 * 64 * 8
    assert [bytes_on(schedule, link) for link in ((0, 1), (1, 2), (2, 3), (0, 3))] == [a_bytes, a_bytes, a_bytes, 0]
    check(schedule)


@pytest.mark.usefixtures("small_chunks")
def test_a_chain_over_many_ranks_goes_by_their_fast_links() -> None:
    links = {(rank, rank + 1): 40 for rank in range(7)}
    problem = GemmProblem(64, 7 * T, 64, DType.f64)
    schedule = made(
        "0,h,h", machine_of(links, 8, 5.0), problem, devices=tuple(range(1, 8)), grid=(1, 7), routing="bw", max_hops=0
    ).schedule
    assert [bytes_on(schedule, link) for link in links] == [64 * 64 * 8] * 7


@pytest.mark.usefixtures("small_chunks")
def test_a_relay_that_needs_the_tile_takes_it_into_its_panel() -> None:
    schedule = made(
        "0,h,h", machine_of(PARALIA, 3, 0.5), devices=(1, 2), grid=(1, 2), batch=False, routing="bw"
    ).schedule
    a_bytes = 64 * 64 * 8
    assert [bytes_on(schedule, link) for link in PARALIA] == [0, a_bytes, a_bytes]
    assert (2, Matrix.A) not in caches(schedule)
    check(schedule)


@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("dtype", ["f64", "bf16"])
@pytest.mark.parametrize("wr_lazy", [True, False])
def test_c_is_fetched_and_written_back_over_relays_where_its_links_are_slow(dtype: str, wr_lazy: bool) -> None:
    links = {(0, 1): 1, (0, 2): 10, (2, 1): 10, (1, 0): 1, (1, 2): 10, (2, 0): 10}
    problem = GemmProblem(64, 64, 64, DType[dtype])
    schedule = made("0,1,0", machine_of(links, 3, 1.0), problem, devices=(1,), routing="bw", wr_lazy=wr_lazy).schedule
    assert bytes_on(schedule, (0, 1), (1, 0)) == 0
    c_bytes = 64 * 64 * problem.dtype.itemsize
    assert bytes_on(schedule, (1, 2)) == bytes_on(schedule, (2, 0)) == c_bytes
    assert caches(schedule) == [(2, Matrix.A), (2, Matrix.C)]
    check(schedule)


@pytest.mark.usefixtures("small_chunks")
def test_host_memory_is_reached_over_the_rank_with_the_good_link() -> None:
    host = 3
    links = {(host, 0): 10, (0, host): 10, (0, 1): 50, (1, 0): 50, (0, 2): 50, (2, 0): 50}
    schedule = made("h,h,h", machine_of(links, 3, 1.0), devices=(1, 2), routing="bw").schedule
    assert bytes_on(schedule, (host, 1), (host, 2), (1, host), (2, host)) == 0
    matrix_bytes = 64 * 64 * 8
    assert bytes_on(schedule, (host, 0)) == 3 * matrix_bytes  # each tile once
    assert bytes_on(schedule, (0, 1), (0, 2)) == 4 * matrix_bytes  # those of A to both
    check(schedule)


@pytest.mark.usefixtures("small_chunks")
def test_private_host_memory_is_relayed_by_copies_that_its_rank_issues() -> None:
    host = 3
    links = {(host, 1): 10, (1, host): 10, (1, 0): 50, (0, 1): 50, (0, 2): 50, (2, 0): 50}
    schedule = made("h1,h1,h1", machine_of(links, 3, 1.0), devices=(2,), routing="bw").schedule
    assert bytes_on(schedule, (host, 2), (2, host)) == 0
    assert bytes_on(schedule, (host, 0)) == bytes_on(schedule, (0, 2)) == 3 * 64 * 64 * 8
    for task, source, to, _ in schedule.copies().tolist():
        assert schedule.tasks["rank"][task] == (1 if host in (source, to) else source)
    check(schedule)


def test_a_port_that_both_links_of_a_chain_share_counts() -> None:
    for capacity, relays in ((2.5, False), (8.0, True)):
        port = Port.of("switch of rank 2", capacity, [(0, 2), (2, 1)])
        machine = machine_of(PARALIA, 3, 0.5, ports=(port,))
        problem = GemmProblem(2048, 2048, 2048, DType.f64)
        schedule = made("0,1,1", machine, problem, devices=(1,), routing="bw", tile=1024, chunks=64).schedule
        assert bool(caches(schedule)) == relays


@pytest.mark.usefixtures("small_chunks")
def test_copies_at_relays_fit_their_memory_and_the_rest_goes_direct() -> None:
    base = machine_of(PARALIA, 3, 0.5)
    for slots in (0, 3, 16):
        memory = np.array([10**9, 10**9, slots * T * T * 8 + 3 * 256])
        machine = dataclasses.replace(base, memory_bytes=memory)
        schedule = made("0,1,1", machine, devices=(1,), routing="bw").schedule
        assert bytes_on(schedule, (2, 1)) == slots * T * T * 8
        assert bytes_on(schedule, (0, 1)) == (16 - slots) * T * T * 8
        assert schedule.softbuf_bytes()[2] == slots * T * T * 8
        check(schedule)


# -- a node like PARALiA's Vulcan ----------------------------------------------------------------------

NVLINKS = {
    (0, 1): 24, (0, 2): 24, (0, 3): 48, (0, 4): 48, (1, 2): 48, (1, 3): 24, (1, 5): 48, (2, 3): 48, (2, 6): 24,
    (3, 7): 24, (4, 5): 24, (4, 6): 24, (4, 7): 48, (5, 6): 48, (5, 7): 24, (6, 7): 48,
}  # fmt: skip
"""NVLinks between the eight V100 of such a node; the other pairs reach less than 6 GB/s."""


def vulcan() -> Machine:
    links = {pair: float(rate) for way in (1, -1) for ends, rate in NVLINKS.items() for pair in (ends[::way],)}
    links |= {(8, rank): 12.0 for rank in range(8)} | {(rank, 8): 12.0 for rank in range(8)}
    return machine_of(links, 8, 5.5, gemm_tflop_per_s={"f64": np.full(8, 7.0)}, typical_gemm_tflop_per_s={})


def slow_pairs(schedule: Schedule) -> int:
    fast = {*NVLINKS, *(ends[::-1] for ends in NVLINKS)}
    copies = schedule.copies()
    return sum(
        size for _, source, to, size in copies.tolist()
        if max(source, to) < 8 and source != to and (source, to) not in fast
    )  # fmt: skip


@pytest.mark.parametrize("place", ["0,0,0", "5,2,7", "0,h,3"])
@pytest.mark.parametrize("batch", [True, False])
def test_tiles_go_round_the_slow_pairs_of_a_cube_mesh(place: str, batch: bool) -> None:
    problem = GemmProblem(8192, 8192, 8192, DType.f64)
    by_hops = [made(place, vulcan(), problem, tile=1024, batch=batch, max_hops=hops) for hops in (0, 1, 2)]
    direct, relayed, _ = by_hops
    assert slow_pairs(relayed.schedule) < 0.7 * slow_pairs(direct.schedule)
    assert relayed.predicted_s < 1.01 * direct.predicted_s
    assert caches(direct.schedule) == []
    blind = made(place, vulcan(), problem, tile=1024, batch=batch, routing="bw")
    assert slow_pairs(blind.schedule) == 0
    for result in (*by_hops, blind):
        verify(result.schedule, lower(result.schedule))


def test_going_round_pays_where_a_result_returns_to_one_rank() -> None:
    problem = GemmProblem(8192, 8192, 2048, DType.f64, reads_c=False)
    direct, relayed = (made("0,0,0", vulcan(), problem, tile=1024, max_hops=hops).predicted_s for hops in (0, 1))
    assert relayed < 0.8 * direct


@pytest.mark.parametrize("routing", ROUTINGS)
def test_relayed_schedules_are_the_same_every_time(routing: str) -> None:
    problem = GemmProblem(4096, 4096, 4096, DType.f64)
    digests = {
        made("5,2,7", vulcan(), problem, tile=512, routing=routing, batch=False, max_hops=2).schedule.digest()
        for _ in range(2)
    }
    assert len(digests) == 1
