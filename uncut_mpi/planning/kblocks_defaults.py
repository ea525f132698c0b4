"""What `kblocks` does where nobody says: how it cuts a product, and its process grid."""

from __future__ import annotations

from typing import Final

from uncut_mpi.model.placement import Matrix, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.options import BARRIERS, IN_RINGS, SWEEPS, USUAL_SLOTS, Blocking, ScheduleOptions, changed

MOST_IN_A_ROW: Final = 32
"""Ranks of a grid row, where nobody asks for a grid and all is in host memory."""

MOST_K_BLOCKS: Final = 1024
"""Into how many k-blocks a rank's part of k is cut where nobody asks: of a longer k they are longer."""


def choose(
    problem: GemmProblem, placement: Placement, num_workers: int, options: ScheduleOptions, *, even: bool = True
) -> Blocking:
    """
    Return `options.blocking` with everything set: what it leaves open follows simple rules.

    k is split over all ranks where it is at least eight times the larger of m and n (and nobody asked for a
    grid or shares). k-blocks grow twofold from 256 to 2048, with half types, whose products read and write C in
    float32, to 8192, or to longer ones of which there are `MOST_K_BLOCKS`. A C in host memory is handed on in the order
    ``"columns"``, any other, or where `Blocking.tail` is given, in the order ``"k"``. In the order ``"corner"`` there
    are as many row blocks as column blocks. Two products may have begun. Pieces go by list scheduling unless links
    between devices are `even`. Ranks begin with what they hold of matrices in parts whose parts are all on devices.
    """
    asked = options.blocking
    if asked.in_rings:
        asked = in_rings(asked)
    if asked.is_complete:
        return asked
    on_host = placement.in_host(Matrix.C)
    splits = asked.splits or len(options.k_shares or ())
    if not splits:
        thin = problem.k >= 8 * max(problem.m, problem.n)
        free = (options.grid, options.row_shares, options.col_shares, options.areas) == (None,) * 4
        splits = num_workers if thin and free else 1
    largest = 8192 if problem.arithmetic.sums_wider else 2048
    block = asked.block or max(asked.first, largest, -(-problem.k // (splits * MOST_K_BLOCKS)))
    order = asked.order or ("corner" if asked.rows > 1 else "columns" if on_host and not asked.tail else "k")
    columns = asked.columns or 4
    held = placement.in_parts and not placement.in_host(Matrix.A, Matrix.B)
    return changed(
        asked,
        splits=splits,
        first=asked.first or min(256, block),
        block=block,
        growth=asked.growth or 2,
        columns=columns,
        rows=asked.rows or (columns if order == "corner" else 1),
        order=order,
        lanes=asked.lanes or 2,
        delivery=asked.delivery or ("balanced" if even else "earliest"),
        begin=asked.begin or ("held" if held else "first"),
        combine=asked.combine or "owner",
    )


def in_rings(how: Blocking) -> Blocking:
    """Return how ranks do with room for some k-blocks at a time: what is left open has one value only."""
    open_ = {"slots": how.slots or USUAL_SLOTS, "c_slots": how.c_slots or 1, "sweep": how.sweep or SWEEPS[0]}
    return changed(how, **IN_RINGS, tail=0, barrier=how.barrier or BARRIERS[0], **open_)


def choose_grid(
    placement: Placement, num_places: int, options: ScheduleOptions, *, transposed: bool = False
) -> ProcessGrid:
    """
    Return the process grid asked for; else one row of ranks if all is in host memory, else the most square one.

    With one grid row every copy from and to the host is of whole columns, which move faster than rows far apart. But
    the ranks of a row hand slices of A to each other, copies by the square of their number, and all of A has to enter
    every rank. So more than `MOST_IN_A_ROW` ranks have as few rows as leave no more than that in a row, if that is
    possible with no more rows than columns. Where shares are given without a grid it is the most square one, which they
    have to fit.
    """
    on_host = not placement.on_device()
    if options.grid is None and options.row_shares is None and options.col_shares is None and on_host:
        square = ProcessGrid.most_square(num_places, transposed=transposed)
        rows = [rows for rows in range(1, square.rows + 1) if num_places % rows == 0]
        return next(
            (
                ProcessGrid(count, num_places // count, transposed)
                for count in rows
                if num_places // count <= MOST_IN_A_ROW
            ),
            square,
        )
    return ProcessGrid.choose(num_places, options.grid, transposed=transposed)
