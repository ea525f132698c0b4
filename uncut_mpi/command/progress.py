"""How far a long command is: a bar that moves on a terminal; elsewhere, as under mpiexec, some lines with one."""

from __future__ import annotations

import sys
import time
from typing import Any, Final

from uncut_mpi.command import streams

_WIDTH: Final = 30
_TEXT: Final = 44
_LINES: Final = 10
_REDRAW_S: Final = 0.1


class ProgressBar:
    """
    Progress of counted steps, for one rank to show.

    Parameters
    ----------
    title : str
        What is under way.
    stream : text stream, optional
        Standard error by default, so that a result on standard output stays clean.
    """

    def __init__(self, title: str, stream: Any = None) -> None:
        self._stream, self._title = sys.stderr if stream is None else stream, title
        self._terminal = streams.is_terminal(self._stream)
        self._drawn_s = 0.0
        self._lines = 0

    def show(self, done: int, total: int, what: str) -> None:
        """Say that `done` of `total` steps are done, and what comes next."""
        share = done / total if total else 1.0
        bar = ("#" * round(share * _WIDTH)).ljust(_WIDTH, ".")
        if self._terminal:
            now = time.monotonic()
            if now - self._drawn_s < _REDRAW_S and done < total:
                return
            self._drawn_s = now
            text = what if len(what) <= _TEXT else what[: _TEXT - 1] + "…"
            end = "\n" if done >= total else ""
            streams.put(self._stream, f"\r{self._title} [{bar}] {done}/{total} {text.ljust(_TEXT)}{end}")
        elif share * _LINES >= self._lines:
            self._lines = int(share * _LINES) + 1
            streams.put(self._stream, f"{self._title} [{bar}] {done}/{total} {what}\n")
