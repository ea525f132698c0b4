"""What a benchmark's results say: rates and speedups, by shape, placement and size, as the papers sum them up. Pure."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from uncut_mpi.bench.baselines.task import MOVED
from uncut_mpi.bench.datasets import Case
from uncut_mpi.bench.processes import BASELINES, FLOOR
from uncut_mpi.model.arguments import counted

Row = Mapping[str, Any]
"""One result as it stands in the file."""

SINGLE: Final = ("one", "numpy", "scipy", "cublas")
"""Methods that have one device, whatever the others have."""

BEST: Final = "the best other library"
"""What stands for whichever of `BASELINES` was fastest on a problem."""

SUMMED: Final = (
    *("m", "n", "k", "dtype", "place", "method", "compute", "median_s", "tflop_per_s"),
    *("limited_by", "passed", "error", "tolerance", "joules", "reason"),
)
"""What a summary and a picture read of a row."""

_FLOPS: Final = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))

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
        Of time of the other over time of the method; the mean is geometric, as all means of ratios.
    slower : int
        Problems in which the method took longer.
    energy, edp : float or None
        The mean of the energy of the other over that of the method, and the same of energy times time. Only problems of
        which both energies are known count.
    """

    problems: int
    mean: float
    least: float
    most: float
    slower: int
    energy: float | None = None
    edp: float | None = None


def case_of(row: Row) -> Case:
    """Return a row's problem."""
    return Case(row["m"], row["n"], row["k"], row["place"])


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
    "place": lambda row: str(row["place"]) if case_of(row).dealt == "whole" else case_of(row).dealt,
    # What bounds all ranks.
    "limit": lambda row: "compute" if row["limited_by"] == "compute" else "transfers",
    "type": lambda row: str(row["dtype"]),
}


def speedup(rows: Iterable[Row], method: str, other: str, compute: int) -> Speedup | None:
    """
    Return how much faster `method` is than `other`, both on so many ranks; None without common problems.

    Methods of `SINGLE` have one device, whatever the others have.
    """
    found: dict[str, dict[_Problem, Row]] = {method: {}, other: {}}
    for row in rows:
        if row["method"] in found and _counts(row, row["method"], _ranks(row["method"], compute)):
            found[row["method"]][_problem(row)] = row
    pairs = [(found[other][problem], row) for problem, row in found[method].items() if problem in found[other]]
    if not pairs:
        return None
    ratios = [theirs["median_s"] / ours["median_s"] for theirs, ours in pairs]
    energies = [
        (theirs["joules"] / ours["joules"], ratio)
        for (theirs, ours), ratio in zip(pairs, ratios, strict=True)
        if theirs["joules"] and ours["joules"]
    ]
    return Speedup(
        len(ratios),
        statistics.geometric_mean(ratios),
        min(ratios),
        max(ratios),
        sum(ratio < 1 for ratio in ratios),
        statistics.geometric_mean(energy for energy, _ in energies) if energies else None,
        statistics.geometric_mean(energy * ratio for energy, ratio in energies) if energies else None,
    )


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


@dataclasses.dataclass(frozen=True, slots=True)
class Totals:
    """
    What a method has done on so many ranks, all problems together, with the paper's metrics (more is better).

    Attributes
    ----------
    problems : int
        How many.
    tflop_per_s : float
        All operations over all times.
    gflop_per_j : float
        PDP_i, GFLOP/s per W: all operations over all energies, of the problems of which these are known.
    edp_i : float
        EDP_i, the same times their rate: (TFLOP/s)² per W.
    ranks : int
        Whose devices took part: one for methods of `SINGLE`.
    """

    problems: int
    tflop_per_s: float
    gflop_per_j: float
    edp_i: float
    ranks: int


def totals(rows: Iterable[Row], method: str, compute: int) -> Totals:
    """Return what a method has done on so many ranks; what is not known of any problem is 0."""
    done = [row for row in rows if _counts(row, method, compute)]
    metered = [row for row in done if row["joules"]]
    joules = sum(row["joules"] for row in metered)
    per_joule = _tflop(metered) / joules if joules else 0.0
    return Totals(len(done), _rate(done), 1e3 * per_joule, per_joule * _rate(metered), _ranks(method, compute))


def _tflop(rows: Iterable[Row]) -> float:
    return sum(_flops(_problem(row)) for row in rows) / 1e12


def _rate(rows: Sequence[Row]) -> float:
    seconds = sum(row["median_s"] for row in rows)
    return _tflop(rows) / seconds if seconds else 0.0


def summary_text(rows: Sequence[Row], methods: Sequence[str]) -> str:
    """Return the summary as text: a table of each problem beside the floor, totals, speedups of the first method."""
    most = largest_small(rows)
    parts = {
        **{half: [row for row in rows if _half(row, most) == half] for half in ("small", "large")},
        "all": list(rows),
    }
    halves = f"; small: problems of up to {_flops_text(most)}, half of them" if parts["large"] else ""
    lines = [f"All operations over all times and joules{halves}.", *_totals_table(rows, methods, parts)]
    first, *others = methods
    for other in others:
        lines += _comparison(rows, first, other) if other != FLOOR else []
    libraries = [method for method in methods if method in BASELINES and method != FLOOR]
    if first not in BASELINES and len(libraries) > 1:
        counts = sorted({row["compute"] for row in rows if row["method"] == first})
        together = [row for count in counts for row in best_of(rows, libraries, count)]
        lines += _comparison([row for row in rows if row["method"] == first] + together, first, BEST)
    if any(method.startswith("parsec") for method in methods):
        lines += _rates_per_rank(rows, methods)
    failed = [row for row in rows if row["passed"] is False]
    left_out = [row for row in rows if row["median_s"] is None]
    unchecked = [
        row for row in rows if row["passed"] is None and row["median_s"] is not None and row["method"] != FLOOR
    ]
    counts_of = f"{len(failed)} of them wrong, {len(unchecked)} not verified, {len(left_out)} left out"
    lines += ["", f"{counted(len(rows), 'result')}, {counts_of}"]
    lines += [f"  wrong: {_name(row)}, error {row['error']:.3g} above {row['tolerance']:.3g}" for row in failed]
    beside = _beside_floor(rows, methods) if FLOOR in methods else []
    return "\n".join([*beside, *lines, *_left_out(left_out)]) + "\n"


def _beside_floor(rows: Sequence[Row], methods: Sequence[str]) -> list[str]:
    """
    Return a table of every problem: what each method takes, and how many times the floor that is.

    Each number of ranks that computed has a table. Its last line says what each method takes where its matrices lie as
    it likes best.
    """
    others = [method for method in methods if method != FLOOR]
    done = [row for row in rows if row["median_s"] is not None]
    width = max([24, *(len(str(row["place"])) for row in done)])
    lines: list[str] = []
    for problem in dict.fromkeys(_problem(row)[:4] for row in done):
        alike = [row for row in done if _problem(row)[:4] == problem]
        for count in sorted({row["compute"] for row in alike if row["method"] not in SINGLE}) or [1]:
            m, n, k, dtype = problem
            head = f"{dtype} {m}×{n}×{k}, {counted(count, 'rank')}"
            lines.append(f"{head:{width}} {'floor, ms':>10}" + "".join(f" {name:>18}" for name in others))
            best: dict[str, tuple[float, str]] = {}
            for place in dict.fromkeys(row["place"] for row in alike):
                found = {
                    row["method"]: row
                    for row in alike
                    if row["place"] == place and row["compute"] == _ranks(row["method"], count)
                }
                floor_s = found[FLOOR]["median_s"] if FLOOR in found else None
                cells = {name: (row["median_s"], _cell(row, floor_s)) for name, row in found.items()}
                best |= {name: min(cell, best.get(name, cell)) for name, cell in cells.items()}
                lines.append(
                    _line(place, width, floor_s, [cells[name][1] if name in cells else "-" for name in others])
                )
            lines += [_line("best", width, None, [best[name][1] if name in best else "-" for name in others]), ""]
    note = [f"In brackets: how many times the floor. * {MOVED}where the library takes them, and back. ! wrong", ""]
    return lines + note if lines else []


def _line(name: str, width: int, floor_s: float | None, cells: Sequence[str]) -> str:
    floor = "" if floor_s is None else f"{1e3 * floor_s:.4g}"
    return (f"{name:{width}} {floor:>10}" + "".join(f" {cell:>18}" for cell in cells)).rstrip()


def _cell(row: Row, floor_s: float | None) -> str:
    ratio = f" ({row['median_s'] / floor_s:.2f})" if floor_s else ""
    mark = "*" if str(row.get("how", "")).startswith(MOVED) else " "
    return f"{1e3 * row['median_s']:.4g}{ratio}{'!' if row['passed'] is False else mark}"


def _rates_per_rank(rows: Sequence[Row], methods: Sequence[str]) -> list[str]:
    """Return a table of every problem as PaRSEC's paper has it: the mean of each method's calls, and their spread."""
    done = [row for row in rows if row.get("samples_s")]
    rates = {id(row): [_flops(_problem(row)) / one / row["compute"] / 1e9 for one in row["samples_s"]] for row in done}
    unit, factor = ("TFLOP/s", 1e-3) if max(map(max, rates.values()), default=0.0) > 1e3 else ("GFLOP/s", 1.0)
    problems = dict.fromkeys((*_problem(row)[:5], row["compute"]) for row in done)
    names = {key: f"{key[3]} {key[0]}×{key[1]}×{key[2]} {key[4]}, {counted(key[5], 'rank')}" for key in problems}
    width = max([24, *map(len, names.values())])
    columns = [method for method in methods if any(row["method"] == method for row in done)]
    lines = ["", f"{unit} of each rank: mean and standard deviation of its calls"]
    lines.append(f"{'':{width}}" + "".join(f" {name:>18}" for name in columns))
    for key, name in names.items():
        found = {row["method"]: rates[id(row)] for row in done if (*_problem(row)[:5], row["compute"]) == key}
        cells = [
            f"{factor * statistics.mean(of):.4g} ± {factor * statistics.pstdev(of):.2g}"
            if (of := found.get(one))
            else "-"
            for one in columns
        ]
        lines.append(f"{name:{width}}" + "".join(f" {cell:>18}" for cell in cells))
    return lines if problems else []


def _left_out(rows: Sequence[Row]) -> list[str]:
    """Return a line for each method and reason, however many problems: a library that is missing has one."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["method"], row["reason"]), []).append(row)
    return [
        f"  left out: {_name(group[0]) if len(group) == 1 else f'{method}, {len(group)} problems'}: {reason}"
        for (method, reason), group in groups.items()
    ]


def _flops_text(flops: float) -> str:
    power, unit = next((one for one in _FLOPS if flops >= one[0]), _FLOPS[-1])
    return f"{flops / power:.4g} {unit}"


def _totals_table(rows: Sequence[Row], methods: Sequence[str], parts: Mapping[str, Sequence[Row]]) -> list[str]:
    """Return the table of all methods and numbers of ranks; energies have columns where any is known."""
    found = {
        (method, count): [totals(part, method, count) for part in parts.values()]
        for method in methods
        for count in sorted({row["compute"] for row in rows})
    }
    found = {key: of_parts for key, of_parts in found.items() if of_parts[-1].problems}
    # What a host computes is some GFLOP/s.
    slow = max((of_parts[-1].tflop_per_s for of_parts in found.values()), default=1.0) < 1
    unit, factor = ("GFLOP/s", 1e3) if slow else ("TFLOP/s", 1.0)
    columns: dict[str, Callable[[Totals], float]] = {
        "problems": lambda one: one.problems,
        unit: lambda one: factor * one.tflop_per_s,
    }
    if max((count for _, count in found), default=1) > 1:  # as PaRSEC's paper has it
        columns[f"{unit} per rank"] = lambda one: factor * one.tflop_per_s / one.ranks
    if any(of_parts[-1].gflop_per_j for of_parts in found.values()):
        columns["GFLOP/s per W"] = lambda one: one.gflop_per_j
        columns[f"EDP_i, ({unit})²/W"] = lambda one: factor**2 * one.edp_i
    width = max(10, *map(len, methods))
    lines = [
        f"{'':{width + 6}}" + "".join(f"  {name:<25}" for name in columns).rstrip(),
        f"{'method':{width}}  ranks" + "".join(f" {name:>8}" for name in parts) * len(columns),
    ]
    for (method, count), of_parts in found.items():
        numbers = [value(one) for value in columns.values() for one in of_parts]
        cells = "".join(f" {number:8.4g}" if number else f" {'-':>8}" for number in numbers)
        lines.append(f"{method:{width}} {count:6}{cells}")
    return lines


def _comparison(rows: Sequence[Row], first: str, other: str) -> list[str]:
    """Return a table of speedups for every number of ranks that computed."""
    counts = sorted({row["compute"] for row in rows if row["method"] not in SINGLE}) or [1]
    lines = []
    for count in counts:
        done = [{_problem(row) for row in rows if _counts(row, name, _ranks(name, count))} for name in (first, other)]
        both = [row for row in rows if row["median_s"] is not None and _problem(row) in done[0] & done[1]]
        of_all = speedup(both, first, other, count)
        if of_all is None:
            continue
        table = [_speedup_line("all", of_all)]
        most = largest_small(both)
        groupings: dict[str, Callable[[Row], str]] = {**GROUPINGS, "size": functools.partial(_half, most=most)}
        for name, key in groupings.items():
            groups = sorted({key(row) for row in both})
            for group in groups if len(groups) > 1 else ():
                found = speedup([row for row in both if key(row) == group], first, other, count)
                if found is not None:
                    table.append(_speedup_line(f"{name}: {group}", found))
        what, energies = "time", ""
        if of_all.energy is not None:
            what, energies = "time, energy, EDP", "  energy     EDP"
        lines += ["", f"{first} against {other}, on {counted(count, 'rank')}: {what} of {other} / of {first}"]
        lines += [f"{'':24} problems    mean   least    most  slower{energies}", *table]
    return lines


def _speedup_line(name: str, found: Speedup) -> str:
    energies = [] if found.energy is None or found.edp is None else [found.energy, found.edp]
    times = f"{found.mean:7.3f} {found.least:7.3f} {found.most:7.3f} {found.slower:7}"
    return f"{name:24} {found.problems:8} {times}" + "".join(f" {ratio:7.3f}" for ratio in energies)


def _ranks(method: str, compute: int) -> int:
    return 1 if method in SINGLE else compute


def _counts(row: Row, method: str, compute: int) -> bool:
    return row["method"] == method and row["compute"] == compute and row["median_s"] is not None


def _problem(row: Row) -> _Problem:
    return (row["m"], row["n"], row["k"], row["dtype"], row["place"])


def _name(row: Row) -> str:
    problem = f"{row['dtype']} {row['m']}×{row['n']}×{row['k']} at {row['place']}"
    return f"{problem}, {row['method']} on {counted(row['compute'], 'rank')}"
