"""
Runs an operation list with numpy, in one thread.

Every lane is a queue. A wait whose flag or event has come, and a body at the head of its lane, are ready; whatever is
ready may run. Every awaited task stands earlier in the global order, and a lane keeps that order. So the first
unfinished task of all ranks is always ready on its rank, and no interleaving deadlocks.

Memory order: numpy's copies and BLAS's stores are done, in program order, when the call returns. For x86-64 keeps the
order of stores, and what bypasses caches is fenced inside the copy. So the flag written after them is seen after them.
"""

from __future__ import annotations

import functools
import heapq
import logging
import math
import os
import time
from collections.abc import Callable, Generator
from typing import Final

import numpy as np

from uncut_mpi.device.files import FileWindows
from uncut_mpi.device.host.bodies import bind_bodies
from uncut_mpi.device.host.system import BlasThreads
from uncut_mpi.device.interface import (
    ALONE,
    Chain,
    Executable,
    ExecutionReport,
    FlagTable,
    ProgressBoard,
    Run,
    TaskTimes,
    Transport,
    stall_error,
)
from uncut_mpi.device.net_lanes import BounceBuffers, NetLanes, NetRun, messages_left
from uncut_mpi.device.views import Array, words_at
from uncut_mpi.errors import DeviceError, StallError, release_frames
from uncut_mpi.model.arguments import Number
from uncut_mpi.planning.lower import Code, OperationList
from uncut_mpi.planning.schedule import MAX_LANES, LaneKind

logger = logging.getLogger("uncut_mpi")

_MASK: Final = 0xFFFFFFFF
_HALF: Final = 0x80000000

_SPINS, _YIELDS = 50, 100
_FIRST_SLEEP_S, _LAST_SLEEP_S = 50e-6, 1e-3
_LOOK_S = 0.02  # how often a sleeping rank looks whether others get on
_POLL_S = 100e-6


class HostExecutable(Executable):
    """An operation list bound to addresses of this process."""

    def __init__(
        self,
        program: OperationList,
        addresses: Array,
        flags: FlagTable,
        board: ProgressBoard,
        *,
        blas: BlasThreads,
        spins: bool,
        files: FileWindows,
        transport: Transport | None = None,
        bounce_buffers: BounceBuffers | None = None,
    ) -> None:
        lane_of = program.operations["lane"]
        of_net = program.lanes["kind"] == LaneKind.NET  # which others move
        self.lanes: list[list[int]] = [
            [] if of_net[lane] else np.flatnonzero(lane_of == lane).tolist() for lane in range(len(of_net))
        ]
        super().__init__(program, addresses, board, np.array([len(lane) for lane in self.lanes]))
        self.rank, self.spins = program.rank, spins
        # Several threads cut a product otherwise, which rounds otherwise.
        self.blas = BlasThreads(1) if program.same_sums else blas
        operations = program.operations
        self.codes: list[int] = operations["code"].tolist()
        self.slots: list[int] = operations["slot"].tolist()
        self.values: list[int] = operations["value"].tolist()
        self.tasks: list[int] = operations["task"].tolist()
        self.peers: list[int] = operations["peer"].tolist()
        self.bodies = bind_bodies(program, addresses, files)
        self.net = NetLanes(program, addresses, flags, transport, bounce_buffers or BounceBuffers())
        self.words = self._words(flags)
        self.counts = board.words[board.rank].data
        self.abort = board.abort.data
        self._open = True

    def _words(self, flags: FlagTable) -> list[memoryview]:
        """Return the flag that each SIGNAL writes and each WAIT_FLAG reads."""
        own, rank = words_at(flags.own, self._program.num_flags), self._program.rank
        in_host, of_host = self._program.operations["in_host"].tolist(), flags.host.reshape(-1).data
        words = [memoryview(b"")] * len(self.codes)
        with_flags = np.isin(self._program.operations["code"], (Code.SIGNAL, Code.WAIT_FLAG))
        for index in np.flatnonzero(with_flags).tolist():
            code, slot, peer = self.codes[index], self.slots[index], self.peers[index]
            if in_host[index]:
                at = (rank if code == Code.SIGNAL else peer) * MAX_LANES + slot
                words[index] = of_host[at : at + 1]
            elif code == Code.WAIT_FLAG:
                words[index] = own[slot : slot + 1]
            else:
                words[index] = words_at(int(flags.peers[peer]) + 4 * slot, 1)
        return words

    def start(
        self, *, alpha: Number, beta: Number, epoch: int, timeout_s: float, traced: bool = False, chain: Chain = ALONE
    ) -> Run:
        """See `Executable.start`: there is nothing to issue, so no body runs yet."""
        if not self._open:
            raise DeviceError("this executable is closed: bind the operation list again")
        self.board.words[self.board.rank] = 0
        return HostRun(self, alpha, beta, epoch & _MASK, timeout_s, traced)

    def runner(self, alpha: Number, beta: Number, epoch: int, timeout_s: float, traced: bool) -> ExecutionReport:
        """See `Executable`."""
        run = self.start(alpha=alpha, beta=beta, epoch=epoch, timeout_s=timeout_s, traced=traced)
        return run.finish()

    def report_of(self, outcome: ExecutionReport, timeout_s: float, *, traced: bool) -> ExecutionReport:
        """See `Executable.report_of`."""
        return outcome

    def advance(self, lane: int) -> None:
        """Let the other ranks see that this one has done something in a lane."""
        self.counts[lane] += 1

    def close(self) -> None:
        """Let go of every view; the memory belongs to others."""
        self._open = False
        self.bodies, self.words = {}, []


class _Aborted(Exception):
    """Another rank has failed: what is left of this one's tasks is left out."""


class HostRun(Run):
    """One run of an operation list; the thread that polls it computes."""

    def __init__(
        self, program: HostExecutable, alpha: Number, beta: Number, epoch: int, timeout_s: float, traced: bool
    ) -> None:
        self._traced = traced
        self._times: list[tuple[int, float, float]] = []
        self._program, self._epoch, self._timeout_s = program, epoch, timeout_s
        self._patience: _Patience | None = None  # while nothing is ready
        self._report = ExecutionReport()
        self._scalars = [0.0, 1.0, alpha, beta]  # by Factor
        self._at = [0] * len(program.lanes)
        self._recorded = [0] * len(program.lanes)  # of each lane, the sequence of the last task with a record
        self._net = NetRun(program.net, epoch)
        self._turns = self.turns()
        self._began_s = time.perf_counter()
        self._over = False

    def poll(self, spin_s: float = 0.0) -> bool:
        """See `Run.poll`."""
        if not self._over:
            self._drive(time.perf_counter() + _POLL_S)
        return self._over

    def finish(self) -> ExecutionReport:
        """See `Run.finish`."""
        if not self._over:
            self._drive(math.inf)
        return self._report

    def _drive(self, until_s: float) -> None:
        """Run what is ready until all is done; before `until_s`, if that is finite, and without waiting then."""
        waits = until_s == math.inf
        try:
            with np.errstate(all="ignore"), self._program.blas.limited():
                for worked in self._turns:
                    if worked:
                        self._patience = None
                        if not waits and time.perf_counter() >= until_s:
                            return
                        continue
                    self._check_abort()
                    patience = self._patience
                    if patience is None:
                        program = self._program
                        patience = self._patience = _Patience(program.board, self._timeout_s, program.spins)
                    if not waits:
                        patience.look(self._waits)
                        return
                    patience.wait(self._waits)
        except _Aborted:
            self._report.aborted = True
        except BaseException as error:
            # An interrupt too: a rank that left alone would strand its peers before the closing barrier.
            logger.debug("rank %d: a run failed", self._program.rank, exc_info=True)
            release_frames(error)
            self._report.error = error.with_traceback(None)  # whose frames refer to the report
            if not isinstance(error, StallError):
                self._program.board.fail(self._epoch)
        self._end()

    def _end(self) -> None:
        self._turns.close()  # it refers to this run
        if self._report.error is not None or self._report.aborted:
            stalled = isinstance(self._report.error, StallError)
            self._net.finish(0.0 if stalled else self._timeout_s)
            if self._net.given_up and not stalled:
                self._report.error = messages_left(self._report.error, self._net.given_up)
            self._write_remaining_flags()
        elif self._traced:
            table = np.array(self._times, np.float64).reshape(-1, 3)
            self._report.times = TaskTimes(table[:, 0].astype(np.int32), table[:, 1], table[:, 2])
        self._report.tasks += self._net.tasks
        self._report.copy_bytes += self._net.copy_bytes
        self._report.issue_s = time.perf_counter() - self._began_s
        self._over = True

    # -- one operation -----------------------------------------------------------------------

    def _is_ready(self, index: int) -> bool:
        code = self._program.codes[index]
        if code == Code.WAIT_FLAG:
            word = self._program.words[index][0]
            return (word - self._epoch - self._program.values[index]) & _MASK < _HALF
        if code == Code.WAIT_EVENT:
            return self._recorded[self._program.peers[index]] >= self._program.values[index]
        return True

    def _step(self, lane: int, index: int) -> None:
        """Perform the operation at the head of a lane, which is ready."""
        program = self._program
        code = program.codes[index]
        if code <= Code.COMBINE:
            self._check_abort()
            body, start_s = program.bodies[index], time.monotonic()
            body(self._scalars, functools.partial(self._get_on, lane))
            if self._traced:
                self._times.append((program.tasks[index], start_s, time.monotonic()))
            elif body.behind:
                self._at[lane] += body.behind
                self._report.tasks += body.behind
                program.counts[lane] += body.behind
            self._report.tasks += 1
            self._report.copy_bytes += body.copy_bytes
        elif code == Code.SIGNAL:
            self._signal(index)
        elif code == Code.RECORD:
            self._recorded[lane] = program.values[index]
        self._at[lane] += 1
        program.advance(lane)
        program.net.beat(self._timeout_s)

    def _get_on(self, lane: int) -> None:
        """Take note of a part of a body."""
        self._program.advance(lane)
        self._program.net.beat(self._timeout_s)
        self._check_abort()

    def _check_abort(self) -> None:
        if self._program.abort[0] == self._epoch + 1:
            raise _Aborted

    def _signal(self, index: int) -> None:
        self._program.words[index][0] = (self._epoch + self._program.values[index]) & _MASK

    def turns(self) -> Generator[bool]:
        """Run the ready operation that is earliest in the list, until none is left; yield whether there was one."""
        codes, net = self._program.codes, self._net
        ready: list[tuple[int, int]] = []
        blocked = self._heads()
        while blocked or ready or not net.over:
            moved = net.listens and net.advance()
            for lane in [lane for lane, index in blocked.items() if self._is_ready(index)]:
                heapq.heappush(ready, (blocked.pop(lane), lane))
            if not ready:
                yield moved
                continue
            index, lane = heapq.heappop(ready)
            self._step(lane, index)
            queue = self._program.lanes[lane]
            # What follows a body is told at once: somebody may be waiting for it.
            while self._at[lane] < len(queue) and codes[queue[self._at[lane]]] >= Code.RECORD:
                self._step(lane, queue[self._at[lane]])
            if self._at[lane] < len(queue):
                blocked[lane] = queue[self._at[lane]]
            yield True

    def _heads(self) -> dict[int, int]:
        """Return the operation at the head of each lane that is not through."""
        lanes = zip(self._program.lanes, self._at, strict=True)
        return {lane: queue[at] for lane, (queue, at) in enumerate(lanes) if at < len(queue)}

    # -- failure -----------------------------------------------------------------------------

    def _waits(self) -> list[str]:
        return [*self._net.waits(), *self._program.explain(self._program.board.words)]

    def _write_remaining_flags(self) -> None:
        """Write every flag not yet written, so that no peer waits for ever."""
        for lane, queue in enumerate(self._program.lanes):
            for index in queue[self._at[lane] :]:
                if self._program.codes[index] == Code.SIGNAL:
                    self._signal(index)
                self._program.advance(lane)
            self._at[lane] = len(queue)


class _Patience:
    """Waiting: spin, yield, sleep; and tell a stall from slow peers by the progress words of all ranks."""

    def __init__(self, board: ProgressBoard, timeout_s: float, spins: bool) -> None:
        self._board, self._timeout_s = board, timeout_s
        self._turns = 0 if spins else _SPINS
        self._sleep_s = _FIRST_SLEEP_S
        self._seen: Array | None = None
        self._changed_s = self._looked_s = 0.0

    def wait(self, describe: Callable[[], list[str]]) -> None:
        """
        Pass a little time.

        Parameters
        ----------
        describe : callable
            Says what this rank waits for, should that become an error.

        Raises
        ------
        StallError
            If no rank has finished anything for as long as is allowed.
        """
        self._turns += 1
        if self._turns <= _SPINS:
            return
        if self._turns <= _SPINS + _YIELDS:
            os.sched_yield()
            return
        time.sleep(self._sleep_s)
        self._sleep_s = min(2.0 * self._sleep_s, _LAST_SLEEP_S)
        self.look(describe)

    def look(self, describe: Callable[[], list[str]]) -> None:
        """See whether any rank gets on; parameters and errors as of `wait`."""
        now = time.monotonic()
        if self._seen is None:
            self._seen, self._changed_s, self._looked_s = self._board.words.copy(), now, now
        elif now - self._looked_s >= min(_LOOK_S, 0.25 * self._timeout_s):
            self._looked_s = now
            if not np.array_equal(self._seen, self._board.words):
                self._seen, self._changed_s = self._board.words.copy(), now
            elif now - self._changed_s > self._timeout_s:
                raise stall_error(self._timeout_s, describe())
