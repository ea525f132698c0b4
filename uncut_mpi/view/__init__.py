"""Pictures of a schedule's run, simulated or real: text, PNG, Perfetto traces, tables of transfers."""

from __future__ import annotations

from uncut_mpi.view.heatmap import draw_transfers
from uncut_mpi.view.perfetto import to_perfetto
from uncut_mpi.view.render import check_drawable, render
from uncut_mpi.view.text import to_text
from uncut_mpi.view.timeline import Activity, Timeline
from uncut_mpi.view.traffic import Traffic, traffic

__all__ = [
    "Activity",
    "Timeline",
    "Traffic",
    "check_drawable",
    "draw_transfers",
    "render",
    "to_perfetto",
    "to_text",
    "traffic",
]
