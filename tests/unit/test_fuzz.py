"""
Whatever a plan can be asked, for 1 to 64 ranks and nodes, and whatever can be wrong with it.

tests/perf/fuzz.py and tests/perf/mutations.py go on for as long as one likes.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import fuzz
from tests.helpers.faults import CLASSES


@settings(fuzz.SETTINGS, max_examples=150)
@given(fuzz.cases())
def test_whatever_is_to_be_multiplied_has_a_schedule_that_is_proved_and_right_on_numbers(case: fuzz.Case) -> None:
    fuzz.check(case)


@settings(fuzz.SETTINGS, max_examples=220)
@given(
    st.one_of(
        *map(fuzz.cases, ("scales", "copies", "batch")),
        fuzz.cases("product", 8, 24),
        fuzz.cases("triangle", 8, 24),
        fuzz.cases("form", 8, 24),
        fuzz.cases("epilogue", 8, 24),
        fuzz.cases("chunks", 4, 128),
    )
)
def test_whatever_is_to_be_scaled_or_copied_or_multiplied_by_few_ranks_has_one_too(case: fuzz.Case) -> None:
    fuzz.check(case)


def test_every_class_of_fault_does_harm_in_some_cases_and_the_proof_refuses_all_of_these() -> None:
    tallies = fuzz.planted(settings(fuzz.SETTINGS, max_examples=240))
    assert {name: one for name, one in tallies.items() if one.caught < one.harmful} == {}
    harmful = {
        name: [tallies[one if isinstance(one, str) else one.__name__].harmful for one in faults]
        for name, faults in CLASSES.items()
    }
    assert min(map(min, harmful.values())) >= 2, harmful
