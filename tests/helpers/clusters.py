"""Machines of several nodes, and schedules of any problem on them."""

from __future__ import annotations

import random

from tests.helpers.layouts import random_layout
from tests.helpers.planned import plan_several
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import MATRICES, Placement
from uncut_mpi.model.ports import Net
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.schedule import Schedule

NET = Net(10.0, 5e-6, adapters=2)


def cluster(num_nodes: int, each: int, net: Net = NET) -> Machine:
    return Machine.cluster(Machine.uniform(each), num_nodes, net)


def random_schedule(seed: int, most: int = 40) -> tuple[Schedule, Machine]:
    """Return the schedule of any problem, in any memories, on two or three nodes; extents are at most `most`."""
    rng = random.Random(seed)
    machine = cluster(rng.choice((2, 2, 3)), rng.choice((1, 2, 3)))
    m, n, k = (rng.randint(1, most) for _ in range(3))
    dtype = rng.choice((DType.f64, DType.f32, DType.f16))
    problem = GemmProblem(m, n, k, dtype, trans_a=rng.choice("NT"), trans_b=rng.choice("NT"), reads_c=seed % 2 == 0)
    layouts = (random_layout(rng, problem.shape_of(matrix), machine.num_ranks) for matrix in MATRICES)
    placement = Placement(*layouts)
    options = ScheduleOptions(scheduler=rng.choice(("uncut", "kblocks", "auto")))
    private = [at for at in range(3) if rng.random() < 0.2]
    return plan_several(problem, placement, machine.num_ranks, machine, options, private)[0].schedule, machine
