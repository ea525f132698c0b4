"""How C is cut among ranks: every element has one block, areas are what was asked for, and edges are short."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.partition import Partition, sizes_of_columns
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Kind


def problem(m: int, n: int, dtype: DType = DType.f64) -> GemmProblem:
    return GemmProblem(m, n, 100, dtype, "N", "N")


def check(cut: Partition, m: int, n: int) -> None:
    """Every element of C is in one block, and strips and places say so too."""
    owner = np.full((m, n), -1)
    for place, (rows, cols) in enumerate(cut.blocks):
        part = owner[rows.start : rows.stop, cols.start : cols.stop]
        assert (part == -1).all()
        part[:] = place
    assert (owner >= 0).all()
    assert (cut.strips[0], cut.strips[-1]) == (0, m)
    assert list(cut.strips) == sorted(cut.strips)
    found = np.full((m, n), -1)
    for (start, stop), strip in zip(itertools.pairwise(cut.strips), cut.places, strict=True):
        assert len(strip) == cut.shape[1]
        for place in strip:
            if place >= 0:
                rows, cols = cut.blocks[place]
                assert rows.start <= start
                assert stop <= rows.stop
                found[start:stop, cols.start : cols.stop] = place
    assert (found == owner).all()


@pytest.mark.parametrize("seed", range(60))
def test_every_element_has_one_block(seed: int) -> None:
    rng = random.Random(seed)
    m, n = rng.randint(1, 90), rng.randint(1, 90)
    dtype = rng.choice(list(DType))
    areas = [[rng.uniform(0.05, 1) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 4))]
    check(Partition.of_areas(problem(m, n, dtype), areas), m, n)
    check(Partition.of_grid(problem(m, n, dtype), ProcessGrid(rng.randint(1, 5), rng.randint(1, 5))), m, n)


def test_areas_are_what_was_asked_for() -> None:
    areas = ((0.37,), (0.25, 0.2, 0.18))
    cut = Partition.of_areas(problem(8192, 8192), areas)
    found = [len(rows) * len(cols) / 8192**2 for rows, cols in cut.blocks]
    assert found == pytest.approx([0.37, 0.25, 0.2, 0.18], abs=0.01)
    assert cut.shape == (3, 2)
    assert len(cut.places) == 3
    # A column of equal ranks beside one of others: the strips are between the cuts of both.
    two = Partition.of_areas(problem(6000, 6000), ((1, 1), (1, 1, 1)))
    assert len(two.strips) == 5
    assert [place for strip in two.places for place in strip] == [0, 2, 0, 3, 1, 3, 1, 4]


@pytest.mark.parametrize("count", [1, 2, 5, 7])
def test_the_edges_of_columns_are_the_shortest(count: int) -> None:
    rng = random.Random(count)
    areas = sorted((rng.uniform(0.1, 1) for _ in range(count)), reverse=True)

    def edges(sizes: tuple[int, ...]) -> float:
        widths, at = [], 0
        for size in sizes:
            widths.append(math.fsum(areas[at : at + size]) / math.fsum(areas))
            at += size
        return len(sizes) + sum(size * width for size, width in zip(sizes, widths, strict=True))

    for columns in range(1, count + 1):
        every = [sizes for sizes in itertools.product(range(1, count + 1), repeat=columns) if sum(sizes) == count]
        found = tuple(sizes_of_columns(areas, columns))
        assert edges(found) == pytest.approx(min(map(edges, every)))


def test_equal_ranks_in_even_columns_are_a_grid() -> None:
    assert sizes_of_columns([1.0] * 8, 2) == [4, 4]
    assert sizes_of_columns([1.0] * 4, 2) == [2, 2]
    assert sizes_of_columns([3.0, 1.0, 1.0, 1.0], 2) == [1, 3]


def test_ranks_of_other_speeds_finish_together() -> None:
    # On a 2x2 grid speeds 1, 1, 1 and 1/2 cannot all finish together; in columns they do.
    speeds = np.array([1.0, 1.0, 1.0, 0.5])
    plain = Machine.uniform(4, link_gb_per_s=1e6, host_gb_per_s=1e6, latency_s=0.0, gemm_tflop_per_s={"f64": 1.0})
    rates = {"f64": speeds}
    machine = Machine.from_json(plain.to_json())
    object.__setattr__(machine, "gemm_tflop_per_s", rates)
    object.__setattr__(machine, "typical_gemm_tflop_per_s", rates)
    options = ScheduleOptions(scheduler="kblocks", areas=((1.0, 1.0), (1.0, 0.5)), blocking=Blocking(splits=1))
    made = plan(GemmProblem(4096, 4096, 64, DType.f64), Placement.parse("h,h,h"), 4, machine, options).schedule
    gemms = made.tasks[made.tasks["kind"] == Kind.GEMM]
    flops = np.zeros(4)
    for task in gemms:
        c = made.regions[made.operands["region"][task["first_operand"]]]
        flops[task["rank"]] += float(c["rows"]) * float(c["cols"])
    finish = flops / speeds
    assert finish.max() <= 1.05 * finish.min()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"areas": ((1.0,), ())}, "name one for each rank of every column"),
        ({"areas": ()}, "name one for each rank of every column"),
        ({"areas": ((1.0, -1.0),)}, "not all positive"),
        ({"areas": ((1.0, float("nan")),)}, "not all positive"),
        ({"areas": ((1e308,), (1e308,))}, "not all positive numbers, 1e.300 at most in all"),
        ({"areas": ((1.0, 1.0),), "grid": (1, 2)}, "give one of both"),
        ({"areas": ((1.0, 1.0),), "row_shares": (1.0, 1.0)}, "give one of both"),
        ({"areas": ((1.0, 1.0),), "col_shares": (1.0,)}, "give one of both"),
    ],
)
def test_what_cannot_be_is_an_error(changes, message) -> None:
    with pytest.raises(ParamError, match=message):
        ScheduleOptions(scheduler="kblocks", **changes)


def test_as_many_areas_as_ranks_and_only_kblocks_takes_them() -> None:
    about = (GemmProblem(512, 512, 512, DType.f64), Placement.parse("h,h,h"), 4, Machine.uniform(4))
    with pytest.raises(ParamError, match="areas names 3 ranks, 4 compute"):
        plan(*about, ScheduleOptions(scheduler="kblocks", areas=((1.0,), (1.0, 1.0))))
    split = Blocking(splits=2)
    with pytest.raises(ParamError, match="areas names 4 ranks, 2 compute each of the 2 parts of k: name"):
        plan(*about, ScheduleOptions(scheduler="kblocks", areas=((1.0,), (1.0, 1.0, 1.0)), blocking=split))
    with pytest.raises(ParamError, match="uncut does not take areas"):
        plan(*about, ScheduleOptions(scheduler="uncut", areas=((1.0,), (1.0, 1.0, 1.0))))
    with pytest.raises(ParamError, match="column of ranks without any"):
        Partition.of_areas(about[0], ((1.0,), ()))
