"""
Litmus of flags and copies: does data that was pushed before a flag always arrive before it?

    mpiexec -n 4 python tests/gpu/litmus.py --json litmus.json

Every rank pushes blocks to every other rank through the executor of the package itself (copy, then
flag). The receiver, released by the flag and nothing else, reads the block at once in two ways: by a
kernel and by a copy engine. What they saw is compared, word by word, with what was sent; the content
changes with every round. A ring of large copies keeps the links busy meanwhile. Exit status 1 if a
single word was wrong. With --without-waits the waits are left out: then words must be wrong.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from typing import Any

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")

import numpy as np

from uncut_mpi.device.cuda import CudaBackend, visible_devices
from uncut_mpi.device.interface import FlagTable, ProgressBoard
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.lower import Code, lower
from uncut_mpi.planning.schedule import Factor, Kind, Op, Role, Schedule

READ = (Factor.ONE, Op.N)
RING_BYTES = 16 << 20
# Bytes of a block, blocks per pair in one run, share of all rounds.
SIZES = ((4 << 10, 16, 0.4), (64 << 10, 16, 0.4), (1 << 20, 8, 0.18), (8 << 20, 2, 0.02))
HOPS = 1000


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A schedule in which every rank pushes `blocks` blocks of `nbytes` to every other."""

    ranks: int
    nbytes: int
    blocks: int

    @property
    def words(self) -> int:
        return self.nbytes // 8

    def build(self) -> Schedule:
        words, ranks = self.words, self.ranks
        build = ScheduleBuilder(ranks, GemmProblem(1, 1, 1, DType.f64), Placement.parse("0,0,0"))

        def buffers(rows: int, cols: int) -> list[int]:
            return [
                build.buffer(at=r, rows=rows, cols=cols, dtype=DType.f64, role=Role.PANEL, offset=0)
                for r in range(ranks)
            ]

        source = buffers(words, self.blocks)
        inbox, by_kernel, by_engine = (buffers(words, self.blocks * ranks) for _ in range(3))
        ring_from, ring_to = buffers(RING_BYTES // 8, 1), buffers(RING_BYTES // 8, 1)
        for block in range(self.blocks):
            if ranks > 1 and block % 4 == 0:
                for r in range(ranks):
                    there = (r + 1) % ranks
                    whole = (0, 0, RING_BYTES // 8, 1)
                    lane = build.copy_lane(r, r, -1)  # apart from the lanes of the blocks
                    build.task(
                        Kind.COPY, lane, RegionRef(ring_to[there], *whole), [(RegionRef(ring_from[r], *whole), *READ)]
                    )
            for distance in range(1, ranks):
                for r in range(ranks):
                    there = (r + distance) % ranks
                    at = (0, r * self.blocks + block, words, 1)
                    sent = [(RegionRef(source[r], 0, block, words, 1), *READ)]
                    push = build.task(Kind.COPY, build.copy_lane(r, r, there), RegionRef(inbox[there], *at), sent)
                    came = [(RegionRef(inbox[there], *at), *READ)]
                    build.task(Kind.COMBINE, build.compute_lane(there), RegionRef(by_kernel[there], *at), came, [push])
                    build.task(
                        Kind.COPY, build.copy_lane(there, there, there), RegionRef(by_engine[there], *at), came, [push]
                    )
        return build.build(scheduler="litmus", grid=(1, ranks), tile=0)


def ring(ranks: int) -> Schedule:
    """One word handed round the ranks HOPS times, each hop behind the flag of the one before."""
    build = ScheduleBuilder(ranks, GemmProblem(1, 1, 1, DType.f64), Placement.parse("0,0,0"))
    at = [build.buffer(at=r, rows=HOPS + 1, cols=1, dtype=DType.f64, role=Role.PANEL, offset=0) for r in range(ranks)]
    last: list[int] = []
    for hop in range(HOPS):
        here, there = hop % ranks, (hop + 1) % ranks
        to, of = RegionRef(at[there], hop + 1, 0, 1, 1), RegionRef(at[here], hop, 0, 1, 1)
        last = [build.task(Kind.COPY, build.copy_lane(here, here, there), to, [(of, *READ)], last)]
    return build.build(scheduler="litmus", grid=(1, ranks), tile=0)


class Rank:
    """This process's device, an arena per buffer, and one set of flags for all lists."""

    def __init__(self, comm: Any, without_waits: bool) -> None:
        self.comm, self.without_waits = comm, without_waits
        self.backend = CudaBackend(comm.rank % max(1, len(visible_devices()[0])))
        self.epoch = 0
        self.flags, self.peer_flags = self._share(1 << 20)
        self.backend.fill_words(self.flags, 1 << 18, 0)
        self.board = np.zeros(ProgressBoard.shape(comm.size), np.uint32)

    def _share(self, nbytes: int) -> tuple[int, np.ndarray]:
        own = self.backend.allocate(nbytes)
        handles = self.comm.allgather(own.handle)
        peers = [own.address if r == self.comm.rank else self.backend.open(h) for r, h in enumerate(handles)]
        return own.address, np.array(peers, np.int64)

    def prepare(self, schedule: Schedule) -> tuple[Any, np.ndarray]:
        """Return the executable of this rank's list and the addresses of all buffers."""
        sizes = schedule.buffers["rows"] * schedule.buffers["cols"] * 8
        addresses = np.zeros(len(sizes), np.int64)
        for first in range(0, len(sizes), self.comm.size):  # one buffer per rank, of one size
            _, peers = self._share(int(sizes[first]))
            addresses[first : first + self.comm.size] = peers
        program = lower(schedule).rank_list(self.comm.rank)
        if self.without_waits:
            kept = program.operations[program.operations["code"] != Code.WAIT_FLAG]
            program = dataclasses.replace(program, operations=kept)
        table, board = FlagTable(self.flags, self.peer_flags), ProgressBoard(self.board, self.comm.rank)
        return self.backend.executable(program, addresses, table, board), addresses

    def run(self, executable: Any) -> float:
        """Run between two barriers and return the seconds."""
        epoch, self.epoch = self.epoch, self.epoch + executable.span
        self.comm.Barrier()
        started = time.perf_counter()
        report = executable.run(alpha=1.0, beta=0.0, epoch=epoch, timeout_s=20.0)
        if report.error is not None:
            sys.stderr.write(f"rank {self.comm.rank}: {report.error}\n")
            sys.stderr.flush()
            self.comm.Abort(1)
        self.comm.Barrier()
        return time.perf_counter() - started


def exchange(rank: Rank, case: Exchange, rounds: int) -> dict[str, Any]:
    """Run until every pair together has done `rounds` rounds; count the wrong words of both readers."""
    import cupy

    comm = rank.comm
    executable, addresses = rank.prepare(case.build())
    ranks, blocks, words = comm.size, case.blocks, case.words

    def view(kind: int, cols: int) -> Any:
        memory = cupy.cuda.UnownedMemory(int(addresses[kind * ranks + comm.rank]), words * cols * 8, executable)
        return cupy.ndarray((words, cols), cupy.float64, cupy.cuda.MemoryPointer(memory, 0), order="F")

    source, seen = view(0, blocks), (view(2, blocks * ranks), view(3, blocks * ranks))
    index = cupy.arange(words, dtype=cupy.float64)[:, None]
    salt = cupy.arange(blocks * ranks, dtype=cupy.float64)[None, :] * 1e6
    others = cupy.asarray(np.repeat(np.arange(ranks) != comm.rank, blocks))[None, :]
    wrong = cupy.zeros(2, cupy.int64)
    per_run = ranks * (ranks - 1) * blocks
    runs = max(1, -(-rounds // per_run))
    spent = 0.0
    for _ in range(runs):
        stamp = (rank.epoch + 1) * 1e9  # with the salt and the index below 2**53: exact
        source[...] = stamp + salt[:, comm.rank * blocks : (comm.rank + 1) * blocks] + index
        rank.backend.mark_caller()
        rank.backend.await_caller()
        spent += rank.run(executable)
        expected = stamp + salt + index
        for number, found in enumerate(seen):
            wrong[number] += ((found != expected) & others).sum()
    counts = comm.allreduce(np.array(wrong.get()))
    return {
        "bytes": case.nbytes,
        "rounds": runs * per_run,
        "wrong_words_kernel": int(counts[0]),
        "wrong_words_copy_engine": int(counts[1]),
        "us_per_round_and_pair": comm.allreduce(spent) / ranks / runs / blocks * 1e6,
    }


def main() -> int:
    """Run the litmus; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument("--rounds", type=int, default=100_000)
    parser.add_argument("--json")
    parser.add_argument("--without-waits", action="store_true")
    arguments = parser.parse_args()
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    if comm.size < 2:
        parser.error("1 rank has no peer to push to: start at least 2 with mpiexec")
    started = time.perf_counter()
    rank = Rank(comm, arguments.without_waits)
    identities = comm.allgather(rank.backend.identity())
    flush = rank.backend._native.can_flush_remote_writes
    lines = [
        exchange(rank, Exchange(comm.size, nbytes, blocks), int(share * arguments.rounds))
        for nbytes, blocks, share in SIZES
    ]
    executable, _ = rank.prepare(ring(comm.size))
    hop_us = min(rank.run(executable) for _ in range(5)) / HOPS * 1e6
    wrong = sum(line["wrong_words_kernel"] + line["wrong_words_copy_engine"] for line in lines)
    if comm.rank == 0:
        print(f"# {comm.size} ranks on {len({one.uuid for one in identities})} × {identities[0].name}, flush {flush}")
        print(f"{'bytes':>9} {'rounds':>7} {'wrong (kernel)':>15} {'wrong (engine)':>15} {'us/round/pair':>14}")
        for line in lines:
            print(
                f"{line['bytes']:>9} {line['rounds']:>7} {line['wrong_words_kernel']:>15} "
                f"{line['wrong_words_copy_engine']:>15} {line['us_per_round_and_pair']:>14.1f}"
            )
        total = sum(line["rounds"] for line in lines)
        print(f"{total} rounds, {wrong} wrong words; one hop (flag, copy of 8 bytes, flag) {hop_us:.1f} us; "
              f"{time.perf_counter() - started:.1f} s in all: {'FAIL' if wrong else 'PASS'}")  # fmt: skip
        if arguments.json:
            facts = {"ranks": comm.size, "devices": [dataclasses.asdict(one) for one in identities], "flush": flush,
                     "lines": lines, "rounds": total, "wrong_words": wrong, "us_per_hop": hop_us}  # fmt: skip
            with open(arguments.json, "w") as stream:
                json.dump(facts, stream, indent=1)
    comm.Barrier()
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
