"""What a process uses does not grow: sessions that are closed or dropped, and calls that are made over and over."""

from __future__ import annotations

import functools
import itertools

import pytest

from tests.helpers.collective import allgather, collective_assert
from tests.helpers.usage import communicators_left, usage
from tests.perf.soak import mix, product
from uncut_mpi.api import plan_cache

WINDOWS, EACH = 4, 15
MOST = {"blocks": EACH // 2, "objects": 0, "descriptors": 0, "mappings": 0, "shm_files": 0}
"""What may be more of each after a window: what is kept of every session or round is `EACH` at least."""


def grown(comm, work):
    """Return by how much each use grows in the window in which it grows least: what is left of work grows in all."""
    for _ in range(EACH):
        work()
    seen = [usage()]
    for _ in range(WINDOWS):
        for _ in range(EACH):
            work()
        comm.Barrier()
        seen.append(usage())
    return {what: min(after[what] - before[what] for before, after in itertools.pairwise(seen)) for what in MOST}


def check(comm, found):
    collective_assert(comm, all(found[what] <= most for what, most in MOST.items()), f"{allgather(comm, found)}")


@pytest.mark.parametrize("close", [True, False], ids=["closed", "dropped"])
def test_sessions_leave_nothing(comm, open_session, close):
    open_session(comm).close()
    before = communicators_left(comm)
    check(comm, grown(comm, functools.partial(product, comm, close=close)))
    open_session(comm).close()  # gives back what was dropped last
    collective_assert(
        comm, communicators_left(comm) >= before, "communicators are left"
    )  # others may go, of earlier tests


def test_calls_leave_nothing(comm, open_session, monkeypatch):
    monkeypatch.setattr(plan_cache, "_MOST_CALLS", 20)  # that are known again: full before it is looked
    with open_session(comm) as session:
        calls = mix(session)

        def work():
            for call in calls:
                call()

        check(comm, grown(comm, work))
