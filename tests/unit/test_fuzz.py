"""Any layouts, problems, grids and options, for 1 to 64 ranks; tests/perf/fuzz.py goes on for as long as one likes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers import fuzz


@settings(fuzz.SETTINGS, max_examples=100)
@given(fuzz.cases())
def test_whatever_is_to_be_multiplied_has_a_schedule_that_is_proved_and_right_on_numbers(case: fuzz.Case) -> None:
    fuzz.check(case)


@settings(fuzz.SETTINGS, max_examples=300)
@given(st.one_of(fuzz.cases("scales"), fuzz.cases("copies"), fuzz.cases("product", 8, 24)))
def test_whatever_is_to_be_scaled_or_copied_or_multiplied_by_few_ranks_has_one_too(case: fuzz.Case) -> None:
    fuzz.check(case)
