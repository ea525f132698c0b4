"""Matrices of which each rank has a part: made without a copy, used where they are, refused alike on all ranks."""

from __future__ import annotations

import ctypes
import tracemalloc

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.distributed import address_of, check_part, fill, part_of
from tests.helpers.products import random_matrix, shared_of, shows
from tests.helpers.sessions import SHARED, memories, ranks_per_node
from uncut_mpi import Layout
from uncut_mpi.model.dtypes import DType

MEMORIES = ("device", "host", SHARED)


def layouts(size):
    """Layouts for so many ranks, each with the shape of its matrix."""
    last, backwards = size - 1, range(size - 1, -1, -1)
    counts = [(3 * rank * rank + 2) % 7 for rank in range(size)]  # some are 0
    rows = 2 if size % 2 == 0 else 1
    row_counts, col_counts = [4, 3][:rows], [(rank * 5 + 1) % 4 for rank in range(size // rows)]
    return {
        "whole": (Layout.whole(last), (5, 4)),
        "rows": (Layout.rows(counts), (sum(counts), 5)),
        "cols": (Layout.cols(counts, ranks=backwards), (5, sum(counts))),
        "even": (Layout.rows(ranks=backwards), (7, 3)),
        "blocks": (Layout.blocks(row_counts, col_counts), (sum(row_counts), sum(col_counts))),
        "replicated": (Layout.replicated(), (4, 3)),
        "some": (Layout.replicated(ranks=[last]), (4, 3)),
        "no elements": (Layout.cols(), (0, 9)),
    }


KINDS = [*layouts(1)]


def own_part(session, data, layout, memory, order, pad):
    """Return this rank's part of `data`, in memory of a kind, and what keeps that."""
    rows, cols = layout.indices(data.shape, session.rank, num_ranks=session.size)
    whole = session.empty_host(data.shape, data.dtype, order="CF"[pad % 2])  # collective, whatever this rank takes
    if memory == "shared":
        part = whole.array[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1] if len(rows) and len(cols) else None
    else:
        kind = DType.parse(data.dtype)
        shape = (len(rows) + pad, len(cols) + pad)
        make = (
            session._backend.empty
            if memory == "device"
            else lambda m, n, dtype, how: np.empty((m, n), dtype.numpy, how)
        )
        part = make(*shape, kind, order)[: len(rows), : len(cols)]
    if part is not None:
        fill(part, data[np.ix_(rows, cols)])
    return part, whole


def holds(session, matrix, data):
    """Whether the ranks' parts are `data`. Collective."""
    copy = session.download(matrix)
    good = shows(copy, data)
    session.barrier()
    session.release(copy) if copy is not matrix else None
    return good


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shift", range(3))
def test_arrays_of_ranks_become_one_matrix_without_a_copy(comm, session, kind, shift):
    (layout, shape), dtype = layouts(comm.size)[kind], (DType.f64, DType.bf16)[shift % 2]
    data = random_matrix(*shape, dtype, (comm.size, shift))
    memory, order = memories(comm.size)[(session.rank + shift) % 3], "CF"[(session.rank + shift) // 2 % 2]
    part, _whole = own_part(session, data, layout, memory, order, pad=2 + shift)
    matrix = session.distribute(part, layout, shape=shape, dtype=dtype if kind == "no elements" else None)
    local_shape = layout.local_shape(shape, session.rank, num_ranks=session.size)
    rows, cols = layout.indices(shape, session.rank, num_ranks=session.size)
    found = [
        matrix.shape == shape,
        matrix.dtype is dtype,
        matrix.layout == layout.filled(shape, session.size),
        (matrix.local is part) if part is not None else matrix.local.shape == local_shape,
        matrix.local.dtype == dtype.numpy,
        part is None or matrix.memory == memory,
        [index.tolist() for index in matrix.local_indices] == [rows.tolist(), cols.tolist()],
        (0 in local_shape or kind == "no elements") or matrix.address == address_of(part),
    ]
    collective_assert(comm, all(found), f"{matrix!r}: {found}")
    collective_assert(comm, holds(session, matrix, data), f"{matrix!r} holds something else")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_new_matrices_have_their_parts_in_the_memory_that_was_asked_for(comm, session, kind, memory):
    layout, shape = layouts(comm.size)[kind]
    data = random_matrix(*shape, DType.f32, (comm.size, 7))
    order = "FC"[comm.size % 2]
    matrix = session.empty(shape, "f32", layout, order=order, memory=memory)
    found = matrix.memory, matrix.local.shape, matrix.layout
    local_shape = layout.local_shape(shape, session.rank, num_ranks=session.size)
    wanted = memory, local_shape, layout.filled(shape, comm.size)
    collective_assert(comm, found == wanted, f"{matrix!r}: {found} instead of {wanted}")
    fill(matrix.local, part_of(matrix, data))
    session.barrier()
    collective_assert(comm, holds(session, matrix, data), "parts are elsewhere")
    if memory == "shared":
        collective_assert(comm, shows(matrix, data), "not all ranks see all of it")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_shared_matrix_is_copied_into_parts_and_all_replicas(comm, session, kind, memory):
    layout, shape = layouts(comm.size)[kind]
    data = random_matrix(*shape, DType.f64, (comm.size, 8))
    source = shared_of(session, data)
    target = session.empty(shape, "f64", layout, order="F", memory=memory)
    target.local[...] = np.nan
    session.upload(source, target)
    check_part(comm, target, data, tolerance=0)


def test_counts_are_those_of_the_arrays(comm, session):
    counts = [0 if rank == 1 else rank + 2 for rank in range(comm.size)]
    mine = np.empty((counts[session.rank], 3)) if session.rank != 1 else None
    tall = session.distribute(mine, Layout.rows())
    good = (tall.shape, tall.layout) == ((sum(counts), 3), Layout.rows(counts))
    collective_assert(comm, good and tall.local.shape == (counts[session.rank], 3), f"{tall!r}, {tall.layout}")
    backwards = range(comm.size - 1, -1, -1)
    wide = session.distribute(
        np.empty((0 if session.rank == 1 else 4, counts[session.rank])), Layout.cols(ranks=backwards)
    )
    good = (wide.shape, wide.layout) == ((4, sum(counts)), Layout.cols(counts[::-1], ranks=backwards))
    collective_assert(comm, good and wide.local.shape == (4, counts[session.rank]), f"{wide!r}, {wide.layout}")
    none = session.distribute(np.empty((0, 5), np.float32), Layout.rows())
    good = (none.shape, none.dtype) == ((0, 5), DType.f32) and none.location is not None
    collective_assert(comm, good, f"{none!r}")


def test_a_rank_may_have_several_parts_or_none(comm, session):
    data = random_matrix(3 * comm.size, 6, DType.f64, (9,))
    top = 3 * session.rank
    rectangles = [((top, top + 1), (0, 6)), ((top + 1, top + 3), (0, 2)), ((top + 1, top + 3), (2, 6))]
    if session.rank == comm.size - 1 and comm.size > 1:  # the first rank has those of the last one too
        rectangles = []
    elif session.rank == 0 and comm.size > 1:
        rectangles = [*rectangles, ((3 * comm.size - 3, 3 * comm.size), (0, 6))]
    arrays = [
        np.asarray(data[slice(*rows), slice(*cols)], order="FC"[at % 2]).copy("K")
        for at, (rows, cols) in enumerate(rectangles)
    ]
    matrix = session.distribute_parts(
        [(array, (rows[0], cols[0])) for array, (rows, cols) in zip(arrays, rectangles, strict=True)], shape=data.shape
    )
    same = len(matrix.local) == len(arrays) and all(
        one is other for one, other in zip(matrix.local, arrays, strict=True)
    )
    where = [[index.tolist() for index in pair] for pair in matrix.local_indices]
    wanted = [[[*range(*rows)], [*range(*cols)]] for rows, cols in rectangles]
    collective_assert(comm, same and where == wanted and matrix.layout is None, f"{matrix!r}, {where}")
    collective_assert(comm, holds(session, matrix, data), "parts are elsewhere")


@pytest.mark.host_backend  # which reads the memory of peers as any other
def test_parts_on_devices_are_found_by_every_rank_and_unmapped_with_the_matrix(comm, session):
    shape = (2 * comm.size, 3)
    data = random_matrix(*shape, DType.f64, (10,))
    around = session.empty((6 * comm.size, 3), "f64", Layout.rows())
    part = around.local[2 + session.rank % 2 :][:2]
    fill(part, data[2 * session.rank :][:2])
    matrix = session.distribute(part, Layout.rows())
    before = dict(session._store.mappings._open)
    seen = []
    for number, held in enumerate(matrix.info.parts):
        address = session._store.address(matrix.info, number)
        seen.append(
            np.frombuffer((ctypes.c_double * (held.part.shape[0] * 3)).from_address(address)).reshape(-1, 3).copy()
        )
    good = np.array_equal(np.vstack(seen), data)
    opened = len(session._store.mappings._open) - len(before)
    collective_assert(comm, good and opened == comm.size - 1, f"{opened} mapped, {seen}")
    session.barrier()
    session.release(matrix)
    collective_assert(comm, session._store.mappings._open == before, "still mapped")


def test_arrays_without_elements_say_nothing_of_a_matrix_that_has_some(comm, session):
    mine = np.ones((2, 3)) if session.rank == 0 else np.empty((0, 3 if session.rank == 1 else 7), np.float32)
    matrix = session.distribute(mine, Layout.rows())
    local = matrix.local
    good = (matrix.shape, matrix.dtype, matrix.layout) == ((2, 3), DType.f64, Layout.rows([2] + [0] * (comm.size - 1)))
    good = good and (local is mine if session.rank == 0 else (local.shape, local.dtype) == ((0, 3), np.float64))
    collective_assert(comm, good, f"{matrix!r}, {matrix.layout}, {local.shape} {local.dtype}")


def test_shared_memory_stays_as_long_as_a_part_lies_in_it(comm, session):
    whole = session.empty_host((2, 8))
    holder = ranks_per_node(comm.size) - 1
    parts = [(whole.array[:, 2 * at : 2 * at + 2], (0, 2 * at)) for at in range(4)] if session.rank == holder else []
    matrix = session.distribute_parts(parts, shape=(2, 8))
    session.release(whole)
    grips = session._store._held[matrix.info.number].grips
    segments = {id(grip.segment) for grip in grips if grip.segment is not None and grip.segment._mapping is not None}
    there = session.rank <= holder
    good = len(segments) == there
    good &= not there or all(map(session._store._held[matrix.info.number].addresses.__getitem__, range(4)))
    collective_assert(comm, good, f"{grips}")
    session.release(matrix)
    collective_assert(comm, all(grip.segment._mapping is None for grip in grips), "still mapped")


def test_no_memory_as_large_as_a_part_is_taken(comm, session):
    part = np.ones((512, 256))
    tracemalloc.start()
    session.distribute(part, Layout.rows())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    collective_assert(comm, peak < part.nbytes // 2, f"{peak} bytes")


# -- what is refused -----------------------------------------------------------------------------


BAD = {
    "other columns": (
        lambda s: s.distribute(np.ones((2, 3 + (s.rank == 1))), Layout.rows()),
        um.ParamError,
        ["do not make", "2×4 instead of 2×3 on rank 1"],
    ),
    "too few rows": (
        lambda s: s.distribute(np.ones((2, 3)), Layout.rows(), shape=(2 * s.size + 1, 3)),
        um.ParamError,
        ["do not make a", "layout rows: ", "2×3 on "],
    ),
    "not what the counts say": (
        lambda s: s.distribute(np.ones((2, 3)), Layout.rows([2] * (s.size - 1) + [4])),
        um.ParamError,
        ["do not make", "2×3 instead of 4×3 on "],
    ),
    "a part is missing": (
        lambda s: s.distribute(
            None if s.rank == 0 else np.ones((2, 3)), Layout.rows([2] * s.size), shape=(2 * s.size, 3)
        ),
        um.ParamError,
        ["do not make", "nothing instead of 2×3 on rank 0"],
    ),
    "a part too many": (
        lambda s: s.distribute(np.ones((2, 3)), Layout.whole(0)),
        um.ParamError,
        ["do not make", "2×3 instead of nothing"],
    ),
    "other types": (
        lambda s: s.distribute(np.ones((2, 3), [np.float64, np.float32][s.rank == 1]), Layout.rows()),
        um.RankMismatchError,
        ["of different types: ", "f32 on rank 1"],
    ),
    "another type than was asked for": (
        lambda s: s.distribute(np.ones((2, 3)), Layout.rows(), dtype="f32"),
        um.ParamError,
        ["an array of f64 was given as f32"],
    ),
    "other layouts": (
        lambda s: s.distribute(np.ones((2, 3)), [Layout.rows(), Layout.cols()][s.rank == 1]),
        um.RankMismatchError,
        ["values: layout: ", "cols on rank 1"],
    ),
    "other shapes": (
        lambda s: s.distribute(np.ones((2, 3)), Layout.rows(), shape=(2 * s.size, 3 + (s.rank == 1))),
        um.RankMismatchError,
        ["values: shape: ("],
    ),
    "no array of a matrix": (
        lambda s: s.distribute(np.ones(4) if s.rank == 1 else np.ones((2, 3)), Layout.rows()),
        um.ParamError,
        ["rank 1: an array was given that has 1 dimension, "],
    ),
    "no layout": (
        lambda s: s.distribute(np.ones((2, 3)), "rows"),
        um.ParamError,
        ["layout = 'rows' is a str: pass a Layout"],
    ),
    "too many parts": (
        lambda s: s.distribute(np.ones((2, 3)), Layout.blocks([2] * 3, [3] * 3)),
        um.ParamError,
        ["has 9 parts for ", "ranks="],
    ),
    "no such rank": (
        lambda s: s.empty((4, 4), "f64", Layout.whole(s.size)),
        um.ParamError,
        ["names rank ", "name those that there are"],
    ),
    "counts beside the shape": (
        lambda s: s.empty((4, 4), "f64", Layout.rows([3], ranks=[0])),
        um.ParamError,
        ["rows(3;ranks=0) has 3 rows, the matrix 4"],
    ),
    "no such memory": (
        lambda s: s.empty((4, 4), "f64", Layout.rows(), memory="gpu"),
        um.ParamError,
        ["memory = 'gpu': use"],
    ),
    "nobody has an array": (lambda s: s.distribute(None, Layout.rows(), shape=(4, 4)), um.ParamError, ["pass dtype="]),
    "nobody says the shape": (lambda s: s.distribute(None, Layout.rows(), dtype="f64"), um.ParamError, ["pass shape="]),
    "parts overlap": (
        lambda s: s.distribute_parts([(np.ones((2, 3)), (2 * s.rank - (s.rank == 1), 0))], shape=(2 * s.size, 3)),
        um.ParamError,
        ["parts overlap: [0:2, 0:3] at h0 and [1:3, 0:3] at h1", "of all parts [0:2, 0:3] on rank 0, [1:3"],
    ),
    "a part twice": (
        lambda s: s.distribute_parts([(np.ones((2, 3)), (2 * s.rank, 0))] * (1 + (s.rank == 0)), shape=(2 * s.size, 3)),
        um.ParamError,
        ["parts overlap: rank 0 gave [0:2, 0:3] more than once; of all parts [0:2, 0:3] and [0:2, 0:3] on rank 0"],
    ),
    "parts leave something out": (
        lambda s: s.distribute_parts([(np.ones((2, 3)), (2 * s.rank, 0))], shape=(2 * s.size + 1, 3)),
        um.ParamError,
        ["parts have", "of all parts [0:2, 0:3] on"],
    ),
    "a part outside": (
        lambda s: s.distribute_parts([(np.ones((2, 3)), (2 * s.rank, 1))], shape=(2 * s.size, 3)),
        um.ParamError,
        ["is no part of a ", "of all parts [0:2, 1:4] on "],
    ),
    "other types of parts": (
        lambda s: s.distribute_parts(
            [(np.ones((2, 3), [np.float64, np.float32][s.rank == 1]), (2 * s.rank, 0))], shape=(2 * s.size, 3)
        ),
        um.RankMismatchError,
        ["of different types: ", "f32 on rank 1"],
    ),
    "other types that were asked for": (
        lambda s: s.distribute(None, Layout.rows(), shape=(4, 4), dtype=["f64", "f32"][s.rank == 1]),
        um.RankMismatchError,
        ["values: dtype: ", "f32 on rank 1"],
    ),
    "other new layouts": (
        lambda s: s.empty((4, 4), "f64", [Layout.rows(), Layout.cols()][s.rank == 1]),
        um.RankMismatchError,
        ["values: layout: ", "cols on rank 1"],
    ),
    "other memories": (
        lambda s: s.empty((4, 4), "f64", Layout.rows(), memory=["device", "host"][s.rank == 1]),
        um.RankMismatchError,
        ["values: memory: ", "'host' on rank 1"],
    ),
    "no corners": (
        lambda s: s.distribute_parts([np.ones((2, 3))], shape=(2 * s.size, 3)),
        um.ParamError,
        ["parts[0] is an ndarray: pass (array, (first row, first column))"],
    ),
    "a corner outside": (
        lambda s: s.distribute_parts([(np.ones((2, 3)), (-1, 0))], shape=(2 * s.size, 3)),
        um.ParamError,
        ["parts[0][1] = (-1, 0): pass the first row and column"],
    ),
}
ON_TWO = {*(name for name in BAD if name.startswith("other ")), "no array of a matrix", "parts overlap"}
ON_TWO |= {"a part is missing", "a part too many"}


@pytest.mark.parametrize("what", BAD)
def test_what_is_no_matrix_is_one_error_on_all_ranks_and_nothing_is_kept(comm, session, what, monkeypatch):
    if what in ON_TWO and comm.size == 1:
        pytest.skip("ranks differ")
    call, error, words = BAD[what]
    pinned = []
    monkeypatch.setattr(session._backend, "pin", lambda address, nbytes: pinned.append(address) or 1)
    monkeypatch.setattr(session._backend, "unpin", pinned.remove)
    before = {*session._store._held}
    expect(comm, error, words, lambda: call(session))
    left = {*session._store._held} - before
    collective_assert(comm, not left and not pinned, f"kept {left}, pinned {pinned}")


def test_parts_are_unpinned_with_their_matrix(comm, session, monkeypatch):
    pinned = []
    monkeypatch.setattr(session._backend, "pin", lambda address, nbytes: pinned.append(address) or 1)
    monkeypatch.setattr(session._backend, "unpin", pinned.remove)
    arrays = [np.ones((2, 3)), np.ones((2, 3))]
    top = 4 * session.rank
    matrix = session.distribute_parts([(arrays[0], (top, 0)), (arrays[1], (top + 2, 0))], shape=(4 * comm.size, 3))
    collective_assert(comm, pinned == [array.ctypes.data for array in arrays], str(pinned))
    session.release(matrix)
    collective_assert(comm, not pinned, str(pinned))


def test_a_part_of_c_in_the_memory_of_a_or_b_or_of_c_is_refused_with_its_rank(comm, session):
    if comm.size == 1:
        pytest.skip("parts of several ranks")
    guilty = comm.size - 1
    memory = np.ones((8, 8))
    a = session.distribute(memory[:4], Layout.rows())
    b = session.distribute(np.ones((8, 8)) if session.rank == 0 else None, Layout.whole(0))
    c = session.distribute(memory[3:7] if session.rank == guilty else np.ones((4, 8)), Layout.rows())
    expect(comm, um.ParamError, [f"C overlaps A in memory (rank {guilty})"], lambda: session.gemm(a, b, c))
    collective_assert(comm, (c.local == 1).all(), f"computed all the same: {c.local}")
    whole = session.empty_host((4, 8))
    if (guilty := ranks_per_node(comm.size) - 1) > 0:
        both = session.rank in (0, guilty)
        twice = session.distribute(whole.array if both else np.ones((4, 8)), Layout.rows())
        wanted = ["parts of C overlap in memory (ranks 0", str(guilty)]
        expect(comm, um.ParamError, wanted, lambda: session.gemm(a, b, twice))
    one = session.register(memory if session.rank == guilty else None, root=guilty)
    expect(comm, um.ParamError, ["C overlaps B in memory: pass"], lambda: session.gemm(b, one, one))


def test_a_read_only_part_cannot_be_written(comm, session):
    part = np.ones((2, 2))
    part.flags.writeable = session.rank != 0
    c = session.distribute(part, Layout.rows())
    a = session.empty((2 * comm.size, 3), "f64", Layout.rows())
    b = session.empty((3, 2), "f64", Layout.replicated())
    where = " (rank 0)" if comm.size > 1 else ""
    expect(comm, um.ParamError, [f"C is a read-only array{where}, or"], lambda: session.gemm(a, b, c))


def test_a_matrix_in_parts_says_how_and_that_it_has_no_array(comm, session):
    matrix = session.distribute(np.ones((2, 3)), Layout.rows())
    if comm.size > 1:
        words = str(matrix), matrix.location
        collective_assert(comm, "in parts (rows(2,2" in words[0] and words[1] is None, str(words))
        for wanted in (lambda: np.asarray(matrix), lambda: matrix.array):
            mend = "download" if session.machine.num_nodes == 1 else "gather"
            with pytest.raises(um.ParamError, match=rf"is not on this rank as a whole.*\.local.*{mend}"):
                wanted()


@pytest.mark.parametrize("order", "CF")
def test_single_rows_and_columns_are_stored_in_the_order_that_was_asked_for(comm, session, order):
    for layout, shape in ((Layout.cols(), (9, comm.size)), (Layout.rows(), (comm.size, 9))):
        matrix = session.empty(shape, "f64", layout, order=order)
        collective_assert(comm, matrix.order == order, f"{matrix!r}, not {order}")


def test_what_has_no_elements_is_one_array_too(comm, session):
    matrix = session.empty((8, 5), "f64", Layout.rows([8] + [0] * (comm.size - 1)), memory="host")
    given = session.distribute(np.ones((8, 5)) if comm.rank == 0 else None, Layout.rows())
    for one in (matrix, given):
        collective_assert(comm, one.local is one.local, f"{one!r}")
        wanted = (8, 5) if comm.rank == 0 else (0, 5)
        collective_assert(comm, one.local.shape == wanted, f"{one.local.shape}")


def test_matrices_in_single_parts_are_copied_to_and_take_fresh_arrays(comm, session):
    shape = (5 * comm.size, 4)
    starts = [(3 * comm.rank, 0), (3 * comm.size + 2 * comm.rank, 0)]

    def arrays(data):
        return [data[row : row + rows].copy() for (row, _), rows in zip(starts, (3, 2), strict=True)]

    first, second, right = (random_matrix(*shape, DType.f64, (seed,)) for seed in (1, 2, 3))
    a = session.distribute_parts([*zip(arrays(first), starts, strict=True)], shape=shape)
    whole = session.scatter(right if comm.rank == 0 else None, Layout.rows(), memory="host")
    b, c = session.scatter(np.eye(4) if comm.rank == 0 else None, Layout.whole(0), memory="host"), None
    session.redistribute(whole, None, out=a)
    collective_assert(comm, all(map(np.array_equal, a.local, arrays(right))), f"{a.local}")
    expect(comm, um.ParamError, ["out is of shape"], lambda: session.redistribute(b, None, out=a))
    expect(comm, um.ParamError, ["layout = None"], lambda: session.redistribute(whole, None))
    c = session.empty(shape, "f64", Layout.rows(), memory="host")
    with session.plan(a, b, c, reads_c=False) as plan:
        given = arrays(second)
        plan.execute(a=given)
        check_part(comm, c, second)
        newest = max(session._store._held)
        plan.execute(a=tuple(given))
        collective_assert(comm, max(session._store._held) == newest, "the same arrays are another matrix")
        words = ["A is of 1 array, and this rank has 2 parts"]
        expect(comm, um.ParamError, words, lambda: plan.execute(a=given[:1]))
