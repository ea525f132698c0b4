"""Batches on the CUDA executor: one call makes many products, with a library that stands in for the real one."""

from __future__ import annotations

import dataclasses
import re
import threading

import numpy as np
import pytest

from tests.dev.fake import FakeCluster, bind, filled_with_numbers, succeed
from tests.helpers.layouts import blocks_of, diagonal
from uncut_mpi.device.cuda.warmup import GemmSignature, Region, WarmupList
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.parts import BoundLayout
from uncut_mpi.model.placement import MATRICES, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Factor, Kind, Op, Role, Schedule

SHAPE, COUNT = (16, 24, 8), 12
HERE = Location.device(0)
OF_SHAPE = "12 of gemm 16x24x8"


def batch(where=HERE, ranks=1, dtype=DType.f64, shapes=(SHAPE,) * COUNT, **about) -> Schedule:
    """Return the plan of a batch whose matrices all lie in one memory, or those of A, of B and of C in one each."""
    places = where if isinstance(where, tuple) else (where,) * 3
    problem = GemmProblem(*map(sum, zip(*shapes, strict=True)), dtype, batch=shapes, **about)
    layouts = (
        diagonal([BoundLayout.whole((bottom - top, right - left), at) for (top, bottom), (left, right) in blocks])
        for blocks, at in zip((blocks_of(problem, one) for one in MATRICES), places, strict=True)
    )
    return plan(problem, Placement(*layouts), ranks, Machine.uniform(ranks)).schedule


def bound(fake, schedule, *, in_steps=False) -> FakeCluster:
    """Return a plan bound to memories that each lie anywhere, or follow one another."""
    block = np.zeros((len(schedule.buffers), 8192), np.uint8) if in_steps else None
    cluster = FakeCluster(fake, schedule, block=block)
    fake.reset()
    return cluster


def calls(fake) -> list[str]:
    """Return the products that were made, as the library was asked for them."""
    return [line for line in fake.log() if "gemm" in line]


@pytest.mark.parametrize("in_steps", [False, True], ids=["anywhere", "in steps"])
@pytest.mark.parametrize("dtype", [DType.f64, DType.f32, DType.tf32, DType.bf16, DType.c64, DType.c128], ids=str)
def test_products_of_one_shape_are_one_call(fake, dtype, in_steps):
    cluster = bound(fake, batch(dtype=dtype, trans_a="T", trans_b="C" if dtype.is_complex else "N"), in_steps=in_steps)
    (alpha, beta), is_right = filled_with_numbers(cluster, 1)
    for _ in range(2):
        fake.reset()
        (report,) = cluster.run(alpha, beta).values()
        assert (report.error, report.tasks) == (None, COUNT)
        assert is_right()
        (line,) = calls(fake)
        assert OF_SHAPE in line
        assert ("in steps" in line) == in_steps


def test_without_a_product_each_c_is_scaled(fake):
    cluster = bound(fake, batch())
    (_, beta), _ = filled_with_numbers(cluster, 2)
    before = [cluster.buffer(2 * COUNT + i).copy() for i in range(COUNT)]
    succeed(cluster.run(0.0, beta))
    assert not calls(fake)
    assert all(np.array_equal(cluster.buffer(2 * COUNT + i), beta * c) for i, c in enumerate(before))


def test_sums_that_are_the_same_are_of_a_call_for_each_product(fake):
    schedule = batch()
    problem = dataclasses.replace(schedule.problem, sums=SHAPE)
    cluster = bound(fake, dataclasses.replace(schedule, problem=problem), in_steps=True)
    (alpha, beta), is_right = filled_with_numbers(cluster, 4)
    succeed(cluster.run(alpha, beta))
    assert is_right()
    assert len(calls(fake)) == COUNT


def test_other_shapes_and_copies_end_a_call(fake):
    shapes = (SHAPE,) * 3 + ((8, 8, 8),) + (SHAPE,) * 2 + ((8, 0, 8), (8, 8, 0))
    cluster = bound(fake, batch(Location.host(), 2, shapes=shapes))
    (alpha, beta), is_right = filled_with_numbers(cluster, 3)
    succeed(cluster.run(alpha, beta))
    assert is_right()
    made = sum(int(count or 1) for line in calls(fake) for count in re.findall(r"(?:(\d+) of )?gemm", line))
    assert made == 6
    assert len(calls(fake)) < 6


def test_two_shapes_in_turn_are_two_calls(fake):
    cluster = bound(fake, batch(shapes=(SHAPE, (8, 8, 8)) * 6))
    (alpha, beta), is_right = filled_with_numbers(cluster, 7)
    succeed(cluster.run(alpha, beta))
    assert is_right()
    assert len(calls(fake)) == 2


def test_a_traced_run_knows_each_product(fake):
    cluster = bound(fake, batch())
    cluster.prepare_trace()
    (alpha, beta), is_right = filled_with_numbers(cluster, 4)
    (report,) = cluster.run(alpha, beta, traced=True).values()
    assert report.tasks == COUNT
    assert is_right()
    assert len(report.times.start_s) == COUNT


@pytest.mark.parametrize(("alpha", "traced"), [(0.0, False), (1.5, True)], ids=["no product", "traced"])
def test_queues_do_not_fill_where_each_product_counts(fake, alpha, traced):
    places = Location.host(0), Location.host(0), Location.device(1)  # rank 1 waits for copies of rank 0
    cluster = bound(fake, batch(places, 2, shapes=((16, 16, 16),) * 2000))
    cluster.prepare_trace()
    late = threading.Timer(0.3, lambda: cluster.executables[0].run(alpha=alpha, beta=0.5, epoch=1, timeout_s=5.0))
    late.start()
    (report,) = cluster.run(alpha, 0.5, ranks=[1], traced=traced).values()
    late.join()
    assert (report.error, report.tasks) == (None, 2000)
    assert 384 <= fake.most_queued <= 800


def test_products_that_add_to_one_c_stay_apart(fake):
    problem = GemmProblem(8, 8, 32, DType.f64)
    build = ScheduleBuilder(1, problem, Placement.parse("0,0,0"))
    shapes = (8, 32), (32, 8), (8, 8)
    a, b, c = (
        build.buffer(at=0, rows=rows, cols=cols, dtype=DType.f64, role=Role.USER, matrix=matrix)
        for matrix, (rows, cols) in zip(MATRICES, shapes, strict=True)
    )
    whole = RegionRef(c, 0, 0, 8, 8)
    for k in range(0, 32, 8):
        factors = RegionRef(a, 0, k, 8, 8), RegionRef(b, k, 0, 8, 8), whole
        reads = zip(factors, (Factor.ALPHA, Factor.ONE, Factor.ONE if k else Factor.BETA), (Op.N,) * 3, strict=True)
        build.task(Kind.GEMM, build.compute_lane(0), whole, [*reads])
    cluster = bound(fake, build.build(scheduler="test", grid=(1, 1), tile=0))
    (alpha, beta), is_right = filled_with_numbers(cluster, 6)
    succeed(cluster.run(alpha, beta))
    assert is_right()
    assert len(calls(fake)) == 4


@pytest.mark.parametrize("apart", [False, True])
def test_what_is_to_run_by_itself_before_a_plan_is_not_made_with_others(fake, apart):
    """Products of one shape at other alignments, which may be other kernels, small enough to lie beside each other."""
    memory, todo = np.zeros(4096, np.uint8), WarmupList(1)
    address = memory.ctypes.data + -memory.ctypes.data % 256
    for alignment in (0, 32, 64):
        region = Region(DType.f64, Op.N, 0, alignment, 2, 2, 2)
        todo.gemm(GemmSignature(region, region, region, Factor.ZERO), 0)
        if apart:
            todo.part(0)
    executable = bind(fake.device(), todo.program(), [address, address])
    fake.reset()
    assert executable.run(alpha=1.0, beta=1.0, epoch=0, timeout_s=20.0).error is None
    assert len(calls(fake)) == (3 if apart else 1)
