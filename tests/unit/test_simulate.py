"""The simulator: closed cases by hand, laws that every run keeps, what it counts."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.by_hand import ByHand
from tests.helpers.faults import set_rows
from uncut_mpi.calibration.probes import Areas, GemmProbe, Transfers, sums, transfers
from uncut_mpi.errors import ParamError, TopologyError
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.costs import (
    HELD,
    HOST_COPY_GB_PER_S,
    HOST_TRANSPOSED_PER_S,
    TRANSPOSING_SHARE,
    GemmShape,
    IssueCosts,
    RowRates,
)
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location, host_index
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import Port, device_ports, duplex_ports, fair_rates
from uncut_mpi.model.problem import GemmProblem, StoredMatrix
from uncut_mpi.planning.builder import RegionRef
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Factor, Kind, LaneKind, Op, Role, Schedule
from uncut_mpi.planning.simulate import Simulations, simulate, union_seconds


def make(
    m: int,
    n: int,
    k: int,
    place: str,
    ranks: int,
    *,
    reads_c: bool = False,
    dtype: DType = DType.f64,
    **options: Any,
) -> Schedule:
    problem = GemmProblem.from_operands(
        StoredMatrix(m, k, "F", m), StoredMatrix(k, n, "F", k), StoredMatrix(m, n, "F", m), dtype=dtype,
        reads_c=reads_c,
    )  # fmt: skip
    machine = Machine.uniform(ranks, gemm_tflop_per_s={dtype.name: 1.0})
    planned = plan(problem, Placement.parse(place), ranks, machine, ScheduleOptions(scheduler="uncut", **options))
    return planned.schedule


def machine_of(ranks: int, **changes: Any) -> Machine:
    if "gemm_tflop_per_s" in changes:
        changes["typical_gemm_tflop_per_s"] = changes["gemm_tflop_per_s"]
    return dataclasses.replace(
        Machine.uniform(
            ranks, link_gb_per_s=100, host_gb_per_s=10, latency_s=0, gemm_tflop_per_s={"f64": 1.0, "f32": 1.0}
        ),
        **changes,
    )


def seconds_of(schedule: Schedule, machine: Machine, **options: Any) -> float:
    return simulate(schedule, machine, **options).seconds


# -- by hand ---------------------------------------------------------------------------------------


def test_a_product_at_home_takes_its_operations() -> None:
    schedule = make(256, 256, 512, "0,0,0", 1, tile=4096)
    assert seconds_of(schedule, machine_of(1)) == pytest.approx(2 * 256 * 256 * 512 / 1e12)


def test_waves_depth_and_overhead_of_a_product() -> None:
    shape = GemmShape(block_rows=128, block_cols=64, half_depth=100, overhead_s=1e-5)
    machine = machine_of(1, gemm_shape={"f64": shape}, multiprocessors=np.array([10]))
    # 3 × 5 blocks on 10 multiprocessors: two waves.
    schedule = make(300, 300, 512, "0,0,0", 1, tile=4096)
    expected = 1e-5 + 2 * 20 * 128 * 64 * 612 / 1e12
    assert seconds_of(schedule, machine) == pytest.approx(expected)
    assert shape.work(300, 300, 512, 10) == (2 * 20 * 128 * 64 * 612, 0.75)


def test_blocks_without_waves_are_as_many_as_there_are() -> None:
    shape = GemmShape(block_rows=128, block_cols=64, half_depth=100, overhead_s=1e-5, waves=False)
    machine = machine_of(1, gemm_shape={"f64": shape}, multiprocessors=np.array([10]))
    schedule = make(300, 300, 512, "0,0,0", 1, tile=4096)
    assert seconds_of(schedule, machine) == pytest.approx(1e-5 + 2 * 15 * 128 * 64 * 612 / 1e12)
    assert shape.work(300, 300, 512, 10) == (2 * 15 * 128 * 64 * 612, 1.0)
    with pytest.raises(ParamError, match="waves = 1 of GemmShape is neither true nor false"):
        GemmShape(waves=1)  # type: ignore[arg-type]


def test_a_product_waits_for_its_last_blocks_and_for_c() -> None:
    shape = GemmShape(half_depth=100, tail_elements=5000, c_s_per_byte=1e-9)
    machine = machine_of(
        1, gemm_shape={"f64": shape, "f16": shape}, gemm_tflop_per_s={"f64": np.ones(1), "f16": np.ones(1)}
    )
    operations = 2 * (300 * 200 * 612 + 5000 * 512)
    # One product that reads C: 8 bytes of each element more than one that only writes it.
    schedule = make(300, 200, 512, "0,0,0", 1, reads_c=True, tile=4096)
    assert seconds_of(schedule, machine) == pytest.approx(operations / 1e12 + 8e-9 * 300 * 200)
    assert shape.work(300, 200, 512, 10) == (operations, 60000 / 65000)
    # Half types accumulate in 4 bytes, and to write these once is no more than expected.
    halves = make(300, 200, 512, "0,0,0", 1, reads_c=True, dtype=DType.f16, tile=4096)
    found = simulate(halves, machine)
    (product,) = np.flatnonzero(halves.tasks["kind"] == Kind.GEMM)
    assert found.end_s[product] - found.start_s[product] == pytest.approx(operations / 1e12)


def test_a_long_product_hides_a_part_of_moving_c() -> None:
    shape = GemmShape(c_s_per_byte=1e-9, c_half_depth=256)
    machine = machine_of(1, gemm_shape={"f64": shape})
    for k, part in ((256, 1 / 2), (768, 1 / 4)):
        schedule = make(300, 200, k, "0,0,0", 1, reads_c=True, tile=4096)
        expected = 2 * 300 * 200 * k / 1e12 + part * 8e-9 * 300 * 200
        assert seconds_of(schedule, machine) == pytest.approx(expected)
        assert shape.seconds(300, 200, k, 1, 1e12, 8 * 300 * 200) == pytest.approx(expected)
    assert dataclasses.replace(shape, c_half_depth=0.0).native().moving_s(100, 1 << 20) == pytest.approx(1e-7)
    with pytest.raises(ParamError, match="c_half_depth = -1 of GemmShape: it cannot be negative"):
        GemmShape(c_half_depth=-1)


@pytest.mark.parametrize(
    ("m", "n", "longer"), [(512, 256, 0), (256, 100, 0), (300, 256, 1), (256, 700, 1), (300, 700, 1)]
)
def test_an_uneven_product_takes_longer(m: int, n: int, longer: int) -> None:
    shape = GemmShape(half_depth=100, uneven=0.25)
    machine = machine_of(1, gemm_shape={"f64": shape})
    operations = 2 * m * n * (512 * (1 + 0.25 * longer) + 100)
    assert seconds_of(make(m, n, 512, "0,0,0", 1, tile=4096), machine) == pytest.approx(operations / 1e12)
    assert shape.work(m, n, 512, 10)[0] == pytest.approx(operations)


@pytest.mark.parametrize(
    ("changes", "longer"),
    [
        ({}, 0),
        ({"lda": 514}, 0),
        ({"lda": 513}, 1),
        ({"ldb": 257}, 1),
        ({"lda": 513, "ldb": 257}, 1),
        ({"ldc": 513}, 1),
    ],
)
def test_a_product_takes_longer_where_columns_are_not_aligned(changes: dict[str, int], longer: int) -> None:
    machine = machine_of(1, gemm_shape={"f64": GemmShape(half_depth=100, misaligned=0.5)})
    problem = GemmProblem(512, 256, 256, DType.f64, **changes)
    made = plan(problem, Placement.parse("0,0,0"), 1, machine, ScheduleOptions(scheduler="uncut", tile=4096)).schedule
    operations = 2 * 512 * 256 * (256 * (1 + 0.5 * longer) + 100)
    assert seconds_of(made, machine) == pytest.approx(operations / 1e12)
    shape = machine.gemm_shape["f64"]
    assert shape.work(512, 256, 256, 10, aligned=not longer)[0] == pytest.approx(operations)


def test_a_product_takes_longer_where_its_part_of_a_begins_between_two_aligned_columns() -> None:
    machine = machine_of(1, gemm_shape={"f64": GemmShape(misaligned=0.5)})
    halves = [make(512, 256, 256, "0,0,0", 1, tile=tile) for tile in (128, 129)]
    even, odd = (seconds_of(schedule, machine) for schedule in halves)
    assert even == pytest.approx(2 * 512 * 256 * 256 / 1e12)
    assert odd > 1.2 * even


def test_fetch_compute_and_write_back_follow_one_another() -> None:
    machine = machine_of(1, latency_s=np.full((2, 2), 1e-6))
    schedule = make(512, 512, 512, "h,h,h", 1, tile=512)
    tile_s = 512 * 512 * 8 / 10e9 + 1e-6
    assert seconds_of(schedule, machine) == pytest.approx(3 * tile_s + 2 * 512**3 / 1e12)


def test_narrow_rows_slow_a_copy() -> None:
    # Rows of 512 bytes, 64 KiB apart: between two widths, and below the first.
    machine = machine_of(1, row_rates=RowRates(host_in=((256, 0.4), (1024, 0.6)), host_out=((1024, 0.5), (4096, 1))))
    schedule = make(8192, 64, 64, "h,h,h", 1, tile=64)
    fetch, write = ((64 * 64 * 8) / share / 10e9 for share in (0.5, 0.25))
    whole = 64 * 64 * 8 / 10e9  # B is one tile and contiguous
    times = simulate(schedule, machine)
    copies = schedule.copies()
    lasting = (times.end_s - times.start_s)[copies[:, 0]]
    assert lasting[copies[:, 2] == host_index(1)] == pytest.approx(write)
    assert sorted(set(lasting[copies[:, 1] == host_index(1)].round(12))) == pytest.approx([whole, fetch])


@pytest.mark.parametrize(
    ("rows", "share"),
    [
        (RowRates(device=((256, 0.4), (1024, 0.6))), 0.5),
        (RowRates(device=((256, 0.4), (1024, 0.6)), local=((1024, 0.2),)), 0.1),
    ],
)
def test_rows_within_a_device_have_a_table_of_their_own(rows: RowRates, share: float) -> None:
    # A of half its rows' distance is copied into a panel, since 16 bytes are no whole number of its columns.
    shape = GemmShape(misaligned=100.0)
    machine = machine_of(1, row_rates=rows, gemm_shape={"f64": shape})
    problem = GemmProblem(64, 64, 64, DType.f64, lda=129)
    schedule = plan(problem, Placement.parse("0,0,0"), 1, machine, ScheduleOptions(scheduler="kblocks")).schedule
    times = simulate(schedule, machine)
    copies = schedule.copies()[:, 0]
    moved = schedule.copies()[:, 3]
    assert len(copies)
    bandwidth = machine.bandwidth_gb_per_s[0, 0] * 1e9
    assert (times.end_s - times.start_s)[copies] == pytest.approx(moved / share / bandwidth)


@pytest.mark.parametrize(("rows", "share"), [(128, 1.0), (256, 1 - 0.5 * 1 / 63), (1 << 12, 1 - 0.5 * 31 / 63)])
def test_rows_that_lie_close_together_cost_less(rows: int, share: float) -> None:
    # Rows of 512 bytes; of 64 KiB less twice their width what lies between two of them is 0, 1 and 31 parts of 63.
    table = RowRates(host_in=((512, 0.5),), host_out=((512, 0.5),))
    schedule = make(rows, 64, 64, "h,h,h", 1, tile=64)
    times = simulate(schedule, machine_of(1, row_rates=table))
    copies = schedule.copies()
    lasting = (times.end_s - times.start_s)[copies[:, 0]]
    assert lasting[copies[:, 2] == host_index(1)] == pytest.approx(64 * 64 * 8 / share / 10e9)


def host_reads(schedule: Schedule, machine: Machine) -> dict[tuple[int, int], float]:
    """Return what fetches from the host get of their link's bandwidth, by the first row and the rows that they read."""
    times, found = simulate(schedule, machine), {}
    for at, source, _, moved in schedule.copies().tolist():
        if source == host_index(schedule.num_ranks):
            read = schedule.regions[schedule.operands["region"][schedule.tasks["first_operand"][at] + 1]]
            share = moved / (times.end_s - times.start_s)[at] / 10e9
            found[int(read["row"]), int(read["rows"])] = share
    return found


def test_a_row_that_lies_in_two_lines_of_host_memory_takes_as_long_as_two() -> None:
    # Columns are 128 KiB apart; tiles have 6144 rows, 48 KiB: the second one's begin 16 KiB before a line of 64 KiB.
    table = RowRates(host_in=((16384, 0.5), (65536, 1.0)))
    found = host_reads(make(16384, 64, 64, "h,h,h", 1, tile=6144), machine_of(1, row_rates=table))
    at_32, at_48 = 0.75, 0.5 + 0.5 * math.log(3) / math.log(4)
    assert found[0, 6144] == pytest.approx(at_48)
    assert found[6144, 6144] == pytest.approx(48 / (16 / 0.5 + 32 / at_32))
    assert found[12288, 4096] == pytest.approx(at_32)


@pytest.mark.parametrize(("ld", "place"), [(9216, "h,h,h"), (10001, "h,h,h"), (8192, "h0,h0,h0")])
def test_rows_that_begin_anywhere_in_lines_cost_what_they_do_on_average(ld: int, place: str) -> None:
    # Rows of 16 KiB. 72 KiB apart they begin at eight places of a line, of which one has half of the row in the next;
    # 80008 bytes apart, or where a caller's memory begins, anywhere.
    table = RowRates(host_in=((16384, 0.5), (65536, 1.0)))
    problem = GemmProblem(8192, 64, 64, DType.f64, lda=ld, ldc=ld)
    options = ScheduleOptions(scheduler="uncut", tile=2048)
    schedule = plan(problem, Placement.parse(place), 1, machine_of(1), options).schedule
    found = host_reads(schedule, machine_of(1, row_rates=table))

    def cost(begins: float) -> float:
        parts = [min(16.0, 64 - begins), max(0.0, begins - 48)]
        return sum(part / (0.5 * part / 16) for part in parts if part) / 16

    places = [8 * at for at in range(8)] if ld == 9216 else [4 * at + 2 for at in range(16)]
    assert found[2048, 2048] == pytest.approx(1 / np.mean([cost(begins) for begins in places]))


def test_peers_share_the_owners_port() -> None:
    # Three ranks fetch a block of A each and all of B from rank 0 at once.
    schedule = make(4096, 64, 4096, "0,0,0", 4, grid=(4, 1), tile=4096, batch=False, routing="origin")
    moved = 3 * (1024 * 4096 + 4096 * 64) * 8
    fast = {"f64": np.full(4, 1e6)}
    free = seconds_of(schedule, machine_of(4, gemm_tflop_per_s=fast))
    ports = tuple(device_ports(range(4), 100, 100))
    shared = seconds_of(schedule, machine_of(4, gemm_tflop_per_s=fast, ports=ports))
    assert shared > moved / 100e9
    assert free == pytest.approx(moved / 3 / 100e9, rel=0.2)
    assert shared == pytest.approx(moved / 100e9, rel=0.1)


def test_both_ways_of_the_host_share_its_memory() -> None:
    ports = duplex_ports("host", [(1, 0)], [(0, 1)], in_gb_per_s=10, out_gb_per_s=10, both_gb_per_s=(5, 5))
    schedule = make(8192, 64, 64, "h,h,h", 1, tile=64)
    alone, shared = (seconds_of(schedule, machine_of(1, ports=p)) for p in ((), tuple(ports)))
    assert shared == pytest.approx(2 * alone, rel=0.1)


def test_one_thread_for_all_ranks_issues_for_longer() -> None:
    schedule = make(1024, 1024, 1024, "h,h,h", 4, tile=128)
    machine = machine_of(4, costs=IssueCosts(copy_s=1e-4, gemm_s=1e-4))
    bodies = int(np.isin(schedule.tasks["kind"], (Kind.COPY, Kind.GEMM)).sum())
    each, one = (seconds_of(schedule, machine, issuing_threads=threads) for threads in (0, 1))
    assert one > bodies * 1e-4 > 2 * each


def test_events_and_flags_are_seen_later() -> None:
    schedule = make(512, 512, 512, "1,1,0", 2, grid=(1, 2), tile=512, batch=False)
    still = seconds_of(schedule, machine_of(2))
    late = seconds_of(schedule, machine_of(2, costs=IssueCosts(flag_latency_s=1e-3)))
    assert late - still == pytest.approx(1e-3, rel=1e-6)


def test_a_kernel_that_leaves_room_runs_beside_the_next() -> None:
    # Two C tiles of one block each on a device with room for two.
    shape = {"f64": GemmShape(block_rows=64, block_cols=64)}
    schedule = make(64, 128, 64, "0,0,0", 1, tile=64)
    alone = 2 * 2 * 64 * 64 * 64 / 1e12
    machine = machine_of(1, gemm_shape=shape, multiprocessors=np.array([2]))
    assert seconds_of(schedule, machine) == pytest.approx(alone)
    machine = machine_of(1, gemm_shape=shape, multiprocessors=np.array([1]))
    assert seconds_of(schedule, machine) == pytest.approx(alone)  # one after the other, each half as long


@pytest.mark.parametrize(
    ("use", "both"), [(1.0, 1.0), (0.5, 2 - 5 / 11), (0.0, 2.0)], ids=["all of it", "half of it", "nothing"]
)
def test_another_product_has_only_part_of_what_one_leaves_idle(use: float, both: float) -> None:
    # Each keeps 3 of 8 multiprocessors busy: it has 3, 5.5 or all of them to itself, and the other one the rest.
    shape = {"f64": GemmShape(block_rows=64, block_cols=64, idle_use=use)}
    schedule = make(2 * 192, 64, 64, "0,0,0", 1, tile=192)
    alone = 8 * 2 * 64 * 64 * 64 / 1e12
    machine = machine_of(1, gemm_shape=shape, multiprocessors=np.array([8]))
    assert len(schedule.tasks) == len(np.unique(schedule.tasks["lane"])) == 2
    assert seconds_of(schedule, machine) == pytest.approx(both * alone)


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("link", [(0, 0), (0, 1)], ids=["within", "between"])
def test_copies_within_a_device_take_their_share_of_products_beside_them(share: float, link: tuple[int, int]) -> None:
    # Four copies of 1 MB at 100 GB/s, one after another, beside two products of 268 us each in all.
    load = GemmProbe((512, 512, 512)), DType.f64, 2
    schedule = transfers(Areas(2, 1 << 20, 1 << 24), [Transfers(link, 4, 1 << 20)], load).schedule
    machine = machine_of(2, gemm_shape={"f64": GemmShape(copy_share=share)})
    copies = 4 * (1 << 20) / (1e9 * machine.bandwidth_gb_per_s[link])
    products = 2 * 2 * 512**3 / 1e12
    assert copies < products
    expected = products + share * copies * (link == (0, 0))
    assert seconds_of(schedule, machine) == pytest.approx(expected)


@pytest.mark.parametrize(("wait", "blocks"), [(0.0, 0.0), (0.5, 0.5), (HELD, 64.0)])
def test_sums_go_before_blocks_that_have_not_begun(wait: float, blocks: float) -> None:
    # A product of 64 waves of one block, and two sums of 64×64 behind it: 3 · 8 · 4096 bytes at 1 GB/s each.
    machine = machine_of(
        1,
        gemm_shape={"f64": GemmShape(block_rows=64, block_cols=64, sum_wait=wait)},
        multiprocessors=np.array([1]),
        combine_gb_per_s=np.array([1.0]),
    )
    schedule = sums(Areas(1, 1 << 20, 1 << 24), 64, 64, 2, GemmProbe((512, 512, 64)), DType.f64).schedule
    run = simulate(schedule, machine)
    block_s, sum_s = 2 * 64**3 / 1e12, 3 * 8 * 64 * 64 / 1e9
    # The second sum is on the lane of the first: the product has gone on meanwhile.
    ends = [blocks * block_s + sum_s, min(2 * blocks, 64) * block_s + 2 * sum_s]
    product_s = 64 * block_s + (0 if wait == HELD else 2 * sum_s)
    assert run.end_s == pytest.approx([product_s, *ends])


@pytest.mark.parametrize(("rest", "longer"), [(0.0, 0.2), (0.1, 0.2 - 0.046), (1.0, 0.0)])
def test_products_take_longer_at_the_power_limit_unless_their_device_rests(rest: float, longer: float) -> None:
    # Sums last for a part of the product's time, when the device does not multiply.
    product_s = 2 * 512**3 / 1e12
    machine = machine_of(
        1,
        gemm_shape={"f64": GemmShape(sum_wait=HELD, sustained=1.2)},
        combine_gb_per_s=np.array([3 * 8 * 64 * 64 / 1e9 / (rest * product_s) if rest else 1.0]),
    )
    areas = Areas(1, 1 << 20, 1 << 24)
    schedule = sums(areas, 64, 64, int(rest > 0), GemmProbe((512, 512, 512)), DType.f64).schedule
    run = simulate(schedule, machine)
    assert run.throttled_s == pytest.approx([longer * product_s])
    assert run.seconds == pytest.approx((1 + rest + longer) * product_s)


@pytest.mark.parametrize("name", ["idle_use", "copy_share"])
def test_no_more_than_all_of_a_device_can_be_used(name: str) -> None:
    with pytest.raises(ParamError, match=rf"{name} = 1\.5"):
        GemmShape(**{name: 1.5})


# -- laws ------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_every_run_keeps_the_order_and_never_beats_the_bound(seed: int) -> None:
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(1, 9))
    m, n, k = (int(rng.integers(1, 3000)) for _ in range(3))
    places = ["h", *map(str, range(ranks))]
    place = ",".join(rng.choice(places, 3))
    reads_c = bool(rng.integers(2))
    schedule = make(
        m, n, k, place, ranks, reads_c=reads_c, tile=int(rng.integers(100, 900)), batch=bool(rng.integers(2)),
        routing=str(rng.choice(["origin", "bw", "eta"])), overlap=bool(rng.integers(2)), caching=bool(rng.integers(2)),
    )  # fmt: skip
    host = ranks
    machine = machine_of(
        ranks,
        ports=(
            *device_ports(range(ranks), 120, 90),
            *duplex_ports(
                "host", [(host, r) for r in range(ranks)], [(r, host) for r in range(ranks)],
                in_gb_per_s=25, out_gb_per_s=20, both_gb_per_s=(14, 13),
            ),
        ),
        row_rates=RowRates(((256, 0.5), (4096, 0.9)), ((512, 0.5),), ((512, 0.3), (1 << 17, 1))),
        costs=IssueCosts(1e-6, 8e-6, 3e-6, 6e-7, 6e-7, 2e-7, 2e-6, 5e-6),
    )  # fmt: skip
    run = simulate(schedule, machine)
    again = simulate(schedule, machine)
    assert (run.end_s == again.end_s).all()
    assert (run.end_s >= run.start_s).all()
    last: dict[int, float] = {}
    for index, task in enumerate(schedule.tasks):
        before = [float(run.end_s[awaited]) for awaited in schedule.awaited(index)]
        before.append(last.get(int(task["lane"]), 0.0))
        assert run.start_s[index] >= max(before) - 1e-15
        last[int(task["lane"])] = float(run.end_s[index])
    assert run.seconds >= bound(schedule.problem, Placement.parse(place), machine).seconds * (1 - 1e-9)
    # What a rank's device does cannot take less than its operations at full rate.
    assert (run.idle_share >= -1e-12).all()
    assert (run.idle_share <= 1).all()


def test_slower_links_do_not_help() -> None:
    # First come, first served has anomalies (Graham 1969), so only up to a tenth.
    for place, batch in itertools.product(("h,h,h", "0,0,0", "h,1,0"), (True, False)):
        schedule = make(4096, 4096, 4096, place, 4, reads_c=True, tile=1024, batch=batch)
        times = [
            seconds_of(schedule, dataclasses.replace(machine_of(4), bandwidth_gb_per_s=np.full((5, 5), rate)))
            for rate in (5.0, 10.0, 20.0, 1e6)
        ]
        assert all(faster <= 1.1 * slower for slower, faster in itertools.pairwise(times))
        assert times[-1] >= 2 * 4096**3 / 4e12


# -- counts ----------------------------------------------------------------------------------------


def test_tile_transfers_of_a_square_product_from_the_host() -> None:
    # 16384³ in tiles of 2048 on a 2×4 grid of 8 (claims, Uncut-GEMMs 13): A, B and C once from the host, C once
    # back; A to three more ranks of its row, B to one more of its column.
    schedule = make(16384, 16384, 16384, "h,h,h", 8, reads_c=True, tile=2048, chunks=1, grid=(2, 4))
    transfers = simulate(schedule, machine_of(8)).transfers()
    assert transfers[8].sum() == 192
    assert transfers[:, 8].sum() == 64
    assert transfers[:8, :8].sum() == 256
    assert transfers.sum() == 512
    tile_bytes = 2048 * 2048 * 8
    assert (simulate(schedule, machine_of(8)).transferred_bytes() == transfers * tile_bytes).all()


def test_intervals_are_joined_before_they_are_added() -> None:
    assert union_seconds(np.array([0.0, 1.0, 5.0, 5.5]), np.array([2.0, 3.0, 6.0, 5.6])) == pytest.approx(4)
    assert union_seconds(np.array([]), np.array([])) == 0


# -- errors ----------------------------------------------------------------------------------------


def test_a_machine_of_another_size_is_refused() -> None:
    with pytest.raises(ParamError, match="has 2 ranks, the schedule 1"):
        simulate(make(64, 64, 64, "h,h,h", 1), machine_of(2))


def test_a_negative_number_of_threads_is_refused() -> None:
    with pytest.raises(ParamError, match="issuing_threads = -1"):
        simulate(make(64, 64, 64, "h,h,h", 1), machine_of(1), issuing_threads=-1)


def test_a_machine_without_a_rate_for_the_type_is_refused() -> None:
    machine = machine_of(1, gemm_tflop_per_s={"f32": np.ones(1)})
    with pytest.raises(TopologyError, match="no GEMM rate for f64"):
        simulate(make(64, 64, 64, "h,h,h", 1), machine)


def test_lanes_pay_for_waits_and_signals_and_a_call_for_itself() -> None:
    # Rank 1 forwards a tile to rank 0's product: one signal, one wait.
    schedule = make(512, 512, 512, "1,1,0", 2, grid=(1, 2), tile=512, batch=False)
    still = seconds_of(schedule, machine_of(2))
    assert seconds_of(schedule, machine_of(2, costs=IssueCosts(call_s=1e-3))) - still == pytest.approx(1e-3)
    # A lane that comes to its wait late pays for it; one that has waited longer for the tile does not.
    (product,) = np.flatnonzero((schedule.tasks["kind"] == Kind.GEMM) & (schedule.tasks["rank"] == 0))
    slow = simulate(schedule, machine_of(2, costs=IssueCosts(wait_lane_s=1e-3)))
    assert slow.start_s[product] == pytest.approx(1e-3)
    assert seconds_of(schedule, machine_of(2, costs=IssueCosts(wait_lane_s=1e-6))) == pytest.approx(still)
    # Two tiles on one lane: the second starts after the first one's signal.
    schedule = make(512, 512, 1024, "1,1,0", 2, grid=(1, 2), tile=512, batch=False)
    run = simulate(schedule, machine_of(2, costs=IssueCosts(signal_lane_s=1e-3)))
    lanes = schedule.lanes[schedule.tasks["lane"]]
    # Tiles of A and of B; the product awaits both, so the second of them signals.
    _, signalling, after, _ = np.flatnonzero((lanes["kind"] == LaneKind.COPY) & (schedule.tasks["rank"] == 1))
    assert run.start_s[after] - run.end_s[signalling] == pytest.approx(1e-3)


def three_copies(*, serial_copies: bool) -> Schedule:
    """Rank 0 copies 1 MB to rank 1, then to rank 2, then to rank 1; rank 1 hands the first one on to rank 3."""
    build = ByHand(4, serial_copies=serial_copies)
    whole = [build.add(rank, 10**6 // 8) for rank in (0, 1, 2, 1, 3)]
    came = [build.copy(build.copy_lane(0, 0, rank), whole[goal], whole[0]) for goal, rank in ((1, 1), (2, 2), (3, 1))]
    build.copy(build.copy_lane(1, 1, 3), whole[4], whole[1], came[:1])
    return build.done()


def test_a_device_that_copies_in_turn_tells_of_a_copy_when_its_lane_s_turn_comes() -> None:
    # 1 MB at 100 GB/s: 10 us each.
    together = machine_of(4)
    in_turn = dataclasses.replace(together, serial_copies=True)
    lanes = three_copies(serial_copies=False)
    assert simulate(lanes, together).end_s * 1e6 == pytest.approx([10, 10, 20, 20])
    # The first copy is over after 10 us, but its lane comes to the flag behind it after the other lane's copy.
    run = simulate(lanes, in_turn)
    assert run.start_s * 1e6 == pytest.approx([0, 10, 20, 20])
    assert run.end_s * 1e6 == pytest.approx([20, 20, 30, 30])
    # On one lane nothing comes between a copy and its flag.
    run = simulate(three_copies(serial_copies=True), in_turn)
    assert run.start_s * 1e6 == pytest.approx([0, 10, 20, 10])
    assert run.end_s * 1e6 == pytest.approx([10, 20, 30, 20])
    # Latency is the engine's time too.
    slow = dataclasses.replace(in_turn, latency_s=np.full((5, 5), 5e-6))
    assert simulate(three_copies(serial_copies=True), slow).end_s * 1e6 == pytest.approx([15, 30, 45, 30])


def test_what_a_task_awaits_on_another_lane_is_seen_later_by_another_engine() -> None:
    # Copy, copy, COMBINE, COMBINE, copy: each awaits the one before on a lane of its own.
    build = ByHand()
    c, sums = (build.add(0, 10, 10) for _ in range(2))
    copy, combine = [(c, Factor.ONE, Op.N)], [(sums, Factor.ONE, Op.N), (c, Factor.BETA, Op.N)]
    lanes = [*(build.copy_lane(0, 0, to) for to in (0, build.host)), *(build.compute_lane(0, at) for at in (0, 1))]
    last: list[int] = []
    for lane, of in zip([*lanes, lanes[0]], (copy, copy, combine, combine, copy), strict=True):
        kind = Kind.COMBINE if of is combine else Kind.COPY
        last = [build.task(kind, lane, sums if kind == Kind.COPY else c, of, last)]
    schedule = build.done()
    for costs, whole in (
        ({"event_latency_s": 1e-3, "engine_latency_s": 1e-2, "kernel_latency_s": 1e-1}, 0.121),
        ({"event_latency_s": 1e-3}, 0.004),
        ({"event_latency_s": 1e-3, "kernel_latency_s": 0.0}, 0.003),
    ):
        machine = machine_of(1, costs=IssueCosts(**costs), combine_gb_per_s=np.array([1e9]))
        assert seconds_of(schedule, machine) == pytest.approx(whole, abs=1e-5)


@pytest.mark.parametrize(("memory_gb_per_s", "expected"), [(400.0, HOST_COPY_GB_PER_S), (15.0, 7.5)])
def test_a_worker_copies_at_a_core_s_rate_within_that_of_the_memory_and_is_awaited_by_flags(
    memory_gb_per_s: float, expected: float
) -> None:
    build = ByHand(2)
    size = 1000
    near, far, other, device = (build.add(Location.parse(at), size, size, ld=size + 1) for at in ("h", "h0", "h1", "0"))
    copies = [build.copy(build.host_lane(0, number), far, near) for number in range(2)]
    copies += [build.copy(build.host_lane(1), other, near) for _ in range(2)]
    build.copy(build.copy_lane(0, build.host, 0), device, near, copies)
    schedule = build.done()
    machine = machine_of(2, costs=IssueCosts(copy_s=1e-3, event_latency_s=1e-1, flag_latency_s=1e-2))
    bandwidth = machine.bandwidth_gb_per_s.copy()
    bandwidth[machine.host, machine.host] = memory_gb_per_s  # of both workers
    found = simulate(schedule, dataclasses.replace(machine, bandwidth_gb_per_s=bandwidth))
    each = 8 * size**2 / (1e9 * expected)
    assert found.end_s[:4] == pytest.approx([2 * each, 2 * each, each, 2 * each], rel=1e-3)  # lanes have turns
    assert found.start_s[4] == pytest.approx(2 * each + 1e-2, rel=1e-3)


@pytest.mark.parametrize("dtype", [DType.f64, DType.f32, DType.bf16])
def test_what_is_transposed_takes_a_kernel_of_a_device_and_a_worker_its_elements(dtype: DType) -> None:
    build = ByHand()
    rows, cols = 3000, 2000
    for at, lane in ((0, build.copy_lane(0, 0, 0)), (Location.host(0), build.host_lane(0))):
        of, to = (build.add(at, *shape, dtype) for shape in ((rows, cols), (cols, rows)))
        build.copy(lane, to, of, op=Op.T)
    schedule = build.done()
    costs = IssueCosts(combine_s=1e-4, copy_s=1e-2, combine_start_s=1e-3)
    rates = {"combine_gb_per_s": np.array([1000.0]), "half_combine_gb_per_s": np.array([10.0])}
    found = simulate(schedule, machine_of(1, costs=costs, **rates))
    moved = rows * cols * dtype.itemsize
    kernel = 1e-3 + 2 * moved / (1e12 * TRANSPOSING_SHARE)
    assert (found.end_s - found.start_s).tolist() == pytest.approx([kernel, rows * cols / HOST_TRANSPOSED_PER_S])
    assert found.start_s[0] == pytest.approx(1e-4)


def test_small_copies_of_a_user_s_matrix_are_one_kernel_where_the_first_is() -> None:
    build = ByHand()
    user = build.buffer(at=0, rows=1000, cols=1000, dtype=DType.f64, role=Role.USER)
    panel = build.buffer(at=0, rows=1000, cols=1000, dtype=DType.f64, role=Role.PANEL)
    for col, cols in ((0, 100), (100, 100), (200, 500), (700, 100), (800, 200)):  # the third has 4 MB
        ends = [RegionRef(one, 0, col, 1000, cols) for one in (panel, user)]
        build.copy(build.copy_lane(0, 0, 0), *ends)
    schedule = build.done()
    costs = IssueCosts(combine_s=1e-4, copy_s=1e-2, combine_start_s=1e-3)
    found = simulate(schedule, machine_of(1, costs=costs, combine_gb_per_s=np.array([1000.0])))
    taken = found.end_s - found.start_s
    assert taken[[0, 1, 3, 4]] == pytest.approx([1e-3 + 2 * 1.6e6 / 1e12, 0.0, 1e-3 + 2 * 2.4e6 / 1e12, 0.0])
    assert found.start_s[0] == pytest.approx(1e-4)
    assert found.start_s[2] == pytest.approx(1e-2 + 1e-4)  # the second was issued with the first


@pytest.mark.parametrize("in_parts", [False, True], ids=["one buffer", "a buffer each"])
@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize("outward", [False, True], ids=["to the panel", "from the panel"])
def test_runs_of_a_matrix_between_devices_are_one_copy_until_somebody_is_told(
    in_parts: bool, along: str, outward: bool
) -> None:
    """Four runs of 0.8 MB at 100 GB/s go to every other place of a panel, or come from there."""
    of_rows = along == "rows"

    def schedule_of(told_of: int | None, places: tuple[int, ...] = (0, 1, 2, 3)) -> Schedule:
        build = ByHand(2)
        shape, run, lines = ((800, 500), (200, 500), 200) if of_rows else ((1000, 400), (1000, 100), 100)
        user = build.buffer(at=0, rows=shape[0], cols=shape[1], ld=1000, dtype=DType.f64, role=Role.USER)
        parts = [build.buffer(at=0, rows=run[0], cols=run[1], ld=1000, dtype=DType.f64, role=Role.USER) for _ in "1234"]
        twice = (2 * shape[0], shape[1]) if of_rows else (shape[0], 2 * shape[1])
        panel = build.buffer(at=1, rows=twice[0], cols=twice[1], dtype=DType.f64, role=Role.PANEL)
        small = [build.buffer(at=0, rows=1, cols=1, dtype=DType.f64, role=Role.PANEL) for _ in "12"]
        for number, place in enumerate(places):
            row, col = (lines * number, 0) if of_rows else (0, lines * number)
            there = RegionRef(panel, *((2 * lines * place, 0) if of_rows else (0, 2 * lines * place)), *run)
            here = RegionRef(parts[number], 0, 0, *run) if in_parts else RegionRef(user, row, col, *run)
            to, of = (here, there) if outward else (there, here)
            lane = build.copy_lane(1, 1, 0) if outward else build.copy_lane(0, 0, 1)
            came = build.task(Kind.COPY, lane, to, [(of, Factor.ONE, Op.N)])
            if told_of == number:
                ends = [RegionRef(one, 0, 0, 1, 1) for one in small]
                build.task(Kind.COMBINE, build.compute_lane(0), ends[0], [(ends[1], Factor.ONE, Op.N)], [came])
        return build.done()

    costs, own = IssueCosts(copy_s=1e-2), 1e-3 + 0.8e6 / 1e11
    machine = machine_of(2, costs=costs, latency_s=np.full((3, 3), 1e-3))

    def ends_of(*arguments: Any) -> list[float]:
        schedule = schedule_of(*arguments)
        return simulate(schedule, machine).end_s[schedule.tasks["kind"] == Kind.COPY].tolist()

    # Layers take 4 ns each to issue.
    assert ends_of(None) == pytest.approx([1e-2 + 1e-3 + 3.2e6 / 1e11] * 4, rel=1e-3)
    two = 1e-2 + 1e-3 + 1.6e6 / 1e11
    assert ends_of(1) == pytest.approx([two, two, two + 1e-2, two + 1e-2], rel=1e-3)
    # The third is not as far behind the second as this one is behind the first.
    assert ends_of(None, (0, 1, 3, 2)) == pytest.approx([two, two, 2e-2 + own, 3e-2 + own], rel=1e-3)


@pytest.mark.parametrize(("columns", "together"), [(1200, True), (1201, False)])
def test_runs_of_rows_in_many_columns_are_one_copy_if_that_takes_less_to_issue(columns: int, together: bool) -> None:
    build = ByHand(2)
    user = build.buffer(at=0, rows=6, cols=columns, dtype=DType.f64, role=Role.USER)
    panel = build.buffer(at=1, rows=16, cols=columns, dtype=DType.f64, role=Role.PANEL)
    for at in range(3):
        ends = RegionRef(panel, 4 * at, 0, 2, columns), RegionRef(user, 2 * at, 0, 2, columns)
        build.copy(build.copy_lane(0, 0, 1), *ends)
    schedule = build.done()
    run = simulate(schedule, machine_of(2, costs=IssueCosts(copy_s=1e-3)))
    moved = 16 * columns / 1e11
    # A layer takes 4 ns to issue.
    ends_s = [1e-3 + 4e-9 * columns + 3 * moved] * 3 if together else [1e-3 + moved, 2e-3 + moved, 3e-3 + moved]
    assert run.end_s == pytest.approx(ends_s, rel=1e-6)


@pytest.mark.parametrize(("dtype", "each"), [("f64", 24), ("f16", 8)])
def test_a_combine_takes_its_bytes_at_the_rate_of_its_type_and_a_start(dtype: str, each: int) -> None:
    build = ByHand(dtype=DType[dtype])
    c, sums = (build.add(0, 1000, 1000, kind) for kind in (DType[dtype], DType[dtype].accumulator))
    build.task(Kind.COMBINE, build.compute_lane(0), c, [(sums, Factor.ONE, Op.N), (c, Factor.BETA, Op.N)])
    schedule = build.done()
    rates = {"combine_gb_per_s": np.array([1000.0]), "half_combine_gb_per_s": np.array([500.0])}
    known = {"gemm_tflop_per_s": {dtype: np.ones(1)}}
    machine = machine_of(1, costs=IssueCosts(combine_start_s=1e-3), **rates, **known)
    rate = 500e9 if dtype == "f16" else 1000e9
    assert seconds_of(schedule, machine) == pytest.approx(1e-3 + each * 1e6 / rate)
    # A rate that is not known is that of the other types.
    machine = machine_of(1, combine_gb_per_s=np.array([1000.0]), **known)
    assert seconds_of(schedule, machine) == pytest.approx(each * 1e6 / 1000e9)


@pytest.mark.parametrize("seed", range(12))
def test_copies_have_fair_rates_from_each_start_and_end_to_the_next(seed: int) -> None:
    # The rates of `fair_rates`, over all copies under way at once, move just the bytes of every copy from its start to
    # its end: what the simulator leaves alone when something begins or ends did not have to change.
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(3, 9))
    machine = machine_of(ranks, costs=IssueCosts())
    links = [(a, b) for a in range(ranks + 1) for b in range(ranks + 1) if a != b]
    ports = list(device_ports(range(ranks), 130.0, 120.0))
    for number in range(int(rng.integers(1, 6))):
        chosen = [links[at] for at in rng.choice(len(links), int(rng.integers(2, 7)), replace=False)]
        ports.append(
            Port(f"port {number}", float(rng.uniform(8, 150)), tuple(chosen), tuple(rng.uniform(0.3, 2, len(chosen))))
        )
    machine = dataclasses.replace(machine, ports=tuple(ports))
    place = ["h,h,h", "0,0,0", "0,1,2", "h,0,1"][seed % 4]
    chunks = [1, 2, 4][seed % 3]
    schedule = make(900, 800, 700, place, ranks, reads_c=True, tile=160, chunks=chunks, min_chunk_bytes=1)
    run, copies = simulate(schedule, machine), schedule.copies()
    start, end = run.start_s[copies[:, 0]], run.end_s[copies[:, 0]]
    ends = copies[:, 1:3]
    across = ends[:, 0] != ends[:, 1]  # a copy within a device has no link
    # Lanes that meet on a link share it too.
    wires = [Port.of(f"{link}", float(machine.bandwidth_gb_per_s[link]), [link]) for link in links]
    times = np.unique(np.concatenate([start, end]))
    moved = np.zeros(len(copies))
    most = 0
    for begins, ceases in itertools.pairwise(times):
        under_way = np.flatnonzero(across & (start <= begins) & (end >= ceases))
        if len(under_way):
            at = [(int(a), int(b)) for a, b in ends[under_way]]
            rates = fair_rates(at, [float(machine.bandwidth_gb_per_s[link]) for link in at], [*ports, *wires])
            moved[under_way] += rates * 1e9 * (ceases - begins)
            most = max(most, len(under_way))
    np.testing.assert_allclose(moved[across], copies[across, 3], rtol=1e-6)
    assert most > 4


def test_lanes_on_one_link_share_it() -> None:
    # Private host memory of rank 1 goes to every rank over the one link of rank 1.
    for place in ("h1,h1,h1", "h1,2,h", "h,h,h1"):
        schedule = make(2048, 2048, 2048, place, 4, reads_c=True, tile=512)
        machine = machine_of(4, gemm_tflop_per_s={"f64": np.full(4, 100.0)})
        least = bound(schedule.problem, Placement.parse(place), machine).seconds
        assert simulate(schedule, machine).seconds >= least * (1 - 1e-9)


# -- beside other work -----------------------------------------------------------------------------


def test_simulations_on_a_thread_are_those_made_at_once() -> None:
    machine = machine_of(4)
    schedules = [make(512 * n, 1024, 512, place, 4, tile=256) for n in range(1, 9) for place in ("h,h,h", "0,1,2")]
    wanted = [simulate(schedule, machine) for schedule in schedules]
    with Simulations(machine) as simulations:
        for turn in range(20):  # whoever waits makes some of them, the thread others
            begun = [simulations.begin(schedule) for schedule in schedules]
            order = list(range(len(begun)))[::-1] if turn % 2 else range(len(begun))
            for at in order:
                found = begun[at]()
                assert found.schedule is schedules[at]
                assert (found.start_s == wanted[at].start_s).all()
                assert (found.end_s == wanted[at].end_s).all()


def test_simulations_that_nobody_waits_for_are_dropped() -> None:
    machine = machine_of(4)
    with Simulations(machine) as simulations:
        begun = [simulations.begin(make(2048, 2048, 2048, "h,h,h", 4, tile=256)) for _ in range(50)]
        assert begun[7]().seconds > 0
        with pytest.raises(ParamError, match="is over: wait for it once"):
            begun[7]()
    with pytest.raises(ParamError, match="is over: wait for it once"):
        begun[40]()
    with pytest.raises(ParamError, match="before its Simulations end"):
        simulations.begin(make(512, 512, 512, "h,h,h", 4))


def test_simulations_refuse_what_simulate_refuses() -> None:
    with Simulations(machine_of(2)) as simulations:
        with pytest.raises(ParamError, match="has 2 ranks, the schedule 4"):
            simulations.begin(make(512, 512, 512, "h,h,h", 4))
        with pytest.raises(TopologyError, match="no GEMM rate for f16"):
            simulations.begin(make(512, 512, 512, "h,h,h", 2, dtype=DType.f16))
        cut = make(512, 512, 512, "h,h,h", 2)
        wait = simulations.begin(set_rows(cut, "tasks", ..., rank=7))
        with pytest.raises(TopologyError, match="on a rank that the machine lacks"):
            wait()
