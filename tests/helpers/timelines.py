"""Times for schedules that nobody ran, and the rules of the trace format."""

from __future__ import annotations

import collections
import itertools
from typing import Any

import numpy as np

from uncut_mpi.planning.schedule import Kind, Schedule


def invented_times(schedule: Schedule, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every task, of random lengths, that keep lanes and awaits in order."""
    rng = np.random.default_rng(seed)
    count = len(schedule.tasks)
    start, end = np.zeros(count), np.zeros(count)
    lane_end: dict[int, float] = collections.defaultdict(float)
    for task, record in enumerate(schedule.tasks):
        lane = int(record["lane"])
        start[task] = max([lane_end[lane], *end[schedule.awaited(task)]])
        length = 0.0 if record["kind"] == Kind.JOIN else rng.uniform(1e-4, 1e-3)
        end[task] = lane_end[lane] = start[task] + length
    return start, end


def check_trace(trace: dict[str, Any]) -> None:
    """
    Check the rules of the Trace Event Format as Perfetto reads it.

    Every event has its phase's fields with their types; threads and processes have names; complete events of a
    thread do not overlap; both ends of a flow lie inside an event of their thread, the start first.
    """
    assert isinstance(trace["traceEvents"], list)
    assert trace.get("displayTimeUnit") in ("ms", "ns")
    named: dict[str, set[tuple[int, int]]] = {"process_name": set(), "thread_name": set()}
    slices: dict[tuple[int, int], list[tuple[float, float]]] = collections.defaultdict(list)
    flows: dict[int, dict[str, dict[str, Any]]] = collections.defaultdict(dict)
    for event in trace["traceEvents"]:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            if event["name"] in named:
                assert event["args"]["name"]
                named[event["name"]].add((event["pid"], event["tid"]))
            else:
                assert event["name"] in ("process_sort_index", "thread_sort_index")
                assert isinstance(event["args"]["sort_index"], int)
            continue
        assert isinstance(event["ts"], int | float)
        assert event["ts"] >= 0
        place = (event["pid"], event["tid"])
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert event["name"]
            slices[place].append((event["ts"], event["ts"] + event["dur"]))
        else:
            assert event["ph"] in ("s", "f")
            assert event["ph"] not in flows[event["id"]], "two flows share an id"
            assert event["cat"]
            assert (event.get("bp") == "e") == (event["ph"] == "f")
            flows[event["id"]][event["ph"]] = event
    for place, spans in slices.items():
        assert place in named["thread_name"]
        assert place[0] in {process for process, _ in named["process_name"]}
        spans.sort()
        for (_, end), (start, _) in itertools.pairwise(spans):
            assert start >= end - 1e-6, "tasks of one lane overlap"
    for pair in flows.values():
        assert set(pair) == {"s", "f"}
        assert pair["s"]["ts"] <= pair["f"]["ts"]
        for event in pair.values():
            spans = slices[event["pid"], event["tid"]]
            assert any(start <= event["ts"] <= end for start, end in spans), "an arrow ends outside of any task"
