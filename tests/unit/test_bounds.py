"""The bound of a product: exact on machines small enough to reason about, and never too high."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.clusters import random_schedule
from uncut_mpi.errors import ParamError
from uncut_mpi.model.bounds import bound, bound_of_files, least_bytes_of_a_node
from uncut_mpi.model.dtypes import MEASURED, DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine, machine_names
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.places import Places
from uncut_mpi.model.ports import Net, Port, device_ports, duplex_ports, fair_rates, least_time
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.view.traffic import traffic


def machine(ranks: int, *, link: float = 100.0, host: float = 10.0, rate: float = 1.0) -> Machine:
    rates = {dtype.name: rate for dtype in MEASURED}
    return Machine.uniform(ranks, link_gb_per_s=link, host_gb_per_s=host, gemm_tflop_per_s=rates)


def place(text: str) -> Placement:
    return Placement.parse(text)


CUBE = GemmProblem(1000, 1000, 1000, DType.f64)


def test_compute_is_shared_by_all_ranks():
    found = bound(CUBE, place("0,1,2"), machine(4, link=1e9))
    assert set(found.terms) == {"compute", "out of rank 0", "out of rank 1", "into rank 2"}
    assert found.seconds == pytest.approx(2e9 / 4e12)
    assert found.limited_by == "compute"
    assert found.formula == "2·1000·1000·1000 operations / 4 TFLOP/s of 4 ranks"
    assert found.words == f"{found.formula}, by assumed rates"


def test_unequal_rates_add_up():
    uneven = dataclasses.replace(
        machine(2, link=1e9), gemm_tflop_per_s={"f64": np.array([1.0, 3.0])}, typical_gemm_tflop_per_s={}
    )
    assert bound(CUBE, place("0,0,0"), uneven).seconds == pytest.approx(2e9 / 4e12)


def test_a_bound_knows_the_best_rates_alone():
    slow = dataclasses.replace(
        machine(2),
        typical_gemm_tflop_per_s={"f64": np.full(2, 1e-3)},
    )
    assert bound(CUBE, place("h,h,h"), slow) == bound(CUBE, place("h,h,h"), machine(2))


@pytest.mark.parametrize(("reads_c", "megabytes"), [(True, 24), (False, 16)])
def test_what_lies_on_the_host_enters_over_all_host_links_together(reads_c, megabytes):
    problem = dataclasses.replace(CUBE, reads_c=reads_c)
    found = bound(problem, place("h,h,h"), machine(2, host=1.0, rate=1e6))
    assert found.terms["host to devices"] == pytest.approx(megabytes * 1e6 / 2e9)
    assert found.terms["devices to host"] == pytest.approx(8e6 / 2e9)
    assert (found.limited_by, found.seconds) == ("host to devices", found.terms["host to devices"])
    assert "A 8.000 MB" in found.formula
    assert ("C 8.000 MB" in found.formula) == reads_c


def test_a_result_on_the_host_leaves_over_all_host_links_together():
    found = bound(dataclasses.replace(CUBE, k=1, reads_c=False), place("0,0,h"), machine(2, host=1.0, rate=1e6))
    assert found.limited_by == "devices to host"
    assert found.seconds == pytest.approx(8e6 / 2e9)


def test_private_host_memory_passes_one_link():
    found = bound(CUBE, place("h1,h,0"), machine(4, host=1.0, rate=1e6))
    assert found.terms["host to devices, rank 1"] == pytest.approx(8e6 / 1e9)
    assert found.terms["host to devices"] == pytest.approx(16e6 / 4e9)
    assert found.limited_by == "host to devices, rank 1"


def test_an_owner_computes_itself_what_would_take_longer_to_move():
    # Alone: 2 ms. C (8 MB) in at 1 GB/s from each of 2 other locations: 4 ms. x·2 = (1−x)·4 at x = 2/3.
    found = bound(CUBE, place("1,1,0"), machine(2, link=1.0, host=1.0))
    assert found.terms["into rank 0"] == pytest.approx(4e-3 / 3)
    # A and B (16 MB) leave rank 1 at 2 GB/s: 8 ms; x·2 = (1−x)·8 at x = 0.8.
    assert found.terms["out of rank 1"] == pytest.approx(1.6e-3)
    assert (found.limited_by, found.seconds) == ("out of rank 1", found.terms["out of rank 1"])
    assert "80% of the operations at rank 1" in found.formula


def test_one_rank_moves_nothing():
    found = bound(CUBE, place("0,0,0"), machine(1, link=1e-3))
    assert found.terms == {"compute": pytest.approx(2e9 / 1e12)}


def test_a_c_that_is_read_at_its_owner_costs_no_transfer():
    reading, writing = (dataclasses.replace(CUBE, reads_c=reads) for reads in (True, False))
    assert bound(reading, place("0,0,0"), machine(4)) == bound(writing, place("0,0,0"), machine(4))


def host_ports(ranks: int, totals: tuple[float, float], both: tuple[float, float]) -> list[Port]:
    return duplex_ports(
        "host",
        [(ranks, rank) for rank in range(ranks)],
        [(rank, ranks) for rank in range(ranks)],
        in_gb_per_s=totals[0],
        out_gb_per_s=totals[1],
        both_gb_per_s=both,
    )


def test_the_host_gives_no_more_than_its_totals_either_way_and_both_ways():
    # 4 links of 55; 184 in, 148 out, 96 + 92 at once. A, B and C (8 MB each) in, C out.
    ports = host_ports(4, (184, 148), (96, 92))
    found = bound(CUBE, place("h,h,h"), dataclasses.replace(machine(4, host=55, rate=1e6), ports=tuple(ports)))
    assert found.terms["host to devices"] == pytest.approx(24e6 / 184e9)
    assert found.terms["devices to host"] == pytest.approx(8e6 / 148e9)
    both = max(24 / 184 + 8 * (1 - 96 / 184) / 92, 8 / 148 + 24 * (1 - 92 / 148) / 96)
    assert found.terms["host both ways"] == pytest.approx(both * 1e6 / 1e9)
    assert (found.limited_by, found.seconds) == ("host both ways", found.terms["host both ways"])
    assert found.formula.startswith("(A 8.000 MB + B 8.000 MB + C 8.000 MB) host to devices and (C 8.000 MB)")


def test_ways_of_the_host_that_share_nothing_have_no_term_together():
    ports = [Port.of("in", 20, [(2, 0), (2, 1)]), Port.of("out", 20, [(0, 2), (1, 2)])]
    found = bound(CUBE, place("h,h,h"), dataclasses.replace(machine(2, host=55), ports=tuple(ports)))
    assert "host both ways" not in found.terms
    assert found.terms["host to devices"] == pytest.approx(24e6 / 20e9)


def test_a_device_gives_and_takes_no_more_than_its_ports():
    # One port of 150 GB/s each way beside 10 GB/s to the host, not 3 links of 100.
    ported = dataclasses.replace(machine(4, rate=1e-3), ports=tuple(device_ports(range(4), 150, 140)))
    found = bound(CUBE, place("1,1,0"), ported)
    out, into, alone = 16e6 / 160e9, 8e6 / 150e9, 2e9 / 1e9
    assert found.terms["out of rank 1"] == pytest.approx(out * alone / (out + alone))
    assert found.terms["into rank 0"] == pytest.approx(into * alone / (into + alone))


def test_what_several_devices_hold_need_not_leave_any():
    placement = Places.parse("replicated,replicated,rows").bind(CUBE, 2)
    terms = bound(dataclasses.replace(CUBE, reads_c=False), placement, machine(2)).terms
    assert not [name for name in terms if name.startswith("out of")]


def test_without_a_product_only_c_moves():
    for problem in (dataclasses.replace(CUBE, k=0), dataclasses.replace(CUBE, scales_only=True)):
        found = bound(problem, place("h,h,h"), machine(2, host=1.0))
        assert found.terms == {
            "host to devices": pytest.approx(8e6 / 2e9),
            "devices to host": pytest.approx(8e6 / 2e9),
        }
        assert bound(problem, place("h,0,0"), machine(2)).seconds == 0.0


def test_nothing_to_do_takes_no_time():
    found = bound(GemmProblem(0, 10, 10, DType.f64, reads_c=False), place("0,0,h"), machine(2))
    assert (found.seconds, found.limited_by) == (0.0, "nothing")


def test_half_types_move_their_own_size():
    half = dataclasses.replace(CUBE, dtype=DType.f16)
    assert bound(half, place("h,h,h"), machine(2, host=1.0)).terms["host to devices"] == pytest.approx(6e6 / 2e9)


def test_a_rank_that_does_not_exist_is_refused():
    with pytest.raises(ParamError, match="rank 3"):
        bound(CUBE, place("0,3,0"), machine(2))


locations = st.sampled_from(["h", "0", "1", "h0", "h1"])
problems = st.builds(
    GemmProblem,
    st.integers(0, 4000),
    st.integers(0, 4000),
    st.integers(0, 4000),
    st.sampled_from(MEASURED),
    reads_c=st.booleans(),
)
placements = st.builds(lambda a, b, c: place(f"{a},{b},{c}"), locations, locations, locations)
speeds = st.floats(0.1, 1000.0)


@settings(max_examples=150, deadline=None)
@given(problems, placements, st.integers(2, 8), speeds, speeds, speeds)
def test_a_better_machine_never_has_a_higher_bound(problem, placement, ranks, link, host, rate):
    base = bound(problem, placement, machine(ranks, link=link, host=host, rate=rate)).seconds
    for better in (
        machine(ranks, link=2 * link, host=host, rate=rate),
        machine(ranks, link=link, host=2 * host, rate=rate),
        machine(ranks, link=link, host=host, rate=2 * rate),
        machine(ranks + 1, link=link, host=host, rate=rate),
    ):
        assert bound(problem, placement, better).seconds <= base * (1 + 1e-12)


@settings(max_examples=150, deadline=None)
@given(problems, placements, st.integers(2, 8), speeds, speeds, speeds)
def test_no_simple_schedule_is_faster(problem, placement, ranks, link, host, rate):
    """Two schedules that anybody can run: all on rank 0, and rows of C dealt out with perfect overlap."""
    nodes = machine(ranks, link=link, host=host, rate=rate)
    lowest = bound(problem, placement, nodes).seconds
    item = problem.dtype.itemsize
    m, n, k = problem.m, problem.n, problem.k if problem.has_product else 0
    sizes = {"a": m * k * item, "b": k * n * item, "c": m * n * item}

    def link_of(source: int, target: int) -> float:
        return float(nodes.bandwidth_gb_per_s[source, target]) * 1e9

    def at(name: str) -> int:
        location = getattr(placement, name)
        return nodes.host if location.space == "host" else location.rank

    def moves(name: str, worker: int, share: float) -> list[tuple[tuple[int, int], float]]:
        home = at(name)
        if home == worker:
            return []
        legs = [(home, worker)]
        location = getattr(placement, name)
        if location.space == "host" and location.rank not in (None, worker):
            # Another rank's private memory is reached through that rank's device.
            legs = [(home, location.rank), (location.rank, worker)]
        return [(leg, share * sizes[name]) for leg in legs]

    def time_of(workers: list[int]) -> float:
        busy: dict[tuple[int, int], float] = {}
        for worker in workers:
            share = 1 / len(workers)
            legs = moves("a", worker, share) + moves("b", worker, 1.0)
            back = moves("c", worker, share)
            legs += [((target, source), size) for (source, target), size in back]
            if problem.reads_c and placement.c.space == "host":
                legs += back
            for leg, size in legs:
                busy[leg] = busy.get(leg, 0.0) + size
        transfers = max((size / link_of(*leg) for leg, size in busy.items()), default=0.0)
        return max(transfers, 2 * m * n * k / len(workers) / (rate * 1e12))

    for workers in ([0], [ranks - 1], list(range(ranks))):
        assert lowest <= time_of(workers) * (1 + 1e-9)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1), placements)
def test_ports_only_raise_the_bound_and_fair_rates_under_them_are_no_faster(seed, placement):
    """The schedule: both ways of the host at once at fair rates, one matrix after the other in each."""
    rng = np.random.default_rng(seed)
    ranks = int(rng.integers(2, 6))
    problem = dataclasses.replace(CUBE, reads_c=bool(rng.integers(2)))
    free = machine(ranks, link=rng.uniform(1, 100), host=rng.uniform(1, 100), rate=10 ** rng.uniform(-3, 3))
    totals = rng.uniform(5, 200, 2)
    ports = [
        *host_ports(ranks, tuple(totals), tuple(totals * rng.uniform(0.2, 1, 2))),
        *device_ports(range(ranks), *rng.uniform(5, 200, 2)),
    ]
    ported = dataclasses.replace(free, ports=tuple(ports))
    with_ports, without = bound(problem, placement, ported), bound(problem, placement, free)
    for name, seconds in without.terms.items():
        assert with_ports.terms[name] >= seconds * (1 - 1e-9)

    host = ported.host
    ways = {"in": "abc" if problem.reads_c else "ab", "out": "c"}
    links = {"in": [(host, rank) for rank in range(ranks)], "out": [(rank, host) for rank in range(ranks)]}
    every = links["in"] + links["out"]
    rates = dict(zip(every, fair_rates(every, [ported.bandwidth_gb_per_s[link] for link in every], ports), strict=True))
    reached = 0.0
    for way, names in ways.items():
        locations = [getattr(placement, name) for name in names]
        served = [
            links[way] if location.rank is None else [links[way][location.rank]]
            for location in locations
            if location.space == "host"
        ]
        reached = max(reached, sum(8e6 / sum(rates[link] * 1e9 for link in of) for of in served))
    host_terms = [seconds for name, seconds in with_ports.terms.items() if "host" in name]
    assert max(host_terms, default=0.0) <= reached * (1 + 1e-9)


@pytest.mark.parametrize(
    ("changes", "dtype", "basis"),
    [
        ({"whole": True}, DType.f32, "what nothing could beat"),
        ({"whole": True}, DType.c64, "by measured rates"),  # a quarter of another type's
        ({}, DType.f32, "by measured rates"),
        ({"provenance": ""}, DType.f32, "by assumed rates"),
    ],
)
def test_a_bound_says_what_its_rates_are_worth(changes, dtype, basis):
    machine = dataclasses.replace(Machine.uniform(2), **{"provenance": "calibrated on a node", **changes})
    rates = {name: rate for name, rate in machine.gemm_tflop_per_s.items() if not DType[name].is_complex}
    machine = dataclasses.replace(machine, gemm_tflop_per_s=rates)
    found = bound(GemmProblem(100, 100, 100, dtype), Placement.parse("0,0,0"), machine)
    assert found.words == f"{found.formula}, {basis}"
    files = bound_of_files(GemmProblem(9, 9, 9, dtype), Placement.parse("h,h,h"), machine, (True, True, True))
    assert files.words.endswith("by assumed rates")  # of the disk


# -- several nodes ---------------------------------------------------------------------------------


def test_what_a_node_needs_enters_it_over_its_adapters() -> None:
    nodes = Machine.cluster(machine(1, link=1e6, host=1e6, rate=1e6), 8, Net(1.0))
    dealt = Places.parse("block_cyclic(125,125;2,4),block_cyclic(125,125;2,4),block_cyclic(125,125;2,4)").bind(CUBE, 8)
    # Each does an eighth of 1e9 products, with 250,000 elements of each matrix: it has 125,000 of each.
    assert least_bytes_of_a_node(CUBE, dealt, nodes) == pytest.approx(8 * 3 * (250_000 - 125_000))
    found = bound(CUBE, dealt, nodes)
    assert found.limited_by == "between nodes"
    # What enters is of A and B, what leaves of C, both at once: x of A, x of B, 2x of C with (1+x)²(1+2x) = 8.
    low, high = 0.0, 2.0
    while high - low > 1e-12:
        x = (low + high) / 2
        low, high = (x, high) if (1 + x) ** 2 * (1 + 2 * x) < 8 else (low, x)
    assert found.seconds == pytest.approx(2 * x * 1e6 / 1e9)
    assert "1 GB/s into node" in found.formula


def test_no_bound_between_nodes_where_all_is_on_each() -> None:
    nodes = Machine.cluster(machine(2, link=1e6, host=1e6, rate=1e3), 2, Net(1e-3))
    everywhere = Places.parse("replicated,replicated,rows").bind(CUBE, 4)
    found = bound(CUBE, everywhere, nodes)
    assert found.seconds == found.terms["compute"] == pytest.approx(found.terms["between nodes"])
    assert least_bytes_of_a_node(CUBE, everywhere, nodes) == 0


def test_what_lies_in_the_memory_of_a_node_leaves_it_for_its_devices_or_for_others() -> None:
    nodes = Machine.cluster(machine(2, host=10.0, rate=1e6), 2, Net(1.0))
    terms = bound(CUBE, place("h3,h2,0"), nodes).terms
    # The link of rank 3 alone, but what is sent: 10 and 1 GB/s; both ranks': 20 and 1.
    assert terms["host to devices, rank 3"] == pytest.approx(8e6 / 11e9)
    assert terms["host to devices, node 1"] == pytest.approx(16e6 / 21e9)
    assert "host to devices, node 0" not in terms


@pytest.mark.parametrize("seed", range(25))
def test_no_schedule_on_several_nodes_is_faster(seed: int) -> None:
    rng = random.Random(seed)
    net = Net(10 ** rng.uniform(-2, 1), 0.0, adapters=rng.choice((1, 2)))
    schedule, _ = random_schedule(seed, most=400)
    num_nodes = int(schedule.locations["node"].max()) + 1
    node = machine(schedule.num_ranks // num_nodes, link=10 ** rng.uniform(0, 2), host=10 ** rng.uniform(0, 2))
    nodes = Machine.cluster(node, num_nodes, net)
    found, run = bound(schedule.problem, schedule.placement, nodes), simulate(schedule, nodes)
    assert 0 < found.seconds <= run.seconds
    moved = max(one.into_bytes + one.out_of_bytes for one in traffic(schedule).nodes)
    assert least_bytes_of_a_node(schedule.problem, schedule.placement, nodes) <= moved


# -- ports and fair rates: closed cases by hand, properties of any case ----------------------------


def test_a_transfer_alone_gets_its_link() -> None:
    assert fair_rates([(0, 1)], [396.0], [Port.of("p", 400, [(0, 1)])]).tolist() == [396.0]


def test_a_port_is_shared_equally() -> None:
    # Three peers pull from one GPU: 133 each.
    rates = fair_rates([(0, 1), (0, 2), (0, 3)], [396.0] * 3, device_ports(range(4), 400, 400))
    assert rates == pytest.approx([400 / 3] * 3)


def test_what_one_leaves_the_others_take() -> None:
    rates = fair_rates([(0, 1), (0, 2), (3, 2)], [50.0, 400.0, 400.0], device_ports(range(4), 400, 400))
    assert rates == pytest.approx([50, 200, 200])
    rates = fair_rates([(0, 1), (0, 2)], [50.0, 400.0], device_ports(range(3), 300, 400))
    assert rates == pytest.approx([50, 250])


def test_the_two_ways_of_a_duplex_meet_at_what_both_reach() -> None:
    inward, outward = [(2, 0), (2, 1)], [(0, 2), (1, 2)]
    ports = duplex_ports("host", inward, outward, in_gb_per_s=88, out_gb_per_s=80, both_gb_per_s=(60, 50))
    assert fair_rates(inward, [60.0] * 2, ports) == pytest.approx([44, 44])
    assert fair_rates(outward, [60.0] * 2, ports) == pytest.approx([40, 40])
    # The corner (60, 50) lies on both lines.
    for port in ports:
        of = dict(zip(port.links, port.weights, strict=True))
        used = sum(of.get(link, 0) * 30 for link in inward) + sum(of.get(link, 0) * 25 for link in outward)
        assert used == pytest.approx(port.capacity_gb_per_s)


def test_ways_that_hinder_each_other_more_than_turns_would_share_one_port() -> None:
    ports = duplex_ports("host", [(1, 0)], [(0, 1)], in_gb_per_s=26, out_gb_per_s=24, both_gb_per_s=(7, 7))
    assert len(ports) == 1
    assert fair_rates([(1, 0)], [60.0], ports) == pytest.approx([26])
    assert fair_rates([(0, 1)], [60.0], ports) == pytest.approx([24])


def test_ways_that_do_not_meet_share_nothing() -> None:
    ports = duplex_ports("host", [(1, 0)], [(0, 1)], in_gb_per_s=50, out_gb_per_s=50, both_gb_per_s=(50, 50))
    assert [port.links for port in ports] == [((1, 0),), ((0, 1),)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("p", 0.0, ((0, 1),), (1.0,)), "has to be positive"),
        (("p", 1.0, ((0, 1),), ()), "one weight for each"),
        (("p", 1.0, (), ()), "one weight for each"),
        (("p", 1.0, ((0, 1),), (0.0,)), "weight that is not positive"),
        (("p", 1.0, ((0, 1), (0, 1)), (1.0, 1.0)), "names a link twice"),
    ],
)
def test_a_port_that_limits_nothing_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ParamError, match=message):
        Port(*arguments)


def test_a_machine_checks_the_links_of_its_ports() -> None:
    with pytest.raises(ParamError, match="names link 0 to 7"):
        dataclasses.replace(Machine.uniform(2), ports=(Port.of("far", 1, [(0, 7)]),))


def test_host_rates_are_those_of_all_ranks_at_once() -> None:
    ports = host_ports(4, (184, 148), (96, 92))
    machine = dataclasses.replace(Machine.uniform(4, host_gb_per_s=55), ports=tuple(ports))
    assert machine.host_rates([2])[:, 0].tolist() == [55, 0]
    assert machine.host_rates(range(4))[0] == pytest.approx([46] * 4)
    assert machine.host_rates(range(4), inward=False, outward=True)[1] == pytest.approx([37] * 4)
    both = machine.host_rates(range(4), outward=True)
    assert both[0].sum() + both[1].sum() <= 96 + 92 + 1e-9
    assert Machine.from_json(machine.to_json()).to_json() == machine.to_json()


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_rates_are_feasible_and_max_min_fair(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 6))
    pairs = [(s, d) for s in range(size) for d in range(size) if s != d]
    links = [pairs[i] for i in rng.choice(len(pairs), int(rng.integers(1, 9)))]
    ports = []
    for number in range(int(rng.integers(0, 5))):
        chosen = [pairs[i] for i in rng.choice(len(pairs), int(rng.integers(1, len(pairs) + 1)), replace=False)]
        weights = tuple(rng.uniform(0.2, 2, len(chosen)).tolist())
        ports.append(Port(f"p{number}", float(rng.uniform(10, 100)), tuple(chosen), weights))
    limits = rng.uniform(5, 80, len(links))
    rates = fair_rates(links, limits.tolist(), ports)
    assert (rates <= limits * (1 + 1e-9)).all()
    full = []
    for port in ports:
        of = dict(zip(port.links, port.weights, strict=True))
        used = sum(of.get(link, 0.0) * rate for link, rate in zip(links, rates, strict=True))
        assert used <= port.capacity_gb_per_s * (1 + 1e-9)
        if used >= port.capacity_gb_per_s * (1 - 1e-9):
            full.append(of)
    for link, rate, limit in zip(links, rates, limits, strict=True):
        # Max-min: a transfer below its limit is held by a full port on which none is faster.
        if rate < limit * (1 - 1e-9):
            assert any(
                link in of and rate >= max(r for other, r in zip(links, rates, strict=True) if other in of) * (1 - 1e-9)
                for of in full
            )


def test_a_subset_keeps_its_links_rates_and_ports() -> None:
    machine = dataclasses.replace(
        Machine.uniform(4), ports=tuple(device_ports(range(4), 300, 200)), memory_bytes=np.array([1, 2, 3, 4])
    )
    bandwidth = np.arange(1.0, 26.0).reshape(5, 5)
    machine = dataclasses.replace(machine, bandwidth_gb_per_s=bandwidth)
    part = machine.subset([3, 1])
    assert part.num_ranks == 2
    assert part.memory_bytes.tolist() == [4, 2]
    assert part.bandwidth_gb_per_s.tolist() == [[19, 17, 20], [9, 7, 10], [24, 22, 25]]
    ports = {port.name: port for port in part.ports}
    assert ports["device 3 egress"].links == ((0, 1),)
    assert ports["device 1 ingress"].links == ((0, 1),)
    assert set(ports) == {f"device {rank} {way}" for rank in (1, 3) for way in ("egress", "ingress")}
    assert part.key != machine.key
    for ranks in ([], [4], [1, 1], [-1]):
        with pytest.raises(ParamError, match="each once"):
            machine.subset(ranks)


def test_a_subset_has_the_nodes_of_its_ranks_alone() -> None:
    node = dataclasses.replace(Machine.uniform(2), host_bytes=np.array([7]))
    machine = Machine.cluster(node, 3, Net(10.0, adapters=2))
    hosts = np.array([5, 6, 7])
    part = dataclasses.replace(machine, host_bytes=hosts).subset([5, 2])
    assert (part.node_of.tolist(), part.host_bytes.tolist()) == ([1, 0], [6, 7])
    ends = [5, 2, 7, 8]
    assert part.bandwidth_gb_per_s.tolist() == machine.bandwidth_gb_per_s[np.ix_(ends, ends)].tolist()
    links = {port.name: set(port.links) for port in part.ports}
    assert links["node 2, adapter 1 sends"] == {(0, 1), (0, 2), (3, 1), (3, 2)}
    assert machine.subset([1, 0]).num_nodes == 1


def table(size: int, gb_per_s: float = 50.0) -> np.ndarray:
    return np.full((size, size), gb_per_s)


def test_bytes_without_ports_take_their_links_together() -> None:
    assert least_time([([(0, 1), (0, 2)], 100e9)], table(3), ()) == pytest.approx(1.0)
    assert least_time([([(0, 1)], 0.0)], table(3), ()) == 0.0
    assert least_time([], table(3), ()) == 0.0


def test_bytes_over_a_port_take_what_is_left_of_it() -> None:
    # 60 GB/s of the port for two links, and a third link of 50 beside it.
    ports = [Port.of("p", 60, [(0, 1), (0, 2)])]
    assert least_time([([(0, 1), (0, 2), (0, 3)], 110e9)], table(4), ports) == pytest.approx(1.0)


def test_nested_ports_are_all_kept() -> None:
    links = [(4, rank) for rank in range(4)]
    ports = [Port.of("a", 60, links[:2]), Port.of("b", 60, links[2:]), Port.of("all", 100, links)]
    assert least_time([(links, 100e9)], table(5), ports) == pytest.approx(1.0)
    assert least_time([(links, 120e9)], table(5), ports[:2]) == pytest.approx(1.0)


def test_both_ways_of_a_duplex_meet_at_the_corner() -> None:
    inward, outward = [(2, 0), (2, 1)], [(0, 2), (1, 2)]
    ports = duplex_ports("host", inward, outward, in_gb_per_s=88, out_gb_per_s=80, both_gb_per_s=(60, 50))
    assert least_time([(inward, 60e9), (outward, 50e9)], table(3), ports) == pytest.approx(1.0)
    assert least_time([(inward, 88e9)], table(3), ports) == pytest.approx(1.0)
    # Half as much back: (x, x/2) on the line from (88, 0) to (60, 50).
    reached = 1 / (1 / 88 + 0.5 * (1 - 60 / 88) / 50)
    assert least_time([(inward, reached * 1e9), (outward, reached * 0.5e9)], table(3), ports) == pytest.approx(1.0)


def test_a_byte_counts_for_each_demand_that_its_link_serves() -> None:
    # 80 GB/s over both links, 70 GB of it over the first: 50 GB/s there.
    links = [(2, 0), (2, 1)]
    assert least_time([(links, 80e9), (links[:1], 70e9)], table(3), ()) == pytest.approx(1.4)


@settings(deadline=None, max_examples=200)
@given(st.integers(0, 2**32 - 1))
def test_fair_rates_never_beat_the_least_time_and_one_limit_always_does_not_exceed_it(seed: int) -> None:
    rng = np.random.default_rng(seed)
    size = int(rng.integers(2, 6))
    bandwidth = rng.uniform(1, 100, (size, size))
    pairs = [(s, d) for s in range(size) for d in range(size) if s != d]
    ports = []
    for number in range(int(rng.integers(1, 5))):
        chosen = [pairs[i] for i in rng.choice(len(pairs), int(rng.integers(1, len(pairs) + 1)), replace=False)]
        weights = tuple(rng.uniform(0.2, 2, len(chosen)).tolist())
        ports.append(Port(f"p{number}", float(rng.uniform(10, 100)), tuple(chosen), weights))
    demands = []
    for _ in range(int(rng.integers(1, 4))):
        chosen = [pairs[i] for i in rng.choice(len(pairs), int(rng.integers(1, len(pairs) + 1)), replace=False)]
        demands.append((chosen, float(rng.uniform(1e6, 1e9))))
    found = least_time(demands, bandwidth, ports)
    links = sorted({link for listed, _ in demands for link in listed})
    rates = dict(zip(links, fair_rates(links, [float(bandwidth[link]) for link in links], ports), strict=True))
    reached = max(size / sum(rates[link] * 1e9 for link in listed) for listed, size in demands)
    assert 0 < found <= reached * (1 + 1e-9)
    for listed, size in demands:
        assert found >= size / sum(float(bandwidth[link]) * 1e9 for link in listed) * (1 - 1e-9)
        for port in ports:
            of = dict(zip(port.links, port.weights, strict=True))
            if all(link in of for link in listed):
                most = port.capacity_gb_per_s / min(of[link] for link in listed)
                assert found >= size / (most * 1e9) * (1 - 1e-9)


def test_figures_that_were_changed_by_hand_are_no_whole_calibration() -> None:
    whole = dataclasses.replace(Machine.uniform(2), provenance="calibrated", whole=True)
    text = whole.to_json()
    assert Machine.from_json(text).whole
    assert not Machine.from_json(text.replace("60.0", "70.0")).whole
    assert not Machine.from_json(dataclasses.replace(whole, whole=False).to_json()).whole
    assert not any(load_machine(name).whole for name in machine_names())  # whose figures come from several sources
