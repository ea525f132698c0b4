"""Bytes, times and ranks as text for people, and the lines of reports."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

LABEL_WIDTH: Final = 11
"""Of what begins the lines of reports."""


def bytes_text(size: int) -> str:
    """Return a number of bytes with four significant digits in B, kB, MB, GB or TB (powers of 1000)."""
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        # What would be rounded to 1000 of a unit is 1 of the next.
        if size >= 0.99995 * 1000**power:
            return f"{_digits(size / 1000**power)} {unit}"
    return f"{size} B"


def time_text(seconds: float) -> str:
    """Return a time with four significant digits in s, ms or µs."""
    for factor, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * factor >= 0.99995:  # as above
            return f"{_digits(seconds * factor)} {unit}"
    return f"{_digits(seconds * 1e6)} µs"


def _digits(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    return f"{value:.0f}" if value >= 999.95 else f"{value:#.4g}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 3``, ``ranks 0-2`` or ``ranks 0-2, 5`` for ascending rank numbers."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
    return f"rank{'s' if len(ranks) > 1 else ''} {text}"


def line(label: str, content: str) -> str:
    """Return a line of a report."""
    return f"{label:<{LABEL_WIDTH}} {content}"


def labelled(label: str, contents: Sequence[str]) -> list[str]:
    """Return lines of a report, of which the first has the label."""
    return [line("" if number else label, content) for number, content in enumerate(contents)]
