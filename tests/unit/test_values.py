"""Values that ranks compare, and answers about layouts that take no longer for larger matrices."""

from __future__ import annotations

import collections
import dataclasses
import decimal
import fractions
import math
import pathlib
import random
import time

import ml_dtypes
import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.hostile import Hostile
from uncut_mpi.api.wanted import new_matrix
from uncut_mpi.api.wording import value_digest
from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import flag, real_number, shown, type_text, whole_number
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
    with pytest.raises(um.ParamError, match=r"x .*, which agree does not compare: pass"):
        value_digest("x", value)


@pytest.mark.parametrize(
    ("value", "instead"),
    [
        (pathlib.Path("a"), "str"),
        ([decimal.Decimal(1)], "str"),
        (np.dtype("f4"), "str"),
        (range(3), "list"),
        (bytearray(3), "bytes"),
    ],
)
def test_what_is_refused_says_what_to_pass_instead(value, instead):
    with pytest.raises(um.ParamError, match=rf"agree does not compare: pass {instead}\(x\) of it, or numbers"):
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


# -- what callers pass as numbers and truth values, turned into plain Python values or refused -----


INTEGERS = [np.dtype(code).type for code in "bBhHiIlLqQ"]
FLOATS = [np.float16, np.float32, np.float64, np.longdouble, ml_dtypes.bfloat16]


class Indexed:
    def __index__(self):
        return 7


# -- whole numbers -------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_of_every_width_are_whole_numbers(kind):
    for value in (kind(5), np.array(5, kind)):
        found = whole_number("root", value)
        assert type(found) is int
        assert found == 5


@pytest.mark.parametrize("value", [0, -3, 10**400, Indexed()])
def test_what_has_an_index_is_a_whole_number(value):
    assert whole_number("root", value) == (7 if isinstance(value, Indexed) else value)


@pytest.mark.parametrize(
    "value",
    [
        True, np.True_, np.array(True), 0.0, np.float64(1), fractions.Fraction(3), decimal.Decimal(3), "0", b"0", None,
        1j, [1], (), {}, np.array([1]), np.array([[1, 2]]), np.datetime64(3, "D"), np.array(2.0), Hostile(), object(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_no_whole_number_is_refused_by_name_value_and_type(value):
    with pytest.raises(ParamError) as caught:
        whole_number("root", value)
    assert str(caught.value) == f"root = {shown(value)} is {type_text(value)}: pass a whole number"


# -- real numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*FLOATS, *INTEGERS, np.bool_])
def test_numbers_of_every_width_are_real_numbers(kind):
    for value in (kind(1), np.array(1, kind)):
        found = real_number("alpha", value)
        assert type(found) is float
        assert found == 1.0


@pytest.mark.parametrize(
    ("value", "wanted"),
    [
        (0.1, 0.1), (True, 1.0), (3, 3.0), (2**60 + 1, 2.0**60), (fractions.Fraction(1, 3), 1 / 3),
        (decimal.Decimal("0.1"), 0.1), (np.float32(0.1), float(np.float32(0.1))), (decimal.Decimal("1e-400"), 0.0),
        (np.array(fractions.Fraction(1, 4), object), 0.25), (Indexed(), 7.0),
    ],
)  # fmt: skip
def test_a_real_number_is_the_nearest_float(value, wanted):
    assert real_number("alpha", value) == wanted


@pytest.mark.parametrize(
    "value",
    [10**400, -(10**400), fractions.Fraction(10**400), decimal.Decimal("1e400"), np.longdouble("1e400"), 10**9000],
    ids=["int", "negative", "fraction", "decimal", "longdouble", "unprintable"],
)
def test_a_number_beyond_float64_is_refused_and_not_made_infinite(value):
    with pytest.raises(ParamError, match=r"alpha = .* is beyond what a float64 can hold"):
        real_number("alpha", value)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, np.float32("nan"), decimal.Decimal("inf")])
def test_infinities_and_nan_are_numbers_unless_finite_ones_are_asked_for(value):
    found = real_number("alpha", value)
    assert found == value or math.isnan(found)
    with pytest.raises(ParamError, match=r"timeout_s = -?(inf|nan) is not finite"):
        real_number("timeout_s", value, finite=True)


@pytest.mark.parametrize(
    "value",
    [
        "1", "x", b"1", bytearray(b"1"), memoryview(b"1"), np.str_("1"), np.bytes_(b"1"), np.array("1"), None, 1j,
        np.complex64(1), np.array(1j), [1.0], (), {}, np.array([1.0]), np.array([[1.0, 2.0]]), np.timedelta64(3, "s"),
        np.datetime64(3, "D"), decimal.Decimal("sNaN"), Hostile(), object(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_is_no_real_number_is_refused_by_name_value_and_type(value):
    with pytest.raises(ParamError) as caught:
        real_number("alpha", value)
    assert str(caught.value).startswith(f"alpha = {shown(value)} is {type_text(value)}: pass ")


# -- truth values --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bool, np.bool_, np.array])
def test_truth_values_of_python_and_numpy_are_flags(kind):
    for value in (True, False):
        assert flag("verify", kind(value)) is value


@pytest.mark.parametrize(
    "value", [0, 1, "no", "True", None, 0.0, [], np.array([True]), np.int8(1), object(), Hostile()]
)
def test_what_is_no_truth_value_is_refused(value):
    with pytest.raises(ParamError, match=r"verify = .* is an? \w+: pass True or False"):
        flag("verify", value)


# -- what a new matrix is made of ------------------------------------------------------------------


ODD = {
    "shape": [
        (2.0, 2), ("2", 2), (True, 2), (2, None), (-1, 2), (2, -(2**70)), (2**70, 2), (2**40, 2**40), (2,), (2, 2, 2),
        4, "22", b"22", None, {2, 3}, {2: 2, 3: 3}, np.zeros((2, 2)), np.array([2.0, 2.0]), (2, math.nan), (1 << 62, 0),
    ],
    "dtype": ["f128", "x", 8, 3.5, int, bool, "f8,f8", [], {}, ["f8"], "O", object, ">f8", Hostile],
    "order": ["c", "f", "A", "K", "", None, b"C", 0, ["C"], {}, Hostile(), np.array("C"), True],
    "memory": ["gpu", None, 0],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ODD.items() for value in values])
def test_what_is_none_of_a_matrix_is_refused_by_name(name, value):
    about = {"shape": (2, 2), "dtype": "f64", "order": "C", "layout": um.Layout.rows(), "memory": "host"}
    with pytest.raises(ParamError, match=name):
        new_matrix(**{**about, name: value})


# -- texts ---------------------------------------------------------------------------------------


def test_a_value_is_shown_on_one_short_line():
    assert shown(np.eye(2)) == "array([[1., 0.], [0., 1.]])"
    assert shown("x" * 100) == "'" + "x" * 56 + "..."
    assert shown(Hostile()) == "<Hostile>"
    assert shown(10**9000) == "<int>"


@pytest.mark.parametrize(
    ("value", "text"), [(1, "an int"), ("", "a str"), (np.eye(2), "an ndarray"), (np.uint8(1), "a uint8")]
)
def test_a_type_has_its_article(value, text):
    assert type_text(value) == text
