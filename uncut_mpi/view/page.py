"""Timelines as one page of HTML, which needs nothing else: ``page.html`` with their data in it, a list per column."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib import resources
from typing import Any, TypeAlias

import numpy as np

from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import ITEMSIZES
from uncut_mpi.model.locations import end_name
from uncut_mpi.planning.candidates import flops_of_tasks
from uncut_mpi.planning.schedule import Kind, Schedule
from uncut_mpi.view.figure import COLOURS
from uncut_mpi.view.parts import make_labels, title_of
from uncut_mpi.view.timeline import Activity, Timeline

_Chart: TypeAlias = tuple[str, float, list[tuple[int, float]]]
"""What transfers share: its name, GB/s, and with which weight each link counts."""


def to_page(timelines: Sequence[Timeline]) -> str:
    """
    Return timelines of one schedule as a page, in which the times of a task stand beside each other.

    Parameters
    ----------
    timelines : sequence of Timeline
        One, or what was expected and what was measured. Those whose machine is known have the load of links.

    Raises
    ------
    ParamError
        If they are of different schedules.
    """
    first = timelines[0]
    if any(one.schedule is not first.schedule for one in timelines):
        raise ParamError("a page shows timelines of one schedule: write one for each, or a trace (.json) of all")
    # In JSON "<" stands in texts alone, and none may end the element that the data are in.
    data = json.dumps(_data(timelines), separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return (resources.files("uncut_mpi.view") / "page.html").read_text(encoding="utf-8").replace(">DATA<", f">{data}<")


def _data(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """Return what the page shows; times are whole nanoseconds, and a length of −1 says that a task has none."""
    first, schedule = timelines[0], timelines[0].schedule
    task, at = np.unique(np.concatenate([one.task for one in timelines]), return_index=True)
    lane, kind = (np.concatenate([getattr(one, name) for one in timelines])[at] for name in ("lane", "activity"))
    lanes = sorted({number for one in timelines for number in one.used_lanes}, key=first.lane_order)
    row = np.zeros(len(first.lanes), np.int64)
    row[lanes] = np.arange(len(lanes))
    charts, link = _links(first)
    labels = make_labels(schedule)
    return {
        "title": title_of(schedule, first.machine),
        "names": [one.name for one in timelines],
        "kinds": [[one.label, COLOURS[one]] for one in Activity],
        "lanes": [[first.lanes[one].rank, first.lanes[one].name] for one in lanes],
        "charts": charts,
        "labels": [labels[one] for one in task.tolist()],
        "tasks": {
            "task": task.tolist(),
            "lane": row[lane].tolist(),
            "kind": kind.tolist(),
            "link": link[task].tolist(),
            "amount": _amounts(schedule)[task].tolist(),
        },
        "times": [_times(one, task) for one in timelines],
    }


def _links(timeline: Timeline) -> tuple[list[_Chart], np.ndarray]:
    """Return charts of ports and links that are used, the busiest first, and of each task its link, −1 for none."""
    schedule, machine = timeline.schedule, timeline.machine
    of_task = np.full(len(schedule.tasks), -1)
    if machine is None:
        return [], of_task
    copies = schedule.copies()
    copies = copies[copies[:, 1] != copies[:, 2]]
    ends, link = np.unique(copies[:, 1:3], axis=0, return_inverse=True)
    of_task[copies[:, 0]] = link = link.reshape(-1)  # numpy 2.0 has one column
    moved = np.bincount(link, copies[:, 3], len(ends))
    number = {(source, destination): at for at, (source, destination) in enumerate(ends.tolist())}
    names = ("->".join(end_name(schedule.locations, end) for end in pair) for pair in number)
    rates = machine.bandwidth_gb_per_s[tuple(ends.T)].tolist()
    links: list[_Chart] = [(name, rate, [(at, 1.0)]) for at, (name, rate) in enumerate(zip(names, rates, strict=True))]
    ports: list[_Chart] = []
    for port in machine.ports:
        uses = [(number[pair], weight) for pair, weight in zip(port.links, port.weights, strict=True) if pair in number]
        if uses:
            ports.append((f"port {port.name}", port.expected_gb_per_s, uses))

    def busy(chart: _Chart) -> float:
        return float(sum(moved[at] * weight for at, weight in chart[2])) / chart[1]

    return [one for of in (ports, links) for one in sorted(of, key=busy, reverse=True)], of_task


def _amounts(schedule: Schedule) -> np.ndarray:
    """Return the operations of products, and of other tasks the bytes: of a sum all that it reads and writes."""
    region = schedule.regions[schedule.operands["region"]]
    sizes = region["rows"].astype(np.int64) * region["cols"] * ITEMSIZES[schedule.buffers["dtype"][region["buffer"]]]
    upto = np.concatenate(([0], np.cumsum(sizes)))
    begin, count = (schedule.tasks[name].astype(np.int64) for name in ("first_operand", "num_operands"))
    once = np.isin(schedule.tasks["kind"], (Kind.COPY, Kind.SEND, Kind.RECV))  # both operands are the same bytes
    amounts: np.ndarray = upto[begin + np.where(once, 1, count)] - upto[begin]
    products, flops = flops_of_tasks(schedule)
    amounts[products] = flops
    return amounts


def _times(timeline: Timeline, task: np.ndarray) -> dict[str, list[int]]:
    start, length = np.zeros(len(task), np.int64), np.full(len(task), -1)
    at = np.searchsorted(task, timeline.task)
    start[at], end = timeline.nanoseconds
    length[at] = end - start[at]
    return {"start": start.tolist(), "length": length.tolist()}
