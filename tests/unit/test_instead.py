"""What is tried first and is not there: one sentence on what to do, from every entry alike."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import pickle
import traceback
from types import SimpleNamespace

import numpy as np
import pytest

import uncut_mpi as um
from uncut_mpi.api.grips import take
from uncut_mpi.api.stored import stored_of
from uncut_mpi.api.wanted import shape_of
from uncut_mpi.instead import BATCH

CLASSES = um.Session, um.Matrix, um.Batch, um.GemmPlan


def methods():
    """Every public method with arguments of its own, of all that users hold."""
    for cls in CLASSES:
        for name, method in inspect.getmembers(cls, inspect.isfunction):
            if (
                not name.startswith("_")
                and name not in ("own_part", "operand")
                and len(inspect.signature(method).parameters) > 1
            ):
                yield pytest.param(method, id=f"{cls.__name__}.{name}")
    yield pytest.param(um.Session, id="Session")
    yield pytest.param(um.matmul, id="matmul")


def makers():
    """Every public value class that callers make, and its class methods that make one."""
    for name in dir(um):
        cls = getattr(um, name)
        if dataclasses.is_dataclass(cls) and not cls.__module__.startswith("uncut_mpi.api"):
            yield pytest.param(cls, id=name)
            for call, method in inspect.getmembers(cls, inspect.ismethod):
                if not call.startswith("_"):
                    yield pytest.param(method, id=f"{name}.{call}")


@pytest.mark.parametrize("method", [*methods(), *makers()])
def test_an_argument_that_is_not_there_is_told_with_those_that_are(method):
    named = inspect.signature(method).parameters
    known = [name for name, one in named.items() if name != "self" and one.kind != one.VAR_KEYWORD]
    with pytest.raises(TypeError) as found:
        method(*([None] if "self" in named else []), **{known[-1] + "s": 1})
    name = method.__name__
    assert str(found.value).startswith(f"{name}() has no argument '{known[-1]}s': did you mean '{known[-1]}'?")
    assert str(found.value).endswith(f"(it takes {', '.join(known)})")
    assert found.value.__cause__ is found.value.__context__ is None


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: um.Session.gemm(None, None, None, asynchronous=True), "wait=False"),
        (lambda: um.GemmPlan.execute(None, blocking=False), "wait=False"),
        (lambda: um.Session.gemm(None, None, None, c=None), "did you mean 'out'"),
        (lambda: um.Session.gemm(None, None, None, transA="T"), "did you mean 'trans_a'"),
        (lambda: um.Session.plan(None, None, None, out=None), "did you mean 'c'"),
        (lambda: um.Session.gemm(None, None, None, epilogue="relu"), "no epilogue: apply"),
        (lambda: um.Session.gemm(None, None, None, batch=4), BATCH),
        (lambda: um.Session.gemm(None), r"^gemm\(\) missing 2 required positional arguments: 'a' and 'b'$"),
        (lambda: um.matmul(None, None), "matmul() missing 1 required positional argument: 'b_local': the communicator"),
        (lambda: um.Session(), r"^Session\(\) missing 1 required positional argument: 'comm'$"),
    ],
)  # fmt: skip
def test_a_call_that_others_would_take_says_what_to_do(call, words):
    with pytest.raises(
        TypeError, match=words if words.startswith("^") else words.replace("(", r"\(").replace(")", r"\)")
    ):
        call()


def test_values_that_check_their_arguments_are_replaced_and_sent_as_before():
    options = um.ScheduleOptions(grid=(1, 2))
    assert pickle.loads(pickle.dumps(options)) == copy.deepcopy(options) == options
    assert dataclasses.replace(options, grid=(2, 1)).grid == (2, 1)
    with pytest.raises(TypeError, match="did you mean 'grid'"):
        dataclasses.replace(options, grids=(2, 1))
    with pytest.raises(TypeError, match=r"^rows\(\) takes only counts by position: name the others, .* one sequence"):
        um.Layout.rows(4, 5)


@pytest.mark.parametrize("owner", [*(cls.__new__(cls) for cls in CLASSES), um])
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ssyrk", "session.syrk(a, c)"),
        ("zherk", "session.herk(a, c)"),
        ("cher2k", "session.her2k(a, b, c)"),
        ("dgemmt", "b.T"),
        ("dsyr2k", "session.syr2k(a, b, c)"),
        ("dtrsm", "overwrite B"),
        ("dgemm", "call session.gemm"),
        ("pdgemm", "call session.gemm"),
        ("pdsyrk", "session.syrk(a, c)"),
        ("bmm", BATCH),
        ("gemm_batched", BATCH),
        ("matmull", "has no attribute 'matmull'"),
    ],
)
def test_a_call_of_another_library_says_which_is_here(owner, name, words):
    with pytest.raises(AttributeError) as found:
        getattr(owner, name)
    assert words in str(found.value)
    assert repr(name) in str(found.value)


@pytest.mark.parametrize(
    ("owner", "name", "like"),
    [(um, "sessions", "Session"), (um.Session, "distributed", "distribute"), (um.Session, "multiply", "gemm")],
)
def test_an_attribute_that_is_not_there_is_told_with_one_like_it_once(owner, name, like):
    with pytest.raises(AttributeError, match=f"{name}': did you mean '{like}'") as found:
        getattr(owner if owner is um else owner.__new__(owner), name)
    assert "".join(traceback.format_exception(found.value)).lower().count("did you mean") == 1


@pytest.mark.parametrize(
    "given",
    [
        lambda: stored_of((2, 3, 4), (96, 32, 8), 8),
        lambda: take([np.ones((2, 2))] * 3, SimpleNamespace(owns=lambda given: False)),
        lambda: shape_of((2, 3, 4)),
    ],
)
def test_a_batch_is_one_sentence(given):
    with pytest.raises(um.ParamError) as found:
        given()
    assert str(found.value).endswith(BATCH)


@pytest.mark.parametrize(
    ("number", "words"), [(0, "0 dimensions.*reshape"), (1, r"1 dimension, .*x\.reshape\(-1, 1\)")]
)
def test_a_number_and_a_vector_are_told_how_to_be_a_matrix(number, words):
    with pytest.raises(um.ParamError, match=words):
        stored_of((3,) * number, (8,) * number, 8)
