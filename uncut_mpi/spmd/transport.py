"""Messages between ranks of different nodes, for executors: begin to send, begin to receive, ask whether it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.runtime import MPI

_MOST_BYTES: Final = 1 << 30
"""Of one message; MPI counts them in 31 bits."""

_TAG: Final = 1
"""Of all messages: two ranks exchange them in one order, which MPI keeps."""


class MpiTransport:
    """
    Point-to-point messages of a session's ranks. Not collective; one thread at a time uses it.

    Nothing is cancelled: whoever begins a message waits for its end, also after an error.

    Attributes
    ----------
    beat, listen : callable
        `Group.beat` and `Group.drive`.
    """

    def __init__(self, group: Group) -> None:
        self._comm, self._hosts = group.messages, group.hosts
        self.beat, self.listen = group.beat, group.drive

    def name(self, rank: int) -> str:
        """Return a rank as an error names it."""
        return f"rank {rank} on {self._hosts[rank]}"

    def send(self, data: np.ndarray, rank: int) -> Callable[[], bool]:
        """Begin to send bytes (uint8, contiguous), which are to stay as they are until what is returned is true."""
        return _all_done([self._comm.Isend((part, MPI.BYTE), rank, _TAG) for part in _parts(data)])

    def receive(self, data: np.ndarray, rank: int) -> Callable[[], bool]:
        """Begin to receive as many bytes as an array has (uint8, contiguous); there when what is returned is true."""
        return _all_done([self._comm.Irecv((part, MPI.BYTE), rank, _TAG) for part in _parts(data)])


def _parts(data: np.ndarray) -> list[np.ndarray]:
    return [data[at : at + _MOST_BYTES] for at in range(0, len(data), _MOST_BYTES)]


def _all_done(requests: list[MPI.Request]) -> Callable[[], bool]:
    def done() -> bool:
        while requests and requests[0].Test():
            del requests[0]
        return not requests

    return done
