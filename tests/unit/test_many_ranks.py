"""Planning for tens to a thousand ranks: choices no worse than the rules, and no work by the cube of the ranks."""

from __future__ import annotations

import dataclasses
import itertools
import random
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.planned import make_schedule
from uncut_mpi.bench.rivals.link_map import LinkMap
from uncut_mpi.errors import PlanError, UncutError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine, machine_names
from uncut_mpi.model.placement import Matrix, Placement
from uncut_mpi.model.places import Places
from uncut_mpi.model.ports import duplex_ports
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import evaluation, ranks, search
from uncut_mpi.planning.kblocks_defaults import choose_grid
from uncut_mpi.planning.options import BLOCK_ORDERS, Blocking, ScheduleOptions
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.rank_sets import RankSets
from uncut_mpi.planning.ranks import ranks_by_use
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import simulate


def cube(n: int) -> GemmProblem:
    return GemmProblem(n, n, n, DType.f64)


def pairs(num_ranks: int) -> Machine:
    """Devices in pairs behind one host link, which share all links' total."""
    host = num_ranks
    ports = duplex_ports(
        "host",
        [(host, rank) for rank in range(num_ranks)],
        [(rank, host) for rank in range(num_ranks)],
        in_gb_per_s=185,
        out_gb_per_s=147,
        both_gb_per_s=(95, 95),
    )
    for first in range(0, num_ranks, 2):
        both = [(host, first), (host, first + 1)], [(first, host), (first + 1, host)]
        ports += duplex_ports(f"pair {first}", *both, in_gb_per_s=60, out_gb_per_s=55, both_gb_per_s=(40, 40))
    return dataclasses.replace(Machine.uniform(num_ranks), ports=tuple(ports))


@pytest.mark.parametrize(("num_ranks", "place"), [(24, "0,0,0"), (48, "h,h,h"), (64, "0,1,2")])
def test_the_choice_is_no_worse_than_the_rules_of_any_scheduler(num_ranks: int, place: str) -> None:
    machine, placement = Machine.uniform(num_ranks), Placement.parse(place)
    found = search.search(Setting.of(cube(8192), placement, num_ranks, machine))
    for scheduler in ("uncut", "kblocks", "cyclic", "bands"):
        if scheduler == "bands" and "h" in place:
            continue
        own = plan(cube(8192), placement, num_ranks, machine, ScheduleOptions(scheduler=scheduler)).schedule
        assert found.best.predicted_s <= simulate(own, machine).seconds * (1 + 1e-12), scheduler


def test_budgets_grow_with_the_ranks() -> None:
    assert [evaluation.default_budget(count) for count in (1, 4, 8, 16, 1024)] == [
        120_000,
        120_000,
        120_000,
        120_000,
        5_120_000,
    ]


def test_few_numbers_of_ranks_are_tried_of_many() -> None:
    for count, most in ((12, 12), (64, 15), (1000, 20)):
        machine = Machine.uniform(count)
        counts = RankSets(Setting.of(cube(100), Placement.parse("h,h,h"), count, machine)).counts
        assert counts[0] == count
        assert counts[-1] == 1
        assert len(counts) <= most
        assert all(a > b for a, b in itertools.pairwise(counts))


def test_rows_of_kblocks_between_host_matrices_hold_few_ranks() -> None:
    host, options = Placement.parse("h,h,h"), ScheduleOptions()
    grids = {count: str(choose_grid(host, count, options)) for count in (1, 8, 32, 48, 61, 64, 256, 1024, 2048)}
    assert grids == {
        1: "1x1",
        8: "1x8",
        32: "1x32",
        48: "2x24",
        61: "1x61",
        64: "2x32",
        256: "8x32",
        1024: "32x32",
        2048: "32x64",
    }


def test_what_is_refused_before_it_is_made_has_too_many_tasks() -> None:
    draw = random.Random(0)
    machines = [load_machine("h200-4x"), load_machine("karolina-8xa100"), Machine.uniform(5), Machine.uniform(24)]
    refused = 0
    for _ in range(150):
        machine, extents = draw.choice(machines), [draw.choice((1, 7, 100, 900, 2048, 5000)) for _ in range(3)]
        problem = GemmProblem(
            *extents,
            draw.choice((DType.f64, DType.f16)),
            draw.choice("NT"),
            draw.choice("NT"),
            reads_c=draw.random() < 0.6,
        )
        place = Placement.parse(draw.choice(("h,h,h", "0,0,0", "0,1,2", "h,1,h")))
        options = draw.choice(
            (
                ScheduleOptions(scheduler="uncut", tile=draw.choice((512, 1000)), batch=draw.random() < 0.6),
                ScheduleOptions(scheduler="uncut", tile=512, caching=False),
                ScheduleOptions(
                    scheduler="cyclic", tile=draw.choice((512, 1000)), devices=(*range(machine.num_ranks),)
                ),
                ScheduleOptions(
                    scheduler="kblocks",
                    blocking=Blocking(
                        splits=draw.choice((1, 2)),
                        away=draw.choice((0, 2, 7)),
                        order=draw.choice(BLOCK_ORDERS),
                        columns=draw.choice((1, 3)),
                    ),
                ),
            )
        )
        about = (problem, place, machine.num_ranks, machine, options)
        try:
            tasks = len(make_schedule(*about).schedule.tasks)
        except UncutError:
            continue
        make_schedule(*about, most_tasks=tasks)  # as many as are allowed: it is made
        try:
            make_schedule(*about, most_tasks=tasks // 8)
        except PlanError:
            refused += 1
    assert refused > 100


def total_s(problem: GemmProblem, placement: Placement, machine: Machine, some: list[int]) -> float:
    """Return what the product and each matrix's way to and from some ranks take, one after the other."""
    seconds = problem.flops / float(machine.typical_gemm_rate(problem.dtype)[some].sum())
    links = machine.bandwidth_gb_per_s
    ways = [(Matrix.A, True), (Matrix.B, True), (Matrix.C, False), *([(Matrix.C, True)] * problem.reads_c)]
    for matrix, inward in ways:
        for part in placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix)):
            at = part.location
            if at.rank is None:
                rate = float(machine.host_rates(some, inward=inward, outward=not inward).sum())
            elif at.space == "device":
                rate = sum(float(links[at.rank, one] if inward else links[one, at.rank]) for one in some)
            else:
                rate = float(links[machine.host, at.rank] if inward else links[at.rank, machine.host])
            seconds += part.shape[0] * part.shape[1] * problem.dtype.itemsize / (rate * 1e9)
    return seconds


def naive_order(problem: GemmProblem, placement: Placement, machine: Machine) -> list[int]:
    chosen: list[int] = []
    while len(chosen) < machine.num_ranks:
        rest = [rank for rank in range(machine.num_ranks) if rank not in chosen]
        times = [total_s(problem, placement, machine, [*chosen, one]) for one in rest]
        chosen.append(next(one for one, time in zip(rest, times, strict=True) if time <= min(times) * (1 + 1e-12)))
    return chosen


@pytest.mark.parametrize("place", ["h,h,h", "0,0,0", "1,2,0", "h,1,h", "rows,cols,h", "cols,h2,rows"])
def test_ranks_that_are_alike_are_ordered_as_if_each_were_looked_at(place: str) -> None:
    for machine in (*(load_machine(name) for name in machine_names()), pairs(12)):
        for n in (500, 8192):
            placement = Places.parse(place).bind(cube(n), machine.num_ranks)
            expected = naive_order(cube(n), placement, machine)
            assert ranks_by_use(cube(n), placement, machine) == expected, machine.name


def test_a_thousand_equal_ranks_are_ordered_without_comparing_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> float:
        raise AssertionError("compared")

    monkeypatch.setattr(ranks._Times, "with_each", refuse)
    assert ranks_by_use(cube(8192), Placement.parse("h,h,h"), Machine.uniform(1024)) == list(range(1024))


def naive_ways(
    links: LinkMap, devices: list[int], max_hops: int
) -> tuple[np.ndarray, dict[tuple[int, int], tuple[int, ...]]]:
    shared, routes = links.shared_gb_per_s.copy(), {}
    for source, to in itertools.permutations(range(len(shared)), 2):
        for hops in range(1, max_hops + 1):
            for way in itertools.permutations(sorted(set(devices) - {source, to}), hops):
                narrowest = min(float(links.shared_gb_per_s[leg]) for leg in itertools.pairwise((source, *way, to)))
                if narrowest > shared[source, to]:
                    shared[source, to], routes[source, to] = narrowest, way
    return shared, routes


def test_ways_round_slow_links_are_those_of_a_look_at_all() -> None:
    draw = np.random.default_rng(0)
    for number in range(40):
        size = int(draw.integers(2, 8))
        bandwidth = draw.integers(1, 6, (size, size)).astype(np.float64)
        links = LinkMap(draw.random((size, size)), bandwidth, {}, bandwidth)
        devices = sorted(draw.choice(size - 1, int(draw.integers(1, size)), replace=False).tolist())
        found = links.rerouted(devices, max_hops=number % 3)
        shared, routes = naive_ways(links, devices, number % 3)
        assert (found.shared_gb_per_s == shared).all()
        assert found.routes == routes
        for link, way in routes.items():
            legs = itertools.pairwise((link[0], *way, link[1]))
            assert found.latency_s[link] == sum(float(links.latency_s[leg]) for leg in legs)


def test_memory_does_not_grow_with_the_cube_of_the_ranks() -> None:
    # 1024³ table entries are 4 GiB.
    script = (
        "import resource\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "from tests.unit.test_many_ranks import *\n"
        "made = plan(cube(16384), Placement.parse('h,h,h'), 1024, Machine.uniform(1024),"
        " ScheduleOptions(scheduler='uncut'))\n"
        "print(made.schedule.grid)\n"
    )
    environment = {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": ":".join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=environment)
    assert run.stdout.strip() == "(32, 32)", run.stderr[-500:]
