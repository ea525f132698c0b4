"""What callers bring to a CUDA device, with a cupy that pretends: streams, and arrays of other libraries."""

from __future__ import annotations

import sys
import types

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.foreign import BFLOAT16, CUDA, CudaInterface, Tensor
from uncut_mpi.device.cuda.callers import current_streams, stream_handle, wrap
from uncut_mpi.errors import ParamError


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
