"""One call at a time in a session."""

from __future__ import annotations

import threading

from uncut_mpi.errors import ParamError, PeerFailedError, is_agreed


class Exclusive:
    """
    A session serves one call at a time: a second thread inside it is a mistake, not a wait.

    Attributes
    ----------
    cut_short : bool
        Whether an error that the other ranks do not share has ended a call, as an interrupt does.
    """

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self.cut_short = False

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ParamError(
                "another thread is inside a call of this session: give every thread a session of its own "
                "(on communicators of their own)"
            )

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._lock.release()
        if error is None:
            return
        if not is_agreed(error):
            self.cut_short = True
        # What has its cause elsewhere is raised from here, without the way down to where it met the call.
        if isinstance(error, KeyboardInterrupt):
            raise KeyboardInterrupt("in a call of a session, which other ranks may still be in: leave it") from None
        if isinstance(error, PeerFailedError):
            raise error.with_traceback(None) from error.__cause__
