"""An operation list bound to one device: the native executor, and what its results mean in words."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import NoReturn

import numpy as np

from uncut_mpi import _native
from uncut_mpi.device.cuda.library import device_errors
from uncut_mpi.device.files import FileWindows
from uncut_mpi.device.interface import (
    ALONE,
    Chain,
    Executable,
    ExecutionReport,
    FlagTable,
    ProgressBoard,
    Run,
    TaskTimes,
    stall_error,
)
from uncut_mpi.device.net_lanes import NetLanes, NetRun, messages_left
from uncut_mpi.errors import DataFileError, DeviceError, StallError, release_frames
from uncut_mpi.model.arguments import Number
from uncut_mpi.planning.lower import Code, OperationList
from uncut_mpi.planning.schedule import LaneKind

_TURNS = 8  # of messages, for one of the rest


class NoFlagsError(DeviceError):
    """
    The CUDA context of this rank is unusable, or a run could not begin: it writes no flags, and the job has to end.

    Attributes
    ----------
    fatal : bool
        True; other device errors leave the context usable and do not have it.
    """

    fatal = True


class CudaExecutable(Executable):
    """
    The list of one rank, ready to run.

    Parameters
    ----------
    device : CudaDevice
        Whose streams, handles and events are used; shared with other executables.
    program, addresses, flags, board
        As for `Backend.executable`.
    kernel : callable
        Takes the signature of a kernel of ours and returns its handle.
    files : FileWindows
        Of the backend.
    description : str
        The device in words, for messages.
    on_close : callable, optional
        Called when the list is forgotten, once.

    Raises
    ------
    DeviceError
        If the list holds something this device cannot run, or streams and events cannot be made.
    CapacityError
        If memory for workspaces is lacking.
    """

    def __init__(
        self,
        device: _native.CudaDevice,
        program: OperationList,
        addresses: np.ndarray,
        flags: FlagTable,
        board: ProgressBoard,
        kernel: Callable[[int], int],
        files: FileWindows,
        description: str,
        on_close: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(program, addresses, board, _ends_of_lanes(program))
        self._on_close = on_close
        self._kept: object = flags  # the native executor holds its address only, and that of the board
        self._description, self._files = description, files
        # What goes wrong natively in it is a `DeviceError`; one for all runs, since every call enters it.
        self.running = device_errors(f"running on {description}")
        with device_errors(f"preparing a plan on {description}"):
            self._native: _native.CudaExecutor | None = _native.CudaExecutor(
                device, program, addresses, flags, board, kernel, files.table()
            )
        self.runner = self._native.run  # one native call, without the interpreter lock

    def move(self, net: NetLanes, within: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        """Have runs move lanes of the net, which streams wait for, in the thread that makes them and in a context."""

        def run(
            alpha: Number, beta: Number, epoch: int, timeout_s: float, traced: bool
        ) -> _native.CudaRunResult | ExecutionReport:
            native = _native.CudaRun(self._open(), alpha, beta, epoch, timeout_s, traced, int(ALONE))
            messages = NetRun(net, epoch)
            with within():
                try:
                    self._finish(native, net, messages, epoch, timeout_s)
                except StallError as error:
                    release_frames(error)
                    messages.finish(0.0)
                    return ExecutionReport(error=error.with_traceback(None))
                except BaseException as error:  # an interrupt too: a rank that left alone would strand its peers
                    release_frames(error)
                    self.board.fail(epoch)
                    messages.finish(timeout_s)
                    return self._outcome(native, messages, timeout_s, error.with_traceback(None))
                return self._outcome(native, messages, timeout_s)

        self.runner = run

    def _outcome(
        self, native: _native.CudaRun, messages: NetRun, timeout_s: float, error: BaseException | None = None
    ) -> _native.CudaRunResult | ExecutionReport:
        """Return what a run and its messages did, of several errors the worst."""
        result = native.finish()
        result.add(messages.tasks, messages.copy_bytes)
        if messages.given_up and not result.fatal:
            error = error or self._error_of(result, timeout_s)
            return ExecutionReport(error=messages_left(error, messages.given_up))
        if error is None or not (result.went_well or result.aborted):
            return result
        return ExecutionReport(error=error)

    def _finish(self, native: _native.CudaRun, net: NetLanes, messages: NetRun, epoch: int, timeout_s: float) -> None:
        """Go on with a run and its messages until both are over."""
        moved_s, words, seen = time.monotonic(), self.board.words, b""
        while not (over := native.poll()) or not messages.over:
            if messages.advance(_TURNS):
                moved_s = time.monotonic()
                net.beat(timeout_s)
            elif words.tobytes() != seen:  # here, or where ranks have told that they get on
                moved_s, seen = time.monotonic(), words.tobytes()
                net.beat(timeout_s)
            elif over and not (result := native.finish()).went_well:
                if not result.aborted:
                    self.board.fail(epoch)
                messages.finish(timeout_s)
            elif over and time.monotonic() - moved_s > timeout_s:
                raise stall_error(timeout_s, [*messages.waits(), *self.explain(self.board.words)])
            else:
                os.sched_yield()

    def start(
        self, *, alpha: Number, beta: Number, epoch: int, timeout_s: float, traced: bool = False, chain: Chain = ALONE
    ) -> Run:
        """See `Executable.start`."""
        run = _native.CudaRun(self._open(), alpha, beta, epoch & 0xFFFFFFFF, timeout_s, traced, int(chain))
        return CudaRun(self, run, timeout_s, traced)

    def _open(self) -> _native.CudaExecutor:
        if self._native is None:
            self._refuse()
        return self._native

    def _refuse(self, *unused: object) -> NoReturn:
        raise DeviceError("a closed executable was asked to run; make a new plan")

    def report_of(
        self, result: _native.CudaRunResult | ExecutionReport, timeout_s: float, *, traced: bool
    ) -> ExecutionReport:
        """See `Executable.report_of`."""
        if isinstance(result, ExecutionReport):
            return result
        report = ExecutionReport(*result.figures)
        if not result.went_well:
            report.error = self._error_of(result, timeout_s)
            report.aborted = result.aborted
        if traced:
            report.times = self._times_of(result)
        return report

    def prepare_trace(self) -> None:
        """Make two events per body; they stay with the backend for other traces."""
        with device_errors(f"preparing a trace on {self._description}"):
            self._open().prepare_trace()

    def close(self) -> None:
        """Forget the list; streams, events and workspaces stay with the backend for the next one."""
        self._native = self._kept = None
        self.runner = self._refuse
        # The caller's board goes, and another thread may still ask for progress.
        self.board = ProgressBoard(np.zeros(ProgressBoard.shape(self._program.rank), np.uint32), 0)
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _error_of(self, result: _native.CudaRunResult, timeout_s: float) -> Exception | None:
        if result.file_error:
            window = self._files.of(result.descriptor)
            return DataFileError("a file was closed in use") if window is None else window.error(result.file_error)
        if result.error:
            text = f"rank {self._program.rank}, {self._description}{self._task_of(result.operation)}: {result.error}"
            if result.fatal:
                return NoFlagsError(f"{text}; this rank can write no flags, and the job has to end")
            return DeviceError(text)
        if result.stalled:
            return stall_error(timeout_s, self.explain(self.board.words))
        return None

    def _times_of(self, result: _native.CudaRunResult) -> TaskTimes | None:
        if result.error or result.stalled or result.aborted:
            return None
        program = self._program
        on_stream = program.lanes["kind"][program.operations["lane"]] != LaneKind.HOST
        bodies = np.flatnonzero((program.operations["code"] <= Code.COMBINE) & on_stream)
        times = np.array(result.times_s, np.float64).reshape(-1, 2)
        by_host = np.array(result.host_times, np.float64).reshape(-1, 3)
        tasks = program.operations["task"][np.concatenate((bodies, by_host[:, 0].astype(np.int64)))]
        times = np.concatenate((times, by_host[:, 1:]))
        return TaskTimes(tasks, times[:, 0], times[:, 1])

    def _task_of(self, operation: int) -> str:
        if operation < 0:
            return ""
        record = self._program.operations[operation]
        return f", task {record['task']} ({Code(record['code']).name})"


def _ends_of_lanes(program: OperationList) -> np.ndarray:
    """Return the last words of lanes: streams write twice the number of the next operation, workers count theirs."""
    lanes = program.operations["lane"]
    through = np.zeros(len(program.lanes))
    np.maximum.at(through, lanes, 2.0 * np.arange(len(lanes)) + 2)
    counted = program.lanes["kind"] == LaneKind.HOST
    through[counted] = np.bincount(lanes, minlength=len(program.lanes))[counted]
    return through


class CudaRun(Run):
    """One run of an executable."""

    def __init__(self, executable: CudaExecutable, native: _native.CudaRun, timeout_s: float, traced: bool) -> None:
        self._executable, self._native = executable, native
        self._timeout_s, self._traced = timeout_s, traced

    def poll(self, spin_s: float = 0.0) -> bool:
        """See `Run.poll`."""
        with self._executable.running:
            return self._native.poll(spin_s)

    @property
    def may_be_followed(self) -> bool:
        """See `Run.may_be_followed`."""
        return self._native.may_be_followed

    def precede(self, streams: list[int]) -> None:
        """See `Run.precede`."""
        with self._executable.running:
            self._native.precede(streams)

    def finish(self) -> ExecutionReport:
        """See `Run.finish`."""
        with self._executable.running:
            result = self._native.finish()
        return self._executable.report_of(result, self._timeout_s, traced=self._traced)
