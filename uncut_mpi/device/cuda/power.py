"""What a GPU consumes, from NVML through nvidia-ml-py where that is installed."""

from __future__ import annotations

import contextlib
import functools
from typing import Any


class PowerMeter:
    """
    The energy counter of one GPU, opened at its first use.

    Parameters
    ----------
    uuid : str
        Of the device, as the driver's tools print it.
    """

    def __init__(self, uuid: str) -> None:
        self._uuid = uuid

    def energy_j(self) -> float | None:
        """Return joules since the driver was loaded; None if they cannot be known. Never raises."""
        if self._counter is None:
            return None
        nvml, handle = self._counter
        try:
            return float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) * 1e-3
        except nvml.NVMLError:
            return None

    @functools.cached_property
    def _counter(self) -> tuple[Any, Any] | None:
        """NVML and the handle of the device."""
        return nvml_device(self._uuid)


def nvml_device(uuid: str) -> tuple[Any, Any] | None:
    """Return NVML and its handle of a device, None where there is none: of a MIG instance, or without nvidia-ml-py."""
    try:
        import pynvml
    except ImportError:
        return None
    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlInit()  # counted by NVML, and given back when the process ends
        # By number and compared: asking by UUID is refused in some containers.
        for number in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(number)
            found = pynvml.nvmlDeviceGetUUID(handle)
            if (found.decode() if isinstance(found, bytes) else found) == uuid:
                return pynvml, handle
    return None
