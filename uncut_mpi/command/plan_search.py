"""What the plan command finds: schedules for a problem, or for the chunks that it is done in, and their figures."""

from __future__ import annotations

import dataclasses

from uncut_mpi.model.bounds import Bound, bound_of_files
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.buffers import user_table
from uncut_mpi.planning.candidates import Candidate, Simulated
from uncut_mpi.planning.chunks import Chunks, of_each
from uncut_mpi.planning.metrics import metric_of
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import Planned, cut, plan_several
from uncut_mpi.planning.search import SearchResult, search
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import simulate


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Found:
    """
    What was found.

    Attributes
    ----------
    result : SearchResult
        The schedules tried, the best first; of the first chunk.
    bound : Bound
        What no schedule of the whole product can beat.
    predicted_s : float
        What the whole product is expected to take.
    chunks : Chunks or None
        Blocks of C, one after another; None: one schedule does all.
    """

    result: SearchResult
    bound: Bound
    predicted_s: float
    chunks: Chunks | None


def find(
    problem: GemmProblem,
    placement: Placement,
    machine: Machine,
    options: ScheduleOptions,
    in_files: tuple[bool, bool, bool],
) -> Found:
    """
    Return schedules for a problem.

    Parameters
    ----------
    problem, placement, machine, options
        As for `uncut_mpi.planning.planner.plan`.
    in_files : (bool, bool, bool)
        Whether A, B and C lie in files.

    Notes
    -----
    Of one scheduler alone, without a product, of matrices in files, or with parts stored the other way round, there is
    no search whose candidates could be shown.
    """

    def result_of(setting: Setting) -> SearchResult:
        searched = problem.has_product and options.scheduler == "auto" and not any(in_files)
        if searched and setting.placement == setting.placement.straight(machine.num_ranks):
            return search(setting)
        several = plan_several(setting)
        candidates = [_candidate(one, machine, in_files, options.metric) for one in several]
        return SearchResult(candidates, 0, sum(len(one.schedule.tasks) for one in several), options.metric)

    users = user_table(machine.num_ranks, problem, placement)["matrix"].tolist()
    files = tuple(at for at, matrix in enumerate(users) if in_files[matrix])
    setting = Setting.of(problem, placement, machine.num_ranks, machine, options, files, files)
    chunks = cut(setting)
    results = of_each(setting, chunks, result_of)
    limit = bound_of_files(problem, placement, machine, in_files)
    return Found(results[0], limit, sum(one.best.predicted_s for one in results), chunks)


def _candidate(planned: Planned, machine: Machine, in_files: tuple[bool, bool, bool], metric: str) -> Candidate:
    schedule, options = planned.schedule, planned.options
    run, seconds = simulate(schedule, machine), planned.predicted_s
    limit = bound_of_files(schedule.problem, schedule.placement, machine, in_files).seconds
    value = metric_of(metric, machine).value(run) if metric != "time" else seconds
    made_with = (options, schedule.callers_grid, schedule.splits, schedule.tile, seconds, limit, value)
    return Candidate(*made_with, Simulated(run))
