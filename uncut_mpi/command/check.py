"""
The check of a result: every element of small products; of large ones a sample, and signed sums over all rows.

All matrices are in host memory that the ranks read; every rank checks its share, and all ranks come
to the same verdict. Bounds are those of `uncut_mpi.command.tolerance`.

NaN and infinity pass where the true value is beyond the type, where sums on the way to it may be, and where the inputs
put them. They must be there in the first and the last case (`uncut_mpi.command.check_elements`). Sums over rows cannot
tell that. Of a large product, rows that hold infinities, or the largest number of the type, are compared element by
element. At most `ROWS_LIMIT` are, evenly spread, and the verdict says how many were. Inputs that hold NaN or infinity
pass only where every element is compared.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import numpy as np

from uncut_mpi.command.check_elements import check_elements
from uncut_mpi.command.check_findings import Finding, Gather, Operands
from uncut_mpi.command.check_sums import VECTORS, check_sums
from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import Number
from uncut_mpi.model.dtypes import DType

# Up to so many multiplications every element is compared with a float64 product.
FULL_CHECK_LIMIT: Final = 2048**3

# Of larger products so many multiplications at most go into rows whose sums do not tell enough.
ROWS_LIMIT: Final = FULL_CHECK_LIMIT

# Rows and columns of the sample that is compared element by element where not all are.
_SAMPLE: Final = 128


@dataclasses.dataclass(frozen=True, slots=True)
class CheckResult:
    """
    Verdict on a result, the same on all ranks.

    Attributes
    ----------
    passed : bool
        Whether every error is within its bound.
    error, tolerance : float
        Error and bound where their ratio is largest. Infinite or NaN where the result is.
    relative : bool
        Whether both are relative to the largest expected value. Else that is no larger than the tolerance, as where all
        results are tiny or 0, and they are absolute.
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
    relative: bool
    rms_error: float
    detail: str
    elements_covered: int


def check_shared(
    *,
    a: np.ndarray,
    b: np.ndarray,
    c_in: np.ndarray | None,
    c_out: np.ndarray,
    dtype: DType,
    trans_a: str = "N",
    trans_b: str = "N",
    alpha: Number,
    beta: Number,
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
    trans_a, trans_b : {"N", "T", "C"}
        Whether op transposes, and conjugates.
    alpha, beta : float or complex
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
    operands = Operands(
        a=_op(trans_a, a),
        b=_op(trans_b, b),
        c_in=None if beta == 0 else c_in,
        c_out=c_out,
        dtype=dtype,
        alpha=alpha,
        beta=beta,
        has_product=alpha != 0 and a.size > 0 and b.size > 0,
    )
    if c_out.size == 0:
        return CheckResult(True, 0.0, 0.0, False, 0.0, "C has no elements", 0)
    with np.errstate(all="ignore"):
        if c_out.size * operands.k <= full_limit:
            elements = check_elements(operands, np.arange(c_out.shape[0]), np.arange(c_out.shape[1]), share, gather)
            what = f"all {c_out.size} elements against a float64 product"
            return _verdict(operands, elements, elements, what, c_out.size)
        return _check_large(operands, seed, share, gather)


class _Conjugated:
    """A matrix whose elements are conjugated when they are taken, without a whole copy of it."""

    def __init__(self, matrix: np.ndarray) -> None:
        self._matrix = matrix
        self.shape, self.size = matrix.shape, matrix.size

    def __getitem__(self, key: Any) -> np.ndarray:
        part: np.ndarray = np.conj(self._matrix[key])
        return part


def _op(trans: str, matrix: np.ndarray) -> Any:
    if trans == "N":
        return matrix
    return _Conjugated(matrix.T) if trans == "C" and np.iscomplexobj(matrix) else matrix.T


def _check_large(operands: Operands, seed: int, share: tuple[int, int], gather: Gather) -> CheckResult:
    """Check all rows by their sums, those with unusual elements one by one, and a sample of elements. Collective."""
    rows, cols = operands.c_out.shape
    sums = check_sums(operands, seed, share, gather)
    most = max(1, ROWS_LIMIT // max(1, cols * operands.k))
    unusual = sums.unusual
    chosen = unusual if unusual.size <= most else unusual[np.arange(most) * unusual.size // most]
    sample = [_stratified(extent, seed) for extent in operands.c_out.shape]
    elements = Finding()
    for some_rows, some_cols in ((np.setdiff1d(sample[0], chosen), sample[1]), (chosen, np.arange(cols))):
        if some_rows.size:
            elements = elements.join(check_elements(operands, some_rows, some_cols, share, gather))
    what = (
        f"all {rows} rows against {VECTORS} vectors of random signs (Freivalds), "
        f"{len(sample[0])}×{len(sample[1])} elements against a float64 product"
    )
    if unusual.size:
        what += (
            f"; {unusual.size} rows hold numbers at or beyond the largest {operands.dtype.name}, {chosen.size} of them "
            "were compared element by element"
        )
    unseen = np.setdiff1d(sums.without_sums, chosen)
    if unseen.size:
        what += f", of {unseen.size} only the sample"
    return _verdict(operands, elements, sums.finding, what, operands.c_out.size - unseen.size * cols)


def _verdict(operands: Operands, elements: Finding, sums: Finding, what: str, covered: int) -> CheckResult:
    finding, unit = (sums, "sum") if sums.ratio > elements.ratio else (elements, "element")
    relative = finding.largest > 0 and not finding.largest <= finding.bound < math.inf
    passed = 0.0 <= finding.ratio <= 1.0
    detail = what
    if not passed:
        row, col = finding.place
        at = f"row {row}, column {col}" if unit == "element" else f"row {row}, vector {col}"
        detail += (
            f"; {finding.wrong} {unit}{'s' if finding.wrong != 1 else ''} wrong, worst at {at}: "
            f"error {finding.error:.3g}, allowed {finding.bound:.3g}"
        )
    if not relative:
        detail += f"; no right {unit} is beyond {finding.largest:.3g}, so error and tolerance are absolute"
    if finding.inherited:
        kept = finding.inherited - finding.misplaced
        detail += (
            f"; {finding.inherited} must be NaN or infinite, as inputs are, and {kept} of them are as they must be"
        )
    if elements.beyond:
        detail += f"; {elements.beyond} beyond the largest {operands.dtype.name} must be infinite"
    if elements.partial:
        detail += (
            f"; {elements.partial} NaN or infinite where partial sums, or terms that cancel, may overflow "
            f"{operands.dtype.accumulator.name}"
        )
    if finding.unusable:
        detail += (
            f"; {finding.unusable} expected {unit}s are NaN or infinite (inputs that are), "
            "so nothing bounds them: mend the inputs, or multiply without a check (--no-check)"
        )
    # A random sum's mean square is the sum of the squares, so either kind gives the same figure.
    base = sums if sums.expected_norm > 0 else elements
    rms = float(base.error_norm / base.expected_norm) if base.expected_norm > 0 else float(base.error_norm)
    scale = finding.largest if relative else 1.0
    return CheckResult(passed, finding.error / scale, finding.bound / scale, relative, rms, detail, covered)


def _stratified(extent: int, seed: int) -> np.ndarray:
    """Return at most `_SAMPLE` places, one at random in each strip of an extent, so that each tile has some."""
    count = min(extent, _SAMPLE)
    bounds = np.arange(count + 1) * extent // count
    return np.random.default_rng([seed, extent]).integers(bounds[:-1], bounds[1:])
