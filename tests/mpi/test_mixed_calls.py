"""Ranks that make different calls all learn at once who called what, and the session goes on working."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import allgather, collective_assert, expect, outcome
from tests.helpers.products import Case, make_operands, mismatch, release
from tests.helpers.sessions import open_descriptors
from uncut_mpi.units import name_ranks

pytestmark = pytest.mark.mpi(min_size=2)
CASE = Case(24, 20, 16)
ALL_THE_SAME = "all ranks of a session have to make the same collective calls in the same order"


class Calls:
    """Every collective call of a session by its name, with arguments that are right."""

    def __init__(self, session):
        self.session = session
        self.operands = make_operands(session, CASE)
        a, b, c = self.operands.a, self.operands.b, self.operands.c
        self.plan = session.plan(a, b, c)
        self.by_name: dict[str, Callable[[], object]] = {
            "gemm": lambda: session.gemm(a, b, c, alpha=CASE.alpha, beta=CASE.beta),
            "execute": lambda: self.plan.execute(CASE.alpha, CASE.beta),
            "plan": lambda: session.plan(a, b, c),
            "empty_host": lambda: session.empty_host((4, 4)),
            "empty_device": lambda: session.empty_device((4, 4), rank=0),
            "register": lambda: session.register(np.ones((3, 3)) if session.rank == 0 else None, root=0),
            "release": lambda: session.release(a),
            "upload": lambda: session.upload(a, a),
            "download": lambda: session.download(c),
            "barrier": session.barrier,
            "agree": lambda: session.agree(3, "a number"),
            "gather_values": lambda: session.gather_values(3),
            "together": self.together,
            "poison_softbuf": session.poison_softbuf,
            "close": session.close,
        }

    def together(self):
        with self.session.together("doing something"):
            pass

    def close(self):
        self.plan.close()
        release(self.session, self.operands)


@pytest.fixture
def calls(session):
    made = Calls(session)
    yield made
    made.close()


def mixed(comm, calls: Calls, names: list[str]) -> None:
    """Make call `names[rank]` on every rank; all must say who called what. Collective."""
    groups = {name: [rank for rank, one in enumerate(names) if one == name] for name in dict.fromkeys(names)}
    who = ", ".join(f"{name_ranks(ranks)} called {name}" for name, ranks in groups.items())
    expect(comm, um.RankMismatchError, [f"{who}: {ALL_THE_SAME}"], calls.by_name[names[comm.rank]])


def check_usable(comm, calls: Calls) -> None:
    """The session computes what it should, as if nothing had happened. Collective."""
    calls.by_name["gemm"]()
    wrong = mismatch(CASE, calls.operands)
    collective_assert(comm, not wrong and not calls.session.broken, wrong)


PAIRS = [
    ("gemm", "empty_host"),
    ("gemm", "barrier"),
    ("gemm", "plan"),
    ("gemm", "execute"),
    ("gemm", "gather_values"),
    ("gemm", "download"),
    ("execute", "release"),
    ("plan", "together"),
    ("empty_host", "empty_device"),
    ("register", "upload"),
    ("agree", "gather_values"),
    ("poison_softbuf", "barrier"),
]


@pytest.mark.parametrize("pair", [*PAIRS, *(pair[::-1] for pair in PAIRS)], ids="-".join)
def test_one_rank_calls_something_else(comm, calls, pair):
    most, odd = pair
    mixed(comm, calls, [*[most] * (comm.size - 1), odd])
    check_usable(comm, calls)


def test_every_rank_calls_something_else_again_and_again(comm, calls):
    names = [name for name in calls.by_name if name != "close"]
    for shift in range(3):
        mixed(comm, calls, [names[(3 * rank + shift) % len(names)] for rank in range(comm.size)])
    check_usable(comm, calls)


def test_different_calls_are_told_from_bad_arguments(comm, calls):
    a, b = calls.operands.a, calls.operands.b
    calls.by_name["gemm"] = lambda: calls.session.gemm(a, b, a, alpha="x")
    mixed(comm, calls, ["gemm", *["barrier"] * (comm.size - 1)])


def test_an_error_of_one_rank_s_own_is_the_cause_of_the_mismatch_there(comm, session):
    found = cause = ""
    try:
        if session.rank == 0:
            with session.together("failing"):
                raise KeyError("missing")
        session.barrier()
    except um.RankMismatchError as error:
        found, cause = str(error), repr(error.__cause__)
    collective_assert(comm, "rank 0 called together" in found, found)
    collective_assert(comm, session.rank != 0 or cause == repr(KeyError("missing")), cause)


def test_blocks_of_different_purpose_do_not_meet(comm, session):
    def body():
        with session.together("reading" if session.rank == 0 else "writing"):
            pass

    expect(comm, um.RankMismatchError, ["what: 'reading' on rank 0", "'writing' on "], body)


def open_session(comm, **more) -> um.Session:
    return um.Session(comm, backend="host", machine=um.Machine.uniform(comm.size), **more)


@pytest.mark.parametrize("other", ["gemm", "empty_host", "barrier", "gather_values"])
def test_a_rank_that_closes_the_session_closes_it_for_all(comm, other):
    descriptors = open_descriptors()
    calls = Calls(open_session(comm))
    calls.plan.close()
    parts = [f"called {other}", "rank 1 called close", ALL_THE_SAME, "closed now"]
    expect(comm, um.RankMismatchError, parts, calls.by_name["close" if comm.rank == 1 else other])
    expect(comm, um.ParamError, ["the session is closed"], calls.session.barrier)
    calls.session.close()
    del calls
    collective_assert(comm, open_descriptors() <= descriptors, "descriptors are left open")


def test_a_call_that_one_rank_leaves_out_ends_the_block_of_the_session_on_all(comm):
    def body():
        with open_session(comm) as session:
            if comm.rank == 0:
                session.empty_host((4, 4))

    expect(comm, um.RankMismatchError, ["rank 0 called empty_host", "called close"], body)


def test_a_product_that_waits_for_the_others_keeps_no_device_from_another_session(comm):
    """Rank 0 is in a product that the others never begin; they finish one of another session first."""
    first, second = open_session(comm), open_session(comm)
    calls, others = Calls(first), Calls(second)
    found: list[str] = []

    def wait():
        try:
            calls.by_name["gemm" if comm.rank == 0 else "barrier"]()
        except um.RankMismatchError as error:
            found.append(str(error))

    thread = threading.Thread(target=wait, daemon=True)
    if comm.rank == 0:
        thread.start()
    check_usable(comm, others)
    if comm.rank != 0:
        thread.start()
    thread.join(30)
    collective_assert(comm, found and "rank 0 called gemm" in found[0], str(found))
    check_usable(comm, calls)
    for one in (others, calls):
        one.close()
        one.session.close()


def test_a_repeated_call_is_opened_and_closed_by_one_exchange_each_and_no_message(comm, calls, monkeypatch):
    """The word that tells calls apart costs no message."""
    group, gate, messages = calls.session._group, calls.session._calls.gate, []
    exchanges = gate._exchange.meeting, gate._verdicts.meeting
    true_gather, true_barrier = group.allgather_bytes, group.barrier
    calls.by_name["gemm"]()
    monkeypatch.setattr(group, "allgather_bytes", lambda *all_: messages.append("allgather") or true_gather(*all_))
    monkeypatch.setattr(group, "barrier", lambda *all_: messages.append("barrier") or true_barrier(*all_))
    before = [one.number for one in exchanges]
    calls.by_name["gemm"]()
    met = [one.number - number for one, number in zip(exchanges, before, strict=True)]
    monkeypatch.undo()
    collective_assert(comm, not messages and met == [1, 1], f"{messages}, {met}")


@pytest.mark.parametrize("name", ["empty_host", "barrier", "release"])
def test_a_rank_that_begins_no_call_is_named_by_every_kind_of_call(comm, name):
    calls = Calls(open_session(comm, arrival_timeout_s=0.5))
    calls.plan.close()
    found = "" if comm.rank == 1 else outcome(calls.by_name[name])
    allgather(comm, None)
    good = found.startswith(f"StallError: {name}: ") and "for rank 1" in found
    collective_assert(comm, comm.rank == 1 or good, found)
    calls.session._gate.broken = True  # the rank that was awaited knows nothing of it
    calls.session.close()
