"""The result check: right products pass whatever their type and size, planted faults never do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.checks import Case, generate, make, multiply, on_ranks, put, tensor_float
from uncut_mpi.command import check
from uncut_mpi.command.tolerance import Tolerance
from uncut_mpi.errors import CapacityError, ParamError
from uncut_mpi.model.dtypes import MEASURED, DType

METHODS = ("full", "sums")
BOTH = pytest.mark.parametrize("method", METHODS)
TYPES = pytest.mark.parametrize("dtype", MEASURED, ids=lambda one: one.name)
REAL = pytest.mark.parametrize("dtype", [one for one in MEASURED if not one.is_complex], ids=lambda one: one.name)
NAN, INF = math.nan, math.inf
LARGEST = {dtype: float(ml_dtypes.finfo(dtype.real.numpy).max) for dtype in MEASURED}


# -- right products ----------------------------------------------------------------------------------------


@TYPES
def test_right_products_pass(dtype):
    for shape in [(1, 1, 1), (1, 700, 3), (700, 1, 30), (129, 513, 257), (600, 520, 140), (3, 5, 20000)]:
        case = make(*shape, dtype)
        rounding = 4 * dtype.unit_roundoff * (1 + shape[2]) ** 0.5 + dtype.operand_roundoff
        for method in METHODS:
            result = case.check(method)
            assert (result.passed, result.relative) == (True, True), (shape, method, result)
            assert 0 <= result.error <= result.tolerance, (shape, method, result)
            assert result.rms_error < rounding, (shape, method, result)
    nan, c = np.full((70, 90), NAN, dtype.numpy), generate(60, 60, dtype, "C", "C")
    for method in METHODS:
        for trans_a, trans_b in [("T", "N"), ("N", "T"), ("T", "C"), ("C", "N")]:
            case = Case(c, c[::-1], c, c, dtype).but(trans_a=trans_a, trans_b=trans_b)
            assert case.check(method).passed, (method, trans_a, trans_b)
            assert not case.check(method, alpha=-case.alpha).passed, (method, trans_a, trans_b)
        for c_in in nan[:, :80], None:
            assert make(70, 80, 90, dtype, beta=0.0).check(method, c_in=c_in).passed
        assert make(70, 80, 90, dtype, alpha=0.0).check(method, a=nan).passed
        scaled = make(70, 80, 0, dtype)
        assert scaled.check(method).passed
        assert not scaled.check(method, c_out=scaled.c_in).passed


def one_sum_after_another(positive: bool) -> Case:
    """The least accurate order that is in use: every product is added to one running sum."""
    case = make(24, 16, 5000, DType.f32)
    a, b = (np.abs(case.a), np.abs(case.b)) if positive else (case.a, case.b)
    total = np.zeros((24, 16), np.float32)
    for p in range(5000):
        total += a[:, p, None] * b[p]
    result = np.float32(case.alpha) * total + np.float32(case.beta) * case.c_in
    return dataclasses.replace(case, a=a, b=b, c_out=result)


def truncated() -> Case:
    """A long product whose sums were cut towards zero after every 8 products, as tensor cores do."""
    case = make(4, 4, 800_000, DType.f16)
    # Positive, so that all cuts go the same way, and small, so that the sum fits half precision.
    a, b = np.abs(case.a) / np.float16(8), np.abs(case.b) / np.float16(8)
    wide_a, wide_b = a.astype(np.float64).reshape(4, -1, 8).transpose(1, 0, 2), b.astype(np.float64).reshape(-1, 8, 4)
    total = np.zeros((4, 4), np.float32)
    for group in np.matmul(wide_a, wide_b):
        exact_sum = group + total
        total = exact_sum.astype(np.float32)
        np.copyto(total, np.nextafter(total, np.float32(0)), where=total > exact_sum)
    result = np.float32(case.alpha) * total + np.float32(case.beta) * case.c_in.astype(np.float32)
    return dataclasses.replace(case, a=a, b=b, c_out=result.astype(np.float16))


def tf32_cut_towards_zero() -> Case:
    case = make(24, 16, 5000, DType.tf32)
    return case.but(a=np.abs(case.a), b=np.abs(case.b), nearest=False)


def rows_that_cancel() -> Case:
    """|A||B| is far above |AB| here, and so are errors."""
    case = make(64, 64, 1000, DType.f32, beta=0.0)
    return case.but(a=np.hstack([case.a, -case.a]), b=np.vstack([case.b, case.b + case.b * np.float32(2**-22)]))


ORDERS = {
    "one after another": lambda: one_sum_after_another(False),
    "one after another, positive": lambda: one_sum_after_another(True),
    "truncated as on tensor cores": truncated,
    "tf32 cut towards zero": tf32_cut_towards_zero,
    "rows that cancel": rows_that_cancel,
    "very long": lambda: make(3, 4, 1_000_000, DType.f32),
    "very long, in halves": lambda: make(3, 4, 1_000_000, DType.bf16),
    "tall": lambda: make(20_000, 2, 3, DType.f32),
}


@pytest.mark.parametrize("order", ORDERS)
def test_whatever_the_order_of_summation_a_right_product_passes(order):
    case = ORDERS[order]()
    assert np.abs(case.c_out).max() > 0
    assert all(case.check(method).passed for method in METHODS)


# -- planted faults ----------------------------------------------------------------------------------------

TILE, OTHER = np.s_[:64, :64], np.s_[64:128, :64]
FAULTS: dict[str, Callable[[Case], np.ndarray]] = {
    "one element": lambda x: put(x.c_out, ((150, 102), x.c_out[150, 102] + x.dtype.numpy.type(16))),
    "two that cancel": lambda x: put(
        x.c_out, *(((5, col), x.c_out[5, col] + x.dtype.numpy.type(by)) for col, by in ((50, 16), (200, -16)))
    ),
    "one NaN": lambda x: put(x.c_out, ((-1, -1), NAN)),
    "one infinity": lambda x: put(x.c_out, ((0, 50), INF)),
    "a tile that nobody wrote": lambda x: put(x.c_out, (OTHER, NAN)),
    "a block of k dropped": lambda x: x.but(a=put(x.a, (np.s_[:128, 128:256], 0))).c_out,
    "a tile of B from another place": lambda x: x.but(b=put(x.b, (OTHER, x.b[TILE]))).c_out,
    "tiles swapped": lambda x: put(x.c_out, (TILE, x.c_out[OTHER]), (OTHER, x.c_out[TILE])),
    "beta twice": lambda x: x.but(beta=x.beta**2).c_out,
    "beta not at all": lambda x: x.but(beta=1.0).c_out,
    "C not added": lambda x: x.but(beta=0.0).c_out,
    "alpha missing": lambda x: x.but(alpha=1.0).c_out,
    "alpha twice in one tile": lambda x: put(x.c_out, (TILE, x.but(alpha=x.alpha**2).c_out[TILE])),
    "C untouched in a tile": lambda x: put(x.c_out, (np.s_[192:, 192:], x.c_in[192:, 192:])),
    "a column shifted": lambda x: put(x.c_out, (np.s_[:, 7], x.c_out[:, 8])),
}


@TYPES
def test_planted_faults_fail(dtype):
    right = make(256, 256, 260, dtype)
    faults = {name: plant(right) for name, plant in FAULTS.items()}
    if dtype is DType.f64:
        faults["in single"] = multiply(dataclasses.replace(right, dtype=DType.f32)).astype(np.float64)
    if dtype is DType.f32:
        faults["of half inputs"] = right.but(a=right.a.astype(np.float16), b=right.b.astype(np.float16)).c_out
    added = multiply(right.but(c_in=multiply(right, stop=130), beta=1.0), start=130)
    for method in METHODS:
        assert right.check(method).passed, method
        # A block of k is added to C: one more rounding, which half types may not have.
        assert right.check(method, c_out=added).passed != dtype.sums_wider, method
        for name, c_out in faults.items():
            result = right.check(method, c_out=c_out)
            assert not result.passed, (method, name, result)
            assert "worst at row" in result.detail, (method, name, result)
            assert not result.error <= result.tolerance, (method, name, result)


@BOTH
@pytest.mark.parametrize("nearest", [True, False])
def test_tf32_may_round_its_operands_or_drop_their_last_bits(method, nearest):
    for shape in (40, 30, 8), (128, 96, 3000), (512, 512, 1024):
        case = make(*shape, DType.tf32, nearest=nearest)
        assert case.check(method).passed
        # An f32 product is not to be computed so, and tf32 not from far fewer bits.
        assert not case.check(method, dtype=DType.f32).passed
        a, b = (tensor_float(operand, nearest, 19) for operand in (case.a, case.b))
        assert not case.check(method, c_out=case.but(a=a, b=b).c_out).passed


def test_small_faults_fail_by_the_bound_that_is_sharp_there():
    case = make(16, 16, 200_000, DType.f32)  # a short block lost from a long product
    assert not any(case.check(method, c_out=multiply(case, stop=199_900)).passed for method in METHODS)
    case = make(20, 20, 1, DType.f32)  # of a short sum the bound that always holds is less than the likely one
    magnitude = case.alpha * np.abs(case.a) @ np.abs(case.b) + case.beta * np.abs(case.c_in)
    off = (case.c_out + 8 * DType.f32.unit_roundoff * magnitude).astype(np.float32)
    assert not case.check("full", c_out=off).passed


# -- NaN, infinity and the largest numbers -----------------------------------------------------------------


def with_a_large_element(dtype: DType, size: float, turn: complex) -> Case:
    """A random product whose element (5, 7) is about `size` times the largest number, and no other is so large."""
    case = make(40, 30, 8, dtype)
    large = math.sqrt(LARGEST[dtype]) * math.sqrt(size / abs(case.alpha))
    a, b = put(case.a, (5, 0), ((5, 0), turn * large)), put(case.b, (np.s_[:, 7], 0), ((0, 7), large))
    return case.but(a=a, b=b)


@BOTH
@TYPES
def test_a_value_beyond_the_type_must_be_its_infinity_and_any_other_finite(method, dtype):
    for turn in (1, 1j, -1, -1j) if dtype.is_complex else (1, -1):
        for is_beyond in True, False:
            case = with_a_large_element(dtype, 1.5 if is_beyond else 0.9, turn)
            result = case.check(method)
            assert result.passed, (turn, result)
            assert 0 <= result.error <= result.tolerance < 1, (turn, result)
            assert ("; 1 must be NaN or infinite" in result.detail) == is_beyond == (not np.isfinite(case.c_out[5, 7]))
            right = ({INF, -INF, NAN} if dtype.is_complex else {turn * INF}) if is_beyond else set()
            for value in {LARGEST[dtype], -LARGEST[dtype], 17.0, NAN, INF, -INF} - right:
                result = case.check(method, c_out=put(case.c_out, ((5, 7), value)))
                assert (result.passed, "worst at row 5" in result.detail) == (False, True), (turn, value, result)
            for place, value in (
                ((5, 8), 4.0 * LARGEST[DType.f16] ** 0.5),
                ((5, 8), INF),
                ((6, 7), NAN),
                ((5, 29), -INF),
            ):
                assert not case.check(method, c_out=put(case.c_out, (place, value))).passed, (place, value)


def judge(dtype: DType, terms: list[float], right: list[float], *candidates: float, **changes: object) -> None:
    """See that of these results and what is not finite the right ones pass for a sum of one element, and no other."""
    scale = changes.pop("scale", 1.0)
    a, b = (np.array(one).astype(dtype.numpy) for one in ([terms], [[scale]] * len(terms)))
    case = dataclasses.replace(Case(a, b, np.zeros((1, 1), dtype.numpy), a, dtype, alpha=1.0, beta=0.0), **changes)
    for value in [*candidates, *right, INF, -INF, NAN]:
        result = case.check("full", c_out=np.full((1, 1), value, case.dtype.numpy))
        assert result.passed == (value in right), (value, case, result)


# At half a unit in the last place beyond the largest the rounding of the sums decides; at so many it must be infinite.
@pytest.mark.parametrize(
    ("dtype", "must"), [(DType.f16, 17 / 32), (DType.bf16, 0.625), (DType.f32, 256.0), (DType.f64, 512.0)]
)
def test_near_the_limit_either_is_right_where_rounding_decides(dtype, must):
    for largest in LARGEST[dtype], -LARGEST[dtype]:
        unit = math.copysign(math.ldexp(2 * dtype.unit_roundoff, math.frexp(largest)[1] - 1), largest)
        judge(dtype, [largest, unit / 2], [largest, largest * INF])
        judge(dtype, [largest, unit / 2, (must - 0.5) * unit], [largest * INF], largest)
        if dtype.sums_wider:
            judge(dtype, [largest, unit / 2, (0.5 - must) * unit], [largest])


@pytest.mark.parametrize("dtype", [DType.f32, DType.tf32, DType.bf16, DType.f64, DType.f16], ids=lambda one: one.name)
def test_sums_on_the_way_may_overflow_where_some_order_does(dtype):
    for terms, right in [
        ((0.9, 0.9, -0.9, -0.9), [INF, -INF, NAN]),  # both infinities, whose sum is NaN, in some order
        ((0.5, 0.7, -0.6), [INF]),  # one term cannot overflow downwards
        ((-0.5, -0.7, 0.6), [-INF]),
        ((0.4, 0.4), []),  # no order of a sum of one sign exceeds its end
        ((0.3, -0.3, 0.2), []),
        ((0.4, -0.4, 0.3), []),  # the magnitudes together are beyond the type
        ((0.9, 0.9, -0.1), [INF]),
        ((0.9, 0.9, 0.9, -0.9, -0.7), [INF, -INF, NAN]),  # beyond, or what an order that begins with the last makes
    ]:
        values = [LARGEST[dtype] * one for one in terms]
        total = sum(np.longdouble(float(dtype.numpy.type(one))) for one in values)
        held = [float(total)] if abs(total) < LARGEST[dtype] else []
        if dtype is DType.f16:  # float32 holds all sums
            right = [] if held else [INF]
        judge(dtype, values, [*held, *right], -LARGEST[dtype], 0.55 * LARGEST[dtype])


def test_alpha_and_beta_c_may_come_before_or_after_sums_that_overflow():
    for product, before, right in [
        (-3e38, 4e38, [1e38, INF]),  # beta C alone is beyond the type
        (-4e38, 3e38, [-1e38, -INF]),  # alpha A B alone
        (-4e38, 5e38, [1e38, INF, -INF, NAN]),  # both: inf - inf
        (4e38, -4e38, [0, INF, -INF, NAN]),
        (4e38, 4e38, [INF]),
        (1e38, 2e38, [3e38]),
    ]:
        given = {"alpha": 1e4, "beta": 10.0, "c_in": np.full((1, 1), before / 10.0, np.float32), "scale": 1e4}
        judge(DType.f32, [product / 1e8], right, 0, 1e38, -1e38, 3e38, LARGEST[DType.f32], **given)
    judge(DType.f32, [1e25], [1e20, INF], 0.0, 1.1e20, scale=1e25, alpha=1e-30)
    judge(DType.f32, [2e38, 3e38, -3e38], [-float(np.float32(2e38)), -INF], 2e38, alpha=-1.0)
    # An order that begins with the small term, which float64 does not see beside the huge one, ends in -inf or NaN.
    judge(DType.f32, [1e30, -1e10], [INF, -INF, NAN], LARGEST[DType.f32], scale=1e30)
    c = np.full((1, 1), 10000, np.float16)
    judge(DType.f16, [10000], [0, INF, -INF, NAN], alpha=1e36, beta=-1e36, c_in=c)


@TYPES
def test_nan_and_infinity_of_the_inputs_are_wanted_where_they_spread_to_and_nowhere_else(dtype):
    case = make(60, 70, 300, dtype)
    a, b = put(case.a, ((5, 6), NAN), ((9, 200), INF)), put(case.b, ((4, 3), INF), ((7, 3), -INF), ((8, 4), -INF))
    case = case.but(a=a, b=b, c_in=put(case.c_in, ((20, 30), -INF), ((9, 8), NAN)))
    spread = 2 * 70 + 2 * 58 + 1
    for method in METHODS:  # sums tell nothing of any row: B spoils them all
        result = case.check(method)
        assert result.passed, result
        assert 0 < result.error <= result.tolerance < 1
        assert all(f"{spread} {what}" in result.detail for what in ("must be NaN or infinite", "of them are")), result
        assert result.rms_error < 4 * dtype.unit_roundoff * 301**0.5 + dtype.operand_roundoff
        for place, value in (
            ((5, 0), 0.5), ((9, 1), -case.c_out[9, 1]), ((9, 1), NAN), ((20, 30), NAN), ((9, 8), INF),
            ((30, 3), INF), ((0, 0), NAN), ((0, 0), INF), ((0, 0), 17.0),
        ):  # fmt: skip
            if dtype.is_complex and place != (0, 0) and not np.isfinite(value):
                continue  # whatever is not finite is right there
            result = case.check(method, c_out=put(case.c_out, (place, value)))
            assert not result.passed, (method, place, value)
            assert f"1 element wrong, worst at row {place[0]}, column {place[1]}" in result.detail
            assert ("and 256 of them" in result.detail) == (place != (0, 0))
    for scalar, value in ("alpha", INF), ("alpha", NAN), ("beta", -INF), ("beta", NAN):
        case = make(30, 20, 8, dtype, **{scalar: value})
        assert case.check("full").passed
        assert not case.check("full", c_out=put(case.c_out, ((3, 4), 1.0))).passed


@REAL
def test_a_product_full_of_infinities_is_checked_within_bounds(dtype, monkeypatch):
    large = math.sqrt(LARGEST[dtype]) * 2
    case = make(400, 300, 16, dtype, of_a=large, of_b=large)
    monkeypatch.setattr(check, "FULL_CHECK_LIMIT", 300 * 16 * 20)
    result = case.check("sums")
    assert result.passed, result
    assert all(what in result.detail for what in ("20 of 400 rows", "of the others only the sample")), result
    assert case.check("full").passed
    # A wrong tile is met by the sample and by the rows that are looked at.
    assert not case.check("sums", c_out=put(case.c_out, (np.s_[:128, :128], 0))).passed


def test_a_saturated_element_of_a_large_row_is_seen():
    case = make(8, 4000, 2, DType.f16, alpha=1.0, beta=0.0)
    b = np.vstack([np.where(case.b[0] > 0, 60000, -60000), np.zeros(4000)]).astype(np.float16)
    b[:, 1234] = 60000, 5540  # 65540: beyond by less than the rounding of the row's other elements
    case = case.but(a=np.ones_like(case.a), b=b)
    assert (case.c_out[3, 1234], case.check("sums").passed) == (INF, True)
    for rows in 3, np.s_[:]:
        assert not case.check("sums", c_out=put(case.c_out, ((rows, 1234), 65504))).passed


@BOTH
@pytest.mark.parametrize(
    ("k", "of_a", "of_b", "alpha", "off"),
    [
        (20, 1e-170, 1e170, 1.0, 1.0), (20, 1e-10, 1e-170, 1.0, 1e-185), (2000, 1e-10, 1e-170, 1.0, 1e-185),
        (2, 1e154, 1e154, 1.0, 1e306), (64, 1e-3, 1e-3, 1e307, 1e293), (64, 1e-3, 1e-3, -1e308, 1e294),
    ],
)  # fmt: skip
def test_very_large_and_small_doubles_have_bounds_and_an_rms_error(method, k, of_a, of_b, alpha, off):
    case = make(300, 400, k, DType.f64, of_a=of_a, of_b=of_b, alpha=alpha, beta=0.0)
    right = case.check(method)
    assert right.passed, right
    assert 0 <= right.rms_error < 1e-14
    assert 0 < right.tolerance < 1e-6
    wrong = case.check(method, c_out=put(case.c_out, ((4, 5), case.c_out[4, 5] + off)))  # not in the sample
    assert not wrong.passed
    assert 1e-14 < wrong.rms_error < 1
    for value in NAN, INF, LARGEST[DType.f64]:
        assert not case.check(method, c_out=put(case.c_out, ((3, 4), value))).passed, value


# -- small numbers -----------------------------------------------------------------------------------------


@BOTH
@REAL
def test_small_results_are_held_to_the_bound_and_flushing_to_zero_is_not(method, dtype):
    smallest_normal = float(ml_dtypes.finfo(dtype.numpy).smallest_normal)
    case = make(30, 20, 1, dtype)
    b = np.broadcast_to(smallest_normal * 2.0**4 * (1.5 + 0.25 * (np.arange(20) % 3)), (1, 20)).astype(dtype.numpy)
    case = case.but(a=np.full_like(case.a, 2.0**-8), b=b, alpha=1.0, beta=0.0)
    assert np.logical_and(case.c_out > 0, case.c_out < smallest_normal).all()
    assert case.check(method).passed
    assert not case.check(method, c_out=np.zeros_like(case.c_out)).passed
    for factor in 0.0, 2.0**-1073 if dtype is DType.f64 else 0.0:
        case = make(30, 20, 40, dtype, of_a=factor, alpha=1.0, beta=0.0)
        result = case.check(method)
        assert (result.passed, result.relative, "are absolute" in result.detail) == (True, False, True), result
        assert 0 <= result.error < result.tolerance < 1e-3
        wrong = case.check(method, c_out=put(case.c_out, ((3, 4), 1.0)))
        assert (wrong.passed, wrong.error) == (False, pytest.approx(1.0))
        assert case.check(method, c_out=-case.c_out).passed  # zeros of either sign are one value
        tiny = 3e-7 if dtype is DType.f16 else 1e-30
        assert not case.check(method, c_out=put(case.c_out, ((3, 4), tiny)), alpha=0.0).passed


@BOTH
@pytest.mark.parametrize("dtype", [DType.f32, DType.bf16, DType.tf32, DType.f64], ids=lambda one: one.name)
def test_what_underflows_before_a_large_alpha_may_be_lost(method, dtype):
    is_double = dtype is DType.f64
    tiny, alpha = (1e-161, 1e300) if is_double else (1e-22, 1e30)
    case = Case(*(np.full(shape, tiny, dtype.numpy) for shape in ((30, 4), (4, 20))), None, None, dtype, beta=0.0)
    case = case.but(alpha=alpha)
    if is_double:  # the reference may lose the more
        case = dataclasses.replace(case, c_out=multiply(dataclasses.replace(case, alpha=1.0, a=case.a * alpha)))
    assert case.check(method).passed
    off = (1 if is_double else 1e3) * alpha * tiny * tiny * 1e4
    assert not case.check(method, c_out=put(case.c_out, ((4, 5), off))).passed


@BOTH
def test_of_subnormal_scalars_and_operands_more_is_rounded_away(method):
    c = generate(30, 20, DType.f32, "C") * np.float32(1e33)
    case = make(30, 20, 4, DType.f32, of_a=1e15, of_b=1e18, c_in=c, alpha=1.0000003e-42, beta=1.0000003e-42)
    assert case.check(method).passed
    assert not case.check(method, c_out=case.c_out * np.float32(1.01)).passed
    for nearest in True, False:
        case = make(30, 20, 40, DType.tf32, of_a=2.0**-130, of_b=2.0**100, beta=0.0, nearest=nearest)
        assert case.check(method).passed
        assert not case.check(method, dtype=DType.f32).passed
        assert not case.check(method, c_out=put(case.c_out, (7, case.c_out[7] * np.float32(1.2)))).passed


def test_a_long_sum_of_zeros_has_a_bound():
    for dtype in DType.f32, DType.f16:
        assert math.isfinite(Tolerance.of(dtype, dtype, 2**25, 1.0, 1).bound(0.0, 0.0, 0.0, 0.0, 0.0))


# -- the verdict, and ranks that share the work ------------------------------------------------------------


def test_what_cannot_be_checked_is_said_and_the_place_of_a_fault_is_named():
    assert make(0, 5, 3, DType.f64).check("full").passed
    with pytest.raises(ParamError, match=r"1\.1154"):
        make(6, 7, 2, DType.f64).check("full", c_in=None)
    case = make(600, 700, 20, DType.f64)
    wrong = put(case.c_out, ((543, 621), case.c_out[543, 621] + 1e-6))
    assert "1 element wrong, worst at row 543, column 621" in case.check("full", c_out=wrong).detail
    assert "wrong, worst at row 543" in case.check("sums", c_out=wrong).detail


@BOTH
@pytest.mark.parametrize("size", [2, 8])
def test_ranks_that_share_the_work_agree_with_one_that_does_it_all(method, size):
    case, large = make(700, 600, 30, DType.f64), with_a_large_element(DType.f16, 1.5, 1)
    for passed, one in (False, case), (True, large):
        c_out = one.c_out if passed else put(case.c_out, ((650, 550), case.c_out[650, 550] + 1e-9))
        alone = one.check(method, c_out=c_out)
        together = on_ranks(size, lambda ranks, one=one, c_out=c_out: one.check(method, ranks, c_out=c_out))
        assert all(result == together[0] for result in together)
        assert alone.passed is together[0].passed is passed
        assert together[0].detail.partition(" wrong")[0] == alone.detail.partition(" wrong")[0]
        assert together[0].error == pytest.approx(alone.error, rel=1e-4)
        assert together[0].rms_error == pytest.approx(alone.rms_error)


class Failing:
    """A result that cannot be read."""

    shape, size = (600, 600), 360_000

    def __getitem__(self, index: object) -> np.ndarray:
        raise CapacityError("planted")


@BOTH
def test_an_error_on_one_rank_is_raised_on_all(method):
    case = make(600, 600, 5, DType.f64)
    results = case.c_out, Failing()
    outcomes = on_ranks(2, lambda ranks: case.check(method, ranks, c_out=results[ranks.rank]))
    assert [(type(one), str(one)) for one in outcomes] == [(CapacityError, "planted")] * 2
