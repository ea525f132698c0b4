"""What is possible: no measurement beats a capacity, no product its bound, and what to expect does not move."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.data import measured
from uncut_mpi.calibration.peaks import Done, peak_bandwidth, peak_ports, unbeaten
from uncut_mpi.calibration.samples import TransferSample
from uncut_mpi.calibration.statistics import Summary
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import Port, least_time
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.simulate import simulate


def sample(links, gigabytes, seconds):
    nbytes = tuple(round(one * 1e9) for one in gigabytes)
    return TransferSample("host", links, (1,) * len(links), nbytes, 0, Summary.of(seconds))


def machine() -> Machine:
    """Four GPUs whose host memory and ports are shared."""
    plain = Machine.uniform(4)
    host = plain.host
    inward, outward = [(host, rank) for rank in range(4)], [(rank, host) for rank in range(4)]
    ports = [Port.of("host", 150.0, inward + outward)]
    for rank in range(4):
        ports.append(Port.of(f"device {rank} egress", 380.0, [(rank, other) for other in range(4) if other != rank]))
    return dataclasses.replace(plain, ports=tuple(ports))


def test_a_port_can_what_the_shortest_time_shows_and_expects_what_it_did() -> None:
    ports = (Port.of("both", 90.0, [(0, 1), (0, 2)]), Port.of("other", 70.0, [(1, 2)]))
    found = peak_ports(
        ports, [sample(((0, 1), (0, 2)), (5.0, 5.0), (0.1, 0.11, 0.12)), sample(((0, 1),), (5,), (0.1,))]
    )
    assert found[0].capacity_gb_per_s == pytest.approx(100.0)
    assert [port.expected_gb_per_s for port in found] == [90.0, 70.0]
    assert found[1] == ports[1]
    assert peak_ports(ports, []) == ports


def test_weights_count() -> None:
    port = Port("mixed", 90.0, ((0, 1), (1, 0)), (1.0, 0.5))
    found = peak_ports([port], [sample(((0, 1), (1, 0)), (8.0, 6.0), (0.1,))])
    assert found[0].capacity_gb_per_s == pytest.approx(80 + 0.5 * 60)


def test_a_link_has_the_best_rate_of_all_its_transfers() -> None:
    known = np.full((3, 3), 40.0)
    found = peak_bandwidth(known, [sample(((0, 1), (1, 2)), (5.0, 3.0), (0.1, 0.2))])
    assert found[0, 1] == pytest.approx(50.0)
    assert found[1, 2] == 40.0
    assert (known == 40.0).all()


@pytest.mark.parametrize(
    ("place", "dtype", "limited_by"),
    [
        ("h,h,h", DType.f16, "host both ways"),
        ("0,0,0", DType.f64, "compute"),
        ("0,0,0", DType.f16, "out of rank 0"),
        ("h,h,0", DType.f16, "host to devices"),
    ],
)
@pytest.mark.parametrize("part", [0.95, 0.6])
def test_a_product_that_beats_its_bound_raises_what_limited_it(place, dtype, limited_by, part) -> None:
    before, problem = machine(), GemmProblem(8192, 8192, 8192, dtype, "N", "N")
    placement = Placement.parse(place)
    limit = bound(problem, placement, before)
    assert limit.limited_by == limited_by
    best_s = part * limit.seconds
    after = unbeaten(before, [Done(problem, placement, best_s)])
    now = bound(problem, placement, after).seconds
    assert best_s * (1 - 1e-6) <= now <= best_s
    # What to expect stays: the same schedule takes as long.
    schedule = plan(problem, placement, 4, before).schedule
    if "host" not in limited_by or part > 0.9:  # beyond what the links alone carry these are faster
        assert simulate(schedule, after).seconds == simulate(schedule, before).seconds
    if limited_by == "compute":
        assert after.ports == before.ports
    elif part > 0.9:  # else the rate limits the bound next
        assert (after.gemm_tflop_per_s[dtype.name] == before.gemm_tflop_per_s[dtype.name]).all()


@pytest.mark.parametrize("part", [0.9, 0.7])
@pytest.mark.parametrize(("place", "k", "limited_by"), [("1,1,0", 16384, "out of rank 1"), ("0,1,1", 1, "into rank 1")])
def test_an_owner_that_computes_most_itself_is_faster_than_its_rate(place, k, limited_by, part) -> None:
    # Links would have to be many times as fast for that.
    before, problem = machine(), GemmProblem(3000, 1 if k > 1 else 3000, k, DType.f16, "N", "N", reads_c=False)
    placement = Placement.parse(place)
    limit = bound(problem, placement, before)
    assert limit.limited_by == limited_by
    after = unbeaten(before, [Done(problem, placement, part * limit.seconds)])
    assert bound(problem, placement, after).seconds <= part * limit.seconds
    rates = after.gemm_tflop_per_s["f16"] / before.gemm_tflop_per_s["f16"]
    assert rates[1] == pytest.approx(1 / part, rel=0.01)
    assert rates.tolist() == [1.0, rates[1], 1.0, 1.0]
    assert after.ports == before.ports
    assert (after.bandwidth_gb_per_s == before.bandwidth_gb_per_s).all()


def test_links_grow_where_no_port_limits_them() -> None:
    before = Machine.uniform(2)
    problem, placement = GemmProblem(4096, 4096, 4096, DType.f16, "N", "N"), Placement.parse("h,h,h")
    best_s = 0.9 * bound(problem, placement, before).seconds
    after = unbeaten(before, [Done(problem, placement, best_s)])
    assert bound(problem, placement, after).seconds <= best_s
    assert after.bandwidth_gb_per_s[0, 1] == before.bandwidth_gb_per_s[0, 1]
    assert after.bandwidth_gb_per_s[2, 0] == pytest.approx(before.bandwidth_gb_per_s[2, 0] / 0.9)


def test_a_product_slower_than_its_bound_changes_nothing() -> None:
    before, problem = machine(), GemmProblem(4096, 4096, 4096, DType.f64, "N", "N")
    for place in ("h,h,h", "0,0,0"):
        placement = Placement.parse(place)
        done = Done(problem, placement, bound(problem, placement, before).seconds)
        assert unbeaten(before, [done]) is before


def test_no_product_measured_on_4_h200_beats_its_bound() -> None:
    shipped, products = load_machine("h200-4x"), measured.products()
    for problem, placement, best_s in products:
        limit = bound(problem, placement, shipped)
        assert best_s >= limit.seconds, f"{problem} at {placement} took {best_s:.6g} s: {limit}"
    assert len(products) > 70


def test_no_transfer_measured_on_4_h200_beats_what_ports_allow() -> None:
    shipped, transfers = load_machine("h200-4x"), measured.transfers()
    for one in transfers:
        demands = [([link], float(size)) for link, size in zip(one.links, one.nbytes, strict=True)]
        allowed = least_time(demands, shipped.bandwidth_gb_per_s, shipped.ports)
        assert one.time.min_s >= allowed * (1 - 1e-9), one
    assert len(transfers) > 300
