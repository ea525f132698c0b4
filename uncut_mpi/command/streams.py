"""
Standard output and standard error: the one place where commands write to them.

A stream may be missing, closed, full, without a reader, non-blocking, or of an encoding that lacks a character. What is
lost is said by the status of a command, never by a traceback. Characters that an encoding lacks are replaced.
"""

from __future__ import annotations

import contextlib
import os
import select
import sys
from typing import Any

_STANDARD = (0, 1, 2)

# What a pipe takes at once if it takes anything (POSIX has at least 512; Linux, with 4096, keeps that promise).
_PIPE_BYTES = 4096


def guard() -> None:
    """
    Occupy the descriptors of standard streams that are closed.

    Else the next file or segment that is opened gets the number of one, and what any library prints goes into it.
    """
    for descriptor in _STANDARD:
        try:
            os.fstat(descriptor)
        except OSError:
            # The lowest one that is free is the one that is missing.
            with contextlib.suppress(OSError):
                os.open(os.devnull, os.O_RDWR)


def to_output(text: str) -> str:
    """Write to standard output; return why it could not be done, empty if it was."""
    return put(sys.stdout, text)


def to_errors(text: str) -> str:
    """Write to standard error; return why it could not be done: who cannot be told has the exit status."""
    return put(sys.stderr, text)


def put(stream: Any, text: str) -> str:
    """Write to a text stream and flush it; return why it could not be done, empty if it was."""
    if not text:
        return ""
    if stream is None:
        return "is closed"
    try:
        stream.flush()  # what others wrote comes first
        text = _encodable(stream, text)
        if stream in (sys.__stdout__, sys.__stderr__):
            # Past the buffer, which would keep what could not be written and fail again when the process ends.
            write_all(stream.fileno(), text.encode(stream.encoding, stream.errors))
        else:
            stream.write(text)
            stream.flush()
    except OSError as error:
        return f"cannot be written ({os.strerror(error.errno) if error.errno else error})"
    except ValueError:
        return "is closed"  # io's word for it
    return ""


def is_terminal(stream: Any) -> bool:
    """Return whether a text stream shows what is written to it on a terminal."""
    try:
        return stream is not None and bool(stream.isatty())
    except ValueError:
        return False  # closed


def flush_last() -> None:
    """
    Flush standard output and standard error for the last time.

    What cannot be flushed is dropped: Python would try again, fail, and end with a status of its own.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError):
                empty = os.open(os.devnull, os.O_WRONLY)
                os.dup2(empty, stream.fileno())
                os.close(empty)


def _encodable(stream: Any, text: str) -> str:
    """Return the text with a replacement for every character that the stream's encoding lacks."""
    encoding = getattr(stream, "encoding", None)
    if not encoding:
        return text  # a stream of text alone
    try:
        text.encode(encoding, getattr(stream, "errors", None) or "strict")
    except UnicodeError:
        return text.encode(encoding, "replace").decode(encoding)
    return text


def write_all(descriptor: int, data: bytes, patience_s: float | None = None) -> None:
    """Write to a file, a pipe or a terminal, waiting or not; OSError if its reader takes nothing for so long."""
    left = memoryview(data)
    ready = select.poll()
    ready.register(descriptor, select.POLLOUT)
    while left:
        if not ready.poll(None if patience_s is None else 1e3 * patience_s):
            raise OSError(f"its reader took nothing for {patience_s:g} s")
        left = left[os.write(descriptor, left[:_PIPE_BYTES]) :]
