"""
Ranks on one GPU, without MPI: threads of one process, or processes that share memory by CUDA IPC.

A case is a module-level function that returns a schedule; the parent fills the buffers, starts
every rank between two barriers and reads the buffers back.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from uncut_mpi.api.watchdog import explain
from uncut_mpi.device.cuda import CudaBackend, preparation
from uncut_mpi.device.interface import ExecutionReport, FlagTable, ProgressBoard
from uncut_mpi.errors import StallError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.schedule import MAX_LANES, Schedule, buffer_bytes
from uncut_mpi.segments import Segment

PATIENCE_S = 90.0
Exports = tuple[dict[int, bytes], dict[int, int], bytes, bytes]


class Rank:
    """One rank's backend with the buffers it owns; host buffers belong to rank 0 and work within one process only."""

    def __init__(self, schedule: Schedule, rank: int, *, tune: bool = False) -> None:
        self.schedule, self.rank = schedule, rank
        self.backend = CudaBackend(0)
        self.backend.tune_products(tune=tune)
        self._lowering = lower(schedule)
        self._host: dict[int, np.ndarray] = {}
        self._owned = {}
        sizes = buffer_bytes(schedule.buffers)
        for index, (owner, in_host) in enumerate(zip(schedule.owners(), schedule.in_host(), strict=True)):
            if max(0, owner) != rank:
                continue
            if in_host:
                self._host[index] = np.zeros(max(1, int(sizes[index])), np.uint8)
                self.backend.pin(self._host[index].ctypes.data, self._host[index].nbytes)
            else:
                self._owned[index] = self.backend.allocate(int(sizes[index]))
        self.flags = self.backend.allocate(4 * max(1, int(self._lowering.num_flags[rank])))
        self._host_flags = None
        if rank == 0:
            self._host_flags = Segment.create(4 * MAX_LANES * schedule.num_ranks, "flags in host memory")

    def export(self) -> Exports:
        """Handles of the device buffers, addresses of the host buffers, handles of flags on the device and the host."""
        host = {index: block.ctypes.data for index, block in self._host.items()}
        of_host = self._host_flags.handle if self._host_flags is not None else b""
        return {index: one.handle for index, one in self._owned.items()}, host, self.flags.handle, of_host

    def prepare(self, exports: Sequence[Exports], epoch: int) -> None:
        """Map the other ranks' memory and bind this rank's list."""
        addresses = np.zeros(len(self.schedule.buffers), np.int64)
        peers = np.zeros(len(exports), np.int64)
        for rank, (handles, host, flags, _) in enumerate(exports):
            own = rank == self.rank
            for index, handle in handles.items():
                addresses[index] = self._owned[index].address if own else self.backend.open(handle)
            for index, address in host.items():
                addresses[index] = address
            peers[rank] = self.flags.address if own else self.backend.open(flags)
        count = max(1, int(self._lowering.num_flags[self.rank]))
        self.backend.fill_words(self.flags.address, count, epoch)
        if self._host_flags is None:
            self._host_flags = Segment.open(exports[0][3])
        of_host = self._host_flags.array(np.uint32, (len(exports), MAX_LANES))
        of_host[self.rank] = epoch
        self.board = np.zeros(ProgressBoard.shape(len(exports)), np.uint32)
        self.program = self._lowering.rank_list(self.rank)
        self.addresses, self.table = addresses, FlagTable(self.flags.address, peers, of_host)
        self.progress = ProgressBoard(self.board, self.rank)
        self.executable = self.backend.executable(self.program, addresses, self.table, self.progress)
        ranks = range(len(exports))
        self.executable.explain = functools.partial(explain, self.schedule, ranks, False)

    def write(self, index: int, values: np.ndarray) -> None:
        """Fill a buffer that this rank owns."""
        if index in self._host:
            self._host_view(index)[...] = values
        else:
            self.backend.from_host(self._owned[index].address, self._ld(index), np.asfortranarray(values))

    def read(self, index: int) -> np.ndarray:
        """The contents of a buffer that this rank owns."""
        if index in self._host:
            return self._host_view(index).copy()
        record = self.schedule.buffers[index]
        shape = (int(record["rows"]), int(record["cols"]))
        out = np.zeros(shape, DType(int(record["dtype"])).numpy, order="F")
        self.backend.to_host(self._owned[index].address, self._ld(index), out)
        return out

    def owns(self, index: int) -> bool:
        return index in self._owned or index in self._host

    def close(self) -> None:
        self.backend.close()
        if self._host_flags is not None:
            self._host_flags.close()

    def _ld(self, index: int) -> int:
        return int(self.schedule.buffers["ld"][index])

    def _host_view(self, index: int) -> np.ndarray:
        record = self.schedule.buffers[index]
        dtype = DType(int(record["dtype"])).numpy
        shape = (int(record["rows"]), int(record["cols"]))
        return np.ndarray(shape, dtype, self._host[index], strides=(dtype.itemsize, self._ld(index) * dtype.itemsize))


class ThreadedRanks:
    """
    All ranks as threads of this process, each with a backend of its own on device 0.

    Not for several ranks with half types: beside other processes on the GPU one run of some hundred stalls, why is not
    known (docs/performance.md, 2026-11-22). No job has several ranks in one process.
    """

    def __init__(self, schedule: Schedule, epoch: int = 1) -> None:
        assert schedule.num_ranks == 1 or not schedule.problem.rounds_c
        self.schedule, self.epoch = schedule, epoch
        self.ranks = [Rank(schedule, rank) for rank in range(schedule.num_ranks)]
        exports = [rank.export() for rank in self.ranks]
        for rank in self.ranks:
            rank.prepare(exports, epoch)

    def write(self, index: int, values: np.ndarray) -> None:
        next(rank for rank in self.ranks if rank.owns(index)).write(index, values)

    def read(self, index: int) -> np.ndarray:
        return next(rank for rank in self.ranks if rank.owns(index)).read(index)

    def run(self, alpha: float = 1.0, beta: float = 0.0, timeout_s: float = 20.0) -> list[ExecutionReport]:
        reports: dict[int, ExecutionReport] = {}

        def work(rank: Rank) -> None:
            reports[rank.rank] = rank.executable.run(alpha=alpha, beta=beta, epoch=self.epoch, timeout_s=timeout_s)

        threads = [threading.Thread(target=work, args=(rank,)) for rank in self.ranks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), "a rank did not come back"
        self.epoch = (self.epoch + self.ranks[0].executable.span) % 2**32
        return [reports[rank] for rank in range(len(self.ranks))]

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


class Processes:
    """Processes on device 0, each of which is one rank of one schedule after another."""

    def __init__(self, count: int, environment: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._children = [], []
        self.broken = False
        with _environment(environment or {}):
            for number in range(count):
                ours, theirs = context.Pipe()
                child = context.Process(target=_serve, args=(theirs, number), daemon=True)
                child.start()
                theirs.close()
                self._pipes.append(ours)
                self._children.append(child)

    def ask(self, rank: int, what: str, *arguments: Any) -> Any:
        """Have one process do something and return what comes of it."""
        self._send(rank, what, arguments)
        return self._receive(rank)

    def ask_all(self, count: int, what: str, *arguments: Any) -> list[Any]:
        """Have the first `count` processes do something at one time."""
        for rank in range(count):
            self._send(rank, what, arguments)
        return [self._receive(rank) for rank in range(count)]

    def close(self) -> None:
        """End them all."""
        for pipe in self._pipes:
            with contextlib.suppress(OSError):
                pipe.send(("quit", ()))
        for child in self._children:
            child.join(0.0 if self.broken else 10.0)
            if child.is_alive():
                child.kill()
                child.join()

    def _send(self, rank: int, what: str, arguments: tuple[Any, ...]) -> None:
        try:
            self._pipes[rank].send((what, arguments))
        except OSError:  # it is gone
            self.broken = True
            raise

    def _receive(self, rank: int) -> Any:
        try:
            assert self._pipes[rank].poll(PATIENCE_S), f"rank {rank} did not answer within {PATIENCE_S} s"
            good, value = self._pipes[rank].recv()
            assert good, f"rank {rank}:\n{value}"
        except BaseException:
            self.broken = True
            raise
        return value


class ProcessRanks:
    """
    All ranks as processes on device 0; memory is shared by CUDA IPC.

    Parameters
    ----------
    processes : Processes
        At least as many as there are ranks; what else they were is over.
    tune_from : float, optional
        Products of so many operations have their kernels chosen by their time.
    """

    def __init__(
        self, schedule: Schedule, processes: Processes, epoch: int = 1, *, tune_from: float | None = None
    ) -> None:
        self.schedule, self.epoch, self._span = schedule, epoch, lower(schedule).span
        self._processes = processes
        exports = self._all("begin", schedule.encode(), tune_from)
        self._all("prepare", exports, epoch)

    def write(self, index: int, values: np.ndarray) -> None:
        self._one(max(0, int(self.schedule.owners()[index])), "write", index, values)

    def read(self, index: int) -> np.ndarray:
        return self._one(max(0, int(self.schedule.owners()[index])), "read", index)

    def run(self, alpha: float = 1.0, beta: float = 0.0, timeout_s: float = 20.0) -> list[ExecutionReport]:
        reports = self._all("run", alpha, beta, self.epoch, timeout_s)
        # A rank that stalled has work in flight that waits for ever.
        self._processes.broken |= any(isinstance(report.error, StallError) for report in reports)
        self.epoch = (self.epoch + self._span) % 2**32
        return reports

    def tuned(self) -> list[tuple[list[int], float, float]]:
        """The products of all ranks that were timed: type and more, time by the usual kernel and by the best."""
        return [one for found in self._all("tuned") for one in found]

    def close(self) -> None:
        if not self._processes.broken:
            self._all("unmap")  # importers first, then exporters
            self._all("close")

    def _all(self, what: str, *arguments: Any) -> list[Any]:
        return self._processes.ask_all(self.schedule.num_ranks, what, *arguments)

    def _one(self, rank: int, what: str, *arguments: Any) -> Any:
        return self._processes.ask(rank, what, *arguments)


def _serve(pipe: Any, number: int) -> None:
    try:
        rank: Any = None
        while True:
            what, arguments = pipe.recv()
            if what == "quit":
                return
            value: Any = None
            if what == "begin":
                encoded, tune_from = arguments
                if tune_from is not None:
                    preparation.LEAST_TUNED_OPERATIONS = tune_from  # in this process alone
                rank = Rank(Schedule.decode(encoded), number, tune=tune_from is not None)
                value = rank.export()
            elif what == "run":
                alpha, beta, epoch, timeout_s = arguments
                value = rank.executable.run(alpha=alpha, beta=beta, epoch=epoch, timeout_s=timeout_s)
            elif what == "unmap":
                value = rank.backend._imports.close_all()
            elif what == "tuned":
                value = rank.backend._native.tuned_products()
            else:
                value = getattr(rank, what)(*arguments)
            pipe.send((True, value))
    except Exception:
        with contextlib.suppress(OSError):
            pipe.send((False, traceback.format_exc()))


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
