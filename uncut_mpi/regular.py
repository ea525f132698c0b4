"""Opening files of the right kind: a path is looked at before anything can wait for it, and again once it is open."""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

_KINDS: Final = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def kind_of(mode: int) -> str:
    """Return what a mode of `os.stat` is of, in words; empty for a regular file and a directory."""
    return next((words for test, words in _KINDS if test(mode)), "")


def status_of(path: str | os.PathLike[str]) -> os.stat_result:
    """
    Return `os.stat` of a path; TypeError if it is none.

    OSError also where Python has a ValueError: for a NUL, or a character that names of files cannot have.
    """
    try:
        return os.stat(os.fspath(path))  # of a number it would be the status of a stream
    except ValueError:
        raise OSError(errno.EINVAL, "its name has a character that no file can have") from None


def open_regular(path: str | os.PathLike[str], flags: int = os.O_RDONLY) -> int:
    """
    Return a descriptor of a regular file; never waits for another process.

    Parameters
    ----------
    path : str or path
        The file. A symbolic link is followed.
    flags : int
        As `os.open` takes them.

    Raises
    ------
    OSError
        If it cannot be opened, or is something else; `uncut_mpi.errors.reason` says which.
    """
    try:
        _check_kind(status_of(path).st_mode)
    except FileNotFoundError:
        if not flags & os.O_CREAT:
            raise
    # What has been put in its place meanwhile is not waited for, and found out below.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    try:
        _check_kind(os.fstat(descriptor).st_mode)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: str | os.PathLike[str], most_bytes: int) -> bytes:
    """
    Return what a regular file holds; never waits for another process.

    OSError as of `open_regular`, and if it holds more than `most_bytes`.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        content = file.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise OSError(errno.EFBIG, f"it holds more than {most_bytes} bytes")
    return content


def _check_kind(mode: int) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if kind := kind_of(mode):
        raise OSError(errno.EINVAL, f"it is {kind}, not a regular file")
