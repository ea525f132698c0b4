"""
Keeps one GPU busy with products of another process, so that it is slower for everybody else.

    python tests/perf/load.py DEVICE SECONDS
"""

import sys
import time

import cupy as cp


def main():
    """Multiply until the time is over."""
    device, seconds = int(sys.argv[1]), float(sys.argv[2])
    until = time.monotonic() + seconds
    with cp.cuda.Device(device):
        a = cp.random.random((2048, 2048))
        while time.monotonic() < until:
            for _ in range(8):
                a @ a
            cp.cuda.Device(device).synchronize()


if __name__ == "__main__":
    main()
