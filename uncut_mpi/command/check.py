"""
The check of a result: every element of small products; of large ones a sample, and signed sums over all rows.

All matrices are in host memory that the ranks read; every rank checks its share, and all ranks come
to the same verdict. Bounds are those of `uncut_mpi.command.tolerance`.

NaN and infinity pass nowhere but where the inputs put them: an element of C whose row of op(A), column of
op(B) or element of C_in holds one must be NaN, or the infinity, that a float64 product gives. Sums over
rows cannot tell that, so of products too large for a check of every element no such inputs pass.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from uncut_mpi.command.lines import lines_of
from uncut_mpi.command.tolerance import Tolerance, block_width, partial_sum_bound
from uncut_mpi.errors import ParamError, from_wire, to_wire
from uncut_mpi.model.dtypes import DType

# Up to so many multiplications every element is compared with a float64 product.
FULL_CHECK_LIMIT: Final = 2048**3

# Random vectors of Freivalds' check: wrong elements of one size hide in a row with a chance of at most 2**-20.
VECTORS: Final = 20

# Rows and columns of the sample that is compared element by element where not all are.
_SAMPLE: Final = 128

_BLOCK: Final = 512

Gather = Callable[[Any], Sequence[Any]]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckResult:
    """
    Verdict on a result, the same on all ranks.

    Attributes
    ----------
    passed : bool
        Whether every error is within its bound.
    error, tolerance : float
        Error and bound where their ratio is largest, both relative to the largest expected value.
        Infinite or NaN where the result is.
    rms_error : float
        Root mean square of the errors relative to that of the expected values.
    detail : str
        What was compared, and where and how it failed.
    elements_covered : int
        Elements of C that took part.
    """

    passed: bool
    error: float
    tolerance: float
    rms_error: float
    detail: str
    elements_covered: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Operands:
    """The product to check: op(A) m×k, op(B) k×n as views, C as it was (None: not read) and as it is."""

    a: np.ndarray
    b: np.ndarray
    c_in: np.ndarray | None
    c_out: np.ndarray
    dtype: DType
    alpha: float
    beta: float
    has_product: bool

    @property
    def k(self) -> int:
        return self.a.shape[1] if self.has_product else 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Finding:
    """
    What one share of the check found; `ratio`, `error`, `bound`, `place` at its worst value.

    `inherited` counts the elements that the inputs make NaN or infinite, `misplaced` those of them that
    are something else in C, `unusable` the other expected values that are not finite.
    """

    ratio: float = -1.0
    error: float = 0.0
    bound: float = 0.0
    place: tuple[int, int] = (0, 0)
    largest: float = 0.0
    sum_error_squared: float = 0.0
    sum_expected_squared: float = 0.0
    wrong: int = 0
    unusable: int = 0
    inherited: int = 0
    misplaced: int = 0

    def join(self, other: _Finding) -> _Finding:
        worst = other if other.ratio > self.ratio else self
        return dataclasses.replace(
            worst,
            largest=max(self.largest, other.largest),
            sum_error_squared=self.sum_error_squared + other.sum_error_squared,
            sum_expected_squared=self.sum_expected_squared + other.sum_expected_squared,
            wrong=self.wrong + other.wrong,
            unusable=self.unusable + other.unusable,
            inherited=self.inherited + other.inherited,
            misplaced=self.misplaced + other.misplaced,
        )


def check_shared(
    *,
    a: np.ndarray,
    b: np.ndarray,
    c_in: np.ndarray | None,
    c_out: np.ndarray,
    dtype: DType,
    trans_a: str = "N",
    trans_b: str = "N",
    alpha: float,
    beta: float,
    seed: int = 0,
    share: tuple[int, int] = (0, 1),
    gather: Gather = lambda value: [value],
    full_limit: int = FULL_CHECK_LIMIT,
) -> CheckResult:
    """
    Check C_out = alpha op(A) op(B) + beta C_in. Collective over the ranks of `gather`.

    Parameters
    ----------
    a, b, c_in, c_out : ndarray
        The whole matrices, of any layout, the same on every rank. `c_in` is None where beta is 0.
        A and B are not read where alpha is 0.
    dtype : DType
        Their type, which bounds the error.
    trans_a, trans_b : {"N", "T"}
        Whether op transposes.
    alpha, beta : float
        Scalars.
    seed : int
        Of the random vectors.
    share : tuple of int
        This rank's number and how many share the work.
    gather : callable
        Returns the values of all ranks in their order, on every rank.
    full_limit : int
        Up to so many multiplications m·n·k every element is compared.

    Raises
    ------
    UncutError
        On every rank, if the check itself failed on one, for want of memory for example.
    ParamError
        If beta is not 0 and there is no `c_in`.
    """
    if beta != 0 and c_in is None:
        raise ParamError(f"beta = {beta} needs C as it was before the call, and none was given")
    operands = _Operands(
        a=a if trans_a == "N" else a.T,
        b=b if trans_b == "N" else b.T,
        c_in=None if beta == 0 else c_in,
        c_out=c_out,
        dtype=dtype,
        alpha=alpha,
        beta=beta,
        has_product=alpha != 0 and a.size > 0 and b.size > 0,
    )
    if c_out.size == 0:
        return CheckResult(True, 0.0, 0.0, 0.0, "C has no elements", 0)
    with np.errstate(all="ignore"):
        if c_out.size * operands.k <= full_limit:
            elements = _elements(operands, np.arange(c_out.shape[0]), np.arange(c_out.shape[1]), share, gather)
            return _verdict(elements, elements, f"all {c_out.size} elements against a float64 product", c_out.size)
        sample = [_stratified(extent, seed) for extent in c_out.shape]
        elements = _elements(operands, sample[0], sample[1], share, gather)
        sums = _freivalds(operands, seed, share, gather)
    what = (
        f"all {c_out.shape[0]} rows against {VECTORS} vectors of random signs (Freivalds), "
        f"{len(sample[0])}×{len(sample[1])} elements against a float64 product"
    )
    return _verdict(elements, sums, what, c_out.size)


def _verdict(elements: _Finding, sums: _Finding, what: str, covered: int) -> CheckResult:
    finding, unit = (sums, "sum") if sums.ratio > elements.ratio else (elements, "element")
    scale = finding.largest if 0 < finding.largest < math.inf else 1.0
    passed = 0.0 <= finding.ratio <= 1.0
    detail = what
    if not passed:
        row, col = finding.place
        at = f"row {row}, column {col}" if unit == "element" else f"row {row}, vector {col}"
        detail += (
            f"; {finding.wrong} {unit}{'s' if finding.wrong != 1 else ''} wrong, worst at {at}: "
            f"error {finding.error:.3g}, allowed {finding.bound:.3g}"
        )
    if finding.inherited:
        kept = finding.inherited - finding.misplaced
        detail += (
            f"; {finding.inherited} must be NaN or infinite, as inputs are, and {kept} of them are as they must be"
        )
    if finding.unusable:
        detail += (
            f"; {finding.unusable} expected {unit}s are NaN or infinite (inputs that are, or too large for float64), "
            "so nothing bounds them: mend the inputs, or multiply without a check (--no-check)"
        )
    # A random sum's mean square is the sum of the squares, so either kind gives the same figure.
    rms = math.sqrt(sums.sum_error_squared / (sums.sum_expected_squared or 1.0))
    return CheckResult(passed, finding.error / scale, finding.bound / scale, rms, detail, covered)


def _compare(
    found: np.ndarray,
    expected: np.ndarray,
    bound: np.ndarray,
    rows: np.ndarray,
    cols: np.ndarray,
    inherited: np.ndarray | None = None,
) -> _Finding:
    """
    Return what is found where `rows` and `cols` say what the positions stand for.

    Where `inherited` is true, found and expected must both be NaN or the same infinity.
    """
    error = np.abs(found - expected)
    misplaced = 0
    if inherited is not None:
        kept = inherited & ((found == expected) | (np.isnan(found) & np.isnan(expected)))
        misplaced = int(np.count_nonzero(inherited & ~kept))
        error[kept], bound, expected = 0.0, np.where(kept, 1.0, bound), np.where(inherited, 0.0, expected)
    ratio = error / bound
    # NaN compares false with everything, so it must be made the worst of all.
    ratio[~(ratio <= math.inf) | ~np.isfinite(error)] = math.inf
    worst = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    finite = np.isfinite(expected)
    return _Finding(
        ratio=float(ratio[worst]),
        error=float(error[worst]),
        bound=float(bound[worst]),
        place=(int(rows[worst[0]]), int(cols[worst[1]])),
        largest=float(np.abs(expected[finite]).max(initial=0.0)),
        sum_error_squared=float(np.square(error).sum()),
        sum_expected_squared=float(np.square(expected).sum()),
        wrong=int(np.count_nonzero(ratio > 1.0)),
        unusable=expected.size - int(np.count_nonzero(finite)),
        inherited=0 if inherited is None else int(np.count_nonzero(inherited)),
        misplaced=misplaced,
    )


def _joined(findings: Iterable[_Finding]) -> _Finding:
    return functools.reduce(_Finding.join, findings, _Finding())


def _agree(work: Callable[[], Any], gather: Gather) -> list[Any]:
    """Return what all ranks' work returned, or raise the first error on every rank."""
    try:
        mine: tuple[bool, Any] = (True, work())
    except Exception as error:
        mine = (False, to_wire(error))
    everybody = gather(mine)
    for rank, (worked, value) in enumerate(everybody):
        if not worked:
            raise from_wire(*value, rank=rank)
    return [value for _, value in everybody]


# -- element by element ------------------------------------------------------------------------------


def _elements(
    operands: _Operands, rows: np.ndarray, cols: np.ndarray, share: tuple[int, int], gather: Gather
) -> _Finding:
    """Compare the elements of these rows and columns."""
    tolerance = Tolerance.for_elements(operands.dtype, operands.k, rows.size * cols.size)
    # Smaller blocks where there are few, so that every rank has some.
    edge = max(1, min(_BLOCK, -(-cols.size // share[1])))
    blocks = [(row, col) for col in range(0, cols.size, edge) for row in range(0, rows.size, _BLOCK)]

    def work() -> _Finding:
        return _joined(
            _element_block(operands, tolerance, rows[row : row + _BLOCK], cols[col : col + edge])
            for row, col in blocks[share[0] :: share[1]]
        )

    return _joined(_agree(work, gather))


def _element_block(operands: _Operands, tolerance: Tolerance, rows: np.ndarray, cols: np.ndarray) -> _Finding:
    block_of_c = _range(rows), _range(cols)
    found = _take(operands.c_out, *block_of_c)
    product, magnitude, partial, block, squares = (np.zeros(found.shape) for _ in range(5))
    inherited = np.zeros(found.shape, bool)
    width = block_width(operands.k)
    for start in range(0, operands.k, width):
        a = _take(operands.a, block_of_c[0], slice(start, start + width))
        b = _take(operands.b, slice(start, start + width), block_of_c[1])
        product += a @ b
        inherited |= ~np.isfinite(a).all(axis=1)[:, None] | ~np.isfinite(b).all(axis=0)
        of_block = np.abs(a) @ np.abs(b)
        magnitude += of_block
        if tolerance.operands:
            squares += np.square(a) @ np.square(b)
        np.maximum(block, of_block, out=block)
        np.maximum(partial, np.abs(product), out=partial)
    expected = operands.alpha * product
    magnitude *= abs(operands.alpha)
    rounded = 0.0
    if tolerance.operands:
        rounded = tolerance.operand_bound(magnitude, np.abs(expected), abs(operands.alpha) * np.sqrt(squares))
    summed = partial_sum_bound(magnitude, abs(operands.alpha) * partial, abs(operands.alpha) * block)
    if operands.c_in is not None:
        scaled = _take(operands.c_in, *block_of_c)
        inherited |= ~np.isfinite(scaled)
        scaled *= operands.beta
        expected += scaled
        np.abs(scaled, out=scaled)
        magnitude += scaled
        summed += scaled
    bound = tolerance.bound(magnitude, summed, np.abs(expected)) + rounded
    return _compare(found, expected, bound, rows, cols, inherited if inherited.any() else None)


def _range(places: np.ndarray) -> slice | np.ndarray:
    """Return a slice where these places follow each other: it selects much faster."""
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if last - first + 1 == places.size else places


def _take(matrix: np.ndarray, rows: slice | np.ndarray, cols: slice | np.ndarray) -> np.ndarray:
    """Return a part in float64; one selection after the other, since two lists of places at once mean pairs."""
    part = matrix[rows][:, cols] if isinstance(rows, slice) else matrix[:, cols][rows]
    return part.astype(np.float64)


def _stratified(extent: int, seed: int) -> np.ndarray:
    """Return at most `_SAMPLE` places, one at random in each strip of an extent, so that each tile has some."""
    count = min(extent, _SAMPLE)
    bounds = np.arange(count + 1) * extent // count
    return np.random.default_rng([seed, extent]).integers(bounds[:-1], bounds[1:])


# -- random vectors ------------------------------------------------------------------------------------


def _freivalds(operands: _Operands, seed: int, share: tuple[int, int], gather: Gather) -> _Finding:
    """
    Compare C_out X with alpha op(A) (op(B) X) + beta C_in X for random signs X.

    Freivalds, "Fast probabilistic algorithms", MFCS 1979; 20 vectors cost 20 matrix-vector products
    instead of one matrix product. What it cannot see is an error whose norm over a row is below
    about 8 roundings of that row's elements. Faults that are small everywhere, as a factor beta too
    many in half types, are what the sample is for.
    """
    m, n = operands.c_out.shape
    signs = _signs(n, seed)
    tolerance = Tolerance.for_signed_sums(operands.dtype, operands.k, n, m * VECTORS)
    lines = lines_of(operands.k, *share)
    parts = _agree(lambda: _thin_product(operands.b[lines], signs), gather)
    b_signs = np.concatenate([part[0] for part in parts])
    b_norms = np.concatenate([part[1] for part in parts])
    rows = lines_of(m, *share)

    def work() -> _Finding:
        mine = (
            _freivalds_rows(operands, tolerance, signs, b_signs, b_norms, slice(row, min(row + _BLOCK, rows.stop)))
            for row in range(rows.start, rows.stop, _BLOCK)
        )
        return _joined(mine)

    return _joined(_agree(work, gather))


def _freivalds_rows(
    operands: _Operands,
    tolerance: Tolerance,
    signs: np.ndarray,
    b_signs: np.ndarray,
    b_norms: np.ndarray,
    rows: slice,
) -> _Finding:
    height = rows.stop - rows.start
    product = np.zeros((height, VECTORS))
    magnitude, partial, block = (np.zeros(height) for _ in range(3))
    squares = np.zeros((height, VECTORS))
    width = block_width(operands.k)
    for start in range(0, operands.k, width):
        at = slice(start, start + width)
        a = operands.a[rows, at].astype(np.float64)
        product += a @ b_signs[at]
        of_block = np.abs(a) @ b_norms[at]
        magnitude += of_block
        if tolerance.operands:
            squares += np.square(a) @ (np.square(b_signs[at]) + np.square(b_norms[at])[:, None])
        np.maximum(block, of_block, out=block)
        # A random sum's mean square is the squared norm of the row that it sums.
        np.maximum(partial, np.sqrt(np.mean(np.square(product), axis=1)), out=partial)
    expected = operands.alpha * product
    magnitude *= abs(operands.alpha)
    rounded = np.zeros(expected.shape)
    if tolerance.operands:
        spread = abs(operands.alpha) * np.sqrt(squares)
        rounded = tolerance.operand_bound(tolerance.deviations * magnitude[:, None], np.abs(expected), spread)
    summed = partial_sum_bound(magnitude, abs(operands.alpha) * partial, abs(operands.alpha) * block)
    if operands.c_in is not None:
        c_signs, c_norms = _thin_product(operands.c_in[rows], signs)
        expected += operands.beta * c_signs
        magnitude += abs(operands.beta) * c_norms
        summed += abs(operands.beta) * c_norms
    found, norms = _thin_product(operands.c_out[rows], signs)
    # A row that is not finite fails by its sums; its norm would make the tolerance useless.
    norms[~np.isfinite(norms)] = 0.0
    bound = tolerance.bound(magnitude, summed, norms) + tolerance.reference * norms
    return _compare(
        found,
        expected,
        bound[:, None] + rounded,
        np.arange(rows.start, rows.stop),
        np.arange(VECTORS),
    )


def _thin_product(matrix: np.ndarray, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return matrix × signs and the 2-norms of the matrix's rows, in float64, without a whole copy of it."""
    rows, cols = matrix.shape
    product = np.zeros((rows, signs.shape[1]))
    squares = np.zeros(rows)
    for row in range(0, rows, _BLOCK):
        for col in range(0, cols, _BLOCK):
            part = matrix[row : row + _BLOCK, col : col + _BLOCK].astype(np.float64)
            product[row : row + _BLOCK] += part @ signs[col : col + _BLOCK]
            squares[row : row + _BLOCK] += np.einsum("ij,ij->i", part, part)
    return product, np.sqrt(squares)


def _signs(n: int, seed: int) -> np.ndarray:
    """Return n×20 random signs as float64; drawn after the result exists, as the chances assume."""
    words = np.random.default_rng([seed, n, VECTORS]).integers(0, 2, size=(n, VECTORS), dtype=np.int8)
    return words.astype(np.float64) * 2.0 - 1.0
