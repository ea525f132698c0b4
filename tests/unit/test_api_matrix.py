"""Matrices of a session: how an array's strides become a layout, and whether two matrices share bytes."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from uncut_mpi.api.keys import PlanKey
from uncut_mpi.api.matrix import HeldPart, MatrixInfo
from uncut_mpi.api.request import Choices, overlapping
from uncut_mpi.api.stored import extent_bytes, host_view, stored_of
from uncut_mpi.api.views import View
from uncut_mpi.errors import ParamError
from uncut_mpi.mappings import Stretch
from uncut_mpi.model.dtypes import MEASURED, DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.parts import BoundLayout, Part
from uncut_mpi.model.placement import Matrix
from uncut_mpi.model.problem import StoredMatrix

DTYPES = MEASURED


def layout(array: np.ndarray) -> StoredMatrix:
    return stored_of(array.shape, array.strides, array.itemsize)


# -- layouts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("order", ["F", "C"])
def test_a_contiguous_array_has_its_own_order_and_the_least_leading_dimension(order, dtype):
    found = layout(np.zeros((5, 3), dtype.numpy, order=order))
    assert found == StoredMatrix(5, 3, order, 5 if order == "F" else 3)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("order", ["F", "C"])
def test_a_part_of_an_array_has_the_leading_dimension_of_the_whole(order, dtype):
    found = layout(np.zeros((9, 7), dtype.numpy, order=order)[2:6, 1:4])
    assert found == StoredMatrix(4, 3, order, 9 if order == "F" else 7)


def test_a_transposed_view_has_the_other_order():
    assert layout(np.zeros((5, 3)).T) == StoredMatrix(3, 5, "F", 3)


def test_every_second_column_is_a_matrix_of_twice_the_leading_dimension():
    assert layout(np.zeros((5, 8), order="F")[:, ::2]) == StoredMatrix(5, 4, "F", 10)


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("order", ["F", "C"])
@pytest.mark.parametrize("pad", [0, 3])
def test_extents_of_one_are_read_as_stored_whatever_their_unused_stride(shape, order, pad):
    whole = np.zeros((shape[0] + pad, shape[1] + pad), order=order)
    part = whole[: shape[0], : shape[1]]
    found = layout(part)
    assert element_addresses(found, part.ctypes.data, 8) == array_addresses(part)


def test_unused_strides_of_any_value_are_allowed():
    assert stored_of((1, 1), (-7, 3), 8) == StoredMatrix(1, 1, "F", 1)
    assert stored_of((4, 1), (8, -3), 8) == StoredMatrix(4, 1, "F", 4)
    assert stored_of((1, 4), (-3, 8), 8) == StoredMatrix(1, 4, "F", 1)


@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0)])
@pytest.mark.parametrize("order", ["F", "C"])
def test_an_empty_array_is_a_matrix(shape, order):
    found = layout(np.zeros((7, 7), order=order)[: shape[0], : shape[1]])
    assert (found.rows, found.cols) == shape
    assert found.ld >= max(1, shape[0])


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((6, 6))[::-1],
        np.zeros((6, 6))[:, ::-1],
        np.zeros((6, 6), order="F")[::-1],
        np.zeros((6, 6), order="F")[:, ::-1],
        np.zeros((6, 6))[::2, ::2],
        np.zeros((4, 4, 4))[:, :, 1],
        np.broadcast_to(np.zeros((1, 6)), (6, 6)),
        np.broadcast_to(np.zeros((6, 1)), (6, 6)),
        np.broadcast_to(np.zeros(1), (6, 6)),
        np.zeros(4, "f8,i4")["f0"].reshape(2, 2),
        np.zeros((3, 3), "f8,i4")["f0"],
    ],
)
def test_an_array_that_no_leading_dimension_describes_is_refused_with_its_strides_and_the_mend(array):
    with pytest.raises(ParamError) as caught:
        layout(array)
    message = str(caught.value)
    assert f"{array.shape[0]}×{array.shape[1]}" in message
    assert f"{array.strides[0]} and {array.strides[1]}" in message
    assert "ascontiguousarray" in message


@pytest.mark.parametrize("strides", [(8, 20), (20, 8)])
def test_lines_that_do_not_start_on_whole_elements_are_refused(strides):
    with pytest.raises(ParamError, match=r"20.*contiguous along neither"):
        stored_of((2, 2), strides, 8)


def test_overlapping_windows_are_refused():
    windows = np.lib.stride_tricks.sliding_window_view(np.zeros(9), 4)
    with pytest.raises(ParamError, match="contiguous along neither"):
        layout(windows)


@pytest.mark.parametrize("shape", [(), (3,), (3, 3, 3)])
def test_other_than_two_dimensions_are_refused_with_their_number(shape):
    with pytest.raises(ParamError, match=f"{len(shape)} dimension"):
        layout(np.zeros(shape))


def element_addresses(stored: StoredMatrix, start: int, item: int) -> list[list[int]]:
    down, right = (1, stored.ld) if stored.order == "F" else (stored.ld, 1)
    return [[start + (i * down + j * right) * item for j in range(stored.cols)] for i in range(stored.rows)]


def array_addresses(array: np.ndarray) -> list[list[int]]:
    rows, cols = array.shape
    return [[array[i : i + 1, j : j + 1].ctypes.data for j in range(cols)] for i in range(rows)]


def test_any_sliced_array_is_refused_or_read_exactly_as_it_is_stored():
    rng = random.Random(7)
    refused = 0
    for _ in range(600):
        whole = np.zeros((rng.randint(1, 6), rng.randint(1, 6)), order=rng.choice("FC"))
        rows, cols = (
            slice(rng.randint(0, extent), rng.randint(0, extent), rng.choice((1, 1, 1, 2))) for extent in whole.shape
        )
        part = whole[rows, cols].T if rng.random() < 0.5 else whole[rows, cols]
        try:
            found = layout(part)
        except ParamError:
            refused += 1
            assert not part.flags.c_contiguous
            assert not part.flags.f_contiguous
            continue
        assert element_addresses(found, part.ctypes.data, 8) == array_addresses(part)
    assert refused  # the slices do hold some that cannot be described


# -- views ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("order", ["F", "C"])
def test_a_view_of_flat_memory_is_the_array_that_was_described(order, dtype):
    whole = np.random.default_rng(3).uniform(-1, 1, (9, 7)).astype(dtype.numpy)
    whole = np.asarray(whole, order=order)
    part = whole[2:7, 1:5]
    flat = whole.ravel(order="K")
    start = (part.ctypes.data - whole.ctypes.data) // dtype.itemsize
    view = host_view(flat[start:], layout(part))
    assert np.array_equal(view, part)
    assert view.strides == part.strides
    view[0, 0] = 2.0
    assert flat[start] == 2.0  # of the same memory


def test_a_view_of_nothing_is_an_empty_array():
    assert host_view(np.zeros(0), StoredMatrix(0, 4, "C")).shape == (0, 4)


# -- overlap -------------------------------------------------------------------------------------


def info(
    rows: int,
    cols: int,
    *,
    at: int = 0,
    order: str = "F",
    ld: int = 0,
    dtype: DType = DType.f64,
    memory: str = "host 0",
) -> MatrixInfo:
    """A matrix whose element (0, 0) is at byte `at`."""
    stored = StoredMatrix(rows, cols, order, ld)
    part = Part((0, rows), (0, cols), Location.host(0), order, stored.ld)
    held = HeldPart(part, 0, (Stretch(memory, at, extent_bytes(stored, dtype)),))
    return MatrixInfo(1, BoundLayout.whole((rows, cols), part.location, order, stored.ld), dtype, (held,))


def with_pieces(x: MatrixInfo, *pieces: Stretch) -> MatrixInfo:
    return dataclasses.replace(x, parts=(dataclasses.replace(x.parts[0], stretches=pieces),))


def overlap(x: MatrixInfo, written: MatrixInfo) -> bool:
    return overlapping(x, written) == (0,)


def start_of(x: MatrixInfo) -> int:
    return x.parts[0].stretches[0].start


def byte_set(x: MatrixInfo) -> set[int]:
    item = x.dtype.itemsize
    return {
        address + byte
        for row in element_addresses(x.stored, start_of(x), item)
        for address in row
        for byte in range(item)
    }


def spans_meet(x: MatrixInfo, y: MatrixInfo) -> bool:
    xs, ys = byte_set(x), byte_set(y)
    return bool(xs and ys) and min(xs) <= max(ys) and min(ys) <= max(xs)


def rectangle(rng: random.Random, order: str, ld: int, num_lines: int, dtype: DType) -> MatrixInfo:
    """Any rectangle of an array of this leading dimension, those that wrap round its edge included."""
    least = rng.choice((0, 1, 1)) if rng.random() < 0.1 else 1
    inner, outer = rng.randint(least, ld), rng.randint(least, num_lines)
    start = rng.randint(0, ld * num_lines - 1) * dtype.itemsize
    rows, cols = (inner, outer) if order == "F" else (outer, inner)
    return info(rows, cols, at=start, order=order, ld=ld, dtype=dtype)


@pytest.mark.parametrize("dtype", [DType.f64, DType.bf16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("orders", ["FF", "CC", "FC"])
def test_overlap_of_rectangles_of_one_leading_dimension_is_exact(orders, dtype):
    rng = random.Random(11)
    seen = {True: 0, False: 0}
    apart_but_interleaved = 0
    for _ in range(1200):
        ld = rng.randint(1, 7)
        x, y = (rectangle(rng, order, ld, rng.randint(1, 5), dtype) for order in orders)
        truth = bool(byte_set(x) & byte_set(y))
        assert overlap(x, y) is truth, f"{x}\n{y}"
        assert overlap(y, x) is truth, f"{y}\n{x}"
        seen[truth] += 1
        apart_but_interleaved += not truth and spans_meet(x, y)
    assert min(*seen.values(), apart_but_interleaved) > 33  # every kind was tried often


def test_overlap_of_any_two_matrices_is_never_missed_and_never_claimed_for_spans_apart():
    rng = random.Random(13)
    for _ in range(800):
        x, y = (
            rectangle(rng, rng.choice("FC"), rng.randint(1, 6), rng.randint(1, 4), rng.choice(DTYPES)) for _ in range(2)
        )
        y = info(
            y.stored.rows,
            y.stored.cols,
            at=start_of(y) + rng.randrange(8),
            order=y.stored.order,
            ld=y.stored.ld,
            dtype=y.dtype,
        )
        found = overlap(x, y)
        assert found is overlap(y, x)
        if byte_set(x) & byte_set(y):
            assert found, f"{x}\n{y}"
        elif not spans_meet(x, y):
            assert not found, f"{x}\n{y}"


@pytest.mark.parametrize("order", ["F", "C"])
def test_halves_of_one_array_side_by_side_do_not_overlap(order):
    whole = np.zeros((8, 8), order=order)
    parts = {
        name: info(*part.shape, at=part.ctypes.data, order=order, ld=8)
        for name, part in (
            ("top", whole[:4]),
            ("bottom", whole[4:]),
            ("left", whole[:, :4]),
            ("right", whole[:, 4:]),
            ("centre", whole[3:5, 3:5]),
        )
    }
    assert not overlap(parts["top"], parts["bottom"])
    assert not overlap(parts["left"], parts["right"])
    assert overlap(parts["top"], parts["left"])
    assert all(overlap(parts["centre"], part) for part in parts.values())


def test_equal_addresses_in_different_memories_do_not_overlap():
    x = info(4, 4)
    assert overlap(x, info(4, 4))
    for other in ("host 1", "device 0", "segment 0"):
        assert not overlap(x, info(4, 4, memory=other))


@pytest.mark.parametrize("shape", [(0, 0), (0, 4), (4, 0)])
def test_an_empty_matrix_overlaps_nothing(shape):
    empty = info(*shape, at=16)
    assert not overlap(empty, info(8, 8))
    assert not overlap(info(8, 8), empty)
    assert not overlap(empty, empty)


def test_neighbours_that_touch_do_not_overlap():
    x = info(4, 2)
    assert not overlap(x, info(4, 2, at=64))
    assert overlap(x, info(4, 2, at=56))


def test_each_piece_of_a_matrix_is_compared_as_it_lies_there():
    """Columns of 4 elements of which the second lies in other memory, where it follows on the first of another."""
    x = info(4, 2)
    split = with_pieces(x, Stretch("host 0", 0, 32), Stretch("a file", 160, 32, 32))
    assert overlap(split, info(4, 1))
    assert not overlap(split, info(4, 1, at=32))
    for column, shared in ((4, False), (5, True), (6, False)):
        for ld in (4, 5):  # of equal leading dimensions, and of two
            other = info(4, 1, at=32 * column, ld=ld, memory="a file")
            assert overlap(split, other) is overlap(other, split) is shared


def test_bytes_that_writing_does_not_change_are_read_all_the_same():
    x = info(4, 4)
    private = with_pieces(x, Stretch("rank 0", 0, 128), Stretch("a file", 0, 128, written=False))
    shared = with_pieces(x, Stretch("a file", 0, 128))
    assert overlap(private, shared)
    assert not overlap(shared, private)
    assert overlap(private, private)


def test_elements_that_straddle_each_other_overlap():
    assert overlap(info(4, 2), info(4, 2, at=4))


# -- copies ---------------------------------------------------------------------------------------


def by_rows(orders: str, memory: str) -> MatrixInfo:
    """A matrix of four rows, some for each part; each part in its order."""
    edges = range(0, 5, 4 // len(orders))
    parts = [
        Part((top, top + edges.step), (0, 3), Location.host(rank), order)
        for rank, (top, order) in enumerate(zip(edges, orders, strict=False))
    ]
    helds = tuple(HeldPart(part, rank, (Stretch(memory, 100 * rank, 96),)) for rank, part in enumerate(parts))
    return MatrixInfo(1, BoundLayout((4, 3), tuple(parts)), DType.f64, helds)


@pytest.mark.parametrize("source", ["F", "C", "FF", "CC", "FC", "CCFF", "FFFC", "CCCC"])  # single rows are of any order
@pytest.mark.parametrize("target", ["F", "C", "FF", "CC", "CF"])
def test_a_copy_transposes_as_few_elements_as_can_be(source, target):
    a, c = by_rows(source, "one"), by_rows(target, "other")
    key = PlanKey.of_copy((a, a, c), Choices.of("N", "N", None))
    turned = {"F": 0, "C": 0}
    for orders in (source, target):
        for order in orders if len(orders) < 4 else "":
            turned[order] += 4 // len(orders)
    parts = [
        part
        for matrix in (Matrix.A, Matrix.C)
        for part in key.placement.parts(matrix, key.problem.shape_of(matrix), key.problem.ld_of(matrix))
    ]
    assert sum(part.shape[0] * part.shape[1] for part in parts if part.order == "C") == 3 * min(turned.values())
    assert key.problem.shape_of(Matrix.C) in ((4, 3), (3, 4))


def test_what_a_view_has_not_of_a_rectangle_are_rectangles_of_exactly_those_elements():
    draws = random.Random(1)

    def elements(rows, cols):
        return [(row, col) for row in range(*rows) for col in range(*cols)]

    for _ in range(2000):
        rows, cols, *rectangle = (tuple(sorted(draws.choices(range(6), k=2))) for _ in range(4))
        found = [one for rest in View(rows, cols).not_of(tuple(rectangle)) for one in elements(*rest)]
        assert sorted(found) == sorted({*elements(*rectangle)} - {*elements(rows, cols)})
        assert View(rows, cols).not_of((rows, cols)) == []
