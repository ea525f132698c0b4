"""What kblocks' stores take of work, and what they let products await."""

from __future__ import annotations

import ctypes
import random
import subprocess

import pytest

from tests.dev.fake import HERE, SOURCES
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.problem import GemmProblem
from uncut_mpi.planning.options import BLOCK_ORDERS

PROBLEM = GemmProblem(40, 48, 96, DType.f64)
DEPTH = 8


@pytest.fixture(scope="module")
def stores(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    made = tmp_path_factory.mktemp("stores") / "libstores.so"
    how = ["-std=c++20", "-O0", "-finstrument-functions", "-shared", "-fPIC", "-Wl,-Bsymbolic", f"-I{SOURCES}"]
    command = [compiler, *how, "-o", made, HERE / "kblocks_store.cpp"]
    subprocess.run([str(part) for part in command], check=True, timeout=120)
    found = ctypes.CDLL(str(made))
    found.calls_for.restype = found.await_arrivals.restype = ctypes.c_size_t
    return found


@pytest.mark.parametrize(("order", "slots"), [*((order, 0) for order in range(len(BLOCK_ORDERS))), (0, 1), (0, 4)])
def test_the_work_for_a_task_does_not_grow_with_the_number_of_k_blocks(
    stores: ctypes.CDLL, order: int, slots: int
) -> None:
    per_task = []
    for k_blocks in (100, 800):
        tasks = ctypes.c_size_t()
        per_task.append(stores.calls_for(k_blocks, order, slots, ctypes.byref(tasks)) / tasks.value)
        assert tasks.value > k_blocks
    assert per_task[1] < 1.1 * per_task[0]


def overlap(one: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(one[at] < other[at + 1] and other[at] < one[at + 1] for at in (0, 2))


@pytest.mark.parametrize("seed", range(20))
def test_a_product_awaits_what_it_reads_and_nothing_before_it_has_awaited(stores: ctypes.CDLL, seed: int) -> None:
    choices = random.Random(seed)
    stores.forget_arrivals()
    came: list[tuple[tuple[int, ...], int, list[int]]] = []  # a piece, its task, and what awaited it on each lane
    last = [-1, -1]
    across = [(at, at + width) for at in range(0, 12, 2) for width in (2, 3, 12)]
    for task in range(300):
        piece = (*choices.choice(across), *sorted(choices.sample(range(30), 2)))
        if choices.random() < 0.6:
            stores.add_arrival((ctypes.c_int64 * 4)(*piece), task)
            came.append((piece, task, [-1, -1]))
            continue
        lane, before = choices.randrange(2), [choices.choice((-1, of)) for of in last]
        found = (ctypes.c_int * 300)()
        count = stores.await_arrivals((ctypes.c_int64 * 4)(*piece), lane, (ctypes.c_int * 2)(*before), task, found)
        wanted = []
        for there, by, awaited in came:
            if overlap(there, piece) and awaited[lane] < 0:
                if not any(0 <= known <= upto for known, upto in zip(awaited, before, strict=True)):
                    wanted.append(by)
                awaited[lane] = task
        assert sorted(found[:count]) == wanted
        last[lane] = task
