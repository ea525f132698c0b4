"""Start of a session: which backend, which device for which rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from uncut_mpi.api.peers import exchange_patterns, reached_from
from uncut_mpi.device.interface import Backend, DeviceIdentity
from uncut_mpi.device.select import make_cuda, make_host, visible_gpus
from uncut_mpi.errors import ParamError, TopologyError, raised_by_all
from uncut_mpi.model.arguments import BACKENDS, BackendName, counted, flag, items, shown, whole_number
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.runtime import node_rank

BackendMaker = Callable[[int, int], Backend]
"""Makes a backend of a caller's own from (local rank, ranks of the node)."""


@dataclasses.dataclass(frozen=True, slots=True)
class Started:
    """
    The devices of a session.

    Attributes
    ----------
    backend : Backend
        This rank's.
    reason : str
        Why this kind of backend was taken.
    identities : list of DeviceIdentity
        One per rank.
    shared : bool
        Whether two ranks are on one device.
    """

    backend: Backend
    reason: str
    identities: list[DeviceIdentity]
    shared: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Sight:
    """
    What one rank tells the others before devices are given out.

    Attributes
    ----------
    gpus : list of str
        UUIDs of the GPUs its process sees, by ordinal.
    why : str
        Why it sees none; empty if it sees some.
    node_rank : int
        Number of its process among those of the job on this node.
    """

    gpus: list[str]
    why: str
    node_rank: int


def start_backend(
    group: Group,
    *,
    backend: BackendName | BackendMaker,
    devices: Sequence[int] | None,
    allow_shared_gpu: bool,
    check_peers: bool = True,
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
        would share one without `allow_shared_gpu`, or if the ranks are on several nodes. With `check_peers`, if what a
        rank writes into another one's device memory does not arrive.
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
        if group.num_nodes > 1:
            raise TopologyError(
                f"the {group.size} ranks are on {group.num_nodes} nodes; a session spans one node: "
                "split the communicator with comm.Split_type(MPI.COMM_TYPE_SHARED)"
            )
        if named is not None and backend in ("auto", "cuda") and len(named) < group.size:
            raise ParamError(
                f"devices ({named}) names {counted(len(named), 'device')} for {counted(group.size, 'rank')}: "
                "name one for every rank"
            )
    if callable(backend):
        make = backend
        return _open(group, lambda: make(group.local_rank, group.size), "the backend was given", check_peers)
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
        return _open(group, lambda: make_host(group.local_rank, group.size), reason, check_peers)
    reason = "every rank has a GPU of its own" if backend == "auto" else "the cuda backend was asked for"
    return _open(group, lambda: make_cuda(ordinals[group.rank]), reason, check_peers)


def _open(group: Group, make: Callable[[], Backend], reason: str, check_peers: bool) -> Started:
    opened: Backend | None = None
    try:
        with agreement.collective(group, "opening the device"):
            opened = make()
            identity = opened.identity()
        told: list[tuple[DeviceIdentity, frozenset[str]]] = group.allgather_objects(
            (identity, reached_from(identity.uuid))
        )
        identities = [one for one, _ in told]
        if check_peers:
            exchange_patterns(group, opened, identities, [reached for _, reached in told])
        shared = len({identity.uuid for identity in identities}) < len(identities)
        return Started(opened, reason, identities, shared)
    except BaseException:
        # Another rank may have failed, and then this one's device is not needed either.
        if opened is not None:
            opened.close()
        raise


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
