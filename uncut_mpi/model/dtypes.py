"""Element types: their short names, codes in schedules, sizes, accumulators and unit roundoffs."""

from __future__ import annotations

import enum
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import shown, type_text


class DType(enum.IntEnum):
    """
    An element type; the integer is its code in encoded schedules.

    ``f32`` is strict: no TF32 or other reduced-precision mode is used for it. ``tf32`` is float32 in memory. Its
    products first round the elements of A and B to 11 significant bits, which tensor cores multiply several times as
    fast, and add up in float32. ``c64`` and ``c128`` are complex, of two float32 or float64.

    ``i8`` is multiplied exactly and adds up in ``i32``, modulo 2**32; that is a type of C alone. ``e4m3`` and ``e5m2``
    are the float8 types without and with infinities (``float8_e4m3fn``, ``float8_e5m2``), of A and B alone.
    """

    f64 = 0
    f32 = 1
    f16 = 2
    bf16 = 3
    tf32 = 4
    c64 = 5
    c128 = 6
    i8 = 7
    i32 = 8
    e4m3 = 9
    e5m2 = 10

    __hash__ = int.__hash__  # that of enumerations is a call into Python, at every lookup of a problem

    def __str__(self) -> str:
        return self.name

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _NUMPY[self].itemsize

    @property
    def numpy(self) -> np.dtype:
        """The numpy dtype (``ml_dtypes.bfloat16`` for bf16)."""
        return _NUMPY[self]

    @property
    def accumulator(self) -> DType:
        """Type in which products are summed: float32 for narrower ones, int32 for int8, else the type itself."""
        return _ACCUMULATORS.get(self, self)

    @property
    def sums_wider(self) -> bool:
        """Whether that is a wider type, from which a result is rounded once."""
        return self in _ACCUMULATORS

    @property
    def results(self) -> tuple[DType, ...]:
        """Types that C may have where A and B are of this one, the usual one first; none of a type of C alone."""
        return _RESULTS.get(self, (self,))

    @property
    def needs_scales(self) -> bool:
        """Whether it has so few exponents that A and B are multiplied with a scale each."""
        return self in (DType.e4m3, DType.e5m2)

    @property
    def is_integer(self) -> bool:
        """Whether elements, and the scalars that multiply them, are whole numbers."""
        return self in (DType.i8, DType.i32)

    @property
    def is_complex(self) -> bool:
        """Whether elements have an imaginary part."""
        return self in _PARTS

    @property
    def real(self) -> DType:
        """Type of real and imaginary part; of a real type the type itself."""
        return _PARTS.get(self, self)

    @property
    def measured_as(self) -> tuple[DType, ...]:
        """Itself, and types that stand for it on a machine that was measured without it: no faster ones, best first."""
        return self, *_STAND_INS.get(self, ())

    @property
    def unit_roundoff(self) -> float:
        """Unit roundoff u = 2**-t for t significand bits (Higham 2002, section 2.1), of complex types that of parts."""
        return 0.0 if self.is_integer else float(self.finfo.eps) / 2

    @property
    def finfo(self) -> Any:
        """Numpy's facts of the type, of complex types those of their parts."""
        return ml_dtypes.finfo(self.real.numpy)  # type: ignore[no-untyped-call]

    @property
    def operand_roundoff(self) -> float:
        """
        What rounding an element of A or B before it is multiplied may change, relative to it; 0 where none is.

        ``tf32`` keeps 10 bits behind the leading one; tensor cores may drop the others instead of rounding them.
        """
        return 2.0**-10 if self is DType.tf32 else 0.0

    def truncated_sums(self, k: int) -> float:
        """
        Return what tensor cores may drop of a sum of k products beside what float32 rounds, relative to their sizes.

        For float8 Hopper's keep 13 bits behind the leading one (DeepSeek-AI, "DeepSeek-V3 Technical Report",
        arXiv:2412.19437, section 3.3.2: "around 14 bits"). Unless it is told to be fast, cuBLAS adds the sums of so
        many products up in float32; 128 is what CUTLASS takes.
        """
        return 2.0**-13 * min(k, 128) if self.needs_scales else 0.0

    @classmethod
    def parse(cls, value: object) -> DType:
        """
        Return the type named by a short name, numpy dtype or anything numpy can turn into one.

        Raises
        ------
        ParamError
            If there is no such type.
        """
        if isinstance(value, DType):
            return value
        if isinstance(value, str) and value in cls.__members__:
            return cls[value]
        try:
            dtype = np.dtype(value)  # type: ignore[call-overload]
        except Exception:  # numpy's, or whatever the value's type raises
            dtype = np.dtype(object)  # not None: numpy takes that for float64
        for code, known in _NUMPY.items():  # float32 is f32, which comes first
            if dtype == known:
                return code
        raise ParamError(
            f"dtype {shown(value, str)} is not supported: use one of {', '.join(cls.__members__)} "
            "(numpy float64, float32, float16, complex64, complex128, int8, int32, ml_dtypes.bfloat16, float8_e4m3fn, "
            "float8_e5m2; tf32 is float32 in memory)"
        )


Dtypes: TypeAlias = tuple[DType, DType, DType]
"""Of A, B and C."""


def three_of(dtype: DType | Dtypes) -> Dtypes:
    """Return the types of A, B and C, or raise ParamError for what is none; of one type C is the usual one."""
    if isinstance(dtype, DType):
        return dtype, dtype, (*dtype.results, dtype)[0]
    if not isinstance(dtype, tuple) or [*map(type, dtype)] != [DType] * 3:
        raise ParamError(f"dtype = {shown(dtype)} is {type_text(dtype)}: pass a DType (DType.parse), or three")
    return dtype


def arithmetic_of(dtypes: Dtypes) -> DType:
    """
    Return the type as which elements of such A and B are multiplied: rates of products are known by it.

    Which types go together is said here alone.

    Raises
    ------
    ParamError
        If there is no product of these.
    """
    a, b, c = dtypes
    alike = a is b or (a.needs_scales and b.needs_scales)
    if alike and c in a.results:
        return a
    if not alike:
        third = "" if c is a else f", C is {c.name}"  # which the caller need not have named
        raise ParamError(f"dtypes differ: A is {a.name}, B is {b.name}{third}; convert them to one")
    mend = f"let C be {' or '.join(one.name for one in a.results)}" if a.results else "convert A and B"
    raise ParamError(f"dtypes do not fit: A is {a.name}, B is {b.name}, C is {c.name}; {mend}")


_ACCUMULATORS: Final = {
    DType.f16: DType.f32,
    DType.bf16: DType.f32,
    DType.i8: DType.i32,
    DType.e4m3: DType.f32,
    DType.e5m2: DType.f32,
}
_RESULTS: Final[dict[DType, tuple[DType, ...]]] = {
    DType.f16: (DType.f16, DType.f32),
    DType.bf16: (DType.bf16, DType.f32),
    DType.i8: (DType.i32,),
    DType.i32: (),
    DType.e4m3: (DType.f32, DType.bf16, DType.f16),
    DType.e5m2: (DType.f32, DType.bf16, DType.f16),
}
_STAND_INS: Final[dict[DType, tuple[DType, ...]]] = {
    DType.tf32: (DType.f32,),
    DType.i8: (DType.bf16,),
    DType.e4m3: (DType.bf16,),
    DType.e5m2: (DType.e4m3, DType.bf16),
}
_PARTS: Final = {DType.c64: DType.f32, DType.c128: DType.f64}
_NUMPY: Final[dict[DType, np.dtype]] = {
    DType.f64: np.dtype(np.float64),
    DType.f32: np.dtype(np.float32),
    DType.f16: np.dtype(np.float16),
    DType.bf16: np.dtype(ml_dtypes.bfloat16),
    DType.tf32: np.dtype(np.float32),
    DType.c64: np.dtype(np.complex64),
    DType.c128: np.dtype(np.complex128),
    DType.i8: np.dtype(np.int8),
    DType.i32: np.dtype(np.int32),
    DType.e4m3: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.e5m2: np.dtype(ml_dtypes.float8_e5m2),
}
MEASURED: Final = tuple(dtype for dtype in DType if dtype <= DType.c128)
"""Types whose rates every machine has."""
PROBED: Final = (*MEASURED, DType.i8, DType.e4m3)
"""Types whose rates are measured now."""
ITEMSIZES: Final = np.array([dtype.itemsize for dtype in DType], np.int64)
"""Bytes per element, by code."""
