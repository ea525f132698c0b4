"""What callers bring to a CUDA device, with a cupy that pretends: streams, and arrays of other libraries."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import sys
import types
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.foreign import BFLOAT16, CUDA, CudaInterface, Tensor
from uncut_mpi import _native
from uncut_mpi.device.cuda.backend import by_events
from uncut_mpi.device.cuda.callers import current_streams, let_follow, stream_handle, wrap
from uncut_mpi.device.cuda.handles import MemoryHandle
from uncut_mpi.device.cuda.imports import Imports
from uncut_mpi.device.cuda.library import OUT_OF_MEMORY, device_errors
from uncut_mpi.device.cuda.pinning import PinnedMemory
from uncut_mpi.device.interface import Pin, Timeable
from uncut_mpi.errors import CapacityError, DeviceError, ParamError, PinError, TopologyError
from uncut_mpi.segments import node_identity


class Array:
    """As cupy.ndarray."""

    def __init__(self, shape, dtype=None, pointer=None, strides=None):
        if dtype == np.dtype("e"):
            raise ValueError("a type that this cupy lacks, on purpose")
        self.shape, self.dtype, self.data, self.strides = shape, dtype, pointer, strides
        self.size = int(np.prod(shape))


@pytest.fixture
def log():
    return []


@pytest.fixture
def cupy(log):
    class Stream:
        ptr = 77

        def __init__(self, non_blocking=False):
            assert non_blocking

        def __enter__(self):
            log.append("enter")

        def __exit__(self, *details):
            log.append("leave")

        def synchronize(self):
            log.append("await 77")

    def asarray(given):
        words = given.__cuda_array_interface__
        pointer = types.SimpleNamespace(ptr=words["data"][0])
        return Array(words["shape"], np.dtype(words["typestr"]), pointer)

    cuda = types.SimpleNamespace(
        Stream=Stream,
        UnownedMemory=lambda address, nbytes, owner, device: (address, nbytes, owner, device),
        MemoryPointer=lambda memory, offset: types.SimpleNamespace(ptr=memory[0] + offset, mem=memory),
        get_current_stream=lambda ordinal: types.SimpleNamespace(ptr=5),
        runtime=types.SimpleNamespace(streamSynchronize=lambda handle: log.append(f"await {handle}")),
    )
    return types.SimpleNamespace(cuda=cuda, ndarray=Array, asarray=asarray, __version__="13")


@pytest.fixture
def torch(monkeypatch):
    def use(handle, started=True):
        cuda = types.SimpleNamespace(
            is_initialized=lambda: started, current_stream=lambda ordinal: types.SimpleNamespace(cuda_stream=handle)
        )
        monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))

    return use


# -- streams -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "stream",
    [
        9,
        np.int64(9),
        types.SimpleNamespace(ptr=9),
        types.SimpleNamespace(cuda_stream=9),
        types.SimpleNamespace(__cuda_stream__=lambda: (0, 9)),
    ],
    ids=["int", "numpy", "cupy", "torch", "protocol"],
)
def test_streams_of_every_library_have_a_handle(stream):
    assert stream_handle(stream) == 9


@pytest.mark.parametrize(
    "stream",
    ["9", 9.0, True, object(), types.SimpleNamespace(__cuda_stream__=lambda: None)],
    ids=lambda stream: type(stream).__name__,
)
def test_what_is_no_stream_is_refused(stream):
    with pytest.raises(ParamError, match=r"^stream = "):
        stream_handle(stream)


def test_the_current_streams_are_cupys_and_torchs_each_once(cupy, torch, monkeypatch):
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert current_streams(cupy, 0) == [5]
    for handle, started, wanted in ((6, True, [5, 6]), (5, True, [5]), (6, False, [5])):
        torch(handle, started)
        assert current_streams(cupy, 0) == wanted


def test_a_stream_waits_for_what_the_current_ones_hold(cupy, torch, log):
    torch(6)
    cupy.cuda.Event = lambda disable_timing: types.SimpleNamespace(ptr=40 + len(log))
    cupy.cuda.runtime.eventRecord = lambda event, stream: log.append(f"{event} in {stream}")
    cupy.cuda.runtime.streamWaitEvent = lambda stream, event: log.append(f"{stream} awaits {event}")
    let_follow(cupy, 0, 9)
    assert log == ["40 in 5", "9 awaits 40", "42 in 6", "9 awaits 42"]
    log.clear()
    let_follow(cupy, 0, 5)
    assert log == ["40 in 6", "5 awaits 40"]


# -- arrays --------------------------------------------------------------------------------------


def test_a_tensor_of_this_device_is_wrapped_behind_what_its_producer_enqueued(cupy, log):
    data = np.arange(12.0).reshape(3, 4).astype(ml_dtypes.bfloat16)
    given = Tensor(data[1:, :2], BFLOAT16, device=(CUDA, 3), flags=1)
    array, writeable = wrap(cupy, 3, given)
    assert (array.shape, array.strides, array.dtype) == ((2, 2), (8, 2), data.dtype)
    assert array.data.ptr == data[1:].ctypes.data
    assert array.data.mem[1] == 8 + 2 + 2  # bytes from the first element to behind the last
    assert array.data.mem[2][1] is given  # kept alive
    assert not writeable
    assert given.asked[0]["stream"] == 77
    assert log == ["await 77"]


def test_managed_and_empty_tensors_are_wrapped(cupy):
    assert wrap(cupy, 3, Tensor(np.zeros((2, 2)), device=(13, 3)))[1]
    array, _ = wrap(cupy, 3, Tensor(np.zeros((0, 2)), device=(CUDA, 3)))
    assert array.data.mem[1] == 0


def test_an_array_with_an_interface_alone_is_wrapped_behind_all_current_streams(cupy, torch, log):
    torch(6)
    data = np.zeros((2, 2))
    array, writeable = wrap(cupy, 3, CudaInterface(data))
    assert array.data.ptr == data.ctypes.data
    assert writeable
    assert log == ["enter", "leave", "await 5", "await 6", "await 77"]
    log.clear()
    assert wrap(cupy, 3, CudaInterface(data, stream=1, data=(data.ctypes.data, True)))[1] is False
    assert log == ["enter", "leave", "await 77"]


@pytest.mark.parametrize(
    ("given", "part"),
    [
        (Tensor(np.zeros((2, 2)), device=(CUDA, 1)), "lies on CUDA device 1, this rank computes on CUDA device 3"),
        (Tensor(np.zeros((2, 2)), device=(10, 3)), "lies on ROCm device 3"),
        (Tensor(np.zeros((2, 2)), device=(CUDA, 3), requires_grad=True), "detach"),
        (Tensor(np.zeros((2, 2), "f2"), device=(CUDA, 3)), "no arrays of float16"),
        (CudaInterface(np.zeros((2, 2)), mask=1), "mask"),
        (CudaInterface(np.zeros((2, 2)), data=None), "cannot show its memory"),
    ],
)
def test_what_cannot_be_wrapped_is_said(cupy, given, part):
    with pytest.raises(ParamError, match=part):
        wrap(cupy, 3, given)


# -- what failures of CUDA's calls become ----------------------------------------------------------


def test_memory_that_ran_out_says_what_to_do():
    with (
        pytest.raises(CapacityError, match="allocating: out of memory; free device memory"),
        device_errors("allocating"),
    ):
        raise _native.CudaError("out of memory", OUT_OF_MEMORY)
    told = pytest.raises(CapacityError, match=r"^using: out of memory; start fewer$")
    with told, device_errors("using", "start fewer"):
        raise _native.CudaError("out of memory", OUT_OF_MEMORY)


def test_any_other_failure_is_a_device_error():
    with pytest.raises(DeviceError, match=r"^copying: illegal address$"), device_errors("copying", "start fewer"):
        raise _native.CudaError("illegal address", 700)


# -- what is timed on a GPU, with a clock and events of the test's own -----------------------------


class Clock:
    """A device whose work takes given times, in milliseconds."""

    def __init__(self, *times_ms):
        self.times_ms = list(times_ms)
        self.now_ms = 0.0
        self.freed = 0

    def launch(self):
        if not self.times_ms:
            raise RuntimeError("no more work")
        self.now_ms += self.times_ms.pop(0)

    def free(self):
        self.freed += 1

    def cupy(self):
        def record(event, stream):
            assert stream == 77
            event["ms"] = self.now_ms

        class Event:
            def __init__(self):
                self.ptr = {}

            def synchronize(self):
                assert "ms" in self.ptr

        def elapsed(start, stop):
            return stop.ptr["ms"] - start.ptr["ms"]

        runtime = SimpleNamespace(eventRecord=record)
        return SimpleNamespace(cuda=SimpleNamespace(runtime=runtime, Event=Event, get_elapsed_time=elapsed))


def make(clock, times):
    return Timeable(contextlib.nullcontext, by_events(clock.cupy(), 77, clock.launch), times, clock.free)


def test_work_is_repeated_for_as_long_as_asked_after_a_turn_that_is_not_timed():
    clock = Clock(1000.0, 4.0, 8.0, 6.0)
    probe = make(clock, 4)
    assert probe.mean_seconds(0.01) == pytest.approx(12e-3 / 8)
    assert probe.mean_seconds(0.0) == pytest.approx(6e-3 / 4)
    probe.close()
    assert clock.freed == 1


def test_work_that_fails_at_once_is_freed():
    clock = Clock()
    with pytest.raises(RuntimeError, match="no more work"):
        make(clock, 1)
    assert clock.freed == 1


# -- peers' device memory mapped into a process ----------------------------------------------------


UUIDS = [bytes([number]) * 16 for number in range(3)]


class Runtime:
    """Three devices of which this process uses device 0; device 2 is out of its reach."""

    class CUDARuntimeError(RuntimeError):
        pass

    def __init__(self) -> None:
        self.opened: list[bytes] = []
        self.closed: list[int] = []

    def deviceCanAccessPeer(self, ordinal, peer):
        return int(peer in (0, 1))

    def ipcOpenMemHandle(self, handle, flags):
        if handle == b"bad":
            raise self.CUDARuntimeError("cudaErrorInvalidValue")
        self.opened.append(handle)
        return 0x1000 * len(self.opened)

    def ipcCloseMemHandle(self, address):
        self.closed.append(address)


def handle(device: int, ipc: bytes = b"good", base: int = 0x500) -> MemoryHandle:
    return MemoryHandle(os.getpid() + 1, node_identity(), UUIDS[device], base, 4096, 7, ipc)


@pytest.fixture
def runtime():
    return Runtime()


@pytest.fixture
def cache(runtime):
    return Imports(runtime, 0, UUIDS)


def test_a_device_without_peer_access_is_refused_before_anything_is_mapped(cache, runtime):
    with pytest.raises(TopologyError, match=r"device 0 .* no peer access to GPU-02020202-.* \(device 2\).*fewer ranks"):
        cache.open(handle(2))
    assert not runtime.opened


def test_memory_of_another_node_is_refused_before_anything_is_mapped(cache, runtime):
    elsewhere = MemoryHandle.decode(dataclasses.replace(handle(1), node="another").encode())
    with pytest.raises(TopologyError, match=r"device memory of process .* another node than .*share PIDs"):
        cache.open(elsewhere)
    assert not runtime.opened


def test_a_device_that_this_process_cannot_see_is_tried(cache, runtime):
    hidden = MemoryHandle(os.getpid() + 1, node_identity(), b"x" * 16, 0x500, 4096, 7, b"good")
    assert cache.open(hidden) == 0x1000
    assert runtime.opened == [b"good"]


def test_a_mapping_that_cuda_refuses_names_the_common_reasons(cache):
    with pytest.raises(
        TopologyError, match=r"4096 bytes of process .* cannot be mapped: cudaErrorInvalidValue.*cgroups"
    ):
        cache.open(handle(1, b"bad"))


def test_what_was_opened_is_unmapped_as_often_and_nothing_else(cache, runtime):
    first, other = cache.open(handle(1)), cache.open(handle(1, base=0x900))
    own = dataclasses.replace(handle(0), pid=os.getpid())
    assert cache.open(own) == own.base
    cache.close(own.base)
    cache.close(first)
    assert runtime.closed == [first]
    cache.close_all()
    assert runtime.closed == [first, other]


# -- host memory is registered once for all who use it, as a whole or not at all -------------------


INVALID, ALREADY = 1, 712


class Cuda:
    """Registers exact bytes, as CUDA does; no two ranges may overlap, and files may only be read."""

    def __init__(self, files=()):
        self.ranges: dict[int, tuple[int, int]] = {}
        self.files = files
        self.foreign: list[tuple[int, int]] = []

    class CUDARuntimeError(RuntimeError):
        @property
        def status(self):
            return self.args[0]

    def hostRegister(self, address, nbytes, flags):
        stop = address + nbytes
        if any(start < stop and address < end for start, end in self.files) and not flags & 8:
            raise self.CUDARuntimeError(INVALID)
        if any(start < stop and address < start + n for start, (n, _) in self.ranges.items()):
            raise self.CUDARuntimeError(ALREADY)
        if any(start < stop and address < end for start, end in self.foreign):
            raise self.CUDARuntimeError(ALREADY)
        self.ranges[address] = nbytes, flags

    def hostUnregister(self, address):
        del self.ranges[address]

    def pointerGetAttributes(self, address):
        return SimpleNamespace(type=int(self.is_known(address)))

    def is_known(self, address):
        known = [*((start, start + n) for start, (n, _) in self.ranges.items()), *self.foreign]
        return any(start <= address < end for start, end in known)


@pytest.fixture
def cuda():
    return Cuda()


@pytest.fixture
def memory(cuda):
    return PinnedMemory(cuda)


def test_a_part_of_what_is_registered_keeps_it_when_the_whole_is_given_back(cuda, memory):
    assert memory.pin("one", 1000, 500) is Pin.WRITEABLE
    assert memory.pin("one", 1100, 50) is Pin.WRITEABLE
    assert [*cuda.ranges] == [1000]
    memory.unpin("one", 1000)
    assert cuda.is_known(1100)
    memory.unpin("one", 1100)
    assert not cuda.ranges


def test_the_whole_of_which_a_part_is_registered_is_registered_with_it(cuda, memory):
    memory.pin("one", 1100, 50)
    memory.pin("one", 1140, 100)
    assert memory.pin("one", 1000, 500) is Pin.WRITEABLE
    assert cuda.ranges == {1000: (500, 3)}
    for address in (1100, 1000, 1140):
        assert cuda.is_known(1499)
        memory.unpin("one", address)
    assert not cuda.ranges


def test_what_another_session_uses_is_counted_and_not_taken_apart(cuda, memory):
    memory.pin("one", 1000, 500)
    assert memory.pin("two", 1200, 100) is Pin.WRITEABLE
    memory.unpin_all("one")
    assert cuda.is_known(1200)
    with pytest.raises(PinError, match="another session uses"):
        memory.pin("one", 1200, 1000)
    memory.unpin("two", 1200)
    assert not cuda.ranges


def test_what_the_program_has_registered_is_used_as_it_is(cuda, memory):
    cuda.foreign.append((1000, 2000))
    assert memory.pin("one", 1000, 1000) is Pin.FOREIGN
    assert not Pin.FOREIGN
    memory.unpin("one", 1000)
    with pytest.raises(PinError, match="the program or another matrix uses a part"):
        memory.pin("one", 1500, 1000)
    with pytest.raises(PinError, match="the program or another matrix uses a part"):
        memory.pin("one", 500, 3000)


def test_the_pages_of_a_file_are_readable_alone(memory, cuda):
    cuda.files = ((1000, 2000),)
    assert memory.pin("one", 1000, 500) is Pin.READABLE
    assert memory.pin("one", 1400, 200) is Pin.READABLE
    assert cuda.ranges == {1000: (600, 11)}
    memory.unpin_all("one")
    assert not cuda.ranges


def test_memory_that_cannot_be_registered_is_an_error_and_what_was_is_registered_again(cuda, memory, monkeypatch):
    memory.pin("one", 1100, 50)
    cuda.foreign.append((1300, 1400))
    with pytest.raises(PinError, match="register the whole first, or pass a copy"):
        memory.pin("one", 1000, 500)
    assert cuda.ranges == {1100: (50, 3)}

    def refuse(*_):
        raise cuda.CUDARuntimeError(2)

    monkeypatch.setattr(cuda, "hostRegister", refuse)
    with pytest.raises(PinError, match=r"error 2\): use less host memory"):
        memory.pin("one", 9000, 5)


@pytest.mark.parametrize("seed", range(20))
def test_random_uses_are_registered_while_they_last_and_not_after(cuda, memory, seed):
    rng = random.Random(seed)
    uses = []
    for _ in range(200):
        if uses and rng.random() < 0.45:
            owner, address, _ = uses.pop(rng.randrange(len(uses)))
            memory.unpin(owner, address)
        else:
            owner, address, nbytes = rng.choice("ab"), rng.randrange(1000), rng.randrange(1, 60)
            try:
                memory.pin(owner, address, nbytes)
            except PinError:
                continue
            uses.append((owner, address, nbytes))
        for _, address, nbytes in uses:
            assert any(start <= address and address + nbytes <= start + n for start, (n, _) in cuda.ranges.items())
    for owner, address, _ in uses:
        memory.unpin(owner, address)
    assert not cuda.ranges
