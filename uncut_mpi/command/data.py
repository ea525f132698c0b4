"""
Generated matrices: element (i, j) depends on seed, matrix, i, j and the number of rows, and on nothing else.

So any number of ranks may fill any shares of a matrix, and a check may make it again elsewhere.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from uncut_mpi.model.dtypes import DType

# Elements generated at a time: their temporaries stay in a core's cache.
_BLOCK_ELEMENTS: Final = 1 << 14


def fill(view: np.ndarray, matrix: str, seed: int, *, rows: int, row0: int = 0, col0: int = 0) -> None:
    """
    Fill part of a matrix with its random values, uniform in (-1, 1) before they are rounded to half types.

    Every significand bit is random (speed of a GPU depends on the data through its power), and the
    signs keep sums small, so that an error in one term shows. Half types are rounded from float32.

    Parameters
    ----------
    view : ndarray, shape (part rows, part cols)
        Part of the matrix to fill; of dtype float64, float32, float16, bfloat16, complex64 or complex128, any layout.
    matrix : str
        ``"A"``, ``"B"`` or ``"C"``; each has its own values.
    seed : int
        At least 0.
    rows : int
        Rows of the whole matrix.
    row0, col0 : int, default 0
        Where the part starts in it.

    Notes
    -----
    Element (i, j) of float64 is made of the (j·rows + i)-th 64-bit word of a PCG64DXSM stream: its upper 54 bits, as a
    signed number. For float32 and half types it is the half word of that number: its upper 25 bits. Imaginary parts
    have a stream of their own.
    """
    part_rows, part_cols = view.shape
    if part_rows == 0 or part_cols == 0:
        return
    dtype = DType.parse(view.dtype)
    if dtype.is_complex:
        fill(view.real, matrix, seed, rows=rows, row0=row0, col0=col0)
        fill(view.imag, matrix.lower(), seed, rows=rows, row0=row0, col0=col0)
        return
    make = _float64 if dtype is DType.f64 else _float32
    stream = np.random.PCG64DXSM(np.random.SeedSequence([seed, ord(matrix)]))
    start = stream.state
    if part_rows == rows and rows <= _BLOCK_ELEMENTS:
        # Whole columns follow each other in the stream.
        step = _BLOCK_ELEMENTS // rows
        for col in range(0, part_cols, step):
            count = min(step, part_cols - col)
            stream.state = start
            view[:, col : col + count] = make(stream, (col0 + col) * rows, count * rows).reshape(count, rows).T
        return
    for col in range(part_cols):
        for row in range(0, part_rows, _BLOCK_ELEMENTS):
            count = min(_BLOCK_ELEMENTS, part_rows - row)
            stream.state = start
            view[row : row + count, col] = make(stream, (col0 + col) * rows + row0 + row, count)


def poison(view: np.ndarray) -> None:
    """Fill an array with NaN, so that an element that nobody writes cannot pass a check."""
    view.fill(complex(np.nan, np.nan) if np.iscomplexobj(view) else np.nan)


def _float64(stream: np.random.PCG64DXSM, first: int, count: int) -> np.ndarray:
    """Return elements first … first+count−1 of a stream at its start."""
    words = stream.advance(first).random_raw(count)
    values: np.ndarray = (words.view(np.int64) >> 10).astype(np.float64)
    values *= 2.0**-53
    return values


def _float32(stream: np.random.PCG64DXSM, first: int, count: int) -> np.ndarray:
    """Return elements first … first+count−1 of a stream at its start; a word holds two of them."""
    begin, end = first // 2, (first + count + 1) // 2
    halves = stream.advance(begin).random_raw(end - begin).view(np.int32)[first - 2 * begin :][:count]
    values: np.ndarray = (halves >> 7).astype(np.float32)
    values *= np.float32(2.0**-24)
    return values
