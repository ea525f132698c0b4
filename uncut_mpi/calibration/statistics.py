"""How sure a mean of timings is, and when enough of them were taken. Pure."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final

import numpy as np

MIN_SAMPLES: Final = 10
WANTED_WIDTH: Final = 0.05
"""Half width of the 95 % confidence interval, as a part of the mean, at which sampling ends."""

_NORMAL_975: Final = 1.959963984540054
# Quantile 0.975 of Student's t for 1 … 4 degrees of freedom, where the expansion is not accurate.
_FEW: Final = (12.706205, 4.302653, 3.182446, 2.776445)


def student_t(degrees: int) -> float:
    """
    Return the 0.975 quantile of Student's t distribution, to four digits.

    Parameters
    ----------
    degrees : int
        Degrees of freedom, at least 1.

    References
    ----------
    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5.
    """
    if degrees <= len(_FEW):
        return _FEW[degrees - 1]
    z, v = _NORMAL_975, float(degrees)
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / v ** (power + 1) for power, term in enumerate(terms))


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """
    What is kept of the samples of one probe.

    Attributes
    ----------
    mean_s, median_s, min_s, max_s : float
        Of the samples (seconds).
    half_width_s : float
        Half the 95 % confidence interval of the mean; infinite for one sample.
    count : int
        Samples.
    """

    mean_s: float
    median_s: float
    min_s: float
    max_s: float
    half_width_s: float
    count: int

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> Summary:
        """Return the summary of one sample or more."""
        values = np.asarray(samples_s, np.float64)
        count = len(values)
        half = math.inf
        if count > 1:
            half = student_t(count - 1) * float(values.std(ddof=1)) / math.sqrt(count)
        return cls(
            float(values.mean()), float(np.median(values)), float(values.min()), float(values.max()), half, count
        )

    @property
    def precise(self) -> bool:
        """Whether enough samples were taken, and their mean is known well enough."""
        return self.count >= MIN_SAMPLES and self.half_width_s <= WANTED_WIDTH * self.mean_s

    @property
    def unsteady(self) -> bool:
        """Whether the mean is not known well enough though enough samples were taken."""
        return self.count >= MIN_SAMPLES and not self.precise

    def to_dict(self) -> dict[str, float]:
        """Return the fields for a JSON file; an interval that is not known is left out."""
        fields = dataclasses.asdict(self)
        return {name: value for name, value in fields.items() if math.isfinite(value)}
