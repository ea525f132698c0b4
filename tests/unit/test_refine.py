"""The last step of a calibration: hidden numbers come back from simulated products, bounds stay where they are."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.data import measured
from uncut_mpi.calibration.peaks import Done, peak_bandwidth, peak_ports, unbeaten
from uncut_mpi.calibration.refine import STEPS, Observation, adjusted, refine
from uncut_mpi.calibration.report import refinement_text
from uncut_mpi.calibration.samples import TransferSample
from uncut_mpi.calibration.statistics import Summary
from uncut_mpi.command.rehearsal import options_for, products_of
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import Port, least_time
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.simulate import simulate

NOTHING = {name: start for name, (start, *_) in STEPS.items()}


def observations(truth: Machine, machine: Machine, noise: float = 0.0) -> list[Observation]:
    """Products of a rehearsal, planned with one machine and timed on another."""
    rng = np.random.default_rng(2)
    found = []
    for product in products_of("cuda", 4):
        problem = GemmProblem(product.m, product.n, product.k, product.dtype, "N", "N")
        for options in options_for(product):
            schedule = plan(problem, Placement.parse(product.placement), 4, machine, options).schedule
            found.append(Observation(schedule, simulate(schedule, truth).seconds * (1 + noise * rng.uniform(-1, 1))))
    return found


def probed() -> Machine:
    machine = load_machine("h200-4x")
    ports = tuple(dataclasses.replace(port, typical_gb_per_s=0.0) for port in machine.ports)
    return dataclasses.replace(machine, ports=ports)


def test_products_of_a_slower_machine_are_explained() -> None:
    # Rates and overheads explain each other; what they add up to comes back.
    machine = probed()
    hidden = {**NOTHING, "device latency": 12e-6, "host ports": 0.84, "call": 8e-5, "rate f64": 0.9, "rate f32": 0.96}
    result, found = refine(machine, observations(adjusted(machine, hidden), machine))
    assert found.median_error < 0.01
    assert found.worst_error < 0.05
    assert found.parameters["host ports"] == pytest.approx(0.84, abs=0.04)
    assert len(found.errors) == 2 * len(products_of("cuda", 4)) + 1
    rates = result.typical_gemm_tflop_per_s
    assert rates["bf16"] == pytest.approx(machine.typical_gemm_tflop_per_s["bf16"] * found.parameters["rate f16"])


@pytest.mark.parametrize(
    ("hidden", "events_s", "errors"),
    [
        (
            {"rate f64": 0.8, "rate f16": 0.9, "call": 8e-5},
            0.0,
            {"rate f64": 0.016, "rate f16": 0.027, "rate f32": 0.01},
        ),
        ({"rate f64": 0.9}, 8e-6, {"kernel overhead": 1e-6}),  # what two events add is no overhead of a product
        ({"rate f64": 0.9, "kernel overhead": 2e-5}, 0.0, {"kernel overhead": 4e-6}),
    ],
)
def test_rates_and_overheads_are_those_of_traced_products(
    hidden: dict[str, float], events_s: float, errors: dict[str, float]
) -> None:
    machine = probed()
    truth = adjusted(machine, {**NOTHING, **hidden})
    traced = []
    for one in observations(truth, machine):
        run = simulate(one.schedule, truth)
        traced.append(Observation(one.schedule, run.seconds, run.end_s - run.start_s + events_s))
    _, found = refine(machine, traced)
    wanted = {"kernel overhead": 0.0, "rate f32": 1.0, **hidden}
    for name, error in errors.items():
        assert found.parameters[name] == pytest.approx(wanted[name], abs=error)
    assert found.median_error < 0.01


def test_c_is_written_as_fast_by_a_slower_product() -> None:
    machine = probed()
    slower = adjusted(machine, {**NOTHING, "rate f16": 0.5})
    fast, slow = (one.gemm_shape["f16"] for one in (machine, slower))
    rates = [float(one.typical_gemm_tflop_per_s["f16"][0]) * 1e12 for one in (machine, slower)]
    # Twice the time for the arithmetic of a step of k, the same for what comes besides.
    short, deep = (
        [shape.seconds(4096, 4096, k, 132, rate) for shape, rate in zip((fast, slow), rates, strict=True)]
        for k in (1024, 2048)
    )
    assert deep[1] - short[1] == pytest.approx(2 * (deep[0] - short[0]))
    assert 2 * short[1] - deep[1] == pytest.approx(2 * short[0] - deep[0])


def test_noise_is_not_fitted_away_and_does_no_harm() -> None:
    machine = probed()
    hidden = {**NOTHING, "device latency": 12e-6, "host ports": 0.84}
    _, found = refine(machine, observations(adjusted(machine, hidden), machine, noise=0.05)[::2])
    assert found.median_error < 0.04


def test_what_is_possible_stays() -> None:
    machine = probed()
    worse = {**NOTHING, "host ports": 0.5, "device ports": 0.6, "rate f64": 0.7, "call": 1e-3}
    moved = adjusted(machine, worse)
    problem = GemmProblem(4096, 4096, 4096, next(iter(products_of("cuda", 4))).dtype, "N", "N")
    for place in ("h,h,h", "0,0,0"):
        assert bound(problem, Placement.parse(place), moved) == bound(problem, Placement.parse(place), machine)
        schedule = plan(problem, Placement.parse(place), 4, machine).schedule
        assert simulate(schedule, moved).seconds > simulate(schedule, machine).seconds + 1e-3
    assert Machine.from_json(moved.to_json()).to_json() == moved.to_json()


def test_a_port_expects_no_more_than_it_can() -> None:
    with pytest.raises(ValueError, match=r"it has to be 0 to 10"):
        Port("p", 10.0, ((0, 1),), (1.0,), 11.0)
    assert Port("p", 10.0, ((0, 1),), (1.0,)).expected_gb_per_s == 10.0
    assert Port("p", 10.0, ((0, 1),), (1.0,), 4.0).expected_gb_per_s == 4.0


def test_the_report_names_what_moved() -> None:
    machine = probed()
    _, found = refine(machine, observations(machine, machine)[:4])
    text = refinement_text(found)
    assert "rehearsal: 4 products" in text
    assert "host ports x 1.00" in text
    assert f"at worst ({found.worst_product}), with" in text
    assert "call + 0.0 us" in text


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("backend", ["cuda", "host"])
def test_a_rehearsal_fits_any_number_of_ranks(backend: str, ranks: int) -> None:
    for product in products_of(backend, ranks):
        Placement.parse(product.placement).check_ranks(ranks)


# -- what is possible: no measurement beats a capacity, no product its bound -----------------------


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
