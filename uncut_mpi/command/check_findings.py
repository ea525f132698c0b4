"""What the parts of the result check share: the operands, what is found, and ranks that agree on it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import numpy as np

from uncut_mpi.errors import agreed, from_wire, to_wire
from uncut_mpi.model.arguments import Number
from uncut_mpi.model.dtypes import DType

# Rows and columns that are taken at a time.
BLOCK: Final = 512

Gather = Callable[[Any], Sequence[Any]]

_ZERO: Final = np.longdouble(0)

# Sums of squares between these have lost nothing to underflow or overflow that rounding would not hide.
_SAFE_SQUARES: Final = (2.0**-900, 2.0**1000)


@dataclasses.dataclass(frozen=True, slots=True)
class Operands:
    """The product to check: op(A) m×k, op(B) k×n as views, C as it was (None: not read) and as it is."""

    a: np.ndarray
    b: np.ndarray
    c_in: np.ndarray | None
    c_out: np.ndarray
    dtype: DType
    alpha: Number
    beta: Number
    has_product: bool

    @property
    def k(self) -> int:
        """The shared extent; 0 where nothing is multiplied."""
        return self.a.shape[1] if self.has_product else 0


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """
    What one share of the check found; `ratio`, `error`, `bound`, `place` at its worst value.

    `inherited` counts the elements that the inputs make NaN or infinite, `misplaced` those of them that
    are something else in C, `unusable` the other expected values that are not finite. `beyond` counts the
    elements whose true value is beyond the type, `partial` those that are not finite because sums on the
    way to them may be so. The norms are 2-norms: their squares may be beyond float64.
    """

    ratio: float = -1.0
    error: float = 0.0
    bound: float = 0.0
    place: tuple[int, int] = (0, 0)
    largest: float = 0.0
    error_norm: np.longdouble = _ZERO
    expected_norm: np.longdouble = _ZERO
    wrong: int = 0
    unusable: int = 0
    inherited: int = 0
    misplaced: int = 0
    beyond: int = 0
    partial: int = 0

    def join(self, other: Finding) -> Finding:
        """Return both as one."""
        worst = other if other.ratio > self.ratio else self
        return dataclasses.replace(
            worst,
            largest=max(self.largest, other.largest),
            error_norm=np.hypot(self.error_norm, other.error_norm),
            expected_norm=np.hypot(self.expected_norm, other.expected_norm),
            **{name: getattr(self, name) + getattr(other, name) for name in _COUNTS},
        )


_COUNTS: Final = ("wrong", "unusable", "inherited", "misplaced", "beyond", "partial")


def joined(findings: Iterable[Finding]) -> Finding:
    """Return all findings as one."""
    return functools.reduce(Finding.join, findings, Finding())


def compare(
    found: np.ndarray,
    expected: np.ndarray,
    bound: np.ndarray,
    rows: np.ndarray,
    cols: np.ndarray,
    *,
    right: np.ndarray | None = None,
    wrong: np.ndarray | None = None,
) -> Finding:
    """
    Return what is found where `rows` and `cols` say what the positions stand for.

    Values that `right` marks are right whatever the bound says, those that `wrong` marks are not.
    """
    if found.size == 0:
        return Finding()
    error = np.abs(found - expected)
    if right is not None:
        error[right] = 0.0
        bound, expected = np.where(right, 1.0, bound), np.where(right, 0.0, expected)
    ratio = error / bound
    # NaN compares false with everything, so it must be made the worst of all.
    # And a bound that is not finite bounds nothing, so nothing passes by it.
    ratio[~(ratio <= math.inf) | ~np.isfinite(error) | ~np.isfinite(bound)] = math.inf
    if wrong is not None:
        ratio[wrong] = math.inf
        expected = np.where(wrong, 0.0, expected)
    worst = np.unravel_index(int(np.argmax(ratio)), ratio.shape)
    finite = np.isfinite(expected)
    return Finding(
        ratio=float(ratio[worst]),
        error=float(error[worst]),
        bound=float(bound[worst]),
        place=(int(rows[worst[0]]), int(cols[worst[1]])),
        largest=float(np.abs(expected[finite]).max(initial=0.0)),
        error_norm=_norm(error),
        expected_norm=_norm(expected),
        wrong=int(np.count_nonzero(ratio > 1.0)),
        unusable=expected.size - int(np.count_nonzero(finite)),
    )


def row_norms(rows: np.ndarray) -> np.ndarray:
    """Return the 2-norms of rows, also of those whose squares overflow or underflow."""
    if np.iscomplexobj(rows):
        rows = np.abs(rows)
    squares = np.einsum("ij,ij->i", rows, rows)
    norms: np.ndarray = np.sqrt(squares)
    least, most = _SAFE_SQUARES
    unsafe = ~((squares > least) & (squares < most))
    if unsafe.any():
        scale = _power_of_two(np.abs(rows[unsafe]).max(axis=1, initial=0.0))
        scaled = rows[unsafe] / scale[:, None]
        norms[unsafe] = np.sqrt(np.einsum("ij,ij->i", scaled, scaled)) * scale
    return norms


def _norm(values: np.ndarray) -> np.longdouble:
    """Return the 2-norm of all values."""
    values = np.abs(values)
    scale = _power_of_two(values.max(initial=0.0))
    norm: np.longdouble = np.longdouble(scale) * np.longdouble(np.sqrt(np.square(values / scale).sum()))
    return norm


def _power_of_two(largest: np.ndarray) -> np.ndarray:
    """Return powers of two that make the largest values 1 to 2, and 1 for what has none."""
    usable = np.isfinite(largest) & (largest > 0)
    exponent = np.frexp(np.where(usable, largest, 1.0))[1] - 1
    power: np.ndarray = np.ldexp(np.ones_like(largest), exponent)
    return power


def agree(work: Callable[[], Any], gather: Gather) -> list[Any]:
    """Return what all ranks' work returned, or raise the first error on every rank."""
    try:
        mine: tuple[bool, Any] = (True, work())
    except Exception as error:
        mine = (False, to_wire(error))
    everybody = gather(mine)
    for rank, (worked, value) in enumerate(everybody):
        if not worked:
            raise agreed(from_wire(*value, rank=rank))
    return [value for _, value in everybody]
