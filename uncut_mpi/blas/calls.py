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
from typing import Any, Final, NoReturn

from uncut_mpi.api.session import Session
from uncut_mpi.blas.doors import Asked, CallersProduct, Door, Given, LeadingDimensionError, Where
from uncut_mpi.blas.rates import grid_rate, plain_rate
from uncut_mpi.blas.routines import ROUTINES, Letters, Routine, Shape
from uncut_mpi.errors import ParamError, RankMismatchError, UncutError, reason
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.spmd.blacs import Blacs, blacs, can_begin
from uncut_mpi.spmd.runtime import MPI, before_end, is_fork

DEFAULT_GFLOP: Final = 2.0
"""As of the shared library, whose source says why."""

_MOST_LETTERS, _MOST_EXTENTS, _OF_MATRIX = 4, 3, 12
_GRID = f"{3 + _MOST_LETTERS + _MOST_EXTENTS + 3 * _OF_MATRIX}q"
_FIRST = 3 + _MOST_LETTERS + _MOST_EXTENTS
"""What `compute_on_grid` is told, and where it begins to be of matrices."""
_TYPES = {ord("s"): DType.f32, ord("d"): DType.f64, ord("c"): DType.c64, ord("z"): DType.c128}
_ENTRIES = (1, 2, 3, 4, 5, 6, 5, 6, 7, 8)
"""Of a descriptor of type 1, for what `compute_on_grid` is told of each but LLD."""

_said: set[str] = set()
_opening = threading.RLock()  # several threads may be the first
_inherited: list[object] = []  # the parent's, in a fork: nothing of it may be given back there
_ends: list[bool] = []  # whether doors close when MPI ends
_doors: dict[object, Door | None] = {}
"""By the context of a grid; None: of this process alone."""


def compute(facts: bytes, where: Where, alpha: float, alpha_i: float, beta: float, beta_i: float, plain: int) -> bool:
    """
    Make a call of this process. Local.

    Parameters
    ----------
    facts : bytes
        Of whole numbers of 64 bits: which of `ROUTINES`, letter of the type, bytes of its integers. Then 4 are its
        letters in capitals, and 3 are M, N and K. Zeros stand for those that it has not, and for what is of grids.
    where : tuple of int
        Addresses of its matrices in their order, which are column-major, 3 with zeros, and their leading dimensions.
    alpha, alpha_i, beta, beta_i : float
        Real and imaginary parts of the scalars.
    plain : int
        Address of ?gemm of the library that does it otherwise; 0 if there is none.
    """
    door = _doors.get(None) or of_process()
    if door is None:
        return False

    def asked() -> Asked:
        describe, rate = (
            functools.partial(_plain, facts),
            functools.partial(plain_rate, _TYPES[facts[8]], facts[16], plain),
        )
        return facts, where, _scalars(facts, alpha, alpha_i, beta, beta_i), describe, rate

    return door.alone((facts, where, alpha, alpha_i, beta, beta_i), asked)


def compute_on_grid(
    facts: bytes, where: Where, alpha: float, alpha_i: float, beta: float, beta_i: float, plain: int
) -> bool:
    """
    Make a call of a grid of processes. Collective in the grid.

    Parameters
    ----------
    facts : bytes
        As of `compute`; of each matrix the first row and column, from 1, and a descriptor without its LLD: type,
        context, M, N, IMB, INB, MB, NB, RSRC and CSRC. The same on all ranks.
    where : tuple of int
        Addresses of this process's arrays, and their LLD.
    alpha, alpha_i, beta, beta_i, plain
        As of `compute`, of p?gemm.
    """
    context = _context(facts)
    door = _doors[context] if context in _doors else _of_grid(facts[16], context)
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


def _context(facts: bytes) -> int:
    return int.from_bytes(facts[8 * _FIRST + 24 : 8 * _FIRST + 32], "little", signed=True)


def _scalars(facts: bytes, alpha: float, alpha_i: float, beta: float, beta_i: float) -> tuple[Any, Any]:
    real = ROUTINES[facts[0]].real if _TYPES[facts[8]].is_complex else ("alpha", "beta")
    return (alpha if "alpha" in real else complex(alpha, alpha_i)), (beta if "beta" in real else complex(beta, beta_i))


def _asked(numbers: Sequence[int]) -> tuple[Routine, Letters, Sequence[Shape]]:
    """Return what is called, with which letters, and the shapes of its matrices."""
    routine = ROUTINES[numbers[0]]
    by = dict(zip(routine.letters, map(chr, numbers[3:]), strict=False))
    return routine, by, routine.shapes(by, numbers[3 + _MOST_LETTERS :][: routine.num_extents])


def _plain(facts: bytes) -> CallersProduct:
    routine, by, shapes = _asked(struct.unpack(_GRID, facts))
    return CallersProduct(routine, by, _TYPES[facts[8]], [Given(one, Layout.whole(), one) for one in shapes])


def _dealt(door: Door, facts: bytes) -> CallersProduct | None:
    """Return the product that descriptors say; None if ours has no such matrices."""
    numbers = struct.unpack(_GRID, facts)
    (routine, by, shapes), given = _asked(numbers), []
    for at, shape in enumerate(shapes):
        row, col, _, context, *about = numbers[_FIRST + _OF_MATRIX * at :][:_OF_MATRIX]
        extents, first_blocks, block, source = zip(about[::2], about[1::2], strict=True)
        first = row - 1, col - 1
        ours = context == _context(facts)
        part = door.part(shape, first, extents, first_blocks, block, source) if ours else None
        if part is None:
            return None
        given.append(part)
    return CallersProduct(routine, by, _TYPES[facts[8]], given)


def _grid_rate(door: Door, facts: bytes, plain: int) -> float:
    kind = _TYPES[facts[8]]
    if kind not in door.plain_rates:
        door.plain_rates[kind] = grid_rate(door, kind, facts[16], _context(facts), plain)
    return door.plain_rates[kind]


def _numbers_of(routine: Routine) -> list[int]:
    """Return by what ranks agree on its number as PBLAS tells it: of descriptors 100 times it and the entry."""
    letters, extents = len(routine.letters), routine.num_extents
    own, after = [*range(1, letters + 1)], [*range(letters + 1, letters + extents + 1)]
    alpha = beta = letters + extents + 1
    told = [0, 0, 0, *own, *[0] * (_MOST_LETTERS - letters), *after, *[0] * (_MOST_EXTENTS - extents)]
    array = alpha + 1
    for at in range(3):
        if at == routine.num_matrices - 1 and not routine.is_triangular:
            beta, array = array, array + 1
        told += [array + 1, array + 2, *(100 * (array + 3) + entry for entry in _ENTRIES)]
        array += 4
    return [*told, alpha, beta]


def _end_by_mismatch(door: Door, passed: Sequence[Any], error: RankMismatchError) -> NoReturn:
    """End the program as PBLAS does for a wrong argument, where ranks pass different ones. Collective."""
    every = door.session.gather_values(passed)
    at = next((at for at, values in enumerate(zip(*every, strict=True)) if len({*values}) > 1), 0)
    routine = ROUTINES[passed[0]]
    number, library, context = _numbers_of(routine)[at], blacs(passed[2]), passed[_FIRST + 3]
    name = f"P{chr(passed[1])}{routine.name}".upper()
    _write(f"{name}: {error}")
    library.tell(context, name, number)
    library.abort(context, number)
