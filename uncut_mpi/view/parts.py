"""Which part of A, B or C each operand of a schedule is, followed through the copies; and its name."""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from uncut_mpi.model.locations import end_name
from uncut_mpi.planning.schedule import Kind, Matrix, Op, Role, Schedule, expand_ranges

_NAMES: Final = {Matrix.A: "A", Matrix.B: "B", Matrix.C: "C", Matrix.NONE: "scratch"}
_Place = tuple[int, int]
_Part = tuple[int, int, int]  # matrix, row, col
_Key = tuple[int, int, int]  # buffer, row, col


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """
    The part of a matrix that each operand is.

    Attributes
    ----------
    matrix : ndarray of uint8, shape (number of operands,)
        `Matrix`, of the schedule's (column-major) problem.
    row, col : ndarray of int64, shape (number of operands,)
        First element, in the matrix as stored; −1 where it cannot be told.
    """

    matrix: np.ndarray
    row: np.ndarray
    col: np.ndarray


def find_parts(schedule: Schedule) -> Parts:
    """Return which part of a matrix each operand of a schedule is."""
    regions, buffers = schedule.regions, schedule.buffers
    region_of = schedule.operands["region"]
    operand_region = regions[region_of]
    operand_buffer = buffers[operand_region["buffer"]]
    is_user = (operand_buffer["role"] == Role.USER).tolist()
    # A panel is one stretch of a matrix from the first task to the last, read from wherever in it; so are most others.
    is_panel = (operand_buffer["role"] == Role.PANEL).tolist()
    stretches: dict[int, _Part | None] = {}
    keys = list(
        zip(
            operand_region["buffer"].tolist(),
            operand_region["row"].tolist(),
            operand_region["col"].tolist(),
            strict=True,
        )
    )
    corners = _corners(schedule)
    transposed = (schedule.operands["op"] == Op.T).tolist()
    unknown = [(matrix, -1, -1) for matrix in operand_buffer["matrix"].tolist()]
    parts = list(unknown)
    held: dict[_Key, _Part] = {}
    tasks = schedule.tasks
    for kind, first, count in zip(
        tasks["kind"].tolist(), tasks["first_operand"].tolist(), tasks["num_operands"].tolist(), strict=True
    ):
        if count == 0:
            continue
        for operand in range(first, first + count):
            key = keys[operand]
            if is_user[operand]:
                turned, top, left = corners[key[0]]
                down, along = (key[2], key[1]) if turned else key[1:]
                parts[operand] = (unknown[operand][0], top + down, left + along)
            elif operand > first and (is_panel[operand] or key not in held) and (known := stretches.get(key[0])):
                matrix, row, col = known
                parts[operand] = (matrix, row + key[1], col + key[2])
            elif operand > first:
                parts[operand] = held.get(key, unknown[operand])
        if is_user[first]:
            continue
        if kind == Kind.GEMM:
            a, b = parts[first + 1], parts[first + 2]
            row, col = a[2 if transposed[first + 1] else 1], b[1 if transposed[first + 2] else 2]
            parts[first] = (int(Matrix.C), row, col) if min(row, col) >= 0 else unknown[first]
        else:
            parts[first] = next((part for part in parts[first + 1 : first + count] if part[1] >= 0), unknown[first])
        held[keys[first]] = parts[first]
        if parts[first][1] >= 0:
            (matrix, row, col), (buffer, buffer_row, buffer_col) = parts[first], keys[first]
            found = (matrix, row - buffer_row, col - buffer_col)
            stretches[buffer] = found if is_panel[first] or stretches.get(buffer, found) == found else None
    table = np.array(parts, np.int64).reshape(len(parts), 3)
    return Parts(table[:, 0].astype(np.uint8), table[:, 1].copy(), table[:, 2].copy())


def _corners(schedule: Schedule) -> dict[int, tuple[int, int, int]]:
    """Return of each of the caller's buffers whether it is stored transposed, and where in its matrix it begins."""
    return {
        buffer: (turned, top - (col if turned else row), left - (row if turned else col))
        for buffer, turned, row, col, _, _, top, left in schedule.pieces.tolist()
    }


def make_labels(schedule: Schedule, parts: Parts) -> list[str]:
    """
    Return a short name of every task, as ``A(2,3) host->1`` or ``C(1,2) += A(1,0) B(0,2)``.

    Numbers in parentheses are tiles, from 0, of op(A), op(B) and C as the caller has them, first to last where there
    are several, as ``C(1,0-4) += A(1,0-2) B(0-2,0-4)``; ``.n`` after them is the n-th part of a fetch that goes in
    parts. A JOIN has an empty name.
    """
    tasks = schedule.tasks
    names = _part_names(schedule, parts)
    labels = [""] * len(tasks)
    first = tasks["first_operand"].tolist()
    for task in np.flatnonzero(tasks["kind"] == Kind.GEMM).tolist():
        at = first[task]
        factors = (at + 2, at + 1) if schedule.problem.swapped else (at + 1, at + 2)
        labels[task] = f"{names[at]} += {names[factors[0]]} {names[factors[1]]}"
    for task in np.flatnonzero(tasks["kind"] == Kind.COMBINE).tolist():
        labels[task] = f"{names[first[task]]} combined"
    chunks = _chunks(schedule, parts)
    for task, source, destination, _ in schedule.copies().tolist():
        ends = "->".join(end_name(schedule.locations, end) for end in (source, destination))
        labels[task] = f"{names[first[task] + 1]}{chunks.get(task, '')} {ends}"
    return labels


def _part_names(schedule: Schedule, parts: Parts) -> list[str]:
    """Return matrix and tiles of every operand."""
    letters = dict(_NAMES)
    if schedule.problem.swapped:
        letters[Matrix.A], letters[Matrix.B] = letters[Matrix.B], letters[Matrix.A]
    multiplied = np.repeat(schedule.tasks["kind"] == Kind.GEMM, schedule.tasks["num_operands"])
    at = expand_ranges(schedule.tasks["first_operand"], schedule.tasks["num_operands"])
    in_gemm = np.zeros(len(schedule.operands), bool)
    in_gemm[at[multiplied]] = True
    tiles = np.full((len(schedule.operands), 2), -1, np.int64)
    lasts = tiles.copy()
    regions = schedule.regions[schedule.operands["region"]]
    for matrix in (Matrix.A, Matrix.B, Matrix.C):
        of = (parts.matrix == matrix) & (parts.row >= 0)
        # Products work on whole tiles; copies may carry parts of them.
        whole = of & in_gemm if (of & in_gemm).any() else of
        for axis, (offsets, extents) in enumerate(((parts.row, regions["rows"]), (parts.col, regions["cols"]))):
            starts = np.unique(offsets[whole])
            tiles[of, axis] = np.searchsorted(starts, offsets[of], side="right") - 1
            lasts[of, axis] = np.searchsorted(starts, (offsets + np.maximum(extents, 1) - 1)[of], side="right") - 1
    # From stored tiles to those of op(A) and op(B), and from the column-major problem to the caller's.
    for matrix, trans in ((Matrix.A, schedule.problem.trans_a), (Matrix.B, schedule.problem.trans_b)):
        if trans == "T":
            for ends in (tiles, lasts):
                ends[parts.matrix == matrix] = ends[parts.matrix == matrix, ::-1]
    if schedule.problem.swapped:
        tiles, lasts = tiles[:, ::-1], lasts[:, ::-1]
    return [
        letters[Matrix(matrix)]
        + (f"({_span(first[0], last[0])},{_span(first[1], last[1])})" if min(first) >= 0 else "")
        for matrix, first, last in zip(parts.matrix.tolist(), tiles.tolist(), lasts.tolist(), strict=True)
    ]


def _span(first: int, last: int) -> str:
    return f"{first}-{last}" if last > first else str(first)


def _chunks(schedule: Schedule, parts: Parts) -> dict[int, str]:
    """Return ``.n`` for every copy that carries the n-th of several parts of what its group fetches."""
    tasks = schedule.tasks
    copies = np.flatnonzero((tasks["kind"] == Kind.COPY) & (tasks["group"] >= 0))
    source = tasks["first_operand"][copies] + 1
    offsets: dict[int, set[_Place]] = {}
    listed = list(
        zip(
            copies.tolist(),
            tasks["group"][copies].tolist(),
            parts.row[source].tolist(),
            parts.col[source].tolist(),
            strict=True,
        )
    )
    for _, group, row, col in listed:
        offsets.setdefault(group, set()).add((row, col))
    order = {group: {place: n for n, place in enumerate(sorted(found))} for group, found in offsets.items()}
    return {task: f".{order[group][row, col]}" for task, group, row, col in listed if len(order[group]) > 1}
