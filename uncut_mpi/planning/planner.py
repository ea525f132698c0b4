"""From a problem to its schedule: picks the scheduler and checks what was asked of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Final, NamedTuple

import numpy as np

from uncut_mpi.errors import CapacityError, PlanError, UncutError
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Matrix, Placement
from uncut_mpi.model.ports import Port
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.candidates import varied
from uncut_mpi.planning.chunks import Chunks, chunks_of, of_each
from uncut_mpi.planning.crossing import cross
from uncut_mpi.planning.evaluation import search_s
from uncut_mpi.planning.options import ScheduleOptions, changed
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.planning.schedulers import make_schedule
from uncut_mpi.planning.search import choice, search
from uncut_mpi.planning.setting import Searching, Setting
from uncut_mpi.planning.simulate import Simulation, simulate
from uncut_mpi.planning.staging import beside_copies, stage, used_by_others

SEARCH_FRACTION: Final = 0.1
"""What a search may take of the time of all calls of a product that are expected so far."""

_FAR_BEHIND: Final = 1.5
"""What a search for files finds to take so many times as long as another one's is tried no further."""


@dataclasses.dataclass(frozen=True, slots=True)
class Planned:
    """
    What the planner decided.

    Attributes
    ----------
    schedule : Schedule
        The tasks of all ranks.
    predicted_s : float
        Time the schedule's model expects.
    options : ScheduleOptions
        Options it was made with, those of a search's choice included; of the caller's C, as those asked for.
    staged : tuple of Matrix
        Which matrices of the column-major problem go through memory of ours, or parts of them. Their own is their
        owner's alone or is stored the other way round.
    simulation : Simulation or None
        Its run, if it was simulated as it is here.
    beside : bool
        Whether it was planned with the memory that is left beside copies of all that may be staged.
    """

    schedule: Schedule
    predicted_s: float
    options: ScheduleOptions
    staged: tuple[Matrix, ...] = ()
    simulation: Simulation | None = None
    beside: bool = False

    @property
    def decision(self) -> Decision:
        """What others make the same schedule of."""
        return Decision(self.options, self.beside)


class Decision(NamedTuple):
    """
    What a schedule was made by, beside its setting: `remade` makes the same one of it, without a search.

    Attributes
    ----------
    options, beside
        As of `Planned`.
    """

    options: ScheduleOptions
    beside: bool


def plan(
    problem: GemmProblem,
    placement: Placement,
    num_ranks: int,
    machine: Machine,
    options: ScheduleOptions | None = None,
) -> Planned:
    """
    Return the schedule for a problem.

    Pure and deterministic: the same arguments give the same bytes on any machine.

    Parameters
    ----------
    problem : GemmProblem
        The column-major problem.
    placement : Placement
        Where its A, B and C live.
    num_ranks : int
        Ranks of the session.
    machine : Machine
        What was measured about them; as many ranks.
    options : ScheduleOptions, optional
        What the caller fixes.

    Raises
    ------
    ParamError
        If placement, grid or machine do not fit the ranks.
    PlanError
        If no schedule is possible with these options.
    CapacityError
        If a rank has too little device memory.
    """
    return plan_several(Setting.of(problem, placement, num_ranks, machine, options))[0]


def plan_several(setting: Setting) -> list[Planned]:
    """
    Return the schedules to try, as many as ``options.tune`` says or as there are, the best first.

    Errors and the rest are those of `plan`, which returns the first one.
    """
    options = setting.options
    try:
        fit = _all_staged(setting, setting.machine)
    except CapacityError as error:
        fit, refusal = [], error
        beside, several = beside_copies(setting)
        for smaller in several:
            try:
                several_beside = _all_staged(setting.but(options=smaller), beside)
                fit += [dataclasses.replace(one, beside=True) for one in several_beside]
            except CapacityError as another:
                refusal = another if options.host_memory else error
        if not fit:
            raise refusal from None
        fit.sort(key=lambda one: one.predicted_s)
    if setting.files:  # of which no search knows
        fit.sort(key=lambda one: one.predicted_s)
    return fit[: max(1, options.tune)]


def remade(setting: Setting, decision: Decision) -> Schedule:
    """
    Return the schedule of a decision, as `plan_several` has made it on another rank. Pure and deterministic.

    Parameters
    ----------
    setting : Setting
        What was asked for there.
    decision : Decision
        That of the plan.
    """
    beside = beside_copies(setting)[0] if decision.beside else setting.machine
    about = _as_searched(setting.straight.but(machine=beside))
    made = make_schedule(about.but(options=setting.callers(decision.options))).schedule
    return cross(_with_copies(setting, made))


def plans_for_calls(
    setting: Setting, *, whole: bool, like: ScheduleOptions | None = None
) -> tuple[Chunks | None, list[Planned], int]:
    """
    Return what calls of a product run by, which may be made again and again, if nobody says how far to search.

    Parameters
    ----------
    setting : Setting
        As for `plan_several`.
    whole : bool
        Whether it is done by one schedule, however large.
    like : ScheduleOptions, optional
        What a search has chosen for a product that is like this one, of the caller's C; a plan by rule may be by it.

    Returns
    -------
    chunks : Chunks or None
        In which blocks of C to do it; the rest is empty then.
    several : list of Planned
        As of `plan_several`. They are by rule, where a search would take more than `SEARCH_FRACTION` of a call.
    calls : int
        After how many calls by rule there is to be a search, since it takes no more of their time; 0: never.
    """
    chunks = None if whole else in_chunks(setting)
    if chunks is not None:
        return chunks, [], 0
    options = setting.options
    is_open = options.scheduler == "auto" and not options.search and options.tune < 2 and options.metric == "time"
    if is_open and setting.problem.has_product and not setting.problem.batch:
        besides = () if like is None else (like.oriented(setting.problem),)
        rule = setting.but(options=changed(options, search="rule"), searching=Searching(besides=besides))
        by_rule = plan_several(rule)
        call_s, tasks = by_rule[0].predicted_s, len(by_rule[0].schedule.tasks)
        calls = math.ceil(search_s(call_s, setting.num_ranks, tasks) / (SEARCH_FRACTION * call_s))
        if calls > 1:
            return None, by_rule, calls
    return None, plan_several(setting), 0


def _all_staged(setting: Setting, beside: Machine) -> list[Planned]:
    """
    Return schedules to try with what is staged of them, the best first; CapacityError if there is room for none.

    They are planned with the memory that `beside` has, and may take with their copies what the setting's machine has.
    """
    # Schedulers have all parts as their matrices are stored; what is not goes through copies that are.
    several = _unstaged(setting.straight.but(machine=beside))
    fit, refusals = list[Planned](), list[CapacityError]()
    for planned in several:
        if setting.files and fit and planned.predicted_s > _FAR_BEHIND * several[0].predicted_s:
            break
        try:
            fit.append(_staged(setting, planned))
        except CapacityError as error:  # another one may need less
            refusals.append(error)
    if not fit:
        raise refusals[-1]
    return fit


def _unstaged(setting: Setting) -> list[Planned]:
    """Return schedules to try as if all could use all matrices as they are, the best first; parts are straight."""
    options, machine = setting.options, setting.machine
    if not _is_searched(setting):
        made = make_schedule(setting)
        # Of several nodes the halves are simulated, which it does not have yet.
        seconds = made.seconds(machine) if machine.num_nodes == 1 else math.nan
        return [Planned(made.schedule, seconds, setting.callers(made.options))]
    several, refusals = list[Planned](), list[UncutError]()
    searched = _as_searched(setting)
    for first in _first_options(setting):
        if several and several[0].options.blocking.slots:  # which looks at long k-blocks as it is
            break
        try:
            about = searched.but(options=first)
            found = varied(search(about).candidates, options.tune) if options.tune > 1 else [choice(about)]
        except (CapacityError, PlanError) as error:  # another way to begin may need less
            refusals.append(error)
            continue
        several += [Planned(one.planned, one.predicted_s, one.options) for one in found]
    if setting.files:
        several.sort(key=lambda one: one.predicted_s)
    if not several:
        raise refusals[0]
    return several


def _is_searched(setting: Setting) -> bool:
    problem = setting.problem
    return problem.has_product and not problem.batch and setting.options.scheduler == "auto"


def _as_searched(setting: Setting) -> Setting:
    """Return what a search is asked, if there is one."""
    return setting.but(machine=behind_a_disk(setting.machine)) if setting.files and _is_searched(setting) else setting


def in_chunks(setting: Setting) -> Chunks | None:
    """Return in which blocks of C a product is done whose schedule would be too large; None: by one schedule."""
    return chunks_of(setting.but(machine=behind_a_disk(setting.machine)) if setting.files else setting)


def expected_seconds(setting: Setting) -> float:
    """Return what the best plan of a product is expected to take (s), in chunks where need be; as `plan_several`."""
    return sum(of_each(setting, in_chunks(setting), lambda one: plan_several(one)[0].predicted_s))


def _first_options(setting: Setting) -> list[ScheduleOptions]:
    """
    Return what searches begin with: the caller's options, for files also such that whole lines are read and written.

    Whole lines follow one another on the disk. Those of A in rows and of B in columns are whole where all of k is
    summed at once. A search that begins with a few steps of k does not come to that.
    """
    options, blocking = setting.options, setting.options.blocking
    ranks = len(options.computing_ranks(setting.num_ranks))
    free = options.grid is None and options.areas is None and not (blocking.rows or blocking.block or blocking.first)
    if not setting.files or not free or blocking.in_rings:
        return [options]
    at_once = {"rows": 1, "first": setting.problem.k, "block": setting.problem.k}
    grids = dict.fromkeys([(1, ranks), (ranks, 1)])
    return [options, *(changed(options, grid=grid, blocking=changed(blocking, **at_once)) for grid in grids)]


def behind_a_disk(machine: Machine) -> Machine:
    """Return a machine whose links with the host are a disk that all ranks share: so searches know what files take."""
    hosts, ranks, disk = machine.host_of, np.arange(machine.num_ranks), machine.disk
    bandwidth = machine.bandwidth_gb_per_s.copy()
    bandwidth[hosts, ranks] = np.minimum(bandwidth[hosts, ranks], disk.read_gb_per_s)
    bandwidth[ranks, hosts] = np.minimum(bandwidth[ranks, hosts], disk.write_gb_per_s)
    ports = [
        Port.of(f"disk {way}", rate, zip(of_node[first].tolist(), of_node[1 - first].tolist(), strict=True))
        for of_node in (np.array((hosts, ranks))[:, machine.node_of == node] for node in range(machine.num_nodes))
        for first, way, rate in ((0, "reads", disk.read_gb_per_s), (1, "writes", disk.write_gb_per_s))
    ]
    return dataclasses.replace(machine, bandwidth_gb_per_s=bandwidth, ports=(*machine.ports, *ports), on_disk=True)


def _with_copies(setting: Setting, schedule: Schedule) -> Schedule:
    """Return it with buffers staged that cannot be used as it says."""
    touched = used_by_others(schedule, setting.private)
    return stage(schedule, touched, setting) if touched or schedule.placement != setting.placement else schedule


def _staged(setting: Setting, planned: Planned) -> Planned:
    """Return it with buffers staged that cannot be used as it says, and in halves what it copies between nodes."""
    schedule = cross(_with_copies(setting, planned.schedule))
    if schedule is planned.schedule and not math.isnan(planned.predicted_s):
        return planned
    added = schedule.buffers["matrix"][len(planned.schedule.buffers) :]
    staged = tuple(map(Matrix, np.unique(added).tolist()))
    run = simulate(schedule, setting.machine)
    return Planned(schedule, run.seconds, planned.options, staged, run)
