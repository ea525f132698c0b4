"""Handles of device memory: opaque bytes for everyone else, checked before they are opened."""

from __future__ import annotations

import dataclasses
import os
import struct
from typing import Final

from uncut_mpi.errors import TopologyError
from uncut_mpi.segments import boot_id

_LAYOUT: Final = struct.Struct("<4sIQ36s16s16sQQQ64s")
_MAGIC: Final = b"UMCU"
_VERSION: Final = 2


def pid_namespace() -> str:
    """Return the identifier of this process's PID namespace, within which CUDA IPC works."""
    return str(os.stat("/proc/self/ns/pid").st_ino)


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryHandle:
    """
    One allocation, as another process must know it; the fields are in the order of `_LAYOUT`.

    Attributes
    ----------
    pid, boot, namespace : int, str, str
        The exporting process, its machine's boot, its PID namespace.
    uuid : bytes
        The device that holds the memory (16 bytes).
    base, nbytes, buffer_id : int
        Address there, size, and CUDA's number of the allocation, which tells a new allocation at an
        old address apart.
    ipc : bytes
        CUDA's own handle (64 bytes).
    """

    pid: int
    boot: str
    namespace: str
    uuid: bytes
    base: int
    nbytes: int
    buffer_id: int
    ipc: bytes

    def encode(self) -> bytes:
        """Return the handle as bytes of fixed length."""
        fields = (one.encode() if isinstance(one, str) else one for one in dataclasses.astuple(self))
        return _LAYOUT.pack(_MAGIC, _VERSION, *fields)

    @classmethod
    def decode(cls, data: bytes) -> MemoryHandle:
        """
        Read what `encode` wrote.

        Raises
        ------
        TopologyError
            If the bytes are not a handle of this backend and version.
        """
        if len(data) != _LAYOUT.size or data[:4] != _MAGIC or _LAYOUT.unpack(data)[1] != _VERSION:
            raise TopologyError(
                f"{len(data)} bytes are not a device memory handle of this version: "
                "all ranks need the same backend and the same uncut_mpi"
            )
        _, _, pid, boot, namespace, *others = _LAYOUT.unpack(data)
        return cls(pid, boot.rstrip(b"\0").decode(), namespace.rstrip(b"\0").decode(), *others)

    def check_same_node(self) -> None:
        """
        Check that this process can open the handle at all.

        Raises
        ------
        TopologyError
            If it comes from another machine or another container's PID namespace.
        """
        if self.boot != boot_id():
            raise TopologyError(
                f"device memory of process {self.pid} lies on another node (boot {self.boot}, here {boot_id()}): "
                "CUDA IPC works within one node"
            )
        if self.namespace != pid_namespace():
            raise TopologyError(
                f"process {self.pid} runs in another PID namespace ({self.namespace}, here {pid_namespace()}), "
                "across which CUDA IPC fails: run all ranks in one container, or share its PID namespace (--pid=host)"
            )
