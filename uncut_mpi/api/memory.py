"""
Arenas: memory of our own on every rank's device, exported once, mapped by every peer.

Protocol of a growth, on all ranks together: importers close, barrier, the exporter frees and
allocates, the result is agreed (a failure restores the old size everywhere and is raised
everywhere), handles are exchanged, peers are opened, the result is agreed again.
"""

from __future__ import annotations

import numpy as np

from uncut_mpi.api.counters import Counters
from uncut_mpi.device.interface import Allocation, Backend
from uncut_mpi.errors import CapacityError
from uncut_mpi.spmd import agreement, exchange
from uncut_mpi.spmd.group import Group

GRANULE_BYTES = 2 << 20


class PeerMappings:
    """Peers' allocations mapped into this process, each opened once however often it is asked for."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._open: dict[bytes, tuple[int, int]] = {}

    def open(self, handle: bytes) -> int:
        """Return the base address of a peer's allocation here; counts users."""
        address, users = self._open.get(handle, (0, 0))
        if users == 0:
            address = self._backend.open(handle)
        self._open[handle] = (address, users + 1)
        return address

    def close(self, handle: bytes) -> None:
        """Give one use back; the last one unmaps."""
        address, users = self._open[handle]
        if users > 1:
            self._open[handle] = (address, users - 1)
            return
        del self._open[handle]
        self._backend.close_peer(address)

    def close_all(self) -> None:
        """Unmap everything."""
        for address, _ in self._open.values():
            self._backend.close_peer(address)
        self._open.clear()


class Arena:
    """
    One exported allocation per rank, the same purpose on all.

    Attributes
    ----------
    addresses : ndarray of int64, shape (num_ranks,)
        Base of every rank's arena in this process; 0 where it is empty.
    sizes : ndarray of int64, shape (num_ranks,)
        Bytes of every rank's arena.
    generation : int
        Counts growths; addresses hold for one generation.
    """

    def __init__(
        self, group: Group, backend: Backend, mappings: PeerMappings, counters: Counters, purpose: str
    ) -> None:
        self._group, self._backend, self._mappings, self._counters = group, backend, mappings, counters
        self._purpose = purpose
        self._own: Allocation | None = None
        self._handles: list[bytes] = [b""] * group.size
        self.addresses = np.zeros(group.size, np.int64)
        self.sizes = np.zeros(group.size, np.int64)
        self.generation = 0

    def fits(self, needed: np.ndarray) -> bool:
        """Return whether every rank's arena has the bytes it needs."""
        return bool((needed <= self.sizes).all())

    def ensure(self, needed: np.ndarray) -> bool:
        """
        Grow until every rank has `needed[rank]` bytes. Collective; the same argument on all ranks.

        Returns
        -------
        bool
            Whether it grew (then all addresses have changed).

        Raises
        ------
        CapacityError
            On all ranks, if one rank cannot; the old sizes are restored.
        """
        if self.fits(needed):
            return False
        rank = self._group.rank
        old = self.sizes.copy()
        wanted = np.maximum(-(-needed // GRANULE_BYTES) * GRANULE_BYTES, old)
        self._unmap()
        self._group.barrier()
        error: BaseException | None = None
        try:
            self._replace(int(wanted[rank]))
        except CapacityError as caught:
            error = caught
        failed = any(self._group.allgather_objects(error is not None))
        if failed:
            self._replace(int(old[rank]))
        self._map(old if failed else wanted)
        self.generation += 1
        agreement.collective_result(self._group, error, f"growing the {self._purpose}")
        return True

    def close(self) -> None:
        """Unmap, and free after all have unmapped. Collective."""
        self._unmap()
        self._group.barrier()
        self._replace(0)
        self.sizes[:] = 0

    def abandon(self) -> None:
        """Let go without any collective call: for a session that is broken."""
        self._handles = [b""] * self._group.size
        self._own = None

    def _replace(self, nbytes: int) -> None:
        if self._own is not None and self._own.nbytes == nbytes:
            return
        if self._own is not None:
            self._backend.free(self._own)
            self._own = None
        if nbytes:
            self._own = self._backend.allocate(nbytes)
            self._counters.allocations += 1

    def _unmap(self) -> None:
        for rank, handle in enumerate(self._handles):
            if handle and rank != self._group.rank:
                self._mappings.close(handle)
        self._handles = [b""] * self._group.size
        self.addresses[:] = 0

    def _map(self, sizes: np.ndarray) -> None:
        self._handles = exchange.exchange_handles(self._group, self._own.handle if self._own else b"")
        with agreement.collective(self._group, f"opening the peers' {self._purpose}"):
            for rank, handle in enumerate(self._handles):
                if rank == self._group.rank:
                    self.addresses[rank] = self._own.address if self._own else 0
                elif handle:
                    self.addresses[rank] = self._mappings.open(handle)
        self.sizes = sizes.copy()
