"""Kernels of products that are chosen by their time, with a driver and a library that stand in for the real ones."""

from __future__ import annotations

import collections
import gc

import numpy as np
import pytest

from tests.dev.fake import FakeCluster, bind, filled_with_numbers, load, succeed
from tests.helpers.interpret import activated
from tests.helpers.numbers import op_of, random_values, wide_of
from tests.helpers.pushed import Pushed
from uncut_mpi.device.cuda.warmup import GemmSignature, Region, WarmupList
from uncut_mpi.errors import DeviceError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.epilogue import Epilogue
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import planner
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.schedule import Factor


@pytest.fixture
def paced(fake):
    """The fake, whose products take as long as a test says."""
    yield fake
    fake.product_ticks()


@pytest.mark.parametrize("dtype", [DType.bf16, DType.tf32, DType.f32], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
def test_products_go_by_the_fastest_that_is_proposed(paced, dtype, trans):
    case = Pushed(dtype=dtype, trans_a=trans[0], trans_b=trans[1])
    before = paced.lt_objects
    paced.product_ticks(usual=30, option_7=20, option_4=25, option_1=10)
    cluster = FakeCluster(paced, case.build(), tune_from=0)
    for call in range(2):
        paced.reset()
        load(case, cluster, seed=call)
        succeed(cluster.run(1.2345, 1.1154))
        assert case.is_right(cluster.schedule, cluster.buffer(2), 1.2345, 1.1154, call)
        gemms, others = ([line for line in paced.log() if word in line] for word in ("option 1 ", "gemm "))
        assert gemms
        assert not others
    del cluster
    gc.collect()
    assert paced.lt_objects == before


@pytest.mark.parametrize(
    ("tune_from", "ticks"),
    [
        (0, {"usual": 100, "option_7": 1000, "option_4": 1000, "option_1": 100}),
        (1e9, {"usual": 100}),
        (float("inf"), {"usual": 100}),
    ],
)
def test_cublas_chooses_where_nothing_is_faster_or_tuning_is_not_wanted(paced, tune_from, ticks):
    case = Pushed(dtype=DType.bf16)
    paced.product_ticks(**ticks)
    paced.reset()
    cluster = FakeCluster(paced, case.build(), tune_from=tune_from)
    assert any("option" in line for line in paced.log()) == (tune_from == 0)
    load(case, cluster)
    paced.reset()
    succeed(cluster.run(1.2345, 1.1154))
    assert case.is_right(cluster.schedule, cluster.buffer(2), 1.2345, 1.1154, 0)
    assert not [line for line in paced.log() if "option" in line]


EXTENTS = {"aligned": {}, "lda": {"lda": 68}, "ldb": {"ldb": 44}, "ldc": {"ldc": 65}, "m": {"m": 60}}


@pytest.mark.parametrize(
    ("extents", "activation", "tune_from"),
    [("aligned", "gelu", 0), *(("aligned", one, 1e99) for one in ("gelu", "relu", ""))]
    + [(one, "gelu", 0) for one in EXTENTS if one != "aligned"],
)
def test_the_library_writes_c_with_an_epilogue_where_all_is_aligned(paced, activation, extents, tune_from):
    """Else its kernels may round the sum before, and one of ours writes C of sums beside it, some columns at a time."""
    about = {"m": 64, "n": 48, "k": 40, "dtype": DType.bf16} | EXTENTS[extents]
    problem = GemmProblem(**about, epilogue=Epilogue(activation, "rows", bias=True))
    schedule = planner.plan(problem, Placement.parse("0,0,0"), 1, Machine.uniform(1)).schedule
    paced.product_ticks(usual=30, option_7=20, option_4=25, option_1=10)
    cluster = FakeCluster(paced, schedule, tune_from=tune_from, copies_bytes=64 * 4 * 17)
    factors, is_right = filled_with_numbers(cluster, 1)
    paced.reset()
    succeed(cluster.run(*factors))
    fused, apart = ([line for line in paced.log() if word in line] for word in ("epilogue 4", "gemm 64x"))
    fused += [line for line in paced.log() if "epilogue 6" in line or "epilogue 36" in line]
    assert len(fused) == (extents == "aligned")
    assert all(("option 1 " in line) == (tune_from == 0) for line in fused)
    assert len(apart) == (3 if extents.startswith("ld") else 0)  # 17, 17 and 14 columns
    assert is_right()


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_an_epilogue_without_a_product_is_of_c_alone(fake, beta):
    problem = GemmProblem(64, 48, 40, DType.bf16, epilogue=Epilogue("gelu", "rows", bias=True))
    schedule = planner.plan(problem, Placement.parse("0,0,0"), 1, Machine.uniform(1)).schedule
    cluster = FakeCluster(fake, schedule)
    filled_with_numbers(cluster, 1)
    c = cluster.buffer(2)
    (_, bias), before = cluster.vectors, c.astype("f8")
    if beta == 0.0:
        c[...] = np.nan
    for a_or_b in (0, 1):
        cluster.buffer(a_or_b)[...] = np.nan
    succeed(cluster.run(0.0, beta))
    wanted = activated("gelu", (beta * before if beta else 0.0) + bias.astype("f8"))
    assert (np.abs(c.astype("f8") - wanted) <= 2**-7 * np.abs(wanted) + 1e-6).all()


def test_sums_that_are_the_same_go_by_no_kernel_that_a_time_chose(paced):
    paced.product_ticks(usual=1000, option_7=1, option_4=1, option_1=1)
    options = ScheduleOptions(same_sums=True, blocking=Blocking(c_rows=24, c_cols=16))
    problem = GemmProblem(40, 30, 50, DType.bf16)
    schedule = planner.plan(problem, Placement.parse("0,0,0"), 1, Machine.uniform(1), options).schedule
    cluster = FakeCluster(paced, schedule, tune_from=0)
    (alpha, beta), is_right = filled_with_numbers(cluster, 1)
    succeed(cluster.run(alpha, beta))
    assert is_right()
    assert not [line for line in paced.log() if "option" in line]


E4M3, E5M2, BF16, F32 = DType.e4m3, DType.e5m2, DType.bf16, DType.f32


@pytest.mark.parametrize("shape", [(48, 32, 64), (37, 29, 41)], ids=str)
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT"])
@pytest.mark.parametrize(
    "dtypes",
    [
        (DType.i8, DType.i8, DType.i32),
        (E4M3, E4M3, F32),
        (E4M3, E5M2, BF16),
        (E5M2, E5M2, F32),
        (BF16, BF16, F32),
    ],
    ids=lambda dtypes: ",".join(map(str, dtypes)),
)
def test_narrow_types_go_to_the_library_where_it_takes_them_and_else_as_copies(fake, dtypes, trans, shape):
    is_integer = dtypes[0].is_integer
    problem = GemmProblem(*shape, dtypes, *trans)
    schedule = planner.plan(problem, Placement.parse("0,0,0"), 1, Machine.uniform(1)).schedule
    copies_bytes = 1 << 11 if trans == "TT" else 1 << 20  # which is memory for some of A and B at once
    cluster = FakeCluster(fake, schedule, copies_bytes=copies_bytes)
    rng, values = np.random.default_rng(3), []
    for index, dtype in enumerate(dtypes):
        values.append(random_values(rng, cluster.buffer(index).shape, dtype))
        cluster.buffer(index)[...] = values[-1]
    alpha, beta = (3, -2) if is_integer else (1.2345, 1.1154)
    a, b, c = (one.astype(wide_of(dtypes[0])) for one in values)
    a, b = op_of(trans[0], a), op_of(trans[1], b)
    fake.reset()
    succeed(cluster.run(alpha, beta))
    wanted, bound = alpha * (a @ b) + beta * c, 0
    if is_integer:
        wanted = wanted.astype(np.int32)
    else:
        bound = 1e-5 * (np.abs(a) @ np.abs(b) + np.abs(c)) + dtypes[2].unit_roundoff * np.abs(wanted)
    assert (np.abs(cluster.buffer(2).astype(wanted.dtype) - wanted) <= bound).all()
    products = [line for line in fake.log() if "gemm" in line or "option" in line]
    copies = [line for line in fake.log() if "combine" in line or "transpose" in line]
    proposed = dtypes[0].needs_scales and shape[0] == 48 and dtypes[:2] != (E5M2, E5M2)
    direct = dtypes[0] is BF16 or (trans == "TN" and (proposed or (is_integer and shape[0] == 48)))
    assert bool(copies) != direct, fake.log()
    assert any("option" in line for line in products) == proposed
    assert (len(products) > 1) == (trans == "TT" and not direct), products


@pytest.fixture
def memory():
    """What products of a test read and write."""
    return np.zeros(65536, np.uint8)


def products(n_of_each, dtype, memory, dtype_c=None):
    """A list of products C_i := A B, of 16 rows, as many columns and steps of k as given, as often as given."""
    todo = WarmupList(1)
    for n, k, count in n_of_each:
        c = Region(dtype_c or dtype.accumulator, 0, 0, 0, 16, n, 16)
        a, b = (Region(dtype, 0, 0, 0, rows, cols, rows) for rows, cols in ((16, k), (k, n)))
        for _ in range(count):
            todo.gemm(GemmSignature(c, a, b, Factor.ONE), 0)
    address = memory.ctypes.data + -memory.ctypes.data % 256
    return todo.program(), np.array([address, address], np.int64)


@pytest.mark.parametrize("dtype_c", [DType.bf16, DType.f32], ids=lambda dtype: dtype.name)
def test_a_shape_is_timed_once_however_many_products_and_plans_have_it(paced, memory, dtype_c):
    device = paced.device()
    device.tune_products(0, timing=True)
    paced.product_ticks(usual=30, option_7=20, option_4=25, option_1=10)
    program, addresses = products([(8, 8, 5), (4, 8, 4)], DType.bf16, memory, dtype_c)
    paced.reset()
    first = bind(device, program, addresses)
    timed = [line for line in paced.log() if "16x8x8" in line]
    # Once each to load the kernel; then two at once, the slower ones in the first of three rounds alone; the best
    # without C and with another beta, too, which may be other kernels.
    counts = collections.Counter(line.split()[2] if "option" in line else "usual" for line in timed)
    assert counts == {"1": 1 + 6 + 2, "usual": 1 + 2, "4": 1 + 2, "7": 2 * (1 + 2)}, timed
    assert [line for line in timed if "+C" not in line] == timed[-2:-1]
    paced.reset()
    again = bind(device, program, addresses)
    assert not [line for line in paced.log() if "x8x8" in line]
    found = device.tuned_products()
    assert [(words[:4], words[4:]) for words, _, _ in found] == [
        ([int(DType.bf16), int(dtype_c), 0, 0], [16, 4, 8]),
        ([int(DType.bf16), int(dtype_c), 0, 0], [16, 8, 8]),
    ]
    assert all(usual > best for _, usual, best in found)
    first.close()
    again.close()


def test_what_little_of_a_plan_is_in_is_not_timed(paced, memory):
    device = paced.device()
    device.tune_products(0, timing=True)
    program, addresses = products([(64, 64, 3), (8, 8, 1), (4, 4, 1)], DType.tf32, memory)
    bind(device, program, addresses).close()
    assert [words[4:] for words, _, _ in device.tuned_products()] == [[16, 64, 64]]


def test_when_too_much_is_known_what_a_plan_asks_for_stays(paced, memory):
    device = paced.device()
    device.tune_products(0, timing=True, most=2)
    for plan in ([(8, 8, 1)], [(4, 8, 1)], [(8, 8, 1), (16, 8, 1)]):
        bind(device, *products(plan, DType.tf32, memory)).close()
    assert [words[4:] for words, _, _ in device.tuned_products()] == [[16, 8, 8], [16, 16, 8]]


def test_without_memory_for_a_result_to_spoil_cublas_chooses(paced, memory):
    device = paced.device()
    device.tune_products(0, timing=True)
    device.reserve(1, 0, 0)
    program, addresses = products([(8, 8, 1)], DType.tf32, memory)
    paced.fail("cuMemAlloc", 1, 1, 2)
    bind(device, program, addresses).close()
    assert device.tuned_products() == []


@pytest.mark.parametrize("name", ["cublasLtMatmulAlgoGetHeuristic", "cublasLtMatmulPreferenceCreate"])
def test_a_failing_description_is_an_error_that_leaves_nothing_behind(paced, memory, name):
    before = paced.lt_objects
    device = paced.device()
    device.tune_products(0, timing=True)
    program, addresses = products([(8, 8, 1)], DType.tf32, memory)
    paced.fail(name, 1, 1, 14)
    with pytest.raises(DeviceError, match=name):
        bind(device, program, addresses)
    assert paced.lt_objects == before


def test_a_proposal_that_fails_is_not_taken(paced, memory):
    device = paced.device()
    device.tune_products(0, timing=True)
    paced.product_ticks(usual=30, option_7=10, option_4=20, option_1=25)
    program, addresses = products([(8, 8, 1)], DType.tf32, memory)
    paced.fail("cublasLtMatmul", 1, 1, 15)
    executable = bind(device, program, addresses)
    paced.reset()
    assert executable.run(alpha=1.0, beta=1.0, epoch=0, timeout_s=60.0).error is None
    assert [line.split()[2] for line in paced.log() if "16x8x8" in line] == ["7"]  # proposed twice
    paced.fail("cublasLtMatmul", 1, 4, 15)
    program, addresses = products([(8, 4, 1)], DType.tf32, memory)
    executable = bind(device, program, addresses)
    paced.reset()
    assert executable.run(alpha=1.0, beta=1.0, epoch=0, timeout_s=60.0).error is None
    assert [line for line in paced.log() if "gemm 16x8x4" in line]
