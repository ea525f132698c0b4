"""GPUs that say that they have no peer access: each is taken for a node, and products are right."""

from __future__ import annotations

import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from tests.helpers.products import Case, product
from uncut_mpi.device.cuda.imports import Imports
from uncut_mpi.device.cuda.library import format_uuid


@pytest.mark.mpi(min_size=2)
def test_what_goes_between_gpus_without_peer_access_goes_through_the_host(comm, monkeypatch):
    def unreached(imports):
        return frozenset(format_uuid(one) for at, one in enumerate(imports._uuids) if at != imports._ordinal)

    monkeypatch.setattr(Imports, "unreached", unreached)
    with um.Session(comm, backend="cuda", timeout_s=30, verify=True) as session:
        collective_assert(comm, session.machine.num_nodes == comm.size, f"{session.machine.node_of}")
        monkeypatch.setattr(Imports, "open", lambda *_: pytest.fail("memory of a peer was mapped"))
        for place in (("0", "1", "0"), ("h", "h", "h"), ("1", "0", "h")):
            wrong = product(session, Case(300, 200, 250, place=place))
            collective_assert(comm, not wrong, wrong)
