"""The Uncut-GEMMs paper's cubes (section III-C1): the largest that fit, and all of the product once."""

from __future__ import annotations

import numpy as np
import pytest

from uncut_mpi.bench.rivals.cubes import EDGE_STEP, cubes, largest_edge
from uncut_mpi.errors import CapacityError, ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.setting import Setting

HOST = Placement.parse("h,h,h")


def softbuf_bytes(edge: int, ranks: int) -> int:
    problem, options = GemmProblem(edge, edge, edge, DType.f64), ScheduleOptions(scheduler="uncut")
    return int(plan(problem, HOST, ranks, Machine.uniform(ranks), options).schedule.softbuf_bytes().max())


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("megabytes", [8, 30, 100])
def test_the_largest_cube_fits_and_the_next_one_does_not(ranks: int, megabytes: int) -> None:
    problem = GemmProblem(9000, 7000, 8000, DType.f64)
    options = ScheduleOptions(device_memory=megabytes * 10**6)
    edge = largest_edge(Setting.of(problem, HOST, ranks, Machine.uniform(ranks), options))
    assert edge % EDGE_STEP == 0
    assert softbuf_bytes(edge, ranks) <= megabytes * 10**6 < softbuf_bytes(edge + EDGE_STEP, ranks)


def test_what_fits_is_one_cube() -> None:
    problem = GemmProblem(900, 700, 800, DType.f64)
    assert largest_edge(Setting.of(problem, HOST, 2, Machine.uniform(2), ScheduleOptions(device_memory=10**9))) == 900
    assert len(cubes(problem, 900)) == 1


def test_cubes_are_all_of_the_product_once_and_those_of_a_block_of_c_follow_one_another() -> None:
    problem = GemmProblem(13, 11, 17, DType.f64)
    seen = np.zeros((13, 11, 17), int)
    blocks = []
    for one in cubes(problem, 5):
        seen[one.rows.start : one.rows.stop, one.cols.start : one.cols.stop, one.k.start : one.k.stop] += 1
        assert one.is_first == (one.k.start == 0)
        blocks.append((one.rows.start, one.cols.start))
    assert (seen == 1).all()
    assert blocks == sorted(blocks, key=lambda at: (at[1], at[0]))
    assert len(blocks) == 3 * 3 * 4


def test_too_little_for_any_cube_and_half_types_are_refused() -> None:
    problem, machine = GemmProblem(900, 900, 900, DType.f64), Machine.uniform(1)
    with pytest.raises(CapacityError, match="needs"):
        largest_edge(Setting.of(problem, HOST, 1, machine, ScheduleOptions(device_memory=10**4)))
    half = GemmProblem(900, 900, 900, DType.f16)
    with pytest.raises(ParamError, match="rounded each time"):
        largest_edge(Setting.of(half, HOST, 1, machine, ScheduleOptions(device_memory=10**6)))
    assert largest_edge(Setting.of(half, HOST, 1, machine, ScheduleOptions())) == 900
