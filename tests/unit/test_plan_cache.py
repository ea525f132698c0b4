"""The plans that one-shot calls keep: which call means which, and which go first."""

from types import SimpleNamespace

import pytest

from uncut_mpi.api.entries import PlanEntry, PlanKey
from uncut_mpi.api.plan_cache import PlanCache
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import ScheduleOptions


class Caller:
    """Makes calls on a cache, as a session does, and counts the keys that were made."""

    def __init__(self, max_plans):
        self.cache = PlanCache(max_plans)
        self.keys = 0

    def __call__(self, size, *, numbers=(1, 2, 3), trans_a="N", reads_c=True, options=None):
        def key():
            self.keys += 1
            problem = GemmProblem(size, size, size, DType.f64, trans_a=trans_a, reads_c=reads_c)
            return PlanKey(problem, Placement.parse("h,h,h"), options or ScheduleOptions())

        matrices = tuple(SimpleNamespace(info=SimpleNamespace(number=size * 10 + number)) for number in numbers)
        return self.cache.find(matrices, trans_a, "N", reads_c, False, options, key)

    def made(self, size, **how):
        entry = self(size, **how)
        self.cache.keep(entry)
        return entry


@pytest.fixture
def closed(monkeypatch):
    """Yield the sizes of the plans that are closed, in order."""
    sizes = []
    monkeypatch.setattr(PlanEntry, "close", lambda self: sizes.append(self.key.problem.m))
    return sizes


def test_a_known_call_finds_its_plan_without_a_key():
    call = Caller(4)
    entry = call.made(8)
    assert call(8) is entry
    assert call.keys == 2  # the plan was not kept yet when its call was first made
    assert call(8) is entry
    assert call.keys == 2


def test_a_plan_that_was_not_kept_is_not_found():
    call = Caller(4)
    first = call(8)
    assert call(8) is not first
    assert len(call.cache) == 0


def test_calls_of_other_matrices_share_the_plan_of_equal_keys():
    call = Caller(4)
    entry = call.made(8)
    for _ in range(2):
        assert call(8, numbers=(4, 5, 6)) is entry
        assert call(8) is entry
    assert call.keys == 3
    assert len(call.cache) == 1


@pytest.mark.parametrize(
    "how",
    [{"trans_a": "T"}, {"reads_c": False}, {"options": ScheduleOptions(tile=64)}],
    ids=["transposed", "without C", "other options"],
)
def test_calls_that_differ_have_plans_of_their_own(how):
    call = Caller(4)
    plain, other = call.made(8), call.made(8, **how)
    for _ in range(3):
        assert call(8) is plain
        assert call(8, **how) is other


def test_options_that_are_equal_need_no_new_key():
    call = Caller(4)
    entry = call.made(8, options=ScheduleOptions(tile=64))
    assert call(8, options=ScheduleOptions(tile=64)) is entry
    keys = call.keys
    assert call(8, options=ScheduleOptions(tile=64)) is entry
    assert call.keys == keys
    assert call(8, options=ScheduleOptions(tile=32)) is not entry


def test_the_least_recently_used_plan_goes_first_and_is_closed(closed):
    call = Caller(2)
    first, second = call.made(8), call.made(16)
    for used in (second, first):
        assert call(used.key.problem.m) is used
        call.cache.use(used)
    assert call(16) is second  # found alone, as in a call that fails on another rank
    call.made(24)
    assert closed == [16]
    assert call(8) is first
    assert call(16) is not second
    assert len(call.cache) == len(call.cache.entries()) == 2


def test_a_dropped_plan_is_not_known_any_more(closed):
    call = Caller(1)
    first = call.made(8)
    assert call(8) is first
    assert call(8) is first
    call.made(16)
    assert closed == [8]
    assert call(8) is not first


def test_many_calls_are_not_remembered_for_ever():
    call = Caller(1)
    entry = call.made(8)
    for number in range(1000):
        assert call(8, numbers=(number, 0, 0)) is entry
    assert len(call.cache._calls) <= 256


def test_a_flag_that_cannot_be_looked_up_is_left_to_the_key():
    cache = PlanCache(2)

    def key():
        raise ParamError("trans_a = []")

    matrices = tuple(SimpleNamespace(info=SimpleNamespace(number=number)) for number in (1, 2, 3))
    with pytest.raises(ParamError, match="trans_a"):
        cache.find(matrices, [], "N", True, False, None, key)


def test_a_cleared_cache_knows_nothing():
    call = Caller(2)
    first = call.made(8)
    assert call(8) is first
    call.cache.clear()
    assert len(call.cache) == 0
    assert call(8) is not first
