"""Generated matrices: the same values whoever fills which part, and every bit of them random."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.numbers import wide_of
from uncut_mpi.command.data import fill, poison
from uncut_mpi.command.nonfinite import NonFinite, find, join
from uncut_mpi.model import lines as shares
from uncut_mpi.model.dtypes import MEASURED, DType

ALL_DTYPES = pytest.mark.parametrize("dtype", MEASURED, ids=lambda one: one.name)


def whole(
    rows: int, cols: int, dtype: DType = DType.f64, matrix: str = "A", seed: int = 0, order: str = "F"
) -> np.ndarray:
    array = np.full((rows, cols), np.nan, dtype.numpy, order=order)
    fill(array, matrix, seed, rows=rows)
    return array


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(MEASURED),
    st.integers(1, 60),
    st.integers(1, 60),
    st.integers(0, 60),
    st.integers(0, 60),
    st.sampled_from(["C", "F"]),
)
def test_a_matrix_filled_in_four_parts_is_the_matrix_filled_at_once(dtype, rows, cols, row, col, order):
    row, col = min(row, rows), min(col, cols)
    parts = np.full((rows, cols), np.nan, dtype.numpy, order=order)
    for r in (slice(0, row), slice(row, rows)):
        for c in (slice(0, col), slice(col, cols)):
            fill(parts[r, c], "B", 7, rows=rows, row0=r.start, col0=c.start)
    np.testing.assert_array_equal(parts, whole(rows, cols, dtype, "B", 7))


def test_blocks_leave_no_seam(monkeypatch):
    expected = {dtype: whole(41, 30, dtype) for dtype in MEASURED}
    for size in (1, 7, 41, 100):
        monkeypatch.setattr("uncut_mpi.command.data._BLOCK_ELEMENTS", size)
        for dtype in MEASURED:
            np.testing.assert_array_equal(whole(41, 30, dtype), expected[dtype])


def test_matrices_and_seeds_have_values_of_their_own():
    arrays = [whole(50, 50, matrix=name, seed=seed) for name in "ABC" for seed in (0, 1)]
    assert len({array.tobytes() for array in arrays}) == 6
    assert len(np.unique(np.concatenate(arrays))) == 6 * 2500


@ALL_DTYPES
def test_values_are_uniform_between_minus_one_and_one(dtype):
    values = whole(300, 300, dtype).astype(wide_of(dtype))
    for part in (values.real, values.imag) if dtype.is_complex else (values,):
        assert np.abs(part).max() <= 1
        assert abs(part.mean()) < 0.01
        counts, _ = np.histogram(part, bins=10, range=(-1, 1))
        assert abs(counts / part.size - 0.1).max() < 0.005


@pytest.mark.parametrize("dtype", [DType.c64, DType.c128], ids=lambda one: one.name)
def test_parts_of_complex_values_are_not_correlated_and_the_real_one_is_that_of_the_real_type(dtype):
    values = whole(300, 300, dtype)
    assert np.array_equal(values.real, whole(300, 300, dtype.real))
    assert abs(np.corrcoef(values.real.ravel(), values.imag.ravel())[0, 1]) < 0.01


@pytest.mark.parametrize(("dtype", "word", "significand"), [(DType.f64, np.uint64, 52), (DType.f32, np.uint32, 23)])
def test_every_significand_bit_and_the_sign_are_random(dtype, word, significand):
    values = whole(300, 300, dtype).ravel()
    words = values[np.abs(values) >= 0.5].view(word)
    for bit in [*range(significand), words.dtype.itemsize * 8 - 1]:
        share = ((words >> word(bit)) & word(1)).mean()
        assert abs(share - 0.5) < 0.02, f"bit {bit}"


def test_elements_of_rows_and_columns_are_not_correlated():
    values = whole(256, 256)
    correlation = np.corrcoef(np.concatenate([values, values.T]))
    np.fill_diagonal(correlation, 0)
    assert np.abs(correlation).max() < 0.4


@ALL_DTYPES
def test_poison_is_nan_everywhere(dtype):
    array = np.zeros((4, 5), dtype.numpy)
    poison(array)
    array = array.astype(wide_of(dtype))
    assert np.isnan(array.real).all()
    assert np.isnan(array.imag).all() or not dtype.is_complex


def test_an_empty_part_is_left_alone():
    fill(np.empty((0, 5)), "A", 0, rows=0)
    fill(np.empty((3, 0)), "A", 0, rows=3)


# -- NaN and infinity in inputs: counted and placed, however the matrix lies -----------------------


@pytest.mark.parametrize("dtype", MEASURED, ids=lambda one: one.name)
@pytest.mark.parametrize("order", ["C", "F"])
def test_all_are_counted_and_the_first_is_found(monkeypatch, dtype, order):
    monkeypatch.setattr(shares, "_BLOCK_BYTES", 64)
    count = 17 if order == "F" else 23
    for ranks in 1, 3, 7:
        values = np.ones((23, 17), dtype.numpy, order=order)
        for wanted in None, NonFinite("A", "A.npy", 2, 2, (7, 15)):
            parts = (find("A", "A.npy", values, order, shares.lines_of(count, rank, ranks)) for rank in range(ranks))
            assert join(list(parts)) == wanted
            values[20, 2], values[7, 16], values[7, 15], values[22, 0] = np.nan, np.inf, -np.inf, np.nan


def test_it_is_said_plainly():
    for nan, infinite, said in (
        (1, 0, "1 NaN element,"),
        (0, 1, "1 infinite element,"),
        (2, 3, "2 NaN and 3 infinite e"),
    ):
        assert f"holds {said}" in str(NonFinite("A", "A.npy", nan, infinite, (1, 2)))
