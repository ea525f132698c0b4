"""Products of matrices of which each rank has a part, on all ranks and in all their memories."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.helpers.collective import collective_assert
from tests.helpers.distributed import distributed, random_layout
from tests.helpers.products import random_matrix
from tests.helpers.sessions import hide_arrays, refuse_pins
from uncut_mpi import Layout
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.staging import used_by_others

pytestmark = pytest.mark.mpi

ROWS = """\
import numpy as np, uncut_mpi as um             # mpiexec -n 4 python rows.py
from mpi4py import MPI
comm = MPI.COMM_WORLD
A = np.random.standard_normal(([0, 200, 71, 100][comm.rank], 518))
B = np.random.standard_normal(([130, 130, 129, 129][comm.rank], 209))
with um.Session(comm) as s:
    a = s.distribute(A, um.Layout.rows())
    b = s.distribute(B, um.Layout.rows())
    c = s.gemm(a, b)
    assert c.layout == um.Layout.rows([0, 200, 71, 100])
    np.testing.assert_allclose(c.local, A @ np.vstack(comm.allgather(B)), atol=1e-10)
"""


@pytest.mark.parametrize("seed", range(24))
def test_any_layouts_multiply_where_they_are(comm, session, seed):
    rng = random.Random(seed)
    dtype = rng.choice((DType.f64, DType.f64, DType.f32))
    m, n, k = (rng.randint(1, 40) for _ in range(3))
    orders, trans, beta = rng.choices(("C", "F", "CF"), k=3), rng.choices("NT", k=2), rng.choice((0.0, 0.75))
    a_MK, b_KN, c_MN = (random_matrix(*shape, dtype, (seed, at)) for at, shape in enumerate(((m, k), (k, n), (m, n))))
    inputs = [x.T if how == "T" else x for x, how in zip((a_MK, b_KN), trans, strict=True)]
    before = c_MN if beta else np.full_like(c_MN, np.nan)
    a, b, c = (distributed(session, rng, x, order) for x, order in zip((*inputs, before), orders, strict=True))
    session.gemm(a, b, c, alpha=1.25, beta=beta, trans_a=trans[0], trans_b=trans[1])
    wide = [x.astype(np.float64) for x in (a_MK, b_KN, c_MN)]
    wanted = (1.25 * wide[0] @ wide[1] + beta * wide[2])[np.ix_(*c.local_indices)]
    error = np.abs(c.local - wanted).max() if wanted.size else 0.0
    limit = (k + 3) * dtype.unit_roundoff * (1.25 * k + 1)
    collective_assert(comm, error <= limit, f"{a!r} x {b!r} = {c!r}, {trans}, beta {beta}: error {error}")
    session.barrier()
    for matrix in (a, b, c):
        session.release(matrix)


def test_the_program_of_the_manual_is_right(comm):
    if comm.size != 4:
        pytest.skip("a program for 4 ranks")
    exec(compile(ROWS, "rows.py", "exec"), {})


def test_a_plan_runs_on_other_arrays_of_the_same_parts(comm, session):
    rows = 3 * comm.size
    made = [session.empty((rows, 4), "f64", Layout.rows()) for _ in range(4)]
    b = session.empty((4, 4), "f64", Layout.replicated())
    first, second = random_matrix(rows, 4, DType.f64, (31,)), random_matrix(rows, 4, DType.f64, (32,))
    right = random_matrix(4, 4, DType.f64, (33,))
    b.local[...] = right
    for matrix, data in zip(made, (first, second, np.full((rows, 4), np.nan), np.full((rows, 4), np.nan)), strict=True):
        matrix.local[...] = data[np.ix_(*matrix.local_indices)]
    session.barrier()
    with session.plan(made[0], b, made[2], reads_c=False) as plan:
        plan.execute()
        plan.execute(a=made[1], c=made[3])
    for c, data in ((made[2], first), (made[3], second)):
        wanted = (data @ right)[np.ix_(*c.local_indices)]
        collective_assert(comm, np.abs(c.local - wanted).max() < 1e-14, f"{c!r}")
    session.barrier()
    for matrix in (*made, b):
        session.release(matrix)


def test_without_a_c_the_result_lies_as_the_operand_that_leaves_k_whole(comm, session):
    a_MK, b_KN = random_matrix(9, 6, DType.f64, (41,)), random_matrix(6, 8, DType.f64, (42,))
    rows, cols = Layout.rows().filled((9, 8), comm.size), Layout.cols().filled((9, 8), comm.size)
    whole, copies = Layout.whole(comm.size - 1), Layout.replicated()
    for first, second, trans, wanted, memory in (
        (Layout.rows(), Layout.cols(), "NN", rows, "device"),
        (Layout.cols(), Layout.cols(), "NN", cols, "host"),
        (Layout.cols(), Layout.rows(), "NN", rows, "device"),
        (Layout.cols(), Layout.rows(), "TT", rows, "device"),
        (Layout.rows(), Layout.rows(), "TT", cols, "host"),
        (copies, Layout.rows(), "NN", copies, "device"),
        (Layout.cols(), whole, "NN", whole, "host"),
        (whole, whole, "NN", Layout.whole(0), "shared"),
    ):
        inputs = [x.T if how == "T" else x for x, how in zip((a_MK, b_KN), trans, strict=True)]
        a = session.empty(inputs[0].shape, "f64", first, memory="device")
        b = session.empty(inputs[1].shape, "f64", second, memory="host", order="F")
        for matrix, data in ((a, inputs[0]), (b, inputs[1])):
            matrix.local[...] = data[np.ix_(*matrix.local_indices)]
        session.barrier()
        c = session.gemm(a, b, trans_a=trans[0], trans_b=trans[1])
        told = f"{first}, {second}, {trans}: {c.layout} in {c.memory} memory, not {wanted} in {memory}"
        collective_assert(comm, (c.layout, c.memory, c.order) == (wanted, memory, "C"), told)
        right = (a_MK @ b_KN)[np.ix_(*c.local_indices)]
        collective_assert(comm, c.local.shape == right.shape and np.allclose(c.local, right, 1e-13, 1e-13), told)
        session.barrier()
        for matrix in (a, b, c):
            session.release(matrix)


@pytest.mark.parametrize("seed", range(6))
def test_parts_that_others_cannot_use_go_through_their_owners(comm, session, monkeypatch, seed):
    rng = random.Random(seed)
    m, n, k = (rng.randint(8, 40) for _ in range(3))
    a_MK, b_KN, c_MN = (
        random_matrix(*shape, DType.f64, (seed, at)) for at, shape in enumerate(((m, k), (k, n), (m, n)))
    )
    hidden = [rng.random() < 0.7 for _ in range(comm.size)]
    hide_arrays(session, monkeypatch, lambda array: hidden[session.rank])
    refuse_pins(session, monkeypatch, lambda array: hidden[session.rank])
    operands = a, b, c = [distributed(session, rng, x, rng.choice("CF")) for x in (a_MK, b_KN, c_MN)]
    session.poison_softbuf()
    with session.plan(a, b, c) as plan:
        key, staged = plan._plan.key, plan.summary.staged
        result = plan.execute(1.25, 0.75)
        untouched = not used_by_others(plan.schedule, key.private)
    missing = {name for name, one in zip("ABC", operands, strict=True) if one.info.obstacle}
    told = f"seed {seed}: {a!r} x {b!r} = {c!r}: {missing} cannot be used, {staged!r} were staged"
    collective_assert(comm, untouched and result.staged == bool(staged) and {*staged} <= missing, told)
    wanted = (1.25 * a_MK @ b_KN + 0.75 * c_MN)[np.ix_(*c.local_indices)]
    collective_assert(comm, np.allclose(c.local, wanted, 1e-12, 1e-12), told)
    session.poison_softbuf()
    out = session.redistribute(c, random_layout(rng, c.shape, comm.size))
    wanted = (1.25 * a_MK @ b_KN + 0.75 * c_MN)[np.ix_(*out.local_indices)]
    collective_assert(comm, np.allclose(out.local, wanted, 1e-12, 1e-12), f"{told}, copied to {out!r}")
    session.barrier()
    for matrix in (*operands, out):
        session.release(matrix)
