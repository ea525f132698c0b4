"""
What the shared library ``libuncut_mpi_blas`` calls: products by the addresses and numbers that a program passed.

They return whether the product is done; else the program's own library does it. Whether one is done here depends on
what all ranks of a grid pass alike. So all of them do the same.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, NoReturn, cast

from uncut_mpi.api.session import Session
from uncut_mpi.blas.doors import Asked, CallersProduct, Door, Given, LeadingDimensionError, Where
from uncut_mpi.blas.rates import grid_rate, plain_rate
from uncut_mpi.errors import ParamError, RankMismatchError, UncutError, reason
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.problem import Trans
from uncut_mpi.spmd.blacs import Blacs, blacs, can_begin
from uncut_mpi.spmd.runtime import MPI, before_end, is_fork

DEFAULT_GFLOP: Final = 2.0
"""As of the shared library, whose source says why."""

_ALONE, _GRID = "7q", "43q"
"""What `gemm` and `pgemm` are told."""
_TYPES = {ord("s"): DType.f32, ord("d"): DType.f64, ord("c"): DType.c64, ord("z"): DType.c128}
_REAL = b"sd"
_ENTRIES = (1, 2, 3, 4, 5, 6, 5, 6, 7, 8)
"""Of a descriptor of type 1, for what `pgemm` is told of each but LLD."""
_NUMBERS = (
    *(0, 0, 1, 2, 3, 4, 5),
    *(
        first + more
        for first in (8, 12, 17)
        for more in (0, 1, *(100 * (first + 2) - first + entry for entry in _ENTRIES))
    ),
    *(6, 15),
)
"""By what ranks agree on, its number as PBLAS tells it: of descriptors 100 times it and the entry."""

_said: set[str] = set()
_opening = threading.RLock()  # several threads may be the first
_inherited: list[object] = []  # the parent's, in a fork: nothing of it may be given back there
_ends: list[bool] = []  # whether doors close when MPI ends
_doors: dict[object, Door | None] = {}
"""By the context of a grid; None: of this process alone."""


def gemm(facts: bytes, where: Where, alpha: float, alpha_i: float, beta: float, beta_i: float, plain: int) -> bool:
    """
    Compute a product of this process. Local.

    Parameters
    ----------
    facts : bytes
        Of whole numbers of 64 bits: letter of the routine, bytes of its integers, TRANSA, TRANSB, M, N and K.
    where : tuple of int
        Addresses of A, B and C, which are column-major, and LDA, LDB and LDC.
    alpha, alpha_i, beta, beta_i : float
        Real and imaginary parts of the scalars.
    plain : int
        Address of the routine that does it otherwise; 0 if there is none.
    """
    door = _doors.get(None) or of_process()
    if door is None:
        return False

    def asked() -> Asked:
        describe, rate = functools.partial(_plain, facts), functools.partial(_rate, facts, plain)
        return facts, where, _scalars(facts, alpha, alpha_i, beta, beta_i), describe, rate

    return door.alone((facts, where, alpha, alpha_i, beta, beta_i), asked)


def pgemm(facts: bytes, where: Where, alpha: float, alpha_i: float, beta: float, beta_i: float, plain: int) -> bool:
    """
    Compute a product of a grid of processes. Collective in the grid.

    Parameters
    ----------
    facts : bytes
        As of `gemm`. Then for A, B and C the first row and column, from 1, and a descriptor without its LLD: type,
        context, M, N, IMB, INB, MB, NB, RSRC and CSRC. The same on all ranks.
    where : tuple of int
        Addresses of this process's arrays, and their LLD.
    alpha, alpha_i, beta, beta_i, plain
        As of `gemm`.
    """
    context = int.from_bytes(facts[80:88], "little", signed=True)
    door = _doors[context] if context in _doors else _of_grid(facts[8], context)
    if door is None:
        return False
    call = facts, where, alpha, alpha_i, beta, beta_i
    try:
        if door.repeats(call):
            return True
        scalars = _scalars(facts, alpha, alpha_i, beta, beta_i)
        describe, rate = functools.partial(_dealt, door, facts), functools.partial(_grid_rate, door, facts, plain)
        return door.multiply(facts, where, scalars, describe, rate, call)
    except LeadingDimensionError:
        return False
    except RankMismatchError as error:
        scalars = _scalars(facts, alpha, alpha_i, beta, beta_i)
        _end_by_mismatch(door, (*struct.unpack(_GRID, facts), *scalars), error)


def forget(context: int) -> None:
    """
    Let go of what a grid of processes has, whose ranks may come here in any order. Local.

    Of all grids, and of this process, for -1: close it. Collective.
    """
    for one in [*_doors] if context == -1 else [context]:
        door = _doors.pop(one, None)
        if door is not None:
            door.close() if context == -1 else door.drop()


def _leave_to_parent() -> None:
    _inherited.append({**_doors})
    _doors.clear()


atexit.register(forget, -1)
os.register_at_fork(after_in_child=_leave_to_parent)


def say(what: str, *, always: bool = False) -> None:
    """Tell the user why calls are not computed here, once, if they want to know (``UNCUT_MPI_BLAS_LOG``)."""
    logs = os.environ.get("UNCUT_MPI_BLAS_LOG", "").lower() not in ("", "0", "false", "no", "off")
    if what not in _said and (logs or always):
        _said.add(what)
        _write(f"{what}; BLAS calls go on as without it")


def _write(what: str) -> None:
    sys.stderr.write(f"uncut_mpi: {what}\n")  # at once, so that lines of ranks stay apart
    sys.stderr.flush()


def least_flop() -> float:
    """Return from how many operations on a product may be computed here (``UNCUT_MPI_BLAS_MIN_GFLOP``)."""
    given = os.environ.get("UNCUT_MPI_BLAS_MIN_GFLOP")
    try:
        least = float(given or DEFAULT_GFLOP)
    except ValueError:
        least = math.nan
    if not 0 <= least < math.inf:
        say(f"UNCUT_MPI_BLAS_MIN_GFLOP = {given!r} is no number of Gflop, so {DEFAULT_GFLOP} is taken", always=True)
        least = DEFAULT_GFLOP
    return 1e9 * least


def _open(comm: Callable[[], Any], grid: Any = None) -> Door | None:
    """Return what computes for a communicator; None, and why is said, if nothing of use does. Collective."""
    asked: Any = os.environ.get("UNCUT_MPI_BLAS_BACKEND") or "auto"
    try:
        session = Session(comm(), backend=asked)
    except (ImportError, UncutError) as error:  # the same on all ranks; ImportError where there is no MPI for Python
        say(reason(error), always=isinstance(error, ParamError))
        return None
    if session.backend_name == "host" and asked != "host":
        say(f"no GPUs are used ({session.backend_reason})")
        session.close()
        return None
    if not _ends:
        _ends.append(True)
        before_end(MPI, functools.partial(forget, -1))
    return Door(session, grid)


def begins() -> bool:
    """Return whether MPI can be used, or is not loaded; why not is said. Local."""
    why = can_begin()
    if why:
        say(why)
    return not why


def of_process() -> Door | None:
    """Return what computes the products of this process alone; None, which is said, if nothing of use does. Local."""
    with _opening:
        if None not in _doors:
            if is_fork[0] or not begins():
                return None
            _doors[None] = _open(lambda: MPI.COMM_SELF)
        return _doors[None]


def _of_grid(integer_bytes: int, context: int) -> Door | None:
    """Return what computes for a grid of processes, all of which can begin; collective in it."""
    try:
        library: Blacs = blacs(integer_bytes)
    except UncutError as error:
        say(str(error))
        return None
    grid = library.grid(context)
    if min(grid.place) < 0:
        return None  # who is not in the grid has nothing to do
    _doors[context] = _open(lambda: library.communicator(context), grid)
    return _doors[context]


def _scalars(facts: bytes, alpha: float, alpha_i: float, beta: float, beta_i: float) -> tuple[Any, Any]:
    return (alpha, beta) if facts[0] in _REAL else (complex(alpha, alpha_i), complex(beta, beta_i))


def _shapes(op_a: int, op_b: int, m: int, n: int, k: int) -> tuple[Trans, Trans, Sequence[tuple[int, int]]]:
    """Return how A and B are taken, and the shapes of A, B and C."""
    trans_a, trans_b = cast("tuple[Trans, Trans]", (chr(op_a), chr(op_b)))
    return trans_a, trans_b, ((m, k) if trans_a == "N" else (k, m), (k, n) if trans_b == "N" else (n, k), (m, n))


def _plain(facts: bytes) -> CallersProduct:
    trans_a, trans_b, shapes = _shapes(*struct.unpack(_ALONE, facts)[2:])
    return CallersProduct(_TYPES[facts[0]], [Given(one, Layout.whole(), one) for one in shapes], trans_a, trans_b)


def _rate(facts: bytes, plain: int) -> float:
    return plain_rate(_TYPES[facts[0]], facts[8], plain)


def _dealt(door: Door, facts: bytes) -> CallersProduct | None:
    """Return the product that descriptors say; None if ours has no such matrices."""
    numbers = struct.unpack(_GRID, facts)
    trans_a, trans_b, shapes = _shapes(*numbers[2:7])
    given = []
    for shape, at in zip(shapes, (7, 19, 31), strict=True):
        row, col, _, context, *about = numbers[at : at + 12]
        extents, first_blocks, block, source = zip(about[::2], about[1::2], strict=True)
        first = row - 1, col - 1
        part = door.part(shape, first, extents, first_blocks, block, source) if context == numbers[10] else None
        if part is None:
            return None
        given.append(part)
    return CallersProduct(_TYPES[facts[0]], given, trans_a, trans_b)


def _grid_rate(door: Door, facts: bytes, plain: int) -> float:
    kind = _TYPES[facts[0]]
    if kind not in door.plain_rates:
        door.plain_rates[kind] = grid_rate(door, kind, facts[8], struct.unpack(_GRID, facts)[10], plain)
    return door.plain_rates[kind]


def _end_by_mismatch(door: Door, passed: Sequence[Any], error: RankMismatchError) -> NoReturn:
    """End the program as PBLAS does for a wrong argument, where ranks pass different ones. Collective."""
    every = door.session.gather_values(passed)
    at = next((at for at, values in enumerate(zip(*every, strict=True)) if len({*values}) > 1), 0)
    number = _NUMBERS[at]
    library, routine, context = blacs(passed[1]), f"P{chr(passed[0]).upper()}GEMM", passed[10]
    _write(f"{routine}: {error}")
    library.tell(context, routine, number)
    library.abort(context, number)
