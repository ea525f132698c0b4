"""Memory, handles, host registration and measurements of the CUDA backend, on one GPU."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import os
import re
import shutil
import subprocess

import ml_dtypes
import numpy as np
import pytest

from uncut_mpi.device.cuda import CudaBackend, visible_devices
from uncut_mpi.device.cuda.handles import MemoryHandle
from uncut_mpi.device.select import describe_gpus
from uncut_mpi.errors import CapacityError, DeviceError, ParamError, TopologyError
from uncut_mpi.model.dtypes import MEASURED, DType
from uncut_mpi.units import bytes_text


@pytest.fixture
def cupy():
    return pytest.importorskip("cupy")


@pytest.fixture
def backend():
    one = CudaBackend(0)
    yield one
    one.close()


def test_the_identity_names_the_device_by_uuid(backend):
    uuids, reason = visible_devices()
    identity = backend.identity()
    assert reason == ""
    assert identity.uuid == uuids[0]
    assert identity.uuid.startswith("GPU-")
    free, total = backend.memory()
    assert 0 < free <= total == identity.memory_bytes


def test_a_bug_report_has_a_line_for_each_device(backend, cupy):
    first, *lines = describe_gpus()
    assert first.startswith(f"cupy {cupy.__version__}, CUDA ")
    of_devices = lines[: cupy.cuda.runtime.getDeviceCount()]
    assert [line.partition(":")[0] for line in of_devices] == [str(at) for at in range(len(of_devices))]
    assert backend.identity().name in of_devices[0]
    assert backend.identity().uuid[:12] in of_devices[0]


def test_devices_have_the_uuids_that_the_drivers_tools_give_them():
    tool = shutil.which("nvidia-smi")
    if tool is None:
        pytest.skip("nvidia-smi is not installed")
    query = [tool, "--query-gpu=uuid", "--format=csv,noheader"]
    listed = subprocess.run(query, capture_output=True, text=True, timeout=30).stdout.split()
    uuids, _ = visible_devices()
    assert set(uuids) <= set(listed)
    assert len(set(uuids)) == len(uuids)


def test_what_computes_is_named_with_its_version(backend, cupy):
    versions = backend.versions()
    assert sorted(versions) == ["blas", "cuda", "cupy", "driver"]
    assert versions["cupy"] == cupy.__version__
    major = cupy.cuda.runtime.runtimeGetVersion() // 1000
    assert versions["cuda"].startswith(f"{major}.")
    assert versions["blas"].startswith(f"cuBLAS {major}.")
    assert re.fullmatch(r"(\d+\.\d+(\.\d+)? )?\(CUDA \d+\.\d\)", versions["driver"])


def test_the_identity_counts_the_multiprocessors(backend, cupy):
    counted = cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"]
    assert backend.identity().multiprocessors == counted > 1


def test_the_energy_counter_grows_while_the_device_works(backend):
    pytest.importorskip("pynvml")
    before = backend.energy_j()
    if before is None:
        pytest.skip("this device has no energy counter")
    with contextlib.closing(backend.gemm_probe(4096, DType.f64)) as probe:
        probe.mean_seconds(1.0)
    assert backend.energy_j() > before


def test_a_device_that_is_not_there_is_refused_with_the_number_that_are():
    with pytest.raises(DeviceError, match="CUDA device 99 was asked for, this process sees"):
        CudaBackend(99)


def test_a_matrix_goes_to_the_device_and_back_with_its_leading_dimension(backend):
    for dtype in MEASURED:
        block = backend.allocate(1 << 20)
        values = np.asfortranarray(np.random.default_rng(0).random((50, 40)).astype(dtype.numpy))
        backend.from_host(block.address, 61, values)
        found = np.zeros_like(values, order="F")
        backend.to_host(block.address, 61, found)
        assert np.array_equal(found, values)
        part = np.zeros((64, 40), dtype.numpy, order="F")[3:53]
        backend.to_host(block.address, 61, part)
        assert np.array_equal(part, values)
        twin = backend.allocate(1 << 20)
        size = dtype.itemsize
        backend.copy_matrix(twin.address, block.address, 50 * size, 40, 61 * size)
        found[...] = 0
        backend.to_host(twin.address, 61, found)
        assert np.array_equal(found, values)


def test_more_memory_than_there_is_says_needed_and_free(backend):
    _, total = backend.memory()
    with pytest.raises(CapacityError, match=rf"^{bytes_text(2 * total)} of device memory are needed .* are free: free"):
        backend.allocate(2 * total)
    block = backend.allocate(0)
    backend.free(block)
    with pytest.raises(DeviceError, match="not allocated"):
        backend.free(block)


def test_cupy_arrays_are_exported_by_base_and_offset(backend, cupy):
    first, second = cupy.arange(100.0), cupy.arange(300.0).reshape(10, 30)[2:, 3:]
    for array in (first, second, backend.empty(30, 20, DType.f32), backend.empty(5, 5, DType.f64, "C")):
        adopted = backend.adopt(array)
        assert adopted.obstacle == ""
        assert MemoryHandle.decode(adopted.handle).base + adopted.offset_bytes == adopted.address == array.data.ptr
        assert backend.owns(array)
        # The process that exports an allocation uses its own address.
        assert backend.open(adopted.handle) == array.data.ptr - adopted.offset_bytes
        backend.close_peer(array.data.ptr - adopted.offset_bytes)
    assert not backend.owns(np.zeros(3))


def test_memory_that_cannot_be_exported_is_named(backend, cupy):
    cases = {"managed": cupy.cuda.malloc_managed, "stream-ordered": cupy.cuda.malloc_async}
    for name, allocator in cases.items():
        array = cupy.ndarray((64,), np.float64, allocator(512))
        adopted = backend.adopt(array)
        assert adopted.handle is None
        assert name in adopted.obstacle
        del array, adopted


@pytest.mark.parametrize("order", ["F", "C"])
def test_new_arrays_have_the_shape_type_and_order_asked_for(backend, order):
    for dtype in MEASURED:
        array = backend.empty(7, 5, dtype, order)
        assert array.shape == (7, 5)
        assert array.dtype == dtype.numpy
        assert array.flags.f_contiguous if order == "F" else array.flags.c_contiguous


def test_host_memory_is_registered_once(backend):
    block = np.zeros(1 << 20, np.uint8)
    runtime = backend._runtime

    def registered(address=block.ctypes.data):
        return runtime.pointerGetAttributes(address).type != 0

    for _ in range(2):
        assert not registered()
        assert backend.pin(block.ctypes.data, block.nbytes)
        assert backend.pin(block.ctypes.data + 100, 1000)  # counted: it lies in what is registered
        backend.unpin(block.ctypes.data)
        assert registered()
        backend.unpin(block.ctypes.data + 100)


def test_awaiting_the_caller_waits_for_its_stream(backend, cupy):
    for stream in (cupy.cuda.Stream(non_blocking=True), cupy.cuda.Stream.null):
        with stream:
            big = cupy.zeros((3000, 3000))
            for _ in range(20):
                big = big @ big
            backend.mark_caller()
            backend.await_caller()
            assert stream.done
    with cupy.cuda.Stream(non_blocking=True) as stream:
        for _ in range(20):
            big = big @ big
    backend.mark_caller(stream)
    backend.await_caller()
    assert stream.done


def test_words_are_set(backend, cupy):
    block = backend.allocate(4096)
    backend.fill_words(block.address, 1024, 2**32 - 1)
    backend.fill_words(block.address, 1000, 7)
    found = np.zeros((1024, 1), np.uint32, order="F")
    backend.to_host(block.address, 1024, found)
    assert (found[:1000] == 7).all()
    assert (found[1000:] == 2**32 - 1).all()


def test_measurements_are_plausible(backend):
    a, b = backend.allocate(64 << 20), backend.allocate(64 << 20)
    seconds = backend.copy_seconds(a.address, b.address, 64 << 20, 3)
    assert 1e-6 < seconds < 1e-2
    probes = [backend.copy_probe(a.address, b.address, 64 << 20)]
    probes += [backend.gemm_probe(1024, dtype) for dtype in MEASURED]
    for probe in probes:
        assert 1e-6 < probe.mean_seconds(1e-3) < 1e-1
        probe.close()


def test_handles_from_elsewhere_are_refused_with_the_reason(backend):
    handle = MemoryHandle.decode(backend.allocate(1024).handle)
    cases = {
        "another node": {"node": "another"},
        "cannot be mapped": {"pid": os.getpid() + 1, "ipc": bytes(64)},
    }
    for text, change in cases.items():
        with pytest.raises(TopologyError, match=text):
            backend.open(dataclasses.replace(handle, **change).encode())
    with pytest.raises(TopologyError, match="not a device memory handle"):
        backend.open(b"something else")


def test_an_array_on_another_device_is_refused(backend, cupy):
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("1 GPU found, 2 needed")
    with cupy.cuda.Device(1):
        array = cupy.zeros(10)
    with pytest.raises(ParamError, match="lies on CUDA device 1, this rank computes on device 0"):
        backend.adopt(array)


def _open_in_child(pipe, handles):
    backend = CudaBackend(0)
    try:
        found = []
        for handle, offset in handles:
            out = np.zeros((4, 1), np.float64, order="F")
            backend.to_host(backend.open(handle) + offset, 4, out)
            found.append(out[:, 0].tolist())
        again = backend.open(handles[0][0])
        for _ in range(2):
            backend.close_peer(again)
        pipe.send(found)
    except Exception as error:
        pipe.send(repr(error))
    backend.close()


def test_small_arrays_of_one_block_are_all_opened_by_another_process(backend, cupy):
    arrays = [cupy.full(4, float(i)) for i in range(5)]
    arrays += [cupy.ndarray((4,), np.float64, cupy.cuda.MemoryPointer(cupy.cuda.Memory(512), 0)) for _ in range(3)]
    for i, array in enumerate(arrays):
        array.fill(float(i))
    cupy.cuda.Device().synchronize()
    adopted = [backend.adopt(array) for array in arrays]
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    handles = [(one.handle, one.offset_bytes) for one in adopted]
    child = context.Process(target=_open_in_child, args=(theirs, handles), daemon=True)
    child.start()
    assert ours.poll(60)
    found = ours.recv()
    child.join(20)
    assert found == [[float(i)] * 4 for i in range(len(arrays))]


def test_bfloat16_arrays_have_the_type_of_ml_dtypes(backend):
    assert backend.empty(2, 2, DType.bf16).dtype == np.dtype(ml_dtypes.bfloat16)
