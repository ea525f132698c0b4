"""The net that samples of messages make: made-up times of nets that are known."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from uncut_mpi.errors import ParamError
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.net import ALONE, BOTH_WAYS, NODES, RANKS, NetSample, busiest, fit_latency, fit_net
from uncut_mpi.model.ports import Net, fair_rates

LONG = 16 << 20


def measured(net, each, counts=(1, 2, 4, 8), noise=lambda: 1.0):
    """Return what is measured between two nodes with so many ranks, joined by a net."""
    node_of = [0] * each + [1] * each

    def sample(kind, flows, nbytes, rate):
        moving = busiest(flows, node_of, net.adapters) * nbytes / (rate * 1e9)
        times = tuple(noise() * (2 * net.latency_s + moving) for _ in range(9))
        return NetSample(kind, tuple(flows), nbytes, times)

    def flows(count):
        return [(at * each // count, each + at * each // count) for at in range(count)]

    back = [flow[::-1] for flow in flows(each)]
    return [
        NetSample(ALONE, ((0, each),), 8, tuple(noise() * 2 * net.latency_s for _ in range(9))),
        sample(ALONE, flows(1), 4096, net.gb_per_s / 3),  # short ones reach less
        sample(ALONE, flows(1), LONG, net.gb_per_s),
        *(sample(RANKS, flows(count), LONG, net.gb_per_s) for count in counts if 1 < count <= each),
        sample(BOTH_WAYS, [(0, each), (each, 0)], LONG, net.gb_per_s),
        sample(NODES, [*flows(each), *back], LONG, net.typical_gb_per_s),
    ], node_of


@pytest.mark.parametrize(("each", "adapters"), [(8, 1), (8, 2), (8, 4), (8, 8), (4, 1), (4, 4), (6, 2), (1, 1), (3, 3)])
def test_the_net_that_was_measured_is_found(each, adapters):
    net = Net(12.5, 3e-6, adapters, 10.0)
    found = fit_net(*measured(net, each, counts=(2, 4, 8, each)))
    assert found.adapters == adapters
    assert (found.gb_per_s, found.latency_s, found.typical_gb_per_s) == pytest.approx((12.5, 3e-6, 10.0))


@pytest.mark.parametrize(("adapters", "seed"), [*itertools.product((1, 2, 4), range(5))])
def test_times_that_scatter_make_the_same_net(adapters, seed):
    rng = np.random.default_rng(seed)
    net = Net(25.0, 5e-6, adapters, 20.0)
    found = fit_net(*measured(net, 8, noise=lambda: 1.0 + rng.exponential(0.05)))
    assert found.adapters == adapters
    assert found.gb_per_s == pytest.approx(25.0, rel=0.02)  # the least of many times
    assert found.typical_gb_per_s == pytest.approx(20.0, rel=0.1)


def test_what_both_ways_take_from_each_other_is_expected_and_no_bound():
    samples = [
        NetSample(ALONE, ((0, 1),), 8, (2e-6, 4e-6, 9e-6)),
        NetSample(ALONE, ((0, 1),), 10**9, (0.1 + 4e-6, 0.2 + 4e-6, 0.4 + 4e-6)),
        NetSample(NODES, ((0, 1), (1, 0)), 10**9, (0.4 + 4e-6, 0.5 + 4e-6, 0.8 + 4e-6)),
    ]
    assert fit_latency(samples) == 2e-6
    net = fit_net(samples, (0, 1))
    assert (net.gb_per_s, net.typical_gb_per_s, net.adapters) == pytest.approx((10.0, 2.0, 1))


def test_a_sum_that_grows_without_doubling_is_nearer_to_two_adapters_or_to_one():
    def samples(both_s):
        return [
            NetSample(ALONE, ((0, 2),), 8, (0.0,)),
            NetSample(ALONE, ((0, 2),), 10**9, (1.0,)),
            NetSample(RANKS, ((0, 2), (1, 3)), 10**9, (both_s,)),
        ]

    assert [fit_net(samples(both_s), (0, 0, 1, 1)).adapters for both_s in (1.0, 1.3, 1.5, 2.0)] == [2, 2, 1, 1]


def test_messages_of_uneven_nodes_are_counted_by_the_adapters_of_each():
    node_of = [0, 1, 0, 1, 1, 1]  # two ranks and four, two adapters: 0 | 2 and 1, 3 | 4, 5
    flows = [(0, 1), (2, 3)]
    assert [busiest(flows, node_of, count) for count in (1, 2, 4)] == [2, 2, 1]
    assert [busiest([(0, 1), (2, 5)], node_of, count) for count in (1, 2)] == [2, 1]
    assert busiest([(0, 1), (1, 0)], node_of, 1) == 1  # an adapter has two ways


def test_a_plan_expects_the_typical_rate_and_a_bound_takes_the_best():
    machine = Machine.cluster(Machine.uniform(2), 2, Net(10.0, 1e-6, 1, 4.0))
    assert machine.bandwidth_gb_per_s[0, 2] == 10.0
    assert fair_rates([(0, 2), (1, 3)], [10.0, 10.0], machine.ports).tolist() == [2.0, 2.0]
    assert {port.capacity_gb_per_s for port in machine.ports} == {10.0}
    with pytest.raises(ParamError, match="no more than the best"):
        Net(10.0, typical_gb_per_s=11.0)
