"""
Matrices that cannot be used where they are: a copy of them is, in memory of ours beside them.

CUDA IPC exports no stream-ordered pool and no managed memory, so that peers cannot open them. Host memory that CUDA
cannot page-lock is for lanes of the host alone, for no device and no message to another node. Where a schedule lets
others use such a matrix, this pass puts a buffer of ours in its place, in the owner's SoftBuf in the same kind of
memory. The owner copies what they read into it, and what they wrote of C out of it. It does so by tasks like any
others: what these await is proved, and they run beside the rest. Copies within host memory are on a lane of the host.

The core (``csrc/staging.cpp``) goes through the schedule task by task and adds the copies. There is one for each region
that others use, so a task that reads awaits its own region only. Where host memory has no room for all of a matrix, its
buffer is a ring. What others use comes into its next columns, and stays there until these are needed.

A part of a matrix may be stored the other way round than the matrix (order "C"). Schedulers have it as it would be
else (`Placement.straight`), and that is how it is in a buffer of ours, which everybody uses, the owner too. The copies
transpose it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import CapacityError
from uncut_mpi.model.dtypes import ITEMSIZES, DType
from uncut_mpi.model.locations import Space, in_host, location_table
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.planning.buffers import (
    BUFFER_ALIGNMENT,
    COLUMN_ALIGNMENT,
    Buffers,
    panel_bytes,
    user_pieces,
    user_table,
)
from uncut_mpi.planning.lower import tables_in_core
from uncut_mpi.planning.options import ScheduleOptions, changed
from uncut_mpi.planning.schedule import NO_SOURCE, LaneKind, Matrix, Role, Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.units import bytes_text

MOST_RINGS: Final = 8
"""So many rings of a rank have lanes of their own: each is a queue of its worker, and a rank has not many."""

SHAPE: Final = ["rows", "cols"]

PIECE_BYTES: Final = 32 << 20
PIECES: Final = 4
MANY_PIECES: Final = 64
"""
What goes through a ring is copied in pieces of so many bytes at most, so that the ring has room for `PIECES` of them.

They are longer where it has room for `MANY_PIECES` all the same: so a schedule has fewer tasks.
"""

MOST_PIECES: Final = 500_000
"""More copies are a mistake in the amount of memory."""


class TooManyPiecesError(CapacityError):
    """Copies would go through so little host memory that there were more than `MOST_PIECES` tasks."""


def piece_bytes(room: int) -> int:
    """Return how much is copied at a time through a ring of so many bytes."""
    return min(max(PIECE_BYTES, room // MANY_PIECES), room // PIECES)


def used_by_others(schedule: Schedule, users: Collection[int]) -> tuple[int, ...]:
    """
    Return those of some user buffers that others use than their owner's device, or its worker in host memory.

    What a copy has on another node is one of these others.
    """
    if not users:
        return ()
    none_turned = np.zeros(len(schedule.buffers), np.uint8)
    used = _native.Staging(tables_in_core(schedule), none_turned, schedule.problem.reads_c).used_by_others
    return tuple(sorted(user for user in users if used[user]))


def stage(schedule: Schedule, users: Collection[int], setting: Setting) -> Schedule:
    """
    Return a schedule that does the same, in which none but those who can touch some of the caller's buffers.

    Parameters
    ----------
    schedule : Schedule
        What is to be done.
    users : collection of int
        As of `used_by_others`.
    setting : Setting
        Where matrices live and how they are stored, which the schedule has as `Placement.straight` says. It says too
        which of them lie in files, and what copies may take on devices and (`host_memory`) of host memory.

    Raises
    ------
    CapacityError
        If it has not.
    """
    placement, room, files = setting.placement, setting.options.host_memory, setting.files
    made = _as_stored(schedule, placement)
    turned = np.zeros(len(schedule.buffers), np.uint8)
    turned[made.pieces["buffer"]] = made.pieces["turned"]
    core = _native.Staging(tables_in_core(schedule), turned, schedule.problem.reads_c)
    meant = {*users, *np.flatnonzero(turned).tolist()}
    moved = [at for at, used in enumerate(core.used_by_others) if used and at in meant]
    pieces = bytes_of_pieces(schedule.buffers, schedule.locations, moved, room)
    if pieces:
        items = ITEMSIZES[schedule.buffers["dtype"]].tolist()
        _check_number(core.divide([pieces.get(at, 0) // item for at, item in enumerate(items)]), len(schedule.tasks))
    columns = _columns_of_rings(schedule, core, pieces, room)
    buffers, stand_ins, owners, of_hosts = Buffers.of(made), [], schedule.owners(), schedule.in_host()
    with_lanes = {*columns, *files}
    for user in moved:
        at, matrix = int(schedule.buffers["location"][user]), Matrix(int(schedule.buffers["matrix"][user]))
        rows, cols = schedule.buffers[SHAPE][user].tolist()
        shape = (core.rows[user], columns[user]) if user in columns else (rows, cols)
        ours = buffers.add(at, shape, schedule.problem.dtypes[matrix], matrix, Role.STAGING)
        # What goes through rings or files has lanes of its own in and out.
        numbers = [1 + 2 * (user % MOST_RINGS), 2 + 2 * (user % MOST_RINGS)] if user in with_lanes else [0, 0]
        owner, of_host = int(owners[user]), bool(of_hosts[user])
        lane_in, lane_out = (
            (owner, int(LaneKind.HOST), NO_SOURCE, number) if of_host else (owner, int(LaneKind.COPY), at, at)
            for number in numbers
        )
        stand_ins.append((user, ours, columns.get(user, 0), lane_in, lane_out))
    setting.check_capacity(buffers.arena_bytes)
    table = buffers.table()
    table["medium"][[*files]] = 1
    about = {name: getattr(schedule, name) for name in ("scheduler", "grid", "splits", "tile")}
    return setting.schedule(table, core.run(schedule.num_ranks, stand_ins), **about)


def bytes_of_pieces(
    buffers: np.ndarray, locations: np.ndarray, moved: Sequence[int], host_memory: int
) -> dict[int, int]:
    """Return those of some buffers (numbers) that go through rings, and how much is copied at a time."""
    taken: dict[int, dict[int, int]] = {}  # of each rank
    for user in moved:
        at, code, *shape = buffers[["location", "dtype", *SHAPE]][user].tolist()
        if in_host(locations, at):
            of_rank = taken.setdefault(int(locations["rank"][at]), {})
            of_rank[user] = panel_bytes(shape, DType(code)) + BUFFER_ALIGNMENT
    return {
        user: piece_bytes(host_memory // len(its))
        for its in taken.values()
        for user in its
        if 0 < host_memory < sum(its.values())
    }


def _check_number(tasks: int, before: int) -> None:
    """Check the number of tasks with copies in pieces, `before` of them without."""
    if tasks <= MOST_PIECES:
        return
    whole = before > MOST_PIECES  # however long they are
    more = f"let them use {-(-tasks // MOST_PIECES)} times as much (host_memory)"
    mend = "ask for kblocks or auto, which cut such products" if whole else more
    raise TooManyPiecesError(
        f"{tasks} copies of matrices in files, or in memory that no device reaches, would go through the "
        f"host memory that ranks may use for them, and {MOST_PIECES} are the most: {mend}"
    )


def _columns_of_rings(
    schedule: Schedule, core: _native.Staging, users: Collection[int], host_memory: int
) -> dict[int, int]:
    """Return how many columns the rings of some buffers have."""
    owners = schedule.owners()
    column_bytes: dict[int, int] = {}
    whole: dict[int, dict[int, int]] = {}
    least: dict[int, dict[int, int]] = {}
    for user in users:
        code, *shape = schedule.buffers[["dtype", *SHAPE]][user].tolist()
        owner, dtype = int(owners[user]), DType(code)
        column_bytes[user] = panel_bytes((core.rows[user], 1), dtype)
        whole.setdefault(owner, {})[user] = panel_bytes(shape, dtype) + BUFFER_ALIGNMENT
        least.setdefault(owner, {})[user] = column_bytes[user] * core.cols[user] + BUFFER_ALIGNMENT
    columns = {}
    for owner, of_all in whole.items():
        given = _shared_room(of_all, least[owner], host_memory, owner)
        columns.update({user: (given[user] - BUFFER_ALIGNMENT) // column_bytes[user] for user in of_all})
    return columns


def _shared_room(whole: Mapping[int, int], least: Mapping[int, int], room: int, owner: int) -> dict[int, int]:
    """
    Return how many bytes the copies of each matrix of a rank may take in host memory.

    Parameters
    ----------
    whole, least : mapping of int to int
        By buffer the bytes of all of it, and of the largest region that a task uses.
    room : int
        For all together (bytes).
    owner : int
        The rank.

    Raises
    ------
    CapacityError
        If there is less room than the largest regions take.
    """
    needed = sum(least.values())
    if needed > room:
        raise CapacityError(
            f"rank {owner} may use {bytes_text(room)} of host memory for copies of matrices in files, or in memory "
            f"that no device reaches, and the smallest of them take {bytes_text(needed)}: let it use some times as "
            "much (host_memory), or ask for smaller blocks (blocking.block, blocking.c_rows, blocking.c_cols)"
        )
    more = {at: max(0, whole[at] - least[at]) for at in whole}
    left = min(room - needed, sum(more.values()))
    return {at: least[at] + more[at] * left // max(1, sum(more.values())) for at in whole}


def _as_stored(schedule: Schedule, placement: Placement) -> Schedule:
    """Return a schedule whose buffers of the caller, and what they hold, are as a placement says."""
    if placement == schedule.placement:
        return schedule
    users = user_table(schedule.ranks, schedule.problem, placement)
    return dataclasses.replace(
        schedule,
        placement=placement,
        buffers=np.concatenate((users, schedule.buffers[len(users) :])),
        pieces=user_pieces(schedule.problem, placement),
    )


def beside_copies(setting: Setting) -> tuple[Machine, list[ScheduleOptions]]:
    """
    Return what devices have beside all copies that are staged there, and options whose blocks host memory has room for.

    Copies in host memory are cut by columns. So the least that these take is a column of a block of each of a rank's
    matrices; with several, some are copied while others are used.
    """
    problem, placement, machine, options = setting.problem, setting.placement, setting.machine, setting.options
    item = max(dtype.itemsize for dtype in problem.dtypes)
    users, pieces = user_table(machine.ranks, problem, placement), user_pieces(problem, placement)
    turned = {*pieces["buffer"][pieces["turned"] != 0].tolist()}
    staged = sorted({*setting.private, *turned})
    copied = users[staged]
    of = location_table(machine.ranks)[copied["location"]]
    on_devices, of_ranks = np.zeros(machine.num_ranks, np.int64), np.zeros(machine.num_ranks + 1, np.int64)
    shapes = copied[["dtype", *SHAPE]].tolist()
    sizes = [
        panel_bytes(shape[::-1] if user in turned else shape, DType(code)) + BUFFER_ALIGNMENT  # copies lie straight
        for user, (code, *shape) in zip(staged, shapes, strict=True)
    ]
    there = of["space"] == Space.DEVICE
    np.add.at(on_devices, of["rank"][there], np.array(sizes, np.int64)[there])
    np.add.at(of_ranks, of["rank"][~there], 1)
    beside = dataclasses.replace(machine, memory_bytes=np.maximum(setting.memory_bytes - on_devices, 1))
    if not options.host_memory or not of_ranks.any() or not options.blocking.may_be_in_rings:
        return beside, [options]
    room = options.host_memory // int(of_ranks.max()) - BUFFER_ALIGNMENT
    extents = {
        "c_rows": problem.m,
        "c_cols": problem.n if problem.trans_b != "N" else 0,
        "block": problem.k if problem.trans_a != "N" or problem.trans_b == "N" else 0,
    }
    free = {name: extent for name, extent in extents.items() if extent and not getattr(options.blocking, name)}
    several = []
    for columns in (PIECES, 1):
        longest = room // columns // COLUMN_ALIGNMENT * COLUMN_ALIGNMENT // item
        if longest > 0:
            short = {name: min(longest, extent) for name, extent in free.items()}
            several.append(changed(options, blocking=changed(options.blocking, **short)))
    return beside, several
