"""How a rank's part of a product is cut, in few words, and the steps in which it is taken."""

from __future__ import annotations

import enum
from typing import NamedTuple

from uncut_mpi.planning.blocking import blocking_of
from uncut_mpi.planning.options import Blocking


class StepKind(enum.IntEnum):
    """What a step does: fetch a piece of op(A), of op(B), of C; multiply; hand finished columns on."""

    FETCH_A = 0
    FETCH_B = 1
    FETCH_C = 2
    MULTIPLY = 3
    FINISH = 4


class Step(NamedTuple):
    """One step: its part of k, its column blocks and row blocks, and whether C is there before its products."""

    kind: StepKind
    k_start: int
    k_stop: int
    first: int
    last: int
    top: int
    bottom: int
    early: bool


def steps_of(extent: int, how: Blocking, *, far_apart: bool = False) -> list[Step]:
    """Return the steps of one rank in the order in which they are issued, as the core makes them."""
    return [Step(*one) for one in blocking_of(how, far_apart=far_apart).steps(extent)]


def cut_by(**given) -> Blocking:
    """Return what says how a rank's part is cut, the rest being 1."""
    return Blocking(**{"growth": 2, "rows": 1, **given})


def k_blocks(extent: int, first: int, most: int, growth: int = 2) -> list[tuple[int, int]]:
    """Return where k-blocks start and end: A arrives in them."""
    how = cut_by(first=first, block=most, growth=growth, columns=1, order="columns")
    return [(step.k_start, step.k_stop) for step in steps_of(extent, how) if step.kind == StepKind.FETCH_A]
