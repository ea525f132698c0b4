"""
What the core is asked for by `kblocks`: a problem, how C is cut among ranks, and how each rank cuts its part.

All of it is made at once and never changed. Where panels lie (`_native.KBlocksLayout`), what is emitted and how many
tasks that is are the core's to say; it counts them without making any.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Final

from uncut_mpi import _native
from uncut_mpi.errors import PlanError
from uncut_mpi.model.locations import location_table, with_ends
from uncut_mpi.model.placement import Matrix
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.blocking import blocking_of, count_blocks
from uncut_mpi.planning.buffers import elements_aligned, user_pieces, user_table
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.limits import FEW_TASKS, MAX_STEPS, MAX_TASKS, too_many
from uncut_mpi.planning.options import Blocking, changed
from uncut_mpi.planning.partition import Partition
from uncut_mpi.planning.schedule import Op, ending_of
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
        ending=ending_of(problem),
        diagonal=problem.diagonal,
        dtypes=problem.dtypes,
        locations=with_ends(location_table(machine.ranks)),
        buffers=user_table(machine.ranks, problem, placement),
        pieces=user_pieces(problem, placement),
        step=elements_aligned(problem),  # a transposed B is aligned along n
        min_slice_bytes=MIN_SLICE_BYTES,
        relay_bytes=min(max(1, min(setting.room) // MANY_RELAYS), RELAY_BYTES),
        ways=ways_of(machine),
        same_sums=problem.sums is not None,
        fuses=problem.fuses_epilogue,
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

    def check_steps(self, how: Blocking) -> None:
        """Raise `PlanError`, before any step is made, if each rank has too many k-blocks and blocks of C."""
        k_blocks = blocking_of(how, far_apart=False).count_k_blocks(self._depth)
        blocks = count_blocks(how.columns) * count_blocks(how.rows)
        steps, unit, what = (
            k_blocks * blocks,
            "pairs of them",
            f"{k_blocks} k-blocks and {blocks} blocks of C on each rank",
        )
        mend = "ask for longer k-blocks (blocking.block), or for fewer blocks (blocking.columns, blocking.rows)"
        if how.in_rings:
            rows, cols = self.largest
            rounds = -(-rows // (how.c_rows or rows or 1)) * -(-cols // (how.c_cols or cols or 1))
            rounds = rounds if self.problem.sums is None else len(self.partitions)
            steps, unit = rounds * (k_blocks + blocks), "steps"
            what = f"{rounds} blocks of C on each rank, one after the other, and {k_blocks} k-blocks"
            mend = (
                "give ranks more memory (device_memory), or ask for larger blocks (blocking.c_rows, blocking.c_cols, "
                "blocking.block)"
            )
        if steps > MAX_STEPS:
            raise too_many(self.problem, f"kblocks with {what}", f"{steps} {unit}", MAX_STEPS, mend)

    def with_longer_k_blocks(self, how: Blocking) -> Blocking:
        """Return k-blocks of twice, four times ... the length where there would be more tasks than there may be."""
        if self._count(how, MAX_TASKS) <= MAX_TASKS:
            return how
        while self._count(how, FEW_TASKS) > FEW_TASKS and how.block < self._depth:
            how = changed(how, block=min(2 * how.block, self._depth))
        return how

    def too_many_tasks(self, most_tasks: int) -> PlanError:
        """Return the error that says what makes more tasks than so many."""
        return too_many(
            self.problem,
            f"kblocks on {ProcessGrid(*self.grid, self.problem.swapped)} ranks, k split {self.splits} times,",
            f"more than {most_tasks} tasks",
            most_tasks,
            "ask for larger k-blocks (blocking.block), another grid or fewer ranks",
        )

    @property
    def _depth(self) -> int:
        """The elements of the longest part of k."""
        return -(-self.problem.k // self.splits)

    def _count(self, how: Blocking, most_tasks: int) -> int:
        """Return how many tasks there are, or any lower number where they are surely few enough."""
        request = self.request(how, aligns=False)
        if request.tasks_at_most <= most_tasks:
            return 0
        return _native.KBlocksLayout(request).count(most_tasks)
