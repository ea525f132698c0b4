"""
How far a correct product may lie from the exact one, from rounding alone.

Each element has a bound that always holds, and a smaller one that holds but for a small chance. The smaller of the two
counts. Half types and ``tf32`` add what tensor cores truncate, and underflow adds one smallest number per operation.
Sums of rows with random signs have bounds of their own. `Tolerance` has the formulas, with their sources.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import numpy as np

from uncut_mpi.model.arguments import Number
from uncut_mpi.model.dtypes import DType

# Chance that a correct product of a whole run is called wrong.
FALSE_ALARM: Final = 1e-9

# Allows for orders of k-blocks other than the one in which partial sums are looked at.
_ORDER_MARGIN: Final = 4.0

_TRUNCATED_PRODUCTS: Final = 8

# The tables are of real types; complex ones are looked up by that of their parts.
# Powers of two that are just beyond the types.
_EXPONENT: Final = {DType.f64: 1024, DType.f32: 128, DType.f16: 16, DType.bf16: 128, DType.tf32: 128}

# Smallest normal numbers of the types that sum.
_SMALLEST_NORMAL: Final = {DType.f64: 2.0**-1022, DType.f32: 2.0**-126, DType.tf32: 2.0**-126}

# Smallest subnormal numbers.
_SMALLEST: Final = {
    DType.f64: 2.0**-1074,
    DType.f32: 2.0**-149,
    DType.f16: 2.0**-24,
    DType.bf16: 2.0**-133,
    DType.tf32: 2.0**-149,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance:
    r"""
    Factors of the bounds above for one problem.

    Attributes
    ----------
    always : float
        Of P.
    likely : float
        Of S.
    reference : float
        Of P, for the check's own arithmetic.
    output : float
        Of |C|.
    absolute : float
        Added for underflow.
    operands : float
        What rounding an element of A or B first may change of it; 0 where none is.
    deviations : float
        λ.

    Notes
    -----
    Let :math:`P = |\alpha||A||B| + |\beta||C|`, u the unit roundoff of the type that sums and k the shared extent. A
    product may be computed in any order of summation, in blocks updated one after another or split between ranks. One
    element of it differs from the exact one by at most the smaller of

    * :math:`\gamma_{k+3} P`, :math:`\gamma_n = nu/(1-nu)`: always (Higham 2002 [1]_, sections 3.1 and 3.5; three
      roundings for alpha, beta and their products; a block update costs no more additions than it saves);
    * :math:`\lambda\sqrt{2k+3}\,u\,S`: except with a probability of :math:`2e^{-\lambda^2/2}` per element, if rounding
      errors are mean independent of zero mean (Higham & Mary 2019 [2]_). In this form it follows from the
      Azuma–Hoeffding inequality (Connolly, Higham & Mary 2021 [3]_). S bounds the partial sums at which the errors
      arise.

    S is taken as the smaller of P and *four times the largest partial sum seen at the bounds of blocks of k, plus the
    largest* :math:`|A||B|` *of one block*. The factor allows for other orders of the blocks.

    Half types add up in float32 on tensor cores, which truncate: u is doubled, and a bias of one truncation per 8
    products, k/8·2u·S, is added (Fasi et al. 2021 [4]_ found 4 products per truncation on V100 and 8 on A100). Their
    one rounding to the output type adds u_out|C|. The float64 reference's own error is bounded by :math:`\gamma_{k+3}P`
    of float64.

    Underflow adds one smallest subnormal number per operation, times :math:`|\alpha|` for what is multiplied before
    alpha is. Operands and results that are subnormal keep their value on tensor cores too [4]_. Alpha and beta are
    numbers of the type that sums: if one is subnormal there, half a smallest subnormal times what it multiplies is
    added.

    ``tf32`` rounds or truncates the elements of A and B to 11 significant bits first, each by at most :math:`u_o =
    2^{-10}` of itself: at most :math:`2u_o(1+u_o)P` always. What is lost of an element depends on its last bits, which
    are taken as random. If they are truncated, they change a product by :math:`u_o|\alpha AB|` on average (half of
    :math:`u_o` for each of two). Beside that they change it by no more than :math:`\lambda u_o Q`, except with the
    chance above, where :math:`Q = |\alpha|\sqrt{(A\circ A)(B\circ B)}` (Hoeffding 1963 [5]_). A term varies by
    :math:`2u_o` of itself at most. Subnormal elements count as the smallest normal number there, which loses as much,
    and their rows and columns have the bound that always holds. For a sum with signs x, :math:`Q^2` is
    :math:`\alpha^2\sum_p a_{rp}^2((Bx)_p^2 + \|b_p\|^2)`.

    For a row r of C and a vector x of random signs, :math:`\sum_j x_j d_{rj}` of errors :math:`|d_{rj}| \le b_{rj}`
    exceeds :math:`\lambda\|b_r\|_2` with a probability of at most :math:`2e^{-\lambda^2/2}` (Hoeffding 1963 [5]_). The
    sum of all rounding errors of a row is one Azuma–Hoeffding sum, so that λ appears once there too.
    :math:`\|(|A||B|)_r\|_2` is bounded by :math:`\sum_p |a_{rp}| \|b_p\|_2` with the 2-norms of the rows of B.

    **Complex types.** Each part of an element is a real sum of 2k products, and alpha and beta add four more. So 2k + 3
    takes the place of k, for either part. The terms of a part add up to |A||B| at most, moduli meant (Cauchy and
    Schwarz), so that both parts together are off by :math:`\sqrt2` of what one may be. This is Higham 2002 [1]_,
    section 3.6, where a complex product costs :math:`\sqrt2\gamma_2`, for sums in any order and for fused ones. There
    are twice as many events.

    References
    ----------
    .. [1] N. J. Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., SIAM, 2002.
    .. [2] N. J. Higham, T. Mary, "A New Approach to Probabilistic Rounding Error Analysis", SIAM J. Sci. Comput. 41(5),
       2019.
    .. [3] M. P. Connolly, N. J. Higham, T. Mary, "Stochastic Rounding and Its Probabilistic Backward Error Analysis",
       SIAM J. Sci. Comput. 43(1), 2021.
    .. [4] M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, "Numerical behavior of NVIDIA tensor cores", PeerJ Comput.
       Sci. 7:e330, 2021.
    .. [5] W. Hoeffding, "Probability Inequalities for Sums of Bounded Random Variables", J. Am. Stat. Assoc. 58, 1963.
    """

    always: float
    likely: float
    reference: float
    output: float
    absolute: float
    operands: float = 0.0
    deviations: float = 0.0

    @classmethod
    def for_elements(cls, dtype: DType, k: int, elements: int, alpha: Number = 1.0) -> Tolerance:
        """Return the factors for every single one of `elements` elements."""
        k, parts, both = _in_parts(dtype, k)
        deviations = _deviations(parts * elements)
        step = _step_roundoff(dtype)
        bias = k / _TRUNCATED_PRODUCTS * step if dtype.is_half else 0.0
        return cls(
            always=both * _gamma(k + 3, step),
            likely=both * deviations * math.sqrt(2 * k + 3) * step + bias,
            reference=both * _gamma(k + 3, DType.f64.unit_roundoff),
            output=dtype.unit_roundoff if dtype.is_half else 0.0,
            absolute=both
            * (_underflow(k, alpha, dtype.accumulator) + _underflow(k, alpha, DType.f64) + _SMALLEST[dtype.real]),
            operands=dtype.operand_roundoff,
            deviations=deviations,
        )

    @classmethod
    def for_signed_sums(cls, dtype: DType, k: int, n: int, sums: int, alpha: Number = 1.0) -> Tolerance:
        """Return the factors for `sums` sums of n elements with random signs; P, S and |C| are row norms then."""
        each = cls.for_elements(dtype, k, 1, alpha)
        k, parts, both = _in_parts(dtype, k)
        # Three kinds of error, each with its own chance to deviate.
        deviations = _deviations(3 * parts * sums)
        step = _step_roundoff(dtype)
        bias = k / _TRUNCATED_PRODUCTS * step if dtype.is_half else 0.0
        return cls(
            always=deviations * each.always,
            likely=both * deviations * (math.sqrt(2 * k + 3) * step + bias),
            # In float64 and always true: row sums of |·| are at most √n times the row norms.
            reference=both * math.sqrt(max(1, n)) * _gamma(k + n + 4, DType.f64.unit_roundoff),
            output=deviations * each.output,
            absolute=n * each.absolute,
            operands=dtype.operand_roundoff,
            deviations=deviations,
        )

    def bound(self, magnitude: Any, partial: Any, result: Any) -> Any:
        """
        Return the largest error that rounding explains.

        Parameters
        ----------
        magnitude, partial, result : ndarray of float64 or float
            P, S and |C|.
        """
        # Of a sum so long that nothing always holds, the first is infinity, or NaN where it is times nothing.
        summed = np.fmin(self.always * magnitude, self.likely * partial)
        return summed + self.reference * magnitude + self.output * result + self.absolute

    def operand_bound(self, magnitude: Any, product: Any, spread: Any) -> Any:
        """
        Return the largest error that rounding the elements of A and B before they are multiplied explains.

        Parameters
        ----------
        magnitude, product, spread : ndarray of float64 or float
            |α||A||B| (of a sum with random signs: λ times that), |α A B| and Q.
        """
        u = self.operands
        return np.minimum(2 * u * (1 + u) * magnitude, u * product + self.deviations * u * spread)


def largest(dtype: DType) -> float:
    """
    Return the largest finite number of a type, of complex types that of their parts.

    Examples
    --------
    >>> largest(DType.f16), float(overflow_limit(DType.f16))
    (65504.0, 65520.0)
    """
    return math.ldexp(1.0 - dtype.unit_roundoff, _EXPONENT[dtype.real])


def overflow_limit(dtype: DType) -> Any:
    """
    Return the least number that rounds to infinity: half a unit in the last place above the largest.

    Returns
    -------
    float or longdouble
        The latter for float64, which cannot hold it.
    """
    if dtype.real is DType.f64:
        return np.ldexp(1 - np.longdouble(dtype.unit_roundoff) / 2, _EXPONENT[dtype.real])
    return math.ldexp(1.0 - dtype.unit_roundoff / 2, _EXPONENT[dtype.real])


def operand_limit(dtype: DType) -> float:
    """Return the least element of A or B that rounds to infinity before it is multiplied (``tf32``)."""
    return math.ldexp(1.0 - dtype.operand_roundoff / 4, _EXPONENT[dtype])


def raise_subnormal(magnitudes: np.ndarray) -> np.ndarray:
    """
    Make subnormal magnitudes of float32 the smallest normal number, in place, and return where they were.

    Rounding a subnormal number to fewer bits changes it by as much as that of the smallest normal one, and so by
    more of itself.
    """
    subnormal: np.ndarray = (magnitudes > 0) & (magnitudes < _SMALLEST_NORMAL[DType.f32])
    magnitudes[subnormal] = _SMALLEST_NORMAL[DType.f32]
    return subnormal


def raised_norm(n: int) -> float:
    """Return what `raise_subnormal` adds at most to the 2-norm of n numbers."""
    return math.sqrt(n) * _SMALLEST_NORMAL[DType.f32]


def scalar_error(dtype: DType, scalar: Number) -> float:
    """Return what rounding alpha or beta to the type that sums changes of it, beyond a unit roundoff of itself."""
    wide = dtype.accumulator.real
    if wide is DType.f64:
        return 0.0
    subnormal = [0 < abs(part) < _SMALLEST_NORMAL[wide] for part in (scalar.real, scalar.imag)]
    return _SMALLEST[wide] / 2 * sum(subnormal)


def block_width(k: int) -> int:
    """Return the width of the blocks of k at whose bounds partial sums are looked at; there are at most 32."""
    return max(128, -(-k // 32))


def partial_sum_bound(magnitude: np.ndarray, largest_partial: np.ndarray, largest_block: np.ndarray) -> np.ndarray:
    """
    Return S without its beta term and alpha.

    Parameters
    ----------
    magnitude : ndarray
        |A||B|.
    largest_partial : ndarray
        The largest partial sum at a bound of a block.
    largest_block : ndarray
        The largest |A||B| of one block.
    """
    bound: np.ndarray = np.minimum(magnitude, _ORDER_MARGIN * largest_partial + largest_block)
    return bound


def _deviations(events: int) -> float:
    return math.sqrt(2.0 * math.log(2.0 * max(1, events) / FALSE_ALARM))


def _in_parts(dtype: DType, k: int) -> tuple[int, int, float]:
    """Return how many terms a part of an element has, how many parts, and the error of both over that of one."""
    return (2 * k + 3, 2, math.sqrt(2)) if dtype.is_complex else (k, 1, 1.0)


def _underflow(k: int, alpha: Number, dtype: DType) -> float:
    """Return what k products and the operations with alpha and beta may lose to underflow."""
    least = _SMALLEST[dtype.real]
    return k * (max(1.0, abs(alpha)) * least) + 3 * least  # the smallest first: k times alpha may overflow


def _gamma(n: int, u: float) -> float:
    return n * u / (1.0 - n * u) if n * u < 1 else math.inf


def _step_roundoff(dtype: DType) -> float:
    u = dtype.accumulator.unit_roundoff
    return 2 * u if dtype.is_half else u
