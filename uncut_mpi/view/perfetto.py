"""
A timeline as a trace file for https://ui.perfetto.dev (and chrome://tracing): the Trace Event Format, JSON.

Processes are ranks, threads are lanes, and tasks are complete events ("X") in microseconds. An arrow (a pair of flow
events, "s" and "f") leads from a task to one on another lane that awaits it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from uncut_mpi.view.parts import title_of
from uncut_mpi.view.timeline import Activity, Timeline


def to_perfetto(timelines: Sequence[Timeline]) -> str:
    """
    Return timelines as one trace, ending in a newline.

    Parameters
    ----------
    timelines : sequence of Timeline
        Each has processes of its own, which follow those of the one before.
    """
    events: list[dict[str, Any]] = []
    first_process = first_flow = 0
    for timeline in timelines:
        name = f" {timeline.name}" if len(timelines) > 1 else ""
        events += _names(timeline, first_process, name)
        events += _tasks(timeline, first_process)
        events += _flows(timeline, first_process, first_flow)
        first_process += timeline.num_ranks
        first_flow += len(timeline.awaits)
    about: dict[str, Any] = {"timelines": [timeline.name for timeline in timelines]}
    if timelines:
        about["title"] = title_of(timelines[0].schedule, timelines[0].machine)
    trace = {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}
    return json.dumps(trace, separators=(",", ":"), allow_nan=False) + "\n"


def _names(timeline: Timeline, first: int, name: str) -> Iterator[dict[str, Any]]:
    for rank in range(timeline.num_ranks):
        process = {"ph": "M", "pid": first + rank, "tid": 0}
        yield {**process, "name": "process_name", "args": {"name": f"rank {rank}{name}"}}
        yield {**process, "name": "process_sort_index", "args": {"sort_index": first + rank}}
    for number, lane in enumerate(timeline.lanes):
        thread = {"ph": "M", "pid": first + lane.rank, "tid": number + 1}
        yield {**thread, "name": "thread_name", "args": {"name": lane.name}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": number}}


def _tasks(timeline: Timeline, first: int) -> Iterator[dict[str, Any]]:
    start, end = (times.tolist() for times in timeline.nanoseconds)
    for row in np.argsort(start, kind="stable").tolist():
        about: dict[str, Any] = {"task": int(timeline.task[row])}
        if timeline.group[row] >= 0:
            about["group"] = int(timeline.group[row])
        if timeline.nbytes[row]:
            about["bytes"] = int(timeline.nbytes[row])
        yield {
            "ph": "X",
            "name": timeline.labels[row],
            "cat": Activity(timeline.activity[row]).label,
            "pid": first + int(timeline.rank[row]),
            "tid": int(timeline.lane[row]) + 1,
            "ts": start[row] / 1e3,
            "dur": (end[row] - start[row]) / 1e3,
            "args": about,
        }


def _flows(timeline: Timeline, first: int, first_flow: int) -> Iterator[dict[str, Any]]:
    # An end of an arrow belongs to the event of its thread in which its time lies, so it must lie inside.
    start, end = (times.tolist() for times in timeline.nanoseconds)
    for number, (awaited, waiting) in enumerate(timeline.awaits.tolist()):
        leaves = max(start[awaited], end[awaited] - 1)
        arrives = max(start[waiting], leaves)
        if arrives > max(start[waiting], end[waiting] - 1):
            continue  # clocks of two devices that disagree by more than the task's length
        for way, row, at in (("s", awaited, leaves), ("f", waiting, arrives)):
            yield {
                "ph": way,
                "id": first_flow + number,
                "name": "await",
                "cat": "await",
                "pid": first + int(timeline.rank[row]),
                "tid": int(timeline.lane[row]) + 1,
                "ts": at / 1e3,
                **({"bp": "e"} if way == "f" else {}),
            }
