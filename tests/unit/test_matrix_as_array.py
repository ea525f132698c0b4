"""A Matrix where numpy, an operator or a copy is given one: its array, or an error that says what to do."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import re
import sys
import types

import numpy as np
import pytest

from uncut_mpi.api.matrix import HeldPart, LocalParts, Matrix, MatrixInfo
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import Location
from uncut_mpi.model.parts import BoundLayout

DATA = np.arange(6.0).reshape(2, 3)


def matrix(array=DATA, location=None):
    layout = BoundLayout.whole((2, 3), location or Location.host(), "C")
    info = MatrixInfo(4, layout, DType.f64, (HeldPart(layout.parts[0], 0, ()),), Layout.whole(0))
    return Matrix(info, array=array, local=LocalParts((((0, 2), (0, 3)),), (array,), {}, "shared", np.empty))


# -- numpy ---------------------------------------------------------------------------------------


def test_numpy_takes_a_matrix_for_its_array():
    held = DATA.copy()
    found = np.asarray(matrix(held))
    assert found.base is held or found is held
    assert np.shares_memory(found, held)
    assert np.allclose(matrix(), DATA)
    assert np.array_equal(matrix(), DATA)
    assert np.linalg.norm(matrix()) == np.linalg.norm(DATA)
    np.testing.assert_array_equal(matrix(), DATA)


def test_a_copy_or_another_type_is_made_where_asked_for():
    held = DATA.copy()
    assert not np.shares_memory(np.array(matrix(held)), held)
    assert np.asarray(matrix(held), np.float32).dtype == np.float32
    assert matrix(held).__array__() is held
    assert matrix(held).__array__(np.float64, copy=None) is held
    assert matrix(held).__array__(copy=False) is held
    assert not np.shares_memory(matrix(held).__array__(copy=True), held)
    assert matrix(held).__array__("f4").dtype == np.float32
    with pytest.raises(ValueError, match="float32"):
        matrix(held).__array__(np.float32, copy=False)


def test_matrices_are_stacked_and_mixed_with_arrays():
    assert np.array([matrix(), matrix()]).shape == (2, 2, 3)
    assert np.array_equal(np.add(matrix(), 1), DATA + 1)
    assert np.array_equal(DATA + matrix(), 2 * DATA)
    assert np.array_equal(matrix() + DATA, 2 * DATA)
    assert (matrix() == DATA).all()
    assert np.array_equal(matrix() @ DATA.T, DATA @ DATA.T)


@pytest.mark.parametrize(
    "how", [np.asarray, np.array, lambda x: np.allclose(x, DATA), lambda x: np.array([x, x]), np.sin]
)
def test_a_matrix_that_this_rank_has_not_is_an_error_with_the_mend(how):
    with pytest.raises(ParamError, match=r"host memory of rank 1.*session\.download"):
        how(matrix(None, Location.host(1)))
    on_gpu = matrix(types.SimpleNamespace(shape=(2, 3)), Location.device(1))
    with pytest.raises(ParamError, match=r"GPU.*\.array.*session\.download"):
        how(on_gpu)
    gone = matrix()
    gone.closed = True
    with pytest.raises(ParamError, match="was released"):
        how(gone)


@pytest.mark.parametrize("where", [Location.host(1), Location.device(1), "file"])
def test_the_array_of_a_matrix_that_is_not_here_is_the_error_that_numpy_gets(where):
    one = matrix(None, None if where == "file" else where)
    one.info = dataclasses.replace(one.info, file="a.npy" if where == "file" else "")
    for seen in (one, one.T):
        with pytest.raises(ParamError) as of_numpy:
            np.asarray(seen)
        with pytest.raises(ParamError, match=re.escape(str(of_numpy.value))):
            _ = seen.array


def test_the_array_of_a_conjugated_view_is_a_copy_as_numpy_gets_it():
    whole = matrix(DATA * (1 + 2j))
    whole.info = dataclasses.replace(whole.info, dtype=DType.c128)
    assert np.array_equal(whole.H.array, (DATA * (1 - 2j)).T)


def test_what_this_rank_has_of_a_result_of_tensors_is_a_tensor(monkeypatch):
    shown = []
    tensors = types.SimpleNamespace(from_dlpack=lambda one: shown.append(one) or types.SimpleNamespace(of=one))
    monkeypatch.setitem(sys.modules, "torch", tensors)
    result = matrix(DATA)
    assert result.local is DATA
    result.of_torch = True
    assert result.local.of.array is DATA
    assert result.local is result.local  # so that a plan knows it again
    assert result.local.of.strides == (3, 1)
    assert np.array_equal(result.T.local.of.array, DATA.T)
    assert len(shown) == 2
    assert isinstance(result.array, np.ndarray)


# -- operators, parts, copies --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "advice"),
    [
        (lambda m: m @ m, r"session\.gemm"),
        (lambda m: m + 1, r"\.array"),
        (lambda m: 2.0 * m, r"\.array"),
        (lambda m: m - m, r"\.array"),
        (lambda m: -m, r"\.array"),
        (lambda m: m[0, 0], r"matrix\[2:5, :\].*\.local or \.array"),
        (lambda m: m[0], r"sliced by rows and columns"),
        (lambda m: m[...], r"sliced by rows and columns"),
        (lambda m: m[:, :, :], r"sliced by rows and columns"),
        (lambda m: m[[0, 1]], r"sliced by rows and columns"),
        (lambda m: m.__setitem__(0, 1.0), r"\.array"),
        (list, r"\.array"),
        (lambda m: 3 in m, r"\.array"),
    ],
)
def test_what_a_matrix_cannot_do_is_a_type_error_with_the_mend(use, advice):
    with pytest.raises(TypeError, match=advice):
        use(matrix())


def test_a_matrix_does_not_pass_for_an_array():
    assert not hasattr(matrix(), "__dlpack__")


def test_what_is_listed_is_there():
    found = matrix()
    assert not [name for name in dir(found) if not hasattr(found, name)]
    assert not [name for name in dir(Matrix) if not hasattr(found, name)]
    assert {"array", "shape", "dtype", "order", "location"} <= set(dir(found))
    with pytest.raises(AttributeError, match="a Matrix has no attribute 'elements'"):
        getattr(found, "elements")  # noqa: B009 - checkers know that there is none


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_matrix_is_neither_copied_nor_sent(how):
    with pytest.raises(TypeError, match=r"session\.download"):
        how(matrix())


def test_matrices_are_told_apart_by_what_they_are_and_not_by_their_elements():
    first, second = matrix(), matrix()
    assert first == first
    assert first != second
    assert len({first, second}) == 2
    assert first
    with pytest.raises(TypeError):
        float(first)
    with pytest.raises(TypeError):
        len(first)
