"""Several nodes: each byte of A and B enters a node once, whoever needs it there, and grids by which little does."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from tests.helpers.clusters import cluster
from tests.helpers.planned import search
from tests.helpers.proven import check
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import Location
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.parts import BoundLayout, Part
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.places import Dealt, Places
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import kblocks, kblocks_request
from uncut_mpi.planning.candidates import Simulated
from uncut_mpi.planning.crossing import cross
from uncut_mpi.planning.grid import ProcessGrid
from uncut_mpi.planning.node_grid import in_tiles
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.rank_sets import RankSets
from uncut_mpi.planning.schedule import Kind, Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.view.traffic import traffic

EDGE = 384
NODE_GRIDS = ((1, 2), (2, 2), (2, 4), (4, 4))
EACH = 4


def problem_of(edge: int, **about: object) -> GemmProblem:
    return GemmProblem(edge, edge, edge, DType.f64, **{"reads_c": True, **about})


def dealt(problem: GemmProblem, grid: tuple[int, int], block: int) -> Placement:
    """Return A, B and C dealt to the nodes of a grid block by block, in turn; a node is a row of ranks."""
    layout = Layout.block_cyclic(block, block, (grid[0], grid[1] * EACH))
    return Places(*(Dealt(layout, "device"),) * 3).bind(problem, grid[0] * grid[1] * EACH)


def formula(edge: int, grid: tuple[int, int]) -> int:
    """Return what a node of a p × q grid receives (bytes): Herault et al., ScalA 2019, section IV-B, one block of C."""
    p, q = grid
    return edge * edge // p * (q - 1) // q * 8 + edge * edge // q * (p - 1) // p * 8


def planned(problem: GemmProblem, placement: Placement, machine: Machine, **options: object) -> Schedule:
    asked = ScheduleOptions(scheduler="kblocks", **options)  # type: ignore[arg-type]
    return cross(kblocks.schedule(Setting.of(problem, placement, machine.num_ranks, machine, asked))[0])


def entering(schedule: Schedule) -> set[int]:
    """Return the bytes into each node."""
    return {one.into_bytes for one in traffic(schedule).nodes}


@pytest.mark.parametrize("grid", NODE_GRIDS)
@pytest.mark.parametrize("block", [EDGE // 16, 8])
def test_each_node_takes_what_the_formula_says(grid: tuple[int, int], block: int) -> None:
    problem, machine = problem_of(EDGE), cluster(grid[0] * grid[1], EACH)
    placement = dealt(problem, grid, block)
    schedule = planned(problem, placement, machine)
    assert entering(schedule) == {formula(EDGE, grid)}
    check(schedule)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("list scheduling", {"blocking": Blocking(delivery="earliest")}),
        ("first of k", {"blocking": Blocking(begin="first")}),
        ("held", {"blocking": Blocking(begin="held", order="columns")}),
        ("column blocks", {"blocking": Blocking(order="corner")}),
        ("rings", {"device_memory": 700_000}),
    ],
)
@pytest.mark.parametrize("serial", [False, True])
def test_each_byte_enters_a_node_once_however_pieces_are_handed_on(
    name: str, options: dict[str, object], serial: bool
) -> None:
    grid = 2, 2
    problem, machine = problem_of(EDGE), dataclasses.replace(cluster(4, EACH), serial_copies=serial)
    schedule = planned(problem, dealt(problem, grid, EDGE // 16), machine, **options)
    assert entering(schedule) == {formula(EDGE, grid)}, name
    check(schedule)


@pytest.mark.parametrize("delivery", ["balanced", "earliest"])
@pytest.mark.parametrize("memory", [0, 700_000])
def test_slices_go_from_node_to_node_in_legs(delivery: str, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, machine = problem_of(EDGE), cluster(8, EACH)
    placement, options = dealt(problem, (2, 4), EDGE // 16), {"blocking": Blocking(delivery=delivery)}
    options |= {"device_memory": memory} if memory else {}
    whole = planned(problem, placement, machine, **options)
    monkeypatch.setattr(kblocks_request, "MIN_SLICE_BYTES", 8)
    schedule = planned(problem, placement, machine, **options)
    messages = [int((one.tasks["kind"] == Kind.SEND).sum()) for one in (whole, schedule)]
    assert messages[1] > 3 * messages[0]
    assert entering(schedule) == {formula(EDGE, (2, 4))}
    check(schedule)


def test_nodes_send_what_is_theirs_before_they_hand_on_what_is_others() -> None:
    problem, machine = problem_of(EDGE), cluster(4, 1)
    layout = Dealt(Layout.block_cyclic(EDGE // 16, EDGE // 16, (1, 4)), "device")
    placement, at_once = Places(layout, layout, layout).bind(problem, 4), Blocking(first=EDGE, block=EDGE, columns=1)
    schedule = planned(problem, placement, machine, grid=(1, 4), blocking=at_once)
    senders = schedule.tasks["rank"][schedule.tasks["kind"] == Kind.SEND]
    # Of A, each part of which goes on to three. All go on by one node before any goes on by two.
    assert [np.bincount(some).tolist() for some in np.split(senders, 3)] == 3 * [4 * [len(senders) // 12]]
    check(schedule)


@pytest.mark.parametrize("grid", NODE_GRIDS[1:3])
def test_a_search_takes_no_more(grid: tuple[int, int]) -> None:
    problem, machine = problem_of(8 * EDGE), cluster(grid[0] * grid[1], EACH)
    best = search(problem, dealt(problem, grid, EDGE // 2), machine.num_ranks, machine, ScheduleOptions()).best
    assert max(entering(best.schedule)) <= formula(8 * EDGE, grid)


@pytest.mark.parametrize("scheduler", ["kblocks", "uncut"])
def test_a_search_expects_what_its_schedules_take_in_halves(scheduler: str) -> None:
    problem, machine = problem_of(4 * EDGE), cluster(2, 2)
    found = search(problem, Placement.parse("0,3,1"), 4, machine, ScheduleOptions(scheduler=scheduler))
    for one in (found.best, found.candidates[-1]):
        assert Kind.SEND in one.schedule.tasks["kind"]
        assert Kind.SEND not in one.planned.tasks["kind"]
        assert one.predicted_s == one.simulation.seconds == simulate(cross(one.planned), machine).seconds
        assert one.run.taken.moved_bytes == Simulated(one.simulation, one.planned).taken.moved_bytes


def test_what_lies_in_host_memory_of_one_node_enters_each_other_node_once() -> None:
    problem, machine = problem_of(EDGE, reads_c=False), cluster(4, EACH)
    schedule = planned(problem, Placement.parse("h,h,h"), machine, grid=(1, 16))
    others = traffic(schedule).nodes[1:]
    assert {one.into_bytes for one in others} == {EDGE * EDGE * 8 + EDGE * EDGE * 8 // 4}
    check(schedule)


def test_a_node_takes_nothing_of_which_it_has_a_replica() -> None:
    problem, machine = problem_of(EDGE), cluster(2, EACH)
    whole = (0, EDGE), (0, EDGE)
    replicas = BoundLayout((EDGE, EDGE), tuple(Part(*whole, Location.device(rank)) for rank in (1, EACH + 1)))
    placement = Placement(replicas, replicas, replicas)
    for blocking in (Blocking(), Blocking(delivery="earliest")):
        schedule = planned(problem, placement, machine, blocking=blocking)
        # C goes to the other node's replica.
        assert sum(one.into_bytes for one in traffic(schedule).nodes) == EDGE * EDGE * 8
        check(schedule)


def test_the_bytes_leave_a_node_once_for_each_other_node_of_its_row_and_column() -> None:
    """Each node sends what it receives once more at most: none sends to all others."""
    grid = 2, 4
    problem, machine = problem_of(EDGE), cluster(8, EACH)
    schedule = planned(problem, dealt(problem, grid, EDGE // 16), machine)
    node = schedule.locations["node"]
    _, source, destination, _ = schedule.copies().T
    pairs = {(int(node[a]), int(node[b])) for a, b in zip(source, destination, strict=True) if node[a] != node[b]}
    per_node = [sum(one == source for one, _ in pairs) for source in range(8)]
    assert max(per_node) == 2  # the next one of its row and of its column


@pytest.mark.parametrize("transposed", [False, True])
def test_nodes_have_tiles_of_a_grid(transposed: bool) -> None:
    machine, problem = cluster(4, 4), problem_of(64)
    for rows, cols in ((4, 4), (2, 8), (1, 16), (8, 2)):
        grid = ProcessGrid(rows, cols, transposed)
        devices = in_tiles(problem, machine, range(16), grid)
        assert sorted(devices) == list(range(16))
        places = dict(zip(devices, map(grid.position, range(16)), strict=True))
        for node in range(4):
            of_node = [places[rank] for rank in range(4 * node, 4 * node + 4)]
            high, wide = (len({place[axis] for place in of_node}) for axis in (0, 1))
            assert high * wide == 4
    # Of a C that is longer than wide nodes have long blocks.
    tall = GemmProblem(1024, 64, 64, DType.f64)
    grid = ProcessGrid(4, 4)
    places = dict(zip(in_tiles(tall, machine, range(16), grid), map(grid.position, range(16)), strict=True))
    assert [places[rank] for rank in range(4)] == [(0, 0), (0, 1), (0, 2), (0, 3)]


def test_ranks_keep_their_order_where_no_tile_fits() -> None:
    problem = problem_of(64)
    for machine, grid in (
        (Machine.uniform(4), ProcessGrid(2, 2)),
        (cluster(2, 3), ProcessGrid(3, 2)),
        (cluster(2, 3), ProcessGrid(2, 2)),
    ):
        devices = in_tiles(problem, machine, range(machine.num_ranks), grid)
        places = [grid.position(place) for place in range(grid.size)]
        if machine.num_nodes == 2 and grid.size == 6:  # columns of three
            assert devices == (0, 3, 1, 4, 2, 5)
            assert list(itertools.compress(places, (rank < 3 for rank in devices))) == [(0, 0), (1, 0), (2, 0)]
        else:
            assert devices == tuple(range(machine.num_ranks))


def test_where_memory_is_short_nodes_have_tiles_too() -> None:
    problem, machine = problem_of(EDGE), cluster(4, EACH)
    setting = Setting.of(problem, Placement.parse("h,h,h"), 16, machine)
    tried = [one for one in RankSets(setting).with_room(ScheduleOptions(scheduler="kblocks")) if one.grid == (4, 4)]
    assert tried
    tiles = in_tiles(problem, machine, range(16), ProcessGrid(4, 4))
    assert {one.devices for one in tried} == {tiles}
    assert tiles[:8] == (0, 1, 4, 5, 2, 3, 6, 7)


@pytest.mark.parametrize("place", ["h,h,h", "h,h,0", "h,h,3"])
@pytest.mark.parametrize("columns", [3, 4])
def test_list_scheduling_deals_what_comes_from_host_memory(
    place: str, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kblocks_request, "MIN_SLICE_BYTES", 1)
    blocking = Blocking(delivery="earliest", columns=columns, lanes=2, combine="worker")
    problem = GemmProblem(65, 43, 57, DType.f64)
    check(planned(problem, Placement.parse(place), cluster(2, 2), blocking=blocking))
