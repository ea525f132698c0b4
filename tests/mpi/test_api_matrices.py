"""Matrices of a session: registered as they are stored, copied there and back, released once."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.products import array_of, as_device_array, as_numpy, random_matrix
from tests.helpers.sessions import ranks_per_node
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location

DTYPES = ["f64", "bf16", "tf32", "c64"]
"""One of each kind and of each size."""
ROWS, COLS = 7, 5


def last(session) -> int:
    return session.size - 1


def fresh(session, where, dtype="f64", order="C", shape=(ROWS, COLS)):
    """A new matrix of the session: shared host, private host of the last rank, device of the last rank."""
    if where == "shared":
        return session.empty_host(shape, dtype, order=order)
    if where == "device":
        return session.empty_device(shape, dtype, rank=last(session), order=order)
    mine = np.zeros(shape, DType[dtype].numpy, order=order) if session.rank == last(session) else None
    return session.register(mine, root=last(session), dtype=dtype)


def fill(session, matrix, data):
    writer = 0 if matrix.location.rank is None else matrix.location.rank
    if session.rank == writer:
        matrix.array[...] = as_device_array(session, data) if matrix.location.space == "device" else data
    session.barrier()


def holds(matrix, data) -> bool:
    """Whether a matrix has these elements where this rank sees it."""
    found = as_numpy(matrix)
    return found is None or (found.dtype == data.dtype and np.array_equal(found, data))


# -- registering ---------------------------------------------------------------------------------


def test_float32_arrays_can_be_multiplied_in_tf32_and_others_not(comm, session):
    root = last(session)
    array = random_matrix(9, 8, DType.f32, (4,)) if session.rank == root else None
    matrix, strict = session.register(array, root=root, dtype="tf32"), session.register(array, root=root)
    collective_assert(comm, (matrix.dtype, strict.dtype) == (DType.tf32, DType.f32), f"{matrix!r}, {strict!r}")
    with pytest.raises(um.ParamError, match="tf32"):
        session.gemm(matrix, strict, trans_b="T")
    half = random_matrix(9, 8, DType.f16, (4,)) if session.rank == root else None
    with pytest.raises(um.ParamError, match="an array of f16 was given as tf32, which is float32 in memory"):
        session.register(half, root=root, dtype="tf32")
    with pytest.raises(um.ParamError, match="use one of"):
        session.register(array, root=root, dtype="f128")


@pytest.mark.parametrize("where", ["private", "device"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ["F", "C"])
@pytest.mark.parametrize("view", ["whole", "part", "transposed"])
def test_a_registered_array_is_known_to_all_as_it_is_stored(comm, session, where, order, view, dtype):
    root = last(session)
    mine = session.rank == root
    data = random_matrix(9, 8, DType[dtype], (11,))
    if where == "device":
        whole = fresh(session, "device", dtype, order, (9, 8))
        fill(session, whole, data)
        whole = whole.array if mine else None
    else:
        whole = np.array(data, order=order)
    views = {"whole": lambda x: x, "part": lambda x: x[1:6, 2:6], "transposed": lambda x: x.T}
    array, wanted = views[view](whole) if mine else None, views[view](data)
    matrix = session.register(array, root=root, dtype=dtype)
    wanted_order = order if view != "transposed" else {"F": "C", "C": "F"}[order]
    good = (
        (matrix.shape, matrix.order) == (wanted.shape, wanted_order)
        and matrix.info.stored.ld == (9 if order == "F" else 8)
        and matrix.dtype is DType[dtype]
        and matrix.location == (Location.host(root) if where == "private" else Location.device(root))
        and array_of(matrix) is array
        and (matrix.address != 0) == mine
    )
    collective_assert(comm, good, f"{matrix!r}, leading dimension {matrix.info.stored.ld}")
    copy = session.download(matrix)
    collective_assert(comm, holds(copy, wanted), f"{copy!r}")


@pytest.mark.parametrize("order", ["F", "C"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_part_of_shared_host_memory_is_seen_by_every_rank(comm, session, order, transposed):
    data = random_matrix(9, 8, DType.f64, (5,))
    whole = session.empty_host((9, 8), order=order)
    fill(session, whole, data)
    seen, root = array_of(whole), ranks_per_node(comm.size) - 1
    part = None if seen is None else seen[2:7, 3:7]
    wanted = data[2:7, 3:7]
    if transposed:
        part, wanted = None if part is None else part.T, wanted.T
    matrix = session.register(part if session.rank == root else None, root=root)
    good = matrix.location == Location.host() and holds(matrix, wanted)
    collective_assert(comm, good, f"{matrix!r}: {array_of(matrix)}")
    same = part is None or (np.shares_memory(matrix.array, part) and matrix.address == part.ctypes.data)
    collective_assert(comm, same, "it is another memory")
    session.release(whole)
    collective_assert(comm, holds(matrix, wanted), "the part went with the whole")


def test_parts_of_parts_can_be_registered_when_the_whole_is_gone(comm, session):
    data = random_matrix(9, 8, DType.f64, (6,))
    whole = session.empty_host((9, 8))
    fill(session, whole, data)
    part = session.register(whole.array[2:] if session.rank == 0 else None, root=0)
    session.release(whole)
    inner = session.register(part.array[1:4, 2:5] if session.rank == 0 else None, root=0)
    good = inner.location == Location.host() and holds(inner, data[3:6, 2:5])
    collective_assert(comm, good, f"{inner!r}")
    held = session._store._held
    session.release(part)
    collective_assert(comm, holds(inner, data[3:6, 2:5]) and inner.info.number in held, "it went with the part")


def record_pins(session, monkeypatch) -> dict[int, int]:
    """Return what the session pins from now on: bytes by address."""
    backend = session._backend
    pin, unpin = backend.pin, backend.unpin
    pinned: dict[int, int] = {}
    undo = set()

    def recording_pin(address, nbytes):
        if pin(address, nbytes):
            undo.add(address)
        pinned[address] = nbytes
        return True

    def recording_unpin(address):
        del pinned[address]
        if address in undo:
            undo.remove(address)
            unpin(address)

    monkeypatch.setattr(backend, "pin", recording_pin)
    monkeypatch.setattr(backend, "unpin", recording_unpin)
    return pinned


def test_shared_host_memory_stays_pinned_while_a_part_of_it_is_registered(comm, open_session, monkeypatch):
    with open_session(comm) as session:
        pinned = record_pins(session, monkeypatch)
        whole = session.empty_host((9, 8))
        start, there = whole.address, comm.rank < ranks_per_node(comm.size)
        first = session.register(whole.array[2:] if session.rank == 0 else None, root=0)
        second = session.register(whole.array[3:] if session.rank == 0 else None, root=0)
        collective_assert(comm, pinned == ({start: 9 * 8 * 8} if there else {}), f"{pinned}")
        session.release(whole)
        session.release(first)
        collective_assert(comm, pinned == ({start: 9 * 8 * 8} if there else {}), f"unpinned too early: {pinned}")
        session.release(second)
        collective_assert(comm, not pinned, f"still pinned: {pinned}")
        private = session.register(np.zeros((4, 6))[:, :3] if session.rank == 0 else None, root=0)
        extra = list(pinned.values())
        collective_assert(comm, extra == [(3 * 6 + 3) * 8] * (session.rank == 0), f"{extra}")
        session.release(private)
        collective_assert(comm, not pinned, f"still pinned: {pinned}")
        session.empty_host((3, 3))
    collective_assert(comm, not pinned, f"still pinned after the session: {pinned}")


def test_memory_that_one_rank_cannot_pin_is_everybodys_error_and_is_given_back(comm, open_session, monkeypatch):
    def refuse(address, nbytes):
        raise um.DeviceError("no more pinned memory on purpose")

    odd = ranks_per_node(comm.size) - 1
    with open_session(comm) as session:
        if session.rank == odd:
            monkeypatch.setattr(session._backend, "pin", refuse)
        expect(comm, um.DeviceError, ["on purpose"], lambda: session.empty_host((4, 4)))
        array = np.zeros((4, 4)) if session.rank == odd else None
        expect(comm, um.DeviceError, ["on purpose"], lambda: session.register(array, root=odd))
        gc.collect()
        held = list(session._store._held)
        collective_assert(comm, not held, f"matrices {held} are still held")


def test_a_read_only_part_of_shared_memory_is_no_result(comm, session):
    whole = session.empty_host((12, 24))
    fill(session, whole, 0.5)
    view = None
    if session.rank == 0:
        view = whole.array[:, :12]
        view.flags.writeable = False
    part = session.register(view, root=0)
    other = session.register(whole.array[:, 12:] if session.rank == 0 else None, root=0)
    expect(comm, um.ParamError, ["read-only"], lambda: session.gemm(other, other, part))
    expect(comm, um.ParamError, ["read-only"], lambda: session.upload(other, part))


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0), (1, 1), (1, 6), (6, 1)])
@pytest.mark.parametrize("where", ["shared", "private", "device"])
@pytest.mark.parametrize("order", ["F", "C"])
def test_thin_and_empty_matrices_are_made_and_copied(comm, session, shape, where, order):
    data = random_matrix(*shape, DType.f32, (8,))
    matrix, target = (fresh(session, where, "f32", order, shape) for _ in range(2))
    fill(session, matrix, data)
    copy = session.download(matrix)
    seen = array_of(copy) is not None or comm.rank >= ranks_per_node(comm.size)
    collective_assert(comm, holds(copy, data) and seen, f"{copy!r}")
    session.upload(copy, target)
    collective_assert(comm, holds(target, data), f"{target!r}")


# -- copying -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("orders", ["FF", "FC", "CF", "CC"])
@pytest.mark.parametrize("where", ["shared", "private", "device"])
def test_what_is_uploaded_is_downloaded(comm, session, where, orders, dtype):
    data = random_matrix(ROWS, COLS, DType[dtype], (9,))
    source = fresh(session, "shared", dtype, orders[0])
    target = fresh(session, where, dtype, orders[1])
    fill(session, source, data)
    session.upload(source, target)
    fill(session, source, 0)
    copy = session.download(target)
    good = copy.location == Location.host() and copy.order == orders[1] and holds(copy, data)
    collective_assert(comm, good, f"{copy!r} of {target!r}")
    collective_assert(comm, (copy is target) == (where == "shared"), "shared matrices are returned as they are")


@pytest.mark.parametrize("order", ["F", "C"])
@pytest.mark.parametrize("where", ["private", "device"])
def test_a_part_is_copied_without_its_surroundings(comm, session, where, order):
    data = random_matrix(ROWS, COLS, DType.f64, (10,))
    whole = fresh(session, where, "f64", order, (ROWS + 3, COLS + 2))
    mine = session.rank == last(session)
    if mine:
        whole.array[...] = -1.0
    part = session.register(whole.array[1 : ROWS + 1, 2:] if mine else None, root=last(session))
    source = fresh(session, "shared")
    fill(session, source, data)
    session.upload(source, part)
    good = not mine or ((whole.array == -1.0).sum() == whole.array.size - data.size)
    collective_assert(comm, good, "elements around the part have changed")
    copy = session.download(part)
    collective_assert(comm, holds(copy, data), f"{copy!r}")


def test_uploads_that_do_not_fit_are_refused(comm, session):
    shared, turned, single = (
        session.empty_host((4, 6)),
        session.empty_host((6, 4)),
        session.empty_host((4, 6), "f32"),
    )
    device, private = (fresh(session, where, shape=(4, 6)) for where in ("device", "private"))
    expect(comm, um.ParamError, ["4×6", "6×4", "equal"], lambda: session.upload(turned, device))
    expect(comm, um.ParamError, ["f32", "f64", "equal"], lambda: session.upload(single, private))
    expect(comm, um.ParamError, ["shared host memory"], lambda: session.upload(device, shared))
    expect(comm, um.ParamError, ["shared host memory"], lambda: session.upload(private, shared))
    expect(comm, um.ParamError, ["ndarray"], lambda: session.upload(np.zeros((4, 6)), shared))


@pytest.mark.mpi(min_size=2)
def test_ranks_that_copy_different_matrices_get_one_error(comm, session):
    first, second = (session.empty_host((4, 4)) for _ in range(2))
    target = fresh(session, "device", shape=(4, 4))
    mine = first if session.rank else second
    expect(comm, um.RankMismatchError, [f"matrix {first.info.number}"], lambda: session.upload(mine, target))
    expect(comm, um.RankMismatchError, [f"matrix {first.info.number}"], lambda: session.download(mine))
    expect(comm, um.RankMismatchError, [f"matrix {first.info.number}"], lambda: session.release(mine))


def test_what_is_no_matrix_is_named_with_its_argument_and_call(comm, session):
    matrix = session.empty_host((4, 4))
    calls = {
        "release: matrix is None: pass a Matrix": lambda: session.release(None),
        "download: matrix is a float: pass a Matrix": lambda: session.download(2.0),
        "upload: source is None: pass a Matrix": lambda: session.upload(None, matrix),
        "upload: target is an ndarray: pass a Matrix": lambda: session.upload(matrix, np.zeros((4, 4))),
        "A is None: pass a Matrix": lambda: session.gemm(None, matrix),
        "A is a float: pass the matrices first, and factors by": lambda: session.gemm(1.0, matrix, matrix),
        "C is a str: pass a Matrix": lambda: session.plan(matrix, matrix, "C"),
        "None was given: the rank that has the array": lambda: session.register(None, root=last(session)),
    }
    for message, call in calls.items():
        expect(comm, um.ParamError, [message], call)
    session.release(matrix)
    for message, call in {
        "release: matrix is a matrix that was released": lambda: session.release(matrix),
        "upload: source is a matrix that was released": lambda: session.upload(matrix, matrix),
    }.items():
        expect(comm, um.ParamError, [message], call)


# -- releasing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["shared", "private", "device"])
def test_a_matrix_is_released_once(comm, session, where):
    matrix = fresh(session, where)
    session.release(matrix)
    for call in (session.release, session.download, lambda gone: session.upload(gone, gone)):
        expect(comm, um.ParamError, ["released"], lambda call=call: call(matrix))


@pytest.mark.parametrize("where", ["shared", "private", "device"])
def test_a_matrix_of_another_session_is_refused(comm, open_session, where):
    session, other = open_session(comm), open_session(comm)
    with session, other:
        ours = fresh(session, "shared")
        theirs = fresh(other, where)
        same_number = theirs.info.number == ours.info.number
        collective_assert(comm, same_number, "numbers differ, so that nothing is tested")
        for call in (session.release, session.download):
            expect(comm, um.ParamError, ["another session"], lambda call=call: call(theirs))


# -- as arrays -----------------------------------------------------------------------------------


def test_numpy_has_shared_matrices_on_every_rank_until_they_are_released(comm, session):
    data = random_matrix(ROWS, COLS, DType.f64, (12,))
    matrix = fresh(session, "shared")
    fill(session, matrix, data)
    seen = array_of(matrix)
    good = seen is None or (
        np.array_equal(np.asarray(matrix), data)
        and np.shares_memory(np.asarray(matrix), seen)
        and np.allclose(matrix, data)
    )
    collective_assert(comm, good, f"{seen!r}")
    session.release(matrix)
    expect(comm, um.ParamError, ["released"], lambda: np.asarray(matrix))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", ["private", "device"])
def test_numpy_has_a_ranks_own_matrix_there_and_elsewhere_an_error_with_the_mend(comm, session, where):
    data = random_matrix(ROWS, COLS, DType.f64, (13,))
    matrix = fresh(session, where)
    fill(session, matrix, data)
    text = ""
    try:
        found = np.asarray(matrix)
    except um.ParamError as error:
        found, text = None, str(error)
    if session.rank == last(session) and (where == "private" or session.backend_name == "host"):
        collective_assert(comm, found is not None and np.array_equal(found, data), f"{found!r}")
    else:
        mend = "session.download(matrix)" if session.machine.num_nodes == 1 else "session.gather(matrix, root=r)"
        collective_assert(comm, mend in text, f"{found!r} {text}")
    collective_assert(comm, holds(session.download(matrix), data), "the download is not the matrix")


@pytest.mark.parametrize("where", ["shared", "private", "device"])
def test_a_closed_sessions_matrices_are_no_arrays(comm, open_session, where):
    with open_session(comm) as session:
        matrix = fresh(session, where)
    expect(comm, um.ParamError, ["released"], lambda: np.asarray(matrix))
