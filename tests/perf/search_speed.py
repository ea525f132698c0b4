"""
How long searches take: ``python tests/perf/search_speed.py [OUT.json]``.

The median of nine searches, on one core, for cubes on the machines that ship; and of fits of shares. To compare two
versions, run it with each in turns on an idle machine.
"""

from __future__ import annotations

import functools
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.search import search
from uncut_mpi.planning.shares import fit_shares

MACHINES = ("h200-4x", "karolina-8xa100", "vulcan-8xv100-uneven")
EXTENTS = (512, 4096, 16384)
PLACES = ("h,h,h", "0,0,0", "0,1,0")


def timed(work: Callable[[], Any], repeats: int = 9) -> dict[str, float]:
    """Return median, least and most seconds of some calls after one that is not counted."""
    work()
    samples = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        samples.append(time.perf_counter() - started)
    return {"median_s": statistics.median(samples), "min_s": min(samples), "max_s": max(samples)}


def main() -> None:
    """Print a line for each search and fit."""
    rows: list[dict[str, Any]] = []
    for name in MACHINES:
        machine = load_machine(name)
        for place in PLACES:
            for n in EXTENTS:
                problem, placement = GemmProblem(n, n, n, DType.f64), Placement.parse(place)
                spent = timed(functools.partial(search, problem, placement, machine.num_ranks, machine))
                rows.append({"what": "search", "machine": name, "place": place, "n": n, **spent})
    speeds = np.random.default_rng(0).uniform(1, 3, (2, 4))
    rows.append({"what": "fit_shares", "machine": "2x4", "place": "", "n": 8, **timed(lambda: fit_shares(speeds), 99)})
    for row in rows:
        median, least, most = (f"{1e3 * row[key]:.3g}" for key in ("median_s", "min_s", "max_s"))
        about = f"{row['what']:10} {row['machine']:22} {row['place']:6} {row['n']:6}"
        print(f"{about} {median:>8} ms ({least} to {most})")
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
