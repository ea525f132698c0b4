"""
Bare two-dimensional copies from a session's host matrices into its SoftBuf, all ranks at once.

    mpiexec -n 4 python tests/perf/host_reads.py [SIZE [TILE]]

Tells whether reads from the host are slow because of the memory they touch or because of what else a
call does: the same copies as a call's first fetches, without any schedule, flag or product.
"""

import sys
import time

import cupy
from mpi4py import MPI

import uncut_mpi as um
from uncut_mpi.command.arguments import parse
from uncut_mpi.command.product import generated_sources, make_product
from uncut_mpi.model.dtypes import DType


def main():
    """Print the slowest rank's rate for each pattern of tiles, into memory of cupy's and into the SoftBuf."""
    n = int(sys.argv[1]) if len(sys.argv) > 1 else 16384
    tile = int(sys.argv[2]) if len(sys.argv) > 2 else 2048
    comm = MPI.COMM_WORLD
    arguments = parse(["-m", str(n), "--place", "h,h,h"])
    runtime = cupy.cuda.runtime
    with um.Session(comm, backend="cuda", timeout_s=20) as session:
        product = make_product(session, arguments, (n, n, n), DType.f64, generated_sources(arguments, n, n, n), "F")
        with session.plan(
            product.a, product.b, product.c, options=um.ScheduleOptions(scheduler="uncut", tile=tile)
        ) as plan:
            plan.execute(1.0, 1.0)
            a, b = product.a.address, product.b.address
            softbuf = int(session._calls.binder.softbuf.addresses[session.rank])
            scratch = runtime.malloc(tile * tile * 8)
            stream = cupy.cuda.Stream(non_blocking=True)
            half = n // 2
            row0, col0 = session.rank // 2 % 2 * half, session.rank % 2 * half
            steps = range(0, n, tile)
            patterns = {
                "own quadrant of A": [
                    (a, row0 + i, col0 + j) for i in range(0, half, tile) for j in range(0, half, tile)
                ],
                "row of A, shared by two ranks": [(a, row0, p) for p in steps] * 2,
                "column of B, shared by two ranks": [(b, p, col0) for p in steps] * 2,
                "A and B in turn, as a call fetches": [x for p in steps for x in ((a, row0, p), (b, p, col0))],
            }
            for name, tiles in patterns.items():
                for where, target, pitch in (("scratch", scratch, tile * 8), ("SoftBuf", softbuf, half * 8)):
                    rates = []
                    for _ in range(3):
                        comm.Barrier()
                        start = time.perf_counter()
                        for base, row, col in tiles:
                            source = base + (col * n + row) * 8
                            runtime.memcpy2DAsync(target, pitch, source, n * 8, tile * 8, tile, 1, stream.ptr)
                        stream.synchronize()
                        rates.append(len(tiles) * tile * tile * 8 / (time.perf_counter() - start) / 1e9)
                    slowest = min(comm.allgather(max(rates)))
                    if session.rank == 0:
                        print(f"{name:36s} into {where}: {slowest:5.1f} GB/s per rank", flush=True)
            runtime.free(scratch)


if __name__ == "__main__":
    main()
