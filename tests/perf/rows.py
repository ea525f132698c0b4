"""
Two-dimensional copies between host and device: rate by the width of rows and by how far apart they lie.

    mpiexec -n 2 python tests/perf/rows.py OUT.json

Every rank copies at once (and one alone), from and to the session's host memory, with streams as calls have them.
"""

import json
import statistics
import sys
import time

import cupy
import numpy as np
from mpi4py import MPI

import uncut_mpi as um

TOTAL = 128 << 20
SPAN = 3 << 30


def main():
    """Print GB/s per rank, and keep them."""
    comm = MPI.COMM_WORLD
    runtime = cupy.cuda.runtime
    rows = []
    with um.Session(comm, backend="cuda", timeout_s=20) as session:
        host = session.empty_host((SPAN // 8, 1), np.float64, order="F")
        host.array[comm.rank :: comm.size] = 0.5
        base = host.address
        device = runtime.malloc(SPAN)
        stream = cupy.cuda.Stream(non_blocking=True)
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()

        def measure(width, host_pitch, device_pitch, inward, everyone):
            count = min(TOTAL // width, (SPAN // comm.size - 65536) // max(host_pitch, device_pitch))
            start = base + comm.rank * (SPAN // comm.size) // 4096 * 4096
            times = []
            for _ in range(4):
                comm.Barrier()
                if not everyone and comm.rank:
                    continue
                begin.record(stream)
                if inward:
                    runtime.memcpy2DAsync(device, device_pitch, start, host_pitch, width, count, 1, stream.ptr)
                else:
                    runtime.memcpy2DAsync(start, host_pitch, device, device_pitch, width, count, 2, stream.ptr)
                end.record(stream)
                end.synchronize()
                times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
            comm.Barrier()
            mine = width * count / statistics.median(times[1:]) / 1e9 if times else 1e9
            return min(comm.allgather(mine))

        for inward in (True, False):
            for everyone in (False, True):
                for kb in (1, 2, 4, 8, 16, 32, 64):
                    width = kb * 1024
                    row = {"inward": inward, "all": everyone, "width": width}
                    for name, host_pitch, device_pitch in (
                        ("contiguous", width, width),
                        ("2x apart", 2 * width, width),
                        ("64K apart", max(65536, width), width),
                        ("64K both", max(65536, width), max(65536, width)),
                        ("64K+512 both", max(65536, width) + 512, max(65536, width) + 512),
                        ("64K+4K both", max(65536, width) + 4096, max(65536, width) + 4096),
                        ("128K both", 131072, 131072),
                        ("128K host", 131072, width),
                        ("64K device", width, max(65536, width)),
                    ):
                        if count_fits(host_pitch, comm.size):
                            row[name] = round(measure(width, host_pitch, device_pitch, inward, everyone), 1)
                    rows.append(row)
                    if comm.rank == 0:
                        print(json.dumps(row), flush=True)
        runtime.free(device)
    if comm.rank == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump({"date": time.strftime("%Y-%m-%d"), "ranks": comm.size, "rows": rows}, file, indent=1)


def count_fits(pitch, ranks):
    """Whether there are enough rows for a rate."""
    return SPAN // ranks // pitch > 64


if __name__ == "__main__":
    main()
