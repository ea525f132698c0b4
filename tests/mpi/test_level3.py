"""symm, hemm, trmm and trsm: right in all places and orders, and nothing beyond the triangle is read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.distributed import made_of, on_host, part_of
from tests.helpers.numbers import steps_of
from tests.helpers.products import random_matrix
from uncut_mpi.api import session_level3
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.model.dtypes import DType

LAYOUTS = {
    "rows": lambda _: um.Layout.rows(),
    "cols": lambda _: um.Layout.cols(),
    "cyclic": lambda size: um.Layout.block_cyclic(5, 7, (size, 1)),
    "whole": lambda _: um.Layout.whole(),
}
PAIRS = [*zip(LAYOUTS, [*LAYOUTS][1:] + [*LAYOUTS][:1], strict=True)]  # of A and B
TYPES = [DType.f64, DType.f32, DType.c64, DType.c128]
OPS = {"N": lambda one: one, "T": np.transpose, "C": lambda one: one.conj().T}
EDGE, OTHER = 45, 23
ALPHA, BETA = 1.2345, 1.1154


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(session_level3, "LEAST_BLOCK", 16)
    monkeypatch.setattr(session_level3, "_STEP", 4)


def triangle_of(square, lower, unit=False):
    """Return it with NaN beyond the triangle, as it is given; and with zeros there, as it is meant."""
    inside = np.tri(len(square), k=-1 if unit else 0, dtype=bool)
    inside = inside if lower else inside.T
    given, meant = square.copy(), square.astype(np.complex128 if square.dtype.kind == "c" else np.float64)
    given[~inside], meant[~inside] = np.nan, 0
    if unit:
        np.fill_diagonal(meant, 1)
    return given, meant


def well_conditioned(square):
    """Add to the diagonal, so that solutions do not grow."""
    return square + len(square) * np.eye(len(square), dtype=square.dtype)


def require_within(comm, found, wanted, bound, told):
    """Fail on all ranks if a part of this rank is farther off than the bound."""
    has, most, value = on_host(found.local), part_of(found, bound), part_of(found, wanted)
    collective_assert(comm, (np.abs(has - value) <= most).all(), f"{told}: {np.abs(has - value).max(initial=0)}")


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("call", ["symm", "hemm"])
def test_a_mirrored_matrix_is_read_in_one_triangle(comm, session, dtype, call):
    u = dtype.unit_roundoff
    pairs = [*enumerate([*PAIRS, *[pair[::-1] for pair in PAIRS]])]
    last = (call, dtype) in (("symm", DType.f64), ("hemm", DType.c128))  # these have all pairs by one call or the other
    for number, (of_a, of_b) in pairs[4:] if last else pairs[:4]:
        left, lower, orders = bool(number % 2), bool(number // 2 % 2), ("FC"[number // 4 % 2], "FC"[number // 8 % 2])
        shape = (EDGE, OTHER) if left else (OTHER, EDGE)
        square, b, c = (random_matrix(*one, dtype, (3, at)) for at, one in enumerate(((EDGE, EDGE), shape, shape)))
        given, half = triangle_of(square, lower)
        if call == "hemm" and dtype.is_complex:
            half[np.diag_indices(EDGE)] = half.diagonal().real
        mirrored = half + (half.conj().T if call == "hemm" else half.T) - np.diag(half.diagonal())
        alpha = ALPHA - 0.5j if dtype.is_complex else ALPHA
        one, other = (mirrored, b) if left else (b, mirrored)
        wanted = alpha * (one @ other) + BETA * c
        bound = (steps_of(dtype, EDGE) + 20) * u * (abs(alpha) * (np.abs(one) @ np.abs(other)) + BETA * np.abs(c))
        a, of_b_, out = (
            made_of(session, data, LAYOUTS[layout](comm.size), order=order)
            for data, layout, order in ((given, of_a, orders[0]), (b, of_b, orders[1]), (c, of_b, "FC"[number % 2]))
        )
        getattr(session, call)(a, of_b_, out, left=left, lower=lower, alpha=alpha, beta=BETA)
        require_within(comm, out, wanted, bound, f"{of_a}, {of_b}, left {left}, lower {lower}, {orders}")
        for matrix in (a, of_b_, out):
            session.release(matrix)


@pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("call", ["trmm", "trsm"])
def test_a_triangular_matrix_and_its_inverse(comm, session, dtype, call):
    u = dtype.unit_roundoff
    cases = list(itertools.product((True, False), (True, False), "NTC", (False, True)))
    pairs = {DType.c128: PAIRS, DType.f64: PAIRS[::3]}.get(dtype, PAIRS[:1])
    for number, (of_a, of_b) in enumerate(pairs):
        for left, lower, trans, unit in cases[number % 4 :: 4]:
            square = random_matrix(EDGE, EDGE, dtype, (4, number))
            square = square / EDGE if unit else well_conditioned(square)
            given, half = triangle_of(square.astype(dtype.numpy), lower, unit)
            b = random_matrix(*((EDGE, OTHER) if left else (OTHER, EDGE)), dtype, (5, number))
            a, out = (
                made_of(session, data, LAYOUTS[layout](comm.size), order="FC"[number // step % 2])
                for data, layout, step in ((given, of_a, 1), (b, of_b, 2))
            )
            alpha = ALPHA - 0.5j if dtype.is_complex else ALPHA
            getattr(session, call)(a, out, left=left, lower=lower, trans=trans, unit=unit, alpha=alpha)
            own = OPS[trans](half)
            told = f"{of_a}, {of_b}, left {left}, lower {lower}, {trans}, unit {unit}"
            wide = b.astype(half.dtype)
            if call == "trmm":
                one, other = (own, wide) if left else (wide, own)
                bound = (steps_of(dtype, EDGE) + 20) * u * abs(alpha) * (np.abs(one) @ np.abs(other))
                require_within(comm, out, alpha * (one @ other), bound, told)
            else:  # the residual of substitution (Higham 2002, theorem 8.5), also by blocks (13.6)
                solved = session.gather(out)
                good = True
                if comm.rank == 0:
                    solved = solved.astype(half.dtype)
                    one, other = (own, solved) if left else (solved, own)
                    most = np.abs(one) @ np.abs(other) + np.abs(alpha * wide)
                    good = (np.abs(one @ other - alpha * wide) <= 2 * (steps_of(dtype, EDGE) + 20) * u * most).all()
                collective_assert(comm, bool(good), told)
            for matrix in (a, out):
                session.release(matrix)


def test_what_alpha_and_sizes_of_0_leave_out(comm, session):
    data, given = random_matrix(EDGE, OTHER, DType.f64, (6,)), np.full((EDGE, EDGE), np.nan)
    a = made_of(session, given, um.Layout.rows())
    for call in ("trmm", "trsm"):
        b = made_of(session, np.full((EDGE, OTHER), np.nan), um.Layout.cols())
        getattr(session, call)(a, b, alpha=0.0)
        collective_assert(comm, not on_host(b.local).any(), f"{call} reads what alpha leaves out")
    b, c = (made_of(session, data, um.Layout.cols()) for _ in range(2))
    session.symm(a, b, c, alpha=0.0, beta=2.0)
    collective_assert(comm, np.array_equal(on_host(c.local), 2 * part_of(c, data)), "symm is not C times beta")
    for shape in ((0, 5), (EDGE, 0)):
        none, square = (
            session.empty(shape, "f64", um.Layout.rows()),
            session.empty((shape[0],) * 2, "f64", um.Layout.rows()),
        )
        assert session.trsm(square, none) is none
        assert session.symm(square, none).shape == shape


def test_a_diagonal_with_a_0_gives_infinities_and_nan(comm, session):
    square = np.tril(random_matrix(EDGE, EDGE, DType.f64, (7,))) + EDGE * np.eye(EDGE)
    square[20, 20] = 0
    a, b = made_of(session, square, um.Layout.rows()), made_of(session, np.ones((EDGE, OTHER)), um.Layout.cols())
    session.trsm(a, b)
    found = on_host(b.local)
    good = np.isfinite(found[:20]).all() and np.isinf(found[20]).all() and not np.isfinite(found[21:]).any()
    collective_assert(comm, bool(good), "a 0 does not divide")


def test_every_rank_says_what_does_not_fit(comm, session):
    a, b, flat = (session.empty(shape, "f64", um.Layout.rows()) for shape in ((8, 8), (8, 4), (4, 8)))
    whole = session.empty((16, 16), "f64", um.Layout.rows())
    half, z = (session.empty((8, 8), dtype, um.Layout.rows()) for dtype in ("bf16", "c64"))
    for call, words in (
        (lambda: session.trsm(flat, b), "a is 4×8"),
        (lambda: session.trsm(a, flat), "left=True a has to be 4×4"),
        (lambda: session.trsm(half, half), "f32, f64, c64 or c128"),
        (
            lambda: session.trsm(a, b, lower=comm.rank == 0 if comm.size > 1 else None),
            "lower" if comm.size == 1 else "differ",
        ),
        (lambda: session.trmm(a, b, unit=2), "unit"),
        (lambda: session.trmm(a, b, trans="X"), "trans"),
        (lambda: session.trmm(a, b, alpha=1j), "complex"),
        (lambda: session.symm(a, b, flat), "symm: a is 8×8 f64, so out has to be 8×4 f64, and is 4×8 f64"),
        (lambda: session.symm(a, b, beta=1.0), "symm: beta = 1.0, but there is no out"),
        (lambda: session.symm(a, b, b), "overlaps"),
        (lambda: session.trsm(whole[:8, :8], whole[4:12, :4]), "overlaps"),
        (lambda: session.hemm(None, b), "a is None"),
        (lambda: session.symm(z, z.H), "b is a conjugated view"),
        (lambda: session.symm(z.H, z), "a is a conjugated view"),
        (lambda: session.trsm(z, z.H), "b is a conjugated view"),
    ):
        expect(comm, um.ParamError, [words], call)
    for one in (a, b):
        session.release(one)


def test_errors_name_the_call_that_was_written_and_its_arguments(comm, session):
    a, b, c, square = (session.empty(shape, "f64", um.Layout.rows()) for shape in ((8, 4), (6, 4), (8, 6), (8, 8)))
    z, of_z = (session.empty((8, extent), "c128", um.Layout.rows()) for extent in (4, 8))
    first, some = comm.rank == 0, 2.0 if comm.rank == 0 else 1j
    for call, words in (
        (lambda: session.syrk(a, c), "syrk: a is 8×4 f64, so out has to be 8×8 f64, and is 8×6 f64"),
        (lambda: session.syrk(a, of_z), "syrk: a is 8×4 f64, so out has to be 8×8 f64, and is 8×8 c128"),
        (lambda: session.syrk(None), "syrk: a is None: pass a Matrix"),
        (lambda: session.syrk(1.0, a), "syrk: a is a float: pass the matrices first"),
        (lambda: session.syrk(a, beta=2.0), "syrk: beta = 2.0, but there is no out"),
        (lambda: session.syrk(square, square), "syrk: C overlaps A in memory"),
        (lambda: session.syrk(a, square, alpha="x"), "syrk: alpha = 'x' is a str"),
        (lambda: session.syr2k(a, b, square), "syr2k: a is 8×4 f64, so b has to be 8×4 f64, and is 6×4 f64"),
        (lambda: session.syr2k(a, z), "syr2k: a is 8×4 f64, so b has to be 8×4 f64, and is 8×4 c128"),
        (lambda: session.syr2k(a, None), "syr2k: b is None"),
        (lambda: session.herk(z, lower="no"), "herk: lower = 'no'"),
        (lambda: session.her2k(z, z, of_z, beta=1j), "her2k: beta = 1j is a complex: pass a real number"),
        (lambda: session.trsm(square, a, left=1), "trsm: left = 1 is an int"),
        (lambda: session.trmm(2.0, square, a), "trmm() takes only a, b by position"),
    ):
        expect(comm, um.ParamError if "()" not in words else TypeError, [words], call)
    if comm.size == 1:
        return
    for call, words in (
        (lambda: session.syrk(a, square, lower=first), "lower: True on rank 0, False on"),
        (lambda: session.trsm(square, a, lower=first), "lower: True on rank 0, False on"),
        (lambda: session.trmm(square, a, unit=first), "unit: True on rank 0, False on"),
        (lambda: session.syrk(a, square if first else None), "out: "),
        (lambda: session.her2k(z, z, of_z, alpha=some), "alpha: 2.0 on rank 0, 1j on"),
        (lambda: session.syrk(a) if first else session.syr2k(a, a), "rank 0 called syrk, rank"),
        (lambda: session.syrk(a, square) if first else session.syr2k(a, a, square), "rank 0 called syrk, rank"),
        (lambda: session.herk(z, of_z) if first else session.gemm(z, z.H, of_z), "rank 0 called herk, rank"),
        (lambda: session.symm(square, a) if first else session.barrier(), "rank 0 called symm, rank"),
    ):
        expect(comm, um.RankMismatchError, [words], call)
    expect(comm, um.ParamError, ["syrk: a is None", "rank 0: "], lambda: session.syrk(None if first else a, square))


def test_what_fails_within_a_call_is_told_with_its_arguments(comm, session, monkeypatch):
    a = session.empty((EDGE, EDGE), "f64", um.Layout.rows())
    b = session.empty((EDGE, EDGE), "f64", um.Layout.rows())

    def fails():
        if comm.rank == comm.size - 1:
            raise LookupError("on purpose")

    for call, told in (
        (lambda: session.syrk(a, b), f"syrk(a={a.info}, out={b.info}, lower=True, alpha=1.0, beta=0.0)"),
        (
            lambda: session.trsm(a, b, trans="T"),
            f"trsm(a={a.info}, b={b.info}, left=True, lower=True, unit=False, trans=T, alpha=1.0)",
        ),
        (lambda: session.gemm_batch([a], [a], [b]), f"gemm_batch(a={a.info}, b={a.info}, out={b.info}, alpha=1.0"),
    ):
        notes = ""
        with monkeypatch.context() as patched:
            patched.setattr(session._backend, "await_caller", fails)
            try:
                call()
            except (LookupError, um.PeerFailedError) as error:
                notes = str([error, *getattr(error, "__notes__", ())])
        good = f"(while {told}" in notes if comm.rank == comm.size - 1 else "on purpose" in notes
        collective_assert(comm, good, notes)


def test_little_memory_makes_smaller_blocks(comm, open_session, monkeypatch):
    monkeypatch.setattr(session_level3, "LEAST_BLOCK", 256)
    products, operands = [], MatrixStore.operands
    monkeypatch.setattr(MatrixStore, "operands", lambda *given: products.append(given) or operands(*given))
    square = np.tril(random_matrix(256, 256, DType.f64, (8,))) + 256 * np.eye(256)
    wanted = random_matrix(256, 8, DType.f64, (9,))
    with open_session(comm, device_memory=300_000) as session:
        a, b = made_of(session, square, um.Layout.rows()), made_of(session, square @ wanted, um.Layout.rows())
        products.clear()
        session.trsm(a, b)
        bound = 4 * (steps_of(DType.f64, 256) + 20) * 2.0**-53 * np.abs(np.linalg.inv(square)) @ np.abs(square)
        require_within(comm, b, wanted, bound @ np.abs(wanted), "in small blocks")
        collective_assert(comm, comm.size == 1 or len(products) > 3, f"{len(products)} products")


@pytest.mark.parametrize("name", ["Kahan", "random"])
def test_a_solution_with_an_ill_conditioned_triangle_has_the_residual_of_substitution(comm, session, name):
    if name == "Kahan":  # (Higham 2002, equation 8.11)
        sine, cosine = np.sin(1.2), np.cos(1.2)
        square = np.diag(sine ** np.arange(EDGE)) @ (np.eye(EDGE) - cosine * np.triu(np.ones((EDGE, EDGE)), 1))
    else:
        square = np.triu(random_matrix(EDGE, EDGE, DType.f64, (10,)))
    b = random_matrix(EDGE, OTHER, DType.f64, (11,))
    assert np.linalg.cond(square) > 1e6
    x = made_of(session, b, um.Layout.rows())
    session.trsm(made_of(session, square, um.Layout.cols()), x, lower=False)
    found = session.gather(x)
    if comm.rank == 0:
        most = 2 * (steps_of(DType.f64, EDGE) + 20) * 2.0**-53 * np.abs(square) @ np.abs(found)
        found = (np.abs(square @ found - b) <= most).all()
    collective_assert(comm, comm.rank > 0 or bool(found), "the residual is larger than its bound")


def test_a_new_result_may_be_of_a_matrix_and_itself_and_of_one_that_is_read_only(comm, session):
    data = random_matrix(EDGE, EDGE, DType.f64, (12,))
    a = made_of(session, data, um.Layout.rows())
    mirrored = np.tril(data) + np.tril(data, -1).T
    bound = (steps_of(DType.f64, EDGE) + 20) * 2.0**-53 * np.abs(mirrored) @ np.abs(data)
    require_within(comm, session.symm(a, a), mirrored @ data, bound, "of itself")
    data.flags.writeable = False
    b = session.register(data if comm.rank == 0 else None, root=0)
    require_within(comm, session.symm(a, b), mirrored @ data, bound, "of one that is read only")


def test_conjugated_views_of_a(comm, session):
    square = well_conditioned(random_matrix(EDGE, EDGE, DType.c128, (13,)))
    data = random_matrix(EDGE, OTHER, DType.c128, (14,))
    a = made_of(session, square, um.Layout.rows())
    half = np.tril(square).conj().T  # the upper triangle of a.H
    b = made_of(session, data, um.Layout.cols())
    session.trmm(a.H, b, lower=False)
    most = (steps_of(DType.c128, EDGE) + 20) * 2.0**-53 * np.abs(half) @ np.abs(data)
    require_within(comm, b, half @ data, most, "trmm")
    session.trsm(a.H, b, lower=False)
    inverse = np.abs(np.linalg.inv(half))
    require_within(comm, b, data, 4 * inverse @ most, "trsm")
    mirrored = half + half.conj().T - np.diag(half.diagonal()) - 1j * np.diag(half.diagonal().imag)
    np.fill_diagonal(mirrored, half.diagonal().real)
    most = (steps_of(DType.c128, EDGE) + 20) * 2.0**-53 * np.abs(mirrored) @ np.abs(data)
    found = session.hemm(a.H, made_of(session, data, um.Layout.cols()), lower=False)
    require_within(comm, found, mirrored @ data, most, "hemm")


def test_what_is_not_finite_stays_in_the_rows_that_depend_on_it(comm, session):
    rows, beside = 1200, 512 if session.backend_name == "cuda" else 1  # cuBLAS multiplies zeros, too
    square, data = np.tril(np.ones((rows, rows))), np.ones((rows, 2))
    data[-1] = np.inf
    a, b = made_of(session, square, um.Layout.rows()), made_of(session, data, um.Layout.cols())
    session.trmm(a, b)
    wanted = part_of(b, square[:, :-1] @ data[:-1] + np.where(np.arange(rows) == rows - 1, np.inf, 0)[:, None])
    found, few = on_host(b.local), rows - beside
    collective_assert(comm, np.array_equal(found[:few], wanted[:few]), "infinities spread beyond a triangle")
    collective_assert(comm, not np.isfinite(found[-1]).any(), "infinities were lost")
