"""A plan: one problem's schedule, bound and reusable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from uncut_mpi.api.matrix import Matrix
from uncut_mpi.errors import ParamError

if TYPE_CHECKING:
    from uncut_mpi.api.calls import PlanEntry
    from uncut_mpi.planning.schedule import Schedule

Operands = tuple[Matrix, Matrix, Matrix]


@dataclasses.dataclass(frozen=True, slots=True)
class CallResult:
    """
    What one product did on this rank.

    Attributes
    ----------
    tasks : int
        Tasks this rank executed.
    copy_bytes : int
        Bytes its copies moved.
    issue_s, drain_s : float
        Host time to issue everything, and from then until all of it had finished.
    planned : bool
        Whether this call had to plan or bind first.
    staged : bool
        Whether a matrix went through memory of our own because it cannot be exported.
    """

    tasks: int
    copy_bytes: int
    issue_s: float
    drain_s: float
    planned: bool
    staged: bool


@dataclasses.dataclass(frozen=True, slots=True)
class PlanSummary:
    """
    What a plan does, in numbers.

    Attributes
    ----------
    scheduler : str
        Name of the scheduler.
    grid : tuple of int
        Process grid (rows, cols).
    tile : int
        Tile edge (elements).
    tasks : int
        Tasks of all ranks.
    bytes_by_link : dict
        Bytes copied per kind of link.
    predicted_s : float
        Time the planner expects.
    plan_s : float
        Time rank 0 took to plan.
    digest : str
        Of the schedule, the same on all ranks.
    softbuf_bytes : list of int
        SoftBuf each rank needs.
    """

    scheduler: str
    grid: tuple[int, int]
    tile: int
    tasks: int
    bytes_by_link: dict[str, int]
    predicted_s: float
    plan_s: float
    digest: str
    softbuf_bytes: list[int]


class GemmPlan:
    """
    One problem's schedule, bound and reusable; made by `Session.plan`.

    Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        execute: Callable[[PlanEntry, Operands, Operands, float, float, Any], CallResult],
        discard: Callable[[PlanEntry], None],
        entry: PlanEntry,
        operands: Operands,
    ) -> None:
        self._execute, self._discard, self._entry, self._operands = execute, discard, entry, operands
        self.closed = False

    @property
    def summary(self) -> PlanSummary:
        """What the plan does, in numbers."""
        return self._entry.summary

    @property
    def schedule(self) -> Schedule:
        """The schedule: every task of every rank."""
        return self._entry.schedule

    def execute(
        self,
        alpha: float = 1.0,
        beta: float = 0.0,
        *,
        a: Matrix | None = None,
        b: Matrix | None = None,
        c: Matrix | None = None,
        stream: Any = None,
    ) -> CallResult:
        """
        Compute C := alpha op(A) op(B) + beta C. Collective.

        Parameters
        ----------
        alpha, beta : float
            Scalars; beta must be 0 if the plan was made with ``reads_c=False``.
        a, b, c : Matrix, optional
            Instead of the matrices planned with: same shape, type, order, leading dimension and
            location.
        stream : optional
            Stream whose earlier work must be done first; the current one by default.

        Raises
        ------
        ParamError
            If an argument does not fit the plan or ranks pass different ones.
        UncutError
            If a rank failed while computing; C is undefined then.
        """
        if self.closed:
            raise ParamError("the plan is closed: make a new one")
        given = tuple(new if new is not None else old for new, old in zip((a, b, c), self._operands, strict=True))
        return self._execute(self._entry, self._operands, (given[0], given[1], given[2]), alpha, beta, stream)

    def close(self) -> None:
        """Release streams and events of this plan. A second call does nothing."""
        if not self.closed:
            self.closed = True
            self._discard(self._entry)

    def __enter__(self) -> GemmPlan:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()
