"""What callers bring to a device: their streams, and arrays of libraries other than cupy."""

from __future__ import annotations

import sys
from typing import Any

from uncut_mpi.device.exported import CUDA, Exported, from_dlpack, place_of, refuse_mask, translated
from uncut_mpi.errors import ParamError, reason
from uncut_mpi.model.arguments import shown, type_text, whole_number


def stream_handle(stream: Any) -> int:
    """
    Return the handle of a stream of cupy, torch, or any library with `__cuda_stream__`, or the handle itself.

    Raises
    ------
    ParamError
        If it is none of these.
    """
    try:
        if hasattr(stream, "__cuda_stream__"):
            return int(stream.__cuda_stream__()[1])
        for name in ("ptr", "cuda_stream"):
            if hasattr(stream, name):
                return int(getattr(stream, name))
    except Exception as error:  # whatever the stream's type raises
        raise ParamError(f"stream = {shown(stream)} has no handle ({reason(error)}): pass a CUDA stream") from error
    return whole_number("stream", stream)


def current_streams(cupy: Any, ordinal: int) -> list[int]:
    """Return the handles of the streams that cupy, and torch if it is in use, have for a device now, cupy's first."""
    handles = [int(cupy.cuda.get_current_stream(ordinal).ptr)]  # cupy has one for each device
    torch = sys.modules.get("torch")
    if torch is None:  # as mostly, and this is part of every call
        return handles
    if torch.cuda.is_initialized():
        handles.append(int(torch.cuda.current_stream(ordinal).cuda_stream))
    return list(dict.fromkeys(handles))


def let_follow(cupy: Any, ordinal: int, stream: int) -> None:
    """See `Backend.let_follow`; the device is current."""
    for handle in current_streams(cupy, ordinal):
        if handle != stream:
            event = cupy.cuda.Event(disable_timing=True)
            cupy.cuda.runtime.eventRecord(event.ptr, handle)
            cupy.cuda.runtime.streamWaitEvent(stream, event.ptr)


def wrap(cupy: Any, ordinal: int, given: Any) -> tuple[Any, bool]:
    """
    See `Backend.wrap`; the device is current.

    A stream of ours awaits what the producer has enqueued, and this thread awaits that stream.
    """
    with translated(given):
        stream = cupy.cuda.Stream(non_blocking=True)
        if hasattr(given, "__dlpack__"):
            place = place_of(given)
            if place != (CUDA, ordinal):
                raise ParamError(
                    f"{type_text(given)} lies on {place[0]} {place[1]}, this rank computes on CUDA device {ordinal}: "
                    "copy it there, or to the host"
                )
            memory = from_dlpack(given, stream.ptr)
            array, writeable = array_over(cupy, ordinal, memory), memory.writeable
        else:
            words = given.__cuda_array_interface__
            refuse_mask(given, words)
            address, is_read_only = words["data"]
            with stream:
                array = cupy.asarray(given)
            if array.size and array.data.ptr != address:
                raise ParamError(f"{type_text(given)} gives cupy other memory than it shows: pass cupy.asarray(x)")
            writeable = not is_read_only
            if words.get("stream") is None:  # then consumers have to know what its producer may have used
                for handle in current_streams(cupy, ordinal):
                    cupy.cuda.runtime.streamSynchronize(handle)
        stream.synchronize()
    return array, writeable


def array_over(cupy: Any, ordinal: int, memory: Exported) -> Any:
    """Return a cupy array over memory of a device."""
    nbytes = 0
    if 0 not in memory.shape:
        steps = zip(memory.shape, memory.strides, strict=True)
        nbytes = sum((extent - 1) * step for extent, step in steps) + memory.dtype.itemsize
    owner = cupy.cuda.UnownedMemory(memory.address, nbytes, memory.keep, ordinal)
    try:
        return cupy.ndarray(memory.shape, memory.dtype, cupy.cuda.MemoryPointer(owner, 0), strides=memory.strides)
    except (TypeError, ValueError) as error:
        raise unknown_type(cupy, memory.dtype.name, error) from error


def unknown_type(cupy: Any, name: str, error: Exception) -> ParamError:
    """Return the error of a type that this cupy has no arrays of."""
    return ParamError(
        f"cupy {cupy.__version__} has no arrays of {name} ({reason(error)}): use cupy 14 or later, or host arrays"
    )
