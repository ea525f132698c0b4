"""The few functions of cuBLAS and cuBLASXt that baselines call, by ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from uncut_mpi.bench.baselines.library import Unsupported
from uncut_mpi.model.dtypes import DType

# Numbers of cudaDataType, and of cublasComputeType_t for the accumulator; CUBLAS_OP_N; CUBLAS_GEMM_DEFAULT.
_DATA = {DType.f64: 1, DType.f32: 0, DType.f16: 2, DType.bf16: 14, DType.tf32: 0, DType.c64: 4, DType.c128: 5}
_COMPUTE = {DType.f64: 70, DType.f32: 68, DType.tf32: 77, DType.c64: 68, DType.c128: 70}
_SCALAR = {DType.f64: ctypes.c_double, DType.f32: ctypes.c_float, DType.tf32: ctypes.c_float}
_N, _DEFAULT_ALGO = 0, -1
_EXACT_REDUCTIONS = 16  # CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
_XT_GEMM = {
    DType.f64: "cublasXtDgemm",
    DType.f32: "cublasXtSgemm",
    DType.c64: "cublasXtCgemm",
    DType.c128: "cublasXtZgemm",
}

XT_TYPES = frozenset(_XT_GEMM)
"""Types that cuBLASXt multiplies."""


class BlasLibrary:
    """
    A loaded libcublas.

    Parameters
    ----------
    path : str
        Of the library.
    """

    def __init__(self, path: str) -> None:
        self._library = ctypes.CDLL(path)

    def version(self) -> str:
        """Return it as NVIDIA writes it."""
        parts = []
        for which in range(3):  # MAJOR_VERSION, MINOR_VERSION, PATCH_LEVEL
            value = ctypes.c_int()
            self.call("cublasGetProperty", which, ctypes.byref(value))
            parts.append(str(value.value))
        return ".".join(parts)

    def call(self, name: str, *arguments: Any) -> None:
        """
        Call a function that returns a status.

        Raises
        ------
        Unsupported
            If the library lacks it, or it fails.
        """
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise Unsupported(f"this libcublas has no {name}") from None
        status = function(*arguments)
        if status != 0:
            raise Unsupported(f"{name} failed with status {status}")

    def handle(self) -> ctypes.c_void_p:
        """Return a new handle for the current device, by which half types are rounded once, as ours are."""
        handle = ctypes.c_void_p()
        self.call("cublasCreate_v2", ctypes.byref(handle))
        self.call("cublasSetMathMode", handle, ctypes.c_int(_EXACT_REDUCTIONS))
        return handle

    def xt_handle(self, devices: Sequence[int]) -> ctypes.c_void_p:
        """Return a new handle of cuBLASXt for the devices of some ordinals."""
        handle = ctypes.c_void_p()
        self.call("cublasXtCreate", ctypes.byref(handle))
        array = (ctypes.c_int * len(devices))(*devices)
        try:
            self.call("cublasXtDeviceSelect", handle, ctypes.c_int(len(devices)), array)
        except Unsupported:
            self.call("cublasXtDestroy", handle)
            raise
        return handle

    def gemm(
        self,
        handle: ctypes.c_void_p,
        dtype: DType,
        extents: tuple[int, int, int],
        scalars: tuple[float, float],
        addresses: tuple[int, int, int],
        *,
        xt: bool = False,
    ) -> None:
        """
        Multiply packed column-major matrices of one device; returns at once.

        With `xt` by cuBLASXt, matrices of one of `XT_TYPES` wherever they are: C is complete on return.
        """
        m, n, k = map(ctypes.c_size_t if xt else ctypes.c_int, extents)
        alpha, beta = (_scalar(dtype, value) for value in scalars)
        a, b, c = (ctypes.c_void_p(address) for address in addresses)
        op, data = ctypes.c_int(_N), ctypes.c_int(_DATA[dtype])
        if xt:
            self.call(_XT_GEMM[dtype], handle, op, op, m, n, k, alpha, a, m, b, k, beta, c, m)
            return
        self.call(
            "cublasGemmEx",
            *(handle, op, op, m, n, k, alpha, a, data, m, b, data, k, beta, c, data, m),
            *(ctypes.c_int(_COMPUTE[dtype.accumulator]), ctypes.c_int(_DEFAULT_ALGO)),
        )


def _scalar(dtype: DType, value: float) -> Any:
    """Return a scalar as cuBLAS takes it, by reference; of complex types with an imaginary part of 0."""
    return ctypes.byref((_SCALAR[dtype.accumulator.real] * 2)(value, 0.0))
