"""
The calls that multiply, one after another: each is opened, started, asked and finished.

A repeated call is: look the plan up, opening barrier, fire, drain, closing barrier. The opening
barrier is that of every call of a session (`gate`). The devices are taken after it, when all ranks are
known to be in this call: a rank that makes another one never waits for them. Between it and the closing
barrier no rank may leave alone: what goes wrong is carried as a value and raised on all ranks afterwards.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import numpy as np

from uncut_mpi.api.binding import Binder, Binding, digest_of
from uncut_mpi.api.control import Control
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.flight import Flight
from uncut_mpi.api.gate import Gate
from uncut_mpi.api.keys import PlanKey
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.api.plan_cache import PlanCache
from uncut_mpi.api.plan_maker import PlanMaker
from uncut_mpi.api.plans import AnyPlan, Chunked, Plan, Trial, fastest
from uncut_mpi.api.request import Choices, Operands, Request
from uncut_mpi.api.searches import Searches
from uncut_mpi.device.interface import ALONE, Backend, Chain, ExecutionReport, Run
from uncut_mpi.errors import (
    CapacityError,
    DeviceError,
    ParamError,
    PlanError,
    ScheduleError,
    StallError,
    UncutError,
    is_agreed,
    release_frames,
)
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.chunks import Chunks
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.meetings import NEWS, READY
from uncut_mpi.spmd.turns import DeviceTurns

_FIRST_FLAGS = 1 << 12
_NO_DIGEST = bytes(16)

_R = TypeVar("_R")


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
            self._run.precede(streams)
            self._reported = False

    def finish(self, *, last: bool = True) -> None:
        """Wait until all ranks have done their parts; raise what any of them met. `last`: of what is written."""
        calls, gate = self._calls, self._calls.gate
        if not self._reported:
            assert self._run is not None
            self.report = self._run.finish()
        if gate.broken:  # by the call before this one, which others do not close either
            raise ParamError(gate.why)
        report = self.report
        calls.counters.add(report)
        error = report.error
        try:
            verdict = gate.close(error, self._patience_s)
        except StallError as missing:
            gate.broken = True
            # What this rank waited for in vain says more than that the barrier was not reached.
            raise (error if isinstance(error, StallError) else missing) from None
        if verdict is not None:
            wires, in_flight = verdict
            gate.broken |= in_flight
            agreement.raise_failure(wires, error, "gemm")
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
        report, staged = self.report, self._binding.staged
        figures = report.tasks, report.copy_bytes, report.issue_s, report.drain_s
        return tuple.__new__(CallResult, (*figures, self._planned, staged))  # half the time of its constructor

    def progress(self) -> float:
        """Return about what part of it is done on this rank, from 0 to 1. Any thread may ask."""
        return self._binding.executable.progress() if self.begun else 0.0

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


_CALLS: Final[dict[type, type[Call]]] = {Plan: Call, Trial: TriedCall, Chunked: ChunkedCall}
"""What makes a call by each kind of plan."""


class Calls:
    """
    Makes the calls of a session; what belongs to one of them alone is in its `Call`.

    Parameters
    ----------
    control : Control
        What the ranks share.
    device_key : str
        Identifies this rank's device.
    max_plans : int
        Plans that one-shot calls keep.
    timeout_s : float
        A call fails when nothing finishes anywhere for so long.
    arrival_timeout_s : float or None
        How long to wait for the others to begin a call, and for devices.

    Attributes
    ----------
    turns : DeviceTurns
        Gives devices to calls.
    flight : Flight
        Those that go on by themselves.
    gate : Gate
        Opens and closes all calls of the session.
    binder : Binder
        Binds plans to matrices.
    searches : Searches
        For better plans, beside the calls.
    plans : PlanCache
        Those of one-shot calls.
    now : Call or None
        The one that runs on this rank, while one does; another thread may read it.
    """

    def __init__(
        self,
        group: Group,
        backend: Backend,
        store: MatrixStore,
        counters: Counters,
        maker: PlanMaker,
        *,
        control: Control,
        device_key: str,
        max_plans: int,
        timeout_s: float,
        arrival_timeout_s: float | None,
    ) -> None:
        self.group, self.backend, self.store, self.counters = group, backend, store, counters
        self.timeout_s, self._arrival_timeout_s = timeout_s, arrival_timeout_s
        self.maker = maker
        self.now: Call | None = None
        self.control = control
        self.turns = DeviceTurns(group, device_key, control.turns)
        try:
            self.flight = Flight(group, backend)
            self.gate = Gate(group, self.turns, control, self.flight, arrival_timeout_s)
            self.binder = Binder(group, backend, store, counters, control)
            self.binder.flags.before_reset = self.flight.drain
            about = maker.machine, self.binder.fits
            self.searches = Searches(*about, verify=maker.verify, active=group.rank == 0)
            self.plans = PlanCache(max_plans, self.binder.drop, self.searches)
            flags = self.binder.flags
            try:
                flags.ensure(np.full(group.size, 4 * _FIRST_FLAGS, np.int64))
            except BaseException as error:
                if is_agreed(error) and not group.stalled:  # what peers have mapped is unmapped before it is freed
                    flags.close()
                raise
        except BaseException:
            self.turns.close()
            raise

    def run(
        self, request: Request, plan: AnyPlan | PlanKey, keep: Callable[[AnyPlan], None], *, traced: bool = False
    ) -> Call:
        """Open, start and finish a product; parameters are those of `open`. Collective."""
        call = self.open(request, plan, keep, traced=traced)
        try:
            call.arm()
            call.start(waits=True)
            call.finish()
        finally:
            call.let_go()
        return call

    def launch(self, request: Request, plan: AnyPlan | PlanKey, keep: Callable[[AnyPlan], None]) -> Call:
        """
        Open a product and let it go on by itself; parameters are those of `open`. Collective.

        What needs ranks together more than once is done when this returns: the first call of a plan of several that are
        tried, or of one in chunks.
        """
        call = self.open(request, plan, keep, follows=True)
        try:
            if type(call) is Call:
                call.arm()
                self.flight.add(call)
                return call
            self.flight.drain()
            call.arm()
            call.start(waits=True)
            call.attempt(call.finish)
        except BaseException:
            call.let_go()
            raise
        call.let_go()
        call.over = True
        return call

    def open(
        self,
        request: Request,
        plan: AnyPlan | PlanKey,
        keep: Callable[[AnyPlan], None],
        *,
        traced: bool = False,
        follows: bool = False,
    ) -> Call:
        """
        Return one product that all ranks agree to make, with this rank's turn at its device. Collective.

        Parameters
        ----------
        plan : Plan, Trial, Chunked or PlanKey
            The plan to run, or the key of a plan that is still to be made.
        keep : callable
            Takes the plan that all ranks use, and later what comes in its place.
        traced : bool, default False
            Take the times of this rank's tasks.
        follows : bool, default False
            Leave earlier calls in flight, if all ranks are ready for this one.
        """
        binding, told = self._meet(request, plan, follows=follows)
        all_ready = told == READY
        written = request.matrices[2].info
        try:
            self.turns.acquire(self._arrival_timeout_s, self.flight.drain)
            if follows and (written.file or not all_ready):
                self.flight.drain()
        except StallError:
            self.gate.broken = True  # some ranks may hold their devices by now
            raise
        try:
            if not all_ready:
                ways = self._take if told & NEWS else self.prepare
                plan, binding = ways(plan, request.matrices, request.choices)
            if TYPE_CHECKING:  # ready or just prepared
                assert not isinstance(plan, PlanKey)
                assert binding is not None
            keep(plan)
            if written.file:
                self.store.begin_writing(written)
            self.now = call = _CALLS[type(plan)](self, request, plan, keep, binding, not all_ready, traced)
            return call
        except BaseException:
            if written.file:
                self.store.refuse_writing(written)
            self.turns.release()
            raise

    def _meet(self, request: Request, plan: AnyPlan | PlanKey, *, follows: bool) -> tuple[Binding | None, int]:
        """Meet the ranks in this call; return what is bound to its matrices here, and what `Gate.open` does."""
        error: BaseException | None = None
        binding: Binding | None = None
        digest = _NO_DIGEST
        matrices, scalars = request.matrices, request.scalars
        try:
            a, b, c = matrices
            alpha, beta = scalars
            if c.info.dtype is not DType.f64 or type(alpha) is complex or type(beta) is complex:
                scalars.check(c.info.dtype)
            binding = self.binder.find(plan, matrices)
            if binding is not None:
                if alpha is not binding.alpha or beta is not binding.beta:  # mostly those of the last call
                    binding.alpha, binding.beta, binding.mixed = alpha, beta, scalars.mixed_with(binding.digest)
                digest = binding.mixed
            else:
                digest = scalars.mixed_with(digest_of(plan, matrices))
                if not isinstance(plan, PlanKey):
                    binding = self.binder.find(plan.now, plan.begins_with(matrices, request.choices))
            self.backend.await_caller()
            if a.info.file or b.info.file or c.info.file:
                self.store.check_files(matrices)
        except Exception as caught:  # carried to every rank by the opening record
            error = caught
        epoch, flags = self.binder.flags.epoch, READY if binding is not None else 0
        if self.searches.found and plan in self.searches.found and self.searches.is_due(plan):
            flags |= NEWS
        return binding, self.gate.open(
            request.call, request.asked, digest, epoch=epoch, flags=flags, error=error, follows=follows
        )

    def _take(self, plan: Any, matrices: Operands, choices: Choices) -> tuple[AnyPlan, Binding]:
        """Take the plan that rank 0 has found beside calls of one by rule, if it can be bound here. Collective."""
        try:
            better = self.maker.successor(plan, self.searches.found.pop(plan, None))
            binding = self.binder.bind(better, matrices)
        except UncutError as error:
            if not is_agreed(error) or self.gate.broken:
                raise
            self.searches.forget(plan)
            return self.prepare(plan, matrices, choices)
        self.searches.succeed(plan, better)
        return better, binding

    def prepare(self, plan: AnyPlan | PlanKey, matrices: Operands, choices: Choices) -> tuple[AnyPlan, Binding]:
        """Make a plan if there is none, and bind to matrices that by which the next call begins. Collective."""
        while True:
            try:
                if isinstance(plan, PlanKey):
                    plan = self._made(plan, matrices, choices)
                return plan, self.binder.bind(plan.now, plan.begins_with(matrices, choices))
            except (CapacityError, DeviceError, PlanError) as error:  # of one type on all ranks
                if not is_agreed(error) or isinstance(error, ScheduleError):
                    raise
                if isinstance(plan, Trial) and plan.may_go and isinstance(error, CapacityError | DeviceError):
                    plan = self.without(plan)
                else:
                    raise

    def _made(self, key: PlanKey, matrices: Operands, choices: Choices) -> AnyPlan:
        made = self.maker.make(key, self.binder.held_bytes)
        if isinstance(made, Chunks):  # too long to be planned by rule
            return Chunked.of(key, made, matrices, choices, self._plan_of_chunk)
        return made

    def _plan_of_chunk(self, key: PlanKey) -> Plan:
        plan = self.maker.make(key, self.binder.held_bytes, whole=True)
        assert isinstance(plan, Plan)  # nothing is tried
        return plan

    def bind_chunk(self, plan: Chunked, request: Request, number: int) -> tuple[Binding, bool]:
        """Return what binds a chunk of a product, and whether it is new. Collective."""
        its = plan.plan(number, self._plan_of_chunk, self.binder.drop)
        matrices = plan.operands(request.matrices, request.choices, number)
        is_new = self.binder.find(its, matrices) is None
        return self.binder.bind(its, matrices), is_new

    def judged(self, trial: Trial, seconds: float) -> AnyPlan:
        """Return what is kept of plans that are tried, after a call by one: in the end the fastest. Collective then."""
        trial = trial.after(seconds)
        if not trial.over:
            return trial
        tables = self.group.allgather_bytes(trial.table(), "comparing schedules", self.timeout_s)
        winner = trial.plans[fastest(tables)]
        chosen = dataclasses.replace(winner, summary=dataclasses.replace(winner.summary, tried=trial.num_left))
        self.binder.hand_over(winner, chosen)
        self.binder.drop(trial)
        return chosen

    def without(self, trial: Trial) -> Trial:
        """Return plans that are tried without the one whose turn it is, which cannot run here. Local."""
        self.binder.drop(trial.now)
        return trial.without()

    # -- life --------------------------------------------------------------------------------

    def close(self) -> None:
        """Release everything, once nothing is bound. Collective."""
        self.binder.close()
        self.group.barrier()
        self.let_go()

    def abandon(self) -> None:
        """Let go without collective calls, after a call that did not end."""
        self.binder.abandon()
        self.let_go()

    def let_go(self) -> None:
        """Drop the memory that ranks share; no call is possible any more. Not collective."""
        self.flight.drain()  # after a call that did not end: until it has given up
        self.searches.close()
        self.turns.close()
        self.gate.let_go()
        self.control.close()
