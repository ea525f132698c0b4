"""
The litmus of flags and copies: what a copy pushed has to be there when the flag after it is seen.

Every rank pushes blocks to every other one. The receiver reads each block behind its flag in two ways, with
a COMBINE kernel and with a copy on a copy lane, while larger copies go round the ranks. Both results are
compared word by word. No finite number of blocks proves it; one wrong word disproves it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from uncut_mpi.calibration.probes import Areas, Probe, ProbeBuild
from uncut_mpi.calibration.workbench import Workbench
from uncut_mpi.planning.schedule import Factor, Kind, Op
from uncut_mpi.spmd import agreement

_BYTES_OF_RUN: Final = 2 << 20
_MOST_BLOCKS: Final = 16
_RUNS, _FEWEST_RUNS = 30, 3
_READERS: Final = 2
_BOXES: Final = 4 + _READERS


@dataclasses.dataclass(frozen=True, slots=True)
class Exchange:
    """
    Where the blocks of one run lie in each device's memory.

    Attributes
    ----------
    num_ranks : int
        Ranks.
    words : int
        Of 8 bytes in a block.
    blocks : int
        From each rank to each other.
    series : int
        Tells the words of this size from those of another.
    """

    num_ranks: int
    words: int
    blocks: int
    series: int

    @property
    def box_bytes(self) -> int:
        """Bytes of the blocks that one rank receives, or of its own for all to read."""
        return 8 * self.words * self.blocks * self.num_ranks

    def seen_offset(self, reader: int) -> int:
        """Return where a reader's copies of the received blocks lie: behind the own ones and the received ones."""
        return (2 + reader) * self.box_bytes

    def probe(self) -> Probe:
        """Return the pushes, and the readers behind them."""
        built = ProbeBuild(Areas(self.num_ranks, 0))
        read = (Factor.ONE, Op.N)
        block_bytes = 8 * self.words
        ring = self.box_bytes // 8
        ring_to, ring_from = ((2 + _READERS + end) * self.box_bytes for end in (0, 1))
        for block in range(self.blocks):
            if block % 4 == 0:
                for rank in range(self.num_ranks):
                    there = (rank + 1) % self.num_ranks
                    lane = built.build.copy_lane(rank, rank, -1)  # apart from the lanes of the blocks
                    built.copy(lane, built.window(there, ring_to, ring, 1), built.window(rank, ring_from, ring, 1))
            for distance in range(1, self.num_ranks):
                for rank in range(self.num_ranks):
                    there = (rank + distance) % self.num_ranks
                    source = built.window(rank, block * block_bytes, self.words, 1)
                    at = (rank * self.blocks + block) * block_bytes
                    came = built.window(there, self.box_bytes + at, self.words, 1)
                    push = built.copy(built.build.copy_lane(rank, rank, there), came, source)
                    kernel, engine = (
                        built.window(there, self.seen_offset(reader) + at, self.words, 1) for reader in range(_READERS)
                    )
                    built.build.task(Kind.COMBINE, built.build.compute_lane(there), kernel, [(came, *read)], [push])
                    built.copy(built.build.copy_lane(there, there, there), engine, came, [push])
        return built.probe()

    def sent(self, rank: int, run: int) -> np.ndarray:
        """Return what a rank sends in a run, shape (words, blocks): no word is ever sent twice."""
        first = self.series * 2.0**44 + ((run * self.num_ranks + rank) * self.blocks) * self.words + 1
        numbers = first + np.arange(self.words * self.blocks, dtype=np.float64)
        return numbers.reshape((self.words, self.blocks), order="F")


def run_litmus(bench: Workbench, sizes_bytes: Sequence[int]) -> dict[str, int]:
    """
    Push and read blocks of some sizes. Collective.

    Returns
    -------
    dict of str to int
        ``"rounds"``: blocks pushed; ``"wrong_words"``: words that a reader saw otherwise than they were sent.
    """
    ranks, rank = bench.group.size, bench.group.rank
    pushed, wrong = 0, 0
    for series, nbytes in enumerate(sizes_bytes):
        most = bench.areas.device_bytes // (_BOXES * ranks * nbytes)
        blocks = min(_MOST_BLOCKS, max(1, _BYTES_OF_RUN // nbytes), most)
        if not blocks:
            continue  # as many ranks leave no room for blocks so large
        case = Exchange(ranks, nbytes // 8, blocks, series)
        what = f"the litmus with blocks of {nbytes} bytes"
        with bench.bind(case.probe(), what) as executable:
            for run in range(_RUNS):
                with agreement.collective(bench.group, what):
                    bench.backend.from_host(bench.address(rank), case.words, case.sent(rank, run))
                bench.run(executable, what)
                with agreement.collective(bench.group, what):
                    wrong += _wrong_words(bench, case, run)
                pushed += ranks * (ranks - 1) * blocks
                if run + 1 >= _FEWEST_RUNS and bench.late:
                    break
    counts = bench.group.allgather_bytes(np.array([wrong], np.int64), "gathering the litmus")
    return {"rounds": pushed, "wrong_words": int(counts.sum())}


def _wrong_words(bench: Workbench, case: Exchange, run: int) -> int:
    """Count what this rank's readers saw otherwise than it was sent. Not collective."""
    rank = bench.group.rank
    expected = np.concatenate([case.sent(source, run) for source in range(case.num_ranks)], axis=1)
    own = slice(rank * case.blocks, (rank + 1) * case.blocks)  # nobody pushes to itself
    wrong = 0
    for reader in range(_READERS):
        seen = np.empty(expected.shape, np.float64, order="F")
        bench.backend.to_host(bench.address(rank, case.seen_offset(reader)), case.words, seen)
        differs = seen != expected
        differs[:, own] = False
        wrong += int(differs.sum())
    return wrong
