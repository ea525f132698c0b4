"""From times to the parameters of the cost model: products by shape, copies by row width. Pure."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import ParamError
from uncut_mpi.model.costs import GemmShape, RowTable

# Edges of the blocks that products are cut into on GPUs, in whole waves; and those of the smallest ones where a library
# chooses from several sizes, so that there are no waves to be seen.
_BLOCK_EDGES: Final = (64, 96, 128, 192, 256)
_SMALLEST_EDGES: Final = (64, 128)

# Waves are believed where the error that remains with them is no more than so many times the one without: in f16 on an
# H200 they fitted better, 10.7 for 11.3 %, and were 14 for 11 % off on 1,681 products that the fit had not seen.
_WITH_WAVES: Final = 0.9

# So many steps of k hide half of what moving C takes; believed where the error that remains is no more than so many
# times the one without, since few of the products are added to C.
_C_HALF_DEPTHS: Final = (4096.0, 2048.0, 1024.0, 512.0, 256.0, 128.0)
_WITH_HIDING: Final = 0.995

# A fit that says that large products run more than so much faster than the fastest one seen is no fit.
_FASTER: Final = 2.0

# How many products with an uneven C, and how many others, tell what uneven ones take longer.
_FEW: Final = 3


def nonnegative_least_squares(matrix: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
    """
    Return the x ≥ 0 that minimises |matrix·x − values|, and that norm; for a few columns.

    Every set of columns is tried: the best one whose solution has no negative entry is the answer.

    Parameters
    ----------
    matrix : ndarray of float64, shape (samples, columns)
    values : ndarray of float64, shape (samples,)
    """
    columns = matrix.shape[1]
    best, least = np.zeros(columns), float(np.linalg.norm(values))
    for count in range(1, columns + 1):
        for chosen in itertools.combinations(range(columns), count):
            part, *_ = np.linalg.lstsq(matrix[:, chosen], values, rcond=None)
            norm = float(np.linalg.norm(matrix[:, chosen] @ part - values))
            if (part >= 0).all() and norm < least * (1 - 1e-12):
                best, least = np.zeros(columns), norm
                best[list(chosen)] = part
    return best, least


def fit_gemm_shape(
    shapes: Sequence[tuple[int, int, int]],
    seconds: Sequence[float],
    multiprocessors: int,
    extra_bytes: Sequence[float] = (),
) -> tuple[GemmShape, float, float]:
    """
    Fit the time of products by shape; errors count relative to the time.

    For given blocks ``t = overhead + W·k·(1 + uneven·u)/rate + W·half_depth/rate + 2·tail·k/rate + c·extra``. W is the
    operations per step of k, whole blocks counted, or whole waves of them; u is 1 where C is uneven (`GemmShape`), else
    0. So t is linear in (overhead, 1/rate, half_depth/rate, tail/rate, c, uneven/rate). The blocks are those that fit
    best, in waves only if they fit far better. With these, the extra bytes are divided by 1 + k/c_half_depth for
    several depths, and that is taken which fits best if it fits better than none. Times that do not grow with the
    operations (of tiny products on a busy machine) give the best rate seen, and no shape.

    Parameters
    ----------
    shapes : sequence of (m, n, k)
        At least three, of different k and of different m·n. Of fewer than six neither tail nor c are told, and
        `uneven` only where at least three have an uneven C and as many have not.
    seconds : sequence of float
        Time of each.
    extra_bytes : sequence of float, optional
        Bytes of C that each moves besides writing it once in the accumulator's type; default none.
    multiprocessors : int
        Of the device; with 1 there are no waves.

    Returns
    -------
    shape : GemmShape
    tflop_per_s : float
        Rate of a large product, to go with `shape`.
    error : float
        Root mean square of the relative errors that remain.

    Raises
    ------
    ParamError
        If there are fewer than three samples, or one is not a positive time.
    """
    blocks = [GemmShape()]
    if multiprocessors > 1:
        for edges, waves in ((_SMALLEST_EDGES, False), (_BLOCK_EDGES, True)):
            blocks += [GemmShape(float(rows), float(cols), waves=waves) for rows in edges for cols in edges]
    times = np.asarray(seconds, np.float64)
    if len(times) < 3 or not (np.isfinite(times).all() and (times > 0).all()):
        raise ParamError(f"{len(times)} products were timed, at least 3 positive times are needed to fit their rate")
    ones, depths = np.ones(len(times)), np.array([float(k) for _, _, k in shapes])
    extra = np.zeros(len(times)) if not len(extra_bytes) else np.asarray(extra_bytes, np.float64)
    uneven = np.array([_native.is_uneven(m, n) for m, n, _ in shapes])
    operations = np.array([2.0 * m * n * k for m, n, k in shapes])
    fastest = float((operations / times).max())

    def fit(plain: GemmShape) -> tuple[float, GemmShape, float] | None:
        """Return the norm of the errors, the shape and the rate for given blocks and depth; None if it is no fit."""
        work = np.array([plain.work(m, n, k, multiprocessors)[0] for m, n, k in shapes])
        hidden = 1.0 + depths / plain.c_half_depth if plain.c_half_depth else ones
        matrix = np.stack([ones, work, work / depths, 2.0 * depths, extra / hidden, work * uneven], axis=1)
        matrix /= times[:, None]
        scale = np.linalg.norm(matrix, axis=0)
        scale[scale == 0] = 1.0
        fitted = np.zeros(6)
        known = 3 if len(times) <= 5 else 5 if min(uneven.sum(), (~uneven).sum()) < _FEW else 6
        fitted[:known], norm = nonnegative_least_squares((matrix / scale)[:, :known], ones)
        overhead, inverse, fill, tail, moved, longer = (float(value) for value in fitted / scale)
        if inverse * _FASTER * fastest < 1.0:
            return None
        shape = dataclasses.replace(
            plain,
            half_depth=fill / inverse,
            overhead_s=overhead,
            tail_elements=tail / inverse,
            c_s_per_byte=moved,
            uneven=longer / inverse,
        )
        return norm, shape, 1e-12 / inverse

    found, least = None, np.inf
    for plain in blocks:
        one = fit(plain)
        badness = np.inf if one is None else one[0] / (_WITH_WAVES if plain.waves and plain.block_rows > 1 else 1.0)
        if badness < least * (1 - 1e-9):
            found, least = one, badness
    if found is None:
        errors = 1.0 - operations / fastest / times
        return GemmShape(), fastest * 1e-12, float(np.sqrt(np.mean(errors**2)))
    best, least = found[1], _WITH_HIDING * found[0]
    for depth in _C_HALF_DEPTHS if best.c_s_per_byte > 0 else ():
        one = fit(GemmShape(best.block_rows, best.block_cols, waves=best.waves, c_half_depth=depth))
        if one is not None and one[0] < least:
            found, least = one, one[0]
    norm, shape, tflop_per_s = found
    return shape, tflop_per_s, norm / len(times) ** 0.5


def fit_idle_use(idle: Sequence[float], gained: Sequence[float]) -> float:
    """
    Return the `GemmShape.idle_use` for which two products at a time gain most nearly what they were seen to gain.

    In the long run each of two takes 1 - idle_use · idle of its time alone, and no less than half of it. Least
    squares, to a thousandth.

    Parameters
    ----------
    idle : sequence of float
        Part of the device that each product leaves idle (`GemmShape.work`), one at least above 0.
    gained : sequence of float
        What each of two took less than alone, of its time alone.
    """
    uses = np.linspace(0.0, 1.0, 1001)
    expected = np.minimum(np.outer(uses, idle), 0.5)
    return float(uses[np.argmin(((expected - np.asarray(gained)) ** 2).sum(axis=1))])


def fit_row_shares(widths_bytes: Sequence[int], seconds_per_byte: Sequence[float]) -> RowTable:
    """
    Return what rows of some widths get of the bandwidth of a contiguous copy, as a table of `RowRates`.

    Parameters
    ----------
    widths_bytes : sequence of int
        Width of the rows, each once; 0 for the contiguous copy, which has to be there.
    seconds_per_byte : sequence of float
        For each.
    """
    times = dict(zip(widths_bytes, seconds_per_byte, strict=True))
    whole = times.pop(0)
    return tuple((float(width), min(1.0, whole / times[width])) for width in sorted(times))
