"""What the host backend asks of the machine it is on."""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import threading
from collections.abc import Iterator

import threadpoolctl  # type: ignore[import-untyped]


def processor_name() -> str:
    """Return the model name of the first processor."""
    with contextlib.suppress(OSError):
        for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    return platform.machine()


def usable_cores() -> int:
    """Return the number of cores this process may run on."""
    return len(os.sched_getaffinity(0))


class BlasThreads:
    """
    Bounds the threads of numpy's BLAS while bodies run.

    The number is a setting of the whole process. One thread of it at a time sets it, and the same
    thread puts it back (threadpoolctl ignores any other); a second session that runs meanwhile
    computes under the first one's bound.
    """

    _turn = threading.Lock()

    def __init__(self, num_threads: int) -> None:
        self._libraries = threadpoolctl.ThreadpoolController().select(user_api="blas")
        # A lower number that the user set (OMP_NUM_THREADS, ...) stands.
        current = [library["num_threads"] for library in self._libraries.info()]
        self.num_threads: int = max(1, min([num_threads, *current]))

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Hold the bound for the length of a ``with`` block."""
        if not self._turn.acquire(blocking=False):
            yield
            return
        try:
            with self._libraries.limit(limits=self.num_threads):
                yield
        finally:
            self._turn.release()
