"""
What calls of one key run by: a plan, several of which the fastest is looked for, or those of chunks of C.

All three have a key, a digest, and what callers are told (`summary`, `schedule`). They name the plan by which the next
call begins (`now`), what that multiplies, and all plans that may be bound to matrices (`plans`). They are the same on
all ranks.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from uncut_mpi.api.bound_epilogue import BoundEpilogue
from uncut_mpi.api.keys import PlanKey
from uncut_mpi.api.request import Choices, Operands, infos_of
from uncut_mpi.model.arguments import counted
from uncut_mpi.model.locations import Space
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.parts import Extent
from uncut_mpi.planning.chunks import MOST_KINDS, Chunks
from uncut_mpi.planning.description import describe
from uncut_mpi.planning.longest import longest_task_s
from uncut_mpi.planning.lower import OperationList, lower
from uncut_mpi.planning.options import ScheduleOptions, changed
from uncut_mpi.planning.planner import Decision, Planned
from uncut_mpi.planning.schedule import Schedule, digest_of_bytes

MOST_TOLD_ALL: Final = 64
"""Up to so many ranks are told the whole schedule of any plan: to have it from rank 0 takes less than to make it."""

LARGE_BYTES: Final = 1 << 16
"""So are more ranks, if it takes no more than this, encoded."""

CALLS: Final = 3
"""Calls of each plan that are timed; its first one comes before them and is not."""


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
    search : str
        How far a search of ``"auto"`` went: ``"rule"`` or ``"full"`` (`ScheduleOptions.search`), or ``"part"`` beside
        the calls of a plan by rule; empty without one.
    search_after : int
        After how many calls there is a whole search beside them, where this plan comes before it; 0: never.
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
    search: str = ""
    search_after: int = 0

    @classmethod
    def of(
        cls, planned: Planned, machine: Machine, asked: ScheduleOptions, plan_s: float, tried: int, calls: int = 0
    ) -> Told:
        """
        Return what one of several plans does, and what other ranks make its schedule of.

        It is by what was asked for, the time that all took (s), and `search_after`. Many ranks make a large schedule
        themselves.
        """
        schedule, copies = planned.schedule, planned.schedule.copies()
        names = "BAC" if schedule.problem.swapped else "ABC"
        in_host = schedule.softbuf_bytes(Space.HOST).tolist()
        searched = asked.scheduler == "auto" and schedule.problem.has_product
        encoded = schedule.encode()
        summary = cls(
            scheduler=f"auto ({schedule.scheduler})" if asked.scheduler == "auto" else schedule.scheduler,
            grid=schedule.callers_grid,
            splits=schedule.splits,
            tile=schedule.tile,
            how=describe(schedule, planned.options),
            tasks=len(schedule.tasks),
            bytes_by_link=schedule.bytes_by_link(copies),
            predicted_s=planned.predicted_s,
            plan_s=plan_s,
            digest=digest_of_bytes(encoded),
            softbuf_bytes=schedule.softbuf_bytes().tolist(),
            staged="".join(sorted(names[matrix] for matrix in planned.staged)),
            tried=tried,
            device_memory=planned.options.device_memory,
            host_bytes=in_host,
            host_memory=planned.options.host_memory if any(in_host) else 0,
            longest_s=longest_task_s(schedule, copies, machine),
            search=("rule" if calls else asked.search or "full") if searched else "",
            search_after=calls,
        )
        is_large = machine.num_ranks > MOST_TOLD_ALL and len(encoded) > LARGE_BYTES
        return Told(summary, planned.decision if is_large else encoded)


class Told(NamedTuple):
    """A plan as rank 0 tells it."""

    summary: PlanSummary  # the plan in numbers
    schedule: bytes | Decision  # its schedule, or what that is made by


@dataclasses.dataclass(frozen=True, eq=False)  # no slots: what is bound to a plan is found by a weak reference
class Plan:
    """A schedule as this rank runs it."""

    key: PlanKey  # what it was made for
    digest: bytes  # 16 bytes that only plans of the same key and schedule share
    schedule: Schedule  # every task of every rank
    summary: PlanSummary  # the plan in numbers
    options: ScheduleOptions  # those of the key, with what the plan may use of memory
    program: OperationList  # what this rank issues
    # softbuf_bytes, host_softbuf_bytes, flag_bytes: SoftBuf on the device and on the host, and flags, that each rank
    # needs, shape (num_ranks,).
    softbuf_bytes: np.ndarray
    host_softbuf_bytes: np.ndarray
    flag_bytes: np.ndarray

    @property
    def now(self) -> Plan:
        """The plan itself."""
        return self

    @property
    def plans(self) -> Sequence[Plan]:
        """The plan alone."""
        return (self,)

    def begins_with(self, matrices: Operands, choices: Choices) -> _Bound:
        """Return what `now` multiplies: those of a call."""
        return matrices, choices.epilogue

    @classmethod
    def of(cls, key: PlanKey, summary: PlanSummary, schedule: Schedule, rank: int, options: ScheduleOptions) -> Plan:
        """Return the plan of a rank by a schedule."""
        lowering = lower(schedule, rank)
        needed = (
            np.array(summary.softbuf_bytes, np.int64),
            np.array(summary.host_bytes, np.int64),
            4 * (lowering.num_flags + schedule.num_ranks),  # with the words by which runs follow one another
        )
        for of_ranks in needed:
            of_ranks.flags.writeable = False
        softbuf_bytes, host_softbuf_bytes, flag_bytes = needed
        return cls(
            key=key,
            digest=hashlib.blake2b(key.digest + summary.digest.encode(), digest_size=16).digest(),
            schedule=schedule,
            summary=summary,
            options=options,
            program=dataclasses.replace(lowering.rank_list(rank), longest_s=summary.longest_s),
            softbuf_bytes=softbuf_bytes,
            host_softbuf_bytes=host_softbuf_bytes,
            flag_bytes=flag_bytes,
        )


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Trial:
    """
    Several plans of one key, of which the next calls show the fastest.

    Every rank counts the same calls, so the turns are the same on all ranks; the times are this rank's own.
    """

    plans: tuple[Plan, ...]  # the one that is predicted best comes first, and is never left out
    # What the calls of each took so far; None for one that cannot run here and is left out.
    seconds: tuple[tuple[float, ...] | None, ...]

    @property
    def key(self) -> PlanKey:
        """What the plans were made for."""
        return self.plans[0].key

    @property
    def digest(self) -> bytes:
        """16 bytes that only trials of the same plans at the same moment share: all ranks run the same schedule."""
        counts = [-1 if times is None else len(times) for times in self.seconds]
        return hashlib.blake2b(self.now.digest + repr(counts).encode(), digest_size=16).digest()

    @property
    def index(self) -> int:
        """
        Whose turn it is: that of a plan that ran least, so that all meet the same conditions.

        Every other time they go backwards, so that no plan always comes after a slow one, which lets devices cool.
        """
        counts = {index: len(times) for index, times in enumerate(self.seconds) if times is not None}
        least = min(counts.values())
        those = [index for index, count in counts.items() if count == least]
        return those[-1 if least % 2 else 0]

    @property
    def now(self) -> Plan:
        """The plan whose turn it is."""
        return self.plans[self.index]

    @property
    def may_go(self) -> bool:
        """Whether the plan whose turn it is may be left out."""
        return self.index > 0

    @property
    def summary(self) -> PlanSummary:
        """That of the plan predicted best."""
        return self.plans[0].summary

    @property
    def schedule(self) -> Schedule:
        """That of the plan predicted best."""
        return self.plans[0].schedule

    def begins_with(self, matrices: Operands, choices: Choices) -> _Bound:
        """Return what `now` multiplies: those of a call."""
        return matrices, choices.epilogue

    @property
    def num_left(self) -> int:
        """How many plans are not left out."""
        return sum(times is not None for times in self.seconds)

    @property
    def over(self) -> bool:
        """Whether every plan that is not left out has its times."""
        return all(times is None or len(times) > CALLS for times in self.seconds)

    def after(self, seconds: float) -> Trial:
        """Return the trial after a call of the plan whose turn it is."""
        return self._with((*(self.seconds[self.index] or ()), seconds))

    def without(self) -> Trial:
        """Return the trial without the plan whose turn it is: it cannot run here."""
        return self._with(None)

    def _with(self, times: tuple[float, ...] | None) -> Trial:
        at = self.index
        return dataclasses.replace(self, seconds=(*self.seconds[:at], times, *self.seconds[at + 1 :]))

    def table(self) -> np.ndarray:
        """Return this rank's times (s), shape (plans, CALLS); infinite for plans that are left out."""
        return np.array([[np.inf] * CALLS if times is None else times[1 : 1 + CALLS] for times in self.seconds])


def fastest(tables: np.ndarray) -> int:
    """
    Return the plan whose calls take least, in the median of the slowest rank.

    Parameters
    ----------
    tables : ndarray of float64, shape (ranks, plans, CALLS)
        The tables of all ranks.
    """
    return int(np.argmin(np.median(tables.max(axis=0), axis=1)))


@dataclasses.dataclass(eq=False)
class Chunked:
    """How a product is done in chunks; the same on all ranks."""

    key: PlanKey  # of the whole product
    by_rows: bool  # whether chunks are rows of the caller's C, or columns
    extents: Sequence[Extent]  # first row or column of each chunk, and the one after its last
    keys: Sequence[PlanKey]  # of each chunk
    # Of the chunks that are planned, `MOST_KINDS` at most; that of the first one for as long as this lives.
    by_key: dict[PlanKey, Plan]
    summary: PlanSummary  # of all chunks together

    @classmethod
    def of(
        cls, key: PlanKey, chunks: Chunks, matrices: Operands, choices: Choices, make: Callable[[PlanKey], Plan]
    ) -> Chunked:
        """
        Plan the chunks of a product. Collective.

        Parameters
        ----------
        key : PlanKey
            Of the product.
        chunks : Chunks
            Of the C of its column-major problem.
        matrices, choices
            Of the call.
        make : callable
            Makes the plan of a key; collective.
        """
        by_rows = (chunks.axis == 0) != key.problem.swapped
        choices = choices._replace(options=changed(choices.options, tune=0))
        promises = {"reads_c": key.problem.reads_c, "scales_only": key.problem.scales_only}
        keys = [
            PlanKey.of(infos_of(its), choices._replace(epilogue=epilogue), **promises).searched(
                choices.options.search or "full"  # such calls are long
            )
            for its, epilogue in (operands_of(matrices, choices, by_rows, extent) for extent in chunks.extents)
        ]
        plans = {one: make(one) for one in [*dict.fromkeys(keys)][:MOST_KINDS]}
        return cls(key, by_rows, chunks.extents, keys, plans, _summary(chunks, by_rows, keys, plans))

    @property
    def now(self) -> Plan:
        """The plan of the first chunk."""
        return self.by_key[self.keys[0]]

    @property
    def plans(self) -> Sequence[Plan]:
        """Those of the chunks that are planned."""
        return [*self.by_key.values()]

    @property
    def schedule(self) -> Schedule:
        """The schedule of the first chunk."""
        return self.now.schedule

    @property
    def digest(self) -> bytes:
        """16 bytes that only the same chunks by the same plans share."""
        return hashlib.blake2b(self.key.digest + self.summary.digest.encode(), digest_size=16).digest()

    def begins_with(self, matrices: Operands, choices: Choices) -> _Bound:
        """Return what `now` multiplies: those of the first chunk."""
        return self.operands(matrices, choices, 0)

    def operands(self, matrices: Operands, choices: Choices, number: int) -> _Bound:
        """Return what a chunk multiplies: views of the matrices of a call."""
        return operands_of(matrices, choices, self.by_rows, self.extents[number])

    def plan(self, number: int, make: Callable[[PlanKey], Plan], drop: Callable[[Plan], None]) -> Plan:
        """Return the plan of a chunk, made if there is none; the last one then goes if there are too many."""
        key = self.keys[number]
        if key not in self.by_key:
            if len(self.by_key) >= MOST_KINDS:
                drop(self.by_key.popitem()[1])
            self.by_key[key] = make(key)
        return self.by_key[key]


_Bound: TypeAlias = tuple[Operands, BoundEpilogue | None]
"""What a plan is bound to."""

AnyPlan: TypeAlias = Plan | Trial | Chunked


def operands_of(matrices: Operands, choices: Choices, by_rows: bool, extent: Extent) -> _Bound:
    """Return views of A, B and C, and of an epilogue's vectors, for some rows or columns of C."""
    a, b, c = matrices
    some = slice(*extent)
    epilogue = choices.epilogue and choices.epilogue.within("rows" if by_rows else "cols", extent)
    if by_rows:
        return ((a[some] if choices.trans_a == "N" else a[:, some]), b, c[some]), epilogue
    return (a, (b[:, some] if choices.trans_b == "N" else b[some]), c[:, some]), epilogue


def _summary(chunks: Chunks, by_rows: bool, keys: Sequence[PlanKey], plans: dict[PlanKey, Plan]) -> PlanSummary:
    """Return the figures of all chunks together; those without a plan so far are taken to be as the first one is."""
    first = plans[keys[0]].summary
    every = [plans[key].summary if key in plans else first for key in keys]
    links = {link: sum(one.bytes_by_link[link] for one in every) for link in first.bytes_by_link}
    lines = "rows" if by_rows else "columns"
    about = f"{counted(len(keys), 'chunk')} of {chunks.edges[1]} {lines} of C, one after another"
    return dataclasses.replace(
        first,
        how=f"{about}, each: {first.how}",
        tasks=sum(one.tasks for one in every),
        bytes_by_link=links,
        predicted_s=sum(one.predicted_s for one in every),
        plan_s=sum(plan.summary.plan_s for plan in plans.values()),
        digest=hashlib.blake2b("".join(one.digest for one in every).encode(), digest_size=16).hexdigest(),
        softbuf_bytes=[max(of_rank) for of_rank in zip(*(one.softbuf_bytes for one in every), strict=True)],
        host_bytes=[max(of_rank) for of_rank in zip(*(one.host_bytes for one in every), strict=True)],
        chunks=len(keys),
    )
