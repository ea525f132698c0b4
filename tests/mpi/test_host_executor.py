"""The host executor on real ranks: memory, flags and progress words shared between processes."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.helpers.pushed import Pushed
from uncut_mpi.device.host import Disorder, HostBackend
from uncut_mpi.device.host.views import matrix_at
from uncut_mpi.device.interface import ExecutionReport, FlagTable, ProgressBoard
from uncut_mpi.errors import StallError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.schedule import buffer_bytes
from uncut_mpi.segments import Segment

pytestmark = pytest.mark.mpi(min_size=2)


class Rank:
    """This rank's backend, its buffers, and the peers' opened by handle; every method is collective."""

    def __init__(self, comm, case: Pushed, disorder: Disorder | None = None, fault=None) -> None:
        self.comm, self.case, self.schedule, self.epoch = comm, case, case.build(), 2**32 - 1
        rank = comm.rank
        lowering = lower(self.schedule)
        self.backend = HostBackend(rank, comm.size, blas_threads=1, disorder=disorder, fault=fault)
        count = int(lowering.num_flags[rank])
        flags = self.backend.allocate(4 * count)
        self.backend.fill_words(flags.address, count, self.epoch)
        sizes = buffer_bytes(self.schedule.buffers)
        own = {
            index: self.backend.allocate(int(sizes[index]))
            for index in np.flatnonzero(self.schedule.owners() == rank).tolist()
        }
        self.board = (
            Segment.create(4 * math.prod(ProgressBoard.shape(comm.size)), "progress board") if rank == 0 else None
        )
        shared = comm.allgather(
            (flags.handle, {i: a.handle for i, a in own.items()}, self.board.handle if self.board else b"")
        )
        self.own = {index: self.view(index, allocation.address) for index, allocation in own.items()}
        addresses = np.zeros(len(sizes), np.int64)
        peers = np.zeros(comm.size, np.int64)
        for peer, (flag_handle, buffers, _) in enumerate(shared):
            peers[peer] = flags.address if peer == rank else self.backend.open(flag_handle)
            for index, handle in buffers.items():
                addresses[index] = own[index].address if peer == rank else self.backend.open(handle)
        self.board = self.board or Segment.open(shared[0][2])
        words = self.board.array(np.uint32, ProgressBoard.shape(comm.size))
        self.executable = self.backend.executable(
            lowering.rank_list(rank), addresses, FlagTable(flags.address, peers), ProgressBoard(words, rank)
        )

    def view(self, index: int, address: int) -> np.ndarray:
        record = self.schedule.buffers[index]
        return matrix_at(
            address, int(record["rows"]), int(record["cols"]), int(record["ld"]), DType(int(record["dtype"])).numpy
        )

    def run(self, alpha: float, beta: float, seed: int, timeout_s: float = 20.0) -> ExecutionReport:
        """Load values, run between two barriers."""
        self.case.fill(self.schedule, self.own, seed)
        self.comm.Barrier()
        report = self.executable.run(alpha=alpha, beta=beta, epoch=self.epoch, timeout_s=timeout_s)
        self.comm.Barrier()
        self.epoch = (self.epoch + self.executable.span) % 2**32
        return report

    def close(self) -> None:
        self.executable.close()
        self.comm.Barrier()
        self.backend.close()
        self.board.close()


def agree(comm, wrong: str) -> None:
    """Fail on every rank if something is wrong on one."""
    everywhere = comm.allgather(wrong)
    assert not any(everywhere), {rank: text for rank, text in enumerate(everywhere) if text}


def run_and_judge(rank: Rank, alpha: float, beta: float, seed: int) -> str:
    report = rank.run(alpha, beta, seed)
    if report.error is not None:
        return repr(report.error)
    if 2 in rank.own and not rank.case.is_right(rank.schedule, rank.own[2], alpha, beta, seed):
        return f"wrong product for seed {seed}"
    return ""


@pytest.mark.parametrize("dtype", list(DType), ids=lambda dtype: dtype.name)
def test_repeated_products_are_right_across_the_epoch_s_wrap(comm, dtype):
    rank = Rank(comm, Pushed(m=67, n=53, k=71, ranks=comm.size, chunks=5, dtype=dtype))
    wrong = [run_and_judge(rank, 1.2345, 1.1154, seed) for seed in range(20)]
    rank.close()
    agree(comm, "; ".join(filter(None, wrong)))


@pytest.mark.parametrize("seed", range(5))
def test_random_order_and_late_flags_give_the_right_answer(comm, seed):
    rank = Rank(comm, Pushed(ranks=comm.size, chunks=4, trans_b="T"), disorder=Disorder(seed, pause_s=3e-4))
    wrong = [run_and_judge(rank, -0.5, 2.0, seed + call) for call in range(4)]
    rank.close()
    agree(comm, "; ".join(filter(None, wrong)))


def test_a_failing_rank_strands_nobody(comm):
    failing = comm.size - 1
    fail = [True]

    def fault(task, code, written) -> None:
        if fail[0]:
            raise ValueError("planted")

    rank = Rank(comm, Pushed(ranks=comm.size), fault=fault if comm.rank == failing else None)
    error = rank.run(1.0, 0.0, 0).error
    first = "" if isinstance(error, ValueError if comm.rank == failing else type(None)) else repr(error)
    fail[0] = False
    again = run_and_judge(rank, 1.0, 0.5, 1)
    rank.close()
    agree(comm, first or again)


def test_ranks_that_wait_for_one_that_does_not_run_say_so_and_end(comm):
    rank = Rank(comm, Pushed(ranks=comm.size))
    wrong = ""
    if comm.rank:
        error = rank.executable.run(alpha=1.0, beta=0.0, epoch=rank.epoch, timeout_s=0.3).error
        if not isinstance(error, StallError) or f"rank {comm.rank} waits in" not in str(error):
            wrong = repr(error)
        elif comm.rank == 1 and "of rank 0 (slot" not in str(error):
            wrong = str(error)
    comm.Barrier()
    rank.close()
    agree(comm, wrong)
