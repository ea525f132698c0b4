"""
How the Uncut-GEMMs paper multiplies what does not fit the devices: cubes one after the other (section III-C1).

A problem whose SoftBufs would be larger than what there is for them is cut into sub-problems of m = n = k = T_L, with
the largest T_L that fits. Each is a problem of its own for all devices, by the paper's scheduler, and the next one
begins when it is over. C of a cube is read and written for each T_L of k.
"""

from __future__ import annotations

import itertools
from typing import Final, NamedTuple

from uncut_mpi.errors import CapacityError, ParamError
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import uncut
from uncut_mpi.planning.options import changed
from uncut_mpi.planning.setting import Setting

EDGE_STEP: Final = 256
"""What T_L is a multiple of (elements), unless less fits: kernels are best at such extents."""


class Cube(NamedTuple):
    """A sub-problem: rows and columns of C and steps of k, and whether it is the first that adds to its C."""

    rows: range
    cols: range
    k: range
    is_first: bool


def largest_edge(setting: Setting) -> int:
    """
    Return T_L: the edge of the largest cube that fits, or the longest extent if the whole problem does.

    Pure and deterministic.

    Parameters
    ----------
    setting : Setting
        Its options are those of each cube's schedule; `device_memory` is what a rank may use.

    Raises
    ------
    CapacityError
        If not even a cube of one step fits.
    ParamError
        If sums of half types would be rounded between cubes.
    """
    problem, asked = setting.problem, changed(setting.options, scheduler="uncut")

    def check(m: int, n: int, k: int) -> None:
        part = GemmProblem(m, n, k, problem.dtype, problem.trans_a, problem.trans_b, swapped=problem.swapped)
        uncut.prepare(setting.but(problem=part, options=asked))

    longest = max(problem.m, problem.n, problem.k)
    try:
        check(problem.m, problem.n, problem.k)
    except CapacityError as error:
        if problem.rounds_c:
            raise ParamError(
                f"cubes of {problem.arithmetic.name}: sums would be rounded each time that C leaves the devices; use "
                "another scheduler"
            ) from error
    else:
        return longest
    least, most = 0, -(-longest // EDGE_STEP)
    while most - least > 1:
        edge = (least + most) // 2
        try:
            check(*(min(EDGE_STEP * edge, one) for one in (problem.m, problem.n, problem.k)))
        except CapacityError:
            most = edge
        else:
            least = edge
    if least:
        return least * EDGE_STEP
    smallest = min(EDGE_STEP, longest)
    check(*(min(smallest, one) for one in (problem.m, problem.n, problem.k)))
    return smallest


def cubes(problem: GemmProblem, edge: int) -> list[Cube]:
    """Return the sub-problems of an edge in their order: all of k for one block of C, then the next one down."""
    rows, cols, steps = (
        [range(start, min(start + edge, extent)) for start in range(0, extent, edge)]
        for extent in (problem.m, problem.n, problem.k)
    )
    return [Cube(down, along, step, step.start == 0) for along, down, step in itertools.product(cols, rows, steps)]
