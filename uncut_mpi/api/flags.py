"""The flags by which ranks wait for each other's tasks, and the epoch from which a call counts in them."""

from __future__ import annotations

from uncut_mpi.api.control import Control
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.memory import Arena, PeerMappings
from uncut_mpi.device.interface import Backend, FlagTable
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import Group

_EPOCHS = 1 << 32
_PERIOD = 1 << 30  # the epoch gets no further ahead of any flag


class Flags(Arena):
    """
    Every rank's flags.

    Attributes
    ----------
    epoch : int
        Of the next call; the same on all ranks.
    """

    def __init__(
        self, group: Group, backend: Backend, mappings: PeerMappings, counters: Counters, control: Control
    ) -> None:
        super().__init__(group, backend, mappings, counters, "flags")
        self._control = control
        self.epoch = self._ahead = 0

    def begin(self, span: int) -> int:
        """Return the epoch of a call; that of the next one is `span` further on. Collective; seldom a message."""
        if self._ahead + span >= _PERIOD:
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
        return FlagTable(int(self.addresses[self._group.rank]), self.addresses.copy(), self._control.flags)
