"""One call at a time in a session."""

from __future__ import annotations

import threading

from uncut_mpi.errors import ParamError


class Exclusive:
    """A session serves one call at a time: a second thread inside it is a mistake, not a wait."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise ParamError(
                "another thread is inside a call of this session: give every thread a session of its own "
                "(on communicators of their own)"
            )

    def __exit__(self, *unused: object) -> None:
        self._lock.release()
