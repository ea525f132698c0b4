"""Schedules with lanes of the host: random copies without a product, and products whose tasks await these lanes."""

from __future__ import annotations

import dataclasses
import random

import numpy as np

from tests.helpers.by_hand import ByHand
from tests.helpers.oracle import region
from uncut_mpi.model.locations import Location
from uncut_mpi.planning.builder import RegionRef
from uncut_mpi.planning.schedule import (
    AWAIT_DTYPE,
    LANE_DTYPE,
    NO_SOURCE,
    TASK_DTYPE,
    Kind,
    LaneKind,
    Schedule,
)

ROWS, CELLS, COLS = 5, 4, 3  # of a cell; cells of a buffer, one below the other


def random_copies(rng: random.Random, num_ranks: int, num_tasks: int) -> Schedule:
    """
    Return a schedule whose every copy awaits what wrote its source, and what wrote or read its destination.

    Each rank has a buffer on its device and one in its private host memory, the node one in host memory.
    """
    build = ByHand(num_ranks)
    places = [Location.host(), *map(Location.device, range(num_ranks)), *map(Location.host, range(num_ranks))]
    buffers = [build.add(at, ROWS * CELLS, COLS, ld=ROWS * CELLS + 2).buffer for at in places]
    wrote: dict[tuple[int, int], int] = {}
    read: dict[tuple[int, int], list[int]] = {}
    while num_tasks:
        rank = rng.randrange(num_ranks)
        own_host = (0, num_ranks + 1 + rank)
        reached = (0, rank + 1, *own_host[1:], rng.randrange(num_ranks) + 1)
        to, of = ((rng.choice(own_host if rng.random() < 0.5 else reached), rng.randrange(CELLS)) for _ in range(2))
        if to == of:
            continue
        ends = [places[at].space for at, _ in (of, to)]
        if ends == ["host", "host"]:
            lane = build.host_lane(rank, rng.randrange(2))
        else:
            locations = [build.host if places[at].space == "host" else at - 1 for at, _ in (of, to)]
            lane = build.copy_lane(rank, *locations)
        awaits = [*read.pop(to, []), *(wrote[cell] for cell in (to, of) if cell in wrote)]
        target, source = (RegionRef(buffers[at], ROWS * cell, 0, ROWS, COLS) for at, cell in (to, of))
        wrote[to] = task = build.copy(lane, target, source, awaits)
        read.setdefault(of, []).append(task)
        num_tasks -= 1
    return build.done()


def contents(schedule: Schedule, seed: int) -> list[np.ndarray]:
    """Return random contents of every buffer."""
    rng = np.random.default_rng(seed)
    return [rng.random((int(one["rows"]), int(one["cols"]))) for one in schedule.buffers]


def copied(schedule: Schedule, memory: list[np.ndarray]) -> list[np.ndarray]:
    """Return what contents become, one task after the other."""
    memory = [one.copy() for one in memory]
    for task in range(len(schedule.tasks)):
        refs = [region(schedule, at) for at in schedule.operands_of(task)["region"]]
        to, of = (memory[one.buffer][one.row : one.row + one.rows, one.col : one.col + one.cols] for one in refs)
        to[...] = of
    return memory


def joined_by_hosts(schedule: Schedule, rng: random.Random) -> Schedule:
    """
    Return a schedule that does the same, whose every task awaits a JOIN on a lane of some rank's host instead.

    On several nodes messages stay as they are, and a JOIN is of the rank of the task.
    """
    ranks, alone = schedule.num_ranks, schedule.locations["node"].max() == 0
    lanes = [(rank, LaneKind.HOST, NO_SOURCE, 0) for rank in range(ranks)]
    tasks: list[tuple[int, ...]] = []
    awaits: list[int] = []
    number: list[int] = []  # of each task in the new order
    for task, record in enumerate(schedule.tasks.tolist()):
        awaited = [number[other] for other in schedule.awaited(task).tolist()]
        if awaited and record[0] not in (Kind.SEND, Kind.RECV):
            rank = rng.randrange(ranks) if alone else record[3]
            lane = len(schedule.lanes) + rank
            tasks.append((Kind.JOIN, 0, 0, rank, lane, -1, 0, len(awaits), len(awaited)))
            awaits += awaited
            awaited = [len(tasks) - 1]
        number.append(len(tasks))
        tasks.append((*record[:7], len(awaits), len(awaited)))
        awaits += awaited
    return dataclasses.replace(
        schedule,
        tasks=np.array(tasks, TASK_DTYPE),
        awaits=np.array(awaits, AWAIT_DTYPE),
        lanes=np.concatenate((schedule.lanes, np.array(lanes, LANE_DTYPE))),
    )
