"""When each task of a schedule ran, or would run: a neutral value that every picture is made from."""

from __future__ import annotations

import dataclasses
import enum
import functools
from typing import Final

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.model.locations import between_nodes, end_name, in_host
from uncut_mpi.model.machine import Machine
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.schedule import Kind, LaneKind, Schedule, rows_by_rank
from uncut_mpi.view.parts import make_labels


class Activity(enum.IntEnum):
    """What a task does, as pictures tell it apart."""

    GEMM = 0
    COMBINE = 1
    HOST_IN = 2
    HOST_OUT = 3
    PEER = 4
    LOCAL = 5
    NET = 6

    @property
    def label(self) -> str:
        """The activity in words."""
        return _LABELS[self]


_LABELS: Final = ("product", "combine", "from host", "to host", "between devices", "within a memory", "between nodes")


@dataclasses.dataclass(frozen=True, slots=True)
class Lane:
    """
    A lane of a schedule.

    Attributes
    ----------
    rank : int
        Whose device issues it.
    computes : bool
        Whether it is a compute lane.
    name : str
        As ``compute 0`` or ``copy host->1``.
    """

    rank: int
    computes: bool
    name: str


@dataclasses.dataclass(frozen=True, eq=False)
class Timeline:
    """
    The tasks of a schedule with their times; JOINs, which do nothing, are left out, as are tasks without times.

    Attributes
    ----------
    name : str
        What it shows, as ``predicted`` or ``measured``.
    num_ranks : int
        Ranks of the schedule.
    lanes : tuple of Lane
        In the schedule's order.
    task, rank, lane, group : ndarray of int64, shape (n,)
        Index in the schedule; rank and lane that issue it; fetch it belongs to, −1 for none.
    activity : ndarray of uint8, shape (n,)
        `Activity`.
    nbytes : ndarray of int64, shape (n,)
        Bytes that a copy moves; 0 for others.
    start_s, end_s : ndarray of float64, shape (n,)
        From the start of the call.
    schedule : Schedule
        What ran.
    ends_s : ndarray of float64, shape (number of tasks,)
        As it was given: JOINs and tasks without times included.
    machine : Machine or None
        What it ran on, or would run on; None if it is not known.
    """

    name: str
    num_ranks: int
    lanes: tuple[Lane, ...]
    task: np.ndarray
    rank: np.ndarray
    lane: np.ndarray
    group: np.ndarray
    activity: np.ndarray
    nbytes: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray
    schedule: Schedule
    ends_s: np.ndarray
    machine: Machine | None = None

    @classmethod
    def of(
        cls, schedule: Schedule, start_s: np.ndarray, end_s: np.ndarray, name: str, machine: Machine | None = None
    ) -> Timeline:
        """
        Return the timeline of a simulation or of a real run.

        Parameters
        ----------
        schedule : Schedule
            What ran.
        start_s, end_s : ndarray of float64, shape (number of tasks,)
            From the start of the call; NaN for a task that has no time.
        name : str
            What it shows.
        machine : Machine, optional
            What it ran on, for titles, and for the load of links on a page.

        Raises
        ------
        ParamError
            If there is not one start and one end per task, or a task ends before it starts.
        """
        tasks = schedule.tasks
        for which, values in (("start", start_s), ("end", end_s)):
            if values.shape != (len(tasks),):
                raise ParamError(f"{len(tasks)} tasks, but {which} times of shape {values.shape}: give one per task")
        timed = np.flatnonzero((tasks["kind"] != Kind.JOIN) & np.isfinite(start_s) & np.isfinite(end_s))
        backwards = end_s[timed] < start_s[timed]
        if backwards.any():
            raise ParamError(f"task {timed[int(np.argmax(backwards))]} ends before it starts")
        copies = schedule.copies()
        nbytes = np.zeros(len(tasks), np.int64)
        nbytes[copies[:, 0]] = copies[:, 3]
        return cls(
            name=name,
            num_ranks=schedule.num_ranks,
            lanes=tuple(_lane(record, schedule.locations) for record in schedule.lanes),
            task=timed,
            **{name: tasks[name][timed].astype(np.int64) for name in ("rank", "lane", "group")},
            activity=_activities(schedule, copies)[timed],
            nbytes=nbytes[timed],
            start_s=start_s[timed].astype(np.float64),
            end_s=end_s[timed].astype(np.float64),
            schedule=schedule,
            ends_s=end_s,
            machine=machine,
        )

    @functools.cached_property
    def labels(self) -> tuple[str, ...]:
        """Names of the tasks, as ``A(2,3) host->1``: tiles of the caller's op(A), op(B) and C, numbered from 0."""
        labels = make_labels(self.schedule)
        return tuple(labels[task] for task in self.task.tolist())

    @functools.cached_property
    def awaits(self) -> np.ndarray:
        """
        (awaited, waiting) rows where a lane waits for another, int64 of shape (a, 2).

        Of what it awaits through a JOIN, the last to end.
        """
        return _awaits(self.schedule, self.task, self.ends_s)

    @functools.cached_property
    def rows_of_rank(self) -> list[np.ndarray]:
        """The tasks of each rank, as ascending rows."""
        return rows_by_rank(self.rank, self.num_ranks)

    @property
    def used_lanes(self) -> list[int]:
        """The lanes that have tasks, by rank, computing ones first."""
        return sorted(np.unique(self.lane).tolist(), key=self.lane_order)

    def lane_order(self, lane: int) -> tuple[int, bool, int]:
        """Return where a lane stands in pictures, to sort by."""
        return self.lanes[lane].rank, not self.lanes[lane].computes, lane

    @property
    def nanoseconds(self) -> tuple[np.ndarray, np.ndarray]:
        """Starts and ends in whole numbers, so that tasks that follow one another never overlap by rounding."""
        start, end = (np.rint(times * 1e9).astype(np.int64) for times in (self.start_s, self.end_s))
        return start, end

    @property
    def seconds(self) -> float:
        """End of the last task; 0 without tasks."""
        return float(self.end_s.max(initial=0.0))

    @property
    def idle_share(self) -> np.ndarray:
        """Share of the time in which a rank's device computes nothing, shape (num_ranks,)."""
        total = self.seconds
        busy = np.array([self.covered_s(rows[self.activity[rows] <= Activity.COMBINE]) for rows in self.rows_of_rank])
        return 1.0 - busy / total if total > 0 else np.ones(self.num_ranks)

    @functools.cached_property
    def moved(self) -> tuple[int, float]:
        """
        Return how many bytes go from one memory to another, and how many of them while products run there.

        A copy moves at an even pace. It counts as long as the devices at its ends multiply: of two the one that
        multiplies less of that time.
        """
        multiplies = [self.coverage(rows[self.activity[rows] == Activity.GEMM]) for rows in self.rows_of_rank]
        ends = np.full((len(self.schedule.tasks), 2), -1)
        copies = self.schedule.copies()
        ends[copies[:, 0]] = copies[:, 1:3]
        locations = self.schedule.locations
        total, hidden = 0, 0.0
        for row in np.flatnonzero(self.nbytes).tolist():
            source, destination = ends[self.task[row]].tolist()
            start, end, nbytes = self.start_s[row], self.end_s[row], int(self.nbytes[row])
            if source == destination:
                continue
            total += nbytes
            of_ends = [
                float(np.diff(np.interp((start, end), *multiplies[one]))[0])
                for one in (source, destination)
                if not in_host(locations, one)
            ]
            hidden += nbytes * min(of_ends, default=0.0) / (end - start) if end > start else 0.0
        return total, hidden

    def covered_s(self, which: np.ndarray) -> float:
        """Return the time in which at least one of the tasks selected by `which` (bools or rows) runs."""
        _, busy = self.coverage(which)
        return float(busy[-1])

    def coverage(self, which: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """
        Return how the time in which at least one of some tasks runs adds up.

        Parameters
        ----------
        which : ndarray of bool, shape (n,), or of int64
            The tasks: which they are, or their rows.

        Returns
        -------
        times, busy_s : ndarray of float64
            Until times[i], busy_s[i] seconds were covered; between them it grows linearly.
        """
        order = np.argsort(self.start_s[which], kind="stable")
        start, end = self.start_s[which][order], self.end_s[which][order]
        if not len(start):
            return np.zeros(1), np.zeros(1)
        reached = np.maximum.accumulate(end)
        opens = np.flatnonzero(np.concatenate(([True], start[1:] > reached[:-1])))
        begins, ends = start[opens], reached[np.concatenate((opens[1:] - 1, [len(start) - 1]))]
        busy = np.concatenate(([0.0], np.cumsum(ends - begins)))
        times = np.column_stack((begins, ends)).ravel()
        return times, np.column_stack((busy[:-1], busy[1:])).ravel()


def _lane(record: np.void, locations: np.ndarray) -> Lane:
    if record["kind"] == LaneKind.COMPUTE:
        return Lane(int(record["rank"]), True, f"compute {record['destination']}")
    if record["kind"] == LaneKind.HOST:
        return Lane(int(record["rank"]), False, f"host {record['destination']}")
    ends = (end_name(locations, int(end)) for end in (record["source"], record["destination"]))
    kind = "results" if record["kind"] == LaneKind.RESULT else "copy"
    return Lane(int(record["rank"]), False, "{} {}->{}".format(kind, *ends))


def _activities(schedule: Schedule, copies: np.ndarray) -> np.ndarray:
    activity = np.full(len(schedule.tasks), Activity.GEMM, np.uint8)
    activity[schedule.tasks["kind"] == Kind.COMBINE] = Activity.COMBINE
    task, source, destination = copies[:, 0], copies[:, 1], copies[:, 2]
    activity[task] = Activity.PEER
    activity[task[source == destination]] = Activity.LOCAL
    from_host, to_host = in_host(schedule.locations, source), in_host(schedule.locations, destination)
    activity[task[from_host & ~to_host]] = Activity.HOST_IN
    activity[task[to_host & ~from_host]] = Activity.HOST_OUT
    activity[task[between_nodes(schedule.locations, source, destination)]] = Activity.NET
    activity[schedule.tasks["kind"] == Kind.RECV] = Activity.NET
    return activity


def _awaits(schedule: Schedule, timed: np.ndarray, end_s: np.ndarray) -> np.ndarray:
    waits = lower(schedule).waits
    tasks = schedule.tasks
    # A JOIN stands for the task it waited for longest.
    stands_for = np.arange(len(tasks))
    for join in np.flatnonzero(tasks["kind"] == Kind.JOIN).tolist():
        sources = stands_for[schedule.awaited(join)]
        sources = sources[sources >= 0]
        ends = np.nan_to_num(end_s[sources], nan=-np.inf)
        stands_for[join] = sources[int(np.argmax(ends))] if len(sources) else -1
    waiting, awaited = waits[:, 0], stands_for[waits[:, 1]]
    row = np.full(len(tasks) + 1, -1)  # the last entry answers for −1
    row[timed] = np.arange(len(timed))
    pairs = np.stack((row[awaited], row[waiting]), axis=1)
    lanes = tasks["lane"]
    kept = (pairs >= 0).all(axis=1) & (lanes[awaited] != lanes[waiting])
    return np.unique(pairs[kept], axis=0)
