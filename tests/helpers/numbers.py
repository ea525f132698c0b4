"""Random numbers of every type, what op makes of them, and how far sums of their products may be off."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from uncut_mpi.model.dtypes import DType


def random_values(rng: np.random.Generator, shape: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Return full-mantissa values with parts in (−1, 1), rounded to the type; of integers all that there are."""
    if dtype.is_integer:
        limits = np.iinfo(dtype.numpy)
        return rng.integers(limits.min, limits.max, shape, dtype.numpy, endpoint=True)
    values = rng.uniform(-1.0, 1.0, shape)
    if dtype.is_complex:
        values = values + 1j * rng.uniform(-1.0, 1.0, shape)
    return values.astype(dtype.numpy)


def poison_of(dtype: DType) -> float:
    """Return what nobody may read: NaN, or of integers the least one."""
    return float(np.iinfo(dtype.numpy).min) if dtype.is_integer else math.nan


def op_of(trans: str, matrix: np.ndarray) -> np.ndarray:
    """Return op(matrix) for N, T or C."""
    return {"N": matrix, "T": matrix.T, "C": matrix.conj().T}[trans]


def wide_of(dtype: DType) -> Any:
    """Return the numpy type in which a product of a type is made again."""
    return np.complex128 if dtype.is_complex else np.int64 if dtype.is_integer else np.float64


def factors_of(dtype: DType) -> tuple[complex, complex]:
    """Return an alpha and a beta that no shortcut can skip."""
    return (1.2345 - 0.5j, 1.1154 + 0.25j) if dtype.is_complex else (1.2345, 1.1154)


def steps_of(dtype: DType, k: int) -> int:
    """Return how many roundings an element of a product, or a part of a complex one, goes through at most."""
    return 2 * k + 8 if dtype.is_complex else k + 4


def of_both_parts(dtype: DType) -> float:
    """
    Return the bound of an element's error over that of a part.

    A part of a complex product is a real one of 2k terms, whose sizes add up to |A||B| at most (Cauchy-Schwarz).
    """
    return math.sqrt(2) if dtype.is_complex else 1.0
