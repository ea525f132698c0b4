"""
Products under the names of BLAS: ``um.blas.dgemm`` and kin, with the arguments of `scipy.linalg.blas`.

Each is computed by the process that calls it, on its own GPU where that is expected to take less time, else by numpy.
Programs in other languages call the same names of a shared library, and those of PBLAS (`library`).
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any, Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.blas.calls import least_flop, of_process
from uncut_mpi.blas.doors import CallersProduct, Given
from uncut_mpi.blas.rates import numpy_rate
from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import shown
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.problem import Trans

__all__ = ["cgemm", "dgemm", "library", "sgemm", "zgemm"]

_OPS: Final[tuple[Trans, ...]] = ("N", "T", "C")
_TURNED: Final[dict[Trans, Trans]] = {"N": "T", "T": "N"}
Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class BlasGemm:
    """A product of one element type."""

    dtype: DType

    def __call__(
        self,
        alpha: Any,
        a: Any,
        b: Any,
        beta: Any = 0.0,
        c: Any = None,
        trans_a: int = 0,
        trans_b: int = 0,
        overwrite_c: int = 0,
    ) -> Array:
        """
        Return alpha op(A) op(B) + beta C, column-major. Local.

        Parameters
        ----------
        alpha, beta : float or complex
            Scalars. With beta = 0 C is not read.
        a, b : array_like
            Of two dimensions; op(A) is m×k, op(B) is k×n. Those of another type or order are copied, as SciPy does;
            row-major ones are not.
        c : array_like, optional
            C, m×n; by default zeros.
        trans_a, trans_b : {0, 1, 2}
            Whether op transposes (1), or transposes and conjugates (2).
        overwrite_c : int, default 0
            Whether C may be overwritten, and returned, if it is a column-major array of this type.

        Raises
        ------
        ParamError
            If arguments do not fit.
        UncutError
            If a GPU failed while computing.
        """
        dtype = self.dtype
        (first, op_a), (second, op_b) = _operand("a", a, trans_a, dtype), _operand("b", b, trans_b, dtype)
        (m, k), (rows, n) = _shape(first, op_a), _shape(second, op_b)
        if k != rows:
            raise ParamError(f"op(a) is {m}×{k} and op(b) is {rows}×{n}: k must be the same")
        out = _result(c, (m, n), dtype, overwrite=bool(overwrite_c))
        with np.errstate(over="ignore"):  # to infinity, as BLAS' callers do
            scalars = dtype.numpy.type(alpha).item(), dtype.numpy.type(beta).item()
        operands = first, second, out
        given = [Given(one.shape, Layout.whole(), one.shape) for one in operands]
        product = CallersProduct(dtype, given, op_a, op_b)
        door = of_process() if product.flop >= least_flop() else None
        key = dtype, op_a, op_b, m, n, k
        leading = _leading(first), _leading(second), _leading(out)
        where = (first.ctypes.data, second.ctypes.data, out.ctypes.data, *leading)
        rate = functools.partial(numpy_rate, dtype)
        if (
            door is None
            or not product.flop
            or not np.isfinite(scalars).all()
            or not door.alone(None, lambda: (key, where, scalars, lambda: product, rate))
        ):
            if scalars[1] != 1:
                out[...] = scalars[1] * out if scalars[1] else 0
            if scalars[0]:  # else A and B are not read
                out += scalars[0] * (_applied(first, op_a) @ _applied(second, op_b))
        return out


def library(*, ilp64: bool = False) -> pathlib.Path:
    """Return where ``libuncut_mpi_blas.so`` lies, or that whose integers have 64 bits. Local."""
    folder = pathlib.Path(_native.__file__).parent / "lib"
    return folder / f"libuncut_mpi_blas{'_ilp64' if ilp64 else ''}.so"


def _operand(name: str, given: Any, trans: int, dtype: DType) -> tuple[Array, Trans]:
    """Return A or B column-major, and how it is taken then."""
    if trans not in (0, 1, 2):
        raise ParamError(f"trans_{name} = {shown(trans)}: use 0 (as it is), 1 (transposed) or 2 (and conjugated)")
    op, array = _OPS[int(trans)], _two(name, given, dtype)
    turned = "N" if op == "C" and not dtype.is_complex else _TURNED.get(op)
    if turned is not None and not _is_column_major(array) and _is_column_major(array.T):
        return array.T, turned
    return array if _is_column_major(array) else np.asfortranarray(array), op


def _result(given: Any, shape: tuple[int, int], dtype: DType, *, overwrite: bool) -> Array:
    if given is None:
        return np.zeros(shape, dtype.numpy, order="F")
    array = _two("c", given, dtype)
    if array.shape != shape:
        raise ParamError(f"c is {array.shape[0]}×{array.shape[1]}, and the product is {shape[0]}×{shape[1]}")
    if overwrite and array.flags.writeable and _is_column_major(array):
        return array
    return np.array(array, order="F", copy=True)


def _two(name: str, given: Any, dtype: DType) -> Array:
    array = np.asarray(given, dtype.numpy)
    if array.ndim != 2:
        raise ParamError(f"{name} has {array.ndim} dimensions: pass a matrix")
    return array


def _is_column_major(array: Array) -> bool:
    """Return whether columns are contiguous and one behind the other, with gaps or without."""
    item, (rows, cols), (down, across) = array.itemsize, array.shape, array.strides
    return (down == item or rows <= 1) and (cols <= 1 or (across >= rows * item and across % item == 0))


def _leading(array: Array) -> int:
    return array.strides[1] // array.itemsize if array.shape[1] > 1 else max(1, array.shape[0])


def _shape(array: Array, op: Trans) -> tuple[int, int]:
    rows, cols = array.shape
    return (rows, cols) if op == "N" else (cols, rows)


def _applied(array: Array, op: Trans) -> Array:
    return array if op == "N" else array.T if op == "T" else array.conj().T


sgemm = BlasGemm(DType.f32)
dgemm = BlasGemm(DType.f64)
cgemm = BlasGemm(DType.c64)
zgemm = BlasGemm(DType.c128)
