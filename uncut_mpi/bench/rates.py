"""Rates of several methods over the problems of a benchmark."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

from uncut_mpi.bench.datasets import SHAPES
from uncut_mpi.bench.summary import Row, case_of
from uncut_mpi.view.figure import import_figure, to_png

_LINES: Final = ("-", "--", "-.", ":")
_FILLS: Final = ("full", "none", "left", "right")
"""Of lines and of their markers, by number of ranks; methods have colours."""

_LEGEND_COLUMNS: Final = 4

_MARKERS: Final = dict(zip(SHAPES, "os^", strict=True))
_SHAPE_WORDS: Final = dict(
    zip(SHAPES, ("m = n = k", "k below the larger of m and n", "k at least the larger of m and n"), strict=True)
)


def draw_rates(rows: Sequence[Row], methods: Sequence[str]) -> bytes:
    """
    Return a PNG of the rate of every method: one panel per type and placement, problems by their operations.

    Lines join problems of one shape, whose extents have the same proportions. Colours tell methods, markers the kinds
    of shape, lines and the fill of markers the numbers of ranks.

    Parameters
    ----------
    rows : sequence of mapping
        Results with ``m``, ``n``, ``k``, ``dtype``, ``place``, ``method``, ``compute`` and ``tflop_per_s``; those
        whose ``median_s`` is None are left out. The title has ``device``, ``ranks``, ``backend``, ``version`` and
        ``date`` where they are known.
    methods : sequence of str
        Those to draw, in the order of the legend.

    Raises
    ------
    ParamError
        If matplotlib is not installed.
    """
    done = [row for row in rows if row["median_s"] is not None and row["method"] in methods]
    panels = list(dict.fromkeys((row["dtype"], row["place"]) for row in done)) or [("", "")]
    columns = min(3, len(panels))
    lines = -(-len(panels) // columns)
    figure = import_figure()(figsize=(max(7.0, 4.6 * columns), 3.2 * lines + 0.6), dpi=120, layout="constrained")
    from matplotlib.ticker import EngFormatter

    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    series = list(dict.fromkeys((row["method"], row["compute"]) for row in done))
    series.sort(key=lambda one: (list(methods).index(one[0]), one[1]))
    counts = sorted({compute for _, compute in series})
    styles = {
        (method, compute): {
            "ms": 5,
            "lw": 1,
            "color": f"C{list(methods).index(method)}",
            "linestyle": _LINES[counts.index(compute) % len(_LINES)],
            "fillstyle": _FILLS[counts.index(compute) % len(_FILLS)],
        }
        for method, compute in series
    }
    most = max((row["tflop_per_s"] for row in done), default=1.0)
    unit, factor = ("TFLOP/s", 1.0) if most >= 1 else ("GFLOP/s", 1e3)  # a host's are some of the latter
    for axis, (dtype, place) in zip(axes, panels, strict=False):
        for method, compute in series:
            of_method = [
                row
                for row in done
                if (row["dtype"], row["place"], row["method"], row["compute"]) == (dtype, place, method, compute)
            ]
            for family in _families(of_method):
                points = sorted((2.0 * row["m"] * row["n"] * row["k"], factor * row["tflop_per_s"]) for row in family)
                axis.plot(
                    *zip(*points, strict=True), marker=_MARKERS[case_of(family[0]).shape], **styles[method, compute]
                )
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter(EngFormatter(unit="FLOP"))
        axis.xaxis.set_minor_formatter("")
        rates = [factor * row["tflop_per_s"] for row in done if (row["dtype"], row["place"]) == (dtype, place)]
        axis.set_ylim(0, 1.08 * max(rates, default=0.0) or 1.0)
        axis.set_title(f"{dtype}, A, B, C at {place}", fontsize="medium")
        axis.set_xlabel("operations, 2mnk")
        axis.set_ylabel(f"rate, {unit}")
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    figure.suptitle(_title(done), fontsize="large")
    if done:
        _add_legend(figure, styles, [shape for shape in SHAPES if shape in {case_of(row).shape for row in done}])
    return to_png(figure)


def _families(rows: Sequence[Row]) -> list[list[Row]]:
    """Return problems in groups of the same proportions; scaled extents that were rounded count as the same."""
    families: dict[tuple[float, ...], list[Row]] = {}
    for row in rows:
        k = max(1, row["k"])
        proportions = tuple(round(math.log2(max(1, row[name]) / k), 1) for name in "mn")
        families.setdefault(proportions, []).append(row)
    return list(families.values())


def _title(rows: Sequence[Row]) -> str:
    """Return what was measured, on what, with which version and when; of several, all are named."""
    title = "Rate of C := alpha op(A) op(B) + beta C, median of the calls of each problem"

    def named(key: str) -> str:
        return ", ".join(dict.fromkeys(str(row[key]) for row in rows if row.get(key)))

    device, ranks, backend, version = (named(key) for key in ("device", "ranks", "backend", "version"))
    days = sorted({str(row["date"])[:10] for row in rows if row.get("date")})
    hardware = " × ".join(part for part in (ranks, device) if part) + (f" ({backend})" if backend else "")
    about = [hardware, f"uncut_mpi {version}" if version else "", " to ".join(dict.fromkeys((*days[:1], *days[-1:])))]
    known = [part for part in about if part]
    return f"{title}\n{'; '.join(known)}" if known else title


def _add_legend(figure: Any, styles: Mapping[tuple[str, int], Mapping[str, Any]], shapes: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    handles = [
        Line2D([], [], marker="o", label=f"{method}, {compute} rank{'s' if compute > 1 else ''}", **style)
        for (method, compute), style in styles.items()
    ]
    handles += [
        Line2D([], [], marker=_MARKERS[shape], color="grey", linestyle="", label=f"{shape}: {_SHAPE_WORDS[shape]}")
        for shape in shapes
    ]
    # As many columns as the figure is wide for, below the panels, which keep their height.
    for columns in range(_LEGEND_COLUMNS, 0, -1):
        legend = figure.legend(handles=handles, loc="outside lower center", ncols=columns, frameon=False)
        box = legend.get_window_extent()
        if box.width <= figure.bbox.width or columns == 1:
            break
        legend.remove()
    figure.set_figheight(figure.get_figheight() + box.height / figure.dpi)
