"""What the host backend asks of the machine it is on."""

from __future__ import annotations

import contextlib
import os
import pathlib
import platform
import threading
from collections.abc import Iterator

import threadpoolctl  # type: ignore[import-untyped]

_BLAS_NAMES = {"openblas": "OpenBLAS", "mkl": "MKL", "blis": "BLIS", "flexiblas": "FlexiBLAS"}


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

    The number is a setting of the whole process. One thread of it at a time sets it, and the same thread puts it back
    (threadpoolctl ignores any other). A second session that runs meanwhile computes under the first one's bound.
    """

    _turn = threading.Lock()

    def __init__(self, num_threads: int) -> None:
        self._libraries = threadpoolctl.ThreadpoolController().select(user_api="blas")
        # A lower number that the user set (OMP_NUM_THREADS, ...) stands.
        current = self._libraries.info()
        self.num_threads: int = max(1, min([num_threads, *(library["num_threads"] for library in current)]))
        self._found = current
        self._limits = any(library["num_threads"] > self.num_threads for library in current)

    @property
    def name(self) -> str:
        """Name and version of the BLAS, as ``OpenBLAS 0.3.31``; ``unknown`` where threadpoolctl finds none."""
        for library in self._found:
            kind = str(library["internal_api"])
            return f"{_BLAS_NAMES.get(kind, kind)} {library['version'] or ''}".rstrip()
        return "unknown"

    @contextlib.contextmanager
    def limited(self) -> Iterator[None]:
        """Hold the limit for the length of a ``with`` block, unless there were no more threads from the start."""
        if not self._limits or not self._turn.acquire(blocking=False):
            yield
            return
        try:
            with self._libraries.limit(limits=self.num_threads):
                yield
        finally:
            self._turn.release()
