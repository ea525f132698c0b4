"""
Copies between nodes, which schedulers plan as any others, become pairs of SEND and RECV.

The halves stand one behind the other, so the pair has one place in the global order. What the copy awaits is dealt to
them: SEND awaits what wrote its region, RECV whatever used the region that it writes, each on its own node. Who awaits
the copy awaits RECV on the node where it arrives, and SEND on the other one, where the region may be overwritten.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from uncut_mpi import _native
from uncut_mpi.errors import ScheduleError, reason
from uncut_mpi.planning.lower import tables_in_core
from uncut_mpi.planning.schedule import Schedule, native_tables


def cross(schedule: Schedule) -> Schedule:
    """
    Return a schedule that does the same, in which no copy goes from node to node: itself, if there is none.

    The owner of a memory sends and receives what lies there. For the host of a node that is the rank that issues the
    copy, if it is on that node; else the rank there that has its place.

    Raises
    ------
    ScheduleError
        If a task awaits one of another node from which it copies nothing.
    """
    if not schedule.locations["node"].any():
        return schedule
    try:
        found = _native.cross(tables_in_core(schedule), schedule.num_ranks)
    except ValueError as error:
        raise ScheduleError(reason(error)) from None
    tables = cast("Sequence[np.ndarray] | None", found)
    if tables is None:
        return schedule
    made: dict[str, Any] = native_tables(*tables)
    return dataclasses.replace(schedule, **made)
