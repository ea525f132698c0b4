"""The check of a result: every element of small products; of large ones signed sums of all rows, and a sample."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from uncut_mpi.command.tolerance import Tolerance, overflow_limit
from uncut_mpi.errors import ParamError, agreed, from_wire, to_wire
from uncut_mpi.model.arguments import Number
from uncut_mpi.model.dtypes import DType, Dtypes, arithmetic_of, three_of
from uncut_mpi.model.lines import lines_of
from uncut_mpi.model.placement import Matrix

if TYPE_CHECKING:
    from uncut_mpi.command.sharers import Sharers

# Up to so many multiplications every element is compared with a float64 product. Of larger products so many go at most
# into rows whose sums tell nothing.
FULL_CHECK_LIMIT: Final = 2048**3

# Random vectors of Freivalds' check: wrong elements of one size hide in a row with a chance of at most 2**-20.
_VECTORS: Final = 20

# Rows and columns of the sample, and those that are taken at a time.
_SAMPLE: Final = 128
_BLOCK: Final = 512

# Where sums in float64 may reach this, all is computed again with numbers that are by 2**-64 smaller.
_REACH: Final = 2.0**1000
_SMALLER: Final = -64

Places = slice | np.ndarray
Reader = Callable[[Places, Places], np.ndarray]


@dataclasses.dataclass(frozen=True, slots=True)
class CheckResult:
    """Verdict on a result, the same on all ranks."""

    passed: bool  # whether every error is within its bound
    error: float  # error, tolerance: error and bound where their ratio is largest. Infinite or NaN where the result is.
    tolerance: float
    # Whether both are relative to the largest expected value. Else that is no larger than the tolerance, as where all
    # results are tiny or 0, and they are absolute.
    relative: bool
    rms_error: float  # root mean square of the errors relative to that of the expected values
    detail: str  # what was compared, and where and how it failed


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Equation:
    """What is to be true: C_out = alpha op(A) op(B) + beta C_in."""

    # a, b, c_in, c_out: the whole matrices, of any layout. A and B are not read where alpha is 0; `c_in` is not where
    # beta is 0, and may be None.
    a: np.ndarray
    b: np.ndarray
    c_in: np.ndarray | None
    c_out: np.ndarray
    dtype: DType | Dtypes  # their type, or that of each, which bounds the error
    alpha: Number  # alpha, beta: scalars; rounded to the type that sums
    beta: Number
    trans_a: str = "N"  # trans_a, trans_b: whether op transposes, and conjugates
    trans_b: str = "N"

    @property
    def k(self) -> int:
        """Products that an element is the sum of."""
        return self.a.shape[self.trans_a == "N"] if self.alpha != 0 and self.a.size > 0 and self.b.size > 0 else 0


def check_shared(equation: Equation, ranks: Sharers, seed: int = 0, full_limit: int | None = None) -> CheckResult:
    r"""
    Check an equation, the same on every rank. Collective.

    Parameters
    ----------
    equation : Equation
        What is to be true.
    ranks : Sharers
        Who share the work.
    seed : int
        Of the random vectors.
    full_limit : int, optional
        Up to so many multiplications m·n·k every element is compared; by default `FULL_CHECK_LIMIT`.

    Raises
    ------
    UncutError
        On every rank, if the check itself failed on one, for want of memory for example.
    ParamError
        If beta is not 0 and there is no `c_in`.

    Notes
    -----
    An element has a value v by a product in float64 and a bound b (`Tolerance`), within which it is right. L is half a
    unit in the last place above the type's largest number: from there rounding goes to infinity.

    * :math:`|v| - b \ge L`: it must be the infinity of v's sign. If only :math:`|v| + b \ge L`, it may be.
    * v is NaN or infinite, as inputs are or as float64 cannot hold the product: it must be the same.
    * The sum of all positive terms, or of all negative ones, is beyond the type that sums (float32 for half types),
      before or after alpha: some order of summation overflows. It may be that infinity, and NaN if both are.
    * Else it must be finite. Results below the smallest normal number must be kept, not flushed to zero.

    A complex element has no sign. Its larger part says whether it must or may be not finite; any such value is right.

    Of large products, C x and alpha op(A) (op(B) x) + beta C x are compared for 20 vectors x of random signs
    (Freivalds, "Fast probabilistic algorithms", MFCS 1979). Errors whose norm over a row is below about 8 roundings of
    its elements hide there. Those that are small everywhere are what the sample is for: 128 rows and 128 columns, one
    at random in each of as many strips. Sums tell nothing of a row with NaN or infinity, and little of one with the
    largest number of the type. Such rows are compared element by element, at most `FULL_CHECK_LIMIT` multiplications,
    evenly spread. The verdict says how many were.
    """
    if equation.beta != 0 and equation.c_in is None:
        raise ParamError(f"beta = {equation.beta} needs C as it was before the call, and none was given")
    if equation.c_out.size == 0:
        return CheckResult(True, 0.0, 0.0, False, 0.0, "C has no elements")
    is_large = equation.c_out.size * equation.k > (FULL_CHECK_LIMIT if full_limit is None else full_limit)
    with np.errstate(all="ignore"):
        for exponent in (0, _SMALLER):
            check = _Check(equation, ranks, exponent)
            elements, sums, what = check.all(seed, is_large)
            if not elements.is_huge:
                break
        return check.verdict(elements, sums, what)


def _reader(matrix: Any, trans: str, exponent: int) -> Reader:
    """Return what reads rows and columns of op(matrix) times 2**exponent in float64 or complex128."""
    view = matrix if trans == "N" else matrix.T

    def read(rows: Places, cols: Places) -> np.ndarray:
        # One after the other, since two lists of places at once mean pairs.
        part = view[rows][:, cols] if isinstance(rows, slice) else view[:, cols][rows]
        values: np.ndarray = part.astype(np.complex128 if np.iscomplexobj(part) else np.float64)
        values *= 2.0**exponent
        return values.conj() if trans == "C" else values

    return read


@dataclasses.dataclass(frozen=True, slots=True)
class _Finding:
    """
    What one share found.

    `worst` is the largest ratio of error to bound, these two, and their row and column. `norms` are those of errors and
    of expected values. `counts` are of what is wrong, of what must be NaN or infinite and of the part that is. The last
    one is of what else is so, since sums may overflow.
    """

    worst: tuple[float, float, float, int, int] = (-1.0, 0.0, 0.0, 0, 0)
    largest: float = 0.0
    norms: tuple[float, float] = (0.0, 0.0)
    counts: tuple[int, ...] = (0, 0, 0, 0)
    is_huge: bool = False


def _joined(findings: Iterable[_Finding]) -> _Finding:
    every = [_Finding(), *findings]
    return _Finding(
        max((one.worst for one in every), key=lambda worst: worst[0]),
        max(one.largest for one in every),
        (math.hypot(*(one.norms[0] for one in every)), math.hypot(*(one.norms[1] for one in every))),
        tuple(map(sum, zip(*(one.counts for one in every), strict=True))),
        any(one.is_huge for one in every),
    )


def _compared(
    error: np.ndarray, expected: np.ndarray, bound: np.ndarray, rows: np.ndarray, cols: np.ndarray, *more: Any
) -> _Finding:
    """Return what is found where `rows` and `cols` say what the positions stand for."""
    if error.size == 0:
        return _Finding()
    bound = np.broadcast_to(bound, error.shape)
    ratio = error / bound
    # NaN compares false with everything, so it must be made the worst of all. What is not finite bounds nothing.
    ratio[~(ratio <= math.inf) | ~np.isfinite(error) | ~np.isfinite(bound)] = math.inf
    row, col = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    worst = float(ratio[row, col]), float(error[row, col]), float(bound[row, col]), int(rows[row]), int(cols[col])
    (off, _), (norm, most) = (_norms(one.reshape(1, -1)) for one in (error, expected))
    counts, is_huge = more or ((0, 0, 0), False)
    wrong = int((ratio > 1.0).sum())
    return _Finding(worst, most.item(), (off.item(), norm.item()), (wrong, *counts), is_huge)


def _norms(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the 2-norms of rows, also of those whose squares overflow or underflow, and their largest sizes."""
    sizes = np.abs(rows)
    top = sizes.max(axis=1, keepdims=True)
    scale = np.where((top > 0) & (top < math.inf), top, 1.0)
    sizes /= scale
    return scale * np.sqrt(np.einsum("ij,ij->i", sizes, sizes))[:, None], top


def _signed(read: Reader, rows: slice, signs: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return a matrix's rows times the signs, their 2-norms and their largest sizes, without a copy of whole rows."""
    sums, norms, top = (np.zeros((rows.stop - rows.start, width)) for width in (_VECTORS, 1, 1))
    for col in range(0, len(signs), _BLOCK):
        part = read(rows, slice(col, min(col + _BLOCK, len(signs))))
        sums = sums + part @ signs[col : col + _BLOCK]
        of_part, most = _norms(part)
        norms, top = np.hypot(norms, of_part), np.maximum(top, most)
    return sums, norms, top


def _stratified(extent: int, seed: int) -> np.ndarray:
    """Return at most `_SAMPLE` places, one at random in each strip of an extent, so that each tile has some."""
    count = min(extent, _SAMPLE)
    starts = np.arange(count + 1) * extent // count
    return np.random.default_rng([seed, extent]).integers(starts[:-1], starts[1:])


def _range(places: np.ndarray) -> Places:
    """Return a slice where these places follow each other: it selects much faster."""
    first, last = int(places[0]), int(places[-1])
    return slice(first, last + 1) if last - first + 1 == places.size else places


class _Summed(NamedTuple):
    """Values of op(A) op(B), sums of the sizes of their terms, what partial sums reach at most, and sums of squares."""

    value: np.ndarray
    size: np.ndarray
    partial: np.ndarray
    squares: np.ndarray


class _Check:
    """The check of an equation: readers of op(A), op(B), C as it was (None: not read) and as it is, A and C scaled."""

    def __init__(self, equation: Equation, ranks: Sharers, exponent: int) -> None:
        self.ranks, self.exponent, dtypes = ranks, exponent, three_of(equation.dtype)
        self.multiplied, self.written = arithmetic_of(dtypes), dtypes[Matrix.C]
        summing = self.multiplied.accumulator.numpy
        self.alpha, self.beta = (np.asarray(one, summing).item() for one in (equation.alpha, equation.beta))
        (self.m, self.n), self.k = equation.c_out.shape, equation.k
        self.a, self.b = _reader(equation.a, equation.trans_a, exponent), _reader(equation.b, equation.trans_b, 0)
        self.c_in = _reader(equation.c_in, "N", exponent) if self.beta != 0 else None
        self.c_out = _reader(equation.c_out, "N", exponent)

    def agree(self, work: Callable[[], Iterable[Any]]) -> list[Any]:
        """Return what all ranks' work returned, or raise the first error on every rank."""
        try:
            mine: tuple[bool, Any] = (True, list(work()) if self.ranks.rank < self.ranks.size else [])
        except Exception as error:
            mine = (False, to_wire(error))
        everybody = self.ranks.gather_values(mine)
        for rank, (worked, value) in enumerate(everybody):
            if not worked:
                raise agreed(from_wire(*value, rank=rank))
        return [one for _, value in everybody for one in value]

    def blocks(self, extent: int) -> list[slice]:
        """Return this rank's part of an extent, in blocks."""
        mine = lines_of(extent, self.ranks.rank, self.ranks.size)
        return [slice(at, min(at + _BLOCK, mine.stop)) for at in range(mine.start, mine.stop, _BLOCK)]

    def all(self, seed: int, is_large: bool) -> tuple[_Finding, _Finding, str]:
        """Return what is found of elements and of sums, and what was compared. Collective."""
        if not is_large:
            elements = self.elements(np.arange(self.m), np.arange(self.n))
            return elements, _Finding(), f"all {self.m * self.n} elements against a float64 product"
        sums, unusual = self.sums(seed)
        most = max(1, FULL_CHECK_LIMIT // max(1, self.n * self.k))
        chosen = unusual if unusual.size <= most else unusual[np.arange(most) * unusual.size // most]
        rows, cols = (_stratified(extent, seed) for extent in (self.m, self.n))
        elements = _joined((self.elements(np.setdiff1d(rows, chosen), cols), self.elements(chosen, np.arange(self.n))))
        what = f"all {self.m} rows against {_VECTORS} vectors of random signs (Freivalds), "
        what += f"{rows.size}×{cols.size} elements against a float64 product"
        if unusual.size:
            what += (
                f"; {chosen.size} of {unusual.size} rows, those with NaN, infinity or a number as large as the largest "
            )
            what += f"{self.written.name}, whose sums nothing bounds, element by element"
        return elements, sums, what + ", of the others only the sample" * (unusual.size > chosen.size)

    def elements(self, rows: np.ndarray, cols: np.ndarray) -> _Finding:
        """Compare the elements of these rows and columns. Collective."""
        tolerance = Tolerance.of(self.multiplied, self.written, self.k, self.alpha, max(1, rows.size * cols.size))
        number, count = self.ranks.rank, self.ranks.size
        # Smaller blocks where there are few, so that every rank has some.
        edge = max(1, min(_BLOCK, -(-cols.size // count)))
        blocks = [(row, col) for col in range(0, cols.size, edge) for row in range(0, rows.size, _BLOCK)][number::count]
        found = self.agree(lambda: (self.block(tolerance, rows[i : i + _BLOCK], cols[j : j + edge]) for i, j in blocks))
        return _joined(found)

    def block(self, tolerance: Tolerance, rows: np.ndarray, cols: np.ndarray) -> _Finding:
        """Compare a block of elements."""
        at_rows, at_cols = _range(rows), _range(cols)
        found = self.c_out(at_rows, at_cols)
        before = self.c_in(at_rows, at_cols) if self.c_in else np.zeros_like(found)

        def factors(at: slice) -> tuple[np.ndarray, np.ndarray]:
            values = self.b(at, at_cols)
            return values, np.abs(values)

        product = self.product(tolerance, at_rows, factors, of_sums=False)
        value, bound = self.expect(tolerance, product, before, np.abs(before))
        up, down = self.extremes(tolerance, product, before)
        limit, summing = (overflow_limit(dtype, self.exponent) for dtype in (self.written, self.multiplied.accumulator))
        special = ~np.isfinite(value)
        if self.written.is_complex:
            larger = np.maximum(np.abs(value.real), np.abs(value.imag))
            right = ~np.isfinite(found) & (special | (larger + bound >= limit) | (up >= summing))
        else:
            larger = np.abs(value)
            plus, minus = (value + bound >= limit) | (up >= summing), (bound - value >= limit) | (down >= summing)
            may = np.where(np.isnan(found), plus & minus, np.where(found > 0, plus, minus) & np.isinf(found))
            right = np.where(special, (found == value) | (np.isnan(found) & np.isnan(value)), may)
        must = special | (larger - bound >= limit)
        error, bound = np.abs(found - value), bound + tolerance.output * larger
        error[right], bound[right] = 0.0, 1.0
        bound[must & ~right] = 0.0  # whatever the error
        counts = [int(one.sum()) for one in (must, must & right, right & ~must)]
        is_huge = self.multiplied.real is DType.f64 and self.exponent == 0 and not (np.maximum(up, down) < _REACH).all()
        return _compared(error, np.where(right | must, 0.0, value), bound, rows, cols, counts, is_huge)

    def sums(self, seed: int) -> tuple[_Finding, np.ndarray]:
        """Compare signed sums of all rows; return the rows of whose numbers they tell nothing, too. Collective."""
        signs = np.random.default_rng([seed, self.n, _VECTORS]).integers(0, 2, (self.n, _VECTORS), np.int8) * 2.0 - 1.0
        tolerance = Tolerance.of(self.multiplied, self.written, self.k, self.alpha, self.m * _VECTORS, self.n)
        of_b = self.agree(lambda: (_signed(self.b, rows, signs)[:2] for rows in self.blocks(self.k)))
        values, norms = (np.concatenate(one) for one in (zip(*of_b, strict=True) if of_b else ([[]], [[]])))

        def compare(rows: slice) -> tuple[_Finding, np.ndarray]:
            found, sizes, top = _signed(self.c_out, rows, signs)
            before = _signed(self.c_in, rows, signs)[:2] if self.c_in else (np.zeros_like(found), np.zeros_like(sizes))
            product = self.product(tolerance, rows, lambda at: (values[at], norms[at]), of_sums=True)
            value, bound = self.expect(tolerance, product, *before)
            bound = bound + (tolerance.output + tolerance.reference) * sizes
            usual = np.isfinite(found) & np.isfinite(value) & np.isfinite(bound)
            usual = (usual & (top < np.ldexp(float(self.written.finfo.max), self.exponent))).all(axis=1)
            places, error = np.arange(rows.start, rows.stop), np.abs(found - value)
            kept = error[usual], value[usual], bound[usual], places[usual]
            return _compared(*kept, np.arange(_VECTORS)), places[~usual]

        every = self.agree(lambda: map(compare, self.blocks(self.m)))
        return _joined(finding for finding, _ in every), np.concatenate([rows for _, rows in every])

    def product(self, tolerance: Tolerance, rows: Places, factors: Callable[[slice], Any], of_sums: bool) -> _Summed:
        """
        Return some rows of op(A) op(B), or of signed sums of them.

        `factors` gives some rows of op(B) with their sizes, or those rows' sums with their norms.
        """
        value, size, partial, block, squares = (np.zeros(1) for _ in range(5))
        width = max(128, -(-self.k // 32))
        for start in range(0, self.k, width):
            at = slice(start, min(start + width, self.k))
            a, (b, b_sizes) = self.a(rows, at), factors(at)
            value = value + a @ b
            a_sizes, b_sizes = np.abs(a) + tolerance.floor, b_sizes + tolerance.floor
            if tolerance.floor:
                squares = squares + np.square(a_sizes) @ (np.square(b_sizes) + (np.square(b) if of_sums else 0.0))
            of_block, seen = a_sizes @ b_sizes, np.abs(value)
            size, block = size + of_block, np.maximum(block, of_block)
            partial = np.maximum(partial, seen.max(axis=1, keepdims=True) if of_sums else seen)
        return _Summed(value, size, np.minimum(size, 4.0 * partial + block), squares)

    def expect(
        self, tolerance: Tolerance, of: _Summed, c: np.ndarray, c_sizes: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return what C should be, and by how much it may differ."""
        by, product, scaled = abs(self.alpha), self.alpha * of.value, self.beta * c
        sizes = by * of.size, by * of.partial, np.abs(product), by * by * of.squares, np.abs(self.beta) * c_sizes
        return product + scaled, tolerance.bound(*sizes)

    def extremes(self, tolerance: Tolerance, of: _Summed, c: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the largest and (without its sign) the least that sums on the way to elements of C can be."""
        by, scaled = abs(self.alpha), self.beta * c

        def most(terms: np.ndarray, added: np.ndarray) -> Any:
            most = terms * (1 + min(1.0, tolerance.always)) + tolerance.reference * of.size
            return np.maximum(most, by * most + np.maximum(added, 0))

        if self.written.is_complex:
            one = most(of.size, abs(self.beta) * np.abs(c))
            return one, one
        sign = -1 if np.real(self.alpha) < 0 else 1
        up, down = ((of.size + one * of.value) / 2 for one in (sign, -sign))
        return most(up, scaled), most(down, -scaled)

    def verdict(self, elements: _Finding, sums: _Finding, what: str) -> CheckResult:
        """Return the verdict on what was found."""
        of, unit = (sums, "sum") if sums.worst[0] > elements.worst[0] else (elements, "element")
        ratio, error, bound, row, col = of.worst
        wrong, (_, special, kept, by_sums) = of.counts[0], elements.counts
        relative, scale = of.largest > 0 and not of.largest <= bound < math.inf, 2.0**self.exponent
        passed, name = 0.0 <= ratio <= 1.0, self.written.name
        if not passed:
            what += f"; {wrong} {unit}{'s' * (wrong != 1)} wrong, worst at row {row}, "
            what += f"{'vector' if unit == 'sum' else 'column'} {col}: error {error / scale:.3g}, "
            what += f"allowed {bound / scale:.3g}"
        if not relative:
            what += f"; no right {unit} is beyond {of.largest / scale:.3g}, so error and tolerance are absolute"
        if special:
            what += f"; {special} must be NaN or infinite, as inputs are or as values beyond the largest {name} are, "
            what += f"and {kept} of them are as they must be"
        if by_sums:
            what += f"; {by_sums} NaN or infinite where partial sums, or terms that cancel, may overflow "
            what += self.multiplied.accumulator.name
        # A random sum's mean square is the sum of the squares, so either kind gives the same figure.
        off, norm = sums.norms if sums.norms[1] > 0 else elements.norms
        unit_of = of.largest if relative else scale
        rms = off / (norm if norm > 0 else scale)
        return CheckResult(passed, error / unit_of, bound / unit_of, relative, rms, what)
