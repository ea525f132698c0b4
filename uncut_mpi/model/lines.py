"""
How a matrix file is divided between ranks.

A matrix is divided into *lines*: its columns where the file is in Fortran order, its rows in C order. So a range of
lines is one run of bytes. Ranks read or write a range of lines each.
"""

from __future__ import annotations

from typing import Final

from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.problem import Order

# Bytes converted at a time where the layouts of array and file differ.
_BLOCK_BYTES: Final = 16 << 20


def lines_of(num_lines: int, share: int, count: int) -> slice:
    """
    Return the lines that the `share`-th of `count` ranks takes, in order and of nearly equal number.

    Examples
    --------
    >>> [lines_of(10, i, 3) for i in range(3)]
    [slice(0, 3, None), slice(3, 6, None), slice(6, 10, None)]
    """
    return slice(num_lines * share // count, num_lines * (share + 1) // count)


def index(order: Order, lines: slice) -> tuple[slice, slice]:
    """Return what selects these lines of a whole matrix."""
    return (slice(None), lines) if order == "F" else (lines, slice(None))


def blocks(shape: tuple[int, ...], order: Order, dtype: DType) -> list[tuple[slice, slice]]:
    """Return ranges of whole lines, in order, each of about `_BLOCK_BYTES` or one line."""
    length, count = shape if order == "F" else shape[::-1]
    step = max(1, _BLOCK_BYTES // max(1, length * dtype.itemsize))
    return [index(order, slice(start, min(start + step, count))) for start in range(0, count, step)]
