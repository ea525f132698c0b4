"""
Assertions for tests that run on several ranks.

A plain assertion that fails on one rank leaves the others in their next collective call. These gather
the outcome of every rank and fail on all of them, naming the guilty. Between two collective calls of
a test they are the only kind of assertion allowed.
"""

from __future__ import annotations

import contextlib
import time

import pytest


def allgather(comm, value, timeout_s=None):
    """
    Gather one picklable value of every rank without spinning while ranks are still to come.

    Raises TimeoutError on this rank alone if they do not all come within `timeout_s`.
    """
    request = comm.Ibarrier()
    started = time.monotonic()
    pause_s = 0.0
    while not request.Test():
        if timeout_s is not None and time.monotonic() - started > timeout_s:
            raise TimeoutError(f"some of the {comm.size} ranks did not come within {timeout_s} s")
        time.sleep(pause_s)
        pause_s = min(pause_s + 5e-5, 2e-3)
    return comm.allgather(value)  # all are here: short


def collective_assert(comm, ok, detail=""):
    """Fail on all ranks if `ok` is false on any, saying which and its `detail`. Collective."""
    __tracebackhide__ = True
    outcomes = allgather(comm, (bool(ok), str(detail) if not ok else ""))
    guilty = [f"rank {rank}: {text or 'assertion failed'}" for rank, (fine, text) in enumerate(outcomes) if not fine]
    if guilty:
        pytest.fail("\n".join(guilty), pytrace=True)


def once(comm, call):
    """Have rank 0 do something that all ranks then see, after what they have done so far. Collective."""
    comm.Barrier()
    if comm.rank == 0:
        call()
    comm.Barrier()


@contextlib.contextmanager
def carried(comm):
    """
    Run a block in which single ranks may fail; if one does, fail on all ranks, naming it. Collective.

    The block must hold no collective call that a failing rank would leave out.
    """
    __tracebackhide__ = True
    error = None
    try:
        yield
    except Exception as caught:
        error = caught
    outcomes = allgather(comm, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    guilty = [f"rank {rank}: {text}" for rank, text in enumerate(outcomes) if text is not None]
    if guilty:
        pytest.fail("\n".join(guilty), pytrace=False)


def expect(comm, error, parts, call):
    """`call` must raise `error` with all `parts` in its message, the same on every rank. Collective."""
    __tracebackhide__ = True
    try:
        call()
        found = "nothing was raised"
    except error as caught:
        found = str(caught)
    except Exception as caught:
        found = f"raised {type(caught).__name__}: {caught}"
    collective_assert(comm, all(part in found for part in parts), f"wanted {error.__name__} with {parts}, got: {found}")
    collective_assert(comm, len(set(allgather(comm, found))) == 1, f"ranks raised different messages; here: {found}")


def outcome(call):
    """Return what a call does on this rank: the name and text of its error, or a word."""
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "worked"
