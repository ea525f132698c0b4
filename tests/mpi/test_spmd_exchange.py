"""Handles, schedules and shared memory: complete on all ranks or an error on all, and nothing left."""

from __future__ import annotations

import functools
import os

import numpy as np
import pytest

from tests.helpers.collective import expect
from tests.helpers.sessions import left_behind
from uncut_mpi.errors import CapacityError, TopologyError
from uncut_mpi.segments import Segment
from uncut_mpi.spmd import exchange

both_kinds = pytest.mark.parametrize("use_file", [False, True], ids=["anonymous", "file"])


def held():
    """Return what this rank holds of segments: descriptors, mappings, and its files in /dev/shm."""
    return sorted(one for one in left_behind().elements() if "uncut_mpi" in one)


@pytest.fixture(autouse=True)
def nothing_is_left(agree_all):
    before = held()
    yield
    after = held()
    agree_all(after == before, f"before {before}, after {after}")


@both_kinds
def test_every_rank_writes_its_part_and_reads_the_others(comm, agree_all, group, use_file):
    segment = exchange.segment_of(group, group.node, 8 * 1000 * comm.size, "a test", use_file)
    array = segment.array(np.float64, (comm.size, 1000))
    array[comm.rank] = np.random.default_rng(comm.rank).uniform(size=1000)
    group.barrier()
    wanted = [np.random.default_rng(rank).uniform(size=1000) for rank in range(comm.size)]
    agree_all(np.array_equal(array, wanted), "another rank's part was not seen")
    names = [name for name in os.listdir("/dev/shm") if name.startswith(f"uncut_mpi-{os.getpid()}-")]
    agree_all(not names, f"still named: {names}")
    del array
    segment.close()


def test_no_bytes_can_be_shared(agree_all, group):
    segment = exchange.shared_segment(group, 0, "a test")
    agree_all(segment.nbytes == 0 and segment.address != 0)
    segment.close()


@both_kinds
def test_too_little_memory_is_the_same_error_on_all_ranks(comm, agree_all, group, use_file):
    parts = ["a huge matrix needs 1126 TB", "available"]
    call = functools.partial(exchange.segment_of, group, group.node, 1 << 50, "a huge matrix", use_file)
    expect(comm, CapacityError, parts, call)


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_may_not_look_at_descriptors_gets_a_file(comm, agree_all, group, monkeypatch):
    real, refused = Segment.open.__func__, []

    def guarded(cls, handle):
        if not refused and comm.rank == comm.size - 1:
            refused.append(handle)
            raise TopologyError("/proc may not be read")
        return real(cls, handle)

    monkeypatch.setattr(Segment, "open", classmethod(guarded))
    segment = exchange.shared_segment(group, 100, "a test")
    array = segment.array()
    if comm.rank == 0:
        array[:] = 5
    group.barrier()
    agree_all((array == 5).all(), array)
    agree_all(len(refused) == (comm.rank == comm.size - 1), refused)
    del array
    segment.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("error", [TopologyError, CapacityError, OSError])
def test_a_rank_that_cannot_map_it_fails_all_ranks(comm, agree_all, group, monkeypatch, error):
    def refuse(handle):
        raise error("not here")

    if comm.rank == 1:
        monkeypatch.setattr(Segment, "open", refuse)
    found, before = "", held()
    try:
        exchange.shared_segment(group, 100, "a test")
    except Exception as caught:
        # The error's traceback keeps every local variable alive; memory must not wait for its end.
        found = f"{type(caught).__name__}: {caught}" if held() == before else f"left: {held()}"
    agree_all("not here" in found and (error is OSError or error.__name__ in found), found)
    agree_all(error is OSError or "rank 1" in found, found)
