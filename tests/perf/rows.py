"""
Two-dimensional copies between host and device: rate by the width of rows and by how far apart they lie.

    mpiexec -n 2 python tests/perf/rows.py OUT.json [--loaded] [--lines]

To the device, from it and both ways at once, on rank 0 alone and on all ranks at once, from and to the session's host
memory; GB/s of each way of the slowest rank, the median of five. "cold", for some: every copy touches rows that none
has touched for long. With --loaded the devices multiply in f64 meanwhile. With --lines, instead, rows 256 KiB apart by
where in a line of 64 KiB of host memory they begin.
"""

import json
import statistics
import sys
import time

import cupy
import numpy as np
from mpi4py import MPI

import uncut_mpi as um

KIB = 1024
COPY, SPAN = 8 << 20, 3 << 30
COPIES, TIMES = 4, 5
WIDTHS_KIB = (1, 2, 3, 4, 5, 6, 7, 8, 8.5, 9, 10, 11, 12, 13, 14, 16, 20, 24, 32, 40, 64, 128, 256, 512)
DISTANCES_KIB = (0, 16, 20, 24, 28, 32, 56, 60, 64, 64.5, 112, 128, 225, 256, 512, 1024)  # 0: contiguous
COLD_WIDTHS_KIB, COLD_DISTANCES_KIB = (1, 4, 16, 64), (0, 32, 64, 256)
LINE_WIDTHS_KIB, LINE_DISTANCE_KIB, PLACES_KIB = (8, 16, 24, 32, 48, 64), 256, range(0, 64, 8)
WAYS = {"in": (0,), "out": (1,), "both": (0, 1)}


class Rows:
    """The memory and streams of one rank; each way has half of the rank's part of the host memory."""

    def __init__(self, comm, session, loaded):
        self.comm, self.loaded = comm, loaded
        self.memory = session.empty_host((SPAN // 8, 1), np.float64, order="F")
        self.memory.array[comm.rank :: comm.size] = 0.5
        self.room = SPAN // comm.size // 2 // 65536 * 65536
        self.host = [self.memory.address + (2 * comm.rank + way) * self.room for way in range(2)]
        self.device = [cupy.zeros(COPY, cupy.uint8) for _ in range(2)]
        self.streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(3)]
        self.events = [[cupy.cuda.Event() for _ in range(2)] for _ in range(2)]
        self.factor = cupy.random.random((4096, 4096))
        self.product = cupy.empty_like(self.factor)

    def copy(self, way, place, width, distance, count):
        """Issue one copy, 0 to the device and 1 from it."""
        here, there = (self.device[way].data.ptr, width), (self.host[way] + place, distance)
        to, source = (here, there) if way == 0 else (there, here)
        cupy.cuda.runtime.memcpy2DAsync(*to, *source, width, count, 1 + way, self.streams[way].ptr)

    def seconds(self, ways, places, width, distance, count):
        """Return what the copies of each way take."""
        if self.loaded:
            with self.streams[2]:
                cupy.matmul(self.factor, self.factor, out=self.product)
        for way in ways:
            self.events[way][0].record(self.streams[way])
            for place in places:
                self.copy(way, place, width, distance, count)
            self.events[way][1].record(self.streams[way])
        for stream in self.streams:
            stream.synchronize()
        return [cupy.cuda.get_elapsed_time(*self.events[way]) / 1e3 for way in ways]

    def rate(self, ways, width, distance, everyone, cold=False, first=0):
        """Return GB/s of each way of the slowest rank; rows begin `first` bytes into the host memory."""
        count = min(COPY // width, (self.room - first) // distance)
        span = -(-count * distance // 4096) * 4096
        places = range(0, self.room - span + 1, span) if cold else [first] * COPIES
        self.comm.Barrier()
        rates = [float("inf")] * len(ways)
        if everyone or not self.comm.rank:
            times = [self.seconds(ways, places, width, distance, count) for _ in range(1 if cold else TIMES)]
            rates = [len(places) * count * width / statistics.median(one) / 1e9 for one in zip(*times, strict=True)]
        return [round(min(one), 1) for one in zip(*self.comm.allgather(rates), strict=True)]


def by_place(rows, comm):
    """Return rates of rows by where in a line they begin, all ranks at once."""
    found = []
    for name, ways in WAYS.items():
        for width in LINE_WIDTHS_KIB:
            line = {"way": name, "width": width * KIB, "distance": LINE_DISTANCE_KIB * KIB}
            for place in PLACES_KIB:
                line[str(place * KIB)] = rows.rate(ways, width * KIB, LINE_DISTANCE_KIB * KIB, True, first=place * KIB)
            found.append(line)
            if comm.rank == 0:
                print(json.dumps(line), flush=True)
    return found


def main(out, loaded, lines):
    """Print GB/s, and keep them."""
    comm = MPI.COMM_WORLD
    found = []
    with um.Session(comm, backend="cuda", timeout_s=20) as session:
        rows = Rows(comm, session, loaded)
        if lines:
            found = by_place(rows, comm)
        for everyone in () if lines else (False, True) if comm.size > 1 else (False,):
            for name, ways in WAYS.items():
                for width in WIDTHS_KIB:
                    line = {"way": name, "all": everyone, "width": int(width * KIB)}
                    for distance in (one for one in DISTANCES_KIB if not 0 < one < width):
                        apart = int((distance or width) * KIB)
                        label = str(apart) if distance else "contiguous"
                        line[label] = rows.rate(ways, line["width"], apart, everyone)
                        if not loaded and width in COLD_WIDTHS_KIB and distance in COLD_DISTANCES_KIB:
                            line[f"{label} cold"] = rows.rate(ways, line["width"], apart, everyone, cold=True)
                    found.append(line)
                    if comm.rank == 0:
                        print(json.dumps(line), flush=True)
    if comm.rank == 0:
        device = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
        facts = {"date": time.strftime("%Y-%m-%d"), "device": device, "ranks": comm.size, "loaded": loaded}
        with open(out, "w", encoding="utf-8") as file:
            json.dump({**facts, "rows": found}, file)


if __name__ == "__main__":
    main(sys.argv[1], "--loaded" in sys.argv, "--lines" in sys.argv)
