"""GPUs that say that they have no peer access: each is taken for a node, and products are right."""

from __future__ import annotations

import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from tests.helpers.products import Case, product


@pytest.mark.mpi(min_size=2)
@pytest.mark.multigpu(num=2)
@pytest.mark.parametrize("whose", ["all", "the last rank's"])
def test_what_goes_between_gpus_without_peer_access_goes_through_the_host(comm, monkeypatch, whose):
    cupy = pytest.importorskip("cupy")
    if whose == "all" or comm.rank == comm.size - 1:
        monkeypatch.setattr(cupy.cuda.runtime, "deviceCanAccessPeer", lambda device, peer: 0)
    with um.Session(comm, backend="cuda", timeout_s=30, verify=True) as session:
        wanted = comm.size if whose == "all" else 2
        collective_assert(comm, session.machine.num_nodes == wanted, f"{session.machine.node_of}")
        for place in (("0", "1", "0"), ("h", "h", "h"), ("1", "0", "h")):
            wrong = product(session, Case(300, 200, 250, place=place))
            collective_assert(comm, not wrong, wrong)
