"""A Matrix where numpy, an operator or a copy is given one: its array, or an error that says what to do."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import pickle
import random
import re
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest

from uncut_mpi.api.dealing import GivenArray, by_layout, by_starts
from uncut_mpi.api.matrix import HeldPart, LocalParts, Matrix, MatrixInfo
from uncut_mpi.api.request import Choices, Request, Scalars
from uncut_mpi.api.stored import shown_of, stored_of
from uncut_mpi.api.views import View, info_of
from uncut_mpi.api.wanted import new_results
from uncut_mpi.device.exported import from_dlpack
from uncut_mpi.errors import ParamError
from uncut_mpi.mappings import Stretch
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.form import PLAIN
from uncut_mpi.model.layout import Layout, LocalArray
from uncut_mpi.model.locations import Location
from uncut_mpi.model.parts import BoundLayout, Part
from uncut_mpi.planning.options import ScheduleOptions

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
    result.library = "torch"
    assert result.local.of.array is DATA
    assert result.local is result.local  # so that a plan knows it again
    assert result.local.of.strides == (3, 1)
    assert np.array_equal(result.T.local.of.array, DATA.T)
    assert len(shown) == 2
    assert result.array.of.array is DATA
    assert result.array is result.array
    assert np.asarray(result) is DATA


def test_what_jax_has_of_a_result_is_asked_for_anew_and_has_no_gaps(monkeypatch):
    arrays = types.SimpleNamespace(from_dlpack=lambda one: types.SimpleNamespace(of=one))
    monkeypatch.setitem(sys.modules, "jax.numpy", arrays)
    result = matrix(DATA)
    result.library = "jax.numpy"
    assert result.local.of.array is DATA
    assert result.local is not result.local  # which JAX takes for a constant
    part = result[:, 1:].local.of
    assert np.array_equal(part.array, DATA[:, 1:])
    assert part.strides == (2, 1)


def test_an_array_is_of_numpy_where_its_library_has_no_such_device(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.numpy", types.SimpleNamespace(from_dlpack=lambda one: one.nothing))
    result = matrix(DATA)
    result.library = "jax.numpy"
    assert result.local is result.array is DATA


def test_an_array_is_of_numpy_where_its_library_is_not_loaded(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    result = matrix(DATA)
    result.library = "torch"
    assert result.local is result.array is DATA


# -- operators, parts, copies --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("use", "advice"),
    [
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


def shown_by_a_session(one, followed=None):
    """Returns a matrix with a session that does what is local."""
    session = types.SimpleNamespace(
        _memory=lambda matrix, array: shown_of(array),
        _let_follow=lambda stream, memory: None if followed is None else followed.append(stream),
    )
    one.home = lambda: session
    return one


def test_a_matrix_shows_its_memory_by_dlpack_in_any_type():
    followed = []
    for dtype in (DType.f64, DType.bf16, DType.c64):
        held = DATA.astype(dtype.numpy)
        one = shown_by_a_session(matrix(held), followed)
        one.info = dataclasses.replace(one.info, dtype=dtype)
        seen = from_dlpack(one)
        assert (seen.address, seen.shape, seen.dtype) == (held.ctypes.data, (2, 3), dtype.numpy)
        assert seen.strides == held.strides
    assert np.shares_memory(np.from_dlpack(shown_by_a_session(matrix())), DATA)
    one = shown_by_a_session(matrix(), followed)
    one.__dlpack__(stream=5)
    assert followed == [None, None, None, 5]


def test_a_matrix_is_shown_without_a_copy_or_not_at_all():
    one = shown_by_a_session(matrix())
    for words in ({"copy": True}, {"dl_device": (2, 0)}):
        with pytest.raises(BufferError, match="without a copy"):
            one.__dlpack__(**words)
    one.__dlpack__(copy=False, dl_device=(1, 0), max_version=(1, 0))
    with pytest.raises(ParamError, match="released"):
        np.from_dlpack(matrix())
    one.info = dataclasses.replace(one.info, dealt=None)
    one._local = LocalParts((), (DATA, DATA), {}, "host", np.empty)
    with pytest.raises(ParamError, match="2 arrays on this rank"):
        np.from_dlpack(one)


def test_a_matrix_that_this_rank_sees_and_has_nothing_of_is_shown_as_a_whole():
    one = shown_by_a_session(matrix())
    one._local = LocalParts((((0, 0), (0, 3)),), (), {}, "shared", lambda *shape: np.empty(shape))
    assert np.shares_memory(np.from_dlpack(one), DATA)
    one._array = None
    assert np.from_dlpack(one).shape == (0, 3)


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


# -- what every rank knows of a view, and how it is dealt ------------------------------------------


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
                Stretch(name, start, size, start)
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
                whose, number, start = view.origin(at)
                assert whose == 7
                of, part = matrix.parts[number], held.part.transposed if view.view.turned else held.part
                down, along = part.rows[0] + top - of.part.rows[0], part.cols[0] + left - of.part.cols[0]
                first = down + along * of.part.ld if of.part.order == "F" else along + down * of.part.ld
                assert (start, held.offset_bytes, part.ld) == (first * item, 1000 + first * item, of.part.ld)
                ends = np.array([(one.offset, one.offset + one.nbytes) for one in held.stretches]).ravel().tolist()
                nbytes = ((part.stored_shape[1] - 1) * part.ld + part.stored_shape[0]) * item
                assert (ends[0], ends[-1], ends[1:-1:2]) == (0, nbytes, ends[2:-1:2])
                assert all(one.start - one.offset == start for one in held.stretches)


# -- what ranks give, put together -----------------------------------------------------------------


F64 = DType.f64


def given(array, rank, row=0, col=0):
    stored = stored_of(array.shape, array.strides, array.itemsize)
    part = Part((row, row + stored.rows), (col, col + stored.cols), Location.host(rank), stored.order, stored.ld)
    return GivenArray(HeldPart(part, rank, ()), DType.parse(array.dtype), array.flags.writeable)


def addresses(part):
    """Where each element of a part lies, counted from the first one."""
    rows, cols = part.shape
    down, right = (1, part.ld) if part.order == "F" else (part.ld, 1)
    return [[down * row + right * col for col in range(cols)] for row in range(rows)]


@pytest.mark.parametrize("order", ["F", "C"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1)])
@pytest.mark.parametrize("pad", [0, 2])
def test_a_single_row_or_column_is_stored_as_the_others_wherever_its_memory_can_be_read_so(order, shape, pad):
    vector = np.zeros((shape[0] + pad, shape[1] + pad), order=order)[: shape[0], : shape[1]]
    other = np.zeros((6, 6), order="C")[:5, :6] if shape[1] == 6 else np.zeros((shape[0], 5), order="C")
    first = given(vector, 0)
    whole = (shape[0] + other.shape[0], 6) if shape[1] == 6 else (shape[0], shape[1] + other.shape[1])
    second = given(other, 1, shape[0], 0) if shape[1] == 6 else given(other, 1, 0, shape[1])
    dealt = by_starts([[first], [second]], whole, None)
    part = dealt.layout.parts[0]
    assert dealt.parts[0].part == part
    assert addresses(part) == addresses(first.held.part)
    gaps = {abs(stride) for stride, extent in zip(vector.strides, shape, strict=True) if extent > 1} - {8}
    assert part.order == (first.held.part.order if gaps else dealt.layout.parts[1].order)


def test_parts_of_two_orders_stay_as_they_are():
    by_rows, by_columns = given(np.zeros((3, 4)), 0), given(np.zeros((3, 4), order="F"), 1)
    dealt = by_layout([by_rows, by_columns], Layout.rows(), None, None)
    assert [part.order for part in dealt.layout.parts] == ["C", "F"]


def test_a_matrix_without_elements_lies_where_the_first_array_does():
    dealt = by_layout([None, given(np.zeros((0, 4)), 1)], Layout.rows(), None, None)
    assert dealt.layout.shape == (0, 4)
    assert dealt.layout.parts == ()
    assert [(held.holder, held.part.location, held.part.shape) for held in dealt.parts] == [
        (1, Location.host(1), (0, 4))
    ]
    assert by_layout([None, None], Layout.cols(), (3, 0), F64).dealt == Layout.cols([0, 0])


def test_a_matrix_is_writeable_if_every_part_is():
    fixed = np.zeros((2, 2))
    fixed.flags.writeable = False
    assert by_layout([given(np.zeros((2, 2)), 0)], Layout.rows(), None, None).read_only == ()
    assert by_layout([given(np.zeros((2, 2)), 0), given(fixed, 1)], Layout.rows(), None, None).read_only == (1,)


def test_what_does_not_add_up_says_what_each_rank_has():
    three = [given(np.zeros((rows, 4)), rank) for rank, rows in enumerate((2, 3, 2))]
    with pytest.raises(ParamError, match=r"matrix of 6×4 and layout rows: 3×4 on rank 1, 2×4 on the others; pass"):
        by_layout(three, Layout.rows(), (6, 4), None)
    with pytest.raises(ParamError, match=r"3×4 instead of 2×4 on rank 1"):
        by_layout(three, Layout.rows([2, 2, 2]), None, None)
    with pytest.raises(ParamError, match=r"2×4 instead of nothing on rank 2"):
        by_layout(three, Layout.rows(ranks=[0, 1]), None, None)


def operand(layout, shape, memory="device", in_parts=True):
    info, at = SimpleNamespace(in_parts=in_parts), Location.host() if memory == "shared" and not in_parts else None
    return SimpleNamespace(
        home=None, layout=layout, shape=shape, memory=memory, dtype=F64, info=info, whole=SimpleNamespace(location=at)
    )


def test_a_result_in_shared_memory_follows_only_a_matrix_that_lies_there_as_a_whole():
    b = operand(Layout.whole(0), (4, 5), "host", False)
    (one,) = new_results(operand(Layout.rows([1, 2]), (3, 4), "shared", False), b, "N", "N", None, 2)
    assert (one.layout, one.memory, one.shape) == (Layout.rows([1, 2]), "shared", (3, 5))
    (mixed,) = new_results(operand(Layout.rows([1, 2]), (3, 4), "shared"), b, "N", "N", None, 2)
    assert (mixed.layout, mixed.memory) == (Layout.rows([1, 2]), "host")


def test_a_result_follows_no_blocks_and_no_single_parts():
    blocks = operand(Layout.blocks([3], [4, 0]), (3, 4))
    for first in (blocks, operand(None, (3, 4))):
        (made,) = new_results(first, operand(Layout.rows([2, 2]), (4, 5), "host"), "N", "N", None, 2)
        assert (made.layout, made.memory) == (Layout.rows(), "device")


# -- what callers ask of a product: converted, told apart, and said in words -----------------------


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
    assert (made, type(made.trans_a)) == (("T", "N", ScheduleOptions(), "", PLAIN, None), str)
    for wrong in ("R", "n", b"N", None, 1, [], np.array(["N", "T"])):
        with pytest.raises(ParamError, match="trans_b = "):
            Choices.of("N", wrong, None)
    with pytest.raises(ParamError, match="options is a dict"):
        Choices.of("N", "N", {})


def test_a_request_tells_its_arguments_by_the_callers_names():
    matrices = tuple(SimpleNamespace(info=SimpleNamespace(number=number, view=None)) for number in (4, 2, 9))
    asked = Request("execute", matrices, Scalars(2.0, 0.5), Choices.of("N", "T", ScheduleOptions()))
    said = {name: value for name, value in asked.asked().items() if name not in "abc"}
    wanted = {"alpha": 2.0, "beta": 0.5, "trans_a": "N", "trans_b": "T", "options": ScheduleOptions(), "triangle": ""}
    assert said == wanted
    for call, names in (("execute", "a b c"), ("gemm", "a b out"), ("redistribute", "matrix out")):
        assert [*asked._replace(call=call).asked()][: len(names.split())] == names.split()
