"""What a report of all ranks says of a product, and the signal that asks for one."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest

from tests.helpers.schedules import random_case
from uncut_mpi.api import watchdog
from uncut_mpi.planning.lower import Code, lower


@pytest.mark.parametrize("seed", range(8))
def test_each_wait_is_for_the_task_that_the_schedule_awaits(seed: int) -> None:
    schedule = random_case(random.Random(seed))
    lowering = lower(schedule)
    found = []
    for rank, program in lowering.lists.items():
        for wait in program.operations[np.isin(program.operations["code"], (Code.WAIT_FLAG, Code.WAIT_EVENT))]:
            told = watchdog._awaited(lowering.lists, wait, rank)
            assert told is not None
            assert schedule.tasks["rank"][told[1]] == told[0]
            found.append((int(wait["task"]), told[1]))
    assert sorted(found) == sorted(map(tuple, lowering.waits.tolist()))


def test_a_lane_is_where_its_word_says() -> None:
    schedule = next(
        one
        for one in (random_case(random.Random(seed)) for seed in range(50))
        if one.num_ranks > 1 and len(lower(one).waits) > 4
    )
    lists = lower(schedule).lists
    words = np.zeros((schedule.num_ranks + 1, 64), np.uint32)
    told = watchdog.waits(schedule, words, range(schedule.num_ranks), by_host=True, before=words)
    text = "\n".join("\n".join([head, *lanes]) for head, lanes in told)
    for rank, program in lists.items():
        assert f"rank {rank} has" in text
        words[rank, : len(program.lanes)] = np.bincount(program.operations["lane"], minlength=len(program.lanes))
    over = list(watchdog.waits(schedule, words, range(schedule.num_ranks), by_host=True))
    assert over == [(f"rank {rank} has finished its part", []) for rank in lists]
    assert "waits for task" in text


LISTENS = """
import os, signal
from uncut_mpi import _native
{before}
found = _native.listen_to(signal.SIGUSR2)
assert (found >= 0) == {listens}, found
if found >= 0:
    os.kill(os.getpid(), signal.SIGUSR2)
    assert os.read(found, 64) == b"\\0"
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGUSR2)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    os.set_blocking(found, False)
    try:
        os.read(found, 64)
    except BlockingIOError:
        pass
    else:
        raise SystemExit("a fork told its parent")
"""


@pytest.mark.parametrize(
    ("before", "listens"),
    [("", True), ("signal.signal(10 + 2, signal.SIG_IGN)", False), ("signal.signal(12, lambda *_: None)", False)],
)
def test_a_signal_is_heard_unless_the_program_handles_it(before: str, listens: bool) -> None:
    code = LISTENS.format(before=before, listens=listens)
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
