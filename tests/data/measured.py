"""What was measured on nodes with 4 H200 and is kept in ``docs/performance/results``: whole products, and transfers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from uncut_mpi.calibration.peaks import Done
from uncut_mpi.calibration.samples import TransferSample
from uncut_mpi.calibration.statistics import Summary
from uncut_mpi.model.dtypes import DType
from uncut_mpi.model.placement import Placement
from uncut_mpi.model.problem import GemmProblem

EARLIER_F64_TFLOP_PER_S = 64.7
"""Best of earlier probes on such a node, of which only the figures are kept; with `earlier_transfers`."""

RESULTS = Path(__file__).parents[2] / "docs" / "performance" / "results"


def products() -> dict[str, list[Done]]:
    """Return by the file's name the products whose calls were timed."""
    found = {}
    for path in sorted(RESULTS.glob("*4xh200*.json")):
        done = [_done(row) for row in _rows(json.loads(path.read_text()), {})]
        if done:
            found[path.name] = done
    return found


def transfers() -> list[TransferSample]:
    """Return what the probes of calibrations found."""
    found = []
    for path in sorted(RESULTS.glob("calibration_4xh200*.json")):
        for one in json.loads(path.read_text()).get("samples", {}).get("transfers", ()):
            found.append(
                TransferSample(
                    one["kind"],
                    tuple((source, destination) for source, destination in one["links"]),
                    tuple(one["counts"]),
                    tuple(one["nbytes"]),
                    one["width_bytes"],
                    Summary(**{"half_width_s": float("inf"), **one["time"]}),
                )
            )
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


def _rows(data: Any, around: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what has samples, with the problem that stands in it or around it."""
    if isinstance(data, list):
        for one in data:
            yield from _rows(one, around)
    elif isinstance(data, dict):
        here = {**around, **{key: value for key, value in data.items() if not isinstance(value, dict | list)}}
        if isinstance(data.get("samples_s"), list) and data["samples_s"] and {"m", "n", "k", "dtype"} <= here.keys():
            yield {**here, "samples_s": data["samples_s"]}
        for value in data.values():
            yield from _rows(value, here)


def _done(row: dict[str, Any]) -> Done:
    problem = GemmProblem(row["m"], row["n"], row["k"], DType[row["dtype"]], "N", "N")
    return Done(problem, Placement.parse(row.get("place") or row["placement"]), min(row["samples_s"]))
