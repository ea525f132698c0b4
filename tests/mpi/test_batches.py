"""Batches: arrays of three dimensions and lists of matrices, multiplied as one product."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.distributed import distributed, fill, on_host
from tests.helpers.numbers import factors_of, op_of, random_values
from tests.helpers.products import Case, array_of, as_numpy, expected, set_matrix, shows
from tests.helpers.sessions import memories
from uncut_mpi import Layout
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning import chunks

pytestmark = pytest.mark.mpi


def made(session, rng, data, order, memory):
    """Return `data`, of three dimensions, as a batch in memory of some kind, dealt at random, with gaps or not."""
    count, size = len(data), session.size
    edges = [0, *sorted(rng.randint(0, count) for _ in range(size - 1)), count]
    counts, root, gap = (
        [stop - start for start, stop in itertools.pairwise(edges)],
        rng.randrange(size),
        rng.choice((0, 2)),
    )
    layout = rng.choice(
        (Layout.rows(counts, ranks=rng.sample(range(size), size)), Layout.whole(root), Layout.replicated())
    )
    if memory == "shared":
        layout = Layout.rows(counts)
    if memory != "host":
        batch = session.empty(data.shape, data.dtype, layout, order=order, memory=memory)
    else:
        own = layout.indices((count, 1), session.rank, num_ranks=size)[0]
        around = (len(own), data.shape[1] + gap * (order == "C"), data.shape[2] + gap * (order == "F"))
        array = np.full(around, np.nan, data.dtype)
        if order == "F":
            array = np.full((around[0], *around[:0:-1]), np.nan, data.dtype).swapaxes(1, 2)
        part = array[:, : data.shape[1], : data.shape[2]]
        if layout.kind == "whole":
            batch = session.register(part if session.rank == root else None, root=root)
        else:
            batch = session.distribute(part if len(own) else None, layout, shape=rng.choice((None, data.shape)))
    own = batch.layout.indices((count, 1), session.rank, num_ranks=size)[0]
    fill(batch.local, data[own])
    return batch


def matrix(session, rng, data, order):
    """Return `data` as a matrix, dealt at random."""
    return (
        distributed(session, rng, data, order) if data.size else session.empty_host(data.shape, data.dtype, order=order)
    )


def wrong(session, batch, wanted, bound):
    """Return which products of a batch, or list, are off by more than a bound in what this rank has; empty if none."""
    if isinstance(batch, um.Batch):
        own = batch.layout.indices((len(batch), 1), session.rank, num_ranks=session.size)[0]
        pairs = [(number, found, ...) for number, found in zip(own, on_host(batch.local), strict=True)]
    else:
        pairs = [(number, on_host(one.local), np.ix_(*one.local_indices)) for number, one in enumerate(batch)]
    off = [number for number, found, at in pairs if not (np.abs(found - wanted[number][at]) <= bound[number][at]).all()]
    return f"products {off} are wrong" if off else ""


@pytest.mark.parametrize("seed", range(24))
def test_batches_and_lists_are_multiplied_product_by_product(comm, session, seed):
    rng, values = random.Random(seed), np.random.default_rng(seed)
    dtype = rng.choice((DType.f64, DType.f64, DType.f32, DType.bf16, DType.c64))
    count, listed, single = rng.choice((1, 2, 7, 13)), seed % 2, rng.choice((None, None, 0, 1))
    trans, orders = rng.choices("NTC", k=2), rng.choices("CF", k=3)
    alpha, beta = factors_of(dtype) if rng.random() < 0.5 else (1.0, 0.0)
    shapes = [[rng.choice((0, *range(1, 13), *range(1, 13))) for _ in range(3)] for _ in range(count)]
    for at in range(count):  # of equal shapes, or of those that one matrix for all allows
        keep = (1, 1, 1) if not listed else ((1, 0, 1) if single == 0 else (0, 1, 1) if single == 1 else (0, 0, 0))
        shapes[at] = [first if kept else own for first, kept, own in zip(shapes[0], keep, shapes[at], strict=True)]
    a = [random_values(values, (m, k) if trans[0] == "N" else (k, m), dtype) for m, n, k in shapes]
    b = [random_values(values, (k, n) if trans[1] == "N" else (n, k), dtype) for m, n, k in shapes]
    c = [random_values(values, (m, n), dtype) for m, n, k in shapes]
    given = [a, b, c if beta else [np.full_like(one, np.nan) for one in c]]
    operands = []
    for at, (data, order) in enumerate(zip(given, orders, strict=True)):
        if at == single:
            data[:] = [data[0]] * count
            operands.append(matrix(session, rng, data[0], order))
        elif listed:
            operands.append([matrix(session, rng, one, order) for one in data])
        else:
            seen = rng.choice((None, "T", "H")) if at < 2 else rng.choice((None, "T"))
            stack = (
                np.stack(data) if seen is None else np.stack([op_of({"T": "T", "H": "C"}[seen], one) for one in data])
            )
            batch = made(session, rng, stack, order, rng.choice(memories(comm.size)))
            operands.append(batch if seen is None else getattr(batch, seen))
    both = [
        expected(
            Case(m, n, k, dtype=dtype.name, trans_a=trans[0], trans_b=trans[1], alpha=alpha, beta=beta),
            SimpleNamespace(a_MK=x, b_KN=y, c_MN=z, on_gpus=False),
        )
        for (m, n, k), x, y, z in zip(shapes, *given, strict=True)
    ]
    how = {"alpha": alpha, "beta": beta, "trans_a": trans[0], "trans_b": trans[1]}
    told = f"seed {seed}: {count} of {shapes[0]} {dtype.name} {orders} {how}, {operands}"
    session.gemm_batch(*operands, **how) if listed else session.gemm(*operands, **how)
    off = wrong(session, operands[2], *zip(*both, strict=True))
    collective_assert(comm, not off, f"{told}: {off}")
    if beta:
        return
    before = session.counters.planner_calls, session.counters.allocations
    session.gemm_batch(*operands, **how)
    again = session.counters.planner_calls, session.counters.allocations
    collective_assert(comm, again == before, f"{told}: planned or allocated again")
    if not listed:
        new = session.gemm(*operands[:2], **how)
        off = wrong(session, new, *zip(*both, strict=True))
        collective_assert(comm, not off and new.shape == operands[2].shape, f"{told}: new {new!r}: {off}")


@pytest.mark.parametrize("seed", range(12))
def test_batches_are_copied_as_matrices_are(comm, session, seed):
    rng, values = random.Random(seed), np.random.default_rng(seed)
    dtype, count = rng.choice((DType.f64, DType.bf16, DType.c64)), rng.choice((0, 1, 2, 9))
    data = random_values(values, (count, rng.randint(1, 6), rng.randint(1, 6)), dtype)
    kinds = [one for one in memories(comm.size) if count or one != "host"]
    source = made(session, rng, data, rng.choice("CF"), rng.choice(kinds))
    first, stop = sorted(rng.choices(range(count + 1), k=2))
    seen, wanted = rng.choice(((source, data), (source[first:stop], data[first:stop])))
    if rng.random() < 0.4:
        seen, wanted = seen.T, wanted.swapaxes(1, 2)
    told, root = f"seed {seed}: {dtype.name} {seen!r} of {source!r}", rng.randrange(session.size)

    def check(found, where=None):
        same = found is None or np.array_equal(on_host(found), wanted[... if where is None else where])
        collective_assert(comm, same, f"{told}: {found}")

    def check_local(batch):
        own = batch.layout.indices((len(batch), 1), session.rank, num_ranks=session.size)[0]
        check(batch.local, own)

    gathered = session.gather(seen, root)
    collective_assert(comm, (gathered is None) == (session.rank != root), f"{told}: {gathered}")
    check(gathered)
    below = session.download(seen)
    check(array_of(below))
    collective_assert(comm, session.download(below) is below, told)
    edges = [0, *sorted(rng.randint(0, len(wanted)) for _ in range(session.size - 1)), len(wanted)]
    counts = [stop - start for start, stop in itertools.pairwise(edges)]
    layouts = Layout.rows(), Layout.rows(counts), Layout.whole(root), Layout.replicated()
    for layout in rng.sample(layouts, 2):
        other = session.redistribute(seen, layout, memory=rng.choice(("host", "device")))
        check_local(other)
        given = np.ascontiguousarray(wanted) if session.rank == root else None
        check_local(session.scatter(given, layout, root, memory="host"))
        for order in "CF":
            out = session.empty(wanted.shape, dtype, layout, order=order, memory=rng.choice(("host", "device")))
            fill(out.local, np.nan)
            collective_assert(comm, session.redistribute(seen, rng.choice((None, layout)), out=out) is out, told)
            check_local(out)
            fill(out.local, np.nan)
            session.upload(below, out)
            check_local(out)


@pytest.mark.one_node("what is compared are plans by rule, and searches find others there")
@pytest.mark.parametrize("memory", ["host", "device"])
def test_the_fastest_result_of_batches_is_dealt_as_one_of_them_or_evenly(comm, session, memory):
    size, values = session.size, np.random.default_rng(comm.rank)
    counts = [0] * (size - 1) + [64]  # all on the last one
    a, b = (session.empty((64, 96, 96), "f64", Layout.rows(counts), memory=memory) for _ in "ab")
    fill(a.local, mine := values.random((counts[comm.rank], 96, 96)))
    fill(b.local, mine)
    for first, second in ((a, b), (a.T, b.H), (a, b[7]), (b[7], a)):
        c = session.gemm(first, second, out_layout="auto")
        told = f"{c!r} of {first!r} and {second!r}"
        collective_assert(
            comm, c.shape == (64, 96, 96) and c.layout in (a.layout, Layout.rows().filled((64, 1), size)), told
        )
        times = {}
        for layout in (a.layout, Layout.rows().filled((64, 1), size)):
            out = session.empty((64, 96, 96), "f64", layout, memory=memory)
            with session.plan(first, second, out, reads_c=False) as plan:
                times[str(layout)] = plan.summary.predicted_s
        collective_assert(comm, times[str(c.layout)] == min(times.values()), f"{told}: {times}")
        every = comm.bcast(session.gather(a))
        x, y = (
            every if one is a or one is b else every[7] if isinstance(one, um.Matrix) else every.swapaxes(1, 2)
            for one in (first, second)
        )
        own = c.layout.indices((64, 1), session.rank, num_ranks=size)[0]
        wanted = (x @ y)[own]
        collective_assert(comm, np.allclose(c.local, wanted, rtol=1e-12), told)
    whole = session.empty_host((3, 4, 4))
    collective_assert(comm, session.gemm(whole, whole, out_layout="auto").shape == (3, 4, 4), "of whole ones")


@pytest.mark.parametrize("order", "CF")
def test_one_matrix_for_all_is_multiplied_in_chunks_where_there_is_little_memory(
    comm, open_session, monkeypatch, order
):
    monkeypatch.setattr(chunks, "MOST_TASKS", 60)
    monkeypatch.setattr(chunks, "STEP", 8)
    values = np.random.default_rng(1)
    single, several = values.random((90, 90)), values.random((9, 90, 90))
    with open_session(comm, device_memory=96 << 10, verify=True) as session:
        one, batch, out = session.empty_host((90, 90)), *(session.empty_host((9, 90, 90), order=order) for _ in "bc")
        if session.rank == 0:
            one.array[...], batch.array[...], out.array[...] = single, several, np.nan
        session.barrier()
        operands = (batch, one) if order == "C" else (one, batch)
        with session.plan(*operands, out, reads_c=False) as plan:
            collective_assert(comm, plan.summary.chunks > 1, f"{plan.summary}")
            plan.execute()
        wanted = several @ single if order == "C" else single @ several
        collective_assert(comm, shows(out, wanted, np.allclose, rtol=1e-12), f"{as_numpy(out)}")


@pytest.mark.parametrize(("order", "first"), [("C", True), ("F", False), ("C", False)])
def test_one_matrix_for_all_that_is_there_is_copied_nowhere(comm, session, order, first):
    values, size = np.random.default_rng(4), session.size
    single, several = values.random((6, 6)), values.random((5 * size, 6, 6))
    counts = Layout.rows([5] * size)
    x, out = (session.empty(several.shape, "f64", counts, order=order, memory="device") for _ in "xc")
    one = session.empty((6, 6), "f64", Layout.replicated(), memory="device")
    own = slice(5 * comm.rank, 5 * comm.rank + 5)
    fill(x.local, several[own])
    fill(one.local, single)
    fill(out.local, np.nan)
    operands = (one, x) if first else (x, one)
    with session.plan(*operands, out, reads_c=False) as plan:
        summary = plan.summary
        collective_assert(comm, not any(summary.bytes_by_link.values()), f"{summary}")
        plan.execute()
    wanted = (single @ several if first else several @ single)[own]
    collective_assert(comm, np.allclose(out.local, wanted, rtol=1e-12), f"{out.local}")


def test_a_list_has_matrices_in_files(comm, session, mpi_tmp_path):
    rng = np.random.default_rng(2)
    shapes = [(5, 7, 6), (40, 1, 33), (3, 3, 3), (8, 0, 2)]
    a, b = [rng.random((m, k)) for m, _, k in shapes], [rng.random((k, n)) for _, n, k in shapes]
    if comm.rank == 0:
        for number, data in enumerate(a):
            np.save(mpi_tmp_path / f"{number}.npy", data)
    comm.Barrier()
    files = [session.open_file(mpi_tmp_path / f"{number}.npy") for number in range(3)]
    ms = [*files, session.register(a[3] if comm.rank == 0 else None, root=0)]
    ns = [session.register(one if comm.rank == comm.size - 1 else None, root=comm.size - 1) for one in b]
    out = [session.empty_host((m, n)) for m, n, _ in shapes]
    for _ in range(2):
        session.gemm_batch(ms, ns, out)
        good = all(shows(c, x @ y, np.allclose, rtol=1e-12) for c, x, y in zip(out, a, b, strict=True))
        collective_assert(comm, good, f"{as_numpy(out[0])}")
    file = session.create_file(mpi_tmp_path / "C.npy", (3, 3), "f8")
    expect(
        comm,
        um.ParamError,
        ["out has a matrix in the file"],
        lambda: session.gemm_batch(ms[2:3] * 2, ns[2], [out[2], file]),
    )
    for one in (*files, file):
        session.release(one)


def test_ranks_multiply_their_matrices_of_a_batch(comm):
    values = np.random.default_rng(comm.rank)
    a, b = (values.random((3 + comm.rank, *shape)) for shape in ((4, 3), (3, 5)))
    found = um.matmul(comm, a, b)
    collective_assert(comm, found.shape == (3 + comm.rank, 4, 5) and np.allclose(found, a @ b), f"{found}")
    one = np.random.default_rng(9).random((3, 5))
    rows = np.array_split(one, comm.size)[comm.rank]
    found = um.matmul(comm, a, rows)
    collective_assert(comm, np.allclose(found, a @ one), f"{found}")
    none = um.matmul(comm, a if comm.rank == 0 else None, b if comm.rank == 0 else None)
    good = np.allclose(none, a @ b) if comm.rank == 0 else none.shape == (0, 4, 5)
    collective_assert(comm, good, f"{none}")
    expect(comm, um.ParamError, ["A and B have"], lambda: um.matmul(comm, a, b[:2]))


def test_a_batch_is_a_sequence_of_matrices_in_the_memory_that_was_given(comm, session):
    root, data = session.size - 1, random_values(np.random.default_rng(1), (5, 4, 3), DType.f64)
    batch = session.register(data if session.rank == root else None, root=root)
    same = batch.local is data and batch.array is data if session.rank == root else batch.local.shape == (0, 4, 3)
    told = [
        batch.shape,
        len(batch),
        batch.dtype.name,
        batch.order,
        str(batch.layout),
        batch.memory,
        str(batch.location),
    ]
    collective_assert(
        comm, same and told == [(5, 4, 3), 5, "f64", "C", f"whole({root})", "host", f"h{root}"], str(told)
    )
    views = (
        (batch[1:4], data[1:4]),
        (batch[-2:][0], data[-2]),
        (batch.T[3], data[3].T),
        (batch[2:].mT[:2], data[2:4].swapaxes(1, 2)),
        (batch[3:1], data[3:1]),
        (batch[4][1:, :2], data[4][1:, :2]),
        ([*batch][2], data[2]),
    )
    for view, part in views:
        there = session.rank != root or (shows(view, part) and np.array_equal(np.asarray(view), part))
        collective_assert(comm, view.shape == part.shape and there, f"{view!r} is not {part}")
    for key, kind in ((5, IndexError), (1.5, TypeError), (slice(0, 5, 2), um.ParamError)):
        with pytest.raises(kind):
            batch[key]
    expect(comm, um.ParamError, ["is a view", "release the batch"], lambda: session.release(batch[1:]))
    one = batch[1]
    session.release(batch)
    expect(comm, um.ParamError, ["released"], lambda: session.gemm(one, one))
    expect(
        comm,
        um.ParamError,
        ["B is a batch that was released"],
        lambda: session.gemm(session.empty_host((5, 3, 4)), batch),
    )


def test_what_makes_no_product_of_batches_is_one_error_on_all_ranks_and_nothing_is_written(comm, session):
    a, b, c = (session.empty_host((4, 3, 3)) for _ in "abc")
    wide, single = session.empty_host((4, 3, 5)), session.empty_host((4, 3, 3), "f32")
    set_matrix(session, c, 7.0)
    rank, listed = min(session.rank, 2), session.gemm_batch
    cases = (
        (lambda: session.gemm(a, b[1:], c), um.ParamError, ["A has 4 products, B has 3 products, C has 4 products"]),
        (lambda: session.gemm(a[:2], b), um.ParamError, ["A and B have 2 and 4 products"]),
        (lambda: session.gemm(a, b, c[0]), um.ParamError, ["C is one matrix"]),
        (lambda: session.gemm(a[0], b[0], c), um.ParamError, ["A is one matrix, B is one matrix, C has 4 products"]),
        (lambda: session.gemm(wide, a), um.ParamError, ["op(A) is 3×5 and op(B) is 3×3"]),
        (lambda: session.gemm(a, wide, c), um.ParamError, ["shapes of product 0 do not fit", "op(B) is 3×5"]),
        (lambda: listed([a[0], a[1][1:]], b[0], [c[0], c[1]]), um.ParamError, ["shapes of product 1", "op(A) is 2×3"]),
        (lambda: listed([a[0][1:], a[1]], b[0], [c[0], c[1][1:]]), um.ParamError, ["shapes of product 0"]),
        (lambda: session.gemm(a, single, c), um.ParamError, ["B is f32"]),
        (lambda: listed([a[0], single[1]], b[:2], c[:2]), um.ParamError, ["number 1 of a list", "is f32"]),
        (lambda: session.gemm(a[1:], b[1:], a[:3]), um.ParamError, ["C overlaps A"]),
        (lambda: session.gemm(a, b, a), um.ParamError, ["C overlaps A"]),
        (lambda: session.gemm(b[0], a[0], a[0]), um.ParamError, ["C overlaps B"]),
        (lambda: listed(a[:2], b[:2], [c[0], c[0][:, :3]]), um.ParamError, ["parts of C overlap"]),
        (lambda: listed([a[0], None], b[:2], c[:2]), um.ParamError, ["A[1] is None"]),
        (lambda: listed([a[0], b], b[:2], c[:2]), um.ParamError, ["A[1] is a Batch"]),
        (lambda: session.gemm(a[rank : rank + 1], b[:1], c[:1]), um.RankMismatchError, ["[0:3, 0:3] on rank 0"]),
        (
            lambda: session.gemm(a[:2], b[:2], c[rank : rank + 2]),
            um.RankMismatchError,
            ["out: batch", "[0:2] on rank 0"],
        ),
        (lambda: listed([a[0], b[rank]], b[:2], c[:2]), um.RankMismatchError, ["[0:3, 0:3]", "on rank 0"]),
        (lambda: session.gemm(a, b, beta=2.0), um.ParamError, ["there is no C"]),
        (lambda: session.gemm(a, b, out_layout=Layout.cols()), um.ParamError, ["Layout.rows()"]),
        (lambda: session.redistribute(a, Layout.cols()), um.ParamError, ["whole products"]),
        (lambda: session.redistribute(a, None, out=wide), um.ParamError, ["4×3×3: 4×3×5 was given"]),
        (lambda: session.redistribute(a, None, out=single), um.ParamError, ["out is", "f32"]),
        (lambda: session.redistribute(a[1:], None, out=a[:3]), um.ParamError, ["out overlaps matrix"]),
        (
            lambda: session.redistribute(a[rank : rank + 1], None, out=c[3:]),
            um.RankMismatchError,
            ["[0:3, 0:3] on rank 0"],
        ),
        (lambda: session.upload(a, b[0]), um.ParamError, ["4×3×3: 3×3 was given"]),
        (lambda: session.gather(a, comm.size), um.ParamError, ["is not a rank"]),
        (
            lambda: session.distribute(np.zeros((2, 3, 3 + rank)), Layout.rows()),
            um.RankMismatchError,
            ["different shapes"],
        ),
        (
            lambda: session.distribute(np.zeros((2, 3, 3)[rank > 0 :]), Layout.rows()),
            um.RankMismatchError,
            ["2 dimensions"],
        ),
        (lambda: session.distribute(np.zeros((2, 3, 3)), Layout.cols()), um.ParamError, ["whole products"]),
        (lambda: session.distribute(np.zeros((2, 3, 3)), Layout.rows((9,) * comm.size)), um.ParamError, ["2 of 3×3"]),
        (lambda: session.distribute(None, Layout.rows(), shape=(2, 3, 3), dtype="f4"), um.ParamError, ["0 of 3×3"]),
    )
    for call, kind, words in cases:
        if kind is um.RankMismatchError and comm.size == 1:
            continue
        expect(comm, kind, words, call)
    collective_assert(comm, shows(c, 7.0), "C was written")


def test_an_empty_batch_does_nothing_and_a_plan_takes_other_batches(comm, session):
    none = session.gemm(session.empty_host((0, 3, 4)), session.empty_host((0, 4, 2)))
    collective_assert(comm, none.shape == (0, 3, 2) and session.gemm_batch([], [], []) == [], f"{none!r}")
    counts = [3] + [1] * (comm.size - 1)
    a, b, c, d = (session.empty((sum(counts), 6, 6), "f64", Layout.rows(counts), memory="device") for _ in "abcd")
    for at, one in enumerate((a, b, c, d)):
        one.local[...] = at + session.rank if at < 2 else np.nan
    with session.plan(a, b, c, reads_c=False) as plan:
        plan.execute()
        plan.execute(c=d)
        plan.execute(2.0, a=b, c=c)
        expect(comm, um.ParamError, ["C has", "products"], lambda: plan.execute(c=d[1:]))
    rank = session.rank
    good = (d.local == 6.0 * rank * (rank + 1)).all() and (c.local == 12.0 * (rank + 1) ** 2).all()
    collective_assert(comm, good, f"{c.local}, {d.local}")


def test_batches_that_are_not_waited_for_are_done_in_their_order(comm, session):
    a, b, c = (session.empty_host((3, 8, 8)) for _ in "abc")
    listed = [session.empty_host((8, 8)) for _ in range(3)]
    if session.rank == 0:
        a.array[...], b.array[...] = 2.0, 3.0
    session.barrier()
    first = session.gemm(a, b, c, wait=False)
    second = session.gemm_batch([*c], b[0], listed, wait=False)
    kept = first.wait() is c and second.wait() is listed
    good = shows(c, 48.0) and all(shows(one, 1152.0) for one in listed)
    collective_assert(comm, kept and good, f"{as_numpy(c)}, {[as_numpy(one) for one in listed]}")
