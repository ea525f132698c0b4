"""
The check of rows by signed sums, for products too large for a check of every element.

Sums of a row that holds an infinity tell nothing. Those of a row with numbers near the limit of its type tell little. A
value just beyond the type may have been made the largest number, not infinity. That changes less than rounding may
change of the other elements together. Such rows are named, for a check of their elements.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Final

import numpy as np

from uncut_mpi.command.check_findings import BLOCK, Finding, Gather, Operands, agree, compare, joined, row_norms
from uncut_mpi.command.tolerance import (
    Tolerance,
    block_width,
    largest,
    partial_sum_bound,
    raise_subnormal,
    raised_norm,
    scalar_error,
)
from uncut_mpi.model.lines import lines_of

# Random vectors of Freivalds' check: wrong elements of one size hide in a row with a chance of at most 2**-20.
VECTORS: Final = 20


@dataclasses.dataclass(frozen=True, slots=True)
class Sums:
    """
    What the sums of all rows told.

    Attributes
    ----------
    finding : Finding
        Of the rows whose sums are finite, or which inputs that are not finite spoil.
    unusual : ndarray of int
        The rows that hold an element at or beyond the largest number, or sums beyond float64.
    without_sums : ndarray of int
        Those of them that have no sums.
    """

    finding: Finding
    unusual: np.ndarray
    without_sums: np.ndarray


def check_sums(operands: Operands, seed: int, share: tuple[int, int], gather: Gather) -> Sums:
    """
    Compare C_out X with alpha op(A) (op(B) X) + beta C_in X for random signs X. Collective.

    Freivalds, "Fast probabilistic algorithms", MFCS 1979; 20 vectors cost 20 matrix-vector products
    instead of one matrix product. What it cannot see is an error whose norm over a row is below
    about 8 roundings of that row's elements. Faults that are small everywhere, as a factor beta too
    many in half types, are what the sample is for.
    """
    m, n = operands.c_out.shape
    signs = _signs(n, seed)
    tolerance = Tolerance.for_signed_sums(operands.dtype, operands.k, n, m * VECTORS, operands.alpha)
    lines = lines_of(operands.k, *share)
    parts = agree(lambda: _thin_product(operands.b[lines], signs, math.inf), gather)
    of_b = _ThinProduct(*(np.concatenate([getattr(part, name) for part in parts]) for name in _ThinProduct.__slots__))
    if tolerance.operands:
        of_b.norms[of_b.norms > 0] += raised_norm(n)
    rows = lines_of(m, *share)

    def work() -> list[Sums]:
        return [
            _check_rows(operands, tolerance, signs, of_b, slice(row, min(row + BLOCK, rows.stop)))
            for row in range(rows.start, rows.stop, BLOCK)
        ]

    every = [one for of_rank in agree(work, gather) for one in of_rank]
    return Sums(
        joined(one.finding for one in every),
        np.concatenate([one.unusual for one in every]),
        np.concatenate([one.without_sums for one in every]),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _ThinProduct:
    """A matrix times the signs, the 2-norms of its rows, and which rows hold an element of some size, or NaN."""

    sums: np.ndarray
    norms: np.ndarray
    reaches: np.ndarray


def _check_rows(operands: Operands, tolerance: Tolerance, signs: np.ndarray, of_b: _ThinProduct, rows: slice) -> Sums:
    height = rows.stop - rows.start
    product = np.zeros((height, VECTORS), of_b.sums.dtype)
    magnitude, partial, block = (np.zeros(height) for _ in range(3))
    squares = np.zeros((height, VECTORS))
    spoilt = np.full(height, bool(of_b.reaches.any()))
    width = block_width(operands.k)
    for start in range(0, operands.k, width):
        at = slice(start, start + width)
        a = operands.a[rows, at].astype(of_b.sums.dtype)
        product += a @ of_b.sums[at]
        a = np.abs(a)
        spoilt |= ~(a < math.inf).all(axis=1)
        if tolerance.operands:
            subnormal = raise_subnormal(a).any(axis=1, keepdims=True)
            of_signs = np.square(a) @ (np.square(of_b.sums[at]) + np.square(of_b.norms[at])[:, None])
            squares += np.where(subnormal, math.inf, of_signs)
        of_block = a @ of_b.norms[at]
        magnitude += of_block
        np.maximum(block, of_block, out=block)
        # A random sum's mean square is the squared norm of the row that it sums.
        np.maximum(partial, row_norms(product) / math.sqrt(VECTORS), out=partial)
    alpha, beta = operands.alpha, operands.beta
    summed = abs(alpha) * partial_sum_bound(magnitude, partial, block)
    rounded = np.abs(product) * scalar_error(operands.dtype, alpha)
    expected = alpha * product
    magnitude *= abs(alpha)
    if tolerance.operands:
        spread = abs(alpha) * np.sqrt(squares)
        rounded += tolerance.operand_bound(tolerance.deviations * magnitude[:, None], np.abs(expected), spread)
    if operands.c_in is not None:
        of_c = _thin_product(operands.c_in[rows], signs, math.inf)
        spoilt |= of_c.reaches
        rounded += np.abs(of_c.sums) * scalar_error(operands.dtype, beta)
        expected += beta * of_c.sums
        magnitude += abs(beta) * of_c.norms
        summed += abs(beta) * of_c.norms
    found = _thin_product(operands.c_out[rows], signs, largest(operands.dtype))
    norms = found.norms
    # A row that inputs make NaN or infinite fails by its sums; its norm would make the tolerance useless.
    norms[~np.isfinite(norms)] = 0.0
    bound = (tolerance.bound(magnitude, summed, norms) + tolerance.reference * norms)[:, None] + rounded
    numbers = np.isfinite(found.sums) & np.isfinite(expected) & np.isfinite(bound)
    without_sums = ~spoilt & ~numbers.all(axis=1)
    places = np.arange(rows.start, rows.stop)
    kept = ~without_sums
    return Sums(
        compare(found.sums[kept], expected[kept], bound[kept], places[kept], np.arange(VECTORS)),
        places[without_sums | (~spoilt & found.reaches)],
        places[without_sums],
    )


def _thin_product(matrix: np.ndarray, signs: np.ndarray, size: float) -> _ThinProduct:
    """Multiply by the signs in float64 (complex128), without a whole copy; find rows with elements of that size."""
    rows, cols = matrix.shape
    wide = np.complex128 if np.iscomplexobj(matrix) else np.float64
    product = np.zeros((rows, signs.shape[1]), wide)
    norms = np.zeros(rows)
    reaches = np.zeros(rows, bool)
    for row in range(0, rows, BLOCK):
        here = slice(row, row + BLOCK)
        for col in range(0, cols, BLOCK):
            part = matrix[here, col : col + BLOCK].astype(wide)
            product[here] += part @ signs[col : col + BLOCK]
            norms[here] = np.hypot(norms[here], row_norms(part))
            reaches[here] |= ~(np.abs(part) < size).all(axis=1)
    return _ThinProduct(product, norms, reaches)


def _signs(n: int, seed: int) -> np.ndarray:
    """Return n×20 random signs as float64; drawn after the result exists, as the chances assume."""
    words = np.random.default_rng([seed, n, VECTORS]).integers(0, 2, size=(n, VECTORS), dtype=np.int8)
    return words.astype(np.float64) * 2.0 - 1.0
