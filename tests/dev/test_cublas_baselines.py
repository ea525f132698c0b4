"""cuBLAS as a baseline, against a library with their prototypes and naive products of host memory."""

from __future__ import annotations

import ctypes
import pathlib
import subprocess

import numpy as np
import pytest

from tests.helpers.baselines import expected, make_task
from uncut_mpi.bench.baselines.cublas import _CublasProduct, _FloorProduct, _XtProduct
from uncut_mpi.bench.baselines.cublas_calls import BlasLibrary
from uncut_mpi.bench.baselines.library import Unsupported
from uncut_mpi.model.dtypes import DType

HERE = pathlib.Path(__file__).parent


class FakeMemory:
    """Device memory that is host memory."""

    def __init__(self):
        self.devices, self.kept, self.finished, self.closed = [], [], [], 0

    def pin(self, matrix):
        return matrix.__array_interface__["data"][0]

    def allocate(self, device, nbytes):
        self.devices.append(device)
        self.kept.append(np.full(nbytes, 0xFF, np.uint8))  # NaN
        return self.kept[-1].__array_interface__["data"][0]

    def copy(self, device, destination, source, nbytes):
        ctypes.memmove(destination, source, nbytes)

    def use(self, device):
        self.used = device

    def finish(self, device):
        self.finished.append(device)

    def close(self):
        self.closed += 1


@pytest.fixture(scope="module")
def path(compiler, tmp_path_factory):
    """The fake library."""
    made = tmp_path_factory.mktemp("cublas") / "libfakecublas.so"
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(made)]
    done = subprocess.run([*command, str(HERE / "fake_cublas.cpp")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return str(made)


@pytest.fixture
def blas(path):
    """It, as baselines reach it."""
    return BlasLibrary(path)


@pytest.mark.parametrize(("extents", "blocks"), [((8, 6, 10), (2, 1, 1)), ((3, 2, 24), (1, 1, 2))])
def test_the_floor_is_a_share_of_the_product_on_every_device(blas, extents, blocks):
    memory, used = FakeMemory(), []
    m, n, k = extents
    with make_task(m, n, k, DType.f64, ("rows", "rows", "rows"), (1, 0)) as (task, matrices):
        gemm = blas.gemm
        blas.gemm = lambda *arguments: (used.append((memory.used, arguments[2])), gemm(*arguments))
        product = _FloorProduct(blas, dict.fromkeys((1, 0), blas.handle()), memory, task, matrices)
        (setting,) = product.settings
        product.call(setting)
        down, along, deep = blocks if blocks[2] > 1 else blocks[1::-1] + blocks[2:]
        share = m // down, n // along, k // deep
        assert used == [(1, share), (0, share)]
        assert memory.finished[-2:] == [1, 0]
        # On each device the last block, of the last part of k, as the product of what is there.
        a, b = matrices.a[m - share[0] :, k - share[2] :], matrices.b[k - share[2] :, n - share[1] :]
        wanted = task.alpha * a @ b + task.beta * matrices.c[m - share[0] :, n - share[1] :]
        for kept in (memory.kept[2], memory.kept[5]):
            np.testing.assert_allclose(kept.view(np.float64).reshape(share[1::-1]).T, wanted, rtol=0, atol=1e-14)
        product.close()
    assert memory.closed == 1


PLACES = [(None, None, None), (0, 0, 0), (2, 1, None), (None, 1, 0)]


@pytest.mark.parametrize("dtype", [DType.f64, DType.f32, DType.tf32])
@pytest.mark.parametrize("place", PLACES)
def test_cublas_copies_what_is_elsewhere_and_puts_c_back(blas, place, dtype):
    memory = FakeMemory()
    with make_task(7, 5, 6, dtype, place, (1, 2)) as (task, matrices):
        product = _CublasProduct(blas, blas.handle(), memory, task, matrices)
        product.reset()
        product.call("1 device")
        product.store()
        bound = 20 * dtype.unit_roundoff
        np.testing.assert_allclose(matrices.out, expected(task, matrices), rtol=0, atol=bound)
        product.close()
    # One copy of each matrix where it is and, for all that are not on GPU 1, one there.
    assert sorted(memory.devices) == sorted([d for d in place if d is not None] + [1 for d in place if d != 1])
    assert memory.closed == 1


def test_what_the_library_refuses_is_said(blas):
    memory = FakeMemory()
    refused = pytest.raises(Unsupported, match="cuBLASXt has no product of f16")
    with make_task(4, 4, 4, DType.f16, (0, 0, 0), (0,)) as (task, matrices), refused:
        _XtProduct(blas, memory, task, matrices)
    assert not memory.devices  # before anything is allocated
    with pytest.raises(Unsupported, match="this libcublas has no cublasNothing"):
        blas.call("cublasNothing")
    with pytest.raises(Unsupported, match="cublasSetMathMode failed with status 7"):
        blas.call("cublasSetMathMode", ctypes.c_void_p(1), ctypes.c_int(16))
    assert blas.version() == "13.12.11"
