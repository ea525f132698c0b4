"""The CUDA executor on one GPU, against numpy."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest

from tests.gpu.ranks import Processes, ProcessRanks, ThreadedRanks
from tests.helpers.numbers import factors_of, of_both_parts, op_of, random_values, steps_of, wide_of
from tests.helpers.pushed import Pushed
from tests.helpers.schedules import random_case
from tests.helpers.transposed import SHAPES, bits_of, filled, transposing_copies
from uncut_mpi.device.cuda.executable import CudaExecutable
from uncut_mpi.errors import DeviceError, StallError
from uncut_mpi.model.dtypes import MEASURED, DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.lower import Code
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Factor, Kind, Matrix, Op, Role

F, N, T = Factor, Op.N, Op.T
# A device has channels for 13 to 16 processes of 32 connections, and tests run beside each other.
SETTINGS = {
    "default": {"CUDA_DEVICE_MAX_CONNECTIONS": "8"},
    "one connection": {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    "blocking launches": {"CUDA_DEVICE_MAX_CONNECTIONS": "8", "CUDA_LAUNCH_BLOCKING": "1"},
}


@pytest.fixture
def started():
    """Starts ranks and stops them at the end of the test."""
    running = []

    def start(kind, *arguments, **options):
        running.append(kind(*arguments, **options))
        return running[-1]

    yield start
    for ranks in running:
        ranks.close()


@pytest.fixture(scope="module")
def lasting_processes():
    """Returns three processes that are ranks in one test after another."""
    made = []

    def lasting():
        if made and made[-1].broken:
            made.pop().close()
        if not made:
            made.append(Processes(3, SETTINGS["default"]))
        return made[-1]

    yield lasting
    for processes in made:
        processes.close()


@pytest.fixture
def processes_with(lasting_processes):
    """Returns processes for ranks by their environment; asked for before `started`, whose ranks end first."""
    own = []

    def of(setting):
        if setting == "default":
            return lasting_processes()
        own.append(Processes(3, SETTINGS[setting]))  # ended with the test, for others to have room
        return own[-1]

    yield of
    for processes in own:
        processes.close()


def succeed(reports):
    for rank, report in enumerate(reports):
        assert report.error is None, f"rank {rank}: {report.error!r}"


def load(case, ranks, seed=0):
    for index, record in enumerate(ranks.schedule.buffers):
        contents = np.zeros((int(record["rows"]), int(record["cols"])), DType(int(record["dtype"])).numpy)
        case.fill(ranks.schedule, {index: contents}, seed)
        ranks.write(index, contents)


# -- products ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", MEASURED, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("trans", ["NN", "NT", "TN", "TT", "CN", "TC"])
def test_a_product_over_three_ranks_is_right_and_can_be_repeated(started, lasting_processes, dtype, trans):
    case = Pushed(m=137, n=129, k=141, dtype=dtype, trans_a=trans[0], trans_b=trans[1])
    ranks = started(ProcessRanks, case.build(), lasting_processes(), epoch=2**32 - 1)
    for call, (alpha, beta) in enumerate([factors_of(dtype), (1.2345, 0.0), (-0.5, 1.0)]):
        load(case, ranks, seed=call)
        reports = ranks.run(alpha, beta)
        succeed(reports)
        assert case.is_right(ranks.schedule, ranks.read(2), alpha, beta, call)


@pytest.mark.parametrize("dtype", [DType.f16, DType.bf16, DType.tf32, DType.f32], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(
    ("trans", "extents", "pad"),
    [("NN", (1152, 896, 1032), 8), ("TN", (1152, 896, 1032), 8), ("TT", (1137, 829, 1141), 5)],
)
def test_tuned_products_are_right(started, lasting_processes, dtype, trans, extents, pad):
    m, n, k = extents
    case = Pushed(m=m, n=n, k=k, dtype=dtype, trans_a=trans[0], trans_b=trans[1], pad=pad)
    ranks = started(ProcessRanks, case.build(), lasting_processes(), tune_from=1e6)
    timed = ranks.tuned()
    assert timed
    assert all(of[0] == dtype and 0 < best_s <= usual_s < 1e-2 for of, usual_s, best_s in timed)
    for seed, (alpha, beta) in enumerate([(1.2345, 1.1154), (-0.5, 0.0)]):
        load(case, ranks, seed=seed)
        reports = ranks.run(alpha, beta)
        succeed(reports)
        assert case.is_right(ranks.schedule, ranks.read(2), alpha, beta, seed)


@pytest.mark.parametrize("dtype", [DType.f16, DType.bf16], ids=lambda dtype: dtype.name)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1500, 304, 1804), (1500, 301, 1804), (512, 512, 8192), (128, 128, 8192), (300, 200, 3000)]
)
def test_a_half_type_that_is_formed_directly_is_rounded_once(started, dtype, m, n, k):
    # Few blocks of C: cuBLAS shares k among multiprocessors, and by default adds the parts up in the type of C.
    problem = GemmProblem(m, n, k, dtype)
    whole = ScheduleOptions(scheduler="kblocks", blocking=Blocking(first=k, block=k, columns=1, lanes=1))
    schedule = plan(problem, Placement.parse("0,0,0"), 1, Machine.uniform(1), whole).schedule
    assert len(schedule.tasks) == 1
    ranks = started(ThreadedRanks, schedule)
    rng = np.random.default_rng(m + n)
    values = [rng.uniform(-0.5, 0.5, shape).astype(dtype.numpy) for shape in ((m, k), (k, n), (m, n))]
    for matrix, contents in enumerate(values):
        ranks.write(matrix, contents)
    succeed(ranks.run(1.2345, 1.1154))
    a, b, c = (one.astype(np.float64) for one in values)
    wanted = 1.2345 * (a @ b) + 1.1154 * c
    # Sums of k in float32 lose some 2**-24 sqrt(k) of the largest ones: a tenth of what rounding to the half type does.
    rounding = wanted.astype(dtype.numpy).astype(np.float64) - wanted
    error = ranks.read(2).astype(np.float64) - wanted
    assert np.sqrt(np.mean(error**2)) <= 1.05 * np.sqrt(np.mean(rounding**2))


def test_random_schedules_give_the_product_and_count_their_tasks_and_bytes(started):
    rng = random.Random(3)
    done = 0
    while done < 12:
        schedule = random_case(rng, max_ranks=3, max_extent=60)
        problem = schedule.problem
        if problem.rounds_c:
            continue
        done += 1
        ranks = started(ThreadedRanks, schedule)
        values, at = {}, {}
        for index, record in enumerate(schedule.buffers):
            shape = (int(record["rows"]), int(record["cols"]))
            contents = np.full(shape, np.nan, DType(int(record["dtype"])).numpy)
            if record["role"] == Role.USER:
                if problem.reads_c or record["matrix"] != Matrix.C:
                    contents = random_values(np.random.default_rng(index), shape, DType(int(record["dtype"])))
                values[Matrix(record["matrix"])], at[Matrix(record["matrix"])] = contents, index
            ranks.write(index, contents)
        reports = ranks.run(1.5, 0.5)
        succeed(reports)
        wide = wide_of(problem.dtype)
        wanted, magnitude = np.zeros((problem.m, problem.n), wide), np.zeros((problem.m, problem.n))
        if problem.has_product:
            a, b = values[Matrix.A].astype(wide), values[Matrix.B].astype(wide)
            a, b = 1.5 * op_of(problem.trans_a, a), op_of(problem.trans_b, b)
            wanted += a @ b
            magnitude += np.abs(a) @ np.abs(b)
        if problem.reads_c:
            wanted += 0.5 * values[Matrix.C]
        bound = 40 * (problem.k + 4) * problem.dtype.unit_roundoff * (1 + np.abs(wanted))
        bound += 2.01 * problem.dtype.operand_roundoff * magnitude
        np.testing.assert_array_less(np.abs(ranks.read(at[Matrix.C]) - wanted), bound)
        bodies = schedule.tasks["kind"] != Kind.JOIN
        per_rank = np.bincount(schedule.tasks["rank"][bodies], minlength=schedule.num_ranks)
        assert [report.tasks for report in reports] == per_rank.tolist()
        assert sum(report.copy_bytes for report in reports) == int(schedule.copies()[:, 3].sum())


@pytest.mark.parametrize("dtype", MEASURED, ids=lambda dtype: dtype.name)
@pytest.mark.parametrize("alpha", [0.0, 2.0])
@pytest.mark.parametrize("beta", [0.0, 1.0, 0.5])
def test_an_operand_whose_factor_is_zero_is_not_read(started, dtype, alpha, beta):
    m, n, k = 70, 50, 90
    wide = dtype.accumulator
    build = ScheduleBuilder(1, GemmProblem(m, n, k, dtype), Placement.parse("0,0,0"))
    a = build.buffer(at=0, rows=m, cols=k, dtype=dtype, role=Role.PANEL, ld=m + 3, offset=0)
    b = build.buffer(at=0, rows=k, cols=n, dtype=dtype, role=Role.PANEL, ld=k + 1, offset=0)
    c = build.buffer(at=0, rows=m, cols=n, dtype=wide, role=Role.PANEL, ld=m + 2, offset=0)
    d = build.buffer(at=0, rows=m, cols=n, dtype=dtype, role=Role.PANEL, ld=m + 5, offset=0)
    whole, other = RegionRef(c, 0, 0, m, n), RegionRef(d, 0, 0, m, n)
    reads = [(RegionRef(a, 0, 0, m, k), F.ALPHA, N), (RegionRef(b, 0, 0, k, n), F.ONE, N), (whole, F.BETA, N)]
    last = build.task(Kind.GEMM, build.compute_lane(0), whole, reads)
    build.task(Kind.COMBINE, build.compute_lane(0, 1), other, [(whole, F.ALPHA, N), (other, F.BETA, N)], [last])
    ranks = started(ThreadedRanks, build.build(scheduler="test", grid=(1, 1), tile=0))
    rng = np.random.default_rng(0)
    values = [
        random_values(rng, shape, t) for shape, t in (((m, k), dtype), ((k, n), dtype), ((m, n), wide), ((m, n), dtype))
    ]
    exact = wide_of(dtype)
    va, vb, vc, vd = (value.astype(exact) for value in values)
    product, rounded = np.zeros((m, n), exact), np.zeros((m, n))
    if alpha:
        product += alpha * va @ vb
        rounded += 2.01 * dtype.operand_roundoff * alpha * np.abs(va) @ np.abs(vb)
    else:
        values[0][...] = np.nan
    if beta:
        product += beta * vc
    else:
        values[2][...] = np.nan
        values[3][...] = np.nan
    for index, value in enumerate(values):
        ranks.write(index, value)
    succeed(ranks.run(alpha, beta))
    tolerance = 4 * steps_of(dtype, k) * wide.unit_roundoff
    error = np.abs(ranks.read(c).astype(exact) - product)
    np.testing.assert_array_less(error, tolerance * (1 + np.abs(product)) + rounded)
    combined = (alpha * product if alpha else 0.0) + (beta * vd if beta else 0.0)
    combined = np.broadcast_to(combined, (m, n))
    tolerance += 2 * dtype.unit_roundoff
    error = np.abs(ranks.read(d).astype(exact) - combined)
    np.testing.assert_array_less(error, tolerance * (4 + np.abs(combined)) + alpha * rounded)


def test_single_precision_products_are_strict(started):
    # TF32 keeps 10 bits of the mantissa: its error would be a thousand times the bound.
    m = 256
    build = ScheduleBuilder(1, GemmProblem(m, m, m, DType.f32), Placement.parse("0,0,0"))
    a, b, c = (build.buffer(at=0, rows=m, cols=m, dtype=DType.f32, role=Role.PANEL, offset=0) for _ in range(3))
    whole = [RegionRef(x, 0, 0, m, m) for x in (a, b, c)]
    build.task(Kind.GEMM, build.compute_lane(0), whole[2], [(whole[0], F.ONE, N), (whole[1], F.ONE, N)])
    ranks = started(ThreadedRanks, build.build(scheduler="test", grid=(1, 1), tile=0))
    rng = np.random.default_rng(0)
    va, vb = (rng.random((m, m)).astype(np.float32) for _ in range(2))
    for index, value in enumerate((va, vb, np.full_like(va, np.nan))):
        ranks.write(index, value)
    succeed(ranks.run())
    exact = va.astype(np.float64) @ vb.astype(np.float64)
    assert (np.abs(ranks.read(2) - exact) <= (m + 4) * 2.0**-24 * exact).all()
    assert np.abs(ranks.read(2) / exact - 1).max() < 1e-5


# -- combine and copies --------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (1, 3000), (3000, 1), (7, 701), (2049, 33), (256, 256)])
@pytest.mark.parametrize("dtype", MEASURED, ids=lambda dtype: dtype.name)
def test_combine_sums_weighs_converts_and_rounds_once(started, rows, cols, dtype):
    wide = dtype.accumulator
    build = ScheduleBuilder(1, GemmProblem(rows, cols, 1, dtype), Placement.parse("0,0,0"))
    out = build.buffer(at=0, rows=rows + 2, cols=cols, dtype=dtype, role=Role.PANEL, ld=rows + 5, offset=0)
    parts = [
        build.buffer(at=0, rows=rows, cols=cols, dtype=wide, role=Role.PANEL, ld=rows + i, offset=0) for i in range(4)
    ]
    target = RegionRef(out, 1, 0, rows, cols)
    factors = [F.ONE, F.ALPHA, F.BETA, F.ONE]
    reads = [(RegionRef(part, 0, 0, rows, cols), factor, N) for part, factor in zip(parts, factors, strict=True)]
    build.task(Kind.COMBINE, build.compute_lane(0), target, [*reads, (target, F.BETA, N)])
    ranks = started(ThreadedRanks, build.build(scheduler="test", grid=(1, 1), tile=0))
    rng = np.random.default_rng(1)
    before = random_values(rng, (rows + 2, cols), dtype)
    values = [random_values(rng, (rows, cols), wide) for _ in parts]
    for index, value in enumerate([before, *values]):
        ranks.write(index, value)
    alpha, beta = (1.5 - 0.75j, 0.25j) if dtype.is_complex else (1.5, 0.25)
    succeed(ranks.run(alpha, beta))
    found, number = ranks.read(out), wide_of(dtype)
    assert np.array_equal(found[[0, -1]], before[[0, -1]])
    terms = [f * v.astype(number) for f, v in zip((1.0, alpha, beta, 1.0), values, strict=True)]
    terms.append(beta * before[1:-1].astype(number))
    exact, scale = sum(terms), sum(np.abs(term) for term in terms)
    error = np.abs(found[1:-1].astype(number) - exact)
    # A part of a complex sum has two fused steps per term, and both parts are off by √2 of what one is.
    steps = 16 * of_both_parts(dtype) if dtype.is_complex else 8
    assert (error <= steps * wide.unit_roundoff * scale + 1.01 * dtype.unit_roundoff * np.abs(exact)).all()


@pytest.mark.parametrize("dtype", [DType.c64, DType.c128], ids=lambda dtype: dtype.name)
def test_a_real_factor_of_complex_numbers_makes_no_nan_of_an_infinity(started, dtype):
    build = ScheduleBuilder(1, GemmProblem(4, 4, 1, dtype), Placement.parse("0,0,0"))
    target = RegionRef(build.buffer(at=0, rows=4, cols=4, dtype=dtype, role=Role.PANEL, offset=0), 0, 0, 4, 4)
    build.task(Kind.COMBINE, build.compute_lane(0), target, [(target, F.BETA, N)])
    ranks = started(ThreadedRanks, build.build(scheduler="test", grid=(1, 1), tile=0))
    ranks.write(0, np.full((4, 4), complex(np.inf, 1.0), dtype.numpy))
    succeed(ranks.run(1.0, 2.0))
    assert (ranks.read(0) == complex(np.inf, 2.0)).all()


@pytest.mark.parametrize("dtype", [DType.f16, DType.bf16], ids=lambda dtype: dtype.name)
def test_conversion_to_a_half_type_rounds_as_numpy_does(started, dtype):
    special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65520.0, 1e-8, 3e38, 1 + 2**-9, 1 + 3 * 2**-9])
    bits = np.random.default_rng(0).integers(0, 2**32, 5000, dtype=np.uint32).view(np.float32)
    values = np.concatenate([special.astype(np.float32), bits])[:, None]
    rows = len(values)
    build = ScheduleBuilder(1, GemmProblem(rows, 1, 1, dtype), Placement.parse("0,0,0"))
    out = build.buffer(at=0, rows=rows, cols=1, dtype=dtype, role=Role.PANEL, offset=0)
    part = build.buffer(at=0, rows=rows, cols=1, dtype=DType.f32, role=Role.PANEL, offset=0)
    build.task(Kind.COMBINE, build.compute_lane(0), RegionRef(out, 0, 0, rows, 1),
               [(RegionRef(part, 0, 0, rows, 1), F.ONE, N)])  # fmt: skip
    ranks = started(ThreadedRanks, build.build(scheduler="test", grid=(1, 1), tile=0))
    ranks.write(part, values)
    succeed(ranks.run())
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = (values + np.float32(0)).astype(dtype.numpy)
    found = ranks.read(out)
    same = (found.view(np.uint16) == wanted.view(np.uint16)) | (np.isnan(found) & np.isnan(wanted))
    assert same.all(), (values[~same][:5], found[~same][:5], wanted[~same][:5])


def test_copies_keep_leading_dimensions_and_cross_between_host_and_device(started):
    build = ScheduleBuilder(1, GemmProblem(8, 8, 8, DType.f64), Placement.parse("h,0,h"))
    source = build.buffer(at=Location.host(), rows=40, cols=30, dtype=DType.f64, role=Role.PANEL, ld=47)
    middle = build.buffer(at=0, rows=33, cols=21, dtype=DType.f64, role=Role.PANEL, ld=36, offset=0)
    second = build.buffer(at=0, rows=20, cols=20, dtype=DType.f64, role=Role.PANEL, offset=0)
    target = build.buffer(at=Location.host(), rows=25, cols=26, dtype=DType.f64, role=Role.PANEL, ld=31)
    steps = [
        (RegionRef(middle, 2, 1, 20, 20), RegionRef(source, 5, 7, 20, 20)),
        (RegionRef(second, 0, 0, 20, 20), RegionRef(middle, 2, 1, 20, 20)),
        (RegionRef(target, 3, 4, 20, 20), RegionRef(second, 0, 0, 20, 20)),
    ]
    lanes = [build.copy_lane(0, build.host, 0), build.copy_lane(0, 0, 0), build.copy_lane(0, 0, build.host)]
    last = []
    for lane, (to, of) in zip(lanes, steps, strict=True):
        last = [build.task(Kind.COPY, lane, to, [(of, F.ONE, N)], last)]
    ranks = started(ThreadedRanks, build.build(scheduler="test", grid=(1, 1), tile=0))
    values = np.random.default_rng(0).random((40, 30))
    ranks.write(source, values)
    ranks.write(target, np.full((25, 26), -1.0))
    reports = ranks.run()
    succeed(reports)
    wanted = np.full((25, 26), -1.0)
    wanted[3:23, 4:24] = values[5:25, 7:27]
    assert np.array_equal(ranks.read(target), wanted)
    assert reports[0].copy_bytes == 3 * 20 * 20 * 8


@pytest.mark.parametrize("dtype", [*MEASURED, DType.i8], ids=lambda dtype: dtype.name)
def test_copies_that_transpose_keep_every_bit_and_touch_nothing_else(started, dtype):
    # The last is more than all multiprocessors have at once.
    ranks = started(ThreadedRanks, transposing_copies(dtype, [*SHAPES, (3001, 2999)]))
    wanted = filled(ranks.schedule, ranks.write, 1)
    reports = ranks.run()
    succeed(reports)
    assert all(np.array_equal(bits_of(ranks.read(index)), values) for index, values in enumerate(wanted))
    assert reports[0].copy_bytes == ranks.schedule.copies()[:, 3].sum()


# -- many operations, failures -------------------------------------------------------------------------


def chain(length, ranks):
    """A value handed round between ranks `length` times, one element per hop, each behind a flag."""
    build = ScheduleBuilder(ranks, GemmProblem(1, 1, 1, DType.f64), Placement.parse("0,0,0"))
    rows = length // ranks + 2
    at = [build.buffer(at=r, rows=rows, cols=1, dtype=DType.f64, role=Role.PANEL, offset=0) for r in range(ranks)]
    last = []
    for hop in range(length):
        here, there = hop % ranks, (hop + 1) % ranks
        to = RegionRef(at[there], (hop + 1) // ranks, 0, 1, 1)
        of = RegionRef(at[here], hop // ranks, 0, 1, 1)
        if hop % 5 == 4:
            last = [build.task(Kind.COMBINE, build.compute_lane(here), to, [(of, F.ALPHA, N)], last)]
        else:
            last = [build.task(Kind.COPY, build.copy_lane(here, here, there), to, [(of, F.ONE, N)], last)]
    return build.build(scheduler="test", grid=(1, 1), tile=0), at


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_two_processes_hand_a_value_round_by_flags(processes_with, started, setting):
    schedule, at = chain(400, 2)
    ranks = started(ProcessRanks, schedule, processes_with(setting))
    for call in range(3):
        for buffer in at:
            ranks.write(buffer, np.full((202, 1), np.nan))
        ranks.write(at[0], np.concatenate([np.full((1, 1), 1.0 + call), np.full((201, 1), np.nan)]))
        succeed(ranks.run(alpha=2.0))
        assert ranks.read(at[0])[200, 0] == (1.0 + call) * 2.0**80


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_a_product_of_three_processes_is_right(processes_with, started, setting):
    case = Pushed(m=300, n=290, k=310, chunks=5)
    ranks = started(ProcessRanks, case.build(), processes_with(setting))
    for call in range(2):
        load(case, ranks, seed=call)
        succeed(ranks.run(1.2345, 1.1154))
        assert case.is_right(ranks.schedule, ranks.read(2), 1.2345, 1.1154, call)


@pytest.mark.parametrize("setting", list(SETTINGS))
def test_more_than_five_thousand_operations_on_a_lane(processes_with, started, setting):
    length = 3000
    build = ScheduleBuilder(2, GemmProblem(1, 1, 1, DType.f64), Placement.parse("0,0,0"))
    here = build.buffer(at=0, rows=length + 1, cols=1, dtype=DType.f64, role=Role.PANEL, offset=0)
    there = build.buffer(at=1, rows=length + 1, cols=1, dtype=DType.f64, role=Role.PANEL, offset=0)
    push, back = build.copy_lane(0, 0, 1), build.copy_lane(1, 1, 0)
    order = [
        build.task(
            Kind.COPY, push, RegionRef(there, i, 0, 1, 1), [(RegionRef(here, i, 0, 1, 1), F.ONE, N)]
        )
        for i in range(length)
    ]  # fmt: skip
    for i in range(length):
        build.task(Kind.COPY, back, RegionRef(here, i, 0, 1, 1), [(RegionRef(there, i, 0, 1, 1), F.ONE, N)], [order[i]])
    ranks = started(ProcessRanks, build.build(scheduler="test", grid=(1, 1), tile=0), processes_with(setting))
    values = np.random.default_rng(0).random((length + 1, 1))
    ranks.write(here, values)
    ranks.write(there, np.full_like(values, np.nan))
    reports = ranks.run(timeout_s=60.0)
    succeed(reports)
    assert [report.tasks for report in reports] == [length, length]  # each with a signal or a wait: 6,000 operations
    assert np.array_equal(ranks.read(here), values)


def test_a_refused_product_poisons_the_flags_and_the_next_call_is_right(started):
    case = Pushed(m=64, n=64, k=64, ranks=2, chunks=2)
    ranks = started(ThreadedRanks, case.build())
    good = ranks.ranks[1].executable
    operands = ranks.ranks[1].program.operands.copy()
    first = ranks.ranks[1].program.operations
    gemm = first[first["code"] == Code.GEMM][0]
    operands["ld"][gemm["first_operand"] + 1] = 1  # a leading dimension below the rows: cuBLAS refuses
    spoilt = dataclasses.replace(ranks.ranks[1].program, operands=operands)
    load(case, ranks)
    backend, handed = ranks.ranks[1].backend, ranks.ranks[1]
    ranks.ranks[1].executable = CudaExecutable(
        backend._native,
        spoilt,
        handed.addresses,
        handed.table,
        handed.progress,
        backend._preparation.kernel,
        backend.files,
        "device 0",
    )
    reports = ranks.run(1.0, 1.0)
    assert reports[0].error is None
    error = reports[1].error
    assert isinstance(error, DeviceError)
    assert "CUBLAS_STATUS_INVALID_VALUE" in str(error)
    assert f"task {gemm['task']} (GEMM)" in str(error)
    ranks.ranks[1].executable = good
    load(case, ranks, seed=1)
    succeed(ranks.run(1.2345, 1.1154))
    assert case.is_right(ranks.schedule, ranks.read(2), 1.2345, 1.1154, 1)


def test_a_flag_that_never_comes_is_a_stall_that_names_the_rank(started):
    schedule, at = chain(10, 2)
    ranks = started(ThreadedRanks, schedule)
    ranks.write(at[0], np.zeros((7, 1)))
    rank = ranks.ranks[1]
    report = rank.executable.run(alpha=1.0, beta=0.0, epoch=1, timeout_s=1.0)
    assert isinstance(report.error, StallError)
    assert "of rank 0" in str(report.error)
    # Release the lane by a copy, which loads no kernel: loading one would wait for the lane.
    import cupy

    pinned = cupy.cuda.alloc_pinned_memory(4096)
    words = np.frombuffer(pinned, np.uint32, rank.program.num_flags)
    words[...] = 1 + rank.program.span
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.runtime.memcpyAsync(rank.flags.address, words.ctypes.data, words.nbytes, 1, stream.ptr)
    stream.synchronize()
    cupy.cuda.Device().synchronize()
