"""A plan: one problem's schedule, bound and reusable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from uncut_mpi.api.entries import CallResult, PlanEntry, PlanSummary
from uncut_mpi.api.matrix import Matrix
from uncut_mpi.api.trace import Trace
from uncut_mpi.planning.schedule import Schedule

Operands = tuple[Matrix, Matrix, Matrix]


class GemmPlan:
    """
    One problem's schedule, bound and reusable; made by `Session.plan`.

    Use as a context manager, or call `close`.
    """

    def __init__(
        self,
        execute: Callable[[PlanEntry, Operands, Operands, float, float, Any], CallResult],
        trace: Callable[[PlanEntry, Operands, Operands, float, float, Any], Trace],
        discard: Callable[[PlanEntry], None],
        entry: PlanEntry,
        operands: Operands,
    ) -> None:
        self._execute, self._trace, self._discard = execute, trace, discard
        self._entry, self._operands = entry, operands

    @property
    def closed(self) -> bool:
        """Whether `close` was called on this rank, or the session has ended."""
        return self._entry.closed

    @property
    def summary(self) -> PlanSummary:
        """What the plan does, in numbers; while schedules are tried that of the one predicted best."""
        return self._entry.summary

    @property
    def schedule(self) -> Schedule:
        """The schedule: every task of every rank; while others are tried the one predicted best."""
        return self._entry.schedule

    @property
    def tuning(self) -> bool:
        """Whether calls still try schedules (`ScheduleOptions.tune`); the same on every rank."""
        return self._entry.trials is not None

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
        return self._execute(self._entry, self._operands, self._given(a, b, c), alpha, beta, stream)

    def trace(
        self,
        alpha: float = 1.0,
        beta: float = 0.0,
        *,
        a: Matrix | None = None,
        b: Matrix | None = None,
        c: Matrix | None = None,
        stream: Any = None,
    ) -> Trace:
        """
        Compute as `execute` does, and return when every task of every rank ran. Collective.

        Taking the times costs such a call a little; calls of `execute` pay nothing for it. What to make of them:
        ``uncut_mpi.view.Timeline.of(plan.schedule, trace.start_s, trace.end_s, "measured")``.

        Parameters
        ----------
        alpha, beta, a, b, c, stream
            As for `execute`.

        Returns
        -------
        Trace
            The same on every rank.

        Raises
        ------
        ParamError, UncutError
            As `execute`.
        """
        return self._trace(self._entry, self._operands, self._given(a, b, c), alpha, beta, stream)

    def _given(self, a: Matrix | None, b: Matrix | None, c: Matrix | None) -> Operands:
        if a is b is c is None:
            return self._operands
        first, second, result = self._operands
        return (a if a is not None else first, b if b is not None else second, c if c is not None else result)

    def close(self) -> None:
        """Release streams and events of this plan. Not collective; a second call does nothing."""
        if not self._entry.closed:
            self._entry.closed = True
            self._discard(self._entry)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a GemmPlan belongs to its session and process, and cannot be copied or sent: make it where it is needed, "
            "session.plan(a, b, c), on all ranks; its .schedule and .summary are values, which can"
        )

    def __enter__(self) -> GemmPlan:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()
