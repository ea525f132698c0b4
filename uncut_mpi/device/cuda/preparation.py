"""What a plan needs before it may be fired: its kernels loaded, everything it calls called once."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.device.cuda.executable import CudaExecutable
from uncut_mpi.device.cuda.kernels import kernel_name, kernel_source
from uncut_mpi.device.cuda.library import import_cupy
from uncut_mpi.device.cuda.warmup import GemmSignature, WarmupList, gemm_signatures, square
from uncut_mpi.device.files import FileWindows
from uncut_mpi.device.interface import FlagTable, ProgressBoard
from uncut_mpi.errors import CapacityError, DeviceError, reason
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import Code, OperationList
from uncut_mpi.planning.schedule import Role, buffer_bytes

LEAST_TUNED_OPERATIONS: Final = 1e9
"""Floating-point operations of a product below which the library's choice stays: it takes some µs in any case."""

_LEAST_SCRATCH_BYTES = 2 << 20
_HOST_SCRATCH_BYTES = 4096
_SMALL = 64
_PATIENCE_S = 60.0


def own_memory(program: OperationList, addresses: np.ndarray) -> tuple[int, int]:
    """Return the address and the bytes of what a list uses of its own rank's buffers together; 0 if it uses none."""
    buffers, used = program.buffers, addresses > 0
    of_rank = np.flatnonzero(used & (buffers["role"] != Role.USER) & (buffers["location"] == program.rank))
    if not len(of_rank):
        return 0, 0
    base, ends = int(addresses[of_rank].min()), addresses[of_rank] + buffer_bytes(buffers[of_rank])
    return base, int(ends.max()) - base


class Preparation:
    """
    The kernels of one device that are loaded, what has been warmed up there, and whether products are timed.

    In f32, tf32, f16 and bf16 what the library proposes for a product may be timed, and the fastest taken.

    The device is current whenever a method is called, and nothing is in flight on it.

    Parameters
    ----------
    native : CudaDevice
        Streams, handles and events, shared by all executables.
    description : str
        The device in words, for messages.
    malloc : callable
        Takes bytes and returns the address of new device memory; raises CapacityError.
    files : FileWindows
        Those of the backend.

    Attributes
    ----------
    bind : callable
        Binds a list to addresses, flags and a board, as `CudaExecutable` does. Kernels are loaded, streams reserved.
    """

    def __init__(
        self, native: _native.CudaDevice, description: str, malloc: Callable[[int], int], files: FileWindows
    ) -> None:
        self._native, self._description, self._malloc = native, description, malloc
        self.bind = functools.partial(CudaExecutable, native, kernel=self.kernel, files=files, description=description)
        self._cupy = import_cupy()
        self._host_scratch = self._cupy.cuda.alloc_pinned_memory(_HOST_SCRATCH_BYTES)
        self._kernels: dict[int, Any] = {}  # by signature, with what they were loaded from
        self._warm: set[Any] = set()
        self._least_operations = math.inf

    def warm_up(self, program: OperationList, addresses: np.ndarray) -> None:
        """
        Run what a list needs and has not run yet; synchronous. What its own buffers hold is lost.

        It runs on memory of those buffers, which no call uses meanwhile. Where the largest operand of a product is
        larger, it runs on scratch memory. A list that awaits no flag loads what it needs in its first run. That may
        wait for the device, where nothing waits for more than has been issued.

        Raises
        ------
        CapacityError
            If there is no memory for the scratch, even with the least leading dimensions.
        """
        if not (program.operations["code"] == Code.WAIT_FLAG).any():
            return
        lanes = len(np.unique(program.operations["lane"][program.operations["code"] == Code.GEMM]))
        new = gemm_signatures(program, addresses) - self._warm
        signatures = sorted(new)
        dtypes = {DType(int(code)) for code in np.unique(program.operands["dtype"])}
        host = bool(program.in_host().any())
        copies = {("copies", dtype, host) for dtype in dtypes} - self._warm
        multiplied = {dtype for dtype in dtypes if dtype.results}
        handles = {("handle", dtype, lane) for dtype in multiplied for lane in range(lanes)} - self._warm
        if not (signatures or copies or handles):
            return
        (base, nbytes), scratch = own_memory(program, addresses), 0
        if _scratch_bytes(signatures) > nbytes:
            try:
                base = scratch = self._malloc(_scratch_bytes(signatures))
            except CapacityError:
                signatures = [one.compact() for one in signatures]
                base = scratch = self._malloc(_scratch_bytes(signatures))
        try:
            todo = WarmupList(lanes)
            for number, signature in enumerate(signatures):
                todo.gemm(signature, number % max(1, lanes))
                todo.part(number % max(1, lanes))
            # Every handle multiplies once in every type: a handle may prepare itself at its first use.
            for _, dtype, lane in sorted(handles):
                todo.gemm(square(_SMALL, dtype), lane)
            for _, dtype, _ in sorted(copies):
                todo.copies(dtype, host=host)
            patience_s = _PATIENCE_S + lanes * program.longest_s  # products of all lanes run at once
            raise_error(
                self.bind_scratch(todo.program(program.epilogue, base if program.vectors[1] else 0), base)
                .run(alpha=1.0, beta=0.5, epoch=0, timeout_s=patience_s)
                .error
            )
        finally:
            self._cupy.cuda.runtime.free(scratch)
        self._warm |= new | copies | handles

    def tune_products(self, *, tune: bool) -> None:
        """Choose kernels of products by their time from now on, or leave it to the library."""
        self._least_operations = LEAST_TUNED_OPERATIONS if tune else math.inf
        self._native.tune_products(self._least_operations, timing=False)
        self._forget_products()

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Time the products of what is bound meanwhile, if that is wanted; what only warms up uses what was found."""
        known = self._native.tuned_products()
        self._native.tune_products(self._least_operations, timing=True)
        try:
            yield
        finally:
            self._native.tune_products(self._least_operations, timing=False)
            if self._native.tuned_products() != known:
                self._forget_products()

    def _forget_products(self) -> None:
        """Take no product for warm any more: what the library runs for it may be another kernel now."""
        self._warm = {one for one in self._warm if not isinstance(one, GemmSignature)}

    def bind_scratch(self, program: OperationList, base: int) -> CudaExecutable:
        """Bind a list of `WarmupList` to scratch memory at `base`."""
        return self.bind(
            program,
            np.array([base, self._host_scratch.ptr], np.int64),
            FlagTable(own=0, peers=np.zeros(1, np.int64)),
            ProgressBoard(words=np.zeros(ProgressBoard.shape(1), np.uint32), rank=0),
        )

    def kernel(self, signature: int) -> int:
        """
        Return the handle of a kernel of ours, which is loaded at its first use, and run on nothing.

        Raises
        ------
        DeviceError
            If it cannot be compiled.
        """
        if signature not in self._kernels:
            # One module per kernel: cupy keeps the compiled text on disk, and another plan's set would not match.
            module = self._cupy.RawModule(code=kernel_source([signature]), options=("--std=c++14",))
            try:
                function = module.get_function(kernel_name(signature)).kernel
            except self._cupy.cuda.compiler.CompileException as error:
                raise DeviceError(
                    f"compiling {kernel_name(signature)} for {self._description}: {reason(error)}"
                ) from error
            self._native.run_on_nothing(function.ptr)
            self._kernels[signature] = module, function
        return int(self._kernels[signature][1].ptr)


def _scratch_bytes(signatures: Sequence[GemmSignature]) -> int:
    return max([_LEAST_SCRATCH_BYTES, *(one.nbytes for one in signatures)])


def raise_error(error: BaseException | None) -> None:
    """Raise the error of a report, if it has one."""
    if error is not None:
        raise error
