"""Names: of a schedule, and of its tasks by the tiles of A, B and C that they work on, as the proof derives it."""

from __future__ import annotations

import numpy as np

from uncut_mpi.model.locations import end_name
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import MATRICES
from uncut_mpi.planning.schedule import Kind, Matrix, Schedule
from uncut_mpi.planning.verify import held_by_operands

_Operand = tuple[int, int]  # task, number of the operand in it


def letters_of(schedule: Schedule) -> dict[Matrix, str]:
    """Return what the caller calls each matrix: of a product that is computed transposed, A and B change places."""
    names = {Matrix.A: "A", Matrix.B: "B", Matrix.C: "C", Matrix.NONE: "scratch"}
    if schedule.problem.swapped:
        names[Matrix.A], names[Matrix.B] = names[Matrix.B], names[Matrix.A]
    return names


def make_labels(schedule: Schedule) -> list[str]:
    """
    Return a short name of every task, as ``A(2,3) host->1`` or ``C(1,2) += A(1,0) B(0,2)``.

    Numbers in parentheses are tiles, from 0, of op(A), op(B) and C as the caller has them, first to last where there
    are several, as ``C(1,0-4) += A(1,0-2) B(0-2,0-4)``. Rectangles that lie apart stand with a plus between them.
    ``.n`` after a name is the n-th part of a fetch that goes in parts. A JOIN has an empty name.
    """
    tasks = schedule.tasks
    held = held_by_operands(schedule)
    found = _names(schedule, held)
    letters = letters_of(schedule)

    def name(task: int, operand: int) -> str:
        if (task, operand) in found:
            return found[task, operand]
        region = schedule.regions[schedule.operands_of(task)[operand]["region"]]  # of zeros, which are of no place
        return letters[Matrix(schedule.buffers["matrix"][region["buffer"]])]

    labels = [""] * len(tasks)
    factors = (2, 1) if schedule.problem.swapped else (1, 2)
    for task in np.flatnonzero(tasks["kind"] == Kind.GEMM).tolist():
        labels[task] = f"{name(task, 0)} += {name(task, factors[0])} {name(task, factors[1])}"
    for task in np.flatnonzero(tasks["kind"] == Kind.COMBINE).tolist():
        labels[task] = f"{name(task, 0)} combined"
    chunks = _chunks(schedule, held)
    for task, source, destination, _ in schedule.copies().tolist():
        ends = "->".join(end_name(schedule.locations, end) for end in (source, destination))
        is_sent = tasks["kind"][task] == Kind.SEND  # its RECV is behind it, and holds the same
        of = (task + 1, 0) if is_sent else (task, 1)
        labels[task] = labels[of[0]] = f"{name(*of)}{chunks.get(of[0], '')} {ends}"
    return labels


def _names(schedule: Schedule, held: np.ndarray) -> dict[_Operand, str]:
    """Return matrix and tiles of every operand that holds elements of one."""
    problem, letters = schedule.problem, letters_of(schedule)
    in_gemm = schedule.tasks["kind"][held["task"]] == Kind.GEMM
    found: dict[_Operand, str] = {}
    for matrix in MATRICES:
        of = held["matrix"] == matrix
        # Products work on whole tiles; copies may carry parts of them.
        whole = of & in_gemm if (of & in_gemm).any() else of
        spans = []
        for start, extent in (("row", "rows"), ("col", "cols")):
            begins = np.unique(held[start][whole])
            ends = held[start][of] + held[extent][of] - 1
            tiles = (np.searchsorted(begins, at, side="right") - 1 for at in (held[start][of], ends))
            spans.append([_span(first, last) for first, last in zip(*(one.tolist() for one in tiles), strict=True)])
        # From stored tiles to those of op(A) and op(B), and from the column-major problem to the caller's.
        trans = {Matrix.A: problem.trans_a, Matrix.B: problem.trans_b}.get(matrix, "N")
        if (trans != "N") != problem.swapped:
            spans.reverse()
        operands = zip(held["task"][of].tolist(), held["operand"][of].tolist(), strict=True)
        for operand, row, col in zip(operands, *spans, strict=True):
            before = f"{found[operand]}+" if operand in found else ""
            found[operand] = f"{before}{letters[matrix]}({row},{col})"
    return found


def _span(first: int, last: int) -> str:
    return f"{first}-{last}" if last > first else str(first)


def _chunks(schedule: Schedule, held: np.ndarray) -> dict[int, str]:
    """Return ``.n`` for every copy that carries the n-th of several parts of what its group fetches."""
    group = schedule.tasks["group"][held["task"]]
    kind = schedule.tasks["kind"][held["task"]]
    read = (group >= 0) & ((kind == Kind.COPY) & (held["operand"] == 1) | (kind == Kind.RECV))
    columns = (held["task"], group, held["row"], held["col"])
    listed = list(zip(*(column[read].tolist() for column in columns), strict=True))
    offsets: dict[int, set[tuple[int, int]]] = {}
    for _, of, row, col in listed:
        offsets.setdefault(of, set()).add((row, col))
    order = {of: {place: n for n, place in enumerate(sorted(places))} for of, places in offsets.items()}
    return {task: f".{order[of][row, col]}" for task, of, row, col in listed if len(order[of]) > 1}


def title_of(schedule: Schedule, machine: Machine | None) -> str:
    """Return the problem, as the caller wrote it, the scheduler and, if it is known, the machine."""
    problem, place = schedule.problem, schedule.placement
    a, b = (place.b, place.a) if problem.swapped else (place.a, place.b)
    where = f"A, B, C at {a},{b},{place.c}"
    title = f"m×n×k = {problem.shape_text}, {problem.arithmetic.name}, {where}; scheduler {schedule.scheduler}"
    return f"{title}; machine {machine.name}" if machine else title
