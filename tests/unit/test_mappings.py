"""What lies behind addresses: the system's list of mappings, read as text and as it is."""

from __future__ import annotations

import ctypes
import mmap
import os
import random

import numpy as np
import pytest

from uncut_mpi import mappings
from uncut_mpi.mappings import MappedArea, Stretch, covering, ground_of, object_name, stretches_of

LINES = b"""\
1000-3000 r--p 00000000 fe:00 260131                     /usr/bin/cat
3000-5000 rw-p 00000000 00:00 0                          [heap]
6000-8000 rw-s 00002000 00:01 77                         /memfd:of (deleted)
8000-9000 rw-s 00004000 00:01 77                         /memfd:of (deleted)
9000-a000 rw-p 00000000 00:00 0
a000-c000 rw-p 00001000 fe:00 5                          /data/a file\\012of two lines
c000-d000 rw-s 00000000 00:05 5                          /dev/nvidia-uvm
d000-e000 rw-s 00000000 00:01 77                         /SYSV00000000 (deleted)
e000-f000 rw-s 00000000 00:0f 9                          anon_inode:[perf_event]
ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0  [vsyscall]
""".splitlines(keepends=True)


def at(start, stop):
    return stretches_of(covering(LINES, start, stop), start, stop - start, "process 2")


@pytest.mark.parametrize(
    ("start", "stop", "wanted"),
    [
        (0x0, 0x1000, []),
        (0x0, 0x1001, [0]),
        (0x1000, 0x1001, [0]),
        (0x2FFF, 0x3001, [0, 1]),
        (0x5000, 0x6000, []),
        (0x5FFF, 0xA000, [2, 3, 4]),
        (0x0, 1 << 64, list(range(10))),
        (0xFFFFFFFFFF600000, 0xFFFFFFFFFF600001, [9]),
        (1 << 64, 1 << 65, []),
    ],
)
def test_the_mappings_of_a_range_are_found(start, stop, wanted):
    found = covering(LINES, start, stop)
    assert [f"{one.start:x}-{one.stop:x}".encode() for one in found] == [LINES[i].split()[0] for i in wanted]


def test_a_line_has_its_fields():
    (file,) = covering(LINES, 0xA000, 0xA001)
    assert file == MappedArea(0xA000, 0xC000, "rw-p", 0x1000, "fe:00", 5, "/data/a file\\012of two lines")
    assert [one.shared for one in covering(LINES, 0x3000, 0x8000)] == [False, True]
    assert covering([], 0, 1 << 64) == []


def test_what_is_found_by_halving_is_what_all_lines_say():
    rng = random.Random(3)
    for _ in range(200):
        edges = sorted(rng.sample(range(1, 400), 2 * rng.randint(1, 12)))
        ranges = list(zip(edges[::2], edges[1::2], strict=True))
        lines = [f"{start:x}-{stop:x} rw-p 00000000 00:00 0\n".encode() for start, stop in ranges]
        start = rng.randint(0, 400)
        stop = start + rng.randint(1, 100)
        wanted = [(a, b) for a, b in ranges if a < stop and b > start]
        assert [(one.start, one.stop) for one in covering(lines, start, stop)] == wanted


def test_anonymous_memory_is_its_processs():
    assert at(0x3010, 0x4000) == (Stretch("process 2", 0x3010, 0xFF0),)


def test_a_shared_object_is_known_by_device_inode_and_offset_through_all_its_mappings():
    assert at(0x7000, 0x8800) == (Stretch("00:01 77", 0x3000, 0x1800),)


def test_a_private_view_of_a_file_is_its_processs_and_reads_the_file():
    assert at(0xB000, 0xB010) == (
        Stretch("process 2", 0xB000, 0x10),
        Stretch("fe:00 5", 0x2000, 0x10, written=False),
    )


def test_what_devices_map_is_known_by_its_address():
    assert at(0xC000, 0xD000) == (Stretch("process 2", 0xC000, 0x1000),)
    assert at(0xE000, 0xF000) == (Stretch("process 2", 0xE000, 0x1000),)


def test_system_v_memory_is_no_memfd_of_the_same_inode():
    (piece,) = at(0xD000, 0xE000)
    assert piece.memory != "00:01 77"
    assert piece.start == 0


def test_an_extent_over_several_mappings_has_a_piece_of_each():
    assert at(0x8800, 0xA800) == (
        Stretch("process 2", 0x9000, 0x1800, 0x800),
        Stretch("00:01 77", 0x4800, 0x800),
        Stretch("fe:00 5", 0x1000, 0x800, 0x1800, written=False),
    )


def test_where_nothing_is_mapped_the_address_says_what_it_is():
    assert at(0x5800, 0x6800) == (
        Stretch("process 2", 0x5800, 0x800),
        Stretch("00:01 77", 0x2000, 0x800, 0x800),
    )
    assert at(1 << 40, (1 << 40) + 8) == (Stretch("process 2", 1 << 40, 8),)


def test_no_more_of_the_list_is_read_than_is_needed():
    lines = iter(LINES)
    covering(lines, 0x0, 0x6000)
    assert next(lines) == LINES[3]


# -- as it is ------------------------------------------------------------------------------------


def test_private_arrays_are_their_processs():
    array = np.zeros(1 << 20)
    ground = ground_of(array.ctypes.data, array.nbytes, "me")
    assert ground == mappings.Ground((Stretch("me", array.ctypes.data, array.nbytes),))


def test_a_memfd_has_the_name_that_its_status_gives():
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, 3 * mmap.PAGESIZE)
    status = os.fstat(descriptor)
    memory = mmap.mmap(descriptor, mmap.PAGESIZE, offset=mmap.PAGESIZE)
    os.close(descriptor)
    address = np.frombuffer(memory, np.uint8).ctypes.data
    name = object_name(status.st_dev, status.st_ino)
    assert ground_of(address + 8, 16, "me").stretches == (Stretch(name, mmap.PAGESIZE + 8, 16),)


def test_pages_that_cannot_be_written_are_said_to_be_so(tmp_path):
    (tmp_path / "data").write_bytes(bytes(64))
    array = np.memmap(tmp_path / "data", np.uint8, "r")
    assert not ground_of(array.ctypes.data, 64, "me").writeable


def test_a_file_that_has_become_shorter_is_found_before_it_is_read(tmp_path):
    file = tmp_path / "data"
    file.write_bytes(bytes(3 * mmap.PAGESIZE))
    array = np.memmap(file, np.uint8, "r+")
    os.truncate(file, mmap.PAGESIZE + 1)
    address = array.ctypes.data
    assert ground_of(address, 2 * mmap.PAGESIZE, "me").trouble == ""
    trouble = ground_of(address, 2 * mmap.PAGESIZE + 1, "me").trouble
    assert "data" in trouble
    assert "shorter" in trouble
    assert ground_of(address, 3 * mmap.PAGESIZE, "me", on_host=False).trouble == ""


def test_memory_that_is_gone_or_closed_to_reading_is_found():
    system = ctypes.CDLL(None)
    system.mmap.restype = ctypes.c_void_p
    system.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
    address = system.mmap(None, mmap.PAGESIZE, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    assert f"{address:#x}" in ground_of(address, 8, "me").trouble
    assert "mapped" in ground_of(16, 8, "me").trouble


def test_without_the_systems_list_process_and_address_are_what_is_known(monkeypatch):
    def refuse(*arguments, **options):
        raise PermissionError("no /proc on purpose")

    monkeypatch.setattr("builtins.open", refuse)
    assert ground_of(4096, 8, "me") == mappings.Ground((Stretch("me", 4096, 8),))


def test_an_empty_extent_is_one_piece_of_nothing():
    assert ground_of(4096, 0, "me") == mappings.Ground((Stretch("me", 4096, 0),))
