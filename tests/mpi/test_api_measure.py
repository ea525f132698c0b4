"""The first measurement of a machine: made once, kept, read again, and never used for other hardware."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import shutil
import tempfile
import time

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert
from uncut_mpi.api import measure as measuring
from uncut_mpi.device.host import HostBackend
from uncut_mpi.model.dtypes import DType

pytestmark = pytest.mark.mpi(min_size=1)
TABLES = ("bandwidth_gb_per_s", "latency_s")


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
    """Smaller probes: these tests look at what is kept, not at how fast it is."""
    monkeypatch.setitem(measuring._PROBE_BYTES, "host", 256 << 10)
    monkeypatch.setitem(measuring._GEMM_EDGE, "host", 64)


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


def machine_of(comm, **options) -> um.Machine:
    with um.Session(comm, backend="host", **options) as session:
        return session.machine


def open_descriptors() -> int:
    gc.collect()  # what a closed session still refers to in a cycle
    return len(os.listdir("/proc/self/fd"))


def stamps(directory: pathlib.Path) -> dict[str, tuple[int, int]]:
    """Name, inode and time of change of every file kept."""
    if not directory.is_dir():
        return {}
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in directory.iterdir()}


def only_file(directory: pathlib.Path) -> pathlib.Path:
    (path,) = directory.iterdir()
    return path


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
    wrong += [dtype.name for dtype in DType if not (machine.gemm_rate(dtype) > 0).all()]
    shapes = [getattr(machine, name).shape for name in TABLES] + [
        rate.shape for rate in machine.gemm_tflop_per_s.values()
    ]
    good = shapes == [(size + 1, size + 1)] * 2 + [(size,)] * len(DType)
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
    comm.Barrier()
    if comm.rank == 0:
        path = only_file(cache)
        data = json.loads(path.read_text())
        data["memory_bytes"] = [12345] * comm.size
        path.write_text(json.dumps(data))
    comm.Barrier()
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
    "empty": lambda data: "",
    "not text": lambda data: b"\xff\xfe\x00machine",
    "a list": lambda data: "[]",
    "older format": lambda data: json.dumps({**data, "format": 0}),
    "a field is missing": lambda data: json.dumps({key: data[key] for key in data if key != "latency_s"}),
    "a ragged table": lambda data: json.dumps({**data, "latency_s": [[1e-6], [1e-6, 2e-6]]}),
    "a number that is none": lambda data: json.dumps({**data, "latency_s": [["x"]]}),
    "a number out of range": lambda data: json.dumps({**data, "memory_bytes": [10**30]}),
    "a link without bandwidth": lambda data: json.dumps(
        {**data, "bandwidth_gb_per_s": np.zeros((len(data["memory_bytes"]) + 1,) * 2).tolist()}
    ),
    "a type is missing": lambda data: json.dumps(
        {**data, "gemm_tflop_per_s": {name: rate for name, rate in data["gemm_tflop_per_s"].items() if name != "bf16"}}
    ),
    "other hardware": lambda data: json.dumps({**data, "key": "cuda-8-0123456789abcdef"}),
    "another number of ranks": spoil_ranks,
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_a_file_that_cannot_be_used_is_measured_anew_and_replaced(comm, cache, measurements, spoil):
    machine_of(comm)
    comm.Barrier()
    if comm.rank == 0:
        path = only_file(cache)
        spoilt = spoil(json.loads(path.read_text()))
        path.write_bytes(spoilt if isinstance(spoilt, bytes) else spoilt.encode())
    comm.Barrier()
    machine = machine_of(comm)
    collective_assert(comm, len(measurements) == 2, f"{len(measurements)} measurements")
    kept = links(um.Machine.from_json(only_file(cache).read_text()))
    collective_assert(comm, kept == links(machine), "the file was not replaced")
    machine_of(comm)
    collective_assert(comm, len(measurements) == 2, "the new file is not used")


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
        monkeypatch.setattr(measuring.tempfile, "mkstemp", refuse)
    monkeypatch.setenv("XDG_CACHE_HOME", str(base))
    comm.Barrier()
    found = [machine_of(comm).num_ranks for _ in range(2)]
    collective_assert(comm, found == [comm.size] * 2 and len(measurements) == 2, f"{found}, {len(measurements)}")
    collective_assert(comm, not stamps(cache), f"kept {stamps(cache)}")


def refuse(*arguments, **options):
    raise PermissionError(13, "Permission denied")


def test_a_full_disk_leaves_no_half_written_file(comm, cache, monkeypatch, measurements):
    true_fdopen = os.fdopen

    def full(handle, *arguments, **options):
        stream = true_fdopen(handle, *arguments, **options)
        if arguments == ("w",):
            stream.close()
            raise OSError(28, "No space left on device")
        return stream

    monkeypatch.setattr(measuring.os, "fdopen", full)
    machine = machine_of(comm)
    monkeypatch.undo()
    collective_assert(comm, machine.num_ranks == comm.size and not stamps(cache), f"left {stamps(cache)}")


def test_a_given_machine_is_used_and_nothing_is_measured(comm, cache, measurements):
    given = um.Machine.uniform(comm.size)
    found = machine_of(comm, machine=given)
    collective_assert(comm, found is given and not measurements and not stamps(cache), f"{found.name}")


def test_a_given_machine_with_another_number_of_ranks_is_refused_on_every_rank(comm, cache):
    descriptors = open_descriptors()
    try:
        machine_of(comm, machine=um.Machine.uniform(comm.size + 1, name="larger"))
        found = "nothing was raised"
    except um.TopologyError as error:
        found = str(error)
    good = all(part in found for part in ("larger", f"{comm.size + 1} ranks", f"has {comm.size}"))
    collective_assert(comm, good, found)
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
    try:
        machine_of(comm, machine=machine)
        found = "nothing was raised"
    except um.RankMismatchError as error:
        found = str(error)
    collective_assert(comm, f"rank {comm.size - 1}" in found, found)
    collective_assert(comm, len(set(comm.allgather(found))) == 1, found)


@pytest.mark.parametrize("method", ["copy_seconds", "gemm_seconds", "close_peer", "allocate", "open"])
def test_a_measurement_that_fails_on_one_rank_fails_on_all_and_leaves_nothing(comm, cache, method):
    class Failing(HostBackend):
        pass

    def fail(self, *arguments):
        raise um.DeviceError(f"{method} failed on purpose")

    if comm.rank == comm.size - 1:
        setattr(Failing, method, fail)
    descriptors = open_descriptors()
    try:
        um.Session(comm, backend=Failing).close()
        found = "nothing was raised"
    except um.DeviceError as error:
        found = str(error)
    peers_needed = method in ("open", "close_peer") and comm.size == 1
    collective_assert(comm, "on purpose" in found or peers_needed, found)
    collective_assert(comm, open_descriptors() <= descriptors, "descriptors are left open")
    collective_assert(comm, peers_needed or not stamps(cache), "a failed measurement was kept")


def test_the_time_of_a_full_measurement_is_shown(comm, cache, monkeypatch, capfd):
    monkeypatch.setitem(measuring._PROBE_BYTES, "host", 4 << 20)
    monkeypatch.setitem(measuring._GEMM_EDGE, "host", 384)
    comm.Barrier()
    started = time.perf_counter()
    machine_of(comm)
    taken = max(allgather(comm, time.perf_counter() - started))
    if comm.rank == 0:
        with capfd.disabled():
            print(f"\nmeasuring {comm.size} ranks on the host backend took {taken:.2f} s, the session included")
