"""
The first measurement of a machine, and where it is kept.

Every (source, destination) pair and one GEMM per type, in under 3 s. The result is a `Machine`,
kept as JSON in the user's cache directory under a key of the hardware, so that other hardware
never uses it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import os
import pathlib
import platform
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from uncut_mpi.device.interface import Backend, DeviceIdentity
from uncut_mpi.errors import TopologyError, UncutError, agreed
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.spmd import agreement, exchange
from uncut_mpi.spmd.group import Group

logger = logging.getLogger("uncut_mpi")

# Bytes of a bandwidth probe and edge of the GEMM probe, large enough for full rate, small enough
# for 8 ranks' 72 links and four types to stay under 3 s.
_PROBE_BYTES = {"cuda": 64 << 20, "host": 4 << 20}
_GEMM_EDGE = {"cuda": 4096, "host": 384}
_LATENCY_BYTES = 4096
_REPEATS = 3


def machine_key(identities: Sequence[DeviceIdentity]) -> str:
    """
    Return the key of the hardware: what and which the devices are, in rank order.

    A GPU has an identity of its own, which no restart or container changes; the host backend's device
    is the node, known by its name.
    """
    text = "|".join(f"{one.name}/{one.uuid if one.backend == 'cuda' else platform.node()}" for one in identities)
    return f"{identities[0].backend}-{len(identities)}-{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"


def cache_directory() -> pathlib.Path:
    """Return the directory machine files are kept in: ``$XDG_CACHE_HOME/uncut_mpi/machines``."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return pathlib.Path(base) / "uncut_mpi" / "machines"


def obtain_machine(
    group: Group, backend: Backend, identities: Sequence[DeviceIdentity], given: Machine | None
) -> Machine:
    """
    Return the machine of this session: the one given, the one kept, or a new measurement. Collective.

    Raises
    ------
    TopologyError
        If the machine given has another number of ranks, or was measured on other hardware.
    RankMismatchError
        If ranks give different machines.
    """
    key = machine_key(identities)
    described = "machine=None" if given is None else f"machine={given.name} of {given.num_ranks} ranks"
    agreement.agree(group, given.to_json().encode() if given is not None else b"", lambda: described)
    if given is not None:
        if given.num_ranks != group.size:
            raise agreed(
                TopologyError(
                    f"machine {given.name} has {given.num_ranks} ranks, the session has {group.size}: "
                    "measure this one, or start as many ranks"
                )
            )
        check_hardware(given, key)
        return given
    path = cache_directory() / f"{key}.json"
    kept = agreement.from_root(group, lambda: _load(path, key, group.size).encode())
    if kept:
        # Memory is a fact of this run (the host backend's is what is free now), links and rates are kept.
        memory = np.array([one.memory_bytes for one in identities], np.int64)
        return dataclasses.replace(Machine.from_json(kept.decode()), memory_bytes=memory)
    started = time.perf_counter()
    machine = measure(group, backend, identities, key)
    if group.rank == 0:
        logger.info(
            "measured this machine in %.1f s, the quick form: python -m uncut_mpi.calibrate measures all of it",
            time.perf_counter() - started,
        )
        _keep(path, machine.to_json())
    return machine


def check_hardware(machine: Machine, key: str) -> None:
    """
    Check that a machine was measured on the hardware of a key, or on none: assumed ones go anywhere.

    Raises
    ------
    TopologyError
        If it was measured on other hardware; on every rank, since all have the same machine.
    """
    if machine.key != key and machine.key.partition("-")[0] in _PROBE_BYTES:
        raise agreed(
            TopologyError(
                f"machine {machine.name} was measured on other hardware (its key is {machine.key}, that of these "
                f"ranks is {key}): measure this one with python -m uncut_mpi.calibrate, on as many ranks"
            )
        )


def measure(group: Group, backend: Backend, identities: Sequence[DeviceIdentity], key: str) -> Machine:
    """Measure every link, one transfer at a time, and one GEMM per type, all ranks at once. Collective."""
    size, rank = group.size, group.rank
    nbytes = _PROBE_BYTES[backend.name]
    bandwidth = np.zeros((size + 1, size + 1))
    latency = np.zeros((size + 1, size + 1))
    host = exchange.shared_segment(group, nbytes, "link probe")
    pinned = False
    try:
        with agreement.collective(group, "preparing the link probe"):
            host.array(np.uint8)[:] = 1  # touched, so that no page fault is measured
            pinned = backend.pin(host.address, nbytes)
            scratch = backend.allocate(2 * nbytes)
        handles = exchange.exchange_handles(group, scratch.handle)
        with agreement.collective(group, "opening the peers' link probe"):
            peers = [scratch.address if r == rank else backend.open(handles[r]) for r in range(size)]
        for turn in range(size):
            # Each block ends when all ranks have left it, so that one rank at a time measures.
            with agreement.collective(group, f"measuring the links of rank {turn}"):
                if turn == rank:
                    _measure_links(backend, rank, [*peers, host.address], nbytes, bandwidth, latency)
        edge = _GEMM_EDGE[backend.name]
        with agreement.collective(group, "measuring products"):
            rates = {dtype.name: 2.0 * edge**3 / backend.gemm_seconds(edge, dtype, _REPEATS) / 1e12 for dtype in DType}
        with agreement.collective(group, "closing the peers' link probe"):
            for r in range(size):
                if r != rank:
                    backend.close_peer(peers[r])
        with agreement.collective(group, "freeing the link probe"):
            if pinned:
                pinned = False
                backend.unpin(host.address)
            backend.free(scratch)
    finally:
        # After a failure the backend, which is closed then, frees what else there is.
        if pinned:
            with contextlib.suppress(UncutError):
                backend.unpin(host.address)
        host.close()
    parts = group.allgather_objects((bandwidth, latency, rates))
    bandwidth = sum(part[0] for part in parts)
    latency = sum(part[1] for part in parts)
    bandwidth[size, size] = np.max(bandwidth)
    return Machine(
        name=f"{size}×{identities[0].name}",
        key=key,
        bandwidth_gb_per_s=bandwidth,
        latency_s=latency,
        gemm_tflop_per_s={name: np.array([part[2][name] for part in parts]) for name in parts[0][2]},
        memory_bytes=np.array([one.memory_bytes for one in identities], np.int64),
        provenance=f"quick form, as at a first session: {nbytes >> 20} MiB copies, one at a time, best of {_REPEATS}; "
        f"GEMM of edge {edge}, all ranks at once, best of {_REPEATS}",
    )


def _measure_links(
    backend: Backend, rank: int, addresses: Sequence[int], nbytes: int, bandwidth: np.ndarray, latency: np.ndarray
) -> None:
    """Fill in this rank's row: its pushes to every device and to the host, and its pull from the host."""
    host = len(addresses) - 1
    own = addresses[rank]
    for there, target in enumerate(addresses):
        origin = own + (nbytes if there == rank else 0)
        transfers = [(rank, there, target, origin)]
        if there == host:
            transfers.append((host, rank, origin, target))
        for source, destination, to, start in transfers:
            latency[source, destination] = backend.copy_seconds(to, start, _LATENCY_BYTES, _REPEATS)
            seconds = backend.copy_seconds(to, start, nbytes, _REPEATS)
            transfer = max(seconds - latency[source, destination], 0.5 * seconds)
            bandwidth[source, destination] = nbytes / transfer / 1e9


def _load(path: pathlib.Path, key: str, num_ranks: int) -> str:
    try:
        text = path.read_text()
        machine = Machine.from_json(text)
    except (OSError, ValueError, OverflowError):
        return ""  # none kept, damaged, or of an older format: measure
    complete = all(dtype.name in machine.gemm_tflop_per_s for dtype in DType)
    return text if machine.key == key and machine.num_ranks == num_ranks and complete else ""


def _keep(path: pathlib.Path, text: str) -> None:
    # Best effort: a read-only home directory costs a measurement per session and nothing else.
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.stem)
    except OSError:
        return
    try:
        with os.fdopen(handle, "w") as stream:
            stream.write(text)
        os.replace(temporary, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
