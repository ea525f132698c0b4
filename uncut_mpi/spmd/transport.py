"""Messages between ranks of different nodes, for executors: begin to send, begin to receive, ask whether it is done."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.runtime import MPI

Columns = tuple[int, int, int]
"""As `device.interface.Columns`, of which this package does not know."""

_TAG: Final = 1
"""Of all messages: two ranks exchange them in one order, which MPI keeps."""


class MpiTransport:
    """
    Point-to-point messages of a session's ranks, of less than 2 GiB each. Not collective; one thread at a time uses it.

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

    def send(self, data: np.ndarray, rank: int, columns: Columns | None = None) -> Callable[[], bool]:
        """
        Begin to send bytes (uint8, contiguous), which are to stay as they are until what is returned is true.

        That is when the other rank receives them: so nothing comes that nobody has asked for, however small it is.

        Parameters
        ----------
        columns : (int, int, int), optional
            Of them, to send columns: bytes of a column, how many columns, and bytes from one to the next.
        """
        return _begin(self._comm.Issend, data, rank, columns)

    def receive(self, data: np.ndarray, rank: int, columns: Columns | None = None) -> Callable[[], bool]:
        """Begin to receive as many bytes as are sent, parameters as of `send`; there when what is returned is true."""
        return _begin(self._comm.Irecv, data, rank, columns)


def _begin(
    begin: Callable[..., MPI.Request], data: np.ndarray, rank: int, columns: Columns | None
) -> Callable[[], bool]:
    if columns is None:
        return begin((data, MPI.BYTE), rank, _TAG).Test
    width, count, pitch = columns
    if count == 1:
        return begin((data, width, MPI.BYTE), rank, _TAG).Test
    kind = MPI.BYTE.Create_hvector(count, width, pitch).Commit()
    request = begin((data, 1, kind), rank, _TAG)
    kind.Free()  # which MPI does when the message is over
    return request.Test
