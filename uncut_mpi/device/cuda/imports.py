"""Peers' memory mapped into this process: opened once, counted, closed once."""

from __future__ import annotations

import collections
import os
from typing import Any

from uncut_mpi.device.cuda.handles import MemoryHandle
from uncut_mpi.device.cuda.library import device_errors, format_uuid
from uncut_mpi.errors import DeviceError, TopologyError, reason

_LAZY_ENABLE_PEER_ACCESS = 1
_PEER_ACCESS_ALREADY_ENABLED = 704


class ImportCache:
    """
    Every allocation of another rank that is mapped here, by exporter, base and buffer id.

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
        self._address: dict[tuple[int, bytes, int, int], int] = {}
        self._uses: collections.Counter[int] = collections.Counter()  # by address

    def open(self, handle: MemoryHandle) -> int:
        """
        Return the base address of the allocation in this process; a further use of one that is open is counted.

        Raises
        ------
        TopologyError
            If the exporter is on another node or its device cannot be reached from this one.
        DeviceError
            If the system refuses for another reason.
        """
        handle.check_same_node()
        key = (handle.pid, handle.uuid, handle.base, handle.buffer_id)
        address = self._address.get(key)
        if address is None:
            # What this process does not see cannot be asked for access, and is tried.
            peer = self._uuids.index(handle.uuid) if handle.uuid in self._uuids else self._ordinal
            if peer != self._ordinal and not self._runtime.deviceCanAccessPeer(self._ordinal, peer):
                raise TopologyError(
                    f"device {self._ordinal} of this process has no peer access to {format_uuid(handle.uuid)} (device "
                    f"{peer}): choose GPUs that reach each other (NVLink, or PCIe below one root), or use fewer ranks"
                )
            address = self._same_process(handle, peer) if handle.pid == os.getpid() else self._map(handle)
            self._address[key] = address
        self._uses[address] += 1
        return address

    def close(self, address: int) -> None:
        """Give one use back; the last one unmaps the memory."""
        if address not in self._uses:
            raise DeviceError(f"address {address:#x} was asked to be closed and is not open")
        self._uses[address] -= 1
        if self._uses[address]:
            return
        del self._uses[address]
        key = next(key for key, value in self._address.items() if value == address)
        del self._address[key]
        if key[0] != os.getpid():
            with device_errors("unmapping a peer's device memory"):
                self._runtime.ipcCloseMemHandle(address)

    def close_all(self) -> None:
        """Unmap everything."""
        for address in list(self._uses):
            self._uses[address] = 1
            self.close(address)

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
