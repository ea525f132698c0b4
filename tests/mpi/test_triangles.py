"""Products that write a triangle of C: what is in it is right, what is beyond it stays as it was."""

from __future__ import annotations

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.distributed import made_of, on_host, part_of
from tests.helpers.numbers import steps_of
from tests.helpers.products import random_matrix
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.candidates import flops_of_tasks

LAYOUTS = {
    "rows": lambda _: um.Layout.rows(),
    "cols": lambda _: um.Layout.cols(),
    "cyclic": lambda size: um.Layout.block_cyclic(5, 7, (size, 1)),
    "whole": lambda _: um.Layout.whole(),
}
TYPES = [DType.f64, DType.f32, DType.bf16, DType.c128]
N, K = 61, 45
ALPHA, BETA = 1.2345, 1.1154


def result_of(terms, before, dtype, beta):
    """Return the whole of C, and how far each element may be off (Higham 2002, section 3.5, and two roundings)."""
    wide = np.complex128 if dtype.is_complex else np.float64
    result, size = beta * before.astype(wide), np.abs(beta * before.astype(wide))
    for a, b in terms:
        a, b = a.astype(wide), b.astype(wide)
        result, size = result + ALPHA * (a @ b.T), size + ALPHA * (np.abs(a) @ np.abs(b.T))
    u = dtype.accumulator.unit_roundoff
    # Of two products the result of the first is rounded, too.
    return result, (steps_of(dtype, 2 * K) + 8) * 2 * u * size + 2 * len(terms) * dtype.unit_roundoff * size


def check(comm, c, terms, before, lower, beta=BETA, told=""):
    dtype = c.dtype
    result, bound = result_of(terms, before, dtype, beta)
    inside = np.tril(np.ones((N, N), bool)) if lower else np.triu(np.ones((N, N), bool))
    found, wanted, most, here, was = (
        on_host(c.local) if one is None else part_of(c, one) for one in (None, result, bound, inside, before)
    )
    good = (np.abs(found.astype(wanted.dtype) - wanted) <= most)[here].all()
    kept = np.array_equal(found[~here], was[~here])
    collective_assert(comm, good and kept, f"{told}: right {good}, kept beyond {kept}")


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
def test_a_triangle_is_computed_in_every_layout_and_nothing_beyond_it(comm, session, dtype):
    data = [random_matrix(*shape, dtype, (1, at)) for at, shape in enumerate(((N, K), (N, K), (N, N)))]
    for number, (of_a, of_c) in enumerate((a, c) for a in LAYOUTS for c in LAYOUTS):
        lower, order = bool(number % 2), "FC"[number // 2 % 2]
        a, b = (made_of(session, one, LAYOUTS[of_a](comm.size)) for one in data[:2])
        c = made_of(session, data[2], LAYOUTS[of_c](comm.size), order=order)
        session.syrk(a, c, lower=lower, alpha=ALPHA, beta=BETA)
        told = f"A {of_a}, C {of_c} in {order}"
        check(comm, c, [(data[0], data[0])], data[2], lower, told=told)
        twice = made_of(session, data[2], LAYOUTS[of_c](comm.size), order=order)
        session.syr2k(a, b, twice, lower=lower, alpha=ALPHA, beta=BETA)
        check(comm, twice, [(data[0], data[1]), (data[1], data[0])], data[2], lower, told=f"twice: {told}")
        for one in (a, b, c, twice):
            session.release(one)


def test_a_new_c_is_0_beyond_its_triangle_and_nan_that_is_not_read_stays_out(comm, session):
    data = random_matrix(N, K, DType.f64, (2,))
    a = made_of(session, data, um.Layout.rows())
    made = session.syrk(a, lower=False, alpha=ALPHA)
    check(comm, made, [(data, data)], np.zeros((N, N)), False, beta=0.0, told="new")
    lost = np.where(np.tril(np.ones((N, N), bool)), np.nan, 3.0)
    c = made_of(session, lost, um.Layout.cols())
    session.syrk(a, c, alpha=ALPHA)
    check(comm, c, [(data, data)], np.where(np.isnan(lost), 0.0, lost), True, beta=0.0, told="NaN")


def test_a_triangle_takes_little_more_than_half_the_operations(comm, session):
    a = session.empty((512, 512), "f64", um.Layout.rows())
    c = session.empty((512, 512), "f64", um.Layout.rows())
    flops = []
    for triangle in ("", "lower"):
        with session.plan(a, a, c, trans_b="T", triangle=triangle) as plan:
            flops.append(int(flops_of_tasks(plan.schedule)[1].sum()))
    collective_assert(comm, flops[0] == 2 * 512**3 and flops[1] <= 0.57 * flops[0], f"{flops}")


def test_what_has_no_triangle_is_refused_on_all_ranks(comm, session):
    a, c = (session.empty(shape, "f64", um.Layout.rows()) for shape in ((12, 7), (12, 9)))
    b = session.empty((7, 9), "f64", um.Layout.rows())
    expect(comm, um.ParamError, ["triangle", "12×9"], lambda: session.gemm(a, b, c, triangle="lower"))
    expect(comm, um.ParamError, ["'lower', 'upper'"], lambda: session.gemm(a, b, c, triangle="left"))
    odd = "maybe" if comm.rank == comm.size - 1 else True
    expect(comm, um.ParamError, ["lower"], lambda: session.syrk(a, lower=odd))
