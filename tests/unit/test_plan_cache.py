"""The plans that one-shot calls keep: which call means which, and which go first."""

from types import SimpleNamespace

import pytest

from uncut_mpi.api.keys import PlanKey
from uncut_mpi.api.plan_cache import PlanCache
from uncut_mpi.api.request import Choices, Request, Scalars
from uncut_mpi.api.searches import Searches
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import ScheduleOptions


class Caller:
    """Makes calls on a cache, as a session does, and counts the keys that were made."""

    def __init__(self, max_plans, monkeypatch):
        self.dropped = []
        self.searches = Searches(Machine.uniform(2), lambda plan: True, verify=False, active=True)
        self.cache = PlanCache(max_plans, lambda plan: self.dropped.append(plan.key.problem.m), self.searches)
        self.due = []
        monkeypatch.setattr(self.searches, "_begin", lambda job: self.due.append(job.plan))
        self.keys = 0
        monkeypatch.setattr(PlanKey, "of", self._key)

    def _key(self, infos, choices, *, reads_c, scales_only):
        self.keys += 1
        size = infos[0].size
        problem = GemmProblem(
            size, size, size, DType.f64, trans_a=choices.trans_a, reads_c=reads_c, scales_only=scales_only
        )
        return PlanKey(problem, Placement.parse("h,h,h"), choices.options)

    def __call__(self, size, *, numbers=(1, 2, 3), trans_a="N", alpha=1.0, beta=1.0, options=None):
        matrices = tuple(
            SimpleNamespace(info=SimpleNamespace(size=size, name=size * 10 + number)) for number in numbers
        )
        return self.cache.find(Request("gemm", matrices, Scalars(alpha, beta), Choices.of(trans_a, "N", options)))

    def made(self, size, search_after=0, **how):
        plan = Made(self(size, **how), search_after)
        self.cache.keep(plan)
        return plan


class Made:
    """A plan, as far as a cache sees it."""

    def __init__(self, key, search_after=0, predicted_s=1e-3):
        self.key, self.now = key, self
        search = "rule" if search_after or key.options.search == "rule" else "full"
        self.summary = SimpleNamespace(search=search, search_after=search_after, predicted_s=predicted_s)


@pytest.fixture
def caller(monkeypatch):
    """Return a function that makes the caller of a cache of so many plans."""
    return lambda max_plans: Caller(max_plans, monkeypatch)


def test_a_known_call_finds_its_plan_without_a_key(caller):
    call = caller(4)
    plan = call.made(8)
    assert call(8) is plan
    assert call.keys == 2  # the plan was not kept yet when its call was first made
    assert call(8) is plan
    assert call.keys == 2


def test_a_plan_that_was_not_kept_is_not_found(caller):
    call = caller(4)
    first = call(8)
    assert type(first) is PlanKey
    assert call(8) == first
    assert len(call.cache._plans) == 0


def test_calls_of_other_matrices_share_the_plan_of_equal_keys(caller):
    call = caller(4)
    plan = call.made(8)
    for _ in range(2):
        assert call(8, numbers=(4, 5, 6)) is plan
        assert call(8) is plan
    assert call.keys == 3
    assert len(call.cache._plans) == 1


@pytest.mark.parametrize(
    "how",
    [{"trans_a": "T"}, {"beta": 0.0}, {"alpha": 0.0}, {"options": ScheduleOptions(tile=64)}],
    ids=["transposed", "without C", "scaled alone", "other options"],
)
def test_calls_that_differ_have_plans_of_their_own(caller, how):
    call = caller(4)
    plain, other = call.made(8), call.made(8, **how)
    for _ in range(3):
        assert call(8) is plain
        assert call(8, **how) is other


def test_options_that_are_equal_need_no_new_key(caller):
    call = caller(4)
    plan = call.made(8, options=ScheduleOptions(tile=64))
    assert call(8, options=ScheduleOptions(tile=64)) is plan
    keys = call.keys
    assert call(8, options=ScheduleOptions(tile=64)) is plan
    assert call.keys == keys
    assert call(8, options=ScheduleOptions(tile=32)) is not plan


def test_the_least_recently_used_plan_goes_first_and_is_closed(caller):
    call = caller(2)
    first, second = call.made(8), call.made(16)
    for used in (second, first):
        assert call(used.key.problem.m) is used
        call.cache.keep(used)
    assert call(16) is second  # found alone, as in a call that fails on another rank
    call.made(24)
    assert call.dropped == [16]
    assert call(8) is first
    assert call(16) is not second
    assert len(call.cache._plans) == 2


def test_what_comes_in_the_place_of_a_plan_is_found_and_what_was_there_is_not_dropped(caller):
    call = caller(2)
    first, other = call.made(8), call.made(16)
    assert call(8) is first
    later = Made(first.key)
    for _ in range(2):
        call.cache.keep(later)
        assert call(8) is later
    assert call.dropped == []
    assert len(call.cache._plans) == 2
    call.made(24)
    assert call.dropped == [16]
    assert call(8) is later
    assert call(16) == other.key


def test_a_dropped_plan_is_not_known_any_more(caller):
    call = caller(1)
    first = call.made(8)
    assert call(8) is first
    assert call(8) is first
    call.made(16)
    assert call.dropped == [8]
    assert call(8) is not first


def test_many_calls_are_not_remembered_for_ever(caller):
    call = caller(1)
    plan = call.made(8)
    for number in range(1000):
        assert call(8, numbers=(number, 0, 0)) is plan
    assert len(call.cache._calls) <= 256


def test_a_cleared_cache_knows_nothing(caller):
    call = caller(2)
    first = call.made(8)
    assert call(8) is first
    call.cache.clear()
    assert len(call.cache._plans) == 0
    assert call(8) is not first


def test_a_plan_by_rule_is_counted_until_its_search_is_due_and_followed_by_what_that_finds(caller):
    call = caller(4)
    rule = call.made(8, search_after=3)  # its first call
    for _ in range(2):
        assert call.due == []
        assert call(8) is rule
        call.cache.keep(rule)
    assert call.due == [rule]
    assert call(8) is call(8, numbers=(4, 5, 6)) is rule
    found = Made(rule.key)
    call.cache.keep(found)
    assert call(8) is call(8, numbers=(4, 5, 6)) is found
    assert call.dropped == [8]


def test_nothing_is_searched_for_a_plan_that_has_gone(caller):
    call = caller(1)
    call.made(8, search_after=3)
    call.made(9, search_after=3)
    assert [plan.key.problem.m for plan in call.searches.left] == [9]
    call.cache.clear()
    assert not call.searches.left


def test_who_asks_how_far_a_search_goes_has_plans_of_its_own(caller):
    call, rule, full = caller(4), ScheduleOptions(search="rule"), ScheduleOptions(search="full")
    usual, searched, by_rule = call.made(8, search_after=100), call.made(8, options=full), call.made(8, options=rule)
    assert by_rule.summary.search == "rule"
    for _ in range(5):
        call.cache.keep(by_rule)
        assert [*call.searches.left] == [usual]
        assert (call(8), call(8, options=full), call(8, options=rule)) == (usual, searched, by_rule)
