"""One call at a time in a session, and what an error that ends one leaves behind: nothing."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from uncut_mpi.errors import ParamError, PeerFailedError, is_agreed, release_frames
from uncut_mpi.instead import bad_call

_P = ParamSpec("_P")
_R = TypeVar("_R")


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


class Exclusive:
    """
    A session serves one call at a time: a second thread inside it is a mistake, not a wait.

    Parameters
    ----------
    lock : threading.RLock
        Held during a call.
    cut_short : bound method
        Told of an error that ends a call and that the other ranks do not share, as an interrupt; not kept alive.

    Attributes
    ----------
    opened : bool
        Whether all ranks are in the call; the gate sets it.
    """

    def __init__(self, lock: threading.RLock, cut_short: Callable[[BaseException], None]) -> None:
        self._lock, self._cut_short = lock, weakref.WeakMethod(cut_short)
        self.opened = self._inside = False

    def __enter__(self) -> None:
        if self._inside or not self._lock.acquire(blocking=False):
            raise ParamError(
                "another thread is inside a call of this session: give every thread a session of its own "
                "(on communicators of their own)"
            )
        self._inside, self.opened = True, False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._inside = False
        if error is None:
            self._lock.release()
            return
        try:
            if not is_agreed(error) and (cut_short := self._cut_short()) is not None:
                cut_short(error)
        finally:
            self._lock.release()
