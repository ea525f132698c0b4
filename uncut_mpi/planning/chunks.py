"""
Products whose schedule would be too large: done in chunks, blocks of C one after another, each by its own schedule.

A schedule is made, proved, lowered and bound as a whole, at some 4 µs and half a kilobyte for each task. A product with
memory for a small part of it has millions of them. So its C is cut into chunks of as many rows or columns each. These
are products of their own, which lie in memory alike, and all of one shape have one schedule. While a chunk is computed
there is no other, so that the device's memory is all its own. What is lost is what the first k-block of a chunk takes
to arrive and its last part of C to leave: milliseconds of a chunk that takes minutes.

k is not cut, so each element of C is summed and rounded as in one schedule.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Collection
from typing import Final, TypeVar

from uncut_mpi.errors import CapacityError, PlanError
from uncut_mpi.model.form import PLAIN
from uncut_mpi.model.locations import location_table
from uncut_mpi.model.parts import Extent, common
from uncut_mpi.model.placement import MATRICES, Matrix, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.buffers import user_table
from uncut_mpi.planning.limits import MAX_TASKS
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.staging import TooManyPiecesError, bytes_of_pieces, stage, used_by_others

MOST_TASKS: Final = 150_000
"""Tasks of a chunk for each node, about: such a schedule takes a node some seconds and some hundred megabytes."""

STEP: Final = 256
EVEN_STEP: Final = 8
"""Chunks begin at multiples of so many rows or columns, or of the second if all have as many then."""


MOST_KINDS: Final = 16
"""Chunks that lie differently have plans of their own, so many at a time; figures of others are those of the first."""

_Value = TypeVar("_Value")


@dataclasses.dataclass(frozen=True, slots=True)
class Chunks:
    """
    How the C of a column-major problem is cut.

    Attributes
    ----------
    axis : int
        Along its rows (0) or its columns (1).
    edges : tuple of int
        Where chunks begin, and the extent at the end.
    """

    axis: int
    edges: tuple[int, ...]

    @property
    def extents(self) -> list[Extent]:
        """The rows or columns of each chunk."""
        return list(itertools.pairwise(self.edges))


def chunks_of(setting: Setting) -> Chunks | None:
    """
    Return how to cut a product whose schedule would be too large; None for one that need not be cut, or cannot be.

    Pure and deterministic. Only what ranks have not room for has such schedules. Their tasks are counted with what
    `kblocks` chooses by its own rules.

    Parameters
    ----------
    setting : Setting
        The machine's host memory stands for files, if matrices lie there.
    """
    problem = setting.problem
    if (
        problem.sums is not None
        or problem.batch
        or not problem.has_product
        or (not setting.private and setting.surely_fits)
    ):
        return None
    if setting.options.scheduler not in ("auto", "kblocks"):
        return None
    straight = setting.straight
    most = _most_tasks(setting)
    if tasks_of(straight) <= most:
        return None
    for axis in _axes(problem, straight.placement):
        extent = (problem.m, problem.n)[axis]
        count, before = 2, extent
        while (size := _size(extent, count)) < before:
            chunks = Chunks(axis, (*range(0, extent, size), extent))
            if tasks_of(_setting_of(straight, axis, chunks.extents[0])) <= most:
                return chunks
            count, before = 2 * count, size
    return None


def chunk_of(problem: GemmProblem, placement: Placement, axis: int, extent: Extent) -> tuple[GemmProblem, Placement]:
    """Return the product that forms some rows (`axis` 0) or columns (1) of C, and where its matrices lie."""
    size = extent[1] - extent[0]
    part = problem.part and problem.part.within(*_seen(problem, Matrix.C, axis, extent))
    found = [placement.seen(matrix, *_seen(problem, matrix, axis, extent)) for matrix in MATRICES]
    m, n = (size, problem.n) if axis == 0 else (problem.m, size)
    return dataclasses.replace(problem, m=m, n=n, part=part), Placement(*found)


def of_each(setting: Setting, chunks: Chunks | None, value_of: Callable[[Setting], _Value]) -> list[_Value]:
    """
    Return a value for each chunk, or the one of a product that is not cut.

    It is found once for each kind of chunk; beyond `MOST_KINDS` of them it is that of the first one.
    """
    every = [setting] if chunks is None else [_setting_of(setting, chunks.axis, one) for one in chunks.extents]
    known = {one: value_of(one) for one in itertools.islice(dict.fromkeys(every), MOST_KINDS)}
    return [known.get(one, known[every[0]]) for one in every]


def _setting_of(setting: Setting, axis: int, extent: Extent) -> Setting:
    """Return the setting of a chunk."""
    which = setting.problem, setting.placement, axis, extent
    problem, placement = chunk_of(*which)
    private, files = (buffers_of(*which, some) for some in (setting.private, setting.files))
    return setting.but(problem=problem, placement=placement, private=private, files=files)


def _seen(problem: GemmProblem, matrix: Matrix, axis: int, extent: Extent) -> tuple[Extent, Extent]:
    """Return which rows and columns of a matrix a chunk uses."""
    rows, cols = ((0, whole) for whole in problem.shape_of(matrix))
    if matrix is Matrix.C or matrix is (Matrix.A if axis == 0 else Matrix.B):
        op = problem.trans_a if matrix is Matrix.A else problem.trans_b if matrix is Matrix.B else "N"
        if (axis == 0) == (op == "N"):
            return extent, cols
        return rows, extent
    return rows, cols


def buffers_of(
    problem: GemmProblem, placement: Placement, axis: int, extent: Extent, buffers: Collection[int]
) -> tuple[int, ...]:
    """Return the numbers that some of the caller's buffers, the parts of A, B and C in turn, have in a chunk."""
    kept: list[int] = []
    before = 0
    for matrix in MATRICES:
        rows, cols = _seen(problem, matrix, axis, extent)
        parts = placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix))
        kept += [before + at for at, part in enumerate(parts) if common((part.rows, part.cols), (rows, cols))]
        before += len(parts)
    return tuple(now for now, number in enumerate(kept) if number in buffers)


def _size(extent: int, count: int) -> int:
    """Return how many of so many rows or columns each of about `count` chunks has."""
    if extent % (count * EVEN_STEP) == 0:
        return extent // count
    return -(-extent // count // STEP) * STEP


def _axes(problem: GemmProblem, placement: Placement) -> tuple[int, ...]:
    """
    Return along what to cut, the best first: where chunks lie alike and have one schedule; then the longer.

    What has a form is not cut.
    """
    if problem.forms != PLAIN:
        return (0 if problem.forms[0] is None else 1,)
    longer = 0 if problem.m >= problem.n else 1
    for axis in (longer, 1 - longer):
        extent = (problem.m, problem.n)[axis]
        half = extent // 2
        if half > 0:
            both = [chunk_of(problem, placement, axis, one)[1] for one in ((0, half), (half, 2 * half))]
            if both[0] == both[1]:
                return axis, 1 - axis
    return longer, 1 - longer


def _most_tasks(setting: Setting) -> int:
    return min(MAX_TASKS, setting.machine.num_nodes * MOST_TASKS)


def tasks_of(setting: Setting) -> float:
    """Return how many tasks a schedule has; none where its size is no matter, infinitely many beyond counting."""
    users = user_table(setting.machine.ranks, setting.problem, setting.placement)
    staged = bytes_of_pieces(
        users, location_table(setting.machine.ranks), [*setting.private], setting.options.host_memory
    )
    if setting.surely_fits and not staged:
        return 0
    try:
        made = kblocks.Planner(setting).prepare(setting.options)
        if not staged:
            return made.count(_most_tasks(setting)) if made.options.blocking.in_rings else 0
        schedule = made.schedule(_most_tasks(setting))
        return len(stage(schedule, used_by_others(schedule, setting.private), setting).tasks)
    except (PlanError, TooManyPiecesError):
        return math.inf
    except CapacityError:  # other blocks are looked for then
        return 0
