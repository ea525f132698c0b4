"""Products to check: a result as a device computes it, beside its operands."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.helpers.numbers import op_of
from uncut_mpi.command.check import CheckResult, Equation, check_shared
from uncut_mpi.command.data import fill
from uncut_mpi.model.dtypes import DType

ALONE = types.SimpleNamespace(rank=0, size=1, gather_values=lambda value: [value])


@dataclasses.dataclass(frozen=True)
class Case(Equation):
    """A product, and its check."""

    alpha: complex = 1.2345
    beta: complex = 1.1154

    def check(self, method: str, ranks: Any = ALONE, **changes: object) -> CheckResult:
        """Check every element ("full"), or sums of rows and a sample ("sums")."""
        equation = dataclasses.replace(self, **changes)
        return check_shared(equation, ranks, full_limit=10**18 if method == "full" else -1)

    def but(self, nearest: bool = True, **changes: object) -> Case:
        """The product of other operands, computed."""
        made = dataclasses.replace(self, **changes)
        return dataclasses.replace(made, c_out=multiply(made, nearest=nearest))


def generate(rows: int, cols: int, dtype: DType, name: str, order: str = "F") -> np.ndarray:
    array = np.empty((rows, cols), dtype.numpy, order=order)
    fill(array, name, 3, rows=rows)
    return array


def make(m: int, n: int, k: int, dtype: DType, *, of_a: float = 1.0, of_b: float = 1.0, **changes: object) -> Case:
    """A random product, with elements of A and B up to `of_a` and `of_b`."""
    a, b, c = generate(m, k, dtype, "A"), generate(k, n, dtype, "B"), generate(m, n, dtype, "C")
    a, b = a * dtype.numpy.type(of_a), b * dtype.numpy.type(of_b)
    return Case(a, b, c, c, dtype).but(**changes)


def tensor_float(array: np.ndarray, nearest: bool, bits: int = 13) -> np.ndarray:
    """Round float32 to the nearest number with so many bits less, or drop them."""
    whole = np.ascontiguousarray(array).view(np.uint32)
    mask = np.uint32((0xFFFFFFFF << bits) & 0xFFFFFFFF)
    return ((whole + np.uint32(1 << (bits - 1) if nearest else 0)) & mask).view(np.float32)


def multiply(case: Case, start: int = 0, stop: int | None = None, nearest: bool = True) -> np.ndarray:
    """The product as a device computes it: sums in the accumulator's type, one rounding at the end."""
    wide = case.dtype.accumulator.numpy.type
    a = op_of(case.trans_a, case.a).astype(wide)[:, start:stop]
    b = op_of(case.trans_b, case.b).astype(wide)[start:stop]
    if case.dtype is DType.tf32:
        a, b = (tensor_float(operand, nearest) for operand in (a, b))
    with np.errstate(all="ignore"):
        result = wide(case.alpha) * (a @ b) if case.alpha != 0 else np.zeros((a.shape[0], b.shape[1]), wide)
        if case.c_in is not None and case.beta != 0:
            result = result + wide(case.beta) * case.c_in.astype(wide)
        return result.astype(case.dtype.numpy)


def put(values: np.ndarray, *changes: tuple[object, object]) -> np.ndarray:
    """Return a copy with other values in some places."""
    made = values.copy()
    for place, value in changes:
        made[place] = value
    return made


def on_ranks(size: int, call: Callable[..., object]) -> list[object]:
    """Return what `call(ranks)` returned or raised on each of some threads in place of ranks."""
    values, barrier = [None] * size, threading.Barrier(size, timeout=60)

    def main(rank: int) -> object:
        def gather(value: object) -> list[object]:
            values[rank] = value
            barrier.wait()
            everybody = list(values)
            barrier.wait()
            return everybody

        try:
            return call(ranks=types.SimpleNamespace(rank=rank, size=size, gather_values=gather))
        except Exception as error:
            return error

    with concurrent.futures.ThreadPoolExecutor(size) as pool:
        return list(pool.map(main, range(size)))
