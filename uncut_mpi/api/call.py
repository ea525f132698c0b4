"""One product from its first task to the verdict of all ranks: a value that is opened, started, asked and finished."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from uncut_mpi.api.binding import Binding
from uncut_mpi.api.chunked import AnyPlan, Chunked
from uncut_mpi.api.request import Request
from uncut_mpi.api.trials import Trial
from uncut_mpi.device.interface import ExecutionReport, Run
from uncut_mpi.errors import CapacityError, DeviceError, StallError, is_agreed
from uncut_mpi.spmd import agreement

if TYPE_CHECKING:
    from uncut_mpi.api.calls import Calls


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
    binding : Binding
        What it runs.
    planned : bool
        Whether something was planned or bound for it, so that ranks meet again before it begins.
    traced : bool
        Whether the times of this rank's tasks are taken.

    Attributes
    ----------
    report : ExecutionReport
        Once it is finished: what this rank did.
    """

    __slots__ = ("_began", "_binding", "_calls", "_planned", "_request", "_run", "_traced", "report")

    report: ExecutionReport

    def __init__(self, calls: Calls, request: Request, binding: Binding, planned: bool, traced: bool) -> None:
        self._calls, self._request, self._binding = calls, request, binding
        self._planned, self._traced = planned, traced
        self._began = False

    def start(self, *, waits: bool = False) -> None:
        """Begin the product, and return soon; or when this rank's part is over, if it waits for it anyway."""
        calls, executable = self._calls, self._binding.executable
        if self._traced:
            with agreement.collective(calls.group, "preparing a trace"):
                executable.prepare_trace()
        if self._planned or self._traced:
            calls.group.barrier()
        alpha, beta = self._request.scalars
        calls.gate.epoch = epoch = calls.binder.flags.begin(executable.span)
        self._began = True
        self._run: Run | ExecutionReport = (executable.run if waits else executable.start)(
            alpha=alpha,
            beta=beta,
            epoch=epoch,
            timeout_s=self._patience_s,
            traced=self._traced,
        )

    def poll(self) -> bool:
        """Get on without waiting; return whether `finish` has nothing of this rank's to wait for. Local."""
        return not isinstance(self._run, Run) or self._run.poll()

    def finish(self) -> None:
        """Wait until all ranks have done their parts; raise what any of them met."""
        self._end()
        self._note_written()

    def _note_written(self) -> None:
        written = self._request.matrices[2]
        if written.info.file:
            self._calls.store.is_written(written, written=True)

    def _end(self) -> None:
        calls, gate, run = self._calls, self._calls.gate, self._run
        self.report = report = run.finish() if isinstance(run, Run) else run
        calls.counters.add(report)
        error = report.error
        try:
            if gate.close(error, self._patience_s):  # with every rank's verdict
                # After a stall, or with a context that is dead, tasks may still be in flight somewhere, so
                # nothing may be freed or reused any more.
                lost = isinstance(error, StallError) or getattr(error, "fatal", False)
                gate.broken |= any(calls.group.allgather_objects(lost))
                agreement.collective_result(calls.group, error, "gemm")
        except StallError as missing:
            gate.broken = True
            # What this rank waited for in vain says more than that the barrier was not reached.
            raise (error if isinstance(error, StallError) else missing) from None
        assert not report.aborted  # without a rank that reports why

    @property
    def _patience_s(self) -> float:
        """For how long nothing may end anywhere: during the longest task, and what is allowed besides."""
        return self._calls.timeout_s + self._binding.executable.longest_s

    @property
    def result(self) -> CallResult:
        """What this rank did, once it is finished."""
        report, staged = self.report, self._binding.staged
        figures = report.tasks, report.copy_bytes, report.issue_s, report.drain_s
        return tuple.__new__(CallResult, (*figures, self._planned, staged))  # half the time of its constructor

    def progress(self) -> float:
        """Return about what part of it is done on this rank, from 0 to 1. Any thread may ask."""
        return self._binding.executable.progress() if self._began else 0.0

    def let_go(self) -> None:
        """Give the turn back. Local; a second call does nothing."""
        self._calls.now = None
        self._calls.turns.release()


class TriedCall(Call):
    """A call by one of several plans, of which the fastest is looked for (`ScheduleOptions.tune`)."""

    __slots__ = ("_keep", "_started_s", "_trial")

    def __init__(self, trial: Trial, keep: Callable[[AnyPlan], None], *about: Any) -> None:
        super().__init__(*about)
        self._trial, self._keep = trial, keep

    def start(self, *, waits: bool = False) -> None:
        """See `Call.start`."""
        self._started_s = time.perf_counter()
        super().start(waits=waits)

    def finish(self) -> None:
        """See `Call.finish`; what is kept then is what the next call runs."""
        calls, trial = self._calls, self._trial
        try:
            super().finish()
        except (CapacityError, DeviceError) as error:  # C is lost, but the next call need not be
            if trial.may_go and is_agreed(error) and not calls.gate.broken:
                self._keep(calls.without(trial))
            raise
        self._keep(calls.judged(trial, time.perf_counter() - self._started_s))


class ChunkedCall(Call):
    """A product of chunks, one after another: each is a call of its own, bound when it comes, under one turn."""

    __slots__ = ("_chunked", "_each")

    def __init__(self, chunked: Chunked, calls: Calls, request: Request, traced: bool) -> None:
        self._calls, self._request, self._chunked, self._traced = calls, request, chunked, traced
        self._each: list[Call] = []
        self._planned = False

    def start(self, *, waits: bool = False) -> None:
        """See `Call.start`; of the first chunk."""
        calls, number = self._calls, len(self._each)
        binding, is_new = calls.bind_chunk(self._chunked, self._request, number)
        self._planned |= is_new
        # A barrier before each, as before calls that were planned: what it overwrites the last one has used.
        self._each.append(Call(calls, self._request, binding, planned=True, traced=self._traced and not number))
        self._each[-1].start(waits=waits)

    def poll(self) -> bool:
        """See `Call.poll`."""
        return self._each[-1].poll() and len(self._each) == len(self._chunked.keys)

    def finish(self) -> None:
        """See `Call.finish`."""
        self._each[-1]._end()
        while len(self._each) < len(self._chunked.keys):
            self.start(waits=True)
            self._each[-1]._end()
        self._note_written()
        self.report = self._each[0].report

    @property
    def result(self) -> CallResult:
        """Of all chunks."""
        every = [call.result for call in self._each]
        tasks, copied, issue_s, drain_s = (sum(of_all) for of_all in zip(*(one[:4] for one in every), strict=True))
        staged = any(one.staged for one in every)
        return CallResult(int(tasks), int(copied), issue_s, drain_s, self._planned, staged)

    def progress(self) -> float:
        """See `Call.progress`."""
        each = self._each
        return (len(each) - 1 + each[-1].progress()) / len(self._chunked.keys) if each else 0.0
