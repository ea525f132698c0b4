"""What ranks give, put together: parts in one order where they can be, and the layout of a result nobody gave."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from uncut_mpi.api.dealing import GivenArray, by_layout, by_starts
from uncut_mpi.api.matrix import HeldPart
from uncut_mpi.api.stored import stored_of
from uncut_mpi.api.wanted import new_result
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import Location
from uncut_mpi.model.parts import Part

F64 = DType.f64


def given(array, rank, row=0, col=0):
    stored = stored_of(array.shape, array.strides, array.itemsize)
    part = Part((row, row + stored.rows), (col, col + stored.cols), Location.host(rank), stored.order, stored.ld)
    return GivenArray(HeldPart(part, rank, ()), DType.parse(array.dtype), array.flags.writeable)


def addresses(part):
    """Where each element of a part lies, counted from the first one."""
    rows, cols = part.shape
    down, right = (1, part.ld) if part.order == "F" else (part.ld, 1)
    return [[down * row + right * col for col in range(cols)] for row in range(rows)]


@pytest.mark.parametrize("order", ["F", "C"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1)])
@pytest.mark.parametrize("pad", [0, 2])
def test_a_single_row_or_column_is_stored_as_the_others_wherever_its_memory_can_be_read_so(order, shape, pad):
    vector = np.zeros((shape[0] + pad, shape[1] + pad), order=order)[: shape[0], : shape[1]]
    other = np.zeros((6, 6), order="C")[:5, :6] if shape[1] == 6 else np.zeros((shape[0], 5), order="C")
    first = given(vector, 0)
    whole = (shape[0] + other.shape[0], 6) if shape[1] == 6 else (shape[0], shape[1] + other.shape[1])
    second = given(other, 1, shape[0], 0) if shape[1] == 6 else given(other, 1, 0, shape[1])
    dealt = by_starts([[first], [second]], whole, None)
    part = dealt.layout.parts[0]
    assert dealt.parts[0].part == part
    assert addresses(part) == addresses(first.held.part)
    gaps = {abs(stride) for stride, extent in zip(vector.strides, shape, strict=True) if extent > 1} - {8}
    assert part.order == (first.held.part.order if gaps else dealt.layout.parts[1].order)


def test_parts_of_two_orders_stay_as_they_are():
    by_rows, by_columns = given(np.zeros((3, 4)), 0), given(np.zeros((3, 4), order="F"), 1)
    dealt = by_layout([by_rows, by_columns], Layout.rows(), None, None)
    assert [part.order for part in dealt.layout.parts] == ["C", "F"]


def test_a_matrix_without_elements_lies_where_the_first_array_does():
    dealt = by_layout([None, given(np.zeros((0, 4)), 1)], Layout.rows(), None, None)
    assert dealt.layout.shape == (0, 4)
    assert dealt.layout.parts == ()
    assert [(held.holder, held.part.location, held.part.shape) for held in dealt.parts] == [
        (1, Location.host(1), (0, 4))
    ]
    assert by_layout([None, None], Layout.cols(), (3, 0), F64).dealt == Layout.cols([0, 0])


def test_a_matrix_is_writeable_if_every_part_is():
    fixed = np.zeros((2, 2))
    fixed.flags.writeable = False
    assert by_layout([given(np.zeros((2, 2)), 0)], Layout.rows(), None, None).read_only == ()
    assert by_layout([given(np.zeros((2, 2)), 0), given(fixed, 1)], Layout.rows(), None, None).read_only == (1,)


def test_what_does_not_add_up_says_what_each_rank_has():
    three = [given(np.zeros((rows, 4)), rank) for rank, rows in enumerate((2, 3, 2))]
    with pytest.raises(ParamError, match=r"matrix of 6×4 and layout rows: 3×4 on rank 1, 2×4 on the others; pass"):
        by_layout(three, Layout.rows(), (6, 4), None)
    with pytest.raises(ParamError, match=r"3×4 instead of 2×4 on rank 1"):
        by_layout(three, Layout.rows([2, 2, 2]), None, None)
    with pytest.raises(ParamError, match=r"2×4 instead of nothing on rank 2"):
        by_layout(three, Layout.rows(ranks=[0, 1]), None, None)


def operand(layout, shape, memory="device", in_parts=True):
    info, at = SimpleNamespace(in_parts=in_parts), Location.host() if memory == "shared" and not in_parts else None
    return SimpleNamespace(
        layout=layout, shape=shape, memory=memory, dtype=F64, info=info, whole=SimpleNamespace(location=at)
    )


def test_a_result_in_shared_memory_follows_only_a_matrix_that_lies_there_as_a_whole():
    b = operand(Layout.whole(0), (4, 5), "host", False)
    one = new_result(operand(Layout.rows([1, 2]), (3, 4), "shared", False), b, "N", "N")
    assert (one.layout, one.memory, one.shape) == (Layout.rows([1, 2]), "shared", (3, 5))
    mixed = new_result(operand(Layout.rows([1, 2]), (3, 4), "shared"), b, "N", "N")
    assert (mixed.layout, mixed.memory) == (Layout.rows([1, 2]), "host")


def test_a_result_follows_no_blocks_and_no_single_parts():
    blocks = operand(Layout.blocks([3], [4, 0]), (3, 4))
    for first in (blocks, operand(None, (3, 4))):
        made = new_result(first, operand(Layout.rows([2, 2]), (4, 5), "host"), "N", "N")
        assert (made.layout, made.memory) == (Layout.rows(), "device")
