"""
One call, in one direction: check, agree, plan, reserve, fire, close.

A repeated call is: look the plan up, opening barrier, fire, drain, closing barrier. The opening
barrier is that of every call of a session (`gate`). The devices are taken after it, when all ranks are
known to be in this call: a rank that makes another one never waits for them. Between it and the closing
barrier no rank may leave alone: what goes wrong is carried as a value and raised on all ranks afterwards.
"""

from __future__ import annotations

import math
import struct
import time
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from uncut_mpi.api import plan_message
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.entries import Binding, CallResult, PlanEntry, PlanKey
from uncut_mpi.api.gate import Gate
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.api.matrix import READ_ONLY, Matrix, overlap
from uncut_mpi.api.memory import Arena
from uncut_mpi.api.plan_cache import PlanCache
from uncut_mpi.api.trace import Trace, merge_times
from uncut_mpi.api.trials import Trials, fastest
from uncut_mpi.device.interface import (
    Backend,
    DeviceIdentity,
    ExecutionReport,
    FlagTable,
    ProgressBoard,
    TaskTimes,
)
from uncut_mpi.errors import CapacityError, DeviceError, ParamError, StallError, is_agreed
from uncut_mpi.model.arguments import real_number, shown, type_text
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan_several
from uncut_mpi.planning.schedule import Role
from uncut_mpi.planning.verify import verify
from uncut_mpi.spmd import agreement, exchange
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.order import DeviceOrder

Operands = tuple[Matrix, Matrix, Matrix]
_FIRST_FLAGS = 1 << 12
# Sets of matrices that one plan stays bound to; each holds a list of bound operations and few events.
_MAX_BINDINGS = 8
# Sets of matrices and scalars of which a plan keeps the digest.
_MAX_DIGESTS = 64
_FLAG_PERIOD = 1 << 30  # the epoch gets no further ahead of any flag
_EPOCHS = 1 << 32
_NO_DIGEST = bytes(16)
# Between them numbers are neither 0 nor infinite in float32: half its least one, and half a unit above its largest.
_LEAST_FLOAT32, _MOST_FLOAT32 = 2.0**-150, (2 - 2.0**-24) * 2.0**127


class CallMachinery:
    """Plans, reserves and fires; owns the SoftBuf, the flags and the session's epoch."""

    def __init__(
        self,
        group: Group,
        backend: Backend,
        identities: Sequence[DeviceIdentity],
        store: MatrixStore,
        counters: Counters,
        *,
        machine: Machine,
        timeout_s: float,
        arrival_timeout_s: float | None,
        verify: bool,
    ) -> None:
        self._group, self._backend, self._store, self._counters = group, backend, store, counters
        self._machine, self._timeout_s, self._verify = machine, timeout_s, verify
        self._arrival_timeout_s = arrival_timeout_s
        self._epoch = self._ahead = 0
        self._entries: weakref.WeakSet[PlanEntry] = weakref.WeakSet()
        store.on_release.append(self._forget_matrix)

        board_shape = ProgressBoard.shape(group.size)
        board_bytes, room_bytes = 4 * math.prod(board_shape), agreement.room_bytes(group)
        control_bytes = room_bytes + board_bytes + 2 * group.size * 8
        self._control = exchange.shared_segment(group, control_bytes, "the progress board")
        room = self._control.array(np.uint8, room_bytes)
        self._board = ProgressBoard(self._control.array(np.uint32, board_shape, offset_bytes=room_bytes), group.rank)
        words = self._control.array(np.uint64, (2, group.size), offset_bytes=room_bytes + board_bytes)
        self._order = DeviceOrder(group, identities[group.rank].uuid, words[0])
        group.count_steps(words[1])
        self._softbuf = Arena(group, backend, store.mappings, counters, "SoftBuf")
        self._flags = Arena(group, backend, store.mappings, counters, "flags")
        self.gate = Gate(group, self._order, arrival_timeout_s, room)
        try:
            self._flags.ensure(np.full(group.size, 4 * _FIRST_FLAGS, np.int64))
            self._reset_flags()
        except BaseException as error:
            if is_agreed(error):  # every rank is here, so what peers have mapped is unmapped before it is freed
                self._flags.close()
            self._let_go()
            raise

    # -- local checks ------------------------------------------------------------------------

    def key(
        self,
        a: object,
        b: object,
        c: object,
        trans_a: str,
        trans_b: str,
        reads_c: bool,
        alpha_is_zero: bool,
        options: ScheduleOptions | None,
    ) -> PlanKey:
        """
        Return the plan key of a call. Local.

        Raises
        ------
        ParamError
            If shapes, types, layouts or overlaps do not allow the product.
        """
        if options is not None and not isinstance(options, ScheduleOptions):
            raise ParamError(f"options is {type_text(options)}: pass a ScheduleOptions")
        trans_a, trans_b = check_trans("trans_a", trans_a), check_trans("trans_b", trans_b)
        checked = [self._store.check(name, matrix) for name, matrix in (("A", a), ("B", b), ("C", c))]
        first, second, result = checked
        if len({matrix.dtype for matrix in checked}) > 1:
            raise ParamError(
                f"dtypes differ: A is {first.dtype.name}, B is {second.dtype.name}, C is {result.dtype.name}; "
                "convert them to one"
            )
        if not result.info.writeable:
            raise ParamError(f"C {READ_ONLY}")
        problem = GemmProblem.from_operands(
            first.info.stored,
            second.info.stored,
            result.info.stored,
            dtype=result.dtype,
            trans_a=trans_a,
            trans_b=trans_b,
            reads_c=reads_c,
            alpha_is_zero=alpha_is_zero,
        )
        for name, matrix in (("A", first), ("B", second)):
            if overlap(matrix.info, result.info):
                raise ParamError(f"C overlaps {name} in memory: pass another matrix for the result")
        places = [matrix.location for matrix in checked]
        if problem.swapped:
            places[0], places[1] = places[1], places[0]
        return PlanKey(problem, Placement(*places), options or ScheduleOptions())

    def checked(self, entry: PlanEntry, planned: Operands, matrices: Operands, alpha: float, beta: float) -> PlanEntry:
        """Return a plan, once matrices and scalars are found to fit it. Local."""
        if entry.closed:
            raise ParamError("the plan is closed: make a new one")
        if alpha != 0 and entry.key.problem.scales_only:
            raise ParamError(f"alpha = {alpha}, but the plan was made with scales_only=True: plan without it")
        if beta != 0 and not entry.key.problem.reads_c:
            raise ParamError(f"beta = {beta}, but the plan was made with reads_c=False: plan with reads_c=True")
        if matrices is planned:
            for name, matrix in zip("ABC", planned, strict=True):
                self._store.check(name, matrix)
            return entry
        for name, old, new in zip("ABC", planned, matrices, strict=True):
            self._store.check(name, new)
            if new is old:
                continue
            wanted, found = (
                f"{m.info.stored.rows}×{m.info.stored.cols} {m.dtype.name}, order {m.order}, "
                f"leading dimension {m.info.stored.ld}, at {m.location}"
                for m in (old, new)
            )
            if wanted != found:
                raise ParamError(f"{name} does not fit the plan: planned {wanted}; given {found}")
            if name == "C" and not new.info.writeable:
                raise ParamError(f"C {READ_ONLY}")
        for name, matrix in (("A", matrices[0]), ("B", matrices[1])):
            if overlap(matrix.info, matrices[2].info):
                raise ParamError(f"C overlaps {name} in memory: pass another matrix for the result")
        return entry

    def make_output(
        self, a: Matrix, b: Matrix, trans_a: str, trans_b: str, alpha: object, beta: object, asked: str
    ) -> Matrix:
        """Return a new host matrix for op(A) op(B). Collective."""
        found: list[tuple[tuple[int, int], DType]] = []

        def check() -> None:
            real_number("alpha", alpha)
            if real_number("beta", beta) != 0:
                raise ParamError(f"beta = {shown(beta)}, but there is no C: pass out=, or beta=0")
            plain = check_trans("trans_a", trans_a) == "N", check_trans("trans_b", trans_b) == "N"
            first, second = self._store.check("A", a), self._store.check("B", b)
            found.append(((first.shape[0 if plain[0] else 1], second.shape[1 if plain[1] else 0]), first.dtype))

        self.gate.begin("gemm", asked, check)
        return self._store.empty_host(*found[0], "C")

    # -- planning ----------------------------------------------------------------------------

    def plan(self, make_key: Callable[[], PlanKey]) -> PlanEntry:
        """Return a new plan. Collective."""
        error: BaseException | None = None
        key: PlanKey | None = None
        try:
            key = make_key()
        except Exception as caught:  # carried to every rank by the opening record
            error = caught
        self.gate.open("plan", repr(key), error=error)
        assert key is not None  # no rank had an error
        entry = PlanEntry(key)
        self._fill(entry)
        return entry

    def _fill(self, entry: PlanEntry) -> None:
        before = self._group.bytes_broadcast
        data = agreement.from_root(self._group, lambda: self._plan_on_root(entry.key))
        with agreement.collective(self._group, "decoding the schedule"):
            plans = plan_message.decode(data)
            entries = [entry, *(PlanEntry(entry.key) for _ in plans[1:])]
            for one, (summary, schedule) in zip(entries, plans, strict=True):
                one.fill(schedule, lower(schedule, self._group.rank), summary, self._group.rank)
            if len(entries) > 1:
                entry.try_others(entries[1:])
        self._entries.add(entry)
        self._counters.planner_calls += 1
        self._counters.schedule_bytes_broadcast += self._group.bytes_broadcast - before

    def _plan_on_root(self, key: PlanKey) -> bytes:
        started = time.perf_counter()
        several = plan_several(key.problem, key.placement, self._group.size, self._machine, key.options)
        plan_s = time.perf_counter() - started
        if self._verify:
            for planned in several:
                verify(planned.schedule, lower(planned.schedule))
        return plan_message.encode(several, key.options, plan_s)

    def prepare(self, entry: PlanEntry, matrices: Operands) -> None:
        """Reserve memory and bind the plan to these matrices. Collective."""
        if self._softbuf.ensure(entry.softbuf_bytes):
            self._close_bindings()
        needed = 4 * entry.num_flags.astype(np.int64)
        if not self._flags.fits(needed):
            self._close_bindings()
            try:
                self._flags.ensure(needed)
            finally:
                self._reset_flags()  # new memory, also where growing failed and the old size was restored
        staged: set[int] = set()
        operands = _in_schedule_order(entry.key.problem, matrices)
        for buffer in entry.foreign:
            matrix = operands[entry.schedule.buffers["matrix"][buffer]]
            if self._store.share(matrix):
                staged.add(matrix.info.number)
        with agreement.collective(self._group, "binding the plan"):
            key = self._binding_key(matrices)
            if key not in entry.bindings:
                while len(entry.bindings) >= _MAX_BINDINGS:
                    entry.bindings.pop(next(iter(entry.bindings))).executable.close()
                flags = FlagTable(int(self._flags.addresses[self._group.rank]), self._flags.addresses.copy())
                addresses = self._addresses(entry, operands, staged)
                executable = self._backend.executable(entry.program, addresses, flags, self._board)
                entry.bindings[key] = Binding(executable, frozenset(staged))

    def _prepare_turn(self, plan: PlanEntry, matrices: Operands, tries: bool) -> None:
        """Prepare a plan, or the schedule that it tries now; one that cannot run here is left out. Collective."""
        while True:
            turn = plan.turn(tries)
            try:
                self.prepare(turn, matrices)
            except (CapacityError, DeviceError) as error:  # of one type on all ranks
                if turn is plan or not is_agreed(error):
                    raise
                plan.leave_out(turn)
            else:
                return

    def _addresses(self, entry: PlanEntry, operands: Sequence[Matrix], staged: Collection[int]) -> np.ndarray:
        buffers, owners = entry.schedule.buffers, entry.schedule.owners()
        addresses = np.zeros(len(buffers), np.int64)
        for index in entry.program.buffers_used():
            buffer = buffers[index]
            if buffer["role"] == Role.USER:
                matrix = operands[buffer["matrix"]]
                addresses[index] = self._store.address(matrix, staged=matrix.info.number in staged)
            else:
                addresses[index] = self._softbuf.addresses[owners[index]] + buffer["offset"]
        return addresses

    def _binding_key(self, matrices: Operands) -> tuple[int, ...]:
        a, b, c = matrices  # spelled out: this is part of every call
        return (a.info.number, b.info.number, c.info.number, self._softbuf.generation, self._flags.generation)

    # -- the call ----------------------------------------------------------------------------

    def call(
        self,
        name: str,
        find: Callable[[float, float], PlanEntry],
        matrices: Operands,
        alpha: object,
        beta: object,
        stream: Any,
        plans: PlanCache | None,
        asked: Callable[[], str],
        take_times: Callable[[TaskTimes], None] | None = None,
    ) -> CallResult:
        """
        Run one product. Collective.

        Parameters
        ----------
        name : str
            Of the call.
        find : callable
            Local: returns the plan for alpha and beta, filled or new, or raises for bad arguments.
        alpha, beta : object
            The scalars as the caller gave them; what is called here gets floats.
        plans : PlanCache, optional
            Where `find` looks, if anywhere: told of the plan that this call uses.
        asked : callable
            Returns the call as its caller wrote it, for the error of ranks that differ.
        take_times : callable, optional
            Takes when this rank's tasks ran, which is measured only for it; given on all ranks or none.
        """
        tries = take_times is None
        error: BaseException | None = None
        plan: PlanEntry | None = None
        binding: Binding | None = None
        digest = _NO_DIGEST
        factor, scale = 0.0, 0.0
        try:
            self._backend.mark_caller(stream)  # first: the device comes to it meanwhile
            # Mostly floats already, and this is part of every call.
            factor = alpha if type(alpha) is float else real_number("alpha", alpha)
            scale = beta if type(beta) is float else real_number("beta", beta)
            plan = find(factor, scale)
            if plan.scales_in_float32:
                check_float32("alpha", factor)
                check_float32("beta", scale)
            digest = _call_digest(plan, matrices, factor, scale)
            if plan.trials is not None:  # ranks that run different schedules would wait for each other
                digest = agreement.digest_of(digest + struct.pack("<q", plan.trials.state)).tobytes()
            binding = plan.turn(tries).bindings.get(self._binding_key(matrices))
            self._backend.await_caller()
        except Exception as caught:  # carried to every rank by the opening record
            error = caught
        all_ready = self.gate.open(name, asked, digest, epoch=self._epoch, ready=binding is not None, error=error)
        assert plan is not None  # no rank had an error
        try:
            self._order.acquire(self._arrival_timeout_s)
        except StallError:
            self.gate.broken = True  # some ranks may hold their devices by now
            raise
        try:
            if not all_ready:
                if not plan.filled:
                    self._fill(plan)
                self._prepare_turn(plan, matrices, tries)
                if plans is not None:
                    plans.keep(plan)
                binding = plan.turn(tries).bindings[self._binding_key(matrices)]
            elif plans is not None:
                plans.use(plan)
            assert binding is not None  # ready or just prepared
            if plan.trials is None or not tries:
                return self._fire(binding, matrices, factor, scale, take_times, planned=not all_ready)
            return self._try(plan, plan.trials, binding, matrices, factor, scale, planned=not all_ready)
        finally:
            self._order.release()

    def _try(
        self,
        plan: PlanEntry,
        trials: Trials,
        binding: Binding,
        matrices: Operands,
        alpha: float,
        beta: float,
        *,
        planned: bool,
    ) -> CallResult:
        """Run one product by the schedule whose turn it is; after the last trial keep the fastest. Collective."""
        turn = plan.turn()
        started = time.perf_counter()
        try:
            result = self._fire(binding, matrices, alpha, beta, None, planned=planned)
        except (CapacityError, DeviceError) as error:  # C is lost, but the next call need not be
            if turn is not plan and is_agreed(error) and not self.gate.broken:
                plan.leave_out(turn)
            raise
        trials.record(time.perf_counter() - started)
        if trials.over:
            tables = self._group.allgather_bytes(trials.table(), "comparing schedules", self._timeout_s)
            plan.settle(fastest(tables))
        return result

    def trace(
        self,
        entry: PlanEntry,
        find: Callable[[float, float], PlanEntry],
        matrices: Operands,
        alpha: object,
        beta: object,
        stream: Any,
        asked: Callable[[], str],
    ) -> Trace:
        """Run one product by a plan, as `call` does, and return when every task of every rank ran. Collective."""
        own: list[TaskTimes] = []
        self.call("trace", find, matrices, alpha, beta, stream, None, asked, own.append)
        return merge_times(len(entry.schedule.tasks), self._group.allgather_objects(own[0]))

    def _fire(
        self,
        binding: Binding,
        matrices: Operands,
        alpha: float,
        beta: float,
        take_times: Callable[[TaskTimes], None] | None,
        *,
        planned: bool,
    ) -> CallResult:
        traced = take_times is not None
        if traced:
            with agreement.collective(self._group, "preparing a trace"):
                binding.executable.prepare_trace()
        span = binding.executable.span
        if self._ahead + span >= _FLAG_PERIOD:
            self._reset_flags()
        epoch, self._epoch = self._epoch, (self._epoch + span) % _EPOCHS
        self._ahead += span
        if binding.staged:
            self._stage(binding, matrices, inward=True)
        if planned or binding.staged or traced:
            self._group.barrier()
        report = binding.executable.run(alpha=alpha, beta=beta, epoch=epoch, timeout_s=self._timeout_s, traced=traced)
        self._count(report)
        try:
            self._finish(report)
        except StallError as missing:
            self.gate.broken = True
            # What this rank waited for in vain says more than that the barrier was not reached.
            raise (report.error if isinstance(report.error, StallError) else missing) from None
        if take_times is not None and report.times is not None:
            take_times(report.times)
        if binding.staged:
            self._stage(binding, matrices, inward=False)
        staged = bool(binding.staged)
        return CallResult(report.tasks, report.copy_bytes, report.issue_s, report.drain_s, planned, staged)

    def _finish(self, report: ExecutionReport) -> None:
        """Pass the closing barrier, which carries every rank's verdict; raise any rank's error on all."""
        if self.gate.close(report.error, self._timeout_s, self._board.words.tobytes):
            # After a stall, or with a context that is dead, tasks may still be in flight somewhere, so
            # nothing may be freed or reused any more.
            lost = isinstance(report.error, StallError) or getattr(report.error, "fatal", False)
            self.gate.broken |= any(self._group.allgather_objects(lost))
            agreement.collective_result(self._group, report.error, "gemm")
        assert not report.aborted  # without a rank that reports why

    def _stage(self, binding: Binding, matrices: Operands, *, inward: bool) -> None:
        with agreement.collective(self._group, "staging"):
            for matrix in matrices if inward else matrices[2:]:
                if matrix.info.number in binding.staged:
                    self._store.stage(matrix, inward=inward)

    def _count(self, report: ExecutionReport) -> None:
        counters = self._counters
        counters.calls += 1
        counters.tasks += report.tasks
        counters.copy_bytes += report.copy_bytes
        counters.python_tasks += report.python_tasks
        counters.allocations += report.allocations

    def poison_softbuf(self) -> None:
        """Fill this session's SoftBuf with all-one bits, a NaN in every type. Collective."""
        with agreement.collective(self._group, "poisoning the SoftBuf"):
            words = int(self._softbuf.sizes[self._group.rank]) // 4
            if words:
                self._backend.fill_words(int(self._softbuf.addresses[self._group.rank]), words, 0xFFFFFFFF)

    # -- life --------------------------------------------------------------------------------

    def end_plans(self) -> None:
        """Release the streams and events of all plans, which can run no more. Local."""
        for entry in self._entries:
            entry.closed = True
            entry.close()

    def close(self) -> None:
        """Release everything, once the plans have ended. Collective."""
        self._softbuf.close()
        self._flags.close()
        self._group.barrier()
        self._let_go()

    def abandon(self) -> None:
        """Let go without collective calls, after a call that did not end."""
        self._softbuf.abandon()
        self._flags.abandon()
        self._let_go()

    def _let_go(self) -> None:
        self._order.close()
        self._group.count_steps(None)
        # Arrays of the segment would keep it mapped.
        del self._order, self._board
        self.gate.let_go()
        self._control.close()

    def _reset_flags(self) -> None:
        """Set every flag to the epoch, so that none looks reached, and the abort word to 0. Collective."""
        with agreement.collective(self._group, "resetting the flags"):
            self._board.abort[0] = 0
            own = int(self._flags.addresses[self._group.rank])
            count = int(self._flags.sizes[self._group.rank]) // 4
            if count:
                self._backend.fill_words(own, count, self._epoch)
        self._ahead = 0

    def _close_bindings(self) -> None:
        for entry in self._entries:
            entry.close()

    def _forget_matrix(self, number: int) -> None:
        for entry in self._entries:
            entry.forget_matrix(number)


def _in_schedule_order(problem: GemmProblem, matrices: Operands) -> Operands:
    a, b, c = matrices
    return (b, a, c) if problem.swapped else (a, b, c)


def _call_digest(entry: PlanEntry, matrices: Operands, alpha: float, beta: float) -> bytes:
    a, b, c = matrices
    which = struct.pack("<3qdd", a.info.number, b.info.number, c.info.number, alpha, beta)
    known = entry.call_digests.get(which)
    if known is None:
        if len(entry.call_digests) >= _MAX_DIGESTS:
            entry.call_digests.clear()
        known = agreement.digest_of(entry.key_digest + which).tobytes()
        entry.call_digests[which] = known
    return known


def check_float32(name: str, value: float) -> None:
    """Raise ParamError for a finite scalar that float32 has as an infinity or as 0. Local."""
    if value and not _LEAST_FLOAT32 < abs(value) < _MOST_FLOAT32 and math.isfinite(value):
        becomes = "0" if abs(value) < 1 else "infinite"
        raise ParamError(
            f"{name} = {value} becomes {becomes} in float32, in which products of this type are scaled: "
            "scale the matrices instead, or use float64"
        )


def check_trans(name: str, value: object) -> str:
    """Return a caller's transposition, or raise ParamError unless it is N or T. Local."""
    if not isinstance(value, str) or value not in ("N", "T"):
        raise ParamError(f"{name} = {shown(value)}: use 'N' or 'T'")
    return str(value)
