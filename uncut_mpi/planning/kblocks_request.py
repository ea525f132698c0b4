"""
What the core is asked for by `kblocks`: a problem, how C is cut among ranks, and how each rank cuts its part.

All of it is made at once and never changed. Where panels lie (`_native.KBlocksLayout`) and what is emitted are the
core's to say.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Final

from uncut_mpi import _native
from uncut_mpi.model.locations import location_table, with_ends
from uncut_mpi.model.placement import Matrix
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.blocking import blocking_of
from uncut_mpi.planning.buffers import elements_aligned, user_pieces, user_table
from uncut_mpi.planning.options import Blocking
from uncut_mpi.planning.partition import Partition
from uncut_mpi.planning.schedule import Op
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import machine_in_core
from uncut_mpi.planning.ways import ways_of

MIN_SLICE_BYTES: Final = 128 * 1024
"""Smallest slice of a fetch shared by several ranks: below it a copy's fixed cost outweighs what it moves."""


RELAY_BYTES: Final = 8 << 20
"""Largest chunk in which a piece goes over another rank."""

MANY_RELAYS: Final = 256
"""Such a chunk is at most this part of what a rank has for panels: its slots take a thirty-second of that."""


def problem_in_core(setting: Setting) -> _native.KBlocksProblem:
    """Return what all schedules of a problem have in common."""
    problem, placement, machine = setting.problem, setting.placement, setting.machine
    return _native.KBlocksProblem(
        num_ranks=machine.num_ranks,
        serial_copies=machine.serial_copies,
        op_a=Op[problem.trans_a],
        op_b=Op[problem.trans_b],
        reads_c=problem.reads_c,
        dtypes=problem.dtypes,
        locations=with_ends(location_table(machine.ranks)),
        buffers=user_table(machine.ranks, problem, placement),
        pieces=user_pieces(problem, placement),
        step=elements_aligned(problem),  # a transposed B is aligned along n
        min_slice_bytes=MIN_SLICE_BYTES,
        relay_bytes=min(max(1, min(setting.room) // MANY_RELAYS), RELAY_BYTES),
        ways=ways_of(machine),
    )


@dataclasses.dataclass(frozen=True, eq=False)
class DealtPanels:
    """
    A problem as it is dealt to ranks, whatever they do with it.

    Attributes
    ----------
    setting : Setting
        What is multiplied where.
    in_core : KBlocksProblem
        The same for the core.
    partitions : sequence of Partition
        How each rectangle of C that is computed is cut: one block for each rank, or for all that share k.
    devices : sequence of int
        Ranks that compute, those of the first part of k first.
    k_starts : sequence of int
        Where parts of k start, and their end.
    """

    setting: Setting
    in_core: _native.KBlocksProblem
    partitions: Sequence[Partition]
    devices: Sequence[int]
    k_starts: Sequence[int]

    @property
    def problem(self) -> GemmProblem:
        """The problem."""
        return self.setting.problem

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of ranks, the same for each rectangle."""
        return self.partitions[0].shape

    @property
    def largest(self) -> tuple[int, int]:
        """The most rows and the most columns that a block has."""
        extents = zip(*(block for one in self.partitions for block in one.blocks), strict=True)
        rows, cols = (max(map(len, of_all)) for of_all in extents)
        return rows, cols

    @functools.cached_property
    def _places(self) -> list[_native.KBlocksPlaces]:
        """The partitions for the core."""
        return [
            _native.KBlocksPlaces([((rows.start, rows.stop), (cols.start, cols.stop)) for rows, cols in one.blocks])
            for one in self.partitions
        ]

    @property
    def splits(self) -> int:
        """Parts of k."""
        return len(self.k_starts) - 1

    @property
    def ranks_that_share(self) -> tuple[int, int]:
        """How many ranks of a node share the columns of B that the first one needs, and how many its rows of A."""
        node_of, blocks = self.setting.machine.node_of, self.partitions[0].blocks
        beside = [
            block
            for rank, block in zip(self.devices, blocks, strict=False)
            if node_of[rank] == node_of[self.devices[0]]
        ]
        rows, cols = blocks[0]
        return sum(block[1] == cols for block in beside), sum(block[0] == rows for block in beside)

    def request(self, how: Blocking, *, aligns: bool) -> _native.KBlocksRequest:
        """
        Return what the core is asked for.

        Parameters
        ----------
        how : Blocking
            With everything set.
        aligns : bool
            Whether ranks may take panels for what they hold, so that their products are aligned: where that pays, as
            ``csrc/kblocks_alignment.cpp`` says.
        """
        # K-blocks of B are rows far apart in host memory; stored transposed they are whole columns.
        far_apart = self.setting.placement.in_host(Matrix.B) and self.problem.trans_b == "N"
        return _native.KBlocksRequest(
            problem=self.in_core,
            how=blocking_of(how, far_apart=far_apart),
            k_starts=self.k_starts,
            devices=self.devices,
            rounds=self._places,
            aligns_for=machine_in_core(self.setting.machine, 0) if aligns else None,
        )
