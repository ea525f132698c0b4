"""Gradients of tensors on the ranks' own GPUs: the cases of the host, and work that is still enqueued."""

from __future__ import annotations

import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert
from tests.mpi.test_gradients import *  # noqa: F403  the same cases, collected here with this folder's fixtures
from tests.mpi.test_gradients import K, M, N, mine_of, rows_of

pytestmark = [
    pytest.mark.mpi(min_size=1),
    pytest.mark.multigpu(num=1),
    # Of torch: in the thread of its backward, and where home cannot be written.
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS", "ignore:Specified kernel cache directory"),
]

SLEEP_CYCLES = 100_000_000  # about 0.05 s


def test_gradients_are_of_what_a_side_stream_has_still_to_compute(comm, torch, whole, device):
    a, b = whole(M, K), whole(K, N)
    a_mine, b_mine = mine_of(comm, a), mine_of(comm, b)
    (2 * a @ b * 3).sum().backward()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(stream):
        torch.cuda._sleep(SLEEP_CYCLES)
        found = um.matmul(comm, 2 * a_mine, b_mine)
        torch.cuda._sleep(SLEEP_CYCLES)
        (found * 3).sum().backward()
    stream.synchronize()
    for its, mine in ((a, a_mine), (b, b_mine)):
        right = torch.allclose(rows_of(comm, its.grad), mine.grad)
        collective_assert(comm, right, f"{mine.grad} of {rows_of(comm, its.grad)}")
