"""Plans as values: what they depend on, what they say of themselves, and what this rank does by them."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Sequence
from typing import ClassVar, Final, TypeVar

import numpy as np

from uncut_mpi.api.matrix import MatrixInfo
from uncut_mpi.api.request import Choices, Infos, check_written
from uncut_mpi.model.locations import Location, Space
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.parts import Order
from uncut_mpi.model.placement import Placement, Where
from uncut_mpi.model.positions import Orders, orders_for_copy, orders_for_product
from uncut_mpi.model.problem import GemmProblem, StoredMatrix, conjugated
from uncut_mpi.planning.longest import longest_task_s
from uncut_mpi.planning.lower import OperationList, lower
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import Planned, describe
from uncut_mpi.planning.schedule import Schedule

_T = TypeVar("_T")
_PLAIN: Final[tuple[Orders, Orders, Orders]] = ((None, None), (None, None), (None, None))


@dataclasses.dataclass(frozen=True, slots=True)
class PlanSummary:
    """
    What a plan does, in numbers.

    Attributes
    ----------
    scheduler : str
        Name of the scheduler; ``"auto (uncut)"`` if a search chose its options.
    grid : tuple of int
        Process grid (rows, cols) of the caller's C. Of columns of ranks (`ScheduleOptions.areas`) the most ranks in
        one, and how many there are, of rows of ranks the other way round: fewer ranks than their product may compute.
        `how` says which.
    splits : int
        Over how many such grids k is split.
    tile : int
        Tile edge (elements); 0 where the scheduler has none.
    how : str
        How the problem is divided, in words.
    tasks : int
        Tasks of all ranks.
    bytes_by_link : dict
        Bytes copied per kind of link.
    predicted_s : float
        Time the planner expects.
    plan_s : float
        Time rank 0 took to plan.
    digest : str
        Of the schedule, the same on all ranks.
    softbuf_bytes : list of int
        SoftBuf each rank needs.
    staged : str
        Which of the caller's A, B and C go through memory of ours, because others would have to use them and cannot.
        These lie in device memory that peers cannot open, or in private host memory that cannot be page-locked. As
        ``"AC"``, mostly none.
    tried : int
        Schedules of which this one is the fastest, or while they are tried how many there are; 1 without a trial.
    device_memory : int
        The budget: what each rank may use of its device's memory beside the matrices there (bytes).
    host_bytes : list of int
        Host memory each rank needs for copies of matrices that no device reaches, as those in files.
    host_memory : int
        What each rank may use of it (bytes); 0 where nothing is copied so.
    chunks : int
        In how many blocks of C, one after another, a product is done whose schedule would be too large; mostly 1. All
        figures are of all of them. Where more than 16 of them lie differently, the others are taken to be as the first.
        Memory is reserved for each when it is first computed.
    longest_s : float
        Time the planner expects of the longest task.
    """

    scheduler: str
    grid: tuple[int, int]
    splits: int
    tile: int
    how: str
    tasks: int
    bytes_by_link: dict[str, int]
    predicted_s: float
    plan_s: float
    digest: str
    softbuf_bytes: list[int]
    staged: str = ""
    tried: int = 1
    device_memory: int = 0
    host_bytes: list[int] = dataclasses.field(default_factory=list)
    host_memory: int = 0
    chunks: int = 1
    longest_s: float = 0.0

    @classmethod
    def of(cls, planned: Planned, machine: Machine, asked: ScheduleOptions, plan_s: float, tried: int) -> PlanSummary:
        """Return what one of several plans does, by what their caller asked for and the time that all took (s)."""
        schedule = planned.schedule
        names = "BAC" if schedule.problem.swapped else "ABC"
        in_host = schedule.softbuf_bytes(Space.HOST).tolist()
        return cls(
            scheduler=f"auto ({schedule.scheduler})" if asked.scheduler == "auto" else schedule.scheduler,
            grid=schedule.callers_grid,
            splits=schedule.splits,
            tile=schedule.tile,
            how=describe(schedule, planned.options),
            tasks=len(schedule.tasks),
            bytes_by_link=schedule.bytes_by_link(),
            predicted_s=planned.predicted_s,
            plan_s=plan_s,
            digest=schedule.digest(),
            softbuf_bytes=schedule.softbuf_bytes().tolist(),
            staged="".join(sorted(names[matrix] for matrix in planned.staged)),
            tried=tried,
            device_memory=planned.options.device_memory,
            host_bytes=in_host,
            host_memory=planned.options.host_memory if any(in_host) else 0,
            longest_s=longest_task_s(schedule, machine),
        )


@dataclasses.dataclass(frozen=True, slots=True)
class PlanKey:
    """
    What a plan depends on, besides the machine: calls with equal keys share one.

    Attributes
    ----------
    problem, placement, options
        What is computed, where, and what is fixed about how.
    private : tuple of int
        Which of the problem's user buffers, the parts of A, B and C one after another, their owner alone can use. These
        lie in device memory that peers cannot open, in private host memory that cannot be page-locked, or in files.
    files : tuple of int
        Those of them that lie in files.
    orders : tuple of (CyclicOrder or None, CyclicOrder or None)
        In which orders of their rows and columns the caller's A, B and C are multiplied.
    """

    problem: GemmProblem
    placement: Placement
    options: ScheduleOptions
    private: tuple[int, ...] = ()
    files: tuple[int, ...] = ()
    orders: tuple[Orders, Orders, Orders] = _PLAIN
    now: ClassVar[None] = None
    tuning: ClassVar[bool] = False

    @classmethod
    def of(cls, infos: Infos, choices: Choices, *, reads_c: bool, scales_only: bool) -> PlanKey:
        """
        Return the key of a product. Local.

        Parameters
        ----------
        reads_c, scales_only : bool
            Whether C is read, and whether it is all that is read.

        Raises
        ------
        ParamError
            If shapes, types, layouts or overlaps do not allow the product.
        """
        a, b, c = infos
        op_a, op_b = (conjugated(op) if one.conjugated else op for one, op in zip((a, b), choices[:2], strict=True))

        def read(infos: Infos) -> tuple[GemmProblem, Infos, tuple[Order, Order, Order]]:
            a, b, c = infos
            (a, stored_a), (b, stored_b) = _as_read(a, op_a, c.stored), _as_read(b, op_b, c.stored)
            problem = GemmProblem.from_operands(
                stored_a,
                stored_b,
                c.stored,
                dtype=(a.dtype, b.dtype, c.dtype),
                trans_a=op_a,
                trans_b=op_b,
                reads_c=reads_c,
                alpha_is_zero=scales_only,
            )
            return problem, (a, b, c), (stored_a.order, stored_b.order, c.stored.order)

        problem, infos, read_in = read(infos)
        check_written("C", c, A=a, B=b)
        orders = _PLAIN
        if any(one.layout.orders != (None, None) for one in infos):
            bounds = a.layout, b.layout, c.layout
            orders = orders_for_product(*bounds, choices.trans_a, choices.trans_b)
            problem, infos, read_in = read(infos_in(infos, orders))
        both = (in_schedule_order(problem, of_three) for of_three in (infos, read_in))
        places = itertools.starmap(_where, zip(*both, strict=True))
        return cls(problem, Placement(*places), choices.options, *private_of(problem, infos), orders)

    @classmethod
    def of_copy(cls, infos: Infos, choices: Choices) -> PlanKey:
        """Return the key of C := A, where B is A as well and not read; a conjugated A is refused. Local."""
        source, _, target = infos
        source.check_in_memory()
        both = orders_for_copy(source.layout, target.layout)
        source, target = source.in_orders(both), target.in_orders(both)
        # What is not in the order in which the problem has both is transposed: as little as can be.
        orders = target.stored.order, source.stored.order
        reads = [(order, source.in_order(order), target.in_order(order)) for order in orders]
        order, a, c = min(reads, key=lambda read: sum(info.elements_not_in(read[0]) for info in read[1:]))
        shape = a.layout.shape if order == "F" else a.layout.shape[::-1]
        places = [_where(one, order) for one in (a, c)]
        lda, ldc = (
            one.parts[0].part.ld if isinstance(where, Location) else 0
            for one, where in zip((a, c), places, strict=True)
        )
        problem = GemmProblem(*shape, 0, a.dtype, lda=lda, ldc=ldc, reads_c=False, copies=True)
        placement = Placement(places[0], Location.host(), places[1])
        parts = [*_obstacles(a), ("", False), *_obstacles(c)]  # B, in one part, is not read
        return cls(problem, placement, choices.options, *_private(parts), (both, both, both))

    @property
    def digest(self) -> bytes:
        """16 bytes that equal keys share on every rank."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).digest()


def infos_in(infos: Infos, orders: tuple[Orders, Orders, Orders]) -> Infos:
    """Return A, B and C with their rows and columns in other orders."""
    a, b, c = (info.in_orders(one) for info, one in zip(infos, orders, strict=True))
    return a, b, c


def in_schedule_order(problem: GemmProblem, of_three: tuple[_T, _T, _T]) -> tuple[_T, _T, _T]:
    """Return what A, B and C have as the schedule counts them, which for a C in row-major order multiplies B by A."""
    a, b, c = of_three
    return (b, a, c) if problem.swapped else of_three


def _as_read(info: MatrixInfo, op: str, c: StoredMatrix) -> tuple[MatrixInfo, StoredMatrix]:
    """
    Return an operand and how it is read: as it is stored, or in the order in which op conjugates and transposes it.

    What is stored otherwise is transposed by copies then: nothing conjugates without transposing.
    """
    stored = info.stored
    if op not in ("C", "R") or not info.dtype.is_complex or (stored.order == c.order) == (op == "C"):
        return info, stored
    order: Order = "C" if stored.order == "F" else "F"
    info = info.in_order(order)
    return info, info.stored if info.stored.order == order else StoredMatrix(stored.rows, stored.cols, order)


def _where(info: MatrixInfo, order: Order) -> Where:
    """Return where a matrix lives, or its parts if they are several or in another order; of what is column-major."""
    if info.location is not None and info.parts[0].part.order == order:
        return info.location
    return info.layout if order == "F" else info.layout.transposed


def private_of(problem: GemmProblem, infos: Infos) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return which of a problem's user buffers their owner alone can use (`PlanKey.private`), and those in files."""
    return _private([part for info in in_schedule_order(problem, infos) for part in _obstacles(info)])


def _obstacles(info: MatrixInfo) -> list[tuple[str, bool]]:
    """Return of each part why its owner alone can use it, and whether it lies in a file."""
    return [(held.obstacle, bool(info.file)) for held in info.parts]


def _private(parts: Sequence[tuple[str, bool]]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    private = tuple(at for at, (obstacle, _) in enumerate(parts) if obstacle)
    return private, tuple(at for at in private if parts[at][1])


@dataclasses.dataclass(frozen=True, eq=False)  # no slots: what is bound to a plan is found by a weak reference
class Plan:
    """
    A schedule as this rank runs it.

    Attributes
    ----------
    key : PlanKey
        What it was made for.
    digest : bytes
        16 bytes that only plans of the same key and schedule share.
    schedule : Schedule
        Every task of every rank.
    summary : PlanSummary
        The plan in numbers.
    program : OperationList
        What this rank issues.
    softbuf_bytes, host_softbuf_bytes, flag_bytes : ndarray of int64, shape (num_ranks,)
        SoftBuf on the device and on the host, and flags, that each rank needs.
    """

    key: PlanKey
    digest: bytes
    schedule: Schedule
    summary: PlanSummary
    program: OperationList
    softbuf_bytes: np.ndarray
    host_softbuf_bytes: np.ndarray
    flag_bytes: np.ndarray
    tuning: ClassVar[bool] = False
    may_go: ClassVar[bool] = False

    @property
    def now(self) -> Plan:
        """What the next call binds before it begins."""
        return self

    shown = now

    @property
    def every(self) -> Sequence[Plan]:
        """All that may be bound."""
        return (self,)

    @classmethod
    def of(cls, key: PlanKey, summary: PlanSummary, schedule: Schedule, rank: int) -> Plan:
        """Return the plan of a rank by a schedule."""
        lowering = lower(schedule, rank)
        needed = schedule.softbuf_bytes(), schedule.softbuf_bytes(Space.HOST), 4 * lowering.num_flags
        for of_ranks in needed:
            of_ranks.flags.writeable = False
        softbuf_bytes, host_softbuf_bytes, flag_bytes = needed
        return cls(
            key=key,
            digest=hashlib.blake2b(key.digest + summary.digest.encode(), digest_size=16).digest(),
            schedule=schedule,
            summary=summary,
            program=dataclasses.replace(lowering.rank_list(rank), longest_s=summary.longest_s),
            softbuf_bytes=softbuf_bytes,
            host_softbuf_bytes=host_softbuf_bytes,
            flag_bytes=flag_bytes,
        )
