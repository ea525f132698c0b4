"""
Usual figures of a backend, where a first measurement is too short to find them.

A session's first measurement takes links and rates. What else planning needs stands here: what it costs to issue, how
the rate of a product depends on its shape, what narrow rows and devices share. It was measured once by ``python -m
uncut_mpi.calibrate``. For ``cuda`` that was on nodes with 1, 2 and 4 H200 (CUDA 13, driver 580), for ``host`` on a
machine with 2 cores. A calibration replaces all of it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

import numpy as np

from uncut_mpi.model.costs import HELD, GemmShape, IssueCosts, RowRates
from uncut_mpi.model.ports import device_ports

_CUDA_COSTS: Final = IssueCosts(
    copy_s=3.0e-6,
    gemm_s=7.0e-6,
    combine_s=2.6e-6,
    wait_s=0.9e-6,
    event_s=0.2e-6,
    combine_start_s=3.6e-6,
    event_latency_s=1.0e-6,
    engine_latency_s=3.0e-6,
    kernel_latency_s=0.3e-6,
    flag_latency_s=8.0e-6,
    wait_lane_s=3.5e-6,
    signal_lane_s=2.5e-6,
    call_s=3.0e-5,
)
ISSUED_S: Final = {"cuda": 3.0e-6, "host": 0.0}
"""What issuing takes of the measured time of one copy on an idle stream, by backend."""

_HOST_COSTS: Final = IssueCosts(copy_s=1e-5, gemm_s=1e-5, combine_s=1e-5, event_latency_s=2e-6, flag_latency_s=8e-6)

# Without waves. They go with the rate of one product of 4096³, as a first measurement takes it. copy_share is of two
# H100, sum_wait and sustained are of two H200 (docs/performance.md, 2026-11-28), as
# i8 and e4m3 are (2026-11-29).
_CUDA_FIELDS: Final = (
    *("block_rows", "block_cols", "half_depth", "overhead_s", "tail_elements", "c_s_per_byte", "uneven", "misaligned"),
    *("idle_use", "copy_share", "sum_wait", "sustained"),
)
_CUDA_FIGURES: Final = {
    "f64": (64, 64, 39, 4e-6, 5.5e4, 2.2e-13, 0.02, 0.21, 0.7, 0.27, 1.06, 1.1),
    "f32": (128, 64, 38, 1e-5, 2e4, 2.5e-13, 0.05, 0.02, 1.0, 0.71, 4.0, 1.0),
    "f16": (128, 64, 200, 4e-6, 3e5, 2.5e-13, 0.0, 6.0, 0.1, 0.69, HELD, 1.14),
    "bf16": (128, 64, 200, 4e-6, 3e5, 2.5e-13, 0.0, 6.0, 0.1, 0.72, HELD, 1.14),
    "tf32": (128, 128, 260, 7e-6, 5.5e5, 3e-13, 0.2, 1.9, 0.46, 0.73, HELD, 1.13),
    "i8": (128, 64, 600, 5e-6, 8e5, 2.5e-13, 0.42, 9.5, 0.48, 0.86, HELD, 1.0),
    "e4m3": (64, 64, 500, 4e-6, 4e5, 2.5e-13, 0.04, 23.0, 0.3, 0.86, HELD, 1.17),
    # Derived from f32 and f64: what is counted in operations is a quarter, for a complex one is four real ones.
    "c64": (128, 64, 9.5, 1e-5, 5e3, 2.5e-13, 0.05, 0.02, 1.0, 0.67, 1.7, 1.0),
    "c128": (64, 64, 9.75, 4e-6, 1.4e4, 2.2e-13, 0.02, 0.21, 0.7, 0.77, 0.5, 1.02),
}
_CUDA_SHAPES: Final = {
    dtype: GemmShape(**dict(zip(_CUDA_FIELDS, map(float, figures), strict=True)), waves=False)
    for dtype, figures in _CUDA_FIGURES.items()
}
_HOST_SHAPES: Final = {
    "f64": GemmShape(half_depth=3, overhead_s=1e-5),
    "f32": GemmShape(half_depth=2, overhead_s=1.5e-5),
    "f16": GemmShape(overhead_s=3e-5),
    "bf16": GemmShape(overhead_s=2e-5),
    "tf32": GemmShape(overhead_s=2e-5),
    "i8": GemmShape(overhead_s=3e-5),
    "e4m3": GemmShape(overhead_s=3e-5),
    "c64": GemmShape(half_depth=1, overhead_s=1.5e-5),
    "c128": GemmShape(half_depth=1, overhead_s=1e-5),
}

# Rows 64 KiB apart, the device multiplying meanwhile.
_CUDA_ROWS: Final = RowRates(
    device=((512, 0.71), (2048, 0.93), (8192, 0.98), (8704, 0.74), (10240, 0.87), (12288, 0.97)),
    host_in=((512, 0.26), (2048, 0.35), (4096, 0.36), (8192, 0.58), (16384, 0.58), (32768, 0.85), (65536, 1.0)),
    host_out=((512, 0.24), (2048, 0.34), (4096, 0.35), (8192, 0.58), (16384, 0.58), (32768, 0.78), (65536, 0.99)),
    local=((512, 0.09), (1024, 0.23), (2048, 0.37), (4096, 0.53), (8192, 0.47), (16384, 0.42), (32768, 0.40)),
)


def usual_figures(backend: str, bandwidth_gb_per_s: np.ndarray) -> dict[str, Any]:
    """
    Return fields of a `Machine` that a first measurement leaves open, ports of devices among them.

    Parameters
    ----------
    backend : str
        ``"cuda"`` or ``"host"``.
    bandwidth_gb_per_s : ndarray of float64, shape (num_ranks + 1, num_ranks + 1)
        Of every link alone. Devices are expected to send, and to receive, as much in all as over the best of their
        links, as behind a switch; for bounds all of their links count.
    """
    if backend != "cuda":
        return {"costs": _HOST_COSTS, "gemm_shape": _HOST_SHAPES, "ports": ()}
    ranks = range(len(bandwidth_gb_per_s) - 1)
    links = bandwidth_gb_per_s[:-1, :-1][~np.eye(len(ranks), dtype=bool)]
    ports = []
    if len(links):
        most, best = (len(ranks) - 1) * float(links.max()), float(links.max())
        ports = [dataclasses.replace(port, typical_gb_per_s=best) for port in device_ports(ranks, most, most)]
    return {
        "costs": _CUDA_COSTS,
        "gemm_shape": _CUDA_SHAPES,
        "row_rates": _CUDA_ROWS,
        "ports": ports,
        "serial_copies": True,
    }
