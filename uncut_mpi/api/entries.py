"""Plans as a session keeps them: what they depend on, what they hold on this rank, what they say of themselves."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import NamedTuple

import numpy as np

from uncut_mpi.api.trials import Trials
from uncut_mpi.device.interface import Executable
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.lower import Lowering, OperationList
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.schedule import Role, Schedule, expand_ranges


class CallResult(NamedTuple):
    """
    What one product did on this rank.

    Attributes
    ----------
    tasks : int
        Tasks this rank executed.
    copy_bytes : int
        Bytes its copies moved.
    issue_s, drain_s : float
        Host time to issue everything, and from then until all of it had finished.
    planned : bool
        Whether this call had to plan or bind first.
    staged : bool
        Whether a matrix went through memory of our own because it cannot be exported.
    """

    tasks: int
    copy_bytes: int
    issue_s: float
    drain_s: float
    planned: bool
    staged: bool


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
    tried : int
        Schedules of which this one is the fastest, or while they are tried how many there are; 1 without a trial.
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
    tried: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class PlanKey:
    """What a plan depends on, besides the machine: calls with equal keys share one."""

    problem: GemmProblem
    placement: Placement
    options: ScheduleOptions

    def digest(self) -> bytes:
        """Return 16 bytes that equal keys share on every rank."""
        return hashlib.blake2b(repr(self).encode(), digest_size=16).digest()


@dataclasses.dataclass(frozen=True, slots=True)
class Binding:
    """
    A plan bound to one set of matrices.

    Attributes
    ----------
    executable : Executable
        This rank's operations with addresses.
    staged : frozenset of int
        Numbers of those of these matrices that go through memory of our own; the same on all ranks.
    """

    executable: Executable
    staged: frozenset[int]


class PlanEntry:
    """
    A plan as this rank holds it: the schedule, this rank's operations, and their bindings to addresses.

    While schedules are tried it holds the others as entries of their own, and takes over the one that wins.
    """

    def __init__(self, key: PlanKey) -> None:
        self.key = key
        self.key_digest = key.digest()
        self.scales_in_float32 = key.problem.dtype is not DType.f64
        self.bindings: dict[tuple[int, ...], Binding] = {}
        self.call_digests: dict[bytes, bytes] = {}  # of matrices and scalars, made once
        self.closed = False  # by a caller who had it; one that was only dropped from a cache may be bound again
        self.trials: Trials | None = None
        self._rivals: list[PlanEntry] = []
        self._schedule: Schedule | None = None
        self._summary: PlanSummary | None = None

    def fill(self, schedule: Schedule, lowering: Lowering, summary: PlanSummary, rank: int) -> None:
        """Take in what rank 0 planned."""
        self._schedule, self._summary = schedule, summary
        self.program: OperationList = lowering.rank_list(rank)
        self.softbuf_bytes = schedule.softbuf_bytes()
        self.num_flags = lowering.num_flags
        self.foreign = _touched_by_peers(schedule)

    def try_others(self, rivals: list[PlanEntry]) -> None:
        """Take in other plans, of which the next calls show the fastest."""
        self._rivals = rivals
        self.trials = Trials(1 + len(rivals))

    def turn(self, tries: bool = True) -> PlanEntry:
        """Return the entry whose schedule the next call runs: this one, or another if it tries schedules."""
        at = self.trials.turn if tries and self.trials is not None else 0
        return self._rivals[at - 1] if at else self

    def leave_out(self, rival: PlanEntry) -> None:
        """Try another plan no more: it cannot run here. Local."""
        assert self.trials is not None  # else there are none
        self.trials.leave_out(1 + self._rivals.index(rival))
        rival.close()

    def settle(self, winner: int) -> None:
        """End the trials: take over a rival, or stay if `winner` is 0, and forget the others. Local."""
        assert self.trials is not None  # they end here
        tried = self.trials.num_left
        rivals, self._rivals, self.trials = self._rivals, [], None
        if winner:
            taken = rivals[winner - 1]
            self.bindings, taken.bindings = taken.bindings, self.bindings
            self._schedule, self._summary, self.program = taken.schedule, taken.summary, taken.program
            self.softbuf_bytes, self.num_flags, self.foreign = taken.softbuf_bytes, taken.num_flags, taken.foreign
        self._summary = dataclasses.replace(self.summary, tried=tried)
        for rival in rivals:  # last: whatever this meets, the plan is the winner's
            rival.close()

    @property
    def filled(self) -> bool:
        """Whether `fill` has happened."""
        return self._schedule is not None

    @property
    def schedule(self) -> Schedule:
        """The schedule, the same on all ranks."""
        assert self._schedule is not None  # callers check `filled`
        return self._schedule

    @property
    def summary(self) -> PlanSummary:
        """The plan in numbers."""
        assert self._summary is not None  # callers check `filled`
        return self._summary

    def close(self) -> None:
        """Release streams and events. Local."""
        for binding in self.bindings.values():
            binding.executable.close()
        self.bindings.clear()
        for rival in self._rivals:
            rival.close()

    def forget_matrix(self, number: int) -> None:
        """Release the bindings that use one matrix. Local."""
        for key in [key for key in self.bindings if number in key[:3]]:
            self.bindings.pop(key).executable.close()
        for rival in self._rivals:
            rival.forget_matrix(number)


def _touched_by_peers(schedule: Schedule) -> list[int]:
    """Return the user buffers in device memory that a rank other than their owner reads or writes."""
    tasks = schedule.tasks
    operand = expand_ranges(tasks["first_operand"], tasks["num_operands"])
    rank = np.repeat(tasks["rank"], tasks["num_operands"])
    buffer = schedule.regions["buffer"][schedule.operands["region"][operand]]
    users = schedule.buffers["role"][buffer] == Role.USER
    foreign = users & ~schedule.in_host()[buffer] & (schedule.owners()[buffer] != rank)
    return [int(index) for index in np.unique(buffer[foreign])]
