"""Reaching cupy, the driver and cuBLAS, with errors that say what to install."""

from __future__ import annotations

import contextlib
import functools
import pathlib
import re
from typing import Any

from uncut_mpi import _native
from uncut_mpi.errors import CapacityError, DeviceError, reason

OUT_OF_MEMORY = 2
_INSTALL = "install it with: python -m pip install cupy-cuda12x (CUDA 12) or cupy-cuda13x (CUDA 13)"


@functools.cache
def import_cupy() -> Any:
    """
    Return the module cupy.

    Raises
    ------
    DeviceError
        If cupy cannot be imported; the message names the extras that bring it.
    """
    try:
        import cupy
    except ImportError as error:
        raise DeviceError(
            f"the CUDA backend needs cupy, which cannot be imported ({reason(error)}); {_INSTALL}"
        ) from error
    return cupy


class device_errors:  # used like a function; as a generator it takes a microsecond of every call
    """
    Turn errors of cupy's runtime and of the native module into ours, naming `what` was being done: a context.

    Every call enters two, and a generator's context takes a microsecond.

    Parameters
    ----------
    what : str
        What is being done.
    no_memory : str
        What to do where device memory runs out.

    Raises
    ------
    CapacityError
        If device memory ran out.
    DeviceError
        For every other failure of a call.
    """

    __slots__ = ("_no_memory", "_what")

    def __init__(self, what: str, no_memory: str = "free device memory, use more GPUs or a smaller problem") -> None:
        self._what, self._no_memory = what, no_memory

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if not isinstance(error, Exception):
            return
        if isinstance(error, _native.CudaError):
            text, code = error.args
        elif isinstance(error, import_cupy().cuda.memory.OutOfMemoryError):
            text, code = reason(error), OUT_OF_MEMORY
        elif isinstance(error, import_cupy().cuda.runtime.CUDARuntimeError):
            text, code = reason(error), int(error.status)
        else:
            return
        if code == OUT_OF_MEMORY:
            raise CapacityError(f"{self._what}: {text}; {self._no_memory}") from error
        raise DeviceError(f"{self._what}: {text}") from error


@functools.cache
def load_driver() -> _native.CudaDriver:
    """Return the driver's functions; DeviceError if there is no driver or it is too old."""
    with device_errors("loading the CUDA driver"):
        return _native.CudaDriver()


@functools.cache
def load_blas() -> _native.CudaBlas:
    """Return cuBLAS's functions, from the library that cupy uses."""
    cupy = import_cupy()
    with device_errors("loading cuBLAS"):
        # cupy may load the library at the first use of a handle only.
        cupy.cuda.device.get_cublas_handle()
        return _native.CudaBlas()


def driver_version() -> str:
    """Return the version of the kernel's driver, as ``580.95.05``; empty where the kernel does not tell it."""
    with contextlib.suppress(OSError):
        found = re.search(r"\d+\.\d+(\.\d+)?", pathlib.Path("/proc/driver/nvidia/version").read_text())
        if found is not None:
            return found.group()
    return ""


def version_text(number: int) -> str:
    """Return a version of CUDA as ``12.9``, of the number that it gives."""
    return f"{number // 1000}.{number % 1000 // 10}"


def device_uuids(count: int) -> list[bytes]:
    """
    Return the 16 bytes that tell each of `count` visible devices from all others, by ordinal.

    The driver is asked: cupy's device properties end a UUID at its first zero byte.
    """
    driver = load_driver()
    return [driver.uuid(ordinal) for ordinal in range(count)]


def format_uuid(raw: bytes) -> str:
    """Return a device UUID as the driver's tools print it."""
    text = raw.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def visible_devices() -> tuple[list[str], str]:
    """
    Return the UUIDs of the GPUs this process sees, by ordinal, and why there are none if so.

    Never raises: cupy missing, no driver and no device are all reasons.
    """
    try:
        load_driver()
        with device_errors("looking for CUDA devices"):
            uuids = [format_uuid(raw) for raw in device_uuids(import_cupy().cuda.runtime.getDeviceCount())]
    except DeviceError as error:
        return [], str(error)
    except Exception as error:  # whatever a broken CUDA installation raises is a reason as well
        return [], f"CUDA cannot be used here: {reason(error)}"
    return uuids, "" if uuids else "this process sees no CUDA device"
