"""Products whose kernels are chosen by their time: right, and no call meets a kernel that is not loaded."""

from __future__ import annotations

import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert
from tests.helpers.products import Case, product
from uncut_mpi.device.cuda import preparation


@pytest.fixture(scope="module")
def tuned_session(comm):
    """A session that times products of any size worth it in a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "LEAST_TUNED_OPERATIONS", 1e6)
        with um.Session(comm, backend="cuda", timeout_s=30, tune_products=True) as session:
            yield session


@pytest.mark.parametrize("dtype", ["f16", "bf16", "tf32", "f32"])
@pytest.mark.parametrize("place", ["hhh", "000", "0h1"])
@pytest.mark.parametrize("scheduler", ["kblocks", "uncut"])
@pytest.mark.parametrize(("extents", "trans"), [((640, 512, 768), "NN"), ((333, 517, 641), "TN")])
def test_tuned_products_are_right_call_after_call(tuned_session, comm, dtype, place, scheduler, extents, trans):
    session = tuned_session
    options = um.ScheduleOptions(scheduler=scheduler, tile=256 if scheduler == "uncut" else 0)
    places = tuple(one if one == "h" else str(int(one) % comm.size) for one in place)
    wrong = []
    for beta in (1.1154, 0.0):
        case = Case(*extents, places, dtype, *trans, beta=beta)
        wrong.append(product(session, case, options))
    collective_assert(comm, not any(wrong), f"{wrong}")
    timed = sum(allgather(comm, len(session._backend._native.tuned_products())))
    collective_assert(comm, timed > 0, "no product was timed")
