"""NumPy: one process, whose BLAS uses all cores."""

from __future__ import annotations

import numpy as np
import threadpoolctl  # type: ignore[import-untyped]

from uncut_mpi.baselines.library import Library, Product, Unsupported
from uncut_mpi.baselines.task import Matrices, Task
from uncut_mpi.model.dtypes import DType


class NumpyLibrary(Library):
    """NumPy's product."""

    def __init__(self) -> None:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        self.version = f"NumPy {np.__version__}, {blas['name']} {blas['version']}"

    def open(self, task: Task, matrices: Matrices) -> Product:
        """See `Library.open`."""
        if task.dtype.is_half:
            raise Unsupported(f"NumPy multiplies {task.dtype.name} without a BLAS: nothing to compare with")
        if task.dtype is DType.tf32:
            raise Unsupported("NumPy has no TF32")
        return _NumpyProduct(task, matrices)


class _NumpyProduct(Product):
    def __init__(self, task: Task, matrices: Matrices) -> None:
        threads = [one["num_threads"] for one in threadpoolctl.threadpool_info() if one["user_api"] == "blas"]
        self.settings = [f"{max(threads, default=1)} BLAS threads"]
        self._task, self._matrices = task, matrices
        self._product_t = np.empty((task.n, task.m), task.dtype.numpy)

    def call(self, setting: str) -> None:
        # Row-major, as NumPy has it: Cᵀ = Bᵀ Aᵀ.
        product_t, out_t = self._product_t, self._matrices.out.T
        np.matmul(self._matrices.b.T, self._matrices.a.T, out=product_t)
        product_t *= self._task.alpha
        out_t *= self._task.beta
        out_t += product_t

    def reset(self) -> None:
        np.copyto(self._matrices.out, self._matrices.c)

    def store(self) -> None:
        pass  # C is there

    def close(self) -> None:
        pass  # the shared memory is all it has
