"""One rank's GPU behind the backend interface: cupy for arrays and IPC, `_native` for firing."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from uncut_mpi import _native
from uncut_mpi.device.cuda.callers import current_streams, let_follow, stream_handle, unknown_type, wrap
from uncut_mpi.device.cuda.executable import CudaExecutable
from uncut_mpi.device.cuda.handles import MemoryHandle
from uncut_mpi.device.cuda.imports import Imports
from uncut_mpi.device.cuda.library import (
    device_errors,
    device_uuids,
    driver_version,
    format_uuid,
    import_cupy,
    load_blas,
    load_driver,
    version_text,
)
from uncut_mpi.device.cuda.pinning import pinned_memory
from uncut_mpi.device.cuda.power import PowerMeter
from uncut_mpi.device.cuda.preparation import Preparation, raise_error
from uncut_mpi.device.cuda.warmup import WarmupList, square
from uncut_mpi.device.files import FileWindows
from uncut_mpi.device.interface import (
    AdoptedArray,
    Allocation,
    Backend,
    DeviceIdentity,
    FlagTable,
    Pin,
    ProgressBoard,
    Timeable,
)
from uncut_mpi.device.net_lanes import BounceBuffers, NetLanes, Over
from uncut_mpi.errors import CapacityError, DeviceError, ParamError
from uncut_mpi.model.arguments import type_text
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.lower import OperationList
from uncut_mpi.segments import node_identity
from uncut_mpi.units import bytes_text

# CUDA gives small allocations shares of one 2 MiB block, which IPC would export as a whole.
_GRANULE_BYTES = 2 << 20
_ANY_KIND = 4  # of memory at the ends of a copy, which their addresses tell
_TIMED_PRODUCTS = 4  # issued at once
# Of every call: made once.
_MARKING, _AWAITING = map(device_errors, ("marking the caller's stream", "awaiting the caller's stream"))

# Pointer attributes of the driver.
_BUFFER_ID, _IS_MANAGED, _IPC_CAPABLE, _RANGE_START, _RANGE_SIZE, _MEMPOOL = 7, 8, 10, 11, 12, 17


class CudaBackend(Backend):
    """
    One device of this process.

    Parameters
    ----------
    ordinal : int
        Of the device, among those this process sees.

    Raises
    ------
    DeviceError
        If cupy, the driver, cuBLAS or the device cannot be used; the message says what to install.
    """

    name = "cuda"

    def __init__(self, ordinal: int) -> None:
        driver = load_driver()
        self._cupy = import_cupy()
        self._runtime = self._cupy.cuda.runtime
        self._ordinal = ordinal
        # Where the channels of a device are gone the driver says that memory is: with 32 connections each, 13 to 16
        # processes take all of an H200's, though each holds 0.7 GiB of 139.
        connections = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8, CUDA's own choice")
        crowded = (
            "free device memory, or start fewer processes on it, or with fewer connections each "
            f"(CUDA_DEVICE_MAX_CONNECTIONS is {connections})"
        )
        with device_errors(f"using CUDA device {ordinal}", crowded):
            count = self._runtime.getDeviceCount()
            if not 0 <= ordinal < count:
                raise DeviceError(f"CUDA device {ordinal} was asked for, this process sees {count}")
            self._cupy.cuda.Device(ordinal).use()
            properties = self._runtime.getDeviceProperties(ordinal)
            uuids = device_uuids(count)
            self._uuid = uuids[ordinal]
            self._name = properties["name"].decode()
            self._multiprocessors = int(properties["multiProcessorCount"])
            self._native = _native.CudaDevice(driver, load_blas(), ordinal)
        self._imports = Imports(self._runtime, ordinal, uuids)
        self._meter = PowerMeter(format_uuid(self._uuid))
        self._allocations: dict[int, int] = {}
        self._pinned, self._pins = pinned_memory(self._runtime), object()
        self.files = FileWindows()
        self._bounce_buffers = BounceBuffers(self._page_locked)
        self._net_streams: list[Any] = []  # from the device, and to it
        self._net_events: list[Any] = []  # that no copy uses now
        self._preparation = Preparation(self._native, self._description(), self._malloc, self.files)

    # -- identity ----------------------------------------------------------------------------

    def identity(self) -> DeviceIdentity:
        """See `Backend.identity`."""
        return DeviceIdentity(
            backend=self.name,
            uuid=format_uuid(self._uuid),
            name=self._name,
            node=node_identity(),
            memory_bytes=self.memory()[1],
            multiprocessors=self._multiprocessors,
            unreached=self._imports.unreached(),
        )

    def versions(self) -> dict[str, str]:
        """See `Backend.versions`. ``"cuda"`` is the runtime's, and ``"driver"`` has the CUDA version that it offers."""
        with self._current("asking for versions"):
            runtime, offered = self._runtime.runtimeGetVersion(), self._runtime.driverGetVersion()
            blas = self._cupy.cuda.cublas.getVersion(self._cupy.cuda.device.get_cublas_handle())
        return {
            "blas": f"cuBLAS {blas // 10000}.{blas // 100 % 100}.{blas % 100}",
            "cupy": str(self._cupy.__version__),
            "cuda": version_text(runtime),
            "driver": f"{driver_version()} (CUDA {version_text(offered)})".lstrip(),
        }

    def memory(self) -> tuple[int, int]:
        """See `Backend.memory`."""
        with self._current("asking for free memory"):
            free, total = self._runtime.memGetInfo()
        return int(free), int(total)

    # -- memory ------------------------------------------------------------------------------

    def allocate(self, nbytes: int) -> Allocation:
        """See `Backend.allocate`; outside cupy's pool."""
        rounded = max(1, -(-nbytes // _GRANULE_BYTES)) * _GRANULE_BYTES
        address = self._malloc(rounded)
        try:
            handle = self._export(address)
        except BaseException:
            self._runtime.free(address)
            raise
        self._allocations[address] = rounded
        return Allocation(address=address, nbytes=nbytes, handle=handle)

    def free(self, allocation: Allocation) -> None:
        """See `Backend.free`."""
        if self._allocations.pop(allocation.address, None) is None:
            raise DeviceError(f"address {allocation.address:#x} was asked to be freed and is not allocated")
        with self._current("freeing device memory"):
            self._runtime.free(allocation.address)

    def open(self, handle: bytes) -> int:
        """See `Backend.open`."""
        with self._current("mapping a peer's device memory"):
            return self._imports.open(MemoryHandle.decode(handle))

    def close_peer(self, address: int) -> None:
        """See `Backend.close_peer`."""
        with self._current("unmapping a peer's device memory"):
            self._imports.close(address)

    def owns(self, array: object) -> bool:
        """Whether `array` is a cupy array."""
        return isinstance(array, self._cupy.ndarray)

    def wrap(self, given: Any) -> tuple[Any, bool]:
        """See `Backend.wrap`."""
        with self._current("registering another library's array"):
            return wrap(self._cupy, self._ordinal, given)

    def adopt(self, array: Any) -> AdoptedArray:
        """See `Backend.adopt`: of this rank's device, and of no kind that means more than its memory."""
        if type(array) is not self._cupy.ndarray:
            raise ParamError(
                f"{type_text(array)} was given, a kind of cupy array that may mean more than what lies in its "
                "memory: pass a plain one"
            )
        if array.device.id != self._ordinal:
            raise ParamError(
                f"the array lies on CUDA device {array.device.id}, this rank computes on device {self._ordinal}: "
                "allocate it there"
            )
        address = int(array.data.ptr)
        obstacle = self._obstacle(address) if array.size and address else "it is empty"
        if obstacle:
            return AdoptedArray(address, None, 0, obstacle, array)
        with self._current("registering a device array"):
            base = self._native.pointer_attribute(_RANGE_START, address)
        try:
            handle = self._export(base)
        except DeviceError as error:
            return AdoptedArray(address, None, 0, f"CUDA cannot export it ({error})", array)
        return AdoptedArray(address, handle, address - base, "", array)

    def pin(self, address: int, nbytes: int) -> Pin:
        """See `Backend.pin`; memory in which other matrices of this process lie is registered once for all of them."""
        if nbytes == 0:
            return Pin.FOREIGN
        with self._current(f"registering {nbytes} bytes of host memory"):
            return self._pinned.pin(self._pins, address, nbytes)

    def unpin(self, address: int) -> None:
        """See `Backend.unpin`."""
        with self._current("unregistering host memory"):
            self._pinned.unpin(self._pins, address)

    def empty(self, rows: int, cols: int, dtype: DType, order: str = "F") -> Any:
        """
        Return a new cupy array in memory of its own, which peers can open whatever cupy's allocator is.

        That of float8, which cupy does not know, is of uint8.
        """
        nbytes = max(1, rows * cols * dtype.itemsize)
        with self._current(f"allocating an array of {rows}×{cols} {dtype.name}"):
            memory = self._cupy.cuda.Memory(-(-nbytes // _GRANULE_BYTES) * _GRANULE_BYTES)
            try:
                kind = np.dtype(np.uint8) if dtype.needs_scales else dtype.numpy
                return self._cupy.ndarray((rows, cols), kind, self._cupy.cuda.MemoryPointer(memory, 0), order=order)
            except (TypeError, ValueError) as error:
                raise unknown_type(self._cupy, dtype.name, error) from error

    def strided(self, array: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
        """See `Backend.strided`; also over the memory of a cupy array."""
        if isinstance(array, np.ndarray):
            return super().strided(array, shape, strides)
        return self._cupy.lib.stride_tricks.as_strided(array, shape, strides)

    def copy_columns(
        self, destination: int, destination_pitch: int, source: int, source_pitch: int, width_bytes: int, columns: int
    ) -> None:
        """See `Backend.copy_columns`."""
        if not width_bytes or not columns:
            return
        ends = destination, destination_pitch, source, source_pitch
        with self._current(f"copying {columns} columns of {width_bytes} bytes"):
            self._enqueue_copy(0, *ends, width_bytes, columns)
            self._runtime.streamSynchronize(0)

    def _enqueue_copy(
        self,
        stream: int,
        destination: int,
        destination_pitch: int,
        source: int,
        source_pitch: int,
        width_bytes: int,
        columns: int,
    ) -> None:
        if columns == 1:
            destination_pitch = source_pitch = width_bytes  # unused, but checked against the width
        extent = width_bytes, columns
        self._runtime.memcpy2DAsync(destination, destination_pitch, source, source_pitch, *extent, _ANY_KIND, stream)

    def fill_words(self, address: int, count: int, value: int) -> None:
        """See `Backend.fill_words`."""
        if count:
            with self._current("setting flags"):
                self._native.fill_words(address, count, value & 0xFFFFFFFF)

    def streams_of(self, stream: Any = None) -> list[int]:
        """See `Backend.streams_of`."""
        return current_streams(self._cupy, self._ordinal) if stream is None else [stream_handle(stream)]

    def mark_caller(self, stream: Any = None) -> None:
        """See `Backend.mark_caller`."""
        streams = self.streams_of(stream)
        with _MARKING:
            self._native.mark_streams(streams)

    def await_caller(self) -> None:
        """See `Backend.await_caller`."""
        with _AWAITING:
            self._native.await_marks()

    def let_follow(self, stream: int) -> None:
        """See `Backend.let_follow`."""
        with self._current("letting a stream wait"):
            let_follow(self._cupy, self._ordinal, stream)

    # -- plans -------------------------------------------------------------------------------

    def executable(
        self, program: OperationList, addresses: np.ndarray, flags: FlagTable, board: ProgressBoard
    ) -> CudaExecutable:
        """See `Backend.executable`."""
        with contextlib.ExitStack() as made, self._current("preparing a plan"):
            on_close = None
            if program.operations["in_host"].any():
                # Streams wait for flags in host memory, and write them.
                address = flags.host.ctypes.data
                self._pinned.pin(self._pins, address, flags.host.nbytes)
                on_close = made.callback(functools.partial(self._forget_flags, address))
            with self._preparation.timing():
                executable = self._preparation.bind(program, addresses, flags, board, on_close=on_close)
            self._preparation.warm_up(program, addresses)
            if self.transport is not None:
                self._net_streams = self._net_streams or [self._cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
                lanes = NetLanes(program, addresses, flags, self.transport, self._bounce_buffers, self._begin_copy)
                executable.move(lanes, functools.partial(self._current, "moving messages"))
            made.pop_all()
        return executable

    def _page_locked(self, nbytes: int) -> np.ndarray:
        memory = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
        memory.fill(0)
        self._pinned.pin(self._pins, memory.ctypes.data, nbytes)
        return memory

    def _begin_copy(self, inbound: bool, *ends_and_extent: int) -> Over:
        """See `net_lanes.BeginCopy`; the device is current."""
        stream = self._net_streams[inbound]
        event: Any = self._net_events.pop() if self._net_events else self._cupy.cuda.Event(disable_timing=True)
        self._enqueue_copy(stream.ptr, *ends_and_extent)
        event.record(stream)

        def is_over() -> bool:
            nonlocal event
            if event is not None and event.done:
                self._net_events.append(event)
                event = None
            return event is None

        return is_over

    def _forget_flags(self, address: int) -> None:
        if not self._native.abandoned:  # else lanes still wait for them
            self.unpin(address)

    # -- measurements ------------------------------------------------------------------------

    def copy_probe(self, destination: int, source: int, nbytes: int, at_once: int = 4) -> Timeable:
        """See `Backend.copy_probe`."""
        with self._current("preparing to time a copy"):
            stream = self._cupy.cuda.Stream(non_blocking=True)

            def copy() -> None:
                for _ in range(at_once):
                    self._runtime.memcpyAsync(destination, source, nbytes, _ANY_KIND, stream.ptr)

            work = by_events(self._cupy, stream.ptr, copy)
        return Timeable(functools.partial(self._current, "timing"), work, at_once)

    def gemm_probe(self, size: int, dtype: DType) -> Timeable:
        """See `Backend.gemm_probe`."""
        with self._current("preparing to time a product"):
            nbytes = size * size * dtype.itemsize
            wide = size * size * dtype.accumulator.itemsize
            base = self._malloc(nbytes + wide)
            try:
                self.fill_random(base, nbytes, dtype)
                # Run as a list of products, so that the time to issue one hides behind the one before.
                todo = WarmupList(1)
                for _ in range(_TIMED_PRODUCTS):
                    todo.gemm(square(size, dtype), 0)
                program = todo.program()
                program.operands["offset"][0::3] = nbytes  # C behind A, which is B as well
                with self._preparation.timing():
                    executable = self._preparation.bind_scratch(program, base)
            except BaseException:
                self._runtime.free(base)
                raise

            def multiply() -> None:
                raise_error(executable.run(alpha=1.0, beta=0.0, epoch=0, timeout_s=60.0).error)

            work = by_events(self._cupy, self._native.compute_stream(0), multiply)

        def end() -> None:
            with self._current("freeing what was timed"):
                executable.close()
                self._runtime.free(base)

        return Timeable(functools.partial(self._current, "timing"), work, _TIMED_PRODUCTS, end)

    def tune_products(self, *, tune: bool) -> None:
        """See `Backend.tune_products`."""
        self._preparation.tune_products(tune=tune)

    def energy_j(self) -> float | None:
        """See `Backend.energy_j`: NVML's counter; None without nvidia-ml-py, or where the device has none."""
        return self._meter.energy_j()

    # -- end ---------------------------------------------------------------------------------

    def close(self) -> None:
        """See `Backend.close`."""
        if self._native.abandoned:
            return  # lanes still wait for peers: every call that frees would wait with them
        with self._current("closing the device"):
            self._imports.close_all()
            self._pinned.unpin_all(self._pins)
            for address in list(self._allocations):
                del self._allocations[address]
                self._runtime.free(address)
            self._native.close()

    # -- parts -------------------------------------------------------------------------------

    def _description(self) -> str:
        return f"CUDA device {self._ordinal} ({self._name})"

    @contextlib.contextmanager
    def _current(self, what: str) -> Iterator[None]:
        """Make the device current in this thread for a while, and translate errors meanwhile."""
        with device_errors(f"{what} on {self._description()}"), self._cupy.cuda.Device(self._ordinal):
            yield

    def _malloc(self, nbytes: int) -> int:
        try:
            with self._current(f"allocating {nbytes} bytes"):
                return int(self._runtime.malloc(nbytes))
        except CapacityError as error:
            free, total = self.memory()
            raise CapacityError(
                f"{bytes_text(nbytes)} of device memory are needed on {self._description()}, "
                f"{bytes_text(free)} of {bytes_text(total)} are free: free memory there (cupy's pool keeps blocks: "
                "cupy.get_default_memory_pool().free_all_blocks()), use more GPUs or a smaller problem"
            ) from error

    def _export(self, base: int) -> bytes:
        with self._current("exporting device memory"):
            return MemoryHandle(
                pid=os.getpid(),
                node=node_identity(),
                uuid=self._uuid,
                base=base,
                nbytes=self._native.pointer_attribute(_RANGE_SIZE, base),
                buffer_id=self._native.pointer_attribute(_BUFFER_ID, base),
                ipc=self._runtime.ipcGetMemHandle(base),
            ).encode()

    def _obstacle(self, address: int) -> str:
        with self._current("asking for the kind of an array's memory"):
            attribute = self._native.pointer_attribute
            if attribute(_IS_MANAGED, address):
                return "it lies in managed memory (cudaMallocManaged), which CUDA IPC cannot export"
            if attribute(_MEMPOOL, address):
                return "it lies in a stream-ordered pool (cudaMallocAsync), which CUDA IPC cannot export"
            if not attribute(_IPC_CAPABLE, address):
                return (
                    "it lies in memory that CUDA IPC cannot export (virtual memory management, such as expandable "
                    "segments, or a mapping of another process)"
                )
        return ""


def by_events(cupy: Any, stream: int, launch: Callable[[], None]) -> Callable[[], float]:
    """Return what issues work on a stream, waits for it, and returns its time (s)."""
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()

    def work() -> float:
        cupy.cuda.runtime.eventRecord(start.ptr, stream)
        launch()
        cupy.cuda.runtime.eventRecord(stop.ptr, stream)
        stop.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, stop)) * 1e-3

    return work
