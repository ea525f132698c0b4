"""The core of kblocks: its schedules are those of a file, and what does not fit together is refused, not read."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.helpers.canonical import canonical_digest
from uncut_mpi import _native
from uncut_mpi.errors import ParamError, PlanError, TopologyError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.blocking import blocking_of
from uncut_mpi.planning.layout import user_table
from uncut_mpi.planning.options import BLOCK_ORDERS, DELIVERIES, Blocking, ScheduleOptions, changed
from uncut_mpi.planning.schedule import Schedule
from uncut_mpi.planning.simulate import Simulations, simulate

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "golden_kblocks_digests.json"
COMPLETE = Blocking(1, 128, 256, 2, 2, 1, "k", 2, "balanced", "owner", 0, 1)


def golden_cases() -> Iterator[tuple[str, Schedule]]:
    """Return schedules of every order, place and way to hand on, of extents that divide nothing."""
    machine = dataclasses.replace(Machine.uniform(5, gemm_tflop_per_s={"f64": 1.0, "f16": 4.0}), serial_copies=True)
    hosts = Machine.uniform(5, gemm_tflop_per_s={"f64": 1.0, "f16": 4.0})
    places = ("0,0,0", "0,1,2", "h,h,h", "h1,0,3")
    ways = (
        {"splits": 1, "columns": 3, "away": 2},
        {"splits": 1, "columns": 1, "combine": "worker", "lanes": 1, "growth": 3},
        {"splits": 2, "columns": 2},
    )
    for number, (order, place, way) in enumerate(itertools.product(BLOCK_ORDERS, places, ways)):
        dtype, trans = ((DType.f64, "N"), (DType.f16, "T"))[number % 2]
        problem = GemmProblem(1301, 1003, 2107, dtype, trans, "NT"[number // 2 % 2], ldc=1400, reads_c=number % 5 > 0)
        delivery = DELIVERIES[number // 3 % 2]
        blocking = Blocking(first=100, block=600, order=order, delivery=delivery, **way)
        grid = (2, 2) if blocking.splits == 1 else (1, 2)
        options = ScheduleOptions(scheduler="kblocks", grid=grid, devices=(4, 0, 2, 1), blocking=blocking)
        if number % 4 == 3 and blocking.splits == 1:
            options = dataclasses.replace(options, grid=None, areas=((1.0,), (1.5, 0.7, 0.4)))
        on = (machine, hosts)[number % 3 == 0]
        made, _ = kblocks.schedule(problem, Placement.parse(place), 5, on, options)
        yield f"{order} {place} {dtype.name} {number}", made


def test_lists_are_as_good_as_tuples() -> None:
    problem, place, machine = GemmProblem(700, 600, 500, DType.f64), Placement.parse("0,1,2"), Machine.uniform(4)
    for lists, tuples in (
        ({"grid": [2, 2], "row_shares": [1.0, 2.0]}, {"grid": (2, 2), "row_shares": (1.0, 2.0)}),
        ({"areas": [[1.0], [1.0, 2.0, 1.0]]}, {"areas": ((1.0,), (1.0, 2.0, 1.0))}),
    ):
        made = [
            kblocks.schedule(problem, place, 4, machine, ScheduleOptions(scheduler="kblocks", **given))[0].digest()
            for given in (lists, tuples)
        ]
        assert made[0] == made[1]


def test_digests_are_those_of_the_golden_file() -> None:
    assert {name: canonical_digest(schedule) for name, schedule in golden_cases()} == json.loads(GOLDEN.read_text())


# -- what is refused -------------------------------------------------------------------------------


def given() -> _native.KBlocksInput:
    """Return all that a schedule of one rank is made of, but for steps and places."""
    made, problem = _native.KBlocksInput(), GemmProblem(64, 48, 512, DType.f64)
    made.num_ranks, made.k_starts, made.column_blocks, made.halvings = 2, [0, 512], 2, 2
    made.first_away = 4
    made.set_buffers(user_table(made.num_ranks, problem, Placement.parse("0,0,0")))
    for matrix in range(3):
        made.set_origin(matrix, False, 0)
    return made


def steps() -> _native.KBlocking:
    return blocking_of(512, COMPLETE, whole=False)


def places() -> _native.KBlocksPlaces:
    made = _native.KBlocksPlaces([0, 64], [[0]])
    made.add((0, 64), (0, 48))
    return made


def finished(made: _native.KBlocksInput) -> None:
    """Do what comes after the first input."""
    made.add_steps(steps())
    made.set_places(places(), [1])
    made.lay_out()
    _native.schedule_kblocks(made)


def test_the_input_that_others_vary_is_good() -> None:
    finished(given())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("product_lanes", lanes) for lanes in (0, -1, 3)),
        *((size, 0) for size in ("itemsize", "accumulator_itemsize", "min_slice_bytes", "first_block", "step")),
        *((size, 0) for size in ("buffer_alignment", "column_alignment", "row_blocks", "column_blocks")),
        *(("most_summands", most) for most in (0, 1, 2)),
        *(("first_away", first) for first in (-1, 5)),
        *(("k_starts", starts) for starts in ([], [0], [0, 256], [0, 256, 512])),
        ("num_ranks", 1),
        ("halvings", -1),
        ("halvings", 1),
        ("column_blocks", 1),
    ],
)
def test_numbers_out_of_range_are_refused(name: str, value: object) -> None:
    made = given()
    setattr(made, name, value)
    with pytest.raises(ValueError, match=r"(there (is|are)|have|has|are) "):
        finished(made)


@pytest.mark.parametrize("origin", [(False, -1), (False, 2), (True, 2), (True, -2)])
@pytest.mark.parametrize("matrix", range(3))
def test_origins_that_are_nowhere_are_refused(matrix: int, origin: tuple[bool, int]) -> None:
    made = given()
    made.set_origin(matrix, *origin)
    with pytest.raises(ValueError, match="on a rank or the host"):
        finished(made)


def out_of_turn() -> Iterator[Callable[[_native.KBlocksInput], object]]:
    yield lambda made: _native.schedule_kblocks(made)
    yield lambda made: made.lay_out()
    yield lambda made: (made.add_steps(steps()), made.set_places(places(), [1]), _native.schedule_kblocks(made))
    yield lambda made: (made.add_steps(steps()), made.set_places(places(), []))
    yield lambda made: (made.add_steps(steps()), made.set_places(places(), [2]), made.lay_out())
    yield lambda made: (finished(made), made.lay_out())
    yield lambda made: (finished(made), made.set_places(places(), [1]), _native.schedule_kblocks(made))
    yield lambda made: (finished(made), made.add_steps(steps()), _native.schedule_kblocks(made))
    yield lambda made: (finished(made), setattr(made, "num_ranks", 1), _native.schedule_kblocks(made))
    yield lambda made: (
        made.add_steps(steps()),
        made.set_places(places(), [1]),
        made.align(0, 0, False, False, True, 0),
    )


@pytest.mark.parametrize("act", list(out_of_turn()))
def test_calls_out_of_turn_are_refused(act: Callable[[_native.KBlocksInput], object]) -> None:
    with pytest.raises(ValueError, match=r"(first|part of k|such rank|on a rank|along k|blocks)"):
        act(given())


@pytest.mark.parametrize(
    ("row_starts", "place_of"), [([], [[0]]), ([0], [[0]]), ([0, 32, 64], [[0]]), ([0, 32, 64], [[0], [0, 0]])]
)
def test_bands_without_their_places_are_refused(row_starts: list[int], place_of: list[list[int]]) -> None:
    made, ragged = given(), _native.KBlocksPlaces(row_starts, place_of)
    ragged.add((0, 64), (0, 48))
    made.add_steps(steps())
    with pytest.raises(ValueError, match="every band of rows"):
        made.set_places(ragged, [1])


def test_blocks_that_end_before_they_begin_are_refused() -> None:
    made, turned = given(), _native.KBlocksPlaces([0, 64], [[0]])
    turned.add((64, 0), (0, 48))
    made.add_steps(steps())
    with pytest.raises(ValueError, match="ends before it begins"):
        made.set_places(turned, [1])


@pytest.mark.parametrize(
    "wrong",
    [(-1, 2, 1, 1, 2), (64, 0, 1, 1, 2), (64, 2, 0, 1, 2), (64, 2, -8, 1, 2), (64, 2, 1, 0, 2), (64, 2, 1, 1, -1)],
)
def test_edges_of_no_blocks_are_refused(wrong: tuple[int, int, int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        _native.block_edges(*wrong)


NONE = [
    *(("extent", value) for value in (0, -1)),
    *((name, value) for name in ("first", "most") for value in (0, -1)),
    *(("growth", value) for value in (1, 0, -1)),
    *((name, 0) for name in ("columns", "rows", "tail_parts")),
    *((name, -1) for name in ("halvings", "lookahead", "order")),
    ("order", 4),
]


@pytest.mark.parametrize(("name", "value"), NONE)
def test_steps_of_nothing_are_refused(name: str, value: int) -> None:
    good = {"extent": 64, "first": 8, "most": 8, "growth": 2, "columns": 1, "rows": 1, "halvings": 2, "order": 0}
    how = {**good, "whole": False, "tail_parts": 4, "lookahead": 2}
    assert _native.kblocks_steps(_native.KBlocking(**how))
    assert _native.kblocks_steps(_native.KBlocking(**{**how, "growth": 2**62}))
    with pytest.raises(ValueError, match=r"there is something to multiply|and grow"):
        _native.kblocks_steps(_native.KBlocking(**{**how, name: value}))


def test_buffers_that_are_none_are_refused() -> None:
    made = _native.KBlocksInput()
    for table in (np.zeros(41, np.uint8), np.zeros(200, np.uint8)[1:121]):
        with pytest.raises(ValueError, match="a table"):
            made.set_buffers(table)


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [one.name for one in dataclasses.fields(Blocking)])
def test_options_are_changed_as_replace_changes_them(field: str) -> None:
    other = Blocking(2, 64, 512, 3, 4, 1, "columns", 1, "earliest", "owner", 1)
    value = getattr(other, field)
    wanted = dataclasses.replace(COMPLETE, **{field: value})
    assert changed(COMPLETE, **{field: value}) == wanted
    assert hash(changed(COMPLETE, **{field: value})) == hash(wanted)
    options = ScheduleOptions(scheduler="kblocks", tile=7, devices=(1, 0))
    assert changed(options, blocking=other, grid=(1, 2)) == dataclasses.replace(options, blocking=other, grid=(1, 2))


def test_what_leaves_nothing_open_is_complete() -> None:
    assert COMPLETE.is_complete
    for one in dataclasses.fields(Blocking):
        left_out = dataclasses.replace(COMPLETE, **{one.name: one.default})
        assert left_out.is_complete == (one.name in ("away", "tail")), one.name


# -- made and simulated at once --------------------------------------------------------------------


def prepared() -> tuple[Machine, kblocks.Prepared, Schedule]:
    """Return what a schedule is made of, and the schedule."""
    machine, place = load_machine("h200-4x"), Placement.parse("0,0,0")
    problem = GemmProblem(3000, 2000, 4000, DType.f64)
    options = ScheduleOptions(scheduler="kblocks", grid=(2, 2))
    planner = kblocks.Planner(problem, place, 4, machine)
    return machine, planner.prepare(options), planner.prepare(options).schedule()


def test_a_run_is_the_schedule_and_its_simulation() -> None:
    machine, made, schedule = prepared()
    count = len(schedule.tasks)
    wanted = simulate(schedule, machine)
    with Simulations(machine) as simulations:
        runs = [made.run(most, keeps=most < 10**6) for most in (count, count - 1, 10**6)]
        waits = [simulations.begin_kblocks(run, DType.f64) for run in runs]
        with pytest.raises(ValueError, match="a run is begun once"):
            simulations.begin_kblocks(runs[0], DType.f64)
        for wait in waits[::-1]:
            wait()
        with pytest.raises(ParamError, match="wait for it once"):
            waits[0]()
    with pytest.raises(ValueError, match="kept by who asked for it"):
        runs[2].times()
    again = made.run(10**6, keeps=True)
    again.make(simulations.machine)  # after the end of the context, too
    with pytest.raises(ValueError, match="a run is begun once"):
        again.make(simulations.machine)
    for run in (runs[0], again):
        assert (run.fits, run.num_tasks, run.seconds) == (True, count, wanted.seconds)
        assert made.schedule_of(run).digest() == schedule.digest()
        assert all((one == other).all() for one, other in zip(run.times(), (wanted.start_s, wanted.end_s), strict=True))
        ends, elements = run.progress()
        assert sum(elements) == 3000 * 2000 * 4000
        assert max(ends) <= run.seconds
    assert (runs[1].fits, runs[1].num_tasks, runs[1].seconds) == (True, count, 0.0)  # too many tasks
    assert len(runs[1].times()[0]) == 0
    with pytest.raises(ParamError, match="is over"):
        simulations.begin_kblocks(made.run(count), DType.f64)


def test_only_the_limit_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made, schedule = prepared()
    made._given.most_tasks = len(schedule.tasks) - 1
    with pytest.raises(PlanError, match="the limit is 4000000: ask for larger k-blocks"):
        made.schedule()
    with pytest.raises(_native.TooManyTasksError, match="too many tasks"):
        _native.schedule_kblocks(made._given)

    def schedule_kblocks(given: _native.KBlocksInput) -> None:
        raise ValueError("vector::reserve")

    _, made, _ = prepared()
    monkeypatch.setattr(_native, "schedule_kblocks", schedule_kblocks)
    with pytest.raises(ValueError, match=r"^vector::reserve$"):
        made.schedule()


def test_a_run_without_room_is_only_said_to_be_so() -> None:
    machine, made, _ = prepared()
    machine = dataclasses.replace(machine, memory_bytes=np.full(4, 3 * 10**8))
    small = kblocks.Planner(GemmProblem(3000, 2000, 4000, DType.f64), Placement.parse("0,0,0"), 4, machine)
    with Simulations(machine) as simulations:
        run = small.prepare(made.options).run(10**6, keeps=True)
        simulations.begin_kblocks(run, DType.f64)()
        assert (run.fits, run.num_tasks, run.seconds) == (True, len(made.schedule().tasks), run.times()[1].max())
        machine = dataclasses.replace(machine, memory_bytes=np.full(4, 10**7))
        smaller = kblocks.Planner(GemmProblem(3000, 2000, 4000, DType.f64), Placement.parse("3,3,3"), 4, machine)
        run = smaller.prepare(made.options).run(10**6)
        simulations.begin_kblocks(run, DType.f64)()
        assert (run.fits, run.num_tasks, run.seconds) == (False, 0, 0.0)


def test_what_cannot_be_simulated_is_refused_when_it_is_waited_for() -> None:
    machine, made, _ = prepared()
    alone = Machine.uniform(1, gemm_tflop_per_s={"f64": 1.0})
    with Simulations(alone) as simulations:
        wait = simulations.begin_kblocks(made.run(10**6), DType.f64)
        with pytest.raises(TopologyError, match="cannot be simulated"):
            wait()
        with pytest.raises(TopologyError, match="no GEMM rate"):
            simulations.begin_kblocks(made.run(10**6), DType.f16)
    assert machine.num_ranks == 4


def test_a_run_is_made_of_input_that_fits_together() -> None:
    with pytest.raises(ValueError, match=r"(there (is|are)|have|has|are) "):
        _native.KBlocksRun(given(), [10**9, 10**9], 1000)
    made = given()
    finished(made)
    with pytest.raises(ValueError, match="input that is not laid out"):
        _native.KBlocksRun(made, [10**9, 10**9], 1000)
