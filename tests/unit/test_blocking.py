"""The order in which `kblocks` fetches and multiplies: k-blocks, and where blocks of rows and columns begin."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json
import math
import pathlib
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.blocking import StepKind, cut_by, k_blocks, steps_of
from uncut_mpi import _native
from uncut_mpi.command.arguments import parse
from uncut_mpi.command.entry import HelpRequested
from uncut_mpi.errors import ParamError
from uncut_mpi.model.dtypes import MEASURED, DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.blocking import count_blocks
from uncut_mpi.planning.grid import ProcessGrid, block_starts
from uncut_mpi.planning.kblocks_defaults import choose
from uncut_mpi.planning.option_fields import About, declared, told
from uncut_mpi.planning.options import ORDERS_BY_K, SEARCHED, Blocking, ScheduleOptions
from uncut_mpi.planning.partition import Partition, sizes_of_columns
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import Kind

HOST_PROBLEM = GemmProblem(512, 512, 4096, DType.f64)


def options(**blocking) -> ScheduleOptions:
    return ScheduleOptions(scheduler="kblocks", blocking=Blocking(**blocking))


def test_k_blocks_grow_from_the_first_to_the_largest() -> None:
    assert k_blocks(8192, 256, 2048) == [
        (0, 256),
        (256, 512),
        (512, 1024),
        (1024, 2048),
        (2048, 4096),
        (4096, 6144),
        (6144, 8192),
    ]
    assert k_blocks(100, 256, 2048) == [(0, 100)]
    assert k_blocks(5000, 2048, 2048) == [(0, 2048), (2048, 5000)]  # what is left is less than half a block
    assert k_blocks(8192, 512, 8192, growth=4) == [(0, 512), (512, 2048), (2048, 8192)]
    assert k_blocks(8192, 512, 2048, growth=3) == [(0, 512), (512, 1536), (1536, 3584), (3584, 5632), (5632, 8192)]


@pytest.mark.parametrize(("extent", "blocks"), list(itertools.product((1, 2, 7, 100, 4096), (1, 2, 3, 8))))
def test_column_blocks_are_all_columns_one_after_the_other(extent: int, blocks: int) -> None:
    starts = _native.block_edges(extent, blocks, 2)
    assert len(starts) == count_blocks(blocks) + 1
    assert (starts[0], starts[-1]) == (0, extent)
    assert starts == sorted(starts)
    assert extent < 100 or all(start % 2 == 0 for start in starts)


def test_the_last_column_block_is_halved_twice() -> None:
    assert _native.block_edges(4096, 4, 2) == [0, 1024, 2048, 3072, 3584, 3840, 4096]
    assert _native.block_edges(4096, 1, 2) == [0, 4096]


def test_blocks_begin_at_multiples_of_which_they_have_four() -> None:
    wanted = [0, 320, 640, 960, 1280, 1536, 1792, 2048, 2176, 2240, 2304]
    assert _native.block_edges(2304, 8, 2) == wanted  # 288 elements in a block: 256 and 128 are too many
    assert _native.block_edges(4096, 3, 2) == [0, 1536, 2816, 3584, 3840, 4096]
    assert _native.block_edges(8192, 3, 8) == [0, 2816, 5632, 6912, 7680, 8192]
    assert _native.block_edges(100, 3, 4) == [0, 32, 64, 80, 88, 100]
    assert _native.block_edges(1003, 2, 2)[-2:] == [896, 1003]


@pytest.mark.parametrize(("name", "about"), [(name, about) for name, about, _ in told(Blocking)])
def test_what_is_declared_of_an_option_is_checked_and_can_be_said(name: str, about: About) -> None:
    good = about.words[-1] if about.words else max(2, about.least)
    blocking = parse(["--options", json.dumps({"blocking": {name: good}})]).options.blocking
    assert blocking == Blocking(**{name: good}) != Blocking()
    for wrong in ["other"] if about.words else [about.least - 1, about.most + 1]:
        refused = f"{name} ('other' of|= {wrong}( is above| is below|: use a power))"
        with pytest.raises(ParamError, match=refused):
            Blocking(**{name: wrong})
        with pytest.raises(ParamError, match=refused):
            ScheduleOptions.decoded({"blocking": {name: wrong}})


def test_every_option_is_explained_once_for_the_class_and_the_command_line() -> None:
    with pytest.raises(HelpRequested) as asked:
        parse(["--help-schedulers"])
    for prefix, kind in (("", ScheduleOptions), ("blocking.", Blocking)):
        names = {field.name for field in dataclasses.fields(kind)}
        assert {name for name, _ in declared(kind)} == names - {"blocking"}
        for name, about in declared(kind):
            if about.hidden:
                assert f"\n{prefix}{name}: " not in asked.value.text
                assert f"\n{name} : " not in inspect.getdoc(kind)
                with pytest.raises(ParamError, match=f"has no '{name}'"):
                    kind.decoded({name: about.default}) if not prefix else ScheduleOptions.decoded(
                        {"blocking": {name: about.default}}
                    )
                continue
            assert f"\n{prefix}{name}: {about.what}" in asked.value.text
            assert f"\n{name} : {about.what}\n" in inspect.getdoc(kind)
            assert not set(about.takers) - set(SEARCHED)
        for _, _, explanation in told(kind):
            assert len(explanation) >= 20
            assert explanation in " ".join(asked.value.text.split())


def test_options_come_from_a_file_too(tmp_path: pathlib.Path) -> None:
    said = {"grid": [1, 2], "areas": None, "blocking": {"columns": 3}}
    (tmp_path / "options.json").write_text(json.dumps(said))
    assert parse(["--options", str(tmp_path / "options.json")]).options == ScheduleOptions.decoded(said)


def test_the_last_half_of_k_arrives_by_column_blocks_where_they_are_multiplied_so() -> None:
    how = cut_by(first=1024, block=1024, columns=2, order="k-columns")
    made = [step for step in steps_of(4096, how) if step.kind in (StepKind.FETCH_B, StepKind.MULTIPLY)]
    whole = [(1024, 0, 4), (1024, 0, 4)]
    by_columns = [(2048, at, at + 1) for at in range(4)]
    for kind in (StepKind.FETCH_B, StepKind.MULTIPLY):
        assert [
            (one.k_stop - one.k_start, one.first, one.last) for one in made if one.kind == kind
        ] == whole + by_columns
    shared = dataclasses.replace(how, splits=2)
    assert [one.k_start for one in steps_of(4096, shared) if one.kind == StepKind.MULTIPLY][3:] == [3072] * 4
    # One k-block: nothing is multiplied before all of it is there, as in the order "k".
    at_once = {order: dataclasses.replace(how, first=4096, block=4096, order=order) for order in ("k", "k-columns")}
    assert steps_of(4096, at_once["k"]) == steps_of(4096, at_once["k-columns"])


@pytest.mark.parametrize("order", ORDERS_BY_K)
def test_as_much_of_the_end_of_k_goes_by_column_blocks_as_asked(order: str) -> None:
    for tail, first in ((1, 0), (2, 2048), (4, 3072), (8, 3584), (4096, 3584)):  # one k-block at least
        how = cut_by(first=512, block=512, columns=2, order=order, tail=tail)
        products = [one for one in steps_of(4096, how) if one.kind == StepKind.MULTIPLY]
        assert {one.k_start for one in products if one.last - one.first == 1} == {first}
        assert [one.k_start for one in products if one.last - one.first > 1] == list(range(0, first, 512))


def test_an_end_of_k_by_column_blocks_is_for_the_orders_by_k() -> None:
    assert choose(HOST_PROBLEM, Placement.parse("h,h,h"), 4, options(tail=8)).order == "k"
    assert choose(HOST_PROBLEM, Placement.parse("h,h,h"), 4, options()).order == "columns"
    for order in ("columns", "corner"):
        with pytest.raises(ParamError, match=f"last 1/8 of k .* not for the order '{order}': leave one of the two out"):
            Blocking(tail=8, order=order)
    with pytest.raises(ParamError, match=r"last 1/8 of k .* not for 3 row blocks"):
        Blocking(tail=8, rows=3)
    with pytest.raises(ParamError, match="tail = 5000 is above 4096"):
        Blocking(tail=5000)
    with pytest.raises(ParamError, match="tail = -1 is below 0"):
        Blocking(tail=-1)


def test_long_k_blocks_that_are_rows_in_host_memory_end_at_multiples_of_their_length() -> None:
    # 32 KiB in f64: from 16 KiB behind a line of 64 KiB on every other one would lie in two lines.
    how = cut_by(first=2048, block=4096, growth=4, columns=1, order="k")
    ends = {
        far_apart: [one.k_stop for one in steps_of(16384, how, far_apart=far_apart) if one.kind == StepKind.FETCH_B]
        for far_apart in (False, True)
    }
    assert ends == {False: [2048, 6144, 10240, 14336, 16384], True: [2048, 4096, 8192, 12288, 16384]}
    how = cut_by(first=4095, block=4096, growth=2, columns=1, order="k")  # not a block of two elements
    made = [one.k_stop for one in steps_of(16384, how, far_apart=True) if one.kind == StepKind.FETCH_B]
    assert made == [4095, 8190, 12288, 16384]


def test_from_the_corner_the_first_block_alone_is_made_by_parts_of_k() -> None:
    made = steps_of(4096, cut_by(first=512, block=2048, columns=2, order="corner"))
    products = [(step.k_stop - step.k_start, step.first, step.last) for step in made if step.kind == StepKind.MULTIPLY]
    assert products == [(512, 0, 1), (512, 0, 1), (1024, 0, 1), (2048, 0, 1), (4096, 1, 2), (4096, 2, 3), (4096, 3, 4)]
    how = cut_by(first=4096, block=4096, columns=2, rows=2, order="corner")
    made = steps_of(4096, how)
    products = [(step.top, step.bottom, step.first, step.last) for step in made if step.kind == StepKind.MULTIPLY]
    assert products[:5] == [(0, 1, 0, 1), (0, 1, 1, 2), (1, 2, 0, 2), (0, 2, 2, 3), (2, 3, 0, 3)]
    assert all(step.early for step in made if step.kind == StepKind.MULTIPLY)


def test_fetches_run_ahead_of_products() -> None:
    how = cut_by(first=256, block=2048, columns=1, order="k")
    steps = [step.kind for step in steps_of(8192, how)]
    assert steps[:7] == [StepKind.FETCH_A, StepKind.FETCH_B] * 3 + [StepKind.MULTIPLY]


# -- how C is cut among ranks ----------------------------------------------------------------------


def problem(m: int, n: int, dtype: DType = DType.f64) -> GemmProblem:
    return GemmProblem(m, n, 100, dtype, "N", "N")


def check(cut: Partition, m: int, n: int) -> None:
    """Every element of C is in one block."""
    owner = np.full((m, n), -1)
    for place, (rows, cols) in enumerate(cut.blocks):
        part = owner[rows.start : rows.stop, cols.start : cols.stop]
        assert (part == -1).all()
        part[:] = place
    assert (owner >= 0).all()


@pytest.mark.parametrize("seed", range(60))
def test_every_element_has_one_block(seed: int) -> None:
    rng = random.Random(seed)
    m, n = rng.randint(1, 90), rng.randint(1, 90)
    dtype = rng.choice(MEASURED)
    areas = [[rng.uniform(0.05, 1) for _ in range(rng.randint(1, 4))] for _ in range(rng.randint(1, 4))]
    check(Partition.of_areas(problem(m, n, dtype), areas), m, n)
    check(Partition.of_grid(problem(m, n, dtype), ProcessGrid(rng.randint(1, 5), rng.randint(1, 5))), m, n)


def test_areas_are_what_was_asked_for() -> None:
    areas = ((0.37,), (0.25, 0.2, 0.18))
    cut = Partition.of_areas(problem(8192, 8192), areas)
    found = [len(rows) * len(cols) / 8192**2 for rows, cols in cut.blocks]
    assert found == pytest.approx([0.37, 0.25, 0.2, 0.18], abs=0.01)
    assert cut.shape == (3, 2)


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


# -- process grids and blocks ----------------------------------------------------------------------


@given(st.integers(1, 64))
def test_default_grid_uses_all_ranks_and_no_pair_is_nearer_to_a_square(ranks: int) -> None:
    grid = ProcessGrid.most_square(ranks)
    assert grid.size == ranks
    assert grid.rows <= grid.cols
    for rows in range(1, ranks + 1):
        if ranks % rows == 0 and rows <= ranks // rows:
            assert rows <= grid.rows


@given(st.integers(1, 8), st.integers(1, 8))
def test_ranks_are_numbered_row_by_row(rows: int, cols: int) -> None:
    grid = ProcessGrid(rows, cols)
    places = list(itertools.product(range(rows), range(cols)))
    assert [grid.position(rank) for rank in range(grid.size)] == places
    assert [grid.rank(*place) for place in places] == list(range(grid.size))


def test_an_explicit_grid_may_leave_ranks_over_but_not_need_more() -> None:
    assert ProcessGrid.choose(8, (1, 5)) == ProcessGrid(1, 5)
    assert ProcessGrid.choose(8, None) == ProcessGrid(2, 4)
    with pytest.raises(ParamError, match="grid 3x3 has 9 places, but there are 8 ranks"):
        ProcessGrid.choose(8, (3, 3))


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_blocks_are_contiguous_cover_everything_and_put_the_larger_ones_first(extent: int, blocks: int) -> None:
    starts = block_starts(extent, blocks)
    sizes = [stop - start for start, stop in itertools.pairwise(starts)]
    assert starts[0] == 0
    assert starts[-1] == extent
    assert len(sizes) == blocks
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
