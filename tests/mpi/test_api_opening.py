"""Sessions that an error of one rank keeps from opening: no other rank waits for it, and nothing is left of them."""

from __future__ import annotations

import gc
import os
import pathlib
import random
import sys
import threading
import time

import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert, outcome
from tests.helpers.faulty import recorded
from tests.helpers.hostile import interrupt
from uncut_mpi.api import control
from uncut_mpi.device.host import HostBackend
from uncut_mpi.spmd import group, meetings, turns
from uncut_mpi.spmd.group import Group

pytestmark = pytest.mark.mpi(min_size=2)

PACKAGE = str(pathlib.Path(um.__file__).parent)
PLACES = 16


class OnPurpose(BaseException):
    """What a signal handler may raise."""


class Interrupter:
    """Raises before a line of the package that an opening comes to , counted once all are here."""

    def __init__(self, place):
        self.place, self.count, self.where = place, 0, ""
        self._stage, self._seen, self._begun = 0, set(), False

    def trace(self, frame, event, argument):
        code = frame.f_code
        if not code.co_filename.startswith(PACKAGE):
            return None
        self._begun |= code is control.Control.__init__.__code__
        if event == "line" and self._begun:
            if code.co_name == "__init__" and code.co_filename.endswith("session.py"):
                self._stage = frame.f_lineno
            where = (code, frame.f_lineno, frame.f_back.f_lineno, self._stage)
            if where not in self._seen:
                self._seen.add(where)
                self.count += 1
                if self.count == self.place:
                    self.where = f"{code.co_filename}:{frame.f_lineno}"
                    raise OnPurpose
        return self.trace

    def run(self, call):
        sys.settrace(self.trace)
        try:
            return call()
        finally:
            sys.settrace(None)


@pytest.fixture
def impatient(monkeypatch):
    """Do not wait long for what may be on its way."""
    monkeypatch.setattr(group, "_GRACE_S", 0.02)
    monkeypatch.setattr(meetings, "_LAST_WORDS_S", 0.0)


def held():
    gc.collect()
    names = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    files = sum(
        "uncut_mpi" in os.readlink(name) or "/dev/shm" in os.readlink(name) for name in names if os.path.islink(name)
    )
    with open("/proc/self/maps") as lines:
        mappings = sum("uncut_mpi" in line for line in lines)
    return files, mappings, sum("uncut_mpi" in name for name in os.listdir("/dev/shm")), threading.active_count()


def users():
    return set(turns._registry)


@pytest.mark.parametrize("first", [True, False], ids=["first rank", "last rank"])
def test_an_opening_that_is_interrupted_anywhere_ends_on_all_ranks_and_leaves_nothing(
    comm, open_session, monkeypatch, impatient, first
):
    odd = 0 if first else comm.size - 1
    open_session(comm).close()
    interrupter = Interrupter(-1)
    interrupter.run(lambda: open_session(comm)).close()
    places = random.Random(7).sample(range(1, allgather(comm, interrupter.count)[odd]), PLACES)
    before, reached = held(), 0
    open_session(comm)  # dropped: the next opening that comes so far gives it back
    for place in places:
        part = comm.Dup()
        interrupter = Interrupter(place if comm.rank == odd else -1)

        def work(part=part, interrupter=interrupter):
            session = interrupter.run(lambda: open_session(part))
            session.barrier()  # where the others were through
            session.close()

        with monkeypatch.context() as patch:
            patch.setattr(group, "SETTLING_S", 0.5)
            patch.setattr(control, "SETTLING_S", 0.5)
            said = outcome(work)
        wanted = ("OnPurpose",) if comm.rank == odd else ("PeerFailedError", "StallError")
        where = allgather(comm, interrupter.where)[odd]
        if where:
            reached += 1
        else:  # a rank that waits longer takes more ways, and some of those that were counted were not taken now
            wanted = ("worked",)
        collective_assert(comm, said.startswith(wanted), f"{where}: {said}")
        part.Free()
    collective_assert(comm, reached > PLACES / 2, f"{reached} of {PLACES} places were reached")
    with open_session(comm) as session:
        session.barrier()
    after = held()
    collective_assert(comm, after == before, f"files, mappings, names, threads: {before}, then {after}")


@pytest.mark.parametrize(
    "place",
    [
        "spmd.group.Group.count_steps",
        "api.lifetime._numbers",
        "api.start.Started",
        "api.lifetime.obtain_machine",
        "api.calls.Binder",
        "api.calls.PlanCache",
        "api.lifetime.keep",
    ],
)
def test_who_interrupted_an_opening_is_named_and_the_next_one_closes_all_devices(comm, monkeypatch, impatient, place):
    odd = comm.size - 1

    class Backend(HostBackend):
        closed = False

        def close(self):
            super().close()
            self.closed = True

    backend, made = recorded(Backend)

    def open_session():
        return um.Session(comm, backend=backend, machine=um.Machine.uniform(comm.size), timeout_s=20)

    class Interrupted:
        """Stands for a function, and for an iterator."""

        def __call__(self, *unused):
            patch.undo()
            raise KeyboardInterrupt

        __next__ = __call__

    before = users()
    open_session()  # dropped; the next opening that comes so far closes it
    with monkeypatch.context() as patch:
        if comm.rank == odd:
            patch.setattr(f"uncut_mpi.{place}", Interrupted())
        said = outcome(lambda: open_session().barrier())
    open_session().close()
    wanted = "KeyboardInterrupt" if comm.rank == odd else f"rank {odd} left the session by KeyboardInterrupt"
    closed = [one.closed for one in made]
    collective_assert(comm, wanted in said and all(closed), f"{said}; closed: {closed}")
    collective_assert(comm, users() == before, f"{before}, then {users()}")


def test_before_ranks_share_anything_the_wait_for_one_that_is_interrupted_is_bounded(comm, open_session, monkeypatch):
    odd = comm.size - 1
    monkeypatch.setattr(group, "SETTLING_S", 0.3)
    with monkeypatch.context() as patch:
        if comm.rank == odd:
            patch.setattr(Group, "_find_nodes", interrupt)
        said = outcome(lambda: open_session(comm))
    wanted = "KeyboardInterrupt" if comm.rank == odd else "StallError: opening a session: rank"
    collective_assert(comm, said.startswith(wanted), said)


def test_a_rank_that_takes_long_to_give_back_what_was_dropped_fails_nobody(comm, open_session, impatient):
    session = open_session(comm)
    holdings = session._holdings
    end = holdings._end

    def slowly():
        if comm.rank == comm.size - 1:
            time.sleep(0.3)
        end()

    holdings._end = slowly
    del session
    said = outcome(lambda: open_session(comm).close())
    collective_assert(comm, said == "worked" and holdings.released, said)


def test_buffers_of_a_wait_that_is_interrupted_live_until_the_operation_ends(comm, monkeypatch):
    own = Group(comm)
    late = comm.size - 1
    group._forget_ended()
    counts = [len(group._unended)]
    with monkeypatch.context() as patch:
        patch.setattr(Group, "watch", interrupt)
        said = "KeyboardInterrupt" if comm.rank == late else outcome(lambda: own.allgather_objects(comm.rank))
    counts.append(len(group._unended))
    usable = comm.rank == late or not own.stalled
    allgather(comm, None)
    if comm.rank == late:  # the others' operation ends now
        own._comm.Iallgather(*(bytearray(group._EACH_BYTES * n) for n in (1, comm.size))).Wait()
    allgather(comm, None)
    Group(comm).free()
    counts.append(len(group._unended))
    wanted = [0, 0, 0] if comm.rank == late else [0, 1, 0]
    counts = [count - counts[0] for count in counts]
    collective_assert(
        comm, counts == wanted and said.startswith("KeyboardInterrupt") and usable == (comm.rank == late), counts
    )
