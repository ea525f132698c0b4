"""Copies of the CUDA executor that are made together, on a fake driver: by one kernel, or by one copy."""

from __future__ import annotations

import gc
import random

import numpy as np
import pytest

from tests.dev.fake import FakeCluster, bind, packed_in, succeed
from tests.helpers.by_hand import ByHand
from tests.helpers.transposed import bits_of
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.builder import RegionRef
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.schedule import Factor, Kind, Op, Role

F, N = Factor, Op.N


@pytest.mark.parametrize("dtype", [DType.f64, DType.f32, DType.bf16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("along", ["rows", "columns"])
def test_runs_of_a_matrix_go_into_a_panel_by_one_kernel(fake, dtype, along):
    build = ByHand()
    user = build.buffer(at=0, rows=42, cols=35, ld=45, dtype=dtype, role=Role.USER)
    panel = build.buffer(at=0, rows=84, cols=70, ld=90, dtype=dtype, role=Role.PANEL)
    for at in range(7):
        if along == "rows":
            ends = (RegionRef(panel, 12 * at, 3, 6, 35), RegionRef(user, 6 * at, 0, 6, 35))
        else:
            ends = (RegionRef(panel, 1, 10 * at, 42, 5), RegionRef(user, 0, 5 * at, 42, 5))
        build.copy(build.copy_lane(0, 0, 0), *ends)
    cluster = FakeCluster(fake, build.done())
    values = np.random.default_rng(3).integers(0, 256, (42, 35 * dtype.itemsize), np.uint8).view(dtype.numpy)
    cluster.buffer(user)[...] = values
    wanted = np.zeros((84, 70), dtype.numpy)
    for at in range(7):
        if along == "rows":
            wanted[12 * at : 12 * at + 6, 3:38] = values[6 * at : 6 * at + 6]
        else:
            wanted[1:43, 10 * at : 10 * at + 5] = values[:, 5 * at : 5 * at + 5]
    cluster.prepare_trace()
    for traced in (False, True):
        cluster.buffer(panel)[...] = 0
        fake.reset()
        reports = cluster.run(traced=traced)
        succeed(reports)
        assert np.array_equal(bits_of(cluster.buffer(panel)), bits_of(wanted))
        assert (reports[0].tasks, reports[0].copy_bytes) == (7, 42 * 35 * dtype.itemsize)
        assert packed_in(fake) == [7]


@pytest.mark.parametrize("seed", range(60))
def test_copies_that_need_an_order_are_not_packed_together(fake, seed):
    """The fake makes the last copy of a pack first."""
    rng = random.Random(seed)
    build = ByHand()
    buffers = [
        build.buffer(at=0, rows=12, cols=9, ld=rng.choice((12, 13, 16)), dtype=DType.f32, role=Role.STAGING)
        for _ in range(rng.choice((2, 3)))
    ]
    moves = []
    for _ in range(rng.randint(2, 10)):
        to, of = rng.sample(buffers, 2)
        shape, turned = (rng.randint(1, 4), rng.randint(1, 4)), rng.random() < 0.2
        ends = [
            RegionRef(one, rng.randint(0, 12 - rows), rng.randint(0, 9 - cols), rows, cols)
            for one, (rows, cols) in ((to, shape), (of, shape[::-1] if turned else shape))
        ]
        moves.append((*ends, turned))
        build.copy(build.copy_lane(0, 0, 0), *ends, op=Op.T if turned else N)
    cluster = FakeCluster(fake, build.done())
    wanted = np.random.default_rng(seed).random((len(buffers), 12, 9), np.float32)
    for index, values in zip(buffers, wanted, strict=True):
        cluster.buffer(index)[...] = values
    for to, of, turned in moves:
        piece = wanted[buffers.index(of.buffer), of.row : of.row + of.rows, of.col : of.col + of.cols].copy()
        piece = piece.T if turned else piece
        wanted[buffers.index(to.buffer), to.row : to.row + to.rows, to.col : to.col + to.cols] = piece
    succeed(cluster.run())
    found = [cluster.buffer(index) for index in buffers]
    assert np.array_equal(found, wanted)


def test_copies_that_are_large_or_wait_are_issued_where_they_stand(fake):
    build = ByHand()
    user = build.buffer(at=0, rows=700, cols=600, dtype=DType.f64, role=Role.USER)
    panel = build.buffer(at=0, rows=700, cols=600, dtype=DType.f64, role=Role.PANEL)
    sums = build.buffer(at=0, rows=8, cols=8, dtype=DType.f64, role=Role.PANEL)
    lane, regions = build.copy_lane(0, 0, 0), [RegionRef(user, 0, 10 * at, 8, 8) for at in range(5)]

    def copy(col, cols, awaits=()):
        ends = [RegionRef(one, 0, col, 700, cols) for one in (panel, user)]
        return build.copy(lane, *ends, awaits)

    copy(0, 10), copy(10, 10), copy(20, 10)  # one pack
    copy(30, 500)  # 2.8 MB
    copy(530, 10), copy(540, 10)  # another one
    product = build.task(
        Kind.GEMM, build.compute_lane(0), RegionRef(sums, 0, 0, 8, 8), [(regions[0], F.ONE, N), (regions[1], F.ONE, N)]
    )
    copy(550, 10, [product]), copy(560, 10, [product]), copy(570, 10)  # which wait for a product, once
    cluster = FakeCluster(fake, build.done())
    cluster.buffer(user)[...] = np.random.default_rng(1).random((700, 600))
    fake.reset()
    succeed(cluster.run())
    assert np.array_equal(cluster.buffer(panel)[:, :580], cluster.buffer(user)[:, :580])
    assert packed_in(fake) == [3, 2, 3]


def series_in(fake):
    """How large the copies in three dimensions were: bytes of a line, lines, layers."""
    return [tuple(map(int, line.split()[-1].split("x"))) for line in fake.log() if " copy3d " in line]


# Runs of a matrix that is dealt in turn to two ranks: whole columns, some rows of them, rows, some columns of those.
WAYS = {
    "whole columns": ((42, 10), (42, 5), (42 * 5 * 8, 7, 1)),
    "columns": ((40, 10), (40, 5), (40 * 8, 5, 7)),
    "rows": ((12, 33), (6, 33), (6 * 8, 7, 33)),
    "one row": ((2, 33), (1, 33), (8, 7, 33)),
}


def dealt_runs(way, to=1, source=0, leave_out=(), told_of=None):
    """
    Return copies of runs of a part to every other place of a matrix, and what each is of.

    The rank or, by None, host memory of the matrix and of the part, runs that are not copied, and one of whose copy
    another device is told.
    """
    apart, run, _ = WAYS[way]
    build = ByHand(2)
    down, host = "row" in way, build.host
    to, source = (host if at is None else at for at in (to, source))
    user = build.buffer(at=source, rows=42, cols=35, dtype=DType.f64, role=Role.USER)
    panel = build.buffer(at=to, rows=84 if down else 42, cols=35 if down else 70, dtype=DType.f64, role=Role.PANEL)
    lane, pairs, tasks = build.copy_lane(0, source, to), [], []
    for at in range(7):
        if at in leave_out:
            continue
        ends = [RegionRef(one, *((x[0] * at, 0) if down else (0, x[1] * at)), *run) for one, x in
                ((panel, apart), (user, run))]  # fmt: skip
        tasks.append(build.copy(lane, *ends))
        pairs.append(ends)
        if told_of == at:
            build.task(Kind.COMBINE, build.compute_lane(1), build.add(1), [(build.add(1), F.ONE, N)], [tasks[-1]])
    return build.done(), pairs


def moved(cluster, pairs):
    """Fill the source, run all copies, and return what the target has and should have."""
    user, panel = (cluster.buffer(pairs[0][end].buffer) for end in (1, 0))
    user[...] = np.random.default_rng(2).random(user.shape)
    panel[...] = 0.0
    wanted = panel.copy()
    for to, of in pairs:
        piece = user[of.row : of.row + of.rows, of.col : of.col + of.cols]
        wanted[to.row : to.row + to.rows, to.col : to.col + to.cols] = piece
    reports = cluster.run()
    succeed(reports)
    return panel, wanted, reports[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("to", "source"), [(1, 0), (None, 0), (0, None)], ids=["device", "to host", "from host"])
def test_runs_of_a_matrix_go_to_another_memory_by_one_copy(fake, way, to, source):
    schedule, pairs = dealt_runs(way, to, source)
    cluster = FakeCluster(fake, schedule)
    cluster.prepare_trace()
    found, wanted, report = moved(cluster, pairs)
    assert np.array_equal(found, wanted)
    assert series_in(fake) == [WAYS[way][2]]
    assert (report.tasks, report.copy_bytes) == (7, wanted.astype(bool).sum() * 8)
    reports = cluster.run(traced=True)
    succeed(reports)
    assert len(reports[0].times.tasks) == 7


@pytest.mark.parametrize(("columns", "together"), [(1200, True), (1201, False)])
def test_few_runs_of_rows_in_many_columns_are_copied_one_by_one(fake, columns, together):
    """A driver writes down each layer of a copy, which takes it longer than three copies."""
    build = ByHand(2)
    user = build.buffer(at=0, rows=6, cols=columns, dtype=DType.f64, role=Role.USER)
    panel = build.buffer(at=1, rows=16, cols=columns, dtype=DType.f64, role=Role.PANEL)
    pairs = []
    for at in range(3):
        ends = RegionRef(panel, 4 * at, 0, 2, columns), RegionRef(user, 2 * at, 0, 2, columns)
        build.copy(build.copy_lane(0, 0, 1), *ends)
        pairs.append(ends)
    found, wanted, report = moved(FakeCluster(fake, build.done()), pairs)
    assert np.array_equal(found, wanted)
    assert report.copy_bytes == 6 * columns * 8
    assert series_in(fake) == ([(16, 3, columns)] if together else [])


def test_copies_within_an_allocation_are_in_order_whatever_their_lane_says(fake):
    build = ByHand(2)
    buffer = build.buffer(at=0, rows=8, cols=4, dtype=DType.f64, role=Role.USER)
    for at in range(3):  # each column becomes the first one
        ends = RegionRef(buffer, 0, at + 1, 8, 1), RegionRef(buffer, 0, at, 8, 1)
        build.copy(build.copy_lane(0, 0, 1), *ends)
    cluster = FakeCluster(fake, build.done())
    cluster.buffer(buffer)[...] = np.arange(32.0).reshape(8, 4)
    succeed(cluster.run())
    assert np.array_equal(cluster.buffer(buffer), np.tile(np.arange(0.0, 32.0, 4.0)[:, None], 4))


def test_runs_between_which_one_is_missing_or_somebody_is_told_are_copies_of_their_own(fake):
    for way in WAYS:
        for left_out, told_of, counts in (((3,), None, [3, 3]), ((), 2, [3, 4])):
            fake.reset()
            schedule, pairs = dealt_runs(way, leave_out=left_out, told_of=told_of)
            found, wanted, _ = moved(FakeCluster(fake, schedule), pairs)
            assert np.array_equal(found, wanted)
            which = 2 if way == "columns" else 1
            assert [one[which] for one in series_in(fake)] == counts


@pytest.mark.parametrize("one_allocation", [True, False])
def test_parts_in_one_allocation_are_copied_by_one_copy_others_by_several(fake, one_allocation):
    """Each is a buffer of its own, and a driver may refuse a copy that goes from one allocation into the next."""
    build = ByHand(2)
    user = build.buffer(at=0, rows=8, cols=3, dtype=DType.f64, role=Role.USER)
    columns = [build.buffer(at=1, rows=8, cols=1, dtype=DType.f64, role=Role.USER) for _ in range(3)]
    for at, column in enumerate(columns):
        ends = RegionRef(column, 0, 0, 8, 1), RegionRef(user, 0, at, 8, 1)
        build.copy(build.copy_lane(0, 0, 1), *ends)
    block = np.zeros((4, 256), np.uint8)
    fake.is_one_allocation(block[1:] if one_allocation else block[:0])
    cluster = FakeCluster(fake, build.done(), block=block)
    cluster.buffer(user)[...] = np.arange(24.0).reshape(8, 3)
    succeed(cluster.run())
    assert np.array_equal(np.hstack([cluster.buffer(one) for one in columns]), cluster.buffer(user))
    assert series_in(fake) == ([(64, 3, 1)] if one_allocation else [])


@pytest.mark.parametrize("seed", range(80))
def test_random_copies_to_another_device_make_what_they_make_one_by_one(fake, seed):
    """Steps that repeat, or lines that overlap, turn back, are too far apart, or of several buffers: in any order."""
    rng = random.Random(seed)
    build = ByHand(2)
    buffers = [
        [build.buffer(at=at, rows=24, cols=16, ld=rng.choice((24, 32)), dtype=DType.f32, role=Role.STAGING)
         for _ in range(2)]
        for at in (0, 1)
    ]  # fmt: skip
    moves = []
    while len(moves) < 40:
        of, to = (rng.choice(one) for one in buffers)
        rows, cols = rng.choice((1, 2, 3, 24)), rng.choice((1, 2, 3, 16))
        steps = [(rng.choice((0, 0, 1, 2, 4)), rng.choice((0, 0, 1, 2, 4))) for _ in range(2)]
        places = [[rng.randint(0, 24 - rows), rng.randint(0, 16 - cols)] for _ in range(2)]
        for _ in range(rng.randint(1, 5)):
            if any(row + rows > 24 or col + cols > 16 for row, col in places):
                break
            ends = [RegionRef(one, *place, rows, cols) for one, place in zip((to, of), places, strict=True)]
            moves.append(ends)
            build.copy(build.copy_lane(0, 0, 1), *ends)
            places = [[at + by for at, by in zip(*both, strict=True)] for both in zip(places, steps, strict=True)]
    cluster = FakeCluster(fake, build.done())
    values = np.random.default_rng(seed)
    for index in (*buffers[0], *buffers[1]):
        cluster.buffer(index)[...] = values.random((24, 16), np.float32)
    wanted = {index: cluster.buffer(index).copy() for index in (*buffers[0], *buffers[1])}
    for to, of in moves:
        piece = wanted[of.buffer][of.row : of.row + of.rows, of.col : of.col + of.cols]
        wanted[to.buffer][to.row : to.row + to.rows, to.col : to.col + to.cols] = piece
    succeed(cluster.run())
    for index, values_of in wanted.items():
        assert np.array_equal(cluster.buffer(index), values_of)


def test_a_table_of_packed_copies_is_used_again_when_its_list_is_gone(fake):
    """To free it would wait for the whole device, after a stall for ever."""
    build, device = ByHand(), fake.device()
    whole = build.buffer(at=0, rows=64, cols=1, dtype=DType.f64, role=Role.STAGING)
    for row in (0, 2):
        build.copy(build.copy_lane(0, 0, 0), RegionRef(whole, row, 0, 1, 1), RegionRef(whole, row + 9, 0, 1, 1))
    program = lower(build.done()).rank_list(0)
    scratch = np.zeros(64)
    taken = []
    for _ in range(3):
        executable = bind(device, program, [scratch.ctypes.data, *[0] * (len(program.buffers) - 1)])
        succeed({0: executable.run(alpha=1.0, beta=1.0, epoch=0, timeout_s=20.0)})
        executable.close()
        del executable
        gc.collect()
        taken.append(fake.allocations)
    assert taken[0] == taken[1] == taken[2]
    assert packed_in(fake) == [2, 2, 2]
