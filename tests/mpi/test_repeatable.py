"""Results are the same in every bit from run to run: of one machine, number of ranks, plan and options."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from tests.helpers.faulty import Disorder, FaultyBackend
from tests.helpers.products import random_matrix
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.options import Blocking

pytestmark = [pytest.mark.host_backend, pytest.mark.mpi(min_size=2)]

LAYOUTS = {
    "parts of k": lambda _: (um.Layout.cols(), um.Layout.rows(), um.Layout.rows()),
    "rows": lambda _: (um.Layout.rows(), um.Layout.cols(), um.Layout.rows()),
    "cyclic": lambda size: (
        um.Layout.block_cyclic(8, 8, (1, size)),
        um.Layout.block_cyclic(5, 8, (size, 1)),
        um.Layout.whole(),
    ),
}
M, N, K = 37, 41, 90


def results(comm, dtype, layouts, options, seed):
    """Return the bits of C on this rank, of several calls in which tasks run in other orders."""
    made = functools.partial(FaultyBackend, disorder=Disorder(seed, pause_s=5e-4))
    found = []
    with um.Session(comm, backend=made, machine=um.Machine.uniform(comm.size), timeout_s=60) as session:
        matrices = []
        for number, (shape, layout) in enumerate(zip(((M, K), (K, N), (M, N)), layouts, strict=True)):
            matrix = session.empty(shape, dtype.name, layout)
            here = np.ix_(*layout.indices(shape, session.rank, num_ranks=session.size))
            matrix.local[...] = random_matrix(*shape, dtype, (3, number))[here]
            matrices.append(matrix)
        first = matrices[2].local.copy()
        with session.plan(*matrices, reads_c=True, options=options) as plan:
            for _ in range(4):
                matrices[2].local[...] = first
                plan.execute(1.2345, 1.1154)
                found.append(matrices[2].local.tobytes())
    return found


@pytest.mark.parametrize("layouts", LAYOUTS)
@pytest.mark.parametrize("dtype", [DType.f64, DType.f32, DType.bf16], ids=lambda one: one.name)
def test_results_are_the_same_whatever_order_tasks_run_in(comm, dtype, layouts):
    for options in (None, um.ScheduleOptions("kblocks", blocking=Blocking(splits=2, block=20))):
        found = [one for seed in (1, 2) for one in results(comm, dtype, LAYOUTS[layouts](comm.size), options, seed)]
        collective_assert(comm, len(set(found)) == 1, f"{options}: {len(set(found))} results")
