"""
Calls that were made without waiting for them (``wait=False``): in their order, by a thread of the session's.

Ranks open such a call together, as any other, and plan and bind then if they have to. What is left uses no MPI: the
thread starts the product, and meets the other ranks' threads at its end. So it gets on whatever the program does. All
other calls of the session finish those in flight before they begin (`Gate.open`).
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from uncut_mpi.api.gate import public_call
from uncut_mpi.device.interface import Chain
from uncut_mpi.errors import ParamError, from_wire, to_wire
from uncut_mpi.instead import absent
from uncut_mpi.model.arguments import flag
from uncut_mpi.spmd.group import Group

if TYPE_CHECKING:
    from uncut_mpi.api.calls import Call

MOST_IN_FLIGHT: Final = 16
"""Calls that may be in flight; the next one waits for the oldest."""

_LOOK_S = 1e-3  # how often a rank that waits lets MPI get on
_SPIN_S = 100e-6  # how long the thread polls before it looks for another call
_CHAINED = 2  # calls that are started at a time
_LINGER_S = 0.02  # how long the thread waits for another call; a program does not end before

_R = TypeVar("_R")


def call_without_waiting(call: str, wait: object) -> str:
    """Return the name of a call that is not waited for, another one since all ranks have to do so, or not."""
    return call if flag("wait", wait) else f"{call} with wait=False"


class Flight:
    """
    The calls of a session that are in flight.

    Attributes
    ----------
    calls : deque of Call
        The oldest first. The thread takes them out when they are over.
    unheard : bool
        Whether a call has failed of which nobody here will ask what became of it.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._idle = True  # whether the thread waits for calls, or is none
        self._awaited = 0  # threads that wait for it
        self._failure: BaseException | None = None  # of the last call that failed; on all ranks
        self.unheard = False
        self.calls: collections.deque[Call] = collections.deque()

    def add(self, call: Call) -> None:
        """Let a call go on that all ranks have opened, once there are not too many before it. Local."""
        if len(self.calls) >= MOST_IN_FLIGHT:
            self._await(lambda: len(self.calls) <= MOST_IN_FLIGHT // 2)  # one by one the threads would only take turns
        self.calls.append(call)
        if not self._idle:
            return
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="uncut_mpi calls")
                try:
                    thread.start()
                except BaseException:  # there are too many, and nobody would end the call
                    self.calls.pop()
                    raise
                self._thread, self._idle = thread, False
            self._changed.notify_all()

    def drain(self) -> None:
        """Wait until none is in flight. Local."""
        if self.calls:
            self._await(lambda: not self.calls)

    def await_end(self, call: Call) -> None:
        """Wait until a call is over. Local."""
        if not call.over:
            self._await(lambda: call.over)

    def drop(self, call: Call) -> None:
        """Note that nobody here will ask what became of a call. Local."""
        call.unheard = True
        if call.over:
            self.unheard |= call.error is not None

    def unheard_error(self) -> BaseException:
        """Return the error of a call that is unheard, once. Local."""
        self.unheard = False
        return self.failure

    @property
    def failure(self) -> BaseException:
        """The error of the last call that failed, for those who have not asked for it."""
        assert self._failure is not None
        name, message = to_wire(self._failure)
        return from_wire(name, f"a call with wait=False, whose handle was dropped: {message}", rank=self._group.rank)

    def _await(self, done: Callable[[], object]) -> None:
        with self._changed:
            self._awaited += 1
            while not done():
                self._changed.wait(_LOOK_S)
                self._group.drive()
            self._awaited -= 1

    def _work(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # none that is expected, and nobody may wait for ever
            with self._changed:
                for call in self.calls:
                    call.fail(error)
                    call.let_go()
                    self._failure, call.over = call.error, True
                    self.unheard |= call.unheard
                self.calls.clear()
                self._thread, self._idle = None, True
                self._changed.notify_all()

    def _loop(self) -> None:
        calls, started = self.calls, collections.deque[Any]()
        while True:
            if not calls:
                with self._changed:
                    self._idle = True
                    if not self._changed.wait_for(lambda: calls, _LINGER_S):
                        self._thread = None
                        return
                    self._idle = False
            last = started[-1] if started else None
            if len(started) < len(calls) and (last is None or (len(started) < _CHAINED and last.may_be_followed)):
                started.append(calls[len(started)])
                started[-1].attempt(started[-1].start, chain=Chain.FIRST if last is None else Chain.NEXT)
                continue
            oldest = started[0]
            # As long as it is alone another one may come and follow it.
            if len(calls) == 1 and oldest.may_be_followed and not oldest.poll(_SPIN_S):
                continue
            oldest.attempt(oldest.finish)
            oldest.let_go()
            if oldest.error is not None:
                self._failure = oldest.error
                self.unheard |= oldest.unheard
            oldest.over = True
            del last, oldest  # who finds no call in flight finds nothing of it here either
            started.popleft()
            calls.popleft()
            if self._awaited:
                with self._changed:
                    self._changed.notify_all()


class Handle(Generic[_R]):
    """
    A product that was begun without waiting for it, by `Session.gemm` or `GemmPlan.execute` with ``wait=False``.

    It gets on by itself. Its matrices are not to be read, written or freed before it is done. Products are done in the
    order in which they were begun, so one may use what an earlier one computes. Every other call of the session
    finishes them first. If the handle of a call that fails is dropped, the next call of the session raises the error.
    """

    def __init__(self, session: object, flight: Flight, call: Call, result: Callable[[Call], _R]) -> None:
        self._session = session  # which is in use as long as its calls are
        self._flight, self._call, self._result = flight, call, result
        self._asked = False

    def done(self) -> bool:
        """Return whether the product is over on all ranks, also by an error. Local."""
        return self._call.over

    @public_call
    def wait(self) -> _R:
        """
        Wait until the product is over on all ranks. Local: a rank need not wait for what it does not use.

        Returns
        -------
        Matrix or CallResult
            What the call would have returned.

        Raises
        ------
        ParamError
            If it was waited for before.
        UncutError
            If a rank failed while computing; the same error on all ranks that wait. C is undefined then, and so is what
            later products made of it.
        """
        if self._asked:
            raise ParamError("this handle was waited for before: keep what its wait() has returned")
        self._asked = True
        call = self._call
        self._flight.await_end(call)
        if call.error is not None:
            raise call.error
        return self._result(call)

    def __del__(self) -> None:
        if not self._asked:
            self._flight.drop(self._call)

    def __reduce__(self) -> Any:
        raise TypeError("a Handle belongs to its session and process, and cannot be copied or sent: call its wait()")

    def __repr__(self) -> str:
        return f"<Handle: {'done' if self.done() else 'in flight'}>"

    if not TYPE_CHECKING:
        __getattr__ = absent
