"""What callers ask of a product: converted, told apart, and said in words."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from uncut_mpi.api.request import Choices, Request, Scalars
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.options import ScheduleOptions

OTHERS = [(1.5, 2.5), (2.5, 1.5), (1.5, -2.5), (0.0, 0.0), (-0.0, 0.0), (0.0, -0.0), (1.5, np.nextafter(2.5, 3.0))]


def test_other_scalars_or_digests_never_give_the_same_bytes():
    digests = 3, 5, (1 << 128) - 1
    made = [Scalars.of(*pair).mixed_with(digest) for pair, digest in itertools.product(OTHERS, digests)]
    assert len(set(made)) == len(OTHERS) * len(digests)
    assert {len(one) for one in made} == {16}


def test_equal_scalars_of_any_type_give_the_same_bytes():
    plain = Scalars.of(2.0, float("nan"))
    for alpha, beta in ((2, np.nan), (np.float32(2), np.float64("nan")), (np.array(2.0), float("nan"))):
        asked = Scalars.of(alpha, beta)
        assert (type(asked), type(asked.alpha), type(asked.beta)) == (Scalars, float, float)
        assert asked.mixed_with(7) == plain.mixed_with(7)


def test_complex_scalars_that_differ_give_other_bytes():
    values = (1.0, 2.0, 1 + 2j, 2 + 1j, 1j, 2j)
    made = [Scalars.of(alpha, beta).mixed_with(7) for alpha, beta in itertools.product(values, repeat=2)]
    assert len(set(made)) == len(made)
    assert Scalars.of(1 + 0j, 2.0).mixed_with(7) == Scalars.of(1.0, 2.0).mixed_with(7)
    assert Scalars.of(np.complex64(1 + 2j), np.array(2j)) == Scalars(1 + 2j, 2j)


@pytest.mark.parametrize("value", [1e-50, -1e39])
def test_a_scalar_that_float32_does_not_have_is_named(value):
    with pytest.raises(ParamError, match=r"beta = .* in float32"):
        Scalars(1.0, value).check(DType.f32)
    for fits in (0.0, np.inf, np.nan, 1e-45, -3e38):
        Scalars(fits, fits).check(DType.f32)


def test_choices_are_words_and_options():
    made = Choices.of(np.str_("T"), "N", None)
    assert (made, type(made.trans_a)) == (("T", "N", ScheduleOptions()), str)
    for wrong in ("R", "n", b"N", None, 1, [], np.array(["N", "T"])):
        with pytest.raises(ParamError, match="trans_b = "):
            Choices.of("N", wrong, None)
    with pytest.raises(ParamError, match="options is a dict"):
        Choices.of("N", "N", {})


def test_a_request_tells_its_arguments_by_the_callers_names():
    matrices = tuple(SimpleNamespace(info=SimpleNamespace(number=number)) for number in (4, 2, 9))
    asked = Request("execute", matrices, Scalars(2.0, 0.5), Choices.of("N", "T", ScheduleOptions()))
    said = {name: value for name, value in asked.asked().items() if name not in "abc"}
    assert said == {"alpha": 2.0, "beta": 0.5, "trans_a": "N", "trans_b": "T", "options": ScheduleOptions()}
    for call, names in (("execute", "a b c"), ("gemm", "a b out"), ("redistribute", "matrix out")):
        assert [*asked._replace(call=call).asked()][: len(names.split())] == names.split()
