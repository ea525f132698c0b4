"""How far a call is, as the command shows it."""

from __future__ import annotations

import io
import itertools
import threading

import pytest

from uncut_mpi.command.progress import Watch


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watched(stream: io.StringIO, looks: int) -> str:
    """Return what is shown of a call that ends after so many looks at how far it is."""
    seen = itertools.count(1)
    enough = threading.Event()

    def progress() -> float:
        number = next(seen)
        if number >= looks:
            enough.set()
        return number / 10

    with Watch("multiplying", progress, stream, first_s=0.0, every_s=0.001):
        assert enough.wait(20)
    return stream.getvalue()


def test_a_terminal_gets_one_line_with_the_time_that_is_left() -> None:
    text = watched(Terminal(), 5)
    assert text.count("\n") == 1
    assert text.endswith("\n")
    lines = [line.strip() for line in text.split("\r")[1:]]
    assert lines[0].startswith("multiplying [###...........................]  10%, ")
    assert all(" so far, about " in line and line.endswith(" left") for line in lines)
    assert max(map(len, text.split("\r"))) < 125


def test_a_file_gets_lines() -> None:
    lines = watched(io.StringIO(), 12).splitlines()
    assert len(lines) >= 11
    assert lines[4].startswith("multiplying [###############...............]  50%, ")
    assert lines[10].startswith("multiplying [##############################] 100%, ")


def test_nothing_is_said_of_a_call_that_is_soon_over_or_has_just_begun() -> None:
    stream = io.StringIO()
    with Watch("multiplying", lambda: 1.0, stream, first_s=100.0):
        pass
    assert stream.getvalue() == ""
    looked = threading.Event()
    with Watch("multiplying", lambda: float(looked.set() or 0), stream, first_s=0.0, every_s=100.0):
        assert looked.wait(20)
    assert stream.getvalue().endswith(" so far, beginning\n")


def test_an_error_passes() -> None:
    with pytest.raises(KeyError), Watch("multiplying", lambda: 0.0, io.StringIO()):
        raise KeyError
