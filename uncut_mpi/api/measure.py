"""
The first measurement of a machine, and where it is kept.

Every (source, destination) pair alone, then one GEMM per type and the host links with all ranks at once, in under
3 s. The result is a `Machine`, kept as JSON in the user's cache directory under a key of the hardware, so that other
hardware never uses it.

What all ranks do at once is sampled several times, the kinds of work in turn. So a busy moment spoils a sample of each
kind, and not all of one. The median is what to expect, the best what a bound may assume. A measurement whose median
lies far below its best is marked, and the next session replaces it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from uncut_mpi.api.counters import Counters
from uncut_mpi.api.memory import Arena, PeerMappings
from uncut_mpi.api.net_probe import measure_net
from uncut_mpi.device.interface import Backend, DeviceIdentity, Timeable
from uncut_mpi.errors import TopologyError, UncutError, agreed
from uncut_mpi.model.arguments import counted
from uncut_mpi.model.costs import Disk
from uncut_mpi.model.dtypes import MEASURED, PROBED, DType
from uncut_mpi.model.evened import evened
from uncut_mpi.model.locations import host_index, num_ends
from uncut_mpi.model.machine import QUICK, Machine
from uncut_mpi.model.net import NetSample, fit_net
from uncut_mpi.model.ports import Port
from uncut_mpi.model.usual import ISSUED_S, usual_figures
from uncut_mpi.regular import read_regular
from uncut_mpi.spmd import agreement, exchange
from uncut_mpi.spmd.group import SETTLING_S, Group
from uncut_mpi.unfinished import replace_file

logger = logging.getLogger("uncut_mpi")

# Bytes of a bandwidth probe and edge of the GEMM probe, large enough for full rate, small enough
# for 8 ranks' 72 links and four types to stay under 3 s.
_PROBE_BYTES = {"cuda": 64 << 20, "host": 4 << 20}
_GEMM_EDGE = {"cuda": 4096, "host": 384}
_LATENCY_BYTES = 4096

# How keys of measured machines begin; others were assumed or put together, and go with any hardware.
_MEASURED = ("cuda-", "host-")
_MOST_BYTES = 1 << 26  # of a kept file, samples included
_REPEATS = 3
_PROBED = tuple(dtype for dtype in PROBED if not dtype.is_complex)  # those have a quarter of the rate
_SAMPLES = 5
_SAMPLE_S = 0.01
# How far a median may lie below the best on a machine that is not busy with something else.
_STEADY_SPREAD = 0.15


def machine_key(identities: Sequence[DeviceIdentity], hosts: Sequence[str], node_of: Sequence[int]) -> str:
    """
    Return the key of the hardware: what and which the devices are, in rank order, and on which nodes. Local.

    A GPU has an identity of its own, which no restart or container changes; the host backend's device
    is the node, known by its name.

    Parameters
    ----------
    identities, hosts, node_of : sequence
        Of every rank: its device, the name of its machine and the number of its node.
    """
    which = [one.uuid if one.backend == "cuda" else host for one, host in zip(identities, hosts, strict=True)]
    nodes = [f"/{node}" if any(node_of) else "" for node in node_of]
    text = "|".join(f"{one.name}/{its}{node}" for one, its, node in zip(identities, which, nodes, strict=True))
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
    key = machine_key(identities, group.hosts, group.node_of)
    described = None if given is None else f"{given.name} of {counted(given.num_ranks, 'rank')}"
    agreement.agree(group, given.to_json().encode() if given is not None else b"", lambda: {"machine": described})
    if given is not None:
        if given.num_ranks != group.size:
            raise agreed(
                TopologyError(
                    f"machine {given.name} has {counted(given.num_ranks, 'rank')}, the session has {group.size}: "
                    "measure this one, or start as many ranks"
                )
            )
        if given.node_of.tolist() != list(group.node_of):
            raise agreed(
                TopologyError(
                    f"machine {given.name} has its ranks on nodes {given.node_of.tolist()}, the session on "
                    f"{list(group.node_of)}: leave it out, or compose it with Machine.cluster or Machine.joined"
                )
            )
        check_hardware(given, key)
        return given
    path = cache_directory() / f"{key}.json"
    kept = group.from_root(lambda: _load(path, key, group.size))
    if kept:
        # Memory is a fact of this run (the host backend's is what is free now), links and rates are kept.
        memory = np.array([one.memory_bytes for one in identities], np.int64)
        return dataclasses.replace(Machine.from_json(kept), memory_bytes=memory)
    if group.num_nodes > 1:
        with agreement.on_each_node(group, "measuring each node") as within:
            node = obtain_machine(within, backend, [identities[rank] for rank in group.here], None)
        return join_nodes(group, node, key, measure_net(group))
    started = time.perf_counter()
    machine = measure(group, backend, identities, key)
    machine = dataclasses.replace(machine, disk=group.from_root(lambda: kept_disk(path)))
    if group.rank == 0:
        _tell(machine, time.perf_counter() - started, again=path.is_file())
        _keep(path, machine.to_json())
    return machine


def join_nodes(group: Group, node: Machine, key: str, samples: Sequence[NetSample]) -> Machine:
    """
    Return the machine of several nodes. Collective.

    Parameters
    ----------
    node : Machine
        What was measured of this rank's node, the same on its ranks.
    key : str
        As `machine_key`.
    samples : sequence of NetSample
        What was measured between nodes.
    """
    told = group.allgather_objects(node.to_json() if group.local_rank == 0 else None, "joining nodes", SETTLING_S)
    nodes = [Machine.from_json(one) for one in told if one is not None]  # in the order of their first ranks
    joined = Machine.joined(nodes, group.node_of, fit_net(samples, group.node_of))
    longest = max(one.nbytes for one in samples)
    said = f"{joined.provenance}; net between {group.num_nodes} nodes: messages of up to {longest >> 10} KiB"
    return dataclasses.replace(joined, key=key, provenance=said)


def _tell(machine: Machine, seconds: float, *, again: bool) -> None:
    """Say that the machine was measured, and why it is measured again; once as a warning, which is seen by default."""
    why = (
        "once for these devices; plans are right with it"
        if machine.steady
        else "while it was busy with something else; plans are right all the same, and sessions measure again until "
        "it is quiet"
    )
    logger.log(
        logging.INFO if again else logging.WARNING,
        "machine measured in the quick form (%.1f s) %s. For plans that are a little better, run "
        "python -m uncut_mpi.calibrate once, on as many ranks",
        seconds,
        why,
    )


def check_hardware(machine: Machine, key: str) -> None:
    """
    Check that a machine was measured on the hardware of a key, or on none: assumed ones go anywhere.

    Else raise TopologyError on every rank, since all have the same machine.
    """
    if machine.key != key and machine.key.startswith(_MEASURED):
        raise agreed(
            TopologyError(
                f"machine {machine.name} was measured on other hardware (its key is {machine.key}, that of these "
                f"ranks is {key}): measure this one with python -m uncut_mpi.calibrate, on as many ranks"
            )
        )


def measure(group: Group, backend: Backend, identities: Sequence[DeviceIdentity], key: str) -> Machine:
    """Measure every link, one transfer at a time, then products and host links, all ranks at once. Collective."""
    began = time.perf_counter()
    size, rank = group.size, group.rank
    nbytes, edge = _PROBE_BYTES[backend.name], _GEMM_EDGE[backend.name]
    bandwidth, latency = np.zeros((2, num_ends(size), num_ends(size)))
    # A part for every rank: no rank of a product writes what another one does.
    host = exchange.shared_segment(group, size * nbytes, "link probe")
    mine, pinned = host.address + rank * nbytes, False
    try:
        with agreement.collective(group, "preparing the link probe"):
            host.array(np.uint8, nbytes, offset_bytes=rank * nbytes)[:] = 1  # so that no page fault is measured
            pinned = bool(backend.pin(mine, nbytes))
        arena = Arena(group, backend, PeerMappings(backend), Counters(), "link probe")
        arena.ensure(np.full(size, 2 * nbytes))
        peers = arena.addresses.tolist()
        for turn in range(size):
            # Each block ends when all ranks have left it, so that one rank at a time measures.
            with agreement.collective(group, f"measuring the links of rank {turn}"):
                if turn == rank:
                    _measure_links(backend, rank, [*peers, mine], nbytes, bandwidth, latency)
        work: dict[str, Callable[[], Timeable]] = {
            "host to device": lambda: backend.copy_probe(peers[rank], mine, nbytes),
            "device to host": lambda: backend.copy_probe(mine, peers[rank], nbytes),
            **{dtype.name: functools.partial(backend.gemm_probe, edge, dtype) for dtype in _PROBED},
        }
        seconds = _sample_together(group, work)
        arena.close()
    finally:
        # After a failure the backend, which is closed then, frees what else there is.
        if pinned:
            with contextlib.suppress(UncutError):
                backend.unpin(mine)
        host.close()
    parts = group.allgather_objects((bandwidth, latency, seconds, time.perf_counter() - began))
    bandwidth = sum(part[0] for part in parts)
    latency = sum(part[1] for part in parts)
    # The stream was idle while the copy was issued.
    latency = np.maximum(latency - ISSUED_S[backend.name], 0.25 * latency)
    gb, tflop = nbytes / 1e9, 2.0 * edge**3 / 1e12
    # Work per second of each (sample, rank).
    rates = {
        name: (tflop if name in DType.__members__ else gb) / np.array([part[2][name] for part in parts]).T
        for name in work
    }
    inward, outward = (rates.pop(name) for name in ("host to device", "device to host"))
    # A rank reaches alone what it has reached beside others.
    at = host_index(size)
    np.maximum(bandwidth[at, :size], inward.max(axis=0), out=bandwidth[at, :size])
    np.maximum(bandwidth[:size, at], outward.max(axis=0), out=bandwidth[:size, at])
    bandwidth[at, at] = np.max(bandwidth)
    # Ranks that share cores take turns, so that only their total can be steady.
    spread = max(
        _spread(rate.sum(axis=1, keepdims=True) if group.oversubscribed else rate)
        for rate in (inward, outward, *rates.values())
    )
    steady = spread <= _STEADY_SPREAD
    usual = usual_figures(backend.name, bandwidth)
    models = [one.name for one in identities]
    typical = {name: evened(np.median(rate, axis=0), models) for name, rate in rates.items()}
    best = {name: evened(np.max(rate, axis=0), models, np.max) for name, rate in rates.items()}
    return Machine(
        name=f"{size}×{identities[0].name}",
        key=key,
        bandwidth_gb_per_s=bandwidth,
        latency_s=latency,
        gemm_tflop_per_s={name: np.maximum(best[name], typical[name]) for name in rates},
        typical_gemm_tflop_per_s=typical,
        memory_bytes=np.array([one.memory_bytes for one in identities], np.int64),
        ports=(*usual.pop("ports"), *_host_ports(inward, outward)),
        multiprocessors=np.array([one.multiprocessors for one in identities], np.int64),
        **usual,
        provenance=f"{QUICK}, measured in {max(part[3] for part in parts):.1f} s: {nbytes >> 10} KiB "
        f"copies, one at a time, best of {_REPEATS}; "
        f"GEMM of edge {edge} and host links, all ranks at once, {_SAMPLES} samples of {1e3 * _SAMPLE_S:g} ms: "
        "costs, shapes and what devices share are usual ones; "
        f"medians are up to {spread:.0%} below the best"
        + ("" if steady else "; the machine was busy, and the next session measures again"),
        steady=steady,
    )


def _sample_together(group: Group, work: Mapping[str, Callable[[], Timeable]]) -> dict[str, list[float]]:
    """Return the seconds that this rank took for each kind of work, one number per sample. Collective."""
    seconds: dict[str, list[float]] = {name: [] for name in work}
    with contextlib.ExitStack() as opened:
        probes = {}
        with agreement.collective(group, "preparing products"):
            for name, prepare in work.items():
                probes[name] = opened.enter_context(contextlib.closing(prepare()))
        for _ in range(_SAMPLES):
            for name, probe in probes.items():
                # Each block begins when all ranks have left the one before, so that all measure at once.
                with agreement.collective(group, f"measuring {name}"):
                    seconds[name].append(probe.mean_seconds(_SAMPLE_S))
    return seconds


def _host_ports(inward: np.ndarray, outward: np.ndarray) -> tuple[Port, Port]:
    """Return what all ranks together get from and to the host: the most of any sample, GB/s of (sample, rank)."""
    ranks = range(inward.shape[1])
    host = host_index(len(ranks))
    return (
        Port.of("host to devices", float(inward.sum(axis=1).max()), [(host, rank) for rank in ranks]),
        Port.of("devices to host", float(outward.sum(axis=1).max()), [(rank, host) for rank in ranks]),
    )


def _spread(rates: np.ndarray) -> float:
    """Return how far a median over the samples, the first axis, lies below the best at most."""
    return float(np.max(1 - np.median(rates, axis=0) / np.max(rates, axis=0)))


def _measure_links(
    backend: Backend, rank: int, addresses: Sequence[int], nbytes: int, bandwidth: np.ndarray, latency: np.ndarray
) -> None:
    """Fill in this rank's row: its pushes to every device and to the host, and its pull from the host."""
    host = host_index(len(addresses) - 1)
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


def kept_disk(path: str | os.PathLike[str]) -> Disk:
    """Return the disk of the machine that a file has, whatever else is measured again; the usual one if it has none."""
    machine = _read(path)
    return Disk() if machine is None else machine.disk


def _load(path: pathlib.Path, key: str, num_ranks: int) -> str:
    machine = _read(path)
    if machine is None:
        return ""
    complete = all(
        dtype.name in rates
        for rates in (machine.gemm_tflop_per_s, machine.typical_gemm_tflop_per_s)
        for dtype in MEASURED
        if not dtype.is_complex
    )
    good = machine.steady and complete and machine.key == key and machine.num_ranks == num_ranks
    # Without the samples that a calibration adds, which no session needs.
    return machine.to_json() if good else ""


def _read(path: str | os.PathLike[str]) -> Machine | None:
    """Return the machine that a file has; None if there is no file, or it is damaged or of an older format."""
    try:
        return Machine.from_json(read_regular(os.fspath(path), _MOST_BYTES).decode())
    except (OSError, ValueError, OverflowError):
        return None


def _keep(path: pathlib.Path, text: str) -> None:
    # Best effort: a read-only home directory costs a measurement per session and nothing else.
    with contextlib.suppress(OSError):
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
        replace_file(str(path), text.encode())
