"""Calls that do not end as they should: interrupted inside, stalled, entered where none is possible; who is awaited."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

from tests.helpers.collective import allgather, collective_assert, outcome
from tests.helpers.hostile import interrupt
from tests.helpers.products import ones, shows
from uncut_mpi.api.call import Call
from uncut_mpi.api.calls import Calls
from uncut_mpi.api.gate import Gate
from uncut_mpi.planning.options import ScheduleOptions


class Interrupting:
    """An array whose reading is interrupted."""

    __dlpack__ = None

    def __init__(self, error):
        self.error = error

    def __dlpack_device__(self):
        raise self.error


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_while_an_array_is_read_is_carried_to_every_rank_and_the_session_goes_on(
    comm, open_session, error
):
    odd = comm.rank == comm.size - 1
    with open_session(comm) as session:
        said = outcome(lambda: session.register(Interrupting(error()) if odd else None, root=comm.size - 1))
        a = ones(session)
        c = session.gemm(a, a)
        good = shows(c, 4.0)
    wanted = error.__name__ if odd else "PeerFailedError"
    collective_assert(comm, good and said.startswith(wanted), said)


@pytest.mark.mpi(min_size=2)
@pytest.mark.on_nodes
def test_an_interrupt_inside_a_call_ends_the_session_for_all(comm, open_session, monkeypatch):
    odd = comm.rank == comm.size - 1
    session = open_session(comm)
    with monkeypatch.context() as patch:
        if odd:
            patch.setattr(session._group, "allgather_objects", interrupt)
        first = outcome(lambda: session.gather_values(1))
    second = outcome(session.barrier)
    wanted = "KeyboardInterrupt" if odd else f"rank {comm.size - 1} left the session by KeyboardInterrupt"
    collective_assert(comm, wanted in first and "ParamError" in second and "left" in second, f"{first}; {second}")
    collective_assert(comm, session.broken and outcome(session.close) == "worked")


def test_an_interrupt_before_a_call_has_opened_ends_nothing(comm, open_session, monkeypatch):
    with open_session(comm) as session:
        a, c = ones(session), session.empty_host((4, 4))
        with monkeypatch.context() as patch:
            patch.setattr(session._backend, "mark_caller", interrupt)
            said = outcome(lambda: session.gemm(a, a, c))
        session.gemm(a, a, c)
        good = shows(c, 4.0)
    collective_assert(comm, good and "KeyboardInterrupt" in said, said)


@pytest.mark.mpi(min_size=2)
@pytest.mark.host_backend
@pytest.mark.on_nodes
def test_a_rank_that_goes_on_after_the_others_stalled_is_told(comm, open_session, monkeypatch):
    session = open_session(comm, timeout_s=0.3)
    a = ones(session)
    session.gemm(a, a)
    close = Gate.close

    def late(*arguments, **named):
        if comm.rank == comm.size - 1:
            allgather(comm, None)  # the others wait no more
        return close(*arguments, **named)

    with monkeypatch.context() as patch:
        patch.setattr(Gate, "close", late)
        said = outcome(lambda: session.gemm(a, a))
    if comm.rank != comm.size - 1:
        allgather(comm, None)
    wanted = "gave up" if comm.rank == comm.size - 1 else "closing barrier"
    collective_assert(comm, "StallError" in said and wanted in said and session.broken, said)


@pytest.mark.mpi(min_size=2)
@pytest.mark.on_nodes
def test_an_interrupt_before_the_first_task_ends_the_call_of_the_others(comm, open_session, monkeypatch):
    session = open_session(comm, timeout_s=60)
    options = ScheduleOptions(scheduler="uncut", tile=32, grid=(comm.size, 1))  # the others wait for flags
    a = session.empty_device((96, 96), np.float64, rank=comm.size - 1)
    if a.address:
        a.array[...] = 1.0
    c = session.empty_host((96, 96))
    session.barrier()
    session.gemm(a, a, c, options=options)
    run = Call.finish

    def interrupted(call):
        if comm.rank == comm.size - 1:
            raise KeyboardInterrupt
        run(call)

    began = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(Calls, "_may_go", lambda *_: False)  # else it is done before there is anything to interrupt
        patch.setattr(Call, "finish", interrupted)
        said = outcome(lambda: session.gemm(a, a, c, options=options))
    wanted = "KeyboardInterrupt" if comm.rank == comm.size - 1 else "PeerFailedError"
    collective_assert(comm, said.startswith(wanted) and time.monotonic() - began < 30, said)


@pytest.mark.mpi(min_size=2)
def test_an_interrupt_while_flags_grow_stays_what_it_is(comm, open_session, monkeypatch):
    session = open_session(comm, timeout_s=20)
    flags = session._calls.binder.flags
    with monkeypatch.context() as patch:
        if comm.rank == comm.size - 1:
            patch.setattr(flags, "_map", interrupt)

        def grow():
            with session._gate.exclusive():
                session._gate.open("growing")
                flags.ensure(2 * flags.sizes)

        said = outcome(grow)
    wanted = "KeyboardInterrupt" if comm.rank == comm.size - 1 else "PeerFailedError"
    collective_assert(comm, said.startswith(wanted), said)


def test_nothing_is_done_together_where_no_call_is_possible(comm, open_session):
    session = open_session(comm)
    session.close()
    done = []

    def together():
        with session.together("what cannot be"):
            done.append(1)

    said = outcome(together)
    collective_assert(comm, not done and "the session is closed" in said, f"{said} {done}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.on_nodes
def test_a_rank_that_is_awaited_inside_a_call_is_named(comm, open_session, monkeypatch, caplog):
    monkeypatch.setattr("uncut_mpi.spmd.group.PATIENCE_S", 0.05)
    late = comm.size - 1

    class Slow:
        """An array that takes a while to be read."""

        def __init__(self):
            self.array = np.ones((3, 3))

        @property
        def __array_interface__(self):
            time.sleep(0.3)
            return self.array.__array_interface__

    with caplog.at_level(logging.WARNING, logger="uncut_mpi"), open_session(comm) as session:
        session.register(Slow() if comm.rank == late else None, root=late)
    said = [record.getMessage() for record in caplog.records]
    named = [text for text in said if f"for rank {late};" in text]
    counts = allgather(comm, (len(named), len(said)))
    good = counts[late] == (0, 0) and sum(one[0] for one in counts) > 0 and all(one[0] == one[1] for one in counts)
    collective_assert(comm, good, f"{counts} {said}")


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("at", ["acquire", "release"])
def test_an_interrupt_as_a_call_begins_or_ends_is_told_to_those_who_wait(comm, open_session, at):
    class Interrupted:
        def __init__(self, lock):
            self.lock = lock

        def acquire(self, **how):
            taken = self.lock.acquire(**how)
            if at == "acquire":
                session._gate._busy = self.lock
                raise KeyboardInterrupt
            return taken

        def release(self):
            if at == "release":
                session._gate._busy = self.lock
                raise KeyboardInterrupt
            self.lock.release()

    odd, session = comm.rank == comm.size - 1, open_session(comm, arrival_timeout_s=5)
    if odd:
        session._gate._busy = Interrupted(session._gate._busy)

    def twice():
        with session:
            session.barrier()
            session.barrier()

    said = outcome(twice)
    wanted = "KeyboardInterrupt" if odd else f"rank {comm.size - 1} left the session by KeyboardInterrupt"
    collective_assert(comm, wanted in said, said)


@pytest.mark.mpi(min_size=2)
@pytest.mark.host_backend
@pytest.mark.on_nodes
@pytest.mark.parametrize("again", ["gather_values", "close", "another"])
def test_who_was_interrupted_as_it_waited_for_a_call_to_open_makes_it_again(comm, open_session, monkeypatch, again):
    session = open_session(comm)
    call = session.close if again == "close" else lambda: session.gather_values(1)
    if comm.rank == 0:
        with monkeypatch.context() as patch:
            patch.setattr(session._group, "watch", interrupt)
            said = outcome(call)
    allgather(comm, None)  # the others come later
    found = outcome(session.barrier if again == "another" and comm.rank == 0 else call)
    wanted = "worked"
    if again == "another":
        wanted = "ParamError: this rank left" if comm.rank == 0 else "rank 0 left the session by KeyboardInterrupt"
    good = wanted in found and (comm.rank > 0 or said.startswith("KeyboardInterrupt"))
    collective_assert(comm, good and outcome(session.close) == "worked", found)


@pytest.mark.mpi(min_size=2)
@pytest.mark.on_nodes
@pytest.mark.parametrize("place", ["binder", "store"])
def test_who_waits_in_close_is_told_of_a_rank_that_is_interrupted_there(comm, open_session, monkeypatch, place):
    session, odd = open_session(comm), comm.rank == comm.size - 1
    ones(session)
    if odd:
        monkeypatch.setattr(getattr(session._calls, place), "close", interrupt)
    said = outcome(session.close)
    wanted = "KeyboardInterrupt" if odd else f"rank {comm.size - 1} left the session by KeyboardInterrupt"
    collective_assert(comm, wanted in said, said)
