"""Results are the same in every bit from run to run: of one machine, number of ranks, plan and options."""

from __future__ import annotations

import collections
import functools
import itertools

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
OPTIONS = None, um.ScheduleOptions("kblocks", blocking=Blocking(splits=2, block=20))
M, N, K = 37, 41, 90


def results(session, dtype, layouts, options):
    """Return the bits of C on this rank, of several calls in which tasks run in other orders."""
    matrices, found = [], []
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
def test_results_are_the_same_whatever_order_tasks_run_in(comm, layouts):
    machine, found = um.Machine.uniform(comm.size), collections.defaultdict(set)
    for seed in (1, 2):
        made = functools.partial(FaultyBackend, disorder=Disorder(seed, pause_s=5e-4))
        with um.Session(comm, backend=made, machine=machine, timeout_s=60) as session:
            for dtype, options in itertools.product((DType.f64, DType.f32, DType.bf16), OPTIONS):
                found[dtype.name, str(options)].update(results(session, dtype, LAYOUTS[layouts](comm.size), options))
    several = {what: len(bits) for what, bits in found.items() if len(bits) > 1}
    collective_assert(comm, not several, f"{several}")
