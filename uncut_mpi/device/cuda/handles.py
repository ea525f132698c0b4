"""Handles of device memory: opaque bytes for everyone else, checked before they are opened."""

from __future__ import annotations

import dataclasses
import struct
from typing import Final

from uncut_mpi.errors import TopologyError

_LAYOUT: Final = struct.Struct("<4sIQ64s16sQQQ64s")
_MAGIC: Final = b"UMCU"
_VERSION: Final = 3


@dataclasses.dataclass(frozen=True, slots=True)
class MemoryHandle:
    """
    One allocation, as another process must know it; the fields are in the order of `_LAYOUT`.

    Attributes
    ----------
    pid, node : int, str
        The exporting process, and its node (`segments.node_identity`), within which CUDA IPC works.
    uuid : bytes
        The device that holds the memory (16 bytes).
    base, nbytes, buffer_id : int
        Address there, size, and CUDA's number of the allocation, which tells a new allocation at an
        old address apart.
    ipc : bytes
        CUDA's own handle (64 bytes).
    """

    pid: int
    node: str
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
        _, _, pid, node, *others = _LAYOUT.unpack(data)
        return cls(pid, node.rstrip(b"\0").decode(errors="replace"), *others)
