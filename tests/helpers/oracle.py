"""
Whether a schedule is right, found out the slow way: by running it on numbers and comparing all pairs.

Independent of `uncut_mpi.planning.verify`, whose verdicts it judges. Types are ignored: everything
is computed in float64, of complex types in complex128, on poisoned memory.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from tests.helpers.layouts import user_parts
from tests.helpers.numbers import op_of, random_values, wide_of
from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.placement import MATRICES
from uncut_mpi.planning.builder import RegionRef
from uncut_mpi.planning.lower import Code, OperationList
from uncut_mpi.planning.schedule import Factor, Kind, Matrix, Op, Schedule

ALPHA, BETA = 2**0.5, 3**0.5
VALUE = {Factor.ZERO: 0.0, Factor.ONE: 1.0, Factor.ALPHA: ALPHA, Factor.BETA: BETA}


def is_wrong(schedule: Schedule) -> str:
    """Return why a schedule must not run, or an empty string."""
    try:
        schedule.check()
    except ScheduleError:
        return "structure"
    return wrong_result(schedule) or race(schedule)


def wrong_result(schedule: Schedule) -> str:
    """Run the tasks in the global order; return what is wrong with them or with the result."""
    problem = schedule.problem
    rng = np.random.default_rng(7)
    wide = wide_of(problem.dtype)
    memory = [np.full((row["rows"], row["cols"]), np.nan, wide) for row in schedule.buffers]
    before = {}
    for matrix in MATRICES:
        before[matrix] = np.full(problem.shape_of(matrix), np.nan, wide)
        if problem.reads_c if matrix is Matrix.C else problem.has_product:
            before[matrix][...] = random_values(rng, before[matrix].shape, DType.parse(wide))
        for _, held, place in user_parts(schedule, matrix, memory):
            held[...] = before[matrix][place]
    expected = np.zeros((problem.m, problem.n), wide)
    if problem.has_product:
        expected += ALPHA * op_of(problem.trans_a, before[Matrix.A]) @ op_of(problem.trans_b, before[Matrix.B])
    if problem.reads_c:
        expected += BETA * before[Matrix.C]
    for task in range(len(schedule.tasks)):
        fault = _run_task(schedule, task, memory)
        if fault:
            return fault
    for matrix in (Matrix.A, Matrix.B):
        for _, held, place in user_parts(schedule, matrix, memory):
            if not np.array_equal(held, before[matrix][place], equal_nan=True):
                return f"{matrix.name} was changed"
    good = [
        np.allclose(held, expected[place], rtol=1e-9, atol=1e-9)
        for _, held, place in user_parts(schedule, Matrix.C, memory)
    ]
    return "" if all(good) else "values"


def _run_task(schedule: Schedule, task: int, memory: list[np.ndarray]) -> str:
    kind = schedule.tasks[task]["kind"]
    if kind == Kind.JOIN:
        return ""
    operands = schedule.operands_of(task)
    refs = [region(schedule, operand["region"]) for operand in operands]
    views = [view(memory, ref) for ref in refs]
    terms = [
        (VALUE[Factor(operand["factor"])], op_of(Op(operand["op"]).name, part))
        for operand, part in zip(operands[1:], views[1:], strict=True)
    ]
    accumulates = kind == Kind.GEMM and len(refs) == 4
    if accumulates and refs[3] != refs[0]:
        return "a GEMM accumulates elsewhere than it writes"
    # A COMBINE may change a region in place; op(A) and op(B) lie apart from what a GEMM writes.
    if any(share(refs[0], ref) and (ref != refs[0] or kind != Kind.COMBINE) for ref in refs[1:3]):
        return "a task overwrites what it reads"
    if any(share(refs[0], ref) and ref != refs[0] for ref in refs[3:]):
        return "a task overwrites what it reads"
    target = views[0]
    if kind == Kind.GEMM:
        (f_a, a), (_, b) = terms[:2]
        if a.shape[1] != b.shape[0] or (a.shape[0], b.shape[1]) != target.shape:
            return "shapes"
        result = f_a * (a @ b)
        terms = terms[2:]
    else:
        if any(part.shape != target.shape for _, part in terms):
            return "shapes"
        result = np.zeros(target.shape, target.dtype)
    for factor, part in terms:
        if factor:
            result = result + factor * part
    target[...] = result
    return ""


def race(schedule: Schedule) -> str:
    """Return a pair of tasks that touch the same element, one of them writing, in no certain order."""
    before = ordered(schedule)
    accesses: dict[int, list[tuple[int, RegionRef, bool]]] = {}
    for task in range(len(schedule.tasks)):
        for place, operand in enumerate(schedule.operands_of(task)):
            ref = region(schedule, operand["region"])
            accesses.setdefault(ref.buffer, []).append((task, ref, place == 0))
    for entries in accesses.values():
        for (first, left, writes), (second, right, writes_too) in itertools.combinations(entries, 2):
            if (writes or writes_too) and first != second and share(left, right) and not before[second] >> first & 1:
                return f"race of tasks {first} and {second}"
    return ""


def ordered(schedule: Schedule) -> list[int]:
    """Return, per task, a bit set of the tasks that are over before it by lane order and awaits."""
    before: list[int] = []
    last: dict[int, int] = {}
    for task, lane in enumerate(schedule.tasks["lane"].tolist()):
        reached = 0
        for earlier in [*schedule.awaited(task).tolist(), *([last[lane]] if lane in last else [])]:
            reached |= before[earlier] | 1 << earlier
        before.append(reached)
        last[lane] = task
    return before


def lists_lose_order(schedule: Schedule, lists: Sequence[OperationList]) -> str:
    """Return a pair of tasks whose order the schedule asks for and the lists do not keep."""
    waits = (Code.WAIT_EVENT, Code.WAIT_FLAG)
    # (task, whether after its waits, place in its list, lane, code, slot, value, peer, in host memory). A JOIN has a
    # place, no body.
    nodes: list[tuple[int, ...]] = []
    for program in lists:
        lane_ids = np.flatnonzero(schedule.lanes["rank"] == program.rank)
        for at, (code, in_host, _, lane, task, slot, value, peer, _) in enumerate(program.operations.tolist()):
            nodes.append((task, code not in waits, at, int(lane_ids[lane]), code, slot, value, peer, in_host))
    for task in np.flatnonzero(schedule.tasks["kind"] == Kind.JOIN).tolist():
        nodes.append((task, True, -1, int(schedule.tasks["lane"][task]), Kind.JOIN, -1, 0, -1, 0))
    nodes.sort()
    reached: list[int] = []
    last: dict[int, int] = {}
    recorded: dict[tuple[int, int], int] = {}
    written: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    body: dict[int, int] = {}
    for number, (task, _, _, lane, code, slot, value, peer, in_host) in enumerate(nodes):
        rank = int(schedule.lanes["rank"][lane])
        earlier = [last[lane]] if lane in last else []
        if code == Code.WAIT_EVENT:
            earlier.append(recorded[rank, slot])
        elif code == Code.WAIT_FLAG:
            flag = (in_host, peer if in_host else rank, slot)
            earlier.append(min((v, number) for v, number in written[flag] if v >= value)[1])
        elif code == Code.RECORD:
            recorded[rank, slot] = number
        elif code == Code.SIGNAL:
            written.setdefault((in_host, rank if in_host else peer, slot), []).append((value, number))
        else:
            body[task] = number
        reached.append(0)
        for other in earlier:
            reached[number] |= reached[other] | 1 << other
        last[lane] = number
    before = ordered(schedule)
    for second, number in body.items():
        for first, other in body.items():
            if before[second] >> first & 1 and not reached[number] >> other & 1:
                return f"task {second} may start before task {first} is over"
    return ""


def region(schedule: Schedule, index: int) -> RegionRef:
    """Return a row of the region table."""
    row = schedule.regions[index]
    return RegionRef(*(int(row[name]) for name in ("buffer", "row", "col", "rows", "cols")))


def view(memory: list[np.ndarray], ref: RegionRef) -> np.ndarray:
    """Return the part of memory that a region names."""
    return memory[ref.buffer][ref.row : ref.row + ref.rows, ref.col : ref.col + ref.cols]


def share(left: RegionRef, right: RegionRef) -> bool:
    """Return whether two regions have an element in common."""
    return (
        left.buffer == right.buffer
        and max(left.row, right.row) < min(left.row + left.rows, right.row + right.rows)
        and max(left.col, right.col) < min(left.col + left.cols, right.col + right.cols)
    )
