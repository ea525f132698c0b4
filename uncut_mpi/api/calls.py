"""
The calls that multiply, one after another: each is opened, started, asked and finished.

A repeated call is: look the plan up, opening barrier, fire, drain, closing barrier. It goes through them in one go, or
as far as all is as usual. The opening barrier is that of every call of a session (`gate`). The devices are taken after
it, when all ranks are known to be in this call: a rank that makes another one never waits for them. Between it and the
closing barrier no rank may leave alone: what goes wrong is carried as a value and raised on all ranks afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from uncut_mpi.api.binding import Binder, Binding, digest_of
from uncut_mpi.api.call import CALLS, Call, CallResult
from uncut_mpi.api.control import Control
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.flight import Flight
from uncut_mpi.api.gate import Gate, Stage
from uncut_mpi.api.keys import PlanKey
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.api.plan_cache import PlanCache
from uncut_mpi.api.plan_maker import PlanMaker
from uncut_mpi.api.plans import AnyPlan, Chunked, Plan, Trial, fastest
from uncut_mpi.api.request import Choices, Operands, Request
from uncut_mpi.api.searches import Searches
from uncut_mpi.device.interface import Backend, Outcome
from uncut_mpi.errors import (
    CapacityError,
    DeviceError,
    ParamError,
    PlanError,
    ScheduleError,
    UncutError,
    is_agreed,
)
from uncut_mpi.planning.chunks import Chunks
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.meetings import NEWS, READY
from uncut_mpi.spmd.turns import DeviceTurns

_FIRST_FLAGS = 1 << 12
_NO_DIGEST = bytes(16)


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
        self._going: Binding | None = None  # what the last call in one go ran
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

    def run(self, request: Request, plan: AnyPlan | PlanKey, keep: Callable[[AnyPlan], None]) -> CallResult:
        """Make a product and return what this rank did; parameters are those of `open`. Collective."""
        binding = self.binder.find(plan, request.matrices, request.choices.epilogue)
        if binding is None or not self._may_go(request, binding):
            return self.make(request, plan, keep).result
        flags = self.binder.flags
        self._going, executable = binding, binding.executable
        patience_s = self.timeout_s + executable.longest_s
        done = self.gate.go(request, binding, flags.epoch, self.backend.await_caller, patience_s)
        if self.gate.stage is not Stage.OVER:
            return self.make(request, plan, keep, stage=self.gate.stage, outcome=done).result
        if TYPE_CHECKING:
            assert done is not None
            assert isinstance(plan, Plan)  # nothing else is bound
        flags.begin(executable.span)
        keep(plan)
        tasks, copied, issue_s, drain_s = done.figures
        self.counters.add(tasks, copied)
        # Half the time of its constructor.
        return tuple.__new__(CallResult, (tasks, copied, issue_s, drain_s, False, binding.staged))

    def _may_go(self, request: Request, binding: Binding) -> bool:
        """Return whether a product that is bound may be made in one go. Local."""
        flight = self.flight
        if flight.calls or flight.unheard or self.searches.found or binding.with_files or self.gate.interrupted:
            return False
        try:
            binding.take(request.scalars, request.matrices[2].info.dtype)
        except ParamError:  # which all ranks are to learn
            return False
        return self.binder.flags.goes_on(binding.executable.span)

    def make(
        self,
        request: Request,
        plan: AnyPlan | PlanKey,
        keep: Callable[[AnyPlan], None],
        *,
        traced: bool = False,
        stage: Stage = Stage.OUTSIDE,
        outcome: Outcome | None = None,
    ) -> Call:
        """Make a product step by step, or finish one whose run has an outcome; parameters as of `open`. Collective."""
        call = self.open(request, plan, keep, traced=traced, stage=stage)
        try:
            call.arm()
            if outcome is None:
                call.start(waits=True)
            else:
                call.pass_by(outcome)
            call.finish()
        finally:
            call.let_go()
        return call

    def progress(self) -> float:
        """Return about what part of a product that runs is done on this rank, from 0 to 1. Any thread may ask."""
        if self.now is not None:
            return self.now.progress()
        return 0.0 if self.running is None else self.running.executable.progress()

    @property
    def running(self) -> Binding | None:
        """What runs on this rank now; None if nothing does. Any thread may ask."""
        if self.now is not None:
            return self.now.running
        return self._going if self.gate.stage is Stage.RUNNING else None

    def launch(self, request: Request, plan: AnyPlan | PlanKey, keep: Callable[[AnyPlan], None]) -> Call:
        """
        Open a product and let it go on by itself; parameters are those of `open`. Collective.

        What needs ranks together more than once is done when this returns: the first call of a plan of several that are
        tried, and one in chunks. So is each over several nodes, whose messages need MPI.
        """
        call = self.open(request, plan, keep, follows=True)
        try:
            if type(call) is Call and self.group.num_nodes == 1:
                call.arm()
                self.flight.add(call)
                return call
            self.flight.drain()
            call.arm()
            call.start(waits=True)
            call.attempt(call.finish)
        except BaseException:
            if call not in self.flight.calls:
                call.let_go()
            raise
        call.let_go()
        if call.error is not None:
            self.flight.note(call.error)
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
        stage: Stage = Stage.OUTSIDE,
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
        stage : Stage, default OUTSIDE
            How far it is already, by `Gate.go`.
        """
        if stage is Stage.OUTSIDE:
            binding, told = self._meet(request, plan, follows=follows)
        else:
            binding, told = self.binder.find(plan, request.matrices, request.choices.epilogue), READY
            if stage is Stage.OPENING:
                told = self.gate.open(request.call, request.asked, b"", flags=READY, begun=True)
        all_ready = told == READY
        written = request.matrices[2].info
        # After a stall some ranks have their devices: they are told that this one leaves (`Gate.__exit__`).
        self.turns.acquire(self._arrival_timeout_s, self.flight.drain)
        if follows and (written.file or not all_ready):
            self.flight.drain()
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
            self.now = call = CALLS[type(plan)](self, request, plan, keep, binding, not all_ready, traced)
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
        matrices, scalars, epilogue = request.matrices, request.scalars, request.choices.epilogue
        try:
            a, b, c = matrices
            binding = self.binder.find(plan, matrices, epilogue)
            if binding is not None:
                digest = binding.take(scalars, c.info.dtype)
            else:
                scalars.check(c.info.dtype)
                digest = scalars.mixed_with(digest_of(plan, matrices, epilogue))
                if not isinstance(plan, PlanKey):
                    binding = self.binder.find(plan.now, *plan.begins_with(matrices, request.choices))
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
            binding = self.binder.bind(better, matrices, choices.epilogue)
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
                return plan, self.binder.bind(plan.now, *plan.begins_with(matrices, choices))
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
        about = plan.operands(request.matrices, request.choices, number)
        is_new = self.binder.find(its, *about) is None
        return self.binder.bind(its, *about), is_new

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
        """Release everything but what ranks tell each other by, once nothing is bound. Collective."""
        self.binder.close()
        self.group.barrier()

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
