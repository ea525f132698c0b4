"""How far a long command is: a bar that moves on a terminal; elsewhere, as under mpiexec, some lines with one."""

from __future__ import annotations

import time
from typing import Final, TextIO

_WIDTH: Final = 30
_TEXT: Final = 44
_LINES: Final = 10
_REDRAW_S: Final = 0.1


class ProgressBar:
    """
    Progress of counted steps, for one rank to show.

    Parameters
    ----------
    stream : text stream
        Usually standard error, so that a result on standard output stays clean.
    title : str
        What is under way.
    """

    def __init__(self, stream: TextIO, title: str) -> None:
        self._stream, self._title = stream, title
        self._terminal = stream.isatty()
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
            self._stream.write(f"\r{self._title} [{bar}] {done}/{total} {text.ljust(_TEXT)}")
            if done >= total:
                self._stream.write("\n")
        elif share * _LINES >= self._lines:
            self._lines = int(share * _LINES) + 1
            self._stream.write(f"{self._title} [{bar}] {done}/{total} {what}\n")
        self._stream.flush()
