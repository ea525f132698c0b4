"""The probes of a calibration on the CUDA executor, with a fake driver: it takes all of them and moves their data."""

from __future__ import annotations

import numpy as np
import pytest

from tests.dev.fake import FakeCluster
from uncut_mpi.calibration import probes
from uncut_mpi.calibration.litmus import Exchange
from uncut_mpi.calibration.probes import Areas, GemmProbe, Transfers
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.schedule import Kind

AREAS = Areas(3, 1 << 16, 1 << 15)


PROBES = {
    "transfers": lambda: probes.transfers(
        AREAS,
        [
            Transfers((0, 1), 3, 1 << 16),
            Transfers((3, 0), 2, 1 << 15, 512),
            Transfers((2, 3), 1, 4096),
            Transfers((2, 2), 4, 4096),
        ],
    ),
    "hops on one rank": lambda: probes.hops(AREAS, [0], 100),
    "hops between ranks": lambda: probes.hops(AREAS, [0, 1], 100),
    "signalled": lambda: probes.signalled(AREAS, 100),
    "sums in turns": lambda: probes.turns(AREAS, 16, 100, copies=False),
    "sums and copies in turns": lambda: probes.turns(AREAS, 16, 100, copies=True),
    **{
        f"products {dtype.name}": lambda dtype=dtype: probes.products(AREAS, GemmProbe((16, 8, 32)), dtype, 3)
        for dtype in (DType.f64, DType.f32)
    },
    "combines": lambda: probes.combines(AREAS, 16, 8, DType.f64, 3),
    "litmus": lambda: Exchange(3, 64, 4, 0).probe(),
}


@pytest.mark.parametrize("make", PROBES.values(), ids=PROBES.keys())
def test_the_executor_runs_every_task_of_a_probe_again_and_again(fake, make):
    probe = make()
    cluster = FakeCluster(fake, probe.schedule)
    per_rank = np.bincount(probe.schedule.tasks["rank"], minlength=3)
    for _ in range(3):
        for rank, report in cluster.run().items():
            assert report.error is None, f"rank {rank}: {report.error!r}"
            assert report.tasks == per_rank[rank]
    wide = [int(one["rows"]) * int(one["cols"]) * DType(int(one["dtype"])).itemsize for one in probe.schedule.buffers]
    if (probe.schedule.tasks["kind"] == Kind.COPY).all():
        assert max(wide) <= AREAS.nbytes


def test_what_the_readers_of_the_litmus_see_is_what_was_sent(fake):
    case = Exchange(3, 64, 2, 0)
    probe = case.probe()
    cluster = FakeCluster(fake, probe.schedule)
    at = {window: index for index, window in enumerate(probe.windows)}
    block_bytes = 8 * case.words
    for rank in range(3):
        for block, words in enumerate(case.sent(rank, 5).T):
            cluster.buffer(at[rank, block * block_bytes])[:, 0] = words
    for report in cluster.run().values():
        assert report.error is None
    for there in range(3):
        for rank in set(range(3)) - {there}:
            for block, words in enumerate(case.sent(rank, 5).T):
                offset = (rank * case.blocks + block) * block_bytes
                for reader in (0, 1):
                    seen = cluster.buffer(at[there, case.seen_offset(reader) + offset])
                    assert (seen[:, 0] == words).all()
