"""
What each part of the search brings, on a fixed list of problems: no GPU.

    python3 tests/perf/ablation.py choose OUT.json [-j JOBS] [--without NAME[,NAME...]]   # choices of this checkout
    python3 tests/perf/ablation.py compare OLD.json NEW.json                              # of two checkouts
    python3 tests/perf/ablation.py table [-j JOBS] [NAME[,NAME...] ...]                   # dimensions taken out

``choose`` searches every problem and writes the predicted time of each choice. ``table`` takes each dimension out, or
those named together, and prints what the choices lose: geometric mean, worst problem, time of the process. The list is
made by counting through machines, shapes, places and types, so that every version searches the same problems.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import json
import math
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.places import Places
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import search as searching
from uncut_mpi.planning.dimensions import DIMENSIONS, Dimensions
from uncut_mpi.planning.setting import Setting

TYPES = {
    "h200-4x": ("f64", "f32", "tf32", "f16", "bf16"),
    "karolina-8xa100": ("f64", "f32"),
    "meluxina-4xa100": ("f64", "f32"),
    "vega-4xa100": ("f64", "f32"),
    "vulcan-8xv100": ("f64", "f32"),
    "vulcan-8xv100-uneven": ("f64",),
}
SHAPES = (
    (512, 512, 512),
    (1024, 1024, 1024),
    (2048, 2048, 2048),
    (4096, 4096, 4096),
    (8192, 8192, 8192),
    (16384, 16384, 16384),
    (999, 1777, 1301),
    (6001, 5003, 7011),
    (14189, 512, 14189),
    (512, 14189, 9000),
    (3000, 100, 2000),
    (4096, 4096, 32768),
    (1024, 1024, 40000),
    (14336, 14336, 896),
    (20000, 300, 300),
    (256, 256, 256),
    (16384, 256, 256),
    (700, 700, 700),
    (1500, 1500, 1500),
    (5000, 5000, 200),
    (2000, 9000, 333),
    (128, 8192, 8192),
    (10000, 1000, 1000),
    (4100, 2050, 1025),
    (8192, 1024, 8192),
)
PLACES = (
    "h,h,h",
    "0,0,0",
    "0,1,2",
    "0,0,h",
    "h,h,0",
    "h,0,h",
    "0,1,0",
    "h,1,h",
    "1,h,h",
    "2,2,0",
    "h1,h1,h1",
    "h,0,0",
    "0,1,1",
)
PARTS = ("rows,rows,rows", "cols,cols,cols", "rows,cols,rows", "rows,replicated,rows", "0,rows,cols", "h,h,rows")
EACH = {"h200-4x": 80, "vulcan-8xv100-uneven": 16}
USUAL = 50
"""Problems of a machine."""


def problems() -> list[tuple[str, str, int, int, int, str, str, bool]]:
    """Return (machine, type, m, n, k, place, transpose of A, whether C is read)."""
    found = []
    for name, types in TYPES.items():
        for number in range(EACH.get(name, USUAL)):
            shape = SHAPES[number % len(SHAPES)]
            at = 3 * number + number // len(SHAPES)
            place = PARTS[number // 5 % len(PARTS)] if number % 5 == 4 else PLACES[at % len(PLACES)]
            trans = "T" if number % 7 == 3 and place in PLACES else "N"
            found.append((name, types[number % len(types)], *shape, place, trans, number % 3 > 0))
    return found


def nothing_varied(name: str) -> Callable[..., Iterator[dict[str, Any]]]:
    """Return a dimension of this name that makes nothing of a candidate."""

    def none(*_: object) -> Iterator[dict[str, Any]]:
        return iter(())

    none.__name__ = name  # by which a search knows what it has improved
    return none


def chosen(case: tuple[Any, ...], without: tuple[str, ...]) -> dict[str, Any]:
    """Return what the search chooses without some dimensions, and what that takes."""
    for name in without:
        assert hasattr(Dimensions, "_" + name), f"there is no dimension {name}"
        setattr(Dimensions, "_" + name, nothing_varied(name))
    name, dtype, m, n, k, place, trans, reads_c = case
    machine = load_machine(name)
    problem = GemmProblem(m, n, k, DType[dtype], trans, "N", reads_c=reads_c)
    where = Places.parse(place).bound(problem, machine.num_ranks).straight(machine.num_ranks)
    setting = Setting.of(problem, where, machine.num_ranks, machine)
    searching.search(setting, budget_tasks=1)  # what is kept for the next call
    started = time.process_time()
    found = searching.search(setting)
    spent = time.process_time() - started
    best = found.best
    return {
        "case": case,
        "seconds": best.predicted_s,
        "bytes": best.run.taken.moved_bytes + best.run.taken.held_bytes,
        "cpu_s": spent,
        "tasks": found.tasks_simulated,
        "tried": len(found.candidates),
        "scheduler": best.options.scheduler,
        "choice": repr(best.options),
    }


def all_chosen(jobs: int, without: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """Return the choices for all problems, made in processes."""
    with concurrent.futures.ProcessPoolExecutor(jobs) as pool:  # anew: a process that left something out is no use
        return list(pool.map(chosen, problems(), itertools.repeat(without), chunksize=4))


def compared(name: str, old: list[dict[str, Any]], new: list[dict[str, Any]]) -> str:
    """Return a line: by how much choices take longer in the mean and at worst, and the time of the searches."""
    ratios = [one["seconds"] / before["seconds"] for before, one in zip(old, new, strict=True)]
    mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
    worst = max(range(len(ratios)), key=ratios.__getitem__)
    moved = [(one["bytes"] or 1) / (before["bytes"] or 1) for before, one in zip(old, new, strict=True)]
    bytes_mean = math.exp(math.fsum(map(math.log, moved)) / len(moved))
    cpu = [math.fsum(one["cpu_s"] for one in rows) for rows in (old, new)]
    return (
        f"{name:44} {mean - 1:+7.2%}  worst {ratios[worst] - 1:+6.1%}  bytes {bytes_mean - 1:+6.1%}  "
        f"{cpu[0]:5.1f} s, then {cpu[1]:5.1f} s  {' '.join(map(str, new[worst]['case'][:7]))}"
    )


def main() -> None:
    """Choose, compare or print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("choose", "compare", "table"))
    parser.add_argument("words", nargs="*")
    parser.add_argument("-j", "--jobs", type=int, default=2)
    parser.add_argument("--without", default="")
    given = parser.parse_intermixed_args()
    if given.what == "choose":
        rows = all_chosen(given.jobs, tuple(filter(None, given.without.split(","))))
        pathlib.Path(given.words[0]).write_text(json.dumps(rows, indent=1), encoding="utf-8")
        print(f"{len(rows)} problems, {math.fsum(one['cpu_s'] for one in rows):.1f} s")
    elif given.what == "compare":
        old, new = (json.loads(pathlib.Path(file).read_text(encoding="utf-8")) for file in given.words)
        print(compared("all", old, new))
        for name in TYPES:
            pairs = [(a, b) for a, b in zip(old, new, strict=True) if a["case"][0] == name]
            print(compared(name, *map(list, zip(*pairs, strict=True))))
        pairs = sorted(zip(old, new, strict=True), key=lambda pair: pair[0]["seconds"] / pair[1]["seconds"])
        for before, one in pairs[:12]:
            print(f"{one['seconds'] / before['seconds'] - 1:+6.1%} {before['seconds'] * 1e3:9.3f} ms", *one["case"])
    else:
        rows = all_chosen(given.jobs)
        for group in given.words or (*DIMENSIONS, "tiles"):
            print(compared(group, rows, all_chosen(given.jobs, tuple(group.split(",")))), flush=True)


if __name__ == "__main__":
    sys.exit(main())
