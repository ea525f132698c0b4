"""The end of a session and what comes after it: forks, dropped sessions, ranks that leave, MPI that is gone."""

from __future__ import annotations

import gc
import logging
import os
import pickle
import time
import traceback

import numpy as np
import pytest

from tests.helpers.collective import allgather, collective_assert, outcome
from tests.helpers.jobs import MACHINE
from tests.helpers.products import ones, shows
from tests.helpers.sessions import ranks_per_node
from uncut_mpi.api.call import Call


def in_child(work):
    """Return what `work` returns in a forked child, which ends at once; None if it does not end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            said = pickle.dumps(work())
        except BaseException as error:
            said = pickle.dumps(f"{type(error).__name__}: {error}")
        os.write(writing, said)
        os._exit(0)
    os.close(writing)
    deadline = time.monotonic() + 10
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, 9)
            os.waitpid(child, 0)
            return None
        time.sleep(0.01)
    with os.fdopen(reading, "rb") as pipe:
        return pickle.loads(pipe.read())


# -- forked children ---------------------------------------------------------------------------------


def test_a_forked_child_gets_errors_and_the_session_of_its_parent_goes_on(comm, open_session):
    with open_session(comm) as session:
        a = ones(session, (6, 6))
        plan = session.plan(a, a, ones(session, (6, 6)), reads_c=False)
        session.barrier()

        def work():
            calls = {
                "gemm": lambda: session.gemm(a, a),
                "empty_host": lambda: session.empty_host((2, 2)),
                "barrier": session.barrier,
                "gather_values": lambda: session.gather_values(1),
                "execute": plan.execute,
                "release": lambda: session.release(a),
            }
            said = {name: outcome(call) for name, call in calls.items()}
            said["close"] = outcome(session.close)
            said["array"] = shows(a, 1.0)
            plan.close()
            return said

        said = in_child(work) or {}
        c = session.gemm(a, a)
        good = shows(c, 6.0)
        good &= outcome(plan.execute) == "worked"
    refused = all(
        "fork" in said.get(name, "") for name in ("gemm", "empty_host", "barrier", "gather_values", "execute")
    )
    collective_assert(comm, good and refused and said["close"] == "worked" and said["array"], str(said))


def test_a_child_that_leaves_a_with_block_by_an_exception_says_nothing_to_the_ranks(comm, open_session):
    with open_session(comm) as session:
        a = ones(session, (6, 5))

        def work():
            with session:
                raise ValueError("in the child")

        said = in_child(work)
        c = session.gemm(a, a, trans_b="T")
        good = shows(c, 5.0)
    collective_assert(comm, good and said == "ValueError: in the child", str(said))


def test_a_forked_child_cannot_open_a_session(comm, open_session):
    said = in_child(lambda: outcome(lambda: open_session(comm)))
    collective_assert(comm, said is not None and "TopologyError" in said and "fork" in said, str(said))


def test_an_interrupt_shows_the_program_and_not_the_way_down(comm, open_session, monkeypatch):
    with open_session(comm) as session:
        a = ones(session, (4, 4))
        run = Call.finish

        def interrupted(*arguments, **named):
            run(*arguments, **named)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(Call, "finish", interrupted)
            text = ""
            try:
                session.gemm(a, a)
            except KeyboardInterrupt as error:
                text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        after = outcome(session.barrier)  # it was cut short inside a call
    good = "ParamError" in after and "left the session by KeyboardInterrupt" in after
    good &= (
        "test_api_life" in text
        and "session_products.py" not in text
        and "calls.py" not in text
        and len(text.splitlines()) < 16
    )
    collective_assert(comm, good, text)


def test_a_call_that_has_begun_is_asked_and_finished(comm, open_session):
    with open_session(comm) as session:
        a, c = ones(session, (40, 40)), session.empty_host((40, 40))
        with session.plan(a, a, c) as plan, session._gate.exclusive():
            request, _ = plan._request("execute", (2.0, 0.0), (None, None, None), (None, None), None)
            call = session._calls.open(request, plan._plan, plan._keep)
            call.arm()
            call.start()
            is_now = session._calls.now is call and plan.progress() < 1
            while not call.may_finish(spin_s=0.0, waits=True):
                pass
            over = plan.progress()
            call.finish()
            call.let_go()
            after = session._calls.now, plan.progress()
        moves = ranks_per_node(comm.size) < comm.size  # messages alone, perhaps, which do not count
        good = is_now and (over == 1 or moves) and after == (None, 0.0) and call.result.tasks >= 0
        collective_assert(comm, good and shows(c, 80), f"{is_now} {over} {after}")


def test_a_plan_that_is_dropped_leaves_nothing_bound_and_its_session_lives_as_long(comm, open_session):
    session = open_session(comm)
    a, c = ones(session, (4, 4)), session.empty_host((4, 4))
    bound = session._calls.binder._bound
    plan = session.plan(a, a, c)
    del session
    gc.collect()
    plan.execute()
    counts = [len(bound)]
    session = plan._session
    del plan
    gc.collect()
    counts.append(len(bound))
    session.close()
    collective_assert(comm, counts == [1, 0], str(counts))


# -- ranks that leave --------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
def test_after_a_rank_has_left_every_call_is_an_error_and_close_returns(comm, open_session):
    session = open_session(comm)
    a = ones(session, (6, 5))
    odd = comm.rank == comm.size - 1
    first = outcome(lambda: session.__exit__(ValueError, ValueError("x"), None) if odd else session.gemm(a, a))
    second = [outcome(call) for call in (session.barrier, lambda: session.gemm(a, a), lambda: session.release(a))]
    closing = outcome(session.close)
    touched = shows(a, 1.0)
    good = all("left" in one for one in second) and closing == "worked" and touched
    collective_assert(comm, good, f"{first}; {second}; {closing}; {touched}")


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_drops_its_session_is_named(comm, open_session):
    session = open_session(comm)
    comm.Barrier()
    if comm.rank == 0:
        del session
        gc.collect()
        said = "rank 0 left"
    else:
        said = outcome(session.barrier)
    collective_assert(comm, "rank 0 left" in said, said)


def test_a_closed_plan_is_an_error_on_every_rank(comm, open_session):
    with open_session(comm) as session:
        a = ones(session, (4, 4))
        plan = session.plan(a, a, ones(session, (4, 4)))
        if session.rank == 0:
            plan.close()
        said = outcome(plan.execute)
        plan.close()
        c = session.gemm(a, a)
        good = shows(c, 4.0)
    collective_assert(comm, good and "ParamError" in said and "plan is closed" in said, said)


# -- sessions that are dropped -----------------------------------------------------------------------


def test_dropped_sessions_give_back_what_they_held(comm, open_session):
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    def mappings():
        with open("/proc/self/maps") as lines:
            return sum("uncut_mpi" in line for line in lines)

    counts = []
    for _ in range(6):
        session = open_session(comm)
        session.gemm(ones(session, (6, 5)), ones(session, (6, 5)), trans_b="T")
        del session
        counts.append((descriptors(), mappings()))
    with open_session(comm):
        pass
    left = mappings()
    collective_assert(comm, counts[-1] == counts[2] and left < counts[-1][1], f"{counts}, at the end {left}")


@pytest.mark.mpi(min_size=2)
def test_dropped_sessions_of_overlapping_ranks_are_collected_in_one_order(comm, open_session):
    parts = [comm.Split(comm.rank < comm.size - 1), comm.Split(comm.rank > 0)]
    for turn in range(4):
        for part in parts if turn % 2 else parts[::-1]:
            session = open_session(part)
            if turn == 3 and comm.rank == 0:
                kept = session  # dropped by some of its ranks alone: it stays
            del session
    with open_session(comm) as session:
        c = session.gemm(ones(session, (6, 5)), ones(session, (6, 5)), trans_b="T")
        good = shows(c, 5.0)
    if comm.rank == 0:
        del kept
    with open_session(comm):
        pass
    for part in parts:
        part.Free()
    collective_assert(comm, good)


def test_what_a_session_handed_out_is_safe_to_touch_after_its_end(comm, open_session):
    session = open_session(comm)
    a = ones(session, (6, 6))
    d = session.empty_device((6, 6), rank=0)
    session.upload(a, d)
    plan = session.plan(a, d, ones(session, (6, 6)), reads_c=False)
    trace, before = plan.trace(), repr(plan)
    session.close()
    text = [repr(a), repr(session), plan.summary.digest, str(plan.schedule.tasks[:1]), str(session.versions)]
    text += [str(session.machine.name), str(session.energy_j()), str(session.broken), str(session.rank)]
    sums = [36.0 * shows(a, 1.0), float(trace.end_s.shape[0])]
    if session.rank == 0:
        sums.append(float(np.asarray(d.array).sum()) if session.backend_name == "host" else 36.0)
    refused = [outcome(call) for call in (plan.execute, plan.trace, session.barrier, lambda: session.release(a))]
    plan.close()
    session.close()
    good = sums[0] == 36.0 and all("ParamError" in one for one in refused) and "closed" in repr(session)
    good &= before.startswith("<GemmPlan: auto (") and before.endswith(" µs>") and repr(plan).endswith(", closed>")
    collective_assert(comm, good and (session.rank != 0 or sums[2] == 36.0), f"{sums} {refused} {text}")


# -- waiting -----------------------------------------------------------------------------------------


@pytest.mark.mpi(min_size=2)
@pytest.mark.on_nodes
def test_a_rank_that_is_long_awaited_is_named_in_a_warning(comm, open_session, monkeypatch, caplog):
    monkeypatch.setattr("uncut_mpi.spmd.group.PATIENCE_S", 0.05)
    late = comm.size - 1
    with caplog.at_level(logging.WARNING, logger="uncut_mpi"), open_session(comm) as session:
        for call in (session.barrier, lambda: session.gather_values(0), lambda: session.empty_host((2, 2))):
            if comm.rank == late:
                time.sleep(0.4)
            call()
    said = [record.getMessage() for record in caplog.records if f"rank {late}" in record.getMessage()]
    counts = allgather(comm, len(said))
    # One rank speaks for all that wait, and says so again after twice the time.
    collective_assert(comm, counts[late] == 0 and sum(counts) >= 3 and sum(map(bool, counts)) == 1, f"{counts} {said}")


# -- whole jobs ---------------------------------------------------------------------------------------


@pytest.fixture
def job(job_of_ranks):
    """As `job_of_ranks`, of a program that has all at hand."""
    start = (
        "import os, sys, time\nimport numpy as np\nfrom mpi4py import MPI\nimport uncut_mpi as um\n"
        f"W = MPI.COMM_WORLD\n{MACHINE}\n"
    )
    return lambda body, *wanted, **how: job_of_ranks(start + body, *wanted, **how)


def test_mpi_that_ended_before_the_session_is_an_error_and_close_frees(job):
    body = """
with um.Session(W, backend="host", machine=M) as s:
    a = s.empty((8, 8), "f64", um.Layout.replicated()); a.local[:] = 1
    s.gemm(a, a)
    MPI.Finalize()
    for call in (lambda: s.gemm(a, a), s.barrier, lambda: s.empty_host((2, 2)), lambda: s.release(a)):
        try:
            call()
            sys.stdout.write("no error\\n")
        except um.TopologyError as error:
            sys.stdout.write(f"refused: {error}\\n")  # a line at once, since the ranks' are mixed
links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
held = sum("uncut_mpi" in os.readlink(one) for one in links if os.path.islink(one))
sys.stdout.write(f"reached {held} {a.local.sum()}\\n")
"""

    output = job(body, status=0)
    assert output.count("refused:") == 8, output
    assert "no error" not in output
    assert output.count("reached 0 64.0") == 2, output


def test_a_rank_that_raises_inside_a_session_ends_the_job_under_plain_python(job):
    body = """
with um.Session(W, backend="host", machine=M) as s:
    a = s.empty_host((8, 8))
    if W.rank == 1:
        raise ValueError("of rank 1")
    s.gemm(a, a)
"""
    job(body, "ValueError: of rank 1", "PeerFailedError", "rank 1 left the session by ValueError")


def test_a_rank_that_ends_without_closing_is_named(job):
    body = """
s = um.Session(W, backend="host", machine=M)
a = s.empty_host((8, 8))
if W.rank == 0:
    s.gemm(a, a)
"""
    job(body, "rank 1 left the session")


def test_a_session_that_one_rank_never_opens_is_told(job):
    body = """
import uncut_mpi.spmd.group
uncut_mpi.spmd.group.PATIENCE_S = 0.2
if W.rank == 1:
    time.sleep(1)
with um.Session(W, backend="host", machine=M) as s:
    s.barrier()
"""
    job(body, "opening a session: rank 0 of 2 waited", status=0)


def test_the_wait_for_a_rank_that_opens_a_session_too_late_ends_on_both(job):
    body = """
if W.rank == 1:
    time.sleep(1)
try:
    um.Session(W, backend="host", machine=M, arrival_timeout_s=0.3)
except um.StallError as error:
    print(f"gave up: {error}", flush=True)
else:
    print("opened", flush=True)
    raise SystemExit(5)
raise SystemExit(4)
"""
    said = (f"gave up: opening a session: rank {rank} of 2 waited 0.3 s for other ranks" for rank in range(2))
    job(body, *said, status=4)


@pytest.mark.mpi(min_size=2)
def test_what_is_done_together_is_a_text_on_every_rank(comm, open_session):
    def together(session, what):
        with session.together(what):
            pass

    with open_session(comm) as session:
        said = [outcome(lambda what=what: together(session, what)) for what in (5, 5 if comm.rank == 0 else "a", "a")]
    collective_assert(comm, all("ParamError" in one for one in said[:2]) and said[2] == "worked", said)


@pytest.mark.mpi(min_size=3)
@pytest.mark.on_nodes
def test_a_rank_that_gave_up_neither_shortens_the_wait_of_others_nor_is_blamed(comm, open_session):
    session = open_session(comm, arrival_timeout_s=1.6)
    comm.Barrier()
    if comm.rank == 1:
        time.sleep(0.4)
    found, waited_s = "", 0.0
    if comm.rank:
        started = time.monotonic()
        found = outcome(session.barrier)
        waited_s = time.monotonic() - started
    allgather(comm, None)
    good = comm.rank == 0 or ("for rank 0" in found and waited_s > 1.5)
    session._gate.broken = True
    collective_assert(comm, good, f"{found} after {waited_s:.2f} s")
