"""What every rank knows of a view, and how it is dealt."""

from __future__ import annotations

import random

import numpy as np

from uncut_mpi.api.matrix import HeldPart, MatrixInfo
from uncut_mpi.api.views import View, info_of
from uncut_mpi.mappings import Piece
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout, LocalArray
from uncut_mpi.model.locations import Location

SHAPE = (14, 12)
LAYOUTS = (
    Layout.rows([5, 0, 9], ranks=[2, 0, 1]),
    Layout.cols([3, 4, 5]),
    Layout.blocks([6, 8], [7, 5]),
    Layout.blocks([14], [2, 4, 6], ranks=[1, 2, 0]),
    Layout.replicated(ranks=[1, 0]),
    Layout.whole(1),
)


def test_a_view_and_a_transposed_matrix_are_dealt_to_those_who_have_their_elements():
    owner = np.arange(SHAPE[0] * SHAPE[1]).reshape(SHAPE)
    rng = random.Random(3)
    for layout in LAYOUTS:
        num_ranks = 4 if layout.kind == "blocks" and layout.ranks is None else 3
        for _ in range(10):
            (top, bottom), (left, right) = (sorted(rng.choices(range(extent + 1), k=2)) for extent in SHAPE)
            seen = layout.sliced(SHAPE, (top, bottom), (left, right))
            for rank in range(num_ranks):
                has = owner[np.ix_(*layout.indices(SHAPE, rank, num_ranks=num_ranks))]
                part = owner[top:bottom, left:right]
                mine = part[np.ix_(*seen.indices(part.shape, rank, num_ranks=num_ranks))]
                assert set(mine.flat) == set(part.flat) & set(has.flat)
                turned = part.T[np.ix_(*seen.transposed.indices(part.T.shape, rank, num_ranks=num_ranks))]
                assert np.array_equal(turned, mine.T)


def test_parts_of_a_view_lie_where_their_elements_do():
    rng, item = random.Random(5), 8
    for layout in LAYOUTS[:4]:
        num_ranks = 4 if layout.ranks is None and layout.kind == "blocks" else 3
        arrays = [LocalArray(Location.device(rank), rng.choice("CF"), 20) for rank in range(num_ranks)]
        bound = layout.bind(SHAPE, arrays)
        helds = []
        for number, part in enumerate(bound.parts):
            nbytes = ((part.stored_shape[1] - 1) * part.ld + part.stored_shape[0]) * item
            cut = rng.randrange(0, nbytes + 1, item)
            pieces = tuple(
                Piece(name, start, size, start)
                for name, start, size in ((f"x{number}", 0, cut), (f"y{number}", cut, nbytes - cut))
                if size
            )
            helds.append(HeldPart(part, part.location.rank, pieces, b"handle", 1000))
        matrix = MatrixInfo(7, bound, DType.f64, tuple(helds), layout)
        for _ in range(20):
            (top, bottom), (left, right) = (sorted(rng.sample(range(extent + 1), 2)) for extent in SHAPE)
            view = info_of(matrix, View((top, bottom), (left, right), rng.random() < 0.5))
            assert view.layout.shape == (
                (right - left, bottom - top) if view.view.turned else (bottom - top, right - left)
            )
            for at, held in enumerate(view.parts):
                number, start = view.origin(at)
                of, part = matrix.parts[number], held.part.transposed if view.view.turned else held.part
                down, along = part.rows[0] + top - of.part.rows[0], part.cols[0] + left - of.part.cols[0]
                first = down + along * of.part.ld if of.part.order == "F" else along + down * of.part.ld
                assert (start, held.offset_bytes, part.ld) == (first * item, 1000 + first * item, of.part.ld)
                ends = np.array([(one.offset, one.offset + one.nbytes) for one in held.pieces]).ravel().tolist()
                nbytes = ((part.stored_shape[1] - 1) * part.ld + part.stored_shape[0]) * item
                assert (ends[0], ends[-1], ends[1:-1:2]) == (0, nbytes, ends[2:-1:2])
                assert all(one.start - one.offset == start for one in held.pieces)
