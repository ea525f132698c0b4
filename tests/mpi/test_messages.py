"""Messages between nodes in fragments, from host and device memory and to it: products of what comes so."""

from __future__ import annotations

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from uncut_mpi.device import net_lanes
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.ports import Net
from uncut_mpi.spmd.transport import MpiTransport

pytestmark = pytest.mark.mpi(min_size=2)

LAYOUTS = {
    "rows": lambda size: um.Layout.rows(),
    "cols": lambda size: um.Layout.cols(),
    "cyclic": lambda size: um.Layout.block_cyclic(7, 5, grid=(1, size)),
}


@pytest.fixture(params=[(1, 1), (2, 8)], ids=["one buffer", "several"])
def buffers(monkeypatch, request):
    """Few bytes are a fragment, so that a message has many and columns have parts; buffers are as few, or as many."""
    least, most = request.param
    monkeypatch.setattr(net_lanes, "FRAGMENT_BYTES", 320)
    monkeypatch.setattr(net_lanes, "SMALL_BYTES", 96)
    monkeypatch.setattr(net_lanes, "_LEAST_BUFFERS", least)
    monkeypatch.setattr(net_lanes, "_MOST_BUFFERS", most)


@pytest.mark.parametrize("memory", ["device", "host"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", ["f64", "c128"])
def test_messages_of_many_fragments_bring_all(comm, open_session, buffers, layout, memory, dtype):
    machine = um.Machine.cluster(um.Machine.uniform(1), comm.size, Net(10.0, 5e-6))
    values = np.random.default_rng(5)
    numpy_type = DType[dtype].numpy
    with open_session(comm, machine=machine, ranks_per_node=1) as session:
        m, n, k = 31, 27, 23
        given = [values.uniform(-1, 1, shape).astype(numpy_type) for shape in ((m, k), (k, n), (m, n))]
        how = LAYOUTS[layout](comm.size)
        dealt = [session.scatter(one if comm.rank == 0 else None, how, memory=memory) for one in given]
        with session.plan(*dealt) as plan:
            moved = sum(comm.allgather(sum(plan.execute(beta=0.5).copy_bytes for _ in range(3))))
        found = session.gather(dealt[2])
    a, b, c = given
    for _ in range(3):
        c = a @ b + 0.5 * c
    # k + 3 roundings in each product (Higham, section 3.5); complex ones have four times the real ones.
    bound = 8 * (k + 3) * np.finfo(numpy_type).eps * (np.abs(a) @ np.abs(b) + np.abs(given[2]))
    right = comm.rank != 0 or bool((np.abs(found - c) <= bound).all())
    collective_assert(comm, right and moved > 0, f"{moved} bytes moved, the result right: {right}")


def test_small_messages_go_together(comm, open_session, monkeypatch):
    machine = um.Machine.cluster(um.Machine.uniform(1), comm.size, Net(10.0, 5e-6))
    counts = {"add": 0, "send": 0}

    def counted(kind, name):
        def call(*arguments):
            counts[name] += 1
            return plain(*arguments)

        plain = getattr(kind, name)
        monkeypatch.setattr(kind, name, call)

    values = np.random.default_rng(7).uniform(-1, 1, (100, 90))
    with open_session(comm, machine=machine, ranks_per_node=1) as session:
        layout = um.Layout.block_cyclic(3, 3, grid=(comm.size, 1))
        given = session.scatter(values if comm.rank == 0 else None, layout, memory="device")
        counted(net_lanes._Parcel, "add")
        counted(MpiTransport, "send")
        dealt = session.redistribute(given, um.Layout.block_cyclic(5, 5, grid=(1, comm.size)))
        added, sent = counts.values()
        monkeypatch.undo()
        found = session.gather(dealt)
    right = comm.rank != 0 or bool((found == values).all())
    collective_assert(
        comm, right and added > 100 and sent == comm.size - 1, f"{added} fragments, {sent} messages, right: {right}"
    )
