"""How a rank's part of a product is cut, in few words."""

from __future__ import annotations

from uncut_mpi.planning.blocking import StepKind, steps_of
from uncut_mpi.planning.options import Blocking


def cut_by(**given) -> Blocking:
    """Return what says how a rank's part is cut, the rest being 1."""
    return Blocking(**{"growth": 2, "rows": 1, **given})


def k_blocks(extent: int, first: int, most: int, growth: int = 2) -> list[tuple[int, int]]:
    """Return where k-blocks start and end: A arrives in them."""
    how = cut_by(first=first, block=most, growth=growth, columns=1, order="columns")
    made = steps_of(extent, how, far_apart=False)
    return [(step.k_start, step.k_stop) for step in made if step.kind == StepKind.FETCH_A]
