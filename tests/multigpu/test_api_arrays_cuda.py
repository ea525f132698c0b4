"""Arrays of torch and cupy on the ranks' own GPUs: registered without a copy, under any stream."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.products import as_numpy, shows

SIZE = 256
SLEEP_CYCLES = 200_000_000  # about 0.1 s
TYPES = ["float64", "float32", "float16", "bfloat16"]


def device_of(session):
    import torch

    return torch.device("cuda", session._backend._ordinal)


def needs_cupy_14(dtype):
    cupy = pytest.importorskip("cupy")
    if dtype == "bfloat16" and int(cupy.__version__.split(".")[0]) < 14:
        pytest.skip("cupy before 14 has no bfloat16")


def whole_numbers(torch, device, dtype, seed):
    generator = torch.Generator(device=device).manual_seed(seed)
    return torch.randint(-3, 4, (SIZE, SIZE), generator=generator, device=device).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("root", [0, -1])
def test_tensors_of_torch_are_registered_without_a_copy(comm, session, dtype, root):
    torch = pytest.importorskip("torch")
    needs_cupy_14(dtype)
    root %= comm.size
    a, b = (whole_numbers(torch, device_of(session), getattr(torch, dtype), seed) for seed in (1, 2))
    c = torch.zeros_like(a)
    first, second, result = (session.register(x, root=root) for x in (a, b, c))
    same = comm.rank != root or [m.address for m in (first, second, result)] == [x.data_ptr() for x in (a, b, c)]
    session.gemm(first, second, result, trans_b="T")
    right = comm.rank != root or torch.equal(c, (a.double() @ b.double().T).to(c.dtype))
    collective_assert(comm, same and right, f"same memory: {same}, right: {right}")
    for matrix in (first, second, result):
        session.release(matrix)


@pytest.mark.parametrize("how", ["at registration", "current", "given", "in cupy"])
def test_what_was_enqueued_on_a_stream_of_the_callers_is_done_first(comm, session, how):
    torch = pytest.importorskip("torch")
    cupy = pytest.importorskip("cupy")
    device = device_of(session)
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device):
        a, wanted = torch.zeros(SIZE, SIZE, dtype=torch.float64, device=device), float(SIZE)
        torch.cuda.synchronize()

        def fill():
            with torch.cuda.stream(stream):
                torch.cuda._sleep(SLEEP_CYCLES)
                a.fill_(1.0)

        if how == "at registration":
            fill()
            with torch.cuda.stream(stream):
                matrix = session.register(a, root=0)
            product = session.gemm(matrix, matrix)
        else:
            matrix = session.register(a, root=0)
            warm = session.gemm(matrix, matrix)  # so that planning takes none of the time
            session.release(warm)
            fill()
            if how == "current":
                with torch.cuda.stream(stream):
                    product = session.gemm(matrix, matrix)
            elif how == "given":
                product = session.gemm(matrix, matrix, stream=stream)
            else:
                from_external = getattr(cupy.cuda.Stream, "from_external", None)  # of cupy 14
                with from_external(stream) if from_external else cupy.cuda.ExternalStream(stream.cuda_stream):
                    product = session.gemm(matrix, matrix)
    collective_assert(comm, shows(product, wanted), f"{how}: {as_numpy(product)}")
    for one in (matrix, product):
        session.release(one)


@pytest.mark.parametrize("dtype", TYPES)
def test_tensors_in_are_tensors_out_on_their_gpu(comm, session, dtype):
    torch = pytest.importorskip("torch")
    needs_cupy_14(dtype)
    tensor = whole_numbers(torch, device_of(session), getattr(torch, dtype), 3)
    a = session.distribute(tensor, um.Layout.rows())
    c = session.gemm(a, session.distribute(tensor, um.Layout.replicated()))
    wanted = (tensor.double() @ tensor.double()).to(tensor.dtype)
    for found in (c.local, session.redistribute(c, um.Layout.rows()).local, torch.from_dlpack(c)):
        good = type(found) is torch.Tensor and found.device == tensor.device and torch.equal(found, wanted)
        collective_assert(comm, good, f"{found}")
    collective_assert(comm, torch.from_dlpack(c).data_ptr() == c.address, "a copy")


def test_who_takes_a_matrix_by_dlpack_waits_for_streams_and_for_what_is_in_flight(comm, session):
    torch = pytest.importorskip("torch")
    cupy = pytest.importorskip("cupy")
    device, size = device_of(session), 2048
    with torch.cuda.device(device), cupy.cuda.Device(device.index):
        a = session.distribute(torch.ones(size, size, device=device), um.Layout.rows())
        b = session.distribute(torch.ones(size, size, device=device), um.Layout.replicated())
        c = session.empty(a.shape, "f4", um.Layout.rows())
        other = cupy.cuda.Stream(non_blocking=True)
        with torch.cuda.stream(torch.cuda.Stream(device)):
            session.gemm(a, b, c)  # planned
            torch.cuda._sleep(SLEEP_CYCLES)
            torch.from_dlpack(c).fill_(3.0)
            with other:
                filled = float(cupy.from_dlpack(c).max())
        for _ in range(3):
            handle = session.gemm(a, b, c, wait=False)
        found = float(torch.from_dlpack(c).min())
        handle.wait()
    collective_assert(comm, (filled, found) == (3.0, size), f"{filled}, {found}")
    for one in (a, b, c):
        session.release(one)


def test_tensors_that_are_more_than_their_memory_are_refused(comm, session):
    torch = pytest.importorskip("torch")
    device = device_of(session)
    for tensor, word in (
        (torch.eye(3, device=device, requires_grad=True), "detach()"),
        (torch._neg_view(torch.eye(3, device=device)), "resolve_neg()"),
        (torch.eye(3, device=device).to_sparse(), "Tensor"),
    ):
        expect(comm, um.ParamError, [word], lambda tensor=tensor: session.register(tensor, root=0))


def test_a_tensor_on_another_device_is_refused(comm, session):
    torch = pytest.importorskip("torch")
    if torch.cuda.device_count() < 2:
        pytest.skip("one device")
    other = (session._backend._ordinal + 1) % torch.cuda.device_count()
    tensor = torch.eye(3, device=torch.device("cuda", other))
    expect(comm, um.ParamError, ["CUDA device"], lambda: session.register(tensor, root=0))


def test_managed_memory_is_the_same_on_the_host_and_on_the_device(comm, session):
    cupy = pytest.importorskip("cupy")
    with cupy.cuda.Device(session._backend._ordinal):
        memory = cupy.cuda.malloc_managed(8 * SIZE * SIZE)
        on_device = cupy.ndarray((SIZE, SIZE), np.float64, memory)
    on_host = np.frombuffer((ctypes.c_char * on_device.nbytes).from_address(memory.ptr)).reshape(SIZE, SIZE)
    a, c = session.register(on_device, root=0), session.register(on_host, root=0)
    expect(comm, um.ParamError, ["C overlaps A"], lambda: session.gemm(a, a, c))
    expect(comm, um.ParamError, ["C overlaps A"], lambda: session.gemm(c, c, a))
    for matrix in (a, c):
        session.release(matrix)


def test_an_array_with_a_cuda_interface_alone_is_registered(comm, session):
    cupy = pytest.importorskip("cupy")

    class Interface:
        def __init__(self, array):
            self.keep, self.__cuda_array_interface__ = array, array.__cuda_array_interface__

    with cupy.cuda.Device(session._backend._ordinal):
        data = cupy.ones((SIZE, SIZE))
    matrix = session.register(Interface(data), root=0)
    same = comm.rank != 0 or matrix.address == data.data.ptr
    product = session.gemm(matrix, matrix)
    collective_assert(comm, same and shows(product, SIZE), f"{as_numpy(product)}")
    for one in (matrix, product):
        session.release(one)
