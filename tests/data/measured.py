"""The best that was measured on nodes with 4 H200 until 2026-11-22 (``h200_best.json``): products, and transfers."""

from __future__ import annotations

import json
from pathlib import Path

from uncut_mpi.calibration.peaks import Done
from uncut_mpi.calibration.samples import TransferSample
from uncut_mpi.calibration.statistics import Summary
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem

EARLIER_F64_TFLOP_PER_S = 64.7
"""Best of earlier probes on such a node, of which only the figures are kept; with `earlier_transfers`."""

BEST = json.loads((Path(__file__).parent / "h200_best.json").read_text())


def products() -> list[Done]:
    """Return for each problem and placement the shortest of all calls."""
    return [
        Done(GemmProblem(m, n, k, DType[dtype], "N", "N"), Placement.parse(place), best_s)
        for m, n, k, dtype, place, best_s in BEST["products"]
    ]


def transfers() -> list[TransferSample]:
    """Return for each set of links, and of shares of the bytes on them, the fastest transfer that calibrations saw."""
    found = []
    for links, nbytes, best_s in BEST["transfers"]:
        pairs = tuple((source, destination) for source, destination in links)
        found.append(TransferSample("pair", pairs, (1,) * len(pairs), tuple(nbytes), 0, Summary.of([best_s])))
    return found


def earlier_transfers(num_ranks: int) -> list[TransferSample]:
    """Return the best of earlier probes: 396 GB/s from GPU to GPU, 204 GB/s from the host to all GPUs."""
    host, between = num_ranks, [(one, other) for one in range(num_ranks) for other in range(num_ranks) if one != other]
    every = Summary.of([1.0])
    return [
        *(TransferSample("alone", (link,), (1,), (396 * 10**9,), 0, every) for link in between),
        TransferSample(
            "host",
            tuple((host, rank) for rank in range(num_ranks)),
            (1,) * num_ranks,
            (204 * 10**9 // num_ranks,) * num_ranks,
            0,
            every,
        ),
    ]
