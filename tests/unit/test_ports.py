"""Ports and fair rates: closed cases by hand, properties of any case."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from uncut_mpi.errors import ParamError
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.ports import Port, device_ports, duplex_ports, fair_rates, least_time


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
    host = 4
    ports = duplex_ports(
        "host",
        [(host, rank) for rank in range(4)],
        [(rank, host) for rank in range(4)],
        in_gb_per_s=184,
        out_gb_per_s=148,
        both_gb_per_s=(96, 92),
    )
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
