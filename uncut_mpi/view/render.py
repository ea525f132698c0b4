"""The picture that a file name asks for."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Final

from uncut_mpi.errors import ParamError
from uncut_mpi.view.figure import draw_timelines, import_figure
from uncut_mpi.view.page import to_page
from uncut_mpi.view.parts import title_of
from uncut_mpi.view.perfetto import to_perfetto
from uncut_mpi.view.text import to_text
from uncut_mpi.view.timeline import Timeline

SUFFIXES: Final = (".html", ".json", ".png", ".txt")
_TEXT_WIDTH: Final = 160


def check_suffix(path: str) -> None:
    """
    Check that a file name says which picture is wanted.

    Raises
    ------
    ParamError
        If the name ends otherwise than in `SUFFIXES`.
    """
    if pathlib.PurePath(path).suffix not in SUFFIXES:
        raise ParamError(
            f"{path} does not say which picture is wanted: let it end in .html (a page for any browser), "
            ".json (a trace for ui.perfetto.dev), .png or .txt"
        )


def check_drawable(path: str) -> None:
    """
    Check, before any work, that the picture of that name could be drawn here.

    Raises
    ------
    ParamError
        As `check_suffix`, or if matplotlib is needed and not installed.
    """
    check_suffix(path)
    if pathlib.PurePath(path).suffix == ".png":
        import_figure(", or write text (.txt) or a trace (.json)")


def render(path: str, timelines: Sequence[Timeline]) -> bytes:
    """
    Return the contents of a file with timelines, one below the other.

    Parameters
    ----------
    path : str
        Its name, which says what to make: see `check_drawable`, which raises the same errors.
    timelines : sequence of Timeline
        At least one; on a page all of one schedule.
    """
    check_suffix(path)
    suffix = pathlib.PurePath(path).suffix
    if suffix == ".png":
        return draw_timelines(timelines)
    if suffix == ".html":
        return to_page(timelines).encode()
    if suffix == ".json":
        return to_perfetto(timelines).encode()
    return f"{title_of(timelines[0].schedule, timelines[0].machine)}\n{to_text(timelines, _TEXT_WIDTH)}".encode()
