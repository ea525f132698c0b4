"""What a session holds until it is closed, dropped by all its ranks, or MPI is gone."""

from __future__ import annotations

from collections.abc import Callable

from uncut_mpi.api.calls import Calls
from uncut_mpi.api.plan_cache import PlanCache
from uncut_mpi.device.interface import Backend


class Holdings:
    """
    Everything that a session has to give back, without the session itself.

    Attributes
    ----------
    released : bool
        Whether it has been given back.
    whole : bool
        Whether the session has opened on this rank.
    """

    whole = True

    def __init__(self, calls: Calls, plans: PlanCache) -> None:
        self._calls, self._plans = calls, plans
        calls.gate.on_close = self.give_back
        self.released = False

    @property
    def in_use(self) -> bool:
        """Whether work of this rank or its peers may still be in flight, so that nothing of it can be freed. Local."""
        return self._calls.gate.broken

    def give_back(self, *, in_use: bool = False, check_left: Callable[[], None] | None = None) -> None:
        """
        Release everything. Collective.

        Parameters
        ----------
        in_use : bool, default False
            The communicator alone, since the rest is in use on some rank.
        check_left : callable, optional
            In the place of the group's own, by which all have left where nobody has closed the session.
        """
        if check_left is not None:
            self._calls.group.check_left = check_left
        if in_use:
            self._calls.group.free()
            return
        self._end()
        self._calls.close()
        self._calls.store.close()
        self._calls.backend.close()
        self._calls.group.free()

    def give_back_alone(self) -> None:
        """Release what this rank holds, where the others do the same or MPI is gone. Local."""
        self._end()
        self._calls.abandon()
        self._calls.store.give_back_alone()
        self._calls.backend.close()
        self._calls.group.free()

    def _end(self) -> None:
        self._calls.gate.closed = self.released = True
        self._calls.binder.drop_all()
        self._plans.clear()


class HalfOpened:
    """
    What a session holds that the error of one rank has kept from opening here: a device, whose memory peers may map.

    Attributes
    ----------
    in_use, whole : bool
        As of `Holdings`.
    """

    in_use = whole = False

    def __init__(self, backend: Backend | None) -> None:
        self._backend = backend

    def give_back(self, *, in_use: bool = False, check_left: Callable[[], None] | None = None) -> None:
        """See `Holdings.give_back`; nothing but a communicator can be given back together, and that is gone. Local."""

    def give_back_alone(self) -> None:
        """Close the device. Local."""
        if self._backend is not None:
            self._backend.close()
