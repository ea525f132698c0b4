"""Parts of a matrix cover it exactly, whatever they are."""

import numpy as np
import pytest

from uncut_mpi.errors import ParamError
from uncut_mpi.model.locations import Location
from uncut_mpi.model.parts import BoundLayout, Part


def device(rank, rows, cols, order="F", ld=0):
    return Part(rows, cols, Location.device(rank), order, ld)


def test_a_part_is_stored_as_its_array_is():
    part = Part((3, 8), (0, 4), Location.host(2), "C", 9)
    assert (part.shape, part.stored_shape, part.ld) == ((5, 4), (4, 5), 9)
    assert part.transposed == Part((0, 4), (3, 8), Location.host(2), "F", 9)
    assert part.transposed.stored_shape == part.stored_shape
    assert [device(0, (0, 5), (0, 4), order).ld for order in "FC"] == [5, 4]


def test_parts_cover_a_matrix_exactly():
    parts = (device(0, (0, 2), (0, 7)), device(1, (2, 6), (0, 3)), device(2, (2, 6), (3, 7)))
    bound = BoundLayout((6, 7), parts)
    assert (bound.cuts(0), bound.cuts(1), bound.replicas) == ((0, 2, 6), (0, 3, 7), 1)
    assert bound.transposed.transposed == bound
    for wrong, words in (
        (parts[:2], "have 26 elements of a matrix of 6×7, which has 42"),
        ((*parts, device(3, (1, 3), (0, 1))), r"parts overlap: \[0:2, 0:7\] at 0 and \[1:3, 0:1\] at 3"),
        ((*parts[:2], device(2, (2, 6), (3, 8))), r"\[2:6, 3:8\] at 2 is no part of a matrix of 6×7"),
        ((*parts, device(3, (4, 4), (0, 1))), r"\[4:4, 0:1\] at 3 is no part"),
    ):
        with pytest.raises(ParamError, match=words):
            BoundLayout((6, 7), wrong)


def test_several_holders_have_replicas():
    both = BoundLayout((4, 4), (device(0, (0, 4), (0, 4)), device(1, (0, 4), (0, 4), "C")))
    assert (both.replicas, both.order) == (2, "C")
    assert BoundLayout((0, 4), ()).replicas == 1
    assert BoundLayout.whole((0, 4), Location.host()).parts == ()


def test_the_order_is_that_of_most_elements():
    parts = (device(0, (0, 3), (0, 5), "F"), device(1, (3, 5), (0, 5), "C"))
    assert BoundLayout((5, 5), parts).order == "F"
    assert BoundLayout((5, 5), parts).transposed.order == "C"


def test_plain_values_make_the_same_parts_again():
    bound = BoundLayout((6, 2), (device(0, (0, 2), (0, 2), "C", 5), device(1, (2, 6), (0, 2))), "rows")
    again = BoundLayout.decoded(bound.encoded())
    assert again == bound
    assert (again.word, str(again)) == ("rows", "rows@0+1")


def test_a_thousand_parts_are_checked():
    rng = np.random.default_rng(1)
    cuts = np.sort(rng.choice(np.arange(1, 100_000), 1023, replace=False)).tolist()
    edges = [0, *cuts, 100_000]
    parts = tuple(device(rank, (edges[rank], edges[rank + 1]), (0, 3)) for rank in range(1024))
    assert BoundLayout((100_000, 3), parts).cuts(0) == tuple(edges)


def test_layouts_that_differ_in_their_word_alone_are_one_to_plans():
    parts = (device(0, (0, 2), (0, 2)), device(1, (2, 6), (0, 2)))
    named, unnamed = BoundLayout((6, 2), parts, "rows(2,4)"), BoundLayout((6, 2), parts)
    assert (named, repr(named)) == (unnamed, repr(unnamed))
