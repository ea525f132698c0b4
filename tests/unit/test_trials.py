"""Schedules tried by a plan's first calls: whose turn it is, when it is over, which one wins."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from uncut_mpi.api.trials import CALLS, Trial, fastest
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import MOST_TRIED, Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan, plan_several
from uncut_mpi.planning.search import search
from uncut_mpi.planning.variety import varied

PROBLEM, PLACE = GemmProblem(4096, 4096, 4096, DType.f64), Placement.parse("0,0,0")


def trial(count):
    return Trial(tuple(SimpleNamespace(digest=bytes([number])) for number in range(count)), ((),) * count)


def test_schedules_take_turns_and_the_first_call_of_each_is_not_timed():
    tried, turns, moments = trial(3), [], []
    while not tried.over:
        assert tried.turn is tried.plans[tried.index]
        turns.append(tried.index)
        moments.append(tried.digest)
        tried = tried.after(100.0 if turns.count(tried.index) == 1 else 1.0 + tried.index)
    assert turns == [0, 1, 2, 2, 1, 0] * ((CALLS + 1) // 2)
    assert len(set(moments)) == len(moments)
    assert tried.table().tolist() == [[1.0] * CALLS, [2.0] * CALLS, [3.0] * CALLS]


def test_a_schedule_that_cannot_run_is_tried_no_more_and_does_not_win():
    before = trial(3).after(9.0)
    tried = before.without()
    assert tried.digest != before.digest
    assert (before.num_left, tried.num_left) == (3, 2)
    turns = []
    while not tried.over:
        turns.append(tried.index)
        tried = tried.after(5.0 - tried.index)
    assert turns == [2, 2, 0, 0, 2, 2, 0]
    assert np.isinf(tried.table()[1]).all()
    assert fastest(np.stack([tried.table()] * 2)) == 2


def test_a_moment_of_a_trial_is_told_from_others_with_the_same_turn():
    one = trial(2)
    later = one.after(1.0).after(1.0).after(1.0)
    assert later.index == one.index
    assert later.digest != one.digest
    assert later.digest == one.after(2.0).after(3.0).after(4.0).digest  # times are each rank's own


def test_the_slowest_rank_and_the_median_call_decide():
    ranks = np.array(
        [
            [[1.0, 1.0, 1.0], [2.0, 2.0, 9.0], [3.0, 3.0, 3.0]],
            [[4.0, 4.0, 4.0], [2.5, 2.5, 2.5], [1.0, 1.0, 1.0]],
        ]
    )
    assert fastest(ranks) == 1
    ranks[0, 1, 1] = 9.0  # now it is slow in two calls of three
    assert fastest(ranks) == 2


def test_what_is_tried_are_the_best_predicted_no_two_of_a_kind():
    machine = load_machine("h200-4x")
    found = search(PROBLEM, PLACE, 4, machine)
    chosen = varied(found.candidates, 6)
    assert len(chosen) == 6
    assert chosen[0] is found.best
    values = [one.value for one in chosen]
    assert values == sorted(values)
    assert values[-1] <= 1.25 * values[0]
    assert len({one.schedule.digest() for one in chosen}) == 6
    alike = [(one.schedule.scheduler, one.schedule.grid, one.schedule.tile, one.options.blocking) for one in chosen]
    shares = [(one.options.row_shares, one.options.col_shares, one.options.areas) for one in chosen]
    assert len(set(zip(alike, shares, strict=True))) == 6
    assert varied(found.candidates, 1) == [found.best]
    # The best of another scheduler comes before more of the same.
    schedulers = {one.schedule.scheduler for one in found.candidates if one.value <= 1.1 * found.best.value}
    assert {one.schedule.scheduler for one in varied(found.candidates, len(schedulers))} == schedulers


def test_columns_of_ranks_are_a_kind_of_their_own():
    machine, blocking = (
        load_machine("h200-4x"),
        Blocking(splits=1, first=256, block=2048, columns=4, order="k", combine="owner"),
    )
    cuts = ((0.3,), (0.25, 0.25, 0.2)), ((0.25, 0.25, 0.2), (0.3,)), ((0.3, 0.3), (0.2, 0.2)), None
    made = [
        search(PROBLEM, PLACE, 4, machine, ScheduleOptions(areas=areas, blocking=blocking), budget_tasks=1).best
        for areas in cuts
    ]
    made.sort(key=lambda one: one.value)
    assert made[-1].value <= 1.25 * made[0].value
    assert varied(made, 4) == made


def test_sums_away_are_a_kind_of_their_own():
    machine = load_machine("h200-4x")
    made = []
    for away in (0, 1, 2):
        blocking = Blocking(splits=1, first=256, block=2048, columns=4, order="k", combine="owner", away=away)
        options = ScheduleOptions(scheduler="auto", grid=(2, 2), devices=(0, 1, 2, 3), blocking=blocking)
        made.append(search(PROBLEM, PLACE, 4, machine, options, budget_tasks=1).best)
    made.sort(key=lambda one: one.value)
    chosen = varied(made, 3)
    assert len(chosen) == 2  # one or two away is no great difference
    assert {one.options.blocking.away > 0 for one in chosen} == {True, False}


def test_the_planner_returns_as_many_as_asked_and_plans_the_same_first_one():
    machine = load_machine("h200-4x")
    one = plan(PROBLEM, PLACE, 4, machine)
    several = plan_several(PROBLEM, PLACE, 4, machine, ScheduleOptions(tune=4))
    assert len(several) == 4
    assert several[0].schedule.digest() == one.schedule.digest()
    assert [planned.options.tune for planned in several] == [0] * 4
    assert plan(PROBLEM, PLACE, 4, machine, ScheduleOptions(tune=4)).schedule.digest() == one.schedule.digest()
    # What the caller fixed stays fixed.
    fixed = ScheduleOptions(tune=3, blocking=Blocking(columns=2))
    assert {planned.options.blocking.columns for planned in plan_several(PROBLEM, PLACE, 4, machine, fixed)} == {2}


def test_nothing_else_can_be_tried():
    with pytest.raises(ParamError, match=r"tune = 4 with scheduler 'uncut'.*scheduler='auto'"):
        ScheduleOptions(scheduler="uncut", tune=4)
    for tune in (MOST_TRIED + 1, -1, 2.5, "3", None):
        with pytest.raises(ParamError, match=rf"tune = {tune!r} is not a whole number from 0 to {MOST_TRIED}"):
            ScheduleOptions(tune=tune)
    assert ScheduleOptions(scheduler="uncut", tune=1).given == ()
