"""Matrices in parts stay where they are: beside the SoftBuf no memory is taken for what is there already."""

from __future__ import annotations

import contextlib
import tracemalloc

import pytest

from tests.helpers.collective import collective_assert
from tests.helpers.distributed import uneven
from tests.helpers.sessions import SHARED
from uncut_mpi import Layout, ScheduleOptions
from uncut_mpi.segments import Segment

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.one_node("messages take memory while they are under way")]

PLAIN = ScheduleOptions("kblocks")  # a search takes memory and time, and finds no other kind of schedule
EXTENT = 256  # for each rank; parts have 0.5 MiB a rank
LITTLE = 1 << 18  # of Python's and numpy's own: half the least part
SCRATCH = 2 * (8 << 20)  # in which the host backend forms sums and products, whatever the parts


@contextlib.contextmanager
def taken(monkeypatch, found):
    """Fill `found` with what is taken meanwhile: ``"segments"``, bytes of each, and ``"peak"``, of Python and numpy."""
    create, found["segments"] = Segment.create.__func__, []

    def counted(cls, nbytes, *arguments, **options):
        found["segments"].append(nbytes)
        return create(cls, nbytes, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Segment, "create", classmethod(counted))
        tracemalloc.start()
        try:
            yield
            found["peak"] = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()


def dealt(kind, size):
    edge = EXTENT * size
    if kind != "blocks":
        return getattr(Layout, kind)(uneven(edge, size))
    down = 2 if size % 2 == 0 else 1
    return Layout.blocks(uneven(edge, down), uneven(edge, size // down))


@pytest.mark.parametrize("memory", ["device", "host", SHARED])
@pytest.mark.parametrize("kind", ["rows", "cols", "blocks"])
def test_no_memory_for_a_part_is_taken_that_is_there(comm, session, monkeypatch, kind, memory):
    shape, layout, found = (EXTENT * comm.size,) * 2, dealt(kind, comm.size), {}
    a, b, c = (session.empty(shape, "f64", layout, memory=memory) for _ in range(3))
    for matrix in (a, b):
        matrix.local[...] = 1.5
    session.barrier()
    part_bytes, binder = a.local.nbytes, session._calls.binder
    with taken(monkeypatch, found):
        again = session.distribute(a.local, layout, shape=shape)
    nothing = not found["segments"] and found["peak"] < LITTLE
    collective_assert(comm, nothing and part_bytes > LITTLE, f"distribute took {found}, a part {part_bytes}")
    with taken(monkeypatch, found):
        session.gemm(again, b, c, options=PLAIN)
    ours = {int(arena.sizes[comm.rank]) for arena in (binder.softbuf, binder.host_softbuf, binder.flags)}
    collective_assert(comm, ours.issuperset(found["segments"]) and found["peak"] < SCRATCH + LITTLE, f"gemm: {found}")
    with taken(monkeypatch, found):
        session.gemm(again, b, c, options=PLAIN)
    collective_assert(comm, not found["segments"] and found["peak"] < LITTLE, f"gemm again took {found}")
    collective_assert(comm, (c.local == 1.5 * 1.5 * shape[0]).all(), "the product is wrong")
