"""One product from its first task to the verdict of all ranks: a value that is opened, started, asked and finished."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from uncut_mpi.api.binding import Binding
from uncut_mpi.api.chunked import AnyPlan
from uncut_mpi.api.request import Request
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

    Until it is finished it owns this rank's turn at the device, the epoch from which its tasks count in flags, and what
    the SoftBufs hold. One of chunks runs these one after another, each with an epoch of its own.

    Parameters
    ----------
    binding : Binding or None
        What it runs. None for one of chunks, which are bound when they come.
    planned : bool
        Whether something was planned or bound for it, so that ranks meet again before it begins.
    keep : callable
        Takes what comes in the place of a plan that is tried.
    traced : bool
        Whether the times of this rank's tasks are taken; of the first chunk.

    Attributes
    ----------
    report : ExecutionReport
        Once it is finished: what this rank did; of the first chunk.
    """

    __slots__ = (
        "_binding",
        "_calls",
        "_chunk",
        "_keep",
        "_num_chunks",
        "_others",
        "_plan",
        "_planned",
        "_request",
        "_run",
        "_staged",
        "_started_s",
        "_traced",
        "report",
    )

    def __init__(
        self,
        calls: Calls,
        request: Request,
        plan: AnyPlan,
        binding: Binding | None,
        planned: bool,
        keep: Callable[[AnyPlan], None],
        traced: bool,
    ) -> None:
        self._calls, self._request, self._plan, self._binding, self._keep = calls, request, plan, binding, keep
        self._planned, self._traced, self._num_chunks = planned, traced, plan.summary.chunks
        self._chunk, self._staged = 0, False
        self._others: list[ExecutionReport] = []
        self._run: Run | None = None  # while something of it runs

    def start(self) -> None:
        """Begin the product, and return soon."""
        calls, written = self._calls, self._request.matrices[2]
        try:
            if written.info.file:
                calls.store.is_written(written, written=False)
            if self._plan.tuning:
                self._started_s = time.perf_counter()
            calls.now = self
            self._begin()
        except BaseException as error:
            self._fail(error)
            self.let_go()
            raise

    def poll(self) -> bool:
        """Get on without waiting; return whether `finish` has nothing of this rank's to wait for. Local."""
        return self._run is None or (self._run.poll() and self._chunk + 1 == self._num_chunks)

    def finish(self) -> None:
        """Wait until all ranks have done their parts; raise what any of them met."""
        plan = self._plan
        try:
            self._end()
            while self._chunk < self._num_chunks:
                self._begin()
                self._end()
            if plan.tuning:
                self._keep(self._calls.judged(plan, time.perf_counter() - self._started_s))
            written = self._request.matrices[2]
            if written.info.file:
                self._calls.store.is_written(written, written=True)
        except BaseException as error:
            self._fail(error)
            raise
        finally:
            self.let_go()

    @property
    def result(self) -> CallResult:
        """What this rank did, once it is finished."""
        one, others = self.report, self._others
        figures: tuple[float, ...] = (one.tasks, one.copy_bytes, one.issue_s, one.drain_s)
        for more in others:
            added = more.tasks, more.copy_bytes, more.issue_s, more.drain_s
            figures = tuple(map(operator.add, figures, added))
        return tuple.__new__(CallResult, (*figures, self._planned, self._staged))  # half the time of its constructor

    def progress(self) -> float:
        """Return about what part of it is done on this rank, from 0 to 1. Any thread may ask."""
        binding = self._binding if self._run is not None else None
        return (self._chunk + (0.0 if binding is None else binding.executable.progress())) / self._num_chunks

    def let_go(self) -> None:
        """Give the turn back, if it is not given back yet. Local."""
        self._calls.now = None
        self._calls.turns.release()

    def _begin(self) -> None:
        """Begin what comes next: all of the product, or a chunk."""
        calls, binding, traced = self._calls, self._binding, self._traced and self._chunk == 0
        if self._num_chunks > 1 or binding is None:
            binding, is_new = calls.bind_chunk(self._plan, self._request, self._chunk)
            self._binding = binding
            self._planned |= is_new
        executable = binding.executable
        if traced:
            with agreement.collective(calls.group, "preparing a trace"):
                executable.prepare_trace()
        # Of chunks, too, each overwrites what the last one has used.
        if self._planned or traced or self._num_chunks > 1:
            calls.group.barrier()
        alpha, beta = self._request.scalars
        self._run = executable.start(
            alpha=alpha,
            beta=beta,
            epoch=calls.binder.flags.begin(executable.span),
            timeout_s=calls.timeout_s,
            traced=traced,
        )
        self._staged |= binding.staged

    def _end(self) -> None:
        """Wait for the end of what has begun, and pass the closing barrier with every rank's verdict."""
        calls, gate, run = self._calls, self._calls.gate, self._run
        assert run is not None  # it has begun
        try:
            report = run.finish()
        finally:
            self._run = None
        if self._chunk:
            self._others.append(report)
        else:
            self.report = report
        self._chunk += 1  # whatever others still do
        calls.counters.add(report)
        error = report.error
        try:
            if gate.close(error, calls.timeout_s):
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

    def _fail(self, error: BaseException) -> None:
        """Leave a plan out that is tried and cannot run here: C is lost, but the next call need not be."""
        cannot = isinstance(error, CapacityError | DeviceError) and is_agreed(error)
        if cannot and self._plan.may_go and not self._calls.gate.broken:
            self._keep(self._calls.without(self._plan))
