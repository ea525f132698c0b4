"""A timeline as lines of text."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from typing import Final

import numpy as np

from uncut_mpi.view.timeline import Activity, Timeline

_LEVELS: Final = " ▁▂▃▄▅▆▇█"
_ROWS: Final = (
    ("compute", (Activity.GEMM, Activity.COMBINE)),
    ("from host", (Activity.HOST_IN,)),
    ("to host", (Activity.HOST_OUT,)),
    ("copies", (Activity.PEER, Activity.LOCAL)),
    ("net", (Activity.NET,)),
)
_LEAST_CELLS: Final = 10


def to_text(timelines: Sequence[Timeline], width: int | None = None) -> str:
    """
    Return timelines as text, one line per rank and kind of lane, all to one scale of time.

    Parameters
    ----------
    timelines : sequence of Timeline
        Shown one below the other.
    width : int, optional
        Columns to fill; those of the terminal by default.

    Returns
    -------
    str
        Ends in a newline. The height of a column says how much of its time the lanes are busy. The share of the whole
        follows, and on a rank's first line the share in which its device computes nothing.
    """
    width = shutil.get_terminal_size().columns if width is None else width
    total = max((timeline.seconds for timeline in timelines), default=0.0)
    return "".join(_one(timeline, total, width) for timeline in timelines)


def _one(timeline: Timeline, total: float, width: int) -> str:
    head = f"rank {timeline.num_ranks - 1} "
    names = max(len(name) for name, _ in _ROWS)
    tail = " 100.0 %, idle 100.0 %"
    cells = max(_LEAST_CELLS, width - len(head) - names - 2 - len(tail))
    edges = np.linspace(0.0, total, cells + 1)
    scale = f"{timeline.name}, {_milliseconds(timeline.seconds)}, {_milliseconds(total / cells)} a column"
    lines = [f"{scale}; idle: the device runs nothing"]
    idle = timeline.idle_share
    for rank, rows in enumerate(timeline.rows_of_rank):
        for name, activities in _ROWS:
            which = rows[np.isin(timeline.activity[rows], activities)]
            if name != "compute" and not len(which):
                continue
            first = name == "compute"
            share = timeline.covered_s(which) / timeline.seconds if timeline.seconds > 0 else 0.0
            lines.append(
                f"{f'rank {rank}' if first else '':<{len(head)}}{name:<{names}}"
                f" {_bar(timeline, which, edges)} {share:6.1%}".replace("%", " %")
                + (f", idle {idle[rank]:.1%}".replace("%", " %") if first else "")
            )
    return "\n".join(lines) + "\n"


def _bar(timeline: Timeline, which: np.ndarray, edges: np.ndarray) -> str:
    if edges[-1] <= 0:
        return " " * (len(edges) - 1)
    times, busy = timeline.coverage(which)
    shares = np.diff(np.interp(edges, times, busy)) / np.diff(edges)
    # Whatever is busy at all shows.
    return "".join(_LEVELS[min(8, math.ceil(8 * share - 1e-9))] for share in shares)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.4g} ms"
