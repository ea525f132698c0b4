"""
What the core is asked for by `kblocks`: a problem, how C is cut among ranks, and how each rank cuts its part.

All of it is made at once and never changed. Where panels lie (`_native.KBlocksLayout`) and what is emitted are the
core's to say.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Final

from uncut_mpi import _native
from uncut_mpi.model.locations import location_table, with_ends
from uncut_mpi.model.placement import Matrix
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.alignment import choose_alignment, elements_aligned
from uncut_mpi.planning.blocking import blocking_of, count_blocks, forms_sums, steps_of
from uncut_mpi.planning.buffers import homes, parts_on_devices, user_pieces, user_table
from uncut_mpi.planning.options import Blocking
from uncut_mpi.planning.partition import Partition
from uncut_mpi.planning.schedule import Op
from uncut_mpi.planning.setting import Setting
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
        locations=with_ends(location_table(machine.num_ranks)),
        buffers=user_table(machine.num_ranks, problem, placement),
        pieces=user_pieces(problem, placement),
        step=elements_aligned(problem),  # a transposed B is aligned along n
        min_slice_bytes=MIN_SLICE_BYTES,
        relay_bytes=min(max(1, min(setting.room) // MANY_RELAYS), RELAY_BYTES),
        ways=ways_of(machine),
    )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """
    How C is cut among ranks.

    Attributes
    ----------
    partitions : sequence of Partition
        Blocks of each rectangle of C that is computed.
    places : sequence of KBlocksPlaces
        The same for the core.
    is_even : bool
        Whether all extents of the problem, and where blocks start, are multiples of what products are aligned to.
    """

    partitions: Sequence[Partition]
    places: Sequence[_native.KBlocksPlaces]
    is_even: bool

    @classmethod
    def of(cls, problem: GemmProblem, partitions: Sequence[Partition]) -> Cut:
        """Return the same for the core too."""
        places, extents = [], [problem.m, problem.n, problem.k, problem.lda, problem.ldb, problem.ldc]
        for one in partitions:
            blocks = [((rows.start, rows.stop), (cols.start, cols.stop)) for rows, cols in one.blocks]
            places.append(_native.KBlocksPlaces(blocks))
            extents += [edge for rows, (left, _) in blocks for edge in (*rows, left)]
        step = elements_aligned(problem)
        return cls(partitions, places, not any(extent % step for extent in extents))

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

    @property
    def blocks(self) -> Iterator[tuple[int, int, range, range]]:
        """Rectangle, place, rows and columns of each block of C that has elements."""
        for number, partition in enumerate(self.partitions):
            for place, (rows, cols) in enumerate(partition.blocks):
                if rows and cols:
                    yield number, place, rows, cols


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class DealtPanels:
    """
    A problem as it is dealt to ranks, whatever they do with it.

    Attributes
    ----------
    setting : Setting
        What is multiplied where.
    in_core : KBlocksProblem
        The same for the core.
    cut : Cut
        How C is cut: one block for each rank, or for all that share k.
    devices : sequence of int
        Ranks that compute, those of the first part of k first.
    k_starts : sequence of int
        Where parts of k start, and their end.
    """

    setting: Setting
    in_core: _native.KBlocksProblem
    cut: Cut
    devices: Sequence[int]
    k_starts: Sequence[int]

    @property
    def problem(self) -> GemmProblem:
        """The problem."""
        return self.setting.problem

    @property
    def splits(self) -> int:
        """Parts of k."""
        return len(self.k_starts) - 1

    def request(self, how: Blocking, *, aligns: bool) -> _native.KBlocksRequest:
        """
        Return what the core is asked for.

        Parameters
        ----------
        how : Blocking
            With everything set.
        aligns : bool
            Whether ranks may take panels for what they hold, so that their products are aligned.
        """
        first_at_worker = max(
            0, count_blocks(how.columns) - how.away
        )  # the first column block combined where it is computed
        return _native.KBlocksRequest(
            problem=self.in_core,
            how=blocking_of(how, far_apart=self._far_apart),
            combines=forms_sums(self.problem, self.splits),
            at_owner=how.combine == "owner" and self.setting.placement.on_device(Matrix.C) and first_at_worker > 0,
            first_at_worker=first_at_worker,
            k_starts=self.k_starts,
            devices=self.devices,
            rounds=self.cut.places,
            aligned=[*self._aligned(how)] if aligns and not how.slots else [],
        )

    @property
    def _far_apart(self) -> bool:
        """Whether k-blocks of B are rows far apart in host memory; stored transposed they are whole columns."""
        return self.setting.placement.in_host(Matrix.B) and self.problem.trans_b == "N"

    def _aligned(self, how: Blocking) -> Iterator[tuple[int, int, int, bool, bool, bool, int]]:
        """Return (rectangle, place, part of k, ...) of ranks that do something about columns that are not aligned."""
        step = elements_aligned(self.problem)
        placement, num_places = self.setting.placement, len(self.cut.partitions[0].blocks)
        if self.cut.is_even and not placement.in_parts and not any(start % step for start in self.k_starts):
            return
        held = parts_on_devices(self.problem, placement)
        for number, place, rows, cols in self.cut.blocks:
            for split, (start, stop) in enumerate(itertools.pairwise(self.k_starts)):
                rank = self.devices[split * num_places + place]
                found = choose_alignment(
                    self.problem,
                    self.setting.machine,
                    rank,
                    (rows, cols, range(start, stop)),
                    homes(self.problem, held.get(rank, ()), rows, cols, range(start, stop)),
                    steps_of(stop - start, how, far_apart=self._far_apart),
                    may_sum_apart=forms_sums(self.problem, self.splits),
                )
                copied = Matrix.A in found.copied, Matrix.B in found.copied
                yield number, place, split, *copied, found.apart, found.k_step
