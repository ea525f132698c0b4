"""Rates of several methods over the problems of a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from uncut_mpi.view.figure import import_figure, to_png

_LINES: Final = ("-", "--", "-.", ":")
"""By number of ranks; methods have colours."""


def draw_rates(rows: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> bytes:
    """
    Return a PNG of the rate of every method: one panel per type and placement, problems by their operations.

    Parameters
    ----------
    rows : sequence of mapping
        Results with ``m``, ``n``, ``k``, ``dtype``, ``place``, ``method``, ``compute`` and ``tflop_per_s``; those
        whose ``median_s`` is None are left out.
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
    figure = import_figure()(figsize=(4.6 * columns, 3.2 * lines + 0.5), dpi=120, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).ravel()
    series = list(dict.fromkeys((row["method"], row["compute"]) for row in done))
    series.sort(key=lambda one: (list(methods).index(one[0]), one[1]))
    counts = sorted({compute for _, compute in series})
    for axis, (dtype, place) in zip(axes, panels, strict=False):
        for method, compute in series:
            points = sorted(
                (2e-9 * row["m"] * row["n"] * row["k"], row["tflop_per_s"])
                for row in done
                if (row["dtype"], row["place"], row["method"], row["compute"]) == (dtype, place, method, compute)
            )
            if points:
                ranks = f"{compute} rank{'s' if compute > 1 else ''}"
                axis.plot(
                    *zip(*points, strict=True),
                    ms=3,
                    lw=1,
                    marker="o",
                    color=f"C{list(methods).index(method)}",
                    linestyle=_LINES[counts.index(compute) % len(_LINES)],
                    label=f"{method}, {ranks}",
                )
        axis.set_xscale("log")
        axis.xaxis.set_major_formatter("{x:g}")
        axis.xaxis.set_minor_formatter("")
        axis.set_ylim(bottom=0)
        axis.set_title(f"{dtype}, A, B, C at {place}", fontsize="medium")
        axis.set_xlabel("operations, 1e9")
        axis.set_ylabel("TFLOP/s")
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    if handles:
        figure.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=4, frameon=False)
    return to_png(figure)
