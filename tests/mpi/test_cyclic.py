"""Matrices in ScaLAPACK's block-cyclic layout: the manual's program, offsets, other layouts beside it, bad input."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.distributed import check_copies
from tests.helpers.products import random_matrix
from uncut_mpi import Layout
from uncut_mpi.model.dtypes import DType

pytestmark = pytest.mark.mpi

CYCLIC = """\
import cupy as cp, numpy as np, uncut_mpi as um # mpiexec -n 4 python cyclic.py
from mpi4py import MPI
comm = MPI.COMM_WORLD
m, n, k = 5000, 3000, 4100
L = um.Layout.block_cyclic(256, 256, grid=(2, 2))
with um.Session(comm, backend="cuda") as s:
    def part(shape):
        r, q = L.local_shape(shape, s.rank)
        big = cp.empty((r + 32, q), order="F")  # leading dimension above the local rows
        big[:r] = cp.random.standard_normal((r, q))
        return big[:r]
    a = s.distribute(part((m, k)), L, shape=(m, k))
    b = s.distribute(part((k, n)), L, shape=(k, n))
    c = s.empty((m, n), "f64", L, order="F")
    s.gemm(a, b, c)
    A, B, C = (s.gather(x, 0) for x in (a, b, c))
    if s.rank == 0:
        np.testing.assert_allclose(C, A @ B, atol=1e-9)
"""
GRIDS = {1: (1, 1), 2: (1, 2), 3: (3, 1), 4: (2, 2), 5: (1, 5), 6: (2, 3), 7: (7, 1), 8: (4, 2)}


def test_the_program_of_the_manual_is_right(comm, backend_name):
    text = CYCLIC.replace("grid=(2, 2)", f"grid={GRIDS[comm.size]}")
    if backend_name == "host":
        text = text.replace("import cupy as cp, numpy as np,", "import numpy as np, numpy as cp,")
        text = text.replace('backend="cuda"', 'backend="host"').replace("5000, 3000, 4100", "500, 300, 410")
        text = text.replace("block_cyclic(256, 256,", "block_cyclic(32, 32,")
    exec(compile(text, "cyclic.py", "exec"), {})


def layout_of(comm, mb=3, nb=4, **more):
    return Layout.block_cyclic(mb, nb, GRIDS[comm.size], **more)


def dealt(session, data, layout, **more):
    """Return a matrix with these elements: each rank's part in host memory."""
    rows, cols = layout.indices(data.shape, session.rank)
    return session.distribute(np.array(data[np.ix_(rows, cols)], **more), layout, shape=data.shape)


def test_a_rank_has_its_blocks_and_views_of_them_at_any_offset(comm, session):
    data = random_matrix(31, 26, DType.f64, (1,))
    layout = layout_of(comm, source=(GRIDS[comm.size][0] - 1, 0))
    matrix = dealt(session, data, layout)
    for view, part in (
        (matrix, data),
        (matrix[4:29, 2:], data[4:29, 2:]),
        (matrix[5:, 7:25].T, data[5:, 7:25].T),
        (matrix.T[3:20][1:, 9:30], data.T[3:20][1:, 9:30]),
        (matrix[8:8], data[8:8]),
    ):
        told = f"{view!r} of {view.layout} has {view.local}"
        collective_assert(comm, np.array_equal(view.local, part[np.ix_(*view.local_indices)]), told)
        wanted = view.layout.local_shape(view.shape, comm.rank)
        collective_assert(comm, view.local.shape == wanted and Layout.parse(str(view.layout)) == view.layout, told)
        check_copies(comm, session, view, part)


@pytest.mark.parametrize("seed", range(4))
def test_offsets_into_matrices_that_are_dealt_alike_and_otherwise(comm, session, seed):
    """As PBLAS' IA, JA: parts of matrices, of which what is around them in C stays as it is."""
    rng = random.Random(seed)
    m, n, k = (rng.randint(5, 25) for _ in range(3))
    offsets = [(rng.randint(0, 9), rng.randint(0, 9)) for _ in range(3)]
    shapes = [
        (rows + i + 2, cols + j + 1) for (rows, cols), (i, j) in zip(((m, k), (k, n), (m, n)), offsets, strict=True)
    ]
    data = [random_matrix(*shape, DType.f64, (seed, at)) for at, shape in enumerate(shapes)]
    layouts = [layout_of(comm, *(rng.choice(((3, 4), (2, 5), (7, 1))) if seed % 2 else (3, 3))) for _ in range(3)]
    matrices = [dealt(session, one, layout, order=rng.choice("CF")) for one, layout in zip(data, layouts, strict=True)]
    places = [
        (slice(i, i + rows), slice(j, j + cols))
        for (i, j), (rows, cols) in zip(offsets, ((m, k), (k, n), (m, n)), strict=True)
    ]
    a, b, c = (matrix[place] for matrix, place in zip(matrices, places, strict=True))
    session.gemm(a, b, c, alpha=1.25, beta=0.75)
    wanted = data[2].copy()
    wanted[places[2]] = 1.25 * data[0][places[0]] @ data[1][places[1]] + 0.75 * data[2][places[2]]
    found = matrices[2].local
    right = np.allclose(found, wanted[np.ix_(*matrices[2].local_indices)], 1e-12, 1e-12)
    collective_assert(comm, right, f"{a!r} x {b!r} = {c!r}: {found}")


def test_operands_that_are_dealt_alike_take_no_more_products_than_blocks_do(comm, session):
    down = along = math.isqrt(comm.size)  # rows and columns are dealt alike
    extent, ranks = 12 * comm.size * down, range(down * along)
    blocks = Layout.blocks([extent // down] * down, [extent // along] * along, ranks=ranks)
    counts = []
    for layout in (blocks, Layout.block_cyclic(2, 2, (down, along), ranks=ranks)):
        a, b, c = (session.empty((extent, extent), "f64", layout) for _ in range(3))
        options = um.ScheduleOptions(scheduler="kblocks", grid=(down, along), blocking=um.Blocking(columns=1))
        with session.plan(a, b, c, options=options) as plan:
            counts.append((plan.summary.tasks, plan.summary.bytes_by_link["device_to_device"]))
    collective_assert(comm, counts[0] == counts[1], f"{counts}")


def test_c_follows_an_operand_that_has_whole_rows_of_k(comm, session):
    rows = Layout.block_cyclic(3, 100, (comm.size, 1))
    data = random_matrix(20, 9, DType.f64, (5,)), random_matrix(9, 7, DType.f64, (6,))
    a, b = dealt(session, data[0], rows), session.scatter(data[1], Layout.rows())
    c = session.gemm(a, b)
    wanted = (data[0] @ data[1])[np.ix_(*c.local_indices)]
    collective_assert(comm, c.layout == rows and np.allclose(c.local, wanted, 1e-13, 1e-13), f"{c!r}")
    square = session.gemm(dealt(session, data[0], layout_of(comm)), b)
    follows = GRIDS[comm.size][1] == 1
    wanted = layout_of(comm) if follows else Layout.rows().filled((20, 7), comm.size)
    collective_assert(comm, square.layout == wanted, f"{square.layout}")


def test_arrays_that_are_not_as_the_layout_says_are_refused_on_all_ranks(comm, session):
    layout = layout_of(comm)
    shape = (13 * comm.size, 11 * comm.size)
    mine = np.zeros(layout.local_shape(shape, comm.rank))
    cut = mine[:-1] if comm.rank == comm.size - 1 else mine
    words = ["local arrays do not make", str(layout), f" on rank {comm.size - 1}", "instead of"]
    expect(comm, um.ParamError, words, lambda: session.distribute(cut, layout, shape=shape))
    expect(comm, um.ParamError, ["pass shape="], lambda: session.distribute(mine, layout))
    grid = Layout.block_cyclic(3, 4, (comm.size + 1, 1))
    expect(
        comm,
        um.ParamError,
        [f"has {comm.size + 1} parts for {comm.size} rank"],
        lambda: session.empty(shape, "f64", grid),
    )
    expect(
        comm,
        um.ParamError,
        ["memory = 'shared'", str(layout)],
        lambda: session.empty(shape, "f64", layout, memory="shared"),
    )
    host = session.empty_host(shape)
    words = ["memory = 'shared'", str(layout)]
    expect(comm, um.ParamError, words, lambda: session.redistribute(host, layout, memory="shared"))
    expect(comm, um.ParamError, words, lambda: session.scatter(host.array, layout, memory="shared"))
    session.release(host)
    if comm.size > 1:
        other = Layout.block_cyclic(3, 4 + comm.rank, GRIDS[comm.size])
        expect(
            comm, um.ParamError, ["rank 1", "block_cyclic(3,5"], lambda: session.distribute(mine, other, shape=shape)
        )


def test_what_follows_shared_memory_is_cyclic_in_memory_of_each_rank(comm, session):
    layout = layout_of(comm)
    data = random_matrix(17, 17, DType.f64, (7,))
    shared = session.empty_host((17, 17))
    if comm.rank == 0:
        shared.array[...] = data
    session.barrier()
    copy = session.redistribute(shared, layout)
    product = session.gemm(shared, shared, out_layout=layout)
    for matrix, wanted in ((copy, data), (product, data @ data)):
        right = np.allclose(matrix.local, wanted[np.ix_(*matrix.local_indices)], 1e-13, 1e-13)
        collective_assert(comm, right and matrix.memory == "host" and matrix.layout == layout, f"{matrix!r}")
