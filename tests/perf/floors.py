"""
Products beside their floor: what the machine can do now, measured in the same run and independent of any plan.

    mpiexec -n 4 python tests/perf/floors.py OUT.json SECONDS "f64 8192 0,0,0;h,h,h;0,1,2" "f32 4096x4096x65536 0,0,0" \
        [-- "scheduler=kblocks k.first=256" ...]

A problem is TYPE, SIZE (N or MxNxK) and places. The floor is the longest of three times: compute (every GPU multiplies
an equal share at once, cuBLAS called directly), the busiest GPU port (each rank of a 2x2 grid needs its panels of A and
B once, C travels once as a result; all ranks share k where k is 8 times m and n) at the rate of one pair alone, and the
host (every element of A, B and C once, C twice) at the better of the rates in and in both directions of all GPUs at
once. Compute is measured before and after the product, with as many calls to warm up and as many that count as the
product has, since rates sag with heat. Every result is verified. When
SECONDS have passed no more problems begin; what is missing is named. After ``--`` come other schedules as in sweep.py,
run beside the default one.
"""

import contextlib
import dataclasses
import json
import statistics
import sys
import time

import cupy
import numpy as np
from model_data import pool, source
from mpi4py import MPI
from sweep import options_of

import uncut_mpi as um
from uncut_mpi.command.arguments import parse
from uncut_mpi.command.product import (
    generated_sources,
    make_product,
    measure,
    release_product,
    reset_result,
    verify_product,
)
from uncut_mpi.model.dtypes import DType
from uncut_mpi.planning.grid import ProcessGrid

CUDA_TYPES = {"f64": 1, "f32": 0, "tf32": 0, "f16": 2, "bf16": 14}
COMPUTE_TYPES = {"f64": 70, "f32": 68, "tf32": 77, "f16": 68, "bf16": 68}
WARMUP, REPEAT = 5, 15
CALLS = ("--warmup", str(WARMUP), "--repeat", str(REPEAT))
PORT_BYTES = 512 << 20
HOST_BYTES = 192 << 20


def shares(m, n, k, ranks):
    """Return the product of one rank with equal shares, and whether ranks share k."""
    if k >= 8 * max(m, n):
        return (m, n, k // ranks), True
    grid = ProcessGrid.choose(ranks, None)
    return (m // grid.rows, n // grid.cols, k), False


class Floor:
    """Measures what the machine can do, with cuBLAS and copies of its own."""

    def __init__(self, session):
        self.session = session
        self.comm = MPI.COMM_WORLD
        self.rates = {}
        self.stream = cupy.cuda.Stream(non_blocking=True)

    def slowest(self, work, repeats):
        """Return the slowest rank's seconds of `work`, all ranks at once, sample by sample."""
        samples = []
        for _ in range(repeats):
            self.stream.synchronize()
            self.comm.Barrier()
            start = time.perf_counter()
            work()
            self.stream.synchronize()
            samples.append(time.perf_counter() - start)
        return [max(of_ranks) for of_ranks in zip(*self.comm.allgather(samples), strict=True)]

    def compute(self, m, n, k, dtype, values):
        """Return seconds of one product of every rank at once."""
        return self.slowest(self.product(m, n, k, dtype, values), WARMUP + REPEAT)[WARMUP:]

    def product(self, m, n, k, dtype, values):
        """Return what issues one product of this rank."""
        itemsize = DType[dtype].itemsize
        block = values[dtype].view(np.uint8)

        def filled(count):
            operand = cupy.empty(count * itemsize, np.uint8)
            for at in range(0, len(operand), len(block)):
                operand[at : at + len(block)] = block[: len(operand) - at]
            return operand

        a, b, c = filled(m * k), filled(k * n), filled(m * n)
        wide = DType[dtype] is DType.f64
        alpha, beta = (np.array(x, np.float64 if wide else np.float32) for x in (1.2345, 0.1154))
        handle = cupy.cuda.device.get_cublas_handle()
        kind = CUDA_TYPES[dtype]

        def work():
            with self.stream:
                cupy.cuda.cublas.gemmEx(
                    handle, 0, 0, m, n, k, alpha.ctypes.data, a.data.ptr, kind, m, b.data.ptr, kind, k,
                    beta.ctypes.data, c.data.ptr, kind, m, COMPUTE_TYPES[dtype], -1,
                )  # fmt: skip

        cupy.cuda.Device().synchronize()
        return work

    def port(self):
        """Return bytes per second that GPU 0 sends to the last one alone."""
        if "port" not in self.rates:
            rate = 0.0
            if self.comm.rank == 0 and self.comm.size > 1:
                with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):  # the session has done it already
                    cupy.cuda.runtime.deviceEnablePeerAccess(self.comm.size - 1)
                mine = cupy.zeros(PORT_BYTES, np.uint8)
                with cupy.cuda.Device(self.comm.size - 1):
                    other = cupy.zeros(PORT_BYTES, np.uint8)
                    cupy.cuda.Device().synchronize()
                times = []
                for _ in range(8):
                    cupy.cuda.Device().synchronize()
                    start = time.perf_counter()
                    cupy.cuda.runtime.memcpyPeerAsync(
                        other.data.ptr, self.comm.size - 1, mine.data.ptr, 0, PORT_BYTES, self.stream.ptr
                    )
                    self.stream.synchronize()
                    times.append(time.perf_counter() - start)
                rate = PORT_BYTES / min(times)
                del mine, other
            self.rates["port"] = self.comm.bcast(rate)
        return self.rates["port"]

    def host(self):
        """Return bytes per second of all GPUs at once: the better of in alone and both ways (3 in to 1 out)."""
        if "host" not in self.rates:
            comm, runtime = self.comm, cupy.cuda.runtime
            with_host = self.session.empty_host((comm.size * HOST_BYTES // 8, 2), np.float64, order="F")
            with_host.array[comm.rank * HOST_BYTES // 8 : (comm.rank + 1) * HOST_BYTES // 8] = 0.5
            base = with_host.address + comm.rank * HOST_BYTES
            back = base + comm.size * HOST_BYTES
            device = cupy.zeros(HOST_BYTES, np.uint8)
            result = cupy.zeros(HOST_BYTES, np.uint8)
            second = cupy.cuda.Stream(non_blocking=True)
            rates = []
            for out in (0, HOST_BYTES // 3):

                def work(out=out):
                    runtime.memcpyAsync(device.data.ptr, base, HOST_BYTES, 1, self.stream.ptr)
                    if out:
                        runtime.memcpyAsync(back, result.data.ptr, out, 2, second.ptr)
                        second.synchronize()

                samples = self.slowest(work, 12)[2:]
                rates.append(comm.size * (HOST_BYTES + out) / statistics.median(samples))
            self.session.release(with_host)
            self.rates["host"] = max(rates)
            self.rates["host_in"], self.rates["host_both"] = rates
        return self.rates["host"]

    def others(self, m, n, k, dtype, place):
        """Return seconds of the busiest port and of the host."""
        size = DType[dtype].itemsize
        wide = 4 if size == 2 else size
        ranks = self.comm.size
        a, b, c, host = place.a, place.b, place.c, 0.0
        (rows, cols, depth), split = shares(m, n, k, ranks)
        columns = n // cols
        out, into = [0.0] * ranks, [0.0] * ranks
        for matrix, extent in ((a, m * k), (b, k * n), (c, m * n)):
            if matrix.space == "host":
                host += (2 if matrix is c else 1) * extent * size
        for rank in range(ranks):
            for matrix, part in ((a, rows * depth), (b, depth * cols)):
                if matrix.space == "device" and matrix.rank != rank:
                    into[rank] += part * size
            if c.space == "device" and c.rank != rank:
                into[c.rank] += rows * cols * (wide if split else size)
                out[rank] += rows * cols * (wide if split else size)
        # An owner sends each byte that another rank needs once.
        for matrix, extent, part in ((a, m * k, rows * depth), (b, k * n, depth * cols)):
            if matrix.space == "device":
                owner = matrix.rank
                if split:
                    out[owner] += (extent - part) * size
                else:
                    alone = (columns if matrix is a else ranks // columns) == 1
                    out[owner] += (extent - (part if alone else 0)) * size
        return max(*out, *into) / self.port(), host / self.host()


def main():
    """Measure every problem and its floor, and print them beside each other."""
    out, limit, *texts = sys.argv[1:]
    texts, variants = (texts[: texts.index("--")], texts[texts.index("--") + 1 :]) if "--" in texts else (texts, [])
    began, cases, missing = time.monotonic(), [], []
    with um.Session(MPI.COMM_WORLD, timeout_s=20) as session:
        cupy.cuda.Device(session.rank).use()
        random = np.random.default_rng(3)
        values = {name: (random.random(1 << 22) - 0.5).astype(DType[name].numpy) for name in CUDA_TYPES}
        values = {name: cupy.asarray(one.view(np.uint8)) for name, one in values.items()}
        floor = Floor(session)
        for text in texts:
            dtype, size, places = text.split()
            if session.gather_values(time.monotonic() - began)[0] > float(limit):
                missing.append(text)
                continue
            extents = [int(part) for part in size.split("x")]
            m, n, k = extents * 3 if len(extents) == 1 else extents
            arguments = parse(["-m", str(m), "-n", str(n), "-k", str(k), *CALLS])
            host = make_product(
                session, arguments, (m, n, k), DType[dtype], sources(arguments, m, n, k, DType[dtype]), "F"
            )
            for place in places.split(";"):
                case = measured(session, floor, values, host, dtype, place, ["", *variants])
                if session.rank == 0:
                    cases.append(case)
                    show(case)
            release_product(session, host)
    if cases:
        facts = {"devices": session.device_names, "date": time.strftime("%Y-%m-%d"), "version": um.__version__}
        with open(out, "w", encoding="utf-8") as file:
            json.dump({**facts, "rates": floor.rates, "missing": missing, "cases": cases}, file, indent=1)
        print("rates GB/s:", {name: round(rate / 1e9, 1) for name, rate in floor.rates.items()}, "missing:", missing)


def sources(arguments, m, n, k, dtype):
    """Return random A, B and C: of large ones a block of values is repeated."""
    if max(m * k, k * n, m * n) <= 1 << 27:
        return generated_sources(arguments, m, n, k)
    values = pool(dtype)
    return source(m, k, values), source(k, n, values), source(m, n, values)


def measured(session, floor, values, host, dtype, place, variants):
    """Return the facts of one problem at one place: floor before and after, and every schedule's times."""
    m, n, k = host.m, host.n, host.k
    arguments = parse(["-m", str(m), "-n", str(n), "-k", str(k), "--place", place, *CALLS])
    placed = []
    for matrix, location in ((host.a, arguments.place.a), (host.b, arguments.place.b), (host.c, arguments.place.c)):
        if location.space == "device":
            placed.append(session.empty_device(matrix.shape, host.dtype, rank=location.rank, order="F"))
            session.upload(matrix, placed[-1])
        else:
            placed.append(matrix)
    product = dataclasses.replace(host, a=placed[0], b=placed[1], c=placed[2])
    share, _ = shares(m, n, k, session.size)
    compute = floor.compute(*share, dtype, values)
    rows = []
    for text in variants:
        reset_result(session, product)
        with session.plan(product.a, product.b, product.c, reads_c=True, options=options_of(text)) as plan:
            timing = measure(session, plan, arguments, 0.0, lambda: reset_result(session, product))
            check = verify_product(session, product, arguments)
            rows.append(
                {
                    "options": text,
                    "scheduler": plan.summary.scheduler,
                    "how": plan.summary.how,
                    "tasks": plan.summary.tasks,
                    "median_s": statistics.median(timing.samples_s),
                    "samples_s": timing.samples_s,
                    "predicted_s": plan.summary.predicted_s,
                    "error": check.error,
                    "rms_error": check.rms_error,
                    "tolerance": check.tolerance,
                    "passed": check.passed,
                }
            )
    compute += floor.compute(*share, dtype, values)
    cupy.get_default_memory_pool().free_all_blocks()
    port_s, host_s = floor.others(m, n, k, dtype, arguments.place)
    for matrix in {id(one): one for one in placed if one not in (host.a, host.b, host.c)}.values():
        session.release(matrix)
    return {
        "m": m, "n": n, "k": k, "dtype": dtype, "place": place,
        "compute_s": statistics.median(compute), "compute_samples_s": compute, "port_s": port_s, "host_s": host_s,
        "floor_s": max(statistics.median(compute), port_s, host_s), "rows": rows,
    }  # fmt: skip


def show(case):
    """Print one problem's times beside its floor."""
    for row in case["rows"]:
        print(
            f"{case['dtype']:4s} {case['m']}x{case['n']}x{case['k']} {case['place']:5s} "
            f"median {1e3 * row['median_s']:8.3f} "
            f"min {1e3 * min(row['samples_s']):8.3f} "
            f"floor {1e3 * case['floor_s']:8.3f} = {case['floor_s'] / row['median_s']:.3f} "
            f"(compute {1e3 * case['compute_s']:.3f} port {1e3 * case['port_s']:.3f} host {1e3 * case['host_s']:.3f}) "
            f"predicted {1e3 * row['predicted_s']:8.3f} {'PASS' if row['passed'] else 'FAIL'} "
            f"{row['options'] or row['scheduler']}: {row['how']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
