"""The follower of the core: what it refuses, what rectangles hold, and the room of products."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable

import numpy as np
import pytest

from tests.helpers.by_hand import ByHand
from tests.helpers.faults import set_rows
from tests.helpers.schedules import random_case
from uncut_mpi import _native
from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import with_ends
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.lower import Code, OperationList, lower, tables_in_core
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Factor, Kind, Matrix, Op, Role, Schedule, expand_ranges
from uncut_mpi.planning.verify import follower_of, verify
from uncut_mpi.planning.verify_lists import verify_spare_rows


def followed(schedule: Schedule) -> str:
    """Return what is said against a schedule."""
    follower = follower_of(schedule)
    try:
        follower.follow(tables_in_core(schedule))
        follower.finish()
    except _native.RuleBroken as broken:
        return str(broken)
    return ""


@pytest.mark.parametrize(
    ("table", "field", "value"),
    [
        ("tasks", "lane", 10**6),
        ("tasks", "lane", -1),
        ("tasks", "first_operand", 10**6),
        ("tasks", "first_operand", -1),
        ("tasks", "first_await", 10**6),
        ("tasks", "num_awaits", -1),
        ("operands", "region", 10**6),
        ("operands", "region", -1),
        ("regions", "buffer", 10**6),
        ("regions", "buffer", -1),
        ("regions", "row", -1),
        ("regions", "cols", 10**6),
        ("regions", "rows", -1),
        ("awaits", "", 10**6),
        ("awaits", "", -1),
    ],
)
def test_tables_that_point_elsewhere_are_refused(table: str, field: str, value: int) -> None:
    schedule = random_case(random.Random(4))
    names = ("tasks", "operands", "regions", "awaits", "buffers", "lanes")
    tables = {name: getattr(schedule, name) for name in names}
    follower_of(schedule).follow(tables_in_core(schedule))
    tables[table] = tables[table].copy()
    (tables[table][field] if field else tables[table])[:] = value
    with pytest.raises(ValueError, match=r"outside its tables|does not exist|leaves its buffer|not earlier"):
        follower_of(schedule).follow(_native.ScheduleTables(*tables.values(), with_ends(schedule.locations)))


def test_what_rectangles_hold_is_what_single_elements_hold() -> None:
    """Random rectangles of C travel through panels; at the end every fragment that is named holds what elements say."""
    extent, named = 11, 0
    whole = (0, 0, extent, extent)
    for seed in range(300):
        rng = random.Random(seed)
        builder = ScheduleBuilder(1, GemmProblem(extent, extent, 0, DType.f64), Placement.parse("0,0,0"))
        for at in range(6):
            role = {"role": Role.USER, "matrix": Matrix(at)} if at < 3 else {"role": Role.PANEL, "offset": at * 1024}
            rows, cols = ((extent, 0), (0, extent))[at] if at < 2 else (extent, extent)
            builder.buffer(at=0, rows=rows, cols=cols, ld=extent if at == 1 else None, dtype=DType.f64, **role)
        # Of each element of C and of the panels: which element of C it holds.
        held = {at: np.full((extent, extent, 2), -1) for at in range(2, 6)}
        held[2][:] = np.moveaxis(np.indices((extent, extent)), 0, -1)
        lane, copies = builder.compute_lane(0), 0
        while copies < 40:
            rows, cols = rng.randint(1, extent), rng.randint(1, extent)
            to, of = (
                (at, rng.randint(0, extent - rows), rng.randint(0, extent - cols), rows, cols)
                for at in (rng.randrange(2, 6), rng.randrange(2, 6))
            )
            source, target = (held[at][row : row + rows, col : col + cols] for at, row, col, _, _ in (of, to))
            if to[0] == of[0] or (source < 0).any():
                continue
            target[:] = source
            builder.task(Kind.COPY, lane, RegionRef(*to), [(RegionRef(*of), Factor.ONE, Op.N)])
            copies += 1
        builder.task(Kind.COMBINE, lane, RegionRef(2, *whole), [(RegionRef(2, *whole), Factor.BETA, Op.N)])
        said = followed(builder.build(scheduler="uncut", grid=(1, 1), tile=0))
        displaced = np.moveaxis(np.indices((extent, extent)), 0, -1) - held[2]
        assert bool(said) == displaced.any(), seed
        if not said:
            continue
        named += 1
        numbers = re.fullmatch(
            r"C \[(\d+):(\d+), (\d+):(\d+)\] ends with the values of elements displaced by (-?\d+) rows and (-?\d+) "
            r"columns; it is written last by <task 40>",
            said,
        )
        assert numbers, said
        top, bottom, left, right, down, across = map(int, numbers.groups())
        assert (displaced[top:bottom, left:right] == (-down, -across)).all(), (seed, said)
    assert named > 200, named


# == rows that products compute beyond their operands ==============================================


def schedule_of(scheduler: str, dtype: DType = DType.f16) -> Schedule:
    """Return a schedule with padding behind panels (203 rows do not fill 64 bytes) and behind the caller's matrices."""
    problem = GemmProblem(203, 203, 203, dtype, trans_b="T", lda=208, ldb=208, ldc=208)
    options = ScheduleOptions(scheduler=scheduler, tile=0 if scheduler == "kblocks" else 70)
    return plan(problem, Placement.parse("0,1,0"), 3, Machine.uniform(3), options).schedule


def lists_of(schedule: Schedule) -> list[OperationList]:
    lowering = lower(schedule)
    return [lowering.rank_list(rank) for rank in range(schedule.num_ranks)]


@pytest.mark.parametrize("dtype", [DType.f16, DType.f64])
@pytest.mark.parametrize("scheduler", ["kblocks", "uncut", "cyclic"])
def test_room_that_lowering_gives_is_proven(scheduler: str, dtype: DType) -> None:
    schedule = schedule_of(scheduler, dtype)
    verify(schedule, lower(schedule))
    assert any(program.operands["spare_rows"].any() for program in lists_of(schedule))


Rule = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
"""Room by regions, buffers, and what lowering gives."""


@pytest.mark.parametrize(
    "wrong",
    [
        lambda regions, buffers, given: np.full(len(regions), 7, np.uint8),
        lambda regions, buffers, given: given + (given > 0),
        lambda regions, buffers, given: np.where(buffers["role"] == Role.USER, 0, buffers["ld"] - buffers["rows"])[
            regions["buffer"]
        ],
        lambda regions, buffers, given: (
            (buffers["ld"] - buffers["rows"])[regions["buffer"]]
            * (regions["row"] + regions["rows"] == buffers["rows"][regions["buffer"]])
        ),
    ],
    ids=["always 7", "one too many", "inside a panel too", "behind the caller's too"],
)
@pytest.mark.parametrize("scheduler", ["kblocks", "uncut"])
def test_a_wrong_rule_of_room_is_found(scheduler: str, wrong: Rule) -> None:
    schedule = schedule_of(scheduler)
    lowering = lower(schedule)
    lists = {}
    for program in lists_of(schedule):
        bodies = schedule.tasks[program.operations["task"][program.operations["code"] <= Code.COMBINE]]
        regions = schedule.operands["region"][expand_ranges(bodies["first_operand"], bodies["num_operands"])]
        spare = wrong(schedule.regions[regions], schedule.buffers, program.operands["spare_rows"])
        lists[program.rank] = set_rows(program, "operands", ..., spare_rows=spare)
    with pytest.raises(ScheduleError, match="has spare rows"):
        verify(schedule, dataclasses.replace(lowering, lists=lists))


def test_room_is_found_wrong_wherever_it_is_one_too_large() -> None:
    lists = lists_of(schedule_of("uncut"))
    for program in lists:
        for at, given in enumerate(program.operands["spare_rows"].tolist()):
            with pytest.raises(ScheduleError, match=f"rank {program.rank}: an operand of task"):
                verify_spare_rows([set_rows(program, "operands", at, spare_rows=given + 1)])
            verify_spare_rows([set_rows(program, "operands", at, spare_rows=given // 2)])


def test_spare_rows_are_the_padding_behind_regions_at_the_end_of_their_panel() -> None:
    build = ByHand()
    panel, user, cache, staging = (
        build.add(0, 5, 3, role=role, ld=ld)
        for role, ld in ((Role.PANEL, 8), (Role.USER, 8), (Role.CACHE, 5), (Role.STAGING, 900))
    )
    rows = [(panel, 0, 5), (panel, 2, 3), (panel, 2, 2), (user, 0, 5), (cache, 0, 5), (staging, 0, 5)]
    for whole, row, extent in rows:
        region = whole._replace(row=row, rows=extent, cols=1)
        build.copy(build.copy_lane(0, 0, 0), region, region)
    spare = lower(build.done()).rank_list(0).operands["spare_rows"]
    assert spare[::2].tolist() == spare[1::2].tolist() == [3, 3, 0, 0, 0, 255]
