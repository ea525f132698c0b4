"""How every command begins and ends: guarded streams, its files before its report, one line for an error, a status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from uncut_mpi.command import streams
from uncut_mpi.command.artifacts import stream_number, written_by
from uncut_mpi.errors import INTERRUPTED, CapacityError, DataFileError, UncutError

Arguments = TypeVar("Arguments")

Say = Callable[[str], None]
"""Keeps a part of a command's report. It is printed at the end, when every file is written, also after an error."""


FAILED = 2
"""Exit status of a command that an error ended, or whose report could not be written."""


class HelpRequested(Exception):
    """
    The command line asked for help or the version; carries the text, for one rank to print.

    Attributes
    ----------
    text : str
        The answer, ending in a newline.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text


def run_alone(
    name: str,
    parse: Callable[[Sequence[str]], Arguments],
    run: Callable[[Arguments, Say], None],
    argv: Sequence[str] | None = None,
    *,
    speaks: bool = True,
) -> int:
    """
    Run a command of one process and return its exit status: 0, 2 after an error, or 130 after an interrupt.

    Parameters
    ----------
    name : str
        What its errors begin with.
    parse : callable
        Makes the arguments of the words.
    run : callable
        Does the work. It says what it found by its second argument.
    argv : sequence of str, optional
        Arguments; those of the process by default.
    speaks : bool, default True
        Whether this process, which may be one of several that do the same, says anything.
    """
    streams.guard()
    said: list[str] = []
    error: UncutError | None = None
    arguments: Arguments | None = None
    try:
        try:
            arguments = parse(sys.argv[1:] if argv is None else argv)
            run(arguments, said.append)
        except HelpRequested as asked:
            said.append(asked.text)
        except UncutError as found:
            error = found
        except MemoryError as found:
            error = CapacityError(f"the memory of this host is too small: {found or 'no more could be had'}")
        if not speaks:
            return FAILED if error is not None else 0
        return conclude(name, said, error, aside=takes_output(arguments))
    except KeyboardInterrupt:
        streams.to_errors(f"{name}: interrupted\n")
        streams.flush_last()
        return INTERRUPTED


def takes_output(arguments: object) -> bool:
    """Return whether a file of a command goes to standard output; its report goes to standard error then."""
    return any(path is not None and stream_number(path) == 1 for path in written_by(arguments).values())


def tell(said: Sequence[str], *, aside: bool) -> str:
    """Print a report on standard output, aside on standard error; return what is lost and why, empty if nothing is."""
    lost = (streams.to_errors if aside else streams.to_output)("".join(said))
    return lost and f"standard {'error' if aside else 'output'} {lost}"


def conclude(name: str, said: Sequence[str], error: UncutError | None = None, *, aside: bool = False) -> int:
    """
    Print a report as `tell` and, below it, the error that ended the command; return the status, 0 or `FAILED`.

    A report that cannot be written is an error, too.
    """
    errors = [error] if error is not None else []
    if lost := tell(said, aside=aside):
        errors.append(DataFileError(f"{lost}: what goes there is lost (files are written before it)"))
    for one in errors:
        streams.to_errors(f"{name}: {type(one).__name__}: {one}\n")
    streams.flush_last()
    return FAILED if errors else 0
