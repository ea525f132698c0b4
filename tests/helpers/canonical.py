"""
A digest of what a schedule does, whatever its encoding: tests find with it that tasks have changed.

Memories and the ends of lanes are named, not numbered; lanes, buffers and regions are spelled out where a task uses
them. The header takes no part.
"""

from __future__ import annotations

import hashlib

from uncut_mpi.planning.schedule import Kind, LaneKind, Schedule, Space


def canonical_digest(schedule: Schedule) -> str:
    """Return 32 hexadecimal digits that schedules of the same tasks share."""
    digest = hashlib.blake2b(digest_size=16)
    lanes = [_lane(*lane) for lane in schedule.lanes.tolist()]
    places = [_place(space, owner) for owner, space in zip(*_owners(schedule), strict=True)]
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


def _owners(schedule: Schedule) -> tuple[list[int], list[int]]:
    return schedule.buffers["owner"].tolist(), schedule.buffers["space"].tolist()


def _place(space: int, owner: int) -> str:
    return f"device {owner}" if space == Space.DEVICE else "host" if owner < 0 else f"host of {owner}"


def _lane(rank: int, kind: int, source: int, destination: int) -> str:
    if kind == LaneKind.COMPUTE:
        return f"{rank} COMPUTE {destination}"
    ends = ({-1: "host", -3: "devices"}.get(end, str(end)) for end in (source, destination))
    return f"{rank} {LaneKind(kind).name} {'→'.join(ends)}"
