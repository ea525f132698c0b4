"""Peers' device memory mapped into a process: once each, or refused with the reason. No GPU: a stand-in runtime."""

from __future__ import annotations

import os

import pytest

from uncut_mpi.device.cuda.handles import MemoryHandle, pid_namespace
from uncut_mpi.device.cuda.imports import ImportCache
from uncut_mpi.errors import TopologyError
from uncut_mpi.segments import boot_id

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
    return MemoryHandle(os.getpid() + 1, boot_id(), pid_namespace(), UUIDS[device], base, 4096, 7, ipc)


@pytest.fixture
def runtime():
    return Runtime()


@pytest.fixture
def cache(runtime):
    return ImportCache(runtime, 0, UUIDS)


def test_a_device_without_peer_access_is_refused_before_anything_is_mapped(cache, runtime):
    with pytest.raises(TopologyError, match=r"device 0 .* no peer access to GPU-02020202-.* \(device 2\).*fewer ranks"):
        cache.open(handle(2))
    assert not runtime.opened


def test_a_device_that_this_process_cannot_see_is_tried(cache, runtime):
    hidden = MemoryHandle(os.getpid() + 1, boot_id(), pid_namespace(), b"x" * 16, 0x500, 4096, 7, b"good")
    assert cache.open(hidden) == 0x1000
    assert runtime.opened == [b"good"]


def test_a_mapping_that_cuda_refuses_names_the_common_reasons(cache):
    with pytest.raises(
        TopologyError, match=r"4096 bytes of process .* cannot be mapped: cudaErrorInvalidValue.*cgroups"
    ):
        cache.open(handle(1, b"bad"))


def test_an_allocation_is_mapped_once_and_unmapped_after_its_last_use(cache, runtime):
    first, again, other = cache.open(handle(1)), cache.open(handle(1)), cache.open(handle(1, base=0x900))
    assert first == again != other
    cache.close(first)
    assert not runtime.closed
    cache.close(first)
    assert runtime.closed == [first]
    cache.close_all()
    assert runtime.closed == [first, other]
