"""Batches: plans of random ones are proved and interpreted, and a product of two products' operands is refused."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest

from tests.helpers.by_hand import ByHand
from tests.helpers.fuzz import AS_IF_LARGE
from tests.helpers.interpret import mismatch, random_data, random_order, reference
from tests.helpers.layouts import batch_of, batch_placement, blocks_of, diagonal, random_batch, user_parts
from uncut_mpi.api.stored import turned
from uncut_mpi.device.cuda.warmup import gemm_signatures
from uncut_mpi.device.files import FileWindows
from uncut_mpi.device.host.bodies import Bundled, bind_bodies
from uncut_mpi.errors import ParamError, ScheduleError
from uncut_mpi.model.alike import Alike
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.parts import BoundLayout, Order, Part, edges_of
from uncut_mpi.model.placement import MATRICES, Matrix, Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import batch
from uncut_mpi.planning.builder import RegionRef, ScheduleBuilder
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.metrics import METRICS
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.planner import Planned, plan
from uncut_mpi.planning.schedule import Factor, Kind, Op, Role, Schedule
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.planning.verify import verify
from uncut_mpi.view.traffic import traffic

MACHINES = {ranks: Machine.uniform(ranks) for ranks in range(1, 9)}


@pytest.mark.parametrize("seed", range(80))
def test_random_batches_are_proved_and_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed % 2:  # products are cut as if they were large
        for name, value in AS_IF_LARGE.items():
            monkeypatch.setattr(batch, name, value)
    rng = random.Random(seed)
    ranks = rng.randint(1, 8)
    problem, placement = random_batch(rng, ranks, rng.choice((DType.f64, DType.f32, DType.bf16, DType.c128)))
    made = plan(problem, placement, ranks, MACHINES[ranks]).schedule
    verify(made, lower(made))
    assert mismatch(made, random_data(problem, seed), random_order(made, seed)) == ""
    assert Schedule.decode(made.encode()).digest() == made.digest()


def _planned(
    shapes: list[tuple[int, int, int]], where: Location, ranks: int = 2, options: ScheduleOptions | None = None
) -> Planned:
    problem = batch_of(shapes)
    placement = batch_placement(problem, lambda shape: BoundLayout.whole(shape, where))
    return plan(problem, placement, ranks, MACHINES[ranks], options)


def test_a_product_of_operands_of_two_products_is_refused() -> None:
    made = _planned([(8, 8, 8)] * 3, Location.device(0), 1).schedule
    regions, tasks = made.regions.copy(), made.operands["region"][made.tasks["first_operand"][1] + 1]
    other = made.operands["region"][made.tasks["first_operand"][0] + 1]  # A of the first product for that of the second
    regions[int(tasks)] = regions[int(other)]
    with pytest.raises(ScheduleError, match=r"op\(A\) holds k \[0, 8\) and op\(B\) holds k \[8, 16\)"):
        verify(dataclasses.replace(made, regions=regions))


def test_products_are_dealt_whole_where_there_are_many_and_cut_where_there_are_few() -> None:
    many = _planned([(128, 128, 128)] * 100, Location.host()).schedule
    of_ranks = np.bincount(many.tasks["rank"][many.tasks["kind"] == Kind.GEMM], minlength=2)
    assert of_ranks.tolist() == [50, 50]
    assert all(link.nbytes == link.least_bytes for link in traffic(many).links)
    few = _planned([(2048, 2048, 2048)] * 3, Location.host()).schedule
    multiplied = few.tasks[few.tasks["kind"] == Kind.GEMM]
    written = few.regions[few.operands["region"][multiplied["first_operand"]]]
    elements = np.bincount(multiplied["rank"], written["rows"] * written["cols"])
    assert elements.tolist() == [1.5 * 2048**2] * 2
    assert len(multiplied) > 4  # in pieces, of which one is multiplied while another one comes
    verify(few, lower(few))
    inward, *_ = traffic(few).links
    assert inward.nbytes == inward.least_bytes + 2048**2 * 8  # an operand of the product that is cut
    at_home = _planned([(128, 128, 128)] * 100, Location.device(1)).schedule
    assert {*at_home.tasks["rank"].tolist()} == {1}
    assert len(at_home.tasks) == 100


@pytest.mark.parametrize(
    "options", [{"grid": (2, 1)}, {"tile": 512, "scheduler": "auto"}, {"blocking": Blocking(splits=2)}]
)
def test_options_of_one_product_are_refused(options: dict[str, Any]) -> None:
    problem = batch_of([(8, 8, 8)] * 4)
    placement = batch_placement(problem, lambda shape: BoundLayout.whole(shape, Location.host()))
    with pytest.raises(ParamError, match=f"{next(iter(options))}.* was given, which is for one product and no batch"):
        plan(problem, placement, 2, MACHINES[2], ScheduleOptions(**options))


def test_a_batch_takes_as_many_ranks_as_its_metric_is_least_of() -> None:
    problem = batch_of([(512, 512, 512)] * 16)
    placement = batch_placement(problem, lambda shape: BoundLayout.whole(shape, Location.host()))
    watts = {"busy_watts": np.full(4, 700.0), "idle_watts": np.full(4, 5.0), "active_watts": np.full(4, 600.0)}
    machine = dataclasses.replace(MACHINES[4], **watts)
    values = {}
    for name in METRICS:
        planned = plan(problem, placement, 4, machine, ScheduleOptions(metric=name))
        values[name] = [METRICS[other].value(simulate(planned.schedule, machine)) for other in METRICS]
        ranks = {*planned.schedule.tasks["rank"].tolist()}
        assert name == "edp" or (len(ranks) == 4) == (name == "time"), name
    for at, name in enumerate(METRICS):
        assert values[name][at] == min(of[at] for of in values.values())
    with pytest.raises(ParamError, match="needs the devices' power"):
        plan(problem, placement, 4, MACHINES[4], ScheduleOptions(metric="pdp"))


def test_what_lies_together_is_one_copy_and_large_groups_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = batch_of([(30, 20, 10)] * 64)
    stacks = (
        BoundLayout(
            (64 * rows, 64 * cols),
            (Part((0, 64 * rows), (0, 64 * cols), Location.host(), "F", rows, 64),),
            blocks=Alike([((rows, cols), 64)]),
        )
        for rows, cols in ((30, 10), (10, 20), (30, 20))
    )
    placement = Placement(*stacks)
    plenty = plan(problem, placement, 1, MACHINES[1]).schedule
    assert np.bincount(plenty.tasks["kind"]).tolist() == [4, 64]
    monkeypatch.setattr(batch, "LEAST_GROUP_BYTES", 4096)
    monkeypatch.setattr(batch, "AT_ONCE_BYTES", 1 << 14)
    turns = plan(problem, placement, 1, MACHINES[1]).schedule
    assert turns.softbuf_bytes()[0] < plenty.softbuf_bytes()[0] / 2
    copies = np.bincount(turns.tasks["kind"])[Kind.COPY]
    assert copies == 4 * -(-copies // 4) >= 4 * 8
    for made in (plenty, turns):
        verify(made, lower(made))
        assert mismatch(made, random_data(problem), random_order(made, 1)) == ""


def test_what_one_call_makes_is_expected_to_begin_once_where_no_flag_is_awaited() -> None:
    machine = load_machine("h200-4x")

    def expected_s(count: int, *, awaits_a_peer: bool) -> float:
        build = ByHand(4)
        if awaits_a_peer:
            there, here = build.add(1), build.add(0)
            copied = build.copy(build.copy_lane(1, 1, 0), here, there)
            build.copy(build.copy_lane(0, 0, build.host), build.add(Location.host()), here, [copied])
        for _ in range(count):
            c, a, b = (build.add(0, 128, 128) for _ in "cab")
            build.task(Kind.GEMM, build.compute_lane(0), c, [(a, Factor.ALPHA, Op.N), (b, Factor.ONE, Op.N)])
        return simulate(build.done(), machine).seconds

    assert expected_s(64, awaits_a_peer=False) < 8 * expected_s(1, awaits_a_peer=False)
    assert expected_s(64, awaits_a_peer=True) > 4 * expected_s(64, awaits_a_peer=False)


def test_little_memory_is_used_again() -> None:
    shapes = [(100, 80, 60)] * 8 + [(30, 90, 70)]
    plenty = _planned(shapes, Location.host(), 1).schedule
    room = int(plenty.softbuf_bytes()[0]) // 4
    problem = plenty.problem
    for device_memory in (room, 70 << 10):  # the second has not room for a product
        tight = _planned(shapes, Location.host(), 1, ScheduleOptions(device_memory=device_memory)).schedule
        assert 0 < tight.softbuf_bytes()[0] <= device_memory
        verify(tight, lower(tight))
        assert mismatch(tight, random_data(problem), random_order(tight, 1)) == ""


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([Part((0, 2), (0, 2), Location.host())], "0 elements of a matrix of 3×3"),
        (
            [Part((0, 2), (0, 2), Location.host()), Part((2, 5), (1, 5), Location.host())],
            "is no part of a matrix of 3×3",
        ),
    ],
)
def test_parts_are_the_blocks_of_a_batch(parts: list[Part], message: str) -> None:
    with pytest.raises(ParamError, match=message):
        BoundLayout((5, 5), tuple(parts), blocks=((2, 2), (3, 3)))


def test_blocks_that_follow_one_another_are_one_part() -> None:
    part = Part((4, 10), (6, 15), Location.device(1), "C", 5, 3)  # of 2×3, each stored by rows
    assert (part.stored_shape, part.elements, part.transposed.transposed) == ((3, 6), 18, part)
    assert edges_of([part]).tolist() == [[4, 6, 6, 9], [6, 8, 9, 12], [8, 10, 12, 15]]
    first = BoundLayout.whole((4, 6), Location.host())
    bound = BoundLayout((10, 15), (*first.parts, part), blocks=[(4, 6), *[(2, 3)] * 3])
    assert BoundLayout.decoded(bound.encoded()) == bound == bound.transposed.transposed
    singles = [BoundLayout.whole((2, 3), Location.device(1), "C", 5)] * 3
    assert diagonal([first, *singles]).blocks == bound.blocks
    with pytest.raises(ParamError, match=r"0 elements of a matrix of 2×3"):
        BoundLayout((12, 18), (*first.parts, part), blocks=[(4, 6), *[(2, 3)] * 4])
    with pytest.raises(ParamError, match="is no part of a matrix of 3×3"):
        BoundLayout((10, 15), (*first.parts, part), blocks=[(4, 6), (3, 3), (3, 3), (0, 3)])


@pytest.mark.parametrize(
    ("part", "read"),
    [
        (Part((0, 3), (0, 12), Location.host(), "C", 4, 3), ("F", 1)),  # of 1×4, without gaps
        (Part((0, 12), (0, 3), Location.host(), "C", 1, 3), ("F", 4)),  # of 4×1
        (Part((0, 3), (0, 12), Location.host(), "C", 5, 3), None),
        (Part((0, 12), (0, 3), Location.host(), "C", 2, 3), None),
        (Part((0, 6), (0, 6), Location.host(), "C", 2, 3), None),
    ],
    ids=str,
)
def test_single_rows_and_columns_are_read_in_either_order(part: Part, read: tuple[Order, int] | None) -> None:
    found = turned(part)
    assert found is None if read is None else found == dataclasses.replace(part, order=read[0], ld=read[1])
    assert found is None or turned(found) == part
    # What an element's place is by order, leading dimension and block.
    if found is not None:
        memory = np.arange(12)
        held = [
            np.lib.stride_tricks.as_strided(memory, (one.ld, one.stored_shape[1]), (8, 8 * one.ld))
            for one in (part, found)
        ]
        blocks = []
        for one, array in zip((part, found), held, strict=True):
            rows, cols = one.stored_shape[0], one.stored_shape[1] // one.count
            its = [array[:rows, at * cols : (at + 1) * cols] for at in range(one.count)]
            blocks.append([block.T if one.order == "C" else block for block in its])
        assert np.array_equal(*blocks)


def test_values_in_a_row_are_kept_as_runs() -> None:
    values = [(1, 2)] * 3 + [(2, 2)] + [(1, 2)] * 2
    alike = Alike.of(values)
    assert alike.runs == (((1, 2), 3), ((2, 2), 1), ((1, 2), 2))
    assert Alike.of(alike) is alike
    assert [*alike] == values == [alike[at] for at in range(len(alike))]
    assert alike[-1] == (1, 2)
    assert alike[2:4] == values[2:4]
    assert alike == Alike([((1, 2), 1), ((3, 3), 0), ((1, 2), 2), ((2, 2), 1), ((1, 2), 2)]) != Alike.of(values[1:])
    assert hash(alike) == hash(Alike.of(iter(values)))
    assert Alike.decoded(alike.encoded()) == alike
    assert np.array_equal(alike.table(2), values)
    assert Alike().table(3).shape == (0, 3)
    assert not Alike()
    with pytest.raises(IndexError):
        alike[6]


@pytest.mark.parametrize("dtype", [DType.f32, DType.c128, DType.bf16], ids=str)
@pytest.mark.parametrize("factors", [(1.0, 0.0), (0.5, 1.0), (-1.5, 0.25), (0.0, 2.0)], ids=str)
def test_numpy_makes_products_of_one_shape_at_once(dtype: DType, factors: tuple[float, float]) -> None:
    problem = batch_of([(7, 5, 6)] * 4 + [(5, 5, 6)] * 3, dtype, trans_a="T")
    lds = {Matrix.A: 9, Matrix.B: 6, Matrix.C: 8}
    placement = Placement(
        *(
            diagonal(
                [
                    BoundLayout.whole((bottom - top, right - left), Location.device(0), "F", lds[matrix])
                    for (top, bottom), (left, right) in blocks_of(problem, matrix)
                ]
            )
            for matrix in MATRICES
        )
    )
    made = plan(problem, placement, 1, MACHINES[1]).schedule
    alpha, beta = factors
    data = random_data(problem, alpha=alpha, beta=beta)
    memory = np.full((len(made.buffers), 2048), 0xFF, np.uint8)  # at equal steps
    held = [
        np.ndarray((ld, cols), dtype.numpy, row, order="F")
        for row, (ld, cols) in zip(memory, made.buffers[["ld", "cols"]].tolist(), strict=True)
    ]
    for matrix, values in zip(MATRICES, (data.a, data.b, data.c), strict=True):
        for _, part, place in user_parts(made, matrix, held):
            part[...] = values[place]
    bound = bind_bodies(lower(made).rank_list(0), np.array([row.ctypes.data for row in memory]), FileWindows())
    assert sum(isinstance(one, Bundled) for one in bound.values()) == (0 if dtype is DType.bf16 else 5)
    for body in bound.values():
        body([0.0, 1.0, alpha, beta], lambda: None)
    result, error = reference(problem, data)
    for _, part, place in user_parts(made, Matrix.C, held):
        assert (np.abs(part - result[place]) <= error[place]).all()


def test_what_is_warmed_up_for_a_batch_is_each_kind_of_its_products_once() -> None:
    shapes = [(7, 5, 6), (5, 5, 6), (5, 5, 6), (7, 5, 6), (6, 6, 6)] * 3
    program = lower(_planned(shapes, Location.device(0), 1).schedule).rank_list(0)
    addresses = 256 * (1 + np.arange(len(program.buffers)))
    found = gemm_signatures(program, addresses)
    assert {(one.c.rows, one.c.cols, one.a.cols) for one in found} == {*shapes}
    assert len(found) == 3 * 3  # beta may be 0, 1 or neither
    assert gemm_signatures(dataclasses.replace(program, operations=program.operations[:0]), addresses) == set()


def test_copies_that_follow_one_another_at_both_ends_are_one() -> None:
    build = ScheduleBuilder(1, GemmProblem(4, 4, 40, DType.f64), Placement.parse("h,0,0"))
    shape = {"rows": 4, "cols": 40, "dtype": DType.f64}
    there = build.buffer(at=Location.host(), role=Role.USER, matrix=Matrix.A, ld=5, **shape)
    here = build.buffer(at=0, role=Role.PANEL, ld=4, offset=0, **shape)
    columns = [(0, 4), (4, 10), (10, 12), (20, 22), (22, 30)]  # two runs
    for start, stop in columns:
        to, source = (RegionRef(at, 0, start, 4, stop - start) for at in (here, there))
        build.task(Kind.COPY, build.copy_lane(0, build.host, 0), to, [(source, Factor.ONE, Op.N)])
    whole = RegionRef(here, 0, 0, 4, 8), RegionRef(here, 0, 4, 4, 8)  # one over the other, in this order
    for to, source in (whole, whole[::-1]):
        build.task(Kind.COPY, build.copy_lane(0, 0, 0), to, [(source, Factor.ONE, Op.N)])
    program = lower(build.build(scheduler="test", grid=(1, 1), tile=0)).rank_list(0)
    memory = np.random.default_rng(1).random((2, 1000))
    bodies = bind_bodies(program, np.array([row.ctypes.data for row in memory]), FileWindows())
    assert [isinstance(one, Bundled) for one in bodies.values()] == [False, True, True, False, True, False, False]
    assert sum(one.copy_bytes for one in bodies.values()) == 8 * 4 * (22 + 16)
    first, second = (
        np.ndarray((4, 40), buffer=row, strides=(8, 8 * ld)) for row, ld in zip(memory, (5, 4), strict=True)
    )
    for body in [*bodies.values()][:5]:
        body([0.0, 1.0, 1.0, 0.0], lambda: None)
    copied = [*range(12), *range(20, 30)]
    assert np.array_equal(second[:, copied], first[:, copied])
    assert not (second[:, 12:20] == first[:, 12:20]).any()
