"""What ranks of kblocks do about columns that are not aligned, and when they leave them."""

from __future__ import annotations

import dataclasses

import pytest

from uncut_mpi.model.costs import RowRates
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.parts import Part
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.alignment import Alignment, _with_last_columns, choose_alignment
from uncut_mpi.planning.blocking import steps_of
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Matrix
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.planning.verify import verify

A, B, C = Matrix.A, Matrix.B, Matrix.C
ALL = (A, B, C)


MISALIGNED = {"f64": 0.21, "f32": 0.02, "tf32": 2.03, "f16": 5.96, "bf16": 6.43}
"""Of calibration_2xh200_2026-11-22_18h.json; what ships may change."""


@pytest.fixture(scope="module")
def machine() -> Machine:
    shipped = load_machine("h200-4x")
    shapes = {
        name: dataclasses.replace(shape, misaligned=MISALIGNED[name]) for name, shape in shipped.gemm_shape.items()
    }
    return dataclasses.replace(shipped, gemm_shape=shapes)


def chosen(machine: Machine, problem: GemmProblem, homes: tuple[Matrix, ...], *, sums: bool = True) -> Alignment:
    """The decision of a rank that computes all of C."""
    how = Blocking(first=256, block=2048, growth=2, columns=4, rows=1, order="k")
    steps = steps_of(problem.k, how, far_apart=False)
    part = (range(problem.m), range(problem.n), range(problem.k))
    parts = {
        one: Part((0, rows), (0, cols), Location.device(0), "F", problem.ld_of(one))
        for one in homes
        for rows, cols in [problem.shape_of(one)]
    }
    return choose_alignment(problem, machine, 0, part, parts, steps, may_sum_apart=sums)


@pytest.mark.parametrize(
    ("problem", "homes", "wanted"),
    [
        (GemmProblem(8191, 8191, 8191, DType.f16), ALL, Alignment((A, B), True, 8)),
        (GemmProblem(8191, 8191, 8191, DType.f16), (A,), Alignment((A,), False, 8)),
        (GemmProblem(8191, 8191, 8191, DType.f16), (), Alignment((), False, 8)),
        (GemmProblem(8192, 8191, 8191, DType.tf32, lda=8193), (A, C), Alignment((A,), False, 4)),
        (GemmProblem(8191, 8192, 8192, DType.f64), (C,), Alignment((), True, 2)),
        # k runs along no column; n along those of B, at the end of one column block alone.
        (GemmProblem(8192, 8191, 8191, DType.f16, trans_b="T"), (A, B), Alignment((B,), False, 1)),
        # Aligned, or so small that what has to be done takes longer.
        (GemmProblem(8192, 8191, 8192, DType.f16), ALL, Alignment()),
        (GemmProblem(1001, 1001, 1001, DType.f16), ALL, Alignment()),
        (GemmProblem(2001, 2001, 2001, DType.f64), ALL, Alignment()),
        # Nobody adds rows to a transposed A, so that all the rest would be in vain.
        (GemmProblem(8191, 8192, 8192, DType.f16, trans_a="T"), ALL, Alignment()),
        (GemmProblem(100, 100, 8191, DType.f16, trans_a="T"), ALL, Alignment()),
    ],
)
def test_all_that_is_in_the_way_is_seen_to_or_nothing(machine, problem, homes, wanted):
    assert chosen(machine, problem, homes) == wanted


def test_a_c_that_cannot_be_summed_apart_leaves_the_rest_as_it_is(machine):
    assert chosen(machine, GemmProblem(8191, 8191, 8191, DType.f64), ALL, sums=False) == Alignment()
    assert chosen(machine, GemmProblem(8191, 8191, 8191, DType.f64), (A, B), sums=False).copied == (A, B)


def test_a_machine_that_does_not_say_so_is_not_slower(machine):
    shapes = {name: dataclasses.replace(shape, misaligned=0.0) for name, shape in machine.gemm_shape.items()}
    for other in (dataclasses.replace(machine, gemm_shape=shapes), Machine.uniform(4)):
        assert chosen(other, GemmProblem(8191, 8191, 8191, DType.f16), ALL) == Alignment()


def test_tails_of_further_products_count(machine):
    problem = GemmProblem(3001, 3001, 3001, DType.f16)
    shapes = {name: dataclasses.replace(shape, tail_elements=1e8) for name, shape in machine.gemm_shape.items()}
    assert chosen(machine, problem, ALL) != Alignment()
    assert chosen(dataclasses.replace(machine, gemm_shape=shapes), problem, ALL) == Alignment()


@pytest.mark.parametrize("dtype", [DType.f16, DType.tf32, DType.f64])
@pytest.mark.parametrize("extent", [151, 1001, 2001, 4095, 8191])
@pytest.mark.parametrize(("share", "gain"), [(0.0, 0.7), (0.84, 0.75)], ids=["copies are free", "copies take products"])
def test_what_is_chosen_is_no_slower_than_leaving_it(machine, dtype, extent, share, gain):
    problem = GemmProblem(extent, extent, extent, dtype)
    shapes = {name: dataclasses.replace(shape, copy_share=share) for name, shape in machine.gemm_shape.items()}
    machine = dataclasses.replace(machine, gemm_shape=shapes)
    shapes = {name: dataclasses.replace(shape, misaligned=0.0) for name, shape in machine.gemm_shape.items()}
    careless = dataclasses.replace(machine, gemm_shape=shapes)
    options = ScheduleOptions(scheduler="kblocks", devices=(0,))
    seconds = []
    for planned in (machine, careless):
        schedule = plan(problem, Placement.parse("0,0,0"), 4, planned, options).schedule
        verify(schedule, lower(schedule))
        seconds.append(simulate(schedule, machine).seconds)
    assert seconds[0] <= 1.02 * seconds[1]
    assert extent < 4095 or dtype is DType.f64 or seconds[0] < gain * seconds[1]


def test_what_stays_slow_of_a_transposed_b_is_the_part_with_the_last_columns():
    steps = steps_of(
        4096, Blocking(first=4096, block=4096, growth=2, columns=2, rows=1, order="columns"), far_apart=True
    )
    # Of 1001 columns the last of two blocks is halved twice, at multiples of 64.
    assert _with_last_columns(steps.products, 1001, 8) == pytest.approx(105 / 1001)


def test_what_does_not_fit_with_panels_is_planned_without(machine):
    problem = GemmProblem(70001, 70001, 70001, DType.f64)
    schedule = plan(problem, Placement.parse("0,0,0"), 4, machine, ScheduleOptions(scheduler="kblocks")).schedule
    homes = schedule.buffers[(schedule.buffers["location"] == 0) & (schedule.buffers["offset"] >= 0)]
    assert not (homes["matrix"] == A).any()


def test_what_copies_within_a_device_cost_counts(machine: Machine) -> None:
    problem = GemmProblem(4095, 4096, 512, DType.f64, lda=4095, ldc=4096)
    shapes = {"f64": dataclasses.replace(machine.gemm_shape["f64"], misaligned=0.5)}
    fast, slow = (
        dataclasses.replace(machine, gemm_shape=shapes, row_rates=RowRates(local=((512, share),)))
        for share in (1.0, 0.01)
    )
    assert chosen(fast, problem, (A,)) == Alignment((A,), False, 2)
    assert chosen(slow, problem, (A,)) == Alignment()
