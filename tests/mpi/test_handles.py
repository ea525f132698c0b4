"""Products that are not waited for (``wait=False``)."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert
from tests.helpers.faulty import FaultyBackend
from tests.helpers.hostile import interrupt
from uncut_mpi.api import flight
from uncut_mpi.api.call import Call
from uncut_mpi.device.host.executor import HostRun

pytestmark = [pytest.mark.mpi, pytest.mark.host_backend, pytest.mark.one_node("products are done at once")]


def outcome(call):
    """What a call raises, as text."""
    try:
        call()
    except um.UncutError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def operands(session, count=3, size=24):
    """Matrices with numbers of full mantissas, and as many for results, full of NaN."""
    rng = np.random.default_rng(7)
    made = [session.empty_host((size, size)) for _ in range(2 * count)]
    for matrix in made:
        values = rng.uniform(-1, 1, (size, size))
        if session.rank == 0:
            matrix.array[...] = values
    for matrix in made[count:]:
        if session.rank == 0:
            matrix.array[...] = np.nan
    session.barrier()
    return made[:count], made[count:]


def is_near(found, wanted):
    """Whether a product of factors below 1 has an error below 2 k² u, of two sums of k terms one after the other."""
    return np.abs(found - wanted).max() <= 2 * len(wanted) ** 2 * 2**-53 * max(1.0, np.abs(wanted).max())


@pytest.fixture
def held_up(monkeypatch):
    """Lets no product in flight begin until the test says so."""
    gate = threading.Event()
    start = Call.start

    def late(call, *arguments, **named):
        if threading.current_thread().name == "uncut_mpi calls":
            assert gate.wait(20)
        return start(call, *arguments, **named)

    monkeypatch.setattr(Call, "start", late)
    yield gate
    gate.set()


@pytest.fixture(params=["the thread", "the program"])
def by_whom(request, monkeypatch):
    """Who starts and ends products: devices that compute by themselves leave that to the program while it comes."""
    if request.param == "the program":
        usual = flight.Flight.__init__

        def by_program(one, *about):
            usual(one, *about)
            one._computes = False

        monkeypatch.setattr(flight.Flight, "__init__", by_program)
    return request.param


@pytest.mark.usefixtures("by_whom")
def test_products_are_done_in_order_and_one_may_use_what_an_earlier_one_made(comm, open_session):
    with open_session(comm) as session:
        (a, b, d), (c, e, f) = operands(session)
        handles = [
            session.gemm(a, b, c, wait=False),
            session.gemm(c, d, e, wait=False),
            session.gemm(a, d, f, wait=False),
            session.gemm(b, d, f, alpha=2.0, beta=-1.0, wait=False),
        ]
        results = [handle.wait() for handle in handles[comm.rank % 2 :: 2]]
        session.barrier()
        wanted = [c, e, f, f][comm.rank % 2 :: 2]
        x, y, z = a.array, b.array, d.array
        good = is_near(c.array, x @ y) and is_near(e.array, x @ y @ z) and is_near(f.array, 2 * y @ z - x @ z)
        collective_assert(comm, good and results == wanted and all(one.done() for one in handles), str(results))


def test_a_call_returns_before_its_product_begins_and_the_product_gets_on_by_itself(comm, open_session, held_up):
    with open_session(comm) as session:
        (a, b, _), (c, *_) = operands(session)
        session.gemm(a, b, c)  # what is to be planned waits for what is in flight
        with session.plan(a, b, c) as plan:
            handles = [plan.execute(wait=False), session.gemm(a, b, c, wait=False)]
            begun = [one.done() for one in handles]
            held_up.set()
            until = time.monotonic() + 20
            while not all(one.done() for one in handles) and time.monotonic() < until:
                time.sleep(1e-3)
            done = [one.done() for one in handles]
            result = handles[0].wait()
        collective_assert(comm, begun == [False, False] and done == [True, True], f"{begun} {done}")
        collective_assert(comm, is_near(c.array, a.array @ b.array) and isinstance(result, um.CallResult), str(result))


@pytest.mark.usefixtures("by_whom")
def test_so_many_products_are_in_flight_and_no_more(comm, open_session, monkeypatch):
    monkeypatch.setattr(flight, "MOST_IN_FLIGHT", 3)
    with open_session(comm) as session:
        (a, b, _), (c, *_) = operands(session)
        in_flight = session._calls.flight
        most = 0
        for _ in range(30):
            session.gemm(a, b, c, wait=False)
            most = max(most, len(in_flight.calls))
        collective_assert(comm, 1 <= most <= 3, str(most))
        session.barrier()
        collective_assert(comm, not in_flight.calls and is_near(c.array, a.array @ b.array))


@pytest.mark.usefixtures("by_whom")
@pytest.mark.parametrize("fence", ["barrier", "release", "register", "gemm", "plan", "gather", "close"])
def test_every_other_call_finishes_what_is_in_flight(comm, open_session, fence):
    session = open_session(comm)
    (a, b, d), (c, e, f) = operands(session)
    session.gemm(a, b, c), session.gemm(b, a, d)
    handles = [session.gemm(a, b, c, wait=False), session.gemm(c, b, e, wait=False)]
    calls = {
        "release": lambda: session.release(f),
        "register": lambda: session.register(np.ones((2, 2)) if comm.rank == 0 else None, root=0),
        "gemm": lambda: session.gemm(a, b, f),
        "plan": lambda: session.plan(e, b, f),
        "gather": lambda: session.gather(e),
    }
    calls.get(fence, getattr(session, fence, None))()
    done = [one.done() for one in handles]
    collective_assert(comm, all(done) and handles[1].wait() is e, str(done))
    if fence != "close":
        collective_assert(comm, is_near(e.array, a.array @ b.array @ b.array))
        session.close()


def test_a_handle_is_waited_for_once_and_ranks_do_so_or_not(comm, open_session):
    with open_session(comm) as session:
        (a, b, _), (c, *_) = operands(session)
        handle = session.gemm(a, b, c, wait=False)
        handle.wait()
        said = outcome(handle.wait)
        collective_assert(comm, said.startswith("ParamError: this handle was waited for before"), said)
        if comm.size > 1:
            said = outcome(lambda: session.gemm(a, b, c, wait=comm.rank > 0))
            named = "RankMismatchError: rank 0 called gemm with wait=False, rank"
            collective_assert(comm, said.startswith(named), said)
        said = outcome(lambda: session.gemm(a, b, c, wait=2))
        collective_assert(comm, said.startswith("ParamError: gemm: wait = 2"), said)
        collective_assert(comm, session.gemm(a, b, c, wait=False).wait() is c)


def test_an_interrupted_wait_leaves_the_product_and_its_handle(comm, open_session, held_up, monkeypatch):
    with open_session(comm) as session:
        (a, b, _), (c, *_) = operands(session)
        session.gemm(a, b, c)
        handle = session.gemm(a, b, c, wait=False)
        with monkeypatch.context() as patch:
            patch.setattr(session._calls.group, "drive", interrupt)
            with pytest.raises(KeyboardInterrupt):
                handle.wait()
        held_up.set()
        good = handle.wait() is c and is_near(c.array, a.array @ b.array)
        collective_assert(comm, good and session._calls.flight._awaited == 0)


@pytest.mark.mpi(min_size=2)
@pytest.mark.usefixtures("by_whom")
def test_products_in_flight_end_well_where_a_rank_is_interrupted_in_another_call(comm, open_session, monkeypatch):
    session = open_session(comm)
    (a, b, _), results = operands(session)
    options = um.ScheduleOptions(scheduler="uncut", tile=8, grid=(comm.size, 1))  # all ranks compute
    for c in results:
        session.gemm(a, b, c, options=options)
    handles = [session.gemm(a, b, c, alpha=2.0, options=options, wait=False) for c in results]
    last, said = None, "interrupted"
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(Call, "arm", interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            last = session.gemm(a, b, results[0], options=options, wait=False)
    done = [handle.wait() for handle in handles] == results
    good = all(is_near(c.array, 2 * a.array @ b.array) for c in results[1:])
    said = said if last is None else outcome(last.wait)
    wanted = "interrupted" if comm.rank == 1 else "PeerFailedError"
    collective_assert(comm, done and good and said.startswith(wanted) and session.broken, f"{done} {good} {said}")
    session.close()


@pytest.mark.mpi(min_size=2)
def test_an_interrupt_between_two_steps_of_a_product_ends_the_session_on_all_ranks(comm, open_session, monkeypatch):
    session = open_session(comm)
    (a, b, _), (c, e, _) = operands(session)
    session.gemm(a, b, c), session.gemm(b, a, e)
    session._calls.flight._computes = False
    usual, armed = Call.let_go, [comm.rank == 1]

    def interrupted(call):
        if threading.current_thread() is threading.main_thread() and armed[0]:
            armed[0] = False
            raise KeyboardInterrupt
        return usual(call)

    with monkeypatch.context() as patch:
        patch.setattr(Call, "let_go", interrupted)
        said, ended = [], True
        for target in (c, e) * 20:
            try:
                session.gemm(a, b, target, wait=False).wait()
            except (KeyboardInterrupt, um.UncutError) as error:
                said.append(type(error).__name__)
                ended &= session.broken
        allgather(comm, None)
    # Where its own thread has ended the product there was no interrupt.
    interrupts = allgather(comm, "KeyboardInterrupt" in said)
    collective_assert(comm, not any(interrupts) or (bool(said) and ended), f"{said} {interrupts}")
    session.close()


def test_where_streams_cannot_wait_the_program_does(comm, open_session):
    with open_session(comm) as session:
        (a, b, d), (c, e, _) = operands(session)
        session.gemm(a, b, c), session.gemm(b, d, e)
        handles = [session.gemm(a, b, c, wait=False), session.gemm(b, d, e, wait=False)]
        handles[1].wait_on()
        handles[1].wait_on(0)
        done = [one.done() for one in handles]
        collective_assert(comm, all(done) and handles[1].wait() is e and is_near(e.array, b.array @ d.array), str(done))


def failing(session_of, comm, guilty):
    """A session in which a product fails on a rank after it was told to, once."""
    told = []

    def fault(task, code, region):
        if told:
            told.clear()
            raise um.DeviceError(f"task {task} on purpose")

    def backend(*about):
        return FaultyBackend(*about, fault=fault if comm.rank == guilty else None)

    return session_of(comm, backend=backend), told


@pytest.mark.usefixtures("by_whom")
@pytest.mark.parametrize("heard", ["waited", "dropped", "at close"])
def test_what_fails_in_flight_is_told_by_the_handle_or_by_the_next_call_on_every_rank(comm, open_session, heard):
    guilty = comm.size - 1
    session, told = failing(open_session, comm, guilty)
    options = um.ScheduleOptions(scheduler="uncut", tile=8, grid=(comm.size, 1))  # all ranks compute
    (a, b, _), (c, e, f) = operands(session)
    for target in (c, e):
        session.gemm(a, b, target, options=options)
    if comm.rank == guilty:
        told.append(True)
    first = session.gemm(a, b, c, options=options, wait=False)
    second = session.gemm(b, a, e, options=options, wait=False)
    if heard == "waited":
        said = outcome(first.wait)
        second.wait()
        good = is_near(e.array, b.array @ a.array)
    else:
        del first
        gc.collect()
        good = second.wait() is e
        said = outcome(session.close if heard == "at close" else session.barrier)
    lost = "a call with wait=False, whose handle was dropped: " if heard != "waited" else ""
    collective_assert(comm, good and f"DeviceError: {lost}" in said and "on purpose" in said, f"{good} {said}")
    if heard != "at close":
        session.gemm(a, b, f)
        collective_assert(comm, is_near(f.array, a.array @ b.array))
        session.close()


@pytest.mark.parametrize("options", [um.ScheduleOptions(tune=2), um.ScheduleOptions(scheduler="uncut", tile=8)])
def test_what_fails_in_a_product_that_is_done_at_once_is_told_too(comm, open_session, options):
    session, told = failing(open_session, comm, 0)
    (a, b, _), (c, *_) = operands(session)
    session.gemm(a, b, c, options=options, wait=False).wait()
    if comm.rank == 0:
        told.append(True)
    session.gemm(a, b, c, options=options, wait=False)
    said = outcome(session.barrier)
    collective_assert(comm, "whose handle was dropped: " in said and "on purpose" in said, said)
    session.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("where", ["a product", "the thread"])
def test_an_error_of_one_rank_alone_ends_the_session_and_every_handle(comm, open_session, held_up, monkeypatch, where):
    session = open_session(comm)
    (a, b, _), (c, *_) = operands(session)
    session.gemm(a, b, c)
    of, name = (HostRun, "finish") if where == "a product" else (Call, "let_go")
    usual, left = getattr(of, name), [comm.rank == 1]

    def broken(one):
        if threading.current_thread().name == "uncut_mpi calls" and left and left.pop():
            raise MemoryError("of this rank alone")
        return usual(one)

    with monkeypatch.context() as patch:
        patch.setattr(of, name, broken)
        handles = [session.gemm(a, b, c, wait=False) for _ in range(3)]
        held_up.set()
        said = []
        for handle in handles:
            try:
                handle.wait()
            except Exception as error:
                said.append(type(error).__name__)
        allgather(comm, None)
    if where == "a product":
        wanted = ["MemoryError" if comm.rank == 1 else "PeerFailedError", "ParamError", "ParamError"]
    else:  # behind the first product, which the others have
        wanted = ["MemoryError"] * 3 if comm.rank == 1 else ["PeerFailedError", "ParamError"]
    collective_assert(comm, said == wanted and session.broken, str(said))
    session.close()


@pytest.mark.usefixtures("by_whom")
def test_files_chunks_and_plans_that_are_tried_are_right_without_waiting(comm, open_session, tmp_path_factory):
    folder = comm.bcast(str(tmp_path_factory.mktemp("handles")) if comm.rank == 0 else None)
    with open_session(comm) as session:
        (a, b, _), (_, e, f) = operands(session, size=48)
        file = session.create_file(f"{folder}/c.npy", (48, 48), "f64")
        several = um.ScheduleOptions(tune=2)
        handles = [
            session.gemm(a, b, file, wait=False),
            session.gemm(a, b, file, alpha=2.0, wait=False),
            session.gemm(file, b, e, wait=False),
            *(session.gemm(a, b, f, options=several, wait=False) for _ in range(12)),
        ]
        new = session.gemm(a, b, wait=False).wait()
        handles[-1].wait()
        session.barrier()
        x, y = a.array, b.array
        good = is_near(e.array, 2 * x @ y @ y) and is_near(f.array, x @ y) and is_near(new.array, x @ y)
        collective_assert(comm, good)
    collective_assert(comm, is_near(np.load(f"{folder}/c.npy"), 2 * x @ y))


def test_a_fork_does_not_wait_for_a_product_of_its_parent(comm, open_session, held_up):
    with open_session(comm) as session:
        (a, b, _), (c, *_) = operands(session)
        session.gemm(a, b, c)
        handle = session.gemm(a, b, c, wait=False)
        child = os.fork()
        if not child:
            signal.alarm(10)  # whose end is another status
            os._exit(0 if all("is a fork" in outcome(call) for call in (handle.wait, handle.done)) else 1)
        status = os.waitpid(child, 0)[1]
        held_up.set()
        collective_assert(comm, status == 0 and handle.wait() is c, status)
