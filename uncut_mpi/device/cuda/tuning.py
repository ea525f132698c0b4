"""Kernels of products that are chosen by their time: when that is done, and what it has found."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Final, NamedTuple

from uncut_mpi import _native
from uncut_mpi.device.cuda.preparation import Preparation
from uncut_mpi.model.dtypes import DType

LEAST_TUNED_OPERATIONS: Final = 1e9
"""Floating-point operations of a product below which the library's choice stays: it takes some µs in any case."""


class TunedProduct(NamedTuple):
    """
    What timing found for a product.

    Attributes
    ----------
    dtype, dtype_c : DType
        Of A and B, and of C.
    op_a, op_b : int
        1 where the operand is transposed.
    m, n, k : int
        Elements.
    usual_s, best_s : float
        Time (s) by the library's choice and by the fastest of what it proposes, the choice itself included.
    """

    dtype: DType
    dtype_c: DType
    op_a: int
    op_b: int
    m: int
    n: int
    k: int
    usual_s: float
    best_s: float


class ProductTuning:
    """
    Whether executables of one device time what the library proposes for their products, in f32, tf32, f16 and bf16.

    Parameters
    ----------
    native : CudaDevice
        It times products and keeps what was found.
    preparation : Preparation
        Has what is taken run before a call does.
    """

    def __init__(self, native: _native.CudaDevice, preparation: Preparation) -> None:
        self._native, self._preparation = native, preparation
        self._least_operations = math.inf

    def use(self, *, tune: bool) -> None:
        """Choose kernels by their time from now on, or leave it to the library."""
        self._least_operations = LEAST_TUNED_OPERATIONS if tune else math.inf
        self._native.tune_products(self._least_operations, timing=False)
        self._preparation.forget_products()

    @contextlib.contextmanager
    def timing(self) -> Iterator[None]:
        """Time the products of what is bound meanwhile, if that is wanted; what only warms up uses what was found."""
        known = len(self._native.tuned_products())
        self._native.tune_products(self._least_operations, timing=True)
        try:
            yield
        finally:
            self._native.tune_products(self._least_operations, timing=False)
            if len(self._native.tuned_products()) != known:
                self._preparation.forget_products()

    def found(self) -> list[TunedProduct]:
        """Return every product that was timed so far."""
        return [
            TunedProduct(DType(dtype), DType(dtype_c), op_a, op_b, m, n, k, usual_s, best_s)
            for (dtype, dtype_c, op_a, op_b, m, n, k), usual_s, best_s in self._native.tuned_products()
        ]
