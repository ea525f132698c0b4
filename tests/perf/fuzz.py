"""
Plans, proves and runs random cases (tests/helpers/fuzz.py) until time is over.

    python3 -m tests.perf.fuzz [MINUTES [SEED]]

Cases come in rounds, each of a seed of its own that is printed before it begins, SEED + 0, 1, 2, … A case that fails is
made as small as possible and printed; the rounds go on. The exit status is 1 if any has failed. One round again:
MINUTES 0 and its seed.
"""

from __future__ import annotations

import sys
import time
import traceback

from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.helpers import fuzz

EXAMPLES = 250


def failure_of(number: int) -> str:
    """Run one round and return the error and the smallest case that has it; empty if there is none."""
    last = []

    @seed(number)
    @settings(fuzz.SETTINGS, derandomize=False, max_examples=EXAMPLES, report_multiple_bugs=False)
    @given(st.one_of(fuzz.cases(), fuzz.cases(), fuzz.cases("scales"), fuzz.cases("copies")))
    def run(case: fuzz.Case) -> None:
        last[:] = [case]
        fuzz.check(case)

    try:
        run()
    except Exception:
        return f"{traceback.format_exc(limit=-6)}\n{last[0]}"
    return ""


def main(minutes: float = 20.0, first: int = 0) -> int:
    began, number, failed = time.monotonic(), first, []
    while number == first or time.monotonic() - began < 60 * minutes:
        print(f"seed {number}", flush=True)
        failure = failure_of(number)
        if failure:
            failed.append(number)
            print(failure, flush=True)
        number += 1
    print(f"{number - first} rounds of {EXAMPLES} cases from seed {first}, failed: {failed or 'none'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(*(kind(word) for kind, word in zip((float, int), sys.argv[1:], strict=False))))
