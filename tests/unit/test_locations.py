"""What memories a job has stands in one table; planner, proof and core look up in it what each is."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TypeAlias

import pytest

from tests.helpers.canonical import canonical_digest
from tests.helpers.planned import plan_several
from uncut_mpi.model import locations
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import NOBODY, Space, host_index
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.simulate import Simulation, simulate
from uncut_mpi.planning.verify import verify

RANKS = 3
PROBLEM = GemmProblem(600, 520, 440, DType.f64, reads_c=True)


def forget() -> None:
    """Empty what the model and planning keep by the number of ranks."""
    for name, module in list(sys.modules.items()):
        for one in vars(module).values() if name.startswith("uncut_mpi.") else ():
            getattr(one, "cache_clear", lambda: None)()


@contextlib.contextmanager
def second_host() -> Iterator[int]:
    """Put the host of a second node into the table, behind the first one's; return its number."""
    usual, at = locations._memories, host_index(RANKS) + 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            locations, "_memories", lambda ranks: [*usual(ranks)[:at], (Space.HOST, NOBODY, 1), *usual(ranks)[at:]]
        )
        forget()
        yield at
    forget()


def planned(scheduler: str, place: str, files: tuple[int, ...]) -> Simulation:
    machine, options = Machine.uniform(RANKS), ScheduleOptions(scheduler)
    schedule = plan_several(PROBLEM, Placement.parse(place), RANKS, machine, options, files, files)[0].schedule
    verify(schedule, lower(schedule))
    return simulate(schedule, machine)


Case: TypeAlias = tuple[str, str, tuple[int, ...]]  # scheduler, places, parts that are in files
CASES: tuple[Case, ...] = (
    ("kblocks", "h,h2,1", ()),
    ("kblocks", "h0,0,h1", ()),
    ("uncut", "h,h2,1", ()),
    ("uncut", "h0,h,h1", ()),
    ("auto", "h1,h2,h", (0,)),
)


@pytest.mark.parametrize("case", CASES)
def test_a_further_host_in_the_table_changes_no_schedule_of_the_others(case: Case) -> None:
    usual = planned(*case)
    with second_host():
        found = planned(*case)
    assert len(found.machine.bandwidth_gb_per_s) == RANKS + 2
    assert canonical_digest(found.schedule) == canonical_digest(usual.schedule)
    assert found.schedule.digest() != usual.schedule.digest()  # private memory has other numbers
    assert found.start_s.tolist() == usual.start_s.tolist()
    assert found.end_s.tolist() == usual.end_s.tolist()
