"""What rank 0 tells the others of a plan: its schedules, and of each what it says of itself."""

from __future__ import annotations

import dataclasses
import itertools
import json
import struct
from collections.abc import Sequence

import numpy as np

from uncut_mpi.api.plans import PlanSummary
from uncut_mpi.model.locations import Space
from uncut_mpi.planning.chunks import Chunks
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import Planned, describe
from uncut_mpi.planning.schedule import Schedule


def encode(several: Sequence[Planned], asked: ScheduleOptions, plan_s: float) -> bytes:
    """
    Return plans as one message: how many, the bytes of each part, then of each its summary and its schedule.

    Parameters
    ----------
    several : sequence of Planned
        The schedules to try, or one.
    asked : ScheduleOptions
        What the caller asked for.
    plan_s : float
        Time it took to plan all of them (s).
    """
    parts: list[bytes] = []
    for planned in several:
        about = dataclasses.asdict(_summary(planned, asked, plan_s, len(several)))
        parts += [json.dumps(about).encode(), planned.schedule.encode()]
    return struct.pack(f"<{1 + len(parts)}Q", len(several), *map(len, parts)) + b"".join(parts)


def encode_chunks(chunks: Chunks) -> bytes:
    """Return as a message of no plans how a product is cut into chunks, which have plans of their own."""
    return struct.pack("<QQ", 0, chunks.axis) + np.array(chunks.edges, "<i8").tobytes()


def decode(data: bytes) -> list[tuple[PlanSummary, Schedule]] | Chunks:
    """Return what a message says: schedules, each with its summary, or chunks."""
    (count,) = struct.unpack_from("<Q", data)
    if count == 0:
        (axis,) = struct.unpack_from("<Q", data, 8)
        return Chunks(axis, tuple(np.frombuffer(data, "<i8", offset=16).tolist()))
    ends = np.cumsum([8 * (1 + 2 * count), *struct.unpack_from(f"<{2 * count}Q", data, 8)]).tolist()
    parts = [data[start:end] for start, end in itertools.pairwise(ends)]
    found = []
    for text, encoded in zip(parts[::2], parts[1::2], strict=True):
        about = json.loads(text)
        about["grid"] = tuple(about["grid"])
        found.append((PlanSummary(**about), Schedule.decode(encoded)))
    return found


def _summary(planned: Planned, asked: ScheduleOptions, plan_s: float, tried: int) -> PlanSummary:
    schedule = planned.schedule
    names = "BAC" if schedule.problem.swapped else "ABC"
    in_host = schedule.softbuf_bytes(Space.HOST).tolist()
    return PlanSummary(
        scheduler=f"auto ({schedule.scheduler})" if asked.scheduler == "auto" else schedule.scheduler,
        grid=schedule.callers_grid,
        splits=schedule.splits,
        tile=schedule.tile,
        how=describe(schedule, planned.options),
        tasks=len(schedule.tasks),
        bytes_by_link=schedule.bytes_by_link(),
        predicted_s=planned.predicted_s,
        plan_s=plan_s,
        digest=schedule.digest(),
        softbuf_bytes=schedule.softbuf_bytes().tolist(),
        staged="".join(sorted(names[matrix] for matrix in planned.staged)),
        tried=tried,
        device_memory=planned.options.device_memory,
        host_bytes=in_host,
        host_memory=planned.options.host_memory if any(in_host) else 0,
    )
