"""What a GPU consumes, from NVML through nvidia-ml-py where that is installed."""

from __future__ import annotations

import threading
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
        self._opening = threading.Lock()
        self._opened = False
        self._nvml: Any = None
        self._handle: Any = None

    def energy_j(self) -> float | None:
        """Return joules since the driver was loaded; None if they cannot be known. Never raises."""
        with self._opening:
            if not self._opened:
                self._opened = True
                self._open()
        if self._nvml is None:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)) * 1e-3
        except self._nvml.NVMLError:
            return None

    def _open(self) -> None:
        try:
            import pynvml
        except ImportError:
            return
        try:
            pynvml.nvmlInit()  # counted by NVML, and given back when the process ends
            # By number and compared: asking by UUID is refused in some containers.
            for number in range(pynvml.nvmlDeviceGetCount()):
                handle = pynvml.nvmlDeviceGetHandleByIndex(number)
                found = pynvml.nvmlDeviceGetUUID(handle)
                if (found.decode() if isinstance(found, bytes) else found) == self._uuid:
                    self._handle, self._nvml = handle, pynvml
                    return
        except pynvml.NVMLError:
            return
