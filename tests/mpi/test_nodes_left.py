"""A rank that leaves or gives up a session of several nodes: whoever waits, wherever, hears so and gets one error."""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert, outcome
from tests.helpers.hostile import interrupt
from uncut_mpi.api import lifetime, measure
from uncut_mpi.api.calls import Calls
from uncut_mpi.api.gate import Gate
from uncut_mpi.device.host.executor import HostExecutable
from uncut_mpi.model.ports import Net
from uncut_mpi.spmd import group, meetings
from uncut_mpi.spmd.group import Group

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.host_backend]

LIMIT_S = 40
"""Far below what a session waits here without being told."""


@pytest.fixture
def open_alone(comm, monkeypatch):
    """Opens a session with each rank on a node of its own."""
    monkeypatch.delenv(lifetime.RANKS_PER_NODE, raising=False)
    monkeypatch.setattr(group, "_GRACE_S", 0.05)
    monkeypatch.setattr(meetings, "_LAST_WORDS_S", 0.0)
    machine = um.Machine.cluster(um.Machine.uniform(1), comm.size, Net(10.0, 5e-6))

    def opened(**options):
        about = {"backend": "host", "ranks_per_node": 1, "timeout_s": 300, "machine": machine}
        return um.Session(comm, **{**about, **options})

    return opened


@pytest.fixture
def told(comm):
    """Checks that the last rank, or another, raised an error, and the rest soon a `PeerFailedError` that names it."""
    began = time.monotonic()

    def check(said, error, odd=comm.size - 1):
        wanted = error if comm.rank == odd else "PeerFailedError"
        named = comm.rank == odd or f"rank {odd} left the session by {error}" in said
        collective_assert(comm, said.startswith(wanted) and named and time.monotonic() - began < LIMIT_S, said)

    return check


WAITS = {
    "barrier of MPI": lambda its: its.barrier("a barrier"),
    "gather": lambda its: its.allgather_bytes(np.zeros(3), "a gather"),
    "gather of objects": lambda its: its.allgather_objects("x" * 5000, "a gather"),
    "broadcast": lambda its: its.from_root(lambda: 1),
    "watch": lambda its: its.watch(lambda: False, "something", None),
}


@pytest.mark.parametrize("wait", WAITS)
def test_who_waits_outside_of_the_exchange_is_told(comm, open_alone, told, wait):
    odd = 0 if wait == "broadcast" else comm.size - 1

    def program():
        with open_alone() as session:
            if comm.rank == odd:
                raise ValueError("the program's own")
            WAITS[wait](session._group)

    told(outcome(program), "ValueError", odd)


def test_who_waits_in_the_exchange_is_told_also_of_a_rank_that_was_there_before(comm, open_alone, told):
    def program():
        with open_alone() as session:
            session.barrier()
            if comm.rank == comm.size - 1:
                raise ValueError("the program's own")
            session.gather_values(1)

    told(outcome(program), "ValueError")


def test_who_waits_is_told_of_a_session_that_is_dropped(comm, open_alone):
    session, odd = open_alone(), comm.rank == comm.size - 1
    if odd:
        del session
        gc.collect()
        said = ""
    else:
        said = outcome(session.barrier)
    collective_assert(comm, odd or "left the session by leaving without close()" in said, said)


@pytest.mark.parametrize("place", ["measure_net", "obtain_machine"])
def test_who_measures_the_net_is_told_of_a_rank_that_is_interrupted(comm, open_alone, told, monkeypatch, place):
    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(measure, place, interrupt)
        told(outcome(lambda: open_alone(machine=None)), "KeyboardInterrupt")
    with open_alone() as session:
        session.barrier()


@pytest.mark.mpi(min_size=3)
def test_who_measures_its_node_is_told_of_a_rank_of_it_that_is_interrupted(comm, open_alone, told, monkeypatch):
    odd, before = comm.size - 2, {*lifetime._kept}
    with monkeypatch.context() as patch:
        patch.setattr(measure, "_load", lambda *_: "")  # else there is nothing to measure
        if comm.rank == odd:
            patch.setattr(measure, "measure", interrupt)
        said = outcome(lambda: open_alone(machine=None, ranks_per_node=comm.size - 1))
    told(said, "KeyboardInterrupt", odd)
    with open_alone() as session:
        session.barrier()
        left = [key for key, kept in lifetime._kept.items() if kept.over and key not in before]
    collective_assert(comm, not left, left)


def test_what_fails_as_one_node_is_measured_is_an_error_on_all(comm, open_alone, monkeypatch):
    def fail(*_):
        raise um.DeviceError("no probe on purpose")

    with monkeypatch.context() as patch:
        patch.setattr(measure, "_load", lambda *_: "")
        if comm.rank == comm.size - 1:
            patch.setattr(measure, "_measure_links", fail)
        said = outcome(lambda: open_alone(machine=None))
    collective_assert(comm, said.startswith("DeviceError") and "on purpose" in said, said)
    with open_alone() as session:
        session.barrier()


def test_who_runs_a_product_is_told_of_a_rank_that_left_it(comm, open_alone, told, monkeypatch):
    session = open_alone(timeout_s=1.0)  # what a message from that rank is awaited
    a, c = (session.empty((48, 48), "f64", um.Layout.rows()) for _ in range(2))
    a.local[...] = 1.0
    session.gemm(a, a, c)
    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(HostExecutable, "start", interrupt)
        told(outcome(lambda: session.gemm(a, a, c)), "KeyboardInterrupt")


def test_who_plans_is_told_of_a_rank_that_waits_for_its_device_in_vain(comm, open_alone, told, monkeypatch):
    def in_vain(*_):
        raise um.StallError("in vain on purpose")

    session = open_alone()
    a, c = (session.empty((24, 24), "f64", um.Layout.rows()) for _ in range(2))
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(session._calls.turns, "acquire", in_vain)
    told(outcome(lambda: session.gemm(a, a, c)), "StallError")


def test_a_call_that_one_rank_ends_is_ended_on_the_boards_of_other_nodes(comm, open_alone):
    with open_alone() as session:
        if comm.rank == 0:
            session._calls.control.board.fail(41)
        board, until_s = session._calls.control.board, time.monotonic() + LIMIT_S
        while board.abort[0] != 42 and time.monotonic() < until_s:
            session._group.drive()
        said = int(board.abort[0])
    collective_assert(comm, said == 42, said)


def test_words_of_a_session_that_has_ended_are_not_heard_in_the_next(comm, open_alone, monkeypatch):
    for _ in range(3):
        session = open_alone()
        if comm.rank == comm.size - 1:
            session._gate.leave("leaving first")  # which nobody waits to hear
        else:
            session._gate.leave("leaving too")
        del session
        gc.collect()
        with open_alone() as session:
            values = session.gather_values(comm.rank)
        collective_assert(comm, values == [*range(comm.size)], str(values))


def test_a_key_tells_words_of_two_groups_apart(comm):
    one = Group(comm, ranks_per_node=1)
    two = Group(comm, ranks_per_node=1)
    heard = []
    two.on_word = lambda rank, word: heard.append((rank, word))
    two._key, kept = one._key, two._key
    two.tell(b"of the other group")
    two._key = kept
    two.tell(b"of this group")
    until_s = time.monotonic() + LIMIT_S
    while len(heard) < comm.size - 1 and time.monotonic() < until_s:
        two.drive()
    wanted = [(rank, b"of this group") for rank in range(comm.size) if rank != comm.rank]
    good = sorted(heard) == wanted
    allgather(comm, None)
    one.free()
    two.free()
    collective_assert(comm, good, str(heard))


def test_nothing_that_ranks_were_told_comes_to_communicators_of_the_program(comm, open_alone):
    session = open_alone()
    session.barrier()
    if comm.rank == 0:
        time.sleep(0.3)  # the others tell that they wait
    session.close()
    own = comm.Dup()  # which may have the number of one of the session's
    comm.Barrier()
    found = own.Iprobe()
    own.Free()
    collective_assert(comm, not found, found)


# -- ranks that give up a meeting: who comes to it in the same moment, has met in it, or waits in it ----------


def do_together(session):
    """Make a call that waits for the others without limit."""
    with session.together("what has no limit"):
        pass


WAITS_AFTER = {"gather": lambda session: WAITS["gather"](session._group), "next call": do_together}


@pytest.fixture
def gives_up(comm, monkeypatch):
    """Has a session's rank give up its next wait of a name: it is in it when it calls `before`, and out of it then."""

    def patch(session, awaited, before):
        watch = session._group.watch

        def gave_up(done, what, *how, **named):
            if what != awaited:
                return watch(done, what, *how, **named)
            before()
            raise um.StallError("in vain on purpose")

        monkeypatch.setattr(session._group, "watch", gave_up)

    return patch


@pytest.mark.parametrize("nodes", ["one node", "several nodes"])
@pytest.mark.parametrize("wait", WAITS_AFTER)
@pytest.mark.parametrize("meeting", ["barrier", "closing barrier"])
def test_who_has_met_is_told_of_a_rank_that_gave_up_meanwhile(
    comm, open_alone, gives_up, monkeypatch, meeting, wait, nodes
):
    odd, close = comm.rank == comm.size - 1, Gate.close
    one = {"ranks_per_node": comm.size, "machine": um.Machine.uniform(comm.size)} if nodes == "one node" else {}
    session = open_alone(**one)
    a, c = (session.empty((24, 24), "f64", um.Layout.rows()) for _ in range(2))
    session.gemm(a, a, c)
    call = session.barrier if meeting == "barrier" else lambda: session.gemm(a, a, c)

    def late(*arguments, **named):
        allgather(comm, None)  # the other rank waits
        return close(*arguments, **named)

    first = ""
    with monkeypatch.context() as patch:
        if odd:
            gives_up(session, meeting, lambda: [allgather(comm, None) for _ in range(2)])
            said = outcome(call)
        else:
            patch.setattr(Calls, "_may_go", lambda *_: False)
            patch.setattr(Gate, "close", late)
            if meeting == "barrier":
                allgather(comm, None)
            first = outcome(call)
            allgather(comm, None)  # and gives up what is over here
            said = outcome(lambda: WAITS_AFTER[wait](session))
    wanted = "in vain on purpose" if odd else f"rank {comm.size - 1} waited for "
    good = said.startswith("StallError") and wanted in said and first in ("", "worked") and session.broken
    collective_assert(comm, good and (odd or "gave up" in said), f"{first}; {said}")


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("nodes", ["one node", "several nodes"])
def test_who_meets_without_a_limit_is_told_of_a_rank_that_gave_up_and_uses_mpi_no_more(
    comm, open_alone, gives_up, mpi_tmp_path, nodes
):
    one = {"ranks_per_node": comm.size, "machine": um.Machine.uniform(comm.size)} if nodes == "one node" else {}
    session, odd, until_s = open_alone(**one), comm.size - 1, time.monotonic() + LIMIT_S

    def await_end(*ranks):  # without MPI
        while not all((mpi_tmp_path / str(rank)).exists() for rank in ranks) and time.monotonic() < until_s:
            time.sleep(1e-3)

    if comm.rank == odd:
        gives_up(session, "barrier", lambda: None)
        said = outcome(session.barrier)
    else:
        await_end(*[odd][comm.rank :])  # the first rank comes late
        said = outcome(lambda: do_together(session))
    (mpi_tmp_path / str(comm.rank)).touch()
    await_end(*range(comm.size))
    wanted = "in vain on purpose" if comm.rank == odd else f"rank {odd} waited for this rank and gave up"
    good = said.startswith("StallError") and wanted in said and session.broken and time.monotonic() < until_s
    collective_assert(comm, good, said)
