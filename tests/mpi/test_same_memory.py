"""What is the same memory: C may share no byte with A or B, through whatever mappings, windows or ranks it is seen."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
from multiprocessing import shared_memory

import numpy as np
import pytest

import uncut_mpi as um
from tests.helpers.collective import collective_assert, expect
from tests.helpers.products import array_of
from tests.helpers.sessions import ranks_per_node

EDGE = 16
NBYTES = 8 * EDGE * EDGE


@contextlib.contextmanager
def one_file(comm):
    """Yield the path of a file of two matrices that every rank sees; removed at the end."""
    path = None
    if comm.rank == 0:
        descriptor, path = tempfile.mkstemp(prefix="uncut_mpi_same_memory_")
        os.write(descriptor, np.arange(2.0 * EDGE * EDGE).tobytes())
        os.close(descriptor)
    path = comm.bcast(path)
    try:
        yield path
    finally:
        comm.Barrier()
        if comm.rank == 0:
            os.unlink(path)


def view(buffer, offset=0, ld=EDGE, shape=(EDGE, EDGE)):
    return np.ndarray(shape, np.float64, buffer=buffer, offset=offset, strides=(8 * ld, 8))


def mapped(path, mode="r+", offset=0):
    return np.memmap(path, np.float64, mode, offset, (EDGE, EDGE))


def twice_mapped_memfd(comm):
    descriptor = os.memfd_create("of_the_caller")
    os.ftruncate(descriptor, NBYTES)
    arrays = [view(mmap.mmap(descriptor, NBYTES)) for _ in range(2)]
    os.close(descriptor)
    return arrays


def twice_attached_shared_memory(comm):
    first = shared_memory.SharedMemory(create=True, size=NBYTES)
    second = shared_memory.SharedMemory(name=first.name)
    arrays = [view(memory.buf) for memory in (first, second)]
    first.unlink()
    second._mmap, first._mmap = None, None  # the arrays keep them
    return arrays


def twice_attached_system_v(comm):
    system = ctypes.CDLL(None)
    system.shmat.restype = ctypes.c_void_p
    number = system.shmget(0, NBYTES, 0o600 | 0o1000)
    addresses = [system.shmat(number, None, 0) for _ in range(2)]
    system.shmctl(number, 0, None)  # removed with the last process that has attached it
    return [view((ctypes.c_char * NBYTES).from_address(address)) for address in addresses]


def one_file_mapped_twice(comm):
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(NBYTES)
        return [mapped(file.name) for _ in range(2)]


def read_only_and_writeable(comm):
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(NBYTES)
        a, c = mapped(file.name, "r"), mapped(file.name)
        c[0, 0] = 3.0
        return a, c


def one_file_by_two_names(comm):
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "data")
        with open(path, "wb") as file:
            file.truncate(NBYTES)
        os.link(path, path + "_again")
        return [mapped(path), mapped(path + "_again")]


def remapped_pages(comm):
    """A second mapping of shared anonymous memory, as mremap makes it of a length of 0."""
    memory = mmap.mmap(-1, NBYTES, mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
    system = ctypes.CDLL(None).mremap
    system.restype, system.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    first = view(memory)
    second = system(first.ctypes.data, 0, NBYTES, 1)
    return first, view((ctypes.c_char * NBYTES).from_address(second))


WAYS = [
    twice_mapped_memfd,
    twice_attached_shared_memory,
    twice_attached_system_v,
    one_file_mapped_twice,
    read_only_and_writeable,
    one_file_by_two_names,
    remapped_pages,
]


def overlaps(comm, session, a, c, a_root=0, c_root=0):
    """Whether the session refuses A and C, which ranks `a_root` and `c_root` register, as the same memory."""
    a = session.register(a if comm.rank == a_root else None, root=a_root)
    c = session.register(c if comm.rank == c_root else None, root=c_root)
    try:
        session.gemm(a, a, c)
    except um.ParamError as error:
        refused = "C overlaps A" in str(error)
    else:
        refused = False
    for matrix in (a, c):
        session.release(matrix)
    return refused


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_the_same_bytes_at_two_addresses_are_the_same_memory(comm, session, way):
    a, c = way(comm)
    same = a.ctypes.data != c.ctypes.data
    c[3, 5] = 17.0
    same &= a[3, 5] == 17.0
    refused = overlaps(comm, session, a, c)
    collective_assert(comm, same and refused, f"same bytes: {same}, refused: {refused}")


@pytest.mark.mpi(min_size=2)
def test_a_file_that_two_ranks_map_is_the_same_memory(comm, session):
    with one_file(comm) as path:
        mine = mapped(path)
        refused = overlaps(comm, session, mine, mine, 0, comm.size - 1)
        collective_assert(comm, refused, "C was written over A")


@pytest.mark.mpi(min_size=2)
@pytest.mark.one_node("a window that all share")
def test_a_window_that_two_ranks_see_is_the_same_memory(comm, session):
    from mpi4py import MPI

    window = MPI.Win.Allocate_shared(NBYTES if comm.rank == 0 else 0, 8, comm=comm)
    mine = view(window.Shared_query(0)[0])
    refused = overlaps(comm, session, mine, mine, 0, comm.size - 1)
    window.Free()
    collective_assert(comm, refused, "C was written over A")


@pytest.mark.mpi(min_size=2)
def test_shared_matrices_of_another_session_are_the_same_memory_on_all_ranks(comm, open_session, session):
    with open_session(comm) as other:
        theirs = other.empty_host((EDGE, EDGE))
        last = ranks_per_node(comm.size) - 1
        refused = overlaps(comm, session, array_of(theirs), array_of(theirs), 0, last) or not last
        collective_assert(comm, refused, "C was written over A")


def test_a_private_view_of_a_file_reads_what_is_written_to_the_file(comm, session):
    with one_file(comm) as path:
        refused = overlaps(comm, session, mapped(path, "c"), mapped(path))
        collective_assert(comm, refused, "C was written over A")


def test_what_is_written_to_a_private_view_of_a_file_reaches_no_other_view(comm, session):
    with one_file(comm) as path:
        a, c = mapped(path), mapped(path, "c")
        before = a.copy()
        refused = overlaps(comm, session, a, c)
        good = not refused and np.array_equal(a, before)
        if comm.rank == 0:
            good &= np.array_equal(c, before @ before)
        collective_assert(comm, good, f"refused: {refused}")
        again = overlaps(comm, session, c, c)
        collective_assert(comm, again, "one view of its own is the same memory")


def test_parts_of_one_file_that_share_no_byte_are_multiplied(comm, session):
    with one_file(comm) as path:
        first, second = mapped(path), mapped(path, offset=NBYTES)
        wanted = first @ first
        refused = overlaps(comm, session, first, second)
        comm.Barrier()
        good = not refused and np.array_equal(mapped(path, offset=NBYTES), wanted)
        collective_assert(comm, good, f"refused: {refused}")


def test_rectangles_of_one_file_seen_through_two_mappings_are_told_apart_exactly(comm, session):
    half = (EDGE // 2, EDGE // 2)
    with one_file(comm) as path:
        first, second = mapped(path), mapped(path)
        left = first[: half[0], : half[1]]
        beside, upon = second[: half[0], half[1] :], second[half[0] - 1 : -1, half[1] - 1 : -1]
        found = [overlaps(comm, session, left, other) for other in (beside, upon)]
        collective_assert(comm, found == [False, True], f"{found}")


def test_a_plan_is_not_executed_on_the_same_memory_either(comm, session):
    with one_file(comm) as path:
        root = comm.size - 1
        arrays = [mapped(path), mapped(path, offset=NBYTES), mapped(path)]
        a, c, again = (session.register(array if comm.rank == root else None, root=root) for array in arrays)
        with session.plan(a, a, c) as plan:
            plan.execute(beta=0.0)
            expect(comm, um.ParamError, ["C overlaps A"], lambda: plan.execute(beta=0.0, c=again))


def test_bytes_at_equal_addresses_of_two_ranks_are_not_the_same_memory(comm, session):
    private = np.ones((EDGE, EDGE))
    found = overlaps(comm, session, private, private, 0, comm.size - 1)
    collective_assert(comm, found == (comm.size == 1), f"{found}")


@pytest.mark.host_backend
def test_an_array_over_several_mappings_shares_what_each_of_them_shows(comm, session):
    pages = 2 * mmap.PAGESIZE
    with one_file(comm) as path:
        system = ctypes.CDLL(None).mmap
        system.restype = ctypes.c_void_p
        system.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_long]
        base = system(None, pages, 3, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        with open(path, "r+b") as file:
            file.truncate(pages)
            system(base + mmap.PAGESIZE, mmap.PAGESIZE, 3, mmap.MAP_SHARED | 0x10, file.fileno(), 0)
        whole = np.frombuffer((ctypes.c_char * pages).from_address(base), np.float64)
        straddling = whole[mmap.PAGESIZE // 8 - EDGE * 4 :][: EDGE * EDGE].reshape(EDGE, EDGE)
        before = whole[: EDGE * EDGE].reshape(EDGE, EDGE)
        found = [overlaps(comm, session, array, mapped(path)) for array in (straddling, before)]
        collective_assert(comm, found == [True, False], f"{found}")
