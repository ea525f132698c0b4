"""
The check of elements, one by one, against a product in float64, or in long double where float64 overflows.

Each element has a true value, known up to a bound. The element is right if it is within the bound, and it may be
infinite or NaN only where the type cannot hold what it must. `check_elements` has the rules.
"""

from __future__ import annotations

import cmath
import dataclasses
import math
from typing import Any, Final

import numpy as np

from uncut_mpi.command.check_findings import BLOCK, Finding, Gather, Operands, agree, compare, joined
from uncut_mpi.command.tolerance import (
    Tolerance,
    block_width,
    operand_limit,
    overflow_limit,
    partial_sum_bound,
    raise_subnormal,
    scalar_error,
)
from uncut_mpi.model.dtypes import DType

# Where sums or bounds in float64 reach this, elements are computed again in long double.
_FLOAT64_REACH: Final = 2.0**1000

# Makes of any float64 a factor whose products with others of its kind are far from overflow.
_SCALE: Final = 2.0**-550


@dataclasses.dataclass(frozen=True, slots=True)
class _Expected:
    """
    What a block of elements should be, all of one shape.

    `bound` is without the rounding to the output type, `rounding`. `up` and `down` are the largest and the
    least value that a sum on the way can have, the latter without its sign. `inherited` marks what inputs
    make NaN or infinite.
    """

    value: np.ndarray
    bound: np.ndarray
    rounding: np.ndarray
    up: np.ndarray
    down: np.ndarray
    inherited: np.ndarray

    @property
    def reach(self) -> np.ndarray:
        reach: np.ndarray = np.maximum(self.up, self.down) + self.bound
        return reach


def check_elements(
    operands: Operands, rows: np.ndarray, cols: np.ndarray, share: tuple[int, int], gather: Gather
) -> Finding:
    r"""
    Compare the elements of these rows and columns. Collective.

    Notes
    -----
    What an element may be follows from its true value v, known up to a bound b, and from the type. L is half a unit in
    the last place above the type's largest number: from there rounding goes to infinity.

    * :math:`|v| - b \ge L`: the infinity of v's sign. A finite number, however large, is wrong.
    * :math:`|v| + b < L`: a finite number within the bound. An infinity and NaN are wrong.
    * between: either.

    **Sums on the way.** An order of summation that is as right as any other may pass through larger numbers than v. Of
    the terms 3e38, 3e38, -3e38 float32 holds the sum, and not that of the first two. What can be met is what *some*
    order meets. That is the sum of all positive terms, and that of all negative ones, or S of
    `uncut_mpi.command.tolerance` where that is less. It counts before and after alpha: 1e-30 times 1e25 · 1e25 may
    overflow before alpha makes it 1e20. Beta C is met alone, and either with the other. If the largest of these is
    beyond the type that sums (float32 for half types), the element may also be plus infinity. If the least is, it may
    be minus infinity; if both are, NaN, which inf - inf makes. So a sum whose terms all have one sign, or whose terms
    together stay below the limit, may be none of these: it must be what v is.

    **Inputs.** An element whose row of op(A), column of op(B) or element of C_in holds NaN or infinity must be
    NaN (any NaN), or the infinity, that the float64 product gives.

    **Complex elements** have no sign. What a sum on the way can meet is S, in either part. The larger part of v says
    whether the element must be infinite, or may be. Any that is not finite is right then, and where inputs are not
    finite: products of complex infinities have no one value.

    **Small numbers.** Subnormal results are held to the same bounds, which allow for one rounding to the grid of
    subnormal numbers per operation. Flushing them to zero is an error: numpy, cuBLAS and tensor cores do not.
    """
    tolerance = Tolerance.for_elements(operands.dtype, operands.k, max(1, rows.size * cols.size), operands.alpha)
    # Smaller blocks where there are few, so that every rank has some.
    edge = max(1, min(BLOCK, -(-cols.size // share[1])))
    blocks = [(row, col) for col in range(0, cols.size, edge) for row in range(0, rows.size, BLOCK)]

    def work() -> Finding:
        return joined(
            _check_block(operands, tolerance, rows[row : row + BLOCK], cols[col : col + edge])
            for row, col in blocks[share[0] :: share[1]]
        )

    return joined(agree(work, gather))


def _check_block(operands: Operands, tolerance: Tolerance, rows: np.ndarray, cols: np.ndarray) -> Finding:
    expected = _expect(operands, tolerance, rows, cols, np.float64)
    wide = ~expected.inherited & ~(expected.reach < _FLOAT64_REACH)
    finding = _judge(operands, expected, rows, cols, None if not wide.any() else wide)
    if wide.any():
        some_rows, some_cols = wide.any(axis=1), wide.any(axis=0)
        rows, cols, wide = rows[some_rows], cols[some_cols], wide[np.ix_(some_rows, some_cols)]
        again = _expect(operands, tolerance, rows, cols, np.longdouble)
        finding = finding.join(_judge(operands, again, rows, cols, ~wide))
    return finding


def _expect(
    operands: Operands, tolerance: Tolerance, rows: np.ndarray, cols: np.ndarray, real: type[np.floating[Any]]
) -> _Expected:
    """Return what the elements of these rows and columns should be, computed in the type `real`."""
    at_rows, at_cols = _range(rows), _range(cols)
    shape = rows.size, cols.size
    complexes = operands.dtype.is_complex
    number, taken = _types(real, operands.dtype), _types(np.float64, operands.dtype)
    product = np.zeros(shape, number)
    magnitude, partial, block, squares = (np.zeros(shape, real) for _ in range(4))
    inherited, rounds_up = np.zeros(shape, bool), np.zeros(shape, bool)
    scalars_are_finite = cmath.isfinite(operands.alpha) and cmath.isfinite(operands.beta)
    width = block_width(operands.k)
    for start in range(0, operands.k, width):
        a = _take(operands.a, at_rows, slice(start, start + width), taken)
        b = _take(operands.b, slice(start, start + width), at_cols, taken)
        product += _product(a, b, number)
        inherited |= ~np.isfinite(a).all(axis=1)[:, None] | ~np.isfinite(b).all(axis=0)
        a, b = np.abs(a), np.abs(b)
        if tolerance.operands:
            # The grid of subnormal numbers is coarser for what they are: they count as the smallest normal one,
            # and what they lose as not random.
            few = raise_subnormal(a).any(axis=1, keepdims=True) | raise_subnormal(b).any(axis=0)
            squares += np.where(few, math.inf, np.square(a) @ np.square(b))
            limit = operand_limit(operands.dtype)
            rounds_up |= (a >= limit).any(axis=1)[:, None] | (b >= limit).any(axis=0)
        of_block = _product(a, b, real)
        magnitude += of_block
        np.maximum(block, of_block, out=block)
        np.maximum(partial, np.abs(product), out=partial)
    alpha, beta = number(operands.alpha), number(operands.beta)
    up, down = (magnitude, magnitude) if complexes else (0.5 * (magnitude + product), 0.5 * (magnitude - product))
    # Of terms of one sign, the differences leave the reference's own rounding, which may be large itself.
    if (
        not complexes
        and (tolerance.reference * magnitude * max(1, abs(alpha)) >= overflow_limit(operands.dtype.accumulator)).any()
    ):
        up, down = _sums_by_sign(operands, at_rows, at_cols, real)
    plausible = partial_sum_bound(magnitude, partial, block)
    up, down = np.minimum(up, plausible), np.minimum(down, plausible)
    if not complexes and alpha < 0:
        up, down = down, up
    summed = abs(alpha) * plausible
    rounded = np.abs(product) * scalar_error(operands.dtype, operands.alpha)
    value = alpha * product
    magnitude *= abs(alpha)
    if tolerance.operands:
        rounded += tolerance.operand_bound(magnitude, np.abs(value), abs(alpha) * np.sqrt(squares))
    before, behind = (up, down), (abs(alpha) * up, abs(alpha) * down)
    if operands.c_in is not None:
        scaled = _take(operands.c_in, at_rows, at_cols, number)
        inherited |= ~np.isfinite(scaled)
        rounded += np.abs(scaled) * scalar_error(operands.dtype, operands.beta)
        scaled *= beta
        value += scaled
        size = np.abs(scaled)
        more, less = (size, size) if complexes else (scaled, -scaled)
        behind = np.maximum(behind[0], behind[0] + more), np.maximum(behind[1], behind[1] + less)
        scaled = size
        magnitude += scaled
        summed += scaled
    up, down = (np.maximum(*pair) * (1 + min(1.0, tolerance.always)) for pair in zip(before, behind, strict=True))
    up[rounds_up], down[rounds_up] = math.inf, math.inf
    if not scalars_are_finite:
        inherited[...] = True
    bound = tolerance.bound(magnitude, summed, 0.0) + rounded
    return _Expected(value, bound, tolerance.output * np.abs(value), up, down, inherited)


def _sums_by_sign(
    operands: Operands, at_rows: slice | np.ndarray, at_cols: slice | np.ndarray, real: type[np.floating[Any]]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the sums of the positive and, without their sign, of the negative terms of A B."""
    signed: list[Any] = [0.0, 0.0]
    width = block_width(operands.k)
    for start in range(0, operands.k, width):
        a = _take(operands.a, at_rows, slice(start, start + width), np.float64)
        b = _take(operands.b, slice(start, start + width), at_cols, np.float64)
        for sign, opposite in ((1, 0), (-1, 1)):
            part = np.maximum(sign * a, 0)
            signed[opposite] += _product(part, np.maximum(b, 0), real)
            signed[1 - opposite] += _product(part, np.maximum(-b, 0), real)
    return signed[0], signed[1]


def _judge(
    operands: Operands, expected: _Expected, rows: np.ndarray, cols: np.ndarray, ignored: np.ndarray | None
) -> Finding:
    """Compare C with what it should be, apart from `ignored` elements."""
    real = expected.value.dtype.type
    found = _take(operands.c_out, _range(rows), _range(cols), real)
    inherited, limit = expected.inherited, overflow_limit(operands.dtype)
    considered = np.ones(found.shape, bool) if ignored is None else ~ignored
    right, wrong = ~considered, None
    counts: dict[str, Any] = {}
    if inherited.any():
        inherited = inherited & considered
        same = (found == expected.value) | (np.isnan(found) & np.isnan(expected.value))
        kept = inherited & (~np.isfinite(found) if operands.dtype.is_complex else same)
        right |= kept
        counts = {
            "inherited": int(np.count_nonzero(inherited)),
            "misplaced": int(np.count_nonzero(inherited & ~kept)),
        }
        wrong = inherited & ~kept
    considered &= ~expected.inherited
    if not (expected.reach[considered] < limit).all():
        summing = overflow_limit(operands.dtype.accumulator)
        up, down = expected.up >= summing, expected.down >= summing
        if operands.dtype.is_complex:
            larger = np.maximum(np.abs(expected.value.real), np.abs(expected.value.imag))
            beyond = considered & (larger - expected.bound >= limit)
            not_finite = considered & (up | (larger + expected.bound >= limit)) & ~np.isfinite(found)
        else:
            plus, minus = expected.value + expected.bound >= limit, expected.value - expected.bound <= -limit
            beyond = considered & (np.abs(expected.value) - expected.bound >= limit)
            infinite = np.where(found > 0, plus | up, minus | down) & np.isinf(found)
            not_finite = considered & (infinite | (np.isnan(found) & up & down))
        right |= not_finite
        saturated = beyond & np.isfinite(found)
        wrong = saturated if wrong is None else wrong | saturated
        counts |= {
            "beyond": int(np.count_nonzero(beyond)),
            "partial": int(np.count_nonzero(not_finite & ~beyond)),
        }
    bound = expected.bound + expected.rounding
    finding = compare(found, expected.value, bound, rows, cols, right=right, wrong=wrong)
    return dataclasses.replace(finding, **counts)


def _product(a: np.ndarray, b: np.ndarray, real: Any) -> np.ndarray:
    """
    Return the product of float64 or complex128 matrices in the type `real`, with the significant bits of float64.

    numpy multiplies matrices of long double a hundred times slower. So numbers from 1 up and those below are multiplied
    apart, the former scaled so that no product overflows; what underflows is nothing beside sums that need this.
    """
    product: np.ndarray = a @ b
    if real in (np.float64, np.complex128):
        return product
    plain = np.abs(a) @ np.abs(b)
    (a_large, a_small), (b_large, b_small) = (
        (np.where(large, one * _SCALE, 0), np.where(large, 0, one)) for one in (a, b) for large in (np.abs(one) >= 1,)
    )
    once = (a_large @ b_small + a_small @ b_large).astype(real) / real(_SCALE)
    twice = (a_large @ b_large).astype(real) / real(_SCALE) / real(_SCALE)
    wide: np.ndarray = np.where(plain < _FLOAT64_REACH, product, twice + once + a_small @ b_small)
    return wide


def _types(real: type[np.floating[Any]], dtype: DType) -> Any:
    """Return the type in which numbers of a type are taken where real ones are in `real`."""
    return np.result_type(real, np.complex64).type if dtype.is_complex else real


def _range(places: np.ndarray) -> slice | np.ndarray:
    """Return a slice where these places follow each other: it selects much faster."""
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if last - first + 1 == places.size else places


def _take(matrix: np.ndarray, rows: slice | np.ndarray, cols: slice | np.ndarray, real: Any) -> np.ndarray:
    """Return a part in another type; one selection after the other, since two lists of places at once mean pairs."""
    part = matrix[rows][:, cols] if isinstance(rows, slice) else matrix[:, cols][rows]
    return part.astype(real)
