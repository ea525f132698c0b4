"""
Plants every fault of `tests.helpers.faults` in the schedules of random cases, and in their lists, and prints a table.

    python3 -m tests.perf.mutations [CASES [SEED]]

Of each class and fault: in how many cases it was planted, in how many of these it does harm as the oracle finds by
running them (`tests.helpers.oracle`), and how many of these the proof refuses. The exit status is 1 if it missed one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

from hypothesis import seed, settings

from tests.helpers import fuzz
from tests.helpers.faults import CLASSES, Tally


def table(tallies: Mapping[str, Tally]) -> str:
    """Return it in markdown."""
    lines = ["| class | fault | planted | harmful | caught |", "| --- | --- | --- | --- | --- |"]
    for name, faults in CLASSES.items():
        for fault in (one if isinstance(one, str) else one.__name__ for one in faults):
            tally = tallies.get(fault, Tally())
            about = name, fault.replace("_", " "), str(tally.planted), str(tally.harmful), str(tally.caught)
            lines.append("| " + " | ".join(about) + " |")
            name = ""
    return "\n".join(lines)


def main(cases: int = 1000, first: int = 0) -> int:
    tallies = fuzz.planted(seed(first)(settings(fuzz.SETTINGS, derandomize=False, max_examples=cases)))
    print(table(tallies))
    return int(any(one.caught < one.harmful for one in tallies.values()))


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
