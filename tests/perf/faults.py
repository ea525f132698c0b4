"""
Plants faults in jobs, at every point that a call passes, on each rank, and tells what becomes of the other ranks.

    python3 -m tests.perf.faults [--scenarios node,nodes,files,command] [--faults LIST] [--points TEXT] [--ranks 2]
                                 [--every N] [--first N] [--json FILE] [--at-once 2] [--mpiexec]
    python3 -m tests.perf.faults --gpus [--ranks 2] [--every N] [--first N] [--json FILE]

Points come from a job without a fault, which lists what the core names (tests/helpers/planted.py). --points takes those
that hold a text, --every each N-th case. Jobs are started by launch/node, with --mpiexec by the MPI alone. The second
form takes some cases, on GPUs. The exit status is 1 if one was not as it should be: tests/helpers/judged.py says what
that is.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import json
import sys
from typing import Any

from tests.helpers.judged import TIMEOUT_S, Case, Outcome, run

EVERYWHERE = ("exception", "kill", "stop", "never calls", "_exit(0)", "host memory", "shared memory", "fork")
OF_SCENARIOS = {
    "node": ("full /dev/shm",),
    "nodes": ("lost message",),
    "files": ("full disk", "file shrinks"),
    "command": ("full disk", "file shrinks"),
}
ON_GPUS = {
    "kill": (
        "open: in opening the device",
        "make: in registering a matrix",
        "first call: at broadcast",
        "first call: in binding the plan",
        "repeated call: running",
        "repeated call: verdict",
        "in flight: in flight",
        "close: at freeing the SoftBuf",
    ),
    "stop": ("repeated call: running", "close: begin"),
    "_exit(0)": ("first call: in binding the plan", "repeated call: running"),
    "exception": ("first call: in binding the plan", "repeated call: begin"),
    "GPU error": ("make: begin", "first call: in binding the plan", "repeated call: issue", "in flight: in flight"),
    "GPU memory": ("make: begin", "first call: begin"),
}
"""What is tried where there are GPUs; on the ranks in turn."""
LONG = 16384
"""Edge of the matrices there: a product of tens of milliseconds."""
OUTSIDE = ("never calls", "file shrinks", "lost message")
"""Faults between calls."""
IN_FLIGHT = ("kill", "stop", "_exit(0)")
"""Faults that a thread can have while tasks run."""


def cases_of(scenario: str, ranks: int, faults: list[str], text: str, by_launcher: bool) -> list[Case]:
    """Return the cases of a scenario, or end if the job fails without a fault."""
    about: dict[str, Any] = {"scenario": scenario, "ranks": ranks, "by_launcher": by_launcher}
    plain = run(Case(**about))
    if plain.problems:
        sys.exit(f"{scenario} fails without a fault: {plain.problems}\n{plain.said}")
    usual = (*EVERYWHERE, *OF_SCENARIOS[scenario])
    found = []
    for point in plain.points:
        for fault in faults or usual:
            if text not in point or (point.endswith(": running") and fault not in IN_FLIGHT):
                continue
            if fault in OUTSIDE and not point.endswith(("begin", "in flight")):
                continue
            found += [Case(fault=fault, point=point, rank=rank, **about) for rank in range(ranks)]
    return found


def cases_of_gpus(ranks: int) -> list[Case]:
    """Return the cases of GPUs, each of which is there alone."""
    which = itertools.cycle(range(ranks))
    about: dict[str, Any] = {"ranks": ranks, "backend": "cuda", "size": LONG}
    pairs = [(fault, point) for fault, points in ON_GPUS.items() for point in points]
    return [Case(**about), *(Case(fault=fault, point=point, rank=next(which), **about) for fault, point in pairs)]


def main() -> int:
    """Run what is asked, print the table and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", default="node,nodes,files,command")
    parser.add_argument("--faults", default="")
    parser.add_argument("--points", default="")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--every", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--at-once", type=int, default=2)
    parser.add_argument("--gpus", action="store_true")
    parser.add_argument("--json")
    parser.add_argument("--mpiexec", action="store_true")
    asked = parser.parse_args()
    faults = [one for one in asked.faults.split(",") if one]
    scenarios = [] if asked.gpus else asked.scenarios.split(",")
    several = (cases_of(scenario, asked.ranks, faults, asked.points, not asked.mpiexec) for scenario in scenarios)
    cases = cases_of_gpus(asked.ranks) if asked.gpus else [*itertools.chain(*several)]
    cases = cases[asked.first :: asked.every]
    outcomes: list[Outcome] = []
    with concurrent.futures.ThreadPoolExecutor(1 if asked.gpus else asked.at_once) as pool:
        timeout_s = 4.0 if asked.gpus else TIMEOUT_S
        for one in pool.map(functools.partial(run, timeout_s=timeout_s), cases):
            case = one.case
            outcomes.append(one)
            if asked.gpus:
                print(
                    f"{case.fault} on rank {case.rank} at '{case.point}': {one.status}, {one.slowest_s:.1f} s",
                    flush=True,
                )
            if one.problems and (one.planted or asked.gpus):
                print(f"{case.scenario}, {case.fault} on rank {case.rank} at '{case.point}': {'; '.join(one.problems)}")
                print("    " + one.said.strip()[-1200:].replace("\n", "\n    "), flush=True)
    print(table(outcomes))
    if asked.json:
        with open(asked.json, "w") as file:
            json.dump([dataclasses.asdict(one) for one in outcomes], file, indent=1)
    return int(any(one.problems for one in outcomes if one.planted or asked.gpus))


def table(outcomes: list[Outcome]) -> str:
    """Return a line for each fault: how many jobs, how they ended, and what was wrong."""
    lines = [
        "| scenario | fault | jobs | statuses | last other rank (s) | wrong |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    groups: dict[tuple[str, str], list[Outcome]] = collections.defaultdict(list)
    for one in outcomes:
        if one.planted:
            groups[one.case.scenario, one.case.fault].append(one)
    for (scenario, fault), those in groups.items():
        statuses = collections.Counter(str(one.status) for one in those)
        worst = max(one.slowest_s for one in those)
        bad = sum(bool(one.problems) for one in those)
        counts = ", ".join(f"{status} ({count})" for status, count in statuses.most_common())
        lines.append(f"| {scenario} | {fault} | {len(those)} | {counts} | {worst:.1f} | {bad} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
