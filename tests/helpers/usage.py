"""What a process has in use: memory, objects, descriptors, mappings, communicators."""

from __future__ import annotations

import ctypes
import gc
import os
import sys

from mpi4py import MPI

MOST_COMMUNICATORS = 4096  # that are tried: MPICH gives 2048, Open MPI far more


class _Mallinfo(ctypes.Structure):
    """What glibc's ``mallinfo2`` returns."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"
    )]  # fmt: skip


def usage() -> dict[str, int]:
    """Return what this process uses now, after the garbage collector. Local."""
    gc.collect()
    with open("/proc/self/smaps_rollup") as lines:
        rss = next(int(line.split()[1]) << 10 for line in lines if line.startswith("Rss:"))
    with open("/proc/self/maps") as lines:
        mappings = sum(1 for _ in lines)
    mallinfo = getattr(ctypes.CDLL(None), "mallinfo2", None)  # of glibc 2.33 and later
    if mallinfo is not None:
        mallinfo.restype = _Mallinfo
    return {
        "rss_bytes": rss,
        "malloc_bytes": mallinfo().uordblks if mallinfo else 0,
        "blocks": sys.getallocatedblocks(),
        "objects": len(gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": mappings,
        "shm_files": sum(f"-{os.getpid()}-" in name for name in os.listdir("/dev/shm")),
    }


def communicators_left(comm: MPI.Intracomm) -> int:
    """Return how many more communicators MPI gives, as far as is tried. Collective."""
    made: list[MPI.Intracomm] = []
    before = comm.Get_errhandler()
    comm.Set_errhandler(MPI.ERRORS_RETURN)
    try:
        while len(made) < MOST_COMMUNICATORS:
            made.append(comm.Dup())
    except MPI.Exception:
        pass
    finally:
        comm.Set_errhandler(before)
        for one in made:
            one.Free()
    return len(made)
