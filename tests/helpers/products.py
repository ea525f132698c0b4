"""Random products for tests that run on several ranks: the same numbers on every rank, whatever holds them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from tests.helpers.collective import collective_assert
from tests.helpers.numbers import of_both_parts, op_of, poison_of, random_values, steps_of, wide_of
from uncut_mpi import Matrix, ScheduleOptions, Session
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType, Dtypes, three_of
from uncut_mpi.model.locations import Location
from uncut_mpi.planning.schedule import Kind, Schedule


@dataclasses.dataclass(frozen=True)
class Case:
    """
    One product: C := alpha op(A) op(B) + beta C, and where and how its matrices are stored.

    The type is that of A and B with the usual C, or of each, as ``"f16,f16,f32"``. `scales` are those of A and B.
    """

    m: int
    n: int
    k: int
    place: tuple[str, str, str] = ("h", "h", "h")
    dtype: str = "f64"
    trans_a: str = "N"
    trans_b: str = "N"
    orders: str = "FFF"
    pad: tuple[int, int, int] = (0, 0, 0)
    alpha: complex = 1.2345
    beta: complex = 1.1154
    seed: int = 0
    scales: tuple[float, ...] = ()

    @property
    def dtypes(self) -> Dtypes:
        """Of A, B and C."""
        types = tuple(DType[name] for name in self.dtype.split(","))
        return three_of(types[0] if len(types) == 1 else types)

    @property
    def how(self) -> dict[str, Any]:
        """What a call has to be told besides its matrices."""
        scales = zip(("scale_a", "scale_b"), self.scales, strict=False)
        return {name: getattr(self, name) for name in ("alpha", "beta", "trans_a", "trans_b")} | dict(scales)

    def __str__(self) -> str:
        return (
            f"{self.m}x{self.n}x{self.k} {self.dtype} {','.join(self.place)} {self.trans_a}{self.trans_b} "
            f"{self.orders} pad{self.pad} a{self.alpha} b{self.beta}"
        )


@dataclasses.dataclass
class Operands:
    """Matrices of a case in a session, and the same numbers as numpy arrays on every rank."""

    a: Matrix
    b: Matrix
    c: Matrix
    a_MK: np.ndarray
    b_KN: np.ndarray
    c_MN: np.ndarray
    extra: list[Matrix]
    on_gpus: bool = False

    @property
    def abc(self) -> tuple[Matrix, Matrix, Matrix]:
        return self.a, self.b, self.c


def random_matrix(rows: int, cols: int, dtype: DType, seed: tuple[int, ...]) -> np.ndarray:
    """Return `random_values` by a seed."""
    return random_values(np.random.default_rng(seed), (rows, cols), dtype)


def shared_of(session: Session, data: np.ndarray, dtype: Any = None) -> Matrix:
    """Return `data` as a matrix in shared host memory; collective."""
    matrix = session.empty_host(data.shape, dtype or data.dtype)
    if session.rank == 0:
        matrix.array[...] = data
    session.barrier()
    return matrix


def ones(session: Session, shape: tuple[int, int] = (4, 4), dtype: str = "f64") -> Matrix:
    """Return a matrix of ones in shared host memory; collective."""
    return shared_of(session, np.ones(shape), dtype)


def place_matrix(
    session: Session, data: np.ndarray, where: str, order: str, pad: int, dtype: DType
) -> tuple[Matrix, list[Matrix]]:
    """Put `data` at a location, in an order, with a leading dimension `pad` above the least; collective."""
    rows, cols = data.shape
    outer = (rows + pad, cols) if order == "F" else (rows, cols + pad)
    location = Location.parse(where)
    if location.space == "device":
        assert location.rank is not None
        whole = session.empty_device(outer, dtype, rank=location.rank, order=order)
        if not pad:
            set_matrix(session, whole, data)
            return whole, []
        part = None
        if session.rank == location.rank:
            part = whole.array[:rows, :cols]
            part[...] = as_device_array(session, data)
        matrix = session.register(part, root=location.rank, dtype=dtype)
        return matrix, [whole]
    if location.rank is None:
        whole = session.empty_host(outer, dtype, order=order)
        if not pad:
            set_matrix(session, whole, data)
            return whole, []
        part = None
        if session.rank == 0:
            whole.array.fill(poison_of(dtype))
            part = whole.array[:rows, :cols]
            part[...] = data
        matrix = session.register(part, root=0, dtype=dtype)
        return matrix, [whole]
    part = None
    if session.rank == location.rank:
        part = np.full(outer, poison_of(dtype), data.dtype, order=order)[:rows, :cols]
        part[...] = data
    return session.register(part, root=location.rank, dtype=dtype), []


def as_device_array(session: Session, data: np.ndarray) -> Any:
    """Return `data` as what the session's device arrays accept."""
    if session.backend_name == "cuda":
        import cupy

        return cupy.asarray(data.view(np.uint8) if DType.parse(data.dtype).needs_scales else data)
    return data


def set_matrix(session: Session, matrix: Matrix, data: np.ndarray) -> None:
    """Overwrite a matrix with `data` (local to whoever holds it)."""
    target = array_of(matrix)
    if target is not None and (matrix.location.rank is not None or session.rank == 0):
        target[...] = as_device_array(session, data) if matrix.location.space == "device" else data


def make_operands(session: Session, case: Case) -> Operands:
    """Make the matrices of a case; collective."""
    types = case.dtypes
    a = random_matrix(*((case.m, case.k) if case.trans_a == "N" else (case.k, case.m)), types[0], (case.seed, 1))
    b = random_matrix(*((case.k, case.n) if case.trans_b == "N" else (case.n, case.k)), types[1], (case.seed, 2))
    c = random_matrix(case.m, case.n, types[2], (case.seed, 3))
    if case.beta == 0:
        c[...] = poison_of(types[2])
    if case.alpha == 0:
        a[...] = np.nan
        b[...] = np.inf
    made, extra = [], []
    for data, where, order, pad, dtype in zip((a, b, c), case.place, case.orders, case.pad, types, strict=True):
        matrix, more = place_matrix(session, data, where, order, pad, dtype)
        made.append(matrix)
        extra += more
    return Operands(*made, a, b, c, extra, session.backend_name == "cuda")


def renew(session: Session, operands: Operands) -> None:
    """Give C its first values again; collective."""
    set_matrix(session, operands.c, operands.c_MN)
    session.barrier()


def release(session: Session, operands: Operands) -> None:
    """Release a case's matrices; collective."""
    for matrix in (*operands.abc, *operands.extra):
        session.release(matrix)


def array_of(matrix: Matrix) -> Any:
    """Return the array of a matrix where this rank sees all of it, else None."""
    try:
        return matrix.array
    except ParamError:
        return None


def as_numpy(matrix: Matrix) -> np.ndarray | None:
    """Return the matrix's elements where this rank holds them, else None."""
    array = array_of(matrix)
    if array is None or isinstance(array, np.ndarray):  # which is there after the end, too
        return array
    return array.get() if hasattr(array, "get") else np.asarray(matrix)


def shows(matrix: Matrix, wanted: Any, equal: Any = np.array_equal, **how: Any) -> bool:
    """Return whether a matrix is what is wanted, as `equal` has it, where this rank sees all of it. Local."""
    found = as_numpy(matrix)
    return found is None or bool(equal(found, np.broadcast_to(wanted, found.shape), **how))


def moved_bytes(schedule: Schedule) -> int:
    """Return what the copies of all ranks move, of which both ends of a message count what it has."""
    tasks, _, _, nbytes = schedule.copies().T
    return int((nbytes * (1 + (schedule.tasks["kind"][tasks] == Kind.SEND))).sum())


def expected(case: Case, operands: Operands) -> tuple[np.ndarray, np.ndarray]:
    """
    Return the product in float64 or complex128 and the elementwise error bound.

    |C − Ĉ| ≤ γ_{k+2} |alpha| |op(A)| |op(B)| + 3u |beta| |C| with γ_n = n u/(1 − n u), u of the
    accumulator (Higham 2002, section 3.5), plus one rounding of the result to the type, and for tf32 one of each
    element of op(A) and op(B), 2 u_o (1 + u_o) |alpha| |op(A)| |op(B)|. Complex ones: `steps_of`, `of_both_parts`.
    Of float8 tensor cores keep fewer bits for some products (`DType.truncated_sums`). Integers are exact modulo 2**32.
    """
    dtype, _, written = case.dtypes
    wide = wide_of(dtype)
    alpha = case.alpha * math.prod(case.scales)
    a, b = op_of(case.trans_a, operands.a_MK.astype(wide)), op_of(case.trans_b, operands.b_KN.astype(wide))
    product = np.zeros((case.m, case.n), wide)
    magnitude = np.zeros((case.m, case.n))
    if case.alpha != 0 and case.k > 0:
        # BLAS has no integers; float64 has these sums as they are.
        made_as = np.float64 if dtype.is_integer else wide  # which has these sums of integers, and BLAS
        product = alpha * (a.astype(made_as) @ b.astype(made_as)).astype(wide)
        magnitude = abs(alpha) * (np.abs(a).astype(made_as) @ np.abs(b).astype(made_as))
    old = case.beta * operands.c_MN.astype(wide) if case.beta != 0 else np.zeros((case.m, case.n), wide)
    if dtype.is_integer:
        return (product + old).astype(written.numpy).astype(wide), np.zeros((case.m, case.n))
    u = dtype.accumulator.unit_roundoff
    steps = steps_of(dtype, case.k) * u
    result = product + old
    rounded = dtype.operand_roundoff
    of_products = (steps / (1 - steps) + 2 * rounded * (1 + rounded)) * magnitude
    if operands.on_gpus:
        of_products += dtype.truncated_sums(case.k) * magnitude
    bound = of_products + 4 * u * np.abs(old) + 2 * written.unit_roundoff * np.abs(result)
    return result, of_both_parts(dtype) * bound + np.finfo(np.float64).tiny


def mismatch(case: Case, operands: Operands) -> str:
    """Return what is wrong with C where this rank holds it; empty if nothing."""
    found = as_numpy(operands.c)
    if found is None:
        return ""
    result, bound = expected(case, operands)
    error = np.abs(found.astype(result.dtype) - result)
    good = error <= bound  # NaN is not good
    if good.all():
        return ""
    i, j = (int(x) for x in np.argwhere(~good)[0])
    worst = math.inf if not np.isfinite(error).all() else float((error / bound).max())
    return (
        f"{case}: {int((~good).sum())} of {good.size} elements are off, first ({i}, {j}): found {found[i, j]}, "
        f"expected {result[i, j]}; worst error/bound {worst:.3g}"
    )


def check_product(comm: Any, case: Case, operands: Operands) -> None:
    """Fail on all ranks if C is not what a case makes of its first values; collective."""
    __tracebackhide__ = True
    wrong = mismatch(case, operands)
    collective_assert(comm, not wrong, wrong)


def product(session: Session, case: Case, options: ScheduleOptions | None = None) -> str:
    """Multiply the matrices of a case, and return what is wrong with C here; collective."""
    operands = make_operands(session, case)
    session.poison_softbuf()
    session.gemm(*operands.abc, **case.how, options=options)
    wrong = mismatch(case, operands)
    release(session, operands)
    return wrong
