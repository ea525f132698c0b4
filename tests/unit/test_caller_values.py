"""What callers pass as numbers and truth values, turned into plain Python values or refused."""

from __future__ import annotations

import decimal
import fractions
import math

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.hostile import Hostile
from uncut_mpi.api.session import _bytes
from uncut_mpi.errors import ParamError
from uncut_mpi.model.arguments import flag, real_number, shown, type_text, whole_number

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


@pytest.mark.parametrize(
    ("value", "found"),
    [(None, 0), (7, 7), ("4GiB", 4 << 30), ("1.5 GB", 1_500_000_000), ("16kb", 16_000), ("0.5MiB", 1 << 19)],
)
def test_bytes_are_a_number_or_a_text_with_a_unit(value, found):
    assert _bytes("device_memory", value) == found


@pytest.mark.parametrize("value", ["4", "4GB s", "GiB", "", "nanGB", "-1GB", "1e30TB", "0.1kib ", b"4GiB", 1.5, 0])
def test_no_number_of_bytes_is_told_by_its_name(value):
    with pytest.raises(ParamError, match=r"^device_memory = "):
        _bytes("device_memory", value)
