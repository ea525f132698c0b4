"""Buffers as address ranges: the caller's matrices as stated, SoftBuf buffers apart."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import ITEMSIZES, DType
from uncut_mpi.model.locations import NOBODY, location_index
from uncut_mpi.model.parts import Part
from uncut_mpi.model.placement import MATRICES
from uncut_mpi.planning.buffers import pieces_of
from uncut_mpi.planning.schedule import Matrix, Role, Schedule, buffer_bytes


def verify_memory(schedule: Schedule) -> None:
    """
    Prove that no two buffers of ours share memory, and that the caller's are the placement's parts of A, B and C.

    Raises
    ------
    ScheduleError
        Naming the buffers.
    """
    _verify_user_buffers(schedule)
    _verify_softbuf(schedule)


def _verify_user_buffers(schedule: Schedule) -> None:
    problem, buffers = schedule.problem, schedule.buffers
    users = np.flatnonzero(buffers["role"] == Role.USER)
    nobodys = users[buffers["matrix"][users] == Matrix.NONE]
    if len(nobodys):
        raise ScheduleError(f"buffer {nobodys[0]} is the caller's but belongs to no matrix")
    order = np.argsort(schedule.pieces["buffer"], kind="stable")
    first = np.searchsorted(schedule.pieces["buffer"][order], np.arange(len(buffers) + 1))
    for matrix in MATRICES:
        own = users[buffers["matrix"][users] == matrix].tolist()
        parts = schedule.placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix))
        if len(own) > len(parts) == 1:
            raise ScheduleError(f"buffers {own[0]} and {own[1]} are both the caller's {matrix.name}")
        missing = dict[tuple[int, int], list[Part]]()  # by where they begin
        for part in parts:
            missing.setdefault((part.rows[0], part.cols[0]), []).append(part)
        for at in own:
            its = order[first[at] : first[at + 1]]
            _verify_user_buffer(schedule, at, matrix, schedule.pieces[its], missing)
        left = next((part for some in missing.values() for part in some), None)
        if left is not None and matrix is Matrix.C and problem.m and problem.n:
            what = "" if len(parts) == 1 else f", rows {left.rows} and columns {left.cols}"
            raise ScheduleError(f"no buffer is the caller's C{what}")
    strange = schedule.pieces["buffer"][~np.isin(schedule.pieces["buffer"], users)]
    if len(strange):
        raise ScheduleError(f"a piece of the caller's matrices is in buffer {strange[0]}, which is not the caller's")


def _verify_user_buffer(
    schedule: Schedule, at: int, matrix: Matrix, pieces: np.ndarray, missing: Mapping[tuple[int, int], list[Part]]
) -> None:
    """Check one buffer by the pieces that it has, and that it is one of some parts, which is taken out of them."""
    where, _, _, dtype, _, rows, cols, ld, offset = schedule.buffers[at].tolist()
    what = f"buffer {at} is the caller's {matrix.name}"
    top, left = pieces[["top", "left"]][0].tolist() if len(pieces) else (0, 0)
    same = missing.get((top, left), [])
    if not same and len(pieces):
        raise ScheduleError(f"{what} but holds a piece at row {top} and column {left}, where no part of it is left")
    here = [part for part in same if location_index(part.location, schedule.ranks) == where]
    part = next((part for part in here if part.ld == ld), next(iter(here or same), None))
    if part is None or len(pieces) != part.count:
        raise ScheduleError(f"{what} but there are {len(pieces)} pieces that say what it holds")
    if not here:
        raise ScheduleError(f"{what} but does not lie at {part.location}")
    shape = part.stored_shape
    wanted = schedule.problem.dtypes[matrix]
    if ((rows, cols), ld, dtype) != (shape, part.ld, wanted):
        raise ScheduleError(
            f"{what} but has shape {rows}×{cols}, leading dimension {ld} and type {DType(dtype).name}, not "
            f"{shape[0]}×{shape[1]}, {part.ld} and {wanted.name}"
        )
    wanted_pieces = pieces_of([part])
    wanted_pieces["buffer"] = at
    if not np.array_equal(pieces, wanted_pieces):
        raise ScheduleError(f"{what} but its piece is not all of it, or not turned as it is")
    if offset != -1:
        raise ScheduleError(f"{what} but has an offset in a SoftBuf")
    same.remove(part)


def _verify_softbuf(schedule: Schedule) -> None:
    buffers = schedule.buffers
    own = np.flatnonzero(buffers["role"] != Role.USER)
    table = buffers[own]
    for wrong, what in (
        (table["offset"] < 0, "has no place in a SoftBuf"),
        (
            schedule.in_host()[own] & ((table["role"] != Role.STAGING) | (schedule.owners()[own] == NOBODY)),
            "is not the caller's, yet not in a device's SoftBuf, nor is it staging in a rank's private host memory",
        ),
        (table["offset"] % ITEMSIZES[table["dtype"]] != 0, "does not start at a multiple of its element size"),
    ):
        if wrong.any():
            raise ScheduleError(f"buffer {int(own[np.argmax(wrong)])} {what}")
    extent = buffer_bytes(table)
    own, table, extent = own[extent > 0], table[extent > 0], extent[extent > 0]
    order = np.lexsort((table["offset"], table["location"]))
    memory, start = table["location"][order], table["offset"][order]
    stop = start + extent[order]
    clash = (memory[1:] == memory[:-1]) & (start[1:] < stop[:-1])
    if clash.any():
        at = int(np.argmax(clash))
        first, second = int(own[order[at]]), int(own[order[at + 1]])
        raise ScheduleError(
            f"buffers {first} and {second} overlap in the SoftBuf of rank {schedule.owners()[first]}: "
            f"bytes [{start[at]}, {stop[at]}) and [{start[at + 1]}, {stop[at + 1]})"
        )
