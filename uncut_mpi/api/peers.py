"""
Whether ranks reach each other's device memory.

There are machines on which CUDA says that devices reach each other, maps their memory and reports no error. But copies
are lost, or go to memory that nobody reads (an IOMMU, PCIe ACS, virtual machines). Products would be wrong there, or
wait for a flag for ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from uncut_mpi.api.counters import Counters
from uncut_mpi.api.memory import GRANULE_BYTES, Arena, PeerMappings
from uncut_mpi.device.interface import Backend, DeviceIdentity
from uncut_mpi.errors import TopologyError, agreed
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import Group

_MOST_WORDS = 1 << 13  # in a pattern, of 8 bytes
_MOST_PAIRS = 8  # that an error lists

_reached: dict[str, frozenset[str]] = {}
"""
By this process's device, the devices that have exchanged patterns with it, as UUIDs.

Kept for the process alone: what loses copies is a setting of the firmware, the kernel or the container, and the next
process may run under another one.
"""


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
    if all(devices[there] in reached[here] for here in range(size) for there in range(size) if here != there):
        return
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
        for distance in range(1, size):  # not all of them one rank's at once
            there = (rank + distance) % size
            peer = int(arena.addresses[there])
            backend.copy_matrix(peer + (size + rank) * pitch, own + there * pitch, pitch, 1, pitch)
            backend.copy_matrix(read + there * pitch, peer + rank * pitch, pitch, 1, pitch)
    wrong = np.zeros((2, size), np.int64)
    with agreement.collective(group, "looking at what has come from other ranks"):
        seen = np.empty((words, 2 * size), np.uint64, order="F")
        backend.to_host(written, words, seen)
        for here in range(size):
            if here != rank:
                expected = _pattern(here, rank, words)
                wrong[:, here] = [np.count_nonzero(seen[:, at] != expected) for at in (here, size + here)]
    found = group.allgather_bytes(wrong, "checking that ranks reach each other's memory").reshape(size, 2, size)
    arena.close()
    if found.any():
        raise agreed(TopologyError(_complaint(found, words, devices)))
    others = frozenset(device for there, device in enumerate(devices) if there != rank)
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
