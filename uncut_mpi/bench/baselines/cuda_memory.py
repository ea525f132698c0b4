"""Matrices of a task for libraries that take addresses: page-locked host memory, and device memory of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from uncut_mpi.bench.baselines.library import Unsupported
from uncut_mpi.errors import reason

_MEMCPY_DEFAULT = 4
_ALREADY_REGISTERED = 712


class CudaMemory:
    """
    What was allocated and page-locked for one task.

    Parameters
    ----------
    runtime : module
        cupy's runtime.
    """

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._allocated: list[tuple[int, int]] = []
        self._pinned: list[int] = []

    def pin(self, matrix: np.ndarray) -> int:
        """Page-lock a matrix's memory for all devices and return its address."""
        address = int(matrix.__array_interface__["data"][0])
        if matrix.nbytes:
            try:
                self._runtime.hostRegister(address, matrix.nbytes, 1)
            except self._runtime.CUDARuntimeError as error:
                if error.status != _ALREADY_REGISTERED:
                    raise
            else:
                self._pinned.append(address)
        return address

    def allocate(self, device: int, nbytes: int) -> int:
        """Return new memory of a device."""
        self._runtime.setDevice(device)
        try:
            address = int(self._runtime.malloc(max(1, nbytes)))
        except self._runtime.CUDARuntimeError as error:
            raise Unsupported(f"GPU {device} has no {nbytes} bytes left: {reason(error)}") from None
        self._allocated.append((device, address))
        return address

    def copy(self, device: int, destination: int, source: int, nbytes: int) -> None:
        """Copy between any two places, on the default stream of a device; returns at once."""
        self._runtime.setDevice(device)
        if nbytes:
            self._runtime.memcpyAsync(destination, source, nbytes, _MEMCPY_DEFAULT, 0)

    def use(self, device: int) -> None:
        """Make a device current."""
        self._runtime.setDevice(device)

    def finish(self, device: int) -> None:
        """Make a device current and wait until its streams have done everything."""
        self._runtime.setDevice(device)
        self._runtime.deviceSynchronize()

    def close(self) -> None:
        """Free everything."""
        for device, address in self._allocated:
            self._runtime.setDevice(device)
            self._runtime.free(address)
        for address in self._pinned:
            self._runtime.hostUnregister(address)
        self._allocated, self._pinned = [], []
