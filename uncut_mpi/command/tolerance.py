"""How far a right product may lie from the exact one, from rounding alone: one bound, with its sources."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Final

import numpy as np

from uncut_mpi.model.arguments import Number
from uncut_mpi.model.dtypes import DType

# Chance that a right product of a whole run is called wrong.
FALSE_ALARM: Final = 1e-9


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance:
    r"""
    The factors of the bound for one problem.

    Notes
    -----
    Let :math:`P = |\alpha||A||B| + |\beta||C|`, u the unit roundoff of the type that sums and k the shared extent. A
    product may be computed in any order, in blocks added one after another or split between ranks. One element of it
    differs from the exact one by at most the smaller of

    * :math:`\gamma_{k+3} P`, :math:`\gamma_n = nu/(1-nu)`: always (Higham 2002 [1]_, sections 3.1 and 3.5; three
      roundings for alpha, beta and their products);
    * :math:`\lambda\sqrt{2k+3}\,u\,S`: but for a chance of :math:`2e^{-\lambda^2/2}` per element, if rounding errors
      are mean independent of zero mean (Higham & Mary 2019 [2]_; in this form Connolly, Higham & Mary 2021 [3]_).

    S bounds the partial sums at which errors arise. It is P, or four times the largest partial sum at the bounds of
    blocks of k, plus the largest :math:`|A||B|` of a block, if less. Four allows for other orders of the blocks.

    **Added to it.** The float64 reference errs by :math:`\gamma P` of float64. Half types add up in float32 on tensor
    cores, which truncate: u is doubled, and one truncation per 8 products, :math:`k/8 \cdot 2uS`, is added (Fasi et al.
    2021 [4]_). Their one rounding to the output type adds u_out|C|. Underflow adds one smallest subnormal number per
    operation, times :math:`|\alpha|` for what is multiplied before alpha is. Subnormal numbers are kept [4]_.

    **float8** operands and their products are exact in float32. Tensor cores drop more of a sum of them than float32
    does: at most :math:`2^{-13}` of its size at each of 128 products (`DType.truncated_sums`, DeepSeek-AI 2024 [6]_).

    **tf32** rounds or truncates the elements of A and B first, each by at most :math:`u_o = 2^{-10}` of itself: at most
    :math:`2u_o(1+u_o)P` always. Their last bits are taken as random. Truncation then changes a product by
    :math:`u_o|\alpha AB|` on average, and beside that by :math:`\lambda u_o Q` with the chance above, :math:`Q^2 =
    \alpha^2(A\circ A)(B\circ B)` (Hoeffding 1963 [5]_). All elements count as larger by the smallest
    normal number, since subnormal ones lose more of themselves.

    **Sums with random signs.** For a row r and signs x, :math:`\sum_j x_j d_{rj}` of errors :math:`|d_{rj}| \le b_{rj}`
    exceeds :math:`\lambda\|b_r\|_2` with that chance at most [5]_. So P, S and |C| become 2-norms of rows. That of
    |A||B| is at most :math:`\sum_p |a_{rp}| \|b_p\|_2`, and :math:`Q^2 = \alpha^2\sum_p a_{rp}^2((Bx)_p^2 +
    \|b_p\|^2)`. All random errors of a row are one sum, so λ appears once there too.

    **Complex types.** A part of an element is a real sum of 2k products, and alpha and beta add four more: 2k + 3 takes
    the place of k. Its terms add up to |A||B| at most, moduli meant. So both parts together are off by :math:`\sqrt2`
    of what one may be (Higham 2002 [1]_, section 3.6).

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
    .. [6] DeepSeek-AI, "DeepSeek-V3 Technical Report", arXiv:2412.19437, 2024, section 3.3.2.
    """

    always: float
    likely: float
    reference: float
    output: float
    absolute: float
    operands: tuple[float, float, float]
    floor: float

    @classmethod
    def of(cls, multiplied: DType, written: DType, k: int, alpha: Number, values: int, summed: int = 1) -> Tolerance:
        """Return the factors for `values` elements of C, or sums of so many each with random signs, of two types."""
        accumulator, first, dropped = multiplied.accumulator, multiplied.operand_roundoff, multiplied.truncated_sums(k)
        k, parts, both = (2 * k + 3, 2, math.sqrt(2)) if multiplied.is_complex else (k, 1, 1.0)
        u = accumulator.unit_roundoff * (2 if multiplied.sums_wider else 1)
        # Three kinds of error, each with its own chance to deviate.
        deviations = math.sqrt(2.0 * math.log(2.0 * 3 * parts * values / FALSE_ALARM))
        spread = deviations if summed > 1 else 1.0
        bias = spread * (k / 8 * u + dropped) if multiplied.sums_wider else 0.0
        least, smallest = (one.finfo.smallest_subnormal for one in (accumulator, written))
        lost = k * (max(1.0, abs(alpha)) * least) + 3 * least  # the smallest first: k times alpha may overflow
        return cls(
            always=spread * (both * _gamma(k + 3, u) + dropped),
            likely=both * deviations * math.sqrt(2 * k + 3) * u + bias,
            # Always true: sums of the sizes of a row are at most √n times its norm.
            reference=both * math.sqrt(summed) * _gamma(k + summed + 3, DType.f64.unit_roundoff),
            output=spread * written.unit_roundoff if written is not accumulator else 0.0,
            absolute=summed * both * (2 * lost + smallest),  # of the product and of the reference
            operands=(2 * first * (1 + first) * spread, first, deviations * first),
            floor=math.sqrt(summed) * multiplied.finfo.smallest_normal if first else 0.0,
        )

    def bound(self, size: Any, partial: Any, product: Any, squares: Any, c: Any) -> Any:
        """
        Return the largest error that rounding explains, but for that to the output type.

        Parameters
        ----------
        size, partial, product, squares, c : ndarray of float64 or float
            |α||A||B|, what bounds its partial sums, |α A B|, Q² and |β||C|.
        """
        # Of a sum so long that nothing always holds, the first is infinity, or NaN where it is times nothing.
        summed = np.fmin(self.always * (size + c), self.likely * (partial + c))
        always, mean, likely = self.operands
        rounded = np.fmin(always * size, mean * product + likely * np.sqrt(squares)) if always else 0.0
        return summed + rounded + self.reference * (size + c) + self.absolute


def overflow_limit(dtype: DType, exponent: int = 0) -> float:
    """
    Return the least number that rounds to infinity, half a unit in the last place above the largest, times 2**exponent.

    Examples
    --------
    >>> overflow_limit(DType.f16)
    65520.0
    """
    return float(np.ldexp(1.0 - dtype.unit_roundoff / 2, int(dtype.finfo.maxexp) + exponent))


def _gamma(n: int, u: float) -> float:
    return n * u / (1.0 - n * u) if n * u < 1 else math.inf
