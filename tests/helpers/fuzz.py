"""
Problems of any kind for hypothesis, and what must hold of every schedule that is made for one.

Matrices are whole or in parts: of a grid with any cuts, dealt to ranks at random, or of any rectangles; in memory of
any kind, a rectangle with one holder or several. Ranks are 1 to 64, schedules of any scheduler with any options, and
where there are parts and no product, of what needs none.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from unittest import mock

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from tests.helpers import interpret
from tests.helpers.planned import plan_several
from tests.helpers.shapes import slow_where_misaligned
from uncut_mpi.bench.rivals.cyclic import DISTRIBUTIONS
from uncut_mpi.model.dtypes import MEASURED
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.parts import BoundLayout, Part
from uncut_mpi.model.placement import MATRICES, Placement, Where
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import kblocks_request, tiles, without_product
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
from uncut_mpi.planning.schedule import LaneKind, Schedule
from uncut_mpi.planning.verify import verify

SETTINGS = settings(deadline=None, derandomize=True, database=None, suppress_health_check=[*HealthCheck])
Draw = Callable[[st.SearchStrategy], object]
MOST_TASKS_RUN = 3000
"""Of larger schedules the proof is all: numpy takes 0.1 ms for a task."""


@dataclasses.dataclass(frozen=True)
class Case:
    """
    A problem, where its matrices are, and how it shall be computed; `scalars` are alpha and beta of a run.

    `private` buffers, as the planner counts parts, are their owner's alone. Links are as fast as each other, or not.
    `slot_bytes` is what `without_product` gives slots, and chunks and slices have `least` bytes or columns, so that
    small matrices pass in several pieces.
    """

    problem: GemmProblem
    placement: Placement
    num_ranks: int
    options: ScheduleOptions
    private: tuple[int, ...]
    serial_copies: bool
    misaligned: bool
    uneven_links: bool
    slot_bytes: int
    least: int
    scalars: tuple[float, float]
    seed: int

    @property
    def machine(self) -> Machine:
        machine = Machine.uniform(self.num_ranks, memory_bytes=10**10)
        bandwidth = machine.bandwidth_gb_per_s
        if self.uneven_links:
            bandwidth = bandwidth * np.random.default_rng(self.seed).choice((0.02, 0.3, 1), bandwidth.shape)
        machine = dataclasses.replace(machine, serial_copies=self.serial_copies, bandwidth_gb_per_s=bandwidth)
        return slow_where_misaligned(machine) if self.misaligned else machine

    def schedule(self) -> Schedule:
        with (
            mock.patch.object(without_product, "SLOT_BYTES", self.slot_bytes),
            mock.patch.object(kblocks_request, "MIN_SLICE_BYTES", self.least),
            mock.patch.multiple(tiles, MIN_CHUNK_BYTES=self.least, MIN_CHUNK_COLUMNS=self.least),
        ):
            made = plan_several(self.problem, self.placement, self.num_ranks, self.machine, self.options, self.private)
        return made[0].schedule


def check(case: Case) -> None:
    """Plan a case, prove it, and run it on numbers in a random order, unless it is large."""
    schedule = case.schedule()
    verify(schedule, lower(schedule))
    for task in range(len(schedule.tasks) if case.private else 0):
        assert may_run(schedule, task, case.private), f"task {task} uses what is its owner's alone"
    assert Schedule.decode(schedule.encode()).digest() == schedule.digest()
    if len(schedule.tasks) > MOST_TASKS_RUN:
        return
    alpha, beta = case.scalars
    data = interpret.random_data(case.problem, case.seed, alpha=alpha, beta=beta)
    if data.alpha == 0 and not case.problem.copies:
        data = dataclasses.replace(data, a=np.full_like(data.a, np.nan), b=np.full_like(data.b, np.nan))
    order = interpret.random_order(schedule, case.seed)
    if case.problem.copies:
        assert np.array_equal(interpret.interpret(schedule, data, order), data.a)
    else:
        assert interpret.mismatch(schedule, data, order) == ""


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
def cases(draw: Draw, kind: str = "product", most_ranks: int = 64, most_extent: int = 48) -> Case:
    """
    Return a strategy for any case; it shrinks to one rank, small extents and whole matrices.

    Parameters
    ----------
    kind : {"product", "scales", "copies"}
        Whether there is a product, C is only scaled, or A is copied.
    most_ranks, most_extent : int
        Limits; of k ten times as much.
    """
    ranks = draw(st.one_of(st.integers(1, min(8, most_ranks)), st.integers(1, most_ranks)))
    extent = st.one_of(st.integers(0, 3), *[st.integers(1, most_extent)] * 3)
    m, n, copies = draw(extent), draw(extent), kind == "copies"
    k = 0 if copies else draw(st.one_of(extent, st.integers(1, 10 * most_extent)))
    problem = GemmProblem(
        m=m, n=n, k=k,
        dtype=draw(st.sampled_from(MEASURED)),
        trans_a="N" if copies else draw(st.sampled_from("NTC")),
        trans_b="N" if copies else draw(st.sampled_from("NTC")),
        reads_c=not copies and draw(st.booleans()),
        scales_only=kind == "scales",
        swapped=draw(st.booleans()),
        copies=copies,
    )  # fmt: skip
    of_a, of_b, of_c = problem.a_shape, problem.b_shape, (m, n)
    if copies:
        placement = Placement(draw(layouts(of_a, ranks)), Location.host(), draw(layouts(of_c, ranks)))
    else:
        placement = Placement(*(draw(wheres(shape, ranks)) for shape in (of_a, of_b, of_c)))
        whole = [name for name in "abc" if isinstance(getattr(placement, name), Location) and draw(st.booleans())]
        problem = dataclasses.replace(problem, **{f"ld{name}": 10 * most_extent + ord(name) for name in whole})
    owned = [at for at, part in enumerate(user_parts(problem, placement)) if part.location.rank is not None]
    alone = st.lists(st.sampled_from(owned), unique=True, max_size=3) if owned else st.just([])
    scalar = st.sampled_from((1.2345, 1.0, 0.0, -0.75))
    return Case(
        problem, placement, ranks,
        options=draw(any_options(placement, ranks)) if problem.has_product else ScheduleOptions(),
        private=tuple(draw(st.one_of(st.just([]), alone))),
        serial_copies=draw(st.booleans()),
        misaligned=draw(st.booleans()),
        uneven_links=draw(st.booleans()),
        slot_bytes=draw(st.sampled_from((without_product.SLOT_BYTES, 64, 1000))),
        least=draw(st.sampled_from((1 << 10, 1))),
        scalars=(draw(scalar), draw(scalar)),
        seed=draw(st.integers(0, 1 << 16)),
    )  # fmt: skip


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
def any_options(draw: Draw, placement: Placement, ranks: int) -> ScheduleOptions:
    """Options of any scheduler that takes the matrices; mostly of the one that takes all."""
    whole = () if placement.in_parts else ("cyclic",) if placement.in_host() else ("cyclic", "bands")
    scheduler = draw(st.sampled_from(("kblocks", "kblocks", "kblocks", "uncut", "auto", *whole)))
    if scheduler == "auto":
        return ScheduleOptions()
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
