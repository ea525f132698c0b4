"""The names of BLAS and PBLAS: as a program in C calls them, and as SciPy has them."""

from __future__ import annotations

import ctypes
import itertools
import threading
import types

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.blas import (  # noqa: F401 (fixtures)
    GRIDS,
    TYPES,
    Dealt,
    applied,
    at,
    grid_of,
    grid_of_ranks,
    matrix,
    names_of_blas,
    numbers,
    reals,
)
from tests.helpers.collective import collective_assert
from uncut_mpi.blas import calls
from uncut_mpi.errors import ParamError

TRANS = [*itertools.product("NTC", "NTC")]


def expected(ops, alpha, a, b, beta, c):
    """Return what a product is in doubles, and how far one in the matrices' type may be from it."""
    wide = [one.astype("c16" if np.iscomplexobj(one) else "f8") for one in (a, b, c)]
    first, second, third = applied(wide[0], ops[0]), applied(wide[1], ops[1]), wide[2]
    value = alpha * first @ second + (beta * third if beta else 0)
    size = abs(alpha) * abs(first) @ abs(second) + (abs(beta * third) if beta else 0)
    return value, (first.shape[1] + 4) * 4 * np.finfo(c.dtype).eps * size + 1e-300  # Higham 2002, (3.13) and 3.6


@pytest.mark.parametrize(("library", "suffix"), [("lp64", "_"), ("lp64", "_64_"), ("ilp64", "_")])
def test_gemm_of_every_type_and_transpose(names, library, suffix):
    rng = np.random.default_rng(1)
    integer = ctypes.c_int if (library, suffix) == ("lp64", "_") else ctypes.c_int64
    for (letter, kind), ops, beta in itertools.product(TYPES.items(), TRANS, (0, -1.25)):
        m, n, k = 17, 13, 19
        a, b = (matrix(rng, s if op == "N" else s[::-1], kind) for s, op in zip(((m, k), (k, n)), ops, strict=True))
        whole = matrix(rng, (m + 3, n), kind)  # rows behind C's are another's
        if not beta:
            whole[:m] = np.nan
        before, (value, bound) = whole.copy(), expected(ops, 1.5, a, b, beta, whole[:m])
        lda, ldb, ldc = (numbers(len(one), integer=integer) for one in (a, b, whole))
        passed_on = ctypes.c_int.in_dll(names.behind, "passed_on").value
        getattr(getattr(names, library), f"{letter}gemm{suffix}")(
            *(op.lower().encode() for op in ops), *numbers(m, n, k, integer=integer), reals(1.5, kind),
            *(at(a), *lda, at(b), *ldb, reals(beta, kind), at(whole), *ldc),
        )  # fmt: skip
        wrong = np.abs(whole[:m] - value) > bound
        assert not wrong.any(), (letter, ops, beta)
        assert (whole[m:] == before[m:]).all()
        assert ctypes.c_int.in_dll(names.behind, "passed_on").value == passed_on


def test_illegal_and_empty_products_are_those_of_the_library_behind(names):
    passed_on = ctypes.c_int.in_dll(names.behind, "passed_on")
    a = np.ones((4, 4), order="F")
    for m, k, lda, op in ((4, 4, 3, b"N"), (-1, 4, 4, b"N"), (4, 4, 4, b"X"), (0, 4, 4, b"N"), (4, 0, 4, b"N")):
        before, one = passed_on.value, reals(1, "f8")
        rest = at(a), *numbers(4), one, at(a), *numbers(4)
        names.lp64.dgemm_(op, b"N", *numbers(m, 4, k), one, at(a), *numbers(lda), *rest)
        assert passed_on.value == before + 1


def test_calls_of_several_threads_are_computed_or_passed_on(names):
    rng, edge = np.random.default_rng(7), 24
    counted = ctypes.c_int.in_dll(names.behind, "passed_on")
    a, b = (matrix(rng, (edge, edge), "f8") for _ in range(2))
    before, results = counted.value, [np.full((edge, edge), np.nan, order="F") for _ in range(40)]

    def call(some):
        for c in some:
            ld, scalars = numbers(edge), (reals(1.0, "f8"), reals(0.0, "f8"))
            names.lp64.dgemm_(
                *(b"N", b"N"), *numbers(edge, edge, edge), scalars[0], at(a), *ld, at(b), *ld, scalars[1], at(c), *ld
            )

    threads = [threading.Thread(target=call, args=(results[number::2],)) for number in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    done = [np.allclose(c, a @ b, rtol=1e-12) for c in results]
    assert sum(done) >= 1
    assert counted.value - before == len(results) - sum(done)
    assert all(np.isnan(c).all() for c, computed in zip(results, done, strict=True) if not computed)


def multiply(names, ops, extents, operands, starts, beta, suffix="pdgemm_"):
    given = [(at(one.array), *numbers(*start), one.descriptor) for one, start in zip(operands, starts, strict=True)]
    one = reals(1.5, "f8"), reals(beta, "f8")
    getattr(names.lp64, suffix)(
        *(op.encode() for op in ops), *numbers(*extents), one[0], *given[0], *given[1], one[1], *given[2]
    )


@pytest.mark.parametrize(("block", "begun", "source"), [((3, 4), None, (1, 0)), ((5, 3), (2, 3), (0, 1))])
def test_pgemm_of_parts_of_dealt_matrices(names, comm, grid, block, begun, source):
    rng = np.random.default_rng(3)
    m, n, k, first = 11, 9, 13, (4, 2)
    source = tuple(place % count for place, count in zip(source, GRIDS[comm.size], strict=True))
    for ops, beta in itertools.product(TRANS, (0, 0.75)):
        shapes = (m, k) if ops[0] == "N" else (k, m), (k, n) if ops[1] == "N" else (n, k), (m, n)
        about = {"begun": begun, "source": source}
        operands = [
            Dealt(rng, comm, (rows + 6, cols + 5), block, gap=at, **about) for at, (rows, cols) in enumerate(shapes)
        ]
        parts = [one.full[3 : 3 + rows, 1 : 1 + cols] for one, (rows, cols) in zip(operands, shapes, strict=True)]
        value, bound = expected(ops, 1.5, *parts[:2], beta, parts[2])
        multiply(names, ops, (m, n, k), operands, [first] * 3, beta)
        c = operands[2]
        wanted, room = c.full.copy(), np.zeros_like(c.full)
        wanted[3 : 3 + m, 1 : 1 + n], room[3 : 3 + m, 1 : 1 + n] = value, bound
        here = np.ix_(*c.indices)
        good = (np.abs(c.array[: c.rows] - wanted[here]) <= room[here]).all() and (c.array[c.rows :] == 77.0)[
            :, :
        ].all()
        collective_assert(comm, bool(good), f"{ops} {beta}")
    collective_assert(comm, ctypes.c_int.in_dll(names.behind, "passed_on").value < 100, "passed on")


def test_memory_that_is_freed_and_made_again_is_read_anew(names, comm, grid):
    rng = np.random.default_rng(4)
    operands = []
    for gap in (0, 0, None, None, 1, None, 2):  # of a rank another leading dimension; None: the same arrays again
        if gap is not None:
            operands = [Dealt(rng, comm, (24, 24), (4, 4), gap=gap * (comm.rank == 1)) for _ in range(3)]
        value, bound = expected("NN", 1.5, *(one.full for one in operands[:2]), 0, operands[2].full)
        multiply(names, "NN", (24, 24, 24), operands, [(1, 1)] * 3, 0)
        c, here = operands[2], np.ix_(*operands[2].indices)
        collective_assert(comm, bool((np.abs(c.array[: c.rows] - value[here]) <= bound[here]).all()), f"{gap}")


def test_c_that_comes_to_overlap_is_passed_on(names):
    passed_on, one = ctypes.c_int.in_dll(names.behind, "passed_on"), reals(1.0, "f8")
    a, b, c = (np.asfortranarray(np.eye(24)) for _ in range(3))
    before = passed_on.value
    for last, more in ((c, 0), (b, 1), (c, 1), (np.zeros_like(c), 1), (a, 2)):
        passed = [at(a), *numbers(24), at(b), *numbers(24), one, at(last), *numbers(24)]
        names.lp64.dgemm_(b"N", b"N", *numbers(24, 24, 24), one, *passed)
        assert passed_on.value == before + more


@pytest.mark.mpi(min_size=2)
def test_ranks_outside_of_a_grid_take_no_part_and_its_number_may_be_of_another_one_later(names, comm):
    rng, passed_on = np.random.default_rng(8), ctypes.c_int.in_dll(names.behind, "passed_on")
    for members in (comm.size - 1, comm.size, 1):
        inside = comm.Split(int(comm.rank < members), comm.rank)
        place = (0, comm.rank) if comm.rank < members else (-1, -1)
        before = passed_on.value
        operands = [Dealt(rng, comm, (9, 9), (2, 2), grid=(1, members), place=place) for _ in range(3)]
        value, bound = expected("NN", 1.5, *(one.full for one in operands[:2]), 0, operands[2].full)
        with grid_of(names, inside, (1, members), place):
            multiply(names, "NN", (9, 9, 9), operands, [(1, 1)] * 3, 0)
        c, here = operands[2], np.ix_(*operands[2].indices)
        good = passed_on.value == before + (comm.rank >= members)
        good &= comm.rank >= members or bool((np.abs(c.array[: c.rows] - value[here]) <= bound[here]).all())
        collective_assert(comm, good, f"{members} {passed_on.value - before}")
        inside.Free()


@pytest.mark.mpi(min_size=2)
def test_a_rank_without_columns_may_say_a_leading_dimension_of_one(names, comm, grid):
    """PBLAS lets it: no column begins there."""
    rng, passed_on = np.random.default_rng(11), ctypes.c_int.in_dll(names.behind, "passed_on")
    operands = [Dealt(rng, comm, (12, 12), (12 // GRIDS[comm.size][0], 12)) for _ in range(3)]
    for one in operands:
        one.descriptor[8] = one.descriptor[8] if one.array.shape[1] else 1
    value, bound = expected("NN", 1.5, *(one.full for one in operands[:2]), 0, operands[2].full)
    before = passed_on.value
    multiply(names, "NN", (12, 12, 12), operands, [(1, 1)] * 3, 0)
    c, here = operands[2], np.ix_(*operands[2].indices)
    good = passed_on.value == before and bool((np.abs(c.array[: c.rows] - value[here]) <= bound[here]).all())
    collective_assert(comm, good, f"{passed_on.value - before}")


def test_arrays_that_are_not_aligned_any_more_are_multiplied_or_passed_on(names):
    rng, passed_on = np.random.default_rng(12), ctypes.c_int.in_dll(names.behind, "passed_on")
    edge = 31
    a, b, c = (matrix(rng, (edge, edge), "f8") for _ in range(3))
    beside = np.zeros(8 * edge * edge + 8, np.uint8)[4:-4].view(np.uint8)
    value, bound = expected("NN", 1.5, a, b, 0, c)
    for call in range(6):
        odd = call % 3
        moved = beside.ctypes.data if odd else 0
        if odd == 1:
            beside[:] = np.ascontiguousarray(a.T).view(np.uint8).ravel()
        c[:] = np.nan
        before, ld = passed_on.value, numbers(edge)
        first = ctypes.c_void_p(moved) if odd == 1 else at(a)
        third = ctypes.c_void_p(moved) if odd == 2 else at(c)
        names.lp64.dgemm_(
            *(b"N", b"N"),
            *numbers(edge, edge, edge),
            reals(1.5, "f8"),
            first,
            *ld,
            at(b),
            *ld,
            reals(0, "f8"),
            third,
            *ld,
        )
        found = np.frombuffer(beside.tobytes()).reshape(edge, edge).T if odd == 2 else c
        assert passed_on.value > before or (np.abs(found - value) <= bound).all()


@pytest.mark.mpi(min_size=2)
def test_contexts_end_in_any_order(names, comm):
    rng = np.random.default_rng(13)
    shape, place = GRIDS[comm.size], divmod(comm.rank, GRIDS[comm.size][1])
    for context in (5, 6):
        operands = [Dealt(rng, comm, (9, 9), (2, 2)) for _ in range(3)]
        for one in operands:
            one.descriptor[1] = context
        with grid_of(names, comm, shape, place, ends=False):
            multiply(names, "NN", (9, 9, 9), operands, [(1, 1)] * 3, 0)
    for context in (5, 6) if comm.rank % 2 else (6, 5):
        names.lp64.Cblacs_gridexit(context)
        comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_a_grid_of_which_one_process_cannot_begin_is_passed_on_by_all(names, comm, grid, monkeypatch):
    """Else the others wait in a product that this one leaves to the library behind."""
    rng, passed_on = np.random.default_rng(10), ctypes.c_int.in_dll(names.behind, "passed_on")
    operands = [Dealt(rng, comm, (9, 9), (2, 2)) for _ in range(3)]
    monkeypatch.setattr(calls, "begins", lambda: comm.rank != 1)
    for wanted in (1, 2):
        before = passed_on.value
        for _ in range(wanted):
            multiply(names, "NN", (9, 9, 9), operands, [(1, 1)] * 3, 0)
        collective_assert(comm, passed_on.value == before + wanted, f"{passed_on.value - before}")


def test_a_grid_waits_for_a_call_of_another_thread_without_the_interpreter(names, comm, grid):
    """The other thread needs the interpreter, which a caller of p?gemm may hold as extensions do."""
    rng, over = np.random.default_rng(9), threading.Event()
    operands = [Dealt(rng, comm, (24, 24), (4, 4)) for _ in range(3)]
    value, bound = expected("NN", 1.5, *(one.full for one in operands[:2]), 0, operands[2].full)
    a, b, c = (matrix(rng, (8, 8), "f8") for _ in range(3))
    scalars = reals(1.0, "f8"), reals(0.0, "f8")

    def call():
        while not over.is_set():
            edge = numbers(8, 8, 8, 8)
            rest = scalars[1], at(c), edge[3]
            names.lp64.dgemm_(b"N", b"N", *edge[:3], scalars[0], at(a), edge[3], at(b), edge[3], *rest)

    thread = threading.Thread(target=call)
    thread.start()
    try:
        holding = types.SimpleNamespace(lp64=ctypes.PyDLL(str(um.blas.library())))
        for _ in range(20):
            multiply(holding, "NN", (24, 24, 24), operands, [(1, 1)] * 3, 0)
    finally:
        over.set()
        thread.join()
    c, here = operands[2], np.ix_(*operands[2].indices)
    collective_assert(comm, bool((np.abs(c.array[: c.rows] - value[here]) <= bound[here]).all()), "C is wrong")


def test_what_layouts_lack_and_lies_are_for_the_library_behind(names, comm, grid):
    rng, passed_on = np.random.default_rng(5), ctypes.c_int.in_dll(names.behind, "passed_on")
    for entry, value in ((0, 3), (6, -1), (2, 8), (8, 0)):  # no such type, replicated, too few rows, short columns
        operands = [Dealt(rng, comm, (16, 16), (4, 4)) for _ in range(3)]
        operands[0].descriptor[entry] = value
        before = passed_on.value
        multiply(names, "NN", (16, 16, 16), operands, [(1, 1)] * 3, 0)
        collective_assert(comm, passed_on.value == before + 1, f"{entry}")


@pytest.mark.host_backend  # it lets nothing go on
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("change", "number"), [({"n": 5}, 4), ({"first": 2}, 12), ({"block": (2, 4)}, 1405), ({"beta": 0.5}, 15)]
)
def test_ranks_that_pass_other_arguments_end_as_pblas_ends(names, comm, grid, change, number):
    rng = np.random.default_rng(6)
    odd = change if comm.rank == comm.size - 1 else {}
    operands = [Dealt(rng, comm, (8, 8), odd.get("block", (4, 4)) if at == 1 else (4, 4)) for at in range(3)]
    facts = [0, ord("d"), 4, ord("N"), ord("N"), 0, 0, 6, odd.get("n", 6), 6]
    for at_of, one in enumerate(operands):
        plain = [*one.descriptor]
        first = odd.get("first", 1) if at_of == 1 else 1
        facts += [first, 1, *plain[:6], *plain[4:8]]
    data = np.array(facts, np.int64).tobytes()
    where = *(one.array.ctypes.data for one in operands), *(one.descriptor[8] for one in operands)
    with pytest.raises(SystemExit):
        calls.compute_on_grid(data, where, 1.0, 0.0, odd.get("beta", 0.25), 0.0, 0)
    told = [ctypes.c_int.in_dll(names.behind, name).value for name in ("told", "aborted")]
    collective_assert(comm, told == [number, number], f"{told}")


def test_a_product_without_alpha_reads_neither_a_nor_b(names):
    a = np.full((20, 20), np.nan)
    for edge in (2, 20):
        given = a[:edge, :edge]
        assert (um.blas.dgemm(0.0, given, given, 1.0, np.ones((edge, edge))) == 1).all()
        assert (um.blas.dgemm(0.0, given, given) == 0).all()
    assert np.isposinf(um.blas.sgemm(1e300, [[1.0]], [[1.0]])).all()


def test_names_of_scipy(names):
    rng = np.random.default_rng(2)
    for (letter, kind), ops, order in itertools.product(TYPES.items(), TRANS, "CF"):
        shapes = (7, 5), (5, 6)
        given = [
            np.asarray(matrix(rng, shape if op == "N" else shape[::-1], kind), order=order)
            for shape, op in zip(shapes, ops, strict=True)
        ]
        c = matrix(rng, (7, 6), kind)
        by = {f"trans_{name}": "NTC".index(op) for name, op in zip("ab", ops, strict=True)}
        multiply_it = getattr(um.blas, f"{letter}gemm")
        for out, overwrite in ((None, 0), (c.copy(), 0), (c.copy("F"), 1)):
            beta = 0.0 if out is None else 0.5
            value, bound = expected(ops, 2.0, *given, beta, c)
            found = multiply_it(2.0, *given, beta, out, overwrite_c=overwrite, **by)
            assert (np.abs(found - value) <= bound).all(), (letter, ops, order)
            assert found.flags.f_contiguous
            assert found.dtype == kind
            assert (found is out) == bool(overwrite)
            assert out is None or overwrite or (out == c).all()


def test_names_of_scipy_in_several_threads_beside_the_library(names):
    rng, wrong = np.random.default_rng(11), []
    cases = [(matrix(rng, (20, 30), "f8"), matrix(rng, (30, 10), "f8")) for _ in range(3)]

    def call(a, b):
        for number in range(40):
            alpha = 1.0 + number % 3
            try:
                good = np.allclose(um.blas.dgemm(alpha, a, b), alpha * (a @ b), rtol=1e-12)
            except BaseException as error:
                wrong.append(error)
            else:
                wrong.extend([] if good else ["C"])

    threads = [threading.Thread(target=call, args=case) for case in cases]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


def test_arguments_of_names_of_scipy_that_do_not_fit():
    a = np.ones((4, 3))
    for given, said in (
        ((1, a, a), "k must be the same"),
        ((1, a[0], a), "a has 1 dimensions"),
        ((1, a, a.T, 1, a), "c is 4×3"),
        ((1, a, a, 0, None, 3), "trans_a = 3"),
    ):
        with pytest.raises(ParamError, match=said):
            um.blas.dgemm(*given)
