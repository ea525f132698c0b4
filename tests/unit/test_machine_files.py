"""The machines that ship: where their figures come from, what they say, and how a file is asked for."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.data import make_machines
from uncut_mpi.api.measure import machine_key
from uncut_mpi.device.interface import DeviceIdentity
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine, machine_names
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.ports import Net, fair_rates
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan_several
from uncut_mpi.planning.setting import Setting

DATA = Path(make_machines.__file__).parent
NAMES = machine_names()


def totals(machine: Machine, ranks: list[int], *, inward: bool = True, outward: bool = False) -> list[float]:
    return machine.host_rates(ranks, inward=inward, outward=outward).sum(axis=1).tolist()


def test_the_files_are_those_that_the_figures_kept_here_make() -> None:
    made = make_machines.machines()
    assert sorted(made) == NAMES
    for name, machine in made.items():
        found = (make_machines.MACHINES / f"{name}.json").read_text(encoding="utf-8")
        assert found == machine.to_json() + "\n", f"python -m tests.data.make_machines writes another {name}.json"


@pytest.mark.parametrize("name", NAMES)
def test_a_machine_that_ships_loads_and_makes_sense(name: str) -> None:
    machine = load_machine(name)
    assert Machine.from_json(machine.to_json()).to_json() == machine.to_json()
    assert machine.name == name
    assert len(machine.provenance) > 200
    ranks, host = machine.num_ranks, machine.host
    assert f"{ranks}x" in name
    devices = machine.bandwidth_gb_per_s[:host, :host]
    between = devices[~np.eye(ranks, dtype=bool)]
    assert (np.diag(devices) > between.max()).all()
    assert ((between >= 1) & (between <= 450)).all()
    for way in (machine.bandwidth_gb_per_s[host, :host], machine.bandwidth_gb_per_s[:host, host]):
        assert ((way >= 10) & (way <= 64)).all()
    latency = machine.latency_s[np.arange((host + 1) ** 2).reshape(host + 1, -1) < (host + 1) ** 2 - 1]
    assert ((latency >= 1e-6) & (latency <= 3e-5)).all()
    assert (machine.gemm_rate(DType.f64) >= 3e12).all()
    for dtype, shape in machine.gemm_shape.items():
        operations, occupancy = shape.work(8192, 8192, 8192, int(machine.multiprocessors[0]))
        assert 0.9 < 2 * 8192**3 / operations < 1, dtype
        assert 0.9 < occupancy <= 1, dtype
    assert set(machine.gemm_shape) == set(machine.gemm_tflop_per_s)
    assert ((machine.memory_bytes >= 15e9) & (machine.memory_bytes <= 160e9)).all()
    assert (machine.combine_gb_per_s > 500).all()
    assert 1e-6 < machine.costs.copy_s < machine.costs.gemm_s < 2e-5


@pytest.mark.parametrize("name", NAMES)
def test_every_port_can_be_full(name: str) -> None:
    machine = load_machine(name)
    for port in machine.ports:
        rates = [machine.bandwidth_gb_per_s[link] for link in port.links]
        assert np.dot(rates, port.weights) > port.capacity_gb_per_s * (1 + 1e-9), port.name


def test_measured_hardware_never_has_the_key_of_a_file_that_ships() -> None:
    keys = {load_machine(name).key for name in NAMES}
    assert len(keys) == len(NAMES)
    for backend, count in itertools.product(("cuda", "host"), (4, 8)):
        identities = [
            DeviceIdentity(name="NVIDIA A100-SXM4-40GB", uuid=f"GPU-{i}", backend=backend, node="n", memory_bytes=1)
            for i in range(count)
        ]
        assert ":" not in machine_key(identities, count * ["n"], count * [0])
    assert all(key.startswith("shipped:") for key in keys)


def test_karolina_gives_the_totals_of_its_files() -> None:
    machine = load_machine("karolina-8xa100")
    assert totals(machine, [0]) == [22, 0]
    assert totals(machine, [0], inward=False, outward=True) == [0, 24]
    assert sum(totals(machine, [0], outward=True)) == pytest.approx(19 + 16, rel=0.05)
    # The two GPUs of a switch have no more than one.
    assert totals(machine, [0, 1]) == pytest.approx([22, 0])
    assert totals(machine, [0, 1], outward=True) == pytest.approx(totals(machine, [0], outward=True))
    assert totals(machine, [0, 2]) == pytest.approx([36, 0])
    assert totals(machine, [0, 2], inward=False, outward=True) == pytest.approx([0, 44], rel=0.1)
    assert sum(totals(machine, [0, 2], outward=True)) == pytest.approx(32 + 36, rel=0.05)
    assert totals(machine, [0, 2, 4, 6]) == pytest.approx([72, 0])
    assert totals(machine, [0, 2, 4, 6], inward=False, outward=True) == pytest.approx([0, 88])
    assert totals(machine, list(range(8))) == pytest.approx([88, 0])
    assert totals(machine, list(range(8)), inward=False, outward=True) == pytest.approx([0, 88])
    # Both ways at once no run went beyond this, whatever the files say.
    for ranks in ([0, 2, 4, 6], list(range(8))):
        assert sum(totals(machine, ranks, outward=True)) == pytest.approx(97.3)


def test_what_gpus_of_summit_share_is_their_processor_and_the_bus_between_the_sockets() -> None:
    machine = load_machine("summit-6xv100")
    assert totals(machine, [0]) == [50, 0]
    assert totals(machine, [0, 1, 2]) == pytest.approx([128, 0])  # half of it from the other socket, over 64 GB/s
    assert totals(machine, range(6)) == pytest.approx([256, 0])
    assert sum(totals(machine, range(6), outward=True)) == pytest.approx(256)  # both ways take each of the bus
    ports, table = machine.ports, machine.bandwidth_gb_per_s
    for links, expected in (
        ([(0, 1), (0, 2), (1, 0)], [50, 50, 50]),  # NVLinks of their own
        ([(0, 3), (1, 4), (2, 5)], [64 / 3] * 3),
        ([(0, 3), (6, 3)], [25, 25]),
        ([(0, 3), (3, 0)], [50, 50]),
    ):
        assert fair_rates(links, [float(table[link]) for link in links], ports) == pytest.approx(expected)
    assert (machine.memory_bytes == 2e9 * 8).all()  # the paper, in doubles
    assert machine.host_bytes.tolist() == [64e9 * 8]


@pytest.mark.parametrize("gpus", range(1, 7))
def test_transfers_of_a_product_out_of_core_do_not_slow_summit_down(gpus: int) -> None:
    # The paper, figure 2: over 95 % of the peak on 1 to 3 GPUs, 85 % on 4 to 6, of which links explain nothing.
    machine = load_machine("summit-6xv100").subset(range(gpus))
    problem, options = GemmProblem(*[69 * 1024] * 3, DType.f64, reads_c=True), ScheduleOptions(scheduler="parsec")
    setting = Setting.of(problem, Placement.parse("h,h,h"), gpus, machine, options)
    found = plan_several(setting)[0]
    assert 0.95 < problem.flops / found.predicted_s / (gpus * 7.2e12) < 1
    assert found.schedule.bytes_by_link()["host_to_device"] / found.predicted_s < 0.05 * 256e9


def test_no_published_run_on_karolina_beats_its_host_links() -> None:
    machine = load_machine("karolina-8xa100")
    with (DATA / "karolina_strong_scaling.csv").open() as file:
        rows = list(csv.DictReader(file))
    checked = 0
    for row in rows:
        m, n, k = (int(row[name]) for name in ("m", "n", "k"))
        sizes = {"a": 8 * m * k, "b": 8 * k * n, "c": 8 * m * n}
        in_gb = sum(size for name, size in sizes.items() if row[f"loc_{name}"] == "h") / 1e9
        out_gb = sizes["c"] / 1e9 if row["loc_c"] == "h" else 0.0
        ranks = [int(rank) for rank in row["gpu_ids"].split()]
        seconds = float(row["mean_s"])
        checked += in_gb > 0
        assert in_gb / seconds <= totals(machine, ranks)[0]
        assert out_gb / seconds <= totals(machine, ranks, inward=False, outward=True)[1]
        assert (in_gb + out_gb) / seconds <= sum(totals(machine, ranks, outward=True))
    assert checked > 100


@pytest.mark.parametrize(("name", "both_ways"), [("meluxina-4xa100", 7.3 + 14.7), ("vega-4xa100", 8.0 + 16.1)])
def test_the_two_ways_of_a_host_link_hinder_each_other_where_measured(name: str, both_ways: float) -> None:
    machine = load_machine(name)
    assert totals(machine, [0])[0] == pytest.approx(26.3, rel=0.01)
    assert sum(totals(machine, [0], outward=True)) == pytest.approx(both_ways, rel=0.05)
    # One link at a time was measured: GPUs are not said to hinder each other.
    assert totals(machine, [0, 1, 2, 3])[0] == pytest.approx(4 * 26.3, rel=0.01)


def test_vulcan_has_six_links_on_each_gpu_and_slow_pairs_over_pcie() -> None:
    machine = load_machine("vulcan-8xv100")
    devices = machine.bandwidth_gb_per_s[:8, :8]
    assert (devices == devices.T).all()
    slow = {pair for pair in itertools.combinations(range(8), 2) if devices[pair] < 6}
    assert slow == {
        (0, 5), (0, 6), (0, 7), (1, 4), (1, 6), (1, 7), (2, 4), (2, 5), (2, 7), (3, 4), (3, 5), (3, 6),
    }  # fmt: skip
    # PARALiA's text: one NVLink 24, two 48 nominally.
    assert {round(float(rate), 1) for rate in devices[(devices > 6) & (devices < 100)]} == {23.2, 45.0}
    num_links = np.where(devices > 40, 2, np.where(devices > 6, 1, 0)) - 2 * np.eye(8, dtype=int)
    assert num_links.sum(axis=1).tolist() == [6] * 8
    assert totals(machine, [0, 1]) == pytest.approx([12, 0])
    assert totals(machine, list(range(8))) == pytest.approx([48, 0])
    pcie = next(port for port in machine.ports if port.name == "PCIe of devices 0 and 1 in")
    assert {(5, 0), (4, 1), (8, 0)} <= set(pcie.links)
    assert (3, 0) not in pcie.links


def test_the_uneven_vulcan_differs_in_its_rates_only() -> None:
    even, uneven = load_machine("vulcan-8xv100"), load_machine("vulcan-8xv100-uneven")
    assert uneven.gemm_tflop_per_s["f64"].sum() == 38
    assert even.gemm_tflop_per_s["f64"].sum() == 56
    assert (even.bandwidth_gb_per_s == uneven.bandwidth_gb_per_s).all()
    assert even.ports == uneven.ports


def test_published_rows_are_complete() -> None:
    with (DATA / "vulcan_hetero_paralia.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 937
    assert len({(row["loc_a"], row["loc_b"], row["loc_c"]) for row in rows}) == 10
    peak = load_machine("vulcan-8xv100-uneven").gemm_rate(DType.f64)
    for row in rows:
        used = [rank for rank, bit in enumerate(reversed(row["gpu_token"])) if bit == "1"]
        rate = 2 * int(row["m"]) * int(row["n"]) * int(row["k"]) / float(row["median_s"])
        assert math.isfinite(rate)
        assert 0 < rate <= peak[used].sum()
    with (DATA / "karolina_fig9_digitized.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 124


def test_a_file_of_ones_own_loads_and_a_name_goes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine.uniform(3)
    monkeypatch.chdir(tmp_path)
    for name in ("mine.json", "vega-4xa100"):
        Path(name).write_text(machine.to_json(), encoding="utf-8")
    assert load_machine("mine.json").to_json() == machine.to_json()
    assert load_machine(tmp_path / "mine.json").to_json() == machine.to_json()
    assert load_machine("vega-4xa100").num_ranks == 4
    assert load_machine("./vega-4xa100").num_ranks == 3
    assert load_machine(Path("vega-4xa100")).num_ranks == 3


@pytest.mark.parametrize(
    "asked", ["karolina", "karolina-8xa100.json", "../machines/h200-4x", "", ".", "\0", "x" * 5000]
)
def test_an_unknown_name_lists_those_that_exist(asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ParamError) as raised:
        load_machine(asked)
    assert repr(asked) in str(raised.value)
    assert ", ".join(NAMES) in str(raised.value)


def test_a_file_that_is_no_machine_is_named(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"format": 9}')
    with pytest.raises(ParamError, match=r"other\.json: not a machine file: KeyError"):
        load_machine(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ParamError, match="nor a file that can be read"):
        load_machine(path)


def test_a_machine_measured_before_tf32_has_the_rates_of_f32_for_it() -> None:
    machine = load_machine("karolina-8xa100")
    assert "tf32" not in machine.gemm_tflop_per_s
    assert machine.has_gemm_rate(DType.tf32) == machine.has_gemm_rate(DType.f32)
    rates = Machine.uniform(2, gemm_tflop_per_s={"f32": 3.0})
    assert rates.gemm_rate(DType.tf32).tolist() == rates.typical_gemm_rate(DType.f32).tolist() == [3e12, 3e12]
    assert not rates.has_gemm_rate(DType.f64)
    own = Machine.uniform(2, gemm_tflop_per_s={"f32": 3.0, "tf32": 9.0})
    assert own.gemm_rate(DType.tf32).tolist() == [9e12, 9e12]


def test_nodes_and_host_memory_are_kept_and_nodes_with_gaps_are_refused() -> None:
    machine = dataclasses.replace(load_machine("h200-4x"), host_bytes=np.array([2**40]))
    again = Machine.from_json(machine.to_json())
    assert again.host_bytes.tolist() == [2**40]
    assert again.node_of.tolist() == [0, 0, 0, 0]
    without = json.loads(machine.to_json())
    del without["node_of"], without["host_bytes"]
    old = Machine.from_json(json.dumps({**without, "format": 8}))
    assert (old.node_of.tolist(), old.host_bytes.tolist()) == ([0, 0, 0, 0], [0])
    for gaps in ([0, 0, 2, 2], [1, 1, 1, 1], [0, 0, 0], [0, -1, 0, 0]):
        with pytest.raises(ParamError, match="node_of"):
            dataclasses.replace(machine, node_of=np.array(gaps))
    for wrong in ([-1], [1, 1]):
        with pytest.raises(ParamError, match="host_bytes"):
            dataclasses.replace(machine, host_bytes=np.array(wrong))


def test_nodes_that_differ_are_joined_in_whatever_order_their_ranks_are() -> None:
    four, one = load_machine("h200-4x"), Machine.uniform(1, memory_bytes=7 * 10**9)
    node_of = [0, 1, 0, 0, 0]
    made = Machine.joined([four, one], node_of, Net(25.0, 3e-6))
    own = [0, 2, 3, 4, 5]  # of the first node, its host last
    assert made.bandwidth_gb_per_s[np.ix_(own, own)].tolist() == four.bandwidth_gb_per_s.tolist()
    assert made.latency_s[np.ix_([1, 6], [1, 6])].tolist() == one.latency_s.tolist()
    assert made.memory_bytes.tolist() == [*four.memory_bytes[:1], 7 * 10**9, *four.memory_bytes[1:]]
    assert made.gemm_tflop_per_s["f64"][1] == one.gemm_tflop_per_s["f64"][0]
    assert made.gemm_tflop_per_s["f64"][[0, 2, 3, 4]].tolist() == four.gemm_tflop_per_s["f64"].tolist()
    to_host, from_host = {}, {}
    for node, its in ((four, own[:-1]), (one, [1])):
        to_host |= dict(zip(its, node.latency_s[:-1, -1], strict=True))
        from_host |= dict(zip(its, node.latency_s[-1, :-1], strict=True))
    for source, to in ((0, 1), (1, 4), (5, 6), (6, 0)):
        wanted = to_host.get(source, 0.0) + from_host.get(to, 0.0) + 3e-6
        assert made.latency_s[source, to] == pytest.approx(wanted)
        assert made.bandwidth_gb_per_s[source, to] == 25.0
    ends = {link for port in made.ports if port.name.startswith("node 1") for link in port.links}
    assert ends <= {(1, 6), (6, 1), *((here, there) for here in (1, 6) for there in own)} | {
        (there, here) for here in (1, 6) for there in own
    }
    for wrong in ([0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 2], [0, 1, 0, 0, 0, -1]):
        with pytest.raises(ParamError, match="do not fit"):
            Machine.joined([four, one], wrong, Net(25.0, 3e-6))
    with pytest.raises(ParamError, match="do not fit"):
        Machine.joined([], [], Net(25.0, 3e-6))
