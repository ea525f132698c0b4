"""What callers pass: whatever is a number to numpy is one here; anything else is a ParamError on every rank."""

from __future__ import annotations

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert, outcome
from tests.helpers.hostile import Closed

pytestmark = pytest.mark.mpi(min_size=1)

TWOS = {"int": 2, "int64": np.int64(2), "uint8": np.uint8(2), "float": 2.0, "array": np.array(2)}
NO_NUMBERS = {
    "text": "1",
    "bytes": b"1",
    "none": None,
    "complex of real matrices": 1j,
    "numpy complex of real matrices": np.complex128(1),
    "huge": 10**400,
    "list": [1.0],
    "array": np.ones(3),
    "date": np.datetime64("2020-01-01"),
    "object": object(),
}


@pytest.fixture
def filled(session):
    """A 4×4 matrix of ones on every rank's view."""
    matrix = session.empty_host((4, 4))
    if session.rank == 0:
        matrix.array[...] = 1.0
    session.barrier()
    yield matrix
    session.release(matrix)


@pytest.mark.parametrize("name", TWOS)
def test_whole_numbers_are_scalars_and_types_of_one_value_are_one_value(comm, session, filled, name):
    # Ranks may have the same number in other types.
    c = session.gemm(filled, filled, alpha=TWOS[name] if session.rank == 0 else 2.0, beta=np.float32(0))
    collective_assert(comm, (c.array == 8.0).all(), c.array)


@pytest.mark.parametrize("name", NO_NUMBERS)
def test_what_is_no_number_is_a_parameter_error_on_every_rank(comm, session, filled, name):
    value = NO_NUMBERS[name]
    plan = session.plan(filled, filled, session.empty_host((4, 4)))
    calls = {
        "alpha": lambda: session.gemm(filled, filled, alpha=value),
        "beta": lambda: session.gemm(filled, filled, beta=value),
        "execute": lambda: plan.execute(value),
        "trace": lambda: plan.trace(1.0, value),
    }
    said = {which: outcome(call) for which, call in calls.items()}
    plan.close()
    collective_assert(comm, all(one.startswith("ParamError") for one in said.values()), said)
    collective_assert(comm, len({str(one) for one in allgather(comm, said)}) == 1, said)


@pytest.mark.parametrize("dtype", ["f32", "tf32", "f16", "bf16"])
@pytest.mark.parametrize("value", [1e39, -1e300, 1e-46, -1e-300])
def test_a_scalar_that_the_type_of_sums_cannot_hold_is_an_error_on_every_rank(comm, session, dtype, value):
    a = session.empty_host((4, 4), dtype)
    a.array[...] = 1
    session.barrier()
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
        a = session.empty_host((np.int32(3), np.uint8(3)))
        a.array[...] = 1.0
        session.barrier()
        c = session.gemm(a, a, trans_a=np.str_("N") if comm.rank == 0 else "N")
        good = (c.array == 3.0).all()
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
