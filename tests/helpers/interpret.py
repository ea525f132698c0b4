"""
A slow, independent interpreter of schedules on real random numpy arrays.

Every buffer is an array of its own, poisoned with NaN before anything is written, so that reading
what nobody brought, or one element too many, spoils the result. Tasks run in the global order, or in
any order that lanes and awaits allow, chosen at random: then a missing await shows as well.
"""

from __future__ import annotations

import dataclasses

import ml_dtypes
import numpy as np

from tests.helpers.layouts import user_parts
from tests.helpers.numbers import of_both_parts, op_of, random_values, steps_of, wide_of
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.placement import MATRICES
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.schedule import Factor, Kind, Matrix, Op, Schedule


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

    def values(shape: tuple[int, int]) -> np.ndarray:
        return random_values(rng, shape, problem.dtype)

    data = Data(values(problem.a_shape), values(problem.b_shape), values((problem.m, problem.n)), alpha, beta)
    if not problem.reads_c or beta == 0:
        data = dataclasses.replace(data, c=np.full_like(data.c, np.nan), beta=0.0)
    if problem.scales_only and not problem.copies:
        data = dataclasses.replace(data, a=np.full_like(data.a, np.nan), b=np.full_like(data.b, np.nan), alpha=0.0)
    return data


def reference(problem: GemmProblem, data: Data) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the product in float64 or complex128 and the elementwise error bound.

    |C − Ĉ| ≤ γ |alpha| |op(A)| |op(B)| + 4u |beta| |C| with γ = (k+4)u / (1 − (k+4)u), u of the accumulator
    (Higham 2002, section 3.5), plus two roundings of the result to the type (half a
    subnormal each where the result is that small). Complex ones: `steps_of`, `of_both_parts`.
    """
    wide = wide_of(problem.dtype)
    a, b = op_of(problem.trans_a, data.a.astype(wide)), op_of(problem.trans_b, data.b.astype(wide))
    result = np.zeros((problem.m, problem.n), wide)
    magnitude = np.zeros(result.shape)
    if problem.has_product and data.alpha != 0:
        result = data.alpha * (a @ b)
        magnitude = abs(data.alpha) * (np.abs(a) @ np.abs(b))
    old = data.beta * data.c.astype(wide) if data.beta != 0 else np.zeros_like(result)
    u = problem.dtype.accumulator.unit_roundoff
    steps = steps_of(problem.dtype, problem.k) * u
    result = result + old
    bound = steps / (1 - steps) * magnitude + 4 * u * np.abs(old) + 2 * problem.dtype.unit_roundoff * np.abs(result)
    least = float(ml_dtypes.finfo(problem.dtype.real.numpy).smallest_subnormal)
    return result, of_both_parts(problem.dtype) * (bound + least)


def global_order(schedule: Schedule) -> np.ndarray:
    """Return the tasks as the schedule lists them."""
    return np.arange(len(schedule.tasks))


def random_order(schedule: Schedule, seed: int) -> np.ndarray:
    """Return the tasks in a random order that keeps lanes first in, first out, and every await."""
    rng = np.random.default_rng(seed)
    tasks = schedule.tasks
    lanes = [np.flatnonzero(tasks["lane"] == lane).tolist() for lane in range(len(schedule.lanes))]
    at = [0] * len(lanes)
    done = np.zeros(len(tasks), bool)
    order: list[int] = []
    while len(order) < len(tasks):
        ready = [
            lane
            for lane, members in enumerate(lanes)
            if at[lane] < len(members) and done[schedule.awaited(members[at[lane]])].all()
        ]
        # Some lanes are favoured, so that they run far ahead of the others.
        lane = ready[int(len(ready) * rng.uniform() ** 3)]
        task = lanes[lane][at[lane]]
        at[lane] += 1
        done[task] = True
        order.append(task)
    return np.array(order, np.int64)


def interpret(schedule: Schedule, data: Data, order: np.ndarray | None = None) -> np.ndarray:
    """Run the tasks on copies of the data and return C."""
    memory = _allocate(schedule, data)
    for task in global_order(schedule) if order is None else order:
        _run(schedule, memory, int(task), data)
    result = np.full_like(data.c, np.nan)
    known = np.zeros(result.shape, bool)
    for at, held, place in user_parts(schedule, Matrix.C, memory):
        outside = memory[at][int(schedule.buffers["rows"][at]) :, :]
        assert np.isnan(outside.astype(wide_of(schedule.problem.dtype))).all(), "a task wrote between the columns of C"
        assert np.array_equal(held[known[place]], result[place][known[place]], equal_nan=True), "replicas"
        result[place], known[place] = held, True
    return result


def mismatch(schedule: Schedule, data: Data, order: np.ndarray | None = None) -> str:
    """Return what is wrong with the C that the schedule makes; empty if nothing."""
    found = interpret(schedule, data, order).astype(wide_of(schedule.problem.dtype))
    result, bound = reference(schedule.problem, data)
    good = np.abs(found - result) <= bound  # NaN is not good
    if good.all():
        return ""
    i, j = (int(x) for x in np.argwhere(~good)[0])
    return f"{int((~good).sum())} of {good.size} elements are off, first ({i}, {j}): {found[i, j]}, not {result[i, j]}"


def _allocate(schedule: Schedule, data: Data) -> list[np.ndarray]:
    memory = []
    for record in schedule.buffers:
        dtype = DType(int(record["dtype"])).numpy
        array = np.full((int(record["ld"]), int(record["cols"])), np.nan, dtype, order="F")
        memory.append(array)
    for matrix, values in zip(MATRICES, (data.a, data.b, data.c), strict=True):
        for _, held, place in user_parts(schedule, matrix, memory):
            held[...] = values[place]
    return memory


def _run(schedule: Schedule, memory: list[np.ndarray], task: int, data: Data) -> None:
    scalars = {Factor.ZERO: 0.0, Factor.ONE: 1.0, Factor.ALPHA: data.alpha, Factor.BETA: data.beta}
    operands = []
    for operand in schedule.operands_of(task):
        region = schedule.regions[operand["region"]]
        row, col, rows, cols = (int(region[name]) for name in ("row", "col", "rows", "cols"))
        array = memory[int(region["buffer"])][row : row + rows, col : col + cols]
        operands.append((op_of(Op(operand["op"]).name, array), scalars[Factor(int(operand["factor"]))]))
    kind = Kind(int(schedule.tasks[task]["kind"]))
    if kind is Kind.JOIN:
        return
    target = operands[0][0]
    reads = operands[1:]
    if kind is Kind.COPY:
        assert len(reads) == 1
        assert reads[0][0].shape == target.shape
        assert reads[0][0].dtype == target.dtype
        target[...] = reads[0][0]
        return
    accumulator = schedule.problem.dtype.accumulator.numpy
    total = np.zeros(target.shape, accumulator)
    if kind is Kind.GEMM:
        (a, f_a), (b, f_b) = reads[:2]
        assert f_b == 1.0
        assert a.shape[1] == b.shape[0]
        assert len(reads) == 2 or _same(reads[2][0], target)
        if f_a != 0:
            total += accumulator.type(f_a) * (a.astype(accumulator) @ b.astype(accumulator))
        reads = reads[2:]
    for array, factor in reads:
        assert array.shape == target.shape
        if factor != 0:
            total += accumulator.type(factor) * array.astype(accumulator)
    target[...] = total.astype(target.dtype)


def _same(left: np.ndarray, right: np.ndarray) -> bool:
    return (left.__array_interface__["data"], left.shape) == (right.__array_interface__["data"], right.shape)
