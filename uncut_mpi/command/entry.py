"""How every command begins and ends: guarded streams, its files before its report, one line for an error, a status."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

from uncut_mpi.command import streams
from uncut_mpi.command.flags import HelpRequested
from uncut_mpi.errors import INTERRUPTED, CapacityError, DataFileError, UncutError

Arguments = TypeVar("Arguments")

Say = Callable[[str], None]
"""Keeps a part of a command's report. It is printed at the end, when every file is written, also after an error."""

FAILED = 2
"""Exit status of a command that an error ended, or whose report could not be written."""


def run_alone(
    name: str,
    parse: Callable[[Sequence[str]], Arguments],
    run: Callable[[Arguments, Say], None],
    argv: Sequence[str] | None,
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
    argv : sequence of str or None
        Arguments; those of the process by default.
    """
    streams.guard()
    said: list[str] = []
    error: UncutError | None = None
    try:
        try:
            run(parse(sys.argv[1:] if argv is None else argv), said.append)
        except HelpRequested as asked:
            said.append(asked.text)
        except UncutError as found:
            error = found
        except MemoryError as found:
            error = CapacityError(f"the memory of this host is too small: {found or 'no more could be had'}")
        return conclude(name, said, error)
    except KeyboardInterrupt:
        streams.to_errors(f"{name}: interrupted\n")
        streams.settle()
        return INTERRUPTED


def conclude(name: str, said: Sequence[str], error: UncutError | None = None) -> int:
    """
    Print a report and, below it, the error that ended the command; return the status, 0 or `FAILED`.

    A report that cannot be written is an error, too.
    """
    errors = [error] if error is not None else []
    if lost := streams.to_output("".join(said)):
        errors.append(DataFileError(f"standard output {lost}: what goes there is lost (files are written before it)"))
    for one in errors:
        streams.to_errors(f"{name}: {type(one).__name__}: {one}\n")
    streams.settle()
    return FAILED if errors else 0
