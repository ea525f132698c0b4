"""NumPy and SciPy: one process, whose BLAS uses all cores. It has whole matrices, however ours are dealt."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import threadpoolctl  # type: ignore[import-untyped]

from uncut_mpi.bench.baselines.library import Library, LibraryProduct, Unsupported
from uncut_mpi.bench.baselines.task import Matrices, Task
from uncut_mpi.errors import reason
from uncut_mpi.model.dtypes import DType


class NumpyLibrary(Library):
    """NumPy's product."""

    takes_dealt = True

    def __init__(self) -> None:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        self.version = f"NumPy {np.__version__}, {blas['name']} {blas['version']}"

    def open(self, task: Task, matrices: Matrices) -> LibraryProduct:
        """See `Library.open`."""
        if task.dtype.sums_wider:
            raise Unsupported(f"NumPy multiplies {task.dtype.name} without a BLAS: nothing to compare with")
        if task.dtype is DType.tf32:
            raise Unsupported("NumPy has no TF32")
        return _NumpyProduct(task, matrices)


class ScipyLibrary(Library):
    """The product of the BLAS that SciPy comes with."""

    takes_dealt = True

    def __init__(self) -> None:
        try:
            self._blas = importlib.import_module("scipy.linalg.blas")
        except ImportError as error:
            raise Unsupported(f"SciPy is not installed ({reason(error)})") from None
        self.version = f"SciPy {importlib.import_module('scipy').__version__}"

    def open(self, task: Task, matrices: Matrices) -> LibraryProduct:
        """See `Library.open`."""
        gemm = {DType.f64: "dgemm", DType.f32: "sgemm", DType.c128: "zgemm", DType.c64: "cgemm"}.get(task.dtype)
        if gemm is None:
            raise Unsupported(f"SciPy has no product of {task.dtype.name}")
        return _ScipyProduct(task, matrices, getattr(self._blas, gemm))


class _SharedProduct(LibraryProduct):
    """Matrices where all processes see them."""

    def __init__(self, task: Task, matrices: Matrices) -> None:
        found = [one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"]
        self.settings = [f"{max(found, default=1)} BLAS threads"]
        self._task, self._matrices = task, matrices

    def reset(self) -> None:
        np.copyto(self._matrices.out, self._matrices.c)

    def store(self) -> None:
        pass  # C is there

    def close(self) -> None:
        pass  # the shared memory is all it has


class _NumpyProduct(_SharedProduct):
    def __init__(self, task: Task, matrices: Matrices) -> None:
        super().__init__(task, matrices)
        self._product_t = np.empty((task.n, task.m), task.dtype.numpy)

    def call(self, setting: str) -> None:
        # Row-major, as NumPy has it: Cᵀ = Bᵀ Aᵀ.
        product_t, out_t = self._product_t, self._matrices.out.T
        np.matmul(self._matrices.b.T, self._matrices.a.T, out=product_t)
        product_t *= self._task.alpha
        out_t *= self._task.beta
        out_t += product_t


class _ScipyProduct(_SharedProduct):
    def __init__(self, task: Task, matrices: Matrices, gemm: Any) -> None:
        super().__init__(task, matrices)
        self._gemm = gemm

    def call(self, setting: str) -> None:
        task, given = self._task, self._matrices
        # C is column-major, so it is overwritten where it lies.
        self._gemm(task.alpha, given.a, given.b, beta=task.beta, c=given.out, overwrite_c=1)
