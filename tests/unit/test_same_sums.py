"""With `ScheduleOptions.same_sums` all that sums depend on follows from the product, and `verify` proves it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from uncut_mpi.errors import CapacityError, ParamError, ScheduleError
from uncut_mpi.model.dtypes import ITEMSIZES, DType
from uncut_mpi.model.form import Form
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.part_of_c import PartOfC
from uncut_mpi.model.places import Places
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.buffers import BUFFER_ALIGNMENT
from uncut_mpi.planning.description import describe
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan, remade
from uncut_mpi.planning.same_sums import grid_of_sums
from uncut_mpi.planning.schedule import Kind, Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.verify import held_by_operands, verify

OPTIONS = ScheduleOptions(same_sums=True, blocking=Blocking(c_rows=100, c_cols=128, block=200))
PLACES = ["h,h,h", "0,0,0", "0,h,1", "rows,cols,rows", "cols@host,replicated,block_cyclic(16,16;1,3)"]


def planned(problem, place="0,0,0", ranks=3, options=OPTIONS):
    """Return a plan for a product whose rows and columns are in their own order."""
    placement = Places.parse(place).bind(problem, ranks, in_order=True)
    return plan(problem, placement, ranks, Machine.uniform(ranks), options)


def calls(schedule):
    """Return of each product its parts of C and of k, in their order, and all that a library is told of it."""
    products = np.flatnonzero(schedule.tasks["kind"] == Kind.GEMM)
    held = held_by_operands(schedule)
    parts = [
        held[np.isin(held["task"], products) & (held["operand"] == at)][["row", "col", "rows", "cols"]].tolist()
        for at in range(3)
    ]
    told = []
    for product in products.tolist():
        operands = schedule.operands_of(product)
        region = schedule.regions[operands["region"]]
        buffer = schedule.buffers[region["buffer"]]
        start = buffer["offset"] + (region["row"] + region["col"] * buffer["ld"]) * ITEMSIZES[buffer["dtype"]]
        told.append((operands[["factor", "op"]].tolist(), buffer["ld"].tolist(), (start % BUFFER_ALIGNMENT).tolist()))
    return sorted(zip(*parts, map(str, told), strict=True))


@pytest.mark.parametrize("reads_c", [False, True])
@pytest.mark.parametrize(("dtype", "trans"), [(DType.f64, "NN"), (DType.bf16, "NT"), (DType.c64, "CN")])
def test_products_are_the_same_on_any_ranks_and_in_all_places(dtype, trans, reads_c):
    problem = GemmProblem(370, 290, 700, dtype, *trans, reads_c=reads_c)
    found = []
    for ranks in (1, 3, 5):
        for place in PLACES if ranks == 3 else PLACES[:2]:
            schedule = planned(problem, place, ranks).schedule
            verify(schedule, lower(schedule))
            assert all(one.same_sums for one in lower(schedule).lists.values())
            found.append(calls(schedule))
    assert len(found[0]) == 4 * 3 * 3  # k-blocks are of 256
    assert found.count(found[0]) == len(found)


def test_less_memory_changes_no_product():
    problem = GemmProblem(900, 800, 1500, DType.f64)
    sizes = 0, 3 << 20, 1 << 20
    plans = [planned(problem, options=dataclasses.replace(OPTIONS, device_memory=size)) for size in sizes]
    most, less, least = (one.schedule for one in plans)
    assert most.softbuf_bytes().max() > 2 * less.softbuf_bytes().max() > 4 * least.softbuf_bytes().max()
    assert calls(most) == calls(less) == calls(least)
    with pytest.raises(CapacityError, match="needs"):
        planned(problem, options=dataclasses.replace(OPTIONS, device_memory=1 << 18))


def test_tiles_are_of_extents_and_types_alone():
    for extents, dtype, grid in (
        ((100, 1024, 500), DType.f64, (128, 1024, 512)),
        ((1500, 9000, 2049), DType.f64, (768, 1152, 1280)),
        ((16384, 65536, 16384), DType.f64, (2048, 4096, 2048)),
        ((16384, 65536, 16384), DType.bf16, (2048, 8192, 8192)),
        ((10**6, 10, 10**6), DType.f64, (31360, 128, 31488)),
    ):
        assert grid_of_sums(GemmProblem(*extents, dtype), Blocking()) == grid


def test_the_schedule_says_so_and_is_made_again_by_others():
    made = planned(GemmProblem(370, 290, 700, DType.f64, swapped=True))
    read = Schedule.decode(made.schedule.encode())
    assert read.problem.sums == (128, 100, 256)  # of a C stored by rows
    assert describe(read, made.options) == "tiles of C of 100x128 and k-blocks of 256, the same in every plan"
    assert read.digest() == made.schedule.digest()
    about = Setting.of(
        GemmProblem(370, 290, 700, DType.f64, swapped=True), read.placement, 3, Machine.uniform(3), OPTIONS
    )
    assert remade(about, made.decision).digest() == read.digest()


def test_the_proof_refuses_other_products():
    problem = GemmProblem(100, 128, 768, DType.f64)
    good = planned(problem, ranks=1).schedule
    verify(good)

    def refused(schedule, match):
        with pytest.raises(ScheduleError, match=f"sums shall be the same in every plan, and .* {match}"):
            verify(schedule)

    plain = plan(problem, good.placement, 1, Machine.uniform(1), ScheduleOptions()).schedule
    refused(dataclasses.replace(plain, problem=good.problem), "is not of a tile")
    refused(
        dataclasses.replace(good, problem=dataclasses.replace(good.problem, sums=(100, 64, 256))), "is not of a tile"
    )
    at_home = dataclasses.replace(plain, problem=dataclasses.replace(problem, sums=(100, 128, 768)))
    refused(at_home, "has no panel of the usual shape")
    operands = good.operands.copy()  # the second and third k-block change places
    products = np.flatnonzero(good.tasks["kind"] == Kind.GEMM)[1:3]
    first, second = (good.tasks["first_operand"][products][:, None] + [1, 2]).tolist()
    operands["region"][first], operands["region"][second] = (
        good.operands["region"][second],
        good.operands["region"][first],
    )
    refused(dataclasses.replace(good, operands=operands), "is not the next of its tile")


@pytest.mark.parametrize(
    "given",
    [
        {"tile": 128},
        {"grid": (1, 1)},
        {"tune": 2},
        {"search": "full"},
        {"metric": "pdp"},
        {"blocking": Blocking(splits=2)},
        {"scheduler": "uncut"},
    ],
)
def test_what_would_cut_otherwise_is_refused(given):
    with pytest.raises(ParamError, match=rf"(without (blocking\.)?{next(iter(given))}|does not take same_sums|splits)"):
        ScheduleOptions(same_sums=True, **given).schedulers()


@pytest.mark.parametrize(
    "more",
    [
        {"batch": ((20, 20, 20),) * 2},
        {"part": PartOfC.lower(40)},
        {"forms": (Form("symmetric", "lower"), None)},
    ],
)
def test_batches_triangles_and_forms_are_refused(more):
    with pytest.raises(ParamError, match="same_sums is for one product"):
        planned(GemmProblem(40, 40, 40, DType.f64, **more), ranks=1)


def test_a_c_that_is_only_scaled_is_as_without():
    problem = GemmProblem(40, 40, 40, DType.f64, scales_only=True)
    assert planned(problem).schedule.digest() == planned(problem, options=ScheduleOptions()).schedule.digest()
