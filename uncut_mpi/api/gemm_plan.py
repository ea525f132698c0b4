"""A plan: one problem's schedule, bound and reusable."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict

import numpy as np

from uncut_mpi.api.batch import Batch
from uncut_mpi.api.call import CallResult
from uncut_mpi.api.calls import Calls
from uncut_mpi.api.flight import Handle, call_without_waiting
from uncut_mpi.api.gate import end_call, public_call
from uncut_mpi.api.grips import is_array
from uncut_mpi.api.keys import PlanKey
from uncut_mpi.api.matrix import Matrix
from uncut_mpi.api.plans import AnyPlan, PlanSummary, Trial
from uncut_mpi.api.request import Choices, Operands, Request, Scalars, infos_of
from uncut_mpi.api.typed import overload
from uncut_mpi.device.interface import TaskTimes
from uncut_mpi.errors import ParamError
from uncut_mpi.instead import absent, bad_call
from uncut_mpi.model.arguments import Number, counted
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.units import time_text

if TYPE_CHECKING:
    from typing_extensions import Unpack


_Two: TypeAlias = tuple[Any, Any]
_Three: TypeAlias = tuple[Any, Any, Any]


class _With(TypedDict, total=False):
    a: Any
    b: Any
    c: Any
    scale_a: float | None
    scale_b: float | None
    stream: Any


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """
    When the tasks of one call ran.

    Attributes
    ----------
    start_s, end_s : ndarray of float64, shape (number of tasks,)
        One per task of the plan's schedule, from the moment that the first task of any rank began. NaN for a JOIN,
        which no device executes.

    Notes
    -----
    On a GPU, times are those of events on the task's stream, so that a task that waits for the multiprocessors or
    a copy engine runs already. Clocks of different ranks are compared by one event each, to some 10 µs.
    """

    start_s: np.ndarray
    end_s: np.ndarray


def merge_times(num_tasks: int, of_ranks: Sequence[TaskTimes]) -> Trace:
    """Return the times of all ranks as one trace."""
    start, end = np.full((2, num_tasks), np.nan)
    for times in of_ranks:
        start[times.tasks], end[times.tasks] = times.start_s, times.end_s
    first = np.nanmin(start) if np.isfinite(start).any() else 0.0
    return Trace(start - first, end - first)


class GemmPlan:
    """
    One problem's schedule, bound and reusable; made by `Session.plan`.

    Use as a context manager, or call `close`.
    """

    def __init__(
        self, session: object, calls: Calls, plan: AnyPlan, operands: Operands, choices: Choices, given: tuple[Any, ...]
    ) -> None:
        self._session = session  # which is in use as long as its plans are
        self._given = given  # as the caller has them, of which `operands` may be one each for a batch
        self._calls, self._operands, self._choices = calls, operands, choices
        # By the parts that their owner alone can use, on which schedules depend.
        self._plans: dict[tuple[tuple[int, ...], tuple[int, ...]], AnyPlan] = {}
        self._keep(plan)
        self._arrays: dict[str, Matrix] = {}  # made of arrays that the last calls were given
        problem = plan.key.problem
        self._scales_only, self._reads_c, self._closed = problem.scales_only, problem.reads_c, False

    @property
    def closed(self) -> bool:
        """Whether `close` was called on this rank, or the session has ended."""
        return self._closed or self._calls.gate.closed

    @property
    def summary(self) -> PlanSummary:
        """
        What the plan does, in numbers; while schedules are tried that of the one predicted best.

        Of the last call, if its matrices need another schedule than those planned with (`PlanSummary.staged`).
        """
        return self._plan.summary

    @property
    def schedule(self) -> Schedule:
        """The schedule that `summary` is of: every task of every rank. Of a product in chunks that of the first one."""
        return self._plan.schedule

    @property
    def problem(self) -> GemmProblem:
        """What the plan computes: a product of column-major matrices (`GemmProblem.swapped`), in chunks or not."""
        return self._plan.key.problem

    @property
    def placement(self) -> Placement:
        """Where the A, B and C of `problem` live."""
        return self._plan.key.placement

    @property
    def tuning(self) -> bool:
        """Whether calls still try schedules (`ScheduleOptions.tune`); the same on every rank."""
        return isinstance(self._plan, Trial)

    @overload
    def execute(
        self, alpha: Number = ..., beta: Number = ..., *, wait: Literal[True] = ..., **given: Unpack[_With]
    ) -> CallResult: ...
    @overload
    def execute(
        self, alpha: Number = ..., beta: Number = ..., *, wait: Literal[False], **given: Unpack[_With]
    ) -> Handle[CallResult]: ...
    @overload
    def execute(self, alpha: Number = ..., beta: Number = ..., *, wait: bool, **given: Unpack[_With]) -> Any: ...
    def execute(
        self,
        alpha: Number = 1.0,
        beta: Number = 0.0,
        *,
        a: Any = None,
        b: Any = None,
        c: Any = None,
        scale_a: float | None = None,
        scale_b: float | None = None,
        stream: Any = None,
        wait: bool = True,
        **unknown: Any,
    ) -> Any:
        """
        Compute C := alpha op(A) op(B) + beta C. Collective.

        Parameters
        ----------
        alpha, beta : float or complex
            Scalars; beta must be 0 if the plan was made with ``reads_c=False``.
        a, b, c : Matrix, Batch or array, optional
            Instead of the matrices planned with: same shape, type, order, leading dimension and
            location. Where others of them can be used by their owner alone, the first such call plans.
            Instead of a Matrix each rank may pass an array, its part as of `Session.distribute`; one without elements
            where it has none. Of a matrix of `Session.distribute_parts` it passes a list of its parts. They are made a
            matrix, which takes some milliseconds and page-locks host arrays, and are kept until the plan is given
            others or goes. Passing the same ones again makes nothing.
        scale_a, scale_b : float
            As of `Session.gemm`.
        stream : optional
            Stream whose earlier work must be done first; the current one by default.
        wait : bool, default True
            False: return when the product is on its way, with a `Handle` for its end. The same on all ranks.

        Returns
        -------
        CallResult or Handle
            What this rank did, or what waits for it.

        Raises
        ------
        ParamError
            If an argument does not fit the plan or ranks pass different ones.
        UncutError
            If a rank failed while computing; C is undefined then.
        """
        try:  # as `public_call` does, and 1.5 µs quicker
            if unknown:
                raise TypeError(bad_call(GemmPlan.execute, unknown))
            return self._execute((alpha, beta), (a, b, c), (scale_a, scale_b), stream, wait)
        except BaseException as error:
            del self, a, b, c, stream, unknown
            end_call(error)
            raise

    @public_call
    def trace(
        self,
        alpha: Number = 1.0,
        beta: Number = 0.0,
        *,
        a: Any = None,
        b: Any = None,
        c: Any = None,
        scale_a: float | None = None,
        scale_b: float | None = None,
        stream: Any = None,
    ) -> Trace:
        """
        Compute as `execute` does, and return when every task of every rank ran. Collective.

        Of a product in chunks (`PlanSummary.chunks`) the times are those of the first one.

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
        given = self._made("trace", (a, b, c))
        with self._calls.gate.exclusive():
            request, plan = self._request("trace", (alpha, beta), given, (scale_a, scale_b), stream)
            keep: Callable[[AnyPlan], None] = self._keep
            if isinstance(plan, Trial):  # of which this is no call
                keep(plan)
                plan, keep = plan.plans[0], lambda kept: None
            call = self._calls.make(request, plan, keep, traced=True)
            return merge_times(len(self.schedule.tasks), self._calls.group.allgather_objects(call.report.times))

    def progress(self) -> float:
        """
        Return about what part of a call in flight is done on this rank, from 0 to 1; 0 if there is none. Local.

        For other threads than the one that calls: products are counted, or where there are none copies. A GPU says from
        time to time how far it is.
        """
        return self._calls.progress()

    def close(self) -> None:
        """Release streams and events of this plan. Not collective; a second call does nothing."""
        if not self._closed:
            self._closed = True
            self._arrays.clear()
            if not self._calls.gate.over:
                self._calls.flight.drain()
                for plan in self._plans.values():
                    self._calls.binder.drop(plan)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a GemmPlan belongs to its session and process, and cannot be copied or sent: make it where it is needed, "
            "session.plan(a, b, c), on all ranks; its .schedule and .summary are values, which can"
        )

    def __enter__(self) -> GemmPlan:
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    if not TYPE_CHECKING:
        __getattr__ = absent

    def _keep(self, plan: AnyPlan) -> None:
        self._plan = self._plans[plan.key.private, plan.key.files] = plan

    def _plan_for(self, matrices: Operands) -> AnyPlan | PlanKey:
        """Return the plan for matrices, or by which key to make it."""
        if matrices == self._operands and len(self._plans) == 1:  # as mostly
            return self._plan
        key = self._plan.key.for_others(infos_of(self._operands), infos_of(matrices))
        return self._plans.get((key.private, key.files), key)

    def _request(
        self, call: str, factors: _Two, given: _Three, scales: _Two, stream: Any, wait: object = True
    ) -> tuple[Request, AnyPlan | PlanKey]:
        """Return what a caller asks of this plan, and `_plan_for` it; an error is raised on all ranks."""
        calls = self._calls
        try:
            calls.backend.mark_caller(stream)  # first: the device comes to it meanwhile
            if wait is not True:
                call = call_without_waiting(call, wait)
            scalars = Scalars.of(*factors)
            self._check_open()
            if self._scales_only and scalars.alpha != 0:
                raise ParamError(
                    f"alpha = {scalars.alpha}, but the plan was made with scales_only=True: plan without it"
                )
            if not self._reads_c and scalars.beta != 0:
                raise ParamError(
                    f"beta = {scalars.beta}, but the plan was made with reads_c=False: plan with reads_c=True"
                )
            (a, b, c), (first, second, result) = given, self._given
            matrices = calls.store.operands(
                first if a is None else a, second if b is None else b, result if c is None else c, self._choices
            )
            scalars = scalars.scaled(matrices[0].info.dtype, *scales)
            plan = self._plan_for(matrices)
        except Exception as error:
            calls.gate.fail(call, error)
        return tuple.__new__(Request, (call, matrices, scalars, self._choices, None)), plan  # as in `Scalars.of`

    def _made(self, call: str, given: _Three) -> _Three:
        """Return operands with arrays of the ranks made matrices; collective if there are any."""
        arrays = {
            name: (planned, one)
            for name, planned, one in zip("ABC", self._operands, given, strict=True)
            if one is not None and not isinstance(one, Matrix | Batch)
        }
        if not arrays:
            return given

        store = self._calls.store
        with self._calls.gate.call(call) as open_with:
            self._check_open()
            for name, (planned, one) in arrays.items():
                several = planned.layout is None and planned.info.view is None and isinstance(one, tuple | list)
                if several and all(map(is_array, one)):
                    if len(one) != len(planned.rectangles):
                        found = counted(len(planned.rectangles), "part")
                        raise ParamError(
                            f"{name} is of {counted(len(one), 'array')}, and this rank has {found}: pass one for each"
                        )
                elif planned.layout is None or not is_array(one):
                    store.check(name, one)
            told = "an array (a rank without a part passes one without elements)"
            open_with(**dict.fromkeys(map(str.lower, arrays), told))
            for name, (planned, one) in arrays.items():
                try:
                    self._arrays[name] = store.like(planned, one, self._arrays.get(name))
                except ParamError as error:  # the same on all ranks
                    error.args = (f"{name}: {error}",)
                    raise
        a, b, c = (self._arrays[name] if name in arrays else one for name, one in zip("ABC", given, strict=True))
        return a, b, c

    def _check_open(self) -> None:
        if self._closed:
            raise ParamError("the plan is closed: make a new one")

    def __repr__(self) -> str:
        done = self._plan.summary
        return f"<GemmPlan: {done.scheduler}, {done.how}, {'closed' if self.closed else time_text(done.predicted_s)}>"

    def _execute(
        self, factors: _Two, given: _Three, scales: _Two, stream: Any, wait: object
    ) -> CallResult | Handle[CallResult]:
        a, b, c = given
        if not a is b is c is None:  # mostly they are, and this is part of every call
            given = self._made("execute", given)
        with self._calls.gate.exclusive():
            request, plan = self._request("execute", factors, given, scales, stream, wait)
            if wait is True:
                return self._calls.run(request, plan, self._keep)
            begun = self._calls.launch(request, plan, self._keep)
            return Handle(self, self._calls.flight, begun, lambda call: call.result)
