"""Element types: their short names, codes in schedules, sizes, accumulators and unit roundoffs."""

from __future__ import annotations

import enum
from typing import Final

import ml_dtypes
import numpy as np

from uncut_mpi.errors import ParamError


class DType(enum.IntEnum):
    """
    An element type; the integer is its code in encoded schedules.

    ``f32`` is strict: no TF32 or other reduced-precision mode is used for it.
    """

    f64 = 0
    f32 = 1
    f16 = 2
    bf16 = 3

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return _ITEMSIZE[self]

    @property
    def numpy(self) -> np.dtype:
        """The numpy dtype (``ml_dtypes.bfloat16`` for bf16)."""
        return _NUMPY[self]

    @property
    def accumulator(self) -> DType:
        """Type in which products are summed: float32 for the half types, else the type itself."""
        return DType.f64 if self is DType.f64 else DType.f32

    @property
    def is_half(self) -> bool:
        """Whether the accumulator is wider than the type."""
        return self in (DType.f16, DType.bf16)

    @property
    def unit_roundoff(self) -> float:
        """Unit roundoff u = 2**-t for t significand bits (Higham 2002, section 2.1)."""
        return _ROUNDOFF[self]

    @classmethod
    def parse(cls, value: object) -> DType:
        """
        Return the type named by a short name, numpy dtype or anything numpy can turn into one.

        Raises
        ------
        ParamError
            If the type is not one of f64, f32, f16, bf16.
        """
        if isinstance(value, DType):
            return value
        if isinstance(value, str) and value in cls.__members__:
            return cls[value]
        try:
            dtype = np.dtype(value)  # type: ignore[call-overload]
        except TypeError:
            dtype = np.dtype(object)  # not None: numpy takes that for float64
        for code, known in _NUMPY.items():
            if dtype == known:
                return code
        raise ParamError(
            f"dtype {value!s} is not supported: use one of f64, f32, f16, bf16 "
            "(numpy float64, float32, float16 or ml_dtypes.bfloat16)"
        )


_ITEMSIZE: Final = {DType.f64: 8, DType.f32: 4, DType.f16: 2, DType.bf16: 2}
_NUMPY: Final[dict[DType, np.dtype]] = {
    DType.f64: np.dtype(np.float64),
    DType.f32: np.dtype(np.float32),
    DType.f16: np.dtype(np.float16),
    DType.bf16: np.dtype(ml_dtypes.bfloat16),
}
_ROUNDOFF: Final = {DType.f64: 2.0**-53, DType.f32: 2.0**-24, DType.f16: 2.0**-11, DType.bf16: 2.0**-8}
