"""A part of C: planned, proved and computed, and what is beside it stays as it was."""

import dataclasses
import random

import numpy as np
import pytest

from tests.helpers import interpret
from tests.helpers.faults import set_rows
from tests.helpers.layouts import random_part
from uncut_mpi.errors import ParamError, PlanError, ScheduleError
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.dtypes import MEASURED, DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.part_of_c import PartOfC
from uncut_mpi.model.placement import MATRICES, Placement
from uncut_mpi.model.places import Places
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import TRIANGLES, Kind, Op, Schedule
from uncut_mpi.planning.verify import verify

PLACES = ("0,0,0", "h,h,h", "0,h,1", "rows,cols,cols", "cols,1,h", "h,rows,replicated")


@pytest.mark.parametrize("seed", range(24))
def test_a_part_is_computed_and_nothing_else(seed):
    rng = random.Random(seed)
    ranks, m, n, k = rng.randint(1, 4), rng.randint(1, 40), rng.randint(1, 40), rng.randint(1, 60)
    place = rng.choice(PLACES if ranks > 1 else PLACES[:2])
    problem = GemmProblem(
        m,
        n,
        k,
        rng.choice(MEASURED),
        rng.choice("NT"),
        rng.choice("NT"),
        reads_c=rng.random() < 0.6,
        scales_only=rng.random() < 0.2,
        part=random_part(rng, m, n),
    )
    machine, placement = Machine.uniform(ranks), Places.parse(place).bind(problem, ranks)
    options = ScheduleOptions(rng.choice(("auto", "kblocks")), device_memory=rng.choice((0, 0, 60_000)))
    planned = plan(problem, placement, ranks, machine, options)
    verify(planned.schedule, lower(planned.schedule))
    assert Schedule.decode(planned.schedule.encode()).problem == problem
    assert bound(problem, placement, machine).seconds <= planned.predicted_s * (1 + 1e-9)
    data, order = interpret.random_data(problem, seed), interpret.random_order(planned.schedule, seed)
    assert interpret.mismatch(planned.schedule, data, order) == ""


def test_a_triangle_by_blocks_has_half_of_the_operations():
    whole = GemmProblem(4096, 4096, 512, DType.f64)
    part = PartOfC.lower(4096, 512)
    assert next(part.beside(4096, 4096)) == ((0, 512), (512, 4096))
    assert sum((b - a) * (d - c) for (a, b), (c, d) in part.beside(4096, 4096)) == 7 * 8 // 2 * 512**2
    problem = dataclasses.replace(whole, part=part)
    assert problem.flops / whole.flops == 9 / 16
    machine, placement, options = Machine.uniform(2), Placement.parse("0,0,0"), ScheduleOptions("kblocks")
    triangle = plan(problem, placement, 2, machine, options).schedule
    multiplied = sum(2 * m * n * k for m, n, k in products_of(triangle))
    assert multiplied == problem.flops
    assert part.transposed.rectangles[1] == ((0, 1024), (512, 1024))


@pytest.mark.parametrize(
    ("extent", "rows"),
    [(1, [1]), (2047, [2047]), (2048, [1024] * 2), (8200, [1025] * 8), (16384, [1024] * 16), (40000, [2500] * 16)],
)
def test_rectangles_of_a_triangle_have_rows_enough_to_be_shared(extent, rows):
    assert [bottom - top for (top, bottom), _ in PartOfC.lower(extent).rectangles] == rows


@pytest.mark.parametrize("scales_only", [False, True])
@pytest.mark.parametrize("triangle", ["lower", "lower_real"])
def test_a_diagonal_that_is_not_as_asked_for_is_refused(triangle, scales_only):
    problem = GemmProblem(24, 24, 5, DType.c128, scales_only=scales_only, part=PartOfC.lower(24, triangle=triangle))
    schedule = plan(problem, Placement.parse("0,0,0"), 1, Machine.uniform(1)).schedule
    assert Schedule.decode(schedule.encode()).problem == problem
    verify(schedule)
    written = np.flatnonzero(schedule.operands["op"] == TRIANGLES[triangle])
    other = Op.LOWER_REAL if triangle == "lower" else Op.LOWER
    with pytest.raises(ScheduleError, match="or another diagonal"):
        verify(set_rows(schedule, "operands", written[-1], op=other))
    with pytest.raises(ScheduleError, match="op is unknown"):
        verify(set_rows(schedule, "operands", written[-1], op=len(Op)))


def test_a_bound_counts_what_the_part_uses_and_knows_no_share_of_an_owner():
    part = PartOfC((((0, 100), (0, 50)), ((100, 300), (25, 75))))
    problem = GemmProblem(400, 400, 10, DType.f64, "T", part=part)
    a, b, c = (
        problem.elements_used(one, (0, size), (20, 90)) for one, size in zip(MATRICES, (10, 10, 400), strict=True)
    )
    assert (a, b, c) == (10 * 70, 10 * 55, 100 * 30 + 200 * 50)
    found = bound(problem, Placement.parse("0,0,h"), Machine.uniform(2))
    assert [*found.terms] == ["compute", "host to devices", "devices to host"]


def products_of(schedule: Schedule) -> list[tuple[int, int, int]]:
    """Return rows and columns of what each product writes, and how long its sums are."""
    gemms = schedule.tasks["first_operand"][schedule.tasks["kind"] == Kind.GEMM]
    c, a = (schedule.regions[schedule.operands["region"][gemms + at]] for at in (0, 1))
    return [*zip(c["rows"].tolist(), c["cols"].tolist(), a["cols"].tolist(), strict=True)]


@pytest.mark.parametrize(
    ("rectangles", "said"),
    [
        ((((0, 4), (0, 4)), ((3, 5), (3, 5))), "overlap"),
        ((((2, 2), (0, 4)),), "has no elements"),
        ((((0, 9), (0, 4)),), "are not all in a C of 8×8"),
    ],
)
def test_what_is_no_part_is_refused(rectangles, said):
    with pytest.raises(ParamError, match=said):
        GemmProblem(8, 8, 8, DType.f64, part=PartOfC(rectangles))


def test_uncut_refuses_a_part():
    problem = GemmProblem(8, 8, 8, DType.f64, part=PartOfC.lower(8, 4))
    with pytest.raises(PlanError, match="uncut computes all of C, and nothing else: ask for kblocks or auto"):
        plan(problem, Placement.parse("0,0,0"), 2, Machine.uniform(2), ScheduleOptions("uncut"))
