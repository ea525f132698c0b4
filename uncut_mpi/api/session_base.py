"""What the calls of a session work on, and how each of them begins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from uncut_mpi.api.calls import Calls
from uncut_mpi.api.gate import Gate
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.api.plan_cache import PlanCache
from uncut_mpi.api.plan_maker import PlanMaker
from uncut_mpi.device.interface import Backend
from uncut_mpi.spmd.group import Group

_T = TypeVar("_T")


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

    def _begin_converted(
        self, call: str, convert: Callable[[], _T], asked_of: Callable[[_T], Mapping[str, object]]
    ) -> _T:
        """Open a call with what its arguments are converted to, which ranks compare; return that."""
        try:
            asked = convert()
        except Exception as error:
            self._gate.fail(call, error)
        self._gate.open(call, asked_of(asked))
        return asked
