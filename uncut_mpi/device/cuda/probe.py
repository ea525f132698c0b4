"""Work on a GPU that is prepared, so that it can be timed on all ranks at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from uncut_mpi.device.cuda.library import import_cupy
from uncut_mpi.device.interface import Timeable


class CudaProbe(Timeable):
    """
    Work on one stream, timed by events.

    Parameters
    ----------
    current : callable
        Takes what is being done, and returns the context in which the device is current.
    stream : int
        Handle of the stream.
    launch : callable
        Issues the work on it.
    times : int
        How many times over.
    free : callable
        Frees what the work needs.
    """

    def __init__(
        self,
        current: Callable[[str], AbstractContextManager[Any]],
        stream: int,
        launch: Callable[[], None],
        times: int,
        free: Callable[[], None],
    ) -> None:
        self._current, self._stream, self._launch, self._times, self._free = current, stream, launch, times, free
        self._cupy = import_cupy()
        try:
            self.mean_seconds(0.0)  # so that no first use of a kernel is timed
        except BaseException:
            self.close()
            raise

    def mean_seconds(self, least_s: float) -> float:
        """See `Timeable.mean_seconds`."""
        events, runtime = self._cupy.cuda, self._cupy.cuda.runtime
        with self._current("timing"):
            start, stop = events.Event(), events.Event()
            total_s, count = 0.0, 0
            while count == 0 or total_s < least_s:
                runtime.eventRecord(start.ptr, self._stream)
                self._launch()
                runtime.eventRecord(stop.ptr, self._stream)
                stop.synchronize()
                total_s += events.get_elapsed_time(start, stop) * 1e-3
                count += self._times
        return total_s / count

    def close(self) -> None:
        """See `Timeable.close`."""
        with self._current("freeing what was timed"):
            self._free()
