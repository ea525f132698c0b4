"""Results are the same in every bit from run to run: of one machine, number of ranks, plan and options."""

from __future__ import annotations

import collections
import functools
import itertools

import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from tests.helpers.distributed import made_of, on_host
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


def results(session, dtype, layouts, options, times=1):
    """Return the bits of C on this rank, of several calls in which tasks run in other orders."""
    m, n, k = M * times, N * times, K * times
    operands = zip(((m, k), (k, n), (m, n)), layouts, strict=True)
    a, b, c = (
        made_of(session, random_matrix(*shape, dtype, (3, number)), layout)
        for number, (shape, layout) in enumerate(operands)
    )
    first, found = c.local.copy(), []
    with session.plan(a, b, c, reads_c=True, options=options) as plan:
        for _ in range(4):
            c.local[...] = first
            plan.execute(1.2345, 1.1154)
            found.append(on_host(c.local).tobytes())
    return found


def check_repeatable(comm, sessions, layouts, dtypes, times=1):
    """Fail if sessions, or calls of one, have other bits of the same products."""
    found = collections.defaultdict(set)
    for opened in sessions:
        with opened() as session:
            for dtype, options in itertools.product(dtypes, OPTIONS):
                bits = results(session, dtype, LAYOUTS[layouts](comm.size), options, times)
                found[dtype.name, str(options)].update(bits)
    several = {what: len(bits) for what, bits in found.items() if len(bits) > 1}
    collective_assert(comm, not several, f"{several}")


@pytest.mark.parametrize("layouts", LAYOUTS)
def test_results_are_the_same_whatever_order_tasks_run_in(comm, layouts):
    def opened(seed):
        made = functools.partial(FaultyBackend, disorder=Disorder(seed, pause_s=5e-4))
        return um.Session(comm, backend=made, machine=um.Machine.uniform(comm.size), timeout_s=60)

    sessions = [functools.partial(opened, seed) for seed in (1, 2)]
    check_repeatable(comm, sessions, layouts, (DType.f64, DType.f32, DType.bf16))
