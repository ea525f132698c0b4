"""Times on a GPU by events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def by_events(cupy: Any, stream: int, launch: Callable[[], None]) -> Callable[[], float]:
    """Return what issues work on a stream, waits for it, and returns its time (s)."""
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()

    def work() -> float:
        cupy.cuda.runtime.eventRecord(start.ptr, stream)
        launch()
        cupy.cuda.runtime.eventRecord(stop.ptr, stream)
        stop.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, stop)) * 1e-3

    return work
