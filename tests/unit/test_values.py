"""Values that ranks compare, and answers about layouts that take no longer for larger matrices."""

from __future__ import annotations

import collections
import dataclasses
import random
import time

import ml_dtypes
import numpy as np
import pytest

import uncut_mpi as um
from uncut_mpi.api.wording import value_digest
from uncut_mpi.model.positions import runs

BF16 = ml_dtypes.bfloat16
ROWS, CYCLIC = um.Layout.rows(), um.Layout.block_cyclic(2, 3, (2, 2))


def test_values_are_compared_by_what_they_are_and_not_by_their_printed_form():
    large, wide, close = np.arange(5000.0), np.zeros((200, 200)), np.ones(2)
    others = large.copy(), wide.copy(), close.copy()
    others[0][2500], others[1][100, 100], others[2][0] = 1.0, 1.0, 1.0 + 1e-9
    for one, other in zip((large, wide, close), others, strict=True):
        assert value_digest("x", one) == value_digest("x", one.T.copy().T) != value_digest("x", other)
    for one, other in (
        ({"b": 2, "a": 1}, {"a": 1, "b": 2}),
        (frozenset("abcd"), frozenset("dcba")),
        (1, 1.0),
        (-0.0, 0),
        (complex(-0.0, 1), 1j),
        (float("nan"), np.float32(-np.nan)),
        (np.array([0.0, np.nan]), np.array([-0.0, -np.nan], ">f8")),
        (np.array([1j]), np.array([complex(-0.0, 1)])),
        (np.array([0, np.nan], BF16), np.array([-0.0, -np.nan], BF16)),
    ):
        assert value_digest("x", one) == value_digest("x", other)
    for one, other in (([1, 2], [12]), ("1", 1), ({1: 2}, {2: 1}), (ROWS, CYCLIC), ((), []), (None, "None"), (1j, 1)):
        assert value_digest("x", one) != value_digest("x", other)


@dataclasses.dataclass(frozen=True, eq=False)
class Alone:
    x: int = 0


@dataclasses.dataclass
class Changing:
    x: int = 0


ENDLESS: list[object] = []
ENDLESS.append(ENDLESS)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        np.array([object()]),
        [lambda: 0],
        np.random.default_rng(),
        np.ma.array([1.0, 2.0], mask=[True, False]),
        np.zeros(2, [("x", "f8")]),
        np.zeros(2, np.longdouble),
        np.datetime64(1, "s"),
        collections.OrderedDict(a=1),
        Alone(),
        Changing(),
        ENDLESS,
    ],
    ids=type,
)
def test_values_whose_equality_is_not_defined_are_refused(value):
    with pytest.raises(um.ParamError, match=r"x .*cannot be compared: pass"):
        value_digest("x", value)


@pytest.mark.parametrize(
    "call",
    [
        lambda: CYCLIC.locate((7,), 0, 0),
        lambda: CYCLIC.locate((7, 7, 7), 0, 0),
        lambda: ROWS.locate(None, 0, 0, num_ranks=2),
        lambda: CYCLIC.locate((7, 7), 2.0, 0),
        lambda: ROWS.locate((7, 7), 2.5, 0, num_ranks=2),
        lambda: ROWS.locate((7, 7), None, 0, num_ranks=2),
        lambda: ROWS.local_shape((7, 7), 0, num_ranks=0),
        lambda: ROWS.local_shape((7, 7), 0, num_ranks=1.5),
        lambda: ROWS.rectangles((7, 7), 0),
        lambda: CYCLIC.local_shape((7, 7), 0, num_ranks="4"),
        lambda: um.Layout.parse("block_cyclic(2,2;2,1;skip=5,0)"),
    ],
)
def test_what_a_layout_is_asked_is_checked(call):
    with pytest.raises(um.ParamError):
        call()


def test_orders_say_the_same_of_single_elements_as_of_all():
    rng = random.Random(1)
    for _ in range(300):
        block, parts = rng.randint(1, 5), rng.randint(1, 5)
        layout = um.Layout.parse(
            f"block_cyclic({block},1;{parts},1;source={rng.randrange(parts)},0;skip={rng.randrange(block)},0)"
        )
        extent = rng.randint(1, 40)
        order = layout.cyclic.every_order((extent, 1))[0]
        assert [order.index(at) for at in range(extent)] == order.indices(np.arange(order.extent)).tolist()
        assert [order.indices(np.arange(order.extent))[order.position(at)] for at in range(extent)] == [*range(extent)]


def test_a_layout_answers_about_2_to_the_40_as_fast_as_about_a_few():
    edge, layout = 1 << 40, um.Layout.block_cyclic(64, 64, (2, 2))
    start = time.perf_counter()
    rank, row, col = layout.locate((edge, edge), edge - 1, edge // 2 + 65)
    assert layout.local_shape((edge, edge), rank) == (edge // 2, edge // 2)
    assert (row, col) == (edge // 2 - 1, edge // 4 + 1)
    order = layout.orders((edge, edge))[0]
    assert order.within((0, edge // 2), edge // 2, edge) == (edge // 4, edge // 2)
    wide = um.Layout.block_cyclic(edge // 64, edge // 64, (2, 2)).orders((edge, edge))[0]
    assert runs(wide, (5, 9), None) == ((0, 5, 9),)
    assert len(runs(None, (0, edge), wide)) == len(runs(wide, (0, edge), None)) == 64
    assert wide.indices(np.array([edge // 2])) == edge // 64
    for too_many in (
        lambda: runs(order, (0, edge), None),
        lambda: layout.indices((1 << 46, 1), 0, num_ranks=4),
        lambda: um.Layout.rows().indices((1 << 62, 1), 0, num_ranks=1),
    ):
        with pytest.raises(um.CapacityError):
            too_many()
    assert time.perf_counter() - start < 0.05
