"""What the calls of a session work on."""

from __future__ import annotations

from uncut_mpi.api.calls import Calls
from uncut_mpi.api.gate import Gate
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.api.plan_cache import PlanCache
from uncut_mpi.api.plan_maker import PlanMaker
from uncut_mpi.device.interface import Backend
from uncut_mpi.spmd.group import Group


class SessionBase:
    """
    What a session consists of; `Session` makes it.

    Attributes
    ----------
    rank, size : int
        This rank and how many there are.
    """

    _group: Group
    _backend: Backend
    _store: MatrixStore
    _maker: PlanMaker
    _calls: Calls
    _gate: Gate
    _plans: PlanCache

    @property
    def rank(self) -> int:
        """Rank of this process in the session's communicator."""
        return self._group.rank

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self._group.size
