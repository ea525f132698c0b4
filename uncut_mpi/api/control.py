"""The host memory that the ranks of a session share: where they meet, whose turn a device is, how far each rank is."""

from __future__ import annotations

import functools
import math

import numpy as np

from uncut_mpi.device.interface import ProgressBoard
from uncut_mpi.planning.schedule import MAX_LANES
from uncut_mpi.spmd import agreement, exchange
from uncut_mpi.spmd.group import OPENING, SETTLING_S, Group


class Control:
    """
    The first thing that ranks share: from then on a rank that leaves is seen by those who wait for it. Collective.

    Attributes
    ----------
    exchange : CallExchange
        Where ranks meet, and mark that they leave.
    board : ProgressBoard
        Shows what every rank has finished.
    turns : ndarray of uint64, shape (num_ranks,)
        Zeros, for the order of calls on devices.
    flags : ndarray of uint32, shape (num_ranks, MAX_LANES)
        Those in host memory: `FlagTable.host`.
    """

    def __init__(self, group: Group) -> None:
        self._group, size = group, group.size
        room_bytes, board_shape = agreement.room_bytes(group), ProgressBoard.shape(size)
        words_at = room_bytes + 4 * math.prod(board_shape)
        flags_at = words_at + 2 * 8 * size
        nbytes = flags_at + 4 * size * MAX_LANES
        self._segment = exchange.shared_segment(group, nbytes, "the progress board", timeout_s=SETTLING_S)
        self.exchange = agreement.CallExchange(group, self._segment.array(np.uint8, room_bytes))
        try:
            board = self._segment.array(np.uint32, board_shape, offset_bytes=room_bytes)
            self.turns, steps = self._segment.array(np.uint64, (2, size), offset_bytes=words_at)
            self.board = ProgressBoard(board, group.rank)
            self.flags = self._segment.array(np.uint32, (size, MAX_LANES), offset_bytes=flags_at)
            group.count_steps(steps)
            group.check_left = functools.partial(self.exchange.check_left, OPENING, by_giving_up=False)
            group.barrier(OPENING, SETTLING_S)  # all can mark now that they leave
        except BaseException as error:
            self.exchange.leave(type(error).__name__)
            self.close()
            raise

    def close(self) -> None:
        """Let go of the memory; no call is possible any more. Not collective."""
        self._group.check_left = None
        self._group.count_steps(None)
        # Arrays of the segment would keep it mapped.
        for name in ("exchange", "board", "turns", "flags"):
            self.__dict__.pop(name, None)
        self._segment.close()
