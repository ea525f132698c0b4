"""How far a long command is: a bar that moves on a terminal; elsewhere, as under mpiexec, some lines with one."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from uncut_mpi.command import streams
from uncut_mpi.units import time_text

_WIDTH: Final = 30
_TEXT: Final = 44
_LINES: Final = 10
_REDRAW_S: Final = 0.1
_FIRST_S: Final = 4.0
_TERMINAL_S: Final = 0.5
_ELSEWHERE_S: Final = 60.0


class ProgressBar:
    """Progress of counted steps, for one rank to show on standard error: a result on standard output stays clean."""

    def __init__(self, title: str) -> None:
        self._title, self._stream = title, sys.stderr
        self._terminal = streams.is_terminal(self._stream)
        self._drawn_s, self._lines = 0.0, 0

    def show(self, done: int, total: int, what: str) -> None:
        """Say that `done` of `total` steps are done, and what comes next."""
        share = done / total if total else 1.0
        if self._terminal:
            now = time.monotonic()
            if now - self._drawn_s < _REDRAW_S and done < total:
                return
            self._drawn_s = now
            text = what if len(what) <= _TEXT else what[: _TEXT - 1] + "…"
            end = "\n" if done >= total else ""
            streams.put(self._stream, f"\r{_bar(self._title, share)} {done}/{total} {text.ljust(_TEXT)}{end}")
        elif share * _LINES >= self._lines:
            self._lines = int(share * _LINES) + 1
            streams.put(self._stream, f"{_bar(self._title, share)} {done}/{total} {what}\n")


@contextlib.contextmanager
def watch(title: str, progress: Callable[[], float]) -> Iterator[None]:
    """
    Show on standard error how far one long call is, and what time is left: for one rank around the call.

    Nothing is shown of a call that ends within some seconds. A bar moves on a terminal; elsewhere there is a line a
    minute.

    Parameters
    ----------
    title : str
        What is under way.
    progress : callable
        Returns what part is done, from 0 to 1.
    """
    out, over = sys.stderr, threading.Event()
    terminal = streams.is_terminal(out)

    def show() -> None:
        began, shown, wait_s = time.monotonic(), False, _FIRST_S
        while not over.wait(wait_s):
            wait_s = _TERMINAL_S if terminal else _ELSEWHERE_S
            share = min(1.0, max(0.0, progress()))
            spent_s = time.monotonic() - began
            left = f"about {time_text(spent_s * (1 - share) / share)} left" if share > 0.01 else "beginning"
            text = f"{_bar(title, share)} {share:4.0%}, {time_text(spent_s)} so far, {left}"
            streams.put(out, f"\r{text.ljust(_WIDTH + 2 * _TEXT)}" if terminal else f"{text}\n")
            shown = True
        if shown and terminal:
            streams.put(out, "\n")

    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _bar(title: str, share: float) -> str:
    return f"{title} [{('#' * round(share * _WIDTH)).ljust(_WIDTH, '.')}]"
