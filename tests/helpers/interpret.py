"""
A slow, independent interpreter of schedules on real random numpy arrays.

Every buffer is an array of its own, poisoned with NaN before anything is written, so that reading
what nobody brought, or one element too many, spoils the result. Tasks run in the global order, or in
any order that lanes and awaits allow, chosen at random: then a missing await shows as well.
"""

from __future__ import annotations

import bisect
import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

from tests.helpers.layouts import blocks_of, user_parts
from tests.helpers.numbers import of_both_parts, op_of, poison_of, random_values, steps_of, wide_of
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.form import Form, Forms
from uncut_mpi.model.placement import MATRICES
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.schedule import EPILOGUES, TRIANGLES, Factor, Kind, Matrix, Op, Schedule


@dataclasses.dataclass(frozen=True)
class Data:
    """A, B and C as stored column-major (`GemmProblem`'s shapes), and the scalars."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    alpha: complex
    beta: complex


def random_data(problem: GemmProblem, seed: int = 0, *, alpha: complex = 1.2345, beta: complex = 1.1154) -> Data:
    """Return full-mantissa values in (−1, 1); what must not be read (C for beta 0, A and B for alpha 0) is NaN."""
    rng = np.random.default_rng(seed)

    shapes = map(problem.shape_of, MATRICES)
    a, b, c = (random_values(rng, shape, dtype) for shape, dtype in zip(shapes, problem.dtypes, strict=True))
    for form, square in zip(problem.forms, (a, b), strict=True):
        if form is not None and form.is_triangular:  # so that solutions do not grow, which nothing beyond it does
            square[...] /= len(square)
            np.fill_diagonal(square, 1 + square.diagonal())
        if form is not None:
            is_lower = np.tri(len(square), dtype=bool)
            square[~(is_lower if form.triangle == "lower" else is_lower.T)] = np.nan
            np.fill_diagonal(square, np.nan if form.unit else square.diagonal())
    if not problem.reads_c or beta == 0:
        beta = 0.0
        c[computed(problem)] = poison_of(problem.dtypes[Matrix.C])
    if problem.scales_only and not problem.copies:
        alpha = 0.0
    if alpha == 0 and not problem.copies:
        for matrix in (a, b):
            matrix[...] = poison_of(problem.arithmetic)
    return Data(a, b, c, alpha, beta)


def reference(problem: GemmProblem, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the product in float64 or complex128 and the elementwise error bound.

    |C − Ĉ| ≤ γ |alpha| |op(A)| |op(B)| + 4u |beta| |C| with γ = (k+4)u / (1 − (k+4)u), u of the accumulator
    (Higham 2002, section 3.5), plus two roundings of the result to the type (half a
    subnormal each where the result is that small). Complex ones: `steps_of`, `of_both_parts`. Whole numbers wrap
    around, what is copied is as it is, and what is beside a part of C stays as it was.
    """
    wide, of_c = wide_of(problem.arithmetic), problem.dtypes[Matrix.C]
    if problem.copies:
        return data.a.astype(wide), np.zeros(data.a.shape)
    a, b = (
        op_of(trans, formed(form, np.where(there(problem, matrix), values, values.dtype.type(0)).astype(wide)))
        for matrix, trans, values, form in (
            (Matrix.A, problem.trans_a, data.a, problem.forms[0]),
            (Matrix.B, problem.trans_b, data.b, problem.forms[1]),
        )
    )
    result = np.zeros((problem.m, problem.n), wide)
    magnitude = np.zeros(result.shape)
    if problem.has_product and data.alpha != 0:
        result = data.alpha * (a @ b)
        magnitude = abs(data.alpha) * (np.abs(a) @ np.abs(b))
        for at, (form, inverse) in enumerate(zip(problem.forms, (a, b), strict=True)):
            if form is not None and form.kind == "inverse":  # of T X = B |T⁻¹| |T| |X| (Higham 2002, section 8.1)
                off = np.abs(inverse), np.abs(np.linalg.inv(inverse))
                magnitude = off[0] @ off[1] @ magnitude if at == 0 else magnitude @ off[1] @ off[0]
    ending = problem.epilogue
    if ending is not None:
        scale, bias = (one.astype(wide) for one in vectors_of(problem))
        result = result * scale
        magnitude = magnitude * np.abs(scale) + 4 * (np.abs(result) + np.abs(bias))
        result = result + bias
    old = data.beta * data.c.astype(wide) if data.beta != 0 else np.zeros_like(result)
    u = problem.accumulator.unit_roundoff
    steps = steps_of(problem.arithmetic, problem.k) * u
    result = result + old
    bound = steps / (1 - steps) * magnitude + 4 * u * np.abs(old)
    if ending is not None:
        bound = SLOPE * bound + 16 * u * (1 + np.abs(result))  # of what follows, in the accumulator
        result = activated(ending.activation, result)
    bound = bound + 2 * of_c.unit_roundoff * np.abs(result)
    least = 0.0 if of_c.is_integer else float(ml_dtypes.finfo(of_c.real.numpy).smallest_subnormal)
    bound = of_both_parts(problem.arithmetic) * (bound + least)
    if problem.part is not None:
        result, beside = as_written(result, TRIANGLES[problem.triangle], problem.diagonal), ~computed(problem)
        result[beside], bound[beside] = data.c[beside], 0.0
    return result.astype(of_c.numpy).astype(wide) if of_c.is_integer else result, bound  # whole numbers wrap around


SLOPE = 1.13
"""The largest slope of an epilogue's function: that of GELU."""


def vectors_of(problem: GemmProblem) -> tuple[np.ndarray, np.ndarray]:
    """Return the scale and the bias that tests give a problem with an epilogue, along its rows or columns."""
    epilogue, dtype = problem.epilogue, problem.dtypes[Matrix.C]
    by_rows = epilogue.along == "rows"
    rng, shape = np.random.default_rng(11), (problem.m, 1) if by_rows else (1, problem.n)
    scale, bias = (random_values(rng, shape, dtype) for _ in range(2))
    return scale if epilogue.scale else np.ones_like(scale), bias if epilogue.bias else np.zeros_like(bias)


def activated(activation: str, values: np.ndarray) -> np.ndarray:
    """Return a function of values, in their type."""
    if activation == "relu":
        return np.where(values < 0, 0, values)
    if activation == "gelu":
        inner = np.sqrt(2 / np.pi) * (values + 0.044715 * values**3)
        return (0.5 * values * (1 + np.tanh(inner))).astype(values.dtype)
    return values


def formed(form: Form | None, square: np.ndarray) -> np.ndarray:
    """Return what a stored matrix with a form stands for."""
    if form is None:
        return square
    half = np.where(np.tri(len(square), dtype=bool) == (form.triangle == "lower"), square, 0)
    np.fill_diagonal(half, 1 if form.unit else square.diagonal())
    if form.is_triangular:
        return np.linalg.inv(half) if form.kind == "inverse" else half
    hermitian = form.kind == "hermitian"
    diagonal = np.diag(half.diagonal().real if hermitian else half.diagonal())
    half = half - np.diag(half.diagonal())
    return half + diagonal + (half.conj().T if hermitian else half.T)


def there(problem: GemmProblem, matrix: Matrix) -> np.ndarray:
    """Return which elements of a matrix exist: of a batch those of the blocks on the diagonal."""
    mask = np.zeros(problem.shape_of(matrix), bool)
    for (top, bottom), (left, right) in blocks_of(problem, matrix):
        mask[top:bottom, left:right] = True
    return mask


def computed(problem: GemmProblem) -> np.ndarray:
    """Return which elements of C are computed, or scaled."""
    mask = np.zeros((problem.m, problem.n), bool)
    for rows, cols in problem.rectangles:
        mask[slice(*rows), slice(*cols)] = True
    return mask & in_triangle(mask.shape, TRIANGLES[problem.triangle], problem.diagonal)


def in_triangle(shape: tuple[int, ...], op: int, diagonal: int) -> np.ndarray:
    """Return which elements of a region are in a triangle, whose diagonal is so far above the first; N: all."""
    below = np.subtract.outer(np.arange(shape[0]), np.arange(shape[1])) + diagonal
    lower, upper = op in (Op.LOWER, Op.LOWER_REAL), op in (Op.UPPER, Op.UPPER_REAL)
    return below >= 0 if lower else below <= 0 if upper else np.ones(shape, bool)


def as_written(values: np.ndarray, op: int, diagonal: int) -> np.ndarray:
    """Return what is written of a region in a triangle: of a Hermitian C the diagonal without imaginary parts."""
    if op < Op.LOWER_REAL:
        return values
    on = in_triangle(values.shape, Op.LOWER, diagonal) & in_triangle(values.shape, Op.UPPER, diagonal)
    return np.where(on, values.real, values)


def global_order(schedule: Schedule) -> np.ndarray:
    """Return the tasks as the schedule lists them."""
    return np.arange(len(schedule.tasks))


def random_order(schedule: Schedule, seed: int) -> np.ndarray:
    """Return the tasks in a random order that keeps lanes first in, first out, and every await."""
    rng = np.random.default_rng(seed)
    tasks = schedule.tasks
    lanes = [np.flatnonzero(tasks["lane"] == lane).tolist() for lane in range(len(schedule.lanes))]
    lane_of, missing = tasks["lane"].tolist(), tasks["num_awaits"].tolist()
    waiters: list[list[int]] = [[] for _ in missing]
    for task in range(len(tasks)):
        for awaited in schedule.awaited(task).tolist():
            waiters[awaited].append(task)
    at = [0] * len(lanes)
    ready = [lane for lane, members in enumerate(lanes) if members and not missing[members[0]]]
    order: list[int] = []
    while len(order) < len(tasks):
        # Some lanes are favoured, so that they run far ahead of the others.
        lane = ready[int(len(ready) * rng.uniform() ** 3)]
        task = lanes[lane][at[lane]]
        at[lane] += 1
        order.append(task)
        if at[lane] == len(lanes[lane]) or missing[lanes[lane][at[lane]]]:
            ready.remove(lane)
        for waiter in waiters[task]:
            missing[waiter] -= 1
            of = lane_of[waiter]
            if not missing[waiter] and lanes[of][at[of]] == waiter:
                bisect.insort(ready, of)
    return np.array(order, np.int64)


def interpret(schedule: Schedule, data: Data, order: np.ndarray | None = None) -> np.ndarray:
    """Run the tasks on copies of the data and return C."""
    memory = _allocate(schedule, data)
    steps = _Steps.of(schedule, data)
    for task in global_order(schedule) if order is None else order:
        steps.run(memory, int(task))
    result = np.full_like(data.c, poison_of(schedule.problem.dtypes[Matrix.C]))
    known = np.zeros(result.shape, bool)
    for at, held, place in user_parts(schedule, Matrix.C, memory):
        outside = memory[at][int(schedule.buffers["rows"][at]) :, :]
        assert _is_poisoned(outside), "a task wrote between the columns of C"
        assert np.array_equal(held[known[place]], result[place][known[place]], equal_nan=True), "replicas"
        result[place], known[place] = held, True
    return result


def mismatch(schedule: Schedule, data: Data, order: np.ndarray | None = None) -> str:
    """Return what is wrong with the C that the schedule makes; empty if nothing."""
    found = interpret(schedule, data, order).astype(wide_of(schedule.problem.arithmetic))
    result, bound = reference(schedule.problem, data)
    good = (np.abs(found - result) <= bound) | ~there(schedule.problem, Matrix.C)  # NaN is not good
    if good.all():
        return ""
    i, j = (int(x) for x in np.argwhere(~good)[0])
    return f"{int((~good).sum())} of {good.size} elements are off, first ({i}, {j}): {found[i, j]}, not {result[i, j]}"


def _allocate(schedule: Schedule, data: Data) -> list[np.ndarray]:
    memory = []
    for record in schedule.buffers:
        dtype = DType(int(record["dtype"]))
        shape = int(record["ld"]), int(record["cols"])
        memory.append(np.full(shape, poison_of(dtype), dtype.numpy, order="F"))
    for matrix, values in zip(MATRICES, (data.a, data.b, data.c), strict=True):
        for _, held, place in user_parts(schedule, matrix, memory):
            held[...] = values[place]
    return memory


def _is_poisoned(values: np.ndarray) -> bool:
    dtype = DType.parse(values.dtype)
    poison = poison_of(dtype)
    return bool((values == poison).all() if dtype.is_integer else np.isnan(values.astype(wide_of(dtype))).all())


@dataclasses.dataclass(frozen=True)
class _Steps:
    """Tables of a schedule as lists, which are read much faster."""

    tasks: list[tuple[int, int, int]]
    operands: list[tuple[int, str, complex, int, bool]]
    regions: list[tuple[int, int, int, int, int]]
    accumulator: np.dtype
    forms: Forms
    epilogue: tuple[Any, ...]  # function, scale and bias
    messages: dict[int, np.ndarray] = dataclasses.field(default_factory=dict)  # by the SEND

    @classmethod
    def of(cls, schedule: Schedule, data: Data) -> _Steps:
        scalars = {Factor.ZERO: 0.0, Factor.ONE: 1.0, Factor.ALPHA: data.alpha, Factor.BETA: data.beta}
        epilogue = schedule.problem.epilogue
        factors, ops = {int(one): value for one, value in scalars.items()}, {int(op): op.name for op in Op}
        return cls(
            schedule.tasks[["kind", "first_operand", "num_operands"]].tolist(),
            [
                (region, ops[op], factors[factor], diagonal, factor == int(Factor.BETA))
                for region, op, factor, diagonal in schedule.operands[["region", "op", "factor", "diagonal"]].tolist()
            ],
            schedule.regions[["buffer", "row", "col", "rows", "cols"]].tolist(),
            schedule.problem.accumulator.numpy,
            schedule.problem.forms,
            () if epilogue is None else (epilogue.activation, *vectors_of(schedule.problem)),
        )

    def run(self, memory: list[np.ndarray], task: int) -> None:
        code, first, count = self.tasks[task]
        operands = []
        for at, (number, op, scalar, *_) in enumerate(self.operands[first : first + count]):
            buffer, row, col, rows, cols = self.regions[number]
            part = memory[buffer][row : row + rows, col : col + cols]
            if code == Kind.GEMM and at in (1, 2):
                part = formed(self.forms[at - 1], part)
            operands.append((part if Op[op] >= Op.LOWER else op_of(op, part), scalar))
        kind = Kind(code)
        if kind is Kind.JOIN:
            return
        target = operands[0][0]
        reads = operands[1:]
        if kind is Kind.SEND:
            self.messages[task] = target.copy()
            return
        if kind is Kind.RECV:
            reads = [(self.messages.pop(task - 1), 1.0)]
            kind = Kind.COPY
        if kind is Kind.COPY:
            assert len(reads) == 1
            assert reads[0][0].shape == target.shape
            assert reads[0][0].dtype == target.dtype
            target[...] = reads[0][0]
            return
        accumulator = self.accumulator
        total = np.zeros(target.shape, accumulator)
        if kind is Kind.GEMM:
            (a, f_a), (b, f_b) = reads[:2]
            assert f_b == 1.0
            assert a.shape[1] == b.shape[0]
            assert len(reads) == 2 or _same(reads[2][0], target)
            if f_a != 0:
                total += accumulator.type(f_a) * (a.astype(accumulator) @ b.astype(accumulator))
            reads = reads[2:]
        kept = np.zeros(target.shape, accumulator)  # beta C, which no scale is for
        for (array, factor), (*_, is_c) in zip(reads, self.operands[first + count - len(reads) :], strict=False):
            assert array.shape == target.shape
            if factor != 0:
                into = kept if is_c else total
                into += accumulator.type(factor) * array.astype(accumulator)
        _, op, _, diagonal, _ = self.operands[first]
        if Op[op] in EPILOGUES.values():
            (activation, *vectors), by_rows = self.epilogue, Op[op] is Op.EPILOGUE_ROWS
            some = slice(diagonal, diagonal + total.shape[0 if by_rows else 1])
            scale, bias = ((one[some] if by_rows else one[:, some]).astype(total.dtype) for one in vectors)
            total = activated(activation, total * scale + bias + kept)
        else:
            total += kept
        total = as_written(total, Op[op], diagonal)
        np.copyto(target, total.astype(target.dtype), where=in_triangle(target.shape, Op[op], diagonal))


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return (left.__array_interface__["data"], left.shape) == (right.__array_interface__["data"], right.shape)
