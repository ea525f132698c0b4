"""
What a plan is asked for, as one value: a product, where its matrices live, the machine, and what the caller fixes.

It is made where somebody asks, and planning hands it on as it is. What device memory leaves for a schedule is said here
alone. So is whose rows and columns options speak of: outside of planning those of the caller's C, inside of it those of
the problem's.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final

import numpy as np

from uncut_mpi.errors import CapacityError, ParamError
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.form import PLAIN
from uncut_mpi.model.locations import location_table
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.parts import elements_of
from uncut_mpi.model.placement import Matrix, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.buffers import resident_bytes, user_bytes, user_pieces, user_table
from uncut_mpi.planning.limits import MANY_BUFFERS
from uncut_mpi.planning.options import Blocking, ScheduleOptions, changed
from uncut_mpi.planning.same_sums import grid_of_sums
from uncut_mpi.planning.schedule import Schedule, native_tables
from uncut_mpi.units import bytes_text

_BLOCKS: Final = 4
"""Blocks of its part of C that a rank computes one after the other where a matrix has a form, of host memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Searching:
    """
    How a search goes about it.

    Attributes
    ----------
    share : float
        What it may spend, as a part of what a whole one may.
    pause : callable or None
        Called between schedules that are tried, where others are to come first; what it raises ends the search. Nothing
        is simulated on another thread then.
    besides : tuple of ScheduleOptions
        What a search by rule tries besides, of the problem's C: what was chosen for a product that is like this one.
    """

    share: float = 1.0
    pause: Callable[[], None] | None = None
    besides: tuple[ScheduleOptions, ...] = ()


@dataclasses.dataclass(frozen=True)
class Setting:
    """
    What a plan is asked for.

    Attributes
    ----------
    problem : GemmProblem
        The column-major problem.
    placement : Placement
        Where its A, B and C live.
    machine : Machine
        What was measured about the ranks.
    options : ScheduleOptions
        What the caller fixes, with rows and columns of the problem's C.
    private : collection of int
        Which user buffers, the parts of A, B and C one after another, their owner alone can use. These are in device
        memory that peers cannot open, in private host memory that is not page-locked, or in files.
    files : collection of int
        Those of them that lie in files.
    searching : Searching
        How its searches go about it.
    """

    problem: GemmProblem
    placement: Placement
    machine: Machine
    options: ScheduleOptions
    private: Collection[int] = ()
    files: Collection[int] = ()
    searching: Searching = Searching()

    @classmethod
    def of(
        cls,
        problem: GemmProblem,
        placement: Placement,
        num_ranks: int,
        machine: Machine,
        options: ScheduleOptions | None = None,
        private: Collection[int] = (),
        files: Collection[int] = (),
    ) -> Setting:
        """
        Return what is asked for with options of the caller's C.

        Parameters
        ----------
        num_ranks : int
            Ranks of the session.
        options : ScheduleOptions, optional
            By default nothing is fixed.

        Raises
        ------
        ParamError
            If no scheduler takes all the options, or placement or machine do not fit the ranks.
        """
        options = options or ScheduleOptions()
        options.schedulers()  # else refused
        placement.check_ranks(num_ranks)
        machine.check_ranks(num_ranks)
        options = _for_forms(problem, placement, options.oriented(problem), num_ranks)
        problem, options = _for_same_sums(problem, options)
        return cls(problem, placement, machine, options, tuple(private), tuple(files))

    def but(self, **changes: Any) -> Setting:
        """Return the same with some attributes changed."""
        return dataclasses.replace(self, **changes)

    def callers(self, options: ScheduleOptions) -> ScheduleOptions:
        """Return options of the problem's C as those of the caller's."""
        return options.oriented(self.problem)

    @property
    def num_ranks(self) -> int:
        """Ranks of the session."""
        return self.machine.num_ranks

    @property
    def readers(self) -> list[int]:
        """Ranks that reach host memory of all ranks: of several nodes those of the first."""
        found: list[int] = np.flatnonzero(self.machine.node_of == 0).tolist()
        return found

    @property
    def straight(self) -> Setting:
        """The same with matrices in parts as `Placement.straight` has them."""
        return self.but(placement=self.placement.straight(self.readers))

    def bound_s(self, devices: Sequence[int]) -> float:
        """Return what no schedule with products on some ranks can beat (s)."""
        # The part of the whole machine's bound that fewer ranks raise: their sum of rates.
        rate = float(self.machine.gemm_rate(self.problem.arithmetic)[list(devices)].sum())
        return max(bound(self.problem, self.placement, self.machine).seconds, self.problem.flops / rate)

    @functools.cached_property
    def room(self) -> tuple[int, ...]:
        """What a schedule may use of each rank's device: what the matrices there leave of it, or `device_memory`."""
        left = self.machine.memory_bytes - self._resident[: self.num_ranks]
        most = self.options.device_memory
        return tuple((np.minimum(left, most) if most else left).tolist())

    @property
    def memory_bytes(self) -> np.ndarray:
        """What that and the matrices there may take together of each rank's device."""
        available: np.ndarray = self.room + self._resident[: self.num_ranks]
        return available

    @property
    def _resident(self) -> np.ndarray:
        return np.array(resident_bytes(self.machine.ranks, self.problem, self.placement))

    def check_capacity(self, arena_bytes: Sequence[int], *, least: str = "") -> None:
        """
        Raise `CapacityError` for the first memory that has no room for so many bytes beside the matrices there.

        Parameters
        ----------
        arena_bytes : sequence of int
            What is needed of each memory (`location_table`), or of devices alone.
        least : str, optional
            ``"needs at least"`` if no schedule of these ranks needs less, ``"would do with"`` if one needs so much, and
            another one may need less.
        """
        if not all(map(operator.le, arena_bytes, self.room)):
            self._refuse(arena_bytes, least)
        needed, total = sum(arena_bytes[self.num_ranks :]), int(self.machine.host_bytes[0])  # devices come first
        if not needed:
            return
        there = sum(self._resident[self.num_ranks :].tolist())
        there -= int(user_bytes(user_table(self.machine.ranks, self.problem, self.placement))[[*self.files]].sum())
        if needed + there > total > 0:
            raise CapacityError(
                f"{bytes_text(there + needed)} of host memory are needed ({bytes_text(there)} for the matrices there "
                f"and {bytes_text(needed)} for page-locked copies), and {bytes_text(total)} are available, "
                f"{bytes_text(there + needed - total)} too few: make the matrices with empty_host, which needs no "
                "copies, or place them on devices"
            )

    def _refuse(self, arena_bytes: Sequence[int], least: str) -> None:
        """Raise the error for the first device that has too little memory."""
        of_devices = arena_bytes[: self.num_ranks]
        about = zip(of_devices, self.room, self._resident.tolist(), strict=False)
        rank, (needed, room, there) = next(one for one in enumerate(about) if one[1][0] > one[1][1])
        parts = (("the matrices placed there", there), ("its panels of A, B and C", needed))
        whose = " and ".join(f"{bytes_text(size)} for {what}" for what, size in parts if size)
        verb = (least if needed else "") or "needs"
        mend = "place the matrices on other devices or in host memory"
        if room > 0:
            or_else = f"{'' if least else 'leave out options of the schedule, '}or use more ranks"
            more = f"let ranks use {max(of_devices)} bytes (device_memory) if devices have them, {or_else}"
            mend = f"{more}, or {mend}" if there else more
        raise CapacityError(
            f"rank {rank} {verb} {bytes_text(there + needed)} of device memory ({whose}), and "
            f"{bytes_text(there + room)} are available, {bytes_text(needed - room)} too few: {mend}"
        )

    @property
    def surely_fits(self) -> bool:
        """Whether every rank has room for all of each product's A, B and C, so that nobody has to look at panels."""
        problem, count = self.problem, len(self.problem.rectangles)
        of_a, of_b, _ = (problem.k * dtype.itemsize for dtype in problem.dtypes)
        needed = sum(
            (rows[1] - rows[0]) * of_a
            + (cols[1] - cols[0]) * of_b
            + 3 * elements_of((rows, cols)) * problem.accumulator.itemsize
            for rows, cols in problem.rectangles
        )
        return 2 * needed + count * MANY_BUFFERS <= min(self.room)

    def schedule(self, buffers: np.ndarray, tables: Sequence[np.ndarray], **about: Any) -> Schedule:
        """Return a schedule of some buffers and the tables that a native scheduler made (`native_tables`)."""
        return Schedule(
            num_ranks=self.num_ranks,
            problem=self.problem,
            placement=self.placement,
            buffers=buffers,
            locations=location_table(self.machine.ranks),
            pieces=user_pieces(self.problem, self.placement),
            **about,
            **native_tables(*tables),  # type: ignore[arg-type]
        )


def _for_same_sums(problem: GemmProblem, options: ScheduleOptions) -> tuple[GemmProblem, ScheduleOptions]:
    """Return a problem whose sums are the same in every plan, and how it is scheduled, where that is asked for."""
    if not (options.same_sums and problem.has_product):
        return problem, options
    if problem.batch or problem.part is not None or problem.forms != PLAIN:
        raise ParamError(
            "same_sums is for one product with all of A, B and C: it goes with no batch, no triangle and no matrix of "
            "which one triangle is read; multiply one by one without these, or leave it out"
        )
    sums = grid_of_sums(problem, options.blocking)
    return dataclasses.replace(problem, sums=sums), changed(options, scheduler="kblocks")


def _for_forms(problem: GemmProblem, placement: Placement, options: ScheduleOptions, num_ranks: int) -> ScheduleOptions:
    """Return options by which each product is with all of a matrix that has a form; others are taken as they are."""
    if problem.forms == PLAIN:
        return options
    is_left = problem.forms[0] is not None
    ranks = len(options.devices) if options.devices is not None else num_ranks
    count = max(1, min(ranks, problem.n if is_left else problem.m))
    depth = max(1, problem.k)
    # Executors cut products with a form once more, so narrow ones are slow. Between devices there is little to overlap.
    blocks = _BLOCKS if placement.in_host(Matrix.C) or placement.in_host(Matrix(is_left)) else 1
    how = Blocking(
        splits=1,
        first=depth,
        block=depth,
        columns=blocks if is_left else 1,
        rows=1 if is_left else blocks,
        order="columns" if is_left else "corner",
        begin="first",  # not with what a rank holds of it
    )
    devices = None if options.devices is None else options.devices[:count]
    grid = (1, count) if is_left else (count, 1)
    return changed(options, scheduler="kblocks", devices=devices, grid=grid, blocking=how)
