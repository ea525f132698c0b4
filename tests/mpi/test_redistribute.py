"""Matrices copied from one layout to another, from one rank and to one."""

from __future__ import annotations

import random

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.distributed import distributed, fill, on_host, part_of, random_layout
from tests.helpers.products import random_matrix
from tests.helpers.sessions import memories
from uncut_mpi import Layout
from uncut_mpi.model.dtypes import DType


def is_part_of(matrix, data):
    return np.array_equal(on_host(matrix.local), part_of(matrix, data))


@pytest.mark.parametrize("seed", range(8))
def test_a_matrix_takes_any_layout_comes_to_one_rank_and_goes_from_there(comm, session, seed):
    rng = random.Random(seed)
    dtype, root = rng.choice((DType.f64, DType.bf16)), rng.randrange(comm.size)
    data = random_matrix(rng.randint(0, 30), rng.randint(1, 30), dtype, (seed,))
    source = distributed(session, rng, data, rng.choice(("C", "F", "CF")))
    first = distributed(session, rng, np.full_like(data, np.nan), rng.choice(("C", "F", "CF")))
    same = session.redistribute(source, first.layout, out=first) is first
    collective_assert(comm, same and is_part_of(first, data), f"{source!r} became {first!r}: {first.local} of {data}")
    held = {*session._store._held}
    layout = random_layout(rng, data.shape, comm.size)
    memory = "host" if layout.cyclic else rng.choice((memories(comm.size)[2], None))
    second = session.redistribute(first, layout, memory=memory)
    collective_assert(comm, is_part_of(second, data), f"{first!r} became {second!r}")
    array = session.gather(second, root)
    good = (array is None) == (session.rank != root) and (array is None or np.array_equal(array, data))
    collective_assert(comm, good, f"of {second!r} rank {root} has {array}")
    left = {*session._store._held} - held
    collective_assert(comm, left == {second.info.number}, f"kept {left}")
    layout = random_layout(rng, data.shape, comm.size)
    memory = rng.choice(("device", "host") if layout.cyclic else memories(comm.size))
    third = session.scatter(array, layout, root, memory=memory)
    good = is_part_of(third, data) and third.layout == layout.filled(data.shape, comm.size)
    collective_assert(comm, good and third.memory == memory, f"scattered to {third!r}")
    left = {*session._store._held} - held
    collective_assert(comm, left == {second.info.number, third.info.number}, f"kept {left}")


def test_a_copy_into_a_matrix_that_is_there_plans_once(comm, session):
    shape = (3 * comm.size, 2 * comm.size)
    first, second = (
        session.empty(shape, "f64", Layout.rows()),
        session.empty(shape, "f64", Layout.cols(), memory="host"),
    )
    before = session.counters.planner_calls
    for seed in range(3):
        data = random_matrix(*shape, DType.f64, (seed,))
        fill(first.local, part_of(first, data))
        second.local[...] = np.nan
        same = session.redistribute(first, Layout.cols(), out=second) is second
        collective_assert(comm, same and is_part_of(second, data), f"{second.local}")
        session.barrier()
    collective_assert(comm, session.counters.planner_calls == before + 1, "planned again")
    # A product of the same matrices is another call with another plan.
    square = session.empty((2 * comm.size, 2 * comm.size), "f64", Layout.rows())
    square.local[...] = 0.0
    session.gemm(second, square, first)
    collective_assert(comm, not first.local.any(), f"{first.local}")


def test_single_rows_go_into_a_matrix_of_either_order(comm, session):
    shape = (comm.size, 5)
    data = random_matrix(*shape, DType.f32, (3,))
    rows = session.distribute(data[session.rank :][:1].copy(), Layout.rows())
    for order in "CF":
        out = session.empty(shape, "f32", Layout.replicated(), order=order)
        session.redistribute(rows, Layout.replicated(), out=out)
        collective_assert(comm, is_part_of(out, data), f"{rows!r} became {out!r}")
        rows.local[...] = np.nan
        session.redistribute(out, Layout.rows(), out=rows)
        collective_assert(comm, is_part_of(rows, data), f"{out!r} became {rows!r}")


def test_what_cannot_be_copied_is_one_error_on_all_ranks(comm, session):
    blocks = Layout.blocks([2, 2], [4], ranks=[0, comm.size - 1]) if comm.size > 1 else Layout.rows()
    a, other = session.empty((4, 4), "f64", blocks), session.empty((4, 4), "f32", Layout.whole(0))
    for words, call in (
        (
            ["out is of shape 4×4 and type f32, matrix of 4×4 and type f64", "equal"],
            lambda: session.redistribute(a, Layout.whole(0), out=other),
        ),
        (
            ["out is of layout whole(0)", "layout rows and"],
            lambda: session.redistribute(a, Layout.rows(), out=other),
        ),
        (["out overlaps matrix in memory"], lambda: session.redistribute(a, blocks, out=a)),
        (["has 3 rows, the matrix 4"], lambda: session.redistribute(a, Layout.rows([3], ranks=[0]))),
        (["names rank"], lambda: session.scatter(np.ones((4, 4)), Layout.whole(comm.size))),
        (["memory = 'gpu'"], lambda: session.scatter(np.ones((4, 4)), Layout.rows(), memory="gpu")),
        (["root = "], lambda: session.gather(a, comm.size)),
        (["gather: matrix is an ndarray"], lambda: session.gather(np.ones((4, 4)))),
    ):
        expect(comm, um.ParamError, words, call)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_ask_for_different_copies_get_one_error(comm, session):
    odd = comm.rank == 1
    a, b = (session.empty((6, 6), "f64", layout, memory="host") for layout in (Layout.rows(), Layout.cols()))
    for matrix in (a, b):
        matrix.local[...] = 1.0
    same, x, y = Layout.rows(), a.info, b.info
    for words, call in (
        (["layout: ", "rows on ", "cols on "], lambda: session.redistribute(a, [same, Layout.cols()][odd])),
        (["out: ", f"{y} on ", "None"], lambda: session.redistribute(a, Layout.cols(), out=[b, None][odd])),
        (
            ["memory: ", "'host' on ", "'device' on "],
            lambda: session.redistribute(a, same, memory=["host", "device"][odd]),
        ),
        (["root: ", "0 on", "1 on "], lambda: session.scatter(np.ones((6, 6)), same, root=int(odd))),
        (["matrix: ", f"{x} on ", f"{y} on "], lambda: session.gather([a, b][odd])),
        (["out: ", f"{y} on ", "nothing"], lambda: session.gemm(a, a, [b, None][odd])),
        (["out_layout: ", "rows on ", "cols on "], lambda: session.gemm(a, a, out_layout=[same, Layout.cols()][odd])),
    ):
        expect(comm, um.RankMismatchError, [*words, "values: "], call)
    collective_assert(comm, (b.local == 1.0).all(), f"copied all the same: {b.local}")
