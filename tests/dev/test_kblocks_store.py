"""Another store of kblocks than panels: rings, whose slots are written again when their readers are done."""

from __future__ import annotations

import ctypes
import itertools
import random
import subprocess

import numpy as np
import pytest

from tests.dev.fake import HERE, SOURCES
from tests.helpers import oracle
from uncut_mpi.errors import ScheduleError
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.locations import location_table
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.buffers import user_pieces
from uncut_mpi.planning.lower import lower
from uncut_mpi.planning.options import BLOCK_ORDERS
from uncut_mpi.planning.schedule import BUFFER_DTYPE, Matrix, Role, Schedule, native_tables
from uncut_mpi.planning.verify import verify

PROBLEM = GemmProblem(40, 48, 96, DType.f64)
DEPTH = 8


@pytest.fixture(scope="module")
def rings(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = tmp_path_factory.mktemp("rings") / "librings.so"
    how = ["-std=c++20", "-O0", "-finstrument-functions", "-shared", "-fPIC", "-Wl,-Bsymbolic", f"-I{SOURCES}"]
    command = [compiler, *how, "-o", made, HERE / "ring_store.cpp"]
    subprocess.run([str(part) for part in command], check=True, timeout=120)
    found = ctypes.CDLL(str(made))
    found.table.restype = ctypes.c_void_p
    found.calls_for.restype = found.await_arrivals.restype = ctypes.c_size_t
    return found


def scheduled(rings: ctypes.CDLL, slots: int, *ways: bool, forgets: bool = False) -> Schedule:
    rings.schedule_rings(PROBLEM.m, PROBLEM.n, PROBLEM.k, DEPTH, slots, *map(ctypes.c_bool, (*ways, forgets)))
    tables = []
    for number in range(6):
        size = ctypes.c_size_t()
        address = rings.table(number, ctypes.byref(size))
        tables.append(np.frombuffer(ctypes.string_at(address, size.value), np.uint8))
    *native, buffers = tables
    return Schedule(
        num_ranks=3,
        problem=PROBLEM,
        placement=Placement.parse("0,0,0"),
        scheduler="kblocks",
        grid=(1, 2),
        splits=1,
        tile=0,
        buffers=np.frombuffer(buffers, BUFFER_DTYPE),
        locations=location_table(3),
        pieces=user_pieces(PROBLEM, Placement.parse("0,0,0")),
        **native_tables(*native),
    )


@pytest.mark.parametrize(("serial", "earliest"), [*itertools.product((False, True), repeat=2)])
@pytest.mark.parametrize("slots", [3, 5])
def test_rings_that_all_blocks_share_are_written_again_when_their_readers_are_done(
    rings: ctypes.CDLL, slots: int, serial: bool, earliest: bool
) -> None:
    made = scheduled(rings, slots, serial, earliest)
    verify(made, lower(made))
    assert oracle.is_wrong(made) == ""
    read = set(made.regions["buffer"][made.operands["region"]].tolist())
    panels = made.buffers[[number for number in sorted(read) if made.buffers["role"][number] == Role.PANEL]]
    assert sorted(panels["matrix"].tolist()) == sorted(2 * [Matrix.A, Matrix.B, Matrix.C])  # one each of two ranks
    assert set(panels["cols"][panels["matrix"] == Matrix.A].tolist()) == {slots * DEPTH}


@pytest.mark.parametrize("slots", [3, 5])
def test_the_proof_sees_a_slot_that_is_written_while_it_is_read(rings: ctypes.CDLL, slots: int) -> None:
    made = scheduled(rings, slots, False, False, forgets=True)
    with pytest.raises(ScheduleError, match=r"it overwrites .* without awaiting"):
        verify(made, lower(made))


def test_the_proof_sees_a_ring_of_fewer_slots_than_fetches_run_ahead(rings: ctypes.CDLL) -> None:
    made = scheduled(rings, 2, False, False)
    with pytest.raises(ScheduleError):
        verify(made, lower(made))


# -- what a product awaits ---------------------------------------------------------------------------


@pytest.mark.parametrize("order", range(len(BLOCK_ORDERS)))
def test_the_work_for_a_task_does_not_grow_with_the_number_of_k_blocks(rings: ctypes.CDLL, order: int) -> None:
    per_task = []
    for k_blocks in (100, 800):
        tasks = ctypes.c_size_t()
        per_task.append(rings.calls_for(k_blocks, order, ctypes.byref(tasks)) / tasks.value)
        assert tasks.value > k_blocks
    assert per_task[1] < 1.1 * per_task[0]


def overlap(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(one[at] < other[at + 1] and other[at] < one[at + 1] for at in (0, 2))


@pytest.mark.parametrize("seed", range(20))
def test_a_product_awaits_what_it_reads_and_nothing_before_it_has_awaited(rings: ctypes.CDLL, seed: int) -> None:
    choices = random.Random(seed)
    rings.forget_arrivals()
    came: list[tuple[tuple[int, ...], int, list[int]]] = []  # a piece, its task, and what awaited it on each lane
    last = [-1, -1]
    across = [(at, at + width) for at in range(0, 12, 2) for width in (2, 3, 12)]
    for task in range(300):
        piece = (*choices.choice(across), *sorted(choices.sample(range(30), 2)))
        if choices.random() < 0.6:
            rings.add_arrival((ctypes.c_int64 * 4)(*piece), task)
            came.append((piece, task, [-1, -1]))
            continue
        lane, before = choices.randrange(2), [choices.choice((-1, of)) for of in last]
        found = (ctypes.c_int * 300)()
        count = rings.await_arrivals((ctypes.c_int64 * 4)(*piece), lane, (ctypes.c_int * 2)(*before), task, found)
        wanted = []
        for there, by, awaited in came:
            if overlap(there, piece) and awaited[lane] < 0:
                if not any(0 <= known <= upto for known, upto in zip(awaited, before, strict=True)):
                    wanted.append(by)
                awaited[lane] = task
        assert sorted(found[:count]) == wanted
        last[lane] = task
