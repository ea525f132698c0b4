"""Copies that transpose, on a device and in host memory, with all that lies around what they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.schedule import Factor, Kind, Op, Role, Schedule

SHAPES = [(1, 1), (33, 5), (31, 64), (100, 70), (2, 300), (0, 4)]
INSIDE = slice(1, -1), slice(1, -1)


def transposing_copies(dtype: DType, shapes: Sequence[tuple[int, int]] = SHAPES) -> Schedule:
    """Return a schedule in which buffer 2i + 1 gets the inside of buffer 2i, transposed, in all kinds of memory."""
    build = ScheduleBuilder(1, GemmProblem(1, 1, 1, dtype), Placement.parse("0,0,0"))
    for at, lane in ((Location.device(0), build.copy_lane(0, 0, 0)), (Location.host(0), build.host_lane(0))):
        for rows, cols in shapes:
            source, target = (
                RegionRef(
                    build.buffer(at=at, rows=down + 2, cols=along + 2, dtype=dtype, role=Role.STAGING, ld=down + more),
                    1, 1, down, along,
                )
                for down, along, more in ((cols, rows, 7), (rows, cols, 4))
            )  # fmt: skip
            build.task(Kind.COPY, lane, target, [(source, Factor.ONE, Op.T)])
    return build.build(scheduler="test", grid=(1, 1), tile=0)


def bits_of(values: np.ndarray) -> np.ndarray:
    return values.view(f"V{values.dtype.itemsize}")


def filled(schedule: Schedule, write: Callable[[int, np.ndarray], None], seed: int) -> list[np.ndarray]:
    """Write random bits into every buffer, numbers or not, and return what the copies are to make of them."""
    rng = np.random.default_rng(seed)
    contents = []
    for index, record in enumerate(schedule.buffers):
        dtype = DType(int(record["dtype"])).numpy
        shape = int(record["rows"]), int(record["cols"])
        bits = rng.bytes(shape[0] * shape[1] * dtype.itemsize)
        contents.append(np.frombuffer(bits, dtype).reshape(shape).copy())
        write(index, contents[-1])
    for source, target in zip(contents[::2], contents[1::2], strict=True):
        bits_of(target)[INSIDE] = bits_of(source)[INSIDE].T
    return [bits_of(one) for one in contents]
