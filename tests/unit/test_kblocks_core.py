"""The core of kblocks: its schedules are those of a file, and what does not fit together is refused, not read."""

from __future__ import annotations

import dataclasses
import itertools
import json
import pathlib
import types
from collections.abc import Iterator

import numpy as np
import pytest

from tests.helpers import oracle
from tests.helpers.blocking import StepKind
from tests.helpers.canonical import canonical_digest
from tests.helpers.planned import search
from tests.helpers.proven import check
from tests.helpers.shapes import with_shapes
from uncut_mpi import _native
from uncut_mpi.errors import ParamError, PlanError, TopologyError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout, LocalArray
from uncut_mpi.model.locations import Location, location_table, with_ends
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.blocking import blocking_of
from uncut_mpi.planning.buffers import user_pieces, user_table
from uncut_mpi.planning.kblocks_request import problem_in_core
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import BLOCK_ORDERS, DELIVERIES, Blocking, ScheduleOptions, changed
from uncut_mpi.planning.planner import plan
from uncut_mpi.planning.schedule import BUFFER_DTYPE, Kind, Op, Role, Schedule, native_tables
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import Simulations, machine_in_core, simulate
from uncut_mpi.planning.verify import verify
from uncut_mpi.planning.ways import Ways
from uncut_mpi.view.timeline import Timeline

GOLDEN = pathlib.Path(__file__).parents[1] / "data" / "golden_kblocks_digests.json"
COMPLETE = Blocking(1, 128, 256, 2, 2, 1, "k", 2, "balanced", "first", "owner", 0)


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
        made, _ = kblocks.schedule(Setting.of(problem, Placement.parse(place), 5, on, options))
        yield f"{order} {place} {dtype.name} {number}", made


def test_lists_are_as_good_as_tuples() -> None:
    problem, place, machine = GemmProblem(700, 600, 500, DType.f64), Placement.parse("0,1,2"), Machine.uniform(4)
    for lists, tuples in (
        ({"grid": [2, 2], "row_shares": [1.0, 2.0]}, {"grid": (2, 2), "row_shares": (1.0, 2.0)}),
        ({"areas": [[1.0], [1.0, 2.0, 1.0]]}, {"areas": ((1.0,), (1.0, 2.0, 1.0))}),
    ):
        made = [
            kblocks.schedule(Setting.of(problem, place, 4, machine, asked))[0].digest()
            for asked in (ScheduleOptions(scheduler="kblocks", **given) for given in (lists, tuples))
        ]
        assert made[0] == made[1]


def test_digests_are_those_of_the_golden_file() -> None:
    assert {name: canonical_digest(schedule) for name, schedule in golden_cases()} == json.loads(GOLDEN.read_text())


# -- what is refused -------------------------------------------------------------------------------


PROBLEM = {
    "num_ranks": 2,
    **dict.fromkeys(("serial_copies", "reads_c"), False),
    **dict.fromkeys(("op_a", "op_b"), Op.N),
    "ending": Op.N,
    "diagonal": 0,
    "dtypes": (DType.f64,) * 3,
    "locations": with_ends(location_table(2)),
    "buffers": user_table(2, GemmProblem(64, 48, 512, DType.f64), Placement.parse("0,0,0")),
    "pieces": user_pieces(GemmProblem(64, 48, 512, DType.f64), Placement.parse("0,0,0")),
    "step": 1,
    "min_slice_bytes": 1,
    "relay_bytes": 1,
    "ways": Ways(),
    "same_sums": False,
    "fuses": False,
}


def ways_with(one: tuple[float, int, int], pairs: int = 4, last: int = 1) -> Ways:
    """Return ways between two ranks, all of them like this one, of which the last leads to a place of its node."""
    return Ways([0, 2], [0, last], [one] * pairs, [1.0] * pairs, *([1.0] * 2 for _ in range(3)))


HOW = {one.name: getattr(COMPLETE, one.name) for one in dataclasses.fields(Blocking)}
ORDER = {
    "order": 0,
    "earliest": False,
    "tail_parts": 4,
    "far_apart": False,
    "from_held": False,
    "returns": True,
    "together": False,
    "at_owner": False,
}
CUT = [((0, 64), (0, 48))]
"""The blocks of places: C for one rank."""
REST = {
    "k_starts": [0, 512],
    "devices": [1],
    "rounds": [CUT],
    "aligns_for": None,
}


def request(**changes: object) -> _native.KBlocksRequest:
    """Return what the schedule of one rank is asked for by, with some things said otherwise."""
    problem, rest = ({name: changes.get(name, one[name]) for name in one} for one in (PROBLEM, REST))
    rest["rounds"] = [_native.KBlocksPlaces(cut) for cut in rest["rounds"]]
    return _native.KBlocksRequest(problem=_native.KBlocksProblem(**problem), how=cut_by(**changes), **rest)


def cut_by(**changes: object) -> _native.KBlocking:
    """Return how the rank's part is cut, with some things said otherwise that no option may be."""
    how, order = ({name: changes.get(name, one[name]) for name in one} for one in (HOW, ORDER))
    return _native.KBlocking(types.SimpleNamespace(**how), **order)


def num_tasks(asked: _native.KBlocksRequest) -> int:
    return len(_native.KBlocksLayout(asked).tables(1000)[0]) // 28


def test_the_request_that_others_vary_is_good() -> None:
    assert num_tasks(request()) == _native.KBlocksLayout(request()).count(1000) > 10


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("lanes", lanes) for lanes in (0, -1, 3)),
        *((size, 0) for size in ("min_slice_bytes", "relay_bytes", "first", "step")),
        ("dtypes", (DType.f64, DType.f64, len(DType))),
        *((size, 0) for size in ("rows", "columns")),
        ("away", -1),
        *(("k_starts", starts) for starts in ([], [0], [0, 0], [0, 256, 512])),
        *(("devices", ranks) for ranks in ([], [2], [-1])),
        ("num_ranks", 1),
        ("ways", ways_with((1.0, -1, -1), pairs=3)),
        *(("ways", ways_with((1.0, -1, -1), last=place)) for place in (2, -3)),
        *(("ways", ways_with((1.0, *relays))) for relays in ((2, -1), (-1, 0))),
        ("same_sums", True),  # not in rings
        ("rounds", []),
        ("rounds", [CUT, []]),
        ("rounds", [[((64, 0), (0, 48))]]),
    ],
)
def test_what_is_out_of_range_is_refused(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=r"(there (is|are)|have|has|are|every) "):
        request(**{name: value})


def test_products_are_not_aligned_for_a_machine_of_other_ranks() -> None:
    with pytest.raises(ValueError, match="there are as many ranks on the machine"):
        request(aligns_for=machine_in_core(Machine.uniform(3), 0))


@pytest.mark.parametrize("location", [-1, 5])
@pytest.mark.parametrize("matrix", range(3))
def test_matrices_that_are_nowhere_are_refused(matrix: int, location: int) -> None:
    with pytest.raises(ValueError, match="on a rank or the host"):
        request(buffers=edited(PROBLEM["buffers"], "location", matrix, location))


@pytest.mark.parametrize(("field", "value"), [("buffer", 3), ("buffer", -1), ("turned", 1)])
def test_pieces_that_are_nowhere_are_refused(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=r"no such buffer|stored as its matrix is"):
        request(pieces=edited(PROBLEM["pieces"], field, 1, value))


def edited(table: np.ndarray, field: str, at: int, value: int) -> np.ndarray:
    changed = table.copy()
    changed[field][at] = value
    return changed


@pytest.mark.parametrize(
    "wrong",
    [(-1, 2, 1), (64, 0, 1), (64, 2, 0), (64, 2, -8)],
)
def test_edges_of_no_blocks_are_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="at least one block"):
        _native.block_edges(*wrong)


NONE = [
    *(("extent", value) for value in (0, -1)),
    *((name, value) for name in ("first", "block") for value in (0, -1)),
    *(("growth", value) for value in (1, 0, -1)),
    *((name, 0) for name in ("columns", "rows", "tail_parts")),
    *(("order", order) for order in (-1, 4)),
]


@pytest.mark.parametrize(("name", "value"), NONE)
def test_steps_of_nothing_are_refused(name: str, value: int) -> None:
    assert cut_by().steps(64)
    assert cut_by(growth=2**62).steps(64)
    with pytest.raises(ValueError, match=r"there is something to multiply|and grow"):
        cut_by(**{name: value}).steps(value if name == "extent" else 64)


def test_lengths_of_k_blocks_that_no_number_holds_are_the_longest() -> None:
    how = cut_by(first=2**32, block=2**33, growth=2**31 + 1, columns=1, order=1)
    fetched = [tuple(step[1:3]) for step in how.steps(2**34) if step[0] == StepKind.FETCH_A]
    assert fetched == [(0, 2**32), (2**32, 3 * 2**32), (3 * 2**32, 2**34)]


@pytest.mark.parametrize("growth", [2, 3, 2**62])
def test_k_blocks_are_counted_without_making_them(growth: int) -> None:
    how = cut_by(first=3, block=50, growth=growth, columns=1, order=1)
    for extent in (1, 3, 4, 7, 50, 51, 600, 601):
        made = sum(kind == StepKind.FETCH_A for kind, *_ in how.steps(extent))
        assert made <= how.count_k_blocks(extent) <= made + 1
    assert how.count_k_blocks(2**62) == pytest.approx(2**62 / 50, rel=1e-9)


def test_buffers_that_are_none_are_refused() -> None:
    for table in (np.zeros(41, np.uint8), np.zeros(200, np.uint8)[1:121], np.zeros(80, np.uint8)):
        with pytest.raises(ValueError, match=r"a table|no such buffer"):
            request(buffers=table)


# -- several blocks of C for each rank -------------------------------------------------------------


def test_every_rank_takes_one_block_of_c_after_the_other() -> None:
    problem, machine = GemmProblem(61, 90, 77, DType.f16), Machine.uniform(4)
    for place, splits, order in itertools.product(("0,0,0", "0,1,2", "h,h,h"), (1, 2), BLOCK_ORDERS):
        placement = Placement.parse(place)
        how = dataclasses.replace(COMPLETE, splits=splits, first=8, block=16, order=order, rows=1 + (order == "corner"))
        rounds = []
        for cols in ((0, 30, 50), (50, 80, 90)):
            blocks = [((0, 61), part) for part in itertools.pairwise(cols)]
            if splits == 1:
                blocks = [(rows, part) for rows in ((0, 33), (33, 61)) for _, part in blocks]
            rounds.append(_native.KBlocksPlaces(blocks))
        asked = _native.KBlocksRequest(
            problem=problem_in_core(Setting.of(problem, placement, 4, machine)),
            how=blocking_of(how, far_apart=False),
            k_starts=[0, 77] if splits == 1 else [0, 40, 77],
            devices=[2, 0, 1, 3],
            rounds=rounds,
        )
        layout = _native.KBlocksLayout(asked)
        *tables, buffers = layout.tables(10**5)
        about = {"num_ranks": 4, "problem": problem, "placement": placement, "scheduler": "kblocks", "tile": 0}
        made = Schedule(
            **about,
            grid=(3 - splits, 2),
            splits=splits,
            buffers=np.frombuffer(buffers, BUFFER_DTYPE),
            locations=location_table(4),
            pieces=user_pieces(problem, placement),
            **native_tables(*tables),
        )
        verify(made, lower(made))
        assert oracle.is_wrong(made) == ""
        assert layout.count(10**5) == len(made.tasks) <= asked.tasks_at_most


# -- options ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", [one.name for one in dataclasses.fields(Blocking)])
def test_options_are_changed_as_replace_changes_them(field: str) -> None:
    other = Blocking(2, 64, 512, 3, 4, 1, "columns", 1, "earliest", "held", "owner", 1)
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
        of_rings = ("slots", "b_slots", "c_rows", "c_cols", "c_slots", "sweep", "barrier")
        assert left_out.is_complete == (one.name in ("away", "tail", *of_rings)), one.name


# -- made and simulated at once --------------------------------------------------------------------


def prepared() -> tuple[Machine, kblocks.Prepared, Schedule]:
    """Return what a schedule is made of, and the schedule."""
    machine, place = load_machine("h200-4x"), Placement.parse("0,0,0")
    problem = GemmProblem(3000, 2000, 4000, DType.f64)
    options = ScheduleOptions(scheduler="kblocks", grid=(2, 2))
    planner = kblocks.Planner(Setting.of(problem, place, 4, machine))
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
        known = (wanted.start_s, wanted.end_s, wanted.throttled_s)
        assert all((one == other).all() for one, other in zip(run.times(), known, strict=True))
        ends, elements = run.progress()
        assert sum(elements) == 3000 * 2000 * 4000
        assert max(ends) <= run.seconds
    assert (runs[1].fits, runs[1].num_tasks, runs[1].seconds) == (True, count, 0.0)  # too many tasks
    assert len(runs[1].times()[0]) == 0
    with pytest.raises(ParamError, match="is over"):
        simulations.begin_kblocks(made.run(count), DType.f64)


def test_only_the_limit_is_said_to_be_one(monkeypatch: pytest.MonkeyPatch) -> None:
    _, made, schedule = prepared()
    most = len(schedule.tasks) - 1
    with pytest.raises(PlanError, match=rf"makes more than {most} tasks .* the limit is {most}: ask for larger k-bl"):
        made.schedule(most)
    with pytest.raises(_native.TooManyTasksError, match="too many tasks"):
        _native.KBlocksLayout(made.request).tables(most)

    class Layout:
        rank_bytes = ()

        def __init__(self, request: _native.KBlocksRequest) -> None: ...

        def tables(self, most_tasks: int) -> None:
            raise ValueError("vector::reserve")

    monkeypatch.setattr(_native, "KBlocksLayout", Layout)
    with pytest.raises(ValueError, match=r"^vector::reserve$"):
        made.schedule()


def test_a_run_without_room_is_only_said_to_be_so() -> None:
    machine, made, _ = prepared()
    machine = dataclasses.replace(machine, memory_bytes=np.full(4, 3 * 10**8))
    small = kblocks.Planner(Setting.of(GemmProblem(3000, 2000, 4000, DType.f64), Placement.parse("0,0,0"), 4, machine))
    with Simulations(machine) as simulations:
        run = small.prepare(made.options).run(10**6, keeps=True)
        simulations.begin_kblocks(run, DType.f64)()
        assert (run.fits, run.num_tasks, run.seconds) == (True, len(made.schedule().tasks), run.times()[1].max())
        machine = dataclasses.replace(machine, memory_bytes=np.full(4, 10**7))
        smaller = kblocks.Planner(
            Setting.of(GemmProblem(3000, 2000, 4000, DType.f64), Placement.parse("3,3,3"), 4, machine)
        )
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


# -- schedules of `kblocks` whose ranks begin with what they hold of matrices in parts -------------


ROWS, COLS = Layout.rows(), Layout.cols()


def placed(problem: GemmProblem, *layouts: Layout, ranks: int = 4) -> Placement:
    """Return where A, B and C are, on devices; their shapes are those of what is stored."""
    arrays = [LocalArray(Location.device(rank)) for rank in range(ranks)]
    shapes = problem.a_shape, problem.b_shape, (problem.m, problem.n)
    return Placement(*(layout.bind(shape, arrays) for layout, shape in zip(layouts, shapes, strict=True)))


def planned(problem: GemmProblem, placement: Placement, ranks: int = 4, **blocking) -> Schedule:
    grid = (1, ranks) if placement.a.word.startswith("cols") else (ranks, 1)
    options = ScheduleOptions(scheduler="kblocks", grid=grid, blocking=Blocking(**blocking))
    return kblocks.schedule(Setting.of(problem, placement, ranks, Machine.uniform(ranks), options))[0]


def first_products(schedule: Schedule) -> list[int]:
    """Return the first product of each rank."""
    products = np.flatnonzero(schedule.tasks["kind"] == Kind.GEMM)
    return [int(products[schedule.tasks["rank"][products] == rank][0]) for rank in range(schedule.num_ranks)]


def copied(schedule: Schedule) -> set[tuple[int, int]]:
    lanes = schedule.lanes[schedule.tasks["lane"][schedule.tasks["kind"] == Kind.COPY]]
    return {(int(one["source"]), int(one["destination"])) for one in lanes}


@pytest.mark.parametrize("layout", [ROWS, COLS], ids=["rows", "cols"])
@pytest.mark.parametrize("dtype", [DType.f64, DType.bf16])
def test_a_rank_begins_at_once_with_what_it_holds_and_copies_none_of_it(layout: Layout, dtype: DType) -> None:
    problem = GemmProblem(64, 64, 64, dtype, reads_c=True)
    schedule = planned(problem, placed(problem, layout, layout, layout))
    users = np.flatnonzero(schedule.buffers["role"] == Role.USER)
    for task in first_products(schedule):
        of_a, of_b = schedule.operands_of(task)["region"][1:3]
        assert np.isin(schedule.regions["buffer"][[of_a, of_b]], users).all()
        # Of C it may await what brings it, of A and B nothing.
        assert not schedule.tasks["num_awaits"][task] or dtype.sums_wider
    assert all(source != to for source, to in copied(schedule))
    check(schedule)


def test_each_holder_serves_one_rank_at_a_time() -> None:
    """Each rank's first piece comes from the one behind it."""
    problem = GemmProblem(64, 64, 64, DType.f64)
    served = {}
    for begin in ("held", "first"):
        schedule = planned(problem, placed(problem, ROWS, ROWS, ROWS), begin=begin, columns=1, order="k", first=16)
        first: dict[int, int] = {}
        for _, source, to, _ in schedule.copies().tolist():
            if source != to:
                first.setdefault(to, source)
        served[begin] = first
    assert served["held"] == {0: 1, 1: 2, 2: 3, 3: 0}
    assert set(served["first"].values()) != {0, 1, 2, 3}


@pytest.mark.parametrize("counts", [(16, 16, 16, 16), (0, 31, 2, 31), (64, 0, 0, 0), (1, 3, 41, 19)])
@pytest.mark.parametrize("order", ["k", "columns", "corner", "k-columns"])
def test_parts_of_any_extents_in_any_order_of_blocks(counts: tuple[int, ...], order: str) -> None:
    problem = GemmProblem(61, 47, 64, DType.f64, trans_b="T", reads_c=True)
    placement = placed(problem, Layout.cols(counts), Layout.cols(counts[::-1]), ROWS)
    options = ScheduleOptions(scheduler="kblocks", grid=(2, 2), blocking=Blocking(begin="held", first=4, order=order))
    check(kblocks.schedule(Setting.of(problem, placement, 4, Machine.uniform(4), options))[0])


@pytest.mark.parametrize("splits", [2, 4])
def test_ranks_that_share_k_begin_with_what_they_hold_of_their_part(splits: int) -> None:
    problem = GemmProblem(40, 24, 64, DType.f32, trans_a="T", reads_c=True)
    placement = placed(problem, ROWS, ROWS, ROWS)
    options = ScheduleOptions(
        scheduler="kblocks", grid=(4 // splits, 1), blocking=Blocking(begin="held", splits=splits, first=4)
    )
    check(kblocks.schedule(Setting.of(problem, placement, 4, Machine.uniform(4), options))[0])


def test_bytes_are_those_of_the_stationary_form() -> None:
    problem = GemmProblem(64, 96, 128, DType.f64)
    schedule = planned(problem, placed(problem, ROWS, ROWS, ROWS))
    moved = sum(size for _, source, to, size in schedule.copies().tolist() if source != to)
    assert moved == 3 * 96 * 128 * 8  # each rank is sent what it lacks of B


ACROSS = {
    "rows": ((ROWS, COLS, COLS), (1, 4), {"order": "corner", "rows": 4, "columns": 1}),
    "cols": ((ROWS, COLS, ROWS), (4, 1), {"order": "columns", "columns": 4}),
    "cols of a corner": ((ROWS, COLS, ROWS), (4, 1), {"order": "corner", "rows": 1, "columns": 4}),
}


@pytest.mark.parametrize("which", ACROSS)
@pytest.mark.parametrize("dtype", [DType.f64, DType.bf16])
@pytest.mark.parametrize("trans", ["NN", "TT"])
def test_a_rank_begins_with_rows_or_columns_of_c_for_which_it_holds_all(which: str, dtype: DType, trans: str) -> None:
    """A is gathered by rows, or B by columns, while products run."""
    layouts, grid, how = ACROSS[which]
    if trans == "TT":
        layouts = (COLS, ROWS, layouts[2])
    problem = GemmProblem(4096, 4096, 64, dtype, *trans, reads_c=True)
    options = ScheduleOptions(scheduler="kblocks", grid=grid, blocking=Blocking(first=64, block=64, **how))
    placement = placed(problem, *layouts)
    schedule = kblocks.schedule(Setting.of(problem, placement, 4, Machine.uniform(4), options))[0]
    users = np.flatnonzero(schedule.buffers["role"] == Role.USER)
    for task in first_products(schedule):
        assert np.isin(schedule.regions["buffer"][schedule.operands_of(task)["region"][1:3]], users).all()
        assert not schedule.tasks["num_awaits"][task]
    assert all(source != to for source, to in copied(schedule))
    assert sum(size for *_, size in schedule.copies().tolist()) == 3 * 4096 * 64 * dtype.itemsize
    verify(schedule, lower(schedule))
    served = {}
    for _, source, to, _ in schedule.copies().tolist():
        served.setdefault(to, source)
    assert served == {0: 1, 1: 2, 2: 3, 3: 0}


@pytest.mark.parametrize("counts", [(16, 16, 16, 16), (0, 31, 2, 31), (64, 0, 0, 0), (1, 3, 41, 19), (20, 20, 24, 0)])
@pytest.mark.parametrize("which", ACROSS)
@pytest.mark.parametrize(("dtype", "first"), [(DType.f64, 8), (DType.bf16, 64)])
@pytest.mark.parametrize("c", ["in parts", "in host memory", "on one rank"])
def test_rows_and_columns_of_any_extents(counts: tuple[int, ...], which: str, dtype: DType, first: int, c: str) -> None:
    layouts, grid, how = ACROSS[which]
    problem = GemmProblem(64, 64, 40, dtype, reads_c=True)
    placement = placed(problem, Layout.rows(counts), Layout.cols(counts), layouts[2])
    if c != "in parts":
        where = Location.host() if c == "in host memory" else Location.device(1)
        placement = dataclasses.replace(placement, c=where)
    options = ScheduleOptions(scheduler="kblocks", grid=grid, blocking=Blocking(first=first, block=64, **how))
    check(kblocks.schedule(Setting.of(problem, placement, 4, Machine.uniform(4), options))[0])


@pytest.mark.parametrize("counts", [(20, 20, 24, 0), (11, 49, 4, 0), (0, 0, 40, 24)])
@pytest.mark.parametrize("order", ["columns", "corner"])
def test_ranks_that_begin_at_one_column_may_have_other_blocks(counts: tuple[int, ...], order: str) -> None:
    """A rank that holds none of B has equal blocks, one that holds the first columns has a block of these."""
    problem = GemmProblem(64, 64, 64, DType.f64, reads_c=True)
    how = Blocking(begin="held", order=order, rows=1, columns=2, first=16, block=16)
    options = ScheduleOptions(scheduler="kblocks", grid=(4, 1), blocking=how)
    placement = placed(problem, ROWS, Layout.cols(counts), ROWS)
    check(kblocks.schedule(Setting.of(problem, placement, 4, Machine.uniform(4), options))[0])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(
    ("shape", "layouts"), [((8192, 28672, 8192), (ROWS, COLS, COLS)), ((8192, 8192, 28672), (COLS, ROWS, ROWS))]
)
def test_tensor_parallel_products_move_most_bytes_while_they_multiply(ranks, shape, layouts) -> None:
    """Tokens in rows are gathered and multiplied by columns of weights; the next product is reduced to rows again."""
    problem = GemmProblem(*shape, DType.bf16, reads_c=False)
    # At the power limit a device that waits for copies rests, and that pays as well.
    machine = with_shapes(load_machine("h200-4x").subset(range(ranks)), sustained=1.0)
    schedule = plan(problem, placed(problem, *layouts, ranks=ranks), ranks, machine).schedule
    times = simulate(schedule, machine)
    total, hidden = Timeline.of(schedule, times.start_s, times.end_s, "predicted").moved
    assert hidden >= 0.9 * total > 0


def test_it_is_faster_and_a_search_finds_it() -> None:
    machine = dataclasses.replace(Machine.uniform(4), latency_s=np.full((5, 5), 1e-5))
    problem = GemmProblem(4096, 4096, 4096, DType.f64)
    placement = placed(problem, ROWS, ROWS, ROWS)
    seconds = {
        begin: simulate(planned(problem, placement, begin=begin), machine).seconds for begin in ("first", "held")
    }
    assert seconds["held"] < 0.95 * seconds["first"]
    found = search(problem, placement, 4, machine, ScheduleOptions(scheduler="kblocks"))
    assert found.best.options.blocking.begin == "held"
    asked = ScheduleOptions(scheduler="kblocks", blocking=Blocking(begin="first"))
    others = search(problem, placement, 4, machine, asked)
    assert {one.options.blocking.begin for one in others.candidates} == {"first"}
    assert found.best.predicted_s < 0.96 * others.best.predicted_s


def test_whole_matrices_are_taken_from_the_first_k_on() -> None:
    problem = GemmProblem(64, 64, 64, DType.f64)
    found = search(problem, Placement.parse("0,1,0"), 4, Machine.uniform(4), ScheduleOptions(scheduler="kblocks"))
    assert {one.options.blocking.begin for one in found.candidates} == {"first"}
