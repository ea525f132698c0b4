"""What there is to say of CUDA and its devices in a bug report; makes no context on any of them."""

from __future__ import annotations

from typing import Any

from uncut_mpi.device.cuda.library import (
    device_errors,
    device_uuids,
    driver_version,
    format_uuid,
    import_cupy,
    load_driver,
    version_text,
)
from uncut_mpi.device.cuda.power import nvml_device
from uncut_mpi.units import bytes_text

_UUID_CHARACTERS = 12


def describe() -> list[str]:
    """Return it in lines; DeviceError where CUDA cannot be used."""
    cupy = import_cupy()
    runtime = cupy.cuda.runtime
    load_driver()
    with device_errors("looking for CUDA devices"):
        offered, linked = runtime.driverGetVersion(), runtime.runtimeGetVersion()
        uuids = [format_uuid(raw) for raw in device_uuids(runtime.getDeviceCount())]
        lines = [
            f"cupy {cupy.__version__}, CUDA {version_text(linked)}, driver {driver_version() or 'unknown'} "
            f"(CUDA {version_text(offered)})"
        ]
        lines += [_device(ordinal, runtime.getDeviceProperties(ordinal), uuid) for ordinal, uuid in enumerate(uuids)]
        if len(uuids) > 1:
            lines += _peers(runtime, len(uuids))
    return lines


def _device(ordinal: int, properties: dict[str, Any], uuid: str) -> str:
    said = f"{ordinal}: {properties['name'].decode()}, {bytes_text(properties['totalGlobalMem'])}"
    found = nvml_device(uuid)
    if found is None:
        return f"{said}, {uuid[:_UUID_CHARACTERS]}, not told by NVML"
    nvml, handle = found
    try:
        said += f", {bytes_text(nvml.nvmlDeviceGetMemoryInfo(handle).free)} free"
        mig = "MIG on" if nvml.nvmlDeviceGetMigMode(handle)[0] else "MIG off"
    except nvml.NVMLError:
        mig = "no MIG"
    return f"{said}, {uuid[:_UUID_CHARACTERS]}, {mig}"


def _peers(runtime: Any, count: int) -> list[str]:
    """Return which devices each one says that it reaches: one line where each reaches all."""
    reached = [
        [there for there in range(count) if there != here and runtime.deviceCanAccessPeer(here, there)]
        for here in range(count)
    ]
    if all(len(its) == count - 1 for its in reached):
        return ["each reaches all others (peer access)"]
    return [
        f"{here} reaches {', '.join(map(str, its)) or 'no other'} (peer access)" for here, its in enumerate(reached)
    ]
