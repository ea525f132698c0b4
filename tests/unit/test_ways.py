"""Ways between devices whose links differ, and the schedules of `kblocks` that take them."""

from __future__ import annotations

import itertools

import pytest

from tests.helpers.planned import search
from tests.helpers.proven import check
from tests.unit.test_uncut_relays import machine_of
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Matrix, Placement
from uncut_mpi.model.ports import Net
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.schedule import Kind, Role, Schedule
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.simulate import simulate
from uncut_mpi.planning.verify import verify
from uncut_mpi.planning.ways import RELAY_GAIN, ways_of

SLOW = 0.02
FAST = 1.0
LINE = {pair: FAST for one in range(3) for pair in ((one, one + 1), (one + 1, one))}
"""Four ranks in a line: 0 - 1 - 2 - 3."""


def copied(schedule: Schedule) -> set[tuple[int, int]]:
    """Return the pairs of devices between which something is copied."""
    lanes = schedule.lanes[schedule.tasks["lane"][schedule.tasks["kind"] == Kind.COPY]]
    pairs = {(int(one["source"]), int(one["destination"])) for one in lanes}
    return {pair for pair in pairs if pair[0] != pair[1] and max(pair) < schedule.num_ranks}


def planned(problem: GemmProblem, place: str, machine: Machine, **options) -> Schedule:
    asked = ScheduleOptions(scheduler="kblocks", **options)
    return kblocks.schedule(Setting.of(problem, Placement.parse(place), machine.num_ranks, machine, asked))[0]


def test_links_that_are_alike_need_no_ways() -> None:
    for name in ("karolina-8xa100", "h200-4x", "vega-4xa100"):
        assert ways_of(load_machine(name)).even


def test_slow_pairs_of_vulcan_go_over_fast_links() -> None:
    machine = load_machine("vulcan-8xv100")
    ways, rates = ways_of(machine).ways, machine.bandwidth_gb_per_s
    for source, to in itertools.permutations(range(8), 2):
        cost, *relays = ways[8 * source + to]
        relays = [one for one in relays if one >= 0]
        assert (len(relays) > 0) == (rates[source, to] < 10)
        assert len({source, *relays, to}) == 2 + len(relays)
        narrowest = min(rates[leg] for leg in itertools.pairwise((source, *relays, to)))
        assert narrowest > 20
        assert 45 / narrowest <= cost < 1.3 * 45 / narrowest


@pytest.mark.parametrize("place", ["0,0,0", "h,h,0", "1,h,2"])
@pytest.mark.parametrize(
    ("dtype", "delivery"), [(DType.f64, "earliest"), (DType.bf16, "earliest"), (DType.f64, "balanced")]
)
def test_nothing_goes_over_a_slow_link_and_all_of_it_is_right(place: str, dtype: DType, delivery: str) -> None:
    """Every rank is sent more pieces than a relay has slots, so that each of these is used again."""
    machine = machine_of(LINE, 4, SLOW)
    problem = GemmProblem(61, 83, 75, dtype, trans_a="T", reads_c=True)
    blocking = Blocking(first=8, block=16, delivery=delivery)
    schedule = planned(problem, place, machine, grid=(2, 2), blocking=blocking)
    assert copied(schedule) <= LINE.keys()
    check(schedule)


def test_relays_keep_little_and_use_it_again() -> None:
    machine = machine_of(LINE, 4, SLOW)
    schedule = planned(GemmProblem(8192, 8192, 8192, DType.f64), "0,0,0", machine, grid=(1, 4))
    relays = schedule.buffers[(schedule.buffers["matrix"] == Matrix.NONE) & (schedule.buffers["role"] == Role.STAGING)]
    assert set(relays["location"].tolist()) == {1, 2}
    assert (relays["ld"] * relays["cols"] * 8 <= 64 << 20).all()


def test_half_types_are_relayed_as_what_they_are_and_as_their_sums() -> None:
    machine = machine_of(LINE, 4, SLOW)
    problem = GemmProblem(64, 64, 256, DType.bf16)
    schedule = planned(problem, "0,0,0", machine, grid=(1, 1), blocking=Blocking(splits=4))
    relays = schedule.buffers[schedule.buffers["matrix"] == Matrix.NONE]
    assert {DType(int(one)) for one in relays["dtype"]} == {DType.bf16, DType.f32}
    verify(schedule, lower(schedule))
    assert copied(schedule) <= LINE.keys()


@pytest.mark.parametrize("place", ["0,0,0", "h,h,0"])
def test_on_vulcan_kblocks_leaves_nothing_to_the_papers_scheduler(place: str) -> None:
    """The paper's routing gained 30 to 77 % there over copies that know nothing of links."""
    machine = load_machine("vulcan-8xv100")
    problem = GemmProblem(8192, 8192, 8192, DType.f64)
    best = {}
    for scheduler in ("kblocks", "uncut"):
        found = search(problem, Placement.parse(place), 8, machine, ScheduleOptions(scheduler=scheduler)).best
        best[scheduler] = found.predicted_s
    assert best["kblocks"] <= 1.05 * best["uncut"]


def test_a_chain_of_three_takes_little_longer_than_one_link() -> None:
    machine = machine_of(LINE, 4, FAST / 100, gemm_tflop_per_s=dict(Machine.uniform(4).gemm_tflop_per_s))
    problem = GemmProblem(4096, 4096, 4096, DType.f64)
    asked = {"devices": (3,), "blocking": Blocking(block=4096, first=4096, columns=1)}
    times = {
        place: simulate(planned(problem, place, machine, **asked), machine).seconds for place in ("2,2,2", "0,0,0")
    }
    assert times["0,0,0"] < RELAY_GAIN * times["2,2,2"]


@pytest.mark.parametrize("name", ["vulcan-8xv100", "karolina-8xa100", "meluxina-4xa100"])
def test_ways_of_several_nodes_are_those_of_each(name: str) -> None:
    node = load_machine(name)
    alone, found = ways_of(node), ways_of(Machine.cluster(node, 3, Net(12.5, 2e-6, 2)))
    assert found.even == alone.even
    count = node.num_ranks
    for first, source, to in itertools.product(range(0, 3 * count, count), range(count), range(count)):
        if not alone.even:
            cost, *relays = alone.ways[alone.first[source] + alone.place[to]]
            moved = [relay + first if relay >= 0 else relay for relay in relays]
            assert found.ways[found.first[first + source] + found.place[first + to]] == (cost, *moved)
            assert found.links[found.first[first + source] + to] == alone.links[alone.first[source] + to]
    for name in ("sends", "receives", "from_host"):
        assert getattr(found, name) == 3 * getattr(alone, name)
