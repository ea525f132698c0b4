"""What is kept with a communicator, as attributes of MPI: it goes when the communicator does, on this rank alone."""

from __future__ import annotations

import atexit
import itertools
from typing import Any

from uncut_mpi.spmd.runtime import MPI

_key: list[int] = []
_numbers = itertools.count()
_kept: dict[int, object] = {}
"""Values by number. Attributes are the numbers: what MPI itself keeps is alive when Python ends."""


def attach(comm: Any, value: object) -> None:
    """Keep a value with a communicator, in the place of another one; its duplicates have none. Local."""
    if not _key:
        _key.append(MPI.Comm.Create_keyval(delete_fn=_forget))
        atexit.register(_kept.clear)
    number = next(_numbers)
    comm.Set_attr(_key[0], number)  # first: an interrupt leaves nothing that no communicator has
    _kept[number] = value


def attached(comm: Any) -> Any:
    """Return the value that is kept with a communicator; None if there is none. Local."""
    if not _key or not isinstance(comm, MPI.Comm) or comm == MPI.COMM_NULL:
        return None
    number = comm.Get_attr(_key[0])
    return None if number is None else _kept.get(number)


def detach(comm: Any) -> None:
    """Keep nothing with a communicator. Local."""
    if attached(comm) is not None:
        comm.Delete_attr(_key[0])


def _forget(_comm: Any, _key: int, number: int) -> None:
    _kept.pop(number, None)
