"""Makes backends by name; the only place that imports both, and the CUDA one only when asked."""

from __future__ import annotations

from uncut_mpi.device.interface import Backend


def visible_gpus() -> tuple[list[str], str]:
    """
    Return the UUIDs of the GPUs this process sees, by ordinal, and why there are none if so.

    Never raises: cupy missing, no driver and no device are all reasons.
    """
    from uncut_mpi.device.cuda import visible_devices

    return visible_devices()


def describe_gpus() -> list[str]:
    """
    Return what there is to say of CUDA and of the GPUs this process sees, in lines, for bug reports.

    Raises
    ------
    DeviceError
        If CUDA cannot be used; the message says why.
    """
    from uncut_mpi.device.cuda.description import describe

    return describe()


def make_cuda(ordinal: int) -> Backend:
    """Return the CUDA backend of device `ordinal`."""
    from uncut_mpi.device.cuda import CudaBackend

    return CudaBackend(ordinal)


def make_host(local_rank: int, ranks_on_node: int) -> Backend:
    """Return the host backend of one rank among `ranks_on_node`."""
    from uncut_mpi.device.host import HostBackend

    return HostBackend(local_rank, ranks_on_node)
