"""cuBLAS and cuBLASXt: on one GPU after copying there what is elsewhere, and on all of them in square blocks."""

from __future__ import annotations

import abc
import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from uncut_mpi.bench.baselines.cublas_calls import XT_TYPES, BlasLibrary
from uncut_mpi.bench.baselines.cuda_memory import CudaMemory
from uncut_mpi.bench.baselines.library import Library, LibraryProduct, Unsupported, ranges
from uncut_mpi.bench.baselines.task import Matrices, Task
from uncut_mpi.errors import DeviceError, reason
from uncut_mpi.planning.grid import ProcessGrid

_BLOCKS = (512, 1024, 2048, 4096, 8192)
_ALREADY_ENABLED = 704


def _reach(devices: int) -> tuple[Any, BlasLibrary]:
    """Return cupy's runtime and cuBLAS, or raise Unsupported if there are fewer devices."""
    from uncut_mpi.device.cuda.library import import_cupy, load_blas

    try:
        runtime, blas = import_cupy().cuda.runtime, BlasLibrary(load_blas().path)
    except (DeviceError, OSError) as error:
        raise Unsupported(reason(error)) from None
    if runtime.getDeviceCount() < devices:
        raise Unsupported(f"this process sees {runtime.getDeviceCount()} of {devices} GPUs")
    return runtime, blas


def _connect(runtime: Any, devices: int) -> None:
    """Let GPUs copy straight to each other; otherwise their copies go through host memory."""
    for device in range(devices):
        runtime.setDevice(device)
        for peer in range(devices):
            if peer != device and runtime.deviceCanAccessPeer(device, peer):
                try:
                    runtime.deviceEnablePeerAccess(peer)
                except runtime.CUDARuntimeError as error:  # somebody in this process has done it
                    if error.status != _ALREADY_ENABLED:
                        raise


class _CudaLibrary(Library):
    """cuBLAS for GPUs that copy straight to each other where they can."""

    def __init__(self, devices: int) -> None:
        self._runtime, self._blas = _reach(devices)
        _connect(self._runtime, devices)
        self._handles: dict[int, Any] = {}
        self.version = f"cuBLAS {self._blas.version()}"

    def open(self, task: Task, matrices: Matrices) -> LibraryProduct:
        memory = CudaMemory(self._runtime)
        try:
            return self._product(memory, task, matrices)
        except BaseException:
            memory.close()
            raise

    @abc.abstractmethod
    def _product(self, memory: CudaMemory, task: Task, matrices: Matrices) -> LibraryProduct:
        """Take on a task with memory that is freed if this fails."""

    def _handle(self, device: int) -> Any:
        self._runtime.setDevice(device)
        if device not in self._handles:
            self._handles[device] = self._blas.handle()
        return self._handles[device]


class CublasLibrary(_CudaLibrary):
    """cuBLAS on one GPU."""

    def _product(self, memory: CudaMemory, task: Task, matrices: Matrices) -> LibraryProduct:
        return _CublasProduct(self._blas, self._handle(task.compute[0]), memory, task, matrices)


class FloorLibrary(_CudaLibrary):
    """cuBLAS on every GPU at once, each with an equal share of the operations and all that it needs there."""

    takes_dealt = True

    def _product(self, memory: CudaMemory, task: Task, matrices: Matrices) -> LibraryProduct:
        return _FloorProduct(self._blas, {one: self._handle(one) for one in task.compute}, memory, task, matrices)


class CublasXtLibrary(_CudaLibrary):
    """cuBLASXt on all GPUs that may compute."""

    def __init__(self, devices: int) -> None:
        super().__init__(devices)
        self.version = f"cuBLASXt of {self.version}"

    def _product(self, memory: CudaMemory, task: Task, matrices: Matrices) -> LibraryProduct:
        return _XtProduct(self._blas, memory, task, matrices)


class _AddressedProduct(LibraryProduct):
    """Matrices at addresses, where the task puts them."""

    def __init__(self, memory: CudaMemory, task: Task, matrices: Matrices) -> None:
        self._memory, self._task, self._matrices = memory, task, matrices
        host = [memory.pin(matrix) for matrix in (matrices.a, matrices.b, matrices.c, matrices.out)]
        self._first, self._out = host[2:]
        self._nbytes = [matrices.a.nbytes, matrices.b.nbytes, matrices.c.nbytes]
        self._places = [host[0], host[1], host[3]]
        for which, device in enumerate(task.whole):
            if device is not None:
                self._places[which] = memory.allocate(device, self._nbytes[which])
                if which < 2:
                    memory.copy(device, self._places[which], host[which], self._nbytes[which])
                    memory.finish(device)

    def _scalars(self) -> tuple[float, float]:
        return self._task.alpha, self._task.beta

    def reset(self) -> None:
        if self._task.whole[2] is None:
            np.copyto(self._matrices.out, self._matrices.c)
        else:
            self._copy_of_c(self._places[2], self._first)

    def store(self) -> None:
        if self._task.whole[2] is not None:
            self._copy_of_c(self._out, self._places[2])

    def _copy_of_c(self, destination: int, source: int) -> None:
        device = self._task.compute[0]
        self._memory.copy(device, destination, source, self._nbytes[2])
        self._memory.finish(device)

    def close(self) -> None:
        self._memory.close()


class _CublasProduct(_AddressedProduct):
    """One call of cuBLAS between copies of what is elsewhere."""

    def __init__(self, blas: BlasLibrary, handle: Any, memory: CudaMemory, task: Task, matrices: Matrices) -> None:
        super().__init__(memory, task, matrices)
        self.settings = ["1 device"]
        self._blas, self._handle, self._device = blas, handle, task.compute[0]
        self._here = [
            place if device == self._device else memory.allocate(self._device, nbytes)
            for place, device, nbytes in zip(self._places, task.whole, self._nbytes, strict=True)
        ]
        memory.finish(self._device)

    def call(self, setting: str) -> None:
        for here, place, nbytes in zip(self._here, self._places, self._nbytes, strict=True):
            if here != place:
                self._memory.copy(self._device, here, place, nbytes)
        a, b, c = self._here
        self._blas.gemm(self._handle, self._task.dtype, self._task.extents, self._scalars(), (a, b, c))
        if c != self._places[2]:
            self._memory.copy(self._device, self._places[2], c, self._nbytes[2])
        self._memory.finish(self._device)


class _FloorProduct(LibraryProduct):
    """
    What the devices' arithmetic takes: one product on each at once, of shares that are there already.

    Shares are parts of k where that is 8 times m and n, else blocks of C on the most square grid. No result comes of
    them.
    """

    def __init__(
        self, blas: BlasLibrary, handles: Mapping[int, Any], memory: CudaMemory, task: Task, matrices: Matrices
    ) -> None:
        self._blas, self._handles, self._memory, self._task = blas, handles, memory, task
        parts = len(handles)
        grid = ProcessGrid.most_square(parts)
        rows, cols, depths = (1, 1, parts) if task.k >= 8 * max(task.m, task.n) else (grid.rows, grid.cols, 1)
        m, n, k = (ranges(extent, count)[-1] for extent, count in zip(task.extents, (rows, cols, depths), strict=True))
        shares = [np.asfortranarray(one) for one in (matrices.a[m, k], matrices.b[k, n], matrices.c[m, n])]
        self.settings = [f"{rows}x{cols} blocks of C, {depths} of k"]
        self._share = shares[0].shape[0], shares[1].shape[1], shares[0].shape[1]
        self._addresses: dict[int, list[int]] = {}
        for device in handles:
            self._addresses[device] = [memory.allocate(device, one.nbytes) for one in shares]
            for address, one in zip(self._addresses[device], shares, strict=True):
                memory.copy(device, address, int(one.__array_interface__["data"][0]), one.nbytes)
            memory.finish(device)

    def call(self, setting: str) -> None:
        for device, handle in self._handles.items():
            self._memory.use(device)
            a, b, c = self._addresses[device]
            self._blas.gemm(handle, self._task.dtype, self._share, (self._task.alpha, self._task.beta), (a, b, c))
        for device in self._handles:
            self._memory.finish(device)

    def reset(self) -> None:
        pass  # what C holds does not matter

    def store(self) -> None:
        pass  # there is no result

    def close(self) -> None:
        self._memory.close()


class _XtProduct(_AddressedProduct):
    """One call of cuBLASXt, which takes matrices wherever they are."""

    def __init__(self, blas: BlasLibrary, memory: CudaMemory, task: Task, matrices: Matrices) -> None:
        if task.dtype not in XT_TYPES:
            raise Unsupported(f"cuBLASXt has no product of {task.dtype.name}")
        super().__init__(memory, task, matrices)
        self._blas, self._xt = blas, blas.xt_handle(task.compute)
        longest = max(task.extents)
        self._edges = {f"blocks of {edge}": edge for edge in _BLOCKS if edge <= longest or edge == _BLOCKS[0]}
        self.settings = list(self._edges)
        self._edge = 0

    def call(self, setting: str) -> None:
        if self._edge != self._edges[setting]:
            self._edge = self._edges[setting]
            self._blas.call("cublasXtSetBlockDim", self._xt, ctypes.c_int(self._edge))
        a, b, c = self._places
        self._blas.gemm(self._xt, self._task.dtype, self._task.extents, self._scalars(), (a, b, c), xt=True)
        # C is complete on return; that nothing runs on is what makes one sample end before the next begins.
        for device in self._task.compute:
            self._memory.finish(device)

    def close(self) -> None:
        try:
            self._blas.call("cublasXtDestroy", self._xt)
        finally:
            super().close()
