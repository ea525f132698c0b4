"""What a session holds until it is closed, dropped by all its ranks, or MPI is gone."""

from __future__ import annotations

from uncut_mpi.api.calls import Calls
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.api.plan_cache import PlanCache
from uncut_mpi.device.interface import Backend
from uncut_mpi.spmd.group import Group


class Holdings:
    """
    Everything that a session has to give back, without the session itself.

    Attributes
    ----------
    released : bool
        Whether it has been given back.
    """

    def __init__(self, group: Group, backend: Backend, store: MatrixStore, calls: Calls, plans: PlanCache) -> None:
        self._group, self._backend, self._store, self._calls, self._plans = group, backend, store, calls, plans
        self._gate = calls.gate
        self._gate.on_close = self.give_back
        self.released = False

    @property
    def in_use(self) -> bool:
        """Whether work of this rank or its peers may still be in flight, so that nothing of it can be freed. Local."""
        return self._gate.broken

    def give_back(self, *, in_use: bool = False) -> None:
        """Release everything, or the communicator alone where the rest is `in_use` on some rank. Collective."""
        if in_use:
            self._group.free()
            return
        self._end()
        self._calls.close()
        self._store.close()
        self._backend.close()
        self._group.free()

    def give_back_alone(self) -> None:
        """Release what this rank holds, when MPI is gone and with it the way to agree on anything. Local."""
        self._end()
        self._calls.abandon()
        self._store.give_back_alone()
        self._backend.close()

    def _end(self) -> None:
        self._gate.closed = self.released = True
        self._calls.binder.drop_all()
        self._plans.clear()
