"""Products that write a triangle of C: what is in it is right, what is beyond it stays as it was."""

from __future__ import annotations

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.distributed import made_of, on_host, part_of
from tests.helpers.numbers import steps_of
from tests.helpers.products import random_matrix
from uncut_mpi.model import part_of_c
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


@pytest.fixture(autouse=True)
def small_rectangles(monkeypatch):
    monkeypatch.setattr(part_of_c, "LEAST_ROWS", 8)


def result_of(terms, before, dtype, beta):
    """Return the whole of C, and how far each element may be off (Higham 2002, section 3.5, and two roundings)."""
    wide = np.complex128 if dtype.is_complex else np.float64
    result, size = beta * before.astype(wide), np.abs(beta * before.astype(wide))
    for alpha, a, b in terms:
        a, b = a.astype(wide), b.astype(wide)
        result, size = result + alpha * (a @ b.T), size + abs(alpha) * (np.abs(a) @ np.abs(b.T))
    u = dtype.accumulator.unit_roundoff
    # Of two products the result of the first is rounded, too.
    return result, (steps_of(dtype, 2 * K) + 8) * 2 * u * size + 2 * len(terms) * dtype.unit_roundoff * size


def check(comm, c, terms, before, lower, beta=BETA, told="", hermitian=False):
    dtype = c.dtype
    result, bound = result_of(terms, real_on_diagonal(before) if hermitian else before, dtype, beta)
    if hermitian:  # not even what rounding leaves
        result = real_on_diagonal(result)
        on_diagonal = bool((on_host(c.local)[part_of(c, np.eye(N, dtype=bool))].imag == 0).all())
        collective_assert(comm, on_diagonal, f"{told}: the diagonal is not real")
    inside = np.tril(np.ones((N, N), bool)) if lower else np.triu(np.ones((N, N), bool))
    found, wanted, most, here, was = (
        on_host(c.local) if one is None else part_of(c, one) for one in (None, result, bound, inside, before)
    )
    good = (np.abs(found.astype(wanted.dtype) - wanted) <= most)[here].all()
    kept = np.array_equal(found[~here], was[~here])
    collective_assert(comm, good and kept, f"{told}: right {good}, kept beyond {kept}")


def real_on_diagonal(c):
    return np.where(np.eye(N, dtype=bool), c.real, c)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
def test_a_triangle_is_computed_in_every_layout_and_nothing_beyond_it(comm, session, dtype):
    data = [random_matrix(*shape, dtype, (1, at)) for at, shape in enumerate(((N, K), (N, K), (N, N)))]
    for number, (of_a, of_c) in enumerate((a, c) for a in LAYOUTS for c in LAYOUTS):
        if (number + number // 4 + TYPES.index(dtype)) % 2:  # of two types next to each other one has it
            continue
        lower, order = bool(number % 2), "FC"[number // 2 % 2]
        a, b = (made_of(session, one, LAYOUTS[of_a](comm.size)) for one in data[:2])
        c = made_of(session, data[2], LAYOUTS[of_c](comm.size), order=order)
        session.syrk(a, c, lower=lower, alpha=ALPHA, beta=BETA)
        told = f"A {of_a}, C {of_c} in {order}"
        check(comm, c, [(ALPHA, data[0], data[0])], data[2], lower, told=told)
        twice = made_of(session, data[2], LAYOUTS[of_c](comm.size), order=order)
        session.syr2k(a, b, twice, lower=lower, alpha=ALPHA, beta=BETA)
        check(
            comm, twice, [(ALPHA, data[0], data[1]), (ALPHA, data[1], data[0])], data[2], lower, told=f"twice: {told}"
        )
        for one in (a, b, c, twice):
            session.release(one)


@pytest.mark.parametrize("dtype", [DType.c64, DType.c128, DType.f32], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("lower", [True, False], ids=["lower", "upper"])
def test_a_hermitian_triangle_has_a_real_diagonal_whatever_c_had_there(comm, session, dtype, lower):
    data = [random_matrix(*shape, dtype, (3, at)) for at, shape in enumerate(((N, K), (N, K), (N, N)))]
    if dtype.is_complex:
        data[2].imag[0, 0] = np.inf
    first, second, before = data
    alpha = ALPHA - 0.5j if dtype.is_complex else ALPHA
    twice = [(alpha, first, second.conj()), (np.conj(alpha), second, first.conj())]
    pairs = ("rows", "cols"), ("cyclic", "whole"), ("cols", "cyclic")
    for (of_a, of_c), order in zip(pairs, "FCF" if dtype is DType.c128 else "CFC", strict=True):
        a, b = (made_of(session, one, LAYOUTS[of_a](comm.size)) for one in (first, second))
        told = f"A {of_a}, C {of_c} in {order}"
        for call, given, factor, terms in (
            (session.herk, [a], ALPHA, [(ALPHA, first, first.conj())]),
            (session.her2k, [a, b], alpha, twice),
            (session.herk, [a], 0.0, []),
        ):
            c = made_of(session, before, LAYOUTS[of_c](comm.size), order=order)
            call(*given, c, lower=lower, alpha=factor, beta=BETA)
            check(comm, c, terms, before, lower, told=f"{len(terms)} products, {told}", hermitian=True)
            session.release(c)
        for one in (a, b):
            session.release(one)
    a = made_of(session, first, um.Layout.rows())
    made = session.herk(a, lower=lower)
    check(comm, made, [(1.0, first, first.conj())], np.zeros((N, N)), lower, 0.0, "new", hermitian=True)


def test_a_new_c_is_0_beyond_its_triangle_and_nan_that_is_not_read_stays_out(comm, session):
    data = random_matrix(N, K, DType.f64, (2,))
    a = made_of(session, data, um.Layout.rows())
    made = session.syrk(a, lower=False, alpha=ALPHA)
    check(comm, made, [(ALPHA, data, data)], np.zeros((N, N)), False, beta=0.0, told="new")
    lost = np.where(np.tril(np.ones((N, N), bool)), np.nan, 3.0)
    c = made_of(session, lost, um.Layout.cols())
    session.syrk(a, c, alpha=ALPHA)
    check(comm, c, [(ALPHA, data, data)], np.where(np.isnan(lost), 0.0, lost), True, beta=0.0, told="NaN")


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
    z, of_z = (session.empty((12, extent), "c128", um.Layout.rows()) for extent in (7, 12))
    some = 1j if comm.rank == comm.size - 1 else 1.0
    for call in (
        lambda: session.herk(z, alpha=some),
        lambda: session.herk(z, alpha=1 + 0j),
        lambda: session.herk(z, of_z, beta=some),
        lambda: session.her2k(z, z, of_z, beta=some),
        lambda: session.her2k(a, a, alpha=1j),
    ):
        expect(comm, um.ParamError, ["real number"], call)
    for call in (session.herk, lambda a, **by: session.her2k(a, a, **by)):
        expect(comm, um.ParamError, ["lower", "True or False"], lambda call=call: call(z, lower=odd))
