"""PARALiA's link map and predictor: each equation by hand, the choices by comparison with all others."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import numpy as np
import pytest

from uncut_mpi.bench.rivals.link_map import LinkMap
from uncut_mpi.bench.rivals.paralia import (
    MOST_SETS,
    Predictor,
    Workload,
)
from uncut_mpi.errors import ParamError
from uncut_mpi.model.costs import GemmShape
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import Port, device_ports
from uncut_mpi.model.problem import GemmProblem

HHH = Placement.parse("h,h,h")


def machine(ranks: int, **changes: object) -> Machine:
    """Links of 100 GB/s, host links of 10, 1 TFLOP/s, no latency."""
    made = Machine.uniform(ranks, link_gb_per_s=100.0, host_gb_per_s=10.0, latency_s=0.0, gemm_tflop_per_s={"f64": 1.0})
    return dataclasses.replace(made, **{"typical_gemm_tflop_per_s": {}, **changes})


def cube(extent: int, **changes: object) -> GemmProblem:
    return dataclasses.replace(GemmProblem(extent, extent, extent, DType.f64), **changes)


def table(*rows: list[float]) -> np.ndarray:
    return np.array(rows, np.float64)


def link_map(bandwidth: np.ndarray, latency_s: float = 0.0) -> LinkMap:
    return LinkMap(np.full(bandwidth.shape, latency_s), bandwidth, {}, bandwidth)


def test_slowdowns_come_from_ports() -> None:
    # Links of 100 behind ports of 150: two at once get 75 each.
    found = LinkMap.of(machine(3, ports=tuple(device_ports(range(3), 150, 1000)))).slowdowns
    assert found[(0, 1), (0, 2)] == pytest.approx(100 / 75)
    assert ((0, 1), (2, 1)) not in found
    tight = LinkMap.of(machine(3, ports=(Port.of("one", 20, [(0, 1), (0, 2)]),))).slowdowns
    assert tight == {((0, 1), (0, 2)): 2.0, ((0, 2), (0, 1)): 2.0}


def test_links_in_use_slow_each_other_down_by_the_worst_of_them_once() -> None:
    # Host links of 10 share 12: two at once get 6 each, and PARALiA sees no third.
    host = 3
    port = Port.of("host", 12, [(host, rank) for rank in range(3)])
    system = LinkMap.of(machine(3, ports=(port,)))
    assert system.shared_gb_per_s[host, 0] == 10
    shared = system.shared_by([0, 1, 2], [host]).shared_gb_per_s
    assert [shared[host, rank] for rank in range(3)] == pytest.approx([6, 6, 6])
    alone = system.shared_by([0], [host]).shared_gb_per_s
    assert alone[host, 0] == 10
    assert alone[host, 1] == pytest.approx(6)  # it would run beside the one in use


def test_a_slow_link_is_left_for_a_way_over_another_device() -> None:
    bandwidth = table([9, 1, 3], [1, 9, 4], [3, 4, 9])
    found = link_map(bandwidth, latency_s=1e-6).rerouted([0, 1, 2])
    assert found.routes == {(0, 1): (2,), (1, 0): (2,)}
    assert found.shared_gb_per_s[0, 1] == 3
    assert found.latency_s[0, 1] == pytest.approx(2e-6)
    assert found.latency_s[0, 2] == 1e-6
    assert found.transfer_s(0, 1, 3e9) == pytest.approx(1.0 + 2e-6)
    assert found.transfer_s(0, 0, 3e9) == found.transfer_s(0, 1, 0) == 0


def test_detours_need_a_device_that_computes_and_a_gain() -> None:
    bandwidth = table([9, 1, 3], [1, 9, 4], [3, 4, 9])
    assert not link_map(bandwidth).rerouted([0, 1]).routes
    assert not link_map(bandwidth).rerouted([0, 1, 2], max_hops=0).routes
    equal = table([9, 3, 3], [3, 9, 3], [3, 3, 9])
    assert not link_map(equal).rerouted([0, 1, 2], max_hops=2).routes


def test_two_hops_are_taken_only_where_allowed_and_better() -> None:
    bandwidth = np.ones((4, 4))
    bandwidth[0, 1] = bandwidth[1, 2] = bandwidth[2, 3] = 5
    bandwidth[0, 2] = 2
    one, two = (link_map(bandwidth).rerouted(range(4), max_hops=hops) for hops in (1, 2))
    assert (one.routes[0, 3], one.shared_gb_per_s[0, 3]) == ((2,), 2)
    assert (two.routes[0, 3], two.shared_gb_per_s[0, 3]) == ((1, 2), 5)
    with pytest.raises(ParamError, match="max_hops = 3"):
        link_map(bandwidth).rerouted([0], max_hops=3)


def test_four_devices_get_equal_shares_and_exchange_the_rest() -> None:
    found = Predictor(cube(1000), HHH, machine(4)).workload(range(4))
    assert found.ratios == (0.25,) * 4
    (device,) = set(found.predictions)
    assert device.exec_s == pytest.approx(0.5e-3)
    assert device.receive_s == pytest.approx(0.6e-3)
    assert device.send_s == pytest.approx(0.2e-3)
    # (2, 2): (1 + 1)/2 of A and B again, a quarter of it at 100 GB/s.
    assert device.extra_s == pytest.approx(4e6 / 100e9)
    assert device.receive_s > max(device.exec_s, device.send_s)
    assert device.seconds == device.receive_s + device.extra_s


def test_extra_bytes_arrive_at_the_mean_of_the_links_from_the_other_devices() -> None:
    bandwidth = machine(3).bandwidth_gb_per_s.copy()
    bandwidth[1, 0] = 20
    found = Predictor(cube(1000), HHH, machine(3, bandwidth_gb_per_s=bandwidth), 0).workload(
        [0, 1, 2], ratios=[1 / 3] * 3
    )
    # (1, 3): 2/2 of A and B again.
    assert found.predictions[0].extra_s == pytest.approx(16e6 / 3 / 60e9)
    assert found.predictions[1].extra_s == pytest.approx(16e6 / 3 / 100e9)


def test_shares_are_adjusted_until_devices_end_within_five_percent() -> None:
    rates = np.array([3.5] * 4 + [5.0] * 2 + [7.0] * 2)
    uneven = machine(8, gemm_tflop_per_s={"f64": rates}, latency_s=np.full((9, 9), 5e-6))
    for extent in (1000, 8000):
        found = Predictor(cube(extent), HHH, uneven).workload(range(8))
        times = [prediction.seconds for prediction in found.predictions]
        assert max(times) <= 1.05 * min(times)
        assert sum(found.ratios) == pytest.approx(1)
    # Limited by arithmetic, shares follow the rates.
    found = Predictor(cube(8000), Placement.parse("0,1,2"), machine(8, gemm_tflop_per_s={"f64": rates / 100})).workload(
        range(8)
    )
    assert found.ratios == pytest.approx(rates / rates.sum())


def test_devices_that_differ_by_six_percent_are_adjusted_and_by_four_are_not() -> None:
    for slower, adjusted in ((0.94, True), (0.96, False)):
        uneven = machine(2, gemm_tflop_per_s={"f64": np.array([0.01, 0.01 * slower])})
        found = Predictor(cube(1000), HHH, uneven).workload([0, 1])
        assert (found.ratios != (0.5, 0.5)) == adjusted


def test_results_that_leave_slowly_are_waited_for() -> None:
    bandwidth = machine(1).bandwidth_gb_per_s.copy()
    bandwidth[0, 1] = 1.0
    (device,) = Predictor(cube(1000), HHH, machine(1, bandwidth_gb_per_s=bandwidth)).workload([0]).predictions
    assert device.seconds == device.send_s == pytest.approx(8e-3)


def test_the_time_of_products_knows_waves() -> None:
    shape = GemmShape(128, 128, 0, 1e-3)
    waves = machine(2, gemm_shape={"f64": shape}, multiprocessors=np.array([4, 4]))
    found = Predictor(cube(1000), HHH, waves).workload([0, 1])
    assert found.predictions[0].exec_s == pytest.approx(0.5 * (1e-3 + 2 * 64 * 128 * 128 * 1000 / 1e12))


def test_without_a_product_c_is_all_there_is() -> None:
    for problem in (cube(1000, k=0), cube(1000, scales_only=True)):
        found = Predictor(problem, HHH, machine(4)).workload(range(4))
        assert found.seconds == pytest.approx(2e6 / 10e9)
    assert Predictor(cube(1000, k=0), Placement.parse("0,0,0"), machine(2)).workload([0, 1]).ratios == (0.5, 0.5)


WATTS = {"busy_watts": np.array([400.0, 400.0, 400.0, 400.0]), "idle_watts": np.full(4, 50.0)}


def test_energy_counts_the_devices_at_rest_too() -> None:
    found = Predictor(cube(1000), HHH, machine(4, **WATTS)).workload([0, 2])
    assert found.watts == 2 * 400 + 2 * 50


COSTS: dict[str, Callable[[Workload], float]] = {
    "time": lambda work: work.seconds,
    "pdp": lambda work: work.watts * work.seconds,
    "edp": lambda work: work.watts * work.seconds**2,
}


def cheapest_of_all(problem: GemmProblem, place: Placement, node: Machine, metric: str) -> Workload:
    """The paper's loop over all sets of devices, small ones first."""
    ranks = range(node.num_ranks)
    sets = itertools.chain.from_iterable(itertools.combinations(ranks, count) for count in range(1, len(ranks) + 1))
    best = None
    for one in (Predictor(problem, place, node).workload(devices) for devices in sets):
        if best is None or COSTS[metric](one) < COSTS[metric](best) * (1 - 1e-9):
            best = one
    assert best is not None
    return best


@pytest.mark.parametrize(("metric", "place"), [("time", "h,h,h"), ("edp", "0,0,0"), ("pdp", "1,5,5")])
def test_a_bounded_choice_is_that_of_all_sets(metric: str, place: str) -> None:
    uneven, where = load_machine("vulcan-8xv100-uneven"), Placement.parse(place)
    most = 8 * 10  # of 255 sets
    found = Predictor(cube(4096), where, uneven).select(cost=COSTS[metric], most_sets=most)
    assert found == Predictor(cube(4096), where, uneven).select(cost=COSTS[metric])
    rng = np.random.default_rng(5)
    for _ in range(6):
        bandwidth = machine(6).bandwidth_gb_per_s * rng.choice([0.2, 1.0, 3.0], (7, 7))
        rates = {"f64": rng.choice([1.0, 2.0, 5.0], 6)}
        watts = {"busy_watts": rng.choice([200.0, 400.0], 6), "idle_watts": np.full(6, 50.0)}
        node = machine(6, bandwidth_gb_per_s=bandwidth, gemm_tflop_per_s=rates, **watts)
        found = Predictor(cube(2000), where, node).select(cost=COSTS[metric], most_sets=6 * 8)
        assert found == cheapest_of_all(cube(2000), where, node, metric)


def test_sets_are_all_of_eight_devices_and_a_bounded_number_of_more() -> None:
    seen: dict[tuple[int, ...], float] = {}

    def cost(work: Workload) -> float:
        return seen.setdefault(work.devices, work.seconds)

    Predictor(cube(1000), HHH, machine(8)).select(cost=cost)
    assert len(seen) == 255
    seen.clear()
    order = [*range(11, -1, -1)]
    Predictor(cube(1000), HHH, machine(12)).select(cost=cost, order=order, most_sets=48)
    assert len(seen) <= 48
    assert {len(devices) for devices in seen} == {*range(1, 13)}
    assert {devices for devices in seen if len(devices) == 1} == {(8,), (9,), (10,), (11,)}
    assert MOST_SETS // 8 == 70  # sets of 4 devices of 8, the most of one size


def test_a_product_too_small_to_travel_stays_where_it_is() -> None:
    node = machine(4, latency_s=np.full((5, 5), 1e-4))
    assert Predictor(cube(200), Placement.parse("3,3,3"), node).select().devices == (3,)


def test_more_devices_at_rest_make_fewer_at_work_cheaper() -> None:
    node = machine(4, busy_watts=np.full(4, 400.0))
    assert len(Predictor(cube(8000), Placement.parse("0,0,0"), node).select().devices) == 4
    assert Predictor(cube(8000), Placement.parse("0,0,0"), node).select(cost=COSTS["pdp"]).devices == (0,)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"devices": []}, "each once at most"),
        ({"devices": [0, 0]}, "each once at most"),
        ({"devices": [2]}, "ranks 0 to 1"),
        ({"devices": [0, 1], "ratios": [1.0]}, "1 in all"),
        ({"devices": [0, 1], "ratios": [0.4, 0.4]}, "1 in all"),
        ({"devices": [0, 1], "ratios": [1.5, -0.5]}, "1 in all"),
    ],
)
def test_a_workload_that_makes_no_sense_is_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        Predictor(cube(100), HHH, machine(2)).workload(**arguments)


def test_a_matrix_of_a_rank_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ParamError, match="rank 7"):
        Predictor(cube(100), Placement.parse("7,h,h"), machine(2)).select()
