"""The other names of level 3 of BLAS and PBLAS: right of all letters, with nothing beyond a triangle."""

from __future__ import annotations

import ctypes
import itertools
import os

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.blas import (  # noqa: F401 (fixtures)
    GRIDS,
    TYPES,
    Dealt,
    applied,
    at,
    grid_of_ranks,
    matrix,
    names_of_blas,
    numbers,
    reals,
)
from tests.helpers.collective import collective_assert
from uncut_mpi.api import session_level3
from uncut_mpi.api.matrices import MatrixStore
from uncut_mpi.blas import calls
from uncut_mpi.blas.routines import ROUTINES
from uncut_mpi.errors import ParamError
from uncut_mpi.model import part_of_c

OTHERS = {one.name: one for one in ROUTINES[1:]}
LETTERS = {"side": "LR", "uplo": "LU", "trans": "NTC", "diag": "NU"}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(session_level3, "LEAST_BLOCK", 16)
    monkeypatch.setattr(session_level3, "_STEP", 4)
    monkeypatch.setattr(part_of_c, "LEAST_ROWS", 4)


def cases(kind, step=1):
    """Return names of a type's routines, each with all that its letters may be, or some of these."""
    return [*_all_cases(kind)][::step]


def _all_cases(kind):
    is_complex = "c" in kind
    for name, routine in OTHERS.items():
        if routine.is_hermitian and not is_complex:
            continue
        of_trans = "NC" if routine.is_hermitian else "NT" if is_complex and not routine.is_triangular else "NTC"
        known = {**LETTERS, "trans": of_trans}
        for some in itertools.product(*(known[letter] for letter in routine.letters)):
            yield name, dict(zip(routine.letters, some, strict=True))


def half(edge, uplo, diag="N"):
    inside = np.tri(edge, k=0 if diag == "N" else -1, dtype=bool)
    return inside if uplo == "L" else inside.T


def given_of(rng, name, by, shapes, kind, beta=1.0):
    """Return matrices as programs pass them: of those of which a triangle is read NaN beyond it."""
    given = [matrix(rng, shape, kind) for shape in shapes]
    if "side" in by:
        if OTHERS[name].is_triangular:
            edge = shapes[0][0]
            given[0] = given[0] / edge + (np.eye(edge) if by["diag"] == "N" else 0)
        given[0] = np.asfortranarray(np.where(half(shapes[0][0], by["uplo"], by.get("diag", "N")), given[0], np.nan))
        given[0] = given[0].astype(kind)
    elif not beta:
        given[-1][half(shapes[-1][0], by["uplo"])] = np.nan
    return given


def factors_of(name, kind):
    real = OTHERS[name].real if "c" in kind else ("alpha", "beta")
    return 1.5 if "alpha" in real else 1.5 - 0.5j, -1.25 if "beta" in real else -1.25 + 0.5j


def is_right(name, by, alpha, beta, given, found):
    """Return whether a result is within the bound of its products (Higham 2002, (3.13), 8.5), and the rest as was."""
    wide = [one.astype("c16" if np.iscomplexobj(one) else "f8") for one in given]
    routine, c, inside = OTHERS[name], wide[-1], np.ones(found.shape, bool)
    other = "C" if routine.is_hermitian else "T"
    rest = beta * c if beta else np.zeros(c.shape)
    if "side" not in by:
        inside = half(len(c), by["uplo"])
        first, second = (applied(one, "N" if by["trans"] == "N" else other) for one in (wide[0], wide[-2]))
        terms = [(alpha * first, applied(second, other))]
        if name.endswith("2k"):
            back = np.conj(alpha) if routine.is_hermitian else alpha
            terms += [(back * second, applied(first, other))]
        if routine.is_hermitian and beta:
            rest = beta * (c - 1j * np.diag(c.diagonal().imag))
    else:
        a = np.where(half(len(wide[0]), by["uplo"]), wide[0], 0)
        if routine.is_triangular:
            if by["diag"] == "U":
                np.fill_diagonal(a, 1)
            a, rest = applied(a, by["trans"]), np.zeros(c.shape)
        else:
            a = a + applied(np.where(half(len(a), by["uplo"], "U"), a, 0), other)
            if routine.is_hermitian:
                a.imag[np.diag_indices_from(a)] = 0
        b = found.astype(wide[-1].dtype) if name == "trsm" else alpha * wide[1]
        terms = [(a, b) if by["side"] == "L" else (b, a)]
        if name == "trsm":
            rest = -alpha * c
    value = sum(first @ second for first, second in terms) + rest
    size = sum(abs(first) @ abs(second) for first, second in terms) + abs(rest)
    off = abs(value if name == "trsm" else found - value)
    good = off <= (terms[0][0].shape[1] + 20) * 4 * np.finfo(found.dtype).eps * size + 1e-300
    if routine.is_hermitian and "side" not in by:
        good &= (found.diagonal().imag == 0)[:, None]
    return bool(good[inside].all() and np.array_equal(found[~inside], given[-1][~inside]))


def arguments(name, by, extents, alpha, beta, kind, matrices, integer=ctypes.c_int):
    """Return what a program passes; `matrices` are lists of arguments."""
    routine = OTHERS[name]
    real = np.zeros(1, kind).real.dtype
    told = [by[letter].lower().encode() for letter in routine.letters] + numbers(*extents, integer=integer)
    *inputs, last = matrices
    first = reals(alpha, real if "alpha" in routine.real else kind)
    betas = [] if routine.is_triangular else [reals(beta, real if "beta" in routine.real else kind)]
    return [*told, first, *itertools.chain.from_iterable(inputs), *betas, *last]


@pytest.mark.parametrize(("library", "suffix"), [("lp64", "_"), ("lp64", "_64_"), ("ilp64", "_")])
def test_every_routine_of_every_type_and_letter(names, library, suffix):
    rng = np.random.default_rng(1)
    integer = ctypes.c_int if (library, suffix) == ("lp64", "_") else ctypes.c_int64
    passed_on, extents = ctypes.c_int.in_dll(names.behind, "passed_on"), (37, 21)
    for letter, kind in TYPES.items():
        step = 19 if (library, suffix) != ("lp64", "_") else 1 if letter in "dz" else 3
        for number, (name, by) in enumerate(cases(kind, step)):
            shapes = OTHERS[name].shapes(by, extents)
            alpha, beta = factors_of(name, kind)
            beta = beta if number % 3 else 0
            given = given_of(rng, name, by, shapes, kind, beta)
            arrays = []  # rows behind are another's
            for gap, one in enumerate(given):
                arrays.append(np.full((len(one) + gap, one.shape[1]), 77, kind, order="F"))
                arrays[-1][: len(one)] = one
            passed = [[at(one), *numbers(len(one), integer=integer)] for one in arrays]
            before = passed_on.value
            getattr(getattr(names, library), f"{letter}{name}{suffix}")(
                *arguments(name, by, extents, alpha, beta, kind, passed, integer)
            )
            found = arrays[-1][: len(given[-1])]
            assert is_right(name, by, alpha, beta, given, found), (letter, name, by, beta)
            assert all((one[len(plain) :] == 77).all() for one, plain in zip(arrays, given, strict=True))
            assert passed_on.value == before, (letter, name, by)


@pytest.mark.parametrize(("block", "begun", "source"), [((3, 4), None, (1, 0)), ((5, 3), (2, 3), (0, 1))])
def test_every_routine_of_parts_of_dealt_matrices(names, comm, grid, block, begun, source):
    rng, passed_on = np.random.default_rng(3), ctypes.c_int.in_dll(names.behind, "passed_on")
    source, extents = tuple(place % count for place, count in zip(source, GRIDS[comm.size], strict=True)), (19, 11)
    for letter, kind in (("d", "f8"), ("z", "c16")):
        for number, (name, by) in enumerate(cases(kind, 3 if letter == "d" else 5)):
            shapes = OTHERS[name].shapes(by, extents)
            alpha, beta = factors_of(name, kind)
            beta = beta if number % 3 else 0
            given = comm.bcast(given_of(rng, name, by, shapes, kind, beta))
            operands = []
            for gap, one in enumerate(given):
                full = np.full([edge + 7 for edge in one.shape], 55, kind)
                full[3:-4, 1:-6] = one
                operands.append(Dealt(rng, comm, full.shape, block, gap=gap, begun=begun, source=source, full=full))
            before = passed_on.value
            passed = [[at(one.array), *numbers(4, 2), one.descriptor] for one in operands]
            getattr(names.lp64, f"p{letter}{name}_")(*arguments(name, by, extents, alpha, beta, kind, passed))
            last = operands[-1]
            found = last.full.copy()
            for indices, part in comm.allgather((last.indices, last.array[: last.rows])):
                found[np.ix_(*indices)] = part
            good = is_right(name, by, alpha, beta, given, found[3:-4, 1:-6]) and passed_on.value == before
            found[3:-4, 1:-6] = last.full[3:-4, 1:-6] = 0
            good &= np.array_equal(found, last.full) and bool((last.array[last.rows :] == 77).all())
            collective_assert(comm, good, f"{letter}{name} {by} {beta}")


def test_illegal_calls_and_what_a_session_refuses_are_those_of_the_library_behind(names):
    passed_on, one = ctypes.c_int.in_dll(names.behind, "passed_on"), reals(1.0, "f8")
    rng = np.random.default_rng(5)
    for kind, letter in (("f8", "d"), ("c16", "z")):
        a, b = matrix(rng, (6, 6), kind), matrix(rng, (6, 6), kind)
        scalar = reals(1.0, kind)
        wrong = (
            (f"{letter}trsm_", "LUNN", (6, 6), ((a, 5), (b, 6))),
            (f"{letter}trsm_", "LUNN", (6, 6), ((a, 6), (b, 5))),
            (f"{letter}trsm_", "XUNN", (6, 6), ((a, 6), (b, 6))),
            (f"{letter}trmm_", "RUTN", (6, 0), ((a, 6), (b, 6))),
            (f"{letter}trsm_", "LUNN", (6, 6), ((a, 6), (a, 6))),  # A is B
            (f"{letter}trsm_", "LUNN", (6, 2), ((a, 6), (a[:, 4:], 6))),  # a part of A
            (f"{letter}symm_", "LX", (6, 6), ((a, 6), (b, 6), (b, 6))),
            (f"{letter}symm_", "RU", (6, 4), ((a, 6), (b, 5), (b, 6))),
            (f"{letter}syrk_", "UX", (6, 6), ((a, 6), (b, 6))),
            (f"{letter}syrk_", "UT", (6, 6), ((a, 5), (b, 6))),
            (f"{letter}syr2k_", "UN", (-1, 6), ((a, 6), (b, 6), (b, 6))),
            *(
                [("zsyrk_", "UC", (6, 6), ((a, 6), (b, 6))), ("zherk_", "UT", (6, 6), ((a, 6), (b, 6)))]
                * (kind == "c16")
            ),
        )
        for name, letters, extents, given in wrong:
            before, beta = passed_on.value, [] if name[1:3] == "tr" else [one if "he" in name else scalar]
            *inputs, last = ([at(array), *numbers(ld)] for array, ld in given)
            told = [text.encode() for text in letters], numbers(*extents), [one if "he" in name else scalar]
            getattr(names.lp64, name)(*itertools.chain(*told, *inputs, beta, last))
            assert passed_on.value == before + 1, (name, letters, extents)


@pytest.mark.host_backend  # it lets nothing go on
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("name", "change", "number"),
    [
        ("trsm", {"letter": "L"}, 2),
        ("trsm", {"n": 5}, 6),
        ("trsm", {"alpha": 0.5}, 7),
        ("trsm", {"first": 2}, 13),
        ("syrk", {"first": 2}, 12),
        ("syrk", {"beta": 0.5}, 10),
        ("symm", {"block": (2, 4)}, 1305),
    ],
)
def test_ranks_that_pass_other_arguments_end_as_pblas_ends(names, comm, grid, name, change, number):
    rng, routine = np.random.default_rng(6), OTHERS[name]
    odd = change if comm.rank == comm.size - 1 else {}
    by = {letter: LETTERS[letter][0] for letter in routine.letters} | {"uplo": "U"}
    letters = [*(by | {"uplo": odd.get("letter", "U")}).values()]
    facts = [ROUTINES.index(routine), ord("d"), 4, *map(ord, letters), *[0] * (4 - len(letters)), 6, odd.get("n", 6), 0]
    operands = []
    for at_of in range(routine.num_matrices):
        operands.append(Dealt(rng, comm, (8, 8), odd.get("block", (4, 4)) if at_of == 1 else (4, 4)))
        plain = [*operands[-1].descriptor]
        facts += [odd.get("first", 1) if at_of == 1 else 1, 1, *plain[:6], *plain[4:8]]
    none = [0] * (3 - len(operands))
    facts += [0] * (46 - len(facts))
    leading = [one.descriptor[8] for one in operands]
    where = *(one.array.ctypes.data for one in operands), *none, *leading, *none
    factors = odd.get("alpha", 1.0), 0.0, odd.get("beta", 0.25), 0.0
    with pytest.raises(SystemExit):
        calls.compute_on_grid(np.array(facts, np.int64).tobytes(), tuple(where), *factors, 0)
    told = [ctypes.c_int.in_dll(names.behind, name).value for name in ("told", "aborted")]
    collective_assert(comm, told == [number, number], f"{told}")


@pytest.mark.parametrize("on_devices", [True, False])
@pytest.mark.parametrize("order", "CF")
def test_names_of_scipy_for_all_routines(names, monkeypatch, order, on_devices):
    if not on_devices:
        monkeypatch.setattr(um.blas, "of_process", lambda: None)
    rng, extents = np.random.default_rng(2), (23, 18)
    for letter, kind in TYPES.items():
        for number, (name, by) in enumerate(cases(kind, 5 if on_devices else 1)):
            alpha, beta = factors_of(name, kind)
            beta = beta if number % 3 else 0
            given = given_of(rng, name, by, OTHERS[name].shapes(by, extents), kind, beta)
            *inputs, last = (np.asarray(one, order=order) for one in given)
            flags = {"lower": by["uplo"] == "L"}
            if "side" in by:
                flags["side"] = by["side"] == "R"
            if "trans" in by:
                flags["trans_a" if "diag" in by else "trans"] = "NTC".index(by["trans"])
            if "diag" in by:
                flags["diag"] = by["diag"] == "U"
            call, overwrites = getattr(um.blas, f"{letter}{name}"), number % 2
            out = last.copy("F") if overwrites else last
            if "diag" in by:
                found = call(alpha, *inputs, out, overwrite_b=overwrites, **flags)
            else:
                found = call(alpha, *inputs, beta, out, overwrite_c=overwrites, **flags)
            assert is_right(name, by, alpha, beta, given, found), (letter, name, by, beta)
            assert found.dtype == kind
            assert found.flags.f_contiguous
            assert (found is out) == bool(overwrites)
            assert overwrites or np.array_equal(out, given[-1], equal_nan=True)


def test_without_alpha_nothing_but_c_is_read(names):
    none, ones = np.full((20, 20), np.nan), np.ones((20, 20))
    for least in ("0", "1"):  # on the device, and not
        os.environ["UNCUT_MPI_BLAS_MIN_GFLOP"] = least
        try:
            assert (um.blas.dsymm(0.0, none, none, 2.0, ones) == 2).all()
            assert (um.blas.dsyrk(0.0, none, 2.0, ones, lower=1) == ones + np.tri(20)).all()
            assert not um.blas.dsyr2k(0.0, none, none).any()
            assert not um.blas.dtrsm(0.0, none, none).any()
            assert not um.blas.ztrmm(0.0, none, none, side=1).any()
        finally:
            os.environ["UNCUT_MPI_BLAS_MIN_GFLOP"] = "0"


def test_what_does_not_fit_of_all_names_of_scipy():
    a, square = np.ones((4, 3)), np.ones((4, 4))
    for call, given, said in (
        (um.blas.dsyrk, (1, a, 0, a), "c is 4×3, and the product is 4×4"),
        (um.blas.zsyrk, (1, a, 0, None, 2), "trans = 2: use 0 or 1"),
        (um.blas.zherk, (1, a, 0, None, 1), "trans = 1: use 0 or 2"),
        (um.blas.zherk, (1j, a), "alpha = 1j: it is a real number"),
        (um.blas.dsyr2k, (1, a, square), "their shapes must be the same"),
        (um.blas.dsymm, (1, square, a, 0, None, 1), "with side=1 it is 3×3"),
        (um.blas.dtrsm, (1, a, a), "a is 4×3"),
        (um.blas.dtrmm, (1, square, a[0]), "b has 1 dimensions"),
    ):
        with pytest.raises(ParamError, match=said):
            call(*given)


def test_a_0_on_a_diagonal_divides_by_names_of_scipy(names, monkeypatch):
    a = np.eye(4) + np.tri(4)
    a[2, 2] = 0
    for _ in range(2):
        found = um.blas.dtrsm(1.0, a, np.ones((4, 2)), lower=1)
        assert np.isfinite(found[:2]).all()
        assert np.isinf(found[2]).all()
        monkeypatch.setattr(um.blas, "of_process", lambda: None)


def test_memory_of_an_earlier_call_may_be_the_sessions_own_in_a_later_one(names, monkeypatch):
    """It was B's, and is freed; then it holds a copy of the new one, that this must not be taken to overlap."""
    monkeypatch.setattr(session_level3, "LEAST_BLOCK", 2048)
    rng, extents, by = np.random.default_rng(7), (160, 120), {"side": "L", "uplo": "L", "trans": "N", "diag": "N"}
    passed_on = ctypes.c_int.in_dll(names.behind, "passed_on")
    before, shapes, held = passed_on.value, OTHERS["trsm"].shapes(by, extents), []
    for call in range(8):
        given = given_of(rng, "trsm", by, shapes, "f8")
        arrays = [one.copy("F") for one in given]
        held = [*held, arrays][-2:] if call % 2 else [arrays]
        passed = [[at(one), *numbers(len(one))] for one in arrays]
        names.lp64.dtrsm_(*arguments("trsm", by, extents, 1.5, 0, "f8", passed))
        assert is_right("trsm", by, 1.5, 0, given, arrays[-1]), call
    assert passed_on.value == before


@pytest.mark.parametrize("name", ["syrk", "syr2k", "symm", "trmm", "trsm"])
def test_a_repeated_call_makes_no_matrices_wherever_its_arrays_lie(names, monkeypatch, name):
    rng, extents, made = np.random.default_rng(8), (40, 33), []
    by = {letter: LETTERS[letter][0] for letter in OTHERS[name].letters}
    shapes, true_distribute = OTHERS[name].shapes(by, extents), MatrixStore.distribute
    monkeypatch.setattr(MatrixStore, "distribute", lambda *one, **by: made.append(one) or true_distribute(*one, **by))
    passed_on = ctypes.c_int.in_dll(names.behind, "passed_on")
    before, whole = passed_on.value, np.zeros((50, 400), order="F")
    for call, place in enumerate(["own", "own", "same", "columns", "same", "others", "rows", "rows", "own"]):
        given = given_of(rng, name, by, shapes, "f8")
        if place == "own":
            arrays = [one.copy("F") for one in given]
        elif place in ("columns", "others"):
            first = 0 if place == "columns" else 150
            arrays = [whole[:, 50 * i + first :][: len(one), : one.shape[1]] for i, one in enumerate(given)]
        elif place == "rows":
            tall = np.zeros((200, 40), order="F")
            arrays = [tall[50 * i :][: len(one), : one.shape[1]] for i, one in enumerate(given)]
        for array, one in zip(arrays, given, strict=True):
            array[:] = one
        made.clear()
        passed = [[at(one), *numbers(one.strides[1] // 8)] for one in arrays]
        getattr(names.lp64, f"d{name}_")(*arguments(name, by, extents, 1.5, 0.5, "f8", passed))
        assert is_right(name, by, 1.5, 0.0 if name.startswith("tr") else 0.5, given, arrays[-1]), (call, place)
        assert bool(made) == (call in (0, 3, 6, 8)), (call, place, len(made))  # another leading dimension
    assert passed_on.value == before
    a = arrays[0]
    passed = [[at(a), *numbers(len(a))]] * len(arrays)
    if all(one.shape == a.shape for one in arrays):  # which the library behind gets
        getattr(names.lp64, f"d{name}_")(*arguments(name, by, extents, 1.5, 0.5, "f8", passed))
        assert passed_on.value == before + 1


@pytest.mark.parametrize("name", ["syrk", "trsm"])
def test_memory_that_is_freed_and_made_again_is_read_anew_on_a_grid(names, comm, grid, name):
    rng, extents = np.random.default_rng(9), (24, 24)
    by = {letter: LETTERS[letter][0] for letter in OTHERS[name].letters}
    passed_on = ctypes.c_int.in_dll(names.behind, "passed_on")
    before, operands = passed_on.value, []
    for gap in (0, 0, None, None, 1, None, 2, 0):  # of a rank another leading dimension; None: the same arrays again
        if gap is not None:
            given = comm.bcast(given_of(rng, name, by, OTHERS[name].shapes(by, extents), "f8"))
            operands = [
                Dealt(rng, comm, one.shape, (4, 4), gap=gap * (comm.rank == comm.size - 1), full=one) for one in given
            ]
        else:
            for one, full in zip(operands, given, strict=True):
                one.array[: one.rows] = full[np.ix_(*one.indices)]
        passed = [[at(one.array), *numbers(1, 1), one.descriptor] for one in operands]
        getattr(names.lp64, f"pd{name}_")(*arguments(name, by, extents, 1.5, 0.5, "f8", passed))
        found = np.zeros(extents)
        for indices, part in comm.allgather((operands[-1].indices, operands[-1].array[: operands[-1].rows])):
            found[np.ix_(*indices)] = part
        beta = 0.5 if name == "syrk" else 0.0
        collective_assert(comm, is_right(name, by, 1.5, beta, given, found), f"{gap}")
    collective_assert(comm, passed_on.value == before, "passed on")


@pytest.mark.mpi
def test_empty_triangles_and_what_is_not_finite_by_numpy(comm, monkeypatch):
    monkeypatch.setattr(um.blas, "of_process", lambda: None)
    assert um.blas.dtrsm(1.0, np.zeros((0, 0)), np.zeros((0, 3))).shape == (0, 3)
    found = um.blas.dtrmm(1.0, np.tril(np.ones((3, 3))), np.array([[0.0], [0.0], [np.inf]]), lower=1)
    assert np.array_equal(found, [[0.0], [0.0], [np.inf]])
    c = np.full((2, 2), 2 + 0j)
    c[0, 0] = complex(2, np.nan)  # of which the real part is read
    assert um.blas.zherk(1.0, np.ones((2, 1), complex), 0.5, c)[0, 0] == 2
