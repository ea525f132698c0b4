"""
What PaRSEC's product on Summit is expected to take, by its paper's rule, beside what the paper measured.

Usage: python tests/perf/summit.py OUT.json [PROCESSES ...]

From T. Herault, Y. Robert, G. Bosilca and J. Dongarra, *Generic matrix multiplication for multi-GPU accelerated
distributed-memory platforms over PaRSEC* (ScalA 2019), section V: C = A B + C in f64, from host memory to host memory,
tiles of 1024. First N = 70,000 on a node with one process of 1 to 6 GPUs (figure 2). Then grids of PROCESSES² (default
2) processes, of a socket with 3 GPUs each, around the N from which on C does not fit any more (figure 3), with
lookaheads of 1 and 2. The text gives shares of the practical peak, 7.2 TFLOP/s a GPU; its figures have no numbers.

All ranks are simulated. With several blocks of C on many processes k is cut to `LONGEST` tiles. So more of the time
goes to what there is besides k-blocks, at the ends and between blocks of C: on 6 × 6 processes about a point or two.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import sys
import time
from typing import Any, Final

from uncut_mpi.bench.rivals import parsec
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout, LocalArray
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import MATRICES, Placement
from uncut_mpi.model.places import Dealt, Places
from uncut_mpi.model.ports import Net
from uncut_mpi.model.positions import reordered
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.crossing import cross
from uncut_mpi.planning.options import Blocking, ScheduleOptions, changed
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import simulate

PEAK: Final = 7.2e12
"""FLOP/s of a GPU: the paper's practical peak."""

NET: Final = Net(12.5, 2e-6)
"""Of a process: one of a node's two adapters."""

PAPER: Final = {1: 95.0, 2: 95.0, 3: 95.0, 4: 85.0, 5: 85.0, 6: 85.0}
"""Per cent of the peak by GPUs of one node: over 95 for 1 to 3. On grids the plateau is 85."""

AROUND: Final = (5, 11, 21, 22, 33)
"""Columns of C for each GPU beside another (tiles). C fits up to 21.8: three quarters of three GPUs' memory."""

LONGEST: Final = {12: 128}
"""Tiles of k that are simulated where there are several blocks of C, by rows of processes; else all are."""

BESIDES: Final = {
    6: (("one process", "node", 1.0), ("one process", "rank", 1.0), ("in turn", "rank", 1.0)),
    12: (("in turn", "node", 0.5),),
}
"""
Where neighbours along k lie, whom a k-block awaits, and what of the net's rate there is, by rows of processes.

For orders near to where C stops fitting, beside the paper's "in turn" and "node", and all of the rate.
"""


def socket() -> Machine:
    """Return what a process has: a socket's GPUs and its half of host memory, which needs no bus."""
    node = load_machine("summit-6xv100").subset(range(3))
    ports = [
        dataclasses.replace(port, capacity_gb_per_s=port.capacity_gb_per_s / 2) if port.name == "host memory" else port
        for port in node.ports
        if "bus" not in port.name
    ]
    return dataclasses.replace(node, ports=tuple(ports), host_bytes=node.host_bytes // 2)


def case(setting: Setting, blocking: Blocking | None = None) -> dict[str, Any]:
    """Return what is expected of one product: with blocks of the paper's rule for it, or with given ones."""
    began, problem, machine = time.perf_counter(), setting.problem, setting.machine
    model = parsec.model_of(setting, parsec.TILE)
    if blocking is None:
        made, how = parsec.schedule(setting)
    else:
        grid = model.p, model.q * model.devices
        options = ScheduleOptions("kblocks", grid=grid, blocking=blocking)
        made, how = kblocks.schedule(dataclasses.replace(setting, options=options))
    schedule = cross(made)
    planned = time.perf_counter()
    seconds = simulate(schedule, machine).seconds
    of_it = how.blocking
    down = -(-problem.m // (model.p * of_it.c_rows))
    along = -(-problem.n // (model.q * model.devices * of_it.c_cols))
    enters = along * problem.m / model.p * (1 - 1 / model.q) + down * problem.n / model.q * (1 - 1 / model.p)
    return {
        "edge": problem.m,
        "k": problem.k,
        "gpus": machine.num_ranks,
        "processes": [model.p, model.q],
        "blocks_of_c": [down, along],
        "depth": of_it.block,
        "lookahead": of_it.slots - 1,
        "barrier": of_it.barrier,
        "seconds": seconds,
        "between_processes_bytes": schedule.bytes_by_link().get("node_to_node", 0),
        "formula_bytes": machine.num_nodes * enters * problem.k * 8,
        "tasks": len(schedule.tasks),
        "planning_s": planned - began,
        "simulation_s": time.perf_counter() - planned,
    }


def with_rates(found: dict[str, Any], paper: float) -> dict[str, Any]:
    """Return a case with its rate and the paper's."""
    rate = 2 * found["edge"] ** 2 * found["k"] / found["seconds"] / found["gpus"]
    return found | {"tflop_per_s_of_a_gpu": rate / 1e12, "per_cent": 100 * rate / PEAK, "paper_per_cent": paper}


def on_a_node(gpus: int) -> dict[str, Any]:
    """Return a point of figure 2."""
    edge = -(-70_000 // parsec.TILE) * parsec.TILE
    problem, machine = GemmProblem(edge, edge, edge, DType.f64), load_machine("summit-6xv100").subset(range(gpus))
    options = ScheduleOptions("parsec", tile=parsec.TILE)
    return with_rates(case(Setting.of(problem, Placement.parse("h,h,h"), gpus, machine, options)), PAPER[gpus])


def dealt(problem: GemmProblem, processes: int, along_k: str) -> Placement:
    """
    Return A, B and C dealt by tiles to the grid of processes, and in each to its GPUs' ranks.

    Neighbours along k are on processes "in turn", as in the paper. Or what "one process" has of A stands together along
    k, as in other products of such matrices (`model.positions`).
    """
    layout, num_ranks = Layout.block_cyclic(parsec.TILE, parsec.TILE, (processes, 3 * processes)), 3 * processes**2
    if along_k == "one process":
        return Places(*(Dealt(layout, "host"),) * 3).bind(problem, num_ranks)
    hosts = [LocalArray(Location.host(rank), "F") for rank in range(num_ranks)]
    in_turn = [
        (row * processes + col % processes) * 3 + col // processes
        for row, col in itertools.product(range(processes), range(3 * processes))
    ]
    layouts = dataclasses.replace(layout, ranks=tuple(in_turn)), layout, layout
    a, b, c = (one.bind(problem.shape_of(matrix), hosts) for one, matrix in zip(layouts, MATRICES, strict=True))
    return Placement(reordered(a, (c.orders[0], None)), reordered(b, (None, c.orders[1])), c)


def on_a_grid(
    processes: int, columns: int, lookahead: int, along_k: str = "in turn", barrier: str = "node", rate: float = 1.0
) -> dict[str, Any]:
    """Return a point of figure 3."""
    edge = 3 * columns * processes * parsec.TILE
    machine = Machine.cluster(socket(), processes**2, dataclasses.replace(NET, gb_per_s=rate * NET.gb_per_s))

    def asked(k: int) -> Setting:
        problem = GemmProblem(edge, edge, k, DType.f64)
        return Setting.of(problem, dealt(problem, processes, along_k), machine.num_ranks, machine)

    model = parsec.model_of(asked(edge), parsec.TILE)
    blocks = model.choose(lookahead)
    blocking = changed(parsec.blocking_of(model, blocks, parsec.TILE), barrier=barrier)
    beyond = 0 if model.rounds(blocks) == (1, 1) else edge - LONGEST.get(processes, edge) * parsec.TILE
    # Whole k-blocks: the last one, which may be short, counts.
    made = case(asked(edge - -(-max(0, beyond) // blocking.block) * blocking.block), blocking)
    return with_rates(made | {"columns": columns, "along_k": along_k, "net_rate": rate}, 85.0)


def main(out: str, *processes: str) -> None:
    """Simulate and write."""
    found: list[dict[str, Any]] = []

    def add(one: dict[str, Any]) -> None:
        found.append(one)
        print(json.dumps(one), flush=True)
        pathlib.Path(out).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    for gpus in PAPER:
        add(on_a_node(gpus))
    for grid, columns, lookahead in itertools.product(map(int, processes or ("2",)), AROUND, (1, 2)):
        add(on_a_grid(grid, columns, lookahead))
        if columns in (21, 22):
            for about in BESIDES.get(grid, ()):
                add(on_a_grid(grid, columns, lookahead, *about))


if __name__ == "__main__":
    main(*sys.argv[1:])
