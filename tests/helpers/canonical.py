"""
A digest of what a schedule does, whatever its encoding: tests find with it that tasks have changed.

Memories and the ends of lanes are named, not numbered; lanes, buffers and regions are spelled out where a task uses
them. The header takes no part.
"""

from __future__ import annotations

import hashlib

from uncut_mpi.model.locations import end_name, location_at
from uncut_mpi.planning.schedule import Kind, LaneKind, Schedule


def canonical_digest(schedule: Schedule) -> str:
    """Return 32 hexadecimal digits that schedules of the same tasks share."""
    digest = hashlib.blake2b(digest_size=16)
    lanes = [_lane(schedule, *lane) for lane in schedule.lanes.tolist()]
    places = [_place(schedule, at) for at in schedule.buffers["location"].tolist()]
    buffers = [
        (place, *(int(record[name]) for name in ("role", "matrix", "dtype", "rows", "cols", "ld", "offset")))
        for place, record in zip(places, schedule.buffers, strict=True)
    ]
    regions = [
        (buffers[buffer], row, col, rows, cols)
        for buffer, row, col, rows, cols in schedule.regions[["buffer", "row", "col", "rows", "cols"]].tolist()
    ]
    for index, task in enumerate(schedule.tasks):
        operands = [
            (regions[region], factor, op)
            for region, factor, op in schedule.operands_of(index)[["region", "factor", "op"]].tolist()
        ]
        awaits = sorted(schedule.awaited(index).tolist())
        what = (Kind(task["kind"]).name, int(task["rank"]), lanes[task["lane"]], int(task["group"]))
        digest.update(repr((what, operands, awaits)).encode())
    return digest.hexdigest()


def _place(schedule: Schedule, at: int) -> str:
    where = location_at(schedule.locations, at)
    return where.space + ("" if where.rank is None else f"{' of' * (where.space == 'host')} {where.rank}")


def _lane(schedule: Schedule, rank: int, kind: int, source: int, destination: int) -> str:
    if kind == LaneKind.COMPUTE:
        return f"{rank} COMPUTE {destination}"
    ends = (end_name(schedule.locations, end).partition(".")[0] for end in (source, destination))  # a host of any node
    return f"{rank} {LaneKind(kind).name} {'→'.join(ends)}"
