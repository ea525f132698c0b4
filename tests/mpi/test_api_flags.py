"""Flags whose arena could not grow."""

from __future__ import annotations

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, outcome
from tests.helpers.products import Case, check_product, make_operands
from uncut_mpi.api import calls, memory
from uncut_mpi.device.host import HostBackend


@pytest.mark.mpi(min_size=2)
def test_flags_look_unreached_after_a_failed_growth(comm, monkeypatch):
    monkeypatch.setattr(memory, "GRANULE_BYTES", 4)
    monkeypatch.setattr(calls, "_FIRST_FLAGS", 1)
    limit = [1 << 60]

    class Limited(HostBackend):
        def allocate(self, nbytes):
            if nbytes > limit[0]:
                raise um.CapacityError("refused on purpose")
            return super().allocate(nbytes)

    machine = um.Machine.uniform(comm.size)
    options = um.ScheduleOptions(scheduler="kblocks")
    with um.Session(comm, backend=Limited, machine=machine, timeout_s=20) as session:
        case = Case(160, 160, 160, place=("0", "1", "0"))
        operands = make_operands(session, case)
        # Words of new memory are 0, which from 2^31 on counts as reached.
        session._calls.binder.flags.epoch = (1 << 31) + 5
        session._calls.binder.flags.reset()
        session._calls.binder.softbuf.ensure(np.full(session.size, 1 << 20, np.int64))
        limit[0] = 4
        found = outcome(lambda: session.gemm(*operands.abc, beta=case.beta, options=options))
        own = int(session._calls.binder.flags.addresses[session.rank])
        words = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint32 * 1).from_address(own))
        behind = int(words[0]) == session._calls.binder.flags.epoch
        collective_assert(comm, found.startswith("CapacityError") and behind, f"{found}; flag {words[0]}")
        limit[0] = 1 << 60
        session.gemm(*operands.abc, alpha=case.alpha, beta=case.beta, options=options)
        check_product(comm, case, operands)
