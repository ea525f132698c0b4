"""A call that would last a minute ends on all ranks soon after one of them has failed."""

from __future__ import annotations

import dataclasses
import math
import time

import numpy as np
import pytest

from tests.helpers.collective import allgather, collective_assert
from uncut_mpi.device.interface import FlagTable, ProgressBoard
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.lower import Code, lower
from uncut_mpi.planning.schedule import Factor, Kind, Op, Role, Schedule, buffer_bytes
from uncut_mpi.segments import Segment

pytestmark = pytest.mark.mpi(min_size=2)
SIZE = 8192
LONG, FAILING = 3000, 100  # products of each rank, a minute of them on an H100; which of the last rank's fails
SHORT = 3


def products(ranks: int, length: int) -> Schedule:
    """Each rank adds `length` products to a matrix of its own; its last one awaits the next rank's last but one."""
    build = ScheduleBuilder(ranks, GemmProblem(SIZE, SIZE, SIZE, DType.f64), Placement.parse("0,0,0"))
    of, reads = [], []
    for rank in range(ranks):
        a, b, c = (
            RegionRef(
                build.buffer(at=rank, rows=SIZE, cols=SIZE, dtype=DType.f64, role=Role.PANEL, offset=0),
                0,
                0,
                SIZE,
                SIZE,
            )
            for _ in range(3)
        )
        reads.append([(a, Factor.ONE, Op.N), (b, Factor.ONE, Op.N), (c, Factor.ONE, Op.N)])
        of.append([build.task(Kind.GEMM, build.compute_lane(rank), c, reads[rank]) for _ in range(length - 1)])
    for rank in range(ranks):
        build.task(Kind.GEMM, build.compute_lane(rank), reads[rank][2][0], reads[rank], of[(rank + 1) % ranks][-1:])
    return build.build(scheduler="test", grid=(1, ranks), tile=0)


def test_a_failure_ends_a_call_of_a_minute_on_every_rank_within_seconds(comm, open_session):
    with open_session(comm) as session:
        backend, rank, last = session._backend, comm.rank, comm.size - 1
        lists = {length: lower(products(comm.size, length)).rank_list(rank) for length in (LONG, SHORT)}
        buffers = lists[LONG].buffers
        own = [backend.allocate(int(nbytes)) for nbytes in buffer_bytes(buffers)[buffers["location"] == rank]]
        for one in own:
            backend.fill_random(one.address, one.nbytes, DType.f64)
        count = max(one.num_flags for one in lists.values())
        flags = backend.allocate(4 * max(1, count))
        backend.fill_words(flags.address, max(1, count), 0)
        peers = [
            backend.open(handle) if peer != rank else flags.address
            for peer, handle in enumerate(allgather(comm, flags.handle))
        ]
        nbytes = 4 * math.prod(ProgressBoard.shape(comm.size))
        segment = Segment.create(nbytes, "a progress board") if rank == 0 else None
        handle = comm.bcast(segment.handle if segment else None)
        segment = segment or Segment.open(handle)
        board = ProgressBoard(segment.array(np.uint32, ProgressBoard.shape(comm.size)), rank)
        addresses = np.zeros(len(buffers), np.int64)
        addresses[buffers["location"] == rank] = [one.address for one in own]
        bound = {
            length: backend.executable(one, addresses, FlagTable(flags.address, np.array(peers)), board)
            for length, one in lists.items()
        }
        if rank == last:
            bound[LONG] = bind_failing(
                backend, lists[LONG], addresses, FlagTable(flags.address, np.array(peers)), board
            )
        found, epoch = [], 0
        for length in (LONG, SHORT):
            comm.Barrier()
            start = time.perf_counter()
            report = bound[length].run(alpha=1.0, beta=1.0, epoch=epoch, timeout_s=30.0)
            epoch += bound[length].span
            found.append(
                allgather(comm, (report.tasks, report.aborted, str(report.error), time.perf_counter() - start))
            )
        for executable in bound.values():
            executable.close()
        for peer, address in enumerate(peers):
            if peer != rank:
                backend.close_peer(address)
        comm.Barrier()
        for one in (*own, flags):
            backend.free(one)
        del board
        segment.close()
    first, second = found
    collective_assert(comm, all(seconds < 10.0 for *_, seconds in first), f"{first}")
    collective_assert(comm, all(tasks < LONG / 4 and aborted for tasks, aborted, *_ in first[:-1]), f"{first}")
    collective_assert(comm, first[-1][0] == FAILING and "cublasDgemm" in first[-1][2] and not first[-1][1], f"{first}")
    collective_assert(comm, all(one[:3] == (SHORT, False, "None") for one in second), f"{second}")


def bind_failing(backend, program, addresses, flags, board):
    """Bind a list in which cuBLAS refuses a product for its leading dimension, which harms nothing."""
    gemms = program.operations[program.operations["code"] == Code.GEMM]
    operands = program.operands.copy()
    operands["ld"][gemms["first_operand"][FAILING] + 1] = 1
    with backend._current("preparing a list that fails"):
        return backend._preparation.bind(dataclasses.replace(program, operands=operands), addresses, flags, board)
