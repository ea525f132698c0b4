"""The result check knows what a type can hold: what is beyond it must be infinite, what is not must be finite."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

from tests.helpers.checks import Case, Ranks, generate, make, multiply
from uncut_mpi.command import check
from uncut_mpi.command.tolerance import Tolerance
from uncut_mpi.model.dtypes import DType

REAL_DTYPES = pytest.mark.parametrize("dtype", [one for one in DType if not one.is_complex], ids=lambda one: one.name)
COMPLEX_DTYPES = pytest.mark.parametrize("dtype", [DType.c64, DType.c128], ids=lambda one: one.name)
BOTH_CHECKS = pytest.mark.parametrize("method", ["full", "freivalds"])
SIGNS = pytest.mark.parametrize("sign", [1, -1], ids=["plus", "minus"])
NAN, INF = math.nan, math.inf

# The largest finite number, and the least that rounds to infinity: half a unit in the last place more.
LARGEST = {
    DType.f64: np.finfo(np.float64).max,
    DType.f32: float(np.finfo(np.float32).max),
    DType.tf32: float(np.finfo(np.float32).max),
    DType.f16: 65504.0,
    DType.bf16: (2 - 2.0**-7) * 2.0**127,
    DType.c64: float(np.finfo(np.float32).max),
    DType.c128: np.finfo(np.float64).max,
}


def with_a_large_element(dtype: DType, size: float, sign: int) -> Case:
    """A random product whose element (5, 7) is about `size` times the largest number, and no other is so large."""
    case = make(40, 30, 8, dtype)
    large = math.sqrt(LARGEST[dtype]) * math.sqrt(size / abs(case.alpha))
    case.a[5], case.b[:, 7] = 0, 0
    case.a[5, 0], case.b[0, 7] = sign * large, large
    case.c_out = multiply(case)
    return case


def exact(dtype: DType, terms: list[tuple[float, float]], **changes: object) -> Case:
    """A product of one element, whose terms are given as pairs of an element of A and one of B; C is 0."""
    a = np.array([a for a, _ in terms], dtype.numpy).reshape(1, -1)
    b = np.array([b for _, b in terms], dtype.numpy).reshape(-1, 1)
    c = np.zeros((1, 1), dtype.numpy)
    return dataclasses.replace(Case(a, b, c, c, dtype, alpha=1.0, beta=0.0), **changes)


def passes(case: Case, value: float, method: str = "full") -> bool:
    return case.check(method, c_out=np.full(case.c_out.shape, value, case.dtype.numpy)).passed


# -- beyond the largest number -------------------------------------------------------------------------


@BOTH_CHECKS
@REAL_DTYPES
@SIGNS
def test_a_value_beyond_the_type_must_be_the_infinity_of_its_sign(method, dtype, sign):
    case = with_a_large_element(dtype, 1.5, sign)
    assert case.c_out[5, 7] == sign * INF
    result = case.check(method)
    assert result.passed, result
    assert "1 beyond the largest" in result.detail
    assert result.elements_covered == 1200
    assert 0 <= result.error <= result.tolerance < 1
    for wrong in (sign * LARGEST[dtype], -sign * INF, NAN, 17.0, -sign * LARGEST[dtype]):
        other = case.c_out.copy()
        other[5, 7] = wrong
        result = case.check(method, c_out=other)
        assert not result.passed, wrong
        assert "row 5, column 7" in result.detail


@BOTH_CHECKS
@REAL_DTYPES
def test_the_other_elements_of_a_row_with_an_infinity_are_checked(method, dtype):
    case = with_a_large_element(dtype, 1.5, 1)
    assert case.check(method).passed
    for place, value in (((5, 8), 4.0), ((5, 8), INF), ((6, 7), NAN), ((5, 29), -INF)):
        other = case.c_out.copy()
        other[place] = value
        result = case.check(method, c_out=other)
        assert not result.passed, (place, value)
        assert f"worst at row {place[0]}, " in result.detail


@BOTH_CHECKS
@REAL_DTYPES
@SIGNS
def test_a_value_that_can_be_held_must_be_finite(method, dtype, sign):
    case = with_a_large_element(dtype, 0.9, sign)
    assert np.isfinite(case.c_out).all()
    assert case.check(method).passed
    for wrong in (INF, -INF, NAN):
        other = case.c_out.copy()
        other[5, 7] = wrong
        assert not case.check(method, c_out=other).passed, wrong


@BOTH_CHECKS
@COMPLEX_DTYPES
@pytest.mark.parametrize("turn", [1, 1j, -1, -1j])
def test_a_complex_value_beyond_the_type_must_not_be_finite_and_one_that_can_be_held_must_be(method, dtype, turn):
    for size, right, wrong in ((1.5, (INF, NAN), (LARGEST[dtype], 17.0, 0.0)), (0.9, (), (INF, NAN, 17.0))):
        case = with_a_large_element(dtype, size, 1)
        case.a[5, 0] *= turn
        case.c_out = multiply(case)
        assert np.isfinite(case.c_out[5, 7]) == (not right)
        assert case.check(method).passed
        other = case.c_out.copy()
        for value in (*right, *wrong):
            other[5, 7] = value
            assert case.check(method, c_out=other).passed == (value in right), (size, value)


@pytest.mark.parametrize(
    ("dtype", "terms", "right"),
    [
        (DType.f16, [(65504, 1), (15, 1)], [65504]),
        # Half a unit above the largest: the tie, which the rounding of the sums decides.
        (DType.f16, [(65504, 1), (16, 1)], [65504, INF]),
        (DType.f16, [(65504, 1), (17, 1)], [INF]),
        (DType.bf16, [((2 - 2.0**-7) * 2.0**127, 1), (2.0**118, 1)], [LARGEST[DType.bf16]]),
        (DType.bf16, [((2 - 2.0**-7) * 2.0**127, 1), (2.0**119, 1)], [LARGEST[DType.bf16], INF]),
        (DType.bf16, [((2 - 2.0**-7) * 2.0**127, 1), (2.0**119, 1), (2.0**117, 1)], [INF]),
        (DType.f32, [(LARGEST[DType.f32], 1), (2.0**103, 1)], [LARGEST[DType.f32], INF]),
        (DType.f32, [(LARGEST[DType.f32], 1), (2.0**112, 1)], [INF]),
        (DType.f64, [(LARGEST[DType.f64], 1), (2.0**970, 1)], [LARGEST[DType.f64], INF]),
        (DType.f64, [(LARGEST[DType.f64], 1), (2.0**980, 1)], [INF]),
    ],
)  # fmt: skip
@SIGNS
def test_near_the_limit_either_is_right_where_rounding_decides(dtype, terms, right, sign):
    case = exact(dtype, [(sign * a, b) for a, b in terms])
    for value in (LARGEST[dtype], INF, -INF, NAN):
        assert passes(case, sign * value) == (value in right), value


@BOTH_CHECKS
@REAL_DTYPES
def test_k_of_zero_may_scale_c_beyond_the_type(method, dtype):
    case = make(30, 20, 0, dtype, beta=2.0)
    case.c_in = case.c_in.copy()
    case.c_in[4, 3], case.c_in[5, 3] = 0.75 * LARGEST[dtype], -0.75 * LARGEST[dtype]
    case.c_out = multiply(case)
    assert (case.c_out[4, 3], case.c_out[5, 3]) == (INF, -INF)
    assert case.check(method).passed
    case.c_out[4, 3] = LARGEST[dtype]
    assert not case.check(method).passed


@BOTH_CHECKS
def test_a_double_product_beyond_float64_is_told_from_an_overflow_of_the_reference(method):
    case = make(6, 7, 300, DType.f64, alpha=1e-150, beta=1.0)
    case.a[0, :5], case.b[:5, 0] = 1e200, 1e200  # sums of 5e400: beyond, with alpha 5e250: held
    case.c_out = multiply(dataclasses.replace(case, alpha=1.0, a=case.a * 1e-150))
    assert np.isfinite(case.c_out).all()
    assert case.check(method).passed
    other = case.c_out.copy()
    other[0, 0] *= 1.001
    assert not case.check(method, c_out=other).passed
    other[0, 0] = INF  # what the partial sums are, if alpha comes last
    assert case.check(method, c_out=other).passed
    other[0, 0] = -INF
    assert not case.check(method, c_out=other).passed


# -- partial sums --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [DType.f32, DType.tf32, DType.bf16, DType.f64], ids=lambda one: one.name)
@pytest.mark.parametrize(
    ("terms", "right"),
    [
        # Both infinities, whose sum is NaN, in some order.
        ([0.9, 0.9, -0.9, -0.9], [0, INF, -INF, NAN]),
        ([0.5, 0.7, -0.6], [0.6, INF]),  # one term cannot overflow downwards
        ([-0.5, -0.7, 0.6], [-0.6, -INF]),
        ([0.4, 0.4], [0.8]),  # no order of a sum of one sign exceeds its end
        ([0.3, -0.3, 0.2], [0.2]),
        ([0.9, 0.9, -0.1], [INF]),
        # Beyond, or what an order that begins with the last two makes of it.
        ([0.9, 0.9, 0.9, -0.9, -0.7], [INF, -INF, NAN]),
    ],
)
def test_partial_sums_may_overflow_where_some_order_does(dtype, terms, right):
    limit = LARGEST[dtype]
    case = exact(dtype, [(limit * term, 1) for term in terms])
    total = sum(np.longdouble(value) for value in case.a[0].astype(np.float64))
    for value in (0, 0.2, 0.6, -0.6, 0.8, 1, INF, -INF, NAN):
        if abs(value) <= 1 and value in right:
            assert passes(case, float(total))
        else:
            assert passes(case, value if not abs(value) <= 1 else limit * value) == (value in right), value


def test_a_double_sum_whose_magnitudes_are_beyond_float64_is_bounded():
    case = exact(DType.f64, [(LARGEST[DType.f64] * term, 1) for term in (0.4, -0.4, 0.3)])
    assert passes(case, case.a[0, 2])
    assert not any(passes(case, value) for value in (0, 0.9 * case.a[0, 2], INF, -INF, NAN))


def test_half_precision_sums_in_float32_which_does_not_overflow():
    case = exact(DType.f16, [(60000, 1), (60000, 1), (-60000, 1), (-49984, 1)])
    assert passes(case, 10016)
    assert not any(passes(case, value) for value in (INF, -INF, NAN))


def test_half_precision_overflows_float32_through_alpha():
    case = exact(DType.f16, [(10000, 1)], alpha=1e36, beta=-1e36, c_in=np.full((1, 1), 10000, np.float16))
    assert passes(case, NAN)
    assert passes(case, 0)


@pytest.mark.parametrize(
    ("product", "scaled", "right"),
    [
        (-3e38, 4e38, [1e38, INF]),  # beta C alone is beyond the type
        (-4e38, 3e38, [-1e38, -INF]),  # alpha A B alone
        (-4e38, 5e38, [1e38, INF, -INF, NAN]),  # both: inf - inf
        (4e38, -4e38, [0, INF, -INF, NAN]),
        (4e38, 4e38, [INF]),
        (1e38, 2e38, [3e38]),
    ],
)
def test_a_term_that_the_other_cancels_may_overflow_first(product, scaled, right):
    case = exact(DType.f32, [(product / 1e8, 1e4)], alpha=1e4, beta=10.0)
    case.c_in = np.full((1, 1), scaled / 10.0, np.float32)
    for value in (0, 1e38, -1e38, 3e38, LARGEST[DType.f32], INF, -INF, NAN):
        assert passes(case, value) == (value in right), value


def test_a_tiny_alpha_may_come_after_sums_that_overflow():
    case = exact(DType.f32, [(1e25, 1e25)], alpha=1e-30)
    assert passes(case, 1e20)
    assert passes(case, INF)
    assert not any(passes(case, value) for value in (-INF, NAN, 0.0, 1.1e20))


def test_blocks_of_k_whose_sums_stay_small_bound_the_partial_sums():
    # |A||B| is beyond float32, but no partial sum in any plausible order: the bound S of tolerance.py decides.
    k = 128 * 64
    signs = np.tile([1.0, -1.0], k // 2)
    case = exact(DType.f32, [(1e35 * sign, 1) for sign in signs])
    assert np.abs(case.a).sum(dtype=np.float64) > LARGEST[DType.f32]
    assert passes(case, 0)
    assert not any(passes(case, value) for value in (INF, -INF, NAN))
    case.a = np.sort(case.a)
    assert all(passes(case, value) for value in (0, INF, -INF, NAN))


def test_an_operand_of_tf32_may_round_to_infinity():
    case = exact(DType.tf32, [(LARGEST[DType.tf32], 1e-10)])
    assert passes(case, LARGEST[DType.tf32] * 1e-10)
    assert passes(case, INF)
    assert not passes(dataclasses.replace(case, dtype=DType.f32), INF)


def test_a_small_term_may_overflow_the_other_way_beside_a_huge_one():
    # The terms are 1e60 and -1e40: an order that begins with the second ends in -inf or NaN.
    case = exact(DType.f32, [(1e30, 1e30), (-1e20, 1e20)])
    assert all(passes(case, value) for value in (INF, -INF, NAN))
    case = exact(DType.f32, [(1e30, 1e30), (-1e10, 1e10)])
    assert [value for value in (INF, -INF, NAN, LARGEST[DType.f32]) if passes(case, value)] == [INF]


def orders_of(case: Case):
    """What orders of summation, with alpha and C before, between and after, make of a product of one element."""
    real = case.dtype.accumulator.numpy.type
    terms = [real(a) * real(b) for a, b in zip(case.a[0], case.b[:, 0], strict=True)]
    alpha, scaled = real(case.alpha), real(case.beta) * real(case.c_in[0, 0]) if case.beta else real(0)
    for order in itertools.permutations(terms):
        for cut in range(len(terms) + 1):
            first, second = (sum(part, start=real(0)) for part in (order[:cut], order[cut:]))
            yield alpha * sum(order, start=real(0)) + scaled
            yield (scaled + alpha * first) + alpha * second
            yield (alpha * first + alpha * second) + scaled


@pytest.mark.parametrize("dtype", [DType.f64, DType.f32, DType.bf16, DType.f16], ids=lambda one: one.name)
def test_whatever_an_order_of_summation_gives_is_right(dtype):
    random = np.random.default_rng(7)
    limit = LARGEST[dtype]
    told = 0
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(60):
            size = np.minimum(limit * 10.0 ** random.uniform(-1.5, 0.3, random.integers(0, 4)), 0.999 * limit)
            terms = [(float(one), 1.0) for one in size * random.choice([-1.0, 1.0], size.shape)]
            scalars = {"alpha": random.choice([1.0, 1.0, -1.5, 1e-3]), "beta": random.choice([0.0, 1.0, -2.0])}
            case = exact(dtype, terms, **scalars)
            case.c_in = np.full((1, 1), limit * random.uniform(-0.99, 0.99)).astype(dtype.numpy)
            results = [float(dtype.numpy.type(result)) for result in orders_of(case)]
            for result in dict.fromkeys(results):
                assert passes(case, result), (case, result)
                assert passes(case, result, "freivalds"), (case, result)
            if max(map(abs, results)) < 0.9 * limit:
                told += 1
                assert not any(passes(case, value) for value in (INF, -INF, NAN)), case
    assert told > 10


# -- many rows -----------------------------------------------------------------------------------------


@REAL_DTYPES
def test_a_product_full_of_infinities_is_checked_within_bounds(dtype, monkeypatch):
    case = make(400, 300, 16, dtype)
    case.a = (case.a.astype(np.float64) * (math.sqrt(LARGEST[dtype]) * 2)).astype(dtype.numpy)
    case.b = (case.b.astype(np.float64) * (math.sqrt(LARGEST[dtype]) * 2)).astype(dtype.numpy)
    case.c_out = multiply(case)
    # A device adds f64 up in another order than numpy: NaN and infinities of partial sums are its own.
    monkeypatch.setattr(check, "ROWS_LIMIT", 300 * 16 * 20)
    result = case.check("freivalds")
    assert result.passed, result
    assert "400 rows hold" in result.detail
    assert "20 of them" in result.detail
    assert result.elements_covered < case.c_out.size
    everything = case.check("full")
    assert everything.passed, everything
    # A wrong tile is met by the sample and by the rows that are looked at.
    case.c_out[:128, :128] = 0
    assert not case.check("freivalds").passed


def test_a_saturated_element_of_a_large_row_is_seen():
    case = make(8, 4000, 2, DType.f16, alpha=1.0, beta=0.0)
    case.a[:] = 1
    case.b[0], case.b[1] = np.where(case.b[0] > 0, 60000, -60000), 0
    case.b[:, 1234] = 60000, 5540  # 65540: beyond by less than the rounding of the row's other elements
    case.c_out = multiply(case)
    assert case.c_out[3, 1234] == INF
    assert case.check("freivalds").passed
    case.c_out[3, 1234] = 65504
    assert not case.check("freivalds").passed
    case.c_out[:, 1234] = 65504
    assert not case.check("freivalds").passed


def test_sums_of_large_doubles_are_bounded():
    case = make(300, 400, 20, DType.f64, beta=0.0)
    case.a *= 1e-170
    case.b *= 1e170
    case.c_out = multiply(case)
    assert case.check("freivalds").passed
    case.c_out[4, 5] += 1.0  # not in the sample
    assert not case.check("freivalds").passed


@pytest.mark.parametrize("size", [2, 5])
def test_ranks_share_the_rows_with_infinities(size):
    case = with_a_large_element(DType.f16, 1.5, 1)
    assert case.c_out[5, 7] == INF
    for value, passed in ((INF, True), (65504, False)):
        case.c_out[5, 7] = value
        alone = case.check("freivalds")
        every = Ranks(size).run(lambda rank, gather: case.check("freivalds", share=(rank, size), gather=gather))
        assert all(one == every[0] for one in every)
        assert every[0].passed is alone.passed is passed
        assert "1 rows hold numbers at or beyond the largest f16, 1 of them" in every[0].detail
        assert "; 1 beyond the largest f16 must be infinite" in every[0].detail


@pytest.mark.parametrize("k", [20, 2000])
def test_sums_of_small_doubles_are_bounded(k):
    case = make(300, 400, k, DType.f64, beta=0.0)
    case.a *= 1e-10
    case.b *= 1e-170
    case.c_out = multiply(case)
    assert case.check("freivalds").passed
    case.c_out[4, 5] += 1e-185
    assert not case.check("freivalds").passed


@BOTH_CHECKS
@pytest.mark.parametrize(("of_a", "of_b"), [(1e-150, 1e-120), (1e150, 1e120)])
def test_the_rms_error_of_very_large_and_small_doubles_is_a_number(method, of_a, of_b):
    case = make(60, 70, 20, DType.f64, beta=0.0)
    case.a *= of_a
    case.b *= of_b
    case.c_out = multiply(case)
    case.c_out[4, 5] *= 1 + 1e-9
    result = case.check(method)
    assert 1e-13 < result.rms_error < 1e-8


# -- small numbers -------------------------------------------------------------------------------------


@BOTH_CHECKS
@REAL_DTYPES
def test_gradual_underflow_is_held_to_and_flushing_to_zero_is_not(method, dtype):
    smallest_normal = {DType.f64: 2.0**-1022, DType.f16: 2.0**-14}.get(dtype, 2.0**-126)
    case = make(30, 20, 1, dtype, alpha=1.0, beta=0.0)
    case.a[:] = 2.0**-8
    case.b[:] = smallest_normal * 2.0**4 * (1.5 + 0.25 * (np.arange(20) % 3))
    case.c_out = multiply(case)
    assert (case.c_out.astype(np.float64) > 0).all()
    assert (case.c_out.astype(np.float64) < smallest_normal).all()
    assert case.check(method).passed
    assert not case.check(method, c_out=np.zeros_like(case.c_out)).passed


@BOTH_CHECKS
@REAL_DTYPES
@pytest.mark.parametrize("factor", [0.0, 2.0**-1073])
def test_results_no_larger_than_the_tolerance_are_held_to_it_in_absolute_terms(method, dtype, factor):
    case = make(30, 20, 40, dtype, alpha=1.0, beta=0.0)
    if dtype is DType.f64:
        case.a *= factor
    else:
        case.a[:] = 0
    case.c_out = multiply(case)
    result = case.check(method)
    assert result.passed
    assert not result.relative
    assert 0 <= result.error < result.tolerance < 1e-3
    assert "so error and tolerance are absolute" in result.detail
    case.c_out[3, 4] = 1.0
    wrong = case.check(method)
    assert not wrong.passed
    assert wrong.error == pytest.approx(1.0)
    assert make(30, 20, 40, dtype).check(method).relative


@BOTH_CHECKS
@pytest.mark.parametrize(
    ("dtype", "tiny", "alpha"),
    [(DType.f32, 1e-22, 1e30), (DType.bf16, 1e-22, 1e30), (DType.tf32, 1e-22, 1e30), (DType.f64, 1e-161, 1e300)],
    ids=lambda one: getattr(one, "name", None),
)
def test_products_that_underflow_before_a_large_alpha_may_be_lost(method, dtype, tiny, alpha):
    case = make(30, 20, 4, dtype, alpha=alpha, beta=0.0)
    case.a[:], case.b[:] = tiny, tiny
    # Every float64 is read, but of a product of float64 the reference may lose the more.
    case.c_out = (
        multiply(case) if dtype is not DType.f64 else multiply(dataclasses.replace(case, alpha=1, a=case.a * alpha))
    )
    assert case.check(method).passed
    case.c_out[4, 5] = (1 if dtype is DType.f64 else 1e3) * alpha * tiny * tiny * 1e4
    assert not case.check(method).passed


@BOTH_CHECKS
def test_a_subnormal_scalar_is_rounded_to_its_type(method):
    case = make(30, 20, 4, DType.f32, alpha=1.0000003e-42, beta=1.0000003e-42)
    case.a *= np.float32(1e15)
    case.b *= np.float32(1e18)
    case.c_in = case.c_in * np.float32(1e33)
    case.c_out = multiply(case)
    assert case.check(method).passed
    case.c_out *= np.float32(1.01)
    assert not case.check(method).passed


@BOTH_CHECKS
@pytest.mark.parametrize("nearest", [True, False])
def test_subnormal_operands_of_tf32_lose_more_of_themselves(method, nearest):
    case = make(30, 20, 40, DType.tf32, beta=0.0, nearest=nearest)
    case.a *= np.float32(2.0**-130)
    case.b *= np.float32(2.0**100)
    case.c_out = multiply(case)
    assert case.check(method).passed
    assert not case.check(method, dtype=DType.f32).passed
    case.c_out[7] *= np.float32(1.2)
    assert not case.check(method).passed


@BOTH_CHECKS
@REAL_DTYPES
def test_zeros_of_either_sign_are_one_value(method, dtype):
    case = make(30, 20, 8, dtype, alpha=1.0, beta=0.0)
    case.a[3] = 0
    case.c_out = multiply(case)
    case.c_out[3] = -0.0
    assert case.check(method).passed
    case.c_out[3] = 0.0
    assert case.check(method).passed


def test_an_inherited_nan_may_have_any_payload_and_sign():
    case = make(30, 20, 8, DType.f32)
    case.a[3, 2] = NAN
    case.c_out = multiply(case)
    for bits in (0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF):
        case.c_out[3] = np.array([bits], np.uint32).view(np.float32)
        assert case.check("full").passed, hex(bits)


@REAL_DTYPES
def test_inherited_infinities_stand_beside_those_of_large_values(dtype):
    case = with_a_large_element(dtype, 1.5, 1)
    case.a[9, 3], case.b[4, 11] = INF, NAN
    case.c_out = multiply(case)
    inherited = np.zeros(case.c_out.shape, bool)
    inherited[9], inherited[:, 11] = True, True
    assert "must be NaN or infinite" in case.check("full").detail
    for place, value in (((9, 0), 1.0), ((3, 11), INF), ((5, 11), 0.0)):
        other = case.c_out.copy()
        other[place] = value
        assert not case.check("full", c_out=other).passed


def test_a_long_sum_of_zeros_has_a_bound():
    for dtype in (DType.f32, DType.f16):
        assert math.isfinite(Tolerance.for_elements(dtype, 2**25, 1).bound(0.0, 0.0, 0.0))


def test_the_sum_of_many_large_doubles_may_be_beyond_float64_though_none_is():
    c = generate(8, 400, DType.f64, "C")
    case = Case(generate(8, 1, DType.f64, "A"), generate(1, 400, DType.f64, "B"), c, c, DType.f64, beta=0.0, alpha=1.0)
    case.a[:] = 1e154
    case.b[:] = np.where(case.b > 0, 1.5e154, 1.6e154)
    case.c_out = multiply(case)
    assert np.isfinite(case.c_out).all()
    assert case.check("freivalds").passed
    case.c_out[3, 5] *= 1.01
    assert not case.check("freivalds").passed


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@pytest.mark.parametrize("scalar", ["alpha", "beta"])
def test_a_scalar_that_is_not_finite_makes_what_float64_makes(scalar, value):
    case = make(30, 20, 8, DType.f32, **{scalar: value})
    assert case.check("full").passed
    case.c_out[3, 4] = 1.0
    assert not case.check("full").passed


@pytest.mark.parametrize("limit", [check.FULL_CHECK_LIMIT, 0], ids=["elements", "sums"])
@pytest.mark.parametrize("alpha", [3e306, 1e307, 1e308, -1e308])
def test_a_huge_alpha_leaves_no_bound_infinite(alpha, limit):
    rng = np.random.default_rng(1)
    a, b = (rng.uniform(-1, 1, (64, 64)) * 1e-3 for _ in range(2))  # so that the products are finite
    result = alpha * (a @ b)
    given = {"a": a, "b": b, "c_in": None, "dtype": DType.f64, "alpha": alpha, "beta": 0.0, "full_limit": limit}
    right = check.check_shared(c_out=result, **given)
    assert right.passed, right.detail
    assert 0 < right.tolerance < 1e-6
    for wrong in (0.0, math.nan, math.inf, -result[3, 4], float(np.finfo(np.float64).max)):
        spoiled = result.copy()
        spoiled[3, 4] = wrong
        assert not check.check_shared(c_out=spoiled, **given).passed, wrong
