"""
Plans, proves and runs random cases (tests/helpers/fuzz.py) until time is over.

    python3 -m tests.perf.fuzz [MINUTES [SEED]]

Cases come in rounds, each of a seed of its own that is printed before it begins, SEED + 0, 1, 2, … A case that fails is
made as small as possible and printed; the rounds go on. At the end it says what came of how many. The exit status is 1
if any has failed. One round again: MINUTES 0 and its seed.
"""

from __future__ import annotations

import collections
import sys
import time
import traceback

from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.helpers import fuzz

EXAMPLES = 250


def failure_of(number: int, found: collections.Counter[str]) -> str:
    """Run one round, count what came of cases, and return the error and the smallest case with it, if there is any."""
    last = []

    @seed(number)
    @settings(fuzz.SETTINGS, derandomize=False, max_examples=EXAMPLES, report_multiple_bugs=False)
    @given(
        st.one_of(
            fuzz.cases(),
            fuzz.cases("chunks", 4, 128),
            *map(fuzz.cases, ("triangle", "form", "epilogue", "batch", "scales", "copies")),
        )
    )
    def run(case: fuzz.Case) -> None:
        last[:] = [case]
        found.update({fuzz.check(case): 1, "on several nodes": max(case.node_of) > 0})

    try:
        run()
    except Exception:
        return f"{traceback.format_exc(limit=-6)}\n{last[0]}"
    return ""


def main(minutes: float = 20.0, first: int = 0) -> int:
    began, number, failed, found = time.monotonic(), first, [], collections.Counter[str]()
    while number == first or time.monotonic() - began < 60 * minutes:
        print(f"seed {number}", flush=True)
        failure = failure_of(number, found)
        if failure:
            failed.append(number)
            print(failure, flush=True)
        number += 1
    print(f"{number - first} rounds of {EXAMPLES} cases from seed {first}, failed: {failed or 'none'}")
    print(", ".join(f"{name} {count}" for name, count in sorted(found.items())))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*(kind(word) for kind, word in zip((float, int), sys.argv[1:], strict=False))))
