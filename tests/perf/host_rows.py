"""
How fast rows go between the host and a GPU, by their width and by how far apart they lie.

    python tests/perf/host_rows.py OUT.json [--loaded]

For widths of 1 to 64 KiB and distances of 16 to 225 KiB: GB/s to the GPU, from it, and of each way when both run at
once, of copies of 32 MiB whose rows are packed on the GPU; medians of five. Host memory is page-locked. With --loaded
the GPU multiplies in f64 meanwhile.
"""

import json
import statistics
import sys

import cupy

KIB = 1024
WIDTHS = (1, 2, 3, 4, 5, 6, 7, 7.5, 8, 8.5, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 24, 28, 32, 40, 48, 56, 64)
DISTANCES = (16, 17, 20, 24, 28, 32, 56, 57, 60, 64, 64.5, 112, 128, 225)
MOVED, TIMES = 32 << 20, 5


def main(out, loaded):
    """Print and keep the table."""
    runtime = cupy.cuda.runtime
    host = [runtime.hostAlloc(1 << 30, 0) for _ in range(2)]
    for address in host:
        runtime.memset(address, 1, 1 << 30)
    device = [cupy.zeros(MOVED + (1 << 20), cupy.uint8) for _ in range(2)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    load = cupy.cuda.Stream(non_blocking=True)
    a = cupy.random.random((4096, 4096))
    product = cupy.empty_like(a)
    rows = []

    def copy(way, width, distance, count):
        """Issue one copy: 0 to the device, 1 from it."""
        there = (device[0].data.ptr, width, host[0], distance), (host[1], distance, device[1].data.ptr, width)
        runtime.memcpy2DAsync(*there[way], width, count, 1 + way, streams[way].ptr)

    def timed(ways, width, distance):
        """Return the GB/s of each way, both issued at once."""
        count = min(MOVED // width, (1 << 30) // distance)
        found = []
        for _ in range(TIMES):
            events = [[cupy.cuda.Event() for _ in range(2)] for _ in range(2)]
            if loaded:
                with load:
                    cupy.matmul(a, a, out=product)
            for way in ways:
                events[way][0].record(streams[way])
                for _ in range(2):
                    copy(way, width, distance, count)
                events[way][1].record(streams[way])
            for way in ways:
                streams[way].synchronize()
            found.append([cupy.cuda.get_elapsed_time(*events[way]) for way in ways])
            load.synchronize()
        return [2 * count * width / statistics.median(times) / 1e6 for times in zip(*found, strict=True)]

    for distance in DISTANCES:
        for width in WIDTHS:
            if width > distance:
                continue
            w, d = int(width * KIB), int(distance * KIB)
            to, back, both = timed((0,), w, d)[0], timed((1,), w, d)[0], timed((0, 1), w, d)
            rows.append({"width": w, "distance": d, "in": to, "out": back, "both": both})
    with open(out, "w") as file:
        json.dump({"device": runtime.getDeviceProperties(0)["name"].decode(), "loaded": loaded, "rows": rows}, file)
    for key in ("in", "out", "both"):
        print(f"{key}, GB/s\nKiB   " + "".join(f"{distance:>7}" for distance in DISTANCES))
        for width in WIDTHS:
            line = ""
            for distance in DISTANCES:
                one = [r[key] for r in rows if r["width"] == width * KIB and r["distance"] == distance * KIB]
                value = one and (one[0] if key != "both" else sum(one[0]) / 2)
                line += f"{value:7.1f}" if one else "      -"
            print(f"{width:<6}{line}")


if __name__ == "__main__":
    main(sys.argv[1], "--loaded" in sys.argv)
