"""What a process uses does not grow: sessions that are closed or dropped, and calls that are made over and over."""

from __future__ import annotations

import gc
import itertools
import sys

from tests.helpers.collective import allgather, collective_assert
from tests.helpers.usage import communicators_left, usage
from tests.perf.soak import mix, product
from uncut_mpi.api import plan_cache

WINDOWS = 4
KINDS = "blocks", "objects", "descriptors", "mappings", "shm_files"


def check(comm, each, work):
    """
    Fail if windows, in each of which work is done so often, leave more in use.

    Of each kind the window counts in which it grows least: what is left of work grows in all of them. Blocks of memory
    come and go by up to 80, whatever is done. So their least number in a window counts, and one for every other work
    is let pass.
    """
    gc.collect()
    gc.freeze()  # or each collection looks at all that earlier tests have left, for 0.1 s
    seen = []
    for _ in range(1 + WINDOWS):
        blocks = []
        for _ in range(each):
            work()
            gc.collect()
            blocks.append(sys.getallocatedblocks())
        comm.Barrier()
        seen.append(usage() | {"blocks": min(blocks)})
    found = {what: min(after[what] - before[what] for before, after in itertools.pairwise(seen)) for what in KINDS}
    good = found.pop("blocks") <= each // 2 and max(found.values()) <= 0
    collective_assert(comm, good, f"{allgather(comm, [{what: one[what] for what in KINDS} for one in seen])}")


def test_sessions_leave_nothing(comm, open_session):
    open_session(comm).close()
    before = communicators_left(comm)

    def work():
        product(comm, close=True)
        product(comm, close=False)

    check(comm, 40, work)
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

        check(comm, 30, work)
