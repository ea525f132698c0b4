"""Calibration: what is fitted to synthetic samples is what they were made from."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math

import numpy as np
import pytest

from uncut_mpi.calibration import probes
from uncut_mpi.calibration.assemble import assemble, fit_products
from uncut_mpi.calibration.effort import EFFORTS
from uncut_mpi.calibration.fitting import fit_gemm_shape, fit_idle_use, fit_row_shares, nonnegative_least_squares
from uncut_mpi.calibration.litmus import Exchange
from uncut_mpi.calibration.ports import HostTotals, host_ports, pair_ports, predicted_slowdown, star_ports
from uncut_mpi.calibration.probes import Areas, Transfers
from uncut_mpi.calibration.report import machine_text, samples_text
from uncut_mpi.calibration.samples import ProductSample, Samples, TransferSample
from uncut_mpi.calibration.statistics import Summary, student_t
from uncut_mpi.errors import ParamError
from uncut_mpi.model.costs import HELD, GemmShape, RowRates
from uncut_mpi.model.dtypes import MEASURED, DType
from uncut_mpi.model.evened import evened
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.ports import Port, device_ports, duplex_ports, fair_rates
from uncut_mpi.planning.lower import Code, lower
from uncut_mpi.planning.schedule import Kind

SHAPES = EFFORTS["cuda"].shapes
PRODUCTS = EFFORTS["cuda"].products


class TestStatistics:
    # From printed tables of Student's t, two-sided 95 %.
    @pytest.mark.parametrize(
        ("degrees", "quantile"),
        [(1, 12.706), (4, 2.776), (5, 2.571), (9, 2.262), (19, 2.093), (30, 2.042), (120, 1.980)],
    )
    def test_the_quantile_is_that_of_the_tables(self, degrees, quantile):
        assert student_t(degrees) == pytest.approx(quantile, abs=1.5e-3)

    def test_the_interval_is_that_of_a_worked_example(self):
        summary = Summary.of([1.0, 2.0, 3.0, 4.0, 5.0])
        assert summary.half_width_s == pytest.approx(2.776445 * math.sqrt(2.5) / math.sqrt(5), rel=1e-5)
        assert (summary.mean_s, summary.median_s, summary.min_s, summary.max_s, summary.count) == (3, 3, 1, 5, 5)

    def test_the_interval_holds_the_mean_in_95_of_100_cases(self):
        random = np.random.default_rng(3)
        held = 0
        for _ in range(4000):
            summary = Summary.of(random.normal(10.0, 2.0, 10).tolist())
            held += abs(summary.mean_s - 10.0) <= summary.half_width_s
        assert 0.94 < held / 4000 < 0.96

    def test_few_samples_are_never_enough_and_one_has_no_interval(self):
        assert not Summary.of([1.0] * 9).precise
        assert Summary.of([1.0] * 10).precise
        assert "half_width_s" not in Summary.of([1.0]).to_dict()

    def test_samples_that_scatter_are_not_enough(self):
        assert not Summary.of([1.0, 2.0] * 10).precise
        assert Summary.of([1.0, 1.04] * 10).precise


class TestProducts:
    def seconds(self, shape, rate_tflop_per_s, multiprocessors, noise=0.0):
        random = np.random.default_rng(5)
        exact = [shape.seconds(*extents, multiprocessors, rate_tflop_per_s * 1e12) for extents in SHAPES]
        return [value * (1 + noise * random.standard_normal()) for value in exact]

    def with_c(self, shape, rate_flop_per_s, bytes_of_an_element):
        """Return what products that also add to C are, the bytes of C that each moves and the seconds it takes."""
        extents = [one.shape for one in PRODUCTS]
        extra = [bytes_of_an_element * one.shape[0] * one.shape[1] * one.adds for one in PRODUCTS]
        timed = zip(extents, extra, strict=True)
        return extents, extra, [shape.seconds(*one, 132, rate_flop_per_s, moved) for one, moved in timed]

    @pytest.mark.parametrize(
        ("blocks", "waves"),
        [
            *itertools.product([(128.0, 256.0), (256.0, 128.0), (128.0, 128.0), (64.0, 96.0), (1.0, 1.0)], [True]),
            *itertools.product([(64.0, 64.0), (128.0, 64.0), (64.0, 128.0), (128.0, 128.0)], [False]),
        ],
    )
    def test_exact_times_give_back_blocks_depth_overhead_and_rate(self, blocks, waves):
        true = GemmShape(*blocks, half_depth=180.0, overhead_s=6e-6, waves=waves)
        shape, rate, error = fit_gemm_shape(SHAPES, self.seconds(true, 62.0, 132), 132)
        assert (shape.block_rows, shape.block_cols, shape.waves) == (*blocks, waves)
        assert shape.half_depth == pytest.approx(180.0, rel=1e-6)
        assert shape.overhead_s == pytest.approx(6e-6, rel=1e-6)
        assert rate == pytest.approx(62.0, rel=1e-6)
        assert error < 1e-9

    def test_waves_that_explain_little_more_are_not_believed(self):
        waves, none = GemmShape(64.0, 64.0, 180.0), GemmShape(64.0, 64.0, 180.0, waves=False)
        exact = [np.array(self.seconds(one, 62.0, 132)) for one in (none, waves)]
        found = [fit_gemm_shape(SHAPES, (1 - part) * exact[0] + part * exact[1], 132)[0] for part in (0.0, 0.65, 1.0)]
        assert [one.waves and one.block_rows > 1 for one in found] == [False, False, True]

    def test_times_with_noise_give_a_rate_and_predictions_as_good_as_the_noise(self):
        true = GemmShape(128.0, 256.0, half_depth=180.0, overhead_s=6e-6)
        shape, rate, error = fit_gemm_shape(SHAPES, self.seconds(true, 62.0, 132, noise=0.02), 132)
        assert rate == pytest.approx(62.0, rel=0.03)
        assert error < 0.03
        for extents, seconds in zip(SHAPES, self.seconds(true, 62.0, 132), strict=True):
            predicted = shape.seconds(*extents, 132, rate * 1e12)
            assert predicted == pytest.approx(seconds, rel=0.06), extents

    @pytest.mark.parametrize("uneven", [0.0, 0.2])
    @pytest.mark.parametrize("blocks", [(128.0, 256.0), (1.0, 1.0)])
    def test_what_the_last_blocks_leave_idle_the_rate_of_c_and_uneven_ones_come_back(self, blocks, uneven):
        true = GemmShape(
            *blocks, half_depth=40.0, overhead_s=6e-6, tail_elements=2e5, c_s_per_byte=4e-13, uneven=uneven
        )
        extents, extra, seconds = self.with_c(true, 62e12, 8.0)
        shape, rate, error = fit_gemm_shape(extents, seconds, 132, extra)
        for name in ("block_rows", "block_cols", "half_depth", "overhead_s", "tail_elements", "c_s_per_byte"):
            assert getattr(shape, name) == pytest.approx(getattr(true, name), rel=1e-5, abs=0.0)
        assert shape.uneven == pytest.approx(uneven, abs=1e-6)
        assert rate == pytest.approx(62.0, rel=1e-5)
        assert error < 1e-9

    @pytest.mark.parametrize("depth", [0.0, 128.0, 1024.0, 4096.0])
    def test_the_depth_that_hides_half_of_moving_c_comes_back(self, depth):
        true = GemmShape(
            128.0, 64.0, 300.0, 3e-6, tail_elements=4e5, c_s_per_byte=4e-13, waves=False, c_half_depth=depth
        )
        extents, extra, seconds = self.with_c(true, 900e12, 4.0)
        shape, rate, error = fit_gemm_shape(extents, seconds, 132, extra)
        assert shape.c_half_depth == depth
        assert shape.c_s_per_byte == pytest.approx(4e-13, rel=1e-5)
        assert rate == pytest.approx(900.0, rel=1e-5)
        assert error < 1e-9

    def test_a_depth_that_explains_little_is_not_believed(self):
        true = GemmShape(128.0, 64.0, 300.0, 3e-6, c_s_per_byte=4e-13, waves=False)
        extents, extra, exact = self.with_c(true, 900e12, 4.0)
        noise = np.random.default_rng(5).normal(1.0, 0.05, len(extents))
        assert fit_gemm_shape(extents, (noise * exact).tolist(), 132, extra)[0].c_half_depth == 0.0

    @pytest.mark.parametrize("use", [0.0, 0.3, 0.7, 1.0])
    def test_what_two_products_gain_tells_what_is_used_of_what_is_idle(self, use):
        idle = [0.1, 0.3, 0.5, 0.8, 0.9]
        gained = [min(use * one, 0.5) for one in idle]  # two take no less than half of their times
        assert fit_idle_use(idle, gained) == pytest.approx(use)
        assert fit_idle_use(idle, [-0.1] * 5) == 0.0
        assert fit_idle_use(idle[:2], [0.2, 0.5]) == 1.0

    def test_a_device_without_multiprocessors_has_no_waves(self):
        true = GemmShape(half_depth=30.0, overhead_s=2e-6)
        shape, rate, _ = fit_gemm_shape(SHAPES, self.seconds(true, 0.05, 1), 1)
        assert (shape.block_rows, shape.block_cols) == (1.0, 1.0)
        assert rate == pytest.approx(0.05, rel=1e-6)

    @pytest.mark.parametrize("seconds", [[1e-3], [1e-3, 0.0, 1e-3], [1e-3, math.nan, 1e-3]])
    def test_too_few_or_impossible_times_are_an_error(self, seconds):
        with pytest.raises(ParamError, match="at least 3 positive times"):
            fit_gemm_shape(SHAPES[: len(seconds)], seconds, 132)

    def test_times_that_do_not_grow_with_the_work_give_the_best_rate_and_no_shape(self):
        shape, rate, error = fit_gemm_shape([(8, 8, 8), (8, 8, 16), (8, 8, 32)], [3e-3, 2e-3, 1e-3], 1)
        assert shape == GemmShape()
        assert rate == pytest.approx(2 * 8 * 8 * 32 / 1e-3 * 1e-12)
        assert error == pytest.approx(math.sqrt(((11 / 12) ** 2 + (3 / 4) ** 2) / 3))

    def test_no_parameter_is_ever_negative(self):
        random = np.random.default_rng(11)
        for _ in range(20):
            matrix, values = random.uniform(0, 1, (8, 3)), random.uniform(-1, 1, 8)
            found, norm = nonnegative_least_squares(matrix, values)
            assert (found >= 0).all()
            assert norm == pytest.approx(np.linalg.norm(matrix @ found - values))
            # No step into the allowed region lowers the error: the gradient points out of it.
            gradient = matrix.T @ (matrix @ found - values)
            assert (gradient >= -1e-9).all()
            assert abs(gradient @ found) < 1e-9


def test_row_widths_give_back_their_share_of_the_rate():
    assert fit_row_shares([4096, 0, 512], [2e-11, 1e-11, 5e-11]) == ((512.0, pytest.approx(0.2)), (4096.0, 0.5))


def test_rows_faster_than_a_whole_copy_have_its_rate():
    assert fit_row_shares([0, 512], [1e-11, 0.9e-11]) == ((512.0, 1.0),)


@pytest.mark.parametrize("table", [((512, 0.5), (256, 0.6)), ((512, 0.0),), ((512, 1.5),), ((0, 1.0),)])
def test_shares_by_row_width_are_checked(table):
    with pytest.raises(ParamError, match=r"host_in = .* rising widths"):
        RowRates(host_in=table)


def four_gpus(host_total=200.0, both=(100.0, 100.0), pairs=((0, 1), (2, 3))):
    """A node as the shipped facts describe: one port per GPU, two GPUs on each PCIe switch, one host total."""
    bandwidth = np.full((5, 5), 396.0)
    bandwidth[4, :], bandwidth[:, 4] = 55.0, 54.0
    ports = device_ports(range(4), 400.0, 398.0)
    for rank in range(4):
        ports += duplex_ports(
            f"link {rank}", [(4, rank)], [(rank, 4)], in_gb_per_s=55.0, out_gb_per_s=54.0, both_gb_per_s=(50.0, 49.0)
        )
    for one, other in pairs:
        ports += duplex_ports(
            "switch",
            [(4, one), (4, other)],
            [(one, 4), (other, 4)],
            in_gb_per_s=80.0,
            out_gb_per_s=78.0,
            both_gb_per_s=(74.0, 72.0),
        )
    ports += duplex_ports(
        "host",
        [(4, rank) for rank in range(4)],
        [(rank, 4) for rank in range(4)],
        in_gb_per_s=host_total,
        out_gb_per_s=150.0,
        both_gb_per_s=both,
    )
    return bandwidth, ports


def rates(links, bandwidth, ports):
    return fair_rates(links, [float(bandwidth[link]) for link in links], ports)


def stars(egress, ingress):
    """What each of four devices sends to, or receives from, all others in a second (GB)."""
    return [
        TransferSample(
            kind,
            tuple((rank, other) if kind == "egress" else (other, rank) for other in range(4) if other != rank),
            (1, 1, 1),
            (round(total * 1e9), 0, 0),
            0,
            Summary.of([1.0]),
        )
        for kind, totals in (("egress", egress), ("ingress", ingress))
        for rank, total in totals.items()
    ]


class TestPorts:
    def totals(self, bandwidth, ports, noise=0.0):
        random = np.random.default_rng(1)
        host = len(bandwidth) - 1
        found = []
        sets = [(r,) for r in range(host)] + list(itertools.combinations(range(host), 2))
        for ranks in [*sets, *(tuple(range(count)) for count in range(3, host + 1))]:
            inward, outward = [(host, rank) for rank in ranks], [(rank, host) for rank in ranks]
            both = rates(inward + outward, bandwidth, ports)
            one_in, one_out, in_both, out_both = (
                float(part.sum()) * (1 + noise * random.standard_normal())
                for part in (
                    rates(inward, bandwidth, ports),
                    rates(outward, bandwidth, ports),
                    both[: len(ranks)],
                    both[len(ranks) :],
                )
            )
            found.append(HostTotals(ranks, one_in, one_out, (in_both, out_both)))
        return found

    @pytest.mark.parametrize("noise", [0.0, 0.01])
    def test_totals_by_active_gpus_give_back_what_every_set_of_gpus_gets(self, noise):
        bandwidth, true = four_gpus()
        fitted = host_ports(bandwidth, self.totals(bandwidth, true, noise), 4)
        tolerance = 0.06  # what is within 5 % of the ports found so far makes no port of its own
        for count in range(1, 5):
            for ranks in itertools.combinations(range(4), count):
                inward, outward = [(4, rank) for rank in ranks], [(rank, 4) for rank in ranks]
                for links in (inward, outward, inward + outward):
                    expected = rates(links, bandwidth, true).sum()
                    assert rates(links, bandwidth, fitted).sum() == pytest.approx(expected, rel=tolerance), links

    def test_gpus_on_one_switch_are_told_from_those_on_two(self):
        bandwidth, true = four_gpus()
        names = {port.name for port in host_ports(bandwidth, self.totals(bandwidth, true), 4)}
        assert {"host, ranks 0, 1 in", "host, ranks 2, 3 in"} <= names
        assert not {name for name in names if name.startswith(("host, ranks 0, 2", "host, ranks 1, 3"))}

    def test_the_limit_of_each_link_is_not_repeated_for_many_in_whatever_order_they_come(self):
        bandwidth, true = four_gpus()
        links = [port for port in true if port.name.startswith("link")]
        fitted = host_ports(bandwidth, self.totals(bandwidth, links)[::-1], 4)
        assert {port.name for port in fitted} == {
            f"host link of rank {r} {way}" for r in range(4) for way in ("in", "out")
        }

    def test_links_that_share_nothing_get_no_port(self):
        bandwidth, _ = four_gpus()
        assert host_ports(bandwidth, self.totals(bandwidth, []), 4) == []
        alone = dict.fromkeys(range(4), 3 * 396.0)
        assert star_ports(bandwidth, stars(alone, alone)) == []

    def test_one_to_all_and_all_to_one_give_back_the_ports_of_devices(self):
        bandwidth, _ = four_gpus()
        ports = star_ports(bandwidth, stars(dict.fromkeys(range(4), 402.0), {0: 404.0, 1: 1180.0, 2: 300.0, 3: 404.0}))
        capacity = {port.name: port.capacity_gb_per_s for port in ports}
        assert capacity == {
            **{f"device {rank} egress": 402.0 for rank in range(4)},
            "device 0 ingress": 404.0,
            "device 2 ingress": 396.0,  # one link alone had that
            "device 3 ingress": 404.0,
        }
        assert ports[1].links == ((1, 0), (1, 2), (1, 3))

    def test_two_links_that_halve_each_other_become_a_port_unless_it_is_known(self):
        bandwidth, true = four_gpus()
        pair = ((0, 1), (4, 2))
        (port,) = pair_ports(bandwidth, {pair: 2.0}, true, 4)
        assert port.name == "device 0 to device 1 and host to device 2"
        together = rates(pair, bandwidth, [*true, port])
        assert together[0] / bandwidth[pair[0]] + together[1] / bandwidth[pair[1]] == pytest.approx(1.0)
        for link in pair:
            assert rates([link], bandwidth, [*true, port])[0] == pytest.approx(bandwidth[link])
        known = {((0, 1), (0, 2)): 396 * 2 / 400.0}
        assert pair_ports(bandwidth, known, true, 4) == []
        assert pair_ports(bandwidth, {pair: 1.05}, true, 4) == []

    def test_a_slowdown_is_the_time_of_both_when_the_shorter_leaves_first(self):
        port = Port.of("shared", 100.0, [(0, 1), (2, 3)])
        # 20 and 100 GB/s share 100: the first gets 20, the second 80 until the first has ended, then 100.
        assert predicted_slowdown([20.0, 100.0], [(0, 1), (2, 3)], [port]) == pytest.approx(1.2)
        assert predicted_slowdown([20.0, 100.0], [(0, 1), (2, 3)], []) == pytest.approx(1.0)


def summary(seconds, random, noise):
    return Summary.of((seconds * (1 + noise * np.abs(random.standard_normal(10)))).tolist())


def synthetic_samples(machine, shape, noise):
    """Samples of a known machine, as `measuring` would take them."""
    random = np.random.default_rng(8)
    size, host = machine.num_ranks, machine.num_ranks
    samples = Samples(size, machine.multiprocessors.tolist())
    target = 2e-3

    def add(kind, links, width=0):
        nbytes = [target * machine.bandwidth_gb_per_s[link] * 1e9 for link in links]
        speed = rates(links, machine.bandwidth_gb_per_s, machine.ports)
        between = machine.row_rates.local if links[0][0] == links[0][1] else machine.row_rates.device
        shares = dict(machine.row_rates.host_in if links[0][0] == host else between)
        slow = 1 / shares[width] if width else 1.0
        seconds = max(
            b / (s * 1e9) * slow + machine.latency_s[link] for b, s, link in zip(nbytes, speed, links, strict=True)
        )
        time = summary(seconds, random, noise)
        moved = tuple(map(int, nbytes))
        samples.transfers.append(TransferSample(kind, tuple(links), (1,) * len(links), moved, width, time))

    links = [(s, d) for s in range(size + 1) for d in range(size + 1) if (s, d) != (host, host)]
    for link in links:
        seconds = 32 * machine.latency_s[link]
        samples.transfers.append(
            TransferSample("small", (link,), (32,), (32 * 4096,), 0, summary(seconds, random, noise))
        )
        add("alone", [link])
    for rank in range(size):
        others = [other for other in range(size) if other != rank]
        add("egress", [(rank, other) for other in others])
        add("ingress", [(other, rank) for other in others])
    sets = [*itertools.combinations(range(size), 1), *itertools.combinations(range(size), 2), (0, 1, 2), (0, 1, 2, 3)]
    for ranks in sets:
        inward, outward = [(host, rank) for rank in ranks], [(rank, host) for rank in ranks]
        for together in (inward, outward, inward + outward):
            add("host", together)
    for width in (0, 256, 8192):
        add("rows", [(0, 1)], width)
        add("rows", [(0, 0)], width)
        add("rows", [(host, 0)], width)
    for one in PRODUCTS:
        extra = 8.0 * one.shape[0] * one.shape[1] * one.adds
        exact = shape.seconds(*one.shape, 132, 60e12, extra, aligned=one.aligned)
        if one.lanes == 2:
            exact *= 1 - shape.idle_use * (1 - shape.work(*one.shape, 132)[1])
        seconds = [exact * factor for factor in (1.0, 1.0, 1.25, 1.0)]
        time = summary(exact, random, noise)
        samples.products.append(ProductSample("f64", one, tuple(seconds), time))
    samples.combine_gb_per_s = [2000.0] * size
    samples.half_combine_gb_per_s = [1500.0] * size
    samples.costs = {"copy_s": 1.3e-6, "flag_latency_s": 3e-6}
    within = {"products": 8e-3, "copies": 2e-3}
    samples.within = {"f64": within | {"together": 8e-3 + shape.copy_share * 2e-3}}
    block_s = shape.native().block_s(8192, 132, 60e12)
    samples.sums = {"f64": {"waits": 4 * shape.sum_wait * block_s, "count": 4.0, "product": 1e3 * block_s, "k": 8192.0}}
    samples.at_length = {"f64": shape.sustained}
    samples.watts = {"idle": [75.0] * size, "busy": [690.0] * size, "active": [280.0] * size}
    samples.litmus = {"rounds": 100, "wrong_words": 0}
    return samples


@pytest.fixture(scope="module", params=[0.0, 0.01], ids=["exact", "noise"])
def known(request):
    bandwidth, ports = four_gpus()
    np.fill_diagonal(bandwidth, 2000.0)
    latency = np.random.default_rng(4).uniform(2e-6, 5e-6, (5, 5))
    rows = RowRates(
        device=((256, 0.5), (8192, 0.9)), host_in=((256, 0.2), (8192, 0.6)), local=((256, 0.1), (8192, 0.4))
    )
    shape = GemmShape(
        128.0,
        256.0,
        150.0,
        5e-6,
        3e5,
        4e-13,
        misaligned=0.8,
        idle_use=0.4,
        copy_share=0.3,
        sum_wait=0.25,
        sustained=1.1,
    )
    machine = Machine.uniform(4)
    fields = {name: getattr(machine, name) for name in ("name", "key", "gemm_tflop_per_s", "memory_bytes")}
    true = Machine(
        **fields,
        bandwidth_gb_per_s=bandwidth,
        latency_s=latency,
        ports=tuple(ports),
        multiprocessors=np.full(4, 132),
        row_rates=rows,
    )
    samples = synthetic_samples(true, shape, request.param)
    found = assemble(
        samples,
        name="four",
        key="cuda-4-x",
        models=["GPU"] * 4,
        provenance="made up",
        memory_bytes=true.memory_bytes.tolist(),
    )
    return true, found, samples, max(2 * request.param, 2e-3)


class TestAssembling:
    def test_links_come_back(self, known):
        true, found, _, tolerance = known
        off = ~np.eye(5, dtype=bool)
        assert found.bandwidth_gb_per_s[off] == pytest.approx(true.bandwidth_gb_per_s[off], rel=tolerance)
        assert found.latency_s[:4, :] == pytest.approx(true.latency_s[:4, :], rel=tolerance)

    def test_what_transfers_share_comes_back(self, known):
        true, found, _, _ = known
        for links in ([(0, 1), (0, 2), (0, 3)], [(1, 0), (2, 0)], [(4, r) for r in range(4)], [(4, 0), (1, 4), (0, 2)]):
            expected = rates(links, true.bandwidth_gb_per_s, true.ports).sum()
            assert rates(links, found.bandwidth_gb_per_s, found.ports).sum() == pytest.approx(expected, rel=0.06)

    def test_products_rows_costs_and_power_come_back(self, known):
        _, found, samples, tolerance = known
        assert found.typical_gemm_tflop_per_s["f64"] == pytest.approx([60.0, 60.0, 48.0, 60.0], rel=1e-6)
        assert (found.gemm_tflop_per_s["f64"] >= found.typical_gemm_tflop_per_s["f64"]).all()
        shape = dataclasses.asdict(found.gemm_shape["f64"])
        assert shape.pop("uneven") == pytest.approx(0.0, abs=1e-6)
        true = GemmShape(128, 256, 150, 5e-6, 3e5, 4e-13, 0.0, 0.8, 0.4, True, 0.0, 0.3, 0.25, 1.1)
        assert shape == pytest.approx({name: getattr(true, name) for name in shape}, rel=1e-5)
        for way, shares in (("device", (0.5, 0.9)), ("host_in", (0.2, 0.6)), ("local", (0.1, 0.4)), ("host_out", ())):
            table = getattr(found.row_rates, way)
            assert [width for width, _ in table] == [256, 8192][: len(shares)]
            assert [share for _, share in table] == pytest.approx(shares, rel=max(0.01, 2 * tolerance))
        assert found.costs.copy_s == 1.3e-6
        assert (found.idle_watts[0], found.busy_watts[3], found.active_watts[2]) == (75.0, 690.0, 280.0)
        assert fit_products(samples)[2]["f64"] < 1e-6

    def test_sums_that_wait_for_a_product_to_end_do_so_whatever_its_length(self, known):
        sums = {"f64": {"waits": 9e-3, "count": 4.0, "product": 1e-2, "k": 8192.0}}
        assert fit_products(dataclasses.replace(known[2], sums=sums))[1]["f64"].sum_wait == HELD

    @pytest.mark.parametrize(("together", "share"), [(7e-3, 0.0), (9e-3, 0.5), (1e-2, 1.0), (1.1e-2, 1.0)])
    def test_copies_within_a_device_take_between_nothing_and_all_of_it(self, known, together, share):
        within = {"f64": {"products": 8e-3, "copies": 2e-3, "together": together}}
        samples = dataclasses.replace(known[2], within=within)
        assert fit_products(samples)[1]["f64"].copy_share == pytest.approx(share)

    def test_a_product_faster_than_the_fit_is_the_best_rate_of_its_rank(self, known):
        true, _, samples, _ = known
        more = Samples(4, samples.multiprocessors, samples.transfers, list(samples.products))
        seconds = (2 * 8192.0**3 / 90e12, 1.0, 1.0, 1.0)
        more.products.append(ProductSample("f64", probes.GemmProbe((8192,) * 3), seconds, Summary.of(seconds)))
        machine = assemble(
            more, name="m", key="k", memory_bytes=true.memory_bytes.tolist(), models="wxyz", provenance=""
        )
        assert machine.gemm_tflop_per_s["f64"][0] == pytest.approx(90.0)
        assert machine.gemm_tflop_per_s["f64"][0] > machine.typical_gemm_tflop_per_s["f64"][0]

    def test_the_file_keeps_the_samples_and_is_a_machine(self, known):
        _, found, samples, _ = known
        content = {**json.loads(found.to_json()), "samples": samples.to_dict()}
        text = json.dumps(content)
        assert Machine.from_json(text).to_json() == found.to_json()
        kept = json.loads(text)["samples"]
        assert len(kept["transfers"]) == len(samples.transfers)
        assert kept["transfers"][0]["time"]["count"] == 10

    def test_the_report_shows_matrices_ports_and_the_verdict(self, known):
        _, found, samples, _ = known
        text = machine_text(found) + samples_text(samples, found)
        matrix = text[text.index("bandwidth of one transfer") :].splitlines()
        assert matrix[1].split() == ["0", "1", "2", "3", "host"]
        assert float(matrix[2].split()[2]) == pytest.approx(396.0, rel=0.03)
        assert matrix[6].split()[-1] == "-"
        for part in ("device 0 egress", "host, 2 active (0, 1)", "0 wrong words: PASS", "half rate at k", "690"):
            assert part in text, part

    def test_a_measurement_that_scatters_makes_no_port(self, known):
        true, _, samples, _ = known
        wild = Samples(4, samples.multiprocessors, products=samples.products)
        for one in samples.transfers:
            together = one.kind in ("egress", "ingress", "host")
            time = Summary.of([one.seconds * factor for factor in (0.5, 1.0, 3.0, 8.0)]) if together else one.time
            wild.transfers.append(TransferSample(one.kind, one.links, one.counts, one.nbytes, one.width_bytes, time))
        machine = assemble(
            wild, name="wild", key="k", memory_bytes=true.memory_bytes.tolist(), models="wxyz", provenance=""
        )
        assert machine.ports == ()

    @pytest.mark.parametrize(("slower", "scatter", "equal"), [(1.02, 0.03, True), (1.3, 0.03, False), (1.6, 0.5, True)])
    def test_equal_devices_have_equal_rates_unless_they_differ_beyond_the_intervals(
        self, known, slower, scatter, equal
    ):
        true, _, samples, _ = known
        time = Summary.of([1 - scatter, 1 + scatter] * 6)
        products = [
            dataclasses.replace(one, seconds=(one.seconds[0], slower * one.seconds[0]) * 2, time=time)
            for one in samples.products
        ]
        transfers = [dataclasses.replace(one, time=time) for one in samples.transfers] if scatter > 0.1 else []
        more = dataclasses.replace(samples, products=products, transfers=transfers or samples.transfers)
        machine = assemble(
            more, name="m", key="k", memory_bytes=true.memory_bytes.tolist(), models=["GPU"] * 4, provenance="said"
        )
        rates = machine.typical_gemm_tflop_per_s["f64"]
        assert (len(set(rates.tolist())) == 1) == equal
        assert machine.steady == (scatter < 0.1)
        assert machine.provenance.endswith("not steady") != machine.steady


# -- probes: schedules that move what they say -----------------------------------------------------


AREAS = Areas(4, 1 << 20, 1 << 20)


def spans(probe, num_ranks):
    """(location, first byte, last byte, task, whether it is written) of every region."""
    schedule, found = probe.schedule, []
    for index, task in enumerate(schedule.tasks):
        for place in range(int(task["num_operands"])):
            operand = schedule.operands[int(task["first_operand"]) + place]
            region = schedule.regions[operand["region"]]
            buffer = schedule.buffers[region["buffer"]]
            where, offset = probe.windows[int(region["buffer"])]
            assert (where == num_ranks) == (int(buffer["location"]) == num_ranks)
            size = DType(int(buffer["dtype"])).itemsize
            last = offset + (int(buffer["ld"]) * (int(region["cols"]) - 1) + int(region["rows"])) * size
            found.append((where, offset, last, index, place == 0))
    return found


def meeting(found):
    """Yield the tasks of every two regions that overlap, the first of which is written."""
    for (where, first, last, task, written), (there, start, stop, other, _) in itertools.permutations(found, 2):
        if written and where == there and first < stop and start < last:
            yield task, other


def count(lowering, rank, code):
    """Return how many operations of a code a rank has."""
    return int((lowering.rank_list(rank).operations["code"] == code).sum())


def test_transfers_at_once_move_their_bytes_on_lanes_of_their_own():
    at_once = [Transfers((0, 1), 3, 1 << 20), Transfers((4, 2), 2, 4096), Transfers((2, 4), 1, 8192, 512)]
    probe = probes.transfers(AREAS, at_once)
    schedule = probe.schedule
    assert len(schedule.lanes) == 3
    assert [int(rank) for rank in np.unique(schedule.tasks["rank"])] == [0, 2]
    for rank, expected in ((0, [1 << 20] * 3), (1, []), (2, [4096, 4096, 8192])):
        program = lower(schedule).rank_list(rank)
        assert (program.operations["code"] == Code.COPY).all()
        moved = [program.operands[at] for at in program.operations["first_operand"]]
        assert sorted(int(one["rows"] * one["cols"]) * 8 for one in moved) == expected


@pytest.mark.parametrize("link", [(0, 1), (2, 2), (4, 3), (3, 4)])
@pytest.mark.parametrize("width", [0, 512])
def test_transfers_stay_within_the_areas(link, width):
    nbytes = AREAS.nbytes // probes.row_distance(width) * width if width else AREAS.nbytes
    for where, first, last, _, _ in spans(probes.transfers(AREAS, [Transfers(link, 3, nbytes, width)]), 4):
        assert 0 <= first < last <= (AREAS.host_bytes if where == 4 else AREAS.device_bytes)


def test_transfers_of_all_links_at_once_write_nothing_twice_and_nothing_that_is_read():
    links = [(s, d) for s in range(5) for d in range(5) if (s, d) != (4, 4)]
    found = spans(probes.transfers(AREAS, [Transfers(link, 1, AREAS.nbytes) for link in links]), 4)
    assert all(task == other for task, other in meeting(found))


@pytest.mark.parametrize(("link", "strided"), [((0, 1), 1), ((AREAS.num_ranks, 0), 1), ((0, AREAS.num_ranks), 0)])
def test_rows_of_strided_copies_lie_far_apart_in_the_host_or_at_the_source(link, strided):
    probe = probes.transfers(AREAS, [Transfers(link, 1, 16 * 512, 512)])
    ends = lower(probe.schedule).rank_list(0).operands
    assert [(int(end["rows"]), int(end["cols"])) for end in ends] == [(64, 16)] * 2
    assert [int(end["ld"]) for end in ends] == [8192 if at == strided else 64 for at in (0, 1)]
    assert probes.row_distance(1 << 17) == 1 << 18


def test_a_load_multiplies_on_the_devices_of_the_link_only():
    host = AREAS.num_ranks
    for link, ranks in (((0, 1), [0, 1]), ((host, 1), [1]), ((1, host), [1]), ((2, 2), [2])):
        load = probes.GemmProbe((64, 48, 32)), DType.f16, 3
        schedule = probes.transfers(AREAS, [Transfers(link, 2, 1 << 12)], load).schedule
        tasks = schedule.tasks
        products = tasks[tasks["kind"] == Kind.GEMM]
        assert products["rank"].tolist() == [rank for rank in ranks for _ in range(3)]
        assert (tasks["kind"] == Kind.COPY).sum() == 2
        operands = schedule.operands[products["first_operand"] + 1]
        assert (schedule.buffers[schedule.regions[operands["region"]]["buffer"]]["dtype"] == DType.f16).all()


def test_hops_await_one_another():
    for ranks, code in (([0], Code.WAIT_EVENT), ([0, 1], Code.WAIT_FLAG)):
        lowering = lower(probes.hops(AREAS, ranks, 10).schedule)
        assert sum(count(lowering, rank, code) for rank in ranks) == 9


@pytest.mark.parametrize(("copies", "waits", "lanes"), [(False, 6, 2), (True, 13, 2)])
def test_sums_in_turns_await_one_another_or_the_copy_between_them(copies, waits, lanes):
    schedule = probes.turns(AREAS, 16, 7, copies=copies).schedule
    assert count(lower(schedule), 0, Code.WAIT_EVENT) == waits
    assert len(schedule.lanes) == lanes
    kinds = schedule.tasks["kind"]
    assert (int((kinds == Kind.COMBINE).sum()), int((kinds == Kind.COPY).sum())) == (7, 7 if copies else 0)


def test_every_signalled_copy_has_a_flag_and_a_wait():
    lowering = lower(probes.signalled(AREAS, 7).schedule)
    assert [count(lowering, 0, code) for code in (Code.COPY, Code.SIGNAL)] == [7, 7]
    assert [count(lowering, 1, code) for code in (Code.COPY, Code.WAIT_FLAG)] == [7, 7]


def test_small_copies_beside_large_ones_are_on_other_lanes_and_touch_nothing_of_theirs():
    probe = probes.beside(AREAS, 3, 5)
    tasks, lanes = probe.schedule.tasks, probe.schedule.lanes
    assert len(lanes) == 3
    large = tasks["lane"] == 0
    assert (int(large.sum()), int((~large).sum())) == (3, 10)
    assert sum(count(lower(probe.schedule), rank, Code.WAIT_FLAG) for rank in (0, 1)) == 9
    found = spans(probe, 4)
    assert all(0 <= first < last <= AREAS.device_bytes for _, first, last, *_ in found)
    assert all(large[task] == large[other] for task, other in meeting(found))


def test_waits_for_flags_that_are_set_are_all_that_two_probes_differ_by():
    lists = [lower(probes.waiting(AREAS, 7, waits=waits).schedule) for waits in (True, False)]
    for code, of_rank, counts in ((Code.WAIT_FLAG, 1, (7, 0)), (Code.SIGNAL, 0, (7, 0)), (Code.COPY, 0, (7, 7))):
        assert tuple(count(one, of_rank, code) for one in lists) == counts
    copies = [count(one, 1, Code.COPY) for one in lists]
    assert copies[0] == copies[1] > 7


@pytest.mark.parametrize("dtype", MEASURED)
def test_products_lie_in_the_memory_of_their_effort(dtype):
    for effort in EFFORTS.values():
        areas = Areas(2, 0, effort.compute_bytes)
        for product in effort.products:
            probe = probes.products(areas, product, dtype, 4)
            lds = probe.schedule.buffers["ld"][3:] * dtype.itemsize
            assert (product.aligned or dtype.itemsize % 16 == 0) == (lds % 16 == 0).all()
            assert len(probe.schedule.lanes) == 2 * product.lanes
            assert (probe.schedule.tasks["kind"] == Kind.GEMM).all()
            assert max(last for _, _, last, _, _ in spans(probe, 2)) <= 2 * effort.compute_bytes
        combined = spans(probes.combines(areas, *effort.combine, DType.f64, 1), 2)
        assert max(last for _, _, last, _, _ in combined) <= 2 * effort.compute_bytes


def test_held_products_come_after_what_holds_them_on_each_lane():
    effort = EFFORTS["cuda"]
    for lanes in (1, 2):
        product, hold = probes.GemmProbe((512, 256, 4096), lanes=lanes), probes.Hold(*effort.combine, 3)
        probe = probes.products(Areas(2, 0, effort.compute_bytes), product, DType.f16, 4, hold)
        tasks = probe.schedule.tasks
        for lane in range(2 * lanes):
            kinds = tasks["kind"][tasks["lane"] == lane].tolist()
            assert kinds == [Kind.COMBINE] * 3 + [Kind.GEMM] * (4 // lanes)
        assert max(last for _, _, last, _, _ in spans(probe, 2)) <= 2 * effort.compute_bytes


def test_the_litmus_reads_every_pushed_block_twice_and_lies_apart():
    case = Exchange(3, 512, 2, 0)
    probe = case.probe()
    kinds = probe.schedule.tasks["kind"].tolist()
    assert kinds.count(Kind.COMBINE) == 3 * 2 * 2
    assert kinds.count(Kind.COPY) == 2 * 3 * 2 * 2 + 3
    assert not [*meeting([one for one in spans(probe, 3) if one[-1]])]


def test_no_word_of_the_litmus_is_sent_twice():
    words = [
        Exchange(3, 64, 2, series).sent(rank, run).ravel() for series in (0, 1) for rank in range(3) for run in range(4)
    ]
    together = np.concatenate(words)
    assert len(np.unique(together)) == len(together)


# == what a first measurement makes of rates that hardly differ ====================================


def test_devices_of_one_model_that_hardly_differ_are_equal():
    assert evened(np.array([57.0, 60.0, 53.0, 58.0]), ["H200"] * 4) == pytest.approx([57.5] * 4)


def test_a_slow_device_stays_slow_and_other_models_count_apart():
    rates = np.array([60.0, 30.0, 58.0, 6.0, 7.0, 6.6])
    models = ["H200"] * 3 + ["V100"] * 3
    assert evened(rates, models) == pytest.approx([59.0, 30.0, 59.0, 6.6, 6.6, 6.6])
    assert rates[0] == 60.0  # what was measured is kept


def test_the_best_that_one_of_them_reaches_all_can_reach():
    assert evened(np.array([57.0, 60.0, 20.0]), ["H200"] * 3, np.max) == pytest.approx([60.0, 60.0, 20.0])


def test_one_device_is_itself():
    assert evened(np.array([3.5]), ["any"]).tolist() == [3.5]
