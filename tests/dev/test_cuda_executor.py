"""What the CUDA executor issues, in which order, and what it does when calls fail, on a fake driver."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import math
import os
import random
import re
import signal
import threading
import time
import weakref

import numpy as np
import pytest

from tests.dev.fake import FakeCluster, bind, filled_with_numbers, load, succeed
from tests.helpers import interpret
from tests.helpers.by_hand import ByHand
from tests.helpers.host_copies import contents, copied, joined_by_hosts, random_copies
from tests.helpers.interpret import as_written, in_triangle
from tests.helpers.layouts import even
from tests.helpers.numbers import factors_of
from tests.helpers.planned import plan_several, setting_of
from tests.helpers.pushed import Pushed
from tests.helpers.schedules import SummaOptions, random_case, summa
from tests.helpers.transposed import SHAPES, bits_of, filled, transposing_copies
from uncut_mpi import _native
from uncut_mpi.device.cuda.kernels import PACKING, TRANSPOSING
from uncut_mpi.device.interface import Chain, ProgressBoard
from uncut_mpi.errors import DataFileError, DeviceError, ScheduleError, StallError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.form import KINDS, Form
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.parts import BoundLayout, Part
from uncut_mpi.model.placement import MATRICES, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.lower import Code, lower
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import TRIANGLES, Factor, Kind, LaneKind, Op
from uncut_mpi.planning.staging import stage, used_by_others
from uncut_mpi.planning.verify import verify

F, N = Factor, Op.N
PRODUCT_TYPES = DType.f64, DType.f32, DType.c64, DType.c128


# -- results ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*PRODUCT_TYPES, DType.bf16, DType.tf32], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT", "CN", "TC"])
def test_a_product_over_three_ranks_is_right_and_can_be_repeated(fake, dtype, trans):
    case = Pushed(dtype=dtype, trans_a=trans[0], trans_b=trans[1])
    factors = factors_of(dtype)
    cluster = FakeCluster(fake, case.build(), epoch=2**32 - 1)  # the second call's epoch wraps round
    for call in range(3):
        load(case, cluster, seed=call)
        succeed(cluster.run(*factors))
        assert case.is_right(cluster.schedule, cluster.buffer(2), *factors, call)


@pytest.mark.parametrize(("dtype", "computed"), [(DType.f64, 38), (DType.bf16, 40), (DType.tf32, 40), (DType.f32, 37)])
@pytest.mark.parametrize("trans_a", ["N", "T"])
def test_a_product_has_whole_multiples_of_16_bytes_of_rows_where_panels_have_room(fake, dtype, computed, trans_a):
    problem = GemmProblem(37, 29, 41, dtype, trans_a)
    options = ScheduleOptions(scheduler="kblocks", grid=(1, 2))
    schedule = plan(problem, Placement.parse("h,h,h"), 2, Machine.uniform(2), options).schedule
    cluster = FakeCluster(fake, schedule)
    random_values = np.random.default_rng(5)
    values = []
    for index in range(3):
        values.append(random_values.uniform(-1, 1, cluster.buffer(index).shape).astype(cluster.buffer(index).dtype))
        cluster.buffer(index)[...] = values[-1]
    for memory in cluster.memory[3:]:
        memory.fill(0xFF)  # NaN, in the padding too
    fake.reset()
    succeed(cluster.run(1.5, 0.5))
    a, b, c = (value.astype(np.float64) for value in values)
    wanted = 1.5 * (a.T if trans_a == "T" else a) @ b + 0.5 * c
    # Sums of 41 products of values below 1; the result rounds once to its type, bf16 to 2⁻⁹ of itself.
    bound = {DType.f64: 1e-13, DType.f32: 1e-5, DType.tf32: 1e-5, DType.bf16: 2**-8}[dtype] * (1 + np.abs(wanted))
    assert (np.abs(cluster.buffer(2).astype(np.float64) - wanted) <= bound).all()
    rows = {int(re.search(r"gemm (\d+)x", line)[1]) for line in fake.log() if "gemm" in line}
    assert rows == {computed if trans_a == "N" else 37}


def test_random_schedules_give_the_product_and_count_their_tasks_and_bytes(fake):
    rng = random.Random(11)
    for _ in range(60):
        schedule = random_case(rng, max_ranks=4, max_extent=20)
        if schedule.problem.dtype is not DType.f64:
            continue
        cluster = FakeCluster(fake, schedule)
        scalars, is_right = filled_with_numbers(cluster, 1)
        reports = cluster.run(*scalars)
        succeed(reports)
        assert is_right()
        bodies = schedule.tasks["kind"] != Kind.JOIN
        per_rank = np.bincount(schedule.tasks["rank"][bodies], minlength=schedule.num_ranks)
        assert [reports[r].tasks for r in range(schedule.num_ranks)] == per_rank.tolist()
        assert sum(report.copy_bytes for report in reports.values()) == int(schedule.copies()[:, 3].sum())


@pytest.mark.parametrize("op", [*TRIANGLES.values()][1:], ids=str)
def test_a_triangle_is_written_wherever_its_diagonal_is(fake, op):
    build = ByHand(dtype=DType.c128)
    below = range(-4, 6)
    to = [build.add(0, 3, 5, DType.c128) for _ in below]
    terms = [(build.add(0, 3, 5, DType.c128), factor, N) for factor in (F.ALPHA, F.ONE)]
    for one, diagonal in zip(to, below, strict=True):
        build.task(Kind.COMBINE, build.compute_lane(0), one, terms, ending=(op, diagonal))
    cluster = FakeCluster(fake, build.done())
    values = np.random.default_rng(3).normal(size=(2, 3, 5, 2)).view(np.complex128)[..., 0]
    for (place, _, _), of in zip(terms, values, strict=True):
        cluster.buffer(place.buffer)[...] = of
    succeed(cluster.run(2.0 - 1.0j))
    total = (2.0 - 1.0j) * values[0] + values[1]
    for one, diagonal in zip(to, below, strict=True):
        wanted = np.where(in_triangle(total.shape, op, diagonal), as_written(total, op, diagonal), 0)
        assert np.allclose(cluster.buffer(one.buffer), wanted, rtol=1e-14, atol=1e-14), (op, diagonal)


def test_chained_runs_give_what_runs_one_after_another_give(fake):
    """Each adds to what the one before has made, with the same panels and flags."""
    rng = random.Random(5)
    followed = 0
    for case in range(40):
        schedule = random_case(rng, max_ranks=4, max_extent=20)
        if schedule.problem.dtype is not DType.f64:
            continue
        contents = []
        for chained in (0, 4):
            cluster = FakeCluster(fake, schedule, epoch=2**32 - 2)
            (alpha, beta), _ = filled_with_numbers(cluster, case)
            fake.reset()
            for _ in range(1 if chained else 4):
                succeed(cluster.run(alpha, beta or 0.5, chained=chained))
            followed += sum("batch wait" in line for line in fake.log()) * bool(chained)
            contents.append([memory.tobytes() for memory in cluster.memory])
        assert contents[0] == contents[1]
    assert followed > 20


def test_what_a_stream_gets_behind_a_run_finds_it_ended_on_all_ranks(fake):
    """A stream of each rank copies all ranks' memory, given that before other ranks begin, and while they run."""
    rng = random.Random(6)
    for case in range(40):
        schedule = random_case(rng, max_ranks=4, max_extent=20)
        if schedule.problem.dtype is not DType.f64:
            continue
        cluster = FakeCluster(fake, schedule)
        (alpha, beta), _ = filled_with_numbers(cluster, case)
        fake.reset()
        runs, streams, copied = [], [], []
        for executable in cluster.executables:
            run = executable.start(alpha=alpha, beta=beta, epoch=1, timeout_s=20.0, chain=Chain.FIRST)
            assert run.may_be_followed
            streams.append(fake.stream())
            run.precede(streams[-1:])
            copied.append([fake.copy(memory, streams[-1]) for memory in cluster.memory])
            runs.append(run)
        while [run.poll() for run in runs].count(False):
            pass
        succeed(dict(enumerate(run.finish() for run in runs)))
        for stream, copies in zip(streams, copied, strict=True):
            fake.synchronize(stream)
            assert all(np.array_equal(one, memory) for one, memory in zip(copies, cluster.memory, strict=True))


def test_what_a_stream_gets_behind_a_run_does_not_await_the_run_that_follows(fake):
    rng = random.Random(8)
    for case in range(20):
        schedule = random_case(rng, max_ranks=3, max_extent=20)
        if schedule.problem.dtype is not DType.f64 or schedule.num_ranks == 1:
            continue
        cluster = FakeCluster(fake, schedule)
        (alpha, beta), _ = filled_with_numbers(cluster, case)
        fake.reset()
        about, span = {"alpha": alpha, "beta": beta, "timeout_s": 20.0}, cluster.executables[0].span
        runs = [one.start(**about, epoch=1, chain=Chain.FIRST) for one in cluster.executables[:1]]
        behind = [one.start(**about, epoch=1 + span, chain=Chain.NEXT) for one in cluster.executables[:1]]
        stream = fake.stream()
        runs[0].precede([stream])
        runs += [one.start(**about, epoch=1, chain=Chain.FIRST) for one in cluster.executables[1:]]
        while [run.poll() for run in runs].count(False):
            pass
        fake.synchronize(stream)  # though other ranks have not begun the second run
        behind += [one.start(**about, epoch=1 + span, chain=Chain.NEXT) for one in cluster.executables[1:]]
        while [run.poll() for run in (*runs, *behind)].count(False):
            pass
        succeed(dict(enumerate(run.finish() for run in (*runs, *behind))))


@pytest.mark.parametrize("alpha", [0.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_an_operand_whose_factor_is_zero_is_not_read(fake, alpha, beta):
    build = ByHand()
    a, b, c = (build.add(0, *shape, ld=9) for shape in ((6, 4), (4, 5), (6, 5)))
    build.task(Kind.GEMM, build.compute_lane(0), c, [(a, F.ALPHA, N), (b, F.ONE, N), (c, F.BETA, N)])
    cluster = FakeCluster(fake, build.done())
    rng = np.random.default_rng(0)
    for index in range(3):
        cluster.buffer(index)[...] = rng.random(cluster.buffer(index).shape)
    expected = np.zeros((6, 5))
    if alpha:
        expected += alpha * cluster.buffer(0) @ cluster.buffer(1)
    else:
        cluster.buffer(0)[...] = np.nan
    if beta:
        expected += beta * cluster.buffer(2)
    else:
        cluster.buffer(2)[...] = np.nan
    succeed(cluster.run(alpha, beta))
    np.testing.assert_allclose(cluster.buffer(2), expected, rtol=1e-14)


# -- lanes of the host -------------------------------------------------------------------------------


def fill(cluster, seed):
    before = contents(cluster.schedule, seed)
    for index, values in enumerate(before):
        cluster.buffer(index)[...] = values
    return copied(cluster.schedule, before)


def holds(cluster, wanted):
    return all(np.array_equal(cluster.buffer(index), values) for index, values in enumerate(wanted))


@pytest.mark.parametrize("seed", range(8))
def test_lanes_of_the_host_and_streams_copy_what_the_global_order_says(fake, seed):
    rng = random.Random(seed)
    cluster = FakeCluster(fake, random_copies(rng, rng.randint(1, 3), 80), epoch=2**32 - 3)
    cluster.prepare_trace()
    for call in range(3):
        wanted = fill(cluster, call)
        reports = cluster.run(traced=call == 1)
        succeed(reports)
        assert holds(cluster, wanted)
        assert sum(report.tasks for report in reports.values()) == 80
        assert sum(report.copy_bytes for report in reports.values()) == int(cluster.schedule.copies()[:, 3].sum())
        if call == 1:
            times = [report.times for report in reports.values()]
            assert sorted(np.concatenate([one.tasks for one in times]).tolist()) == list(range(80))
            assert all((one.end_s >= one.start_s).all() for one in times)


def test_a_product_whose_every_await_goes_by_a_worker_is_right(fake):
    case = Pushed(trans_a="T")
    cluster = FakeCluster(fake, joined_by_hosts(case.build(), random.Random(1)))
    for call in range(3):
        load(case, cluster, seed=call)
        succeed(cluster.run(1.2345, 1.1154))
        assert case.is_right(cluster.schedule, cluster.buffer(2), 1.2345, 1.1154, call)


@pytest.mark.parametrize("place", ["h0,h0,h0", "h1,0,h0", "h0,h,1"])
def test_products_of_matrices_that_a_worker_alone_touches_are_right(fake, place):
    problem, placement = GemmProblem(37, 29, 41, DType.f64, "T"), Placement.parse(place)
    schedule = summa(problem, placement, 2, grid=(1, 2), options=SummaOptions(steps=3))
    private = [
        matrix for matrix in MATRICES if placement.of(matrix).space == "host" and placement.of(matrix).rank is not None
    ]
    assert used_by_others(schedule, private) == tuple(private)
    cluster = FakeCluster(fake, stage(schedule, private, setting_of(schedule)))
    assert not used_by_others(cluster.schedule, private)
    for call in range(3):
        scalars, is_right = filled_with_numbers(cluster, call)
        succeed(cluster.run(*scalars))
        assert is_right()


def in_files(fake, folder, room):
    """Return a cluster for a product of matrices in files, which go through rings."""
    problem, placement = GemmProblem(37, 29, 41, DType.f64, "T"), Placement.parse("h0,h1,h0")
    schedule = summa(problem, placement, 2, grid=(1, 2), options=SummaOptions(steps=3))
    staged = stage(schedule, used_by_others(schedule, MATRICES), setting_of(schedule, host_memory=room))
    return FakeCluster(fake, staged, in_files={index: str(folder / f"{index}") for index in range(3)})


@pytest.mark.parametrize("room", [4000, 9000])
def test_products_of_matrices_in_files_are_right(fake, tmp_path, room):
    cluster = in_files(fake, tmp_path, room)
    cluster.prepare_trace()
    for call in range(3):
        scalars, is_right = filled_with_numbers(cluster, call)
        reports = cluster.run(*scalars, traced=call == 1)
        succeed(reports)
        assert is_right()
        assert sum(one.copy_bytes for one in reports.values()) == int(cluster.schedule.copies()[:, 3].sum())


@pytest.mark.parametrize(("which", "words"), [(0, "has become shorter"), (2, "cannot be")])
def test_a_file_that_fails_ends_all_ranks_and_is_named(fake, tmp_path, which, words):
    cluster = in_files(fake, tmp_path, 4000)
    window = cluster.files._windows[which]
    if which == 0:
        os.truncate(window.path, 1000)
    else:
        os.dup2(os.open(window.path, os.O_RDONLY), window.descriptor)
    reports = cluster.run()
    assert isinstance(reports[0].error, DataFileError)
    assert words in str(reports[0].error)
    assert window.path in str(reports[0].error)
    assert reports[1].error is None


@pytest.mark.parametrize("places", [("h0", "h1"), ("1", "h0")])
def test_products_of_parts_that_their_owners_alone_touch_are_right(fake, places):
    problem = GemmProblem(37, 29, 41, DType.f64)

    def rows(shape):
        cuts = (0, 20), (20, shape[0])
        return BoundLayout(
            shape, tuple(Part(cut, (0, shape[1]), Location.parse(at)) for cut, at in zip(cuts, places, strict=True))
        )

    placement = Placement(*(rows(problem.shape_of(matrix)) for matrix in MATRICES))
    options = ScheduleOptions(scheduler="kblocks", grid=(1, 2))
    (planned,) = plan_several(problem, placement, 2, Machine.uniform(2), options, range(6))
    assert planned.staged == MATRICES
    assert not used_by_others(planned.schedule, range(6))
    cluster = FakeCluster(fake, planned.schedule)
    scalars, is_right = filled_with_numbers(cluster, 7)
    succeed(cluster.run(*scalars))
    assert is_right()


def within_host(shapes, pad=0):
    """Copies of matrices within host memory, one behind the other on one lane, from buffer 2i to buffer 2i + 1."""
    build = ByHand()
    for shape in shapes:
        source, goal = (build.add(build.host, *shape, ld=max(1, shape[0] + pad)) for _ in range(2))
        build.copy(build.host_lane(0), goal, source)
    return build.done()


@pytest.mark.parametrize("pad", [0, 3])
def test_a_worker_s_copies_go_on_over_many_turns(fake, pad):
    cluster = FakeCluster(fake, within_host([(1_300_000, 2), (0, 5), (7, 11), (600_000, 1), (3, 1)], pad))  # 4 MiB each
    wanted = fill(cluster, 1)
    report = cluster.run()[0]
    assert report.error is None
    assert report.tasks == 5
    assert holds(cluster, wanted)
    for index, record in enumerate(cluster.schedule.buffers):  # nothing between columns is written
        if record["rows"]:
            every = cluster.memory[index].view(np.float64)
            between = np.arange(len(every)) % record["ld"] >= record["rows"]
            assert not every[between].any()


@pytest.mark.parametrize("dtype", [DType.f64, DType.f32, DType.bf16, DType.c128], ids=lambda dtype: dtype.name)
def test_copies_that_transpose_keep_every_bit_and_touch_nothing_else(fake, dtype):
    # The last takes a worker several turns.
    cluster = FakeCluster(fake, transposing_copies(dtype, [*SHAPES, (2100, 1601)]))
    wanted = filled(cluster.schedule, lambda index, values: np.copyto(cluster.buffer(index), values), 1)
    reports = cluster.run()
    succeed(reports)
    found = [bits_of(cluster.buffer(index)) for index in range(len(wanted))]
    assert all(map(np.array_equal, found, wanted))
    assert (reports[0].tasks, reports[0].copy_bytes) == (14, cluster.schedule.copies()[:, 3].sum())
    launched = [line.split()[-1] for line in fake.log() if " transpose " in line]
    assert launched == ["1x1", "33x5", "31x64", "100x70", "2x300", "2100x1601"]
    for record, memory in zip(cluster.schedule.buffers, cluster.memory, strict=True):  # nor between columns
        every = np.arange(len(memory)) // dtype.itemsize % record["ld"]
        assert not memory[every >= record["rows"]].any()


def test_a_kernel_is_asked_for_once_a_list_where_a_stream_needs_it_and_runs_on_nothing_before(fake):
    cluster = FakeCluster(fake, transposing_copies(DType.tf32))
    program, asked = cluster.programs[0], []

    def kernel(signature):
        asked.append(signature)
        return (1 << 48) + signature

    addresses = [memory.ctypes.data for memory in cluster.memory]
    on_host = program.lanes["kind"][program.operations["lane"]] == LaneKind.HOST
    for operations in (program.operations, program.operations[on_host]):
        part = dataclasses.replace(program, operations=operations)
        bind(fake.device(), part, addresses, kernel=kernel)
    assert asked == [TRANSPOSING | 4]
    fake.reset()
    for signature in (TRANSPOSING | 4, PACKING, DType.f64):
        fake.device().run_on_nothing((1 << 48) + signature)
    launched = [line.split()[-2:] for line in fake.log() if re.search(" (transpose|pack|combine) ", line)]
    assert launched == [["transpose", "0x0"], ["pack", "0"], ["combine", "0x0"]]


@pytest.mark.parametrize(
    ("places", "extents", "kind", "words"),
    [
        ((0, Location.host()), (2, 3), DeviceError, "a copy that transposes is one within a device"),
        ((0, 0), (3, 2), ScheduleError, "its regions differ in shape or type"),
    ],
)
def test_a_copy_that_transposes_from_elsewhere_or_what_does_not_fit_is_refused(fake, places, extents, kind, words):
    build = ByHand()
    to, of = (build.add(at, *shape) for at, shape in zip(places, ((3, 2), extents), strict=True))
    build.copy(build.copy_lane(0, 0, 0), to, of, op=Op.T)
    with pytest.raises(kind, match=words):
        FakeCluster(fake, build.done())


@pytest.mark.parametrize("orders", ["CFC", "FCF", "CCC"])
def test_products_of_parts_in_other_orders_are_right(fake, orders):
    problem = GemmProblem(37, 29, 41, DType.f64, "T")
    places = Location.device(0), Location.host(1), Location.host(), Location.device(1)

    def rows(shape, order):
        cuts = even(shape[0], 4)
        parts = [
            Part(extent, (0, shape[1]), place, order if at % 2 else "F")
            for at, (extent, place) in enumerate(zip(itertools.pairwise(cuts), places, strict=True))
        ]
        return BoundLayout(shape, tuple(parts))

    shapes = problem.a_shape, problem.b_shape, (problem.m, problem.n)
    placement = Placement(*map(rows, shapes, orders))
    schedule = plan(problem, placement, 2, Machine.uniform(2), ScheduleOptions(scheduler="kblocks")).schedule
    verify(schedule, lower(schedule))
    cluster = FakeCluster(fake, schedule)
    for call in range(2):
        scalars, is_right = filled_with_numbers(cluster, call)
        succeed(cluster.run(*scalars))
        assert is_right()


@pytest.mark.parametrize("dtype", [DType.f32, DType.f64, DType.c64, DType.c128], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_matrices_that_are_read_in_one_triangle_are_right(fake, kind, dtype):
    for number, (triangle, unit, right) in enumerate(itertools.product(("lower", "upper"), (False, True), (0, 1))):
        form = Form(kind, triangle, unit=unit and kind in ("triangular", "inverse"))
        op, read = ("NTC"[number % 3], False) if form.is_triangular else ("N", True)
        k = 37 if number == 0 else 600  # at once, and by halves twice
        (m, n), ops, forms = ((9, k), ("N", op), (None, form)) if right else ((k, 9), (op, "N"), (form, None))
        problem = GemmProblem(m, n, k, dtype, *ops, forms=forms, reads_c=read)
        where = Placement(Location.device(0), Location.device(1), Location.host())
        schedule = plan(problem, where, 2, Machine.uniform(2)).schedule
        verify(schedule, lower(schedule))
        cluster = FakeCluster(fake, schedule)
        scalars, is_right = filled_with_numbers(cluster, number)
        succeed(cluster.run(*scalars))
        assert is_right(), form


@pytest.mark.parametrize("dtype", [DType.f32, DType.f64, DType.c64, DType.c128], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("room", [0, 37, 30_000])
def test_a_triangular_matrix_is_multiplied_in_place_by_way_of_copies(fake, dtype, room):
    where = Placement(Location.device(0), Location.device(0), Location.device(0))
    for number, (triangle, right, op) in enumerate(itertools.product(("lower", "upper"), (0, 1), "NTC")):
        form, k = Form("triangular", triangle), 37 if number % 3 == 0 else 600
        (m, n), ops, forms = ((9, k), ("N", op), (None, form)) if right else ((k, 9), (op, "N"), (form, None))
        problem = GemmProblem(m, n, k, dtype, *ops, forms=forms, reads_c=False)
        schedule, before = plan(problem, where, 1, Machine.uniform(1)).schedule, len(fake.log())
        if room == 0:  # none is free
            fake.fail("cuMemAlloc", 2, 2, 2)
        cluster = FakeCluster(fake, schedule, copies_bytes=room or 30_000, over={2: 1 - right})
        scalars, is_right = filled_with_numbers(cluster, number)
        data = interpret.random_data(problem, number)
        cluster.buffer(2)[...] = data.a if right else data.b
        succeed(cluster.run(*scalars))
        assert is_right(), (form, right, op)
        blocks = [37] if k == 37 else [512, 88]  # what is no gemm is on the diagonal
        wanted = sum(-(-9 // (room // (rows * dtype.itemsize))) for rows in blocks) if room == 30_000 else 0
        assert sum("copy" in line for line in fake.log()[before:]) == wanted


def host_relay():
    """Rank 1's device, by way of two lanes of the host, to rank 0's device."""
    build = ByHand(2)
    spots = [build.add(at, 4, 4) for at in (1, build.host, Location.host(1), build.host, 0)]
    lanes = [
        build.copy_lane(1, 1, build.host), build.host_lane(1), build.host_lane(1, 1), build.copy_lane(0, build.host, 0)
    ]  # fmt: skip
    last = []
    for lane, of, to in zip(lanes, spots, spots[1:], strict=False):
        last = [build.copy(lane, to, of, last)]
    return build.done()


def test_what_fails_on_a_stream_ends_the_lanes_of_the_host_too(fake):
    cluster = FakeCluster(fake, host_relay())
    before = contents(cluster.schedule, 3)
    fill(cluster, 3)
    fake.fail("cuMemcpyAsync", 1, 1)
    reports = cluster.run(ranks=[1])
    assert "a planted error" in str(reports[1].error)
    assert reports[1].tasks == 0
    assert holds(cluster, before)
    assert set(cluster.host_flags[1, :3]) == {2}  # every flag was written
    cluster.epoch -= 1
    again = cluster.run(ranks=[0])[0]  # rank 0 hears of it
    assert (again.error, again.aborted, again.tasks) == (None, True, 0)
    fake.fail("", 0, 0)
    wanted = fill(cluster, 4)
    succeed(cluster.run())
    assert holds(cluster, wanted)


def test_another_rank_s_failure_ends_what_a_worker_waits_for(fake):
    cluster = FakeCluster(fake, host_relay())
    ProgressBoard(cluster.board, 0).abort[0] = cluster.epoch + 1
    report = cluster.run(ranks=[1])[1]
    assert (report.error, report.aborted, report.tasks) == (None, True, 0)
    assert set(cluster.host_flags[1, :3]) == {2}


def test_a_stalled_worker_says_for_whom_it_waits_and_touches_nothing_any_more(fake):
    build = ByHand(2)
    first = build.task(Kind.JOIN, build.compute_lane(0, 5))
    build.task(Kind.JOIN, build.compute_lane(1))
    build.task(Kind.JOIN, build.host_lane(1, 7), awaits=[first])
    cluster = FakeCluster(fake, build.done())
    error = cluster.run(timeout_s=0.2, ranks=[1])[1].error
    assert isinstance(error, StallError)
    assert "rank 1 has not got on: host lane 7: task 2, JOIN, waits for task 0 of rank 0" in str(error)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_ends_without_the_worker_that_it_has_not(fake):
    device = fake.device()
    schedule = within_host([(2, 2)])
    memory = np.zeros((2, 4))
    executable = bind(device, lower(schedule).rank_list(0), [one.ctypes.data for one in memory])
    assert executable.run(alpha=1.0, beta=0.0, epoch=1, timeout_s=20.0).tasks == 1
    child = os.fork()
    if child == 0:
        device.close()
        os._exit(0)
    ended, deadline = 0, time.monotonic() + 20.0
    while ended == 0 and time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
    if ended == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert (ended, status) == (child, 0)


@pytest.mark.parametrize(
    ("kind", "goal", "words"),
    [
        (Kind.COPY, 0, "copies within host memory alone"),
        (Kind.COMBINE, Location.host(), "only copies, and waits and tells by flags in host memory"),
    ],
)
def test_a_worker_gets_no_task_of_a_device(fake, kind, goal, words):
    build = ByHand()
    to, of = (build.add(at) for at in (goal, Location.host()))
    build.task(kind, build.host_lane(0), to, [(of, F.ONE, N)])
    with pytest.raises(DeviceError, match=words):
        FakeCluster(fake, build.done())


# -- order and batching ------------------------------------------------------------------------------


def test_operations_go_out_in_list_order_each_on_a_stream_of_its_lane(fake):
    cluster = FakeCluster(fake, Pushed(ranks=3).build())
    for rank, program in enumerate(cluster.programs):
        fake.reset()
        cluster.release()  # nobody waits, so that each rank can run alone
        succeed(cluster.run(ranks=[rank]))
        names = {Code.COPY: "copy", Code.GEMM: "gemm", Code.COMBINE: "combine", Code.WAIT_FLAG: "batch"}
        names |= {Code.WAIT_EVENT: "wait", Code.RECORD: "record", Code.SIGNAL: "signal"}
        wanted = [(names[Code(record["code"])], int(record["lane"])) for record in program.operations]
        merged = [op for i, op in enumerate(wanted) if i == 0 or op[0] != "batch" or wanted[i - 1] != op]
        issued = [line.replace("copy2d", "copy").split(" ")[:2] for line in fake.log()]
        lane_of = {}
        for (stream, _), (_, lane) in zip(issued, merged, strict=True):
            assert lane_of.setdefault(stream, lane) == lane
        assert len(set(lane_of.values())) == len(lane_of)
        assert [(name, lane_of[stream]) for stream, name in issued] == merged


def test_consecutive_waits_of_a_lane_are_one_batch_with_progress_words(fake):
    # Two producers on other ranks, awaited by one task: two waits, one batch, a word before each.
    build = ByHand(3)
    parts, goal = [build.add(r, 4, 4) for r in range(3)], build.add(0, 8, 4)
    halves = [goal._replace(row=row, rows=4) for row in (0, 4)]
    pushes = [build.copy(build.copy_lane(r, r, 0), halves[r - 1], parts[r]) for r in (1, 2)]
    build.task(Kind.COMBINE, build.compute_lane(0), parts[0], [(half, F.ONE, N) for half in halves], pushes)
    cluster = FakeCluster(fake, build.done(), epoch=7)
    for index in range(3):
        cluster.buffer(index)[...] = index
    succeed(cluster.run())
    assert "batch word 1 wait 8 word 3 wait 8" in " ".join(line.split(" ", 1)[1] for line in fake.log())
    assert (cluster.buffer(0) == 3).all()
    assert cluster.board[0, 0] == 3


def test_waits_flush_remote_writes_only_where_the_device_can(fake):
    for can in (False, True):
        fake.reset()
        fake.can_flush(can)
        succeed(FakeCluster(fake, Pushed(ranks=2).build()).run())
        waits = [word for line in fake.log() if "batch" in line for word in re.findall(r"wait (\d+!?)", line)]
        assert waits
        assert all(word.endswith("!") is can for word in waits)


def long_chain(length):
    """One lane of `length` copies behind a wait for rank 1, which copies once."""
    build = ByHand(2)
    there, here = build.add(1), build.add(0, length + 1)
    spots = [here._replace(row=row, rows=1) for row in range(length + 1)]
    push = build.copy(build.copy_lane(1, 1, 0), spots[0], there)
    for i, (of, to) in enumerate(itertools.pairwise(spots)):
        build.copy(build.copy_lane(0, 0, 0), to, of, [] if i else [push])
    return build.done()


def test_issuing_pauses_before_queues_fill_and_goes_on_when_they_drain(fake):
    cluster = FakeCluster(fake, long_chain(6000))
    cluster.buffer(0)[...] = 42.0
    late = threading.Timer(0.3, lambda: cluster.executables[1].run(alpha=1, beta=0, epoch=1, timeout_s=5.0))
    late.start()
    report = cluster.run(ranks=[0], timeout_s=math.inf)[0]
    late.join()
    assert report.error is None
    assert report.tasks == 6000
    assert cluster.buffer(1)[-1, 0] == 42.0
    assert 384 <= fake.most_queued <= 780


def test_runs_that_one_thread_polls_in_turn_never_wait_and_issue_little_at_once(fake):
    cluster = FakeCluster(fake, long_chain(6000))
    cluster.buffer(0)[...] = 42.0

    def start(rank):
        return cluster.executables[rank].start(alpha=1, beta=0, epoch=1, timeout_s=5.0)

    first = start(0)  # its chain waits for the other rank
    full = len(fake.log())
    assert not any(first.poll() for _ in range(100))
    assert len(fake.log()) == full
    runs = [first, start(1)]
    issued = [len(fake.log())]
    while [run.poll() for run in runs].count(False):
        issued.append(len(fake.log()))
    reports = dict(enumerate(run.finish() for run in runs))
    succeed(reports)
    assert reports[0].tasks == 6000
    assert cluster.buffer(1)[-1, 0] == 42.0
    assert 384 <= fake.most_queued <= 780
    assert 0 < max(np.diff(issued)) <= 2 * 32


def test_a_polled_run_that_nobody_gets_on_with_ends_in_a_stall(fake):
    cluster = FakeCluster(fake, long_chain(6000))
    run = cluster.executables[0].start(alpha=1, beta=0, epoch=1, timeout_s=0.2)
    while not run.poll():
        pass
    assert isinstance(run.finish().error, StallError)
    assert not cluster.board[-1].any()  # every rank finds a stall by itself


def test_a_device_has_one_run_in_flight_and_one_that_is_dropped_is_its_last(fake):
    cluster = FakeCluster(fake, Pushed(ranks=2).build())
    run = cluster.executables[0].start(alpha=1, beta=0, epoch=1, timeout_s=5.0)
    refused = cluster.executables[0].start(alpha=1, beta=0, epoch=100, timeout_s=5.0)
    assert refused.poll()
    assert "began a run before its last one had ended" in str(refused.finish().error)
    assert not run.poll()
    del run
    assert "has to end" in str(cluster.run(ranks=[0])[0].error)


@pytest.mark.parametrize(
    ("kind", "size", "weight"),
    [(Kind.COPY, 1 << 25, 5), (Kind.COPY, 1 << 27, 17), (Kind.COPY, 1 << 29, 64), (Kind.GEMM, 8192, 11)],
    ids=["copies of 256 MiB", "copies of 1 GiB", "copies of 4 GiB", "products of 8192"],
)
def test_what_takes_long_counts_as_several_steps_so_that_after_an_error_nobody_waits_for_it(fake, kind, size, weight):
    rows, cols = (size, 1) if kind is Kind.COPY else (size, size)
    build = ByHand(2)
    there, whole = build.add(1), build.add(0, rows, cols)
    push = build.copy(build.copy_lane(1, 1, 0), whole._replace(rows=1, cols=1), there)
    lane = build.copy_lane(0, 0, 0) if kind is Kind.COPY else build.compute_lane(0)
    for i in range(400):  # none of which ever runs, and the memory is not touched
        build.task(kind, lane, whole, [(whole, F.ONE, N)] * (1 if kind is Kind.COPY else 2), [push] if i == 0 else [])
    cluster = FakeCluster(fake, build.done())
    run = cluster.executables[0].start(alpha=1.0, beta=0.0, epoch=1, timeout_s=20.0)
    assert not run.poll()
    issued = sum(line.split()[1] in ("copy", "gemm") for line in fake.log())
    assert 768 / weight - 2 <= issued <= 768 / weight + 2


def test_a_run_creates_nothing(fake):
    cluster = FakeCluster(fake, Pushed().build())
    made = fake.allocations
    for _ in range(2):
        reports = cluster.run(1.0, 1.0)
        succeed(reports)
    assert fake.allocations == made


# -- traces ------------------------------------------------------------------------------------------


def test_a_traced_run_times_every_body_on_its_own_stream_and_orders_what_is_awaited(fake):
    case = Pushed(ranks=3)
    cluster = FakeCluster(fake, case.build())
    load(case, cluster)
    cluster.prepare_trace()
    made = fake.allocations
    reports = cluster.run(1.2345, 1.1154, traced=True)
    succeed(reports)
    assert case.is_right(cluster.schedule, cluster.buffer(2), 1.2345, 1.1154, 0)
    assert fake.allocations == made
    start, end = np.full((2, len(cluster.schedule.tasks)), np.nan)
    for rank, report in reports.items():
        times = report.times
        assert (cluster.schedule.tasks["rank"][times.tasks] == rank).all()
        start[times.tasks], end[times.tasks] = times.start_s, times.end_s
    bodies = cluster.schedule.tasks["kind"] != Kind.JOIN
    assert (np.isfinite(start) == bodies).all()
    # The fake's clock counts operations as milliseconds: a body is one, the event after it the next.
    assert (end[bodies] - start[bodies] > 0.0015).all()
    rank_of = cluster.schedule.tasks["rank"]
    for task in np.flatnonzero(bodies):
        for awaited in cluster.schedule.awaited(task):
            # Ranks are threads here, whose references stand at different counts.
            if bodies[awaited] and rank_of[awaited] == rank_of[task]:
                assert end[awaited] < start[task]


def test_the_events_of_a_trace_stand_right_before_and_after_each_body(fake):
    cluster = FakeCluster(fake, Pushed(ranks=1).build())
    cluster.prepare_trace()
    fake.reset()
    succeed(cluster.run())
    plain = fake.log()
    assert not any(line.endswith(" time") for line in plain)
    fake.reset()
    succeed(cluster.run(traced=True))
    traced = fake.log()
    reference = traced[:2]
    assert reference[0] == reference[1]
    assert reference[0].endswith(" time")
    wanted = []
    for line in plain:
        stream, what = line.split(" ", 1)
        body = what.split(" ")[0] in ("copy", "copy2d", "gemm", "combine")
        wanted += [f"{stream} time", line, f"{stream} time"] if body else [line]
    assert traced[2:] == wanted


def test_times_are_on_the_systems_monotonic_clock(fake):
    cluster = FakeCluster(fake, Pushed(ranks=1).build())
    cluster.prepare_trace()
    before = time.monotonic()
    times = cluster.run(traced=True)[0].times
    after = time.monotonic()
    # Counted in operations from a moment of the run on.
    assert before < times.start_s[0] < after + 1e-3 * len(fake.log())


def test_a_traced_run_keeps_queues_from_filling_with_its_events(fake):
    cluster = FakeCluster(fake, long_chain(3000))
    cluster.prepare_trace()
    release = threading.Timer(0.3, lambda: cluster.release(0))
    release.start()
    report = cluster.run(ranks=[0], traced=True)[0]
    release.join()
    assert report.error is None
    assert len(report.times.tasks) == 3000
    assert 384 <= fake.most_queued <= 780


def test_a_run_without_trace_has_no_times_and_a_trace_without_events_is_refused(fake):
    cluster = FakeCluster(fake, Pushed(ranks=1).build())
    assert cluster.run()[0].times is None
    error = cluster.run(traced=True)[0].error
    assert isinstance(error, DeviceError)
    assert "prepare the trace first" in str(error)


@pytest.mark.parametrize("call", ["cuEventElapsedTime", "cuMemcpy2DAsync", "cuEventRecord"])
def test_a_traced_run_that_fails_says_so_and_writes_its_flags(fake, call):
    cluster = FakeCluster(fake, Pushed(ranks=2).build())
    cluster.prepare_trace()
    fake.fail(call, 2, 2)
    reports = cluster.run(traced=True)
    failed = [report for report in reports.values() if report.error is not None]
    assert len(failed) == 1
    assert call in str(failed[0].error)
    assert failed[0].times is None
    assert all(map(np.array_equal, cluster.flags, cluster.signalled(1)))


# -- failures ----------------------------------------------------------------------------------------


def test_a_failing_call_poisons_the_remaining_flags_so_that_peers_finish(fake):
    cluster = FakeCluster(fake, Pushed(ranks=3).build())
    fake.fail("cuMemcpy2DAsync", 2, 2)
    reports = cluster.run(1.0, 1.0, timeout_s=10.0)
    failed = [rank for rank, report in reports.items() if report.error is not None]
    assert len(failed) == 1
    error = reports[failed[0]].error
    assert isinstance(error, DeviceError)
    assert not getattr(error, "fatal", False)
    for part in ("cuMemcpy2DAsync", "CUDA_ERROR_FAKE", "fake device", f"rank {failed[0]}", "task", "COPY"):
        assert part in str(error)
    assert all(map(np.array_equal, cluster.flags, cluster.signalled(1)))
    # The next call finds everything as it was.
    fake.fail("nothing")
    case = Pushed(ranks=3)
    load(case, cluster)
    succeed(cluster.run(1.2345, 1.1154))
    assert case.is_right(cluster.schedule, cluster.buffer(2), 1.2345, 1.1154, 0)


def ping_pong(length):
    """Two ranks copy one number to each other and back, `length` times."""
    build = ByHand(2)
    spots = [build.add(rank) for rank in range(2)]
    awaits = []
    for i in range(2 * length):
        rank = i % 2
        awaits = [build.copy(build.copy_lane(rank, rank, 1 - rank), spots[1 - rank], spots[rank], awaits)]
    return build.done()


@pytest.mark.parametrize("traced", [False, True])
def test_a_failure_ends_a_long_call_on_every_rank_and_the_next_one_runs(fake, traced):
    length = 2000
    cluster = FakeCluster(fake, ping_pong(length))
    cluster.prepare_trace()

    def start(rank):
        return cluster.executables[rank].start(alpha=1, beta=0, epoch=cluster.epoch, timeout_s=5.0, traced=traced)

    first = start(0)  # full, behind the other rank
    begun = sum("copy" in line for line in fake.log())
    fake.fail("cuMemcpyAsync", 20, 20)
    runs = [first, start(1)]
    while [run.poll() for run in runs].count(False):
        pass
    reports = [run.finish() for run in runs]
    assert (reports[0].tasks, reports[0].aborted, reports[0].error, reports[0].times) == (begun, True, None, None)
    assert begun < length / 4
    assert (reports[1].tasks, reports[1].aborted) == (19, False)
    assert "cuMemcpyAsync" in str(reports[1].error)
    assert all(map(np.array_equal, cluster.flags, cluster.signalled(cluster.epoch)))
    fake.fail("nothing")
    cluster.epoch += cluster.executables[0].span
    again = cluster.run(traced=traced)
    succeed(again)
    assert [(report.tasks, report.aborted) for report in again.values()] == 2 * [(length, False)]


@pytest.mark.parametrize("end", ["works", "fails", "is aborted", "stalls"])
def test_a_run_and_its_list_are_gone_with_their_last_reference_whatever_is_in_the_report(fake, end):
    gc.collect()
    gc.disable()
    try:
        cluster = FakeCluster(fake, Pushed(ranks=2 if end == "stalls" else 1).build())
        executable = cluster.executables[-1]
        if end == "fails":
            fake.fail("cublasDgemm_v2_64", 1, 1, 13)
        run = executable.start(alpha=1.0, beta=0.0, epoch=1, timeout_s=0.1)
        if end == "is aborted":
            ProgressBoard(cluster.board, 0).abort[0] = 2
        report = run.finish()
        gone = [weakref.ref(run), weakref.ref(cluster.board)]
        executable.close()
        assert 0.0 <= executable.progress() <= 1.0  # another thread may still ask
        del run, executable, cluster
        assert [one() for one in gone] == [None] * 2
    finally:
        gc.enable()
    assert (report.error is None) == (end in ("works", "is aborted"))


def test_a_cublas_error_names_call_status_and_task(fake):
    cluster = FakeCluster(fake, Pushed(ranks=1).build())
    fake.fail("cublasDgemm_v2_64", 1, 1, 13)
    error = cluster.run()[0].error
    assert isinstance(error, DeviceError)
    assert "cublasDgemm_v2_64: CUBLAS_STATUS_FAKE (13)" in str(error)
    assert "(GEMM)" in str(error)


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuStreamQuery"])
def test_a_lost_context_is_fatal_whether_issuing_or_draining_shows_it(fake, call):
    cluster = FakeCluster(fake, long_chain(3))
    cluster.release(0)
    fake.fail(call, 1, 1 << 30, 700)
    error = cluster.run(ranks=[0])[0].error
    assert isinstance(error, DeviceError)
    assert getattr(error, "fatal", False)
    assert "the job has to end" in str(error)
    fake.fail("nothing")
    again = cluster.run(ranks=[0])[0].error
    assert "has to end" in str(again)


def test_ranks_that_wait_for_one_whose_context_is_lost_end_at_once(fake):
    cluster = FakeCluster(fake, ping_pong(2000))
    first = cluster.executables[0].start(alpha=1, beta=0, epoch=1, timeout_s=30.0)
    fake.fail("cuMemcpyAsync", 20, 20, 700)
    runs = [first, cluster.executables[1].start(alpha=1, beta=0, epoch=1, timeout_s=30.0)]
    began = time.monotonic()
    while [run.poll() for run in runs].count(False):
        assert time.monotonic() < began + 20.0
    reports = [run.finish() for run in runs]
    assert getattr(reports[1].error, "fatal", False)
    assert (reports[0].error, reports[0].aborted) == (None, True)
    fake.fail("nothing")
    assert "has to end" in str(cluster.run(ranks=[0])[0].error)


def test_ranks_that_wait_for_one_whose_run_cannot_begin_end_at_once(fake):
    cluster = FakeCluster(fake, ping_pong(20))
    first = cluster.executables[0].start(alpha=1, beta=0, epoch=1, timeout_s=30.0)
    refused = cluster.executables[1].run(alpha=1, beta=0, epoch=1, timeout_s=30.0, traced=True)  # without events
    began = time.monotonic()
    while not first.poll():
        assert time.monotonic() < began + 5.0
    report = first.finish()
    assert (report.error, report.aborted) == (None, True)
    assert getattr(refused.error, "fatal", False)


def test_a_flag_that_never_comes_is_a_stall_that_names_task_rank_and_slot(fake):
    cluster = FakeCluster(fake, Pushed(ranks=2).build())
    report = cluster.run(ranks=[0], timeout_s=0.3)[0]
    assert isinstance(report.error, StallError)
    waiting = cluster.programs[0].operations
    task = waiting["task"][waiting["code"] == Code.WAIT_FLAG][0]
    assert f"task {task}, " in str(report.error)
    assert "0.3 s" in str(report.error)


def test_progress_anywhere_on_the_board_keeps_a_waiting_rank_patient(fake):
    cluster = FakeCluster(fake, long_chain(3))
    stop = threading.Event()

    def tick():
        while not stop.wait(0.05):
            cluster.board[1, 200] += 1

    other = threading.Thread(target=tick)
    other.start()
    release = threading.Timer(1.0, lambda: cluster.release(0))
    release.start()
    report = cluster.run(ranks=[0], timeout_s=0.4)[0]
    stop.set()
    other.join()
    release.join()
    assert report.error is None


def test_a_full_queue_behind_a_dead_peer_still_ends_in_a_stall(fake):
    cluster = FakeCluster(fake, long_chain(6000))
    report = cluster.run(ranks=[0], timeout_s=0.3)[0]
    assert isinstance(report.error, StallError)
    assert "of rank 1" in str(report.error)


def test_two_threads_on_one_backend_are_refused(fake):
    cluster = FakeCluster(fake, Pushed(ranks=2).build())
    first = threading.Thread(target=cluster.run, kwargs={"ranks": [0], "timeout_s": 1.0})
    first.start()
    while first.is_alive() and not fake.log():
        pass
    error = cluster.executables[0].run(alpha=1.0, beta=0.0, epoch=cluster.epoch, timeout_s=0.2).error
    first.join()
    assert isinstance(error, DeviceError)
    assert "two threads" in str(error)


def test_a_thread_has_its_own_current_context_back(fake):
    cluster = FakeCluster(fake, Pushed(ranks=1).build())
    device = fake.device()
    device.reserve(1, 0, 0)
    fake.current_context = 99
    assert cluster.executables[0].run(alpha=1.0, beta=0.0, epoch=1, timeout_s=5.0).error is None
    assert fake.current_context == 99
    device.mark_streams([device.compute_stream(0)])
    device.await_marks()
    assert fake.current_context == 99
    cluster.prepare_trace()
    assert fake.current_context == 99
    device.close()
    for use in (lambda: device.mark_streams([0]), device.await_marks):
        with pytest.raises(_native.CudaError, match="is closed"):
            use()


def test_the_callers_stream_is_awaited(fake):
    device = fake.device()
    device.reserve(2, 0, 0)
    fake.reset()
    device.mark_streams([device.compute_stream(1)])
    (recorded,) = fake.log()
    device.await_marks()
    device.mark_streams([device.compute_stream(0)])
    assert recorded.endswith(" record")
    assert fake.log()[1] != recorded  # another stream
    fake.fail("cuEventSynchronize")
    with pytest.raises(_native.CudaError, match="cuEventSynchronize"):
        device.await_marks()


# -- refusals ----------------------------------------------------------------------------------------


def test_a_missing_driver_is_an_error_that_says_what_to_do():
    with pytest.raises(_native.CudaError, match=r"no CUDA driver.*install an NVIDIA driver.*host backend"):
        _native.CudaDriver("libdoes_not_exist.so")


def test_a_uuid_has_all_its_bytes_also_when_one_is_zero(fake):
    assert fake.driver.uuid(1) == bytes(0 if i == 5 else 16 + i for i in range(16))


def test_a_missing_cublas_is_named():
    with pytest.raises(_native.CudaError, match="cuBLAS"):
        _native.CudaBlas("libdoes_not_exist.so")


def test_memory_that_runs_out_while_preparing_carries_its_code_and_leaves_no_half_made_lane(fake):
    device = fake.device()
    fake.fail("cuMemAlloc", 2, 2, 2)
    with pytest.raises(_native.CudaError) as caught:
        device.reserve(3, 0, 0)
    assert caught.value.args[1] == 2
    device.reserve(3, 0, 0)


def test_a_buffer_without_an_address_is_refused(fake):
    schedule = Pushed(ranks=1).build()
    with pytest.raises(ScheduleError, match=r"buffer \d+ has no address"):
        bind(fake.device(), lower(schedule).rank_list(0), [0] * len(schedule.buffers))


@pytest.mark.parametrize("ends", [("h0", "h0"), ("h0", "h1"), ("h1", "h0")])
@pytest.mark.parametrize("orders", ["FF", "FC", "CF"])
def test_files_are_copied_into_files_and_transposed(fake, tmp_path, ends, orders):
    shape = 30, 26

    def part(order, at):
        return BoundLayout(shape, (Part((0, 30), (0, 26), Location.parse(at), order),))

    placement = Placement(part(orders[0], ends[0]), Location.host(), part(orders[1], ends[1]))
    problem = GemmProblem(30, 26, 0, DType.f64, reads_c=False, copies=True)
    (planned,) = plan_several(
        problem, placement, 2, Machine.uniform(2), ScheduleOptions(host_memory=3000), (0, 2), (0, 2)
    )
    cluster = FakeCluster(fake, planned.schedule, in_files={0: str(tmp_path / "a"), 2: str(tmp_path / "c")})
    values = np.random.default_rng(5).standard_normal(shape)
    source, target = cluster.buffer(0), cluster.buffer(2)
    source[...] = values if orders[0] == "F" else values.T
    succeed(cluster.run())
    np.testing.assert_array_equal(target if orders[1] == "F" else target.T, values)
