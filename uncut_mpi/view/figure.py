"""Figures with matplotlib, which is imported when one is drawn and not before; no display is needed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from uncut_mpi.errors import ParamError, reason
from uncut_mpi.view.parts import title_of
from uncut_mpi.view.timeline import Activity, Timeline

COLOURS: Final = {
    Activity.GEMM: "#3b6ea5",
    Activity.COMBINE: "#7d5ba6",
    Activity.HOST_IN: "#e08a2e",
    Activity.HOST_OUT: "#c0392b",
    Activity.PEER: "#4f9d69",
    Activity.LOCAL: "#9aa5b1",
    Activity.NET: "#c9a227",
}
"""Of what tasks do, in figures and on pages."""

_DOTS_PER_INCH: Final = 120
_WIDTH_INCHES: Final = 14.0
_LANE_INCHES: Final = 0.19
_POINTS: Final = 8.0  # of the smallest letters
_MOST_INCHES: Final = 200.0  # of height; beyond it a canvas would not be drawn


def import_figure(otherwise: str = "") -> Any:
    """
    Return matplotlib's class of figures; an error advises what else to do, besides to install it.

    Raises
    ------
    ParamError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ParamError(
            f"a PNG needs matplotlib, which cannot be imported ({reason(error)}): pip install matplotlib{otherwise}"
        ) from None
    return Figure


def draw_timelines(timelines: Sequence[Timeline]) -> bytes:
    """
    Return timelines as one PNG, one above the other, to one scale of time.

    Lanes are rows, grouped by rank; a rank's share of time without computing stands at its right. The title is that
    of the first timeline's problem.
    """
    rows = [timeline.used_lanes for timeline in timelines]
    heights = [max(2, len(lanes)) * _LANE_INCHES for lanes in rows]
    height = min(_MOST_INCHES, sum(heights) + 0.8 * len(timelines) + 1.2)
    figure = import_figure()(figsize=(_WIDTH_INCHES, height), dpi=_DOTS_PER_INCH, layout="constrained")
    axes = figure.subplots(len(timelines), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for axis, timeline, lanes in zip(axes, timelines, rows, strict=True):
        _draw(axis, timeline, lanes)
    figure.suptitle(title_of(timelines[0].schedule, timelines[0].machine), fontsize="large")
    axes[-1].set_xlabel(
        "ms from the start of the call.  idle: the share of the time in which a device runs no product and no sum\n"
        "Where products and sums of a device overlap, those that begin later have what the others leave of it."
    )
    axes[-1].set_xlim(0.0, max(max(timeline.seconds for timeline in timelines) * 1e3, 1e-6))
    seen = sorted({int(activity) for timeline in timelines for activity in np.unique(timeline.activity)})
    if seen:
        from matplotlib.patches import Patch

        handles = [Patch(color=COLOURS[Activity(one)], label=Activity(one).label) for one in seen]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(seen), fontsize="medium", frameon=False)
    return to_png(figure)


def to_png(figure: Any) -> bytes:
    """Return a figure as PNG, the same bytes for the same figure."""
    target = io.BytesIO()
    figure.savefig(target, format="png", metadata={"Software": None})
    return target.getvalue()


def _draw(axis: Any, timeline: Timeline, lanes: Sequence[int]) -> None:
    axis.set_title(f"{timeline.name}, {timeline.seconds * 1e3:.4g} ms", loc="left", fontsize="medium")
    start, length = timeline.start_s * 1e3, (timeline.end_s - timeline.start_s) * 1e3
    for row, lane in enumerate(lanes):
        for activity in Activity:
            which = (timeline.lane == lane) & (timeline.activity == activity)
            if which.any():
                spans = np.column_stack((start[which], length[which]))
                axis.broken_barh(
                    spans, (row + 0.1, 0.8), facecolors=COLOURS[activity], edgecolor="white", linewidth=0.2
                )
    axis.set_ylim(max(1, len(lanes)), 0)
    axis.set_yticks([row + 0.5 for row in range(len(lanes))])
    axis.set_yticklabels(
        [f"rank {timeline.lanes[lane].rank} {timeline.lanes[lane].name}" for lane in lanes], fontsize=_POINTS
    )
    axis.tick_params(axis="y", length=0)
    idle = timeline.idle_share
    ranks = [timeline.lanes[lane].rank for lane in lanes]
    for rank in sorted(set(ranks)):
        first, count = ranks.index(rank), ranks.count(rank)
        if first:
            axis.axhline(first, color="black", linewidth=0.6)
        text = f"device {rank} idle {idle[rank]:.1%}".replace("%", " %")
        place = axis.get_yaxis_transform()
        axis.text(1.005, first + count / 2, text, transform=place, fontsize=_POINTS, va="center")
