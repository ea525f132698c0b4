"""
Calls that were made without waiting for them (``wait=False``): in their order, whatever the program does.

Ranks open such a call together, as any other, and plan and bind then if they have to. What is left uses no MPI: who
starts a product, and ends it with the other ranks, is a thread of the session's. So it gets on whatever the program
does. While the program comes back with call after call, it does so itself in passing, as far as it need not wait. (Two
threads would take the interpreter from each other at each small product.) All other calls of the session finish those
in flight before they begin (`Gate.open`).
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar

from uncut_mpi.api.gate import OF_A_FORK, public_call
from uncut_mpi.device.interface import Backend, Chain
from uncut_mpi.errors import ParamError, from_wire, to_wire
from uncut_mpi.instead import absent
from uncut_mpi.model.arguments import flag
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.runtime import is_fork

if TYPE_CHECKING:
    from uncut_mpi.api.call import Call

MOST_IN_FLIGHT: Final = 16
"""Calls that may be in flight; the next one waits for half of them."""

_LOOK_S = 1e-3  # how often a rank that waits lets MPI get on
_SPIN_S = 100e-6  # how long a call is polled before another one is looked for
_AWAY_S = 1e-3  # how long the program may stay away before the thread goes on without it
_LINGERS = 20  # times that the thread waits so long for another call; a program does not end before

_R = TypeVar("_R")


def call_without_waiting(call: str, wait: object) -> str:
    """Return the name of a call that is not waited for, another one since all ranks have to do so, or not."""
    return call if flag("wait", wait) else f"{call} with wait=False"


class Flight:
    """
    The calls of a session that are in flight.

    Parameters
    ----------
    backend : Backend
        Where the host computes, who polls a product does; only the thread of the session's does so then.

    Attributes
    ----------
    calls : deque of Call
        The oldest first. They are taken out when they are over.
    unheard : bool
        Whether a call has failed of which nobody here will ask what became of it.
    """

    def __init__(self, group: Group, backend: Backend) -> None:
        self._group, self._backend, self._computes = group, backend, backend.takes_host_memory
        self._changed = threading.Condition(threading.Lock())
        self._working = threading.Lock()  # held by who starts and ends calls
        self._thread: threading.Thread | None = None
        self._idle = True  # whether the thread waits to be woken up for a call, or is none
        self._awaited = 0  # threads that wait for it
        self._visits = 0  # how often the program itself has come to start and end calls
        self._failure: BaseException | None = None  # of the last call that failed; on all ranks
        self.unheard = False
        self.calls: collections.deque[Call] = collections.deque()

    def add(self, call: Call) -> None:
        """Let a call go on that all ranks have opened, once there are not too many before it. Local."""
        if len(self.calls) >= MOST_IN_FLIGHT:
            self._await(lambda: len(self.calls) <= MOST_IN_FLIGHT // 2)  # one by one the threads would only take turns
        self.calls.append(call)
        if self._idle:
            try:
                self._wake()
            except BaseException:  # there are too many threads, and nobody would end the call
                self.calls.remove(call)
                raise
        while not call.begun and self._visit():
            pass

    def _wake(self) -> None:
        with self._changed:
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="uncut_mpi calls")
                thread.start()
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

    def let_wait(self, stream: object, call: Call) -> None:
        """Let a stream wait until a call is over; or wait for it here, if the device cannot. Local."""
        streams = self._backend.streams_of(stream)
        self._await(lambda: call.over or call.may_be_followed)
        with self._working:
            if not call.over:
                call.precede(streams)

    def let_follow(self, stream: int) -> None:
        """Let a stream wait until all that are in flight are over. Local."""
        if calls := self.calls.copy():  # the thread takes them out
            self.let_wait(stream, calls[-1])

    def note(self, error: BaseException) -> None:
        """Keep the error of a call, for those who will not ask for it. On all ranks."""
        self._failure = error

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

    def _visit(self, spin_s: float = 0.0) -> bool:
        """Start a call or end one in the program's own thread, unless the other is at it; return whether one was."""
        if self._computes:
            return False
        self._visits += 1
        if self._working.locked():
            return False
        with self._working:  # an interrupt may come between any two steps, but not leave it taken
            try:
                return self._advance(spin_s, waits=False)
            except BaseException as error:
                if self.calls:  # of which nobody knows what was done
                    self.calls[0].fail(error)
                raise

    def _await(self, done: Callable[[], object]) -> None:
        if is_fork[0]:
            raise ParamError(OF_A_FORK)
        while not done() and self._visit(_SPIN_S):  # a small product is over before the thread has woken up
            pass
        if done():
            return
        if self._thread is None:
            self._wake()
        with self._changed:
            self._awaited += 1
            try:
                self._changed.notify_all()
                while not done():
                    self._changed.wait(_LOOK_S)
                    self._group.drive()
            finally:
                self._awaited -= 1

    def _work(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # none that is expected, and nobody may wait for ever
            with self._working, self._changed:
                for call in self.calls:
                    call.fail(error)
                    call.let_go()
                    self.note(error)
                    call.over = True
                    self.unheard |= call.unheard
                self.calls.clear()
                self._thread, self._idle = None, True
                self._changed.notify_all()

    def _loop(self) -> None:
        visits, quiet = 0, 0
        while True:
            is_alone, visits = visits == self._visits, self._visits  # else the program comes by itself
            goes_on = self.calls and (is_alone or self._awaited)
            with self._working:
                ended = self._advance(_SPIN_S if goes_on else 0.0, waits=bool(goes_on))
            if ended and self._awaited:
                with self._changed:
                    self._changed.notify_all()
            if ended or goes_on:
                quiet = 0
                continue
            quiet = quiet + 1 if is_alone else 0
            with self._changed:
                self._idle = self._computes or quiet >= _LINGERS
                self._changed.wait_for(lambda: self.calls and (self._awaited or self._idle), _AWAY_S)
                if quiet >= _LINGERS and not self.calls:
                    self._thread = None
                    return
                self._idle = False

    def _advance(self, spin_s: float, *, waits: bool) -> bool:
        """Start or end a call, after polling it for so long; return whether one was. `waits`: for other ranks too."""
        calls = self.calls
        if not calls:
            return False
        oldest = calls[0]
        if not oldest.begun and oldest.error is None:
            oldest.attempt(oldest.start, chain=Chain.FIRST)
            return True
        if len(calls) > 1 and not (calls[1].begun or calls[1].error) and oldest.may_be_followed:
            calls[1].attempt(calls[1].start, chain=Chain.NEXT)
            return True
        ends = self._computes or oldest.attempt(oldest.may_finish, spin_s=spin_s, waits=waits)
        if not ends and oldest.error is None:
            return False
        oldest.attempt(oldest.finish)
        oldest.let_go()
        if oldest.error is not None:
            self.note(oldest.error)
            self.unheard |= oldest.unheard
        oldest.over = True
        del oldest  # who finds no call in flight finds nothing of it here either
        calls.popleft()
        return True


class Handle(Generic[_R]):
    """
    A product that was begun by `Session.gemm`, `gemm_batch` or `GemmPlan.execute` with ``wait=False``.

    It gets on by itself. Its matrices are not to be read, written or freed before it is done. Products are done in the
    order in which they were begun, so one may use what an earlier one computes. Every other call of the session
    finishes them first. If the handle of a call that fails is dropped, the next call of the session raises the error.
    """

    def __init__(self, session: object, flight: Flight, call: Call, result: Callable[[Call], _R]) -> None:
        self._session = session  # which is in use as long as its calls are
        self._flight, self._call, self._result = flight, call, result
        self._asked = False

    def done(self) -> bool:
        """Return whether the product is over on all ranks, also by an error; ParamError in a fork. Local."""
        if is_fork[0]:  # where nobody gets on with it
            raise ParamError(OF_A_FORK)
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
        call = self._call
        self._flight.await_end(call)
        self._asked = True
        if call.error is not None:
            raise call.error
        return self._result(call)

    @public_call
    def wait_on(self, stream: Any = None) -> None:
        """
        Let what a stream gets from now on wait until the product is over on all ranks. Local.

        It returns when the product has begun; where this rank's part is over by then, perhaps when all are. So kernels
        may follow that use the result, while the program goes on. Whether the product has failed `wait` tells, or the
        next call if the handle is dropped. After a stall, or if a rank is lost, the stream waits for ever. On the host,
        and for a product that goes through memory of the host, this returns when the product is over.

        Parameters
        ----------
        stream : optional
            Of this rank's device: of cupy, of torch, of anything with ``__cuda_stream__``, or an integer handle. By
            default the current ones of cupy and torch.

        Raises
        ------
        ParamError
            If it is no stream.
        DeviceError
            If it cannot wait: a stream of another device, or one that is captured.
        """
        self._flight.let_wait(stream, self._call)

    def __del__(self) -> None:
        if not self._asked:
            self._flight.drop(self._call)

    def __reduce__(self) -> Any:
        raise TypeError("a Handle belongs to its session and process, and cannot be copied or sent: call its wait()")

    def __repr__(self) -> str:
        return f"<Handle: {'done' if self.done() else 'in flight'}>"

    if not TYPE_CHECKING:
        __getattr__ = absent
