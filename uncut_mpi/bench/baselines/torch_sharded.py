"""PyTorch: one process that scatters to its devices, multiplies on each and gathers."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from uncut_mpi.bench.baselines.library import Library, LibraryProduct, Unsupported, ranges, splits
from uncut_mpi.bench.baselines.task import Matrices, Task
from uncut_mpi.errors import reason
from uncut_mpi.model.dtypes import DType


def import_torch() -> Any:
    """Return PyTorch, with sums in float32: the products that all others compute."""
    try:
        torch = importlib.import_module("torch")
    except ImportError as error:
        raise Unsupported(f"PyTorch is not installed ({reason(error)})") from None
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = False
    matmul.allow_bf16_reduced_precision_reduction = False
    return torch


class TorchLibrary(Library):
    """
    PyTorch's products.

    Parameters
    ----------
    backend : str
        ``"cuda"``, or ``"host"``: then every device is the CPU.
    devices : int
        How many there are.
    """

    def __init__(self, backend: str, devices: int) -> None:
        self._torch = import_torch()
        if backend == "cuda" and self._torch.cuda.device_count() < devices:
            raise Unsupported(f"PyTorch sees {self._torch.cuda.device_count()} of {devices} GPUs")
        names = [f"cuda:{number}" if backend == "cuda" else "cpu" for number in range(devices)]
        self._devices = [self._torch.device(name) for name in names]
        self.version = f"PyTorch {self._torch.__version__}"

    def open(self, task: Task, matrices: Matrices) -> LibraryProduct:
        """See `Library.open`."""
        self._torch.backends.cuda.matmul.allow_tf32 = task.dtype is DType.tf32
        return _TorchProduct(self._torch, self._devices, task, matrices)


class _TorchProduct(LibraryProduct):
    """Row-major, as PyTorch has it: Cᵀ = Bᵀ Aᵀ."""

    def __init__(self, torch: Any, devices: list[Any], task: Task, matrices: Matrices) -> None:
        self._torch, self._task = torch, task
        self._devices = [devices[number] for number in task.compute]
        self._splits = splits(len(self._devices))
        if task.dtype.sums_wider:  # their partial sums would be rounded
            self._splits = {name: parts for name, parts in self._splits.items() if parts[2] == 1}
        self.settings = list(self._splits)
        self._used = {device for device in devices if device.type == "cuda"}
        self._registered: list[int] = []
        a_place, b_place, c_place = (None if number is None else devices[number] for number in task.whole)
        try:
            # Page-locked is what calls reach there. (To lock A and B that are copied once as well made later calls
            # fail, with "resource already mapped", where they were large and no smaller than C.)
            self._first_t, self._out_t = self._host(matrices.c), self._host(matrices.out, lock=c_place is None)
            a_t, b_t = (
                self._host(matrix, lock=place is None)
                for matrix, place in ((matrices.a, a_place), (matrices.b, b_place))
            )
            self._a_t = a_t if a_place is None else a_t.to(a_place)
            self._b_t = b_t if b_place is None else b_t.to(b_place)
            self._c_t = self._out_t if c_place is None else torch.empty_like(self._first_t, device=c_place)
        except BaseException:
            self._release()
            raise

    def call(self, setting: str) -> None:
        rows, cols, depths = self._splits[setting]
        task = self._task
        depth_of = ranges(task.k, depths)
        blocks = [(i, j, p) for i in ranges(task.m, rows) for j in ranges(task.n, cols) for p in depth_of]
        done = []
        for device, (i, j, p) in zip(self._devices, blocks, strict=False):
            b_t = self._b_t[j, p].to(device, non_blocking=True)
            a_t = self._a_t[p, i].to(device, non_blocking=True)
            if depths > 1:
                done.append((i, j, self._torch.mm(b_t, a_t)))
                continue
            place = self._c_t[j, i]
            if place.device == device:
                place.addmm_(b_t, a_t, beta=task.beta, alpha=task.alpha)
            else:
                c_t = place.to(device, non_blocking=True)
                done.append((i, j, c_t.addmm_(b_t, a_t, beta=task.beta, alpha=task.alpha)))
        if depths > 1:
            self._add_up([part for _, _, part in done])
        else:
            for i, j, part in done:
                self._c_t[j, i].copy_(part, non_blocking=True)
        self._finish()

    def _add_up(self, parts: list[Any]) -> None:
        where = self._c_t.device if self._task.whole[2] is not None else self._devices[0]
        c_t = self._c_t.to(where, non_blocking=True)
        c_t.mul_(self._task.beta)
        for part in parts:
            c_t.add_(part.to(where, non_blocking=True), alpha=self._task.alpha)
        if c_t is not self._c_t:
            self._c_t.copy_(c_t, non_blocking=True)

    def reset(self) -> None:
        self._c_t.copy_(self._first_t)
        self._finish()

    def store(self) -> None:
        if self._c_t is not self._out_t:
            self._out_t.copy_(self._c_t)
            self._finish()

    def close(self) -> None:
        self._finish()
        del self._a_t, self._b_t, self._c_t
        self._release()

    def _release(self) -> None:
        for address in self._registered:
            self._torch.cuda.cudart().cudaHostUnregister(address)
        if self._used:
            self._torch.cuda.empty_cache()

    def _finish(self) -> None:
        for device in self._used:
            self._torch.cuda.synchronize(device)

    def _host(self, matrix: np.ndarray, *, lock: bool = False) -> Any:
        """Return a matrix's transpose as a tensor of the same memory, page-locked if asked for and there are GPUs."""
        rows_t = matrix.T
        half = self._task.dtype is DType.bf16  # which torch does not take from NumPy
        tensor = self._torch.from_numpy(rows_t.view(np.int16) if half else rows_t)
        if lock and self._used and rows_t.nbytes and not tensor.is_pinned():
            status = self._torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), rows_t.nbytes, 0)
            if int(status) != 0:
                raise RuntimeError(f"cudaHostRegister of {rows_t.nbytes} bytes failed with status {int(status)}")
            self._registered.append(tensor.data_ptr())
        return tensor.view(self._torch.bfloat16) if half else tensor
