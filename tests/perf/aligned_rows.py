"""
Copies of columns that begin at multiples of 2, 4, 8 and 16 bytes: what copy engines make of matrices with odd extents.

    python3 tests/perf/aligned_rows.py [OUT.json]

Columns of some bytes one after another, as in a caller's matrix, to columns 64-byte aligned, as in a panel, and back:
within GPU 0, to GPU 1 where there is one, from and to pinned host memory. Best of five of 256 MB, GB/s.
"""

import json
import sys

import cupy

BYTES = 256 << 20
WIDTHS = (2048, 2050, 2052, 2056, 2064, 16384, 16386, 16388, 16392, 16400)


def main():
    """Measure and print all."""
    runtime = cupy.cuda.runtime
    count = runtime.getDeviceCount()
    room = 2 * BYTES
    here, also = cupy.zeros(room, cupy.uint8), cupy.zeros(room, cupy.uint8)
    ways = {"within": (also.data.ptr, here.data.ptr)}
    if count > 1:
        with cupy.cuda.Device(1):
            there = cupy.zeros(room, cupy.uint8)
        runtime.deviceEnablePeerAccess(1)
        ways["to GPU 1"] = (there.data.ptr, here.data.ptr)
    host = cupy.cuda.alloc_pinned_memory(room)
    ways["from host"], ways["to host"] = (here.data.ptr, host.ptr), (host.ptr, here.data.ptr)
    start, stop, stream = cupy.cuda.Event(), cupy.cuda.Event(), cupy.cuda.Stream(non_blocking=True)
    results = []
    for name, (to, source) in ways.items():
        for width in WIDTHS:
            wide = -(-width // 64) * 64
            for how, pitches in (("to aligned", (wide, width)), ("from aligned", (width, wide))):
                rows, best = BYTES // width, float("inf")
                for _ in range(6):
                    start.record(stream)
                    runtime.memcpy2DAsync(to, pitches[0], source, pitches[1], width, rows, 4, stream.ptr)
                    stop.record(stream)
                    stop.synchronize()
                    best = min(best, cupy.cuda.get_elapsed_time(start, stop) * 1e-3)
                results.append({"way": name, "how": how, "width": width, "gb_per_s": width * rows / best / 1e9})
        rates = {(one["how"], one["width"]): one["gb_per_s"] for one in results if one["way"] == name}
        for how in ("to aligned", "from aligned"):
            print(f"{name:>10} {how:>12}:", *(f"{width}: {rates[how, width]:.0f}" for width in WIDTHS), flush=True)
    if len(sys.argv) > 1:
        with open(sys.argv[1], "w") as file:
            json.dump(results, file)


if __name__ == "__main__":
    main()
