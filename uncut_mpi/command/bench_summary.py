"""What a benchmark's results say: rates and speedups, by shape, placement and size, as the papers sum them up. Pure."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from uncut_mpi.command.bench_baselines import BASELINES
from uncut_mpi.model.datasets import Case

Row = Mapping[str, Any]
"""One result as it stands in the file."""

SINGLE: Final = ("one", "numpy", "cublas")
"""Methods that have one device, whatever the others have."""

BEST: Final = "the best other library"
"""What stands for whichever of `BASELINES` was fastest on a problem."""

SUMMED: Final = (
    *("m", "n", "k", "dtype", "place", "method", "compute", "median_s", "tflop_per_s"),
    *("limited_by", "passed", "error", "tolerance", "joules", "reason"),
)
"""What a summary and a picture read of a row."""

_Problem = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Speedup:
    """
    A method against another over some problems that both have done.

    Attributes
    ----------
    problems : int
        How many.
    mean, least, most : float
        Of time of the other over time of the method.
    slower : int
        Problems in which the method took longer.
    """

    problems: int
    mean: float
    least: float
    most: float
    slower: int


def case_of(row: Row) -> Case:
    """Return a row's problem."""
    return Case(row["m"], row["n"], row["k"], row["place"])


def limit_of(row: Row) -> str:
    """Return ``"compute"`` where that is the bound of all ranks, else ``"transfers"``."""
    return "compute" if row["limited_by"] == "compute" else "transfers"


def largest_small(rows: Iterable[Row]) -> float:
    """
    Return the operations up to which a problem is small: those of about half of the problems, by operations.

    PARALiA's tables 4 and 5 split their problems so. Problems of as many operations are in the same half; where all
    have as many, all are small.
    """
    flops = sorted(_flops(problem) for problem in {_problem(row) for row in rows})
    half = len(flops) / 2
    return min(flops, key=lambda most: abs(bisect.bisect_right(flops, most) - half), default=0.0)


GROUPINGS: Mapping[str, Callable[[Row], str]] = {
    "shape": lambda row: case_of(row).shape,
    "data": lambda row: case_of(row).data,
    "place": lambda row: str(row["place"]),
    "limit": limit_of,
    "type": lambda row: str(row["dtype"]),
}


def speedup(rows: Iterable[Row], method: str, other: str, compute: int) -> Speedup | None:
    """
    Return how much faster `method` is than `other`, both on so many ranks; None without common problems.

    Methods of `SINGLE` have one device, whatever the others have.
    """
    times: dict[str, dict[_Problem, float]] = {method: {}, other: {}}
    for row in rows:
        ranks = _ranks(row["method"], compute)
        if row["method"] in times and row["compute"] == ranks and row["median_s"] is not None:
            times[row["method"]][_problem(row)] = row["median_s"]
    ratios = [times[other][problem] / seconds for problem, seconds in times[method].items() if problem in times[other]]
    if not ratios:
        return None
    return Speedup(len(ratios), statistics.fmean(ratios), min(ratios), max(ratios), sum(ratio < 1 for ratio in ratios))


def best_of(rows: Iterable[Row], methods: Sequence[str], compute: int) -> list[Row]:
    """Return of every problem the fastest result of some methods on so many ranks, as one of the method `BEST`."""
    best: dict[_Problem, Row] = {}
    for row in rows:
        ranks = _ranks(row["method"], compute)
        if row["method"] in methods and row["compute"] == ranks and row["median_s"] is not None:
            known = best.get(_problem(row))
            if known is None or row["median_s"] < known["median_s"]:
                best[_problem(row)] = row
    return [{**row, "method": BEST, "compute": compute} for row in best.values()]


def _flops(problem: _Problem) -> float:
    m, n, k = problem[:3]
    return 2.0 * float(m) * float(n) * float(k)


def _half(row: Row, most: float) -> str:
    return "small" if _flops(_problem(row)) <= most else "large"


def total_rate(rows: Iterable[Row], method: str, compute: int) -> tuple[int, float]:
    """Return how many problems a method has done with so many ranks, and all operations over all times (TFLOP/s)."""
    done = [row for row in rows if _counts(row, method, compute)]
    seconds = sum(row["median_s"] for row in done)
    flops = sum(_flops(_problem(row)) for row in done)
    return len(done), flops / seconds / 1e12 if seconds else 0.0


def flops_per_joule(rows: Iterable[Row], method: str, compute: int) -> float:
    """Return the operations per joule of all problems with known energy (GFLOP/s per watt); 0 if none is known."""
    done = [row for row in rows if _counts(row, method, compute) and row["joules"]]
    joules = sum(row["joules"] for row in done)
    return sum(2e-9 * row["m"] * row["n"] * row["k"] for row in done) / joules if joules else 0.0


def summary_text(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """Return the summary as text: totals of every method, then speedups of the first over the others."""
    most = largest_small(rows)
    parts = {
        **{half: [row for row in rows if _half(row, most) == half] for half in ("small", "large")},
        "all": list(rows),
    }
    halves = f"; small: problems of up to {most / 1e9:.4g} GFLOP, half of them" if parts["large"] else ""
    width = max(10, *map(len, methods))
    lines = [
        f"All operations over all times and joules{halves}.",
        f"{'':{width + 7}} problems{'':12} TFLOP/s{'':20} GFLOP/s per W",
        f"{'method':{width}}  ranks" + 3 * "    small    large      all",
    ]
    counts = sorted({row["compute"] for row in rows})
    for method in methods:
        for count in counts:
            rates = [total_rate(part, method, count) for part in parts.values()]
            if rates[-1][0]:
                energies = [flops_per_joule(part, method, count) for part in parts.values()]
                numbers = [*(done for done, _ in rates), *(rate for _, rate in rates), *energies]
                lines.append(
                    f"{method:{width}} {count:6}" + "".join(f" {one:8.4g}" if one else f" {'-':>8}" for one in numbers)
                )
    first, *others = methods
    for other in others:
        lines += _comparison(rows, first, other)
    libraries = [method for method in methods if method in BASELINES]
    if first not in BASELINES and len(libraries) > 1:
        counts = sorted({row["compute"] for row in rows if row["method"] == first})
        together = [row for count in counts for row in best_of(rows, libraries, count)]
        lines += _comparison([row for row in rows if row["method"] == first] + together, first, BEST)
    failed = [row for row in rows if row["passed"] is False]
    left_out = [row for row in rows if row["median_s"] is None]
    unchecked = [row for row in rows if row["passed"] is None and row["median_s"] is not None]
    counts_of = f"{len(failed)} of them wrong, {len(unchecked)} not verified, {len(left_out)} left out"
    lines += ["", f"{len(rows)} results, {counts_of}"]
    lines += [f"  wrong: {_name(row)}, error {row['error']} above {row['tolerance']}" for row in failed]
    lines += [f"  left out: {_name(row)}: {row['reason']}" for row in left_out]
    return "\n".join(lines) + "\n"


def _comparison(rows: Sequence[Row], first: str, other: str) -> list[str]:
    """Return a table of speedups for every number of ranks that computed."""
    counts = sorted({row["compute"] for row in rows if row["method"] not in SINGLE}) or [1]
    lines = []
    for count in counts:
        done = [{_problem(row) for row in rows if _counts(row, name, _ranks(name, count))} for name in (first, other)]
        both = [row for row in rows if row["median_s"] is not None and _problem(row) in done[0] & done[1]]
        table = _speedup_line("all", speedup(both, first, other, count))
        most = largest_small(both)
        groupings: dict[str, Callable[[Row], str]] = {**GROUPINGS, "size": functools.partial(_half, most=most)}
        for name, key in groupings.items():
            groups = sorted({key(row) for row in both})
            for group in groups if len(groups) > 1 else ():
                chosen = [row for row in both if key(row) == group]
                table += _speedup_line(f"{name}: {group}", speedup(chosen, first, other, count))
        if table:
            lines += ["", f"{first} against {other}, on {count} ranks: time of {other} / time of {first}"]
            lines += [f"{'':24} problems    mean   least    most  slower", *table]
    return lines


def _speedup_line(name: str, found: Speedup | None) -> list[str]:
    if found is None:
        return []
    return [f"{name:24} {found.problems:8} {found.mean:7.3f} {found.least:7.3f} {found.most:7.3f} {found.slower:7}"]


def _ranks(method: str, compute: int) -> int:
    return 1 if method in SINGLE else compute


def _counts(row: Row, method: str, compute: int) -> bool:
    return row["method"] == method and row["compute"] == compute and row["median_s"] is not None


def _problem(row: Row) -> _Problem:
    return (row["m"], row["n"], row["k"], row["dtype"], row["place"])


def _name(row: Row) -> str:
    return (
        f"{row['dtype']} {row['m']}×{row['n']}×{row['k']} at {row['place']}, {row['method']} on {row['compute']} ranks"
    )
