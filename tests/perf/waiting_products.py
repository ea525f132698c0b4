"""
What a product costs that waits for something, beside one that follows another at once.

    python3 tests/perf/waiting_products.py OUT.json

Products by cuBLAS on one GPU, C += A B, column-major, full-mantissa values, so many of one size in a row, behind a
kernel that holds the streams until all is issued:

  behind     one after another on one stream
  event      before each a wait for an event that has passed
  flag       before each a wait for a flag that is set
  record     behind each an event, for somebody else
  flagged    behind each a flag written, for somebody else
  traced     between two events that take the time
  in turns   on two streams, each waiting for the one before by an event: nobody has begun when it may begin
  late       in turns, but behind a flag that the one before has written

Medians of seven turns through all, with pauses; the time of each product is that of all by their number. Then with
copies from host memory between products, each waiting for the one before by an event, so that the device has nothing
to compute for as long as a copy takes: what is longer than products and copies (in turns on two streams) alone, with
copies to memory of their own (`apart`) and to where A lies (`fresh`).
"""

import ctypes
import json
import statistics
import sys
import time

import cupy
import cupyx
import numpy as np
from cupy.cuda import cublas
from products_at_once import SPIN, TYPES

SIZES = {
    "f64": ((512, 512, 512), (1024, 1024, 1024), (2048, 1024, 1024), (2048, 2048, 512)),
    "f32": ((1024, 1024, 1024), (2048, 1024, 1024), (2048, 2048, 512)),
    "tf32": ((1024, 1024, 1024), (2048, 2048, 2048)),
    "f16": ((1024, 1024, 1024), (2048, 2048, 2048), (4096, 2048, 2048)),
    "f16 in f32": ((2048, 2048, 2048), (4096, 2048, 2048)),
}
COUNT, ROUNDS, PAUSE_S, HELD_CLOCKS = 24, 7, 0.003, 6_000_000
GAPS = (4 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)
UNTIMED = {"disable_timing": True}
DRIVER = ctypes.CDLL("libcuda.so.1")


class Lane:
    """A stream and a handle."""

    def __init__(self):
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.handle = cublas.create()


class Ways:
    """Issues products of one size in each of the ways."""

    def __init__(self, product, lanes, flags):
        self.product, self.lanes, self.flags = product, lanes, flags

    def multiply(self, lane):
        """Issue one product."""
        with lane.stream:
            self.product(lane.handle)

    def wait(self, lane, which, value):
        """Let a lane wait for a flag."""
        self._on_flag(DRIVER.cuStreamWaitValue32_v2, lane, which, value)

    def write(self, lane, which, value):
        """Let a lane write a flag."""
        self._on_flag(DRIVER.cuStreamWriteValue32_v2, lane, which, value)

    def _on_flag(self, operation, lane, which, value):
        address = ctypes.c_uint64(self.flags.data.ptr + 4 * which)
        error = operation(ctypes.c_void_p(lane.stream.ptr), address, ctypes.c_uint32(value), ctypes.c_uint(0))
        if error:
            raise RuntimeError(f"driver error {error}")

    def behind(self, first, _, __):
        """See above, as for all that follow."""
        self.multiply(first)

    def event(self, first, passed, _):
        first.stream.wait_event(passed)
        self.multiply(first)

    def flag(self, first, _, __):
        self.wait(first, 0, 1)
        self.multiply(first)

    def record(self, first, _, __):
        self.multiply(first)
        cupy.cuda.Event(**UNTIMED).record(first.stream)

    def flagged(self, first, _, number):
        self.multiply(first)
        self.write(first, 1 + number, 1)

    def traced(self, first, _, __):
        cupy.cuda.Event().record(first.stream)
        self.multiply(first)
        cupy.cuda.Event().record(first.stream)

    def in_turns(self, _, __, number):
        mine, other = self.lanes[number % 2], self.lanes[1 - number % 2]
        self.multiply(mine)
        self.hand_over(mine, other)

    def late(self, _, __, number):
        mine, other = self.lanes[number % 2], self.lanes[1 - number % 2]
        self.multiply(mine)
        self.write(mine, 1 + number, 1)
        self.wait(other, 1 + number, 1)

    def copy(self, lane, to, origin, nbytes):
        """Issue one copy from host memory."""
        cupy.cuda.runtime.memcpyAsync(to, origin, nbytes, 1, lane.stream.ptr)

    def hand_over(self, mine, other):
        """Let one lane wait for the other."""
        done = cupy.cuda.Event(**UNTIMED)
        done.record(mine.stream)
        other.stream.wait_event(done)


def gaps(to, origin, nbytes, *, products):
    """Return a way of copies, with or without products behind them."""

    def issue(ways, _, __, number):
        copying, other = ways.lanes if products or number % 2 else ways.lanes[::-1]
        ways.copy(copying, to, origin, nbytes)
        ways.hand_over(copying, other)
        if products:
            ways.multiply(other)
            ways.hand_over(other, copying)

    return issue


WAYS = {
    "behind": Ways.behind,
    "event": Ways.event,
    "flag": Ways.flag,
    "record": Ways.record,
    "flagged": Ways.flagged,
    "traced": Ways.traced,
    "in turns": Ways.in_turns,
    "late": Ways.late,
}


def seconds(ways, way, spin):
    """Return the time of one product of COUNT, all issued before the first begins."""
    first, second = ways.lanes
    passed, start, stop, joined = (cupy.cuda.Event() for _ in range(4))
    passed.record(second.stream)
    ways.flags.fill(0)
    ways.flags[0] = 1
    cupy.cuda.Device().synchronize()
    with first.stream:
        spin((1,), (1,), (np.int64(HELD_CLOCKS),))
    start.record(first.stream)
    second.stream.wait_event(start)
    for number in range(COUNT):
        way(ways, first, passed, number)
    joined.record(second.stream)
    first.stream.wait_event(joined)
    stop.record(first.stream)
    stop.synchronize()
    return cupy.cuda.get_elapsed_time(start, stop) * 1e-3 / COUNT


def report(row):
    """Print what each way takes longer than products one behind the other."""
    middle = {name: 1e6 * statistics.median(took) for name, took in row["seconds"].items()}
    behind = middle.pop("behind")
    parts = []
    for name, took in middle.items():
        way, _, size = name.partition(" ")
        if way in ("apart", "fresh"):
            parts.append(f"{name} KiB {took - behind - middle[f'copies {size}']:+.2f}")
        elif way == "copies":
            parts.append(f"{name} KiB {took:.1f} alone")
        else:
            parts.append(f"{name} {took - behind:+.2f}")
    print(f"{row['dtype']} {row['m']}x{row['n']}x{row['k']}: {behind:.1f} us, {', '.join(parts)}", flush=True)


def main():
    """Measure and print all."""
    lanes, spin = [Lane(), Lane()], cupy.RawKernel(SPIN, "spin")
    flags = cupy.zeros(64, "uint32")
    rows = []
    for kind_name, sizes in SIZES.items():
        kind, code, wide, wide_code, compute = TYPES[kind_name]
        drawn = (np.random.default_rng(1).random(1 << 23) - 0.5).astype(kind)
        values, other = cupy.asarray(drawn), cupy.zeros(GAPS[-1], "uint8")
        pinned = cupyx.empty_pinned(drawn.shape, kind)
        pinned[:] = drawn
        one = np.ones(1, "float64" if wide == "float64" else "float32")
        for m, n, k in sizes:
            a, b, c = cupy.resize(values, m * k), cupy.resize(values, k * n), cupy.zeros(m * n, wide)

            def product(handle, m=m, n=n, k=k, a=a, b=b, c=c, one=one, kinds=(code, wide_code, compute)):
                of, to, how = kinds
                cublas.gemmEx(
                    handle, 0, 0, m, n, k, one.ctypes.data, a.data.ptr, of, m, b.data.ptr, of, k,
                    one.ctypes.data, c.data.ptr, to, m, how, -1,
                )  # fmt: skip

            ways, host = Ways(product, lanes, flags), pinned.ctypes.data
            every = dict(WAYS)
            for nbytes in GAPS:
                if nbytes <= a.nbytes:
                    every[f"copies {nbytes >> 10}"] = gaps(other.data.ptr, host, nbytes, products=False)
                    every[f"apart {nbytes >> 10}"] = gaps(other.data.ptr, host, nbytes, products=True)
                    every[f"fresh {nbytes >> 10}"] = gaps(a.data.ptr, host, nbytes, products=True)
            found = {name: [] for name in every}
            for turn in range(ROUNDS + 2):
                for name, way in every.items():
                    took = seconds(ways, way, spin)
                    time.sleep(PAUSE_S)
                    if turn > 1:
                        found[name].append(took)
            rows.append({"dtype": kind_name, "m": m, "n": n, "k": k, "seconds": found})
            report(rows[-1])
    with open(sys.argv[1], "w") as file:
        json.dump({"device": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(), "rows": rows}, file)


if __name__ == "__main__":
    main()
