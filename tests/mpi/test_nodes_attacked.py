"""Messages between nodes that are late, one at a time, with little room: no product waits for ever, all are right."""

from __future__ import annotations

import collections
import random

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers import jobs
from tests.helpers.collective import carried, collective_assert, outcome
from tests.helpers.distributed import check_part, made_of, random_product
from tests.helpers.jobs import MACHINE
from uncut_mpi import Layout
from uncut_mpi.api.lifetime import RANKS_PER_NODE
from uncut_mpi.device.host.executor import HostRun

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.host_backend]


class Delayed:
    """
    A message that begins when those before it, from or to the same rank, are over, and late, and is told late.

    Delays are counted in questions whether it is over, and no time, so that a slow machine changes nothing.
    """

    def __init__(self, begin, queue, before, after):
        self._begin, self._queue, self._before, self._after = begin, queue, before, after
        self._is_over = None
        queue.append(self)

    def __call__(self):
        if self._after < 0:
            return True
        if self._queue[0] is not self:
            return False
        if self._is_over is None:
            if self._before > 0:
                self._before -= 1
                return False
            self._is_over = self._begin()
        if self._is_over():
            self._after -= 1
            if self._after < 0:
                self._queue.popleft()
        return self._after < 0


class Attacked:
    """A `Transport` of `Delayed` messages, by the most questions before one begins and after it is over, each way."""

    def __init__(self, transport, seed, send, receive):
        self._inner, self._rng, self._late = transport, random.Random(seed), {"send": send, "receive": receive}
        self._queues = collections.defaultdict(collections.deque)
        self.name, self.beat, self.listen = transport.name, transport.beat, transport.listen
        self.number = 0

    def send(self, data, rank):
        return self._delayed("send", data, rank)

    def receive(self, data, rank):
        return self._delayed("receive", data, rank)

    def _delayed(self, way, data, rank):
        self.number += 1
        begin, most = getattr(self._inner, way), self._late[way]
        return Delayed(lambda: begin(data, rank), self._queues[way, rank], *(self._rng.randint(0, one) for one in most))


NOW = (0, 0)
ATTACKS = {
    "random delays": lambda rank: ((20, 20), (20, 20)),
    "late receivers": lambda rank: (NOW, (60, 0)),
    "late senders": lambda rank: ((60, 0), NOW),
    "one slow rank": lambda rank: ((80, 40), (80, 40)) if rank == 0 else (NOW, NOW),
}


@pytest.fixture
def attacked(comm, request, monkeypatch):
    """A session with a node for each rank, whose messages are attacked; what is not over after 20 s is a stall."""
    monkeypatch.setenv(RANKS_PER_NODE, "1")  # which helpers look at too
    with um.Session(comm, backend="host", machine=um.Machine.uniform(comm.size), timeout_s=20) as session:
        transport = Attacked(session._backend.transport, comm.rank, *ATTACKS[request.param](comm.rank))
        session._backend.transport = transport
        yield session
    collective_assert(comm, transport.number > 0, "no messages")


@pytest.mark.parametrize("attacked", ATTACKS, indirect=True)
def test_random_products_end_and_are_right_whatever_is_late(comm, attacked):
    wrong = [random_product(attacked, seed) for seed in range(4)]
    collective_assert(comm, not any(wrong), str(wrong))


@pytest.mark.parametrize("attacked", ["late receivers", "one slow rank"], indirect=True)
def test_rings_of_one_slot_hold_what_late_receivers_have_not_taken(comm, attacked):
    blocking = um.Blocking(block=8, slots=1, c_rows=16, c_cols=16, c_slots=1)
    options = um.ScheduleOptions("kblocks", blocking=blocking, device_memory=20_000, host_memory=20_000)
    values = np.random.default_rng(1)
    a_MK, b_KN, c_MN = (values.uniform(-1, 1, shape) for shape in ((60, 70), (70, 66), (60, 66)))
    a, b, c = (
        made_of(attacked, data, layout, memory=memory)
        for data, layout, memory in (
            (a_MK, Layout.rows(), "host"),
            (b_KN, Layout.whole(comm.size - 1), "device"),
            (c_MN, Layout.cols(), "host"),
        )
    )
    for _ in range(2):
        attacked.gemm(a, b, c, beta=0.5, options=options)
        c_MN = a_MK @ b_KN + 0.5 * c_MN
    check_part(comm, c, c_MN, tolerance=1e-12)


@pytest.mark.parametrize("attacked", ["random delays"], indirect=True)
def test_an_error_of_one_rank_ends_all_and_the_next_product_is_right(comm, attacked, monkeypatch):
    step, failures = HostRun._step, ["made up"]

    def broken(*about):
        if failures:
            raise um.DeviceError(failures.pop())
        step(*about)

    a, c = (attacked.empty((24, 24), "f64", Layout.rows()) for _ in range(2))
    a.local[...] = 1.0
    for _ in range(3):
        with monkeypatch.context() as patch:
            if comm.rank == 1:
                failures[:] = ["made up"]
                patch.setattr(HostRun, "_step", broken)
            said = outcome(lambda: attacked.gemm(a, a, c))
        attacked.gemm(a, a, c)
        right = bool((c.local == 24.0).all())
        collective_assert(comm, "made up" in said and right, f"{said}, {right}")


RENDEZVOUS = {
    "MPIR_CVAR_CH4_OFI_EAGER_THRESHOLD": "1",
    "MPIR_CVAR_CH3_EAGER_MAX_MSG_SIZE": "1",
    "UCX_RNDV_THRESH": "1",
    **{f"OMPI_MCA_btl_{by}_eager_limit": "128" for by in ("self", "sm", "tcp", "vader")},
}
"""Has MPICH and Open MPI send nothing before the receiver is there."""


def test_products_end_where_no_message_is_sent_before_its_receiver_is_there(comm, tmp_path):
    program = f"""
import sys
import numpy as np
from mpi4py import MPI
import uncut_mpi as um; W = MPI.COMM_WORLD; {MACHINE}
values = np.random.default_rng(1)
with um.Session(W, backend="host", machine=M, timeout_s=20) as s:
    for m, n, k in ((5, 6, 7), (60, 50, 70), (200, 210, 190)):
        x, y = values.uniform(-1, 1, (m, k)), values.uniform(-1, 1, (k, n))
        a = s.scatter(x if s.rank == 0 else None, um.Layout.rows())
        b = s.scatter(y if s.rank == 1 else None, um.Layout.cols(), 1)
        for _ in range(3):
            c = s.gemm(a, b, out_layout=um.Layout.rows())
        found = s.gather(c)
        assert s.rank or np.allclose(found, x @ y)
    s.barrier()
print("all right", flush=True)
"""
    with carried(comm):
        if comm.rank == 0:
            path = tmp_path / "program.py"
            path.write_text(program)
            status, output, errors = jobs.ended(jobs.start([path], **{RANKS_PER_NODE: "1", **RENDEZVOUS}), 40)
            assert status == 0, output + errors
            assert output.count("all right") == 2, output + errors
