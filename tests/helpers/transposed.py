"""Copies that transpose, on a device and in host memory, with all that lies around what they write."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tests.helpers.by_hand import ByHand
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.planning.schedule import Op, Schedule

SHAPES = [(1, 1), (33, 5), (31, 64), (100, 70), (2, 300), (0, 4)]
INSIDE = slice(1, -1), slice(1, -1)


def transposing_copies(dtype: DType, shapes: Sequence[tuple[int, int]] = SHAPES) -> Schedule:
    """Return a schedule in which buffer 2i + 1 gets the inside of buffer 2i, transposed, in all kinds of memory."""
    build = ByHand(dtype=dtype)
    for at, lane in ((Location.device(0), build.copy_lane(0, 0, 0)), (Location.host(0), build.host_lane(0))):
        for rows, cols in shapes:
            source, target = (
                build.add(at, down + 2, along + 2, dtype, ld=down + more)._replace(row=1, col=1, rows=down, cols=along)
                for down, along, more in ((cols, rows, 7), (rows, cols, 4))
            )
            build.copy(lane, target, source, op=Op.T)
    return build.done()


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
