"""PaRSEC's product out of core: its model of transfers against the paper, and its schedules against the model."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from tests.helpers import oracle
from tests.helpers.clusters import cluster
from tests.helpers.proven import check
from uncut_mpi.bench.rivals.parsec import (
    Blocks,
    ParsecModel,
    blocking_of,
    received_bytes,
)
from uncut_mpi.errors import CapacityError, ParamError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.layout import Layout
from uncut_mpi.model.locations import in_host
from uncut_mpi.model.machine import Machine
from uncut_mpi.model.machine_files import load_machine
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.places import Dealt, Places
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning import kblocks
from uncut_mpi.planning.crossing import cross
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import Blocking, ScheduleOptions
from uncut_mpi.planning.planner import Planned, plan
from uncut_mpi.planning.schedule import Kind, Matrix, Role, Schedule
from uncut_mpi.planning.search import TIE
from uncut_mpi.planning.setting import Setting
from uncut_mpi.planning.verify import verify
from uncut_mpi.view.traffic import traffic

TILE = 4
HOST = Placement.parse("h,h,h")


def tiles_received(schedule: Schedule, tile: int = TILE) -> list[float]:
    """Return what copies bring to each rank's device from elsewhere (tiles)."""
    copies = schedule.copies()
    into = copies[~in_host(schedule.locations, copies[:, 2]) & (copies[:, 1] != copies[:, 2])]
    size = tile * tile * schedule.problem.dtype.itemsize
    return [float(into[into[:, 2] == rank, 3].sum()) / size for rank in range(schedule.num_ranks)]


def per_process(model: ParsecModel, blocks: Blocks) -> float:
    """Return Comm_process = (b(1 − 1/q) + c(1 − 1/p)) K_t X Y, the tiles that a process receives from others."""
    down, along = model.rounds(blocks)
    return (blocks.b * (1 - 1 / model.q) + blocks.c * (1 - 1 / model.p)) * model.k * down * along


def tiles_sent_out(schedule: Schedule, tile: int = TILE) -> float:
    return schedule.bytes_by_link()["device_to_host"] / (tile * tile * schedule.problem.dtype.itemsize)


def dealt(problem: GemmProblem, model: ParsecModel) -> Placement:
    """Return A, B and C dealt by tiles in turn to the processes' devices, each in its own host memory."""
    p, q, each = model.p, model.q, model.devices
    ranks = [
        (col // each * p + row if problem.swapped else row * q + col // each) * each + col % each
        for row, col in itertools.product(range(p), range(q * each))
    ]
    layout = Layout.block_cyclic(TILE, TILE, (p, q * each), ranks=ranks)
    return Places(*(Dealt(layout, "host"),) * 3).bind(problem, len(ranks))


def tiles_into_nodes(schedule: Schedule) -> list[float]:
    """Return what copies bring to each node from others (tiles)."""
    size = TILE * TILE * schedule.problem.dtype.itemsize
    return [one.into_bytes / size for one in traffic(schedule).nodes]


def over_host_links(schedule: Schedule) -> int:
    moved = schedule.bytes_by_link()
    return moved["host_to_device"] + moved["device_to_host"]


def of_blocks(model: ParsecModel, blocks: Blocks, *, reads_c: bool = True) -> Schedule:
    """Return the schedule with these blocks, on a node for each process and as many ranks as there are devices."""
    problem = GemmProblem(model.m * TILE, model.n * TILE, model.k * TILE, DType.f64, reads_c=reads_c)
    grid, machine = (model.p, model.q * model.devices), cluster(model.p * model.q, model.devices)
    placement = dealt(problem, model) if machine.num_nodes > 1 else HOST
    options = ScheduleOptions("kblocks", grid=grid, blocking=blocking_of(model, blocks, TILE))
    return cross(kblocks.schedule(Setting.of(problem, placement, machine.num_ranks, machine, options))[0])


SETTINGS = [
    (b, c, d, devices, lookahead)
    for b, c, d, devices, lookahead in itertools.product((3, 6, 12), (4, 12), (1, 2, 4), (1, 2, 4), (0, 1, 2))
    if c % devices == 0 and (b + c + d + devices + lookahead) % 2
]


def test_there_are_settings_enough() -> None:
    assert len(SETTINGS) >= 30


@pytest.mark.parametrize(("b", "c", "d", "devices", "lookahead"), SETTINGS)
def test_devices_receive_what_equation_1_says(b: int, c: int, d: int, devices: int, lookahead: int) -> None:
    blocks = Blocks(b, c, d, lookahead)
    m, n, k = 12, 12, 8
    of_c = b * c / devices
    chunks = lookahead + 1
    seen = set()
    for memory in (
        m * k + k * n / devices + m * n / devices,  # case a, if C is one block
        chunks * b * d + c * k / devices + of_c,  # b
        of_c + chunks * (b + c / devices) * d,  # c
    ):
        model = ParsecModel(m, n, k, devices=devices, memory=memory)
        case = model.case(blocks)
        if case == "a" and (b, c) != (m, n):
            continue  # all fits, so nobody cuts C
        if case != "a" and chunks * d >= k and (case == "c" or b == m):
            continue  # all chunks are there at once, which the paper calls another case
        seen.add(case)
        schedule = of_blocks(model, blocks)
        assert tiles_received(schedule) == pytest.approx([model.per_gpu(blocks)] * devices)
        assert tiles_sent_out(schedule) == m * n
        verify(schedule, lower(schedule))
    assert seen or chunks * d >= k


def test_every_case_is_among_them() -> None:
    found = set()
    for b, c, d, devices, lookahead in SETTINGS:
        blocks = Blocks(b, c, d, lookahead)
        least = ParsecModel(12, 12, 8, devices=devices).held(blocks)
        found |= {ParsecModel(12, 12, 8, devices=devices, memory=most).case(blocks) for most in (least, 2 * least, 500)}
    assert found == {"a", "b", "c"}


def test_c_that_is_not_read_does_not_come() -> None:
    model, blocks = ParsecModel(12, 12, 8, devices=2, memory=40), Blocks(3, 4, 2, 1)
    of_c = 144 / 2
    assert tiles_received(of_blocks(model, blocks, reads_c=False)) == [model.per_gpu(blocks) - of_c] * 2


def test_the_papers_numbers() -> None:
    # Section V-A: N = 70,000 with tiles of 1024: C stays on 4 to 6 GPUs, and is cut on 1 to 3.
    edge = math.ceil(70_000 / 1024)
    for devices in range(1, 7):
        model = ParsecModel(edge, edge, edge, devices=devices, memory=2e9 / 1024**2)
        blocks = model.choose()
        assert (model.rounds(blocks) == (1, 1)) == (devices >= 4)
        assert blocks.lookahead == (1 if devices >= 4 else 2)
        assert model.case(blocks) == "c"
        assert model.held(blocks) <= model.memory


def test_transfers_between_processes() -> None:
    model, blocks = ParsecModel(24, 24, 12, p=2, q=3), Blocks(3, 4, 2, 1)
    down, along = model.rounds(blocks)
    assert (down, along) == (4, 2)
    # Comm_total is also (b(1 - 1/q) + c(1 - 1/p)) M_t K_t N_t / (bc).
    total = (3 * (1 - 1 / 3) + 4 * (1 - 1 / 2)) * 24 * 12 * 24 / (3 * 4)
    assert 6 * per_process(model, blocks) == pytest.approx(total)


@pytest.mark.parametrize("rounds", [(1, 1), (2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize(("processes", "devices"), [((2, 2), 1), ((2, 2), 3), ((2, 3), 2), ((3, 1), 1), ((3, 1), 3)])
def test_processes_receive_what_the_formula_says(
    processes: tuple[int, int], rounds: tuple[int, int], devices: int
) -> None:
    (p, q), (down, along) = processes, rounds
    m, n, k = 12, 72, 36
    blocks = Blocks(m // (p * down), n // (q * along), 4, 1)
    memory = ParsecModel(m, n, k, p, q, devices).held(blocks)
    model = ParsecModel(m, n, k, p, q, devices, memory=memory)
    assert (model.rounds(blocks), model.case(blocks)) == (rounds, "c")
    schedule = of_blocks(model, blocks)
    assert tiles_into_nodes(schedule) == pytest.approx([per_process(model, blocks)] * p * q)
    assert schedule.bytes_by_link()["node_to_node"] == pytest.approx(
        p * q * per_process(model, blocks) * TILE * TILE * 8
    )
    assert tiles_received(schedule) == pytest.approx([model.per_gpu(blocks)] * p * q * devices)
    check(schedule)


@pytest.mark.parametrize(
    ("extents", "processes"), [((48, 48, 48), (2, 3)), ((96, 24, 48), (6, 1)), ((24, 96, 48), (1, 6))]
)
@pytest.mark.parametrize("swapped", [False, True])
def test_nodes_make_the_grid_on_which_they_receive_least(
    extents: tuple[int, int, int], processes: tuple[int, int], swapped: bool
) -> None:
    problem, (p, q) = GemmProblem(*extents, DType.f64, swapped=swapped), processes
    model = ParsecModel(*(one // TILE for one in extents), p, q, 2)
    made = plan(problem, dealt(problem, model), 12, cluster(6, 2), ScheduleOptions("parsec", tile=TILE)).schedule
    assert made.grid == (p, 2 * q)
    assert tiles_into_nodes(made) == pytest.approx([per_process(model, model.choose())] * 6)
    check(made)


def test_nodes_have_as_many_devices_each() -> None:
    problem = GemmProblem(64, 64, 64, DType.f64)
    options = ScheduleOptions("parsec", tile=4, devices=(0, 1, 2))
    with pytest.raises(ParamError, match=r"as many devices on each node, found \[2, 1\]"):
        plan(problem, HOST, 4, cluster(2, 2), options)


@pytest.mark.parametrize("processes", [(1, 1), (2, 2)])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_a_chunk_comes_when_all_devices_of_the_process_are_through_with_an_earlier_one(
    processes: tuple[int, int], lookahead: int
) -> None:
    p, q = processes
    blocks = Blocks(6, 12, 4, lookahead)
    memory = ParsecModel(12, 24, 36, devices=3).held(blocks)
    schedule = of_blocks(ParsecModel(12 * p, 24 * q, 36, p, q, 3, memory=memory), blocks)
    tasks, node_of = schedule.tasks, schedule.locations["node"]
    seen = 0
    for task in np.flatnonzero(np.isin(tasks["kind"], (Kind.COPY, Kind.RECV))):
        into = schedule.buffers[schedule.regions[schedule.operands_of(task)[0]["region"]]["buffer"]]
        products = [one for one in schedule.awaited(task) if tasks["kind"][one] == Kind.GEMM]
        if into["role"] != Role.PANEL or into["matrix"] == Matrix.C or not products:
            continue
        here = node_of[tasks["rank"][task]]
        assert {int(rank) for rank in tasks["rank"][products]} == set(np.flatnonzero(node_of[: p * q * 3] == here))
        seen += 1
    first = 2 * 9 - lookahead - 1  # chunks of a column of blocks that come into a slot that was used
    assert seen >= first * p * q * 3 * 2


def test_sizes_that_do_not_divide_are_right_too() -> None:
    for extents, ranks, budget in (((70, 61, 53), 2, 12_000), ((33, 90, 47), 3, 9_000), ((20, 20, 200), 1, 8_000)):
        problem = GemmProblem(*extents, DType.f64)
        options = ScheduleOptions("parsec", tile=4, device_memory=budget)
        made = plan(problem, HOST, ranks, Machine.uniform(ranks), options)
        assert made.schedule.scheduler == "parsec"
        assert made.schedule.softbuf_bytes().max() <= budget
        verify(made.schedule, lower(made.schedule))
        assert oracle.is_wrong(made.schedule) == ""


def test_too_little_memory_is_said() -> None:
    problem = GemmProblem(100, 100, 100, DType.f64)
    with pytest.raises(CapacityError, match=r"room for 0\.488281 tiles, and parsec needs 7: .* take smaller tiles"):
        plan(problem, HOST, 1, Machine.uniform(1), ScheduleOptions("parsec", tile=16, device_memory=1000))
    with pytest.raises(CapacityError, match="take smaller tiles"):
        plan(problem, HOST, 1, Machine.uniform(1), ScheduleOptions("parsec", tile=16, device_memory=16 * 16 * 8 * 2))


def test_what_fits_is_never_refused() -> None:
    rng, refused = random.Random(5), 0
    for _ in range(250):
        extents, ranks, tile = [rng.randint(1, 700) for _ in "mnk"], rng.randint(1, 6), rng.choice((16, 17, 64, 100))
        problem = GemmProblem(*extents, rng.choice((DType.f16, DType.f32, DType.f64)), reads_c=rng.random() < 0.5)
        tile, chunks = min(tile, max(extents)), rng.randint(1, 4)
        memory_bytes = round(tile**2 * problem.dtype.itemsize * rng.uniform(2, 25))
        machine = Machine.uniform(ranks, memory_bytes=memory_bytes)
        options = ScheduleOptions("parsec", tile=tile, blocking=Blocking(slots=chunks))
        try:
            made = plan(problem, HOST, ranks, machine, options).schedule
        except CapacityError:
            refused += 1
            least = Blocking(first=tile, block=tile, slots=chunks, b_slots=chunks, c_slots=1, c_rows=tile, c_cols=tile)
            asked = ScheduleOptions(grid=(1, ranks), blocking=least)
            assert not kblocks.Planner(Setting.of(problem, HOST, ranks, machine)).prepare(asked, in_core=True).fits
        else:
            assert (made.softbuf_bytes() <= machine.memory_bytes).all()
    assert 20 < refused < 125


@pytest.mark.parametrize(
    ("m", "n", "b", "c"), [(8, 1000, 8, 63), (1000, 8, 53, 8), (100, 80, 20, 20), (90, 90, 23, 23)]
)
def test_blocks_of_c_fill_what_the_rule_leaves_them(m: int, n: int, b: int, c: int) -> None:
    # Of 600 tiles. What is short of them: equal numbers of rows and columns, and room for three chunks.
    blocks = ParsecModel(m, n, 100, devices=2, memory=400).choose()
    assert (blocks.b, blocks.c) == (b, c)


def test_odd_numbers_are_refused_in_words_and_endless_memory_is_none() -> None:
    assert ParsecModel(10, 12, 14).choose() == Blocks(10, 12, 14, 1)
    for call in (
        lambda: Blocks(0, 1, 1, 1),
        lambda: ParsecModel(4, 4, 4, memory=20).choose(-1),
    ):
        with pytest.raises(ParamError):
            call()


@pytest.mark.parametrize(
    ("extents", "ranks", "gib"),
    [((32768,) * 3, 2, 4), ((131072, 131072, 4096), 2, 16), ((16384,) * 3, 1, 2), ((70_000,) * 3, 4, 16)],
)
def test_auto_is_ahead_of_it(extents: tuple[int, int, int], ranks: int, gib: int) -> None:
    machine, problem = load_machine("h200-4x").subset(range(ranks)), GemmProblem(*extents, DType.f64, reads_c=False)
    theirs = plan(problem, HOST, ranks, machine, ScheduleOptions("parsec", device_memory=gib << 30))
    ours = plan(problem, HOST, ranks, machine, ScheduleOptions(device_memory=gib << 30))
    assert ours.predicted_s < theirs.predicted_s
    assert is_frugal_or_fast(ours, theirs)


def is_frugal_or_fast(ours: Planned, theirs: Planned) -> bool:
    is_less = over_host_links(ours.schedule) <= over_host_links(theirs.schedule)
    return is_less or ours.predicted_s < theirs.predicted_s


@pytest.mark.parametrize("seed", range(8))
def test_auto_moves_no_more_over_host_links_or_is_faster(seed: int) -> None:
    rng = random.Random(seed)
    ranks, gib = rng.choice((1, 2, 4)), rng.choice((0.25, 0.5, 1, 2))
    extents = (8192, 8192, 8192) if seed < 4 else tuple(rng.choice((2048, 4096, 8192, 12288, 16384)) for _ in "mnk")
    problem = GemmProblem(*extents, DType.f64, reads_c=seed % 3 == 1)
    if seed < 4:
        ranks, gib = 2, 0.5 * (seed + 1)
    machine = load_machine("h200-4x").subset(range(ranks))
    budget = round(gib * 2**30)
    theirs = plan(problem, HOST, ranks, machine, ScheduleOptions("parsec", device_memory=budget))
    ours = plan(problem, HOST, ranks, machine, ScheduleOptions(device_memory=budget))
    assert ours.predicted_s <= (1 + TIE) * theirs.predicted_s
    assert is_frugal_or_fast(ours, theirs)


def test_options_of_a_plan_give_the_same_plan_again() -> None:
    machine, problem = load_machine("h200-4x").subset(range(2)), GemmProblem(8192, 8192, 8192, DType.f64, reads_c=False)
    made = plan(problem, HOST, 2, machine, ScheduleOptions("parsec", device_memory=512 << 20))
    again = plan(problem, HOST, 2, machine, made.options.of_its_scheduler)
    assert again.schedule.digest() == made.schedule.digest()
    of_kblocks = plan(problem, HOST, 2, machine, ScheduleOptions("kblocks", device_memory=512 << 20)).options
    assert of_kblocks.of_its_scheduler == of_kblocks


def test_one_block_of_c_with_the_deepest_k_blocks_is_tried() -> None:
    # Without it the best is expected to take 4 % longer.
    machine, problem = load_machine("h200-4x").subset([0, 1]), GemmProblem(4096, 8192, 32768, DType.f64, reads_c=False)
    found = plan(problem, HOST, 2, machine, ScheduleOptions(device_memory=1 << 30)).options.blocking
    assert found.c_rows >= 4096
    assert found.c_cols >= 4096
    assert found.first == found.block > 3000


@pytest.mark.parametrize(
    ("extents", "memory", "tile", "megabytes"),
    [
        ((500, 300, 400), 10**8, 1024, 5.36),  # room for all: A on both, halves of B and C
        ((2049, 2049, 2049), 2 * 10**8, 1024, 134.35),
        ((20000, 20000, 20000), 2 * 10**8, 256, 40700.0),
        ((2000, 2000, 2000), 10**7, 1024, 365.33),  # no room for tiles of 1024
    ],
)
def test_the_equation_is_of_the_matrices_own_extents(
    extents: tuple[int, int, int], memory: int, tile: int, megabytes: float
) -> None:
    problem, place, machine = GemmProblem(*extents, DType.f64), HOST, load_machine("h200-4x").subset(range(2))
    setting = Setting.of(problem, place, 2, machine, ScheduleOptions(device_memory=memory))
    assert received_bytes(setting, tile) / 1e6 == pytest.approx(megabytes, rel=1e-4)
