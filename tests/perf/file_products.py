"""
A product of matrix files read cold, beside the rate of the disk and the same product in memory.

    mpiexec -n 2 python3 -m mpi4py tests/perf/file_products.py OUT.json FOLDER f64 16384 [HOST_MEMORY [F|C]]

SIZE is N or MxNxK. Files of random values are written to FOLDER and dropped from the page cache. The disk is measured
by all ranks at once, past the cache (O_DIRECT, blocks of 8 MiB, four readers each): A and B are read, as much as C has
is written, and both at once. Then the product of files runs cold, three times, its result is compared with the one in
memory, and the same product runs with all three in host memory.
"""

import concurrent.futures
import json
import mmap
import os
import statistics
import sys
import time

import numpy as np
from common import pool, say
from mpi4py import MPI

import uncut_mpi as um
from uncut_mpi.command.flag_values import bytes_of
from uncut_mpi.command.product import slowest
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.lines import lines_of

BLOCK, READERS, CALLS = 8 << 20, 4, 3


def write_matrix(session, path, shape, dtype, order, values):
    """Write a matrix file of random values, every rank its lines."""
    rows, cols = shape
    if session.rank == 0:
        with open(path, "wb") as file:
            header = {"descr": np.dtype(dtype.numpy).str, "fortran_order": order == "F", "shape": shape}
            np.lib.format.write_array_header_1_0(file, header)
            offset = file.tell()
            os.posix_fallocate(file.fileno(), 0, offset + rows * cols * dtype.itemsize)
    offset = session.gather_values(offset if session.rank == 0 else None)[0]
    length, count = (rows, cols) if order == "F" else (cols, rows)
    share = lines_of(count, session.rank, session.size)
    with open(path, "r+b", buffering=0) as file:
        for line in range(share.start, share.stop):
            start = line * 7919 % (len(values) - length)
            os.pwrite(file.fileno(), values[start : start + length], offset + line * length * dtype.itemsize)
        os.fsync(file.fileno())
    session.barrier()


def forget(session, *paths):
    """Drop files from the page cache."""
    session.barrier()
    for path in paths if session.rank == 0 else ():
        descriptor = os.open(path, os.O_RDWR)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)
    session.barrier()


def disk_seconds(session, read, written=()):
    """Return how long all ranks take to read some files and write others once past the page cache, all at once."""

    def work(path, writes, which):
        room = mmap.mmap(-1, BLOCK)
        if writes:
            room.write(os.urandom(1 << 20) * (BLOCK >> 20))
        descriptor = os.open(path, os.O_DIRECT | (os.O_RDWR if writes else os.O_RDONLY))
        share = range(session.rank * BLOCK, os.path.getsize(path) // BLOCK * BLOCK, session.size * BLOCK)
        for at in share[which::READERS]:
            (os.pwritev if writes else os.preadv)(descriptor, [room], at)
        os.close(descriptor)

    todo = [(path, path in written, which) for path in (*read, *written) for which in range(READERS)]
    session.barrier()
    start = time.perf_counter()
    with concurrent.futures.ThreadPoolExecutor(len(todo)) as threads:
        list(threads.map(work, *zip(*todo, strict=True)))
    return slowest(session, [time.perf_counter() - start])[0]


def main():
    """Measure, and print a short table."""
    out, folder, name, size, *more = sys.argv[1:]
    dtype, room, order = DType[name], bytes_of(more[0]) if more else None, more[1] if len(more) > 1 else "F"
    m, n, k = map(int, size.split("x")) if "x" in size else (int(size),) * 3
    with um.Session(MPI.COMM_WORLD, timeout_s=300, host_memory=room) as session:
        paths = [os.path.join(folder, f"{one}.npy") for one in "ABC"]
        began = time.monotonic()
        for path, shape in zip(paths, ((m, k), (k, n), (m, n)), strict=True):
            write_matrix(session, path, shape, dtype, order, pool(dtype))
        say(session, f"files of {sum(map(os.path.getsize, paths)) / 1e9:.1f} GB after {time.monotonic() - began:.0f} s")
        forget(session, *paths)
        read_s = sum(disk_seconds(session, [path]) for path in paths[:2])
        probe = os.path.join(folder, "probe")
        if session.rank == 0:
            with open(probe, "wb") as file:
                os.posix_fallocate(file.fileno(), 0, os.path.getsize(paths[2]))
        session.barrier()
        write_s = disk_seconds(session, [], [probe])
        forget(session, *paths)
        both_s = disk_seconds(session, paths[:2], [probe])
        of_reading, of_c = sum(map(os.path.getsize, paths[:2])), os.path.getsize(paths[2])
        rates = f"reads {of_reading / read_s / 1e9:.2f} GB/s, writes {of_c / write_s / 1e9:.2f} GB/s"
        say(session, f"disk: {rates}, both at once {(of_reading + of_c) / both_s / 1e9:.2f} GB/s")
        if session.rank == 0:
            os.remove(probe)
        files = [session.open_file(path, mode="r+") for path in paths]
        cold, facts = [], {}
        with session.plan(*files, reads_c=False) as plan:
            about = plan.summary
            say(session, f"plan: {about.how}, {about.tasks} tasks, {about.bytes_by_link}")
            for _ in range(CALLS):
                forget(session, *paths)
                start = time.perf_counter()
                plan.execute()
                cold += slowest(session, [time.perf_counter() - start])
            facts |= {"how": about.how, "tasks": about.tasks, "bytes": about.bytes_by_link}
        in_memory = [session.empty_host(one.shape, dtype, order=one.order) for one in files]
        for one, path in zip(in_memory, paths, strict=True):
            lines = lines_of(one.shape[one.order == "F"], session.rank, session.size)
            at = (slice(None), lines) if order == "F" else (lines, slice(None))
            one.array[at] = np.load(path, mmap_mode="r")[at]
        session.barrier()
        from_files = in_memory[2].array[:: max(1, m // 400), :: max(1, n // 400)].copy()
        session.barrier()
        warm = []
        with session.plan(*in_memory, reads_c=False) as plan:
            for _ in range(CALLS + 1):
                session.barrier()
                start = time.perf_counter()
                plan.execute()
                warm += slowest(session, [time.perf_counter() - start])
        same = in_memory[2].array[:: max(1, m // 400), :: max(1, n // 400)]
        scale = np.abs(same.astype(np.float64)).max()
        difference = float(np.abs(from_files.astype(np.float64) - same).max() / scale)
        floor = max(both_s, statistics.median(warm[1:]))
        facts |= {
            "devices": session.device_names, "dtype": name, "extents": [m, n, k], "order": order, "host_memory": room,
            "read_s": read_s, "write_s": write_s, "both_s": both_s, "cold_s": cold, "in_memory_s": warm[1:],
            "floor_s": floor, "difference": difference,
        }  # fmt: skip
        if session.rank == 0:
            with open(out, "w", encoding="utf-8") as file:
                json.dump(facts, file, indent=1)
        took = statistics.median(cold)
        say(
            session,
            f"{name} {size} {order}: files {took:.2f} s of {[round(one, 2) for one in cold]}, disk reads "
            f"{read_s:.2f}, writes {write_s:.2f}, both at once {both_s:.2f} s, in memory "
            f"{statistics.median(warm[1:]):.2f} s; floor / files {floor / took:.3f}; difference {difference:.1e}",
        )


if __name__ == "__main__":
    main()
