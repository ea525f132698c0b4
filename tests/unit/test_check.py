"""The result check: correct products pass whatever their type, wrong ones never do."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tests.helpers.checks import Case, Ranks, generate, make, multiply, tensor_float
from uncut_mpi.errors import CapacityError, ParamError
from uncut_mpi.model.dtypes import DType

ALL_DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=lambda one: one.name)
BOTH_CHECKS = pytest.mark.parametrize("method", ["full", "freivalds"])


# -- correct products --------------------------------------------------------------------------------


@BOTH_CHECKS
@ALL_DTYPES
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (1, 700, 3), (700, 1, 30), (129, 513, 257), (600, 520, 1300), (3, 5, 20000)]
)
def test_a_correct_product_passes(method, dtype, shape):
    result = make(*shape, dtype).check(method)
    assert result.passed, result
    assert 0 <= result.error <= result.tolerance
    assert result.elements_covered == shape[0] * shape[1]
    assert result.rms_error < 4 * dtype.unit_roundoff * (1 + shape[2]) ** 0.5 + dtype.operand_roundoff


@BOTH_CHECKS
@ALL_DTYPES
@pytest.mark.parametrize(("trans_a", "trans_b"), [("T", "N"), ("N", "T"), ("T", "T"), ("C", "N"), ("T", "C")])
def test_transposed_operands_of_either_order_pass(method, dtype, trans_a, trans_b):
    a = generate(*((40, 60) if trans_a == "N" else (60, 40)), dtype, "A", "C")
    b = generate(*((60, 50) if trans_b == "N" else (50, 60)), dtype, "B", "C")
    c = generate(40, 50, dtype, "C", "C")
    case = Case(a, b, c, c, dtype, trans_a=trans_a, trans_b=trans_b)
    case.c_out = multiply(case)
    assert case.check(method).passed
    assert not case.check(method, alpha=-case.alpha).passed


@BOTH_CHECKS
@ALL_DTYPES
def test_without_beta_c_is_not_read(method, dtype):
    case = make(70, 80, 90, dtype, beta=0.0)
    assert case.check(method, c_in=np.full((70, 80), np.nan, dtype.numpy)).passed
    assert case.check(method, c_in=None).passed


@BOTH_CHECKS
@ALL_DTYPES
def test_without_alpha_a_and_b_are_not_read(method, dtype):
    case = make(70, 80, 90, dtype, alpha=0.0)
    assert case.check(method, a=np.full((70, 90), np.nan, dtype.numpy)).passed


@BOTH_CHECKS
@ALL_DTYPES
def test_k_of_zero_scales_c(method, dtype):
    case = make(70, 80, 0, dtype)
    assert case.check(method).passed
    assert not case.check(method, c_out=case.c_in).passed


@BOTH_CHECKS
def test_a_result_of_zeros_passes_where_zero_is_expected(method):
    case = make(30, 40, 50, DType.f32, alpha=0.0, beta=0.0)
    assert case.check(method).passed
    case.c_out[3, 4] = 1e-30
    assert not case.check(method).passed


def test_a_result_without_elements_passes():
    assert make(0, 5, 3, DType.f64).check("full").passed


@BOTH_CHECKS
@pytest.mark.parametrize("positive", [False, True], ids=["signed", "positive"])
def test_one_sum_after_another_in_float32_passes(method, positive):
    # The least accurate order that is in use: every product is added to one running sum.
    case = make(24, 16, 5000, DType.f32)
    if positive:
        case.a, case.b = np.abs(case.a), np.abs(case.b)
    total = np.zeros((24, 16), np.float32)
    for p in range(5000):
        total += case.a[:, p, None] * case.b[p]
    case.c_out = np.float32(case.alpha) * total + np.float32(case.beta) * case.c_in
    assert case.check(method).passed


@pytest.fixture(scope="module")
def truncated() -> Case:
    """A long product whose sums were cut towards zero after every 8 products, as tensor cores do."""
    k = 800_000
    case = make(4, 4, k, DType.f16)
    # Positive, so that all cuts go the same way, and small, so that the sum fits half precision.
    case.a, case.b = np.abs(case.a) / np.float16(8), np.abs(case.b) / np.float16(8)
    groups = np.matmul(
        case.a.astype(np.float64).reshape(4, -1, 8).transpose(1, 0, 2), case.b.astype(np.float64).reshape(-1, 8, 4)
    )
    total = np.zeros((4, 4), np.float32)
    for group in groups:
        exact = group + total
        total = exact.astype(np.float32)
        np.copyto(total, np.nextafter(total, np.float32(0)), where=total > exact)
    case.c_out = (np.float32(case.alpha) * total + np.float32(case.beta) * case.c_in.astype(np.float32)).astype(
        np.float16
    )
    return case


@BOTH_CHECKS
def test_sums_truncated_as_tensor_cores_do_pass(method, truncated):
    assert truncated.check(method).passed


@BOTH_CHECKS
def test_blocks_of_k_added_to_c_in_another_order_pass(method):
    case = make(100, 120, 4096, DType.f32)
    c = np.float32(case.beta) * case.c_in
    for start in np.random.default_rng(5).permutation(np.arange(0, 4096, 128)):
        c += np.float32(case.alpha) * (case.a[:, start : start + 128] @ case.b[start : start + 128])
    case.c_out = c
    assert case.check(method).passed


@BOTH_CHECKS
def test_rows_that_cancel_pass(method):
    # |A||B| is far above |AB| here, so errors are far above |AB| too.
    case = make(64, 64, 2000, DType.f32, beta=0.0)
    case.a[:, 1000:] = -case.a[:, :1000]
    case.b[1000:] = case.b[:1000]
    case.c_out = multiply(case)
    assert np.abs(case.c_out).max() > 0
    assert case.check(method).passed


# -- wrong products -----------------------------------------------------------------------------------


def one_element(case: Case) -> None:
    case.c_out[150, 102] += case.dtype.numpy.type(16.0)


def two_opposite_elements(case: Case) -> None:
    case.c_out[5, 50] += case.dtype.numpy.type(16.0)
    case.c_out[5, 200] -= case.dtype.numpy.type(16.0)


def one_nan(case: Case) -> None:
    case.c_out[-1, -1] = np.nan


def one_infinity(case: Case) -> None:
    case.c_out[0, 50] = np.inf


def missing_block_of_k(case: Case) -> None:
    lost = dataclasses.replace(case, a=case.a.copy())
    lost.a[:128, 128:256] = 0
    case.c_out = multiply(lost)


def tile_of_b_from_another_place(case: Case) -> None:
    other = dataclasses.replace(case, b=case.b.copy())
    other.b[64:128, :64] = case.b[:64, :64]
    case.c_out = multiply(other)


def swapped_tiles(case: Case) -> None:
    result = case.c_out.copy()
    case.c_out[:64, :64], case.c_out[64:128, :64] = result[64:128, :64], result[:64, :64]


def beta_twice(case: Case) -> None:
    case.c_out = multiply(dataclasses.replace(case, beta=case.beta**2))


def alpha_missing(case: Case) -> None:
    case.c_out = multiply(dataclasses.replace(case, alpha=1.0))


def alpha_twice_in_one_tile(case: Case) -> None:
    case.c_out[:64, :64] = multiply(dataclasses.replace(case, alpha=case.alpha**2))[:64, :64]


def c_untouched_in_a_tile(case: Case) -> None:
    case.c_out[192:, 192:] = case.c_in[192:, 192:]


def one_column_shifted(case: Case) -> None:
    case.c_out[:, 7] = case.c_out[:, 8]


FAULTS = [
    one_element, two_opposite_elements, one_nan, one_infinity, missing_block_of_k, tile_of_b_from_another_place,
    swapped_tiles, beta_twice, alpha_missing, alpha_twice_in_one_tile, c_untouched_in_a_tile, one_column_shifted,
]  # fmt: skip


@pytest.fixture(scope="module")
def right() -> dict[DType, Case]:
    return {dtype: make(256, 256, 512, dtype) for dtype in DType}


@BOTH_CHECKS
@ALL_DTYPES
def test_the_product_in_which_faults_are_planted_passes(method, dtype, right):
    assert right[dtype].check(method).passed


@BOTH_CHECKS
@ALL_DTYPES
@pytest.mark.parametrize("fault", FAULTS, ids=lambda one: one.__name__)
def test_a_wrong_product_fails(method, dtype, fault, right):
    case = dataclasses.replace(right[dtype], c_out=right[dtype].c_out.copy())
    fault(case)
    result = case.check(method)
    assert not result.passed
    assert not result.error <= result.tolerance
    assert "worst at row" in result.detail


@BOTH_CHECKS
@pytest.mark.parametrize("nearest", [True, False])
@pytest.mark.parametrize("shape", [(40, 30, 8), (128, 96, 3000), (512, 512, 1024)])
def test_tf32_may_round_its_operands_or_drop_their_last_bits(method, nearest, shape):
    case = make(*shape, DType.tf32, nearest=nearest)
    assert case.check(method).passed
    # An f32 product is not to be computed so, and tf32 not from far fewer bits.
    assert not dataclasses.replace(case, dtype=DType.f32).check(method).passed
    a, b = (tensor_float(operand, nearest, 19) for operand in (case.a, case.b))
    coarse = multiply(dataclasses.replace(case, a=a, b=b))
    assert not dataclasses.replace(case, c_out=coarse).check(method).passed


@BOTH_CHECKS
def test_a_double_product_computed_in_single_fails(method, right):
    case = right[DType.f64]
    single = dataclasses.replace(case, dtype=DType.f32)
    assert not dataclasses.replace(case, c_out=multiply(single).astype(np.float64)).check(method).passed


@BOTH_CHECKS
def test_a_single_product_of_inputs_cut_to_half_fails(method, right):
    case = right[DType.f32]
    cut = dataclasses.replace(case, a=case.a.astype(np.float16), b=case.b.astype(np.float16))
    assert not dataclasses.replace(case, c_out=multiply(cut)).check(method).passed


def test_a_short_block_lost_from_a_long_thin_product_fails():
    case = make(16, 16, 200_000, DType.f32)
    case.c_out = multiply(case, stop=199_900)
    assert not case.check("full").passed
    assert not case.check("freivalds").passed


def test_a_short_sum_is_held_to_the_bound_that_always_holds():
    case = make(20, 20, 1, DType.f32)
    magnitude = case.alpha * np.abs(case.a) @ np.abs(case.b) + case.beta * np.abs(case.c_in)
    case.c_out = (case.c_out + 8 * DType.f32.unit_roundoff * magnitude).astype(np.float32)
    assert not case.check("full").passed


def test_the_place_of_the_fault_is_named():
    case = make(600, 700, 20, DType.f64)
    case.c_out[543, 621] += 1e-6
    assert "1 element wrong, worst at row 543, column 621" in case.check("full").detail
    assert "wrong, worst at row 543" in case.check("freivalds").detail


@ALL_DTYPES
def test_nan_and_infinity_of_the_inputs_are_wanted_in_c_where_they_spread_to_and_nowhere_else(dtype):
    case = make(60, 70, 300, dtype)
    case.c_in = case.c_in.copy()
    case.a[5, 6], case.a[9, 200] = np.nan, np.inf
    case.b[4, 3], case.b[7, 3], case.b[8, 4] = np.inf, -np.inf, -np.inf
    case.c_in[20, 30], case.c_in[9, 8] = -np.inf, np.nan
    case.c_out = multiply(case)
    result = case.check("full")
    assert result.passed, result
    spread = 2 * 70 + 2 * 58 + 1
    assert f"; {spread} must be NaN or infinite, as inputs are, and {spread} of them are" in result.detail
    assert 0 < result.error <= result.tolerance < 1
    assert result.rms_error < 4 * dtype.unit_roundoff * 301**0.5 + dtype.operand_roundoff
    for place, value in (
        ((5, 0), 0.5), ((9, 1), -case.c_out[9, 1]), ((9, 1), np.nan), ((20, 30), np.nan), ((9, 8), np.inf),
        ((30, 3), np.inf), ((0, 0), np.nan), ((0, 0), np.inf), ((0, 0), 17.0),
    ):  # fmt: skip
        if dtype.is_complex and place != (0, 0) and not np.isfinite(value):
            continue  # whatever is not finite is right there
        wrong = case.c_out.copy()
        wrong[place] = value
        result = case.check("full", c_out=wrong)
        assert not result.passed, (place, value)
        assert f"1 element wrong, worst at row {place[0]}, column {place[1]}" in result.detail
        assert ("and 256 of them" in result.detail) == (place != (0, 0))


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_sums_of_inputs_that_are_not_finite_have_no_bound_and_say_so(value):
    case = make(60, 70, 20, DType.f64)
    case.a[5, 6] = value
    case.c_out = multiply(case)
    result = case.check("freivalds")
    assert not result.passed
    assert "20 expected sums are NaN or infinite" in result.detail


def test_a_product_too_large_for_float64_must_be_infinite():
    case = make(6, 7, 2, DType.f64)
    case.a[0], case.b[:, 0] = 1e200, 1e200
    case.c_out = multiply(case)
    assert case.check("full").passed
    case.c_out[0, 0] = 1e308
    assert not case.check("full").passed


def test_beta_without_c_is_refused():
    case = make(6, 7, 2, DType.f64)
    with pytest.raises(ParamError, match=r"1\.1154"):
        case.check("full", c_in=None)


# -- shared between ranks ------------------------------------------------------------------------------


@BOTH_CHECKS
@pytest.mark.parametrize("size", [2, 3, 8])
def test_ranks_that_share_the_work_agree_with_one_that_does_it_all(method, size):
    case = make(700, 600, 30, DType.f64)
    case.c_out[650, 550] += 1e-9
    alone = case.check(method)
    together = Ranks(size).run(lambda rank, gather: case.check(method, share=(rank, size), gather=gather))
    assert all(result == together[0] for result in together)
    assert (together[0].passed, together[0].elements_covered) == (False, 420_000)
    assert "wrong, worst at row 650, " in together[0].detail
    assert together[0].detail.partition(" wrong")[0] == alone.detail.partition(" wrong")[0]
    np.testing.assert_allclose(together[0].error, alone.error, rtol=1e-4)
    assert together[0].rms_error == pytest.approx(alone.rms_error)


@BOTH_CHECKS
def test_an_error_on_one_rank_is_raised_on_all(method, monkeypatch):
    case = make(600, 600, 5, DType.f64)

    def call(rank: int, gather):
        out = case.c_out if rank != 1 else Failing(case.c_out)
        return case.check(method, c_out=out, share=(rank, 2), gather=gather)

    outcomes = Ranks(2).run(call)
    assert [type(one) for one in outcomes] == [CapacityError, CapacityError]
    assert "planted" in str(outcomes[0])


class Failing:
    """A result that cannot be read."""

    def __init__(self, array: np.ndarray) -> None:
        self.shape, self.size = array.shape, array.size

    def __getitem__(self, index: object) -> np.ndarray:
        raise CapacityError("planted")

    def __deepcopy__(self, memo: object) -> Failing:
        return self
