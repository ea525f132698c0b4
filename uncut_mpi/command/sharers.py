"""The ranks that share what a command does with host memory and with files."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from uncut_mpi.api.matrix import Matrix
from uncut_mpi.api.session import Session
from uncut_mpi.model.lines import lines_of


@dataclasses.dataclass(frozen=True, slots=True)
class Sharers:
    """The ranks of a session that see host memory of all ranks, those of the first node: they share its work."""

    rank: int  # this rank's place among them; `size` where it is none of them
    ranks: tuple[int, ...]  # which they are, ascending
    gather_values: Callable[[Any], list[Any]]  # the session's; of all its ranks

    @classmethod
    def of(cls, session: Session) -> Sharers:
        """Return those of a session. Local."""
        ranks = tuple(np.flatnonzero(session.machine.node_of == 0).tolist())
        rank = ranks.index(session.rank) if session.rank in ranks else len(ranks)
        return cls(rank, ranks, session.gather_values)

    @property
    def size(self) -> int:
        """How many they are."""
        return len(self.ranks)

    def lines(self, num_lines: int) -> slice:
        """Return which of so many lines are this rank's share. Local."""
        return slice(0, 0) if self.rank == self.size else lines_of(num_lines, self.rank, self.size)

    def array(self, matrix: Any) -> np.ndarray:
        """Return all of a matrix in host memory; where it is not to be seen zeros, of which nobody reads any."""
        if self.rank == self.size and isinstance(matrix, Matrix):
            return np.broadcast_to(np.zeros((), matrix.dtype.numpy), matrix.shape)
        array: np.ndarray = matrix.array
        return array
