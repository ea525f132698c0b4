"""What there is room for beside copies of matrices that are staged, in one step: on devices, and in host memory."""

from __future__ import annotations

import dataclasses

import numpy as np

from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Space, location_table
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning.buffers import BUFFER_ALIGNMENT, COLUMN_ALIGNMENT, panel_bytes, user_pieces, user_table
from uncut_mpi.planning.options import ScheduleOptions, changed
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.staging import PIECES, SHAPE


def beside_copies(setting: Setting) -> tuple[Machine, list[ScheduleOptions]]:
    """
    Return what devices have beside all copies that are staged there, and options whose blocks host memory has room for.

    Copies in host memory are cut by columns. So the least that these take is a column of a block of each of a rank's
    matrices; with several, some are copied while others are used.
    """
    problem, placement, machine, options = setting.problem, setting.placement, setting.machine, setting.options
    item = max(dtype.itemsize for dtype in problem.dtypes)
    users, pieces = user_table(machine.ranks, problem, placement), user_pieces(problem, placement)
    turned = {*pieces["buffer"][pieces["turned"] != 0].tolist()}
    staged = sorted({*setting.private, *turned})
    copied = users[staged]
    of = location_table(machine.ranks)[copied["location"]]
    on_devices, of_ranks = np.zeros(machine.num_ranks, np.int64), np.zeros(machine.num_ranks + 1, np.int64)
    shapes = copied[["dtype", *SHAPE]].tolist()
    sizes = [
        panel_bytes(shape[::-1] if user in turned else shape, DType(code)) + BUFFER_ALIGNMENT  # copies lie straight
        for user, (code, *shape) in zip(staged, shapes, strict=True)
    ]
    there = of["space"] == Space.DEVICE
    np.add.at(on_devices, of["rank"][there], np.array(sizes, np.int64)[there])
    np.add.at(of_ranks, of["rank"][~there], 1)
    beside = dataclasses.replace(machine, memory_bytes=np.maximum(setting.memory_bytes - on_devices, 1))
    if not options.host_memory or not of_ranks.any() or not options.blocking.may_be_in_rings:
        return beside, [options]
    room = options.host_memory // int(of_ranks.max()) - BUFFER_ALIGNMENT
    extents = {
        "c_rows": problem.m,
        "c_cols": problem.n if problem.trans_b != "N" else 0,
        "block": problem.k if problem.trans_a != "N" or problem.trans_b == "N" else 0,
    }
    free = {name: extent for name, extent in extents.items() if extent and not getattr(options.blocking, name)}
    several = []
    for columns in (PIECES, 1):
        longest = room // columns // COLUMN_ALIGNMENT * COLUMN_ALIGNMENT // item
        if longest > 0:
            short = {name: min(longest, extent) for name, extent in free.items()}
            several.append(changed(options, blocking=changed(options.blocking, **short)))
    return beside, several
