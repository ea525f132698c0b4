"""What `register` takes, without a copy, and what it refuses, with the mend, on every rank."""

from __future__ import annotations

import gc
import sys
import types
import weakref

import ml_dtypes
import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers import foreign
from tests.helpers.collective import collective_assert, expect
from tests.helpers.foreign import ArrayInterface, Tensor, Units
from tests.helpers.products import array_of, as_numpy, shared_of, shows
from uncut_mpi.device import exported

FULL = np.ma.masked_array(np.eye(3), mask=np.eye(3, dtype=bool))


def data(dtype="f8"):
    return np.arange(12.0).reshape(3, 4).astype(dtype)


def read_only(array):
    array.flags.writeable = False
    return array


def masked(mask):
    return np.ma.masked_array(np.arange(12.0).reshape(3, 4), mask=mask)


class Mapped(np.memmap):
    """A caller's kind of mapped file."""


REFUSED = {
    "masked": (lambda: FULL, ["3 masked elements", "filled"]),
    "hard mask": (lambda: np.ma.masked_array(data(), mask=data() == 0, hard_mask=True), ["1 masked element", "filled"]),
    "units": (lambda: np.eye(3).view(Units), ["Units", "numpy.asarray(x)"]),
    "record array": (lambda: np.eye(3).view(np.recarray), ["recarray", "numpy.asarray(x)"]),
    "characters": (lambda: np.char.array([["a", "b"]]), ["chararray", "numpy.asarray(x)"]),
    "misaligned": (foreign.misaligned, ["multiple of 8", "copy"]),
    "byte-swapped": (lambda: data(">f8"), ["byte order", "astype"]),
    "list": (lambda: [[1.0, 2.0], [3.0, 4.0]], ["a list was given", "numpy.asarray(x)"]),
    "only __array__": (foreign.OnlyArray, ["OnlyArray", "numpy.asarray(x)"]),
    "sparse": (foreign.Sparse, ["Sparse", "toarray()"]),
    "None": (lambda: None, ["None", "the rank that has the array"]),
    "number": (lambda: 3.0, ["a float was given"]),
    "numpy number": (lambda: np.float64(3), ["a float64 was given"]),
    "vector": (lambda: np.zeros(3), ["1 dimension, ", "reshape"]),
    "hypercube": (lambda: np.zeros((3, 3, 3, 3)), ["4 dimensions", "gemm_batch"]),
    "cube of lines apart": (lambda: np.zeros((3, 3, 6))[:, :, ::2], ["no batch", "x.copy()"]),
    "cube that lies in itself": (lambda: np.broadcast_to(np.zeros((3, 3)), (3, 3, 3)), ["no batch", "x.copy()"]),
    "int": (lambda: data("i8"), ["int64", "use one of"]),
    "bool": (lambda: data("?"), ["bool", "use one of"]),
    "long complex": (lambda: data("G"), ["complex256", "use one of"]),
    "object": (lambda: data(object), ["object", "use one of"]),
    "long double": (lambda: data("g"), ["float128", "use one of"]),
    "structured": (lambda: np.zeros((3, 3), "f8,i4"), ["use one of"]),
    "broadcast": (lambda: np.broadcast_to(np.zeros((1, 6)), (6, 6)), ["contiguous along neither"]),
    "backwards": (lambda: data()[::-1], ["contiguous along neither"]),
    "overlapping lines": (
        lambda: np.lib.stride_tricks.as_strided(np.zeros(40), (6, 6), (8, 32)),
        ["contiguous along neither"],
    ),
    "interface with mask": (lambda: ArrayInterface(data(), mask=ArrayInterface(data("?"))), ["mask"]),
    "interface of a copy": (lambda: ArrayInterface(data(), data=data().tobytes()), ["copy"]),
    "interface of nothing": (lambda: ArrayInterface(data(), typestr="nonsense"), ["ArrayInterface"]),
    "interface of int": (lambda: ArrayInterface(data("i2")), ["int16", "use one of"]),
    "cuda interface": (lambda: foreign.CudaInterface(data()), ["CUDA device", "host backend"]),
    "tensor elsewhere": (lambda: Tensor(data(), device=(2, 1)), ["CUDA device 1", "host backend"]),
    "tensor on metal": (lambda: Tensor(data(), device=(8, 0)), ["Metal"]),
    "tensor on what is new": (lambda: Tensor(data(), device=(77, 0)), ["type 77"]),
    "tensor of int": (lambda: Tensor(data("i8")), ["int64", "use one of"]),
    "tensor of complex halves": (lambda: Tensor(data("f4"), (5, 32)), ["code 5", "32 bits"]),
    "tensor of another float8": (lambda: Tensor(data("u1"), (11, 8)), ["code 11", "8 bits"]),
    "tensor of a copy": (lambda: Tensor(data(), flags=2), ["copy"]),
    "tensor of all ranks": (lambda: foreign.of_torch("DTensor")(data()), ["session.from_dtensor"]),
    "tensor with gradient": (lambda: Tensor(data(), requires_grad=True), ["gradient", "detach()"]),
    "conjugated tensor": (lambda: Tensor(data(), is_conj=lambda: True), ["resolve_conj()"]),
    "negated tensor": (lambda: Tensor(data(), is_neg=lambda: True), ["resolve_neg()"]),
    "vector tensor": (lambda: Tensor(np.zeros(3)), ["1 dimension, "]),
    "backward tensor": (lambda: Tensor(data()[:, ::-1]), ["contiguous along neither"]),
    "misaligned tensor": (lambda: Tensor(foreign.misaligned()), ["multiple of 8"]),
    "tensor that cannot": (lambda: foreign.Broken(BufferError("sharded over 2 devices")), ["sharded over 2 devices"]),
    "tensor with a fault": (lambda: foreign.Broken(KeyError("no")), ["Broken", "KeyError"]),
    "tensor of old words": (lambda: foreign.Broken(TypeError("no such word")), ["no such word"]),
    "type": (lambda: np.ndarray, ["a type cannot show its memory"]),
    "function": (lambda: np.zeros, ["was given", "numpy.asarray(x)"]),
    "memoryview": (lambda: memoryview(data()), ["memoryview", "numpy.asarray(x)"]),
    "masked constant": (lambda: np.ma.masked, ["1 masked element"]),
    "kind of file": (lambda: np.memmap.__new__(Mapped, "/dev/zero", "f8", "c", 0, (3, 3)), ["Mapped", "numpy.asarray"]),
    "masked tensor": (lambda: foreign.of_torch("MaskedTensor")(data()), ["MaskedTensor", "plain tensor"]),
    "consumed tensor": (lambda: foreign.Consumed(data()), ["Consumed", "capsule"]),
    "tensor of negative extent": (lambda: foreign.stretched(data(), rows=-3), ["Tensor"]),
    "tensor of nowhere": (lambda: foreign.stretched(data(), data=0), ["Tensor shows no memory"]),
    "tensor beyond its memory": (lambda: foreign.stretched(data(), rows=1 << 40), ["mapped"]),
    "array beyond its memory": (
        lambda: np.lib.stride_tricks.as_strided(np.zeros(1), (1 << 20, 1 << 20), (8 << 20, 8)),
        ["cannot be read", "mapped"],
    ),
}  # fmt: skip

TAKEN = {
    "array": data,
    "half of one": lambda: data()[:, :2],
    "unmasked": lambda: masked(False),
    "unmasked one by one": lambda: masked(np.zeros((3, 4), bool)),
    "matrix": lambda: np.matrix([[1.0, 2.0], [3.0, 4.0]]),
    "bfloat16": lambda: data(ml_dtypes.bfloat16),
    "native byte order": lambda: data("=f8"),
    "interface": lambda: ArrayInterface(data()),
    "interface of columns": lambda: ArrayInterface(data().T),
    "tensor": lambda: Tensor(data()),
    "old tensor": lambda: Tensor(data("f4"), versioned=False),
    "tensor of columns": lambda: Tensor(data().T),
    "tensor of a part": lambda: Tensor(data()[1:, :2]),
    "tensor without strides": lambda: Tensor(data(), versioned=False, strides=False),
    "tensor behind something": lambda: Tensor(data()[1:], byte_offset=32),
    "half tensor": lambda: Tensor(data("f2")),
    "parameter": lambda: foreign.of_torch("Parameter")(data()),
    "bfloat16 tensor": lambda: Tensor(data(ml_dtypes.bfloat16), foreign.BFLOAT16),
    "pinned tensor": lambda: Tensor(data(), device=(3, 0)),
    "empty tensor": lambda: Tensor(np.zeros((0, 4))),
    "one column": lambda: Tensor(data()[:, :1]),
}


def behind(given):
    """The numpy array whose memory it is."""
    return np.asarray(getattr(given, "array", given))


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*chararray")
def test_what_is_no_matrix_is_refused_on_all_ranks_with_what_to_do(comm, session, name):
    make, parts = REFUSED[name]
    given = make() if comm.rank == 0 else None
    expect(comm, um.ParamError, parts, lambda: session.register(given, root=0))


def test_a_file_cut_short_since_it_was_mapped_is_refused_and_not_touched(comm, session, tmp_path):
    given = foreign.cut_file(tmp_path)
    expect(comm, um.ParamError, ["shorter"], lambda: session.register(given, root=0))


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_what_shows_its_memory_is_registered_without_a_copy(comm, session, name):
    root = comm.size - 1
    given = TAKEN[name]() if comm.rank == root else None
    matrix = session.register(given, root=root)
    good = True
    if comm.rank == root:
        there, array = behind(given), np.asarray(matrix)
        good = (
            matrix.shape == there.shape
            and array.dtype == there.dtype == matrix.dtype.numpy
            and (array.ctypes.data == there.ctypes.data or not there.size)
            and shows(matrix, there)
            and not matrix.info.read_only
        )
    collective_assert(comm, good, f"{matrix!r} {array_of(matrix)!r}")
    copy = session.download(matrix)
    wanted = behind(TAKEN[name]())
    collective_assert(comm, shows(copy, wanted), f"{as_numpy(copy)}")
    product = session.gemm(matrix, matrix, trans_b="T")
    wanted = wanted.astype("f8") @ wanted.T.astype("f8")
    close = shows(product, wanted, lambda one, other: np.allclose(one.astype("f8"), other, rtol=0.01))
    collective_assert(comm, close, f"{as_numpy(product)}")


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_a_result_is_written_to_the_memory_that_was_shown(comm, session, name):
    given = TAKEN[name]() if comm.rank == 0 else None
    c = session.register(given, root=0)
    a = shared_of(session, np.full((c.shape[0], 2), 2.0), c.dtype)
    b = shared_of(session, np.full((2, c.shape[1]), 3.0), c.dtype)
    session.gemm(a, b, c)
    good = comm.rank != 0 or bool((behind(given) == 12).all())
    collective_assert(comm, good, "the result is elsewhere")


READ_ONLY = {
    "array": lambda: read_only(data()),
    "tensor": lambda: Tensor(data(), flags=1),
    "interface": lambda: ArrayInterface(read_only(data())),
    "file": lambda: None,
    "closed pages": foreign.closed_pages,
    "tensor of closed pages": lambda: Tensor(foreign.closed_pages()),
    "unmasked": lambda: np.ma.masked_array(read_only(data())),
}


@pytest.mark.parametrize("name", READ_ONLY)
def test_memory_that_must_not_be_written_is_no_result(comm, session, name, tmp_path):
    given = READ_ONLY[name]()
    if name == "file":
        data().tofile(tmp_path / "data")
        given = np.memmap(tmp_path / "data", np.float64, "r", shape=(3, 4))
    matrix = session.register(given, root=0)
    wanted = behind(given).copy()
    product = session.gemm(matrix, matrix, trans_b="T")
    collective_assert(comm, shows(product, wanted @ wanted.T, np.allclose), f"{as_numpy(product)}")
    other = session.empty_host(matrix.shape)
    for call in (
        lambda: session.gemm(product, other, matrix),
        lambda: session.upload(other, matrix),
    ):
        expect(comm, um.ParamError, ["read-only"], call)


def test_what_was_registered_lives_as_long_as_the_matrix_and_its_array(comm, session):
    given = Tensor(data())
    gone = weakref.ref(given)
    matrix = session.register(given, root=0)
    del given
    gc.collect()
    alive = comm.rank != 0 or gone() is not None
    collective_assert(comm, alive, "it went before the matrix")
    array = array_of(matrix)
    session.release(matrix)
    matrix = None
    gc.collect()
    alive = comm.rank != 0 or (gone() is not None and np.array_equal(array, data()))
    collective_assert(comm, alive, "it went before the array")
    array = None
    gc.collect()
    collective_assert(comm, gone() is None, "it is kept for ever")


def test_a_matrix_is_not_registered_again(comm, session):
    matrix = session.empty_host((3, 3))
    expect(comm, um.ParamError, ["Matrix", "as it is"], lambda: session.register(matrix, root=0))


def test_a_tensor_over_a_shared_matrix_stays_shared(comm, session):
    whole = shared_of(session, np.arange(48.0).reshape(6, 8))
    part = session.register(Tensor(whole.array[2:, :4]) if comm.rank == 0 else None, root=0)
    good = str(part.location) == "h" and shows(part, np.arange(48.0).reshape(6, 8)[2:, :4])
    collective_assert(comm, good, f"{part!r} {as_numpy(part)}")


def test_an_exporter_is_asked_for_no_copy_and_for_no_stream_in_host_memory(comm, session):
    given = Tensor(data())
    session.register(given, root=0)
    good = comm.rank != 0 or given.asked == [{"stream": None, "max_version": (1, 0), "copy": False}]
    collective_assert(comm, good, f"{given.asked}")


# -- arrays out as they came in ------------------------------------------------------------------


@pytest.fixture
def shelf(monkeypatch):
    """A library whose arrays are those of the tests: it has made all that are out of the session's memory."""
    monkeypatch.setitem(exported._LIBRARIES, "tests", "shelf")
    makes = types.SimpleNamespace(from_dlpack=lambda one: Tensor(exported.from_dlpack(one).as_numpy(), versioned=False))
    monkeypatch.setitem(sys.modules, "shelf", makes)


def rows(comm, array):
    return np.array_split(array, comm.size)[comm.rank].copy()


def are_of(kind, wanted, *arrays):
    """Whether arrays are of a kind, and have the numbers."""
    return all(type(one) is kind and np.array_equal(behind(one), wanted) for one in arrays)


def test_results_are_of_the_library_that_a_came_in_or_b(comm, session, shelf):
    a_MK, b_KN = data(), data().T.copy()
    by_rows, wanted = um.Layout.rows(), rows(comm, a_MK @ b_KN)
    for first, second, kind in ((Tensor, Tensor, Tensor), (Tensor, np.array, Tensor), (np.array, Tensor, Tensor),
                                (np.array, np.array, np.ndarray)):  # fmt: skip
        a = session.distribute(first(rows(comm, a_MK)), by_rows)
        b = session.distribute(second(rows(comm, b_KN)), by_rows)
        c = session.gemm(a, b)
        found = (
            c.local,
            session.matmul(a, b).local,
            um.matmul(comm, a.local, b.local),
            session.redistribute(c, by_rows).local,
        )
        collective_assert(comm, are_of(kind, wanted, *found), f"{first}, {second}: {found}")
        collective_assert(comm, are_of(kind, wanted[:, 1:], c[:, 1:].local), f"{c[:, 1:].local}")
        every = session.download(c)
        seen = array_of(every)
        good = seen is None or (are_of(kind, a_MK @ b_KN, seen) and type(np.asarray(every)) is np.ndarray)
        collective_assert(comm, good, f"{seen}")
        collective_assert(comm, type(session.gather(c)) is np.ndarray or comm.rank > 0, "gathered")


def test_ranks_that_gave_nothing_have_the_library_of_who_did(comm, session, shelf):
    given = Tensor(data()) if comm.rank == 0 else None
    a, dealt = session.register(given, root=0), session.scatter(given, um.Layout.rows())
    collective_assert(comm, are_of(Tensor, rows(comm, data()), dealt.local), f"{dealt.local}")
    seen = array_of(session.gemm(a, a.T))
    collective_assert(comm, seen is None or are_of(Tensor, data() @ data().T, seen), f"{seen}")
    found = um.matmul(comm, given, rows(comm, data().T))
    collective_assert(comm, type(found) is Tensor and behind(found).shape[1] == 3, f"{found}")


def test_batches_are_of_the_library_that_they_came_in(comm, session, shelf):
    mine = np.arange(24.0).reshape(2, 3, 4) + comm.rank
    batch = session.distribute(Tensor(mine), um.Layout.rows())
    c = session.gemm(batch, batch.T)
    wanted = mine @ mine.swapaxes(1, 2)
    collective_assert(
        comm, are_of(Tensor, wanted, c.local, um.matmul(comm, Tensor(mine), mine.swapaxes(1, 2))), f"{c.local}"
    )
    columns = session.empty((2 * comm.size, 3, 2), "f8", um.Layout.rows(), order="F")
    session.gemm(batch, session.distribute(mine[:, :2].copy(), um.Layout.rows()).T, columns)
    columns.base.library = "shelf"
    collective_assert(comm, are_of(Tensor, wanted[:, :, :2], columns.local), f"{columns.local}")
    copy = session.redistribute(c, um.Layout.whole(0))
    collective_assert(comm, type(copy.local) is Tensor, f"{copy.local}")


@pytest.mark.one_node("memory that all ranks share")
def test_matrices_and_batches_are_shown_by_dlpack(comm, session):
    a = session.distribute(rows(comm, data("f4")), um.Layout.rows())
    for one in (a, a[:, 1:], a.T, session.gemm(a, a.T), session.distribute(np.zeros((2, 3, 4)), um.Layout.rows())):
        seen = np.from_dlpack(one)
        good = np.array_equal(seen, one.local) and (np.shares_memory(seen, one.local) or not seen.size)
        collective_assert(comm, good, f"{one!r}: {seen}")
    whole = session.empty_host((3, 3), "bf16")
    seen = exported.from_dlpack(whole)
    collective_assert(comm, (seen.address, seen.dtype.name) == (whole.address, "bfloat16"), f"{seen}")
    shared = session.empty((2 * comm.size, 3), "f8", um.Layout.rows(), memory="shared")
    collective_assert(comm, np.from_dlpack(shared).shape == (2, 3), "each its part")


def test_what_cannot_be_shown_by_dlpack_says_why(comm, session, tmp_path):
    given = [(np.zeros((1, 4)), (2 * comm.rank + at, 0)) for at in (0, 1)]
    parts = session.distribute_parts(given, shape=(2 * comm.size, 4))
    fixed = session.distribute(read_only(rows(comm, data())), um.Layout.rows())
    turned = session.distribute(rows(comm, data("c8")), um.Layout.rows()).H
    path = comm.bcast(str(tmp_path / "a.npy"))
    file = session.create_file(path, (4, 4), "f8")
    for one, words in ((parts, "2 arrays"), (fixed, "read-only"), (turned, "conjugated"), (file, "lies in the file")):
        expect(comm, um.ParamError, [words], lambda one=one: np.from_dlpack(one))
    expect(comm, um.ParamError, ["is a batch of a session"],
           lambda: session.register(session.empty_host((2, 3, 4)), root=0))  # fmt: skip
    session.release(file)


def test_who_takes_a_matrix_by_dlpack_waits_for_what_is_in_flight(comm, session):
    size = 400
    a = session.distribute(np.ones((size, size * comm.size)), um.Layout.rows())
    c = session.empty((size * comm.size, size * comm.size), "f8", um.Layout.rows())
    c.local[...] = np.nan
    handles = [session.gemm(a, a.T, c, wait=False) for _ in range(3)]
    seen = np.from_dlpack(c)
    collective_assert(comm, (seen == size * comm.size).all() and all(one.done() for one in handles), f"{seen[:2, :2]}")


# -- with the libraries --------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_of_torch_are_registered_without_a_copy(comm, session, dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.arange(12, dtype=getattr(torch, dtype)).reshape(3, 4)
    a, c = session.register(tensor, root=0), session.register(torch.zeros(3, 3, dtype=tensor.dtype), root=0)
    pointer = comm.rank != 0 or a.address == tensor.data_ptr()
    session.gemm(a, a, c, trans_b="T")
    right = comm.rank != 0 or np.array_equal(np.asarray(c).astype("f8"), data() @ data().T)
    collective_assert(comm, pointer and right and a.dtype.numpy.name == dtype, f"{a!r} {array_of(c)}")


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_tensors_in_are_tensors_out(comm, session, dtype):
    torch = pytest.importorskip("torch")
    tensor = torch.full((3, 4 * comm.size), 0.5, dtype=getattr(torch, dtype))
    made = um.matmul(comm, tensor, tensor.T.contiguous()[4 * comm.rank : 4 * comm.rank + 4])
    a = session.distribute(tensor, um.Layout.rows())
    c = session.gemm(a, a.T)
    wanted = torch.full((3, 3), float(comm.size), dtype=tensor.dtype)
    good = torch.equal(made, wanted) and torch.equal(c.local, wanted.repeat(1, comm.size)) and c.local is c.local
    collective_assert(comm, good and torch.equal(c[:, :2].local, c.local[:, :2]), f"{made} {c.local}")


def test_tensors_of_torch_that_are_more_than_their_memory_are_refused(comm, session):
    torch = pytest.importorskip("torch")
    for tensor, word in (
        (torch.eye(3, requires_grad=True), "detach()"),
        (torch.eye(3).to_sparse(), "Tensor"),
        (torch._neg_view(torch.eye(3)), "resolve_neg()"),
        (torch.eye(3, device="meta"), "Tensor"),
    ):
        expect(comm, um.ParamError, [word], lambda tensor=tensor: session.register(tensor, root=0))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_arrays_of_jax_are_registered_without_a_copy_and_are_no_results(comm, session, dtype):
    jnp = pytest.importorskip("jax.numpy")
    array = jnp.arange(12, dtype=dtype).reshape(3, 4)
    a = session.register(array, root=0)
    pointer = comm.rank != 0 or a.address == array.unsafe_buffer_pointer()
    c = session.gemm(a, a, trans_b="T")
    right = shows(c, (data() @ data().T).astype(c.dtype.numpy)) and isinstance(array_of(c), jnp.ndarray | None)
    collective_assert(comm, pointer and right and a.dtype.numpy.name == dtype, f"{a!r} {as_numpy(c)}")
    other = session.empty_host(a.shape, a.dtype)
    expect(comm, um.ParamError, ["read-only"], lambda: session.upload(other, a))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_arrays_of_jax_in_are_arrays_of_jax_out(comm, session, dtype):
    jnp = pytest.importorskip("jax.numpy")
    mine = jnp.full((3, 4 * comm.size), 0.5, dtype) @ jnp.eye(4 * comm.size, dtype=dtype)  # may be under way
    a = session.distribute(mine, um.Layout.rows())
    c = session.gemm(a, a.T)
    found = c.local, um.matmul(comm, mine, mine.T[4 * comm.rank : 4 * comm.rank + 4, :3]), c[:, 1:].local
    good = all(isinstance(one, jnp.ndarray) and one.dtype == dtype and (one == comm.size).all() for one in found)
    collective_assert(comm, good and found[2].shape == (3, 3 * comm.size - 1), f"{found}")


def test_torch_numpy_and_jax_take_matrices_by_dlpack(comm, session):
    torch = pytest.importorskip("torch")
    jax = pytest.importorskip("jax")
    for dtype in ("f4", "bf16", "c8"):
        matrix = session.empty((3 * comm.size, 16), dtype, um.Layout.rows())
        tensor = torch.from_dlpack(matrix)
        tensor.fill_(comm.rank + 2)
        array = jax.dlpack.from_dlpack(matrix)
        good = tensor.data_ptr() == matrix.address == array.unsafe_buffer_pointer() and array.shape == (3, 16)
        good &= bool((array == comm.rank + 2).all()) and (matrix.local == comm.rank + 2).all()
        collective_assert(comm, good, f"{tensor} {array}")
