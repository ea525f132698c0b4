"""Kernels of products that are chosen by their time, with a driver and a library that stand in for the real ones."""

from __future__ import annotations

import collections
import gc

import numpy as np
import pytest

from tests.dev.fake import FakeCluster, bind, load, succeed
from tests.helpers.pushed import Pushed
from uncut_mpi.device.cuda.warmup import GemmSignature, Region, WarmupList
from uncut_mpi.errors import DeviceError
from uncut_mpi.model.dtypes import DType
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
