"""Memory in which a plan for GPUs warms up: what its list uses of its own rank's buffers, whatever else there is."""

from __future__ import annotations

import numpy as np

from uncut_mpi.device.cuda.preparation import own_memory
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.schedule import Factor, Kind, Op, Role


def test_buffers_without_an_address_and_others_memory_are_left_out() -> None:
    build = ScheduleBuilder(2, GemmProblem(1, 1, 1, DType.f64), Placement.parse("0,0,0"))
    user = build.buffer(at=0, rows=64, cols=64, dtype=DType.f64, role=Role.USER)
    first, unused, last, peers = (
        build.buffer(at=at, rows=64, cols=cols, dtype=DType.f64, role=Role.PANEL)
        for at, cols in ((0, 3), (0, 64), (0, 5), (1, 64))
    )
    for to in (first, last):
        of = RegionRef(user, 0, 0, 64, 3)
        build.task(Kind.COPY, build.copy_lane(0, 0, 0), RegionRef(to, 0, 0, 64, 3), [(of, Factor.ONE, Op.N)])
    program = lower(build.build(scheduler="test", grid=(1, 1), tile=0)).rank_list(0)
    addresses = np.zeros(5, np.int64)
    assert own_memory(program, addresses) == (0, 0)
    addresses[[user, first, last, peers]] = 1 << 20, 4096, 8192, 256  # as `unused` is not used it has none
    assert own_memory(program, addresses) == (4096, 4096 + 64 * 5 * 8)
    assert unused not in program.buffers_used()
