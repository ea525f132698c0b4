"""Views: rows, columns and the transposed of a matrix, on all ranks, as A, B and C."""

from __future__ import annotations

import gc
import random
import weakref

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.distributed import address_of, check_copies, check_part, distributed, made_of, on_host, part_of
from tests.helpers.products import array_of, random_matrix, shared_of, shows
from tests.helpers.sessions import memories
from uncut_mpi import Layout
from uncut_mpi.api import matrix as api_matrix
from uncut_mpi.model.dtypes import DType


def seen(session, rng, data, order):
    """Return `data` as a view of a larger matrix that is NaN elsewhere; the matrix; where in it the view is."""
    before, after = ([rng.choice((0, 0, 1, 5)) for _ in range(2)] for _ in range(2))
    turned, twice = rng.random() < 0.5, rng.random() < 0.5
    inside = data.T if turned else data
    around = np.full(tuple(map(sum, zip(before, inside.shape, after, strict=True))), np.nan, data.dtype)
    place = tuple(slice(first, first + extent) for first, extent in zip(before, inside.shape, strict=True))
    around[place] = inside
    whole = distributed(session, rng, around, order)
    if not turned:
        return (whole[place] if not twice else whole[place[0]][:, place[1]]), whole, place
    return (whole[place].T if not twice else whole.T[place[::-1]]), whole, place


@pytest.mark.parametrize("seed", range(10))
def test_views_are_multiplied_where_they_are_and_nothing_around_them_is_touched(comm, session, seed):
    rng = random.Random(seed)
    dtype = rng.choice((DType.f64, DType.f64, DType.f32))
    m, n, k = (rng.randint(1, 30) for _ in range(3))
    orders, beta = rng.choices("CF", k=3), rng.choice((0.0, 0.75))
    a_MK, b_KN, c_MN = (random_matrix(*shape, dtype, (seed, at)) for at, shape in enumerate(((m, k), (k, n), (m, n))))
    operands = [seen(session, rng, data, order) for data, order in zip((a_MK, b_KN, c_MN), orders, strict=True)]
    (a, *_), (b, *_), (c, whole, place) = operands
    told = f"seed {seed}: {a!r} x {b!r} = {c!r}, beta {beta}"
    for one, data in ((a, a_MK), (b, b_KN), (c, c_MN)):
        same = one.shape == data.shape and np.array_equal(on_host(one.local), part_of(one, data))
        kept = array_of(one) is None or np.array_equal(on_host(one.array), data)
        alone = one.local.size and one.memory != "shared"
        there = not alone or address_of(one.local) == one.address
        collective_assert(comm, same and kept and there, f"{told}: {one!r} has {one.local}")
    session.gemm(a, b, c, alpha=1.25, beta=beta)
    wide = [x.astype(np.float64) for x in (a_MK, b_KN, c_MN)]
    product = 1.25 * wide[0] @ wide[1] + beta * wide[2]
    wanted = np.full(whole.shape, np.nan)
    wanted[place] = product.T if c.info.view and c.info.view.turned else product
    limit = (k + 3) * dtype.unit_roundoff * (1.25 * k + 1)
    right = np.allclose(on_host(whole.local), part_of(whole, wanted), 0.0, limit, equal_nan=True)
    collective_assert(comm, right, f"{told}: {whole.local}")


def test_a_view_is_what_its_name_says_and_lasts_as_long_as_its_matrix(comm, session):
    data = random_matrix(12, 10, DType.f64, (1,))
    matrix = made_of(session, data, Layout.rows(), memory="host")
    cases = (
        (matrix[2:9, 3:7], data[2:9, 3:7]),
        (matrix[2:], data[2:]),
        (matrix[-4:, :-1], data[-4:, :-1]),
        (matrix[5:3, :], data[5:3, :]),
        (matrix[:, 4:4], data[:, 4:4]),
        (matrix[3:90], data[3:90]),
        (matrix.T, data.T),
        (matrix.T[1:6, 2:], data.T[1:6, 2:]),
        (matrix[2:9].T[1:6].T[1:, 2:], data[2:9].T[1:6].T[1:, 2:]),
    )
    for view, part in cases:
        told = f"{view!r} has {view.local} of {part}"
        good = view.shape == part.shape and np.array_equal(view.local, part_of(view, part))
        collective_assert(comm, good and np.shares_memory(view.local, matrix.local) == bool(view.local.size), told)
        shapes = [view.layout.local_shape(view.shape, rank, num_ranks=comm.size) for rank in range(comm.size)]
        collective_assert(comm, shapes[comm.rank] == view.local.shape, f"{told}: {view.layout} says {shapes}")
        check_copies(comm, session, view, part)
    collective_assert(comm, matrix.T.T is matrix and matrix[:, :] is matrix and matrix[2:] is cases[1][0], "made anew")
    values = random_matrix(7, 10, DType.f64, (2,))
    shared = shared_of(session, values)
    target = matrix[2:9]
    session.upload(shared, target)
    collective_assert(comm, np.array_equal(target.local, values[target.local_indices[0]]), f"{target.local}")
    expect(comm, um.ParamError, ["[2:9, 0:10] is a view", "release the matrix"], lambda: session.release(target))
    session.release(shared)
    session.release(matrix)
    expect(comm, um.ParamError, ["released"], lambda: session.gather(target))
    expect(comm, um.ParamError, ["released"], lambda: target[1:])


def test_a_view_keeps_its_matrix_alive_and_goes_with_it(comm, session):
    matrix = session.empty((4 * comm.size, 4), "f64", Layout.rows(), memory="host")
    number, gone = matrix.info.number, weakref.ref(matrix)
    view = matrix.T
    del matrix
    gc.collect()
    other = session.empty((4, 4), "f64", Layout.whole(0))  # which frees what all ranks have dropped
    collective_assert(comm, gone() is not None and number in session._store._held, "the matrix went before its view")
    del view
    gc.collect()
    session.release(other)
    session.release(session.empty((4, 4), "f64", Layout.whole(0)))
    collective_assert(comm, gone() is None and number not in session._store._held, "the matrix stays")


def test_matrices_and_views_have_the_operator_of_products(comm, session):
    data = random_matrix(9, 6, DType.f64, (57,))
    a = made_of(session, data, Layout.rows(), memory="host")
    for found, wanted in ((a.T @ a, data.T @ data), (a @ a.T, data @ data.T), (a[:, :3].T @ a, data[:, :3].T @ data)):
        check_part(comm, found, wanted)
    expect(comm, um.ParamError, ["shapes do not fit"], lambda: a @ a)
    other = None if comm.rank == comm.size - 1 else a.T
    expect(comm, um.ParamError, ["B is None"], lambda: a @ other)
    session.release(a)
    expect(comm, um.ParamError, ["was released", "nothing to multiply"], lambda: a @ a)


def test_views_of_one_matrix_may_be_operands_of_one_product_unless_they_overlap(comm, session):
    n = 6
    data = random_matrix(3 * n, n, DType.f64, (3,))
    ways = (Layout.rows(), "host"), (Layout.cols(), "device"), (Layout.rows(), memories(comm.size)[2])
    for layout, memory in dict.fromkeys(ways):
        matrix = made_of(session, data, layout, memory=memory)
        a, b, c = matrix[:n], matrix[n : 2 * n].T, matrix[2 * n :]
        calls = session.counters.planner_calls
        for _ in range(2):
            session.gemm(a, b, c)
        check_part(comm, matrix, np.vstack((data[: 2 * n], data[:n] @ data[n : 2 * n].T)))
        collective_assert(comm, session.counters.planner_calls == calls + 1, "planned again")
        for overlapped, product in (
            ("A", (a, b, a)),
            ("A", (a.T, b.T, matrix[n - 1 : 2 * n - 1])),
            ("B", (c, b, matrix[1 : n + 1])),
            ("B", (c, b, matrix[1 : n + 1].T)),
        ):
            words = [f"C overlaps {overlapped} in memory"]
            expect(comm, um.ParamError, words, lambda product=product: session.gemm(*product))


@pytest.mark.mpi(min_size=2)
def test_copies_of_a_view_are_in_memory_that_all_ranks_agree_on(comm, session):
    data = random_matrix(2 * comm.size, 4, DType.f64, (7,))
    shared, part = session.empty_host((2, 4)), np.empty((2, 4))
    part = shared.array if comm.rank == 0 else part
    part[...] = data[2 * comm.rank : 2 * comm.rank + 2]
    matrix = session.distribute(part, Layout.rows())
    for view, there in ((matrix[:2], data[:2]), (matrix[:1, 1:1], data[:1, 1:1])):
        made = session.redistribute(view, Layout.whole(1))
        good = comm.rank != 1 or np.array_equal(made.local, there)
        copy = session.download(view)
        good &= shows(copy, there)
        good &= session.gemm(view.T, view).shape == (there.shape[1],) * 2
        collective_assert(comm, good, f"{made!r}, {copy!r}: {array_of(copy)}")
        target = session.empty_device(there.shape, rank=0)
        expect(comm, um.ParamError, ["not in shared host memory"], lambda of=view, to=target: session.upload(of, to))


def test_what_is_conjugated_is_downloaded_from_no_memory(comm, session):
    for matrix in (session.empty_host((3, 2), "c64"), session.empty_device((3, 2), "c64", rank=0)):
        mapped = len(session._store._held)
        expect(comm, um.ParamError, ["conjugated, which products alone do"], lambda of=matrix: session.download(of.H))
        collective_assert(comm, len(session._store._held) == mapped, "a copy is left")


def test_what_is_known_of_views_is_bounded_and_right_when_it_is_found_again(comm, session, monkeypatch):
    parts = comm.size  # rows of blocks on each rank
    monkeypatch.setattr(api_matrix, "_MOST_SEEN", 6 * parts)
    data = np.arange(144.0).reshape(12, 12)
    matrix = made_of(session, data, Layout.rows())
    for _ in range(2):
        for stop in range(1, 12):
            check_part(comm, matrix[:stop, stop:], data[:stop, stop:], f"to {stop}")
    held = len(matrix._seen) * len(matrix.info.parts)
    collective_assert(comm, 0 < held <= 6 * parts, f"{held} parts of views are known")
