"""
One product that all ranks have opened: it is started, asked and finished.

Between its opening and its closing barrier no rank may leave alone: what goes wrong is carried as a value and raised on
all ranks afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from uncut_mpi.api.binding import Binding
from uncut_mpi.api.plans import AnyPlan, Chunked, Plan, Trial
from uncut_mpi.api.request import Request
from uncut_mpi.device.interface import ALONE, Chain, ExecutionReport, Outcome, Run
from uncut_mpi.errors import (
    CapacityError,
    DeviceError,
    ParamError,
    StallError,
    is_agreed,
    release_frames,
)
from uncut_mpi.spmd import agreement

if TYPE_CHECKING:
    from uncut_mpi.api.calls import Calls

_R = TypeVar("_R")

_AFTER_STALL_S: Final = 1.0
"""How long a rank that has stalled waits for the others to say so too, at least."""


class CallResult(NamedTuple):
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
        Whether a matrix went through memory of ours because its own is its owner's alone (`PlanSummary.staged`).
    """

    tasks: int
    copy_bytes: int
    issue_s: float
    drain_s: float
    planned: bool
    staged: bool


class Call:
    """
    One product that all ranks have opened; `Calls.open` makes it. Start it once, then finish it. Both are collective.

    Until `let_go` it owns this rank's turn at the device, the epoch from which its tasks count in flags, and what the
    SoftBufs hold.

    Parameters
    ----------
    plan : Plan, Trial or Chunked
        By what all ranks run.
    keep : callable
        Takes the plan that comes in its place.
    binding : Binding
        What it runs first.
    planned : bool
        Whether something was planned or bound for it.
    traced : bool
        Whether the times of this rank's tasks are taken.

    Attributes
    ----------
    begun : bool
        Whether it was started.
    report : ExecutionReport
        Once it is finished: what this rank did.
    over, error, unheard : bool, BaseException or None, bool
        Of one in flight (`Flight`): whether all ranks are through, what any of them met, and whether nobody asks.
    """

    __slots__ = (
        *("_binding", "_calls", "_epoch", "_keep", "_patience_s", "_plan", "_planned", "_reported", "_request", "_run"),
        *("_traced", "begun", "error", "over", "report", "unheard"),
    )

    report: ExecutionReport

    def __init__(
        self,
        calls: Calls,
        request: Request,
        plan: AnyPlan,
        keep: Callable[[AnyPlan], None],
        binding: Binding,
        planned: bool,
        traced: bool,
    ) -> None:
        self._calls, self._request, self._plan, self._keep = calls, request, plan, keep
        self._binding, self._planned, self._traced = binding, planned, traced
        self.begun = self.over = self.unheard = False
        self.error: BaseException | None = None
        self._run: Run | None = None

    def arm(self) -> None:
        """Do what ranks have to do together before the product begins. Collective."""
        calls, executable = self._calls, self._binding.executable
        if self._traced:
            with agreement.collective(calls.group, "preparing a trace"):
                executable.prepare_trace()
        # Nothing may end anywhere during the longest task, and for what is allowed besides.
        self._patience_s = calls.timeout_s + executable.longest_s
        calls.gate.epoch = self._epoch = calls.binder.flags.begin(executable.span)

    def pass_by(self, outcome: Outcome) -> None:
        """Take the product as started, and over on this rank with such an outcome. Local."""
        self.begun = self._reported = True
        self.report = self._binding.executable.report_of(outcome, self._patience_s, traced=False)

    def start(self, *, waits: bool = False, chain: Chain = ALONE) -> None:
        """Begin the product, and return soon; or when this rank's part is over, if it waits for it anyway. Local."""
        if self._calls.gate.broken:  # by the call before this one, which nobody goes on after
            raise ParamError(self._calls.gate.why)
        executable = self._binding.executable
        alpha, beta = self._request.scalars
        self.begun, self._reported = True, waits  # one after another, of chunks
        epoch, timeout_s, traced = self._epoch, self._patience_s, self._traced
        if waits:
            self.report = executable.run(alpha=alpha, beta=beta, epoch=epoch, timeout_s=timeout_s, traced=traced)
        else:
            about: Any = {"alpha": alpha, "beta": beta, "epoch": epoch, "timeout_s": timeout_s}
            self._run = executable.start(**about, traced=traced, chain=chain)

    def may_finish(self, *, spin_s: float, waits: bool) -> bool:
        """Return whether this rank's part is over, after polling it for so long; unless `waits`, all others' too."""
        if not self._reported:
            assert self._run is not None
            if not self._run.poll(spin_s):
                return False
            self.report, self._reported = self._run.finish(), True
        return waits or self._calls.gate.tell(self.report.error)

    @property
    def may_be_followed(self) -> bool:
        """Whether another call may start before this one is over."""
        return self._run is not None and self._run.may_be_followed

    def precede(self, streams: list[int]) -> None:
        """Let streams of the caller's wait for the end, where another call may start before it. Local."""
        if self._run is not None:
            self._reported = False
            self._run.precede(streams)

    def finish(self, *, last: bool = True) -> None:
        """Wait until all ranks have done their parts; raise what any of them met. `last`: of what is written."""
        calls, gate = self._calls, self._calls.gate
        if not self._reported:
            assert self._run is not None
            self.report = self._run.finish()
        if gate.broken:  # by the call before this one, which others do not close either
            raise ParamError(gate.why)
        report = self.report
        calls.counters.add(report.tasks, report.copy_bytes)
        error = report.error
        limit_s = self._patience_s
        if isinstance(error, StallError):  # nothing has got on for so long anywhere, so the others have had their time
            limit_s = min(limit_s, max(_AFTER_STALL_S, limit_s / 4))
        try:
            verdict = gate.close(error, limit_s)
        except StallError as missing:
            gate.broken = True
            # What this rank awaited in vain says more than that the barrier was not reached, but not than who gave up.
            raise (error if isinstance(error, StallError) and not is_agreed(missing) else missing) from None
        if verdict is not None:
            wires, in_flight = verdict
            gate.broken |= in_flight
            agreement.raise_failure(wires, error, self._request.call)
        assert not report.aborted  # without a rank that reports why
        written = self._request.matrices[2].info
        if last and written.file:
            calls.store.end_writing(written)

    def attempt(self, step: Callable[..., _R], **how: Any) -> _R | None:
        """Make a step of a product in flight; an error is kept, and ends it. Local but for the end."""
        if self.error is None:
            try:
                return step(**how)
            except BaseException as error:
                self.fail(error)
                if not isinstance(error, Exception):  # an interrupt of the program
                    raise
        return None

    def fail(self, error: BaseException) -> None:
        """End a product in flight by an error. Local."""
        release_frames(error)
        self.error = error.with_traceback(None)
        if not is_agreed(error):
            self._calls.gate.end_in_flight(self._epoch, error)

    @property
    def result(self) -> CallResult:
        """What this rank did, once it is finished."""
        return CallResult(*self.report.figures, self._planned, self._binding.staged)

    def progress(self) -> float:
        """Return about what part of it is done on this rank, from 0 to 1. Any thread may ask."""
        return self._binding.executable.progress() if self.begun else 0.0

    @property
    def running(self) -> Binding | None:
        """What it runs, once it has begun. Any thread may ask."""
        return self._binding if self.begun else None

    def let_go(self) -> None:
        """Give the turn back, once. Local."""
        self._run = None
        if self._calls.now is self:
            self._calls.now = None
        self._calls.turns.release()


class TriedCall(Call):
    """A call by one of several plans, of which the fastest is looked for (`ScheduleOptions.tune`)."""

    __slots__ = ("_started_s",)

    _plan: Trial

    def start(self, *, waits: bool = False, chain: Chain = ALONE) -> None:
        """See `Call.start`."""
        self._started_s = time.perf_counter()
        super().start(waits=waits, chain=chain)

    def finish(self, *, last: bool = True) -> None:
        """See `Call.finish`; what is kept then is what the next call runs."""
        calls, trial = self._calls, self._plan
        try:
            super().finish(last=last)
        except (CapacityError, DeviceError) as error:  # C is lost, but the next call need not be
            if trial.may_go and is_agreed(error) and not calls.gate.broken:
                self._keep(calls.without(trial))
            raise
        self._keep(calls.judged(trial, time.perf_counter() - self._started_s))


class ChunkedCall(Call):
    """A product of chunks, one after another under one turn; `finish` binds and makes those after the first."""

    __slots__ = ("_results",)

    _plan: Chunked

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self._results = list[CallResult]()

    def finish(self, *, last: bool = True) -> None:
        """See `Call.finish`; the report is of the first chunk."""
        self._finish_one(0)
        first = self.report
        for number in range(1, len(self._plan.keys)):
            # Where ranks meet, so that what this chunk overwrites all have used.
            self._binding, self._planned = self._calls.bind_chunk(self._plan, self._request, number)
            self._traced = False
            self.arm()
            board = self._binding.executable.board
            board.words[board.rank] = 0  # else, until the chunk has begun, it would be as far as the one before
            self.start(waits=True)
            self._finish_one(number)
        self.report = first

    def _finish_one(self, number: int) -> None:
        super().finish(last=number + 1 == len(self._plan.keys))
        self.begun = False
        self._results.append(super().result)

    @property
    def result(self) -> CallResult:
        """Of all chunks."""
        tasks, copied, issue_s, drain_s, planned, staged = zip(*self._results, strict=True)
        return CallResult(sum(tasks), sum(copied), sum(issue_s), sum(drain_s), any(planned), any(staged))

    def progress(self) -> float:
        """See `Call.progress`."""
        return (len(self._results) + super().progress()) / len(self._plan.keys)


CALLS: Final[dict[type, type[Call]]] = {Plan: Call, Trial: TriedCall, Chunked: ChunkedCall}
"""What makes a call by each kind of plan."""
