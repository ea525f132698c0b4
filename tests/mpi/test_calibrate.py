"""The calibrate command on the host backend: what it prints, keeps, refuses and leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import platform
import time
import types

import numpy as np
import pytest

import uncut_mpi as um
import uncut_mpi.api.start as start
from tests.helpers.calibrating import make_small
from tests.helpers.collective import allgather, collective_assert, expect, once
from tests.helpers.commands import in_process
from uncut_mpi.api import measure as measuring
from uncut_mpi.api.lifetime import RANKS_PER_NODE
from uncut_mpi.calibrate import main
from uncut_mpi.calibration import disk, power, probes, workbench
from uncut_mpi.calibration import measuring as measuring_probes
from uncut_mpi.calibration.disk import measure_disk
from uncut_mpi.calibration.effort import EFFORTS
from uncut_mpi.calibration.samples import ProductSample, Samples
from uncut_mpi.calibration.statistics import Summary
from uncut_mpi.calibration.workbench import Timed, Workbench
from uncut_mpi.command import calibrate_job
from uncut_mpi.device.host import HostBackend
from uncut_mpi.device.interface import ExecutionReport
from uncut_mpi.model.costs import Disk
from uncut_mpi.model.dtypes import PROBED
from uncut_mpi.planning.schedule import Kind
from uncut_mpi.spmd import group as groups

pytestmark = pytest.mark.mpi

SHORT = ["--backend", "host", "--time-limit", "1e-3"]


@pytest.fixture(autouse=True)
def small(mpi_tmp_path, monkeypatch):
    """Small probes and products, and machines measured here stay here."""
    make_small(monkeypatch, mpi_tmp_path)


@pytest.fixture
def job(comm, capfd):
    """Runs the command in this process; returns (status, everything rank 0 printed, its errors)."""
    return in_process(main, comm, capfd)


@contextlib.contextmanager
def bench_of(group, **how):
    backend = HostBackend(group.rank, group.size)
    bench = Workbench(group, backend, **{"area_bytes": 65536, "compute_bytes": 4096, "deadline_s": 0.0, **how})
    yield bench
    bench.close()
    backend.close()


@pytest.mark.parametrize("trouble", ["", "issuing", "first hold", "every hold"])
def test_what_holds_products_back_is_no_part_of_their_time(comm, group, monkeypatch, trouble):
    """A product takes 1 ms, a COMBINE 2 ms; 8 products are issued while a hold lasts, or 2; a hold may be slow."""
    hold_s, around_s = 2e-3 * math.ceil(measuring_probes._HELD_S / 2e-3), 3e-5
    counts, holds = [], []

    def time_of(self, probe, what, *, samples=0, known_s=0.0, kind=None):
        kinds = probe.schedule.tasks["kind"][probe.schedule.tasks["rank"] == 0]
        products, sums = (int((kinds == kind).sum()) for kind in (Kind.GEMM, Kind.COMBINE))
        counts.append(products)
        seconds = around_s + 1e-3 * products + 2e-3 * sums
        holds.append(products == 0)
        if holds[-1] and sum(holds) > 2:  # the first two find out how many COMBINEs a hold has
            seconds += 1.0 if trouble == "every hold" or (trouble == "first hold" and sum(holds) == 3) else 0.0
        issued = products * (hold_s / 3 if trouble == "issuing" else 1e-6)
        return Timed(Summary.of([seconds] * 10), np.full(comm.size, seconds), np.full(comm.size, issued))

    monkeypatch.setattr(Workbench, "time", time_of)
    effort = dataclasses.replace(EFFORTS["host"], asynchronous=True, target_s=8e-3, paired=((16, 16, 16),))
    with bench_of(group, compute_bytes=effort.compute_bytes) as bench:
        samples = Samples(comm.size, [1] * comm.size)
        measuring_probes._Measurement(bench, effort, samples, lambda *_: None)._products()
    seconds = [value for one in samples.products for value in (*one.seconds, one.time.median_s)]
    # What cannot be held back is timed as it is, with what passes before it and after it.
    wanted = 1e-3 + (around_s / 8 if trouble == "every hold" else 0.0)
    collective_assert(comm, np.allclose(seconds, wanted), f"{seconds}")
    collective_assert(comm, max(counts) == 8 and (2 in counts) == (trouble == "issuing"), f"{counts}")


def test_products_are_timed_beside_copies_within_a_device(comm, group):
    effort = dataclasses.replace(EFFORTS["host"], asynchronous=True, target_s=1e-4)
    with bench_of(group, compute_bytes=effort.compute_bytes) as bench:
        samples = Samples(comm.size, [1] * comm.size)
        for dtype in PROBED:
            product = ProductSample(
                dtype.name, probes.GemmProbe((96, 64, 32)), (1e-4,) * comm.size, Summary.of([1e-4] * 3)
            )
            samples.products.append(product)
        run = measuring_probes._Measurement(bench, effort, samples, lambda *_: None)
        run._bandwidth = np.full((comm.size + 1, comm.size + 1), 10.0)
        run._within()
    found = {name: sorted(timed) for name, timed in samples.within.items()}
    wanted = {dtype.name: ["copies", "products", "together"] for dtype in PROBED}
    collective_assert(comm, found == wanted, f"{found}")
    seconds = [value for timed in samples.within.values() for value in timed.values()]
    collective_assert(comm, min(seconds) > 0.0, f"{samples.within}")


@pytest.mark.parametrize("unknown", [(), (0,)], ids=["known", "not of one"])
def test_power_is_that_at_rest_under_load_and_what_pauses_leave_of_the_mean(comm, group, monkeypatch, unknown):
    now, joules, of_pauses = 0.0, 0.0, 70.0

    def spend(seconds, watts):
        nonlocal now, joules
        now, joules = now + seconds, joules + seconds * watts

    def run(executable, what):
        began = now
        spend(0.002, 500.0)
        return np.array([[began, now]] * comm.size)

    clock = types.SimpleNamespace(perf_counter=lambda: now, sleep=lambda seconds: spend(seconds, of_pauses))
    monkeypatch.setattr(power, "time", clock)
    backend = types.SimpleNamespace(energy_j=lambda: None if comm.rank in unknown else joules)
    bench = types.SimpleNamespace(group=group, backend=backend, run=run, bind=lambda *_: contextlib.nullcontext())
    known = power.is_known(group, backend)
    idle = power.at_rest(group, backend)
    busy = power.under_load(bench, None, "load")
    of_pauses = 200.0
    active = power.between_runs(bench, None, 0.002, "pauses", idle=idle, busy=busy)
    of_pauses = 20.0
    least = power.between_runs(bench, None, 0.002, "pauses", idle=idle, busy=busy)
    found = np.array([idle, busy, active, least])
    wanted = np.array([[70.0], [500.0], [200.0], [70.0]]) * [rank not in unknown for rank in range(comm.size)]
    collective_assert(comm, known == (len(unknown) < comm.size), f"{known}")
    collective_assert(comm, np.allclose(found, wanted, rtol=0.01), f"{found}")


@pytest.mark.parametrize(("ahead_s", "most"), [(100.0, 5), (-1.0, 3)], ids=["in time", "late"])
def test_probes_whose_difference_counts_run_in_turns(comm, group, monkeypatch, ahead_s, most):
    ran = []
    with bench_of(group, deadline_s=time.perf_counter() + ahead_s) as bench:
        run = bench.run

        def slowed(executable, what, **how):
            ran.append(executable)
            records = run(executable, what, **how)
            records[:, 1] += 1.0 if executable is ran[0] else 3.0
            return records

        monkeypatch.setattr(bench, "run", slowed)
        each = [probes.hops(bench.areas, [0], count) for count in (1, 2)]
        first, second = bench.time_in_turns(each, "hops", samples=5)
    collective_assert(comm, ran == ran[:2] * (most + 1) and ran[0] is not ran[1], f"{len(ran)} runs")
    collective_assert(comm, [first.together.count, second.together.count] == [most, most], f"{first}")
    longer = (second.by_rank_s - first.by_rank_s).tolist()
    collective_assert(comm, longer == pytest.approx([2.0] * comm.size, abs=0.5), f"{longer}")


def test_the_deadline_of_rank_0_counts_on_all_ranks(comm, group):
    now = time.perf_counter()
    for ahead, late in ((-1.0, True), (100.0, False)):
        with bench_of(group, deadline_s=now + ahead * (-1) ** comm.rank) as bench:  # passed on every other rank
            found = bench.late
        collective_assert(comm, found == late, f"late {found} with {ahead} s on rank 0")


def kept(folder: pathlib.Path) -> list[str]:
    directory = folder / "cache" / "uncut_mpi" / "machines"
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


@pytest.mark.one_node("what is printed and probed of one")
def test_everything_is_measured_printed_and_kept_for_the_next_session(comm, job, mpi_tmp_path):
    status, out, err = job(SHORT)
    collective_assert(comm, status == 0, out + err)
    wanted = ["bandwidth of one transfer", "latency of one transfer", "products:", "COMBINE", "costs, us", "kept in"]
    wanted += ["0 wrong words: PASS" if comm.size > 1 else "one rank has no peer", "measured well enough"]
    collective_assert(comm, all(part in out for part in wanted), out)
    collective_assert(comm, err.startswith("calibrating [....") and "done" in err, err)
    names = kept(mpi_tmp_path)
    collective_assert(comm, len(names) == 1, f"{names}")
    text = (mpi_tmp_path / "cache" / "uncut_mpi" / "machines" / names[0]).read_text()
    machine, content = um.Machine.from_json(text), json.loads(text)
    size = comm.size
    off = ~np.eye(size + 1, dtype=bool)
    good = (
        machine.provenance.startswith("calibrated")
        and (machine.bandwidth_gb_per_s[off] > 0).all()
        and (machine.latency_s[off] > 0).all()
        and set(machine.gemm_tflop_per_s) == set(machine.gemm_shape) == {dtype.name for dtype in PROBED}
        and (machine.combine_gb_per_s > 0).all()
    )
    collective_assert(comm, good, text)
    kinds = {one["kind"] for one in content["samples"]["transfers"]}
    expected = {"alone", "small", "host", "rows"} | ({"both ways"} if size > 1 else set())
    expected |= {"egress", "ingress"} if size > 2 else set()
    collective_assert(comm, kinds == expected, f"{kinds}")
    rates, within, beyond = machine.row_rates, [64, 512, 4096], [64, 4096]
    widths = {way: [width for width, _ in getattr(rates, way)] for way in ("local", "device", "host_in", "host_out")}
    wanted = {"local": within, "device": within if size > 1 else [], "host_in": beyond, "host_out": beyond}
    collective_assert(comm, widths == wanted, f"{widths}")
    counts = {one["time"]["count"] for one in content["samples"]["transfers"]}
    collective_assert(comm, counts == {3}, f"after the time limit: {counts} samples")
    # The pairs of links were left out, as the time limit asks, and that is said.
    collective_assert(comm, size == 1 or ("left out" in out and "pairs of links" in out), out)
    with um.Session(comm, backend="host") as session:
        collective_assert(comm, session.machine.provenance == machine.provenance, session.machine.provenance)


@pytest.mark.one_node("what is printed and probed of one")
@pytest.mark.mpi(min_size=2)
def test_pairs_of_links_are_measured_where_there_is_time(comm, job, mpi_tmp_path, monkeypatch):
    monkeypatch.setattr(workbench, "_MAX_SAMPLES", 12)  # where times do not settle
    path = mpi_tmp_path / "machine.json"
    status, out, err = job(["--backend", "host", "--time-limit", "30", "--output", path])
    collective_assert(comm, status == 0, out + err)
    samples = json.loads(path.read_text())["samples"]
    pairs = {tuple(map(tuple, one["links"])) for one in samples["transfers"] if one["kind"] == "pair"}
    # Six links between three locations: 15 pairs, of which the two ways of each link are measured before.
    known = {((0, 1), (1, 0)), ((0, 2), (2, 0)), ((1, 2), (2, 1)), ((2, 0), (2, 1)), ((0, 2), (1, 2))}
    collective_assert(comm, len(pairs) == 15 - len(known) and not pairs & known, f"{sorted(pairs)}")
    counts = [one["time"]["count"] for one in samples["transfers"]]
    collective_assert(comm, min(counts) >= 10 and not samples["left_out"], f"{counts}")


def test_all_memory_is_closed_and_freed_before_the_backend_ends(comm, job, monkeypatch):
    balance = {"memory": 0, "peers": 0}

    def counted(method, what, step):
        true_method = getattr(HostBackend, method)

        def call(self, *arguments):
            balance[what] += step
            return true_method(self, *arguments)

        monkeypatch.setattr(HostBackend, method, call)

    for method, what, step in (
        ("allocate", "memory", 1),
        ("free", "memory", -1),
        ("open", "peers", 1),
        ("close_peer", "peers", -1),
    ):
        counted(method, what, step)
    status, out, err = job(SHORT)
    collective_assert(comm, status == 0 and balance == {"memory": 0, "peers": 0}, f"{balance} {out}{err}")


@pytest.mark.one_node("what is printed and probed of one")
def test_the_quick_form_says_so_and_whether_the_machine_was_busy(comm, job, mpi_tmp_path, monkeypatch):
    monkeypatch.setattr(measuring, "_STEADY_SPREAD", -1.0)
    status, out, err = job(["--backend", "host", "--quick"])
    said = "this is the quick form" in out and "these figures are not steady" in out
    collective_assert(comm, status == 0 and said and not err, out + err)
    collective_assert(comm, len(kept(mpi_tmp_path)) == 1, f"{kept(mpi_tmp_path)}")


def test_a_machine_is_kept_whatever_happens_to_the_second_file(comm, job, mpi_tmp_path):
    path, pipe = mpi_tmp_path / "machine.json", mpi_tmp_path / "pipe"
    once(comm, lambda: os.mkfifo(pipe))
    status, out, err = job(["--backend", "host", "--quick", "--json", pipe, "--output", path])
    good = status == 2 and "nobody reads" in err and err.count("\n") == 1 and f"kept in {path}" in out
    collective_assert(comm, good and path.exists(), f"status {status} {out}{err}")
    status, out, err = job(["--backend", "host", "--quick", "--json", path, "--output", f"{path.parent}/./{path.name}"])
    collective_assert(comm, status == 2 and "are one file" in err and not out, f"status {status} {out}{err}")


def test_output_names_the_file_that_is_kept_and_json_one_more(comm, job, mpi_tmp_path):
    path, other = mpi_tmp_path / "machine.json", mpi_tmp_path / "facts.json"
    status, out, err = job(["--backend", "host", "--quick", "--json", other, "--output", path])
    collective_assert(comm, status == 0 and path.read_text() == other.read_text(), out)
    collective_assert(comm, f"kept in {path}" in out and not err and not kept(mpi_tmp_path), out + err)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("machines", ["several of one name", "one of several names"])
def test_each_machine_keeps_a_file_of_its_own_whatever_it_is_called(comm, job, monkeypatch, machines):
    several, own = machines == "several of one name", []
    monkeypatch.setenv(RANKS_PER_NODE, "1")
    monkeypatch.setattr(groups, "node_identity", lambda: f"machine {comm.rank if several else 0}")
    monkeypatch.setattr(platform, "node", lambda: "name" if several else f"name{comm.rank}")
    monkeypatch.setattr(calibrate_job, "_keep_own", lambda *_: own.append(comm.rank))
    status, out, err = job(["--backend", "host", "--quick"])
    good = own == ([comm.rank] if several or comm.rank == 0 else [])
    collective_assert(comm, status == 0 and good, f"{own} {out}{err}")


@pytest.mark.one_node("what is printed and probed of one")
def test_the_quick_form_says_that_it_takes_the_place_of_a_whole_one(comm, job, mpi_tmp_path):
    path, said = mpi_tmp_path / "machine.json", "it takes the place of a whole calibration"
    quick = ["--backend", "host", "--quick", "--output", path]
    job(quick)
    _, again, _ = job(quick)  # of another quick one
    once(comm, lambda: path.write_text(json.dumps({**json.loads(path.read_text()), "samples": {}})))
    status, out, err = job(quick)
    collective_assert(comm, status == 0 and said in out and said not in again and not err, again + out + err)


def test_a_machine_of_other_hardware_is_refused_on_every_rank(comm, job, mpi_tmp_path):
    path = mpi_tmp_path / "machine.json"
    job(["--backend", "host", "--quick", "--output", path])
    text = path.read_text()
    key = json.loads(text)["key"]
    other = um.Machine.from_json(text.replace(key, f"host-{comm.size}-0123456789abcdef"))
    parts = ["other hardware", "0123456789abcdef", key, "uncut_mpi.calibrate"]
    expect(comm, um.TopologyError, parts, lambda: um.Session(comm, backend="host", machine=other))
    with um.Session(comm, backend="host", machine=um.Machine.from_json(text)) as session:
        collective_assert(comm, session.machine.key == key, session.machine.key)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--output", "{folder}/missing/machine.json"], "--output"),
        (["--output", "{folder}"], "is a directory"),
        (["--json", "{folder}"], "--json"),
        (["--time-limit", "never"], "not a finite number"),
        (["--backend", "host", "--devices", "0"], "no GPUs"),
    ],
)
def test_what_cannot_be_done_is_said_before_anything_is_measured(comm, job, mpi_tmp_path, words, said):
    words = [word.format(folder=mpi_tmp_path) for word in words]
    status, out, err = job(words)
    collective_assert(comm, status == 2 and said in err and not out, out + err)


def test_a_directory_that_cannot_be_made_is_an_error_that_names_the_flag(comm, job, mpi_tmp_path, monkeypatch):
    if comm.rank == 0:
        (mpi_tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(mpi_tmp_path / "file"))
    status, _, err = job(["--backend", "host", "--quick"])
    collective_assert(comm, status == 2 and "--output" in err, err)


@pytest.mark.one_node("what is printed and probed of one")
@pytest.mark.mpi(min_size=2)
def test_a_reader_that_sees_other_words_fails_the_litmus_and_nothing_is_kept(comm, job, mpi_tmp_path, monkeypatch):
    true_to_host = HostBackend.to_host

    def to_host(self, address, ld, out):
        true_to_host(self, address, ld, out)
        out.flat[0 if comm.rank else out.size - 1] = -1.0  # a word of another rank, on every rank

    monkeypatch.setattr(HostBackend, "to_host", to_host)
    status, out, err = job(SHORT)
    collective_assert(comm, status == 1 and "FAIL" in out and "cannot run products" in out, out + err)
    collective_assert(comm, not kept(mpi_tmp_path), f"{kept(mpi_tmp_path)}")


@pytest.mark.parametrize("method", ["allocate", "executable", "from_host", "run"])
def test_what_fails_on_one_rank_fails_on_all_and_ends(comm, job, mpi_tmp_path, monkeypatch, method):
    class Failing(HostBackend):
        def executable(self, *arguments):
            if method == "executable":
                raise um.DeviceError("executable failed on purpose")
            made = super().executable(*arguments)
            if method == "run":
                made.run = lambda **unused: ExecutionReport(error=um.DeviceError("run failed on purpose"))
            return made

    def fail(self, *arguments):
        raise um.DeviceError(f"{method} failed on purpose")

    if method in ("allocate", "from_host"):
        setattr(Failing, method, fail)
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(start, "make_host", Failing)
    status, out, err = job(SHORT)
    collective_assert(comm, status == 2 and f"{method} failed on purpose" in err, out + err)
    collective_assert(comm, not kept(mpi_tmp_path), f"{kept(mpi_tmp_path)}")


def test_the_disk_of_a_folder_is_measured_and_nothing_is_left_there(comm, group, mpi_tmp_path, monkeypatch):
    found = measure_disk(group, str(mpi_tmp_path), file_bytes=4 << 23)
    every = allgather(comm, found)
    good = all(0 < rate < 1000 for rate in (found.read_gb_per_s, found.write_gb_per_s)) and 0 <= found.call_s < 1
    collective_assert(comm, good and every == [every[0]] * comm.size, str(every))
    comm.Barrier()
    collective_assert(comm, not [*mpi_tmp_path.iterdir()], "the file is still there")
    missing = str(mpi_tmp_path / "none")
    expect(comm, um.DataFileError, ["none cannot be measured"], lambda: measure_disk(group, missing))
    expect(comm, um.DataFileError, ["of room"], lambda: measure_disk(group, str(mpi_tmp_path), file_bytes=1 << 60))

    def refused(*_):
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patched:
        if comm.rank == comm.size - 1:
            patched.setattr(os, "pread", refused)
        call = functools.partial(measure_disk, group, str(mpi_tmp_path), file_bytes=4 << 23)
        expect(comm, um.DataFileError, ["cannot be measured", "Input/output error"], call)
    comm.Barrier()
    collective_assert(comm, not [*mpi_tmp_path.iterdir()], "the file is still there")


def test_a_calibration_keeps_the_disk_for_sessions(comm, capfd, mpi_tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "FILE_BYTES", 4 << 23)
    path = mpi_tmp_path / "machine.json"
    words = ["--quick", "--backend", "host", "--disk", str(mpi_tmp_path), "--output", str(path)]
    status = main(words)
    said = capfd.readouterr().out
    collective_assert(comm, status == 0 and (comm.rank > 0) == ("disk of" not in said), said)
    machine = um.load_machine(str(path))
    again = main([word for word in words if word not in ("--disk", str(mpi_tmp_path))])
    comm.Barrier()
    kept = um.load_machine(str(path)).disk
    collective_assert(comm, again == 0 and kept == machine.disk, f"{kept}, {machine.disk}")
    told = comm.rank > 0 or f"reads {machine.disk.read_gb_per_s:.2f} GB/s" in said
    collective_assert(comm, machine.disk != Disk() and told, f"{machine.disk}: {said}")
