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

COPY = 8 << 20
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

        def measure(width, pitch, inward, everyone, cold):
            """Return GB/s of the slowest rank; cold: every copy touches rows that none has touched for long."""
            room = SPAN // comm.size // 4096 * 4096
            count = min(COPY // width, room // pitch)
            span = -(-count * pitch // 4096) * 4096
            places = range(0, room - span + 1, span) if cold else [0] * 4
            times = []
            comm.Barrier()
            if everyone or not comm.rank:
                for place in places:
                    start = base + comm.rank * room + place
                    begin.record(stream)
                    if inward:
                        runtime.memcpy2DAsync(device, width, start, pitch, width, count, 1, stream.ptr)
                    else:
                        runtime.memcpy2DAsync(start, pitch, device, width, width, count, 2, stream.ptr)
                    end.record(stream)
                    end.synchronize()
                    times.append(cupy.cuda.get_elapsed_time(begin, end) / 1e3)
            comm.Barrier()
            mine = width * count / statistics.median(times if cold else times[1:]) / 1e9 if times else 1e9
            return min(comm.allgather(mine))

        for inward, everyone in ((True, False), (False, False), (True, True), (False, True)):
            for width in (1024 * kb for kb in (1, 2, 4, 8, 16, 32, 64, 128)):
                row = {"inward": inward, "all": everyone, "width": width}
                for pitch in (2 * width, 32768, 65536, 65536 + 512, 131072, 262144):
                    if pitch > width:
                        for cold in (False, True):
                            name = f"{pitch}{' cold' if cold else ''}"
                            row[name] = round(measure(width, pitch, inward, everyone, cold), 1)
                row["contiguous cold"] = round(measure(width, width, inward, everyone, True), 1)
                rows.append(row)
                if comm.rank == 0:
                    print(json.dumps(row), flush=True)
        runtime.free(device)
    if comm.rank == 0:
        with open(sys.argv[1], "w", encoding="utf-8") as file:
            json.dump({"date": time.strftime("%Y-%m-%d"), "ranks": comm.size, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
