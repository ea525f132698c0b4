"""Layouts as users write them: words that parse back, and ranks that together have every element."""

from __future__ import annotations

import itertools
import math
import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import uncut_mpi as um
from uncut_mpi.errors import ParamError
from uncut_mpi.model.layout import Layout, LocalArray
from uncut_mpi.model.locations import Location
from uncut_mpi.model.parts import BoundLayout, Part

COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=5)


@st.composite
def dealt(draw):
    """A layout, a shape that it fits and how many ranks there are."""
    kind = draw(st.sampled_from(("whole", "rows", "cols", "blocks", "replicated")))
    shape = draw(st.tuples(st.integers(0, 9), st.integers(0, 9)))
    num_ranks = draw(st.integers(1, 6))
    ranks = draw(st.none() | st.lists(st.integers(0, num_ranks - 1), min_size=1, unique=True))
    if kind == "whole":
        return Layout.whole(draw(st.integers(0, num_ranks - 1))), shape, num_ranks
    if kind == "replicated":
        return Layout.replicated(ranks=ranks), shape, num_ranks
    if kind == "blocks":
        row_counts, col_counts = draw(COUNTS), draw(COUNTS)
        parts = len(row_counts) * len(col_counts)
        num_ranks = draw(st.integers(parts, parts + 3))
        ranks = draw(st.permutations(range(num_ranks)))[:parts]
        return Layout.blocks(row_counts, col_counts, ranks=ranks), (sum(row_counts), sum(col_counts)), num_ranks
    make, axis = (Layout.rows, 0) if kind == "rows" else (Layout.cols, 1)
    if draw(st.booleans()):
        return make(ranks=ranks), shape, num_ranks
    size = num_ranks if ranks is None else len(ranks)
    counts = draw(st.lists(st.integers(0, 5), min_size=size, max_size=size))
    shape = (sum(counts), shape[1]) if axis == 0 else (shape[0], sum(counts))
    return make(counts, ranks=ranks), shape, num_ranks


@settings(deadline=None)
@given(dealt())
def test_a_layout_is_one_word_that_parses_back(case):
    layout, shape, num_ranks = case
    for one in (layout, layout.filled(shape, num_ranks)):
        word = str(one)
        assert word.isascii()
        assert len(word.split()) == 1
        assert Layout.parse(word) == one
        assert hash(Layout.parse(word)) == hash(one)
        assert pickle.loads(pickle.dumps(one)) == one


@settings(deadline=None)
@given(dealt())
def test_every_element_has_one_rank_or_with_replicas_all_that_are_named(case):
    layout, shape, num_ranks = case
    seen = np.zeros(shape, int)
    for rank in range(num_ranks):
        rows, cols = layout.indices(shape, rank, num_ranks=num_ranks)
        assert (len(rows), len(cols)) == layout.local_shape(shape, rank, num_ranks=num_ranks)
        assert layout.filled(shape, num_ranks).local_shape(shape, rank, num_ranks=num_ranks) == (len(rows), len(cols))
        seen[np.ix_(rows, cols)] += 1
        if layout.kind != "replicated":
            for (i, row), (j, col) in itertools.product(enumerate(rows.tolist()), enumerate(cols.tolist())):
                assert layout.locate(shape, row, col, num_ranks=num_ranks) == (rank, i, j)
    holders = len(layout.ranks or range(num_ranks)) if layout.kind == "replicated" else 1
    assert (seen == holders).all()


@settings(deadline=None)
@given(dealt())
def test_a_bound_layout_has_the_parts_that_have_elements_as_they_are_stored(case):
    layout, shape, num_ranks = case
    extents = [layout.local_shape(shape, rank, num_ranks=num_ranks) for rank in range(num_ranks)]
    arrays = [
        LocalArray(
            Location.host(rank) if rank % 2 else Location.device(rank), "FC"[rank % 2], max(1, max(extents[rank]))
        )
        if math.prod(extents[rank]) or rank % 3
        else None
        for rank in range(num_ranks)
    ]
    bound = layout.bind(shape, arrays)
    assert bound.shape == shape
    assert bound.word == str(layout)
    assert {part.location.rank for part in bound.parts} == {
        rank for rank in range(num_ranks) if math.prod(extents[rank])
    }
    for part in bound.parts:
        rows, cols = layout.indices(shape, part.location.rank, num_ranks=num_ranks)
        assert part == Part((rows[0], rows[-1] + 1), (cols[0], cols[-1] + 1), *arrays[part.location.rank])


def test_even_parts_are_those_of_array_split():
    for extent in range(9):
        for num_ranks in range(1, 6):
            wanted = tuple(len(part) for part in np.array_split(range(extent), num_ranks))
            assert Layout.rows().filled((extent, 3), num_ranks) == Layout.rows(wanted)
            assert Layout.cols().filled((3, extent), num_ranks) == Layout.cols(wanted)


def test_words():
    assert str(um.Layout.rows([0, 200, 71, 100])) == "rows(0,200,71,100)"
    assert str(Layout.blocks((3, 4), (5, 6), ranks=(3, 1, 0, 2))) == "blocks(3,4;5,6;ranks=3,1,0,2)"
    assert [str(one) for one in (Layout.whole(2), Layout.cols(), Layout.replicated())] == [
        "whole(2)",
        "cols",
        "replicated",
    ]
    assert str(Layout.cols(ranks=range(2))) == "cols(ranks=0,1)"
    assert Layout.parse("whole") == Layout.whole(0)


def test_layouts_of_equal_numbers_are_equal():
    assert Layout.rows([1, 2], ranks=(1, 0)) == Layout.rows(np.array([1, 2]), ranks=np.array([1, 0]))
    assert Layout.rows([1, 2]) != Layout.rows([1, 2], ranks=(1, 0))
    assert Layout.rows([1, 2]) != Layout.cols([1, 2])


def test_blocks_are_dealt_row_by_row():
    layout = Layout.blocks([3, 4], [5, 6, 0], ranks=[5, 4, 3, 2, 1, 0])
    assert [layout.local_shape((7, 11), rank) for rank in range(7)] == [
        (4, 0),
        (4, 6),
        (4, 5),
        (3, 0),
        (3, 6),
        (3, 5),
        (0, 0),
    ]
    assert [index.tolist() for index in layout.indices((7, 11), 1)] == [[3, 4, 5, 6], [5, 6, 7, 8, 9, 10]]


def test_a_rank_without_rows_has_all_columns_of_none():
    assert Layout.rows(ranks=[0]).local_shape((5, 3), 4) == (0, 3)
    assert Layout.cols(ranks=[0]).local_shape((5, 3), 4) == (5, 0)
    assert Layout.whole(1).local_shape((5, 3), 0) == (0, 0)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: Layout.rows([3, -1]), r"counts = \[3, -1\].*from 0 on"),
        (lambda: Layout.rows([]), r"counts = \[\]"),
        (lambda: Layout.rows(3), "counts = 3 is no sequence"),
        (lambda: Layout.rows([1.5]), "a number of counts = 1.5 is a float"),
        (lambda: Layout.whole(-1), "root"),
        (lambda: Layout.rows([3, 4], ranks=[0]), "has counts for 2 parts and names 1 rank: pass as many of both"),
        (lambda: Layout.blocks([1, 1], [1, 1], ranks=range(3)), "counts for 4 parts and names 3 ranks"),
        (lambda: Layout.cols(ranks=[1, 0, 1]), "a rank more than once.*distribute_parts"),
        (lambda: Layout.rows().local_shape((4, 4), 0), "rows does not say how many ranks.*num_ranks="),
        (lambda: Layout.rows([1, 2]).local_shape((4, 4), 0), r"rows\(1,2\) has 3 rows, the matrix 4: pass counts"),
        (lambda: Layout.blocks([2], [2, 3]).local_shape((2, 4), 0), "has 5 columns, the matrix 4"),
        (lambda: Layout.rows([1, 2]).local_shape((3, 4), 2), "rank = 2 is none of the ranks 0 to 1"),
        (lambda: Layout.rows([1, 2]).local_shape((3, 4), -1), "rank = -1 is none"),
        (
            lambda: Layout.block_cyclic(2, 2, grid=(1, 2)).local_shape((3, 4), 2),
            "whose grid is for 2 ranks",
        ),
        (
            lambda: Layout.rows([1, 2]).local_shape((3, 4), 0, num_ranks=3),
            "has 2 parts for 3 ranks: pass counts for all",
        ),
        (lambda: Layout.whole(3).rectangles((3, 4), 3), r"names rank 3, but there are ranks 0 to 2 only"),
        (lambda: Layout.rows([1, 2]).local_shape((3,), 0), r"shape = \(3,\): pass the numbers of rows and columns"),
    ],
)
def test_what_does_not_fit_is_an_error_with_the_mend(call, words):
    with pytest.raises(ParamError, match=words):
        call()


WRONG = (
    "row rows() rows(,) rows(3,) rows(-3) rows(3;4) cols(3;4;5) blocks blocks(3) blocks(3;4;5) whole() whole(1,2) "
    "whole(ranks=1) replicated(3) rows(ranks=) rows(ranks=1;3) rows(3 rows(3)) rows(ranks=1;ranks=1) replicated;ranks=1"
)


@pytest.mark.parametrize("word", [*WRONG.split(), "", "rows ", f"rows({'9' * 20})", 3, None])
def test_other_words_are_refused_with_those_that_there_are(word):
    with pytest.raises(ParamError, match="is not known: write whole"):
        Layout.parse(word)


@pytest.mark.parametrize(
    "fields",
    [
        ("foo",),
        (None,),
        ("blocks",),
        ("blocks", (1, 2)),
        ("whole",),
        ("whole", None, None, (0, 1)),
        ("rows", None, (3,)),
        ("rows", (-2, 3)),
        ("replicated", (3,)),
        ("block_cyclic",),
    ],
)
def test_a_layout_that_no_maker_makes_is_refused(fields):
    with pytest.raises(ParamError):
        Layout(*fields)


def test_lists_of_counts_are_as_good_as_tuples():
    assert Layout("rows", [2, 3]) == Layout.rows((2, 3))
    with pytest.raises(ParamError):
        Layout.parse("rows(\u0663)")


# -- parts of a matrix cover it exactly, whatever they are -----------------------------------------


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
    assert bound.transposed.transposed == bound
    for wrong, words in (
        (parts[:2], "have 26 elements of a matrix of 6×7, which has 42"),
        ((*parts, device(3, (1, 3), (0, 1))), r"parts overlap: \[0:2, 0:7\] at 0 and \[1:3, 0:1\] at 3"),
        ((*parts[:2], device(2, (2, 6), (3, 8))), r"\[2:6, 3:8\] at 2 is no part of a matrix of 6×7"),
        ((*parts, device(3, (4, 4), (0, 1))), r"\[4:4, 0:1\] at 3 is no part"),
    ):
        with pytest.raises(ParamError, match=words):
            BoundLayout((6, 7), wrong)


def test_several_holders_may_have_all_and_nobody_what_is_empty():
    both = BoundLayout((4, 4), (device(0, (0, 4), (0, 4)), device(1, (0, 4), (0, 4), "C")))
    assert both.order == "C"
    assert BoundLayout.whole((0, 4), Location.host()).parts == ()


def test_the_order_is_that_of_most_elements():
    parts = (device(0, (0, 3), (0, 5), "F"), device(1, (3, 5), (0, 5), "C"))
    assert BoundLayout((5, 5), parts).order == "F"
    assert BoundLayout((5, 5), parts).transposed.order == "C"
    blocks = device(0, (0, 3), (0, 5), "F"), device(0, (3, 6), (5, 10), "F")
    assert BoundLayout((6, 10), blocks, blocks=((3, 5), (3, 5))).order == "F"  # most of what there is


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
    assert BoundLayout((100_000, 3), parts).parts == parts


def test_layouts_that_differ_in_their_word_alone_are_one_to_plans():
    parts = (device(0, (0, 2), (0, 2)), device(1, (2, 6), (0, 2)))
    named, unnamed = BoundLayout((6, 2), parts, "rows(2,4)"), BoundLayout((6, 2), parts)
    assert (named, repr(named)) == (unnamed, repr(unnamed))
