"""Files that a command writes: checked before any work, complete or not there at all."""

from __future__ import annotations

import itertools
import os
import stat
from collections.abc import Mapping, Sequence

from uncut_mpi.command.streams import write_all
from uncut_mpi.errors import DataFileError, reason
from uncut_mpi.regular import kind_of, status_of
from uncut_mpi.unfinished import UnfinishedFile, naming, replace_file

PATIENCE_S = 30.0
"""How long the reader of a pipe or a terminal may take nothing."""


_WRITTEN = ("output", "timeline", "transfers", "json", "trace", "plot")
"""Flags of all commands for files that are replaced."""


def written_by(arguments: object) -> dict[str, str | None]:
    """Return the files that a command was asked for, by their flags; but for matrices."""
    return {f"--{name}": getattr(arguments, name, None) for name in _WRITTEN}


def check_paths(
    written: Mapping[str, str | None],
    read: Sequence[str | None] = (),
    *,
    elsewhere: Mapping[str, str | None] | None = None,
) -> None:
    """
    Check, before any work, that files could be written, each one, and each another one.

    Parameters
    ----------
    written : mapping of str to (str or None)
        Flags that ask for files, and the files' names.
    read : sequence of str or None
        Files that the command reads, and must not replace.
    elsewhere : mapping of str to (str or None), optional
        As `written`, of files that are checked by other means.

    Raises
    ------
    DataFileError
        If one is an input, a directory or another one of them, or cannot be written, or its directory is missing or
        cannot be written.
    """
    named = [(flag, path) for flag, path in {**written, **(elsewhere or {})}.items() if path is not None]
    for flag, path in written.items():
        if path is None:
            continue
        for name in read:
            if name is not None and not _is_special(path) and is_same(name, path):
                raise DataFileError(f"{flag} {path} would replace {name}, which is read: name another file")
        check_writable(f"{flag} {path}", path)
    for (first, one), (second, other) in itertools.combinations(named, 2):
        if not _is_special(one) and is_same(one, other):
            raise DataFileError(f"{first} {one} and {second} {other} are one file: give them different ones")


def check_writable(what: str, path: str, *, overwrite: bool = True) -> None:
    """
    Check that a file could appear under a name, or that what is there can be written to.

    Else raise DataFileError, which begins with `what`.
    """
    number = stream_number(path)
    try:
        mode = (status_of(path) if number is None else _status_of_stream(number)).st_mode
    except FileNotFoundError:
        mode = 0
    except OSError as error:
        raise DataFileError(f"{what} cannot be written: {reason(error)}") from None
    if stat.S_ISDIR(mode):
        raise DataFileError(f"{what} is a directory: name a file in it")
    if stat.S_ISSOCK(mode) or stat.S_ISBLK(mode):
        raise DataFileError(f"{what} is {kind_of(mode)}: name a file")
    if number is not None or (mode and not stat.S_ISREG(mode)):
        return
    final = os.path.realpath(path)
    parent = os.path.dirname(final)
    if not os.path.isdir(parent):
        raise DataFileError(f"{what} cannot be written: there is no directory {parent}; make it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DataFileError(f"{what} cannot be written: this user may not write into {parent}")
    # Permissions do not tell all: file systems may be read-only, full, or make their files themselves.
    with naming(what, path) as final:
        UnfinishedFile(final, overwrite=overwrite).discard()


def write_file(flag: str, path: str | None, content: bytes) -> None:
    """
    Write a file, complete or not at all, or raise DataFileError; without a path nothing is asked for.

    One that is there is replaced. What is no file, as a device, a pipe, a terminal or a stream of this process
    (``/dev/stdout``), is written to instead. No reader is waited for longer than `PATIENCE_S`.
    """
    if path is None:
        return
    try:
        (_write_stream if _is_special(path) else replace_file)(path, content)
    except OSError as error:
        raise DataFileError(f"{flag} {path} cannot be written: {reason(error)}") from None


def is_same(one: str, other: str) -> bool:
    """Return whether two paths are, or would be, the same file."""
    try:
        return os.path.realpath(one) == os.path.realpath(other) or os.path.samefile(one, other)
    except (OSError, ValueError):
        return False


def stream_number(path: str) -> int | None:
    """Return the number of this process's own stream that a path names, as ``/dev/stdout`` does; None if it is none."""
    own = (f"/proc/{os.getpid()}/fd", f"/proc/{os.getpid()}/task/{os.getpid()}/fd")
    for _ in range(40):  # links, which may go round
        folder, name = os.path.split(os.path.abspath(path))
        if os.path.realpath(folder) in own and name.isdecimal():
            return int(name)
        try:
            path = os.path.join(folder, os.readlink(path))
        except (OSError, ValueError):
            return None
    return None


def _is_special(path: str) -> bool:
    """Whether something is there that is neither a file nor a directory, and must not be replaced by one."""
    if stream_number(path) is not None:
        return True
    try:
        mode = status_of(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def _status_of_stream(number: int) -> os.stat_result:
    try:
        return os.fstat(number)
    except (OSError, OverflowError):
        raise OSError(f"stream {number} is not open") from None


def _write_stream(path: str, content: bytes) -> None:
    number = stream_number(path)
    if number is not None:
        _status_of_stream(number)
        descriptor = os.dup(number)  # at its place: opened anew, a file would be written from its beginning
    else:
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
        except OSError as error:
            if stat.S_ISFIFO(status_of(path).st_mode):
                raise OSError("nobody reads the named pipe; start its reader first") from error
            raise
    try:
        write_all(descriptor, content, PATIENCE_S)
    finally:
        os.close(descriptor)
