"""Which ranks' parts of one matrix share memory with another one, or with each other. Local."""

from __future__ import annotations

import collections

from uncut_mpi.api.matrix import HeldPart, MatrixInfo
from uncut_mpi.mappings import Stretch
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.parts import Part


def overlapping(x: MatrixInfo, written: MatrixInfo) -> tuple[int, ...]:
    """
    Return ranks whose part of `written` overlaps `x`.

    Exact for parts of one leading dimension and type; otherwise true whenever they share a byte between their first
    and last ones.
    """
    changed: dict[str, list[tuple[HeldPart, Stretch]]] = collections.defaultdict(list)
    for held in written.parts:
        for piece in held.pieces:
            if piece.written:
                changed[piece.memory].append((held, piece))
    found = {
        other.holder
        for held in x.parts
        for piece in held.pieces
        for other, changing in changed.get(piece.memory, ())
        if _meet((held.part, piece, x.dtype), (other.part, changing, written.dtype))
    }
    return tuple(sorted(found))


def overlapping_itself(written: MatrixInfo) -> tuple[int, ...]:
    """Return the ranks of two parts of which writing one changes an element of the other; none if there are none."""
    there: dict[str, list[tuple[HeldPart, Stretch]]] = collections.defaultdict(list)
    for held in written.parts:
        for piece in held.pieces:
            for other, known in there[piece.memory]:
                meet = (piece.written or known.written) and other is not held
                if meet and _meet((held.part, piece, written.dtype), (other.part, known, written.dtype)):
                    return tuple(sorted({held.holder, other.holder}))
            there[piece.memory].append((held, piece))
    return ()


def _meet(x: tuple[Part, Stretch, DType], y: tuple[Part, Stretch, DType]) -> bool:
    """Return whether two parts share an element's bytes, each as it lies around a piece of it in one memory."""
    (x_part, piece, x_type), (y_part, other, y_type) = x, y
    (x_rows, x_cols), (y_rows, y_cols) = x_part.stored_shape, y_part.stored_shape
    if not (x_rows and x_cols and y_rows and y_cols):
        return False
    if piece.start + piece.nbytes <= other.start or other.start + other.nbytes <= piece.start:
        return False
    item = x_type.itemsize
    same = x_part.ld == y_part.ld and x_type is y_type
    distance = (other.start - other.offset) - (piece.start - piece.offset)
    if not same or distance % item:
        return True
    # Rectangles of one array of leading dimension ld, both read column-major. y starts `col` columns
    # and `row` rows after x; a negative row offset appears as ld − |row| in the column before.
    ld = x_part.ld
    col, row = divmod(distance // item, ld)
    candidates = ((col, row), (col + 1, row - ld))
    return any(-y_rows < r < x_rows and -y_cols < c < x_cols for c, r in candidates)
