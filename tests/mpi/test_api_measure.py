"""The first measurement of a machine: made once, kept, read again, and never used for other hardware."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import tempfile

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers import jobs
from tests.helpers.collective import carried, collective_assert, expect, once, outcome
from tests.helpers.sessions import open_descriptors
from uncut_mpi import unfinished
from uncut_mpi.api import measure as measuring
from uncut_mpi.device.host import HostBackend
from uncut_mpi.device.interface import Timeable
from uncut_mpi.errors import ParamError
from uncut_mpi.model import dtypes
from uncut_mpi.model.dtypes import DType
from uncut_mpi.spmd.group import Group

pytestmark = [pytest.mark.mpi, pytest.mark.one_node("a machine that is measured as one")]

TABLES = ("bandwidth_gb_per_s", "latency_s")
RATES = ("gemm_tflop_per_s", "typical_gemm_tflop_per_s")
PROBED = [dtype for dtype in dtypes.PROBED if not dtype.is_complex]


@pytest.fixture
def cache(comm, monkeypatch):
    """The directory that machine files are kept in, the same on all ranks; gone afterwards."""
    base = comm.bcast(tempfile.mkdtemp(prefix="uncut_mpi_cache_") if comm.rank == 0 else None)
    monkeypatch.setenv("XDG_CACHE_HOME", base)
    yield pathlib.Path(base) / "uncut_mpi" / "machines"
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(base)


@pytest.fixture(autouse=True)
def short_probes(monkeypatch):
    """Smaller probes: these tests look at what is kept, not at how fast or steady it is."""
    monkeypatch.setitem(measuring._PROBE_BYTES, "host", 256 << 10)
    monkeypatch.setitem(measuring._GEMM_EDGE, "host", 64)
    monkeypatch.setattr(measuring, "_SAMPLE_S", 1e-4)
    monkeypatch.setattr(measuring, "_STEADY_SPREAD", 1.0)


@pytest.fixture
def measurements(monkeypatch):
    """Counts measurements on this rank."""
    counted = []
    true_measure = measuring.measure

    def counting(*arguments):
        counted.append(1)
        return true_measure(*arguments)

    monkeypatch.setattr(measuring, "measure", counting)
    return counted


def said_of_it(caplog) -> list[str]:
    return [one.getMessage() for one in caplog.records if one.name == "uncut_mpi" and one.levelname == "WARNING"]


@pytest.mark.parametrize("tune", [True, False])
def test_the_machine_is_measured_without_tuning_whatever_the_session_does(comm, cache, monkeypatch, tune):
    asked: list[bool] = []
    monkeypatch.setattr(HostBackend, "tune_products", lambda _, *, tune: asked.append(tune))
    measured: list[list[bool]] = []
    true_measure = measuring.measure
    monkeypatch.setattr(measuring, "measure", lambda *all_: measured.append(list(asked)) or true_measure(*all_))
    with um.Session(comm, backend="host", tune_products=tune):
        pass
    collective_assert(comm, measured == [[]] and asked == [tune], f"{measured} {asked}")


@pytest.mark.mpi(min_size=2)
def test_ranks_agree_on_tuning(comm):
    with pytest.raises(ParamError, match="tune_products"):
        um.Session(comm, backend="host", tune_products=comm.rank > 0)


def test_the_quick_form_is_told_once_by_rank_0_so_that_it_is_seen(comm, cache, caplog):
    machine_of(comm)
    told = said_of_it(caplog)
    wanted = len(told) == 1 and told[0].startswith("machine measured in the quick form (") and "calibrate" in told[0]
    collective_assert(comm, wanted if comm.rank == 0 else not told, told)
    caplog.clear()
    machine_of(comm)  # kept
    collective_assert(comm, not said_of_it(caplog), said_of_it(caplog))


def test_a_busy_machine_is_told_once_and_why(comm, cache, caplog, monkeypatch):
    monkeypatch.setattr(measuring, "_STEADY_SPREAD", -1.0)
    machine_of(comm)
    told = said_of_it(caplog)
    wanted = len(told) == 1 and "busy with something else" in told[0] and "measure again" in told[0]
    collective_assert(comm, wanted if comm.rank == 0 else not told, told)
    caplog.clear()
    machine_of(comm)  # measured again
    collective_assert(comm, not said_of_it(caplog), said_of_it(caplog))


def test_a_command_tells_it_on_standard_error_alone(comm, tmp_path):
    with carried(comm):
        if comm.rank == 0:
            process = jobs.start_gemm(
                *["-m", "64", "--repeat", "1", "--warmup", "0", "--json"],
                tmp_path / "facts.json",
                XDG_CACHE_HOME=str(tmp_path),
            )
            status, output, errors = jobs.ended(process)
            assert status == 0, output + errors
            assert errors.count("machine measured in the quick form (") == 1, errors
            assert "quick form" not in output
            assert json.loads((tmp_path / "facts.json").read_text())["passed"]


def machine_of(comm, **options) -> um.Machine:
    with um.Session(comm, **{"backend": "host", **options}) as session:
        return session.machine


def stamps(directory: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Name, inode and time of change of every file kept."""
    if not directory.is_dir():
        return {}
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.iterdir()}


def only_file(directory: pathlib.Path) -> pathlib.Path:
    (path,) = directory.iterdir()
    return path


def change(comm, directory: pathlib.Path, changed) -> None:
    """Write the one file that is kept again, as `changed` makes it of what it has. Collective."""

    def write():
        path = only_file(directory)
        made = changed(json.loads(path.read_text()))
        path.write_bytes(made if isinstance(made, bytes) else made.encode())

    once(comm, write)


def links(machine: um.Machine) -> dict[str, object]:
    """What is kept: everything but the memory that is free now."""
    text = json.loads(machine.to_json())
    del text["memory_bytes"]
    return text


def test_every_pair_and_every_type_has_a_positive_number_the_same_on_all_ranks(comm, cache):
    machine = machine_of(comm)
    size = comm.size
    host_to_itself = (size, size)
    wrong = [
        f"{name}[{pair}] = {value}"
        for name in TABLES
        for pair, value in np.ndenumerate(getattr(machine, name))
        if not (np.isfinite(value) and value > 0) and (name, pair) != ("latency_s", host_to_itself)
    ]
    for dtype in dtypes.PROBED:
        best, typical = machine.gemm_rate(dtype), machine.typical_gemm_rate(dtype)
        wrong += [dtype.name] if not ((typical > 0) & (typical <= best)).all() else []
    shared, alone = machine.links(sharing=range(size)), machine.bandwidth_gb_per_s
    wrong += [] if ((shared > 0) & (shared <= alone))[~np.eye(size + 1, dtype=bool)].all() else [f"{shared}, {alone}"]
    wrong += [] if len(machine.ports) == 2 else [str(machine.ports)]
    shapes = [getattr(machine, name).shape for name in TABLES]
    shapes += [rate.shape for name in RATES for rate in getattr(machine, name).values()]
    good = shapes == [(size + 1, size + 1)] * 2 + [(size,)] * 2 * len(PROBED)
    collective_assert(comm, not wrong and good, f"{wrong}, {shapes}")
    collective_assert(comm, len(set(comm.allgather(machine.to_json()))) == 1, machine.to_json())


def test_the_first_session_measures_and_keeps_and_the_second_loads(comm, cache, measurements):
    first = machine_of(comm)
    kept = stamps(cache)
    second = machine_of(comm)
    collective_assert(comm, len(measurements) == 1, f"{len(measurements)} measurements")
    collective_assert(comm, len(kept) == 1 and stamps(cache) == kept, f"{kept} then {stamps(cache)}")
    collective_assert(comm, links(first) == links(second), f"{links(first)} then {links(second)}")
    text = only_file(cache).read_text()
    collective_assert(comm, links(um.Machine.from_json(text)) == links(first), text)
    collective_assert(comm, len(set(comm.allgather(second.to_json()))) == 1, second.to_json())


def test_memory_is_that_of_this_run_and_not_the_kept_one(comm, cache, measurements):
    machine_of(comm)
    change(comm, cache, lambda data: json.dumps({**data, "memory_bytes": [12345] * comm.size}))
    machine = machine_of(comm)
    good = len(measurements) == 1 and (machine.memory_bytes != 12345).all()
    collective_assert(comm, good, f"{len(measurements)} measurements, memory {machine.memory_bytes}")


@pytest.mark.mpi(min_size=2)
def test_another_number_of_ranks_measures_for_itself(comm, cache, measurements):
    whole = machine_of(comm)
    part = comm.Split(0 if comm.rank < comm.size - 1 else 1)
    smaller = machine_of(part)
    ranks = part.size
    part.Free()
    comm.Barrier()
    good = len(measurements) == 2 and smaller.num_ranks == ranks and whole.num_ranks == comm.size
    collective_assert(comm, good and smaller.key != whole.key, f"{len(measurements)} measurements, {smaller.key}")
    kept = stamps(cache)
    again = machine_of(comm)
    collective_assert(comm, links(again) == links(whole) and stamps(cache) == kept, "the file of all ranks was changed")


def spoil_ranks(data):
    other = um.Machine.uniform(len(data["memory_bytes"]) + 1)
    return other.to_json().replace(other.key, data["key"])


SPOILT = {
    "cut short": lambda data: json.dumps(data)[:200],
    "not text": lambda data: b"\xff\xfe\x00machine",
    "a type is missing": lambda data: json.dumps(
        {**data, "gemm_tflop_per_s": {name: rate for name, rate in data["gemm_tflop_per_s"].items() if name != "bf16"}}
    ),
    "an expected type is missing": lambda data: json.dumps(
        {**data, "typical_gemm_tflop_per_s": {"f64": data["typical_gemm_tflop_per_s"]["f64"]}}
    ),
    "a busy machine": lambda data: json.dumps({**data, "steady": False}),
    "other hardware": lambda data: json.dumps({**data, "key": "cuda-8-0123456789abcdef"}),
    "another number of ranks": spoil_ranks,
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_a_file_that_cannot_be_used_is_measured_anew_and_replaced(comm, cache, measurements, spoil):
    machine_of(comm)
    change(comm, cache, spoil)
    machine = machine_of(comm)
    collective_assert(comm, len(measurements) == 2, f"{len(measurements)} measurements")
    kept = links(um.Machine.from_json(only_file(cache).read_text()))
    collective_assert(comm, kept == links(machine), "the file was not replaced")
    machine_of(comm)
    collective_assert(comm, len(measurements) == 2, "the new file is not used")


def test_the_disk_that_was_measured_stays_when_links_are_measured_again(comm, cache, measurements):
    machine_of(comm)
    disk = {"read_gb_per_s": 0.5, "write_gb_per_s": 0.25, "call_s": 1e-4}
    change(comm, cache, lambda data: json.dumps({**data, "steady": False, "disk": disk}))
    machine = machine_of(comm)
    collective_assert(comm, len(measurements) == 2, f"{len(measurements)} measurements")
    collective_assert(comm, machine.disk.write_gb_per_s == 0.25, str(machine.disk))
    kept = um.Machine.from_json(only_file(cache).read_text()).disk
    collective_assert(comm, kept == machine.disk, str(kept))


@pytest.mark.parametrize("place", ["a file", "a directory nobody may write", "no directory"])
def test_a_directory_that_cannot_be_written_costs_a_measurement_and_nothing_else(
    comm, cache, monkeypatch, measurements, place
):
    if place == "a file":  # where the directory should be
        base = cache.parent.parent / "file"
        if comm.rank == 0:
            base.write_text("")
    elif place == "no directory":
        base = pathlib.Path("/proc/self/task")  # not even root makes a directory here
    else:
        base = cache.parent.parent
        if comm.rank == 0:
            cache.mkdir(parents=True)
            cache.chmod(0o500)
        # Root may write everywhere, so the refusal is that of the system call.
        monkeypatch.setattr(unfinished, "open_regular", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    comm.Barrier()
    found = [machine_of(comm).num_ranks for _ in range(2)]
    collective_assert(comm, found == [comm.size] * 2 and len(measurements) == 2, f"{found}, {len(measurements)}")
    collective_assert(comm, not stamps(cache), f"kept {stamps(cache)}")


def refuse(*arguments, **options):
    raise PermissionError(13, "Permission denied")


def test_a_full_disk_leaves_no_half_written_file(comm, cache, monkeypatch, measurements):
    def full(descriptor, data, at):
        os.pwrite(descriptor, data[: len(data) // 2], at)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(unfinished, "write_all", lambda descriptor, data: full(descriptor, data, 0))
    machine = machine_of(comm)
    monkeypatch.undo()
    collective_assert(comm, machine.num_ranks == comm.size and not stamps(cache), f"left {stamps(cache)}")


def test_a_given_machine_is_used_and_nothing_is_measured(comm, cache, measurements):
    given = um.Machine.uniform(comm.size)
    found = machine_of(comm, machine=given)
    collective_assert(comm, found is given and not measurements and not stamps(cache), f"{found.name}")


def test_a_given_machine_with_another_number_of_ranks_is_refused_on_every_rank(comm, cache):
    descriptors = open_descriptors()
    larger = um.Machine.uniform(comm.size + 1, name="larger")
    parts = ["larger", f"{comm.size + 1} ranks", f"has {comm.size}"]
    expect(comm, um.TopologyError, parts, lambda: machine_of(comm, machine=larger))
    collective_assert(comm, open_descriptors() <= descriptors, "descriptors are left open")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("odd", ["none", "another", "too large"])
def test_machines_that_differ_between_ranks_are_refused_on_every_rank(comm, cache, odd):
    machine = um.Machine.uniform(comm.size)
    if comm.rank == comm.size - 1:
        machine = {
            "none": None,
            "another": um.Machine.uniform(comm.size, host_gb_per_s=49.0),
            "too large": um.Machine.uniform(comm.size + 1),
        }[odd]
    expect(comm, um.RankMismatchError, [f"rank {comm.size - 1}"], lambda: machine_of(comm, machine=machine))


METHODS = ["copy_seconds", "copy_probe", "gemm_probe", "close_peer", "allocate", "open"]


@pytest.mark.parametrize("method", METHODS)
def test_a_measurement_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(comm, cache, method):
    class Failing(HostBackend):
        pass

    def fail(self, *arguments):
        raise um.DeviceError(f"{method} failed on purpose")

    if comm.rank == comm.size - 1:
        setattr(Failing, method, fail)
    descriptors = open_descriptors()
    found = outcome(lambda: um.Session(comm, backend=Failing).close())
    peers_needed = method in ("open", "close_peer") and comm.size == 1
    collective_assert(comm, peers_needed or (found.startswith("DeviceError: ") and "on purpose" in found), found)
    collective_assert(comm, open_descriptors() <= descriptors, "descriptors are left open")
    collective_assert(comm, peers_needed or not stamps(cache), "a failed measurement was kept")


class ScriptedProbe(Timeable):
    """Returns given times, and notes when it is used and freed."""

    def __init__(self, name, times, log):
        self.name, self.times, self.log = name, list(times), log

    def mean_seconds(self, least_s):
        self.log.append(self.name)
        return self.times.pop(0)

    def close(self):
        self.log.append(f"{self.name} freed")


def scripted(copy_s, gemm_s, log):
    """Return a backend whose copies and products take these times, one per sample."""

    class Scripted(HostBackend):
        def copy_seconds(self, destination, source, nbytes, repeats):
            return 1.0

        def copy_probe(self, destination, source, nbytes):
            return ScriptedProbe("copy", copy_s, log)

        def gemm_probe(self, size, dtype):
            return ScriptedProbe(dtype.name, gemm_s, log)

    return Scripted


def test_what_ranks_do_at_once_is_sampled_in_turn_for_the_median_and_the_best(comm, cache):
    log: list[str] = []
    times = np.array([5.0, 1.0, 4.0, 3.0, 2.0]) * (comm.rank + 1)
    machine = machine_of(comm, backend=scripted(times, times, log))
    ranks = np.arange(comm.size) + 1
    tflop, gb = 2 * 64**3 / 1e12, (256 << 10) / 1e9
    names = [dtype.name for dtype in PROBED]
    good = all(np.allclose(machine.gemm_tflop_per_s[name], tflop / ranks) for name in names)
    good &= all(np.allclose(machine.typical_gemm_tflop_per_s[name], tflop / (3 * ranks)) for name in names)
    good &= np.allclose(machine.gemm_rate(DType.c128), 1e12 * tflop / ranks / 4)  # of four real products
    good &= np.allclose([port.capacity_gb_per_s for port in machine.ports], (gb / ranks).sum())  # the best sample
    collective_assert(comm, good, machine.to_json())
    turn = ["copy", "copy", *names]
    freed = sorted(f"{name} freed" for name in turn)
    collective_assert(comm, log[: 5 * len(turn)] == 5 * turn and sorted(log[5 * len(turn) :]) == freed, str(log))


def test_a_link_is_as_fast_alone_as_beside_others(comm, cache):
    fast = np.full(5, 0.1)
    machine = machine_of(comm, backend=scripted(fast, fast, []))
    host, gb = machine.host, (256 << 10) / 1e9
    alone = np.stack([machine.bandwidth_gb_per_s[host, :host], machine.bandwidth_gb_per_s[:host, host]])
    between = machine.bandwidth_gb_per_s[:host, :host]
    # A copy alone took 1 s, and so did one of few bytes, of which no more than half is taken for latency.
    collective_assert(comm, np.allclose(alone, gb / 0.1) and np.allclose(between, gb / 0.5), f"{alone} {between}")


@pytest.mark.parametrize("uneven", ["copy", "gemm"])
def test_a_measurement_of_a_busy_machine_is_marked_used_and_replaced_by_the_next_session(
    comm, cache, monkeypatch, measurements, uneven
):
    monkeypatch.setattr(measuring, "_STEADY_SPREAD", 0.15)
    steady, busy = np.full(5, 1.0), np.array([1.0, 1.0, 2.0, 2.0, 2.0])
    times = (busy, steady) if uneven == "copy" else (steady, busy)
    first = machine_of(comm, backend=scripted(*times, []))
    good = not first.steady and "50% below the best; the machine was busy" in first.provenance
    collective_assert(comm, good, first.provenance)
    comm.Barrier()
    collective_assert(comm, not json.loads(only_file(cache).read_text())["steady"], "not kept")
    second = machine_of(comm, backend=scripted(steady, np.array([1.0, 1.1, 1.1, 1.1, 1.1]), []))
    third = machine_of(comm, backend=scripted(*times, []))
    good = second.steady and "busy" not in second.provenance and links(third) == links(second)
    collective_assert(comm, good and len(measurements) == 2, f"{second.provenance}, {len(measurements)} measurements")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("sharing", [True, False])
def test_ranks_that_share_cores_are_judged_together(comm, cache, monkeypatch, sharing):
    """They take turns, so each is uneven by nature while their total is not."""
    monkeypatch.setattr(measuring, "_STEADY_SPREAD", 0.15)
    true_find = Group._find_nodes

    def find(self, *about):
        true_find(self, *about)
        self.oversubscribed = sharing

    monkeypatch.setattr(Group, "_find_nodes", find)
    first = np.array([1.0, 1.0, 1.0, 4.0, 4.0])
    rates = {0: first, 1: 5.0 - first}.get(comm.rank, np.ones(5))
    machine = machine_of(comm, backend=scripted(1 / rates, 1 / rates, []))
    collective_assert(comm, machine.steady == sharing, machine.provenance)
