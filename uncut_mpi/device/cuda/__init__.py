"""The CUDA backend: the only user of cupy, which is imported when a backend is made and not before."""

from __future__ import annotations

from uncut_mpi.device.cuda.backend import CudaBackend
from uncut_mpi.device.cuda.library import visible_devices

__all__ = ["CudaBackend", "visible_devices"]
