"""
Whether a schedule is right, found out the slow way: by running it on numbers and comparing all pairs.

Independent of `uncut_mpi.planning.verify`, whose verdicts it judges. Types are ignored: everything is computed in
float64, of complex types in complex128, on poisoned memory. The numbers are random and stand for symbols: a sum that
lacks one k, or has one twice, is another number, and so is one with alpha or beta in the wrong place.

Lists are run too, as executors run them: lanes, events, flags and messages, and memory by offsets. What is over before
what follows from that alone.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from tests.helpers.interpret import activated, as_written, computed, in_triangle, there, vectors_of
from tests.helpers.layouts import user_parts
from tests.helpers.numbers import op_of, random_values
from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import ITEMSIZES, DType
from uncut_mpi.model.form import Form, op_alone
from uncut_mpi.model.placement import MATRICES
from uncut_mpi.planning.builder import RegionRef
from uncut_mpi.planning.lower import Code, OperationList
from uncut_mpi.planning.schedule import EPILOGUES, TRIANGLES, Factor, Kind, Matrix, Op, Schedule

ALPHA, BETA = 2**0.5, 3**0.5
VALUE = {Factor.ZERO: 0.0, Factor.ONE: 1.0, Factor.ALPHA: ALPHA, Factor.BETA: BETA}
Operand: TypeAlias = tuple[RegionRef, Factor, Op, int]
Access: TypeAlias = tuple[int, RegionRef, bool]


def is_wrong(schedule: Schedule) -> str:
    """Return why a schedule must not run, or an empty string."""
    try:
        schedule.check()
    except ScheduleError:
        return "structure"
    return between_nodes(schedule) or wrong_result(schedule) or race(schedule)


def between_nodes(schedule: Schedule) -> str:
    """Return a task that awaits one of another node, or touches memory there, which nothing but messages can."""
    node_of = schedule.locations["node"]
    if not node_of.any():
        return ""
    of_buffer = node_of[schedule.buffers["location"]]
    for task, (rank, kind) in enumerate(schedule.tasks[["rank", "kind"]].tolist()):
        awaited = [one for one in schedule.awaited(task).tolist() if kind != Kind.RECV or one != task - 1]
        if any(node_of[schedule.tasks["rank"][one]] != node_of[rank] for one in awaited):
            return f"task {task} awaits one of another node"
        buffers = schedule.regions["buffer"][schedule.operands_of(task)["region"]]
        if (of_buffer[buffers] != node_of[rank]).any():
            return f"task {task} touches memory of another node"
    return ""


def wrong_result(schedule: Schedule) -> str:
    """Run the tasks in the global order; return what is wrong with them or with the result."""
    memory = Memory(schedule)
    message = None
    for task, kind in enumerate(schedule.tasks["kind"].tolist()):
        if kind == Kind.JOIN:
            continue
        operands = operands_of(schedule, task)
        if kind == Kind.SEND:
            message = memory.view(operands[0][0]).copy()
            continue
        fault = memory.receive(operands[0][0], message) if kind == Kind.RECV else memory.run(kind, operands)
        if fault:
            return fault
    return memory.wrong()


class Memory:
    """All buffers of a schedule, with numbers in the caller's A, B and C, and what the result is to be."""

    def __init__(self, schedule: Schedule) -> None:
        problem = schedule.problem
        self._schedule = schedule
        wide = np.complex128 if problem.arithmetic.is_complex else np.float64
        rng, self._before = np.random.default_rng(7), dict[Matrix, np.ndarray]()
        self.arrays = [np.full((row["rows"], row["cols"]), np.nan, wide) for row in schedule.buffers]
        for matrix in MATRICES:
            values = random_values(rng, problem.shape_of(matrix), DType.parse(wide))
            if matrix is Matrix.C and not problem.reads_c:
                values[computed(problem)] = np.nan
            elif matrix is not Matrix.C and not (problem.has_product or problem.copies):
                values[...] = np.nan
            self._before[matrix] = values
            for _, held, place in user_parts(schedule, matrix, self.arrays):
                held[...] = values[place]
        a, b, c = (np.where(there(problem, matrix), self._before[matrix], 0) for matrix in MATRICES)
        result = np.zeros_like(c)
        if problem.copies:
            result += a
        elif problem.has_product:
            result += ALPHA * op_of(problem.trans_a, a) @ op_of(problem.trans_b, b)
        if problem.epilogue is not None:
            scale, bias = vectors_of(problem)
            result = activated(
                problem.epilogue.activation, result * scale + bias + (BETA * c if problem.reads_c else 0)
            )
        elif problem.reads_c:
            result += BETA * c
        if problem.part is not None:
            result = as_written(result, TRIANGLES[problem.triangle], problem.diagonal)
            result[~computed(problem)] = c[~computed(problem)]
        self._result = result

    def view(self, ref: RegionRef) -> np.ndarray:
        """Return the part of memory that a region names."""
        return self.arrays[ref.buffer][ref.row : ref.row + ref.rows, ref.col : ref.col + ref.cols]

    def wrong(self) -> str:
        """Return what is wrong with A, B and C at the end."""
        for matrix in (Matrix.A, Matrix.B):
            for _, held, place in user_parts(self._schedule, matrix, self.arrays):
                if not np.array_equal(held, self._before[matrix][place], equal_nan=True):
                    return f"{matrix.name} was changed"
        good = [
            np.allclose(held, self._result[place], rtol=1e-9, atol=1e-9)
            for _, held, place in user_parts(self._schedule, Matrix.C, self.arrays)
        ]
        return "" if all(good) else "values"

    def receive(self, to: RegionRef, message: np.ndarray | None) -> str:
        """Write what was sent; return what is wrong with it."""
        if message is None or message.shape != self.view(to).shape:
            return "a message of another shape"
        self.view(to)[...] = message
        return ""

    def run(self, kind: int, operands: Sequence[Operand]) -> str:
        """Run a COPY, a GEMM or a COMBINE; return what is wrong with it."""
        refs = [ref for ref, *_ in operands]
        terms = [(VALUE[factor], op_of(op.name, self.view(ref))) for ref, factor, op, _ in operands[1:]]
        if kind == Kind.GEMM and len(refs) == 4 and refs[3] != refs[0]:
            return "a GEMM accumulates elsewhere than it writes"
        # A COMBINE may change a region in place; op(A) and op(B) lie apart from what a GEMM writes.
        if any(share(refs[0], ref) and (ref != refs[0] or kind != Kind.COMBINE) for ref in refs[1:3]):
            return "a task overwrites what it reads"
        if any(share(refs[0], ref) and ref != refs[0] for ref in refs[3:]):
            return "a task overwrites what it reads"
        target = self.view(refs[0])
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
        kept = 0.0
        for (factor, part), (_, symbol, _, _) in zip(terms, operands[len(operands) - len(terms) :], strict=True):
            if factor and symbol is Factor.BETA:
                kept = kept + factor * part
            elif factor:
                result = result + factor * part
        _, _, op, diagonal = operands[0]
        if op in EPILOGUES.values():
            problem = self._schedule.problem
            if problem.epilogue is None:
                return "an epilogue of nothing"
            axis = 0 if op is Op.EPILOGUE_ROWS else 1
            if EPILOGUES[problem.epilogue.along] is not op:
                return "an epilogue along the other way"
            scale, bias = (
                one.take(range(diagonal, diagonal + target.shape[axis]), axis, mode="wrap")
                for one in vectors_of(problem)
            )
            result = activated(problem.epilogue.activation, result * scale + bias + kept)
        else:
            result = result + kept
        np.copyto(target, as_written(result, op, diagonal), where=in_triangle(target.shape, op, diagonal))
        return ""


def operands_of(schedule: Schedule, task: int) -> list[Operand]:
    """Return what a task touches, what it writes (or sends) first."""
    return [
        (region(schedule, number), Factor(factor), Op(op), diagonal)
        for number, factor, op, _, diagonal in schedule.operands_of(task).tolist()
    ]


def race(schedule: Schedule) -> str:
    """Return a pair of tasks that touch the same element, one of them writing, in no certain order."""
    kinds = schedule.tasks["kind"].tolist()
    accesses = (
        (task, ref, place == 0 and kinds[task] != Kind.SEND)
        for task in range(len(kinds))
        for place, (ref, *_) in enumerate(operands_of(schedule, task))
    )
    found = unordered(accesses, ordered(schedule))
    return f"race of tasks {found[0]} and {found[1]}" if found else ""


def unordered(accesses: Iterable[Access], before: Sequence[int]) -> tuple[int, ...]:
    """Return two that touch the same element, one of them writing, of which none is over before the other."""
    by_buffer: dict[int, list[Access]] = {}
    for one in accesses:
        by_buffer.setdefault(one[1].buffer, []).append(one)
    for entries in by_buffer.values():
        for (first, left, writes), (second, right, writes_too) in itertools.combinations(entries, 2):
            apart = first == second or before[second] >> first & 1 or before[first] >> second & 1
            if (writes or writes_too) and not apart and share(left, right):
                return first, second
    return ()


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


# -- lists -----------------------------------------------------------------------------------------


def wrong_lists(schedule: Schedule, lists: Sequence[OperationList]) -> str:
    """Return why lists must not be run, or an empty string."""
    run = ListRun(schedule, lists)
    if run.fault or (wrong := run.memory.wrong()):
        return run.fault or wrong
    found = unordered(run.accesses, run.before)
    return f"race of tasks {run.task_of[found[0]]} and {run.task_of[found[1]]}" if found else ""


def lists_lose_order(schedule: Schedule, lists: Sequence[OperationList]) -> str:
    """Return a pair of tasks whose order the schedule asks for and the lists do not keep."""
    run = ListRun(schedule, lists)
    if run.fault:
        return run.fault
    before, body_of = ordered(schedule), {task: body for body, task in enumerate(run.task_of)}
    for second in range(len(before)):
        for first in range(second):
            if before[second] >> first & 1 and not run.before[body_of[second]] >> body_of[first] & 1:
                return f"task {second} may start before task {first} is over"
    return ""


@dataclasses.dataclass(eq=False)
class _Step:
    """An operation, or a JOIN; `over` has the bodies that are over when it is, None before."""

    code: int
    task: int
    key: tuple[int, ...] = ()  # of a flag or a channel
    value: int = 0
    operands: Sequence[Operand] = ()
    after: _Step | None = None  # what a wait waits for; None: nothing
    over: int | None = None


class ListRun:
    """
    A run of the lists of all ranks in one of the orders that they allow.

    Attributes
    ----------
    fault : str
        Why it did not come to its end; else empty.
    task_of, before : list of int
        By body, JOINs included: its task, and as a bit set which bodies are over before it in any run.
    accesses : list of Access
        What bodies touch.
    """

    def __init__(self, schedule: Schedule, lists: Sequence[OperationList]) -> None:
        self.memory = Memory(schedule)
        self.fault, self.task_of, self.before, self.accesses = "", list[int](), list[int](), list[Access]()
        self._messages = collections.defaultdict[tuple[int, ...], collections.deque[tuple[int, np.ndarray]]](
            collections.deque
        )
        queues = self._queues(schedule, lists)
        reached = [0] * len(queues)
        moving = True
        while moving and not self.fault:
            moving = False
            for lane, queue in enumerate(queues):
                while queue and not self.fault and (over := self._step(queue[0], reached[lane])) is not None:
                    queue.popleft().over = reached[lane] = over
                    moving = True
        if not self.fault and any(queues):
            self.fault = "what a lane waits for never comes"
        if not self.fault and any(self._messages.values()):
            self.fault = "nobody receives a message"

    def _queues(self, schedule: Schedule, lists: Sequence[OperationList]) -> list[collections.deque[_Step]]:
        """Return the steps of each lane; waits know what they wait for."""
        queues = [collections.deque[_Step]() for _ in schedule.lanes]
        lanes = [np.flatnonzero(schedule.lanes["rank"] == program.rank).tolist() for program in lists]
        written: dict[tuple[int, ...], list[tuple[int, _Step]]] = {}
        waits: list[_Step] = []
        for program, own in zip(lists, lanes, strict=True):
            joins = (schedule.tasks["kind"] == Kind.JOIN) & (schedule.tasks["rank"] == program.rank)
            todo = collections.deque(np.flatnonzero(joins).tolist())
            recorded: dict[int, _Step] = {}
            for code, in_host, count, lane, task, slot, value, peer, first in program.operations.tolist():
                tells = code in (Code.RECORD, Code.SIGNAL)
                while todo and (todo[0] < task or (todo[0] == task and tells)):
                    join = todo.popleft()
                    queues[schedule.tasks["lane"][join]].append(_Step(Kind.JOIN, join))
                step = _Step(code, task, value=value)
                queues[own[lane]].append(step)
                if code == Code.WAIT_EVENT:
                    step.after = recorded.get(slot)
                elif code == Code.RECORD:
                    recorded[slot] = step
                elif code in (Code.WAIT_FLAG, Code.SIGNAL):
                    told = code == Code.SIGNAL
                    owner = (program.rank if told else peer) if in_host else (peer if told else program.rank)
                    step.key = in_host, owner, slot
                    if told:
                        written.setdefault(step.key, []).append((own[lane], step))
                    else:
                        waits.append(step)
                else:
                    ends = (program.rank, peer) if code == Code.SEND else (peer, program.rank)
                    step.key = ends if code in (Code.SEND, Code.RECV) else ()
                    bound = program.operands[first : first + count]
                    step.operands = self._bound(program, bound)
                    forms = schedule.problem.forms if code == Code.GEMM else ()
                    if any(Form.of_code(int(one)) != form for one, form in zip(bound["op"][1:], forms, strict=False)):
                        self.fault = "a product has an operand of another form"
            for join in todo:
                queues[schedule.tasks["lane"][join]].append(_Step(Kind.JOIN, join))
        span = lists[0].span
        for signals in written.values():
            values = [step.value for _, step in signals]
            if len({lane for lane, _ in signals}) > 1 or sorted(values) != values:
                self.fault = "two lanes write a flag, or one takes it back"
        for wait in waits:
            signals = written.get(wait.key, [])
            if wait.value <= 0 or any(step.value >= span + wait.value for _, step in signals):
                continue  # it is over at once: the call before has left as much in the flag
            wait.after = next((step for _, step in signals if step.value >= wait.value), None)
            if wait.after is None:
                self.fault = "a wait is for what nobody signals"
        return queues

    def _bound(self, program: OperationList, bound: np.ndarray) -> list[Operand]:
        """Return operands by where their bytes lie."""
        found = []
        for buffer, _, factor, op, _, offset, rows, cols, ld, diagonal in bound.tolist():
            about = program.buffers[buffer]
            at, lost = divmod(offset, int(ITEMSIZES[about["dtype"]]))
            col, row = divmod(at, int(about["ld"]))
            inside = row + rows <= about["rows"] and col + cols <= about["cols"]
            if lost or not inside or (cols > 1 and ld != about["ld"]):
                self.fault = "an operand is no region of its buffer"
            found.append(
                (
                    RegionRef(buffer, row, col, rows, cols),
                    Factor(factor),
                    Op(op_alone(op)),
                    diagonal,
                )
            )
        return found

    def _step(self, step: _Step, reached: int) -> int | None:
        """Do a step of a lane on which some bodies are over, and return which are then; None: not yet."""
        if step.code in (Code.WAIT_EVENT, Code.WAIT_FLAG):
            over = 0 if step.after is None else step.after.over
            return None if over is None else reached | over
        if step.code in (Code.RECORD, Code.SIGNAL):
            return reached
        if step.code == Code.RECV:
            if not self._messages[step.key]:
                return None
            sent, message = self._messages[step.key].popleft()
            reached |= sent
        body = len(self.task_of)
        self.task_of.append(step.task)
        self.before.append(reached)
        reads_first = step.code == Code.SEND
        self.accesses += [(body, ref, not (at or reads_first)) for at, (ref, *_) in enumerate(step.operands)]
        over = reached | 1 << body
        if step.code == Code.SEND:
            self._messages[step.key].append((over, self.memory.view(step.operands[0][0]).copy()))
        elif step.code == Code.RECV:
            self.fault = self.memory.receive(step.operands[0][0], message)
        elif step.code != Kind.JOIN:
            self.fault = self.memory.run(step.code, step.operands)
        return over


def region(schedule: Schedule, index: int) -> RegionRef:
    """Return a row of the region table."""
    row = schedule.regions[index]
    return RegionRef(*(int(row[name]) for name in ("buffer", "row", "col", "rows", "cols")))


def share(left: RegionRef, right: RegionRef) -> bool:
    """Return whether two regions have an element in common."""
    return (
        left.buffer == right.buffer
        and max(left.row, right.row) < min(left.row + left.rows, right.row + right.rows)
        and max(left.col, right.col) < min(left.col + left.cols, right.col + right.cols)
    )
