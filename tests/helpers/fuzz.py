"""
Problems of any kind for hypothesis, and what must hold of every schedule that is made for one.

What a plan can be asked (`uncut_mpi.planning.setting.Setting`) is drawn here:

- ranks: 1 to 64, on 1 to 64 nodes of any sizes, numbered node by node or in any other way;
- matrices: whole or in parts, of a grid with any cuts, dealt to ranks at random, or of any rectangles; stored by rows
  or columns, in memory of any kind and in files, a rectangle with one holder or several, some their owner's alone;
- types: every one that A, B and C may have together, and every op;
- products, also of matrices that have a form, parts and triangles of C, C that is only scaled, copies, and batches;
- schedulers with any options, searches, several schedules to try, and room on devices and in host memory;
- products in chunks, as if a few tasks were too many.

Not drawn: matrices larger than some hundred elements, little room on many ranks, metrics other than time, measured
machines, and what rivals take beside their tiles. Bundles are no part of a plan: executors form them of what a list has
in a row.

What must hold. `verify` proves the schedule and its lists (C++, on tables). `oracle.is_wrong` executes the tasks on
random numbers that stand for symbols. A sum that lacks one k of one element, or has one twice, is another number then,
and so is beta C twice or never. Messages go from SEND to RECV there. It finds races by comparing all pairs, and shares
nothing with the proof. `interpret` runs the tasks in the types that they have, in a random order.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Callable
from unittest import mock

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.helpers import interpret, oracle
from tests.helpers.clusters import NET
from tests.helpers.faults import Tally, plant_all
from tests.helpers.layouts import random_batch, random_part
from tests.helpers.shapes import slow_where_misaligned
from uncut_mpi.bench.rivals.cyclic import DISTRIBUTIONS
from uncut_mpi.errors import CapacityError
from uncut_mpi.model.dtypes import DType, Dtypes
from uncut_mpi.model.epilogue import ACTIVATIONS, Epilogue
from uncut_mpi.model.form import KINDS, PLAIN, Form
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.part_of_c import OTHER
from uncut_mpi.model.parts import BoundLayout, Part
from uncut_mpi.model.placement import MATRICES, Placement, Where
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import batch, chunks, kblocks_request, tiles, without_product
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import (
    BARRIERS,
    BEGINS,
    BLOCK_ORDERS,
    COMBINES,
    DELIVERIES,
    ORDERS,
    ORDERS_BY_K,
    ROUTINGS,
    SWEEPS,
    Blocking,
    ScheduleOptions,
)
from uncut_mpi.planning.planner import in_chunks, plan_several
from uncut_mpi.planning.schedule import LaneKind, Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.verify import verify

SETTINGS = settings(deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
Draw = Callable[[st.SearchStrategy], object]
MOST_TASKS_RUN = 3000
"""Of larger schedules the proof is all: numpy takes 0.1 ms for a task."""
MOST_TASKS_COMPARED = 200
"""Of larger ones the oracle compares no pairs."""
TYPES: tuple[Dtypes, ...] = (
    *((one, one, result) for one in DType for result in one.results if one is not DType.i32),
    *((DType.e4m3, DType.e5m2, result) for result in DType.e4m3.results),
    *((DType.e5m2, DType.e4m3, result) for result in DType.e5m2.results),
)
"""All that A, B and C may be together."""
OF_FORMS = (DType.f32, DType.f64, DType.c64, DType.c128)
FORMS = [
    *(Form(kind, triangle) for kind in KINDS for triangle in ("lower", "upper")),
    *(Form(kind, triangle, unit=True) for kind in KINDS[2:] for triangle in ("lower", "upper")),
]
"""All that A or B may have besides a type."""
EPILOGUES = [Epilogue(*one) for one in itertools.product(ACTIVATIONS, ("rows", "cols"), (False, True), (False, True))]
WITH_EPILOGUE = [one for one in TYPES if not (one[0].is_complex or one[0].is_integer)]
AS_IF_LARGE = {"LEAST_PIECE_BYTES": 64, "LEAST_GROUP_BYTES": 512, "AT_ONCE_BYTES": 4096, "STEP": 8, "CUT_S": 0.0}
"""With these, small products of a batch are cut and grouped as large ones are (`uncut_mpi.planning.batch`)."""


@dataclasses.dataclass(frozen=True)
class Case:
    """
    A problem, where its matrices are, and how it shall be computed; `scalars` are alpha and beta of a run.

    `node_of` has the node of each rank. `private` buffers, as the planner counts parts, are their owner's alone, and
    some of these are `files`. Links are as fast as each other, or not. `slot_bytes` is what `without_product` gives
    slots, and chunks and slices have `least` bytes or columns, so that small matrices pass in several pieces. Of
    products in chunks, so many tasks are `most_tasks` for a schedule; 0: none are too many.
    """

    problem: GemmProblem
    placement: Placement
    node_of: tuple[int, ...]
    options: ScheduleOptions
    private: tuple[int, ...]
    files: tuple[int, ...]
    serial_copies: bool
    misaligned: bool
    uneven_links: bool
    slot_bytes: int
    least: int
    most_tasks: int
    scalars: tuple[complex, complex]
    seed: int

    @property
    def machine(self) -> Machine:
        sizes = collections.Counter(self.node_of)
        nodes = [Machine.uniform(sizes[node], memory_bytes=10**10) for node in range(len(sizes))]
        machine = nodes[0] if len(nodes) == 1 else Machine.joined(nodes, self.node_of, NET)
        bandwidth = machine.bandwidth_gb_per_s
        if self.uneven_links:
            bandwidth = bandwidth * np.random.default_rng(self.seed).choice((0.02, 0.3, 1), bandwidth.shape)
        machine = dataclasses.replace(machine, serial_copies=self.serial_copies, bandwidth_gb_per_s=bandwidth)
        return slow_where_misaligned(machine) if self.misaligned else machine

    @property
    def may_lack_room(self) -> bool:
        return bool(self.options.device_memory or self.options.host_memory)

    def plans(self) -> list[tuple[Setting, Schedule]]:
        """Return all schedules to try, of each chunk if there are several, with what was asked for."""
        ranks, about = len(self.node_of), (self.machine, self.options, self.private, self.files)
        with (
            mock.patch.object(without_product, "SLOT_BYTES", self.slot_bytes),
            mock.patch.object(kblocks_request, "MIN_SLICE_BYTES", self.least),
            mock.patch.multiple(tiles, MIN_CHUNK_BYTES=self.least, MIN_CHUNK_COLUMNS=self.least),
            mock.patch.multiple(batch, **(AS_IF_LARGE if self.least == 1 else {"STEP": batch.STEP})),
            mock.patch.multiple(chunks, MOST_TASKS=self.most_tasks or chunks.MOST_TASKS, STEP=8, EVEN_STEP=2),
        ):
            setting = Setting.of(self.problem, self.placement, ranks, *about)
            cut = in_chunks(setting) if self.most_tasks else None
            if cut is not None:
                extent = (self.problem.m, self.problem.n)[cut.axis]
                assert [at for one in cut.extents for at in range(*one)] == [*range(extent)]
            settings: list[Setting] = chunks.of_each(setting, cut, lambda one: one)
            return [(one, made.schedule) for one in dict.fromkeys(settings) for made in plan_several(one)]


def check(case: Case) -> str:
    """
    Plan a case, prove it, and run it, unless it is large: as symbols, and on numbers in a random order.

    Returns what came of it, in a word.
    """
    try:
        plans = case.plans()
    except CapacityError:
        if not case.may_lack_room:
            raise
        return "without room"
    for setting, schedule in plans:
        check_plan(case, setting, schedule)
    return "in chunks" if dataclasses.replace(plans[0][0].problem, sums=None) != case.problem else "proved"


def check_plan(case: Case, setting: Setting, schedule: Schedule) -> None:
    verify(schedule, lower(schedule))
    problem, private = schedule.problem, setting.private
    for task in range(len(schedule.tasks) if private else 0):
        assert may_run(schedule, task, private), f"task {task} uses what is its owner's alone"
    assert Schedule.decode(schedule.encode()).digest() == schedule.digest()
    if len(schedule.tasks) > MOST_TASKS_RUN:
        return
    assert (oracle.is_wrong if len(schedule.tasks) <= MOST_TASKS_COMPARED else oracle.wrong_result)(schedule) == ""
    alpha, beta = case.scalars
    data = interpret.random_data(problem, case.seed, alpha=alpha, beta=beta)
    assert interpret.mismatch(schedule, data, interpret.random_order(schedule, case.seed)) == ""


def planted(how_many: settings) -> dict[str, Tally]:
    """Plant every fault in schedules of small cases and in their lists, and return by fault what came of it."""
    tallies = dict[str, Tally]()
    kinds = "product", "triangle", "form", "epilogue", "batch", "scales", "copies"
    small = [cases(kind, 6, 16, in_nodes=in_nodes) for kind in kinds for in_nodes in (False, True)]

    @how_many
    @given(st.one_of(*[cases("product", 6, 16)] * 2, *small), st.integers(0, 1 << 16))
    def run(case: Case, seed: int) -> None:
        try:
            schedule = case.plans()[0][1]
        except CapacityError:
            return
        if len(schedule.tasks) <= MOST_TASKS_COMPARED:
            plant_all(schedule, seed, tallies)

    run()
    return tallies


def may_run(schedule: Schedule, task: int, private: tuple[int, ...]) -> bool:
    """Return whether a task uses private buffers on their owner alone, those in host memory by its worker."""
    used = np.intersect1d(schedule.regions["buffer"][schedule.operands_of(task)["region"]], private)
    lane, parts = schedule.lanes[schedule.tasks["lane"][task]], user_parts(schedule.problem, schedule.placement)
    return all(
        lane["rank"] == where.rank and (where.space == "host") == (lane["kind"] == LaneKind.HOST)
        for where in (parts[buffer].location for buffer in used.tolist())
    )


def user_parts(problem: GemmProblem, placement: Placement) -> list[Part]:
    """Return the parts of A, B and C, one for each user buffer."""
    return [
        part for matrix in MATRICES for part in placement.parts(matrix, problem.shape_of(matrix), problem.ld_of(matrix))
    ]


# -- strategies ------------------------------------------------------------------------------------


@st.composite
def cases(
    draw: Draw, kind: str = "product", most_ranks: int = 64, most_extent: int = 48, *, in_nodes: bool = False
) -> Case:
    """
    Return a strategy for any case; it shrinks to one rank, small extents and whole matrices.

    Parameters
    ----------
    kind : {"product", "triangle", "form", "epilogue", "chunks", "scales", "copies", "batch"}
        Whether there is a product, one of a triangle, one of a matrix that is read in a triangle, one with an epilogue,
        one with little room and a few tasks for a schedule, which most likely goes in chunks, C is only scaled, A is
        copied, or there are several products. C that is only scaled may have an epilogue, too, and so may chunks.
    most_ranks, most_extent : int
        Limits; of k ten times as much.
    in_nodes : bool, default False
        Whether there are several nodes in any case.
    """
    node_of = draw(some_nodes(most_ranks, 2 if in_nodes else 1))
    ranks, several_nodes = len(node_of), max(node_of) > 0
    extent = st.one_of(st.integers(0, 3), *[st.integers(1, most_extent)] * 3)
    if kind == "chunks":
        extent = st.integers(most_extent // 2, most_extent)
    dtypes = draw(st.sampled_from(TYPES))
    if kind == "batch":
        problem, placement = random_batch(draw(st.randoms()), ranks, dtypes, most_extent)
    elif kind == "copies":
        m, n = draw(extent), draw(extent)
        problem = GemmProblem(m, n, 0, dtypes[:1] * 3, reads_c=False, copies=True, swapped=draw(st.booleans()))
        placement = Placement(draw(layouts((m, n), ranks)), Location.host(), draw(layouts((m, n), ranks)))
    else:
        m, n, k = draw(extent), draw(extent), draw(st.one_of(extent, st.integers(1, 10 * most_extent)))
        some = (kind == "triangle" or draw(st.integers(0, 4)) == 4) and m and n
        epilogue = None
        if kind == "epilogue" or (kind in ("scales", "chunks") and draw(st.booleans())):
            dtypes, epilogue = draw(st.sampled_from(WITH_EPILOGUE)), draw(st.sampled_from(EPILOGUES))
        part = random_part(draw(st.randoms()), m, n) if some and kind != "form" and epilogue is None else None
        forms, ops = PLAIN, (draw(st.sampled_from("NTC")), draw(st.sampled_from("NTC")))
        if kind == "form":
            dtypes, form = (draw(st.sampled_from(OF_FORMS)),) * 3, draw(st.sampled_from(FORMS))
            forms, ops = (form, None), (ops[0] if form.is_triangular else "N", "N")
            k = m
            if draw(st.booleans()):
                forms, ops, m, n = forms[::-1], ops[::-1], n, m
        if part is not None and kind == "triangle":
            part = dataclasses.replace(part, triangle=draw(st.sampled_from([*OTHER][1:])))
        problem = GemmProblem(
            m=m, n=n, k=k,
            dtype=dtypes,
            trans_a=ops[0],
            trans_b=ops[1],
            reads_c=draw(st.booleans()) and not any(form is not None and form.is_triangular for form in forms),
            scales_only=kind == "scales",
            swapped=draw(st.booleans()),
            part=part,
            forms=forms,
            epilogue=epilogue,
        )  # fmt: skip
        placement = Placement(*(draw(wheres(problem.shape_of(matrix), ranks)) for matrix in MATRICES))
        whole = [name for name in "abc" if isinstance(getattr(placement, name), Location) and draw(st.booleans())]
        problem = dataclasses.replace(problem, **{f"ld{name}": 10 * most_extent + ord(name) for name in whole})
    parts = user_parts(problem, placement)
    owned = [at for at, part in enumerate(parts) if part.location.rank is not None]
    alone = st.lists(st.sampled_from(owned), unique=True, max_size=3) if owned else st.just([])
    private = draw(st.one_of(st.just([]), alone))
    in_host = [at for at in private if parts[at].location.space == "host"]
    scalar = st.sampled_from((2, 1, 0, -3) if problem.arithmetic.is_integer else (1.2345, 1.0, 0.0, -0.75))
    options = ScheduleOptions()
    if kind in ("product", "triangle", "epilogue") and problem.has_product:
        others = {"in_part": problem.part is not None, "with_epilogue": epilogue is not None}
        options = draw(any_options(placement, ranks, in_nodes=several_nodes, **others))
    # A search that finds no room tries all there is, and schedules of many ranks with little have very many tasks: each
    # such case takes seconds.
    searched = options.scheduler == "auto" and problem.has_product and kind != "batch"
    room = st.just(0) if ranks > (8 if searched else 16) else st.sampled_from((0, 0, 0, 100_000, 20_000, 4_000))
    options = dataclasses.replace(options, device_memory=draw(room), host_memory=draw(room))
    if kind == "chunks":
        nbytes = sum(problem.bytes_of(matrix) for matrix in MATRICES) // draw(st.sampled_from((3, 6, 12)))
        kind_of = draw(st.sampled_from(({"search": "rule"}, {"scheduler": "kblocks"})))  # a search takes 1 s for each
        options = ScheduleOptions(**kind_of, device_memory=max(6000, nbytes))
    return Case(
        problem, placement, node_of, options,
        private=tuple(private),
        files=tuple(draw(st.lists(st.sampled_from(in_host), unique=True))) if in_host else (),
        serial_copies=draw(st.booleans()),
        misaligned=draw(st.booleans()),
        uneven_links=draw(st.booleans()),
        slot_bytes=draw(st.sampled_from((without_product.SLOT_BYTES, 64, 1000))),
        least=draw(st.sampled_from((1 << 10, 1))),
        most_tasks=draw(st.sampled_from((20, 60) if kind == "chunks" else (0, 0, 20, 100))),
        scalars=(draw(scalar), draw(scalar)),
        seed=draw(st.integers(0, 1 << 16)),
    )  # fmt: skip


@st.composite
def some_nodes(draw: Draw, most_ranks: int, least: int = 1) -> tuple[int, ...]:
    """Return the node of each rank: one for all, one for each, or nodes of any sizes, in order or not."""
    ranks = draw(st.one_of(st.integers(least, min(8, most_ranks)), st.integers(least, most_ranks)))
    nodes = draw(st.one_of(*[st.just(least)] * 2, st.integers(least, min(4, ranks)), st.integers(least, ranks)))
    cuts = sorted(draw(st.sets(st.integers(1, ranks - 1), min_size=nodes - 1, max_size=nodes - 1))) if nodes > 1 else []
    sizes = np.diff([0, *cuts, ranks])
    node_of = np.repeat(np.arange(nodes), sizes).tolist()
    if draw(st.integers(0, 3)) == 3:
        node_of = draw(st.permutations(node_of))
    names = [*dict.fromkeys(node_of)]  # a node's number is that of its first rank among those of others
    return tuple(names.index(node) for node in node_of)


def locations(ranks: int) -> st.SearchStrategy[Location]:
    """Return a strategy for a memory of any kind, mostly that of a device."""
    rank = st.integers(0, ranks - 1)
    return st.one_of(
        rank.map(Location.device), rank.map(Location.device), rank.map(Location.host), st.just(Location.host())
    )


@st.composite
def wheres(draw: Draw, shape: tuple[int, int], ranks: int) -> Where:
    """A whole matrix or one in parts."""
    return draw(st.one_of(locations(ranks), layouts(shape, ranks), layouts(shape, ranks)))


@st.composite
def layouts(draw: Draw, shape: tuple[int, int], ranks: int) -> BoundLayout:
    """Any exact cover of a matrix by parts, each with one holder or several."""
    rectangles = draw(st.one_of(grids(shape, ranks), cut_rectangles(shape)))
    dealt = draw(st.sampled_from(("in turn", "at random", "replicas")))
    first = draw(st.integers(0, ranks - 1))
    kind = draw(st.one_of(st.none(), st.sampled_from((Location.device, Location.host, lambda _: Location.host()))))
    order = st.sampled_from(draw(st.sampled_from(("F", "F", "C", "FC"))))
    parts = []
    for number, (rows, cols) in enumerate(rectangles):
        if rows[0] == rows[1] or cols[0] == cols[1]:
            continue
        if dealt == "in turn":  # as most programs do
            turn = (first + number) % ranks
            holders = [kind(turn) if kind is not None else Location.device(turn)]
        else:
            most = 1 if dealt == "at random" else min(3, ranks)
            holders = draw(st.lists(locations(ranks), min_size=1, max_size=most, unique=True))
        for holder in holders:
            part = Part(rows, cols, holder, draw(order))
            parts.append(dataclasses.replace(part, ld=part.ld + draw(st.sampled_from((0, 0, 1, 3)))))
    return BoundLayout(shape, tuple(parts))


@st.composite
def grids(draw: Draw, shape: tuple[int, int], ranks: int) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Rectangles between cuts, as many as ranks or fewer or more; some without elements."""
    down = draw(st.sampled_from(sorted({1, 2, 3, ranks, min(ranks, 8)})))
    along = draw(st.sampled_from(sorted({1, 2, 3, max(1, min(64, ranks) // down), min(ranks, 8) if down < 8 else 1})))
    edges = [draw(cuts(extent, count)) for extent, count in zip(shape, (down, along), strict=True)]
    return [*itertools.product(itertools.pairwise(edges[0]), itertools.pairwise(edges[1]))]


@st.composite
def cuts(draw: Draw, extent: int, count: int) -> list[int]:
    """Where so many parts begin, and the extent: as equal as can be, or anywhere."""
    if draw(st.booleans()):
        return [extent * part // count for part in range(count + 1)]
    return [0, *sorted(draw(st.lists(st.integers(0, extent), min_size=count - 1, max_size=count - 1))), extent]


@st.composite
def cut_rectangles(draw: Draw, shape: tuple[int, int]) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Rectangles that come of cutting one in two again and again, so that they need make no grid."""
    found = [((0, shape[0]), (0, shape[1]))]
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(found) - 1))
        rows, cols = found.pop(at)
        if draw(st.booleans()):
            cut = draw(st.integers(*rows))
            found += [((rows[0], cut), cols), ((cut, rows[1]), cols)]
        else:
            cut = draw(st.integers(*cols))
            found += [(rows, (cols[0], cut)), (rows, (cut, cols[1]))]
    return found


@st.composite
def any_options(
    draw: Draw, placement: Placement, ranks: int, *, in_nodes: bool, in_part: bool, with_epilogue: bool
) -> ScheduleOptions:
    """Options of any scheduler that takes the matrices; mostly of the one that takes all."""
    whole = ("cyclic",) if placement.in_host() else ("cyclic", "bands")
    rivals = () if placement.in_parts or in_nodes else whole
    others = ("auto",) if in_part or with_epilogue else ("uncut", "auto", *rivals)
    if not in_part and draw(st.sampled_from((True, *[False] * 7))):
        edges = {name: draw(st.integers(0, 20)) for name in ("c_rows", "c_cols")}
        return ScheduleOptions(same_sums=True, blocking=Blocking(**edges, block=draw(st.sampled_from((0, 256)))))
    scheduler = draw(st.sampled_from(("kblocks", "kblocks", "kblocks", *others)))
    if scheduler == "auto":
        return ScheduleOptions(tune=draw(st.sampled_from((0, 0, 3))), search=draw(st.sampled_from(("", "rule"))))
    tile = draw(st.sampled_from((0, 4, 8, 16, 17)))
    if scheduler in ("bands", "cyclic"):
        if scheduler == "bands":
            return ScheduleOptions("bands", tile=tile)
        variant = draw(st.sampled_from(("", *(f":{one}" for one in DISTRIBUTIONS))))
        grid = draw(st.sampled_from((None, (1, ranks), (ranks, 1))))
        return ScheduleOptions(
            f"cyclic{variant}", tile=tile, grid=grid, max_hops=draw(st.sampled_from((None, 0, 1, 2)))
        )
    if draw(st.sampled_from((True, False, False, False))):
        return ScheduleOptions(scheduler)
    devices = draw(st.one_of(st.none(), st.lists(st.integers(0, ranks - 1), min_size=1, unique=True).map(tuple)))
    if scheduler == "uncut":
        shape = draw(grids_of_ranks(ranks if devices is None else len(devices))) if draw(st.booleans()) else {}
        return draw(uncut_options(tile, devices, shape))
    splits, shape = draw(shares(ranks if devices is None else len(devices)))
    in_rings = splits == 1 and "areas" not in shape and draw(st.sampled_from((False, False, True)))
    return ScheduleOptions("kblocks", devices=devices, blocking=draw(blockings(splits, in_rings=in_rings)), **shape)


@st.composite
def uncut_options(draw: Draw, tile: int, devices: tuple[int, ...] | None, shape: dict[str, object]) -> ScheduleOptions:
    """Most options of uncut, on a grid of some shape."""
    flags = {name: draw(st.booleans()) for name in ("caching", "overlap", "batch", "wr_lazy")}
    return ScheduleOptions(
        "uncut",
        tile=tile,
        devices=devices,
        chunks=draw(st.sampled_from((None, 1, 3))),
        min_chunk_bytes=draw(st.sampled_from((None, 1, 100))),
        compute_lanes=draw(st.sampled_from((8, 1, 2))),
        routing=draw(st.sampled_from(ROUTINGS)),
        order=draw(st.sampled_from(ORDERS)),
        max_hops=draw(st.sampled_from((None, 0, 2))),
        **flags,
        **shape,
    )


@st.composite
def shares(draw: Draw, places: int) -> tuple[int, dict[str, object]]:
    """In how many parts k goes to ranks, and how C is cut among so many; areas, or a grid with shares or without."""
    splits = draw(st.sampled_from([one for one in range(1, places + 1) if one in (1, 2, 3, places)]))
    options: dict[str, object] = {}
    if splits > 1 and draw(st.booleans()):
        options["k_shares"] = draw(some_shares(splits))
    cells = places // splits
    if draw(st.sampled_from((False, False, True))):
        edges = [0, *sorted(draw(st.sets(st.integers(1, cells - 1), max_size=4)) if cells > 1 else ()), cells]
        columns = (draw(some_shares(stop - start)) for start, stop in itertools.pairwise(edges))
        return splits, {**options, "areas": tuple(columns)}
    return splits, {**options, **draw(grids_of_ranks(cells))}


def some_shares(count: int) -> st.SearchStrategy[tuple[float, ...]]:
    """Return a strategy for what so many have of a whole."""
    return st.lists(st.floats(0.125, 4, width=16), min_size=count, max_size=count).map(tuple)


@st.composite
def grids_of_ranks(draw: Draw, cells: int) -> dict[str, object]:
    """A grid of at most so many ranks, with shares or without."""
    rows = draw(st.integers(1, cells))
    options: dict[str, object] = {"grid": (rows, draw(st.integers(1, cells // rows)))}
    for name, count in zip(("row_shares", "col_shares"), options["grid"], strict=True):
        if draw(st.booleans()):
            options[name] = draw(some_shares(count))
    return options


@st.composite
def blockings(draw: Draw, splits: int, *, in_rings: bool) -> Blocking:
    """Every option of kblocks, those of several blocks of C in turn or those of one."""

    def one_of(*values: object) -> object:
        return draw(st.sampled_from(values))

    order, combine, block = one_of("", *BLOCK_ORDERS), one_of("", *COMBINES), draw(st.integers(0, 40))
    if in_rings:
        return Blocking(
            first=draw(st.integers(0, min(20, block or 20))),
            block=block,
            growth=one_of(0, 2, 3, 5),
            columns=draw(st.integers(0, 5)),
            lanes=one_of(0, 1, 2),
            delivery=one_of("", *DELIVERIES),
            slots=draw(st.integers(1, 5)),
            b_slots=draw(st.integers(0, 4)),
            sweep=one_of("", *SWEEPS),
            barrier=one_of("", *BARRIERS),
            c_slots=one_of(0, 1, 2),
            c_rows=draw(st.integers(0, 40)),
            c_cols=draw(st.integers(0, 40)),
        )
    return Blocking(
        splits=splits,
        first=draw(st.integers(0, min(20, block or 20))),
        block=block,
        growth=one_of(0, 2, 3, 5),
        columns=draw(st.integers(0, 5)),
        rows=draw(st.integers(0, 5)) if order in ("", "corner") else 0,
        order=order,
        lanes=one_of(0, 1, 2),
        delivery=one_of("", *DELIVERIES),
        begin=one_of("", *BEGINS),
        combine=combine,
        away=0 if combine == "worker" else draw(st.integers(0, 7)),
        tail=one_of(0, 1, 2, 4) if order in ORDERS_BY_K else 0,
    )
