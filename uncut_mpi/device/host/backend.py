"""The host backend: one rank's shared memory as its device."""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from uncut_mpi import _native
from uncut_mpi.device.exported import CUDA, place_of
from uncut_mpi.device.files import FileWindows
from uncut_mpi.device.host.bodies import round_to_tf32
from uncut_mpi.device.host.executor import HostExecutable
from uncut_mpi.device.host.system import BlasThreads, processor_name, usable_cores
from uncut_mpi.device.interface import (
    AdoptedArray,
    Allocation,
    Backend,
    DeviceIdentity,
    Executable,
    FlagTable,
    ProgressBoard,
    Timeable,
)
from uncut_mpi.device.net_lanes import BounceBuffers
from uncut_mpi.device.views import Array, BufferExtent, bytes_at
from uncut_mpi.errors import DeviceError, ParamError
from uncut_mpi.free_memory import available_bytes
from uncut_mpi.model.arguments import type_text
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import OperationList
from uncut_mpi.segments import Segment, node_identity


class HostBackend(Backend):
    """
    Device memory is shared host memory, and numpy computes.

    Not collective.

    Parameters
    ----------
    local_rank, ranks_on_node : int
        This rank's place among those that share the node's cores and memory. While bodies run numpy's BLAS has as many
        threads as this process may use cores, divided by the ranks, but never more than the program itself has set.
    """

    name = "host"
    takes_host_memory = True

    def __init__(self, local_rank: int, ranks_on_node: int) -> None:
        if not 0 <= local_rank < ranks_on_node:
            raise ParamError(f"local rank {local_rank} of {ranks_on_node} ranks on the node does not exist")
        self._local_rank, self._ranks_on_node = local_rank, ranks_on_node
        self.files = FileWindows()
        self._bounce_buffers = BounceBuffers()
        cores = usable_cores()
        self._blas = BlasThreads(max(1, cores // ranks_on_node))
        # With fewer cores than ranks a spinning rank keeps the one it waits for from running.
        self._spins = cores >= ranks_on_node
        self._own: dict[int, Segment] = {}
        self._peers: dict[int, Segment] = {}
        self._arrays: dict[int, Segment] = {}  # of `empty`, until their last view goes

    # -- identity ----------------------------------------------------------------------------

    def identity(self) -> DeviceIdentity:
        """See `Backend.identity`. The memory is this rank's share of what the node has left."""
        node = node_identity()
        return DeviceIdentity(
            backend=self.name,
            uuid=f"host/{node}/{os.getpid()}",
            name=processor_name(),
            node=node,
            memory_bytes=self.memory()[1],
        )

    def versions(self) -> dict[str, str]:
        """See `Backend.versions`."""
        return {"blas": self._blas.name}

    def memory(self) -> tuple[int, int]:
        """See `Backend.memory`: this rank's share of what the node, or its control group, has left, twice."""
        share = available_bytes()[0] // self._ranks_on_node
        return share, share

    # -- memory ------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Allocation:
        """See `Backend.allocate`."""
        segment = Segment.create(nbytes, f"device memory of rank {self._local_rank} on this node")
        self._own[segment.address] = segment
        return Allocation(segment.address, nbytes, segment.handle)

    def free(self, allocation: Allocation) -> None:
        """See `Backend.free`."""
        self._take(self._own, allocation.address, "free").close()

    def open(self, handle: bytes) -> int:
        """See `Backend.open`."""
        segment = Segment.open(handle)
        self._peers[segment.address] = segment
        return segment.address

    def close_peer(self, address: int) -> None:
        """See `Backend.close_peer`."""
        self._take(self._peers, address, "close_peer").close()

    @staticmethod
    def _take(held: dict[int, Segment], address: int, what: str) -> Segment:
        segment = held.pop(address, None)
        if segment is None:
            raise DeviceError(f"{what}: no memory of this backend starts at address {address:#x}")
        return segment

    # -- arrays ------------------------------------------------------------------------------

    def empty(self, rows: int, cols: int, dtype: DType, order: str = "F") -> Array:
        """See `Backend.empty`. The memory goes with the last view of the array."""
        if order not in ("F", "C"):
            raise ParamError(f"order {order!r}: use 'F' (column-major) or 'C' (row-major)")
        count = rows * cols
        segment = Segment.create(count * dtype.itemsize, f"a matrix of {rows}×{cols} in device memory")
        # An extent of one byte at least, so that an empty array too keeps its memory.
        owner = BufferExtent(segment.address, max(1, segment.nbytes), segment)
        self._arrays[segment.address] = segment
        weakref.finalize(owner, _drop, self._arrays, segment.address).atexit = False
        flat = np.asarray(owner)
        array: Array = np.ndarray((rows, cols), dtype.numpy, buffer=flat, order="F" if order == "F" else "C")
        return array

    def owns(self, array: object) -> bool:
        """See `Backend.owns`: whether it lies in memory that `empty` made."""
        return isinstance(array, np.ndarray) and self._segment_of(array) is not None

    def wrap(self, given: Any) -> tuple[Any, bool]:
        """See `Backend.wrap`: no other library has memory of this device."""
        place, index = place_of(given) if hasattr(given, "__dlpack__") else (CUDA, "")
        raise ParamError(
            f"{type_text(given)} lies on {place} {index}".rstrip() + ", and this session computes in host memory "
            '(host backend): copy it to the host, or open the session with backend="cuda"'
        )

    def adopt(self, array: Any) -> AdoptedArray:
        """See `Backend.adopt`."""
        segment = self._segment_of(array)
        if segment is None:
            raise ParamError("this array is not in device memory of the host backend: make it with empty_device")
        address = _address(array)
        return AdoptedArray(address, segment.handle, address - segment.address, "", array)

    def _segment_of(self, array: Array) -> Segment | None:
        address = _address(array)
        for start, segment in list(self._arrays.items()):
            if start <= address < start + max(1, segment.nbytes):
                return segment
        return None

    # -- moving data -------------------------------------------------------------------------

    def copy_columns(
        self, destination: int, destination_pitch: int, source: int, source_pitch: int, width_bytes: int, columns: int
    ) -> None:
        """See `Backend.copy_columns`."""
        ends = (destination, destination_pitch), (source, source_pitch)
        _native.copy_with_files([], *ends, width_bytes, columns, 0)

    def fill_words(self, address: int, count: int, value: int) -> None:
        """See `Backend.fill_words`."""
        bytes_at(address, 4 * count).view(np.uint32)[:] = value

    # -- running and measuring ---------------------------------------------------------------

    def executable(
        self, program: OperationList, addresses: Array, flags: FlagTable, board: ProgressBoard
    ) -> Executable:
        """See `Backend.executable`."""
        how: dict[str, Any] = {"blas": self._blas, "spins": self._spins, "files": self.files}
        how |= {"transport": self.transport, "bounce_buffers": self._bounce_buffers}
        return HostExecutable(program, addresses, flags, board, **how)

    def copy_probe(self, destination: int, source: int, nbytes: int, at_once: int = 4) -> Timeable:
        """See `Backend.copy_probe`; nothing is issued, so it is one at a time."""
        target, origin = bytes_at(destination, nbytes), bytes_at(source, nbytes)
        return timeable(lambda: np.copyto(target, origin), self._blas)

    def gemm_probe(self, size: int, dtype: DType) -> Timeable:
        """See `Backend.gemm_probe`; operands are widened or rounded within the time, as in a task."""
        random = np.random.default_rng(0)
        given = [random.random((size, size)).astype(dtype.numpy) for _ in range(2)]
        taken = [np.empty_like(one) for one in given] if dtype is DType.tf32 else given
        wide = (DType.f64 if dtype.is_integer else dtype.accumulator).numpy
        out = np.empty((size, size), wide)

        def multiply() -> None:
            if dtype is DType.tf32:
                for operand, rounded in zip(given, taken, strict=True):
                    round_to_tf32(operand, rounded)
            a, b = (one.astype(wide, copy=False) for one in taken)
            np.matmul(a, b, out=out)

        return timeable(multiply, self._blas)

    def close(self) -> None:
        """See `Backend.close`. Arrays of `empty` stay readable, but no peer can open them any more."""
        for held in (self._own, self._peers):
            while held:
                held.popitem()[1].close()
        while self._arrays:  # unmapped with the last view
            self._arrays.popitem()[1].unlink()


def timeable(work: Callable[[], None], blas: BlasThreads) -> Timeable:
    """Return work to be timed while the limit of BLAS's threads holds."""

    def timed() -> float:
        start = time.perf_counter()
        work()
        return time.perf_counter() - start

    return Timeable(blas.limited, timed)


def _drop(arrays: dict[int, Segment], address: int) -> None:
    segment = arrays.pop(address, None)
    if segment is not None:
        segment.close()


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])
