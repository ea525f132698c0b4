"""
What products on more and more nodes are expected to take, each with as much work and memory as on one.

Usage: python tests/perf/weak_scaling.py OUT.json PICTURE.png [NODES]

A, B and C lie in blocks on the devices, f64, dealt to the grid of nodes nearest to a square, where the ranks of a node
stand in a row. Lines are whole schedules of all ranks, up to NODES (default 128) nodes; schedules in which each node is
one device with the rates of all its own; and the bound.
"""

from __future__ import annotations

import json
import math
import pathlib
import resource
import sys
import time
from typing import Any, Final

import numpy as np

from uncut_mpi.model.bounds import bound, least_bytes_of_a_node
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.places import Dealt, Places
from uncut_mpi.model.ports import Net
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.crossing import cross
from uncut_mpi.planning.options import ScheduleOptions
from uncut_mpi.planning.schedulers import make_schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import simulate

# Nets as the machines' provenance has them, the edge of a product on one node, the most nodes.
MACHINES: Final = {
    "karolina-8xa100": (Net(25.0, 2e-6, adapters=4), 46341, 128),
    "summit-6xv100": (Net(12.5, 2e-6, adapters=2), 40000, 72),
}
AS_PLANNED, AS_ONE = "all ranks", "each node as one device"


def counts(extent: int, parts: int) -> list[int]:
    """Return how an extent is cut into equal parts."""
    return [extent // parts + (at < extent % parts) for at in range(parts)]


def nearest_square(number: int) -> tuple[int, int]:
    """Return the two factors of a number that differ least."""
    less = next(one for one in range(math.isqrt(number), 0, -1) if number % one == 0)
    return number // less, less


def as_one_device(node: Machine, net: Net) -> tuple[Machine, Net]:
    """Return a node whose devices are one, with their rates and adapters together, and what joins such nodes."""
    rate = float(node.gemm_rate(DType.f64).sum()) / 1e12
    gb_per_s = net.gb_per_s * net.adapters
    memory = int(node.memory_bytes.sum())
    one = Machine.uniform(1, host_gb_per_s=gb_per_s, gemm_tflop_per_s={"f64": rate}, memory_bytes=memory)
    return one, Net(gb_per_s, net.latency_s)


def case(node: Machine, net: Net, num_nodes: int, edge: int, grid: tuple[int, int]) -> dict[str, Any]:
    """Return what is expected of one product, and what it took to plan."""
    laps = [time.perf_counter()]
    machine = Machine.cluster(node, num_nodes, net)
    laps.append(time.perf_counter())
    problem = GemmProblem(edge, edge, edge, DType.f64, reads_c=True)
    dealt = Dealt(Layout.blocks(*(counts(edge, parts) for parts in grid)), "device")
    placement = Places(dealt, dealt, dealt).bind(problem, machine.num_ranks)
    options = ScheduleOptions(scheduler="kblocks", grid=grid)
    setting = Setting.of(problem, placement, machine.num_ranks, machine, options)
    made = make_schedule(setting).schedule
    laps.append(time.perf_counter())
    schedule = cross(made)
    laps.append(time.perf_counter())
    seconds = simulate(schedule, machine).seconds
    laps.append(time.perf_counter())
    limit = bound(problem, placement, machine)
    laps.append(time.perf_counter())
    _, source, destination, size = schedule.copies().T
    of = schedule.locations["node"]
    crossing = of[source] != of[destination]
    into = np.bincount(of[destination[crossing]], size[crossing], num_nodes)
    rate = float(machine.gemm_rate(DType.f64).sum())
    return {
        "nodes": num_nodes,
        "ranks": machine.num_ranks,
        "edge": edge,
        "grid": grid,
        "seconds": seconds,
        "share_of_peak": problem.flops / seconds / rate,
        "bound_s": limit.seconds,
        "limited_by": limit.limited_by,
        "bound_between_nodes_s": limit.terms.get("between nodes", 0.0),
        "most_into_a_node_bytes": int(into.max()),
        "least_of_a_node_bytes": least_bytes_of_a_node(problem, placement, machine),
        "tasks": len(schedule.tasks),
        "planning_s": dict(
            zip(("machine", "schedule", "halves", "simulation", "bound"), np.diff(laps).tolist(), strict=True)
        ),
        "most_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def cases(name: str, most_planned: int) -> dict[str, list[dict[str, Any]]]:
    """Return the lines of one machine."""
    node, (net, edge, most) = load_machine(name), MACHINES[name]
    whole, (one, joined) = node.num_ranks, as_one_device(node, net)
    lines: dict[str, list[dict[str, Any]]] = {AS_PLANNED: [], AS_ONE: []}
    for num_nodes in [*(2**power for power in range(8) if 2**power < most), most]:
        here = round(edge * math.sqrt(num_nodes))
        lines[AS_ONE].append(case(one, joined, num_nodes, here, nearest_square(num_nodes)))
        if num_nodes <= most_planned:
            down, along = nearest_square(num_nodes)
            grid = (down, along * whole) if num_nodes > 1 else nearest_square(whole)
            lines[AS_PLANNED].append(case(node, net, num_nodes, here, grid))
            print(name, json.dumps(lines[AS_PLANNED][-1]), flush=True)
    return lines


def draw(found: dict[str, dict[str, list[dict[str, Any]]]], path: str) -> None:
    """Draw the shares of the peak over the nodes."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.0, 3.8), dpi=110, layout="constrained")
    for axis, (name, lines) in zip(figure.subplots(1, len(found), sharey=True), found.items(), strict=True):
        for (label, line), style in zip(lines.items(), ("o-", "s--"), strict=True):
            axis.plot([one["nodes"] for one in line], [100 * one["share_of_peak"] for one in line], style, label=label)
        last = lines[AS_ONE]
        bounds = [100 * one["share_of_peak"] * one["seconds"] / one["bound_s"] for one in last]
        axis.plot([one["nodes"] for one in last], bounds, ":", color="black", label="bound")
        axis.set_xscale("log", base=2)
        ticks = [one["nodes"] for one in last if one["nodes"] != 64]  # which stands too near to 72
        axis.set_xticks(ticks, [str(one) for one in ticks], fontsize=8)
        axis.set_title(f"{name}, {last[0]['edge']}·√nodes cubed, f64", fontsize="medium")
        axis.set_xlabel("nodes")
        axis.grid(visible=True, alpha=0.3)
    figure.axes[0].set_ylabel("% of the devices' rate, expected")
    figure.axes[0].set_ylim(0, 102)
    figure.axes[0].legend(loc="lower left", fontsize="small")
    figure.savefig(path, metadata={"Software": None})


def main(out: str, picture: str, most_planned: int = 128) -> None:
    """Plan, write and draw."""
    found = {name: cases(name, most_planned) for name in MACHINES}
    pathlib.Path(out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    draw(found, picture)


if __name__ == "__main__":
    main(*sys.argv[1:3], *map(int, sys.argv[3:]))
