"""
The ranks' devices with memory for probes, and the timing of probes on them.

Methods are collective unless they say otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from typing import Final

import numpy as np

from uncut_mpi.api.counters import Counters
from uncut_mpi.api.memory import Arena, PeerMappings
from uncut_mpi.calibration.probes import Areas, Probe
from uncut_mpi.calibration.statistics import Summary
from uncut_mpi.device.interface import Backend, Executable, FlagTable, ProgressBoard, TaskTimes
from uncut_mpi.errors import UncutError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.schedule import Kind
from uncut_mpi.segments import Segment
from uncut_mpi.spmd import agreement, exchange
from uncut_mpi.spmd.group import Group

MAX_FLAGS: Final = 1 << 14
_PATIENCE_S: Final = 60.0
"""As sessions have by default: on a slow GPU a product may take most of it."""
_MAX_SAMPLES: Final = 40
_FEWEST_SAMPLES: Final = 3
_PAGE_BYTES: Final = 4096


@dataclasses.dataclass(frozen=True, slots=True)
class Timed:
    """
    The samples of one probe, the same on all ranks.

    Attributes
    ----------
    together : Summary
        From the start of the first rank that has a part in it to the end of the last one.
    by_rank_s : ndarray of float64, shape (num_ranks,)
        Median time of each rank's own part.
    issue_s : ndarray of float64, shape (num_ranks,)
        Least host time each rank took to issue it.
    """

    together: Summary
    by_rank_s: np.ndarray
    issue_s: np.ndarray


class Workbench:
    """
    Memory for probes on every device and on the host, and the clock. Collective.

    Parameters
    ----------
    group : Group
        The ranks.
    backend : Backend
        This rank's device.
    area_bytes : int
        Bytes of one area of `Areas`.
    compute_bytes : int
        Bytes that products need on each device, for their operands and again for their results.
    deadline_s : float
        Value of ``time.perf_counter()`` after which probes get few samples only; that of rank 0 counts.

    Raises
    ------
    CapacityError
        On all ranks, if one has too little memory.
    """

    def __init__(
        self, group: Group, backend: Backend, *, area_bytes: int, compute_bytes: int, deadline_s: float
    ) -> None:
        self.group, self.backend = group, backend
        self.areas = Areas(group.size, area_bytes, compute_bytes)
        # Ranks enter some milliseconds apart: with deadlines of their own they would end different probes.
        self._deadline_s = float(group.allgather_bytes(np.array([deadline_s]), "agreeing on a deadline")[0, 0])
        self._epoch = 0
        self._board = ProgressBoard(np.zeros(ProgressBoard.shape(group.size), np.uint32), group.rank)
        self._pinned = False
        self._host: Segment = exchange.shared_segment(group, self.areas.host_bytes, "the transfers of a calibration")
        try:
            with agreement.collective(group, "preparing the host memory of a calibration"):
                self._host.array(np.uint8)[::_PAGE_BYTES] = 1  # touched: no page fault is measured
                self._pinned = bool(backend.pin(self._host.address, self._host.nbytes))
            self._arenas = [
                Arena(group, backend, PeerMappings(backend), Counters(), f"{what} of a calibration")
                for what in ("memory", "flags")
            ]
            for arena, nbytes in zip(self._arenas, (self.areas.device_bytes, 4 * MAX_FLAGS), strict=True):
                arena.ensure(np.full(group.size, nbytes))
            memory, flags = (arena.addresses for arena in self._arenas)
            with agreement.collective(group, "preparing the flags of a calibration"):
                backend.fill_words(int(flags[group.rank]), MAX_FLAGS, 0)
        except BaseException:
            self.abandon()
            raise
        self._flags = FlagTable(int(flags[group.rank]), flags)
        self._bases = np.append(memory, self._host.address)

    def address(self, location: int, offset: int = 0) -> int:
        """Return an address in the memory of a location, in this process. Not collective."""
        return int(self._bases[location]) + offset

    @property
    def late(self) -> bool:
        """Whether the deadline has passed; asked of rank 0's clock."""
        now = time.perf_counter()
        return bool(self.group.allgather_bytes(np.array([now]), "looking at the clock")[0, 0] > self._deadline_s)

    def fill(self, dtype: DType) -> None:
        """Fill what products read with full-mantissa random values."""
        with agreement.collective(self.group, "preparing random operands"):
            self.backend.fill_random(self.address(self.group.rank), self.areas.compute_bytes, dtype)

    def time(
        self, probe: Probe, what: str, *, samples: int = 0, known_s: float = 0.0, kind: Kind | None = None
    ) -> Timed:
        """Time one probe; parameters and errors as of `time_in_turns`."""
        return self.time_in_turns([probe], what, samples=samples, known_s=known_s, kind=kind)[0]

    def time_in_turns(
        self,
        probes: Sequence[Probe],
        what: str,
        *,
        samples: int = 0,
        known_s: float = 0.0,
        kind: Kind | None = None,
    ) -> list[Timed]:
        """
        Run probes in turns until their means are known well enough, or so many times.

        In turns for the difference of their times, since clocks sink with load. After the deadline each gets a few
        samples only.

        Parameters
        ----------
        probes : sequence of Probe
            The same on all ranks.
        what : str
            What is measured, as an error calls it.
        samples : int, optional
            How many; by default as many as needed.
        known_s : float, optional
            What of the time is known: the rest of it has to be known well enough.
        kind : Kind, optional
            Of tasks whose time alone is `Timed.together`, from the first one's start to the last one's end on their
            rank: what a probe does besides does not count.

        Raises
        ------
        UncutError
            On all ranks, what went wrong on one.
        """
        found = [_Runs(probe, kind) for probe in probes]
        with contextlib.ExitStack() as all_bound:
            executables = [all_bound.enter_context(self.bind(probe, what)) for probe in probes]
            if kind is not None:
                with agreement.collective(self.group, what):
                    for executable in executables:
                        executable.prepare_trace()
            for number in itertools.count():
                for executable, runs in zip(executables, found, strict=True):
                    records = self.run(executable, what, timed=runs.tasks)
                    if number:  # the first run is slower
                        runs.add(records)
                late = bool(records[0, 1] > self._deadline_s)
                if number and all(runs.are_enough(samples, known_s, late=late) for runs in found):
                    break
        return [runs.timed for runs in found]

    def run_often(self, probe: Probe, what: str, rest_s: float, long_s: float) -> np.ndarray:
        """
        Return every rank's time of each run of a probe, after a rest and then for some time without any.

        The array has shape (runs, num_ranks); errors as of `time_in_turns`.
        """
        with self.bind(probe, what) as executable:
            records = [self.run(executable, what)]  # the first run is slower
            time.sleep(rest_s)
            while len(records) < 2 or records[-1][0, 1] - records[1][0, 0] < long_s:  # rank 0's clock, known to all
                records.append(self.run(executable, what))
        times = np.array(records[1:])
        spent: np.ndarray = times[:, :, 1] - times[:, :, 0]
        return spent

    @contextlib.contextmanager
    def bind(self, probe: Probe, what: str) -> Iterator[Executable]:
        """Have this rank's part of a probe ready to run; after an error the end of the backend forgets it."""
        bound: Executable | None = None
        with agreement.collective(self.group, f"preparing to measure {what}"):
            program = lower(probe.schedule, self.group.rank).rank_list(self.group.rank)
            addresses = np.array([self.address(where, offset) for where, offset in probe.windows], np.int64)
            bound = self.backend.executable(program, addresses, self._flags, self._board)
        assert bound is not None  # else the block raised
        yield bound
        with agreement.collective(self.group, what):
            bound.close()

    def run(self, executable: Executable, what: str, *, timed: np.ndarray | None = None) -> np.ndarray:
        """
        Run a list on every rank once.

        Parameters
        ----------
        timed : ndarray of int, optional
            Tasks to take the time of; `Executable.prepare_trace` comes first.

        Returns
        -------
        ndarray of float64, shape (num_ranks, 4)
            Of each rank, in seconds: start and end on the node's monotonic clock, time to issue, and time of its timed
            tasks. The last is from the start of the first to the end of the last of them, 0 if there are none.
        """
        epoch, self._epoch = self._epoch, self._epoch + executable.span
        self.group.barrier(f"measuring {what}")
        started = time.perf_counter()
        report = executable.run(alpha=1.0, beta=0.0, epoch=epoch, timeout_s=_PATIENCE_S, traced=timed is not None)
        ended = time.perf_counter()
        spent = _spent_s(report.times, timed) if timed is not None else 0.0
        facts = np.array([started, ended, report.issue_s, spent, report.error is not None], np.float64)
        records = self.group.allgather_bytes(facts, f"measuring {what}")
        if records[:, 4].any():
            agreement.collective_result(self.group, report.error, f"measuring {what}")
        return records[:, :4]

    def close(self) -> None:
        """Give all the memory back."""
        try:
            for arena in self._arenas:
                arena.close()
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Let go of the host memory after a failure; the backend, closed then, frees the rest. Not collective."""
        if self._pinned:
            self._pinned = False
            with contextlib.suppress(UncutError):
                self.backend.unpin(self._host.address)
        self._host.close()


class _Runs:
    """What the runs of a probe took."""

    def __init__(self, probe: Probe, kind: Kind | None) -> None:
        tasks = probe.schedule.tasks
        self.tasks = None if kind is None else np.flatnonzero(tasks["kind"] == kind)
        self.together: list[float] = []
        self._active = np.unique(tasks["rank"])  # the others only wait for the next barrier
        self._records: list[np.ndarray] = []

    def add(self, records: np.ndarray) -> None:
        """Take what `Workbench.run` returned."""
        self._records.append(records)
        whole = records[self._active, 1].max() - records[self._active, 0].min()
        self.together.append(float(records[:, 3].max() or whole))  # of the tasks that are timed, if there are any

    def are_enough(self, samples: int, known_s: float, *, late: bool) -> bool:
        """Whether there are as many as are wanted, or as tell the mean of what is not known well enough."""
        count = len(self.together)
        if count >= (samples or _MAX_SAMPLES) or (late and count >= _FEWEST_SAMPLES):
            return True
        return not samples and Summary.of([one - known_s for one in self.together]).precise

    @property
    def timed(self) -> Timed:
        """Their samples."""
        began, ended, issued, _ = np.moveaxis(np.array(self._records), 2, 0)
        return Timed(Summary.of(self.together), np.median(ended - began, axis=0), issued.min(axis=0))


def _spent_s(times: TaskTimes | None, tasks: np.ndarray) -> float:
    """Return the time from the start of the first of some tasks to the end of the last, as far as they ran here."""
    if times is None:
        return 0.0
    mine = np.isin(times.tasks, tasks)
    return float(times.end_s[mine].max() - times.start_s[mine].min()) if mine.any() else 0.0
