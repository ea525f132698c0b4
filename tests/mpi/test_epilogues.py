"""Products with an epilogue: scale, bias, beta C or a residual, ReLU and GELU, wherever matrices lie."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.distributed import made_of, on_host, part_of
from tests.helpers.interpret import SLOPE, activated
from tests.helpers.numbers import steps_of
from tests.helpers.products import random_matrix
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning import chunks, planner

LAYOUTS = {
    "rows": lambda _: um.Layout.rows(),
    "cols": lambda _: um.Layout.cols(),
    "cyclic": lambda size: um.Layout.block_cyclic(5, 7, (size, 1)),
    "whole": lambda _: um.Layout.whole(),
}
M, N, K = 53, 38, 45
ALPHA, BETA = 1.2345, 1.1154


def vector_of(session, along, dtype, seed, m=M, n=N):
    """Return a vector for the rows or columns of C as a matrix that all ranks have, and its numbers."""
    data = random_matrix(*((m, 1) if along == "rows" else (1, n)), dtype, (9, seed))
    return made_of(session, data, um.Layout.replicated()), data


def result_of(data, dtype, beta, activation="", scale=None, bias=None):
    """Return C, and how far each element may be off: `tests.helpers.interpret.reference` has the sources."""
    a, b, c = (one.astype("f8") for one in data)
    scale, bias = (default if one is None else one.astype("f8") for one, default in ((scale, 1.0), (bias, 0.0)))
    result, u = ALPHA * (a @ b) * scale, dtype.accumulator.unit_roundoff
    size = ALPHA * (np.abs(a) @ np.abs(b)) * np.abs(scale) + np.abs(bias) + (np.abs(beta * c) if beta else 0)
    result = result + bias + (beta * c if beta else 0)
    bound = SLOPE * (steps_of(dtype, K) + 16) * u * size + 16 * u * (1 + np.abs(result))
    result = activated(activation, result)
    return result, bound + 2 * dtype.unit_roundoff * np.abs(result)


def check(comm, c, result, told):
    found, wanted, most = (on_host(c.local) if one is None else part_of(c, one) for one in (None, *result))
    collective_assert(comm, (np.abs(found.astype("f8") - wanted) <= most).all(), f"{told}: {found} of {wanted}")


# Of halves whose columns are aligned a product writes C with its epilogue.
@pytest.mark.parametrize(
    ("dtype", "m", "n"),
    [(DType.f64, M, N), (DType.f32, M, N), (DType.bf16, M, N), (DType.bf16, 96, 48), (DType.f16, 96, 48)],
)
def test_an_epilogue_is_done_once_in_every_layout(comm, session, dtype, m, n):
    data = [random_matrix(*shape, dtype, (1, at)) for at, shape in enumerate(((m, K), (K, n), (m, n)))]
    vectors = {
        (name, along): vector_of(session, along, dtype, at, m, n)
        for at, (name, along) in enumerate(itertools.product(("scale", "bias"), ("rows", "cols")))
    }
    ways = itertools.cycle(itertools.product(("relu", "gelu", ""), ("bias", "scale bias", "scale"), (0.0, BETA)))
    for number, (of_a, of_c) in enumerate((a, c) for a in LAYOUTS for c in LAYOUTS):
        (activation, some, beta), order = next(ways), "FC"[number // 2 % 2]
        given = {name: vectors[name, ("rows", "cols")[number % 2]] for name in some.split()}
        a, b = (made_of(session, one, LAYOUTS[of_a](comm.size)) for one in data[:2])
        c = made_of(session, data[2], LAYOUTS[of_c](comm.size), order=order)
        how = {name: matrix for name, (matrix, _) in given.items()}
        session.gemm(a, b, c, alpha=ALPHA, beta=beta, activation=activation, **how)
        numbers = {name: values for name, (_, values) in given.items()}
        told = f"A {of_a}, C {of_c} in {order}, {activation}, {some}, beta {beta}"
        check(comm, c, result_of(data, dtype, beta, activation, **numbers), told)
        for one in (a, b, c):
            session.release(one)


def test_a_residual_a_new_c_a_plan_and_a_call_in_flight(comm, session):
    data = [random_matrix(*shape, DType.f64, (2, at)) for at, shape in enumerate(((M, K), (K, N), (M, N)))]
    a, b, residual = (made_of(session, one, um.Layout.rows()) for one in data)
    bias, values = vector_of(session, "cols", DType.f64, 5)
    wanted = result_of(data, DType.f64, 1.0, "gelu", bias=values)
    for where in (um.Layout.cols(), um.Layout.rows()):
        c = session.gemm(a, b, out_layout=where, alpha=ALPHA, residual=residual, bias=bias, activation="gelu")
        check(comm, c, wanted, f"a new C by {where}")
        session.release(c)
    session.gemm(a, b, residual, alpha=ALPHA, residual=residual, bias=bias, activation="gelu")
    check(comm, residual, wanted, "the residual is C")
    c = session.empty((M, N), "f64", um.Layout.cols())
    bare = result_of(data, DType.f64, 0.0, "relu", bias=values)
    with session.plan(a, b, c, reads_c=False, activation="relu", bias=bias) as plan:
        plan.execute(ALPHA)
        check(comm, c, bare, "a plan")
        bias.local[:] = 0.5  # each call reads what it holds then
        session.barrier()
        plan.execute(ALPHA)
        check(comm, c, result_of(data, DType.f64, 0.0, "relu", bias=np.full_like(values, 0.5)), "a plan, another bias")
    session.gemm(a, b, c, alpha=ALPHA, activation="relu", scale=bias, wait=False).wait()
    check(comm, c, result_of(data, DType.f64, 0.0, "relu", scale=np.full_like(values, 0.5)), "in flight")


def test_without_a_product_and_with_nan_that_is_not_read(comm, session):
    data = [random_matrix(*shape, DType.f64, (3, at)) for at, shape in enumerate(((M, K), (K, N), (M, N)))]
    bias, values = vector_of(session, "rows", DType.f64, 6)
    for place in LAYOUTS:
        a, b, c = (made_of(session, one, LAYOUTS[place](comm.size)) for one in data)
        session.gemm(a, b, c, alpha=0.0, beta=BETA, bias=bias, activation="relu")
        check(comm, c, (np.maximum(BETA * data[2] + values, 0), np.full((M, N), 1e-14)), f"alpha 0, {place}")
        if c.local.size:
            c.local[:] = np.nan
        session.barrier()
        session.gemm(a, b, c, alpha=0.0, bias=bias)
        check(comm, c, (np.broadcast_to(values, (M, N)), np.zeros((M, N))), f"neither, {place}")
        if c.local.size:
            c.local[:] = np.nan
        session.barrier()
        session.gemm(a, b, c, alpha=ALPHA, bias=bias)
        check(comm, c, result_of(data, DType.f64, 0.0, bias=values), f"beta 0, {place}")
        for one in (a, b, c):
            session.release(one)


def test_rows_and_columns_in_chunks_have_their_own_elements_of_a_vector(comm, session, monkeypatch):
    data = [random_matrix(*shape, DType.f64, (4, at)) for at, shape in enumerate(((M, K), (K, N), (M, N)))]
    for axis, along in enumerate(("rows", "cols")):
        cut = chunks.Chunks(axis, (0, 16, 32, (M, N)[axis]))
        monkeypatch.setattr(
            planner, "chunks_of", lambda of, cut=cut: cut if (of.problem.m, of.problem.n) == (M, N) else None
        )
        a, b, c = (made_of(session, one, um.Layout.rows(), order="F") for one in data)
        vectors = {name: vector_of(session, along, DType.f64, at) for at, name in enumerate(("scale", "bias"))}
        its = {name: matrix for name, (matrix, _) in vectors.items()}
        plan = session.plan(a, b, c, activation="gelu", **its)
        collective_assert(comm, "3 chunks" in plan.summary.how, plan.summary.how)
        plan.execute(ALPHA, BETA)
        numbers = {name: values for name, (_, values) in vectors.items()}
        check(comm, c, result_of(data, DType.f64, BETA, "gelu", **numbers), f"chunks, {along}")


def test_vectors_that_do_not_fit_are_refused_on_all_ranks(comm, session):
    data = [random_matrix(*shape, DType.f64, (5, at)) for at, shape in enumerate(((M, K), (K, N), (M, N)))]
    a, b, c = (made_of(session, one, um.Layout.rows()) for one in data)
    of_cols, another, of_rows = (vector_of(session, along, DType.f64, 1)[0] for along in ("cols", "cols", "rows"))
    replicated = um.Layout.replicated()
    longer, single = session.empty((1, N + 1), "f64", replicated), session.empty((1, N), "f32", replicated)
    dealt, wide = session.empty((1, N), "f64", um.Layout.cols()), session.empty((2, N), "f64", replicated, order="F")
    gone = session.empty((1, N), "f64", replicated)
    session.release(gone)
    square, other = (session.empty(shape, "f64", um.Layout.rows()) for shape in ((N, N), (M, N)))
    other.local[:] = 7.0
    for said, how in (
        ((f"bias is 1×{N + 1}, and C {M}×{N}", f"1×{N}, one for its rows {M}×1"), {"bias": longer}),
        (("scale is of f32, and C of f64",), {"scale": single}),
        (("bias is a matrix that was released",), {"bias": gone}),
        (("bias is an ndarray", "Matrix"), {"bias": np.zeros(N)}),
        (("bias is not all, its elements side by side",), {"bias": wide[0:1]}),
        (("scale is for each of the rows of C, and bias for each of the cols",), {"scale": of_rows, "bias": of_cols}),
        (("activation is 'tanh'", "'relu'"), {"activation": "tanh"}),
        (("activation is 3",), {"activation": 3}),
        (("residual and beta = 2.0",), {"residual": c, "beta": 2.0}),
        (("residual is an int",), {"residual": 3}),
        (("out is of shape", "residual of"), {"residual": square}),
        (("out and out_layout were given",), {"residual": other, "out_layout": um.Layout.rows()}),
        (("scale_a and scale_b are for e4m3",), {"residual": other, "scale_a": 1.0}),
        ((f"C must be {M}×{N}",), {"residual": c, "out": square}),
    ):
        expect(comm, um.ParamError, said, functools.partial(session.gemm, a, b, **{"out": c} | how))
    collective_assert(comm, np.array_equal(on_host(c.local), part_of(c, data[2])), "C was written before an error")
    triangle = functools.partial(session.gemm, c.T, c, square, triangle="lower", activation="relu")
    expect(comm, um.ParamError, ("an epilogue is for all of one product", "no part of C"), triangle)
    if comm.size == 1:
        expect(comm, um.ParamError, ("C overlaps bias",), lambda: session.gemm(a, b, c, bias=c[0:1]))
        return
    for said, how in (
        (("bias is not all", "in memory that rank", "um.Layout.replicated()"), {"bias": dealt}),
        (("activation",), {"activation": ("relu", "gelu")[comm.rank % 2]}),
        (("bias",), {"bias": (of_cols, another)[comm.rank % 2]}),
        (("bias",), {"bias": (of_cols, None)[comm.rank % 2]}),
    ):
        error = um.ParamError if "not all" in said[0] else um.RankMismatchError
        expect(comm, error, said, functools.partial(session.gemm, a, b, c, **how))
    session.gemm(a, b, c, alpha=ALPHA, activation="relu")
    check(comm, c, result_of(data, DType.f64, 0.0, "relu"), "after errors")
