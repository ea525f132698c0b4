"""
Arenas: memory of our own on every rank's device, exported once, mapped by every peer; or on its host, for itself.

Protocol of a growth, on all ranks together: importers close, barrier, the exporter frees and allocates, the result is
agreed. A failure restores the old size everywhere and is raised everywhere. Then handles are exchanged, peers are
opened, and the result is agreed again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from uncut_mpi.api.control import Control
from uncut_mpi.api.counters import Counters
from uncut_mpi.device.interface import Allocation, Backend, FlagTable, Pin
from uncut_mpi.errors import PinError
from uncut_mpi.segments import Segment
from uncut_mpi.spmd import agreement
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
        Base of every rank's arena in this process; 0 where it is empty, or on another node.
    sizes : ndarray of int64, shape (num_ranks,)
        Bytes of every rank's arena.
    """

    def __init__(
        self, group: Group, backend: Backend, mappings: PeerMappings, counters: Counters, purpose: str
    ) -> None:
        self._group, self._backend, self._mappings, self._counters = group, backend, mappings, counters
        self._purpose = purpose
        self._own: Allocation | None = None
        self._opened: list[bytes] = []
        self.addresses = np.zeros(group.size, np.int64)
        self.sizes = np.zeros(group.size, np.int64)

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
            On all ranks, if one rank cannot; the old sizes are restored, with new and undefined contents.
        """
        if self.fits(needed):
            return False
        rank = self._group.rank
        old = self.sizes.copy()
        wanted = np.maximum(-(-needed // GRANULE_BYTES) * GRANULE_BYTES, old)
        with agreement.collective(self._group, f"closing the peers' {self._purpose}"):
            self._unmap()
        error = self._attempt(int(wanted[rank]))
        what = f"growing the {self._purpose}"
        failed = self._group.allgather_bytes(np.array([error is not None]), what).any()
        if failed:
            # A rank that cannot even have its old size again has an empty arena, as `sizes` then says.
            self._attempt(int(old[rank]))
        self._map()
        if failed:
            agreement.collective_result(self._group, error, what)
        return True

    def close(self) -> None:
        """Unmap, and free after all have unmapped. Collective."""
        with agreement.collective(self._group, f"closing the peers' {self._purpose}"):
            self._unmap()
        with agreement.collective(self._group, f"freeing the {self._purpose}"):
            self._replace(0)

    def abandon(self) -> None:
        """Let go without any collective call: for a session that is broken."""
        self._opened.clear()
        self._own = None

    def poison(self) -> None:
        """Fill this rank's arena with all-one bits, a NaN in every type. Local."""
        if self._own is not None:
            self._backend.fill_words(self._own.address, self._own.nbytes // 4, 0xFFFFFFFF)

    def _allocate(self, nbytes: int) -> Allocation:
        return self._backend.allocate(nbytes)

    def _free(self, own: Allocation) -> None:
        self._backend.free(own)

    def _attempt(self, nbytes: int) -> BaseException | None:
        try:
            self._replace(nbytes)
        except BaseException as caught:  # also an interrupt: the other ranks wait in what ends a growth
            return caught
        return None

    def _replace(self, nbytes: int) -> None:
        own = self._own
        if own is not None:
            if own.nbytes == nbytes:
                return
            self._own = None
            self._free(own)
        if nbytes:
            self._own = self._allocate(nbytes)
            self._counters.allocations += 1

    def _unmap(self) -> None:
        self.addresses[:] = 0
        self.sizes[:] = 0
        while self._opened:
            self._mappings.close(self._opened.pop())

    def _map(self) -> None:
        own = self._own
        everyone = self._group.allgather_objects((own.handle, own.nbytes) if own else (b"", 0))
        with agreement.collective(self._group, f"opening the peers' {self._purpose}"):
            for rank, (handle, _) in enumerate(everyone):
                if rank == self._group.rank:
                    self.addresses[rank] = own.address if own else 0
                elif handle and self._group.node_of[rank] == self._group.node:
                    self.addresses[rank] = self._mappings.open(handle)
                    self._opened.append(handle)
        # They stay 0 after a failure: nothing fits, and the next growth begins anew.
        self.sizes[:] = [nbytes for _, nbytes in everyone]


class HostArena(Arena):
    """Page-locked host memory of every rank, in which no other rank reads or writes; see `Arena`."""

    _segment: Segment | None = None  # stays when the arena is abandoned, as devices may still copy
    _pin = Pin.FOREIGN

    def poison(self) -> None:
        """See `Arena.poison`."""
        if self._segment is not None:
            self._segment.array().fill(0xFF)

    def _allocate(self, nbytes: int) -> Allocation:
        segment = Segment.create(nbytes, self._purpose)
        try:
            self._pin = self._backend.pin(segment.address, nbytes)
        except PinError as error:
            segment.close()
            raise PinError(f"{self._purpose}: {error}") from error
        self._segment = segment
        return Allocation(segment.address, nbytes, b"")

    def _free(self, own: Allocation) -> None:
        segment, self._segment = self._segment, None
        if self._pin:
            self._backend.unpin(own.address)
        if segment is not None:
            segment.close()


_EPOCHS = 1 << 32
_PERIOD = 1 << 30  # the epoch gets no further ahead of any flag


class Flags(Arena):
    """
    Every rank's flags.

    Attributes
    ----------
    epoch : int
        Of the next call; the same on all ranks.
    before_reset : callable
        Ends the calls that use the flags.
    """

    def __init__(
        self, group: Group, backend: Backend, mappings: PeerMappings, counters: Counters, control: Control
    ) -> None:
        super().__init__(group, backend, mappings, counters, "flags")
        self._control = control
        self.epoch = self._ahead = 0
        self.before_reset: Callable[[], None] = lambda: None

    def goes_on(self, span: int) -> bool:
        """Return whether a call may begin at `epoch` without a message. Local; the same on all ranks."""
        return self._ahead + span < _PERIOD

    def begin(self, span: int) -> int:
        """Return the epoch of a call; that of the next one is `span` further on. Collective; seldom a message."""
        if not self.goes_on(span):
            self.before_reset()
            self.reset()
        epoch, self.epoch = self.epoch, (self.epoch + span) % _EPOCHS
        self._ahead += span
        return epoch

    def reset(self) -> None:
        """Set every flag to the epoch, so that none looks reached, and the abort word to 0. Collective."""
        with agreement.collective(self._group, "resetting the flags"):
            self._control.reset(self.epoch)
            rank = self._group.rank
            count = int(self.sizes[rank]) // 4
            if count:
                self._backend.fill_words(int(self.addresses[rank]), count, self.epoch)
        self._ahead = 0

    def _map(self) -> None:
        """See `Arena._map`: what is new is at the epoch, also where growing failed."""
        super()._map()
        self.reset()

    def table(self) -> FlagTable:
        """Return where the flags lie now. Local."""
        peers = self.addresses + 4 * self._group.size  # behind the words of ranks
        return FlagTable(int(peers[self._group.rank]), peers, self._control.flags)
