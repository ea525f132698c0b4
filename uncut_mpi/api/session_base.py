"""What the calls of a session work on, and how each of them begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from uncut_mpi.api.calls import Calls
from uncut_mpi.api.gate import Gate
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.api.plan_cache import PlanCache
from uncut_mpi.api.plan_maker import PlanMaker
from uncut_mpi.api.wording import matrix_text
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

    def _begin_converted(self, call: str, convert: Callable[[], _T], text: Callable[[_T], str] | None = None) -> _T:
        """Open a call with what its arguments are converted to, which ranks compare; return that."""
        try:
            asked = convert()
        except Exception as error:
            self._gate.fail(call, error)
        self._gate.open(call, f"{call}({asked})" if text is None else text(asked))
        return asked

    def _begin_with(self, call: str, **matrices: object) -> None:
        """Open a call whose arguments are matrices of the session alone, by their names."""
        self._begin_converted(
            call,
            lambda: [self._store.check(f"{call}: {name}", matrix) for name, matrix in matrices.items()],
            lambda found: f"{call}({', '.join(map(matrix_text, found))})",
        )
