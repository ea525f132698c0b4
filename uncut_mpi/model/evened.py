"""Rates of devices of one model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

_HARDLY_DIFFERENT = 0.15


def evened(
    rates: np.ndarray,
    models: Sequence[str],
    common: Callable[[np.ndarray], float] = np.median,
    within: float = _HARDLY_DIFFERENT,
) -> np.ndarray:
    """
    Return rates in which devices of one model that hardly differ are the same.

    A few milliseconds of products on a GPU whose clocks still move differ by 5 % and more from one device to the next.
    Blocks of unequal size made from that cost up to 10 % of a product's time. A device that something else slows down
    differs by more than 15 %, and `calibrate` knows small differences too: those beyond its intervals.

    Parameters
    ----------
    rates : ndarray of float64, shape (num_ranks,)
        Measured ones, any unit.
    models : sequence of str
        Name of each rank's device.
    common : callable, default numpy.median
        What those that hardly differ have in common.
    within : float, default 0.15
        By what part of the largest they may differ.
    """
    found: np.ndarray = rates.copy()
    for model in set(models):
        mine = np.array([one == model for one in models])
        near = mine & (rates >= (1 - within) * rates[mine].max())
        found[near] = common(rates[near])
    return found
