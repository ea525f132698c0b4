"""The host memory that the ranks of a session share: where they meet, whose turn a device is, how far each rank is."""

from __future__ import annotations

import math

import numpy as np

from uncut_mpi.api.gate import Gate
from uncut_mpi.device.interface import ProgressBoard
from uncut_mpi.planning.schedule import MAX_LANES
from uncut_mpi.spmd import agreement, exchange
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.order import DeviceOrder


class Control:
    """
    What orders the calls of a session. Collective.

    Parameters
    ----------
    device_key : str
        Identifies this rank's device.
    arrival_timeout_s : float or None
        How long to wait for the others to begin a call.

    Attributes
    ----------
    gate : Gate
        Opens and closes calls.
    order : DeviceOrder
        Gives devices to calls.
    board : ProgressBoard
        Shows what every rank has finished.
    flags : ndarray of uint32, shape (num_ranks, MAX_LANES)
        Those in host memory: `FlagTable.host`.
    """

    def __init__(self, group: Group, device_key: str, arrival_timeout_s: float | None) -> None:
        self._group, size = group, group.size
        room_bytes, board_shape = agreement.room_bytes(group), ProgressBoard.shape(size)
        words_at = room_bytes + 4 * math.prod(board_shape)
        flags_at = words_at + 2 * 8 * size
        self._segment = exchange.shared_segment(group, flags_at + 4 * size * MAX_LANES, "the progress board")
        room = self._segment.array(np.uint8, room_bytes)
        board = self._segment.array(np.uint32, board_shape, offset_bytes=room_bytes)
        turns, steps = self._segment.array(np.uint64, (2, size), offset_bytes=words_at)
        self.board = ProgressBoard(board, group.rank)
        self.flags = self._segment.array(np.uint32, (size, MAX_LANES), offset_bytes=flags_at)
        self.order = DeviceOrder(group, device_key, turns)
        group.count_steps(steps)
        self.gate = Gate(group, self.order, board, arrival_timeout_s, room)
        self.gate.on_cut_short = self._abort

    def _abort(self, epoch: int) -> None:
        self.board.abort[0] = epoch + 1

    def close(self) -> None:
        """Let go of the memory; no call is possible any more. Not collective."""
        self.order.close()
        self._group.count_steps(None)
        # Arrays of the segment would keep it mapped.
        del self.order, self.board, self.flags
        self.gate.let_go()
        self._segment.close()
