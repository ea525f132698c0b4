"""
The calls that multiply, one after another.

A repeated call is: look the plan up, opening barrier, fire, drain, closing barrier. The opening
barrier is that of every call of a session (`gate`). The devices are taken after it, when all ranks are
known to be in this call: a rank that makes another one never waits for them. Between it and the closing
barrier no rank may leave alone: what goes wrong is carried as a value and raised on all ranks afterwards.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from uncut_mpi.api.binding import Binder, Binding, digest_of
from uncut_mpi.api.call import Call, ChunkedCall, TriedCall
from uncut_mpi.api.chunked import AnyPlan, Chunked
from uncut_mpi.api.control import Control
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.gate import Gate
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.api.plan_maker import PlanMaker
from uncut_mpi.api.plans import Plan, PlanKey
from uncut_mpi.api.request import Choices, Operands, Request
from uncut_mpi.api.trials import Trial, fastest
from uncut_mpi.device.interface import Backend
from uncut_mpi.errors import CapacityError, DeviceError, StallError, is_agreed
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.chunks import Chunks
from uncut_mpi.spmd.group import Group
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
    timeout_s : float
        A call fails when nothing finishes anywhere for so long.
    arrival_timeout_s : float or None
        How long to wait for the others to begin a call, and for devices.

    Attributes
    ----------
    turns : DeviceTurns
        Gives devices to calls.
    gate : Gate
        Opens and closes all calls of the session.
    binder : Binder
        Binds plans to matrices.
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
        timeout_s: float,
        arrival_timeout_s: float | None,
    ) -> None:
        self.group, self.backend, self.store, self.counters = group, backend, store, counters
        self.timeout_s, self._arrival_timeout_s = timeout_s, arrival_timeout_s
        self._maker = maker
        self.now: Call | None = None
        self.control = control
        self.turns = DeviceTurns(group, device_key, control.turns)
        try:
            self.gate = Gate(group, self.turns, control, arrival_timeout_s)
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
        self, request: Request, plan: AnyPlan | PlanKey, keep: Callable[[AnyPlan], None], *, traced: bool = False
    ) -> Call:
        """Open, start and finish a product; parameters are those of `open`. Collective."""
        call = self.open(request, plan, keep, traced=traced)
        try:
            call.start(waits=True)
            call.finish()
        finally:
            call.let_go()
        return call

    def open(
        self, request: Request, plan: AnyPlan | PlanKey, keep: Callable[[AnyPlan], None], *, traced: bool = False
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
        """
        error: BaseException | None = None
        binding: Binding | None = None
        digest = _NO_DIGEST
        matrices, scalars = request.matrices, request.scalars
        try:
            dtype = matrices[2].info.dtype
            if dtype is not DType.f64 or complex in map(type, scalars):
                scalars.check(dtype)
            binding = self.binder.find(plan, matrices)
            if binding is not None:
                digest = scalars.mixed_with(binding.digest)
            else:
                if plan.tuning:
                    binding = self.binder.find(plan.now, matrices)
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
            if c.info.file:
                self.store.is_written(c, written=False)
            if not all_ready:
                plan, binding = self.prepare(plan, matrices, request.choices)
            assert not isinstance(plan, PlanKey)  # just prepared
            keep(plan)
            call: Call
            if isinstance(plan, Chunked):
                call = ChunkedCall(plan, self, request, traced)
            elif isinstance(plan, Trial):
                call = TriedCall(plan, keep, self, request, binding, not all_ready, traced)
            else:
                assert binding is not None  # ready or just prepared
                call = Call(self, request, binding, not all_ready, traced)
            self.now = call
            return call
        except BaseException:
            turns.release()
            raise

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
        while (now := plan.now) is not None:
            try:
                return plan, self.binder.bind(now, matrices)
            except (CapacityError, DeviceError) as error:  # of one type on all ranks
                if not plan.may_go or not is_agreed(error):
                    raise
                plan = self.without(plan)
        return plan, None

    def _plan_of_chunk(self, key: PlanKey) -> Plan:
        plan = self._maker.make(key, self.binder.softbuf_bytes, whole=True)
        assert isinstance(plan, Plan)  # nothing is tried
        return plan

    def bind_chunk(self, plan: AnyPlan, request: Request, number: int) -> tuple[Binding, bool]:
        """Return what binds a chunk of a product, and whether it is new. Collective."""
        assert isinstance(plan, Chunked)
        its = plan.plan(number, self._plan_of_chunk, self.binder.drop)
        matrices = plan.operands(request.matrices, request.choices, number)
        is_new = self.binder.find(its, matrices) is None
        return self.binder.bind(its, matrices, plan.summary.chunks), is_new

    def judged(self, plan: AnyPlan, seconds: float) -> AnyPlan:
        """Return what is kept of plans that are tried, after a call by one: in the end the fastest. Collective then."""
        assert isinstance(plan, Trial)
        trial = plan.after(seconds)
        if not trial.over:
            return trial
        tables = self.group.allgather_bytes(trial.table(), "comparing schedules", self.timeout_s)
        winner = trial.plans[fastest(tables)]
        chosen = dataclasses.replace(winner, summary=dataclasses.replace(winner.summary, tried=trial.num_left))
        self.binder.hand_over(winner, chosen)
        self.binder.drop(trial)
        return chosen

    def without(self, plan: AnyPlan) -> AnyPlan:
        """Return plans that are tried without the one whose turn it is, which cannot run here. Local."""
        assert isinstance(plan, Trial)
        self.binder.drop(plan.turn)
        return plan.without()

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
