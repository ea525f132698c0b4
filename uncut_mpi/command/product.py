"""The product of one command: its matrices in a session, its timed calls, its check."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import numpy as np

from uncut_mpi.api.gemm_plan import GemmPlan
from uncut_mpi.api.matrix import Matrix
from uncut_mpi.api.matrix_files import MatrixFile, check_new
from uncut_mpi.api.session import Session
from uncut_mpi.command import artifacts, check, data
from uncut_mpi.command.arguments import GemmArguments
from uncut_mpi.command.progress import watch
from uncut_mpi.command.sharers import Sharers
from uncut_mpi.command.streaming import FileArray, Streamed
from uncut_mpi.errors import DataFileError
from uncut_mpi.model.arguments import Number
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.lines import index, lines_of
from uncut_mpi.model.locations import Location
from uncut_mpi.model.places import Dealt, Place, Places
from uncut_mpi.model.positions import Orders, runs
from uncut_mpi.model.problem import Order

_LONG_S: Final = 1.0
"""Calls that are expected to take longer, or took longer, show how far they are."""


class Multiplier(Protocol):
    """What computes C := alpha op(A) op(B) + beta C when it is executed."""

    def execute(self, alpha: Number = 1.0, beta: Number = 0.0) -> object:
        """Do it. Collective."""


Fill = Callable[[np.ndarray, slice, slice], None]
"""Writes some rows and columns of a matrix into an array of their shape; whole lines (see `lines`) the quickest."""


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """Where a matrix's elements come from."""

    rows: int  # rows, cols: shape as stored (before op)
    cols: int
    order: Order  # storage order it is given in
    fill: Fill  # writes any rows and columns of it, the same on every rank


@dataclasses.dataclass(frozen=True, slots=True)
class Product:
    """The matrices of one product, placed, and the host copies that a check needs."""

    m: int  # m, n, k: extents of the product (elements)
    n: int
    k: int
    dtype: DType  # element type
    place: Places  # where A, B and C live
    a: Matrix  # a, b, c: there
    b: Matrix
    c: Matrix
    # host_a, host_b: the same elements in host memory that all ranks read (the same objects if placed there).
    host_a: Matrix | FileArray
    host_b: Matrix | FileArray
    # What C holds before a call: its elements, or NaN where it is not read. C itself if it is in host memory that all
    # ranks share and is not read: two of the largest would not fit where one does.
    first_c: Matrix | FileArray
    # The files, where these are multiplied where they are; then what was said of host memory is theirs.
    streamed: Streamed | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Times of a plan's calls, each that of the slowest rank (s)."""

    planned_s: float  # planning and reserving
    call_s: float  # the first call alone
    first_call_s: float  # planning, reserving and the first call
    samples_s: list[float]  # the timed calls, in order; none where nothing was to be measured


def generated_sources(arguments: GemmArguments, m: int, n: int, k: int) -> tuple[Source, Source, Source | None]:
    """Return random A, B and, where beta is not 0, C, in Fortran order."""

    def source(name: str, rows: int, cols: int) -> Source:
        def fill(out: np.ndarray, down: slice, along: slice) -> None:
            data.fill(out, name, arguments.seed, rows=rows, row0=down.start or 0, col0=along.start or 0)

        return Source(rows, cols, "F", fill)

    a = source("A", *((m, k) if arguments.trans_a == "N" else (k, m)))
    b = source("B", *((k, n) if arguments.trans_b == "N" else (n, k)))
    return a, b, source("C", m, n) if arguments.beta != 0 else None


def file_source(file: MatrixFile) -> Source:
    """Return the elements of a matrix file."""

    def fill(out: np.ndarray, rows: slice, cols: slice) -> None:
        file.read_into(out, *((cols, rows) if file.order == "F" else (rows, cols)))

    return Source(file.rows, file.cols, file.order, fill)


def make_product(
    session: Session,
    arguments: GemmArguments,
    extents: tuple[int, int, int],
    dtype: DType,
    sources: tuple[Source, Source, Source | None],
    result_order: Order,
) -> Product:
    """Make, fill and place the matrices. Collective."""
    m, n, k = extents
    a, host_a = placed(session, sources[0], dtype, arguments.place.a)
    b, host_b = placed(session, sources[1], dtype, arguments.place.b)
    first_c = session.empty_host((m, n), dtype, order=result_order)
    source = sources[2]
    is_same = source is None and arguments.place.c == Location.host()  # filled by `reset_result`
    with session.together("filling C"):
        if source is not None:
            _fill(session, source, first_c, arguments.place.c)
        elif not is_same:
            _poison(session, first_c)
    c = first_c if is_same else _empty(session, (m, n), dtype, arguments.place.c, result_order)
    product = Product(m, n, k, dtype, arguments.place, a, b, c, host_a, host_b, first_c)
    reset_result(session, product)
    return product


def release_product(session: Session, product: Product) -> None:
    """Give the matrices back. Collective."""
    held = (product.a, product.b, product.c, product.host_a, product.host_b, product.first_c)
    for matrix in {id(matrix): matrix for matrix in held if isinstance(matrix, Matrix)}.values():
        session.release(matrix)


def reset_result(session: Session, product: Product) -> None:
    """Put into C what it holds before a call, and NaN into every SoftBuf. Collective."""
    if product.streamed is not None:
        product.streamed.reset()
    elif product.c.location == Location.host():
        if product.first_c is product.c:
            _poison(session, product.c)
        elif (lines := share_of(session, product.c)).stop:
            some = index(product.c.order, lines)
            product.c.array[some] = product.first_c.array[some]
        session.barrier()
    else:
        assert isinstance(product.first_c, Matrix)  # no file
        session.upload(product.first_c, product.c)
    session.poison_softbuf()


def measure(session: Session, plan: GemmPlan, arguments: GemmArguments, planned_s: float, product: Product) -> Timing:
    """
    Time a plan's calls. Collective.

    One sample is the slowest rank between two barriers; every call ends with its device work done. Schedules are tried
    before the timed calls.

    Parameters
    ----------
    planned_s : float
        What planning and reserving took this rank; part of the first call's time (s).
    product : Product
        Whose result is reset before the last timed call, outside its time; not at all where none is timed.
    """
    alone = not (plan.tuning or arguments.warmup or arguments.repeat)

    def once(which: str, expected_s: float) -> float:
        # No thread is begun beside a call that is soon over.
        watched = session.rank == 0 and expected_s > _LONG_S
        title = "multiplying" if alone else f"multiplying, {which}"
        with watch(title, plan.progress) if watched else contextlib.nullcontext():
            return timed_call(session, plan, arguments.alpha, arguments.beta)

    first = once("first call", plan.summary.predicted_s)
    warmups = 0
    while plan.tuning or warmups < arguments.warmup:
        once("trying schedules" if plan.tuning else f"warm-up {warmups + 1} of {arguments.warmup}", first)
        warmups += 1
    samples: list[float] = []
    for call in range(1, arguments.repeat + 1):
        if call == arguments.repeat:
            reset_result(session, product)
        samples.append(once(f"timed call {call} of {arguments.repeat}", first))
    timed = slowest(session, [planned_s, first, planned_s + first, *samples])
    return Timing(timed[0], timed[1], timed[2], timed[3:])


def timed_call(session: Session, plan: Multiplier, alpha: Number, beta: Number) -> float:
    """Return what one call takes on this rank from a barrier on (s). Collective."""
    session.barrier()
    start = time.perf_counter()
    plan.execute(alpha, beta)
    return time.perf_counter() - start


def slowest(session: Session, samples: list[float]) -> list[float]:
    """Return the longest of all ranks' times, sample by sample. Collective."""
    return [max(of_ranks) for of_ranks in zip(*session.gather_values(samples), strict=True)]


def verify_product(session: Session, product: Product, arguments: GemmArguments) -> check.CheckResult:
    """Check the result of the last call against the host copies; the same verdict on every rank. Collective."""
    result = session.download(product.c) if product.streamed is None else product.streamed.result
    try:
        session.barrier()
        return check_result(session, product, result, arguments)
    finally:
        if isinstance(result, Matrix) and result is not product.c:
            session.release(result)


def check_result(
    session: Session, product: Product, result: Matrix | FileArray, arguments: GemmArguments
) -> check.CheckResult:
    """Check a result in host memory, complete on every rank; the same verdict on every rank. Collective."""
    sharers = Sharers.of(session)
    c_in = sharers.array(product.first_c) if arguments.beta != 0 else None
    matrices = sharers.array(product.host_a), sharers.array(product.host_b), c_in, sharers.array(result)
    scalars, ops = (arguments.alpha, arguments.beta), (arguments.trans_a, arguments.trans_b)
    return check.check_shared(check.Equation(*matrices, product.dtype, *scalars, *ops), sharers, arguments.seed)


def check_output(path: str, *, overwrite: bool) -> None:
    """
    Check that a matrix file of this name could be written; raise DataFileError if not.

    It must not exist (without `overwrite`), finished or not, and its directory must be there, to be written into.
    """
    if artifacts.stream_number(path) is not None:
        raise DataFileError(f"{path} is a stream of this process, not a regular file: name another one")
    check_new(path, overwrite=overwrite)
    artifacts.check_writable(path, path, overwrite=overwrite)


def write_result(session: Session, product: Product, path: str, *, overwrite: bool) -> None:
    """Write C to the output file, every rank its share; the file appears when it is complete. Collective."""
    if product.streamed is not None:
        product.streamed.commit()
        return
    with session.together("creating the output file"):
        if session.rank == 0:  # one may have appeared meanwhile
            check_output(path, overwrite=overwrite)
    result = session.download(product.c)
    file = session.create_file(path, result.shape, product.dtype, order=result.order, overwrite=overwrite)
    session.upload(result, file)
    session.commit(file)


def placed(session: Session, source: Source, dtype: DType, place: Place) -> tuple[Matrix, Matrix]:
    """Return a matrix in its place, and its elements in host memory, which may be the same one. Collective."""
    shape = source.rows, source.cols
    on_host = place.memory == "shared" if isinstance(place, Dealt) else place == Location.host()
    host = _empty(session, shape, dtype, place if on_host else Location.host(), source.order)
    with session.together("filling a matrix"):
        _fill(session, source, host, place)
    if on_host:
        return host, host
    matrix = _empty(session, shape, dtype, place, source.order)
    session.upload(host, matrix)
    return matrix, host


def _fill(session: Session, source: Source, host: Matrix, place: Place) -> None:
    """Write this rank's share into a host matrix: of one that is dealt what it has, else as much as the others."""
    shape = source.rows, source.cols
    orders: Orders = (None, None)
    rows, cols = (0, source.rows), (0, source.cols)
    readers: Sequence[int] = Sharers.of(session).ranks
    if isinstance(place, Dealt) and session.machine.num_nodes == 1:
        rows, cols = place.layout.rectangles(shape, session.size)[session.rank]
        readers = place.layout.holders(session.size) if place.layout.kind == "replicated" else [session.rank]
        orders = place.layout.orders(shape)
    if session.rank not in readers:
        return
    for down, along in itertools.product(runs(orders[0], rows, None), runs(orders[1], cols, None)):
        lines, whole = (along, down) if source.order == "F" else (down, along)
        share = lines_of(lines.stop - lines.start, readers.index(session.rank), len(readers))
        some, all_of = slice(lines.start + share.start, lines.start + share.stop), slice(*whole.extent)
        part = (all_of, some) if source.order == "F" else (some, all_of)
        source.fill(host.array[part], *part)


def _empty(session: Session, shape: tuple[int, int], dtype: DType, place: Place, order: Order) -> Matrix:
    made: Matrix  # of two dimensions
    if isinstance(place, Dealt):
        made = session.empty(shape, dtype, place.layout, order=place.order or order, memory=place.memory)
    elif place.space == "device":
        assert place.rank is not None  # a device has an owner
        made = session.empty_device(shape, dtype, rank=place.rank, order=order)
    elif place.rank is None:
        made = session.empty_host(shape, dtype, order=order)
    else:
        own = session.rank == place.rank
        array = np.empty(shape, dtype.numpy, order="F" if order == "F" else "C") if own else None
        made = session.register(array, root=place.rank)
    return made


def share_of(session: Session, matrix: Matrix | FileArray) -> slice:
    """Return the lines (columns in F order, rows in C order) that are this rank's share of a matrix in host memory."""
    rows, cols = matrix.shape
    return Sharers.of(session).lines(cols if matrix.order == "F" else rows)


def _poison(session: Session, matrix: Matrix) -> None:
    """Put NaN into this rank's share of a matrix in host memory. Local."""
    share = share_of(session, matrix)
    if share.stop:
        data.poison(matrix.array[index(matrix.order, share)])
