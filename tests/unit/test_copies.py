"""What is copied and pickled: values, as they are; and nothing that belongs to a session."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from collections.abc import Mapping

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.planned import search
from uncut_mpi import errors
from uncut_mpi.api.call import CallResult
from uncut_mpi.api.gemm_plan import GemmPlan, Trace
from uncut_mpi.api.plans import PlanSummary
from uncut_mpi.api.session import Session
from uncut_mpi.bench.rivals.link_map import LinkMap
from uncut_mpi.model.bounds import bound
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.problem import GemmProblem, StoredMatrix
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.view import Timeline, traffic

MACHINE = um.load_machine("h200-4x")
PROBLEM = GemmProblem(500, 400, 300, DType.f32, "T", "N")
PLACE = um.Placement.parse("h,1,h2")
OPTIONS = um.ScheduleOptions(scheduler="kblocks", blocking=um.Blocking(columns=2))
FOUND = search(PROBLEM, PLACE, 4, MACHINE, OPTIONS, budget_tasks=1)
SCHEDULE = FOUND.best.schedule
SIMULATED = simulate(SCHEDULE, MACHINE)
VALUES = {
    "machine": MACHINE,
    "uniform": um.Machine.uniform(3),
    "links": LinkMap.of(MACHINE),
    "problem": PROBLEM,
    "stored": StoredMatrix(3, 4, "C", 8),
    "placement": PLACE,
    "location": um.Location.device(2),
    "dtype": DType.bf16,
    "options": OPTIONS,
    "bound": bound(PROBLEM, PLACE, MACHINE),
    "schedule": SCHEDULE,
    "lowering": lower(SCHEDULE),
    "list": lower(SCHEDULE).rank_list(1),
    "simulation": SIMULATED,
    "timeline": Timeline.of(SCHEDULE, SIMULATED.start_s, SIMULATED.end_s, "predicted"),
    "traffic": traffic(SCHEDULE),
    "result": CallResult(1.0, 3, 4.0, 5.0, True, False),
    "summary": PlanSummary("uncut", (2, 2), 1, 0, "so", 5, {"d2d": 3}, 1.0, 2.0, "ab", [1, 2]),
    "trace": Trace(np.zeros(3), np.ones(3)),
}
COPIES = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {version}": lambda value, v=version: pickle.loads(pickle.dumps(value, v)) for version in (0, 2, 5)},
}


def same(one: object, other: object) -> bool:
    """Whether two values are alike in all that they hold."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in dataclasses.fields(one))
    if isinstance(one, Mapping):
        return list(one) == list(other) and all(map(same, one.values(), other.values()))
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", VALUES)
def test_a_value_is_copied_and_sent_as_it_is(name, how):
    found = COPIES[how](VALUES[name])
    assert same(found, VALUES[name])


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", ["machine", "uniform", "links", "schedule"])
def test_tables_that_are_read_only_stay_so(name, how):
    value, found = VALUES[name], COPIES[how](VALUES[name])
    tables = [field.name for field in dataclasses.fields(value) if isinstance(getattr(value, field.name), np.ndarray)]
    assert tables
    assert not [
        one for one in tables if getattr(found, one).flags.writeable and not getattr(value, one).flags.writeable
    ]


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", [name for name in um.__all__ if name.endswith("Error")])
def test_an_error_is_copied_and_sent_with_its_message_and_mark(name, how):
    found = COPIES[how](errors.agreed(getattr(um, name)("m = 3 is wrong: pass 4")))
    assert type(found) is getattr(um, name)
    assert str(found) == "m = 3 is wrong: pass 4"
    assert errors.is_agreed(found)


@pytest.mark.parametrize("how", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize(("kind", "advice"), [(Session, r"um\.Session\(comm\)"), (GemmPlan, r"session\.plan\(")])
def test_what_belongs_to_a_session_is_neither_copied_nor_sent(kind, advice, how):
    with pytest.raises(TypeError, match=f"a {kind.__name__} belongs .* cannot be copied or sent: .*{advice}"):
        how(object.__new__(kind))
