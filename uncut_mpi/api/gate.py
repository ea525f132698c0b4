"""
The gate that every collective call of a session passes, one at a time, and the closing barrier of a product.

A call opens with one small allgather of a record per rank. It says which call it is, whether the rank is ready and
whether it has an error, and has a digest of the arguments. No call does anything with other ranks before. So whatever
two ranks call, they meet here and see it. Agreement on the arguments costs no message of its own. What follows inside a
call is in lockstep. An error that ends a call leaves nothing behind (`public_call`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NoReturn, ParamSpec, TypeVar, cast

import numpy as np

from uncut_mpi import _native
from uncut_mpi.api.control import Control
from uncut_mpi.errors import (
    ParamError,
    PeerFailedError,
    RankMismatchError,
    StallError,
    Wire,
    agreed,
    is_agreed,
    release_frames,
)
from uncut_mpi.instead import bad_call
from uncut_mpi.model.arguments import shown, type_text
from uncut_mpi.spmd import agreement, meetings
from uncut_mpi.spmd.group import Group
from uncut_mpi.spmd.runtime import is_fork, require_mpi
from uncut_mpi.spmd.turns import DeviceTurns
from uncut_mpi.units import name_ranks

if TYPE_CHECKING:
    from uncut_mpi.api.binding import Binding
    from uncut_mpi.api.flight import Flight
    from uncut_mpi.api.request import Request
    from uncut_mpi.device.interface import Outcome

_P = ParamSpec("_P")
_R = TypeVar("_R")

_OVER_WHEN_OPEN: Final = "barrier", "agree", "together"
"""Calls in which ranks do nothing together but open them."""

Stage = _native.Passage.Stage
"""How far a product has got: ``OUTSIDE``, ``OPENING``, ``TAKING``, ``RUNNING``, ``ENDED``, ``CLOSING``, ``OVER``."""

OF_A_FORK: Final = (
    "this process is a fork of the one that made the session: make calls there; a fork may do what needs neither "
    "sessions nor MPI"
)

CLOSE = "close"
"""The call after which a rank makes no other."""


def _nothing(*unused: object) -> None:
    """Do nothing."""


def call_text(call: str, asked: Mapping[str, object]) -> str:
    """Return a call as its caller could write it."""
    return f"{call}({', '.join(f'{name}={value}' for name, value in asked.items())})"


class Gate:
    """
    The opening of a session's calls and the closing of its products, on buffers kept for all calls.

    Parameters
    ----------
    turns : DeviceTurns
        Told when this rank begins a call, so that those who wait for it can name it.
    control : Control
        Where the ranks meet, and see that a rank gets on or has failed.
    flight : Flight
        The calls in flight, which others finish first.
    arrival_timeout_s : float or None
        How long to wait for the others to begin a call.

    Attributes
    ----------
    closed : bool
        Whether the session is closed.
    broken : bool
        Whether the ranks are not in one call any more, or a call ended with tasks in flight: no
        collective call is possible any more.
    left : bool
        Whether a rank has left the session, this one or another: no call is possible either, but unless it
        is broken too nothing is in flight.
    why : str
        Why no call is possible, as an error says it.
    on_close : callable
        Closes the session on this rank; collective.
    inside, opened : bool
        Whether this rank is in a call, and whether all ranks are in it.
    since_s : float
        When its last call began (s, of the monotonic clock).
    """

    def __init__(
        self, group: Group, turns: DeviceTurns, control: Control, flight: Flight, arrival_timeout_s: float | None
    ) -> None:
        self._group, self._turns, self._flight = group, turns, flight
        self._arrival_timeout_s = arrival_timeout_s
        self._missing, self._progress = turns.missing, control.board.words.tobytes  # changes while a rank gets on
        self._exchange, self._verdicts, self._abort = control.exchange, control.verdicts, control.board.fail
        self._passage = _native.Passage(control.exchange.meeting, control.verdicts.meeting, turns.turn)
        self._spin_s = group.spin_s
        group.check_left = self._check_left
        self._busy = threading.RLock()  # which an interrupt may leave taken by this thread
        self.inside = self.opened = False
        self.since_s = time.monotonic()
        self.closed = self.broken = self.left = False
        self.why = "an earlier call of this session did not end; its devices may still be at work: end the program"
        self._mpi_is_gone = group.is_gone
        self.on_close: Callable[[], None] = _nothing
        self.interrupted = ""  # by what the wait for a call to open has ended, which the others may make
        self.epoch = 0  # of what runs, or of the call that was opened last

    @property
    def over(self) -> bool:
        """Whether this process can make no call of the session any more."""
        return self.closed or self.broken or self.left or is_fork[0]

    def let_go(self) -> None:
        """Drop the memory that ranks share; no call is possible any more. Not collective."""
        self.closed = True
        self.on_close = _nothing  # which refers to this gate
        del self._exchange, self._verdicts, self._progress, self._abort, self._passage

    def exclusive(self) -> Gate:
        """
        Return the context in which a thread makes one call: a second one inside is a mistake, not a wait. Local.

        Raises
        ------
        ParamError
            If no call can be made any more, another thread is in one, or this process is a fork of the session's.
        TopologyError
            If MPI is finalised.
        """
        # Part of every call, so all that is mostly not the case is asked at once.
        if self.closed or self.broken or self.left or is_fork[0] or self._mpi_is_gone():
            self._refuse_all()
        return self

    def __enter__(self) -> None:
        if self.inside or not self._busy.acquire(blocking=False):
            raise ParamError(
                "another thread is inside a call of this session: give every thread a session of its own "
                "(on communicators of their own)"
            )
        self.inside, self.opened = True, False
        self.since_s = time.monotonic()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.inside = False
        try:
            if error is not None and not is_agreed(error):
                self._cut_short(error)
        finally:
            self._busy.release()

    def _refuse_all(self) -> None:
        if self.closed:
            raise ParamError("the session is closed: make a new one")
        if is_fork[0]:
            raise ParamError(OF_A_FORK)
        if self.broken or self.left:
            raise ParamError(self.why)
        require_mpi()

    def leave(self, reason: str) -> None:
        """
        Make no call any more, and tell the ranks that wait for this one, now or later. Local.

        Nothing happens in a fork, after the end, and while another thread is in a call.

        Parameters
        ----------
        reason : str
            By what this rank leaves, as the name of an error's type.
        """
        if self.over or not self._busy.acquire(blocking=False):
            return
        try:
            self._leave(reason, broken=False)
        finally:
            self._busy.release()

    def _leave(self, reason: str, *, broken: bool) -> None:
        self._note_left(f"this rank left the session by {reason}", broken=broken)
        self._exchange.leave(reason)
        if not self._flight.calls:  # else they get on, and end as ever
            self._verdicts.leave(reason)

    def _cut_short(self, error: BaseException) -> None:
        """
        End the session if an error of this rank alone has ended a call that all had opened.

        The others are in the middle of it, and would wait for what this rank does not do any more. Before a call has
        opened nothing has begun, and the wait for that goes on when this rank makes the same call again (`_again`).
        """
        if self.over:
            return
        if self._exchange.pending:
            self.interrupted = type(error).__name__
        elif self.opened:
            self._abort(self.epoch)
            try:
                self._flight.drain()  # earlier calls, of which the others need this rank's part
            finally:
                self._leave(type(error).__name__, broken=True)
                self._turns.release()  # where the interrupt came just before that

    def end_in_flight(self, epoch: int, error: BaseException) -> None:
        """End the session if an error of this rank alone has ended a call in flight, of this epoch. Local."""
        if not self.over:
            self._abort(epoch)
            self._leave(type(error).__name__, broken=True)
            self._verdicts.leave(type(error).__name__)

    def _note_left(self, why: str, *, broken: bool) -> None:
        self.left, self.why = True, f"{why}; make a new session, on all ranks"
        self.broken |= broken

    def _check_left(self) -> None:
        try:
            for one in (self._exchange, self._verdicts):
                one.check_left("waiting for other ranks")
        except (PeerFailedError, StallError) as error:
            self._note_left(str(error), broken=True)
            raise

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[Callable[..., None]]:
        """
        Make one call, in a block that converts its arguments before it opens it. Collective.

        Yields
        ------
        callable
            Opens the call; takes by their names what ranks are to compare. An error before that is raised on all ranks,
            as those of `open`.
        """
        begun = False

        def open_with(**asked: object) -> None:
            nonlocal begun
            begun = True
            self.open(name, lambda: asked)

        with self.exclusive():
            try:
                yield open_with
            except Exception as error:
                if not begun:
                    self.fail(name, error)
                raise

    def open(
        self,
        call: str,
        asked: Callable[[], Mapping[str, object]] = dict,
        digest: bytes | None = None,
        *,
        epoch: int = 0,
        flags: int = meetings.READY,
        error: BaseException | None = None,
        waits_for_ever: bool = False,
        follows: bool = False,
        begun: bool = False,
    ) -> int:
        """
        Open a call, when none is in flight; return `READY` if every rank is, and `NEWS` where any has some. Collective.

        Parameters
        ----------
        asked : callable, optional
            Returns the arguments by their names, which only an error needs where there is a digest.
        digest : bytes, optional
            Of the arguments (16); by default of the texts of what `asked` returns.
        error : BaseException, optional
            What this rank has found wrong so far.
        waits_for_ever : bool, default False
            Do without the deadline: for calls in which ranks await what others do on their own.
        follows : bool, default False
            Leave earlier calls in flight.
        begun : bool, default False
            This rank is in the meeting already, by `go`.

        Raises
        ------
        RankMismatchError
            If ranks make different calls, or pass different arguments. If one of them closes the session,
            all do: a rank that has closed it makes no other call that the rest could meet.
        UncutError
            Any rank's error, on all.
        StallError
            If a rank does not begin a call in the time allowed; names it. The session is broken then.
        PeerFailedError
            If a rank has left the session by an error of its own; names it. The session has ended then.
        """
        if digest is None:
            digest = agreement.digest_of(call_text(call, asked()).encode("utf-8", "surrogatepass")).tobytes()
        if type(error) is ParamError and call not in _OVER_WHEN_OPEN:  # where it is of what the program does
            error.args = (f"{call}: {error}",)
        flight = self._flight
        if flight.calls and not follows:
            flight.drain()
        if flight.unheard and call != CLOSE:
            error = error or flight.unheard_error()
        patience_s = None if waits_for_ever else self._arrival_timeout_s
        outcome, status = self._passage.outcome if begun else None, error is not None
        before = self._exchange.meeting.number - begun
        try:
            if self.interrupted:
                outcome = self._again((call, digest, epoch, flags, status), patience_s)
            if outcome is None:
                self.epoch = epoch
                self._exchange.fill(call, digest, epoch, flags=flags, status=status)
                self._turns.arrive()
            records = self._exchange.exchange(call, patience_s, self._missing, outcome)
        except (StallError, PeerFailedError) as missing:
            self._end_by(missing, broken=False)
            raise
        except BaseException:  # an interrupt may come when all have met
            self.opened = self._exchange.meeting.number > before and not self._exchange.pending
            raise
        self.opened = True
        if error is None and self._exchange.unanimous:
            return flags
        same = self._exchange.all_same()
        if not same and (records["call"] != records["call"][0]).any():
            self._refuse([name.decode() for name in records["call"].tolist()], error)
        if records["status"].any():
            agreement.collective_result(self._group, error, call_text(call, asked()))
        if not same:
            agreement.raise_mismatch(self._group, records["digest"].copy(), asked)
        told = records["flags"]
        return int(np.bitwise_and.reduce(told) & meetings.READY | np.bitwise_or.reduce(told) & meetings.NEWS)

    def go(
        self, request: Request, binding: Binding, epoch: int, settle: Callable[[], object], timeout_s: float
    ) -> Outcome | None:
        """
        Open a product that is bound here, take the devices, run it and close it: as far as all is as usual. Collective.

        How far it got `stage` tells, and who calls this goes on from there.

        Parameters
        ----------
        settle : callable
            Awaits what is to be done before the ranks meet.
        timeout_s : float
            Of the run.

        Returns
        -------
        Outcome or None
            Of the run, if it is over.
        """
        self.epoch = epoch
        self._exchange.fill(request.call, binding.mixed, epoch, flags=meetings.READY, status=0)
        passage, executable, (alpha, beta) = self._passage, binding.executable, request.scalars
        self.opened = True  # too early rather than too late, for an interrupt
        try:
            done = passage.go(settle, executable.runner, alpha, beta, epoch, timeout_s, self._spin_s)
        except BaseException as error:
            self._turns.release()
            if passage.stage is not Stage.OUTSIDE:
                with executable.running:
                    raise
            self.opened = False
            if not isinstance(error, Exception):  # else it comes again, and the other ranks are told
                raise
            return None
        stage = passage.stage
        if stage is Stage.OUTSIDE or stage is Stage.OVER:
            self.opened = False
        elif stage is Stage.CLOSING:
            self._verdicts.begun(passage.outcome)
        return cast("Outcome | None", done)

    @property
    def stage(self) -> Stage:
        """How far `go` got with its product, or has got."""
        return self._passage.stage

    def _again(self, asked: tuple[str, bytes, int, int, bool], patience_s: float | None) -> int | None:
        """
        Return what the meeting has come to that an interrupt has ended here, for the same call; None for the next one.

        Raises
        ------
        ParamError
            If it is another call, and what the others make needs this rank, which has left the session then.
        """
        if self._exchange.has(*asked):
            self.interrupted = ""
            return 0
        name = self._exchange.mine["call"].item().decode()
        self._exchange.exchange(name, patience_s, self._missing, 0)
        reason, self.interrupted = self.interrupted, ""
        if self._exchange.unanimous and name in _OVER_WHEN_OPEN:
            return None
        self._abort(self.epoch)
        self._leave(f"{reason} in {name}", broken=True)
        raise ParamError(self.why)

    def fail(self, call: str, error: Exception) -> NoReturn:
        """Open a call that this rank cannot make. Collective; raises its error, or what others say, on all ranks."""
        self.open(call, error=error)
        raise error  # never reached: the gate raises it on all ranks

    @contextlib.contextmanager
    def together(self, what: object) -> Iterator[None]:
        """See `Session.together`."""
        self.exclusive()  # refuses at once where no call is possible
        error: BaseException | None = None
        try:
            yield
        except BaseException as caught:  # also an interrupt: the other ranks must not wait for this one
            if self.closed or self.broken or self.left:
                raise
            error = caught
        try:
            with self.exclusive():
                if not isinstance(what, str):
                    wrong = ParamError(f"what = {shown(what)} is {type_text(what)}: pass what is done, as a text")
                    error, what = error or wrong, "together()"
                self.open("together", lambda: {"what": what}, error=error, waits_for_ever=True)
        finally:
            del error  # it has left this frame

    def tell(self, error: BaseException | None) -> bool:
        """Begin to close a product, as `Verdicts.tell`. Local."""
        return self.broken or self._verdicts.tell(error)

    def close(self, error: BaseException | None, timeout_s: float) -> tuple[list[Wire | None], bool] | None:
        """Close a product, as `Verdicts.judge`; wait only while the others get on. Collective."""
        try:
            return self._verdicts.judge(error, timeout_s, self._progress)
        except (StallError, PeerFailedError) as missing:
            self._end_by(missing, broken=True)
            if not is_agreed(missing):
                self._verdicts.leave()
            raise

    def _end_by(self, error: StallError | PeerFailedError, *, broken: bool) -> None:
        """
        End the session since ranks did not meet; what runs by then, if a call has opened, is in flight.

        What another rank has told all (`CallExchange.check_left`) this one does not tell again.
        """
        if is_agreed(error):
            self._note_left(str(error), broken=broken or isinstance(error, StallError))
        else:
            self.broken = True
            self._exchange.leave()

    def _refuse(self, calls: list[str], error: BaseException | None) -> None:
        who = ", ".join(
            f"{name_ranks([rank for rank, call in enumerate(calls) if call == name])} called {name}"
            for name in dict.fromkeys(calls)
        )
        ended = ""
        if CLOSE in calls:
            self.on_close()
            ended = "; the session is closed now"
        raise agreed(
            RankMismatchError(
                f"{who}: all ranks of a session have to make the same collective calls in the same order{ended}"
            )
        ) from error


def public_call(method: Callable[_P, _R]) -> Callable[_P, _R]:
    """
    Return a method of what callers hold whose errors refer to nothing that it worked on, its arguments included.

    Who keeps an error keeps neither memory of devices nor a session that others wait for.
    """

    @functools.wraps(method)
    def called(*arguments: _P.args, **named: _P.kwargs) -> _R:
        try:
            return method(*arguments, **named)
        except BaseException as error:
            if wrong := bad_call(method, named, error):
                error.args = (wrong,)
            del arguments, named
            end_call(error)
            raise

    return called


def end_call(error: BaseException) -> None:
    """
    Let an error that has ended a call refer to nothing that the call worked on; its own frame does so with arguments.

    What has its cause elsewhere is raised from here, without the way down to where it met the call.
    """
    release_frames(error)
    try:
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt("in a call of a session") from None
        if isinstance(error, PeerFailedError):
            raise error.with_traceback(None) from error.__cause__
    finally:
        del error
