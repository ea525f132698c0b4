"""One call at a time in a session."""

from __future__ import annotations

import threading
from collections.abc import Callable

from uncut_mpi.errors import ParamError, PeerFailedError, is_agreed


class Exclusive:
    """
    A session serves one call at a time: a second thread inside it is a mistake, not a wait.

    Parameters
    ----------
    lock : threading.Lock
        Held during a call.
    cut_short : callable
        Told of an error that ends a call and that the other ranks do not share, as an interrupt.

    Attributes
    ----------
    opened : bool
        Whether all ranks are in the call; the gate sets it.
    """

    def __init__(self, lock: threading.Lock, cut_short: Callable[[BaseException], None]) -> None:
        self._lock, self._cut_short = lock, cut_short
        self.opened = False

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ParamError(
                "another thread is inside a call of this session: give every thread a session of its own "
                "(on communicators of their own)"
            )
        self.opened = False

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self._lock.release()
            return
        try:
            if not is_agreed(error):
                self._cut_short(error)
        finally:
            self._lock.release()
        # What has its cause elsewhere is raised from here, without the way down to where it met the call.
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt("in a call of a session") from None
        if isinstance(error, PeerFailedError):
            raise error.with_traceback(None) from error.__cause__
