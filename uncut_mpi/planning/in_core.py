"""The tables of a schedule as the core takes them."""

from __future__ import annotations

import numpy as np

from uncut_mpi import _native
from uncut_mpi.model.locations import with_ends
from uncut_mpi.planning.schedule import Schedule


def tables_in_core(schedule: Schedule) -> _native.ScheduleTables:
    """Return a schedule's tables, which live as long as what is returned."""
    names = ("tasks", "operands", "regions", "awaits", "buffers", "lanes")
    tables = [np.ascontiguousarray(getattr(schedule, name)) for name in names]
    return _native.ScheduleTables(*[*tables, with_ends(schedule.locations)])
