"""
Start of a session: which backend, which device for which rank, and whether ranks reach each other's device memory.

There are machines on which CUDA says that devices reach each other, maps their memory and reports no error. But copies
are lost, or go to memory that nobody reads (an IOMMU, PCIe ACS, virtual machines). Products would be wrong there, or
wait for a flag for ever.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

import numpy as np

from uncut_mpi.api.counters import Counters
from uncut_mpi.api.memory import GRANULE_BYTES, Arena, PeerMappings
from uncut_mpi.device.interface import Backend, DeviceIdentity
from uncut_mpi.device.select import make_cuda, make_host, visible_gpus
from uncut_mpi.errors import ParamError, TopologyError, agreed, raised_by_all
from uncut_mpi.model.arguments import BACKENDS, BackendName, counted, flag, items, shown, whole_number
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.runtime import node_rank

_MOST_WORDS = 1 << 13  # in a pattern, of 8 bytes
_MOST_PAIRS = 8  # that an error lists

_reached: dict[str, frozenset[str]] = {}
"""
By this process's device, the devices that have exchanged patterns with it, as UUIDs.

Kept for the process alone: what loses copies is a setting of the firmware, the kernel or the container, and the next
process may run under another one.
"""

BackendMaker = Callable[[int, int], Backend]
"""Makes a backend of a caller's own from (local rank, ranks of the node)."""

Divide = Callable[[Sequence[int]], None]
"""Takes ranks of a node that are in different parts for ranks of different nodes. Collective."""

logger = logging.getLogger("uncut_mpi")


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """The devices of a session."""

    backend: Backend  # this rank's
    reason: str  # why this kind of backend was taken
    identities: list[DeviceIdentity]  # one per rank
    shared: bool  # whether two ranks are on one device


@dataclasses.dataclass(frozen=True, slots=True)
class Sight:
    """What one rank tells the others before devices are given out."""

    gpus: list[str]  # UUIDs of the GPUs its process sees, by ordinal
    why: str  # why it sees none; empty if it sees some
    node_rank: int  # number of its process among those of the job on this node


def start_backend(
    group: Group,
    *,
    backend: BackendName | BackendMaker,
    devices: Sequence[int] | None,
    allow_shared_gpu: bool,
    check_peers: bool = True,
    divide: Divide | None = None,
) -> Started:
    """
    Choose and open the backend, the same kind on every rank, and check that ranks reach each other. Collective.

    Raises
    ------
    ParamError
        If the backend's name is unknown or `devices` does not name one device per rank.
    RankMismatchError
        If ranks ask for different backends or devices.
    TopologyError
        If ``"cuda"`` was asked for, or devices were named, and some rank cannot have a GPU of its own. If two ranks
        would share one without `allow_shared_gpu`. With `check_peers`, if what a rank writes into another one's device
        memory on its node does not arrive. If devices of a node have no peer access, and there is no `divide`.
    """
    named: list[int] | None = None
    with agreement.collective(group, "choosing the backend"):
        if not callable(backend):
            if not isinstance(backend, str) or backend not in BACKENDS:
                raise ParamError(f"backend {shown(backend)} does not exist: use one of {', '.join(BACKENDS)}")
            backend = next(name for name in BACKENDS if name == backend)
        named = (
            None if devices is None else [whole_number("a device of devices", one) for one in items("devices", devices)]
        )
        allow_shared_gpu, check_peers = flag("allow_shared_gpu", allow_shared_gpu), flag("check_peers", check_peers)
    asked = {
        "backend": "a callable" if callable(backend) else repr(backend),
        "devices": named,
        "allow_shared_gpu": allow_shared_gpu,
        "check_peers": check_peers,
    }
    agreement.agree(group, str(asked).encode(), lambda: asked)
    with raised_by_all():
        if named is not None and backend in ("auto", "cuda") and len(named) < group.size:
            raise ParamError(
                f"devices ({named}) names {counted(len(named), 'device')} for {counted(group.size, 'rank')}: "
                "name one for every rank"
            )
    if callable(backend):
        make = backend
        return _open(
            group, lambda: make(group.local_rank, group.local_size), "the backend was given", check_peers, divide
        )
    gpus, why = visible_gpus() if backend != "host" else ([], "the host backend was asked for")
    seen: list[Sight] = group.allgather_objects(Sight(gpus, why, node_rank()))
    ordinals, obstacle = _assign(seen, named, allow_shared_gpu)
    if obstacle:
        with raised_by_all():
            if backend == "cuda":
                raise TopologyError(f"backend cuda was asked for, but {obstacle}")
            if backend == "auto" and named is not None:
                raise TopologyError(
                    f"devices {named} were named, but {obstacle}; or leave devices (--devices) out, and backend auto "
                    "takes the host where there are no GPUs"
                )
        reason = why if backend == "host" else f"host backend, since {obstacle}"
        return _open(group, lambda: make_host(group.local_rank, group.local_size), reason, check_peers, divide)
    reason = "every rank has a GPU of its own" if backend == "auto" else "the cuda backend was asked for"
    return _open(group, lambda: make_cuda(ordinals[group.rank]), reason, check_peers, divide)


def _open(group: Group, make: Callable[[], Backend], reason: str, check_peers: bool, divide: Divide | None) -> Started:
    opened: Backend | None = None
    try:
        with agreement.collective(group, "opening the device"):
            opened = make()
            identity = opened.identity()
        told: list[tuple[DeviceIdentity, frozenset[str]]] = group.allgather_objects(
            (identity, reached_from(identity.uuid))
        )
        identities = [one for one, _ in told]
        parts = _parts(group.node_of, identities)
        if any(parts):
            _take_apart(group, parts, divide)
        if check_peers:
            exchange_patterns(group, opened, identities, [reached for _, reached in told])
        shared = len({identity.uuid for identity in identities}) < len(identities)
        return Started(opened, reason, identities, shared)
    except BaseException:
        # Another rank may have failed, and then this one's device is not needed either.
        if opened is not None:
            opened.close()
        raise


def _parts(node_of: Sequence[int], identities: Sequence[DeviceIdentity]) -> list[int]:
    """Return by rank in which part of its node it is, so that all devices of a part say that they reach each other."""
    parts: list[int] = []
    for rank, mine in enumerate(identities):
        apart = {
            parts[other]
            for other, its in enumerate(identities[:rank])
            if node_of[other] == node_of[rank] and (its.uuid in mine.unreached or mine.uuid in its.unreached)
        }
        parts.append(next(part for part in range(rank + 1) if part not in apart))
    return parts


def _take_apart(group: Group, parts: Sequence[int], divide: Divide | None) -> None:
    said = ", ".join(f"rank {rank} in part {part}" for rank, part in enumerate(parts))
    if divide is None:
        raise agreed(
            TopologyError(
                f"GPUs of a node have no peer access to each other ({said}): choose others, or take the ranks of each "
                "part for a node (--ranks-per-node)"
            )
        )
    if group.rank == 0:
        logger.warning(
            "GPUs of a node have no peer access to each other (%s): what goes between parts goes through the host, as "
            "between nodes, which is slow",
            said,
        )
    divide(parts)


def _assign(seen: Sequence[Sight], devices: Sequence[int] | None, allow_shared: bool) -> tuple[list[int], str]:
    """
    Return every rank's device ordinal, or why they cannot all have one.

    One visible device per rank means that the launcher has masked the others: take it. Otherwise process i of the node
    takes device i, never a wrapped-round one, unless sharing was asked for. So a process has one GPU in all its
    sessions, and sessions on disjoint communicators have disjoint GPUs. With the rank in the session in the place of i,
    the halves of a split communicator would all be on the first GPUs.
    """
    ordinals = []
    for rank, sight in enumerate(seen):
        gpus = sight.gpus
        if not gpus:
            return [], f"rank {rank} sees no GPU ({sight.why})"
        whose = ""
        if devices is not None:
            ordinal = devices[rank]
        elif len(gpus) == 1:
            ordinal = 0
        elif allow_shared:
            ordinal = sight.node_rank % len(gpus)
        else:
            ordinal, whose = sight.node_rank, f", as process {sight.node_rank} of its node,"
        if not 0 <= ordinal < len(gpus):
            return (
                [],
                f"rank {rank}{whose} would need GPU {ordinal}, and sees {len(gpus)}: start fewer ranks, or name "
                "others as devices (--devices)",
            )
        ordinals.append(ordinal)
    taken: dict[str, int] = {}
    for rank, ordinal in enumerate(ordinals):
        uuid = seen[rank].gpus[ordinal]
        if uuid in taken and not allow_shared:
            return [], (
                f"ranks {taken[uuid]} and {rank} would both be on GPU {uuid}: start one rank per GPU, "
                "or allow sharing: allow_shared_gpu (--allow-shared-gpu; slow, for tests)"
            )
        taken[uuid] = rank
    return ordinals, ""


def reached_from(device: str) -> frozenset[str]:
    """Return the devices (UUIDs) with which this process's device has exchanged patterns. Local."""
    return _reached.get(device, frozenset())


def exchange_patterns(
    group: Group, backend: Backend, identities: Sequence[DeviceIdentity], reached: Sequence[frozenset[str]]
) -> None:
    """
    Have every rank write a pattern into the memory of each other, whose owner looks whether it has come. Collective.

    And read one from there, as some products do. Memory is exported and mapped as for products. Where all pairs of
    devices have been checked by these processes, nothing is done.

    Parameters
    ----------
    identities : sequence of DeviceIdentity
        Of every rank's device.
    reached : sequence of frozenset of str
        What `reached_from` returns on every rank.

    Raises
    ------
    TopologyError
        If a pattern has not come; names the ranks, and what to do.
    """
    size, rank = group.size, group.rank
    devices = [identity.uuid for identity in identities]
    pairs = [(one, two) for one in range(size) for two in range(size) if one != two]
    pairs = [(one, two) for one, two in pairs if group.node_of[one] == group.node_of[two]]
    if all(devices[there] in reached[here] for here, there in pairs):
        return
    peers = [there for here, there in pairs if here == rank]
    words = min(_MOST_WORDS, GRANULE_BYTES // (24 * size))
    pitch = 8 * words
    # A pattern for each rank to write to and to read from, what others have written here, and what is read from them.
    arena = Arena(group, backend, PeerMappings(backend), Counters(), "memory to check that ranks reach each other")
    arena.ensure(np.full(size, 3 * size * pitch))
    own = int(arena.addresses[rank])
    written, read = own + size * pitch, own + 2 * size * pitch
    with agreement.collective(group, "preparing to check that ranks reach each other's memory"):
        patterns = np.array([_pattern(rank, there, words) for there in range(size)])
        backend.from_host(own, words, patterns.T)
        backend.fill_words(written, 4 * size * words, 0)  # an earlier check may have left the same patterns there
    with agreement.collective(group, "using other ranks' memory"):
        for there in (*peers[group.local_rank :], *peers[: group.local_rank]):  # not all of them one rank's at once
            peer = int(arena.addresses[there])
            backend.copy_matrix(peer + (size + rank) * pitch, own + there * pitch, pitch, 1, pitch)
            backend.copy_matrix(read + there * pitch, peer + rank * pitch, pitch, 1, pitch)
    wrong = np.zeros((2, size), np.int64)
    with agreement.collective(group, "looking at what has come from other ranks"):
        seen = np.empty((words, 2 * size), np.uint64, order="F")
        backend.to_host(written, words, seen)
        for here in peers:
            expected = _pattern(here, rank, words)
            wrong[:, here] = [np.count_nonzero(seen[:, at] != expected) for at in (here, size + here)]
    found = group.allgather_bytes(wrong, "checking that ranks reach each other's memory").reshape(size, 2, size)
    arena.close()
    if found.any():
        raise agreed(TopologyError(_complaint(found, words, devices)))
    others = frozenset(devices[there] for there in peers)
    _reached[devices[rank]] = reached_from(devices[rank]) | others


def _pattern(here: int, there: int, words: int) -> np.ndarray:
    """Return what goes from one rank to another: no zeros, and of no two pairs the same."""
    return np.random.default_rng((here, there)).integers(1, 1 << 64, words, np.uint64)


def _complaint(wrong: np.ndarray, words: int, devices: Sequence[str]) -> str:
    """Return what to say of wrong words, by where they went, whether they were read there, and where they came from."""
    pairs = [
        f"{wrong[there, reads, here]} of {words} words that "
        + (f"rank {there} read from rank {here}" if reads else f"rank {here} wrote to rank {there}")
        + f" ({devices[here]} to {devices[there]})"
        for there, reads, here in np.argwhere(wrong).tolist()
    ]
    more = f", and of {len(pairs) - _MOST_PAIRS} more pairs" if len(pairs) > _MOST_PAIRS else ""
    return (
        "ranks do not reach each other's device memory, although it was mapped and no call failed; wrong were "
        f"{', '.join(pairs[:_MOST_PAIRS])}{more}: on GPUs without NVLink mostly an IOMMU or PCIe ACS is the reason. "
        "Boot with iommu=pt or without IOMMU and switch ACS off (NCCL's manual, Troubleshooting, has the commands), in "
        "a virtual machine on its host; until then choose other GPUs (devices, --devices) or fewer ranks"
    )
