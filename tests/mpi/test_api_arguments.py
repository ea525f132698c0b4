"""What callers pass: whatever is a number to numpy is one here; anything else is a ParamError on every rank."""

from __future__ import annotations

import decimal
import fractions
import math

import hypothesis
import hypothesis.strategies as st
import ml_dtypes
import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert, outcome
from tests.helpers.hostile import Closed
from tests.helpers.products import as_numpy, ones, shows

TWOS = {"int": 2, "int64": np.int64(2), "uint8": np.uint8(2), "float": 2.0, "array": np.array(2)}


@pytest.fixture
def filled(session):
    """A 4×4 matrix of ones on every rank's view."""
    matrix = ones(session)
    yield matrix
    session.release(matrix)


@pytest.mark.parametrize("name", TWOS)
def test_whole_numbers_are_scalars_and_types_of_one_value_are_one_value(comm, session, filled, name):
    # Ranks may have the same number in other types.
    c = session.gemm(filled, filled, alpha=TWOS[name] if session.rank == 0 else 2.0, beta=np.float32(0))
    collective_assert(comm, shows(c, 8.0), f"{as_numpy(c)}")


@pytest.mark.parametrize("dtype", ["f32", "tf32", "f16", "bf16"])
@pytest.mark.parametrize("value", [1e39, -1e300, 1e-46, -1e-300])
def test_a_scalar_that_the_type_of_sums_cannot_hold_is_an_error_on_every_rank(comm, session, dtype, value):
    a = ones(session, dtype=dtype)
    plan = session.plan(a, a, session.empty_host((4, 4), dtype))
    said = [outcome(call) for call in (lambda: session.gemm(a, a, alpha=value), lambda: plan.execute(1.0, value))]
    for scalar in (3e38, 1e-45, float("inf"), 0.0):  # what it can hold, and what is no number anyway
        said.append("ParamError float32" if outcome(lambda scalar=scalar: plan.execute(scalar)) == "worked" else "no")
    plan.close()
    session.release(a)
    collective_assert(comm, all("ParamError" in one and "float32" in one for one in said), said)


SESSION_ARGUMENTS = {
    "devices=3": {"devices": 3},
    "devices='01'": {"devices": "01"},
    "devices of text": {"devices": ["a"]},
    "devices of bytes": {"devices": b"01"},
    "devices of no dimension": {"devices": np.array(2.0)},
    "devices of floats": {"devices": [0.0]},
    "timeout_s='x'": {"timeout_s": "x"},
    "timeout_s=nan": {"timeout_s": float("nan")},
    "timeout_s=None": {"timeout_s": None},
    "arrival_timeout_s=-1": {"arrival_timeout_s": -1},
    "arrival_timeout_s='1'": {"arrival_timeout_s": "1"},
    "max_plans='3'": {"max_plans": "3"},
    "max_plans=1.5": {"max_plans": 1.5},
    "max_plans=True": {"max_plans": True},
    "verify='no'": {"verify": "no"},
    "tune_products=1": {"tune_products": 1},
    "allow_shared_gpu='x'": {"allow_shared_gpu": "x"},
    "backend=3": {"backend": 3},
    "backend=['host']": {"backend": ["host"]},
    "machine='h200-4x'": {"machine": "h200-4x"},
    "a hostile timeout": {"timeout_s": Closed()},
    "a hostile backend": {"backend": Closed()},
}


@pytest.mark.parametrize("name", SESSION_ARGUMENTS)
def test_odd_arguments_of_a_session_are_a_parameter_error_on_every_rank(comm, name):
    given = {"backend": "host", "machine": um.Machine.uniform(comm.size), **SESSION_ARGUMENTS[name]}
    said = outcome(lambda: um.Session(comm, **given))
    collective_assert(comm, said.startswith("ParamError"), said)
    collective_assert(comm, len(set(allgather(comm, said))) == 1, said)


def test_numbers_of_numpy_are_arguments_of_a_session(comm):
    given = {"timeout_s": np.float32(20), "max_plans": np.int16(3), "verify": np.bool_(True)}
    with um.Session(comm, backend=np.str_("host"), machine=um.Machine.uniform(comm.size), **given) as session:
        a, c = ones(session, (3, 3)), session.empty_host((np.int32(3), np.uint8(3)))
        session.gemm(a, a, c, trans_a=np.str_("N") if comm.rank == 0 else "N")
        good = shows(c, 3.0)
    collective_assert(comm, good)


@pytest.mark.mpi(min_size=2)
def test_an_odd_argument_of_a_session_on_one_rank_is_an_error_on_all(comm):
    for odd in ({"timeout_s": "x"}, {"backend": 3}, {"devices": 3}, {"max_plans": None}, {"backend": Closed()}):
        given = {"backend": "host", "machine": um.Machine.uniform(comm.size), **(odd if comm.rank == 0 else {})}
        said = outcome(lambda given=given: um.Session(comm, **given))
        collective_assert(comm, "ParamError" in said or "RankMismatchError" in said, f"{[*odd]}: {said}")


def test_what_is_no_communicator_is_an_error():
    for comm in (None, 3, "world", object(), np.ones((3, 3))):
        with pytest.raises(um.ParamError, match="intracommunicator"):
            um.Session(comm, backend="host")


# == odd arguments at random, on all ranks or on one ======================================================


EXAMPLES = 300


def odd_values():
    """Return a strategy of values that are sometimes what a parameter takes, and mostly not."""
    numbers = st.one_of(
        st.integers(-3, 9),
        st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**400, 0.0, -0.0, 0.5, 2.0, 1e308, 1e-320, math.inf, math.nan]),
        st.sampled_from([np.int64(2), np.uint8(3), np.float16(0.5), np.float32(2), np.bool_(True), np.array(2.0)]),
        st.sampled_from([fractions.Fraction(1, 3), decimal.Decimal("0.25"), True, False, 1j, np.complex64(2)]),
        st.sampled_from([ml_dtypes.bfloat16(0.5), np.longdouble("1e4000"), np.datetime64("2020-01-01")]),
    )
    others = st.sampled_from(
        [None, "", "N", "T", "n", "C", "F", "host", "f32", "0", b"N", np.str_("T"), "\ud800", (), [], {}, object(), len]
    )
    arrays = st.sampled_from(
        [np.ones((2, 2)), np.ones(3), np.ones((2, 2), np.float32), np.ones((0, 4)), np.ones((2, 3), object), [[1.0]]]
    )
    pairs = st.tuples(st.integers(-2, 5), st.integers(-2, 5))
    return st.one_of(numbers, others, arrays, pairs, st.just("hostile"), st.lists(st.integers(-1, 4), max_size=3))


PARAMETERS = {
    "gemm": ("a", "b", "out", "alpha", "beta", "trans_a", "trans_b", "options", "stream"),
    "plan": ("a", "b", "c", "reads_c", "trans_a", "trans_b", "scales_only", "options"),
    "execute": ("alpha", "beta", "a", "b", "c"),
    "trace": ("alpha", "beta", "a", "b", "c"),
    "empty_host": ("shape", "dtype", "order"),
    "empty_device": ("shape", "dtype", "rank", "order"),
    "register": ("array", "root", "dtype"),
    "download": ("matrix",),
    "upload": ("source", "target"),
    "release": ("matrix",),
    "agree": ("value", "what"),
}


@st.composite
def calls(draw):
    """Return (method, what is odd by name, whether on all ranks)."""
    method = draw(st.sampled_from(sorted(PARAMETERS)))
    names = draw(st.lists(st.sampled_from(PARAMETERS[method]), min_size=1, max_size=2, unique=True))
    return method, {name: draw(odd_values()) for name in names}, draw(st.booleans())


class World:
    """A session with matrices whose product is known, and how each method is called where nothing is odd."""

    def __init__(self, comm):
        self.comm = comm
        self.session = um.Session(comm, backend="host", machine=um.Machine.uniform(comm.size), timeout_s=20)
        self.a, self.b, self.c = (self.session.empty_host((4, 4)) for _ in range(3))
        self.own = np.ones((4, 4))
        self.plan = self.session.plan(self.a, self.b, self.c)
        self.fill()

    def fill(self):
        self.session.barrier()
        if self.comm.rank == 0:
            self.a.array[...], self.b.array[...], self.c.array[...] = 1.0, 2.0, 3.0
        self.session.barrier()

    def usual(self, method):
        a, b, c = self.a, self.b, self.c
        return {
            "gemm": {"a": a, "b": b, "out": c, "alpha": 1.0, "beta": 1.0},
            "plan": {"a": a, "b": b, "c": c},
            "execute": {"alpha": 1.0, "beta": 1.0},
            "trace": {"alpha": 1.0, "beta": 1.0},
            "empty_host": {"shape": (2, 3)},
            "empty_device": {"shape": (2, 3), "rank": 0},
            "register": {"array": self.own if self.comm.rank == 0 else None, "root": 0},
            "download": {"matrix": a},
            "upload": {"source": a, "target": c},
            "release": {"matrix": None},
            "agree": {"value": 1, "what": "a value"},
        }[method]

    def call(self, method, given):
        made = getattr(self.plan if method in ("execute", "trace") else self.session, method)(**given)
        if method in ("gemm", "execute", "trace"):
            return self.wrong(self.c if method != "gemm" else made, given)
        if method == "plan":
            made.close()
        if method == "register" and self.comm.rank == 0:
            return "" if np.array_equal(np.asarray(made.array), np.asarray(given["array"])) else "another array"
        return ""

    def wrong(self, result, given):
        """Return what is wrong with a product; the operands are all alike, so transposing changes nothing."""
        alpha, beta = float(given.get("alpha", 1.0)), float(given.get("beta", 0.0))
        if any(name in given and given[name] is not usual for name, usual in (("a", self.a), ("b", self.b))):
            return ""  # a matrix in the place of another
        if not (abs(alpha) < 1e300 and abs(beta) < 1e300):
            return ""
        wanted = 8.0 * alpha + (3.0 * beta if beta else 0.0)
        near = shows(result, wanted, np.allclose, rtol=1e-12, atol=1e-300)
        return "" if near else f"{as_numpy(result)} for {wanted}"


def test_random_odd_arguments_are_errors_of_ours_on_every_rank_or_give_a_right_result(comm):
    world = World(comm)
    counts = {"worked": 0, "refused": 0}

    @hypothesis.settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate],
    )
    @hypothesis.given(calls())
    def check(call):
        method, odd, everywhere = call
        odd = {
            name: Closed() if isinstance(value, str) and value == "hostile" else value for name, value in odd.items()
        }
        given = {**world.usual(method), **(odd if everywhere or comm.rank == comm.size - 1 else {})}
        try:
            said = world.call(method, given)
        except um.UncutError as error:
            said = type(error).__name__
        except Exception as error:
            said = f"foreign {type(error).__name__}: {error}"
        everybody = allgather(comm, said)
        names = [*odd]
        collective_assert(comm, not said or (said.endswith("Error") and " " not in said), f"{method} {names}: {said}")
        collective_assert(comm, len({*map(bool, everybody)}) == 1, f"{method} {names}: {everybody}")
        counts["refused" if said else "worked"] += 1
        if not said:
            world.fill()

    check()
    world.session.close()
    collective_assert(comm, min(counts.values()) > EXAMPLES // 50, counts)
