"""Complex matrices: every op in every order, layout and memory, conjugated views, scalars, files, bad input."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert, expect
from tests.helpers.commands import in_process
from tests.helpers.distributed import fill, on_host, part_of
from tests.helpers.numbers import of_both_parts, steps_of
from tests.helpers.products import Case, check_product, make_operands, random_matrix
from uncut_mpi import Layout
from uncut_mpi.command import check
from uncut_mpi.gemm import main
from uncut_mpi.model.dtypes import DType

TYPES = pytest.mark.parametrize("dtype", [DType.c64, DType.c128], ids=lambda dtype: dtype.name)
OPS = pytest.mark.parametrize(("trans_a", "trans_b"), list(itertools.product("NTC", repeat=2)), ids="".join)


def bound_of(dtype, alpha, a, beta, c, b):
    """Return how far each element of alpha a b + beta c may be off (`steps_of`, `of_both_parts`)."""
    size = abs(alpha) * (np.abs(a) @ np.abs(b)) + abs(beta) * np.abs(c)
    return of_both_parts(dtype) * steps_of(dtype, a.shape[1]) * dtype.unit_roundoff * size


def check_c(comm, matrix, wanted, bound, told):
    """Fail on all ranks if what a rank has of a matrix is not what it should be."""
    place = np.ix_(*matrix.local_indices)
    error = np.abs(on_host(matrix.local) - wanted[place])
    collective_assert(comm, (error <= bound[place]).all(), f"{told}: {matrix!r} is off by {error.max(initial=0)}")


@OPS
def test_every_op_in_every_order_is_right(comm, session, trans_a, trans_b):
    places = (("h", "h", "h"), ("0", "0", "0"), (str(comm.size - 1), "h", "0"), ("h0", "0", "h"))
    for number, orders in enumerate(itertools.product("FC", repeat=3)):
        place = places[number // 2]
        dtype = "c64" if number % 3 == 2 else "c128"
        alpha, beta = (1.2345 - 0.5j, 0.0 if number % 4 == 3 else 1.1154 + 0.25j)
        pad = (number % 3, 2 * (number % 2), number % 2)
        case = Case(33, 21, 47, place, dtype, trans_a, trans_b, "".join(orders), pad, alpha, beta, number)
        operands = make_operands(session, case)
        session.gemm(*operands.abc, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b)
        check_product(comm, case, operands)


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("layout", ["rows", "whole", "cyclic"])
def test_conjugated_views_are_factors_as_op_c_is(comm, session, layout, order):
    dtype, k = DType.c128, 19
    layouts = {"rows": Layout.rows(), "whole": Layout.whole(0), "cyclic": Layout.block_cyclic(3, 4, (comm.size, 1))}
    data = random_matrix(23, k, dtype, (1, 1))
    rows, cols = layouts[layout].indices(data.shape, session.rank, num_ranks=comm.size)
    mine = np.array(data[np.ix_(rows, cols)], order=order) if len(rows) and len(cols) else None
    a = session.distribute(mine, layouts[layout], shape=data.shape)
    wide = data.astype(np.complex128)
    collective_assert(comm, a.H.H is a and a.H is a.H and a.H.T is a.T.H and a.T.T is a, "views are made again")
    collective_assert(comm, a.H.shape == (k, 23), a.H.shape)
    seen = a.H[2:9, 1:]
    same = np.array_equal(on_host(seen.local), part_of(seen, data.conj().T[2:9, 1:]))
    collective_assert(comm, same, f"{seen!r} has {seen.local}")
    products = {
        "AᴴA": (a.H, a, "N", "N", wide.conj().T @ wide),
        "AAᴴ": (a, a.H, "N", "N", wide @ wide.conj().T),
        "op C of Aᴴ": (a.H, a, "C", "C", wide @ wide.conj().T),
        "conj(A) A": (a.H.T, a, "N", "T", wide.conj() @ wide.T),
        "part": (seen, a[1:], "N", "N", wide.conj().T[2:9, 1:] @ wide[1:]),
    }
    for told, (first, second, trans_a, trans_b, wanted) in products.items():
        c = session.gemm(first, second, trans_a=trans_a, trans_b=trans_b)
        bound = of_both_parts(dtype) * steps_of(dtype, 23) * dtype.unit_roundoff * 2 * 23 * np.ones(wanted.shape)
        check_c(comm, c, wanted, bound, told)


def test_a_real_matrix_is_its_own_conjugate(comm, session):
    a = session.distribute(np.full((2, 3), 1.0 + session.rank), Layout.rows())
    collective_assert(comm, a.H is a.T and a.H.H is a, repr(a.H))
    for trans in ("T", "C"):
        c = session.gemm(a, a, trans_a=trans)
        wanted = sum(2 * (1.0 + rank) ** 2 for rank in range(comm.size))
        collective_assert(comm, (on_host(c.local) == wanted).all(), c.local)


@TYPES
def test_a_plan_is_executed_with_other_scalars_and_matrices(comm, session, dtype):
    a_KM, b_KN, c_MN = (random_matrix(*shape, dtype, (7, at)) for at, shape in enumerate(((9, 14), (9, 11), (14, 11))))
    a, b, c = (session.scatter(one if session.rank == 0 else None, Layout.rows()) for one in (a_KM, b_KN, c_MN))
    wide = [one.astype(np.complex128) for one in (a_KM, b_KN, c_MN)]
    with session.plan(a, b, c, trans_a="C") as plan:
        for alpha, beta in ((1.0, 0.0), (2j, 1.0), (0.0, 1j), (0.5 - 1j, -1j), (np.complex64(1e-3), 0.0)):
            fill(c.local, part_of(c, c_MN))
            session.barrier()
            plan.execute(alpha, beta)
            bound = bound_of(dtype, alpha, wide[0].T, beta, wide[2], wide[1])
            check_c(comm, c, alpha * wide[0].conj().T @ wide[1] + beta * wide[2], bound, f"{alpha} {beta}")
        expect(comm, um.ParamError, ["A does not fit the plan", "conjugated"], lambda: plan.execute(a=a.H.T))


@TYPES
def test_nan_in_what_is_not_read_stays_out(comm, session, dtype):
    nan = np.full((8, 8), complex(np.nan, np.nan), dtype.numpy)
    one = np.full((8, 8), 1 + 2j, dtype.numpy)
    a, b, c = (session.scatter(x if session.rank == 0 else None, Layout.rows()) for x in (one, one, nan))
    session.gemm(a, b, c, beta=0.0, trans_a="C")
    collective_assert(comm, (on_host(c.local) == 8 * (1 - 2j) * (1 + 2j)).all(), c.local)
    fill(a.local, part_of(a, nan))
    session.barrier()
    session.gemm(a, b, c, alpha=0.0, beta=1j, trans_a="C")
    collective_assert(comm, (on_host(c.local) == 40j).all(), c.local)


def test_what_does_not_go_together_is_an_error_on_every_rank_and_the_session_goes_on(comm, session):
    a, b = (session.empty((6, 6), dtype, Layout.rows(), memory="host") for dtype in ("c128", "f64"))
    for matrix in (a, b):
        fill(matrix.local, 1.0)
    made = session.empty((6, 6), "f64", Layout.rows(), memory="host")
    expect(comm, um.ParamError, ["dtypes differ", "A is c128", "convert"], lambda: session.gemm(a, b))
    expect(comm, um.ParamError, ["alpha = 1j is complex", "f64"], lambda: session.gemm(b, b, made, alpha=1j))
    expect(comm, um.ParamError, ["beta", "is complex"], lambda: session.gemm(b, b, made, beta=1 + 0j))
    expect(comm, um.ParamError, ["trans_a = 'H'", "'C'"], lambda: session.gemm(a, a, trans_a="H"))
    shared = session.empty_host((6, 6), "c128")
    for call in (
        lambda: session.gemm(shared, shared, a.H),
        lambda: session.redistribute(a.H, Layout.cols()),
        lambda: session.gather(a.H),
        lambda: session.download(a.H),
        lambda: session.upload(shared.H, a),
        lambda: session.upload(shared, a.H),
    ):
        expect(comm, um.ParamError, [".H is conjugated", ".T"], call)
    c = session.gemm(a, a, alpha=0.5j)
    collective_assert(comm, (on_host(c.local) == 3j).all(), c.local)


@pytest.mark.parametrize("value", [1e39j, 1 - 1e-50j])
def test_a_scalar_a_part_of_which_float32_cannot_hold_is_an_error(comm, session, value):
    a = session.empty((2, 2), "c64", Layout.rows(), memory="host")
    expect(comm, um.ParamError, ["alpha", "in float32"], lambda: session.gemm(a, a, alpha=value))


@pytest.fixture
def job(comm, capfd, backend_name):
    """Runs the command in this process; returns (status, everything rank 0 printed, its errors)."""
    return in_process(main, comm, capfd, ["--backend", backend_name, "--machine", "uniform"])


@pytest.mark.parametrize("full_limit", [10**18, -1])
def test_the_command_multiplies_complex_matrices_and_checks_them(comm, job, mpi_tmp_path, monkeypatch, full_limit):
    monkeypatch.setattr(check, "FULL_CHECK_LIMIT", full_limit)
    words = ["-m", "65", "-n", "33", "-k", "70", "--trans-a", "C", "--alpha", "-1+2j", "--beta", "0.5j"]
    timed = ["--warmup", "0", "--repeat", "1", "--json", mpi_tmp_path / "facts.json"]
    status, out, err = job([*words, *timed, "--dtype", "c128", "--place", "0,rows,cols"])
    good = status == 0 and not err and "PASS" in out and "C := -1+2j Aᴴ B + 0+0.5j C" in out
    collective_assert(comm, good and "of real operations" in out, out + err)
    facts = json.loads((mpi_tmp_path / "facts.json").read_text())
    collective_assert(comm, (facts["alpha"], facts["beta"], facts["trans_a"]) == ("-1+2j", "0.5j", "C"), facts)
    collective_assert(comm, ("Freivalds" in facts["check_detail"]) == (full_limit < 0), facts["check_detail"])
    status, out, err = job([*words, "--dtype", "f32"])
    collective_assert(comm, status == 2 and "--alpha -1+2j is complex" in err, (status, err))


def test_the_command_multiplies_complex_files(comm, job, mpi_tmp_path):
    a, b, c = (random_matrix(*shape, DType.c128, (3, at)) for at, shape in enumerate(((40, 30), (40, 20), (30, 20))))
    if comm.rank == 0:
        for name, one in (("A", a), ("B", np.asfortranarray(b)), ("C", c)):
            np.save(mpi_tmp_path / f"{name}.npy", one)
    comm.Barrier()
    files = [mpi_tmp_path / f"{name}.npy" for name in ("A", "B")]
    rest = ["-c", mpi_tmp_path / "C.npy", "-o", mpi_tmp_path / "OUT.npy", "--trans-a", "C", "--alpha", "1-1j"]
    status, out, err = job([*files, *rest, "--beta", "1j"])
    collective_assert(comm, status == 0 and "PASS" in out, out + err)
    found = np.load(mpi_tmp_path / "OUT.npy")
    wanted = (1 - 1j) * a.conj().T @ b + 1j * c
    collective_assert(comm, (np.abs(found - wanted) <= bound_of(DType.c128, 1 - 1j, a.T, 1j, c, b)).all(), "OUT.npy")


def test_matmul_of_a_few_lines_takes_complex_arrays(comm, backend_name):
    rng = np.random.default_rng(comm.rank)
    mine = [rng.standard_normal((3, 3 * comm.size)) + 1j * rng.standard_normal((3, 3 * comm.size)) for _ in "AB"]
    every = [np.concatenate(allgather(comm, one)) for one in mine]
    found = um.matmul(comm, *mine)
    rows = slice(3 * comm.rank, 3 * comm.rank + 3)
    collective_assert(comm, np.allclose(found, (every[0] @ every[1])[rows], 1e-12, 1e-12), found)
