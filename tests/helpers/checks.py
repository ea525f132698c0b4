"""Products to check: a result as a device computes it, beside its operands."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np

from tests.helpers.numbers import op_of
from uncut_mpi.command.check import CheckResult, check_shared
from uncut_mpi.command.data import fill
from uncut_mpi.model.dtypes import DType


@dataclasses.dataclass
class Case:
    a: np.ndarray
    b: np.ndarray
    c_in: np.ndarray | None
    c_out: np.ndarray
    dtype: DType
    alpha: complex = 1.2345
    beta: complex = 1.1154
    trans_a: str = "N"
    trans_b: str = "N"
    nearest: bool = True

    def check(self, method: str, **changes: object) -> CheckResult:
        facts = dataclasses.asdict(self)
        del facts["nearest"]
        words = facts | {"full_limit": 10**18 if method == "full" else -1} | changes
        return check_shared(**words)


def generate(rows: int, cols: int, dtype: DType, name: str, order: str = "F") -> np.ndarray:
    array = np.empty((rows, cols), dtype.numpy, order=order)
    fill(array, name, 3, rows=rows)
    return array


def tensor_float(array: np.ndarray, nearest: bool, bits: int = 13) -> np.ndarray:
    """Round float32 to the nearest number with so many bits less, or drop them."""
    whole = np.ascontiguousarray(array).view(np.uint32)
    mask = np.uint32((0xFFFFFFFF << bits) & 0xFFFFFFFF)
    return ((whole + np.uint32(1 << (bits - 1) if nearest else 0)) & mask).view(np.float32)


def multiply(case: Case, start: int = 0, stop: int | None = None) -> np.ndarray:
    """The product as a device computes it: sums in the accumulator's type, one rounding at the end."""
    wide = case.dtype.accumulator.numpy.type
    a = op_of(case.trans_a, case.a).astype(wide)[:, start:stop]
    b = op_of(case.trans_b, case.b).astype(wide)[start:stop]
    if case.dtype is DType.tf32:
        a, b = (tensor_float(operand, case.nearest) for operand in (a, b))
    with np.errstate(over="ignore", invalid="ignore"):
        result = wide(case.alpha) * (a @ b) if case.alpha != 0 else np.zeros((a.shape[0], b.shape[1]), wide)
        if case.c_in is not None and case.beta != 0:
            result = result + wide(case.beta) * case.c_in.astype(wide)
        return result.astype(case.dtype.numpy)


def make(m: int, n: int, k: int, dtype: DType, **changes: object) -> Case:
    c = generate(m, n, dtype, "C")
    case = Case(generate(m, k, dtype, "A"), generate(k, n, dtype, "B"), c, c, dtype, **changes)
    case.c_out = multiply(case)
    return case


class Ranks:
    """Threads in place of ranks, with an allgather."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.values: list[object] = [None] * size
        self.barrier = threading.Barrier(size, timeout=60)

    def run(self, call):
        outcomes: list[object] = [None] * self.size

        def main(rank: int) -> None:
            def gather(value: object) -> list[object]:
                self.values[rank] = value
                self.barrier.wait()
                everybody = list(self.values)
                self.barrier.wait()
                return everybody

            try:
                outcomes[rank] = call(rank, gather)
            except Exception as error:
                outcomes[rank] = error

        threads = [threading.Thread(target=main, args=(rank,)) for rank in range(self.size)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return outcomes
