"""The CUDA executor on a fake driver of host memory: ranks are threads, device memory is numpy's."""

from __future__ import annotations

import collections
import ctypes
import dataclasses
import functools
import math
import os
import pathlib
import subprocess
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tests.helpers import interpret
from tests.helpers.layouts import user_parts
from tests.helpers.pushed import Pushed
from uncut_mpi import _native
from uncut_mpi.api.watchdog import explain
from uncut_mpi.device.cuda.executable import CudaExecutable
from uncut_mpi.device.files import FileWindows
from uncut_mpi.device.interface import Chain, ExecutionReport, FlagTable, ProgressBoard, Run
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.placement import MATRICES
from uncut_mpi.planning.lower import Code, OperationList, lower
from uncut_mpi.planning.schedule import MAX_LANES, Matrix, Schedule, buffer_bytes

HERE = pathlib.Path(__file__).parent
SOURCES = HERE.parent.parent / "uncut_mpi" / "csrc"


def build_fake(compiler: str, directory: pathlib.Path) -> pathlib.Path:
    """Compile the fake driver and return the library."""
    library = directory / "libfake_cuda.so"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", f"-I{SOURCES}", "-o", library, HERE / "fake_cuda.cpp"]
    subprocess.run([str(part) for part in command], check=True, timeout=120)
    return library


class FakeCuda:
    """The fake library, as tests see it: what was issued, and what shall fail."""

    def __init__(self, library: pathlib.Path) -> None:
        self.driver = _native.CudaDriver(str(library))
        self.blas = _native.CudaBlas(str(library))
        self._library = ctypes.CDLL(str(library))
        self._library.fake_log.restype = ctypes.c_size_t
        self._library.fake_most_queued.restype = ctypes.c_size_t
        self._library.fake_fail.argtypes = [ctypes.c_char_p, ctypes.c_int, ctypes.c_int, ctypes.c_int]

    def device(self) -> _native.CudaDevice:
        return _native.CudaDevice(self.driver, self.blas, 0)

    def reset(self) -> None:
        self._library.fake_reset()

    def stream(self) -> int:
        """A stream of a caller's."""
        handle = ctypes.c_void_p()
        assert self._library.f_cuStreamCreate(ctypes.byref(handle), 1) == 0
        return handle.value or 0

    def copy(self, array: np.ndarray, stream: int) -> np.ndarray:
        """What a stream has copied of an array, once it has come to that."""
        copied = np.zeros_like(array)
        ends = (ctypes.c_uint64(one.ctypes.data) for one in (copied, array))
        assert self._library.f_cuMemcpyAsync(*ends, ctypes.c_size_t(array.nbytes), ctypes.c_void_p(stream)) == 0
        return copied

    def synchronize(self, stream: int) -> None:
        """Wait until a stream has come to its end."""
        assert self._library.f_cuStreamSynchronize(ctypes.c_void_p(stream)) == 0

    def log(self) -> list[str]:
        size = self._library.fake_log(None, 0)
        text = ctypes.create_string_buffer(size + 1)
        self._library.fake_log(text, ctypes.c_size_t(size + 1))
        return text.value.decode().splitlines()

    def is_one_allocation(self, array: np.ndarray) -> None:
        """Say that an array's memory is one allocation; any other address is taken for one of its own."""
        first = array.ctypes.data
        self._library.fake_allocation(ctypes.c_uint64(first), ctypes.c_uint64(first + array.nbytes))

    def fail(self, call: str, first: int = 1, last: int = 1 << 30, code: int = 1) -> None:
        self._library.fake_fail(call.encode(), first, last, code)

    def can_flush(self, value: bool) -> None:
        self._library.fake_can_flush(int(value))

    @property
    def current_context(self) -> int:
        """Of the calling thread."""
        context = ctypes.c_void_p()
        self._library.f_cuCtxGetCurrent(ctypes.byref(context))
        return context.value or 0

    @current_context.setter
    def current_context(self, context: int) -> None:
        self._library.f_cuCtxSetCurrent(ctypes.c_void_p(context))

    @property
    def allocations(self) -> int:
        return int(self._library.fake_allocations())

    def product_ticks(self, **ticks: int) -> None:
        """What products take from now on, by option of cublasLt's (``option_7=10``); ``usual``: by cuBLAS's choice."""
        for option in range(8):
            count = ticks.get(f"option_{option}" if option else "usual", 0)
            self._library.fake_product_ticks(option, ctypes.c_uint64(count))

    @property
    def lt_objects(self) -> int:
        """Descriptions of cublasLt's that are alive."""
        return int(self._library.fake_lt_objects())

    @property
    def most_queued(self) -> int:
        return int(self._library.fake_most_queued())


def bind(
    device: _native.CudaDevice,
    program: OperationList,
    addresses: Sequence[int],
    flags: FlagTable | None = None,
    board: ProgressBoard | None = None,
    files: FileWindows | None = None,
    kernel: Callable[[int], int] = (1 << 48).__add__,
) -> CudaExecutable:
    """An executable whose kernels are the fake's, by default of one rank that no other sees."""
    flags = flags or FlagTable(0, np.zeros(1, np.int64), np.zeros((1, MAX_LANES), np.uint32))
    board = board or ProgressBoard(np.zeros(ProgressBoard.shape(1), np.uint32), 0)
    about = kernel, files or FileWindows(), "fake device"
    return CudaExecutable(device, program, np.array(addresses, np.int64), flags, board, *about)


class FakeCluster:
    """
    All ranks of a schedule as threads of this process.

    The contents of some buffers lie in files, or where another one's do; others are rows of a block of bytes if that is
    given.
    """

    def __init__(
        self,
        fake: FakeCuda,
        schedule: Schedule,
        epoch: int = 1,
        tune_from: float = math.inf,
        in_files: Mapping[int, str] = types.MappingProxyType({}),
        block: np.ndarray | None = None,
        copies_bytes: int = 1 << 20,
        over: Mapping[int, int] = types.MappingProxyType({}),
    ) -> None:
        self.schedule, self.epoch = schedule, epoch
        lowering = lower(schedule)
        count = schedule.num_ranks
        self.memory = [np.zeros(max(1, int(nbytes)), np.uint8) for nbytes in buffer_bytes(schedule.buffers)]
        if block is not None:
            self.memory = [row[: len(own)] for row, own in zip(block, self.memory, strict=True)]
        for index, other in over.items():
            self.memory[index] = self.memory[other]
        words = [np.full(count + max(1, n), epoch, np.uint32) for n in lowering.num_flags]
        self.flags = [own[count:] for own in words]  # behind a word of each rank
        self.board = np.zeros(ProgressBoard.shape(count), np.uint32)
        self.host_flags = np.full((count, MAX_LANES), epoch, np.uint32)
        self.programs = [lowering.rank_list(rank) for rank in range(count)]
        epilogue = schedule.problem.epilogue
        if epilogue is not None:
            self.vectors = interpret.vectors_of(schedule.problem)
            given = zip(self.vectors, (epilogue.scale, epilogue.bias), strict=True)
            vectors = tuple(one.ctypes.data if there else 0 for one, there in given)
            self.programs = [dataclasses.replace(one, vectors=vectors) for one in self.programs]
        addresses = [memory.ctypes.data for memory in self.memory]
        self.files = FileWindows()
        for index, path in in_files.items():
            pathlib.Path(path).write_bytes(self.memory[index].tobytes())
            window = self.files.open(path, os.open(path, os.O_RDWR), self.memory[index].nbytes)
            addresses[index] = window.address
            self.memory[index] = np.memmap(path, np.uint8, "r+")  # what the file holds, for who looks
        peers = np.array([flags.ctypes.data for flags in self.flags])
        self.executables = [
            bind(
                self._device(fake, tune_from, copies_bytes),
                program,
                addresses,
                FlagTable(int(peers[rank]), peers, self.host_flags),
                ProgressBoard(self.board, rank),
                self.files,
            )
            for rank, program in enumerate(self.programs)
        ]
        for one in self.executables:
            one.explain = functools.partial(explain, schedule, range(count), False)

    @staticmethod
    def _device(fake: FakeCuda, tune_from: float, copies_bytes: int) -> _native.CudaDevice:
        device = fake.device()
        device.copies_bytes = copies_bytes
        device.tune_products(tune_from, timing=True)
        return device

    def buffer(self, index: int) -> np.ndarray:
        """The column-major contents of a buffer."""
        record = self.schedule.buffers[index]
        dtype = DType(int(record["dtype"])).numpy
        rows, cols, ld = (int(record[name]) for name in ("rows", "cols", "ld"))
        return np.ndarray((rows, cols), dtype, self.memory[index], strides=(dtype.itemsize, ld * dtype.itemsize))

    def release(self, *ranks: int) -> None:
        """Let no wait of `ranks` (all by default) last in the next run, whoever signals."""
        for rank in ranks or range(len(self.flags)):
            self.flags[rank].fill((self.epoch + self.executables[rank].span) % 2**32)

    def prepare_trace(self) -> None:
        """Prepare each rank's list for traced runs."""
        for executable in self.executables:
            executable.prepare_trace()

    def signalled(self, epoch: int) -> list[np.ndarray]:
        """What the flags hold after a run that began at `epoch`."""
        flags = [np.zeros_like(own) for own in self.flags]
        for program in self.programs:
            for signal in program.operations[program.operations["code"] == Code.SIGNAL]:
                flags[signal["peer"]][signal["slot"]] = epoch + signal["value"]
        return flags

    def run(
        self,
        alpha: float = 1.0,
        beta: float = 0.0,
        timeout_s: float = 20.0,
        ranks: Sequence[int] | None = None,
        traced: bool = False,
        chained: int = 0,
    ) -> dict[int, ExecutionReport]:
        """
        Run the lists of `ranks` (all by default), one thread each, then advance the epoch.

        `chained`: run them so many times, each begun behind the one before as soon as that may be; returns the last
        reports, or those of a failure.
        """
        reports: dict[int, ExecutionReport] = {}
        span, ended = self.executables[0].span, [0] * len(self.executables)

        def work(rank: int) -> None:
            executable = self.executables[rank]
            about = {"alpha": alpha, "beta": beta, "timeout_s": timeout_s}
            if not chained:
                reports[rank] = executable.run(**about, epoch=self.epoch, traced=traced)
                return
            runs = collections.deque[Run]()
            for number in range(chained):
                while len(runs) == 2 or (runs and not runs[-1].may_be_followed):
                    reports[rank] = runs.popleft().finish()
                    ended[rank] += 1
                while not runs and min(ended) < number:  # as a call's end has ranks meet
                    time.sleep(1e-4)
                epoch = (self.epoch + number * span) % 2**32
                runs.append(executable.start(**about, epoch=epoch, chain=Chain.NEXT if runs else Chain.FIRST))
            for run in runs:
                reports[rank] = run.finish()
                ended[rank] += 1

        threads = [threading.Thread(target=work, args=(rank,)) for rank in ranks or range(len(self.executables))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a rank did not come back"
        self.epoch = (self.epoch + max(1, chained) * span) % 2**32
        return reports


def load(case: Pushed, cluster: FakeCluster, seed: int = 0) -> None:
    """Fill the buffers of a case's schedule."""
    case.fill(cluster.schedule, {i: cluster.buffer(i) for i in range(len(cluster.schedule.buffers))}, seed)


def filled_with_numbers(cluster: FakeCluster, seed: int) -> tuple[tuple[complex, complex], Callable[[], bool]]:
    """
    Give A, B and C numbers and all else NaN; return alpha, beta and what says whether a call was right.

    It was if C is, and nothing beside C in its memory has changed; C has its first numbers again then.
    """
    schedule = cluster.schedule
    data = interpret.random_data(schedule.problem, seed)
    memory = [cluster.buffer(index) for index in range(len(schedule.buffers))]
    for block in cluster.memory:
        block.fill(0xFF)  # NaN, in all padding too
    for matrix, values in zip(MATRICES, (data.a, data.b, data.c), strict=True):
        for _, held, place in user_parts(schedule, matrix, memory):
            held[...] = values[place]
    result, bound = interpret.reference(schedule.problem, data)
    parts = user_parts(schedule, Matrix.C, memory)
    before = {at: cluster.memory[at].copy() for at, _, _ in parts}

    def is_right() -> bool:
        right = all((np.abs(held.astype(result.dtype) - result[at]) <= bound[at]).all() for _, held, at in parts)
        for _, held, at in parts:
            held[...] = data.c[at]
        return right and all(np.array_equal(cluster.memory[at], was) for at, was in before.items())

    return (data.alpha, data.beta), is_right


def succeed(reports: Mapping[int, ExecutionReport]) -> None:
    """Check that every rank's run has succeeded."""
    for rank, report in reports.items():
        assert report.error is None, f"rank {rank}: {report.error!r}"


def packed_in(fake):
    """How many copies each pack had, as they were launched."""
    return [int(line.split()[-1]) for line in fake.log() if " pack " in line]
