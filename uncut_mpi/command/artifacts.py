"""Files that a command writes beside what it prints: complete or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Sequence

from uncut_mpi.errors import DataFileError


def check_path(flag: str, path: str, inputs: Sequence[str | None] = ()) -> None:
    """
    Check, before any work, that a file could be written there.

    Parameters
    ----------
    flag : str
        That asked for it, for the message.
    path : str
        Its name.
    inputs : sequence of str or None
        Files that the command reads, and must not replace.

    Raises
    ------
    DataFileError
        If the path is an input or a directory, or its directory is missing or cannot be written.
    """
    if _is_special(path):
        return
    final = os.path.realpath(path)
    parent = os.path.dirname(final)
    for name in inputs:
        if name is not None and os.path.realpath(name) == final:
            raise DataFileError(f"{flag} {path} would replace {name}, which is read: name another file")
    if os.path.isdir(final):
        raise DataFileError(f"{flag} {path} is a directory: name a file in it")
    if not os.path.isdir(parent):
        raise DataFileError(f"{flag} {path} cannot be written: there is no directory {parent}; make it first")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise DataFileError(f"{flag} {path} cannot be written: this user may not write into {parent}")


def write_file(flag: str, path: str, content: bytes) -> None:
    """
    Write a file, complete or not at all; an existing file is replaced.

    What is no file, as a device, a pipe or a terminal (``/dev/stdout``), is written to instead.

    Raises
    ------
    DataFileError
        If it cannot be written.
    """
    if _is_special(path):
        try:
            with open(path, "wb") as file:
                file.write(content)
        except OSError as error:
            raise DataFileError(f"{flag} {path} cannot be written: {error.strerror}") from None
        return
    final = os.path.realpath(path)
    directory, name = os.path.split(final)
    hidden = os.path.join(directory, f".{name[:200]}.{secrets.token_hex(8)}.part")
    try:
        with open(hidden, "xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(hidden, final)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(hidden)
        raise DataFileError(f"{flag} {path} cannot be written: {error.strerror}") from None


def _is_special(path: str) -> bool:
    """Whether something is there that is neither a file nor a directory, and must not be replaced by one."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)
