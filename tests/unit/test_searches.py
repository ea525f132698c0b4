"""Searches beside calls: when they begin, what they may spend, and what becomes of what they find."""

import threading
import time
from types import SimpleNamespace

import pytest

from uncut_mpi.api import neighbours, searches
from uncut_mpi.api.keys import PlanKey
from uncut_mpi.api.neighbours import Neighbours
from uncut_mpi.api.plans import Plan, PlanSummary
from uncut_mpi.api.searches import Better, Searches, better_plan
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import search as planned
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.planner import plan_several, plans_for_calls
from uncut_mpi.planning.setting import Searching, Setting

CALL_S = 1e-3
AFTER = 1000
"""Calls that pay for a whole search of 0.1 s."""


class Planned:
    """A plan, as far as searches see it."""

    def __init__(self, predicted_s=CALL_S, search_after=AFTER):
        self.key = SimpleNamespace(problem="a product")
        self.now = self
        self.summary = SimpleNamespace(predicted_s=predicted_s, search_after=search_after)


class Looking:
    """Stands for `better_plan`: waits until it may go on, as a search does, and finds what it is told."""

    def __init__(self, monkeypatch, *found):
        self.found, self.shares, self.may_end = [*found], [], threading.Event()
        monkeypatch.setattr(searches, "better_plan", self)

    def __call__(self, plan, machine, searching, *, verify):
        self.shares.append(searching.share)
        while not self.may_end.is_set():
            searching.pause()
        found = self.found.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


@pytest.fixture
def made():
    """Return a function that makes searches, which are closed at the end."""
    several = []

    def make(*, fits=True, active=True):
        several.append(Searches(Machine.uniform(2), lambda plan: fits, verify=False, active=active))
        return several[-1]

    yield make
    for one in several:
        one.close()


def call(of_session, plan, times=1):
    """Make calls as a session does, but for taking what is found; return after how many that is due, or None."""
    for number in range(times):
        if of_session.found and plan in of_session.found and of_session.is_due(plan):
            return number
        if plan in of_session.left:
            of_session.count(plan)
    return None


def better(predicted_s):
    return Better(Planned(predicted_s), ("", b""), None)


def test_calls_go_on_while_a_search_runs_and_what_it_finds_is_taken_after_it(made, monkeypatch):
    looking, of_session, plan = Looking(monkeypatch, better(CALL_S / 2)), made(), Planned()
    of_session.watch(plan)
    assert call(of_session, plan, 10 * AFTER) is None  # though not even the first part has ended
    looking.may_end.set()
    of_session.wait()
    assert looking.shares == [1 / 16]
    assert call(of_session, plan) == 0


def test_searches_of_growing_parts_follow_one_another_when_calls_have_paid_for_them(made, monkeypatch):
    looking, of_session, plan = Looking(monkeypatch, None, None, better(CALL_S / 2)), made(), Planned()
    looking.may_end.set()
    of_session.watch(plan)
    for share, calls in ((1 / 16, 63), (1 / 4, 187), (1, 750)):
        before = len(looking.shares)
        call(of_session, plan, calls - 1)
        assert len(looking.shares) == before
        call(of_session, plan)
        of_session.wait()
        assert looking.shares[before:] == [share]
    assert call(of_session, plan) == 0
    successor = of_session.found[plan].plan
    of_session.succeed(plan, successor)
    assert not of_session.left  # there is nothing more to look for


def test_a_small_part_that_tries_hardly_more_than_a_rule_is_left_out(made, monkeypatch):
    looking, of_session, plan = Looking(monkeypatch, None), made(), Planned(CALL_S, 40)
    looking.may_end.set()
    of_session.watch(plan)
    call(of_session, plan, 40)
    of_session.wait()
    assert looking.shares == [1]


@pytest.mark.parametrize(("fits", "after"), [(True, 20), (False, 120)])
@pytest.mark.parametrize(("gain", "sooner"), [(0.05, 1), (0.5, 5)])
def test_a_plan_is_taken_when_calls_pay_for_that_or_it_saves_as_much(made, monkeypatch, fits, after, gain, sooner):
    looking, of_session, plan = Looking(monkeypatch, better((1 - gain) * CALL_S)), made(fits=fits), Planned(CALL_S, 2)
    looking.may_end.set()
    of_session.watch(plan)
    call(of_session, plan, 2)
    of_session.wait()
    assert 2 + call(of_session, plan, 1000) == pytest.approx(after / sooner, abs=1)


def test_what_was_forgotten_is_searched_no_more(made, monkeypatch):
    looking, of_session, plan, other = Looking(monkeypatch, None), made(), Planned(), Planned()
    of_session.watch(plan)
    of_session.watch(other)
    call(of_session, plan, AFTER)
    call(of_session, other, AFTER)
    of_session.forget(plan)  # which ends: nothing else lets the other one begin
    while len(looking.shares) < 2:
        time.sleep(1e-3)
    looking.may_end.set()
    of_session.wait()
    assert [*of_session.found] == [other]
    of_session.forget(other)
    assert not of_session.found
    assert not of_session.left


def test_a_search_ends_when_the_session_does(made, monkeypatch):
    of_session, plan, _ = made(), Planned(), Looking(monkeypatch)
    of_session.watch(plan)
    call(of_session, plan, AFTER)
    of_session.close()
    assert not any(thread.name == "uncut_mpi search" for thread in threading.enumerate())


def test_a_search_that_fails_leaves_the_plan_and_those_that_follow(made, monkeypatch):
    looking, of_session, plan = Looking(monkeypatch, MemoryError(), better(CALL_S / 2)), made(), Planned()
    looking.may_end.set()
    of_session.watch(plan)
    assert call(of_session, plan, 63) is None
    of_session.wait()
    assert call(of_session, plan, 187) is None
    of_session.wait()
    assert call(of_session, plan) == 0


def test_other_ranks_neither_count_nor_search(made):
    of_session, plan = made(active=False), Planned()
    of_session.watch(plan)
    assert not of_session.left


def key_of(*extents, place="h,h,h", trans="N", options=None):
    problem = GemmProblem(*extents, DType.f64, trans_a=trans)
    return PlanKey(problem, Placement.parse(place), options or ScheduleOptions())


def test_neighbours_are_alike_but_for_extents_within_a_factor_of_two_and_the_nearest_one_counts(monkeypatch):
    monkeypatch.setattr(neighbours, "MOST", 2)
    known, chosen = Neighbours(), [ScheduleOptions(grid=(1, count)) for count in range(1, 5)]
    known.add(key_of(1000, 1000, 1000), chosen[0])
    assert known.of(key_of(1999, 501, 1000)) is chosen[0]
    others = [key_of(2001, 1000, 1000), key_of(1000, 1000, 1000, place="h,h,0"), key_of(1000, 1000, 1000, trans="T")]
    others.append(key_of(1000, 1000, 1000, options=ScheduleOptions(tile=512)))
    assert [known.of(one) for one in others] == [None] * 4
    known.add(key_of(1200, 1000, 1000), chosen[1])
    assert known.of(key_of(1150, 1000, 1000)) is chosen[1]
    assert known.of(key_of(1050, 1000, 1000, options=ScheduleOptions(search="full"))) is chosen[0]
    known.add(key_of(10, 10, 10), chosen[2])  # in the place of what was used longest ago
    assert known.of(key_of(1150, 1000, 1000)) is chosen[0]


@pytest.mark.parametrize("extents", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_where_nothing_is_multiplied_there_are_no_neighbours(extents):
    known = Neighbours()
    known.add(key_of(1, 1, 1), ScheduleOptions())
    assert known.of(key_of(*extents)) is None
    known.add(key_of(*extents), ScheduleOptions(grid=(1, 2)))
    assert known.of(key_of(1, 1, 1)) == ScheduleOptions()


def test_a_plan_by_rule_may_be_that_of_a_neighbour():
    machine, place = Machine.uniform(4), Placement.parse("0,0,0")
    about, near = (
        Setting.of(GemmProblem(*size, DType.f64), place, 4, machine) for size in ([1536] * 3, [1400, 1600, 1536])
    )
    chosen = plan_several(near.but(options=ScheduleOptions(search="full")))[0].options
    (_, rule, calls), (_, like, _) = plans_for_calls(about, whole=True), plans_for_calls(about, whole=True, like=chosen)
    assert calls > 1
    assert like[0].predicted_s < 0.9 * rule[0].predicted_s


@pytest.mark.parametrize(("place", "size"), [("0,0,0", 8192), ("h,h,h", 1536), ("h,h,h", 64)])
def test_a_whole_search_beside_calls_chooses_as_one_that_is_asked_for(place, size):
    machine, pauses = Machine.uniform(4), []
    key = PlanKey(GemmProblem(size, size, size, DType.f64), Placement.parse(place), ScheduleOptions())
    setting = Setting.of(key.problem, key.placement, 4, machine)
    _, several, calls = plans_for_calls(setting, whole=True)
    rule = several[0]
    summary, _ = PlanSummary.of(rule, machine, key.options, 0.0, 1, calls)
    plan = Plan.of(key, summary, rule.schedule, 0, key.options)
    parts = [
        better_plan(plan, machine, Searching(share, lambda: pauses.append(1)), verify=True) for share in (1 / 4, 1)
    ]
    full = plan_several(setting.but(options=ScheduleOptions(search="full")))[0]
    for found, search in zip(parts, ("part", "full"), strict=True):
        if found is not None:
            assert found.plan.summary.search == search
            assert full.predicted_s <= found.plan.summary.predicted_s < rule.predicted_s
    if parts[1] is None:
        assert full.predicted_s >= rule.predicted_s
    else:
        assert parts[1].plan.schedule.digest() == full.schedule.digest()
    assert len(pauses) > 30


def test_what_a_search_beside_calls_has_tried_goes_bit_by_bit(monkeypatch):
    pauses = []
    about = GemmProblem(1024, 1024, 1024, DType.f64), Placement.parse("0,0,0"), 2, Machine.uniform(2)
    setting = Setting.of(*about).but(searching=Searching(pause=lambda: pauses.append(1)))
    tried, counts = len(planned.search(setting).candidates), []
    for at_once in (10**6, 1):
        monkeypatch.setattr(planned, "_FREED_AT_ONCE", at_once)
        pauses.clear()
        planned.choice(setting)
        counts.append(len(pauses))
    assert counts[1] - counts[0] == tried - 1 > 10
