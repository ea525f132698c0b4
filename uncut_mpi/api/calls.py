"""
The calls that multiply, one after another.

A repeated call is: look the plan up, opening barrier, fire, drain, closing barrier. The opening
barrier is that of every call of a session (`gate`). The devices are taken after it, when all ranks are
known to be in this call: a rank that makes another one never waits for them. Between it and the closing
barrier no rank may leave alone: what goes wrong is carried as a value and raised on all ranks afterwards.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from uncut_mpi.api.binding import Binder, Binding, digest_of
from uncut_mpi.api.chunked import AnyPlan, Chunked
from uncut_mpi.api.control import Control
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.gate import Gate
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.api.plan_maker import PlanMaker
from uncut_mpi.api.plans import Plan, PlanKey
from uncut_mpi.api.request import Choices, Operands, Request
from uncut_mpi.api.trials import Trial, fastest
from uncut_mpi.device.interface import Backend, Executable
from uncut_mpi.errors import CapacityError, DeviceError, StallError, is_agreed
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.chunks import Chunks
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.turns import DeviceTurns

_FIRST_FLAGS = 1 << 12
_NO_DIGEST = bytes(16)


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


class Calls:
    """
    Makes the calls of a session; what belongs to one of them alone is in its `Call`.

    Parameters
    ----------
    control : Control
        What the ranks share.
    device_key : str
        Identifies this rank's device.
    timeout_s : float
        A call fails when nothing finishes anywhere for so long.
    arrival_timeout_s : float or None
        How long to wait for the others to begin a call, and for devices.

    Attributes
    ----------
    order : DeviceTurns
        Gives devices to calls.
    gate : Gate
        Opens and closes all calls of the session.
    binder : Binder
        Binds plans to matrices.
    now : (Executable or None, int, int)
        What runs on this rank, while something does; how many chunks of a product are done, and of how many: 0 of 1
        mostly. One value, which another thread may read.
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
        timeout_s: float,
        arrival_timeout_s: float | None,
    ) -> None:
        self.group, self.backend, self.store, self.counters = group, backend, store, counters
        self.timeout_s, self._arrival_timeout_s = timeout_s, arrival_timeout_s
        self._maker = maker
        self.now: tuple[Executable | None, int, int] = (None, 0, 1)
        self.control = control
        self.turns = DeviceTurns(group, device_key, control.turns)
        try:
            self.gate = Gate(group, self.turns, control.board.words, arrival_timeout_s, control.exchange)
            self.gate.on_cut_short = self._abort
            self.binder = Binder(group, backend, store, counters, control)
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
        self,
        request: Request,
        plan: AnyPlan | PlanKey,
        keep: Callable[[AnyPlan], None],
        *,
        traced: bool = False,
    ) -> Call | CallOfChunks:
        """
        Run one product; return when it has ended. Collective.

        Parameters
        ----------
        plan : Plan, Trial, Chunked or PlanKey
            The plan to run, or the key of a plan that is still to be made.
        keep : callable
            Takes the plan that all ranks use, and later what comes in its place.
        traced : bool, default False
            Take the times of this rank's tasks.
        """
        error: BaseException | None = None
        binding: Binding | None = None
        digest = _NO_DIGEST
        matrices, scalars = request.matrices, request.scalars
        try:
            dtype = matrices[2].info.dtype
            if dtype is not DType.f64 or complex in map(type, scalars):
                scalars.check(dtype)
            if type(plan) is Plan:
                binding = self.binder.find(plan, matrices)
                digest = scalars.mixed_with(digest_of(plan, matrices) if binding is None else binding.digest)
            else:
                binding = self.binder.find(plan.turn, matrices) if type(plan) is Trial else None
                digest = scalars.mixed_with(digest_of(plan, matrices))
            self.backend.await_caller()
            a, b, c = matrices
            if a.info.file or b.info.file or c.info.file:
                self.store.check_files(matrices)
        except Exception as caught:  # carried to every rank by the opening record
            error = caught
        all_ready = self.gate.open(
            request.call, request.asked, digest, epoch=self.binder.flags.epoch, ready=binding is not None, error=error
        )
        turns = self.turns
        try:
            turns.acquire(self._arrival_timeout_s)
        except StallError:
            self.gate.broken = True  # some ranks may hold their devices by now
            raise
        try:
            if not all_ready:
                plan, binding = self.prepare(plan, matrices, request.choices)
            assert not isinstance(plan, PlanKey)  # just prepared
            keep(plan)
            if c.info.file:
                self.store.is_written(c, written=False)
            if type(plan) is Chunked:
                chunks = self._run_chunks(plan, request, traced=traced)
                if c.info.file:
                    self.store.is_written(c, written=True)
                return chunks
            assert binding is not None  # ready or just prepared
            call = Call(self, request, binding, not all_ready, traced)
            if type(plan) is Trial:
                self._try(plan, call, keep)
            else:
                call.run()
            if c.info.file:
                self.store.is_written(c, written=True)
            return call
        finally:
            turns.release()

    def prepare(self, plan: AnyPlan | PlanKey, matrices: Operands, choices: Choices) -> tuple[AnyPlan, Binding | None]:
        """
        Make a plan if there is none, and bind it to matrices, of a trial the one whose turn it is. Collective.

        Chunks are bound one after another, when they come.
        """
        if isinstance(plan, PlanKey):
            made = self._maker.make(plan, self.binder.softbuf_bytes)
            if isinstance(made, Chunks):
                plan = Chunked.of(plan, made, matrices, choices, self._plan_of_chunk)
            else:
                plan = made
        if isinstance(plan, Chunked):
            return plan, None
        while isinstance(plan, Trial):
            try:
                return plan, self.binder.bind(plan.turn, matrices)
            except (CapacityError, DeviceError) as error:  # of one type on all ranks
                if plan.index == 0 or not is_agreed(error):
                    raise
                plan = self._leave_out(plan)
        return plan, self.binder.bind(plan, matrices)

    def _plan_of_chunk(self, key: PlanKey) -> Plan:
        plan = self._maker.make(key, self.binder.softbuf_bytes, whole=True)
        assert isinstance(plan, Plan)  # nothing is tried
        return plan

    def _run_chunks(self, chunked: Chunked, request: Request, *, traced: bool) -> CallOfChunks:
        """Run the products of chunks one after another. Collective."""
        calls: list[Call] = []
        is_new = False
        self.now = None, 0, len(chunked.keys)
        try:
            for number in range(len(chunked.keys)):
                plan = chunked.plan(number, self._plan_of_chunk, self.binder.drop)
                matrices = chunked.operands(request.matrices, request.choices, number)
                is_new |= self.binder.find(plan, matrices) is None
                binding = self.binder.bind(plan, matrices, len(chunked.keys))
                # A barrier before each, as before calls that were planned: what it overwrites the last one has used.
                calls.append(Call(self, request, binding, planned=True, traced=traced and number == 0))
                calls[-1].run()
        finally:
            self.now = None, 0, 1
        return CallOfChunks(calls, planned=is_new)

    def _try(self, trial: Trial, call: Call, keep: Callable[[AnyPlan], None]) -> None:
        """Run one product by the plan whose turn it is, and after the last one keep the fastest. Collective."""
        started = time.perf_counter()
        try:
            call.run()
        except (CapacityError, DeviceError) as error:  # C is lost, but the next call need not be
            if trial.index and is_agreed(error) and not self.gate.broken:
                keep(self._leave_out(trial))
            raise
        trial = trial.after(time.perf_counter() - started)
        keep(self._chosen(trial) if trial.over else trial)

    def _leave_out(self, trial: Trial) -> Trial:
        """Return a trial without the plan whose turn it is, which cannot run here. Local."""
        self.binder.drop(trial.turn)
        return trial.without()

    def _chosen(self, trial: Trial) -> Plan:
        """Return the plan that was the fastest on all ranks, and release the others. Collective."""
        tables = self.group.allgather_bytes(trial.table(), "comparing schedules", self.timeout_s)
        winner = trial.plans[fastest(tables)]
        plan = dataclasses.replace(winner, summary=dataclasses.replace(winner.summary, tried=trial.num_left))
        self.binder.hand_over(winner, plan)
        self.binder.drop(trial)
        return plan

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
        self.turns.close()
        self.gate.let_go()
        self.control.close()

    def _abort(self, epoch: int) -> None:
        self.control.board.abort[0] = epoch + 1


class Call:
    """
    One product that all ranks have opened: what it runs, and what came of it on this rank.

    Attributes
    ----------
    epoch : int
        From which its tasks count in flags; no other call that may be in flight has it.
    report : ExecutionReport
        After `run`: the verdict of this rank's part.
    """

    __slots__ = ("_binding", "_calls", "_planned", "_request", "_traced", "epoch", "report")

    def __init__(self, calls: Calls, request: Request, binding: Binding, planned: bool, traced: bool) -> None:
        self._calls, self._request, self._binding = calls, request, binding
        self._planned, self._traced = planned, traced
        self.epoch = calls.binder.flags.begin(binding.executable.span)

    def run(self) -> None:
        """Fire this rank's part, wait for its end, and pass the closing barrier. Collective."""
        calls, executable, (alpha, beta) = self._calls, self._binding.executable, self._request.scalars
        gate = calls.gate
        if self._traced:
            with agreement.collective(calls.group, "preparing a trace"):
                executable.prepare_trace()
        if self._planned or self._traced:
            calls.group.barrier()
        _, done, chunks = calls.now
        calls.now = executable, done, chunks
        try:
            self.report = report = executable.run(
                alpha=alpha, beta=beta, epoch=self.epoch, timeout_s=calls.timeout_s, traced=self._traced
            )
        finally:
            # A chunk is done, whatever others still do.
            calls.now = None, done + (chunks > 1), chunks
        calls.counters.add(report)
        error = report.error
        try:
            if gate.close(error, calls.timeout_s):  # with every rank's verdict
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
    def result(self) -> CallResult:
        """What the product did on this rank, after `run`."""
        report, staged = self.report, self._binding.staged
        figures = report.tasks, report.copy_bytes, report.issue_s, report.drain_s
        return tuple.__new__(CallResult, (*figures, self._planned, staged))  # half the time of its constructor


class CallOfChunks:
    """
    One product that was done in chunks.

    Attributes
    ----------
    report : ExecutionReport
        Of the first chunk.
    result : CallResult
        Of all of them.
    """

    def __init__(self, calls: Sequence[Call], *, planned: bool) -> None:
        self.report = calls[0].report
        results = [call.result for call in calls]
        tasks, copied, issue_s, drain_s = (sum(of_all) for of_all in zip(*(one[:4] for one in results), strict=True))
        staged = any(one.staged for one in results)
        self.result = CallResult(int(tasks), int(copied), issue_s, drain_s, planned, staged)
