"""Arenas: growth that fails on one rank is everybody's error and costs nothing; nothing stays open or mapped."""

from __future__ import annotations

import functools

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect, outcome
from tests.helpers.faulty import recorded
from tests.helpers.products import Case, make_operands, mismatch, release
from tests.helpers.sessions import left_behind, ranks_per_node
from uncut_mpi.api.counters import Counters
from uncut_mpi.api.memory import GRANULE_BYTES, Arena, PeerMappings
from uncut_mpi.device.host import HostBackend
from uncut_mpi.errors import CapacityError, DeviceError

SMALL, LARGE = GRANULE_BYTES, 4 * GRANULE_BYTES


class Limited(HostBackend):
    """Refuses allocations above a limit on one rank, and counts what is open."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__(rank, ranks)
        self.limit_bytes = 1 << 62
        self.refusal: Exception = CapacityError("")
        self.allocated: dict[int, int] = {}
        self.opened = 0

    def allocate(self, nbytes):
        if nbytes > self.limit_bytes:
            raise self.refusal
        made = super().allocate(nbytes)
        self.allocated[made.address] = nbytes
        return made

    def free(self, allocation):
        super().free(allocation)
        del self.allocated[allocation.address]

    def open(self, handle):
        self.opened += 1
        return super().open(handle)

    def close_peer(self, address):
        super().close_peer(address)
        self.opened -= 1


@pytest.fixture
def backend(group):
    backend = Limited(group.rank, group.size)
    yield backend
    backend.close()


@pytest.fixture
def arena(comm, group, backend):
    arena = Arena(group, backend, PeerMappings(backend), Counters(), "SoftBuf")
    yield arena
    arena.close()
    collective_assert(comm, backend.opened == 0 and not backend.allocated, "something is left")


def every(group, nbytes):
    return np.full(group.size, nbytes, np.int64)


def first_word(backend, arena, rank):
    """The first word of a rank's arena, as this rank sees it."""
    out = np.zeros((1, 1), np.uint32)
    backend.to_host(int(arena.addresses[rank]), 1, out)
    return int(out[0, 0])


def mapped_rightly(group, backend, arena) -> bool:
    """Whether each rank's arena is seen by all under the addresses that it has now. Collective."""
    backend.fill_words(int(arena.addresses[group.rank]), 2, group.rank + 7)
    group.barrier()
    seen = [first_word(backend, arena, rank) for rank in range(group.size)]
    group.barrier()
    return seen == [rank + 7 for rank in range(group.size)]


@pytest.mark.mpi(min_size=2)
def test_ranks_may_need_different_sizes_and_none(comm, group, backend, arena):
    needed = np.array([2 * rank * SMALL for rank in range(group.size)], np.int64)
    arena.ensure(needed)
    good = (arena.sizes == needed).all() and (arena.addresses != 0).tolist() == (needed > 0).tolist()
    collective_assert(comm, good, f"sizes {arena.sizes}, addresses {arena.addresses}")
    collective_assert(comm, backend.opened == group.size - 1 - (group.rank != 0), f"{backend.opened} are open")
    arena.ensure(every(group, SMALL))
    wanted = np.maximum(needed, SMALL)
    collective_assert(comm, (arena.sizes == wanted).all(), f"sizes {arena.sizes}")
    collective_assert(comm, not arena.ensure(needed), "what is large enough was made anew")
    collective_assert(comm, mapped_rightly(group, backend, arena), "arenas are not where the addresses say")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("refusal", [CapacityError, DeviceError, um.ParamError, RuntimeError])
def test_a_growth_that_fails_on_one_rank_restores_every_rank(comm, group, backend, arena, refusal):
    arena.ensure(every(group, SMALL))
    if group.rank == 1:
        backend.limit_bytes, backend.refusal = 2 * SMALL, refusal("8 MiB needed, 5 MiB available on purpose")
    said = outcome(lambda: arena.ensure(every(group, LARGE)))
    foreign = "PeerFailedError" if group.rank != 1 else "RuntimeError"
    wanted = refusal.__name__ if refusal is not RuntimeError else foreign
    collective_assert(comm, said.startswith(wanted) and "on purpose" in said, said)
    collective_assert(comm, "rank 1" in said or refusal is RuntimeError, said)
    good = (arena.sizes == SMALL).all() and list(backend.allocated.values()) == [SMALL]
    collective_assert(comm, good, f"sizes {arena.sizes}, allocated {backend.allocated}")
    collective_assert(comm, mapped_rightly(group, backend, arena), "arenas are not where the addresses say")
    grew = arena.ensure(every(group, 2 * SMALL))
    collective_assert(comm, grew and (arena.sizes == 2 * SMALL).all(), f"sizes {arena.sizes}")
    collective_assert(comm, mapped_rightly(group, backend, arena), "arenas are not where the addresses say")


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_cannot_even_have_its_old_size_again_is_empty_and_may_grow_later(comm, group, backend, arena):
    arena.ensure(every(group, SMALL))
    if group.rank == 1:
        backend.limit_bytes, backend.refusal = 0, CapacityError("nothing is left on purpose")
    expect(comm, um.CapacityError, ["rank 1"], lambda: arena.ensure(every(group, LARGE)))
    wanted = [0 if rank == 1 else SMALL for rank in range(group.size)]
    good = arena.sizes.tolist() == wanted and arena.addresses[1] == 0 and not arena.fits(every(group, SMALL))
    collective_assert(comm, good, f"sizes {arena.sizes}")
    backend.limit_bytes = 1 << 62
    arena.ensure(every(group, SMALL))
    collective_assert(comm, mapped_rightly(group, backend, arena), "arenas are not where the addresses say")


@pytest.mark.mpi(min_size=2)
def test_an_arena_that_a_peer_cannot_map_is_everybodys_error(comm, group, backend, arena, monkeypatch):
    def refuse(handle):
        raise um.TopologyError("no peer access on purpose")

    if group.rank == 1:
        monkeypatch.setattr(backend, "open", refuse)
    expect(comm, um.TopologyError, ["rank 1"], lambda: arena.ensure(every(group, SMALL)))
    monkeypatch.undo()
    arena.ensure(every(group, SMALL))
    collective_assert(comm, mapped_rightly(group, backend, arena), "arenas are not where the addresses say")


# -- sessions ------------------------------------------------------------------------------------


def open_session(comm, backend="host"):
    return um.Session(comm, backend=backend, machine=um.Machine.uniform(comm.size), timeout_s=20)


OPTIONS = um.ScheduleOptions(scheduler="uncut", tile=16)
CASE = Case(40, 30, 20, place=("0", "h", "0"))


def test_a_session_closes_every_mapping(comm):
    backend, made = recorded(Limited)
    open_session(comm).close()  # gives back what other tests have dropped
    before = left_behind()
    for _ in range(3):
        with open_session(comm, backend) as session:
            operands = make_operands(session, CASE)
            session.gemm(*operands.abc, alpha=CASE.alpha, beta=CASE.beta, options=OPTIONS)
            wrong = mismatch(CASE, operands)
            del operands
        del session
        left = made[-1].opened, len(made[-1].allocated)
        collective_assert(comm, not wrong and left == (0, 0), f"{wrong}; open, allocated: {left}")
        made.clear()
    after = left_behind()
    collective_assert(comm, after == before, f"{before} before, {after} after")


@pytest.mark.mpi(min_size=2)
def test_a_product_too_large_for_one_rank_fails_on_all_and_smaller_ones_go_on(comm):
    backend, made = recorded(Limited)
    with open_session(comm, backend) as session:
        small, large = make_operands(session, Case(40, 30, 20)), make_operands(session, Case(800, 700, 600))
        if session.rank == 1:
            made[0].limit_bytes = SMALL
            made[0].refusal = CapacityError("SoftBuf: 6 MiB needed, 2 MiB available on purpose")
        with session.plan(small.a, small.b, small.c, options=OPTIONS) as plan:
            plan.execute(1.2345, 1.1154)
            wrong = mismatch(Case(40, 30, 20), small)
            options = um.ScheduleOptions(scheduler="uncut", tile=256)
            call = functools.partial(session.gemm, large.a, large.b, large.c, options=options)
            expect(comm, um.CapacityError, ["rank 1"], call)
            if session.rank == 0:
                small.c.array[...] = small.c_MN
            session.barrier()
            plan.execute(1.2345, 1.1154)
            wrong += mismatch(Case(40, 30, 20), small)
        made[0].limit_bytes = 1 << 62
        case = Case(800, 700, 600)
        call(alpha=case.alpha, beta=case.beta)
        wrong += mismatch(case, large)
        release(session, large)
    collective_assert(comm, not wrong, wrong)


@pytest.mark.parametrize("method", ["identity", "allocate", "open", "fill_words"])
def test_a_session_that_cannot_be_made_on_one_rank_is_refused_on_all_and_leaves_nothing(comm, method):
    closed, held = [], []

    class Failing(HostBackend):
        def close(self):
            # Ranks close their devices each at its own time: by then no peer may have anything mapped.
            held.append(len(self._own) + len(self._peers))
            super().close()
            closed.append(self)

    def fail(self, *arguments):
        raise um.DeviceError(f"{method} failed on purpose")

    if comm.rank == comm.size - 1:
        setattr(Failing, method, fail)
    with open_session(comm):
        pass  # what the first session of a process opens once
    before = left_behind()
    said = outcome(lambda: open_session(comm, Failing).close())
    each = ranks_per_node(comm.size)
    needed = (comm.size % each or each) > 1 or method != "open"
    good = said.startswith("DeviceError") and "on purpose" in said if needed else said == "worked"
    collective_assert(comm, good, said)
    collective_assert(comm, len(closed) == 1, f"the device was closed {len(closed)} times")
    collective_assert(comm, held == [0], f"{held} allocations and mappings were left to the end of the device")
    closed.clear()
    after = left_behind()
    collective_assert(comm, after == before, f"{before} before, {after} after")
    with open_session(comm) as session:  # the ranks are still in step
        session.barrier()
