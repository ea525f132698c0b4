"""What a benchmark's results say: rates and speedups, by shape, placement and size, as the papers sum them up. Pure."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
"""One result as it stands in the file."""

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


def shape_of(row: Row) -> str:
    """Return ``"square"``, ``"fat-thin"`` (k is the least extent) or ``"thin-fat"`` (k is the largest)."""
    edge, depth = max(row["m"], row["n"]), row["k"]
    if row["m"] == row["n"] == depth:
        return "square"
    return "fat-thin" if depth < edge else "thin-fat"


def placement_of(row: Row) -> str:
    """Return ``"host"``, ``"one device"``, ``"devices"`` or ``"mixed"``."""
    places = set(row["place"].split(","))
    if places == {"h"}:
        return "host"
    if "h" in places:
        return "mixed"
    return "one device" if len(places) == 1 else "devices"


def size_of(row: Row) -> str:
    """Return ``"large"`` where the bound of all ranks is their compute, else ``"small"``: set by what has to move."""
    return "large" if row["limited_by"] == "compute" else "small"


GROUPINGS: Mapping[str, Callable[[Row], str]] = {
    "shape": shape_of,
    "data": placement_of,
    "size": size_of,
    "type": lambda row: str(row["dtype"]),
}


def speedup(rows: Iterable[Row], method: str, other: str) -> Speedup | None:
    """Return how much faster `method` is than `other`, each problem counting once; None without common problems."""
    times: dict[str, dict[_Problem, float]] = {method: {}, other: {}}
    for row in rows:
        if row["method"] in times and row["median_s"] is not None:
            times[row["method"]][_problem(row)] = row["median_s"]
    # A baseline of one device has one result, whatever the number of ranks that compute.
    ratios = []
    for problem, seconds in times[method].items():
        theirs = times[other].get(problem, times[other].get((*problem[:-1], 1)))
        if theirs is not None:
            ratios.append(theirs / seconds)
    if not ratios:
        return None
    return Speedup(len(ratios), statistics.fmean(ratios), min(ratios), max(ratios), sum(ratio < 1 for ratio in ratios))


def total_rate(rows: Iterable[Row], method: str, compute: int) -> tuple[int, float]:
    """Return how many problems a method has done with so many ranks, and all operations over all times (TFLOP/s)."""
    done = [row for row in rows if _counts(row, method, compute)]
    seconds = sum(row["median_s"] for row in done)
    flops = sum(2.0 * row["m"] * row["n"] * row["k"] for row in done)
    return len(done), flops / seconds / 1e12 if seconds else 0.0


def flops_per_joule(rows: Iterable[Row], method: str, compute: int) -> float:
    """Return the operations per joule of all problems with known energy (GFLOP/s per watt); 0 if none is known."""
    done = [row for row in rows if _counts(row, method, compute) and row["joules"]]
    joules = sum(row["joules"] for row in done)
    return sum(2e-9 * row["m"] * row["n"] * row["k"] for row in done) / joules if joules else 0.0


def summary_text(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """Return the summary as text: totals of every method, then speedups of the first over the others."""
    lines = ["method      ranks  problems   TFLOP/s (all operations / all times)   GFLOP/s per W"]
    counts = sorted({row["compute"] for row in rows})
    for method in methods:
        for count in counts:
            problems, rate = total_rate(rows, method, count)
            if problems:
                energy = flops_per_joule(rows, method, count)
                lines.append(f"{method:10} {count:6} {problems:9} {rate:12.4g} {energy or '':>34.4}")
    first, *others = methods
    for other in others:
        lines += ["", f"{first} against {other}: time of {other} / time of {first}"]
        lines.append(f"{'':24} problems    mean   least    most  slower")
        lines += _speedup_line("all", speedup(rows, first, other))
        for name, key in GROUPINGS.items():
            groups = sorted({key(row) for row in rows})
            for group in groups if len(groups) > 1 else ():
                chosen = [row for row in rows if key(row) == group]
                lines += _speedup_line(f"{name}: {group}", speedup(chosen, first, other))
    failed = [row for row in rows if row["passed"] is False]
    left_out = [row for row in rows if row["median_s"] is None]
    lines += ["", f"{len(rows)} results, {len(failed)} of them wrong, {len(left_out)} left out"]
    lines += [f"  wrong: {_name(row)}, error {row['error']} above {row['tolerance']}" for row in failed]
    lines += [f"  left out: {_name(row)}: {row['reason']}" for row in left_out]
    return "\n".join(lines) + "\n"


def _speedup_line(name: str, found: Speedup | None) -> list[str]:
    if found is None:
        return []
    return [f"{name:24} {found.problems:8} {found.mean:7.3f} {found.least:7.3f} {found.most:7.3f} {found.slower:7}"]


def _counts(row: Row, method: str, compute: int) -> bool:
    return row["method"] == method and row["compute"] == compute and row["median_s"] is not None


def _problem(row: Row) -> _Problem:
    return (row["m"], row["n"], row["k"], row["dtype"], row["place"], row["compute"])


def _name(row: Row) -> str:
    return (
        f"{row['dtype']} {row['m']}×{row['n']}×{row['k']} at {row['place']}, {row['method']} on {row['compute']} ranks"
    )
