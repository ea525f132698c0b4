"""
Faults to plant in right schedules. Each returns a changed schedule, or None where it cannot be planted.

A fault may happen to be harmless (a dropped await that others imply): `oracle.is_wrong` tells.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any, TypeAlias, TypeVar

import numpy as np

from tests.helpers import oracle
from uncut_mpi.errors import ScheduleError
from uncut_mpi.planning.lower import OperationList
from uncut_mpi.planning.schedule import AWAIT_DTYPE, Factor, Kind, Op, Role, Schedule
from uncut_mpi.planning.verify import verify

Tables = TypeVar("Tables", Schedule, OperationList)
Fault: TypeAlias = Callable[[Schedule, random.Random], "Schedule | None"]


def changed(schedule: Schedule, **tables: np.ndarray) -> Schedule:
    """Return the schedule with some tables replaced."""
    return dataclasses.replace(schedule, **tables)


def set_rows(value: Tables, table: str, at: Any, /, **fields: Any) -> Tables:
    """Return a schedule, or a list of operations, with other values in some rows of a table."""
    rows = getattr(value, table).copy()
    for name, field in fields.items():
        rows[name][at] = field
    return dataclasses.replace(value, **{table: rows})


def drop_await(schedule: Schedule, rng: random.Random) -> Schedule | None:
    return drop_await_of(schedule, rng, np.flatnonzero(schedule.tasks["num_awaits"]))


def drop_await_of(schedule: Schedule, rng: random.Random, waiting: np.ndarray) -> Schedule | None:
    """Let one of some tasks, all of which await others, await one less."""
    tasks = schedule.tasks.copy()
    if not len(waiting):
        return None
    task = int(rng.choice(waiting))
    gone = int(tasks["first_await"][task]) + rng.randrange(int(tasks["num_awaits"][task]))
    tasks["num_awaits"][task] -= 1
    tasks["first_await"][task + 1 :] -= 1
    return changed(schedule, tasks=tasks, awaits=np.delete(schedule.awaits, gone))


def swap_in_lane(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Move a task to the place of its predecessor in the lane, which takes its place in turn."""
    lanes = [np.flatnonzero(schedule.tasks["lane"] == lane) for lane in range(len(schedule.lanes))]
    lanes = [lane for lane in lanes if len(lane) > 1]
    if not lanes:
        return None
    lane = rng.choice(lanes)
    at = rng.randrange(len(lane) - 1)
    first, second = int(lane[at]), int(lane[at + 1])
    order = np.arange(len(schedule.tasks))
    order[[first, second]] = [second, first]
    new_place = np.argsort(order)
    tasks = schedule.tasks[order].copy()
    awaits = [new_place[schedule.awaited(task)] for task in order]
    tasks["first_await"] = np.cumsum([0, *(len(part) for part in awaits[:-1])])
    return changed(schedule, tasks=tasks, awaits=np.concatenate(awaits).astype(AWAIT_DTYPE))


def with_region(schedule: Schedule, operand: int, **fields: int) -> Schedule:
    regions = np.concatenate((schedule.regions, schedule.regions[[schedule.operands["region"][operand]]]))
    with_copy = set_rows(schedule, "operands", operand, region=len(regions) - 1)
    return set_rows(changed(with_copy, regions=regions), "regions", -1, **fields)


def shift_region(schedule: Schedule, rng: random.Random) -> Schedule | None:
    operand = rng.randrange(len(schedule.operands))
    old = schedule.regions[schedule.operands["region"][operand]]
    buffer = schedule.buffers[old["buffer"]]
    choices = [
        {name: int(old[name]) + step}
        for name, extent in (("row", "rows"), ("col", "cols"))
        for step in (-1, 1)
        if 0 <= old[name] + step <= buffer[extent] - old[extent]
    ]
    return with_region(schedule, operand, **rng.choice(choices)) if choices else None


def take_another_tile(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Point an operand at another region of the same shape in memory of the same kind and owner."""
    operand = rng.randrange(len(schedule.operands))
    old = schedule.regions[schedule.operands["region"][operand]]
    kind = ["location", "dtype"]
    like = schedule.buffers[kind][schedule.regions["buffer"]] == schedule.buffers[kind][old["buffer"]]
    like &= (schedule.regions["rows"] == old["rows"]) & (schedule.regions["cols"] == old["cols"])
    others = np.flatnonzero(like & (schedule.regions != old))
    if not len(others):
        return None
    return set_rows(schedule, "operands", operand, region=rng.choice(others))


def reuse_a_buffer_early(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Let two buffers of one rank be one, so that the second use may overtake the first."""
    buffers = schedule.buffers
    pairs = [
        (keep, gone)
        for keep in range(len(buffers))
        for gone in range(len(buffers))
        if keep != gone
        and buffers["role"][keep] != Role.USER
        and buffers["role"][gone] != Role.USER
        and all(buffers[name][keep] == buffers[name][gone] for name in ("location", "dtype"))
        and all(buffers[name][keep] >= buffers[name][gone] for name in ("rows", "cols"))
    ]
    if not pairs:
        return None
    keep, gone = rng.choice(pairs)
    return set_rows(schedule, "regions", schedule.regions["buffer"] == gone, buffer=keep)


def change_a_factor(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """alpha or beta applied twice, never, or to something else."""
    places = []
    for task, record in enumerate(schedule.tasks):
        first = int(record["first_operand"])
        if record["kind"] == Kind.GEMM:
            places += [first + 1, *([first + 3] if record["num_operands"] == 4 else [])]
        elif record["kind"] == Kind.COMBINE:
            places += range(first + 1, first + len(schedule.operands_of(task)))
    if not places:
        return None
    at = rng.choice(places)
    others = [factor for factor in Factor if factor != schedule.operands["factor"][at]]
    return set_rows(schedule, "operands", at, factor=rng.choice(others))


def skip_a_task(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """A copy, a k block or a combination is missing."""
    bodies = np.flatnonzero(schedule.tasks["kind"] != Kind.JOIN)
    return set_rows(schedule, "tasks", rng.choice(bodies), kind=Kind.JOIN, num_operands=0)


def repeat_a_task(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """A k block is summed twice, or C_in fetched again after it was changed."""
    task = rng.randrange(len(schedule.tasks))
    tasks = np.insert(schedule.tasks, task + 1, schedule.tasks[task])
    awaits = schedule.awaits + (schedule.awaits > task).astype(AWAIT_DTYPE)
    return changed(schedule, tasks=tasks, awaits=awaits)


def multiply_another_k_block(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Give a GEMM the inputs of another GEMM of the same rank."""
    gemms = np.flatnonzero(schedule.tasks["kind"] == Kind.GEMM)
    if len(gemms) < 2:
        return None
    task = rng.choice(gemms)
    rank = schedule.tasks["rank"]
    others = [other for other in gemms if other != task and rank[other] == rank[task]]
    if not others:
        return None
    mine, theirs = schedule.tasks["first_operand"][[task, rng.choice(others)]].tolist()
    inputs = schedule.operands["region"][theirs + 1 : theirs + 3]
    return set_rows(schedule, "operands", slice(mine + 1, mine + 3), region=inputs)


def take_an_operand_the_other_way_round(schedule: Schedule, rng: random.Random) -> Schedule | None:
    """Use what a GEMM multiplies, or a COPY transposes, by another op; of more than a row or column."""
    large = (schedule.regions["rows"] > 1) & (schedule.regions["cols"] > 1)
    places = []
    for record in schedule.tasks:
        read = int(record["first_operand"]) + 1
        if record["kind"] == Kind.GEMM:
            places += [read, read + 1]
        elif record["kind"] == Kind.COPY and schedule.operands["op"][read] == Op.T:
            places.append(read)
    places = [place for place in places if large[schedule.operands["region"][place]]]
    if not places:
        return None
    place = rng.choice(places)
    return set_rows(schedule, "operands", place, op=Op.N if schedule.operands["op"][place] == Op.T else Op.T)


FAULTS: tuple[Fault, ...] = (
    drop_await,
    swap_in_lane,
    shift_region,
    take_another_tile,
    reuse_a_buffer_early,
    change_a_factor,
    skip_a_task,
    repeat_a_task,
    multiply_another_k_block,
)


def spoiled(fault: Fault, make: Callable[[random.Random], Schedule], seeds: int) -> int:
    """
    Plant a fault in random schedules and return in how many it did harm.

    The proof has to find it there, and to find nothing in the others; the oracle knows which are which.
    """
    harmful = 0
    for seed in range(seeds):
        rng = random.Random(seed)
        mutant = fault(make(rng), rng)
        if mutant is None:
            continue
        wrong, said = oracle.is_wrong(mutant), ""
        try:
            verify(mutant)
        except ScheduleError as error:
            said = str(error)
        assert bool(wrong) == bool(said), f"seed {seed}: the oracle says {wrong!r}, verify says {said!r}"
        harmful += bool(wrong)
    return harmful
