"""
How the ranks of a session signal each other: all their words in host memory, which those of a node share.

Gate, turns, flags of the host, board and abort word have theirs from here. Ranks of other nodes do not see them. They
meet by messages (`CallExchange`), and hear by words that others get on, have left or failed (`Group.on_word`).
"""

from __future__ import annotations

import functools

import numpy as np

from uncut_mpi.device.interface import ProgressBoard
from uncut_mpi.planning.schedule import MAX_LANES
from uncut_mpi.spmd import exchange, meetings
from uncut_mpi.spmd.group import OPENING, SETTLING_S, Group


class Control:
    """
    The words of the ranks, the first thing that they share. Collective.

    Each word is written by one rank, whose row or entry it is in, and read by all; the abort word any rank writes. On
    the board the ranks of a node also count up the rows of other nodes' ranks, when they hear from them. From here on a
    rank that leaves is seen by all who wait for it.

    Attributes
    ----------
    exchange : CallExchange
        By which ranks begin a call: each gives a record to all, or marks that it leaves.
    verdicts : Verdicts
        By which they end a product.
    turns : ndarray of uint64, shape (num_ranks,)
        How far each rank of the node, these first, is in taking its device for a call; zeros at first.
    steps : ndarray of uint64, shape (num_ranks,)
        How many waits each rank has begun, as far as is known here (`Group.count_steps`).
    flags : ndarray of uint32, shape (num_ranks, MAX_LANES)
        How far each lane of the host is, and each that these wait for: `FlagTable.host`.
    told : ndarray of uint64, shape (1,)
        When a rank of the node has told last what all do (ms of the monotonic clock): one tells it for all.
    board : ProgressBoard
        What every rank has finished, and the abort word.
    """

    def __init__(self, group: Group) -> None:
        self._group, size = group, group.size
        fields = [
            ("exchange", np.uint8, (meetings.memory_bytes(group),)),
            ("verdicts", np.uint8, (meetings.verdict_bytes(group),)),
            ("board", np.uint32, ProgressBoard.shape(size)),
            ("turns", np.uint64, (size,)),
            ("steps", np.uint64, (size,)),
            ("told", np.uint64, (1,)),
            ("flags", np.uint32, (size, MAX_LANES)),
        ]
        kind = np.dtype(fields, align=True)
        self._segment = exchange.shared_segment(group, kind.itemsize, "the progress board", timeout_s=SETTLING_S)
        (words,) = self._segment.array(kind, 1)
        try:
            self.exchange = meetings.CallExchange(group, words["exchange"])
            self.verdicts = meetings.Verdicts(group, words["verdicts"])
            self.turns, self.flags, self.steps = words["turns"], words["flags"], words["steps"]
            self.told = words["told"]
            self.board = ProgressBoard(words["board"], group.rank, functools.partial(self._tell, meetings.ABORT))
            group.on_word, group.on_wait = self._hear, functools.partial(self._tell, meetings.STEPS)
            group.count_steps(words["steps"])
            group.check_left = functools.partial(self.exchange.check_left, OPENING)
            group.barrier(OPENING, SETTLING_S)  # all can mark now that they leave
        except BaseException as error:
            if "exchange" in self.__dict__:
                self.exchange.leave(type(error).__name__)
            self.close()
            raise

    def _hear(self, rank: int, word: bytes) -> None:
        """Take note of what a rank tells: in its row that it gets on, where ranks of this node look."""
        if not word:
            self.board.words[rank, 0] += 1
            return
        about, number, text = meetings.WORD.unpack(word)
        if about == meetings.ABORT:
            self.board.note_failure(number)
        elif about == meetings.STEPS:
            self.steps[rank] = max(self.steps[rank], number)
        for one in (self.exchange, self.verdicts):
            if about == one.about:
                one.hear(rank, number, text.rstrip(b"\0").decode())

    def _tell(self, about: int, number: int) -> None:
        """Let ranks of other nodes hear the epoch of a call that fails here, or how many waits this rank has begun."""
        if self._group.num_nodes > 1:
            self._group.tell(meetings.WORD.pack(about, number, b""))

    def reset(self, epoch: int) -> None:
        """Set this rank's flags to the epoch and the abort word to 0, while no call runs. Local."""
        self.board.abort[0] = 0
        self.flags[self._group.rank] = epoch

    def close(self) -> None:
        """Let go of the memory; no call is possible any more. Not collective."""
        self._group.check_left = None
        self._group.on_word, self._group.on_wait = lambda rank, word: None, lambda steps: None
        self._group.count_steps(None)
        for name in {"exchange", "verdicts"} & self.__dict__.keys():
            self.__dict__[name].close()
        # Arrays of the segment would keep it mapped.
        for name in ("exchange", "verdicts", "board", "turns", "flags", "steps", "told"):
            self.__dict__.pop(name, None)
        self._segment.close()
