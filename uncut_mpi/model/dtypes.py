"""Element types: their short names, codes in schedules, sizes, accumulators and unit roundoffs."""

from __future__ import annotations

import enum
from typing import Final

import ml_dtypes
import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import shown


class DType(enum.IntEnum):
    """
    An element type; the integer is its code in encoded schedules.

    ``f32`` is strict: no TF32 or other reduced-precision mode is used for it. ``tf32`` is float32 in memory. Its
    products first round the elements of A and B to 11 significant bits, which tensor cores multiply several times as
    fast, and add up in float32. ``c64`` and ``c128`` are complex, of two float32 or float64.
    """

    f64 = 0
    f32 = 1
    f16 = 2
    bf16 = 3
    tf32 = 4
    c64 = 5
    c128 = 6

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
        """Type in which products are summed: float32 for the half types, else the type itself."""
        return DType.f32 if self.is_half else self

    @property
    def is_half(self) -> bool:
        """Whether the accumulator is wider than the type."""
        return self in (DType.f16, DType.bf16)

    @property
    def is_complex(self) -> bool:
        """Whether elements have an imaginary part."""
        return self in _PARTS

    @property
    def real(self) -> DType:
        """Type of real and imaginary part; of a real type the type itself."""
        return _PARTS.get(self, self)

    @property
    def unit_roundoff(self) -> float:
        """Unit roundoff u = 2**-t for t significand bits (Higham 2002, section 2.1), of complex types that of parts."""
        return _ROUNDOFF[self.real]

    @property
    def operand_roundoff(self) -> float:
        """
        What rounding an element of A or B before it is multiplied may change, relative to it; 0 where none is.

        ``tf32`` keeps 10 bits behind the leading one; tensor cores may drop the others instead of rounding them.
        """
        return 2.0**-10 if self is DType.tf32 else 0.0

    @classmethod
    def parse(cls, value: object) -> DType:
        """
        Return the type named by a short name, numpy dtype or anything numpy can turn into one.

        Raises
        ------
        ParamError
            If the type is not one of f64, f32, f16, bf16, tf32, c64, c128.
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
            "(numpy float64, float32, float16, complex64, complex128, ml_dtypes.bfloat16; tf32 is float32 in memory)"
        )


_PARTS: Final = {DType.c64: DType.f32, DType.c128: DType.f64}
_NUMPY: Final[dict[DType, np.dtype]] = {
    DType.f64: np.dtype(np.float64),
    DType.f32: np.dtype(np.float32),
    DType.f16: np.dtype(np.float16),
    DType.bf16: np.dtype(ml_dtypes.bfloat16),
    DType.tf32: np.dtype(np.float32),
    DType.c64: np.dtype(np.complex64),
    DType.c128: np.dtype(np.complex128),
}
_ROUNDOFF: Final = {
    DType.f64: 2.0**-53,
    DType.f32: 2.0**-24,
    DType.f16: 2.0**-11,
    DType.bf16: 2.0**-8,
    DType.tf32: 2.0**-24,
}
