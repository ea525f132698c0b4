"""A product whose schedule is written out by hand, small enough to be seen to be right."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from tests.helpers.numbers import of_both_parts, op_of, random_values, steps_of, wide_of
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.schedule import Factor, Kind, Matrix, Op, Role, Schedule

F, N = Factor, Op.N


@dataclasses.dataclass(frozen=True)
class Pushed:
    """
    C := alpha op(A) op(B) + beta C with all three on rank 0 and the columns dealt to all ranks.

    Rank 0 pushes A (once, forwarded down the chain of ranks) and each rank's columns of B in chunks
    of k; each rank sums its product without C and pushes it back; rank 0 combines.
    """

    m: int = 37
    n: int = 29
    k: int = 41
    ranks: int = 3
    chunks: int = 3
    dtype: DType = DType.f64
    trans_a: str = "N"
    trans_b: str = "N"
    pad: int = 5

    def build(self) -> Schedule:
        problem = GemmProblem(self.m, self.n, self.k, self.dtype, self.trans_a, self.trans_b)
        build = ScheduleBuilder(self.ranks, problem, Placement.parse("0,0,0"))
        wide = self.dtype.accumulator
        a_shape, b_shape = problem.a_shape, problem.b_shape

        def user(matrix: Matrix, shape: tuple[int, int]) -> int:
            return build.buffer(
                at=0, rows=shape[0], cols=shape[1], dtype=self.dtype, role=Role.USER, matrix=matrix,
                ld=shape[0] + self.pad,
            )  # fmt: skip

        def panel(owner: int, shape: tuple[int, int], dtype: DType) -> int:
            return build.buffer(at=owner, rows=shape[0], cols=shape[1], dtype=dtype, role=Role.PANEL, offset=0)

        def push(source: int, target: int, to: RegionRef, of: RegionRef, awaits: Sequence[int] = ()) -> int:
            return build.task(Kind.COPY, build.copy_lane(source, source, target), to, [(of, F.ONE, N)], awaits)

        a, b, c = user(Matrix.A, a_shape), user(Matrix.B, b_shape), user(Matrix.C, (self.m, self.n))
        steps = cuts(self.k, self.chunks)
        columns = cuts(self.n, self.ranks)
        a_at, b_at = {0: a}, {0: b}
        arrived: dict[tuple[int, int], list[int]] = {}
        for r in range(1, self.ranks):
            a_at[r] = panel(r, a_shape, self.dtype)
            b_at[r] = panel(r, b_shape, self.dtype)

        def a_piece(rank: int, p: tuple[int, int]) -> RegionRef:
            return RegionRef(a_at[rank], *((0, p[0], self.m, p[1]) if self.trans_a == "N" else (p[0], 0, p[1], self.m)))

        def b_piece(rank: int, p: tuple[int, int], j: tuple[int, int]) -> RegionRef:
            at = (p[0], j[0], p[1], j[1]) if self.trans_b == "N" else (j[0], p[0], j[1], p[1])
            return RegionRef(b_at[rank], *at)

        for step, p in enumerate(steps):
            previous: list[int] = []
            for r in range(1, self.ranks):
                copy_a = push(r - 1, r, a_piece(r, p), a_piece(r - 1, p), previous)
                copy_b = push(0, r, b_piece(r, p, columns[r]), b_piece(0, p, columns[r]))
                previous = [copy_a]
                arrived[step, r] = [copy_a, copy_b]
        for r, j in enumerate(columns):
            whole = RegionRef(panel(r, (self.m, j[1]), wide), 0, 0, self.m, j[1])
            last = -1
            for step, p in enumerate(steps):
                reads = [(a_piece(r, p), F.ALPHA, Op[problem.trans_a]), (b_piece(r, p, j), F.ONE, Op[problem.trans_b])]
                awaits = arrived.get((step, r), [])
                if awaits:
                    awaits = [build.task(Kind.JOIN, build.compute_lane(r, 1), awaits=awaits)]
                if step:
                    reads.append((whole, F.ONE, N))
                    awaits = [*awaits, last]
                last = build.task(Kind.GEMM, build.compute_lane(r), whole, reads, awaits)
            home, awaited = whole, last
            if r:
                home = RegionRef(panel(0, (self.m, j[1]), wide), 0, 0, self.m, j[1])
                awaited = push(r, 0, home, whole, [last])
            target = RegionRef(c, 0, j[0], self.m, j[1])
            build.task(
                Kind.COMBINE, build.compute_lane(0, 2), target, [(home, F.ONE, N), (target, F.BETA, N)], [awaited]
            )
        return build.build(scheduler="test", grid=(1, self.ranks), tile=0)

    def fill(self, schedule: Schedule, buffers: Mapping[int, np.ndarray], seed: int) -> None:
        """Fill those of the buffers given that are A, B and C with random values, the others with NaN."""
        for index, contents in buffers.items():
            if schedule.buffers["role"][index] == Role.USER:
                contents[...] = self.values(schedule, index, seed)
            else:
                contents[...] = np.nan

    def values(self, schedule: Schedule, index: int, seed: int) -> np.ndarray:
        """Return the values of A, B or C (buffers 0, 1, 2), the same wherever they are asked for."""
        shape = (int(schedule.buffers["rows"][index]), int(schedule.buffers["cols"][index]))
        return random_values(np.random.default_rng((seed, index)), shape, self.dtype)

    def is_right(self, schedule: Schedule, found: np.ndarray, alpha: complex, beta: complex, seed: int) -> bool:
        """
        Whether every element is within its bound of the product in float64, or complex128.

        The bound is k + 4 (complex: √2(2k + 8)) u of the accumulator, 2 u of the type and what rounding two operands
        may change, times the sum of absolute values (Higham 2002, sections 3.5 and 3.6).
        """
        wide = wide_of(self.dtype)
        a, b, c = (self.values(schedule, index, seed).astype(wide) for index in range(3))
        a, b = op_of(self.trans_a, a), op_of(self.trans_b, b)
        product = alpha * (a @ b) + beta * c
        scale = abs(alpha) * (np.abs(a) @ np.abs(b)) + np.abs(beta * c)
        bound = self.dtype.accumulator.unit_roundoff * steps_of(self.dtype, self.k) + self.dtype.unit_roundoff * 2
        bound += 2.01 * self.dtype.operand_roundoff
        bound *= of_both_parts(self.dtype)
        return bool((np.abs(found.astype(wide) - product) <= bound * scale).all())


def cuts(extent: int, parts: int) -> list[tuple[int, int]]:
    """(start, length) of nearly equal parts."""
    edges = [extent * i // parts for i in range(parts + 1)]
    return [(lo, hi - lo) for lo, hi in itertools.pairwise(edges)]
