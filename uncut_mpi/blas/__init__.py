"""
Level 3 of BLAS under its names: ``um.blas.dgemm``, ``dtrsm`` and others, with the arguments of `scipy.linalg.blas`.

Each is computed by the process that calls it, on its own GPU where that is expected to take less time, else by numpy.
Programs in other languages call the same names of a shared library, and those of PBLAS (`library`).
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

import numpy as np

from uncut_mpi import _native
from uncut_mpi.blas.calls import least_flop, of_process
from uncut_mpi.blas.doors import CallersProduct, Given, Where
from uncut_mpi.blas.plain import compute_by_numpy
from uncut_mpi.blas.rates import numpy_rate
from uncut_mpi.blas.routines import ROUTINES, Shape
from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import shown
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.problem import Trans

__all__ = [
    "cgemm",
    "chemm",
    "cher2k",
    "cherk",
    "csymm",
    "csyr2k",
    "csyrk",
    "ctrmm",
    "ctrsm",
    "dgemm",
    "dsymm",
    "dsyr2k",
    "dsyrk",
    "dtrmm",
    "dtrsm",
    "library",
    "sgemm",
    "ssymm",
    "ssyr2k",
    "ssyrk",
    "strmm",
    "strsm",
    "zgemm",
    "zhemm",
    "zher2k",
    "zherk",
    "zsymm",
    "zsyr2k",
    "zsyrk",
    "ztrmm",
    "ztrsm",
]

_ROUTINES: Final = {one.name: one for one in ROUTINES}
_OPS: Final[tuple[Trans, ...]] = ("N", "T", "C")
_TURNED: Final[dict[Trans, Trans]] = {"N": "T", "T": "N"}
Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class _OfBlas:
    """A routine of one element type, and what those of all argument lists do."""

    dtype: DType
    name: str

    def _two(self, name: str, given: Any) -> Array:
        array = np.asarray(given, self.dtype.numpy)
        if array.ndim != 2:
            raise ParamError(f"{name} has {array.ndim} dimensions: pass a matrix")
        return array

    def _op(self, name: str, trans: int, known: str = "NTC") -> Trans:
        if trans not in (0, 1, 2) or _OPS[int(trans)] not in known:
            about = "0 (as it is), 1 (transposed) or 2 (and conjugated)"
            told = about if len(known) == 3 else f"0 or {_OPS.index(cast(Trans, known[1]))}"
            raise ParamError(f"{name} = {shown(trans)}: use {told}")
        op = _OPS[int(trans)]
        return "T" if op == "C" and not self.dtype.is_complex else op

    def _written(self, name: str, given: Any, shape: Shape, *, overwrite: int) -> Array:
        if given is None:
            return np.zeros(shape, self.dtype.numpy, order="F")
        array = self._two(name, given)
        if array.shape != shape:
            found = "{}×{}".format(*array.shape)
            raise ParamError(f"{name} is {found}, and the product is {shape[0]}×{shape[1]}")
        if overwrite and array.flags.writeable and _is_column_major(array):
            return array
        return np.array(array, order="F", copy=True)

    def _square(self, given: Any, of: Array, side: int, lower: int, op: Trans = "N") -> tuple[Array, dict[str, str]]:
        """Return A, and the letters that say how it is taken; a row-major one is taken as its transpose."""
        array, edge = self._two("a", given), of.shape[1 if side else 0]
        if array.shape != (edge, edge):
            raise ParamError(f"a is {array.shape[0]}×{array.shape[1]}: with side={int(bool(side))} it is {edge}×{edge}")
        array, turned = _stored(array, may_turn=self.name != "hemm" and op in _TURNED)
        letters = {"side": "R" if side else "L", "uplo": "L" if bool(lower) != turned else "U"}
        return array, letters | {"trans": _TURNED[op] if turned else op}

    def _computed(self, by: Mapping[str, str], operands: Sequence[Array], alpha: Any, beta: Any = 0.0) -> Array:
        """Compute, and return the last of column-major arrays, which is written."""
        dtype, routine, scalars = self.dtype, _ROUTINES[self.name], []
        by = {letter: by[letter] for letter in routine.letters}
        with np.errstate(over="ignore"):  # to infinity, as BLAS' callers do
            for name, value in (("alpha", alpha), ("beta", beta)):
                scalar = dtype.numpy.type(value).item()
                if name in routine.real and scalar.imag:
                    raise ParamError(f"{name} = {shown(value)}: it is a real number")
                scalars.append(scalar.real if name in routine.real else scalar)
        given = [Given(one.shape, Layout.whole(), one.shape) for one in operands]
        product = CallersProduct(routine, by, dtype, given)
        door = of_process() if product.flop >= least_flop() else None
        key = dtype, self.name, *by.values(), *(one.shape for one in operands)
        places, leading = [one.ctypes.data for one in operands], [_leading(one) for one in operands]
        none = [0] * (3 - len(operands))
        where = cast(Where, (*places, *none, *leading, *none))
        rate = functools.partial(numpy_rate, dtype)
        if (
            door is None
            or not product.flop
            or not np.isfinite(scalars).all()
            or not door.alone(None, lambda: (key, where, (scalars[0], scalars[1]), lambda: product, rate))
        ):
            compute_by_numpy(routine, by, operands, *scalars)
        return operands[-1]


class BlasGemm(_OfBlas):
    """A product."""

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
        stored, ops = [], []
        for name, given, trans in (("a", a, trans_a), ("b", b, trans_b)):
            op = self._op(f"trans_{name}", trans)
            array, turned = _stored(self._two(name, given), may_turn=op in _TURNED)
            stored.append(array)
            ops.append(_TURNED[op] if turned else op)
        (m, k), (rows, n) = (one.shape if op == "N" else one.shape[::-1] for one, op in zip(stored, ops, strict=True))
        if k != rows:
            raise ParamError(f"op(a) is {m}×{k} and op(b) is {rows}×{n}: k must be the same")
        out = self._written("c", c, (m, n), overwrite=overwrite_c)
        return self._computed({"trans_a": ops[0], "trans_b": ops[1]}, [*stored, out], alpha, beta)


class _OfFactors(_OfBlas):
    def _of_factors(self, alpha: Any, factors: Mapping[str, Any], beta: Any, c: Any, *how: int) -> Array:
        trans, lower, overwrite_c = how
        is_hermitian = _ROUTINES[self.name].is_hermitian
        op = self._op("trans", trans, "NC" if is_hermitian else "NT" if self.dtype.is_complex else "NTC")
        arrays = [self._two(name, one) for name, one in factors.items()]
        if len({one.shape for one in arrays}) > 1:
            raise ParamError(
                "a is {}×{} and b is {}×{}: their shapes must be the same".format(*arrays[0].shape, *arrays[1].shape)
            )
        turn = not is_hermitian and not any(map(_is_column_major, arrays))
        stored, turned = zip(*(_stored(one, may_turn=turn) for one in arrays), strict=True)
        if len({*turned}) > 1:
            stored, turned = zip(*(_stored(one, may_turn=False) for one in arrays), strict=True)
        op = _TURNED[op] if turned[0] else op
        edge = stored[0].shape[op != "N"]
        out = self._written("c", c, (edge, edge), overwrite=overwrite_c)
        return self._computed({"uplo": "L" if lower else "U", "trans": op}, [*stored, out], alpha, beta)


class BlasSyrk(_OfFactors):
    """A product of a matrix and its transpose, or conjugate transpose."""

    def __call__(
        self, alpha: Any, a: Any, beta: Any = 0.0, c: Any = None, trans: int = 0, lower: int = 0, overwrite_c: int = 0
    ) -> Array:
        """
        Return C with a triangle of alpha A Aᵀ + beta C in it, of ``herk`` alpha A Aᴴ + beta C; column-major. Local.

        Parameters
        ----------
        trans : {0, 1, 2}
            Not 0: Aᵀ A, or Aᴴ A; 1 for the transpose, 2 for the conjugate one.
        lower : int, default 0
            Whether the triangle is the lower one; the other is as in C.
        alpha, a, beta, c, overwrite_c
            As of `BlasGemm`; scalars of ``herk`` are real.
        """
        return self._of_factors(alpha, {"a": a}, beta, c, trans, lower, overwrite_c)


class BlasSyr2k(_OfFactors):
    """A product of two matrices and of their transposes."""

    def __call__(
        self,
        alpha: Any,
        a: Any,
        b: Any,
        beta: Any = 0.0,
        c: Any = None,
        trans: int = 0,
        lower: int = 0,
        overwrite_c: int = 0,
    ) -> Array:
        """
        Return C with a triangle of alpha (A Bᵀ + B Aᵀ) + beta C in it, else as `BlasSyrk`. Local.

        Of ``her2k`` it is alpha A Bᴴ + conj(alpha) B Aᴴ + beta C, with a real beta.
        """
        return self._of_factors(alpha, {"a": a, "b": b}, beta, c, trans, lower, overwrite_c)


class BlasSymm(_OfBlas):
    """A product with a symmetric or Hermitian matrix."""

    def __call__(
        self,
        alpha: Any,
        a: Any,
        b: Any,
        beta: Any = 0.0,
        c: Any = None,
        side: int = 0,
        lower: int = 0,
        overwrite_c: int = 0,
    ) -> Array:
        """
        Return alpha A B + beta C, or with ``side=1`` alpha B A + beta C, column-major. Local.

        Parameters
        ----------
        lower : int, default 0
            Whether A is read in its lower triangle; the other is its transpose, of ``hemm`` the conjugate one.
        alpha, a, b, beta, c, overwrite_c
            As of `BlasGemm`.
        """
        second = np.asfortranarray(self._two("b", b))
        first, letters = self._square(a, second, side, lower)
        out = self._written("c", c, cast(Shape, second.shape), overwrite=overwrite_c)
        return self._computed(letters, [first, second, out], alpha, beta)


class BlasTrmm(_OfBlas):
    """A product with a triangular matrix, or its inverse."""

    def __call__(
        self,
        alpha: Any,
        a: Any,
        b: Any,
        side: int = 0,
        lower: int = 0,
        trans_a: int = 0,
        diag: int = 0,
        overwrite_b: int = 0,
    ) -> Array:
        """
        Return alpha op(A) B, or with ``side=1`` alpha B op(A), column-major; of ``trsm`` with the inverse. Local.

        Parameters
        ----------
        lower : int, default 0
            Whether A is lower triangular; beyond the triangle it is not read.
        diag : int, default 0
            Whether ones stand for its diagonal.
        overwrite_b : int, default 0
            As ``overwrite_c`` of `BlasGemm`.
        alpha, a, b, trans_a
            As of `BlasGemm`.
        """
        array, op = self._two("b", b), self._op("trans_a", trans_a)
        out = self._written("b", array, cast(Shape, array.shape), overwrite=overwrite_b)
        first, letters = self._square(a, out, side, lower, op)
        return self._computed(letters | {"diag": "U" if diag else "N"}, [first, out], alpha)


def library(*, ilp64: bool = False) -> pathlib.Path:
    """Return where ``libuncut_mpi_blas.so`` lies, or that whose integers have 64 bits. Local."""
    folder = pathlib.Path(_native.__file__).parent / "lib"
    return folder / f"libuncut_mpi_blas{'_ilp64' if ilp64 else ''}.so"


def _stored(array: Array, *, may_turn: bool) -> tuple[Array, bool]:
    """Return an array column-major, and whether it is the transpose of what was given."""
    if may_turn and not _is_column_major(array) and _is_column_major(array.T):
        return array.T, True
    return array if _is_column_major(array) else np.asfortranarray(array), False


def _is_column_major(array: Array) -> bool:
    """Return whether columns are contiguous and one behind the other, with gaps or without."""
    item, (rows, cols), (down, across) = array.itemsize, array.shape, array.strides
    return (down == item or rows <= 1) and (cols <= 1 or (across >= rows * item and across % item == 0))


def _leading(array: Array) -> int:
    return array.strides[1] // array.itemsize if array.shape[1] > 1 else max(1, array.shape[0])


_S, _D, _C, _Z = DType.f32, DType.f64, DType.c64, DType.c128
sgemm, dgemm = BlasGemm(_S, "gemm"), BlasGemm(_D, "gemm")
cgemm, zgemm = BlasGemm(_C, "gemm"), BlasGemm(_Z, "gemm")
ssyrk, dsyrk = BlasSyrk(_S, "syrk"), BlasSyrk(_D, "syrk")
csyrk, zsyrk = BlasSyrk(_C, "syrk"), BlasSyrk(_Z, "syrk")
ssyr2k, dsyr2k = BlasSyr2k(_S, "syr2k"), BlasSyr2k(_D, "syr2k")
csyr2k, zsyr2k = BlasSyr2k(_C, "syr2k"), BlasSyr2k(_Z, "syr2k")
ssymm, dsymm = BlasSymm(_S, "symm"), BlasSymm(_D, "symm")
csymm, zsymm = BlasSymm(_C, "symm"), BlasSymm(_Z, "symm")
strmm, dtrmm = BlasTrmm(_S, "trmm"), BlasTrmm(_D, "trmm")
ctrmm, ztrmm = BlasTrmm(_C, "trmm"), BlasTrmm(_Z, "trmm")
strsm, dtrsm = BlasTrmm(_S, "trsm"), BlasTrmm(_D, "trsm")
ctrsm, ztrsm = BlasTrmm(_C, "trsm"), BlasTrmm(_Z, "trsm")
cherk, zherk = BlasSyrk(_C, "herk"), BlasSyrk(_Z, "herk")
cher2k, zher2k = BlasSyr2k(_C, "her2k"), BlasSyr2k(_Z, "her2k")
chemm, zhemm = BlasSymm(_C, "hemm"), BlasSymm(_Z, "hemm")
