"""The disk of a folder, measured as products of matrices in files use it: by all ranks at once."""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Final

from uncut_mpi.errors import DataFileError, reason
from uncut_mpi.model.costs import Disk
from uncut_mpi.spmd import agreement
from uncut_mpi.spmd.group import Group
from uncut_mpi.units import bytes_text

FILE_BYTES: Final = 2 << 30
"""Size of the file that is written and read: what a system keeps of it in passing is little beside that."""

BLOCK: Final = 8 << 20
THREADS: Final = 3
"""Of each rank, as its worker has them: a lane for each of three matrices."""

RUN_BYTES: Final = 16 << 10
RUNS: Final = 512
"""Short runs of bytes that each thread reads, far apart."""


def measure_disk(group: Group, folder: str, file_bytes: int | None = None) -> Disk:
    """
    Return what files in a folder take to be read and written. Collective; some seconds.

    A file is written by all ranks, with what it takes to bring it to the disk, and dropped from the system's memory.
    Then it is read from end to end, dropped again, and read by short runs here and there. What such a run takes longer
    than its bytes do is `Disk.call_s`. All times are of all ranks together.

    Parameters
    ----------
    group : Group
        The ranks.
    folder : str
        Where matrix files are; all ranks see it.
    file_bytes : int, optional
        Size of the file that is made there and removed again; by default `FILE_BYTES`.

    Raises
    ------
    DataFileError
        On all ranks, if the folder has no room for the file or it cannot be written or read.
    """
    size = FILE_BYTES if file_bytes is None else file_bytes
    path = group.from_root(lambda: _make(folder, size))
    try:
        return _measured(group, path, size)
    finally:
        group.barrier()
        if group.rank == 0:
            os.remove(path)


def check_folder(folder: str) -> None:
    """Raise DataFileError, before anything is measured, if the file of `measure_disk` cannot be made there. Local."""
    os.remove(_make(folder, FILE_BYTES))


def _make(folder: str, file_bytes: int) -> str:
    """Make the file with room for all of it, and return its name."""
    try:
        free = os.statvfs(folder)
        if free.f_bavail * free.f_frsize < file_bytes:
            raise DataFileError(
                f"--disk {folder} has {bytes_text(free.f_bavail * free.f_frsize)} of room, and "
                f"{bytes_text(file_bytes)} are written and read there: name another folder of that disk, or make room"
            )
        descriptor, path = tempfile.mkstemp(prefix="uncut_mpi-", suffix=".disk", dir=folder)
        try:
            os.posix_fallocate(descriptor, 0, file_bytes)
        except OSError:
            os.remove(path)
            raise
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataFileError(f"--disk {folder} cannot be measured: {reason(error)}") from None
    return path


def _measured(group: Group, path: str, file_bytes: int) -> Disk:
    blocks = range(group.rank * BLOCK, file_bytes - BLOCK + 1, group.size * BLOCK)
    noise = os.urandom(BLOCK)
    rng = random.Random(group.rank)
    runs = [rng.randrange(file_bytes // RUN_BYTES) * RUN_BYTES for _ in range(THREADS * RUNS)]

    def write(descriptor: int, at: int) -> None:
        os.pwrite(descriptor, noise, at)

    def short(descriptor: int, first: int) -> None:
        # As the worker does: the system hears of them before.
        its = runs[first : first + RUNS]
        for at in its:
            os.posix_fadvise(descriptor, at, RUN_BYTES, os.POSIX_FADV_WILLNEED)
        for at in its:
            os.pread(descriptor, RUN_BYTES, at)

    def timed(work: Callable[[int, int], object], places: Iterable[int]) -> float:
        with agreement.collective(group, "measuring the disk"), _opened(path) as descriptor:
            _forget(descriptor)
        group.barrier()
        began = time.perf_counter()
        with agreement.collective(group, "measuring the disk"), _opened(path) as descriptor:
            with concurrent.futures.ThreadPoolExecutor(THREADS) as threads:
                for _ in threads.map(lambda at: work(descriptor, at), places):
                    pass
            os.fsync(descriptor)
        return float(max(group.allgather_objects(time.perf_counter() - began)))

    moved = file_bytes // BLOCK * BLOCK
    write_s = timed(write, blocks)
    read_s = timed(lambda descriptor, at: os.pread(descriptor, BLOCK, at), blocks)
    short_s = timed(short, range(0, len(runs), RUNS))
    each_s = short_s / (len(runs) * group.size)
    return Disk(
        read_gb_per_s=moved / read_s / 1e9,
        write_gb_per_s=moved / write_s / 1e9,
        call_s=max(0.0, each_s - RUN_BYTES / (moved / read_s)),
    )


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    """Open a file to be read and written; what the system refuses is a `DataFileError`."""
    try:
        descriptor = os.open(path, os.O_RDWR)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataFileError(f"{path} cannot be measured: {reason(error)}") from None


def _forget(descriptor: int) -> None:
    """Drop what the system keeps of a file in memory."""
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
