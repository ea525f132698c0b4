"""Peers' memory mapped into this process. CUDA counts how often each allocation is open."""

from __future__ import annotations

import os
from typing import Any

from uncut_mpi.device.cuda.handles import MemoryHandle
from uncut_mpi.device.cuda.library import device_errors, format_uuid
from uncut_mpi.errors import DeviceError, TopologyError, reason
from uncut_mpi.segments import require_same_node

_LAZY_ENABLE_PEER_ACCESS = 1
_PEER_ACCESS_ALREADY_ENABLED = 704


class Imports:
    """
    The allocations of other ranks that are open here.

    Parameters
    ----------
    runtime : module
        cupy's runtime.
    ordinal : int
        The device that is current whenever a method is called.
    uuids : list of bytes
        Of the devices this process sees, by ordinal.
    """

    def __init__(self, runtime: Any, ordinal: int, uuids: list[bytes]) -> None:
        self._runtime = runtime
        self._ordinal = ordinal
        self._uuids = uuids
        self._mapped: list[int] = []  # addresses, one for each time that another process's memory was opened

    def open(self, handle: MemoryHandle) -> int:
        """
        Return the base address of the allocation in this process.

        Raises
        ------
        TopologyError
            If the exporter is on another node or its device cannot be reached from this one.
        DeviceError
            If the system refuses for another reason.
        """
        require_same_node(handle.node, f"device memory of process {handle.pid}")
        # What this process does not see cannot be asked for access, and is tried.
        peer = self._uuids.index(handle.uuid) if handle.uuid in self._uuids else self._ordinal
        if peer != self._ordinal and not self._runtime.deviceCanAccessPeer(self._ordinal, peer):
            raise TopologyError(
                f"device {self._ordinal} of this process has no peer access to {format_uuid(handle.uuid)} (device "
                f"{peer}): choose GPUs that reach each other (NVLink, or PCIe below one root), or use fewer ranks"
            )
        if handle.pid == os.getpid():
            return self._same_process(handle, peer)
        self._mapped.append(self._map(handle))
        return self._mapped[-1]

    def unreached(self) -> frozenset[str]:
        """Return the devices, as UUIDs, to which CUDA says that this one has no peer access."""
        others = (peer for peer in range(len(self._uuids)) if peer != self._ordinal)
        apart = [peer for peer in others if not self._runtime.deviceCanAccessPeer(self._ordinal, peer)]
        return frozenset(format_uuid(self._uuids[peer]) for peer in apart)

    def close(self, address: int) -> None:
        """Undo an `open`; memory of this process needs nothing."""
        if address in self._mapped:
            self._mapped.remove(address)
            with device_errors("unmapping a peer's device memory"):
                self._runtime.ipcCloseMemHandle(address)

    def close_all(self) -> None:
        """Unmap everything."""
        while self._mapped:
            self.close(self._mapped[-1])

    def _same_process(self, handle: MemoryHandle, peer: int) -> int:
        # CUDA refuses to open a handle in the process that made it: the pointer itself is good here.
        if peer != self._ordinal:
            try:
                self._runtime.deviceEnablePeerAccess(peer)
            except self._runtime.CUDARuntimeError as error:
                if error.status != _PEER_ACCESS_ALREADY_ENABLED:
                    raise DeviceError(f"enabling access to device {peer}: {reason(error)}") from error
        return handle.base

    def _map(self, handle: MemoryHandle) -> int:
        try:
            return int(self._runtime.ipcOpenMemHandle(handle.ipc, _LAZY_ENABLE_PEER_ACCESS))
        except self._runtime.CUDARuntimeError as error:
            raise TopologyError(
                f"{handle.nbytes} bytes of process {handle.pid} on device {format_uuid(handle.uuid)} cannot be "
                f"mapped: {reason(error)}; common reasons are device cgroups that hide the peer's GPU (Slurm: ask for "
                "all GPUs on the node and no --gpu-bind or --gpus-per-task), MIG instances, and containers that do not "
                "share their IPC namespace"
            ) from error
