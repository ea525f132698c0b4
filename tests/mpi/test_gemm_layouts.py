"""Products of matrices of which each rank has a part, on all ranks and in all their memories."""

from __future__ import annotations

import gc
import itertools
import math
import random

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers import interpret
from tests.helpers.collective import collective_assert, expect, outcome
from tests.helpers.distributed import check_copies, check_part, distributed, fill, made_of, on_host, random_layout
from tests.helpers.hostile import Closed
from tests.helpers.products import array_of, random_matrix, shared_of, shows
from tests.helpers.sessions import hide_arrays, memories, refuse_pins
from uncut_mpi import Layout, ScheduleOptions
from uncut_mpi.api import lifetime
from uncut_mpi.api import session as session_module
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import planner
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.planner import plan_several
from uncut_mpi.planning.staging import used_by_others

PLAIN = ScheduleOptions(scheduler="kblocks", blocking=um.Blocking(columns=1, lanes=1))
"""Without a search, which takes most of a small product's time."""

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


def dealt(kind, shape, size):
    """Return a layout of a kind, cut unevenly, that differs from the others also on two ranks."""
    backwards = range(size - 1, -1, -1)

    def cut(extent, parts):
        edges = [0, *(min(extent, part * (part + 1) // 2) for part in range(1, parts)), extent]
        return [stop - start for start, stop in itertools.pairwise(edges)]

    height = 2 if size > 1 else 1
    ranks = [*backwards][: height * (size // height)]
    return {
        "whole": Layout.whole(size // 2),
        "rows": Layout.rows(cut(shape[0], size)),
        "cols": Layout.cols(cut(shape[1], size), ranks=backwards),
        "blocks": Layout.blocks(cut(shape[0], height), cut(shape[1], size // height), ranks=ranks),
        "replicated": Layout.replicated(),
    }[kind]


def test_every_layout_of_a_times_every_one_of_b_gives_every_one_of_c(comm, session):
    m, n, k, alpha, beta = 6, 5, 4, 1.25, 0.75
    other = (DType.f32, DType.bf16, DType.f16)[comm.size % 3]
    problems = {dtype: GemmProblem(m, n, k, dtype) for dtype in (DType.f64, other)}
    values = {dtype: interpret.random_data(problem, 7, alpha=alpha, beta=beta) for dtype, problem in problems.items()}
    made, wrong = {}, []

    def matrix(name, kind, dtype, order):
        key, data = (name, kind, dtype, order), getattr(values[dtype], name)
        if key not in made:
            memory, layout = memories(comm.size)[len(made) % 3], dealt(kind, data.shape, comm.size)
            made[key] = session.empty(data.shape, dtype, layout, order=order, memory=memory)
        elif name != "c":
            return made[key]
        fill(made[key].local, data[np.ix_(*made[key].local_indices)])
        return made[key]

    def operand(name, kind, dtype, order, trans):
        if trans == "N":
            return matrix(name, kind, dtype, order)
        return matrix(name, {"rows": "cols", "cols": "rows"}.get(kind, kind), dtype, "CF"[order == "C"]).T

    hows = [*itertools.product("NT", "NT", "CF", "CF", "CF")]
    for at, kinds in enumerate(itertools.product(("whole", "rows", "cols", "blocks", "replicated"), repeat=3)):
        if at % 3 and (comm.size < 4 or session.backend_name != "host"):
            continue  # all of them on four ranks, where nothing is to be warmed up for them
        dtype = other if at % 4 == 3 else DType.f64
        # 11 is prime to their number: all come up on any number of ranks, with other layouts on each.
        trans_a, trans_b, *orders = hows[(11 * at + 5 * comm.size) % len(hows)]
        a = operand("a", kinds[0], dtype, orders[0], trans_a)
        b = operand("b", kinds[1], dtype, orders[1], trans_b)
        c = matrix("c", kinds[2], dtype, orders[2])
        session.gemm(a, b, c, alpha=alpha, beta=beta, trans_a=trans_a, trans_b=trans_b, options=PLAIN)
        result, bound = (x[np.ix_(*c.local_indices)] for x in interpret.reference(problems[dtype], values[dtype]))
        if not (np.abs(on_host(c.local).astype(np.float64) - result) <= bound).all():
            wrong.append(f"{a!r} {trans_a} x {b!r} {trans_b} = {c!r}")
    collective_assert(comm, not wrong, f"{len(wrong)} products are wrong: {wrong[:5]}")


def test_the_program_of_the_manual_is_right(comm):
    if comm.size != 4:
        pytest.skip("a program for 4 ranks")
    exec(compile(ROWS, "rows.py", "exec"), {})


def test_one_product_needs_no_session(comm):
    a_MK, b_KN = random_matrix(11, 7, DType.f32, (1,)), random_matrix(7, 5, DType.f32, (2,))
    a_mine, b_mine = (np.array_split(data, comm.size)[comm.rank].copy() for data in (a_MK, b_KN))
    c = um.matmul(comm, a_mine, b_mine)
    right = c.dtype == np.float32 and c.shape == (len(a_mine), 5) and np.allclose(c, a_mine @ b_KN, 1e-5, 1e-5)
    collective_assert(comm, right, f"{c} of {a_mine @ b_KN}")
    c = um.matmul(comm, a_MK if comm.rank == 0 else None, b_mine)
    wanted = a_MK @ b_KN if comm.rank == 0 else np.empty((0, 5), np.float32)
    collective_assert(comm, c.shape == wanted.shape and np.allclose(c, wanted, 1e-5, 1e-5), f"{c} of {wanted}")
    expect(comm, um.ParamError, ["shapes do not fit"], lambda: um.matmul(comm, a_mine, a_mine))


def test_the_session_of_single_products_is_kept_for_their_communicator(comm, monkeypatch):
    opened, start = [], session_module.start_backend
    monkeypatch.setattr(
        session_module, "start_backend", lambda *given, **more: opened.append(1) or start(*given, **more)
    )
    a_MK, b_KN = random_matrix(9, 6, DType.f64, (55,)), random_matrix(6, 4, DType.f64, (56,))
    a_mine, b_mine = (np.array_split(data, comm.size)[comm.rank].copy() for data in (a_MK, b_KN))
    one, other = comm.Dup(), comm.Dup()

    def sessions(which):
        found = um.matmul(which, a_mine, b_mine)
        collective_assert(comm, np.allclose(found, a_mine @ b_KN, 1e-13, 1e-13), f"{found} of {a_mine @ b_KN}")
        return len(opened)

    counts = [sessions(which) for which in (one, other, one, other)]
    expect(comm, um.ParamError, ["shapes do not fit"], lambda: um.matmul(one, a_mine, a_mine))  # which closes it
    counts += [sessions(one), sessions(one)]
    with monkeypatch.context() as patch:
        patch.setattr(session_module, "_MOST_KEPT", -1)
        counts.append(sessions(other))
    counts += [sessions(other), sessions(other)]
    collective_assert(comm, counts == [1, 2, 2, 2, 3, 3, 3, 4, 4], str(counts))

    def kept():
        gc.collect()
        with um.Session(comm, backend="host"):  # which gives back those of communicators that are gone
            return len(lifetime._kept)

    before = kept()  # without those of earlier tests
    one.Free()
    other.Free()
    after = kept()
    collective_assert(comm, after == before - 2, f"{before}, then {after}")


def test_a_plan_takes_fresh_arrays_of_the_ranks(comm, session):
    counts = [0, *(2 + rank for rank in range(comm.size - 1))] if comm.size > 1 else [3]
    m, mine = sum(counts), counts[comm.rank]
    a = session.distribute(np.full((mine, 6), np.nan), Layout.rows())
    b = made_of(session, right := random_matrix(6, 5, DType.f64, (50,)), Layout.replicated(), memory="host")
    c = session.empty((m, 5), "f64", Layout.rows(counts), memory="host")
    kept = {*session._store._held}
    with session.plan(a, b, c, reads_c=False) as plan:
        out = np.full((mine, 5), np.nan)
        for seed, (first, second) in enumerate(
            [(None, None), (out, None), (out, None), (np.empty_like(out), right.copy())]
        ):
            x = random_matrix(m, 6, DType.f64, (seed,))[sum(counts[: comm.rank]) :][:mine].copy()
            calls = session.counters.planner_calls
            plan.execute(a=x, b=second, c=first)
            found = c.local if first is None else first
            collective_assert(comm, np.allclose(found, x @ right, 1e-13, 1e-13), f"call {seed}: {found} of {x @ right}")
            collective_assert(comm, session.counters.planner_calls == calls, "planned again")
        newest = max(session._store._held)
        plan.execute(a=x, b=second, c=first)
        collective_assert(comm, max(session._store._held) == newest, "the same arrays are another matrix")
        wrong = np.asfortranarray(np.zeros((mine, 6))) if comm.size == 1 or comm.rank else x
        expect(comm, um.ParamError, ["A does not fit the plan"], lambda: plan.execute(a=wrong))
        expect(comm, um.ParamError, ["A: local arrays do not make"], lambda: plan.execute(a=np.zeros((mine + 1, 6))))
        nothing = np.empty((0, 6)) if comm.size == 1 or comm.rank else x
        expect(comm, um.ParamError, ["A: local arrays do not make"], lambda: plan.execute(a=nothing))
        for odd in ([1.0], np.float64(1), Closed(), "x"):  # also on one rank only, and after arrays were given
            given = odd if comm.rank == comm.size - 1 else x
            product = outcome(lambda odd=odd: session.gemm(odd if comm.rank == comm.size - 1 else a, b))
            executed = outcome(lambda given=given: plan.execute(a=given))
            product = product.replace("gemm: ", "execute: ")
            good = executed == product if type(odd) is not Closed else executed.startswith(("ParamError", "PeerFailed"))
            collective_assert(comm, good, f"{executed} instead of {product}")
        if comm.size > 1:
            some = {"a": x} if comm.rank else {}
            expect(
                comm,
                um.RankMismatchError,
                ["a: ", "an array (a rank without a part passes one without elements)"],
                lambda: plan.execute(**some),
            )
    expect(comm, um.ParamError, ["the plan is closed"], lambda: plan.execute(a=x))
    gc.collect()
    session.release(session.empty((4, 4), "f64", Layout.whole(0)))
    collective_assert(comm, {*session._store._held} == kept, "matrices of arrays stay when the plan is closed")


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
        a = made_of(session, inputs[0], first, memory="device")
        b = made_of(session, inputs[1], second, memory="host", order="F")
        c = session.gemm(a, b, trans_a=trans[0], trans_b=trans[1], options=PLAIN)
        told = f"{first}, {second}, {trans}: {c.layout} in {c.memory} memory, not {wanted} in {memory}"
        collective_assert(comm, (c.layout, c.memory, c.order) == (wanted, memory, "C"), told)
        check_part(comm, c, a_MK @ b_KN, told)


def operands_of(session, shapes, layouts, memory="device"):
    every = [random_matrix(*shape, DType.f64, (seed,)) for seed, shape in enumerate(shapes)]
    return [(made_of(session, data, layout, memory=memory), data) for data, layout in zip(every, layouts, strict=True)]


def test_c_is_dealt_as_asked_also_of_whole_matrices(comm, session):
    blocks = Layout.blocks([4, 5], [8], ranks=[0, comm.size - 1]) if comm.size > 1 else Layout.rows()
    for first, asked, memory in (
        (Layout.rows(), Layout.cols(), "device"),
        (Layout.whole(0), blocks, "host"),
        (Layout.whole(comm.size - 1), Layout.rows(), memories(comm.size)[2]),
    ):
        (a, a_MK), (b, b_KN) = operands_of(session, ((9, 6), (6, 8)), (first, Layout.whole(0)), memory)
        c = session.gemm(a, b, out_layout=asked, options=PLAIN)
        told = f"{c!r} of {c.layout} in {c.memory} memory, not {asked} in {memory}"
        collective_assert(comm, c.layout == asked.filled((9, 8), comm.size) and c.memory == memory, told)
        check_part(comm, c, a_MK @ b_KN, told)
        same = session.matmul(a, b)
        collective_assert(comm, same.layout == session.gemm(a, b, options=PLAIN).layout, f"{same.layout}")
        check_part(comm, same, a_MK @ b_KN)


def split(extent, num):
    return [len(part) for part in np.array_split(range(extent), num)]


@pytest.mark.parametrize("case", range(3))
def test_auto_is_the_layout_whose_product_is_predicted_fastest(comm, session, monkeypatch, case):
    planned = []

    def count(*arguments):
        planned.append(arguments)
        return plan_several(*arguments)

    shapes = (((64, 96), (96, 48)), ((400, 8), (8, 8)), ((8, 8), (8, 400)))[case]
    dealt = ((Layout.cols(), Layout.rows()), (Layout.whole(0), Layout.whole(0)), (Layout.replicated(), Layout.cols()))
    (a, a_MK), (b, b_KN) = operands_of(session, shapes, dealt[case])
    shape = shapes[0][0], shapes[1][1]
    grid = ProcessGrid.most_square(comm.size)
    cuts = [split(extent, num) for extent, num in zip(shape, (grid.rows, grid.cols), strict=True)]
    followed = {0: (), 1: dealt[1], 2: (Layout.replicated(), Layout.cols())}[case]
    expected, searched = {}, {}
    for layout in (*followed, Layout.rows(), Layout.cols(), Layout.blocks(*cuts)):
        out = session.empty(shape, "f64", layout)
        for search, found in (("rule", expected), ("full", searched)):
            with session.plan(a, b, out, reads_c=False, options=ScheduleOptions(search=search)) as plan:
                found.setdefault(out.layout, plan.summary.predicted_s)
    monkeypatch.setattr(planner, "plan_several", count)
    c = session.gemm(a, b, out_layout="auto")
    tried = len(planned)
    wanted = min(expected, key=expected.__getitem__)
    told = f"{c.layout}, expected of {expected}, by a whole search {searched}"
    collective_assert(comm, c.layout == wanted and searched[wanted] <= 1.01 * min(searched.values()), told)
    check_part(comm, c, a_MK @ b_KN)
    asked = {options.search for setting, *_ in planned for options in [setting.options]}
    collective_assert(comm, asked <= {"rule"}, f"searches of {asked} in a call")
    other = session.gemm(a, b, alpha=2.0, out_layout="auto")
    collective_assert(comm, other.layout == wanted and len(planned) == tried, f"{other.layout}, {len(planned)} plans")


def test_layouts_that_c_cannot_have_are_one_error_on_all_ranks(comm, session):
    (a, _), (b, _) = operands_of(session, ((4, 6), (5, 4)), (Layout.rows(), Layout.rows()))
    out = session.empty((4, 4), "f64", Layout.rows())
    for words, call in (
        (["out_layout = 'rows' is a str"], lambda: session.gemm(a, out, out_layout="rows")),
        (["has 3 rows, the matrix 4"], lambda: session.gemm(out, out, out_layout=Layout.rows([3], ranks=[0]))),
        (["out and out_layout were given"], lambda: session.gemm(out, out, a, out_layout=Layout.rows())),
        (["shapes do not fit"], lambda: session.gemm(a, b, out_layout="auto")),
    ):
        expect(comm, um.ParamError, words, call)


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
    wanted = 1.25 * a_MK @ b_KN + 0.75 * c_MN
    check_part(comm, c, wanted, told, 1e-12)
    session.poison_softbuf()
    out = session.redistribute(c, random_layout(rng, c.shape, comm.size))
    check_part(comm, out, wanted, f"{told}, copied to {out!r}", 1e-12)
    session.barrier()
    for matrix in (*operands, out):
        session.release(matrix)


def cut(extent, parts):
    """Return uneven counts."""
    return [extent - parts * (parts - 1) // 2, *range(1, parts)] if parts > 1 else [extent]


def test_ranks_of_a_layout_are_those_of_a_reordered_grid_and_of_its_rows(comm, open_session):
    from mpi4py import MPI

    turned = comm.Split(0, -comm.rank)
    grid = turned.Create_cart(MPI.Compute_dims(comm.size, 2), reorder=True)
    (height, width), (row, col) = grid.dims, grid.coords
    a_MK, b_KN = random_matrix(19, 23, DType.f64, (60,)), random_matrix(23, 17, DType.f64, (61,))

    def part(data, session, counts):
        down, along = (np.cumsum([0, *one]) for one in counts)
        mine = data[down[row] : down[row + 1], along[col] : along[col + 1]].copy()
        return session.distribute(mine, Layout.blocks(*counts))

    with open_session(grid, verify=True) as session:
        a = part(a_MK, session, (cut(19, height), cut(23, width)))
        b = part(b_KN, session, (cut(23, height), cut(17, width)))
        c = session.empty((19, 17), "f64", Layout.blocks(cut(19, height), cut(17, width)))
        session.gemm(a, b, c)
        collective_assert(comm, session.rank == grid.rank, f"it is {session.rank} at {row}, {col}")
        check_part(comm, c, a_MK @ b_KN)
    rows = grid.Sub([False, True])
    with open_session(rows, verify=True) as session:  # those of all rows at the same time
        mine = a_MK[:, row:][:, : 2 * width]
        a = session.distribute(mine[:, 2 * session.rank :][:, :2].copy(), Layout.cols())
        b = session.distribute(b_KN[2 * session.rank :][:2].copy(), Layout.rows())
        c = session.gemm(a, b, out_layout=Layout.cols())
        check_part(comm, c, mine @ b_KN[: 2 * width], f"row {row}")
    for one in (rows, grid, turned):
        one.Free()


# == matrices in ScaLAPACK's block-cyclic layout ==========================================================


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


def test_the_cyclic_program_of_the_manual_is_right(comm, backend_name):
    text = CYCLIC.replace("grid=(2, 2)", f"grid={GRIDS[comm.size]}")
    if backend_name == "host":
        text = text.replace("import cupy as cp, numpy as np,", "import numpy as np, numpy as cp,")
        text = text.replace('backend="cuda"', 'backend="host"').replace("5000, 3000, 4100", "500, 300, 410")
        text = text.replace("block_cyclic(256, 256,", "block_cyclic(32, 32,")
    exec(compile(text, "cyclic.py", "exec"), {})


def layout_of(comm, mb=3, nb=4, **more):
    return Layout.block_cyclic(mb, nb, GRIDS[comm.size], **more)


def scattered(session, data, layout, **more):
    """Return a matrix with these elements: each rank's part in host memory."""
    rows, cols = layout.indices(data.shape, session.rank)
    return session.distribute(np.array(data[np.ix_(rows, cols)], **more), layout, shape=data.shape)


def test_a_rank_has_its_blocks_and_views_of_them_at_any_offset(comm, session):
    data = random_matrix(31, 26, DType.f64, (1,))
    layout = layout_of(comm, source=(GRIDS[comm.size][0] - 1, 0))
    matrix = scattered(session, data, layout)
    for view, part in (
        (matrix, data),
        (matrix[4:29, 2:], data[4:29, 2:]),
        (matrix[5:, 7:25].T, data[5:, 7:25].T),
        (matrix.T[3:20][1:, 9:30], data.T[3:20][1:, 9:30]),
        (matrix[8:8], data[8:8]),
    ):
        told = f"{view!r} of {view.layout} has {view.local}"
        check_part(comm, view, part, told, 0)
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
    matrices = [
        scattered(session, one, layout, order=rng.choice("CF")) for one, layout in zip(data, layouts, strict=True)
    ]
    places = [
        (slice(i, i + rows), slice(j, j + cols))
        for (i, j), (rows, cols) in zip(offsets, ((m, k), (k, n), (m, n)), strict=True)
    ]
    a, b, c = (matrix[place] for matrix, place in zip(matrices, places, strict=True))
    session.gemm(a, b, c, alpha=1.25, beta=0.75)
    wanted = data[2].copy()
    wanted[places[2]] = 1.25 * data[0][places[0]] @ data[1][places[1]] + 0.75 * data[2][places[2]]
    check_part(comm, matrices[2], wanted, f"{a!r} x {b!r} = {c!r}", 1e-12)


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
    a, b = scattered(session, data[0], rows), session.scatter(data[1], Layout.rows())
    c = session.gemm(a, b)
    collective_assert(comm, c.layout == rows, f"{c!r}")
    check_part(comm, c, data[0] @ data[1])
    square = session.gemm(scattered(session, data[0], layout_of(comm)), b)
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
    expect(comm, um.ParamError, words, lambda: session.scatter(array_of(host), layout, memory="shared"))
    session.release(host)
    if comm.size > 1:
        other = Layout.block_cyclic(3, 4 + comm.rank, GRIDS[comm.size])
        expect(
            comm, um.ParamError, ["rank 1", "block_cyclic(3,5"], lambda: session.distribute(mine, other, shape=shape)
        )


def test_what_follows_shared_memory_is_cyclic_in_memory_of_each_rank(comm, session):
    layout = layout_of(comm)
    data = random_matrix(17, 17, DType.f64, (7,))
    shared = shared_of(session, data)
    copy = session.redistribute(shared, layout)
    product = session.gemm(shared, shared, out_layout=layout)
    for matrix, wanted in ((copy, data), (product, data @ data)):
        collective_assert(comm, (matrix.memory, matrix.layout) == ("host", layout), f"{matrix!r}")
        check_part(comm, matrix, wanted)


@pytest.mark.parametrize("memory", ["device", "host"])
def test_a_plan_takes_what_lies_alike_in_its_order_and_nothing_else(comm, session, memory):
    whole, right = random_matrix(16, 48, DType.f64, (51,)), random_matrix(8, 5, DType.f64, (52,))
    b, c, taken = made_of(session, right, Layout.rows(), memory=memory), session.empty_host((16, 5)), 0
    of_four, of_two = (
        made_of(session, whole, Layout.block_cyclic(4, block, grid=(1, comm.size)), memory=memory) for block in (4, 2)
    )
    with session.plan(of_four[:, :8], b, c, reads_c=False, options=PLAIN) as plan:
        for first, dealt_so in itertools.product(range(0, 41, 2), (of_four, of_two)):
            found = outcome(lambda first=first, of=dealt_so: plan.execute(a=of[:, first : first + 8]))
            alike = not found.startswith("ParamError: execute: A does not fit the plan")
            taken += alike
            good = not alike or shows(c, whole[:, first : first + 8] @ right, np.allclose, rtol=1e-13, atol=1e-13)
            collective_assert(comm, good, f"{first}: {found} {array_of(c)}")
            collective_assert(comm, alike or dealt_so is of_two or first % (4 * comm.size), f"{first}: {found}")
    collective_assert(comm, taken > 1, str(taken))
